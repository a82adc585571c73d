"""metrics.jsonl of a run that was killed or stopped and resumed is that of the uninterrupted run, but for clocks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cpu_runtime, torchrun
from resume_worker import BROKEN, LOG_EVERY, STEPS, run, runs, without_window

from sftkit.tracking.meter import by_rank, own_values

CLOCKS = ("time", "perf/", "mem/", "ckpt/", "compile/seconds", "train/seconds")
"What is measured, and what depends on when the background has written a checkpoint."


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCKS)} for row in rows]


def check(folder: Path) -> None:
    whole = lines(folder / "whole")
    assert [row["step"] for row in whole] == [*range(LOG_EVERY, STEPS, LOG_EVERY), STEPS]
    assert [row["health/skipped_steps"] for row in whole] == [0, 0, 1, 0]
    assert BROKEN in range(LOG_EVERY * 2 + 1, LOG_EVERY * 3 + 1)
    for name in ("killed", "stopped"):
        assert lines(folder / name) == whole, name


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


STOPPED: list[Path] = []


@pytest.fixture
def stopped(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A copy of a run that was stopped at step 6."""
    if not STOPPED:
        folder = tmp_path_factory.mktemp("stopped") / "run"
        run(folder, tokenizer, cpu_runtime(), stop_at=6)
        STOPPED.append(folder)
    shutil.copytree(STOPPED[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_stop_is_logged_and_the_throughput_of_the_next_line_counts_the_time_of_all_its_steps(
    stopped: Path, tokenizer, monkeypatch
) -> None:
    rows = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 6]
    state = json.loads((stopped / "step-000006" / "training_state" / "state.json").read_text())
    assert state["window"]["meter"]["steps"] == 2
    assert len(state["window"]["meter"]["step_seconds"]) == 2
    assert state["window"]["meter"]["seconds"] == pytest.approx(2 * rows[-1]["perf/step_seconds"], rel=0.5)
    state["window"]["meter"]["seconds"] = 1000.0
    (stopped / "step-000006" / "training_state" / "state.json").write_text(json.dumps(state))
    monkeypatch.setattr("sftkit.checkpoint.resume.verify", lambda folder: None)
    run(stopped, tokenizer, cpu_runtime(), resume="auto")
    rows = [json.loads(line) for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8, 12, 14]
    assert rows[1]["perf/step_seconds"] == pytest.approx(1000.0 / 4, rel=0.01)


def test_a_checkpoint_without_an_open_window_resumes_and_says_what_is_shorter(
    stopped: Path, tokenizer, monkeypatch, capsys
) -> None:
    without_window(stopped, 6)
    monkeypatch.setattr("sftkit.checkpoint.resume.verify", lambda folder: None)
    run(stopped, tokenizer, cpu_runtime(), resume="auto")
    assert "the first logged line has the steps from 7 on, not those from 5 on" in capsys.readouterr().out
    assert [row["step"] for row in lines(stopped)] == [4, 6, 8, 12, 14]


def test_a_window_fits_another_log_every(stopped: Path, tokenizer) -> None:
    run(stopped, tokenizer, cpu_runtime(), resume="auto", log_every=1)
    assert [row["step"] for row in lines(stopped)] == [4, *range(7, 15)]


def test_values_of_ranks_come_back_to_their_rank_or_as_a_sum_to_the_main_one() -> None:
    rt = cpu_runtime()
    own = torch.tensor([0.1, float("nan"), 3e38])
    rows = by_rank(rt, own)
    assert rows == [[float(own[0]), None, float(own[2])]]
    back = own_values(rt, json.loads(json.dumps(rows)), same_ranks=True).float()
    torch.testing.assert_close(back, own, rtol=0, atol=0, equal_nan=True)
    assert own_values(rt, [[1.0, 2.0], [0.5, 0.25]], same_ranks=False).tolist() == [1.5, 2.25]
