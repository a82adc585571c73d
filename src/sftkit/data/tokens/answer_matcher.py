"""Find answers of a rendered conversation by the text that stands around similar answers.

To render every prefix of a conversation takes time that grows with the square of its turns. Templates look at roles,
fields and the place of the last question, so answers that are alike in those are rendered alike: a few of them are
rendered, and the others are found by the text before and after these, if it is there.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Hashable
from typing import NamedTuple

from sftkit.data.reading.conversation import Message, special_pattern
from sftkit.data.tokens.reasoning import reasoning_of
from sftkit.data.tokens.rendering import Span
from sftkit.data.tokens.spans import common_prefix
from sftkit.data.tokens.template import Template

NOWHERE = (-1, -1)
"The place of an answer that does not stand in a text after the prompt that a server would send for it."
LONGEST_TURN = 50
"The most messages of a turn that are compared; answers further into a turn are rendered."
RENDERED_FIRST = 2
"Answers of each situation that are rendered before others are found by them."


class _Outcome(NamedTuple):
    """How an answer stands in a longer conversation."""

    header: str | None
    "The text from the beginning of its header up to the answer; None: the answer is NOWHERE."
    end: str
    "The text after the answer that belongs to it: the end of its turn."


class AnswerMatcher:
    """What is known of the answers of one rendered conversation."""

    def __init__(self, template: Template, messages: list[Message], text: str, last: int) -> None:
        """Find the headers of the answers in a rendered conversation.

        Args:
            text: the rendered messages up to `last`, an answer.
        """
        self.template, self.messages, self.text, self.last = template, messages, text, last
        self._known: dict[Hashable, list[_Outcome | None]] = {}
        self._users = [i for i in range(last) if messages[i]["role"] == "user"]
        self._places = self._headers()

    def find(self, k: int) -> Span | None:
        """Return where answer k stands, its end-of-turn token included; None: too little is known, render it."""
        # What was rendered must have come out alike each time: a single answer may be rendered so by chance.
        alike = self._known.get(self._situation(k), [])
        outcome = alike[0] if len(alike) >= RENDERED_FIRST and len(set(alike)) == 1 else None
        if outcome is None:
            return None
        if outcome.header is None:
            return NOWHERE
        if k not in self._places or not self.text.startswith(outcome.header, self._places[k]):
            return None
        start = self._places[k] + len(outcome.header)
        end = self._next_special(start)
        return (start, end + len(outcome.end)) if self.text.startswith(outcome.end, end) else None

    def add(self, k: int, start: int, core_end: int, span: Span) -> None:
        """Record where answer k was found by rendering; `start` to `core_end` is its own text,
        without the token that ends it."""
        # An answer that was found otherwise than by header and end is kept as unlike any other.
        outcome = None  # what stands around such answers is too little to find others by
        if span == NOWHERE:
            outcome = _Outcome(None, "")
        elif k in self._places and self._next_special(start) == core_end:
            outcome = _Outcome(self.text[self._places[k] : start], self.text[core_end : span[1]])
        self._known.setdefault(self._situation(k), []).append(outcome)

    def _situation(self, k: int) -> Hashable:
        """Return what a template may look at: the turn up to the answer, the role of the next message, and whether
        another question follows."""
        before = bisect_left(self._users, k)
        turn = self._users[before - 1] if before else 0
        alike = tuple(self._features(i) for i in range(max(turn, k - LONGEST_TURN), k + 1))
        return alike, k - turn > LONGEST_TURN and k, self.messages[k + 1]["role"], before == len(self._users)

    def _features(self, i: int) -> Hashable:
        """Return what a template may look at in one message."""
        message = self.messages[i]
        content = message["content"]
        return (
            (len(message.get("tool_calls", ())), *sorted(message), message["role"]),
            (bool(content), content[:1].isspace(), content[-1:].isspace(), "<think>" in content, "</think>" in content),
            (content.startswith("<tool_response>"), bool(reasoning_of(message))),
        )

    def _headers(self) -> dict[int, int]:
        """Return answer -> where its header begins; empty if a message could contain a header, or if there
        are not as many as answers."""
        headers = [h for h in (*self.template.headers, self.template.short_header) if h.strip()]
        header = common_prefix(headers or [self.template.between])
        if not any(token and token in header for token in self.template.special_tokens):
            return {}
        starts = [match.start() for match in re.finditer(re.escape(header), self.text)]
        answers = [k for k in range(self.last + 1) if self.messages[k]["role"] == "assistant"]
        return dict(zip(answers, starts, strict=True)) if len(starts) == len(answers) else {}

    def _next_special(self, start: int) -> int:
        """Return where the next special token begins; the end of the text if there is none."""
        match = special_pattern(self.template.special_tokens).search(self.text, start)
        return match.start() if match else len(self.text)
