"""Sampling settings and the answer of a model. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Settings by which the tokens of an answer are sampled."""

    temperature: float = 0.0
    "0: the likeliest token (greedy)"
    top_p: float = 1.0
    "of sampling: the likeliest tokens that have this probability together"
    max_new_tokens: int = 256


@dataclass(frozen=True)
class Answer:
    """The answer of the model to one `Question`."""

    text: str
    stop: str
    "why it ended: end_of_turn | stop_text | length"
    tokens: int
    ids: tuple[int, ...] = ()
    "those tokens"
