"""ARC-Easy, ARC-Challenge and OpenBookQA: school science, the answer as a continuation of the question."""

from __future__ import annotations

from collections.abc import Callable

from sftkit.errors import DataError
from sftkit.evals.tasks import choices
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit

ARC, OPENBOOKQA = "allenai/ai2_arc", "allenai/openbookqa"


def arc_item(row: CheckedRow) -> choices.Item:
    """Return a row of ARC as an item."""
    question = row.text("question")
    return _item(row, f"Question: {question}\nAnswer:", question)


def openbookqa_item(row: CheckedRow) -> choices.Item:
    """Return a row of OpenBookQA as an item."""
    return _item(row, row.text("question_stem"), row.text("question_stem"))


def _item(row: CheckedRow, prompt: str, question: str) -> choices.Item:
    """Return an item of a row whose `choices` is {"text": [...], "label": [...]} and whose `answerKey` is one of the
    labels (A to E, or 1 to 5)."""
    options = row["choices"]
    if not isinstance(options, dict) or not {"text", "label"} <= set(options):
        raise DataError(f'{row.where}: column "choices": {options!r} is not {{"text": [...], "label": [...]}}')
    texts, labels = options["text"], options["label"]
    if (answer := row.text("answerKey").strip()) not in labels or len(labels) != len(texts):
        raise DataError(f'{row.where}: column "answerKey": {answer!r} is not one of the labels {labels}')
    return choices.Item(prompt, question, tuple(texts), (labels.index(answer),))


def _design(
    name: str, item: Callable[[CheckedRow], choices.Item], hub: str, subset: str, *other_files: str
) -> choices.Design:
    """Return the design of one of the three. `other_files`: its examples' file may have these names too."""
    return choices.Design(
        name=name,
        examples=DatasetSplit((f"{name}_test", *other_files), hub, subset, "test"),
        shots=DatasetSplit((f"{name}_train",), hub, subset, "train"),
        item=item,
        metric="acc_norm",
        judge=choices.judge_acc_norm,
    )


arc_easy = _design("arc_easy", arc_item, ARC, "ARC-Easy").build
arc_challenge = _design("arc_challenge", arc_item, ARC, "ARC-Challenge").build
openbookqa = _design("openbookqa", openbookqa_item, OPENBOOKQA, "main", "openbookqa_validation").build
