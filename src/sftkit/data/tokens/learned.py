"""Which messages of a conversation are learned: what the data says of each, and what the recipe asks for."""

from __future__ import annotations

from typing import Literal

from sftkit.data.reading.columns import MARKS, NUMBER_MARKS, TRUTH_MARKS
from sftkit.data.reading.conversation import Message
from sftkit.data.types import Row
from sftkit.errors import DataError

Targets = Literal["assistant", "last_turn", "all"]

CONTEXT, MARKED, EARLIER = "not_learned_prompt", "not_learned_marked", "not_learned_earlier_turn"
"Why an answer is context only: it stands in `prompt`; the data marks it; it is in an earlier turn (targets=last_turn)."


def not_learned(row: Row, messages: list[Message], targets: Targets) -> dict[int, str]:
    """Return the answers that are context only, by their index in messages, and why.

    A message's own marks hold for every setting of targets, `weight` (OpenAI's fine-tuning format: 0 or 1) and `train`
    (true or false) and their kin: text that is marked as bad is learned by none. So does a mark of the whole row.

    Raises:
        DataError: a mark of another value, or a message that is not an answer and is marked as learned; where every
            token is learned, one that is marked as not learned, or a role that the row masks.
    """
    if targets == "all" and row.masked_role:
        raise DataError(
            f"{row.where}: column mask: the role {row.masked_role} is not to be learned, but here every token is: "
            "data.targets=assistant learns answers only. Set it, or remove the column",
            reason="marks of parts",
        )
    reasons: dict[int, str] = {}
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    last_user = max((i for i, message in enumerate(messages[:last]) if message["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        marked = _marked(message, f"{row.where}: messages[{i}]")
        if message["role"] != "assistant":
            if marked is False and targets == "all":
                raise DataError(
                    f"{row.where}: messages[{i}]: the role {message['role']} is marked as not learned, but here every "
                    "token of the questions is: data.targets=assistant learns answers only. Set it, or remove the mark",
                    reason="bad train mark",
                )
            continue
        # What the data says of an answer counts before what the recipe asks for.
        if marked is False or not row.learned:
            reasons[i] = MARKED
        elif i < row.context_messages and targets != "all":
            reasons[i] = CONTEXT
        elif i < last_user and targets == "last_turn":
            reasons[i] = EARLIER
    return reasons


def without_marks(messages: list[Message]) -> list[Message]:
    """Return the messages as a template should see them."""
    return [{key: value for key, value in m.items() if key not in MARKS} for m in messages]


def _marked(message: Message, where: str) -> bool | None:
    """Return whether the message says that it is learned, in all of its marks; None if it says nothing."""
    marks = {name: message[name] for name in MARKS if name in message}
    for name, value in marks.items():
        if name in TRUTH_MARKS and not isinstance(value, bool):
            raise DataError(f"{where}: {name} {value!r} is not true or false", reason="bad train mark")
        if value not in (0, 1) or (name in NUMBER_MARKS and isinstance(value, bool)):
            raise DataError(
                f"{where}: {name} {value!r} is not 0 or 1: an answer is learned or it is not", reason="bad weight"
            )
    if message["role"] != "assistant" and any(marks.values()):
        raise DataError(
            f"{where}: a message of role {message['role']} is marked as learned: only answers are",
            reason="bad train mark",
        )
    return all(marks.values()) if marks else None
