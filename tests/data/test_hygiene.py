"""Which documents are used: hashes of rows, copies, shares for validation, evaluation questions."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sftkit.data.hygiene import (
    Copies,
    Questions,
    content_hash,
    drawn,
    head_hash,
    held_out,
    near_copies,
    sample_bound,
    within_limits,
)
from sftkit.data.reading import rows
from sftkit.data.types import Row
from sftkit.errors import ConfigError

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
    def test_limits_count_each_document_for_its_first_reason_and_name_the_first(self) -> None:
        lengths, turns = np.array([5, 50, 8, 3, 60]), np.array([2, 2, 9, 9, 4])
        found = within_limits({"min_tokens": 8, "max_tokens": 50, "max_turns": 8}, lengths, turns)
        assert found.used.tolist() == [False, True, False, False, False]
        assert found.left_out == {
            "where.min_tokens: 8": (2, 0),
            "where.max_tokens: 50": (1, 4),
            "where.max_turns: 8": (1, 2),
        }
        assert within_limits({"min_turns": 2}, lengths, np.array([0, 1, 2, 3, 4])).left_out == {
            "where.min_turns: 2": (2, 0)
        }

    def test_a_sample_has_its_number_of_rows_whatever_the_shards(self) -> None:
        row = np.repeat(np.arange(300), 3)
        bound = sample_bound([row[:90], row[90:600], row[600:]], 100, seed=7)
        chosen = drawn(row, 7) <= np.uint64(bound)
        assert chosen.sum() == 3 * 100 == 3 * len(np.unique(row[chosen]))
        assert bound == sample_bound([row], 100, seed=7) != sample_bound([row], 100, seed=8)
        assert (drawn(row, 7) <= np.uint64(sample_bound([row], 999, seed=7))).all()

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
        return [
            match.text for match in Questions(["What else is asked in this task of eight words?", question]).find(texts)
        ]

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
        assert questions.totals[1] == 0 < questions.totals[0]
        assert [match[:2] for match in questions.find(["", f"{GERMAN} {PROBLEM}"])] == [(1, 0), (1, 2)]
        assert [match.share for match in questions.find([PROBLEM])] == [1.0]

    def test_without_texts_nothing_is_found(self) -> None:
        assert not list(Questions([]).find([PROBLEM]))
        assert not list(Questions([PROBLEM]).find([]))


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
