"""Texts that are encoded by their words have the ids that the tokenizer gives them in one call, or are left to it."""

from __future__ import annotations

import random
import unicodedata
from itertools import product
from typing import Any

import numpy as np
import pytest
from conftest import SENTENCES
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from sftkit.data.tokens import batch, chat, words
from sftkit.data.tokens import text as texts
from sftkit.data.tokens.encode import BYTE_OF
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.tokens.words import Words, word_encoder
from sftkit.data.types import Row

ISOLATED: dict[str, Any] = {"behavior": "isolated", "invert": False}
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_4O = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), **ISOLATED)


def byte_level(**more: Any) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **more)


STEPS = {
    "gpt2": [byte_level()],
    "smollm2": [pre_tokenizers.Digits(individual_digits=True), byte_level()],
    "whole numbers": [pre_tokenizers.Digits(individual_digits=False), byte_level()],
    "llama3": [split(LLAMA3), byte_level(use_regex=False)],
    "gpt4o": [split(GPT_4O), byte_level(use_regex=False)],
    "deepseek": [
        *(split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+")),
        *(split(DEEPSEEK), byte_level(use_regex=False)),
    ],
}


@pytest.fixture
def of_steps(small_bpe: str) -> Any:
    def make(*steps: Any, normalizer: Any = None) -> Tokenizer:
        backend = Tokenizer.from_str(small_bpe)
        backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps)) if len(steps) > 1 else steps[0]
        backend.normalizer = normalizer
        return backend

    return make


def alone(backend: Tokenizer, text: str, split: bool = False) -> list[int]:
    backend.encode_special_tokens = split
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def known_texts() -> list[str]:
    """Every character that is known, in several places."""
    old, new = unicodedata.ucd_3_2_0.category, unicodedata.category
    known = [c for c in map(chr, range(0x10000)) if old(c) == new(c) and new(c) not in ("Cn", "Cs")]
    return ["".join(f"a{c}b {c}1{c} {c}{c}'{c}\n" for c in known[i : i + 50]) for i in range(0, len(known), 50)]


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@pytest.mark.parametrize("kind", STEPS)
def test_each_character_that_is_known_is_split_as_the_tokenizer_splits_it(
    of_steps: Any, kind: str, normalizer: Any
) -> None:
    backend = of_steps(*STEPS[kind], normalizer=normalizer)
    encoder = word_encoder(backend)
    assert encoder is not None
    found = [encoder.encode(text, split=False) for text in known_texts()]
    left = sum(ids is None for ids in found)
    # Each text has 50 characters: some of these are left to the tokenizer, and NFC changes others.
    assert left < (len(found) / 2 if normalizer else 4)
    for ids, text in zip(found, known_texts(), strict=True):
        assert ids is None or ids.tolist() == alone(backend, text)


PIECES = ["a", "ab", "don't", "I'LL", "''s", "1", "23", " ", "  ", "\n", "\r\n", "\t ", "!", "...", "/", "é", "e\u0301"]
PIECES += [
    "世界",
    "ж",
    "½",
    "\xa0",
    "\x85",
    "\u2028",
    "_",
    "$^",
    "<|im_end|>",
    "<|im_",
    "end|>",
    "<think>",
    "</think>",
    "<",
]


@pytest.mark.parametrize("kind", STEPS)
def test_random_texts_with_added_tokens_have_the_ids_of_the_tokenizer(of_steps: Any, kind: str) -> None:
    backend = of_steps(*STEPS[kind])
    encoder = word_encoder(backend)
    assert encoder is not None
    chance = random.Random(0)
    for n in range(600):
        text = "".join(chance.choices(PIECES, k=chance.randint(0, 12)))
        as_text = bool(n % 2)  # special tokens in it are ordinary characters
        ids = encoder.encode(text, split=as_text)
        if as_text and "<|im_end|>" in text:
            assert ids is None
            continue
        assert ids is not None
        assert ids.dtype == np.int32
        assert ids.tolist() == alone(backend, text, as_text), repr(text)


@pytest.mark.parametrize("text", ["a\x1cb", "ſ", "\u212a", "\U0001fae0", "\u32ff", "e\u0301"])
def test_a_text_that_tokenizers_may_split_otherwise_is_left_to_the_tokenizer(of_steps: Any, text: str) -> None:
    encoder = word_encoder(of_steps(split(LLAMA3), byte_level(use_regex=False), normalizer=normalizers.NFC()))
    assert encoder is not None
    assert encoder.encode(f"so {text} it is", split=False) is None
    assert encoder.encode("so it is", split=False) is not None


