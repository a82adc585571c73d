"""What the tasks with choices have in common: few-shot prompts, letters in a chat, accuracy.

Prompts of format "completion" are those of lm-evaluation-harness, character by character, drawn shots included.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sftkit.errors import ConfigError, DataError
from sftkit.evals.task import Choices, ExampleScores, Likelihoods, Message, Task
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit, Read

SHOTS_SEED = 1234
"lm-evaluation-harness's fewshot_random_seed."

DRAWN = {"completion": "random, seed 1234, anew for each example", "chat": "the first ones"}
"How shots are drawn; in a chat the same for all examples, so that the turns before them are computed once."

ASK_FOR_LETTER = "Answer with the letter of the right option only."

ChoiceTask = Task[Choices, Likelihoods]


@dataclass(frozen=True)
class Item:
    """One row in the terms that all tasks with choices share."""

    prompt: str
    "format completion: the text that one of the choices continues, after a space"
    question: str
    "format chat: what stands above the lettered options"
    choices: tuple[str, ...]
    gold: tuple[int, ...]
    "indices of the right ones"


@dataclass(frozen=True)
class Shots:
    """The worked examples before each question."""

    num_shots: int
    pool: Sequence[CheckedRow]
    "where they come from"
    drawn: str
    "how, in words"


NO_SHOTS = Shots(0, (), "")


class Opening(NamedTuple):
    """What prompts begin alike with."""

    group: str
    "its name; empty: each prompt begins in its own way"
    preamble: str = ""
    "format completion: text before the shots"


@dataclass(frozen=True)
class Design:
    """What makes one task with choices different from the others."""

    name: str
    examples: DatasetSplit
    shots: DatasetSplit | None
    "where shots come from; None: the task takes none"
    item: Callable[[CheckedRow], Item]
    metric: str
    "format completion: the metric that stands for the task"
    judge: Callable[[Sequence[Choices], Sequence[Likelihoods]], list[ExampleScores]]
    "format completion; in a chat it is the letter's accuracy"
    letter_metric: str = "acc"
    letter_judge: Callable[[Sequence[Choices], Sequence[Likelihoods]], list[ExampleScores]] | None = None
    "format chat; None: accuracy of the letter"
    one_more: bool = False
    "lm-evaluation-harness draws one shot more than it needs, in case the example is among them"
    group: str = ""
    "format completion without shots: what begins all prompts alike"

    def build(self, read: Read, shots: int | None, format: str, max_examples: int | None) -> ChoiceTask:
        """Return the task. `shots` None: no shots, as lm-evaluation-harness does unless told otherwise."""
        rows = read(self.examples)
        shots = shots or 0
        in_chat = format == "chat"
        pool = shot_rows(self.name, self.shots, read, shots, spare=int(self.one_more))
        chosen = rows[:max_examples]
        drawn = drawn_shots(pool, chosen, shots, format, one_more=self.one_more)
        ask, group = (lettered, self.name if shots else "") if in_chat else (continued, "" if shots else self.group)
        examples = [
            ask(self.name, row, self.item(row), [self.item(shot) for shot in of_row], Opening(group))
            for row, of_row in zip(chosen, drawn, strict=True)
        ]
        return Task(
            name=self.name,
            examples=tuple(examples),
            judge=(self.letter_judge or judge_acc) if in_chat else self.judge,
            metric=self.letter_metric if in_chat else self.metric,
            chance=chance(examples),
            settings=settings_of(rows, format, max_examples, Shots(shots, pool, DRAWN[format])),
        )


def settings_of(
    rows: Sequence[CheckedRow], format: str, max_examples: int | None, shots: Shots = NO_SHOTS
) -> dict[str, Any]:
    """Return what it takes to ask the same questions again."""
    selection = "all rows" if max_examples is None else f"the first {max_examples}"
    settings = {"format": format, "shots": shots.num_shots, "data": rows[0].origin, "rows": len(rows)}
    from_pool = {"shots_from": shots.pool[0].origin, "shots_drawn": shots.drawn} if shots.num_shots else {}
    return {**settings, "selection": selection, **from_pool}


# ---- shots -----------------------------------------------------------------------------------------------------------


def shot_rows(name: str, split: DatasetSplit | None, read: Read, shots: int, spare: int = 0) -> list[CheckedRow]:
    """Return the rows that shots are taken from, none if there are no shots; a ConfigError if they are too few."""
    if not shots:
        return []
    if split is None:
        raise ConfigError(f"eval.shots: {shots}: {name} has a fixed prompt and takes no shots: leave it null or set 0")
    pool = read(split)
    if len(pool) < shots + spare:
        raise ConfigError(
            f"eval.shots: {shots}: {pool[0].origin} has rows for {len(pool) - spare} shots of {name} only"
        )
    return pool


def drawn_shots(
    pool: Sequence[CheckedRow], rows: Sequence[CheckedRow], shots: int, format: str, *, one_more: bool = False
) -> Iterator[Sequence[CheckedRow]]:
    """Yield the shots of each row: in a chat the first ones, else drawn by one random generator, exactly as
    lm-evaluation-harness draws them."""
    rng = random.Random(SHOTS_SEED)
    for row in rows:
        if not shots or format == "chat":
            yield pool[:shots]
        elif not one_more:
            yield rng.sample(pool, shots)
        else:
            drawn = [shot for shot in rng.sample(pool, shots + 1) if shot != row][:shots]
            yield drawn if len(drawn) == shots else rng.sample([shot for shot in pool if shot != row], shots)


# ---- what the model is asked -----------------------------------------------------------------------------------------


def continued(name: str, row: CheckedRow, item: Item, shots: Sequence[Item], opening: Opening) -> Choices:
    """Return an example of format completion: which choice continues the prompt best. Shots stand before it with
    their first right choice."""
    shown = "".join(f"{shot.prompt} {shot.choices[shot.gold[0]]}\n\n" for shot in shots)
    return Choices(
        id=f"{name}/{row.index}",
        prompt=f"{opening.preamble}{shown}{item.prompt}",
        continuations=tuple(f" {choice}" for choice in item.choices),
        gold=item.gold,
        lengths=tuple(map(len, item.choices)),
        group=opening.group,
        source=dict(row),
    )


def lettered(name: str, row: CheckedRow, item: Item, shots: Sequence[Item], opening: Opening) -> Choices:
    """Return an example of format chat: which letter the assistant answers with. Shots are earlier turns."""
    if len(item.choices) > len(string.ascii_uppercase):
        raise DataError(f"{row.where}: {len(item.choices)} choices, and 26 letters for them")
    messages: list[Message] = []
    for shot in shots:
        messages.append({"role": "user", "content": options(shot)})
        messages.append({"role": "assistant", "content": string.ascii_uppercase[shot.gold[0]]})
    return Choices(
        id=f"{name}/{row.index}",
        prompt=(*messages, {"role": "user", "content": options(item)}),
        continuations=tuple(string.ascii_uppercase[: len(item.choices)]),
        gold=item.gold,
        lengths=(1,) * len(item.choices),
        group=opening.group,
        source=dict(row),
    )


def options(item: Item) -> str:
    """Format the question, a line for each option, and what to answer with."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(string.ascii_uppercase, item.choices, strict=False)]
    return "\n".join([item.question, "", *lines, "", ASK_FOR_LETTER])


