"""ARC-Easy, ARC-Challenge and OpenBookQA: school science, the answer as a continuation of the question."""

from __future__ import annotations

from sftkit.errors import DataError
from sftkit.evals.tasks import choices
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit

EASY = DatasetSplit(("arc_easy_test",), "allenai/ai2_arc", "ARC-Easy", "test")
CHALLENGE = DatasetSplit(("arc_challenge_test",), "allenai/ai2_arc", "ARC-Challenge", "test")
OPENBOOKQA = DatasetSplit(("openbookqa_test", "openbookqa_validation"), "allenai/openbookqa", "main", "test")


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


arc_easy = choices.Design("arc_easy", EASY, arc_item, "acc_norm").build
arc_challenge = choices.Design("arc_challenge", CHALLENGE, arc_item, "acc_norm").build
openbookqa = choices.Design("openbookqa", OPENBOOKQA, openbookqa_item, "acc_norm").build
