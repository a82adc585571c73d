"""Which documents are used: hashes of rows, copies, shares for validation, evaluation questions."""

from dataclasses import replace
from typing import Any

import pytest

from sftkit.data.hygiene import content_hash, head_hash
from sftkit.data.reading import rows
from sftkit.data.types import Row

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