# ---- how answers are judged ------------------------------------------------------------------------------------------


def judge_acc(examples: Sequence[Choices], outputs: Sequence[Likelihoods]) -> list[ExampleScores]:
    """Mark acc: 1 if a right choice is the most likely one, else 0."""
    return [
        {"acc": float(_best(likelihoods.sums) in example.gold)}
        for example, likelihoods in zip(examples, outputs, strict=True)
    ]


def judge_acc_norm(examples: Sequence[Choices], outputs: Sequence[Likelihoods]) -> list[ExampleScores]:
    """Mark acc, and acc_norm: the same with log-likelihoods divided by the characters of their choices."""
    scores = judge_acc(examples, outputs)
    for score, example, likelihoods in zip(scores, examples, outputs, strict=True):
        each = zip(likelihoods.sums, example.lengths, strict=True)
        best = _best([nats / length if length else -math.inf for nats, length in each])
        score["acc_norm"] = float(best in example.gold)
    return scores


def chance(examples: Sequence[Choices]) -> float:
    """Return the accuracy of guessing, on average."""
    return sum(len(example.gold) / len(example.continuations) for example in examples) / len(examples)


def _best(scores: Sequence[float]) -> int:
    """Return the index of the highest score, the first one of equals."""
    return max(range(len(scores)), key=scores.__getitem__)
