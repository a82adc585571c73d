"""Files of JSON objects, one a line: what a resumed run drops of them, and how they are read back."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftkit.rundir.files import UNREADABLE, replace_text
from sftkit.rundir.names import FINAL, RESULTS, step_of

MetricsLine = dict[str, Any]
"A line of metrics.jsonl: names of metrics and their values."


def drop_rows_after(path: Path, step: int) -> None:
    """Drop the rows after a step, which a run that resumes from a checkpoint of that step will write again."""
    if not path.exists():
        return
    text = "".join(line + "\n" for line in _lines_of(path) if row_step(line) <= step)
    if text.encode() != path.read_bytes():  # a full disk would have no room for the same again
        replace_text(path, text)


def drop_evals_after(folder: Path, step: int) -> None:
    """Drop the details of evaluations after a step, as their rows are; evals/final too if its model is dropped."""
    for path in folder.glob("*"):
        # The folder `final` has no step in its name; its results name the checkpoint that they are of.
        final = read_results(path / RESULTS) if path.name == Path(FINAL).name else []
        names = [str(result.get("settings", {}).get("model")) for result in final[:1]] or [path.name]
        found = step_of(names[0].rpartition("/")[2])
        if found is not None and found > step:
            shutil.rmtree(path, ignore_errors=True)


def has_row(path: Path, step: int) -> bool:
    """Return whether a file of rows has one of this step."""
    return path.exists() and any(row_step(line) == step for line in _lines_of(path))


def _lines_of(path: Path) -> list[str]:
    """Return the lines of a file of rows.

    A line separator inside a text, which `splitlines` would split at, ends none.
    """
    # A line that was cut inside a character is no JSON either, and is dropped as such.
    return [line for line in path.read_text(errors="replace").split("\n") if line]


def row_step(line: str) -> float:
    """Return the step of a row; infinite for one that a kill or a power failure has cut short."""
    with suppress(*UNREADABLE):
        return float(json.loads(line)["step"])
    return math.inf


def read_metric_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without those that a full disk has cut short; none if it cannot be read."""
    with suppress(OSError):
        return [json.loads(line) for line in _lines_of(path) if row_step(line) < math.inf]
    return []


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return what an evaluation wrote of its tasks; nothing where it had none."""
    with suppress(OSError, *UNREADABLE):
        return json.loads(path.read_text())
    return []
