"""Turn texts into tokens. Each document ends with eos, and all of its tokens but the first are learned.

Plain text is split into chunks that fit rows. Captions of pictures, and answers to texts that an encoder reads, are one
document each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig
from sftkit.data.reading.columns import has_marker, unused_keys
from sftkit.data.reading.conversation import NO_MEDIA, special_pattern
from sftkit.data.reading.rows import reject_picture, require_source_and_texts, require_text
from sftkit.data.tokens import chat
from sftkit.data.tokens.encode import CHUNK_CHARACTERS, TokenBytes, encode
from sftkit.data.tokens.loss_mask import not_learned
from sftkit.data.tokens.template import special_tokens_of
from sftkit.data.types import TOO_LONG, Row, Tokenized
from sftkit.errors import ConfigError, fault
from sftkit.runtime.script import counted

SpecialTokens = Literal["split", "parse", "error"]
TEXT_START = "sftkit_text_start"
"Attribute of a tokenizer, which is not saved: what models/tokenizer.py found in the config of the start model."


def tokenize(
    row: Row, tokenizer: PreTrainedTokenizerBase, *, max_length: int, special_tokens: SpecialTokens = "split"
) -> Tokenized:
    """Tokenize one text to chunks of at most max_length + 1 tokens.

    The last token of a chunk is the first of the next, so each token of the text is a target exactly once. The
    chunks begin with one BOS if the tokenizer adds it, and end with one eos.

    Args:
        special_tokens: what the text of special tokens becomes: ordinary characters (split) or those tokens (parse), or
            the row is bad (error).
    """
    if row.is_tokenized:
        return chat.take(row, tokenizer, max_length=max_length, too_long=None)
    text, odd = text_and_warnings(row, special_tokens_of(tokenizer), special_tokens)
    if not text:
        details = "an empty text" if row.learned else "the row is marked as not to be learned"
        return Tokenized([], "dropped_no_target", details=details)
    ids = _ids(text, tokenizer, split=special_tokens != "parse")
    return documents_of_text(ids, odd, tokenizer, max_length)


def text_and_warnings(row: Row, specials: Sequence[str], special_tokens: SpecialTokens) -> tuple[str, dict[str, str]]:
    """Return (the text that is learned from a row, empty if there is none; what is odd in it).

    Args:
        specials: special_tokens_of(tokenizer).
        special_tokens: as in `tokenize`.

    Raises:
        DataError: the row is no text, or one with special tokens that makes it bad.
    """
    text = require_text(row)
    if not row.learned or not text.strip():
        return "", {}
    odd = {NO_MEDIA: f"{row.where}: <image>, <video> or <audio>"} if has_marker(text) else {}
    if found := special_pattern(tuple(specials)).search(text):
        if special_tokens == "error":
            raise fault(row.where, "special token in text", token=found[0])
        odd["special token in text"] = f"{row.where}: {found[0]}, data.special_tokens_in_text={special_tokens}"
    return text, odd


def documents_of_text(
    token_ids: Sequence[int] | np.ndarray,
    odd: dict[str, str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    sizes: TokenBytes | None = None,
) -> Tokenized:
    """Return the documents of a text, as `tokenize` does.

    Args:
        token_ids: those of the text, with what the tokenizer puts around them.
        odd: what is odd in it.
        sizes: bytes of each id; None: documents are decoded to count their bytes.
    """
    ids = _ended(token_ids, tokenizer)
    if len(ids) > max_length + 1:
        sizes = None  # a chunk may end inside a character
    chunks = [ids[i : i + max_length + 1] for i in range(0, len(ids) - 1, max_length)]
    documents = [one for chunk in chunks if (one := chat.document(chunk, np.ones(len(chunk), bool), tokenizer, sizes))]
    if not documents:
        return Tokenized([], "dropped_no_target", details="a text without tokens")
    return Tokenized(documents, odd=odd)


def tokenize_any(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    too_long: str = "truncate",
    learning: chat.Learning = chat.EVERYTHING,
    special_tokens: SpecialTokens = "split",
) -> Tokenized:
    """Tokenize text as text, conversations as conversations; mid-training learns every token of both."""
    reject_picture(row)
    if row.messages is None and row.is_target is None and row.segments is None:
        return tokenize(row, tokenizer, max_length=max_length, special_tokens=special_tokens)
    return chat.tokenize(row, tokenizer, max_length=max_length, too_long=too_long, learning=learning)


def tokenize_captions(
    row: Row, tokenizer: PreTrainedTokenizerBase, *, max_length: int, too_long: str = "truncate"
) -> Tokenized:
    """Tokenize each text of a row to a document: what comes before (around_text), the text, eos. A document of more
    than max_length positions, or whose text for the encoder has more, is cut, dropped or an error, as `too_long` says.
    Texts are counted as answers are.

    Raises:
        DataError: the row has nothing for an encoder, or a text is too long and `too_long` is error.
    """
    source, texts = require_source_and_texts(row)
    if not row.learned or (row.messages and not_learned(replace(row, context_messages=0), row.messages, "assistant")):
        return Tokenized([], "dropped_no_target", details="marked as not to be learned")
    odd: dict[str, str] = {}
    if empty := sum(not text.strip() for text in texts):
        odd["empty text left out"] = f"{row.where}: {counted(empty, 'text')} of {len(texts)} without a word"
    before, after = around_text(tokenizer)
    encoded = (encode(tokenizer, text, split_special_tokens=True).ids for text in texts if text.strip())
    documents = ([*before, *ids, *after] for ids in encoded)
    whole = [chat.Text(np.array(ids), np.ones(len(ids), dtype=bool), ((len(before), len(ids)),)) for ids in documents]
    counts = Counter(answers=len(whole))
    # A text for the encoder is cut by the model kind, with the tokens that its tokenizer adds.
    size = 0 if row.image is not None else len(tokenizer(source, verbose=False)["input_ids"])
    if size > max_length:
        asked = f"the text for the encoder has {size} tokens, but data.max_length holds {max_length}"
        if too_long == "error":
            raise fault(row.where, "too long", size=asked)
        if too_long == "drop":
            counts[TOO_LONG] = len(whole)
            return Tokenized([], "dropped_too_long", counts, asked)
        odd["text for the encoder cut at data.max_length"] = f"{row.where}: {asked}"
    fitted = [chat.fit(row, one, tokenizer, max_length, too_long) for one in whole]
    chat.count_cut(counts, whole, fitted, max_length)
    made = [replace(example, encoder_source=source) for one in fitted for example in one.examples]
    if made:
        # An encoder and its decoder are given only the text of two messages.
        keys = unused_keys(row.messages or (), lambda role, key: False, reasoning=False)
        is_cut = size > max_length or any(one.note == "truncated" for one in fitted)
        return Tokenized(made, "truncated" if is_cut else None, counts, odd=odd, unused=keys)
    return replace(fitted[-1], counts=counts) if fitted else Tokenized([], "dropped_no_target", details="no text")


def check_targets(data: DataConfig, reason: str) -> None:
    """Reject settings of conversations where every token is learned, with the reason."""
    if data.targets not in (None, "all"):
        raise ConfigError(f"data.targets={data.targets}: {reason}")


def start_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that every text for an encoder's decoder begins with and that is not a target: that of the start
    model (T5 begins with its padding token, BART with eos), else bos, else eos.

    Raises:
        ConfigError: the tokenizer has no eos token.
    """
    eos = _eos_id(tokenizer)
    if (given := text_start(tokenizer)) is not None:
        return given
    return eos if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)


