"""Convert text to token ids and the characters that each token covers.

Long texts are tokenized in chunks, and only as far as needed. In a conversation the last prompt gets the tokens that it
has by itself, as a server sends it."""

import json
import re
from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from sftkit.data.reading.conversation import special_pattern
from sftkit.data.tokens.template import Span, special_tokens_of

CHUNK_CHARACTERS = 2**16
"Characters that are tokenized at a time: tokenizers need some 600 bytes for each."
_MARGIN = 8
"""The next chunk repeats twice as many words; the first half must come out the same: what follows may change
the last ones."""


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

    def tokens(self, span: Span) -> tuple[int, int]:
        """Return (the first token, one past the last) of those that cover at least one character of a span."""
        first = int(np.searchsorted(self.ends, span[0], side="right"))
        return first, int(np.searchsorted(self.starts, span[1], side="left"))

    def inside(self, spans: list[Span]) -> np.ndarray:
        """Return bool [n]: tokens that cover at least one character of a span. Spans ascend and do not overlap."""
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "answers overlap"
        is_target = np.zeros(len(self.ids), dtype=bool)
        for span in spans:
            first, past = self.tokens(span)
            is_target[first:past] |= self.ends[first:past] > self.starts[first:past]
        return is_target


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, enough: int | None = None, *, split_special_tokens: bool = False
) -> Encoded:
    """Tokenize a text as the tokenizer does in one call. No special tokens are added: a template writes its own, and
    apply_chat_template and inference servers add none either, so a second BOS cannot happen.

    A long text is split between words of the tokenizer, since its model works inside a word. The next chunk repeats the
    words before a split. If they come out differently, or if there are none, the text is tokenized in one call.

    Args:
        enough: number of tokens after which tokenizing may stop; None: tokenize all.
        split_special_tokens: tokenize the text of special tokens as ordinary characters.
    """
    if len(text) <= CHUNK_CHARACTERS:
        return _arrays(_call(tokenizer, text, split_special_tokens=split_special_tokens))
    parts = []
    begin = 0
    tokens = 0
    ended = False
    again: list[list[int]] = [[], [], []]
    while not ended and (enough is None or tokens < enough):
        encoded = _call(tokenizer, text[begin : begin + CHUNK_CHARACTERS], split_special_tokens=split_special_tokens)
        ids, starts, ends, _ = _arrays(encoded)
        ended = begin + CHUNK_CHARACTERS >= len(text)
        # All but the last words are kept. The next chunk must repeat the first half of the others: `again`. A border
        # is the index of a token with which a word of the tokenizer begins.
        words = np.asarray([-1 if word is None else word for word in encoded.word_ids(0)])
        borders = [0] * 2 * _MARGIN + (np.flatnonzero(words[1:] != words[:-1]) + 1).tolist()
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


def encode_answers(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: dict[int, list[Span]], last: int, enough: int | None
) -> tuple[Encoded, set[int]]:
    """Encode a text so that the part before its last answer has the token ids that it would have by itself,
    as a prompt.

    Returns the tokens, and the answers for which that does not hold. `enough`: as in `encode`.

    An answer that begins with whitespace may share a token with the end of the prompt, which no server would ever see.
    """
    # Together first: only where the last answer shares a token with its prompt are the two tokenized apart.
    encoded = encode(tokenizer, text, enough)
    pattern = special_pattern(tuple(special_tokens_of(tokenizer)))
    specials = [match.span() for match in pattern.finditer(text)]
    shared = {k for k, parts in spans.items() if parts and _shares(tokenizer, text, parts[0][0], encoded, specials)}
    if last not in shared:
        return encoded, shared
    if not encoded.complete:
        return encode_answers(tokenizer, text, spans, last, None)
    prompt_end = spans[last][0][0]
    before = encode(tokenizer, text[:prompt_end])
    after = encode(tokenizer, text[prompt_end:])
    joined = np.concatenate([before.ids, after.ids])
    if tokenizer.decode(joined) != tokenizer.decode(encoded.ids):
        return encoded, shared  # this tokenizer begins texts in another way
    starts = np.concatenate([before.starts, after.starts + prompt_end])
    ends = np.concatenate([before.ends, after.ends + prompt_end])
    return Encoded(joined, starts, ends, complete=True), shared - {last}


