"""The parts of a task: examples, prompts, and how answers are judged. Data, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sftkit.data.reading.conversation import Message
from sftkit.generation.repl import Answer

ExampleScores = dict[str, float]
"Metric -> the score of one example."


@dataclass(frozen=True)
class Choices:
    """An example whose answer is the continuation that the model finds most likely."""

    id: str
    prompt: str | Sequence[Message]
    "text that is continued as it is; or messages, put through the chat template up to where the assistant begins"
    continuations: tuple[str, ...]
    "with the space that belongs before them, if any"
    gold: tuple[int, ...]
    "indices of the right ones; most tasks have one"
    lengths: tuple[int, ...]
    "characters of each choice that acc_norm divides its log-likelihood by"
    group: str = ""
    "examples of a group begin with the same few-shot text"
    source: dict[str, Any] = field(default_factory=dict)
    "what is kept of the row in the per-example output"


@dataclass(frozen=True)
class Question:
    """Something to answer in free text, greedily."""

    id: str
    prompt: str | Sequence[Message]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    "texts that end an answer and are cut off; the end of turn and the end of sequence always do"
    target: Any = None
    "what the judge needs: a number, tests, rules"
    group: str = ""
    source: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Likelihoods:
    """The likelihoods of the continuations of one `Choices`."""

    sums: tuple[float, ...]
    "log-likelihood of each continuation in nats, summed over its tokens"
    greedy: tuple[bool, ...]
    "whether each token of it is the most likely one"
    tokens: tuple[int, ...]
    "its length in tokens"


ExampleT = TypeVar("ExampleT", Choices, Question)
AnswerT = TypeVar("AnswerT", Likelihoods, Answer)
Judge = Callable[[Sequence[ExampleT], Sequence[AnswerT]], list[ExampleScores]]
"Examples, answers -> scores of every example, in order."


@dataclass(frozen=True)
class Task(Generic[ExampleT, AnswerT]):
    """A named set of examples with its judge."""

    name: str
    examples: tuple[ExampleT, ...]
    judge: Judge[ExampleT, AnswerT]
    "called once for all examples, on one rank"
    metric: str
    "the main metric of the task: acc, acc_norm, exact_match, pass_at_1, ..."
    chance: float
    "what guessing gives in that metric"
    settings: dict[str, Any]
    "shots, format, files and split: what someone needs to repeat it"


def each(judge: Callable[[ExampleT, AnswerT], ExampleScores]) -> Judge[ExampleT, AnswerT]:
    """Make the judge of a task of a function that judges one answer."""
    return lambda examples, answers: [judge(*pair) for pair in zip(examples, answers, strict=True)]