@pytest.mark.parametrize(
    "steps",
    [
        [pre_tokenizers.ByteLevel(add_prefix_space=True)],
        [pre_tokenizers.Metaspace()],
        [pre_tokenizers.Whitespace(), byte_level()],
        [split(r"[a-z&&[^b]]+"), byte_level(use_regex=False)],
        [pre_tokenizers.Split(Regex("a"), behavior="removed", invert=False), byte_level()],
        [pre_tokenizers.Split(Regex("a"), behavior="isolated", invert=True), byte_level()],
        [pre_tokenizers.Split("a", behavior="isolated", invert=False), byte_level()],
    ],
)
def test_a_tokenizer_of_another_kind_encodes_its_texts_itself(of_steps: Any, steps: list[Any]) -> None:
    assert word_encoder(of_steps(*steps)) is None


def test_added_tokens_that_take_spaces_and_other_normalizers_are_left_to_the_tokenizer(of_steps: Any) -> None:
    assert word_encoder(of_steps(byte_level(), normalizer=normalizers.NFKC())) is None
    for token in (AddedToken("<x>", lstrip=True), AddedToken("<x>", rstrip=True), AddedToken("<x>", single_word=True)):
        backend = of_steps(byte_level())
        backend.add_tokens([token])
        assert word_encoder(backend) is None
    backend = of_steps(byte_level())
    backend.model.dropout = 0.5
    assert word_encoder(backend) is None


