"""PIQA (which of two ways works) and BoolQ (yes or no about a passage)."""

from __future__ import annotations

from sftkit.evals.tasks import choices
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit

PIQA, SUPER_GLUE = "baber/piqa", "aps/super_glue"


def piqa_item(row: CheckedRow) -> choices.Item:
    """Return a row of PIQA as an item."""
    goal = row.text("goal")
    options = row.text("sol1"), row.text("sol2")
    return choices.Item(f"Question: {goal}\nAnswer:", goal, options, (row.number("label", 2),))


def boolq_item(row: CheckedRow) -> choices.Item:
    """Return a row of BoolQ as an item. The answer is column `label` (0, 1) as in SuperGLUE, or `answer` (false,
    true) as in BoolQ itself."""
    question = f"{row.text('passage')}\nQuestion: {row.text('question')}?"
    column = "answer" if "answer" in row else "label"
    return choices.Item(f"{question}\nAnswer:", question, ("no", "yes"), (row.number(column, 2),))


piqa = choices.Design(
    name="piqa",
    examples=DatasetSplit(("piqa_validation",), PIQA, None, "validation"),
    shots=DatasetSplit(("piqa_train",), PIQA, None, "train"),
    item=piqa_item,
    metric="acc_norm",
    judge=choices.judge_acc_norm,
    one_more=True,
).build
boolq = choices.Design(
    name="boolq",
    examples=DatasetSplit(("boolq_validation",), SUPER_GLUE, "boolq", "validation"),
    shots=DatasetSplit(("boolq_train",), SUPER_GLUE, "boolq", "train"),
    item=boolq_item,
    metric="acc",
    judge=choices.judge_acc,
    one_more=True,
).build
