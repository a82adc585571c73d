"""What a model answered. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What the model said to one `Question`."""

    text: str
    stop: str
    "why it ended: end_of_turn | stop_text | length"
    tokens: int
