"""metrics.jsonl of a run that was killed and resumed is that of the uninterrupted run, but for clocks; a stop adds a line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import cpu_runtime, torchrun
from resume_worker import BROKEN, STEPS, run, runs

CLOCKS = ("time", "perf/", "mem/", "ckpt/", "compile/seconds", "train/seconds")
"What is measured, and what depends on when the background has written a checkpoint."


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCKS)} for row in rows]


def check(folder: Path) -> None:
    whole = lines(folder / "whole")
    assert [row["step"] for row in whole] == [4, 5, 7, 8, 10, 12, STEPS], (
        "every 4 steps, and before saves and evaluations"
    )
    assert [row["health/skipped_steps"] for row in whole] == [0, 0, 0, 0, 1, 0, 0]
    assert BROKEN == 9
    assert lines(folder / "killed") == whole
    stopped = {row["step"]: row for row in lines(folder / "stopped")}
    assert list(stopped) == [4, 5, 6, 7, 8, 10, 12, STEPS], "the stop at step 6 was logged"
    for row in whole:
        assert row["step"] == 7 or stopped[row["step"]] == row
    assert stopped[7]["train/tokens"] == whole[2]["train/tokens"]


def test_every_line_of_a_resumed_run_is_that_of_the_uninterrupted_one(tmp_path: Path, tokenizer) -> None:
    runs(tmp_path, tokenizer, cpu_runtime())
    check(tmp_path)


@pytest.mark.slow
def test_every_line_of_a_resumed_run_is_that_of_the_uninterrupted_one_on_two_ranks(tmp_path: Path, tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    torchrun(2, "resume_worker.py", str(tmp_path))
    check(tmp_path)
    one = tmp_path / "one"  # goes on from what two ranks wrote
    shutil.copytree(tmp_path / "killed", one)
    shutil.rmtree(one / f"step-{STEPS:06d}")
    run(one, tokenizer, cpu_runtime(), resume="auto")
    for ours, theirs in zip(lines(one), lines(tmp_path / "whole"), strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-5)
