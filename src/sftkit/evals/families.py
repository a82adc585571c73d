"""Exact match on the held-out built-in tasks, per family. Pure: whoever asks the model brings the answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sftkit.data import builtin


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for the assistant, and the one right answer."""

    family: str
    messages: list[dict[str, Any]]
    answer: str


def heldout(max_per_family: int | None = None) -> list[Prompt]:
    """The first `max_per_family` held-out prompts of each family (null: all), always the same ones."""
    prompts: dict[str, list[Prompt]] = {family: [] for family in builtin.FAMILIES}
    for task in builtin.tasks("heldout"):
        prompts[task.family].append(Prompt(task.family, task.messages[:-1], task.answer))
    return [prompt for of_family in prompts.values() for prompt in of_family[:max_per_family]]


def score(prompts: Sequence[Prompt], answers: Sequence[str]) -> dict[str, float]:
    """Share of answers equal to the right one, white space around them aside: one per family, and their "mean"."""
    is_right: dict[str, list[bool]] = defaultdict(list)
    for prompt, answer in zip(prompts, answers, strict=True):
        is_right[prompt.family].append(answer.strip() == prompt.answer)
    scores = {family: sum(marks) / len(marks) for family, marks in is_right.items()}
    return scores | {"mean": sum(scores.values()) / len(scores)} if scores else {}
