"""Which messages of a conversation are learned: what the data says of each, and what the recipe asks for."""

from __future__ import annotations

from typing import Literal

from sftkit.data.reading.conversation import Message
from sftkit.data.types import Row
from sftkit.errors import DataError

Targets = Literal["assistant", "last_turn", "all"]

CONTEXT, MARKED, EARLIER = "not_learned_prompt", "not_learned_marked", "not_learned_earlier_turn"
"Why an answer is context only: it stands in `prompt`; the data marks it; it is in an earlier turn (targets=last_turn)."


def not_learned(row: Row, messages: list[Message], targets: Targets) -> dict[int, str]:
    """Return the answers that are context only, by their index in messages, and why.

    A message's own `weight` (OpenAI's fine-tuning format: 0 or 1) and `train` (true or false) hold for every setting of
    targets: text that is marked as bad is learned by none.

    Raises:
        DataError: a weight or train of another value, or on a message that is not an answer.
    """
    reasons: dict[int, str] = {}
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    last_user = max((i for i, message in enumerate(messages[:last]) if message["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        marked = _marked(message, f"{row.where}: messages[{i}]")
        if message["role"] != "assistant":
            continue
        # What the data says of an answer counts before what the recipe asks for.
        if marked is False:
            reasons[i] = MARKED
        elif i < row.context_messages and targets != "all":
            reasons[i] = CONTEXT
        elif i < last_user and targets == "last_turn":
            reasons[i] = EARLIER
    return reasons


def without_marks(messages: list[Message]) -> list[Message]:
    """Return the messages as a template should see them."""
    return [{key: value for key, value in m.items() if key not in ("weight", "train")} for m in messages]


def _marked(message: Message, where: str) -> bool | None:
    """Return whether the message says that it is learned; None if it says nothing."""
    if "weight" not in message and "train" not in message:
        return None
    weight, train = message.get("weight", 1), message.get("train", True)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(
            f"{where}: weight {weight!r} is not 0 or 1: an answer is learned or it is not", reason="bad weight"
        )
    if not isinstance(train, bool):
        raise DataError(f"{where}: train {train!r} is not true or false", reason="bad train mark")
    if message["role"] != "assistant" and (message.get("weight") or message.get("train")):
        raise DataError(
            f"{where}: a message of role {message['role']} is marked as learned: only answers are",
            reason="bad train mark",
        )
    return bool(weight) and train
