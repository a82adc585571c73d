"""Text to token ids and the characters that each covers. Long texts are tokenized in chunks, and only as far as is
asked for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from sftkit.errors import ConfigError

CHUNK_CHARACTERS = 2**16
"Characters that are tokenized at a time: tokenizers need some 600 bytes for each."
_MARGIN = 8
"The next chunk repeats twice as many words; the first half must come out the same: what follows may change the last ones."


class Encoded(NamedTuple):
    """Tokens of a text, from its beginning on."""

    ids: np.ndarray
    "int32 [n]"
    starts: np.ndarray
    "int64 [n]: the first character that each covers"
    ends: np.ndarray
    "int64 [n]: one past the last"
    complete: bool
    "Whether they are all tokens of the text."


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, enough: int | None = None, *, split_special_tokens: bool = False
) -> Encoded:
    """Tokenize a text as the tokenizer does in one call. No special tokens are added: a template writes its own, and
    apply_chat_template and inference servers add none either, so a second BOS cannot happen.

    A long text is split between words of the tokenizer, inside of which its model works. The words before a split come out
    of the next chunk once more; where they differ, or where there are none, the text is tokenized in one call.

    Args:
        enough: so many tokens will do, if there are more; null: all.
        split_special_tokens: their text stands for the ordinary characters that it is.

    Raises:
        ConfigError: the tokenizer knows no character offsets.
    """
    if not tokenizer.is_fast:
        raise ConfigError("a tokenizer without character offsets (a slow one) cannot be used: convert it to a fast one")
    if len(text) <= CHUNK_CHARACTERS:
        return _arrays(_call(tokenizer, text, split_special_tokens=split_special_tokens))
    parts, begin, tokens, ended = [], 0, 0, False
    again: list[list[int]] = [[], [], []]
    while not ended and (enough is None or tokens < enough):
        encoded = _call(tokenizer, text[begin : begin + CHUNK_CHARACTERS], split_special_tokens=split_special_tokens)
        ids, starts, ends, _ = _arrays(encoded)
        ended = begin + CHUNK_CHARACTERS >= len(text)
        borders = [0] * 2 * _MARGIN + _borders(encoded)
        kept = len(ids) if ended else borders[-2 * _MARGIN]
        repeated = [one[: len(again[0])].tolist() for one in (ids, starts + begin, ends + begin)]
        if repeated != again or not (ended or ends[:kept].any()):
            return _arrays(_call(tokenizer, text, split_special_tokens=split_special_tokens))
        again = [one[kept : borders[-_MARGIN]].tolist() for one in (ids, starts + begin, ends + begin)]
        parts.append((ids[:kept], starts[:kept] + begin, ends[:kept] + begin))
        tokens += kept
        begin += int(ends[kept - 1]) if kept else 0
    ids, starts, ends = map(np.concatenate, zip(*parts, strict=True))
    return Encoded(ids, starts, ends, ended)


def _call(tokenizer: PreTrainedTokenizerBase, text: str, *, split_special_tokens: bool) -> BatchEncoding:
    """Tokenize a text in one call, without special tokens of the tokenizer's own."""
    encoded: BatchEncoding = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        split_special_tokens=split_special_tokens,
        verbose=False,
    )
    return encoded


def _arrays(encoded: BatchEncoding) -> Encoded:
    """Return the tokens as arrays."""
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(offsets[:, 1])
    # Byte-level tokenizers may trim spaces off a token's start (trim_offsets): it begins where the last one ended.
    starts = np.minimum(offsets[:, 0], np.append([0], ends[:-1])) if len(ends) else ends
    return Encoded(np.asarray(encoded["input_ids"], dtype=np.int32), starts, ends, complete=True)


def _borders(encoded: BatchEncoding) -> list[int]:
    """Return the indices of the tokens with which a word of the tokenizer begins, without the first."""
    words = np.asarray([-1 if word is None else word for word in encoded.word_ids(0)])
    return (np.flatnonzero(words[1:] != words[:-1]) + 1).tolist()
