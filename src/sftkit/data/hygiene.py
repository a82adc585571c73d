"""Hash rows when they are tokenized, so that documents are chosen later (chosen.py) without them. No torch."""

import json
import unicodedata
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from sftkit.data.reading.columns import MARKS, PARTS, REASONING
from sftkit.data.types import Row

HEAD_CHARACTERS = 1000
"Beginning of a text that decides on which side of data.val_fraction its documents fall."


def content_hash(row: Row) -> int:
    """Return a 64-bit hash of all that is learned from a row, in the normal form that decides what a copy is: other
    case, white space and composed characters make no difference."""
    if row.messages is None:
        return _hash([row.text or "", row.image or "", *row.captions, *_tokens(row)])
    # A count, tools and arguments decide tokens and mask, so the same messages with others are no copy.
    parts = [str(row.context_messages), row.masked_role, _text(row.tools), _text(row.template_args)]
    for message in row.messages:
        parts += str(message.get("role")), _text(message.get("content")), _text(message.get("tool_calls"))
        parts += [_text(value) for key in (*REASONING, PARTS) if (value := message.get(key))]
        parts += [key for key in MARKS if message.get(key, 1) in (0, "0")]
    return _hash(parts)


def head_hash(row: Row) -> int:
    """Return a 64-bit hash of how a row begins: its first user message, its picture, or the first 1,000 characters of
    its text. Copies, and all answers to one question, have the same."""
    if row.is_tokenized:
        return _hash(_tokens(row)[:HEAD_CHARACTERS])
    if row.messages is None:
        return _hash([row.image or " ".join((row.text or "")[: 2 * HEAD_CHARACTERS].split())[:HEAD_CHARACTERS]])
    first = next((one for one in row.messages if one.get("role") == "user"), row.messages[0] if row.messages else {})
    return _hash([_text(first.get("content"))])


def _tokens(row: Row) -> list[str]:
    """Return the tokens of a row that was tokenized elsewhere, or its segments, each with whether it is learned."""
    if row.ids is None:
        return [f"{learned}{text}" for text, learned in row.segments or ()]
    return [*map(str, row.ids.tolist()), *("" if row.is_target is None else map(str, row.is_target.tolist()))]


def _text(value: object) -> str:
    """Return a value of a message as text; the parts of a content as the text that they are joined to."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in value):
        return "".join(one["text"] for one in value)
    return json.dumps(value, sort_keys=True, default=str) if value else ""


def _normal(text: str) -> bytes:
    """Return a text in lower case, composed, with one space for any white space, as UTF-8."""
    if not text.isascii():
        words = unicodedata.normalize("NFC", text.casefold()).split()
        # a lone surrogate, which JSON may hold, is no error
        return " ".join(words).encode(errors="surrogatepass")
    # The same by bytes, in a third of the time: this runs for each row of a corpus.
    found = text.encode().translate(_LOWER)
    while b"  " in found:
        found = found.replace(b"  ", b" ")
    return found.strip()


_LOWER = bytes(32 if chr(i).isspace() and i < 128 else ord(chr(i).lower()) if i < 128 else i for i in range(256))
"ASCII in lower case, its white space as spaces."


def _hash(parts: Iterable[str]) -> int:
    # Not Python's own hash, which differs between processes. White space around the borders of parts is none.
    return int.from_bytes(blake2b(_normal(" \0 ".join(parts)), digest_size=8).digest(), "little")


def drawn(row: np.ndarray, seed: int) -> np.ndarray:
    """Return a random number for each row, uint64, no two alike. Those of the first rows stay if rows are added."""
    # SplitMix64, one to one: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    z = row.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def held_out(head: np.ndarray, fraction: float) -> np.ndarray:
    """Return which documents are held out for validation, bool [D]: by their head alone, so that copies, trees and
    documents of one row fall on one side, and stay there if rows are added."""
    return head < np.uint64(min(int(fraction * 2**64), 2**64 - 1))
