"""Which documents are used: hashes of rows, copies, shares for validation, evaluation questions."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from sftkit.config.schema import DataConfig, SampleConfig, SourceConfig, source_label
from sftkit.data.batches.loader import load_examples
from sftkit.data.hygiene import (
    Benchmarks,
    Copies,
    Questions,
    choose_documents,
    content_hash,
    head_hash,
    held_out,
    near_copies,
)
from sftkit.data.reading import rows
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.tokens.text import tokenize_any
from sftkit.data.types import DocumentColumns, Examples, Row
from sftkit.errors import ConfigError, DataError
from sftkit.preflight.data import contamination_facts

TEXT = (3757677582388697193, 5814608031911216775)
CHAT = (819618279313987634, 1586464442446408464)
"Content and head of a text and of a conversation."


def chat(*texts: str, **others: Any) -> Row:
    """Return a conversation of user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return Row("here:1", messages=messages, **others)


class TestHashes:
    def test_they_are_the_same_in_every_process_and_version(self) -> None:
        # Stored next to tokens: other values would make a stored corpus useless.
        assert (content_hash(Row("a:1", text="Hello world")), head_hash(Row("a:1", text="Hello world"))) == TEXT
        assert (content_hash(chat("Hi", "Yes")), head_hash(chat("Hi", "Yes"))) == CHAT

    def test_case_white_space_and_composition_make_no_difference(self) -> None:
        first = chat("Où est le café?", "Là-bas.")
        assert content_hash(first) == content_hash(chat(" OÙ  est\nle cafe\u0301? ", "là-bas."))
        assert content_hash(first) != content_hash(chat("Où est le cafe?", "Là-bas."))

    @pytest.mark.parametrize(
        "other",
        [
            chat("Hi", "No"),
            chat("Hi Yes", ""),
            chat("Hi", "Yes", tools=[{"name": "f"}]),
            chat("Hi", "Yes", context_messages=2),
            chat("Hi", "Yes", template_args={"enable_thinking": False}),
            Row(
                "a:1",
                messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "weight": 0}],
            ),
            Row(
                "a:1",
                messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "thinking": "?"}],
            ),
            Row("a:1", messages=[{"role": "system", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]),
        ],
    )
    def test_whatever_decides_tokens_and_mask_makes_another_content(self, other: Row) -> None:
        assert content_hash(other) != content_hash(chat("Hi", "Yes"))

    def test_a_text_in_parts_and_a_mark_that_says_learned_are_the_same_content(self) -> None:
        asked: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
        answered = {"role": "assistant", "content": "Yes", "weight": 1, "tool_calls": None, "mood": "good"}
        assert content_hash(Row("a:1", messages=[asked, answered])) == content_hash(chat("Hi", "Yes"))

    def test_ascii_is_normalised_like_all_other_text(self) -> None:
        odd = "".join(map(chr, range(128))) * 2 + "  A\t\x1f b \n"
        plain = Row("a:1", text=odd)
        assert content_hash(plain) != content_hash(Row("a:1", text=odd + "é"))
        words = Row("a:1", text=" ".join(odd.casefold().split()))
        assert content_hash(plain) == content_hash(words)

    def test_the_place_of_a_row_and_its_metadata_do_not_count(self) -> None:
        one, two = (rows.convert({"text": "A text.", "url": url}, where) for url, where in (("a", "a:1"), ("b", "b:7")))
        assert content_hash(one) == content_hash(two)

    def test_a_head_is_the_first_user_message_or_the_beginning_of_a_text(self) -> None:
        assert head_hash(chat("Hi", "Yes", "Why?", "So.")) == head_hash(chat("hi ", "No"))
        system = [{"role": "system", "content": "Be brief."}]
        assert head_hash(chat("Hi")) == head_hash(replace(chat("Hi"), messages=[*system, *(chat("Hi").messages or [])]))
        assert head_hash(Row("a:1", text="ab " * 400)) == head_hash(Row("a:2", text="ab  " * 400 + "more"))
        assert head_hash(Row("a:1", text="a" * 999)) != head_hash(Row("a:1", text="a" * 999 + "b"))

    def test_captions_of_a_picture_have_one_head(self) -> None:
        one, two = (Row("a:1", image="cat.png", captions=(text,)) for text in ("A cat.", "A grey cat."))
        assert head_hash(one) == head_hash(two)
        assert content_hash(one) != content_hash(two)

    def test_messages_that_are_no_good_still_have_hashes(self) -> None:
        assert content_hash(Row("a:1", messages=[{"content": None}])) != content_hash(Row("a:1", messages=[]))
        assert head_hash(Row("a:1", messages=[])) == head_hash(Row("a:1", messages=[{"role": "user"}]))
        assert content_hash(Row("a:1", text="\ud800")) != content_hash(Row("a:1", text="\ud801"))


