"""The parts of a task (examples, prompts, how answers are judged) and its results: values with confidence intervals,
and every example, as a table and as files. No torch.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from sftkit.data.reading.conversation import Message
from sftkit.generation.repl import Answer
from sftkit.rundir import files, names

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


Z = 1.959964
"Standard errors on each side of a 95 % interval."


@dataclass(frozen=True)
class Result:
    """A task's value and what it takes to judge and repeat it."""

    task: str
    metric: str
    value: float
    stderr: float | None
    "standard error; None: one example, or not known"
    low: float | None
    "of the 95 % interval"
    high: float | None
    chance: float | None
    "what guessing gives; None: not known"
    examples: int
    settings: dict[str, Any]
    metrics: dict[str, float]
    "every metric of the task; <metric>/<family>: of the examples of one family"
    records: list[dict[str, Any]] = field(default_factory=list)
    "one for each example; empty for a group of lm_eval's tasks"


def evaluated(
    task: Task[Any, Any],
    outputs: Sequence[Likelihoods | Answer],
    scores: Sequence[ExampleScores],
    settings: dict[str, Any],
) -> Result:
    """Return the result of a task from the scores of its examples; `settings` are added to the task's own."""
    flat: dict[str, list[float]] = defaultdict(list)
    for example, score in zip(task.examples, scores, strict=True):
        for name, value in score.items():
            flat[name].append(value)
            if family := example.source.get("family"):
                flat[f"{name}/{family}"].append(value)
    return Result(
        task.name,
        task.metric,
        *interval(flat[task.metric]),
        chance=task.chance,
        examples=len(task.examples),
        settings={**task.settings, **settings},
        metrics={name: sum(values) / len(values) for name, values in flat.items()},
        records=[example_record(*row) for row in zip(task.examples, outputs, scores, strict=True)],
    )


def interval(scores: Sequence[float]) -> tuple[float, float | None, float, float]:
    """Return (mean, standard error, low, high) with the 95 % interval: Wilson's for scores of 0 and 1, which stays
    within [0, 1] and does not vanish if all scores agree; else that of the normal distribution, within [0, 1] if all
    scores are."""
    n = len(scores)
    mean = sum(scores) / n
    stderr = math.sqrt(sum((score - mean) ** 2 for score in scores) / (n - 1) / n) if n > 1 else None
    if set(scores) <= {0.0, 1.0}:
        centre = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
        half = Z / (1 + Z**2 / n) * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
        return mean, stderr, max(centre - half, 0.0), min(centre + half, 1.0)
    # Scores between 0 and 1 are no coin tosses, so Wilson's formula does not hold for them.
    half = Z * (stderr or 0.0)
    lowest, highest = (0.0, 1.0) if all(0 <= score <= 1 for score in scores) else (-math.inf, math.inf)
    return mean, stderr, max(mean - half, lowest), min(mean + half, highest)


def centred_mean(results: Sequence[Result]) -> float | None:
    """Return the mean over tasks of (value - chance) / (1 - chance): 0 is guessing, 1 is all right. None: no task with
    a known chance."""
    parts = [(r.value - r.chance) / (1 - r.chance) for r in results if r.chance is not None and r.chance < 1]
    return sum(parts) / len(parts) if parts else None


def values_of(results: Sequence[Result]) -> dict[str, float | None]:
    """Return the values as they are logged: eval/<task>/<metric>, eval/<task>/low and high, eval/<family>/<metric>,
    eval/centred_mean.

    Bounds are those of a task's first result.
    """
    values: dict[str, float | None] = {}
    # A family's values have its name in the place of the task's: eval/<family>/<metric>.
    for result in results:
        for name, value in result.metrics.items():
            metric, _, family = name.partition("/")
            values[f"eval/{family or result.task}/{metric}"] = value
        values.setdefault(f"eval/{result.task}/low", result.low)
        values.setdefault(f"eval/{result.task}/high", result.high)
    return values | ({"eval/centred_mean": centred_mean(results)} if results else {})


def example_record(example: Choices | Question, output: Likelihoods | Answer, scores: ExampleScores) -> dict[str, Any]:
    """Return a line of <task>.jsonl: what was asked, what the model gave, how it was judged."""
    row: dict[str, Any] = {"id": example.id, "prompt": example.prompt}
    if isinstance(example, Choices):
        assert isinstance(output, Likelihoods)
        row |= {"continuations": example.continuations, "gold": example.gold, "loglikelihoods": output.sums}
        row |= {"greedy": output.greedy, "tokens": output.tokens}
    else:
        assert isinstance(output, Answer)
        row |= {"answer": output.text, "stop": output.stop, "tokens": output.tokens, "target": example.target}
    # The scores of a file have the key "marks" for good: readers of earlier files expect it.
    return row | {"marks": scores, "source": example.source}


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(files.clean(value), indent=indent, ensure_ascii=False)


def write_results(folder: Path, results: Sequence[Result]) -> None:
    """Write <task>.jsonl of every task, then results.json; each file is replaced as a whole. Without results nothing is
    written."""
    if not results:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for one in results:
        if one.records:
            files.replace_text(folder / f"{one.task}.jsonl", "".join(f"{_json(row)}\n" for row in one.records))
    shown = [{name: value for name, value in vars(one).items() if name != "records"} for one in results]
    files.replace_text(folder / names.RESULTS, _json(shown, indent=1))


def write_validation(folder: Path, values: Mapping[str, float | None], settings: Mapping[str, Any]) -> None:
    """Write validation.json: val/<source>/loss and bpb, and what it takes to repeat them. Without values nothing is
    written."""
    if values:
        folder.mkdir(parents=True, exist_ok=True)
        files.replace_text(folder / names.VALIDATION, _json({"values": values, "settings": settings}, indent=1))


def results_table(results: Sequence[Result], validation: Mapping[str, float | None]) -> str:
    """Format a line for each value of the validation, for each task and metric, and for the centred mean."""
    lines = [("task", "metric", "value", "95 % interval", "chance", "examples")]
    for name, number in validation.items():
        task, _, metric = name.rpartition("/")
        lines.append((task, metric, "-" if number is None else f"{number:.4f}", "", "", ""))
    for r in results:
        for name, value in sorted(r.metrics.items(), key=lambda item: item[0] != r.metric):
            if name != r.metric:
                lines.append(("", name, f"{value:.3f}", "", "", ""))
                continue
            span = f"{r.low:.3f} to {r.high:.3f}" if r.low is not None and r.high is not None else ""
            chance = f"{r.chance:.3f}" if r.chance is not None else ""
            lines.append((r.task, name, f"{value:.3f}", span, chance, f"{r.examples}"))
    if (mean := centred_mean(results)) is not None:
        lines.append(("centred mean", "", f"{mean:.3f}", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths))
    return "\n".join(f"  {form.format(*line).rstrip()}" for line in lines)
