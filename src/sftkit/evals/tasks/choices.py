"""What the tasks with choices have in common: few-shot prompts, letters in a chat, accuracy.

Prompts of format "completion" are those of lm-evaluation-harness, character by character, drawn shots included.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from sftkit.errors import ConfigError, DataError
from sftkit.evals.task import Choices, ExampleScores, Judge, Likelihoods, Message, Task, each
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


class PromptStyle(NamedTuple):
    """How the prompts of a task are written."""

    task: str
    format: str
    group: str
    "name of what they begin alike with; empty: each begins in its own way"
    preamble: str = ""
    "format completion: text before the shots"


@dataclass(frozen=True)
class Design:
    """What makes one task with choices different from the others."""

    name: str
    examples: DatasetSplit
    item: Callable[[CheckedRow], Item]
    metric: str = "acc"
    "the metric that stands for the task"
    judge: Judge[Choices, Likelihoods] | None = None
    "who marks the metric; None: judge_acc or judge_acc_norm, and in a chat always the letter's accuracy"
    takes_shots: bool = True
    "from split train of the same data set, in a file NAME_train"
    one_more: bool = False
    "lm-evaluation-harness draws one shot more than it needs, in case the example is among them"
    group: str = ""
    "format completion without shots: what begins all prompts alike"

    def build(self, read: Read, shots: int | None, format: str, max_examples: int | None) -> ChoiceTask:
        """Return the task. `shots` None: no shots, as lm-evaluation-harness does unless told otherwise."""
        rows = read(self.examples)
        shots = shots or 0
        in_chat = format == "chat"
        # Shots come from split train and never from the examples that are asked.
        train = replace(self.examples, files=(f"{self.name}_train",), split="train") if self.takes_shots else None
        pool = shot_rows(self.name, train, read, shots, spare=int(self.one_more))
        chosen = rows[:max_examples]
        drawn = drawn_shots(pool, chosen, shots, format, one_more=self.one_more)
        # Prompts that begin alike share the cache of that beginning: drawn shots differ, so they do not.
        alike = (self.name if shots else "") if in_chat else ("" if shots else self.group)
        style = PromptStyle(self.name, format, alike)
        examples = tuple(
            example(style, row, self.item(row), [self.item(shot) for shot in of_row])
            for row, of_row in zip(chosen, drawn, strict=True)
        )
        metric = "acc" if in_chat and self.judge is None else self.metric
        judge = self.judge or (judge_acc_norm if metric == "acc_norm" else judge_acc)
        settings = settings_of(rows, format, max_examples) | shot_settings(shots, pool, DRAWN[format])
        return Task(self.name, examples, judge, metric, chance(examples), settings)


def settings_of(rows: Sequence[CheckedRow], format: str, max_examples: int | None) -> dict[str, Any]:
    """Return what it takes to ask the same questions again, without shots."""
    selection = "all rows" if max_examples is None else f"the first {max_examples}"
    return {"format": format, "shots": 0, "data": rows[0].origin, "rows": len(rows), "selection": selection}


# ---- shots -----------------------------------------------------------------------------------------------------------


def shot_settings(shots: int, pool: Sequence[CheckedRow], drawn: str) -> dict[str, Any]:
    """Return how many shots there are, where they come from, and how they are drawn; empty without shots."""
    return {"shots": shots, "shots_from": pool[0].origin, "shots_drawn": drawn} if shots else {}


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
    # One generator for the whole task: the shots of an example depend on how many were drawn before it.
    rng = random.Random(SHOTS_SEED)
    for row in rows:
        if not shots or format == "chat":
            yield pool[:shots]
        elif not one_more:
            yield rng.sample(pool, shots)
        else:
            # Both draws as lm-evaluation-harness makes them, so that the generator stays in the same state.
            drawn = [shot for shot in rng.sample(pool, shots + 1) if shot != row][:shots]
            yield drawn if len(drawn) == shots else rng.sample([shot for shot in pool if shot != row], shots)


# ---- what the model is asked -----------------------------------------------------------------------------------------


def example(style: PromptStyle, row: CheckedRow, item: Item, shots: Sequence[Item]) -> Choices:
    """Return an example. Format completion: which choice continues the prompt best; shots stand before it with their
    first right choice. Format chat: which letter the assistant answers with; shots are earlier turns."""
    prompt: str | tuple[Message, ...]
    if style.format == "chat":
        if len(item.choices) > len(string.ascii_uppercase):
            raise DataError(f"{row.where}: {len(item.choices)} choices, and 26 letters for them")
        turns = [(options(shot), string.ascii_uppercase[shot.gold[0]]) for shot in shots]
        prompt = conversation(turns, options(item))
        space, texts = "", tuple(string.ascii_uppercase[: len(item.choices)])
    else:
        shown = "".join(f"{shot.prompt} {shot.choices[shot.gold[0]]}\n\n" for shot in shots)
        prompt = f"{style.preamble}{shown}{item.prompt}"
        space, texts = " ", item.choices
    return Choices(
        id=f"{style.task}/{row.index}",
        prompt=prompt,
        continuations=tuple(space + text for text in texts),
        gold=item.gold,
        lengths=tuple(map(len, texts)),
        group=style.group,
        source=dict(row),
    )


def conversation(turns: Iterable[tuple[str, str]], question: str) -> tuple[Message, ...]:
    """Return a user's question after turns of (question, answer)."""
    earlier = (({"role": "user", "content": ask}, {"role": "assistant", "content": answer}) for ask, answer in turns)
    return (*chain.from_iterable(earlier), {"role": "user", "content": question})


def options(item: Item) -> str:
    """Format the question, a line for each option, and what to answer with."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(string.ascii_uppercase, item.choices, strict=False)]
    return "\n".join([item.question, "", *lines, "", ASK_FOR_LETTER])


# ---- how answers are judged ------------------------------------------------------------------------------------------


@each
def judge_acc(example: Choices, likelihoods: Likelihoods) -> ExampleScores:
    """Mark acc: 1 if a right choice is the most likely one, else 0."""
    return {"acc": _is_right(example, likelihoods.sums)}


@each
def judge_acc_norm(example: Choices, likelihoods: Likelihoods) -> ExampleScores:
    """Mark acc, and acc_norm: the same with log-likelihoods divided by the characters of their choices."""
    sums = zip(likelihoods.sums, example.lengths, strict=True)
    normed = [nats / length if length else -math.inf for nats, length in sums]
    return {"acc": _is_right(example, likelihoods.sums), "acc_norm": _is_right(example, normed)}


def chance(examples: Sequence[Choices]) -> float:
    """Return the accuracy of guessing, on average."""
    return sum(len(example.gold) / len(example.continuations) for example in examples) / len(examples)


def _is_right(example: Choices, scores: Sequence[float]) -> float:
    """Return 1.0 if the highest score, the first one of equals, is that of a right choice, else 0.0."""
    return float(max(range(len(scores)), key=scores.__getitem__) in example.gold)
