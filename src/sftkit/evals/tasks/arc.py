"""ARC-Easy, ARC-Challenge and OpenBookQA: school science, the answer as a continuation of the question."""

from __future__ import annotations

from functools import partial

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


def _arc(name: str, subset: str) -> choices.Design:
    return choices.Design(
        name=name,
        examples=DatasetSplit((f"{name}_test",), ARC, subset, "test"),
        shots=DatasetSplit((f"{name}_train",), ARC, subset, "train"),
        item=arc_item,
        metric="acc_norm",
        judge=choices.judge_acc_norm,
    )


arc_easy = partial(choices.build, _arc("arc_easy", "ARC-Easy"))
arc_challenge = partial(choices.build, _arc("arc_challenge", "ARC-Challenge"))
openbookqa = partial(
    choices.build,
    choices.Design(
        name="openbookqa",
        examples=DatasetSplit(("openbookqa_test", "openbookqa_validation"), OPENBOOKQA, "main", "test"),
        shots=DatasetSplit(("openbookqa_train",), OPENBOOKQA, "main", "train"),
        item=openbookqa_item,
        metric="acc_norm",
        judge=choices.judge_acc_norm,
    ),
)
