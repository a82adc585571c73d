"""MMLU: 57 subjects, the answer is the letter of one of four options; shots are the subject's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count

from sftkit.errors import ConfigError, DataError
from sftkit.evals.task import Choices, Task
from sftkit.evals.tasks import choices
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit, Read

HUB = "cais/mmlu"
TEST = DatasetSplit(("mmlu_test",), HUB, "all", "test")
DEV = DatasetSplit(("mmlu_dev",), HUB, "all", "dev")
CHOICE_LETTERS = ("A", "B", "C", "D")


def build(read: Read, shots: int | None, format: str, max_examples: int | None) -> choices.ChoiceTask:
    """Return the task. `max_examples` are spread evenly over the subjects, the first ones of each;
    acc is over all questions."""
    shots = shots or 0
    rows = read(TEST)
    pool = read(DEV) if shots else []
    shots_of = _shots_by_subject(rows, pool, shots)
    chosen = spread_over_subjects(rows, max_examples)
    examples = tuple(_example(row, shots_of[row.text("subject")], format) for row in chosen)
    settings = choices.settings_of(rows, format, max_examples)
    if max_examples is not None:
        settings["selection"] = f"{max_examples}, spread evenly over the subjects"
    settings |= choices.shot_settings(shots, pool, "the subject's first ones")
    return Task("mmlu", examples, choices.judge_acc, "acc", choices.chance(examples), settings)


def spread_over_subjects(rows: Sequence[CheckedRow], max_examples: int | None) -> list[CheckedRow]:
    """Return the first rows of every subject, as evenly many as possible, in the order of the file."""
    if max_examples is None or max_examples >= len(rows):
        return list(rows)
    seen: dict[str, Iterator[int]] = defaultdict(count)
    # (how many of the subject came before, place in the file): sorted, it goes round the subjects.
    order = sorted((next(seen[row.text("subject")]), position) for position, row in enumerate(rows))
    return [rows[position] for position in sorted(position for _, position in order[:max_examples])]


def _shots_by_subject(
    rows: Sequence[CheckedRow], pool: Sequence[CheckedRow], shots: int
) -> dict[str, list[CheckedRow]]:
    """Return subject -> its first `shots` rows of the pool."""
    subjects = dict.fromkeys(row.text("subject") for row in rows)
    of_subject = {name: [row for row in pool if row.text("subject") == name][:shots] for name in subjects}
    for subject, found in sorted(of_subject.items()):
        if len(found) < shots:
            raise ConfigError(f"eval.shots: {shots}: {pool[0].origin} has {len(found)} rows of {subject}")
    return of_subject


def _example(row: CheckedRow, shots: Sequence[CheckedRow], format: str) -> Choices:
    subject = row.text("subject")
    topic = subject.replace("_", " ")
    preamble = f"The following are multiple choice questions (with answers) about {topic}.\n\n"
    style, item = choices.PromptStyle("mmlu", format, subject, preamble), _chat_item if format == "chat" else _item
    return choices.example(style, row, item(row), [item(shot) for shot in shots])


def _item(row: CheckedRow) -> choices.Item:
    """Return an item whose options stand in the prompt, and a letter continues it."""
    options = _chat_item(row)
    lines = "\n".join(f"{letter}. {option}" for letter, option in zip(CHOICE_LETTERS, options.choices, strict=True))
    return choices.Item(f"{options.question}\n{lines}\nAnswer:", options.question, CHOICE_LETTERS, options.gold)


def _chat_item(row: CheckedRow) -> choices.Item:
    """Return an item whose choices are the options."""
    question, options = row.text("question").strip(), row.texts("choices")
    if len(options) != len(CHOICE_LETTERS):
        raise DataError(f'{row.where}: column "choices": {len(options)} of them instead of four')
    return choices.Item("", question, tuple(options), (row.number("answer", len(CHOICE_LETTERS)),))
