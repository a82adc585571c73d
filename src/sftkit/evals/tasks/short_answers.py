"""PIQA (which of two ways works) and BoolQ (yes or no about a passage)."""

from __future__ import annotations

from sftkit.evals.tasks import choices
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit

PIQA = DatasetSplit(("piqa_validation",), "baber/piqa", None, "validation")
BOOLQ = DatasetSplit(("boolq_validation",), "aps/super_glue", "boolq", "validation")


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


piqa = choices.Design("piqa", PIQA, piqa_item, "acc_norm", one_more=True).build
boolq = choices.Design("boolq", BOOLQ, boolq_item, one_more=True).build
