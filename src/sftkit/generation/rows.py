"""Rows of a batch while they are decoded: what each has said, when it ends, their cache and their next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from sftkit.generation.answer import Answer
from sftkit.generation.kv_cache import SharedPrefix, empty_pass
from sftkit.generation.static_step import DecodingState, StaticStep, next_tokens
from sftkit.models.kind import Continuation
from sftkit.runtime.start import Runtime

KEPT_SHARE = 0.75
"Rows that have ended are taken out of the cache once at most this share of a batch goes on."
KEPT_SHARE_REPLAYED = 0.5
"The same for replayed steps, where rows that have ended cost less and a smaller batch is recorded anew."


@dataclass
class DecodedSequence:
    """A prompt that is being answered."""

    index: int
    prompt: np.ndarray
    "int64 [T], its tokens"
    max_new_tokens: int
    "tokens of its answer at most"
    stop_texts: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    stop: str = ""
    "why it ended; empty: it goes on"

    def take(self, token: int, stop_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
        """Add the next token of the answer, and note whether it ends it. Does nothing for an answer that has ended."""
        if self.stop:
            return
        if token in stop_ids:
            self.stop = "end_of_turn"
            return
        self.tokens.append(token)
        # A stop text of n bytes ends within the last n tokens; first tokens may lose a space, hence some more.
        last = self.tokens[-max((len(text.encode()) for text in self.stop_texts), default=0) - 4 :]
        if self.stop_texts and all(
            find_stop_text(text_of(tokens, tokenizer), self.stop_texts) is not None for tokens in (last, self.tokens)
        ):
            self.stop = "stop_text"
        if not self.stop and len(self.tokens) == self.max_new_tokens:
            self.stop = "length"

    def answer(self, tokenizer: PreTrainedTokenizerBase) -> Answer:
        """Return the answer, cut before the first stop text."""
        text = text_of(self.tokens, tokenizer)
        return Answer(text[: find_stop_text(text, self.stop_texts)], self.stop, len(self.tokens), tuple(self.tokens))


def text_of(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of an answer, without special tokens."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def find_stop_text(text: str, stop_texts: Sequence[str]) -> int | None:
    """Return the index at which the first of the stop texts begins; None if none occurs."""
    return min((at for stop in stop_texts if stop and (at := text.find(stop)) >= 0), default=None)


class Decoding:
    """A batch while it is decoded: rows that go on, their cache and their next tokens."""

    def __init__(
        self,
        orig_model: PreTrainedModel,
        continuation: Continuation,
        rows: list[DecodedSequence],
        prefix: SharedPrefix,
        *,
        replay: bool,
    ) -> None:
        """Begin with prompts whose first tokens, those of the prefix, have been read."""
        self.rows = rows
        self._orig_model, self._continuation, self._replay = orig_model, continuation, replay
        self._static: StaticStep | None = None
        if not rows:
            return
        # Prompts are padded on the left: ids [B, width] end together; mask [B, prefix + width + new tokens] is
        # 0 at padding.
        skip, device = len(prefix.ids), orig_model.device
        width, max_new_tokens = max(len(row.prompt) for row in rows) - skip, max(row.max_new_tokens for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        mask = np.ones((len(rows), skip + width + max_new_tokens), dtype=np.int64)
        for i, row in enumerate(rows):
            pad = width - (len(row.prompt) - skip)
            ids[i, pad:] = row.prompt[skip:]
            mask[i, skip : skip + pad] = 0
        self._next = torch.from_numpy(ids).to(device)
        self._mask = torch.from_numpy(mask).to(device)  # [B, all positions there will be]
        # Position ids count what is not padding, so that an answer does not depend on the other rows.
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._seen = skip
        self._cache: Cache = prefix.cache(len(rows), width + max_new_tokens)

    def goes_on(self, together: Runtime | None) -> bool:
        """Return whether this rank, or any of the ranks that work together, has rows that go on."""
        going = any(not row.stop for row in self.rows)
        return going if together is None else together.any_rank(going)

    def step(self) -> list[tuple[DecodedSequence, int]]:
        """Return (row, next token) for the rows of the batch; some of them may have ended already."""
        self._drop_ended()
        if not self.rows:
            empty_pass(self._orig_model)
            return []
        # Only a step that reads one token for each row has the fixed shape: prompts are read first, in one pass.
        alone = self._replay and self._seen > 0 and self._next.shape[1] == 1
        self._next = self._replayed() if alone else self._read()
        return list(zip(self.rows, self._next.squeeze(1).tolist(), strict=True))

    def _read(self) -> torch.Tensor:
        """Run the model over the tokens that it has not read yet, and return the next token
        of each row, int64 [B, 1]."""
        start, end = self._seen, self._seen + self._next.shape[1]
        self._seen = end
        return next_tokens(
            self._continuation,
            input_ids=self._next,
            attention_mask=self._mask[:, :end],
            position_ids=self._positions[:, start:end],
            past_key_values=self._cache,
        )

    def _replayed(self) -> torch.Tensor:
        """Return the next token of each row, int64 [B, 1], by a step of a fixed shape that reads one token per row."""
        if self._static is None:
            state = DecodingState(self._cache, self._next, self._mask, self._positions, self._seen)
            self._static = StaticStep(self._orig_model, self._continuation, state)
        self._seen += 1
        return self._static()

    def _drop_ended(self) -> None:
        """Take rows that have ended out of the batch, once there are enough of them to pay for moving the others."""
        going = [i for i, row in enumerate(self.rows) if not row.stop]
        if going and len(going) > (KEPT_SHARE_REPLAYED if self._replay else KEPT_SHARE) * len(self.rows):
            return
        # A recorded step has the shapes of the rows that were there.
        self._static = None
        if going:
            index = torch.tensor(going, device=self._orig_model.device)
            self._cache.reorder_cache(index)  # type: ignore[arg-type]
            self._next, self._mask, self._positions = (x[index] for x in (self._next, self._mask, self._positions))
            model_kwargs = {name: x[index] for name, x in self._continuation.model_kwargs.items()}
            self._continuation = self._continuation._replace(model_kwargs=model_kwargs)
        self.rows = [self.rows[i] for i in going]
