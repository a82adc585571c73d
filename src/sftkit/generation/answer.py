"""How answers are asked for, and what a model answered. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are chosen."""

    temperature: float = 0.0
    "0: the likeliest token (greedy)"
    top_p: float = 1.0
    "of sampling: the likeliest tokens that have this probability together"
    max_new_tokens: int = 256


@dataclass(frozen=True)
class Answer:
    """What the model said to one `Question`."""

    text: str
    stop: str
    "why it ended: end_of_turn | stop_text | length"
    tokens: int
    ids: tuple[int, ...] = ()
    "those tokens"
