"""Captions of pictures, or answers to texts, that an encoder reads, to tokens. All of them are targets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.data import chat
from sftkit.data.rows import require_source_and_texts
from sftkit.data.types import Row, Tokenized, TokenizedExample
from sftkit.errors import ConfigError, DataError


def start_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that every text begins with and that is no target: bos, else eos.

    Raises:
        ConfigError: the tokenizer has no eos token.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no eos token, which must end every text. Set one in its tokenizer_config")
    return int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)


def tokenize(row: Row, tokenizer: PreTrainedTokenizerBase, *, max_length: int, too_long: str = "truncate") -> Tokenized:
    """Tokenize each text of a row to a document: the first token, the text, eos. A document of more than max_length
    positions is cut, dropped or an error, as `too_long` says.

    Raises:
        DataError: the row has nothing for an encoder, or a text is too long and `too_long` is error.
    """
    made, notes, details = list[TokenizedExample](), set[str](), ""
    for source, text in _pairs(row):
        ids = _ids(text, tokenizer)
        if len(ids) > max_length + 1:
            details = f"{len(ids)} tokens, but data.max_length {max_length} holds {max_length + 1}"
            if too_long == "error":
                hint = "Raise data.max_length, or set data.too_long to truncate or drop"
                raise DataError(f"{row.where}: {details}. {hint}", reason="too long")
            notes.add("truncated" if too_long == "truncate" else "dropped_too_long")
            if too_long == "drop":
                continue
        example = chat.document(ids[: max_length + 1], np.ones(len(ids[: max_length + 1]), dtype=bool), tokenizer)
        if example is not None:
            made.append(TokenizedExample(example.ids, example.is_target, example.num_bytes, source))
    if made:
        return Tokenized(made, "truncated" if "truncated" in notes else None)
    return Tokenized([], "dropped_too_long" if notes else "dropped_no_target", details=details or "no text")


def _pairs(row: Row) -> Iterator[tuple[str, str]]:
    """Yield (what an encoder reads, what is said of it); texts of whitespace alone are left out."""
    source, texts = require_source_and_texts(row)
    return ((source, text) for text in texts if text.strip())


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Tokenize a text between start and eos token, int32 [n]."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return np.asarray([start_id(tokenizer), *ids, tokenizer.eos_token_id], dtype=np.int32)
