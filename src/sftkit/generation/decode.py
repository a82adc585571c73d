"""Generate greedy answers in batches on the eager `orig_model`, and stream one answer for scripts/chat.py.

The composition of batches and the rank of each batch follow from the rows alone, so that results are the same on any
number of ranks. `Decoding` holds the rows of a batch during decoding: their tokens so far, their end, their cache and
their next tokens.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextIteratorStreamer
from transformers.cache_utils import Cache

from sftkit.data.tokens import chat
from sftkit.data.tokens.template import special_tokens_of, template_of
from sftkit.data.types import EncoderInputs, Row
from sftkit.errors import ConfigError
from sftkit.generation import kv_cache
from sftkit.generation.repl import Answer, Sampling, right_answers
from sftkit.models import hybrids, load, structure
from sftkit.models.kind import Continuation, kind_of
from sftkit.ops.attention import windows
from sftkit.runtime.start import Runtime

KEPT_SHARE = 0.75
"Ended rows are removed from the cache once at most this share of a batch is still decoding."
KEPT_SHARE_REPLAYED = 0.5
"The same for replayed steps, in which ended rows cost less and a smaller batch must be recorded again."
MAX_POSITIONS = 32_768
"The most positions that a batch reads at once, padding included."
MIN_SHARED = 16
"Number of common first tokens from which rows share their keys and values."
DEFAULT_LENGTH = 2048
"Longest input in tokens, if neither model nor tokenizer gives one."

K = TypeVar("K", int, tuple[int, int])
T = TypeVar("T")


@dataclass(frozen=True)
class Batching:
    """How rows are batched, and by which ranks."""

    batch_size: int = 64
    "the most rows of a batch; fewer if memory requires it"
    rt: Runtime | None = None
    "runtime whose ranks share the batches and all get the results; None: this process computes all"


ALONE = Batching()


# ---- which rows are read together ------------------------------------------------------------------------------------


class PromptRow(Protocol):
    """A row, and the positions that the model computes for it."""

    ids: np.ndarray
    "int [T], its input"
    group: str
    'rows of a group begin alike; "": no group'
    targets: int
    "number of positions at its end that have logits"
    new_tokens: int
    "maximum number of tokens to generate"


class PromptBatch(NamedTuple):
    """Rows that go through the model together."""

    rows: list[Any]
    "rows, longest first"
    prefix: tuple[int, ...]
    "first tokens of all rows, computed once for all batches that share them"


def _shared_prefixes(rows: Sequence[PromptRow]) -> dict[str, tuple[int, ...]]:
    """Return for each group the tokens that all of its rows begin with, before the positions with logits; empty if
    they are fewer than MIN_SHARED or the row is alone in its group.
    """
    members: dict[str, list[PromptRow]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    shared: dict[str, tuple[int, ...]] = {}
    for group, (first, *others) in members.items():
        # A prefix ends before the positions with logits: the model must read those row by row.
        length = min(len(row.ids) - row.targets for row in members[group]) if group and others else 0
        for row in others if length else ():
            length = int(np.logical_and.accumulate(first.ids[:length] == row.ids[:length]).sum())
        shared[group] = tuple(first.ids[:length].tolist()) if length >= MIN_SHARED else ()
    return shared


def plan(
    rows: Sequence[PromptRow], *, max_rows: int, max_cached: int | None, max_targets: int | None
) -> list[PromptBatch]:
    """Return rows in batches: rows with the same prefix together and the longest first, so that padding is small and
    a batch that exceeds memory fails early.

    Args:
        max_rows: maximum number of rows of a batch.
        max_cached: maximum positions of a batch in the cache (prefix, padded rows and generated tokens); None:
            no limit.
        max_targets: maximum targets of all rows of a batch; a row above this number, or above MAX_POSITIONS, is
            alone. None: no limit.
    """

    def fit(chosen: list[PromptRow], prefix: tuple[int, ...]) -> bool:
        length = len(chosen[0].ids)
        new_tokens = max(row.new_tokens for row in chosen)
        cached = len(chosen) * (length + new_tokens) if prefix or new_tokens else 0
        return (
            len(chosen) <= max_rows
            and len(chosen) * (length - len(prefix)) <= MAX_POSITIONS
            and (max_targets is None or sum(row.targets for row in chosen) <= max_targets)
            and (max_cached is None or cached <= max_cached)
        )

    shared = _shared_prefixes(rows)
    # Rows with a prefix are consecutive, so that its keys and values are computed once and then dropped.
    order = {prefix: number for number, prefix in enumerate(dict.fromkeys(shared[row.group] for row in rows))}
    batches: list[PromptBatch] = []
    for row in sorted(rows, key=lambda row: (order[shared[row.group]], -len(row.ids))):
        prefix = shared[row.group]
        if batches and batches[-1].prefix == prefix and fit([*batches[-1].rows, row], prefix):
            batches[-1].rows.append(row)
        else:
            batches.append(PromptBatch([row], prefix))
    return batches


def turns(
    orig_model: PreTrainedModel, rows: Sequence[PromptRow], batching: Batching, max_targets: int | None = None
) -> Iterator[tuple[PromptBatch | None, kv_cache.SharedPrefix]]:
    """Yield this rank's batches of the rows, each with its computed prefix; None if fewer batches than ranks are
    left. They are assigned to the ranks in turn, with the same batches for the tensor-parallel ranks of a group and
    for those of a pipeline. All ranks have equally many turns and check for a requested stop before each, which may
    raise Stopped. Without a runtime, all batches are this rank's. Call it inside plain_forward.

    Args:
        max_targets: maximum targets of a batch; None: no limit.
    """
    max_cached = kv_cache.max_cached_positions(orig_model)
    batches = plan(rows, max_rows=batching.batch_size, max_cached=max_cached, max_targets=max_targets)
    prefix = kv_cache.SharedPrefix(orig_model)
    rt = batching.rt
    index = 0
    count = 1
    if rt is not None:
        # Ranks that compute the same rows together count as one.
        count = rt.world_size // (rt.topology.tensor * rt.topology.stages)
        index = rt.rank // rt.topology.tensor % count
    before: list[tuple[int, ...]] = [()] * count
    for start in range(0, len(batches), count):
        if rt is not None:
            rt.check_stop()
        round_batches = batches[start : start + count]
        # A new prefix on one rank needs a forward pass, and so one on every rank.
        new = any(batch.prefix and batch.prefix != had for batch, had in zip(round_batches, before, strict=False))
        before = [batch.prefix for batch in round_batches]
        batch = round_batches[index] if index < len(round_batches) else None
        # All ranks gather sharded weights together: while one computes a prefix, others run empty passes.
        prefix.move_to(batch.prefix if batch else (), in_step=new and rt is not None and rt.topology.sharded)
        yield batch, prefix


def gathered(results: dict[K, T], rt: Runtime | None) -> list[T]:
    """Return the results of all ranks, in the order of their keys, on every rank."""
    if rt is not None and rt.world_size > 1:
        results = dict(gather_object(list(results.items())))
    return [value for _, value in sorted(results.items())]


def longest_input(longest: int | None, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the maximum positions given by the model, otherwise by its tokenizer, otherwise DEFAULT_LENGTH."""
    if longest is None and tokenizer.model_max_length < 10**9:
        longest = int(tokenizer.model_max_length)
    return longest or DEFAULT_LENGTH


