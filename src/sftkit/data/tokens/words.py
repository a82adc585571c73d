"""Encode texts with byte-level BPE tokenizers by their words, whose ids are kept: several times as fast as a tokenizer.

A tokenizer splits a text at its added tokens, then into words by its patterns; its model then works inside a word. The
splits are made here, by the tokenizer's own patterns, and the ids of a word that is new come from its model.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sftkit.data.reading.conversation import special_pattern
from sftkit.data.tokens.encode import BYTE_OF

MOST_WORDS, MOST_PARTS = 2**17, 2**14
"Words that are kept, some 100 bytes each, and parts of texts between two splits, some 300 bytes each."
LONGEST_WORD = 64
"Characters of a word or part that is kept."
LONG_PIECES, MOST_PIECES = range(512, 2**14), 2**9
"""Lengths of the texts between added tokens whose ids are cached, in characters, and the largest number of these texts:
tools and system prompts recur."""
GPT2 = r" \p{L}++|\p{L}++|'(?:[stmd]|re|ve|ll)| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"
"The pattern of ByteLevel (byte_level.rs of tokenizers), with the most frequent words first and without backtracking."
PROBE = "It's I'LL 'twas 1234 a12 12  b\n\n c\r\n\t!? _x() ../é½٣世界の한글 ไทย عربى \u00a0«…»€ a\u0301\n "
"Text that a tokenizer must split as here."
_SEPARATORS = "\x1c\x1d\x1e\x1f"
_CHARACTERS = {byte: character for character, byte in BYTE_OF.items()}


def keep(kept: dict[str, Any], key: str, value: object, most: int) -> None:
    """Store a value; clear the dict first if it holds `most` values."""
    if len(kept) >= most:
        kept.clear()
    kept[key] = value


class Parts(dict[str, bytes]):
    """Text -> its ids, int32, which are those of its parts; kept if it is short: names and line breaks recur."""

    def __init__(self, pattern: str, parts: dict[str, bytes]) -> None:
        """Split by a pattern: parts are what it matches and what is between."""
        self._findall = re.compile(pattern).findall
        self._split = re.compile(f"({pattern})").split
        self._parts = parts

    def __missing__(self, text: str) -> bytes:
        found = self._findall(text)
        if sum(map(len, found)) != len(text):  # between matches there are parts too
            found = list(filter(None, self._split(text)))
        ids = b"".join(map(self._parts.__getitem__, found))
        if len(text) <= LONGEST_WORD:
            keep(self, text, ids, MOST_PARTS)
        return ids


class Words(dict[str, bytes]):
    """Word -> its ids, int32, filled when a word is met."""

    def __init__(self, backend: Tokenizer, patterns: Sequence[str], *, nfc: bool) -> None:
        """Keep how texts are split.

        Args:
            patterns: the words are what the first matches and what is between, then the same inside each for the next.
            nfc: whether the tokenizer normalizes.
        """
        self._model = backend.model
        self._nfc = nfc
        self._unknown = re.compile(f"[^{_ranges('')}]")
        added = backend.get_added_tokens_decoder()
        self._added = {token.content: np.int32(i).tobytes() for i, token in added.items()}
        self.added = frozenset(self._added)
        self._special = {token.content for token in added.values() if token.special}
        self._split = re.compile(f"({special_pattern(tuple(self._added)).pattern})").split
        self._pieces: dict[str, bytes] = {}
        self._parts: dict[str, bytes] = self
        for pattern in reversed(patterns):
            self._parts = Parts(pattern, self._parts)

    def __missing__(self, word: str) -> bytes:
        characters = word.encode().decode("latin-1").translate(_CHARACTERS)
        ids = array("i", [token.id for token in self._model.tokenize(characters)]).tobytes()
        if len(word) <= LONGEST_WORD:
            keep(self, word, ids, MOST_WORDS)
        return ids

    def encode(self, text: str, given: Sequence[str] | None = None, *, split: bool) -> np.ndarray | None:
        """Return the ids of a text, int32 [n], not to be written to, without those that a tokenizer puts around it.

        None: the text is to be normalized, or tokenizers may split it in several ways. `split`: special tokens in it
        are ordinary characters. `given`: the text, split at its added tokens, if that is known.
        """
        is_plain = text.isascii() and not any(map(text.__contains__, _SEPARATORS))
        if not is_plain and (self._unknown.search(text) or (self._nfc and not unicodedata.is_normalized("NFC", text))):
            return None
        pieces: list[Any] = self._split(text) if given is None else [*given]
        if split and not self._special.isdisjoint(pieces[1::2]):
            return None
        pieces[1::2] = map(self._added.__getitem__, pieces[1::2])
        pieces[::2] = map(self._ids, pieces[::2])
        return np.frombuffer(b"".join(pieces), np.int32)

    def _ids(self, piece: str) -> bytes:
        if len(piece) not in LONG_PIECES:
            return self._parts[piece]
        if (ids := self._pieces.get(piece)) is None:
            ids = self._parts[piece]
            keep(self._pieces, piece, ids, MOST_PIECES)
        return ids


def word_encoder(backend: Tokenizer) -> Words | None:
    """Return an encoder for a tokenizer; None: its splits are not known here."""
    parts = json.loads(backend.to_str())
    model, normalizer, steps = (parts[name] or {} for name in ("model", "normalizer", "pre_tokenizer"))
    *before, last = steps.get("pretokenizers") or [steps]
    patterns = [*map(_pattern, before), *([_translated(GPT2)] if last.get("use_regex") else [])]
    if last.get("use_regex") and [step.get("type") for step in before] == ["Digits"]:
        # Numbers are split off first: no space goes with them, and white space before one ends its part of the text.
        numbers = r"\p{N}" if before[0]["individual_digits"] else r"\p{N}+"
        patterns = [_translated(GPT2.replace(r" ?\p{N}++", numbers).replace(r"(?!\S)", r"(?![^\s\p{N}])"))]
    added = backend.get_added_tokens_decoder().values()
    known = (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and last.get("type") == "ByteLevel"
        and not last["add_prefix_space"]
        and normalizer.get("type", "NFC") == "NFC"
        and not any(one.lstrip or one.rstrip or one.single_word for one in added)
        and len({one.normalized for one in added}) < 2
        and not (normalizer and any(not unicodedata.is_normalized("NFC", one.content) for one in added))
    )
    if not known or None in patterns:
        return None
    words = Words(backend, patterns, nfc=bool(normalizer))  # type: ignore[arg-type]
    # What else may be otherwise shows here: how an added token is matched, or how a pattern is read.
    probes = [PROBE, unicodedata.normalize("NFC", PROBE), *(f"a{one.content} {one.content}b" for one in added)]
    split_before = backend.encode_special_tokens
    agrees = True
    for split in (False, True):
        backend.encode_special_tokens = split
        alone = backend.encode_batch_fast(probes, add_special_tokens=False)
        found = (words.encode(probe, split=split) for probe in probes)
        agrees &= all(ids is None or ids.tolist() == one.ids for ids, one in zip(found, alone, strict=True))
    backend.encode_special_tokens = split_before
    return words if agrees else None


def _pattern(step: dict[str, Any]) -> str | None:
    """Return the pattern whose matches a step of a pre-tokenizer isolates; None: it does something else."""
    if step["type"] == "Digits":
        return _translated(r"\p{N}" + ("" if step["individual_digits"] else "+") + r"|[^\p{N}]+")
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"] or "Regex" not in step["pattern"]:
        return None
    return _translated(step["pattern"]["Regex"])


# First contractions: nothing but their own letters, in two cases, is a variant of them.
_PARTS = re.compile(
    r"\(\?i:(?:'?(?:\[[sdmt]+\]|s|t|re|ve|m|ll|d)(?:\||(?=\))))+\)"
    r"|\\p\{\w+\}|\\.|\[\^?\]?|&&|\(\?[:!]|\{[\d,]*\}[+?]?|.",
    re.DOTALL,
)


def _translated(pattern: str) -> str | None:
    """Return a pattern of Oniguruma, as tokenizers have it, in the syntax of re; None: they may differ in it."""
    parts = []
    inside = False  # square brackets
    for part in _PARTS.findall(pattern):
        if part.startswith(r"\p{"):
            if not (ranges := _ranges(part[3:-1])):
                return None
            parts.append(ranges if inside else f"[{ranges}]")
            continue
        escapes_otherwise = part[0] == "\\" and part[1].isalnum() and part[1] not in "sSdDrnt"
        repeats_otherwise = part[0] == "{" and len(part) > 1 and (part[1] == "," or part[-1] in "+?")
        nests = part[0] == "[" and (inside or part[-1] == "]")
        outside_only = part in ("(", "^", "$") and not inside
        if escapes_otherwise or repeats_otherwise or nests or outside_only or part == "&&":
            return None
        inside = part in ("[", "[^") or (inside and part != "]")
        parts.append(part)
    try:
        translated = "".join(parts)
        return None if re.compile(f"({translated})").fullmatch("") else translated
    except re.error:
        return None


@cache
def _ranges(category: str) -> str:
    """Return the characters that are in a category in Unicode 3.2 and in that of Python, as between square brackets.

    Left out are separators that only Python counts as spaces, and what case folding makes an ASCII letter.
    """
    old, new = unicodedata.ucd_3_2_0.category, unicodedata.category
    ranges: list[list[int]] = []
    for i, character in enumerate(map(chr, range(0x10000))):
        of = new(character)
        if not (old(character) == of not in ("Cn", "Cs") and of.startswith(category)):
            continue
        if character in f"{_SEPARATORS}\u017f\u212a":
            continue
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in ranges)