class TestColumns:
    def test_the_share_held_out_is_stable_when_rows_are_added_and_has_copies_on_one_side(self) -> None:
        heads = np.array([head_hash(chat(f"Question {i}")) for i in range(4000)], np.uint64)
        side = held_out(heads, 0.05)
        assert 150 < side.sum() < 250
        answers = [chat("question 17 ", "No."), chat("Question 17", "Yes.", "Why?", "So.")]
        assert held_out(np.array([head_hash(one) for one in answers], np.uint64), 0.05).tolist() == [side[17]] * 2
        # A larger share holds out the same documents and more.
        assert not (side & ~held_out(heads, 0.1)).any()

    def test_copies_are_found_across_calls_and_documents_of_one_row_are_none(self) -> None:
        copies = Copies()
        content = np.array([7, 7, 9, 7, 9], np.uint64)
        assert copies.among(content, np.array([0, 0, 1, 2, 3])).tolist() == [False, False, False, True, True]
        assert copies.among(np.array([3, 9], np.uint64), np.array([0, 1])).tolist() == [False, True]
        assert copies.among(np.zeros(0, np.uint64), np.zeros(0, int)).tolist() == []


PROBLEM = """Natalia sold clips to forty eight of her friends in April, and then she sold half as many clips in May.
How many clips did Natalia sell altogether in April and May?"""
GERMAN = """Natalia verkaufte im April Klammern an achtundvierzig ihrer Freundinnen, und im Mai halb so viele. Wie viele
Klammern hat Natalia im April und Mai zusammen verkauft?"""
LONG_PROBLEM = f"{PROBLEM} She packs every clip in a small paper box, and a box costs seven cents in the shop."


class TestQuestions:
    def found(self, question: str, *texts: str) -> list[int]:
        questions = Questions(["What else is asked in this task of eight words?", question])
        return [text for text, _, _ in questions.find(texts)]

    @pytest.mark.parametrize("question", [PROBLEM, LONG_PROBLEM])
    def test_planted_questions_are_found_whole_and_with_one_word_changed_not_translated(self, question: str) -> None:
        around = "user\nSolve this: {}\nassistant\nShe sold 72."
        changed = [
            around.format(question.replace(word, "seven")) for word in ("Natalia sold clips", "half", "altogether")
        ]
        texts = [
            around.format(question),
            "A text about clips.",
            *changed,
            around.format(GERMAN),
            question.upper() + "!",
        ]
        assert self.found(question, *texts) == [0, 2, 3, 4, 6]

    def test_less_than_half_of_a_question_is_no_match(self) -> None:
        words = PROBLEM.split()
        assert self.found(PROBLEM, " ".join(words[:15])) == []
        assert self.found(PROBLEM, " ".join(words[:25])) == [0]

    def test_half_a_question_in_each_of_two_texts_is_no_match(self) -> None:
        words = PROBLEM.split()
        assert self.found(PROBLEM, " ".join(words[:17]), " ".join(words[17:])) == []

    def test_a_text_with_several_questions_matches_each_and_a_match_has_its_share(self) -> None:
        questions = Questions([PROBLEM, "Too short.", GERMAN])
        assert [match[:2] for match in questions.find(["", f"{GERMAN} {PROBLEM}"])] == [(1, 0), (1, 2)]
        assert list(questions.find([PROBLEM])) == [(0, 0, 1.0)]

    def test_without_texts_nothing_is_found(self) -> None:
        assert not list(Questions([]).find([PROBLEM]))
        assert not list(Questions([PROBLEM]).find([]))