# ---- the rows of a batch ---------------------------------------------------------------------------------------------


@dataclass
class DecodedSequence:
    """A prompt and its answer so far."""

    index: int
    ids: np.ndarray
    "int64 [T], tokens of the prompt"
    group: str
    new_tokens: int
    "maximum number of tokens in its answer"
    stop_texts: Sequence[str]
    targets: int = 1
    tokens: list[int] = field(default_factory=list)
    stop: str = ""
    "why the answer ended; empty: it has not ended"

    def take(self, token: int, stop_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
        """Add the next token of the answer and record whether it ends the answer. An answer that has ended does
        not change.
        """
        if self.stop:
            return
        if token in stop_ids:
            self.stop = "end_of_turn"
            return
        self.tokens.append(token)
        # A stop text of n bytes ends within the last n tokens; the first tokens may lose a space, hence some more.
        last = self.tokens[-max((len(text.encode()) for text in self.stop_texts), default=0) - 4 :]
        if self.stop_texts and all(
            find_stop_text(text_of(tokens, tokenizer), self.stop_texts) is not None for tokens in (last, self.tokens)
        ):
            self.stop = "stop_text"
        if not self.stop and len(self.tokens) == self.new_tokens:
            self.stop = "length"

    def answer(self, tokenizer: PreTrainedTokenizerBase) -> Answer:
        """Return the answer, cut before the first stop text."""
        text = text_of(self.tokens, tokenizer)
        return Answer(text[: find_stop_text(text, self.stop_texts)], self.stop, len(self.tokens), tuple(self.tokens))


def text_of(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of an answer, without special tokens and channels."""
    channels = has_channels(tokenizer)
    text = str(tokenizer.decode(tokens, skip_special_tokens=not channels))
    return without_channels(text, tokenizer) if channels else text


def has_channels(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether answers name a channel before each of their parts (harmony, the format of gpt-oss)."""
    return "<|channel|>" in str(tokenizer.chat_template)


def without_channels(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return an answer in harmony as other models write it: the analysis in a thinking block, then the other channels.

    Args:
        text: with special tokens; what is made of its beginning is the beginning of what is made of all of it.
    """
    # The names of role and channel are no text, so one that is not complete is not shown.
    text = re.sub(r"<\|(channel|start)\|>[^<]*\Z", "", text)
    text = _ANALYSIS.sub(lambda found: f"<think>\n{found[1]}" + ("\n</think>\n\n" if found[2] else ""), text)
    text = re.sub(r"<\|channel\|>[^<]*<\|message\|>", "", text)
    for token in special_tokens_of(tokenizer):
        text = text.replace(token, "") if token else text
    return text


_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(<\|end\|>(?:<\|start\|>assistant)?|\Z)", re.DOTALL)


def find_stop_text(text: str, stop_texts: Sequence[str]) -> int | None:
    """Return the index at which the first of the stop texts begins; None if none occurs."""
    return min((at for stop in stop_texts if stop and (at := text.find(stop)) >= 0), default=None)


class Decoding:
    """A batch during decoding: its unfinished rows, their cache and their next tokens."""

    def __init__(
        self,
        orig_model: PreTrainedModel,
        continuation: Continuation,
        rows: list[DecodedSequence],
        prefix: kv_cache.SharedPrefix,
        *,
        replay: bool,
    ) -> None:
        """Begin with prompts whose prefix tokens have been read."""
        self.rows = rows
        self._orig_model = orig_model
        self._continuation = continuation
        self._replay = replay
        self._static: kv_cache.StaticStep | None = None
        if not rows:
            return
        # Prompts are padded on the left: ids [B, width] end together; mask [B, prefix + width + new tokens] is 0 at
        # padding.
        skip = len(prefix.ids)
        width = max(len(row.ids) for row in rows) - skip
        new_tokens = max(row.new_tokens for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        mask = np.ones((len(rows), skip + width + new_tokens), dtype=np.int64)
        for i, row in enumerate(rows):
            pad = width - (len(row.ids) - skip)
            ids[i, pad:] = row.ids[skip:]
            mask[i, skip : skip + pad] = 0
        self._next = torch.from_numpy(ids).to(orig_model.device)
        self._mask = torch.from_numpy(mask).to(orig_model.device)  # [B, all positions to come]
        # Position ids do not count padding, so that an answer does not depend on the other rows.
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._seen = skip
        self._cache: Cache = prefix.cache(len(rows), width + new_tokens)

    def goes_on(self, together: Runtime | None) -> bool:
        """Return whether this rank, or a rank that works with it, has unfinished rows."""
        going = any(not row.stop for row in self.rows)
        return together.any_rank(going) if together else going

    def step(self) -> list[tuple[DecodedSequence, int]]:
        """Return (row, next token) for the rows of the batch; some of them may have ended already."""
        self._drop_ended()
        if not self.rows:
            kv_cache.empty_pass(self._orig_model)
            return []
        # Only a step that reads one token for each row has the fixed shape: prompts are read first, in one pass.
        alone = self._replay and self._seen > 0 and self._next.shape[1] == 1
        self._next = self._replayed() if alone else self._read()
        return list(zip(self.rows, self._next.squeeze(1).tolist(), strict=True))

    def _read(self) -> torch.Tensor:
        """Run the model over its unread tokens, and return the next token of each row, int64 [B, 1]."""
        start = self._seen
        self._seen = end = start + self._next.shape[1]
        return kv_cache.next_tokens(
            self._continuation,
            input_ids=self._next,
            attention_mask=self._mask[:, :end],
            position_ids=self._positions[:, start:end],
            past_key_values=self._cache,
        )

    def _replayed(self) -> torch.Tensor:
        """Return the next token of each row, int64 [B, 1], from a step of fixed shape that reads one token per row."""
        if self._static is None:
            self._static = kv_cache.StaticStep(
                self._orig_model,
                self._continuation,
                cache=self._cache,
                tokens=self._next,
                mask=self._mask,
                positions=self._positions,
                seen=self._seen,
            )
        self._seen += 1
        return self._static()

    def _drop_ended(self) -> None:
        """Remove ended rows from the batch once there are enough of them to pay for moving the others."""
        going = [i for i, row in enumerate(self.rows) if not row.stop]
        if going and len(going) > (KEPT_SHARE_REPLAYED if self._replay else KEPT_SHARE) * len(self.rows):
            return
        # A recorded step has the shapes of the earlier rows.
        self._static = None
        if going:
            index = torch.tensor(going, device=self._orig_model.device)
            self._cache.reorder_cache(index)  # type: ignore[arg-type]
            self._next, self._mask, self._positions = (x[index] for x in (self._next, self._mask, self._positions))
            model_kwargs = {name: x[index] for name, x in self._continuation.model_kwargs.items()}
            self._continuation = self._continuation._replace(model_kwargs=model_kwargs)
        self.rows = [self.rows[i] for i in going]


# ---- answers ---------------------------------------------------------------------------------------------------------


def generate(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    batching: Batching,
    *,
    max_new_tokens: int | Sequence[int],
    end_ids: Sequence[int] | None = None,
    stop_texts: Sequence[Sequence[str]] | None = None,
    groups: Sequence[str] | None = None,
    encoder_inputs: EncoderInputs | None = None,
    replay: bool | None = None,
) -> list[Answer]:
    """Return greedy answers to tokenized prompts, in the given order. With a runtime every rank calls it and
    gets all.

    Prompts of similar length are decoded together, padded on the left, over a cache of fixed size. The common first
    tokens of a group's prompts are computed once. Batches follow from the arguments, not from the number of ranks; if
    the model is sharded, all ranks run equally many passes.

    Args:
        batching: batch settings; batches become smaller if the keys and values of prompts and answers would exceed
            `kv_cache.MAX_CACHE_BYTES`, or the prompts `MAX_POSITIONS`.
        max_new_tokens: maximum for all prompts, or one number for each.
        end_ids: tokens that end an answer; None: those of the model and its tokenizer.
        stop_texts: texts that end the answer to each prompt and are cut off.
        groups: group name of each prompt, for prompts that begin alike; "" is no group.
        encoder_inputs: for models with an encoder, its input for each prompt; encoded once, before the prompt
            is read.
        replay: whether to decode in steps of a fixed shape, on a GPU as a CUDA graph (`kv_cache.StaticStep`); None:
            if that is faster.

    Raises:
        Stopped: a stop was requested; checked between batches.
        ConfigError: the steps of this model, or of a sharded one, cannot be replayed.
    """
    rt = batching.rt
    # A replay repeats kernels of this rank alone: it neither gathers weights nor waits for other ranks.
    reason = kv_cache.replay_unsupported_reason(orig_model)
    if rt is not None and rt.topology.partial:
        reason = "the model is spread over ranks"
    if replay and reason:
        raise ConfigError(f"steps of decoding cannot be replayed: {reason}")
    # Padding lies between a prefix and its rows, and windows count it.
    if groups is None or hybrids.state_besides_keys(orig_model) or windows(orig_model.config):
        groups = [""] * len(prompts)
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    stops = stop_texts or [()] * len(prompts)
    asked = [
        DecodedSequence(i, np.asarray(ids, np.int64), group, limit, stop)
        for i, (ids, group, limit, stop) in enumerate(zip(prompts, groups, limits, stops, strict=True))
    ]
    end_ids = load.stop_ids(orig_model, tokenizer) if end_ids is None else end_ids
    # All ranks gather sharded weights together, so ranks without rows run empty passes.
    together = rt if rt is not None and rt.topology.sharded else None
    found: dict[int, Answer] = {}
    with kv_cache.plain_forward(orig_model):
        for batch, prefix in turns(orig_model, asked, batching):
            rows: list[DecodedSequence] = batch.rows if batch else []
            inputs = {}
            if encoder_inputs is not None:
                entries = encoder_inputs.index[[row.index for row in rows]]
                inputs = {name: np.asarray(array[entries]) for name, array in encoder_inputs.arrays.items()}
            tensors = {name: torch.from_numpy(array).to(orig_model.device) for name, array in inputs.items()}
            kind = kind_of(orig_model.config)
            continuation = kind.continuation(orig_model, tensors) if batch else Continuation(orig_model, {})
            # The first token comes from reading the prompts, so there is one step fewer than tokens.
            steps = max((row.new_tokens for row in rows), default=0) - 1
            replayed = replay if replay is not None else not reason and kv_cache.replay_pays(orig_model.device, steps)
            decoding = Decoding(orig_model, continuation, rows, prefix, replay=replayed)
            while decoding.goes_on(together):
                for row, token in decoding.step():
                    row.take(token, end_ids, tokenizer)
            found |= {row.index: row.answer(tokenizer) for row in rows}
    return gathered(found, rt)


def introduction(path: str, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, newest: bool) -> str:
    """Return the lines printed before a conversation.

    Args:
        path: folder or hub id.
        newest: whether the path was not given and is that of the newest run.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    template = template_of(tokenizer)
    size = orig_model.num_parameters() / 1e6
    about = f"{type(orig_model).__name__} of {size:,.1f} million parameters on {orig_model.device.type}"
    lines = [f"{path}{', the newest run,' if newest else ''} answers: {about}"]
    asked, questions = right_answers(Path(path))
    if questions:
        lines += ["Questions that were not in training and that this checkpoint answered right:"]
        lines += [f"  {line}" for question in questions for line in question.replace("\n", "\\\n").split("\n")]
    elif asked:
        lines += [f"It answered none of {asked:,} held-out questions right, so expect no right answers here"]
    if argument := template.thinking_argument:
        lines += [f"Thinking: --template-arg {argument}=false turns it off, --template-arg {argument}=true on"]
    return "\n".join([*lines, "/help lists the commands; exit or Ctrl-D ends"])


def stream(
    orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], sampling: Sampling
) -> Iterator[str]:
    """Yield one answer in parts as it is decoded. Closing the generator early waits for the token being computed."""
    channels = has_channels(tokenizer)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=not channels)
    prompt = torch.tensor([chat.render_prompt(Row("prompt", messages=messages), tokenizer)], device=orig_model.device)
    # transformers' generate runs in a thread and passes its text through the streamer. `closed` ends it early; its
    # exceptions are raised again here.
    closed = Event()
    failure: list[Exception] = []
    # transformers' default top_k is 50: only the requested settings should apply
    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    orig_model.eval()
    decode: Any = orig_model.generate

    def work() -> None:
        stopping = [lambda ids, *_, **__: torch.full((len(ids),), closed.is_set(), device=ids.device)]
        try:
            with structure.quiet_routers(orig_model):
                decode(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=sampling.max_new_tokens,
                    eos_token_id=load.stop_ids(orig_model, tokenizer),
                    pad_token_id=tokenizer.pad_token_id,
                    streamer=streamer,
                    stopping_criteria=stopping,
                    **(drawn if sampling.temperature > 0 else {"do_sample": False}),
                )
        except Exception as error:
            failure.append(error)
        finally:
            # The reader of the stream would wait for more text.
            streamer.end()

    worker = Thread(target=work, daemon=True)
    worker.start()
    try:
        raw = shown = ""
        for piece in streamer:
            raw += piece
            text = without_channels(raw, tokenizer) if channels else raw
            yield text[len(shown) :]
            shown = text
    finally:
        closed.set()
        worker.join()
    if failure:
        raise failure[0]
