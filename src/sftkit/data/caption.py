"""Captions of pictures, or answers to texts, that an encoder reads, to tokens. All of them are targets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.data import chat
from sftkit.data.rows import require_source_and_texts
from sftkit.data.types import Row, Tokenized
from sftkit.errors import ConfigError


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
    source, texts = require_source_and_texts(row)
    documents = (_ids(text, tokenizer) for text in texts if text.strip())
    whole = [chat.Text(ids, np.ones(len(ids), dtype=bool)) for ids in documents]
    fitted = [chat.fit(row, one, tokenizer, max_length, too_long) for one in whole]
    made = [replace(example, encoder_source=source) for one in fitted for example in one.examples]
    if made:
        return Tokenized(made, "truncated" if any(one.note == "truncated" for one in fitted) else None)
    return fitted[-1] if fitted else Tokenized([], "dropped_no_target", details="no text")


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Tokenize a text between start and eos token, int32 [n]."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return np.asarray([start_id(tokenizer), *ids, tokenizer.eos_token_id], dtype=np.int32)
