"""HellaSwag: which of four endings goes on from a description of everyday activity."""

from __future__ import annotations

import re

from sftkit.evals.tasks import choices
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit

HELLASWAG = DatasetSplit(("hellaswag_validation",), "Rowan/hellaswag", None, "validation")


def item(row: CheckedRow) -> choices.Item:
    """Return a row as an item: four endings of a text."""
    context = f"{row.text('ctx_a')} {row.text('ctx_b').capitalize()}"
    start = cleaned(f"{row.text('activity_label')}: {context}")
    endings = tuple(map(cleaned, row.texts("endings")))
    question = f"Which ending continues this text best?\n\n{start}"
    return choices.Item(start, question, endings, (row.number("label", len(endings)),))


def cleaned(text: str) -> str:
    """Remove the brackets that WikiHow's markup left, exactly as lm-evaluation-harness does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


build = choices.Design("hellaswag", HELLASWAG, item, "acc_norm", one_more=True).build