def text_start(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the decoder_start_token_id of the start model; None: a new model, or one without."""
    return getattr(tokenizer, TEXT_START, None)


def set_text_start(tokenizer: PreTrainedTokenizerBase, start: int | None) -> None:
    """Keep for start_id what the start model's texts begin with."""
    setattr(tokenizer, TEXT_START, start)


def around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a text for an encoder's decoder.

    Those of a start model are its start token, then what its tokenizer puts around a target, as transformers makes
    labels and shifts them; those of a new model are the start token and eos.
    """
    start = start_id(tokenizer)
    eos = _eos_id(tokenizer)
    if text_start(tokenizer) is None:
        return [start], [eos]
    before, after = around(tokenizer, target=True)
    return [start, *(before[1:] if before[:1] == [start] else before)], after if eos in after else [*after, eos]


def _eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no eos token, which must end every text. Set one in its tokenizer_config")
    return int(tokenizer.eos_token_id)


def _ids(text: str, tokenizer: PreTrainedTokenizerBase, *, split: bool) -> list[int]:
    """Tokenize a text with what the tokenizer puts around it. `split`: special tokens in it are ordinary characters."""
    if len(text) <= CHUNK_CHARACTERS:
        return list(
            tokenizer(text, return_attention_mask=False, split_special_tokens=split, verbose=False)["input_ids"]
        )
    before, after = around(tokenizer)
    return [*before, *encode(tokenizer, text, split_special_tokens=split).ids.tolist(), *after]


def _ended(token_ids: Sequence[int] | np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the ids of a text with at most one BOS and with eos, int32 [n]."""
    ids = np.asarray(token_ids, np.int32)
    bos = tokenizer.bos_token_id
    eos = _eos_id(tokenizer)
    # Whatever the tokenizer adds by itself: one BOS in front and one eos at the end.
    if ids[:2].tolist() == [bos, bos]:
        ids = ids[1:]
    return ids if ids[-1:].tolist() == [eos] else np.append(ids, np.int32(eos))


def around(tokenizer: PreTrainedTokenizerBase, *, target: bool = False) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before a text and after it.

    Args:
        target: the text is what a decoder writes, whose language may be another.
    """
    text = {"text_target": "a"} if target else {"text": "a"}
    found = tokenizer(**text)["input_ids"]
    bare = tokenizer(**text, add_special_tokens=False)["input_ids"]
    at = next(i for i in range(len(found)) if found[i : i + len(bare)] == bare)
    return found[:at], found[at + len(bare) :]
