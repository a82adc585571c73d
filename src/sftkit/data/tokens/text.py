"""Texts to tokens, each a document that ends with eos and of which all but the first token is learned: plain text,
split into chunks that fit rows, and captions of pictures, or answers to texts, that an encoder reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.data.reading.rows import refuse_picture, require_source_and_texts, require_text
from sftkit.data.tokens import chat
from sftkit.data.tokens.encode import CHUNK_CHARACTERS, encode
from sftkit.data.types import Row, Tokenized
from sftkit.errors import ConfigError, DataError
from sftkit.runtime.words import counted


def tokenize(row: Row, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> Tokenized:
    """Tokenize one text to chunks of at most max_length + 1 tokens.

    The last token of a chunk is the first of the next, so each token of the text is a target exactly once. BOS stands
    in front where the tokenizer adds one, and eos at the end, each once.
    """
    text = require_text(row)
    if not text.strip():
        return Tokenized([], "dropped_no_target", details="an empty text")
    ids = _ids(text, tokenizer)
    chunks = [ids[i : i + max_length + 1] for i in range(0, len(ids) - 1, max_length)]
    documents = [one for chunk in chunks if (one := chat.document(chunk, np.ones(len(chunk), bool), tokenizer))]
    return Tokenized(documents) if documents else Tokenized([], "dropped_no_target", details="a text without tokens")


def tokenize_any(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    too_long: str = "truncate",
    learning: chat.Learning = chat.EVERYTHING,
) -> Tokenized:
    """Tokenize text as text, conversations as conversations; mid-training learns every token of both."""
    refuse_picture(row)
    if row.messages is None:
        return tokenize(row, tokenizer, max_length=max_length)
    return chat.tokenize(row, tokenizer, max_length=max_length, too_long=too_long, learning=learning)


def tokenize_captions(
    row: Row, tokenizer: PreTrainedTokenizerBase, *, max_length: int, too_long: str = "truncate"
) -> Tokenized:
    """Tokenize each text of a row to a document: the first token, the text, eos. A document of more than max_length
    positions, or whose text for the encoder has more, is cut, dropped or an error, as `too_long` says. Texts are
    counted as answers are.

    Raises:
        DataError: the row has nothing for an encoder, or a text is too long and `too_long` is error.
    """
    source, texts = require_source_and_texts(row)
    odd: dict[str, str] = {}
    if empty := sum(not text.strip() for text in texts):
        odd["empty text left out"] = f"{row.where}: {counted(empty, 'text')} of {len(texts)} without a word"
    start, eos = start_id(tokenizer), tokenizer.eos_token_id
    encoded = (encode(tokenizer, text, split_special_tokens=True).ids for text in texts if text.strip())
    whole = [
        chat.Text(np.array([start, *ids, eos]), np.ones(len(ids) + 2, dtype=bool), ((1, len(ids) + 2),))
        for ids in encoded
    ]
    counts = Counter(answers=len(whole))
    # A text for the encoder is cut by the model kind, with the tokens that its tokenizer adds.
    size = 0 if row.image is not None else len(tokenizer(source, verbose=False)["input_ids"])
    if size > max_length:
        asked = f"the text for the encoder has {size} tokens, but data.max_length holds {max_length}"
        if too_long == "error":
            raise DataError(
                f"{row.where}: {asked}. Raise data.max_length, or set data.too_long to truncate or drop",
                reason="too long",
            )
        if too_long == "drop":
            counts[chat.TOO_LONG] = len(whole)
            return Tokenized([], "dropped_too_long", counts, asked)
        odd["text for the encoder cut at data.max_length"] = f"{row.where}: {asked}"
    fitted = [chat.fit(row, one, tokenizer, max_length, too_long) for one in whole]
    chat.count_cut(counts, whole, fitted, max_length)
    made = [replace(example, encoder_source=source) for one in fitted for example in one.examples]
    if made:
        is_cut = size > max_length or any(one.note == "truncated" for one in fitted)
        return Tokenized(made, "truncated" if is_cut else None, counts, odd=odd)
    return replace(fitted[-1], counts=counts) if fitted else Tokenized([], "dropped_no_target", details="no text")


def start_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that every text for an encoder's decoder begins with and that is not a target: bos, else eos.

    Raises:
        ConfigError: the tokenizer has no eos token.
    """
    eos = _eos_id(tokenizer)
    return eos if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)


def _eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no eos token, which must end every text. Set one in its tokenizer_config")
    return int(tokenizer.eos_token_id)


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Tokenize a text, with BOS if the tokenizer adds one and with eos, int32 [n]."""
    bos, eos = tokenizer.bos_token_id, _eos_id(tokenizer)
    if len(text) <= CHUNK_CHARACTERS:
        ids = list(tokenizer(text, return_attention_mask=False, split_special_tokens=True, verbose=False)["input_ids"])
    else:
        before, after = _around(tokenizer)
        ids = [*before, *encode(tokenizer, text, split_special_tokens=True).ids.tolist(), *after]
    # Whatever the tokenizer adds by itself, BOS stands once in front and eos once at the end.
    if ids[:2] == [bos, bos]:
        ids = ids[1:]
    if ids[-1:] != [eos]:
        ids.append(eos)
    return np.asarray(ids, dtype=np.int32)


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before a text and after it."""
    found, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    at = next(i for i in range(len(found)) if found[i : i + len(bare)] == bare)
    return found[:at], found[at + len(bare) :]