def _shares(
    tokenizer: PreTrainedTokenizerBase, text: str, prompt_end: int, encoded: Encoded, specials: list[Span]
) -> bool:
    """Return whether the prompt text[:prompt_end] alone has other ids than in the whole text. Special tokens split a
    text, so what follows the last one of the prompt decides.

    Args:
        encoded: the text, or the beginning of it: if it ends before the prompt does, what lies between the special
            tokens around that place is encoded here.
        specials: where they are in the text, ascending.
    """
    before = bisect_right(specials, prompt_end, key=lambda span: span[1])
    begin = specials[before - 1][0] if before else 0
    alone = _prompt_end(tokenizer, len(tokenizer), text[begin:prompt_end])
    if not encoded.complete and prompt_end >= encoded.ends[-1]:
        end = specials[before][1] if before < len(specials) else len(text)
        encoded = encode(tokenizer, text[begin:end], len(alone) + 1)
        prompt_end, begin = prompt_end - begin, 0
    # The tokens of the whole text between that special token and the end of the prompt, against those of the
    # prompt alone.
    first = np.searchsorted(encoded.ends, begin, side="right")
    past = np.searchsorted(encoded.starts, prompt_end)
    return bool(past and encoded.ends[past - 1] > prompt_end) or encoded.ids[first:past].tolist() != alone


@lru_cache(maxsize=64)
def _prompt_end(tokenizer: PreTrainedTokenizerBase, vocab_size: int, text: str) -> list[int]:
    """Return the ids of what follows the last special token of a prompt: the same header for nearly every answer.

    Args:
        vocab_size: len(tokenizer), which grows with tokens that are added.
    """
    ids: list[int] = encode(tokenizer, text).ids.tolist()
    return ids


class TokenBytes(NamedTuple):
    """UTF-8 bytes of each id, for tokenizers whose texts are those of their tokens, one after the other."""

    sizes: np.ndarray
    "int32 [V]: of its text; 0 for special tokens, which bits per byte leave out"
    whole: np.ndarray
    "bool [V]: its text is of whole characters"


@lru_cache(maxsize=8)
def token_bytes(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> TokenBytes | None:
    """Return the bytes of each id; None if the text of some tokens depends on what is around them.

    Args:
        vocab_size: len(tokenizer), which grows with tokens that are added.
    """
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    steps = [(one.get("type"), one.get("content"), one.get("pattern")) for one in decoder.get("decoders", [decoder])]
    # Gemma's tokens have another character for a space, and <0x0A> for a byte that is part of no other token.
    gemma = [("Replace", " ", {"String": "▁"}), ("ByteFallback", None, None), ("Fuse", None, None)]
    byte_level = steps == [("ByteLevel", None, None)]
    if not byte_level and steps != gemma:
        return None
    added = tokenizer.added_tokens_decoder
    vocabulary = tokenizer.get_vocab()
    entries = max(vocab_size, max(vocabulary.values()) + 1)  # some vocabularies have gaps
    sizes = np.zeros(entries, dtype=np.int32)
    whole = np.ones(entries, dtype=bool)
    for token, i in vocabulary.items():
        if i in added:
            data = b"" if added[i].special else added[i].content.encode()
        elif byte_level:
            data = bytes(map(BYTE_OF.__getitem__, token)) if BYTE_OF.keys() >= set(token) else token.encode()
        elif found := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            data = bytes.fromhex(found[1])
        else:
            data = token.replace("▁", " ").encode()
        sizes[i] = len(data)
        whole[i] = data.decode(errors="replace").encode() == data
    return TokenBytes(sizes, whole)


_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}
"The characters by which byte-level tokenizers write bytes."
