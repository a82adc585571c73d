"""Conversations to tokens, and the only place where it is decided which of them are targets.

Targets are what the assistant says, and the end-of-turn token after it: without that token a model never stops.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.data import conversation
from sftkit.data.template import Span, answer_spans, render, special_tokens_of, template_of
from sftkit.data.types import Row, Tokenized, TokenizedExample
from sftkit.errors import ConfigError, DataError

Targets = Literal["assistant", "all"]


def tokenize(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    too_long: str = "truncate",
    targets: Targets = "assistant",
) -> Tokenized:
    """One conversation to one document of at most `max_length` row positions, which hold max_length + 1 tokens.

    The text is the template's own, special tokens included, so nothing is added to it but an eos token where the
    template ends turns with none. `targets="all"` learns every token but the first.
    """
    if row.messages is None:
        raise DataError(
            f"{row.where}: a text without turns, but this script learns from conversations (messages, or "
            "instruction and output). Text is for base_train.py and mid_train.py",
            reason="text, not a conversation",
        )
    messages = conversation.validated(row, special_tokens_of(tokenizer))
    conversation.require_answer(messages, row.where)
    text, spans = answer_spans(tokenizer, messages, row.tools, row.where)
    conversation.require_instructions(messages, text, row.where)
    if not spans:
        raise DataError(
            f"{row.where}: the chat template marks no part of this conversation as an answer",
            reason="template marks no answer",
        )
    ids, starts, ends = _encode(tokenizer, text[: spans[-1][1]])
    is_target = np.ones(len(ids), dtype=bool) if targets == "all" else _inside(spans, starts, ends)
    if ids[-1] not in end_of_turn_ids(tokenizer):
        if tokenizer.eos_token_id is None:
            raise ConfigError("neither the chat template nor the tokenizer has a token that ends an answer")
        ids = np.append(ids, np.asarray(tokenizer.eos_token_id, dtype=np.int32))
        is_target = np.append(is_target, True)
    return _fit(row, ids, is_target, tokenizer, max_length, too_long)


def document(ids: np.ndarray, is_target: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> TokenizedExample | None:
    """A document whose token 0 is no target and that ends with its last target; None if it has none."""
    is_target = is_target.astype(bool)
    is_target[:1] = False
    if not is_target.any():
        return None
    n = int(np.flatnonzero(is_target)[-1]) + 1
    ids, is_target = ids[:n].astype(np.int32), is_target[:n]
    learned = tokenizer.decode(ids[is_target].tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return TokenizedExample(ids, is_target, len(str(learned).encode("utf-8", errors="replace")))


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens after which an answer is over: those of the chat template, and eos. Generation stops at any of them."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template:
        ids = [*map(tokenizer.convert_tokens_to_ids, template_of(tokenizer).end_tokens), *ids]
    return list(dict.fromkeys(map(int, ids)))


def render_prompt(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """The tokens after which the model writes the next answer."""
    checked = conversation.validated(Row("prompt", messages=messages, tools=tools), special_tokens_of(tokenizer))
    text, _ = render(tokenizer, template_of(tokenizer, bool(tools)), checked, tools, add_generation_prompt=True)
    return _encode(tokenizer, text)[0].tolist()


def _fit(
    row: Row, ids: np.ndarray, is_target: np.ndarray, tokenizer: PreTrainedTokenizerBase, max_length: int, too_long: str
) -> Tokenized:
    is_long = len(ids) > max_length + 1
    if is_long and too_long == "drop":
        return Tokenized([], "dropped_too_long")
    if is_long and too_long == "error":
        raise DataError(
            f"{row.where}: {len(ids)} tokens, but data.max_length {max_length} holds {max_length + 1}. "
            "Raise data.max_length, or set data.too_long to truncate or drop",
            reason="too long",
        )
    example = document(ids[: max_length + 1], is_target[: max_length + 1], tokenizer)
    if example is None:
        return Tokenized([], "dropped_no_target")
    return Tokenized([example], "truncated" if is_long else None)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids with the characters [start, end) that each covers. No special tokens are added: a template writes its
    own, and apply_chat_template and inference servers add none either, so a second BOS cannot happen."""
    if not tokenizer.is_fast:
        raise ConfigError("a tokenizer without character offsets (a slow one) cannot be used: convert it to a fast one")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(offsets[:, 1])
    # Byte-level tokenizers may trim spaces off a token's start (trim_offsets): it begins where the last one ended.
    starts = np.minimum(offsets[:, 0], np.append([0], ends[:-1])) if len(ends) else ends
    return np.asarray(encoded["input_ids"], dtype=np.int32), starts, ends


def _inside(spans: list[Span], starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """bool [n]: tokens that cover at least one character of a span. Spans ascend and do not overlap."""
    assert all(a[1] <= b[0] for a, b in pairwise(spans)), "answers overlap"
    is_target = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(starts, end, side="left")
        is_target[first:last] |= ends[first:last] > starts[first:last]
    return is_target
