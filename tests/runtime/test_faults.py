"""A run in which something breaks: the ranks end together, and the cause is named. Two ranks, real kills, and real
launchers where one has a part."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import cpu_runtime
from launched import Launcher, fill, launching, small_file_system

from sftkit.rundir import files
from sftkit.rundir.files import verify
from sftkit.rundir.names import HEARTBEATS, heartbeat_file, step_dirs
from sftkit.rundir.status import RunStatus, effective_resume, is_symptom, read_status, report
from sftkit.runtime.open import differing_values, open_run
from sftkit.runtime.watchdog import find_blocking_ranks as compare_places
from sftkit.runtime.watchdog import open_heartbeat


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
    assert run.end() == 128 + signal.SIGKILL
    found = run.status()
    assert (found["status"], found["first_failing_rank"]) == ("failed", 1), run.output[-3000:]
    assert "ended without an error message" in found["error"]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_by_those_that_wait_for_it_for_ever(start) -> None:
    run = start("kill while others wait", forked=True)
    run.until_step(3)
    began = time.monotonic()
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["first_failing_rank"]) == ("failed", 1), run.output[-3000:]
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_rank_that_is_killed_while_the_model_is_loaded_is_named_and_not_taken_for_a_stop(start) -> None:
    run = start("killed in loading", forked=True)
    assert run.end() != 0
    told = "error: rank 1 ended without an error message (killed? out of memory?) before the first step"
    assert run.output.count(told) == 1, run.output[-3000:]
    assert not run.dir.exists()


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_and_is_named_with_phase_and_stack(start) -> None:
    run = start("hang", "run.step_timeout_seconds=6", "train.max_steps=20", forked=True)
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["first_failing_rank"]) == ("failed", 1), run.output[-3000:]
    assert "rank 1 at step 4 (in data); rank 0 at step 4 (in step)" in found["error"]
    errors = "".join(path.read_text() for path in (run.dir / "rank-errors").iterdir())
    assert "time.sleep(1000)" in errors, errors


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_with_its_step_and_changes_nothing_when_it_wakes(start) -> None:
    run = start("slow", "run.step_timeout_seconds=5", "train.max_steps=1000", forked=True)
    run.until_step(3)
    os.kill(run.rank(1), signal.SIGSTOP)
    run.until(lambda: run.status()["status"] == "failed")
    found, written = run.status(), (run.dir / "run_status.json").read_bytes()
    os.kill(run.rank(1), signal.SIGCONT)
    assert run.end() != 0
    assert (run.dir / "run_status.json").read_bytes() == written
    assert found["first_failing_rank"] == 1, found
    places = re.search(r"rank 1 at step (\d+) \(in \w+, silent\); rank 0 at step (\d+) \(in step\)", found["error"])
    assert places, found["error"]
    assert int(places[2]) - 1 <= int(places[1]) <= int(places[2]) == found["step"]


@pytest.mark.slow
def test_a_run_that_is_suspended_for_longer_than_a_step_may_take_goes_on(start) -> None:
    run = start("slow", "run.step_timeout_seconds=3", "train.max_steps=1000", forked=True)
    run.until_step(2)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.killpg(run.process.pid, number)
        time.sleep(8)
    run.until_step(run.steps()[-1] + 5)
    os.kill(run.rank(0), signal.SIGTERM)
    run.end()
    run.check_stopped("preempted", "SIGTERM")


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
def test_a_spike_on_one_rank_is_left_out_by_all_and_again_by_a_resumed_run(start, tmp_path: Path) -> None:
    settings = ("numerics.on_spike=skip", "train.max_steps=45", "checkpoint.every=18")
    run = start("spike", *settings, forked=True)
    assert run.end() == 0, run.output[-3000:]
    rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["health/spikes"] for row in rows] == [row["step"] == 40 for row in rows]
    assert [row["health/skipped_steps"] for row in rows] == [row["step"] == 40 for row in rows]
    assert [row["train/loss"] is None for row in rows] == [row["step"] == 40 for row in rows]
    (event,) = map(json.loads, (run.dir / "events.jsonl").read_text().splitlines())
    assert (event["kind"], event["step"]) == ("spike", 40)
    assert "is that of rank 1, micro-batch " in event["text"]
    weights = run.weights()
    assert weights[0] == weights[1]
    shutil.copytree(run.dir, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "step-000045")  # as if killed after step 36
    again = start("spike", *settings, "train.resume=auto", name="again", forked=True)
    assert again.end() == 0, again.output[-3000:]
    assert again.weights() == weights
    resumed = [json.loads(line) for line in (again.dir / "metrics.jsonl").read_text().splitlines()]
    for name in ("step", "train/loss", "health/spikes", "health/skipped_steps"):
        assert [row[name] for row in resumed] == [row[name] for row in rows]


@pytest.mark.slow
def test_a_spike_can_end_training_on_all_ranks(start) -> None:
    run = start("spike", "numerics.on_spike=error", "train.max_steps=45", "checkpoint.every=18", forked=True)
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["step"]) == ("failed", 40), run.output[-3000:]
    assert "step 40: loss " in found["error"]
    assert [folder.name for folder in step_dirs(run.dir)] == ["step-000018", "step-000036"]


def test_ranks_whose_weights_differ_in_one_bit_are_named_with_the_weight_and_nothing_more_is_saved(start) -> None:
    run = start("flipped bit", "numerics.check_replicas_every=5", "checkpoint.every=3", forked=True)
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["step"]) == ("failed", 5), run.output[-3000:]
    assert "step 5: rank 0 and rank 1 hold different bits of model.layers.1.mlp.up_proj.weight" in found["error"]
    assert [folder.name for folder in step_dirs(run.dir)] == ["step-000003"]
    assert verify(run.dir / "step-000003") is None
    (event,) = map(json.loads, (run.dir / "events.jsonl").read_text().splitlines())
    assert event["kind"] == "replicas"


@pytest.mark.slow
def test_a_run_that_has_lost_a_rank_is_resumed_and_outlives_the_watchdog(start) -> None:
    settings = ("train.max_steps=1000", "checkpoint.every=2")
    run = start("slow", *settings, forked=True)
    run.until_step(5)
    os.kill(run.rank(1), signal.SIGKILL)
    assert run.end() != 0
    assert run.status()["first_failing_rank"] == 1
    assert any((run.dir / "rank-errors").iterdir())
    before = run.steps()[-1]
    again = start("slow", *settings, "train.resume=auto", forked=True)
    again.until_step(before + 1)
    began = time.monotonic()
    again.until(lambda: time.monotonic() - began > 15.0)
    assert not list(run.dir.glob("rank-errors/*"))
    os.kill(again.rank(0), signal.SIGTERM)
    again.end()
    assert again.check_ended("preempted", "SIGTERM")["step"] > before + 20
    summary = json.loads((run.dir / "summary.json").read_text())
    assert summary["train_seconds"] > summary["start_train_seconds"] > 10.0, "of both starts, and of the second alone"


@pytest.mark.slow
def test_a_run_that_has_lost_a_rank_and_is_started_again_by_its_launcher_trains_to_the_end(start, tmp_path) -> None:
    variables = {"FAULT_ONCE": str(tmp_path / "struck"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    restarts = ("--rdzv_backend", "c10d", "--max_restarts", "1", "--monitor_interval", "1")
    run = start("killed once", "checkpoint.every=2", "train.max_steps=24", accelerate=restarts, **variables)
    assert run.end(timeout=300) == 0, run.output[-3000:]
    assert "restart 1 of this launch: train.resume=auto" in run.output
    assert "resumed" in run.output
    assert run.status()["status"] == "finished"
    assert run.steps() == list(range(1, 25))


def rename(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))


def delete(run_dir: Path) -> None:
    while run_dir.exists():  # the run may write into it meanwhile
        shutil.rmtree(run_dir, ignore_errors=True)


def remove_lock(run_dir: Path) -> None:
    (run_dir / ".lock").unlink()


@pytest.mark.parametrize(
    ("loss", "processes"),
    [
        (rename, 1),
        pytest.param(delete, 1, marks=pytest.mark.slow),
        pytest.param(rename, 2, marks=pytest.mark.slow),
        (remove_lock, 1),
    ],
)
def test_a_run_whose_directory_is_taken_away_ends_and_writes_nothing_there_any_more(start, loss, processes) -> None:
    settings = ("train.max_steps=1000", "checkpoint.every=3")
    run = start("slow", *settings, processes=processes, forked=True)
    run.until(lambda: len(step_dirs(run.dir)) > 0)
    folder, metrics = run.dir, run.dir / "metrics.jsonl"
    loss(folder)
    before = metrics.read_bytes() if metrics.exists() else None
    assert run.end() == 1
    assert f"run.dir={folder} is no longer this run's" in run.output, run.output[-3000:]
    assert "Traceback" not in run.output
    if loss is rename:
        assert f"its folder is now {folder.with_name('moved')}" in run.output
        assert all(verify(path) is None for path in step_dirs(folder.with_name("moved")))
    if loss is remove_lock:
        assert metrics.read_bytes() == before
        assert read_status(folder)["status"] == "failed"
    else:
        assert not folder.exists()


@pytest.mark.slow
def test_a_run_whose_directory_is_renamed_does_not_mix_with_a_second_start_of_its_name(start) -> None:
    settings = ("train.max_steps=1000", "checkpoint.every=3")
    run = start("slow", *settings, processes=1, forked=True)
    run.until(lambda: len(step_dirs(run.dir)) > 0)
    rename(run.dir)
    second = start("slow", "train.max_steps=30", "checkpoint.every=3", processes=1, forked=True)
    assert run.end() == 1
    assert second.end() == 0, second.output[-3000:]
    assert second.steps() == list(range(1, 31))
    assert second.status()["status"] == "finished"
    assert all(verify(path) is None for path in step_dirs(second.dir))


@pytest.mark.slow
def test_a_full_disk_costs_saves_until_there_is_room_and_fails_a_run_whose_last_save_finds_none(
    start, tmp_path
) -> None:
    with small_file_system(tmp_path / "disk", "4m") as disk:
        run = start("slow", "train.max_steps=1000", "checkpoint.every=5", name="disk/run", processes=1, forked=True)
        run.until(lambda: len(step_dirs(run.dir)) == 1)
        filler = fill(disk, leave=100_000)
        full_at = run.steps()[-1]
        run.until_step(full_at + 12)
        failed = run.status()
        assert failed["status"] == "running"
        assert full_at < failed["failed_save"]["step"] <= run.steps()[-1]
        assert "free" in failed["failed_save"]["error"] or "No space left" in failed["failed_save"]["error"]
        assert len(step_dirs(run.dir)) <= 2, "what was being written may have found room"
        before = len(step_dirs(run.dir))
        filler.unlink()
        run.until(lambda: step_dirs(run.dir)[-1].name > f"step-{full_at + 10:06d}")
        whole = step_dirs(run.dir)
        run.until(lambda: run.status()["failed_save"] is None)
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
    named = "runs/x/step-000002"
    assert effective_resume(named, str(tmp_path), again) == named, "it has no checkpoint of its own yet"
    (tmp_path / "step-000004").mkdir()
    assert effective_resume(named, str(tmp_path), again) == "auto"
    assert effective_resume(named, str(tmp_path), {}) == named
    assert effective_resume(None, str(tmp_path), {**again, "TORCHELASTIC_RESTART_COUNT": "0"}) is None
    assert effective_resume(None, str(tmp_path), {}) is None
    status._write("running", launch="another launcher")
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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_is_told_in_words_wherever_a_run_writes(tmp_path, monkeypatch, capsys, number) -> None:
    """Before the first step the start is refused, and later the run ends without a traceback."""
    full, write = OSError(number, os.strerror(number)), files.replace_text
    for name in ("config.yaml", "environment.json"):

        def refuse(path: Path, text: str, name: str = name) -> None:
            if path.name == name:
                raise full
            write(path, text)

        monkeypatch.setattr("sftkit.rundir.files.replace_text", refuse)
        with pytest.raises(SystemExit) as ended, cpu_runtime() as rt:
            open_run(str(tmp_path / "run"), None, "run: {}\n", rt)
        assert ended.value.code == 2
        assert not (tmp_path / "run").exists()
        told = capsys.readouterr().err
        assert f"run.dir={tmp_path / 'run'}: a disk is full, or a quota or limit of file sizes is reached" in told
    status = RunStatus(tmp_path, 0, 1, step=7)
    for error in (full, RuntimeError(f"I/O error: {os.strerror(number)} (os error {number})")):
        assert report(error, status) == 1
        told = capsys.readouterr().err
        assert "a disk is full, or a quota or limit of file sizes is reached" in told
        assert "train.resume=auto" in told
        assert "Traceback" not in told


def test_a_rank_told_to_stop_before_training_is_not_called_failed_by_those_that_lose_it(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("sftkit.rundir.status._WATCH_SECONDS", 0.1)
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


def test_how_a_run_ended_is_final_but_a_cause_takes_the_place_of_its_symptom(tmp_path: Path) -> None:
    ranks = [RunStatus(tmp_path, rank, 3, step=7, phase="step") for rank in range(3)]
    ranks[0].begin({})
    ranks[0].failed("Connection closed by peer", symptom=True)
    ranks[0].end("failed", first_failing_rank=0, error=str(ranks[0].failure))
    ranks[1].failed(ValueError("cheese"))
    ranks[1].write_failed()
    written = (tmp_path / "run_status.json").read_bytes()
    assert json.loads(written)["error"] == "rank 1 failed at step 7 (step): ValueError: cheese"
    ranks[2].failed(ValueError("woken late"))
    ranks[2].write_failed()
    ranks[2].end_of_signal(signal.SIGTERM)
    ranks[2].write_end(stopped=True, number=signal.SIGTERM)
    assert (tmp_path / "run_status.json").read_bytes() == written
    ranks[0].begin({})
    assert read_status(tmp_path)["status"] == "running", "the next start"


def test_a_heartbeat_is_that_of_the_present_step(tmp_path: Path) -> None:
    status = RunStatus(tmp_path, 0, 2)
    status.heartbeat = open_heartbeat(status)
    for step, phase in ((1000, "evaluation"), (1001, "data"), (1001, "step"), (2, "data")):
        status.at(step, phase)
        beat = json.loads(heartbeat_file(tmp_path / HEARTBEATS, 0).read_text())
        assert (beat["step"], beat["phase"]) == (step, phase)
        assert time.time() - beat["time"] < 60
    os.close(status.heartbeat)


def test_differences_between_ranks_are_listed_by_name() -> None:
    values = [{"torch": "2.13", "optim.lr": "1"}, {"torch": "2.13", "optim.lr": "2"}, {"torch": "2.13"}]
    assert differing_values(values) == ["optim.lr: 1 on rank 0; 2 on rank 1; not there on rank 2"]
    assert differing_values([values[0]] * 3) == []


def test_the_ranks_that_are_behind_are_found_by_step_and_phase(tmp_path: Path) -> None:
    for rank, (step, phase) in enumerate([(7, "step"), (6, "data"), (7, "step")]):
        (tmp_path / f"rank{rank:03d}").write_text(json.dumps({"step": step, "phase": phase, "time": time.time()}))
    behind, where = compare_places(tmp_path, 3, silent_after=60)
    assert behind == [1]
    assert where == "rank 1 at step 6 (in data); ranks 0, 2 at step 7 (in step)"
    (tmp_path / "rank002").write_text(json.dumps({"step": 7, "phase": "step", "time": time.time() - 61}))
    behind, where = compare_places(tmp_path, 3, silent_after=60)
    assert behind == [2], "it is stopped, whoever else is behind"
    assert where == "rank 2 at step 7 (in step, silent); rank 1 at step 6 (in data); rank 0 at step 7 (in step)"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_console_that_takes_no_more_ends_no_run_and_cannot_keep_a_process_from_ending() -> None:
    script = (
        "from sftkit.config.terminal import print_text\nfrom sftkit.runtime.signals import end_process\n"
        "print_text('stays in the buffer'); print_text('two', error=True)\n"
        "end_process(7)\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=full, timeout=60)
    assert done.returncode == 7