class Corpus:
    """Documents as load_sources returns them: a token a word, the files of their rows, and what choose makes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words: dict[str, int] = {}
        self.decoded = 0

    def source(self, name: str, texts: Sequence[str | Row], **settings: Any) -> SourceConfig:
        path = self.folder / f"{name}.jsonl"
        rows = [one if isinstance(one, Row) else Row("", text=one) for one in texts]
        path.write_text("".join(json.dumps({"text": row.text, "messages": row.messages}) + "\n" for row in rows))
        return SourceConfig(path=str(path), **settings)

    def load(self, sources: Sequence[SourceConfig], key: str = "") -> Examples:
        texts, owner, columns = [], [], []
        for i, source in enumerate(sources):
            for _ in range(source.repeat):
                for number, line in enumerate(Path(source.path).read_text().splitlines()):
                    row = Row("", **json.loads(line))
                    text = row.text or " ".join(one["content"] for one in row.messages or ())
                    texts.append([self.words.setdefault(word, len(self.words)) for word in ["", *text.split()]])
                    owner.append(i)
                    columns.append((number, len(row.messages or ()), content_hash(row), head_hash(row)))
        types = (np.int32, np.int32, np.uint64, np.uint64)
        arrays = [np.array(c, t) for c, t in zip(zip(*columns, strict=True), types, strict=True)]
        of_rows = DocumentColumns(lambda: arrays)
        ids = np.array([word for text in texts for word in text])
        names = tuple(map(source_label, sources))
        made = Examples.of(ids, [len(text) - 1 for text in texts])
        numbers = {name: {"rows": 0, "documents": owner.count(i)} for i, name in enumerate(names)}
        return replace(made, source=np.array(owner), source_names=names, counts=numbers, columns=of_rows, key=key)

    def decode(self, documents: list[list[int]]) -> list[str]:
        self.decoded += len(documents)
        words = list(self.words)
        return [" ".join(words[i] for i in ids) for ids in documents]

    def choose(
        self, *train: SourceConfig, benchmarks: Benchmarks | None = None, key: str = "", **settings: Any
    ) -> tuple[Examples, dict[str, Examples]]:
        data = DataConfig(train=train, cache_dir=str(self.folder), **settings)
        validation = {source_label(source): self.load([source], key and f"{key} val") for source in data.val}
        return choose_documents(self.load(train, key), validation, data, self.decode, benchmarks)

    def texts(self, examples: Examples) -> list[str]:
        return self.decode([examples[i].ids[1:].tolist() for i in range(len(examples))])


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


def left(examples: Examples, name: str) -> list[tuple[str, int, str]]:
    """What was left out of a source: reason, documents, number of the first row."""
    found = [one for one in examples.findings[name] if one.kind == "left out"]
    return [(one.reason, one.rows, one.first.rpartition(": ")[2]) for one in found]


class TestChoose:
    def test_limits_count_each_document_for_its_first_reason_and_name_its_row(self, corpus: Corpus) -> None:
        rows = ["one", "one two three", chat("a b", "c"), chat("a", "b", "c", "d"), "one two three four five six"]
        limits = {"min_tokens": 3, "max_tokens": 6, "max_turns": 2}
        training, _ = corpus.choose(corpus.source("a", rows, where=limits, repeat=2))
        assert corpus.texts(training) == ["one two three", "a b c"] * 2
        assert left(training, "a") == [
            ("where.min_tokens: 3", 1, "row 1"),
            ("where.max_tokens: 6", 1, "row 5"),
            ("where.max_turns: 2", 1, "row 4"),
        ]
        assert training.counts["a"] | {"rows": 0} == {"rows": 0, "documents": 4, "left_out": 3, "held_out": 0}
        one, two = (corpus.source(name, rows, where={"min_turns": 4}) for name in "cd")
        training, _ = corpus.choose(one, two)
        assert corpus.texts(training) == ["a b c d"] * 2
        assert left(training, "c") == left(training, "d") == [("where.min_turns: 4", 4, "row 1")]

    def test_a_sample_has_its_number_of_rows_and_another_seed_others(self, corpus: Corpus) -> None:
        rows = ["short", *(f"text number {i}" for i in range(200))]

        def sample(seed: int, count: int = 20, rows: Sequence[str] = rows) -> list[str]:
            drawn = SampleConfig(rows=count, seed=seed)
            source = corpus.source("a", rows, sample=drawn, where={"min_tokens": 3})
            return corpus.texts(corpus.choose(source)[0])

        assert len(sample(0)) == 20
        assert sample(0) == sample(0) != sample(1)
        assert sample(0, 500) == rows[1:]
        # Most of a sample stays if rows are added.
        assert len(set(sample(0)) & set(sample(0, rows=[*rows, *(f"added {i} more" for i in range(20))]))) > 14

    def test_the_held_out_share_is_stable_and_copies_and_trees_are_on_one_side(self, corpus: Corpus) -> None:
        rows = [chat(f"question {i}", f"answer {i}") for i in range(300)]
        rows += [chat(f"question  {i}", "other answer") for i in range(0, 300, 10)] + rows[:50]
        training, validation = corpus.choose(corpus.source("a", rows, repeat=3), val_fraction=0.1)
        held, trained = corpus.texts(validation["a"]), corpus.texts(training)
        assert 15 < len(held) < 80
        assert len(trained) == 3 * (len(rows) - len(held))
        assert not {text.split()[1] for text in held} & {text.split()[1] for text in trained}
        assert training.counts["a"]["held_out"] == len(held) == validation["a"].counts["a"]["documents"]
        assert validation["a"].source_names == ("a",)
        more = [chat(f"added {i}", "answer") for i in range(100)] + rows
        _, again = corpus.choose(corpus.source("b", more), val_fraction=0.1, val=(corpus.source("c", ["held out"]),))
        assert list(again) == ["c", "b"]
        assert [text for text in corpus.texts(again["b"]) if "added" not in text] == held

    def test_the_held_out_share_is_of_what_is_used(self, corpus: Corpus) -> None:
        rows = [f"text number {i}" for i in range(200)]
        training, validation = corpus.choose(corpus.source("a", [*rows, *rows]), val_fraction=0.2, dedup="exact")
        assert sorted([*corpus.texts(training), *corpus.texts(validation["a"])]) == sorted(rows)

    def test_no_document_for_a_side_is_reported(self, corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
        large = corpus.source("large", [f"text {i}" for i in range(100)])
        small = corpus.source("small", ["only one"])
        _, validation = corpus.choose(large, small, val_fraction=0.1)
        assert list(validation) == ["large"]
        assert "source small: data.val_fraction=0.1 holds out none" in caplog.text
        with pytest.raises(DataError, match=r"val_fraction: 0\.1 holds out none of "):
            corpus.choose(small, val_fraction=0.1)
        with pytest.raises(DataError, match=r"small\.jsonl: no document is left; 1 document left out, where"):
            corpus.choose(large, corpus.source("small", ["only one"], where={"min_tokens": 9}))

    def test_exact_copies_go_in_all_sources_and_validation_stays(self, corpus: Corpus) -> None:
        one = corpus.source("one", ["a text", "another text", "A  text", "held out"], repeat=2)
        two = corpus.source("two", ["another text", "short", "new text"])
        val = corpus.source("val", ["held out", "held out"])
        training, validation = corpus.choose(one, two, val=(val,), dedup="exact")
        assert corpus.texts(training) == [*["a text", "another text"] * 2, "short", "new text"]
        assert left(training, "one") == [("copy of an earlier or a validation row", 2, "row 3")]
        assert left(training, "two") == [("copy of an earlier or a validation row", 1, "row 1")]
        assert corpus.texts(validation["val"]) == ["held out", "held out"]

    def test_a_row_that_is_left_out_hides_no_copy(self, corpus: Corpus) -> None:
        one = corpus.source("one", ["text one", "the same text"], where={"max_tokens": 3})
        two = corpus.source("two", ["the same text"])
        assert corpus.texts(corpus.choose(one, two, dedup="exact")[0]) == ["text one", "the same text"]

    def test_near_copies_go_and_are_looked_for_once(self, corpus: Corpus) -> None:
        pytest.importorskip("rensa")
        text = " ".join(f"word{i}" for i in range(200))
        near = text.replace("word100 ", "new ")
        one = corpus.source("one", [text, "another text", near])
        two = corpus.source("two", [text.replace("word7 ", "seven "), "more text"])
        for _ in range(2):
            before = corpus.decoded
            training, _ = corpus.choose(one, two, dedup="near", key="known")
        assert corpus.decoded == before
        assert corpus.texts(training) == [text, "another text", "more text"]
        assert left(training, "two") == [("near copy of an earlier or a validation row", 1, "row 1")]
        val = corpus.source("val", [near])
        assert corpus.texts(corpus.choose(one, val=(val,), dedup="near")[0]) == ["another text"]

    def test_evaluation_questions_are_counted_with_their_place_and_left_out_if_asked(self, corpus: Corpus) -> None:
        answer = "Natalia sold twenty four clips in May and seventy two clips altogether in both months."
        benchmarks = Benchmarks({"gsm8k": ["Too short", PROBLEM], "gsm8k answers": [answer, "72"]}, {"mmlu": "no rows"})
        one = corpus.source("one", ["some text", f"asked: {PROBLEM} said: 72"], repeat=2)
        two = corpus.source("two", [GERMAN, answer.replace("both", "two"), "more text"])
        counted, _ = corpus.choose(one, two, benchmarks=benchmarks)
        facts = contamination_facts(counted)
        assert facts is not None
        assert len(counted) == 7
        assert [(one["where"], one["task"], one["example"]) for one in facts["found"]] == [
            (f"{corpus.folder}/one.jsonl:2", "gsm8k", 1),
            (f"{corpus.folder}/two.jsonl:2", "gsm8k answers", 0),
        ]
        assert facts["said"] == (
            "compared with questions and answers of gsm8k: found in 2 of 5 documents (gsm8k 1, gsm8k answers 1), not left "
            "out; not compared with mmlu: no rows"
        )
        training, _ = corpus.choose(one, two, benchmarks=benchmarks, decontaminate=("gsm8k",))
        assert corpus.texts(training) == ["some text", "some text", GERMAN.replace("\n", " "), "more text"]
        assert left(training, "one") == [("evaluation question or answer (data.decontaminate)", 1, "row 2")]

    def test_a_comparison_is_kept_for_the_same_documents_and_questions(self, corpus: Corpus) -> None:
        source = corpus.source("one", ["some text", PROBLEM])

        def compared(question: str, key: str) -> int:
            before = corpus.decoded
            training, _ = corpus.choose(source, benchmarks=Benchmarks({"gsm8k": [question]}), key=key)
            assert training.contamination is not None
            assert len(training.contamination["found"]) == (question == PROBLEM)
            return corpus.decoded - before

        assert [compared(PROBLEM, "a"), compared(PROBLEM, "a"), compared(PROBLEM, "b"), compared(GERMAN, "a")] == [
            2,
            0,
            2,
            2,
        ]
        assert [compared(PROBLEM, ""), compared(PROBLEM, "")] == [2, 2]


def test_documents_of_all_sources_are_chosen_by_their_own_rows(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast
) -> None:
    # More rows than a chunk of them, whose numbers are counted through; row 150 becomes no document.
    rows: list[Row] = [
        chat(f"What comes after {i}?", f"It is {i + 1}.", *["More?", "No."] * (i % 3)) for i in range(300)
    ]
    rows[150] = chat("no answer")
    train = corpus.source("train", rows, repeat=2)
    val = corpus.source("val", rows, where={"max_turns": 2}, sample=SampleConfig(rows=30))
    tokenize = RowTokenizer(tokenize_any, tokenizer, 256, "truncate")

    def load(**settings: Any) -> tuple[Examples, dict[str, Examples]]:
        data = DataConfig(cache_dir=str(corpus.folder), on_bad_row="skip", **settings)
        return load_examples(data, tokenize)

    for _ in range(2):  # the second time from the cache
        training, _ = load(train=(train,))
        assert training.columns is not None
        learned = [i for i in range(300) if i != 150]
        assert training.columns.row.tolist() == learned * 2
        assert training.columns.turns.tolist() == [2 + 2 * (i % 3) for i in learned] * 2
        # A store keeps the upper half, which decides the side of val_fraction.
        assert (training.columns.head >> np.uint64(32)).tolist() == [head_hash(rows[i]) >> 32 for i in learned] * 2
        assert training.columns.content.tolist() == [content_hash(rows[i]) for i in learned] * 2

    limited = replace(train, where={"min_turns": 4})
    training, validation = load(train=(limited,), val=(val,), dedup="exact", val_fraction=0.1)
    assert len(validation["val"]) == 30
    assert left(validation["val"], "val")[0] == ("where.max_turns: 2", 200, "row 2")
    assert len(training) == 2 * (200 - len(validation["train"]))
    assert "What comes after 1?" in tokenizer.decode(training[0].ids)
    everything = replace(val, where=None, sample=None)
    with pytest.raises(DataError, match="no document is left; 299 documents left out, copy of an earlier"):
        load(train=(train,), val=(everything,), dedup="exact")


def test_near_copies_are_later_texts_that_share_most_shingles() -> None:
    pytest.importorskip("rensa")
    text = " ".join(f"word{i}" for i in range(200))
    others = [
        text,
        " ".join(f"other{i}" for i in range(200)),
        text.replace("word100 ", "new "),
        text[: len(text) // 2],
        "",
    ]
    assert near_copies(others).tolist() == [False, False, True, False, False]


def test_near_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ConfigError, match=r"data\.dedup: near needs the package rensa: .*sftkit\[dedup\]"):
        near_copies(["A text."])