PATTERNS = [
    *(
        r"\w+",
        r"a$",
        r"^a",
        r"(a)b",
        r"[a&&b]",
        r"[a[bc]]",
        r"[]a]",
        r"\p{Han}",
        r"\p{N}{1,3}+|\p{L}+|\s",
        r"a{3}?",
        r"a{,2}",
    ),
    *(
        r"\p{L}*|\d+",
        r"(?m:a.b)",
        r"(?i:\p{Lu}+)",
        r"(?i:st)",
        r"(?i:ff)",
        r"(?i)a|b",
        r"(?<=a)b",
        r"a\b",
        r"(?=a)",
        r"[",
    ),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_that_python_reads_otherwise_leaves_texts_to_the_tokenizer(pattern: str) -> None:
    assert words._translated(pattern) is None


def test_the_probe_has_no_character_that_is_left_to_the_tokenizer(of_steps: Any) -> None:
    encoder = word_encoder(of_steps(byte_level()))
    assert encoder is not None
    assert encoder.encode(words.PROBE, split=False) is not None


def test_special_tokens_that_are_characters_are_left_to_the_tokenizer(of_steps: Any) -> None:
    """They are found before other added tokens, and may overlap one."""
    backend = of_steps(byte_level())
    backend.add_tokens([AddedToken("<a>", normalized=False)])
    backend.add_special_tokens([AddedToken("<a>b", normalized=False)])
    encoder = word_encoder(backend)
    assert encoder is not None
    assert encoder.encode("so <a>b", split=True) is None
    for text, as_text in (("so <a>b", False), ("so <a>c", True), ("so <a>c", False)):
        ids = encoder.encode(text, split=as_text)
        assert ids is not None
        assert ids.tolist() == alone(backend, text, as_text)


def test_added_tokens_that_a_tokenizer_matches_otherwise_leave_all_texts_to_it(of_steps: Any) -> None:
    composed = of_steps(byte_level(), normalizer=normalizers.NFC())
    composed.add_tokens([AddedToken("e\u0301", normalized=True)])
    assert word_encoder(composed) is None
    again = of_steps(byte_level())
    again.add_special_tokens([AddedToken("<a>", normalized=False)])
    again.add_tokens([AddedToken("<a>", special=False, normalized=False)])  # stays special until it is loaded again
    assert word_encoder(again) is None
    assert word_encoder(Tokenizer.from_str(again.to_str())) is not None


def test_a_token_that_is_added_later_splits_texts(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    tokenize = RowTokenizer(texts.tokenize, tokenizer, 2**10, special_tokens="split")
    rows = [Row(where=f"a:{i}", text=f"{' '.join(SENTENCES)} {i}") for i in range(5)]
    before = tokenize.many(rows)
    assert "is" in tokenizer.get_vocab()
    tokenizer.add_tokens(["is"])  # no id more than before
    found = tokenize.many(rows)
    assert not any(map(batch.same, before, found))
    assert all(batch.same(tokenize(row), one) for row, one in zip(rows, found, strict=True))


def test_a_long_text_is_encoded_by_its_words_or_tokenized_by_itself(
    make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "LONGEST_TEXT", 100)
    long = " ".join(SENTENCES)
    given = {"first": "compared", "long": long, "unknown": f"{long} \U0001fae0"}
    rows = [Row(where=where, text=said) for where, said in given.items()]
    tokenize = RowTokenizer(texts.tokenize, make_tokenizer(), 2**10, special_tokens="split")
    alone = [tokenize(row) for row in rows]
    by_itself = batch.RowBatches.by_itself
    asked: list[str] = []
    monkeypatch.setattr(
        batch.RowBatches, "by_itself", lambda self, row: asked.append(row.where) or by_itself(self, row)
    )
    found = tokenize.many(rows)
    assert asked == ["first", "unknown"]
    assert all(map(batch.same, alone, found))

    ask = {"role": "user", "content": "Say it."}
    answers = {where: [ask, {"role": "assistant", "content": said}] for where, said in given.items()}
    rows = [Row(where, messages=messages) for where, messages in answers.items() for _ in range(20)]
    tokenize = RowTokenizer(chat.tokenize, make_tokenizer(), 2**10)
    alone = [tokenize(row) for row in rows]
    tokenize.many(rows)  # learns how answers are rendered
    asked.clear()
    assert all(map(batch.same, alone, tokenize.many(rows)))
    assert {where: asked.count(where) for where in given} == {"first": 0, "long": 0, "unknown": 20}


def test_words_that_are_kept_are_limited(of_steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MOST_WORDS", 3)
    backend = of_steps(byte_level())
    encoder = word_encoder(backend)
    assert isinstance(encoder, Words)
    for text in ("She sells sea shells", "by the sea shore"):
        ids = encoder.encode(text, split=False)
        assert ids is not None
        assert ids.tolist() == alone(backend, text)
        assert len(encoder) <= 3
    long = "s" * (words.LONGEST_WORD + 1)
    encoder.encode(long, split=False)
    assert long not in encoder


def splits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each text is added that is split from now on."""
    found: list[str] = []
    split = words.Parts.__missing__
    monkeypatch.setattr(words.Parts, "__missing__", lambda self, text: found.append(text) or split(self, text))
    return found


def test_a_long_piece_that_recurs_is_split_once_and_pieces_that_are_kept_are_limited(
    of_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "MOST_PIECES", 2)
    monkeypatch.setattr(words, "LONG_PIECES", range(10, 100))
    monkeypatch.setattr(words, "LONGEST_WORD", 2)
    backend = of_steps(byte_level())
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    encoder = word_encoder(backend)
    assert isinstance(encoder, Words)
    split_of = splits(monkeypatch)
    tools, long = "She sells sea shells", "by the sea shore " * 6
    for answer in ("one", "two", "one", "the sea shore", "the sea shells"):
        text = f"{tools}<end>{answer}<end>{long}"
        ids = encoder.encode(text, split=False)
        assert ids is not None
        assert ids.tolist() == alone(backend, text)
    # Longest pieces are never kept; the third that is kept takes the place of the others.
    assert [split_of.count(piece) for piece in (tools, "one", long)] == [1, 2, 5]
    encoder.encode(tools, split=False)
    assert split_of.count(tools) == 2


def test_a_short_part_between_two_splits_is_split_once_and_parts_that_are_kept_are_limited(
    of_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = of_steps(*STEPS["deepseek"])
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    encoder = word_encoder(backend)
    assert isinstance(encoder, Words)
    split_of = splits(monkeypatch)

    def encode_all(*numbers: str) -> None:
        for number in numbers:
            text = f"tool\n<end>\n<end>{number} shells and {number}0 more"
            ids = encoder.encode(text, split=False)
            assert ids is not None
            assert ids.tolist() == alone(backend, text)

    encode_all("1", "23", "123", "4567", "1")
    assert split_of.count(" shells and ") == 2  # after the numbers: by Chinese and Japanese words, then by others
    assert split_of.count("\n") == 3
    monkeypatch.setattr(words, "MOST_PARTS", 3)
    encode_all("89", "5")
    assert len(encoder._parts) <= 3


@pytest.mark.parametrize("kind", ["gpt2", "smollm2", "whole numbers"])
def test_numbers_contractions_and_white_space_are_split_into_the_words_of_the_tokenizer(
    of_steps: Any, kind: str
) -> None:
    """Ids alone do not show it: a small vocabulary has them for words that are cut otherwise."""
    backend = of_steps(*STEPS[kind])
    encoder = word_encoder(backend)
    assert encoder is not None
    short = ("".join(one) for length in range(1, 6) for one in product(" \n1½a!'s", repeat=length))
    for text in ("they've we're I'll he'd I'm'x 12'll", *short):
        expected = [
            bytes(map(BYTE_OF.__getitem__, word)).decode() for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)
        ]
        assert encoder._parts._findall(text) == expected  # type: ignore[attr-defined]


def test_each_ascii_character_is_known_but_the_separators(of_steps: Any) -> None:
    encoder = word_encoder(of_steps(byte_level()))
    assert encoder is not None
    left = [c for c in map(chr, range(128)) if encoder.encode(f"a{c}b", split=False) is None]
    assert left == ["\x1c", "\x1d", "\x1e", "\x1f"]
