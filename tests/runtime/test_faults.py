"""A run in which something breaks: the ranks end together, and the cause is named. Two ranks, real kills, and real
launchers where one has a part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import Launcher, fill, launching, small_file_system

from sftkit.runtime.consistency import compare
from sftkit.runtime.manifest import verify
from sftkit.runtime.rundir import step_dirs
from sftkit.runtime.status import RunStatus, effective_resume, is_symptom
from sftkit.runtime.watchdog import compare as compare_places


@pytest.fixture
def start(tmp_path: Path, small_bpe: str) -> Iterator[Launcher]:
    with launching(tmp_path, small_bpe) as launcher:
        yield launcher


def test_a_rank_that_raises_ends_all_within_seconds_and_is_named_with_step_and_cause(start) -> None:
    run = start("raise", forked=True)
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["first_failing_rank"], found["step"]) == ("failed", 1, 4), run.output[-3000:]
    assert found["error"] == "rank 1 failed at step 4 (data): ValueError: row 17 is made of cheese"
    assert f"error: {found['error']}" in run.output
    assert step_dirs(run.dir) == []


def test_ranks_with_different_recipes_are_refused_by_key_value_and_rank(start) -> None:
    run = start("differs", forked=True)
    assert run.end() != 0
    assert "optim.lr: 2e-05 on rank 0; 0.5 on rank 1" in run.output
    assert not (run.dir / "config.yaml").exists()


@pytest.mark.slow
def test_ranks_with_different_documents_are_refused_before_the_first_step(start) -> None:
    run = start("other data", forked=True)
    assert run.end() != 0
    assert "the ranks of this run differ" in run.output
    assert "training documents: 560 (sha256 of their lengths" in run.output
    assert "559 (sha256 of their lengths" in run.output
    assert not run.dir.exists()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_by_those_that_lose_it(start) -> None:
    run = start("kill")
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["first_failing_rank"]) == ("failed", 1), run.output[-3000:]
    assert "ended without a word" in found["error"]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_by_those_that_wait_for_it_for_ever(start) -> None:
    began = time.monotonic()
    run = start("kill while others wait")
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["first_failing_rank"]) == ("failed", 1), run.output[-3000:]
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_rank_that_is_killed_while_the_model_is_loaded_is_named_and_not_taken_for_a_stop(start) -> None:
    run = start("killed in loading")
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["first_failing_rank"]) == ("failed", 1), run.output[-3000:]
    assert found["error"] == "rank 1 ended without a word (killed? out of memory?) before the first step"


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_and_is_named_with_phase_and_stack(start) -> None:
    run = start("hang", "run.step_timeout_seconds=6", "train.max_steps=20")
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["first_failing_rank"]) == ("failed", 1), run.output[-3000:]
    assert "rank 1 at step 4 (in data); rank 0 at step 4 (in step)" in found["error"]
    errors = "".join(path.read_text() for path in (run.dir / "rank-errors").iterdir())
    assert "time.sleep(1000)" in errors, errors


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_training_and_names_step_rank_and_documents(start) -> None:
    run = start("nan", forked=True)
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["step"], found["first_failing_rank"]) == ("failed", 3, 1), run.output[-3000:]
    assert (
        "step 3: the loss of rank 1 is not finite (rank 1, micro-batch 1 of 2, with documents test #" in found["error"]
    )
    for rank in (0, 1):
        dump = json.loads((run.dir / f"nonfinite-step-000003-rank{rank:03d}.json").read_text())
        assert dump["step"] == 3
        assert dump["documents"][0]["source"] == "test"
        assert len(dump["documents"][0]["ids"]) > 2
    assert step_dirs(run.dir) == []


@pytest.mark.slow
def test_a_step_that_is_not_finite_can_be_left_out_and_counted(start) -> None:
    run = start("nan", "numerics.on_nonfinite=skip", forked=True)
    assert run.end() == 0, run.output[-3000:]
    rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] is None for row in rows] == [row["step"] == 3 for row in rows]
    assert [row["health/skipped_steps"] for row in rows] == [row["step"] == 3 for row in rows]
    assert rows[-1]["health/nonfinite_steps"] == 1
    weights = run.weights()
    assert weights[0] == weights[1]
    assert all(value == value for value in weights[0].values())


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
def test_a_run_that_the_launcher_starts_again_resumes_by_itself(start, tmp_path: Path, launcher: str) -> None:
    how = {
        "torchrun": {"torchrun": ("--standalone", "--max-restarts", "1", "--monitor-interval", "1")},
        "accelerate launch": {
            "accelerate": ("--rdzv_backend", "c10d", "--max_restarts", "1", "--monitor_interval", "1")
        },
    }
    variables = {"FAULT_ONCE": str(tmp_path / "struck"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = start("raise", "checkpoint.every=2", "train.max_steps=6", **how[launcher], **variables)
    assert run.end() == 0, run.output[-3000:]
    assert "restart 1 of this launch: train.resume=auto" in run.output
    assert "resumed" in run.output
    assert run.status()["status"] == "finished"
    assert run.steps() == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_full_disk_costs_saves_until_there_is_room_and_fails_a_run_whose_last_save_finds_none(
    start, tmp_path
) -> None:
    with small_file_system(tmp_path / "disk", "4m") as disk:
        run = start("slow", "train.max_steps=1000", "checkpoint.every=5", name="disk/run", processes=1)
        run.until(lambda: len(step_dirs(run.dir)) == 1)
        filler = fill(disk, leave=100_000)
        full_at = run.steps()[-1]
        run.until_step(full_at + 12)
        assert len(step_dirs(run.dir)) <= 2, "what was being written may have found room"
        before = len(step_dirs(run.dir))
        filler.unlink()
        run.until(lambda: step_dirs(run.dir)[-1].name > f"step-{full_at + 10:06d}")
        whole = step_dirs(run.dir)
        filler = fill(disk, leave=0)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() != 0
        found = run.status()
        assert (before, found["status"]) == (1, "failed"), run.output[-3000:]
        assert f"step-{found['step']:06d} could not be written" in found["error"]
        assert "not written: " in run.output
        assert [verify(folder) for folder in whole] == [None] * 2
        assert step_dirs(run.dir) == whole


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_only_a_restart_of_the_same_launch_resumes_by_itself(tmp_path: Path) -> None:
    again = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "none", "RANK": "0"}
    assert effective_resume(None, str(tmp_path), again) is None, "nothing there"
    status = RunStatus(tmp_path, 0, 1)
    status.begin(again)
    assert effective_resume(None, str(tmp_path), again) == "auto"
    assert effective_resume("runs/x/step-000002", str(tmp_path), again) == "runs/x/step-000002"
    assert effective_resume(None, str(tmp_path), {**again, "TORCHELASTIC_RESTART_COUNT": "0"}) is None
    assert effective_resume(None, str(tmp_path), {}) is None
    status.write("running", launch="another launcher")
    assert effective_resume(None, str(tmp_path), again) is None


def test_how_a_run_ended_is_written_on_a_disk_without_a_free_byte(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", "1m") as disk:
        status = RunStatus(disk, 0, 1, step=7, phase="checkpoint")
        status.begin({})
        fill(disk, leave=0)
        status.failed(OSError("no room for the last checkpoint"))
        status.write_failed()
        found = json.loads((disk / "run_status.json").read_text())
    assert (found["status"], found["step"], found["first_failing_rank"]) == ("failed", 7, 0)
    assert "no room for the last checkpoint" in found["error"]


def test_a_rank_told_to_stop_before_training_is_not_called_failed_by_those_that_lose_it(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("sftkit.runtime.status._LOOK_SECONDS", 0.1)
    told, left = (RunStatus(tmp_path, rank, 2) for rank in (1, 0))
    left.begin({})
    told.end_of_signal(signal.SIGUSR1)
    left.end_of_signal(signal.SIGTERM)  # from the launcher, which has seen the other one end
    left.failed(RuntimeError("Connection closed by peer"))
    left.write_failed()
    found = json.loads((tmp_path / "run_status.json").read_text())
    assert (found["status"], found["signal"]) == ("preempted", "SIGUSR1")


def test_the_status_of_a_failed_run_names_the_cause_and_not_the_first_symptom(tmp_path: Path) -> None:
    ranks = [RunStatus(tmp_path, rank, 2, step=7, phase="step") for rank in (0, 1)]
    ranks[0].failed(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"))
    ranks[1].failed(ValueError("cheese"))
    first = ranks[0].write_failed()
    assert str(first) == "rank 1 failed at step 7 (step): ValueError: cheese"
    found = json.loads((tmp_path / "run_status.json").read_text())
    assert (found["status"], found["step"], found["first_failing_rank"]) == ("failed", 7, 1)
    assert not is_symptom(ValueError("the connection of cheese and wine"))


def test_differences_between_ranks_are_listed_by_name() -> None:
    values = [{"torch": "2.13", "optim.lr": "1"}, {"torch": "2.13", "optim.lr": "2"}, {"torch": "2.13"}]
    assert compare(values) == ["optim.lr: 1 on rank 0; 2 on rank 1; not there on rank 2"]
    assert compare([values[0]] * 3) == []


def test_the_ranks_that_are_behind_are_found_by_step_and_phase(tmp_path: Path) -> None:
    for rank, (step, phase) in enumerate([(7, "step"), (6, "data"), (7, "step")]):
        (tmp_path / f"rank{rank:03d}").write_text(json.dumps({"step": step, "phase": phase}))
    behind, where = compare_places(tmp_path, 3)
    assert behind == [1]
    assert where == "rank 1 at step 6 (in data); ranks 0, 2 at step 7 (in step)"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_console_that_takes_no_more_ends_no_run_and_cannot_keep_a_process_from_ending() -> None:
    script = (
        "from sftkit.runtime.signals import end_process, say\n"
        "say('stays in the buffer'); say('two', error=True)\n"
        "end_process(7)\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=full, timeout=60)
    assert done.returncode == 7
