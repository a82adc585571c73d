"""Greedy answers in batches on the eager `orig_model`, and one answer as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextIteratorStreamer
from transformers.cache_utils import Cache

from sftkit.data import chat
from sftkit.errors import ConfigError
from sftkit.generation.answer import Answer, Sampling
from sftkit.generation.batching import MOST_POSITIONS, gathered, plan, shared_prefixes, turns
from sftkit.generation.kv_cache import SharedPrefix, empty_pass, most_cached, plain_forward
from sftkit.generation.static_step import StaticStep, refusal
from sftkit.ops.attention import mixes_tokens, windows
from sftkit.runtime.start import Runtime

KEPT_SHARE = 0.75
"When no more of a batch's rows than this go on, the others are taken out of the cache."
KEPT_SHARE_REPLAYED = 0.5
"The same where steps are replayed: rows that have ended cost less, and what remains is recorded anew."


@dataclass
class _Row:
    """A prompt that is being answered."""

    index: int
    most: int
    "tokens of its answer at most"
    stop_texts: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    stop: str = ""
    "why it ended; empty: it goes on"

    def take(self, token: int, stop_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
        """The next token of the answer."""
        if self.stop:
            return
        if token in stop_ids:
            self.stop = "end_of_turn"
            return
        self.tokens.append(token)
        # A stop text of n bytes ends within the last n tokens; first tokens may lose a space, hence some more.
        last = self.tokens[-max((len(text.encode()) for text in self.stop_texts), default=0) - 4 :]
        if self.stop_texts and all(
            cut_at(text_of(tokens, tokenizer), self.stop_texts) is not None for tokens in (last, self.tokens)
        ):
            self.stop = "stop_text"
        if not self.stop and len(self.tokens) == self.most:
            self.stop = "length"

    def answer(self, tokenizer: PreTrainedTokenizerBase) -> Answer:
        text = text_of(self.tokens, tokenizer)
        return Answer(text[: cut_at(text, self.stop_texts)], self.stop, len(self.tokens))


def text_of(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of an answer, without special tokens."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def cut_at(text: str, stop_texts: Sequence[str]) -> int | None:
    """Where the first of the stop texts begins, None if none occurs."""
    return min((at for stop in stop_texts if stop and (at := text.find(stop)) >= 0), default=None)


def generate(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int | Sequence[int],
    batch_size: int,
    stop_texts: Sequence[Sequence[str]] | None = None,
    groups: Sequence[str] | None = None,
    rt: Runtime | None = None,
    replay: bool = False,
) -> list[Answer]:
    """Greedy answers to tokenized prompts, in the order given. With a runtime every rank calls it and has all of them.

    Prompts of about the same length are decoded together, padded on the left, over a cache of fixed size. What the prompts of
    a group begin with is computed once. Batches follow from the arguments, not from the number of ranks, which all run
    equally many passes if the model is sharded.

    Args:
        max_new_tokens: of every prompt, or one number for each.
        batch_size: rows of a batch at most; fewer where the keys and values of prompts and answers would take more than
            `kv_cache.MOST_BYTES`, or the prompts more than `batching.MOST_POSITIONS`.
        stop_texts: texts of each prompt that end its answer and are cut off.
        groups: names of groups of prompts that begin alike; "" is none.
        replay: steps of a fixed shape, on a GPU as a CUDA graph (static_step.py).

    Raises:
        Stopped: a stop was asked for; between batches.
        ConfigError: the steps of this model, or of a sharded one, cannot be replayed.
    """
    if replay and (reason := _no_replay(orig_model, rt)):
        raise ConfigError(f"steps of decoding cannot be replayed: {reason}")
    most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    stops = [tuple(texts) for texts in stop_texts] if stop_texts is not None else [()] * len(prompts)
    # Padding lies between a prefix and its rows, and windows count it.
    may_share = groups is not None and not mixes_tokens(orig_model) and not windows(orig_model.config)
    names = list(groups) if groups is not None and may_share else [""] * len(prompts)
    ids = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
    prefixes = shared_prefixes(ids, [len(prompt) - 1 for prompt in ids], names)
    batches = plan(
        [len(i) - len(prefix) for i, prefix in zip(ids, prefixes, strict=True)],
        prefixes,
        batch_size,
        new_tokens=most,
        most_positions=MOST_POSITIONS,
        most_cached=most_cached(orig_model),
    )
    together = rt if rt is not None and rt.topology.sharded else None
    prefix = SharedPrefix(orig_model)
    found: dict[int, Answer] = {}
    with plain_forward(orig_model):
        for batch, new_prefix in turns(batches, rt):
            prefix.move_to(batch.prefix if batch else (), together is not None and new_prefix)
            rows = [_Row(i, most[i], stops[i]) for i in batch.rows] if batch else []
            decoding = _Decoding(orig_model, rows, [ids[row.index] for row in rows], prefix, replay)
            while decoding.goes_on(together):
                for row, token in decoding.step():
                    row.take(token, stop_ids, tokenizer)
            found |= {row.index: row.answer(tokenizer) for row in rows}
    return gathered(found, rt)


def _no_replay(orig_model: PreTrainedModel, rt: Runtime | None) -> str | None:
    if rt is not None and rt.topology.sharded:
        return "the model is sharded over ranks"
    return refusal(orig_model)


class _Decoding:
    """A batch while it is decoded: rows that go on, their cache and their next tokens."""

    def __init__(
        self,
        orig_model: PreTrainedModel,
        rows: list[_Row],
        prompts: Sequence[np.ndarray],
        prefix: SharedPrefix,
        replay: bool,
    ) -> None:
        self.rows = rows
        self._orig_model, self._replay = orig_model, replay
        self._static: StaticStep | None = None
        if not rows:
            return
        skip, device = len(prefix.ids), orig_model.device
        width, most = max(map(len, prompts)) - skip, max(row.most for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        mask = np.ones((len(rows), skip + width + most), dtype=np.int64)
        for i, prompt in enumerate(prompts):
            pad = width - (len(prompt) - skip)
            ids[i, pad:] = prompt[skip:]
            mask[i, skip : skip + pad] = 0
        self._next = torch.from_numpy(ids).to(device)
        self._mask = torch.from_numpy(mask).to(device)  # [B, all positions there will be]
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._seen = skip
        self._cache: Cache = prefix.cache(len(rows), width + most)

    def goes_on(self, together: Runtime | None) -> bool:
        """Whether this rank has rows to go on with, or any rank of those that work in step."""
        going = any(not row.stop for row in self.rows)
        return going if together is None else together.any_rank(going)

    def step(self) -> list[tuple[_Row, int]]:
        """Rows that go on, perhaps some that have ended, and the next token of each."""
        self._drop_ended()
        if not self.rows:
            empty_pass(self._orig_model)
            return []
        alone = self._replay and self._seen > 0 and self._next.shape[1] == 1
        self._next = self._replayed() if alone else self._read()
        return list(zip(self.rows, self._next.squeeze(1).tolist(), strict=True))

    def _read(self) -> torch.Tensor:
        """The tokens after all of those that have not been read yet, int64 [B, 1]."""
        start, end = self._seen, self._seen + self._next.shape[1]
        logits = self._orig_model(
            input_ids=self._next,
            attention_mask=self._mask[:, :end],
            position_ids=self._positions[:, start:end],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self._seen = end
        return logits[:, -1].float().argmax(-1, keepdim=True)

    def _replayed(self) -> torch.Tensor:
        """The same for one token of each row, by steps of a fixed shape."""
        if self._static is None:
            self._static = StaticStep(
                self._orig_model, self._cache, self._next, self._mask, self._positions, self._seen
            )
        self._seen += 1
        return self._static()

    def _drop_ended(self) -> None:
        """Take rows that have ended out of the batch, once they are many enough to pay for moving the others."""
        going = [i for i, row in enumerate(self.rows) if not row.stop]
        if going and len(going) > (KEPT_SHARE_REPLAYED if self._replay else KEPT_SHARE) * len(self.rows):
            return
        self._static = None
        if going:
            index = torch.tensor(going, device=self._orig_model.device)
            self._cache.reorder_cache(index)  # type: ignore[arg-type]
            self._next, self._mask, self._positions = (x[index] for x in (self._next, self._mask, self._positions))
        self.rows = [self.rows[i] for i in going]


def stream(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    sampling: Sampling,
) -> Iterator[str]:
    """One answer, piece by piece as it is decoded. Who closes it earlier waits for the token that is being made."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    prompt = torch.tensor([chat.render_prompt(messages, tokenizer)], device=orig_model.device)
    closed, failure = Event(), list[Exception]()
    # top_k is transformers' own default of 50 otherwise: what is asked for is all that decides
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    arguments = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": sampling.max_new_tokens,
        "eos_token_id": chat.end_of_turn_ids(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "do_sample": sampling.temperature > 0,
        "streamer": streamer,
        "stopping_criteria": [lambda ids, *_, **__: torch.full((len(ids),), closed.is_set(), device=ids.device)],
        **(drawn if sampling.temperature > 0 else {}),
    }
    orig_model.eval()
    decode: Any = orig_model.generate

    def work() -> None:
        try:
            decode(**arguments)
        except Exception as error:
            failure.append(error)
        finally:
            streamer.end()

    worker = Thread(target=work, daemon=True)
    worker.start()
    try:
        yield from streamer
    finally:
        closed.set()
        worker.join()
    if failure:
        raise failure[0]
