"""A run that was killed: what did it, as far as can be read, and what its directory says to the next start and the report."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from forked import in_fork
from helpers import cpu_runtime

from sftkit.reports.collect import gather_report
from sftkit.reports.page import write_report
from sftkit.rundir import lock
from sftkit.rundir.status import RunStatus, as_killed, killed_by, last_step, read_status, report_killed, start_command
from sftkit.runtime.open import open_run
from sftkit.runtime.script import likely_cause


@pytest.fixture
def killed_run(tmp_path: Path) -> Path:
    """The directory of a run that is really killed after its fourth step."""
    folder = tmp_path / "run"

    def run() -> None:
        lock.take_lock(folder)
        RunStatus(folder, 0, 1, total_steps=9).begin({})
        (folder / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n{"step": 5, "trai')
        (folder / "step-000003").mkdir()
        (folder / "LATEST").write_text("step-000003\n")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_fork(run) == -signal.SIGKILL
    assert read_status(folder)["status"] == "running"
    return folder


@pytest.mark.parametrize(
    ("resume", "then"), [("auto", "this start resumes from there"), (None, "train.resume=auto would")]
)
def test_the_next_start_says_that_the_run_before_was_killed_and_where_it_was(
    killed_run: Path, capsys: pytest.CaptureFixture[str], resume: str | None, then: str
) -> None:
    with cpu_runtime() as rt:
        open_run(str(killed_run), resume, "run: {}\n", rt)
    told = f"{killed_run}: the previous run was killed: newest logged step 4, newest checkpoint "
    out = capsys.readouterr().out
    assert f"{told}{killed_run}/step-000003; {then}" in out


def test_a_start_after_a_run_that_ended_says_nothing(killed_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunStatus(killed_run, 0, 1, step=9).end("finished")
    with cpu_runtime() as rt:
        open_run(str(killed_run), "auto", "run: {}\n", rt)
    assert "killed" not in capsys.readouterr().out


def test_the_report_shows_a_run_that_was_killed_as_killed_and_a_live_one_as_running(killed_run: Path) -> None:
    status = gather_report(killed_run)["status"]
    assert (status["status"], status["step"]) == ("killed", 4)
    assert f"newest logged step 4, newest checkpoint {killed_run}/step-000003; resume from there: " in status["error"]
    assert status["error"].endswith("train.resume=auto")
    page = write_report(killed_run).read_text()
    assert ">killed<" in page
    assert ">running<" not in page
    held = lock.take_lock(killed_run)
    try:
        assert gather_report(killed_run)["status"]["status"] == "running"
    finally:
        held.release()
    assert as_killed(killed_run, {"status": "finished"}) == {"status": "finished"}


def test_of_a_run_on_another_machine_nothing_is_claimed(killed_run: Path) -> None:
    holder = json.loads((killed_run / ".lock").read_text())
    (killed_run / ".lock").write_text(json.dumps(holder | {"machine": "another boot", "host": "elsewhere"}))
    assert gather_report(killed_run)["status"]["status"] == "running"


def test_what_a_rank_that_was_left_has_written_stays_and_a_run_that_lives_on_is_not_called_dead(tmp_path: Path) -> None:
    folder, earlier = tmp_path / "run", None
    words = ["scripts/chat_sft.py", "sft.yaml", "train.resume=other/step-000002"]
    held = lock.take_lock(folder)
    status = RunStatus(folder, 0, 2, step=7, start_id="this")
    status.begin({})
    told = report_killed(folder, signal.SIGKILL, "a cause", earlier, words)
    assert told == f"error: the launcher was killed by SIGKILL: a cause\n{folder}: the run itself is still at work"
    held.release()
    status.end("failed", first_failing_rank=1, error="rank 1 ended without an error message")
    assert "had not begun to train" in report_killed(folder, signal.SIGKILL, "a cause", "this", words)
    told = report_killed(folder, signal.SIGKILL, "a cause", earlier, words)
    assert told.startswith("error: rank 1 was killed by SIGKILL: a cause\n")
    assert told.endswith(f"no checkpoint; start it again: {start_command(words)}")
    assert "train.resume=other/step-000002" in told, "there is nothing that auto would find"
    assert read_status(folder)["error"] == "rank 1 ended without an error message"


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None
    file = tmp_path / "metrics.jsonl"
    file.write_text("")
    assert last_step(tmp_path) is None
    file.write_text("".join(json.dumps({"step": step, "text": "x" * 100}) + "\n" for step in range(1, 5001)) + '{"ste')
    assert last_step(tmp_path) == 5000


@pytest.mark.parametrize(
    ("code", "number"),
    [
        (137, signal.SIGKILL),
        (139, signal.SIGSEGV),
        (143, None),
        (130, None),
        (138, None),
        (1, None),
        (0, None),
        (255, None),
    ],
)
def test_a_signal_that_asks_for_a_stop_kills_nobody(code: int, number: signal.Signals | None) -> None:
    assert killed_by(code) == number


def test_a_kill_is_likely_for_memory_and_a_crash_is_named() -> None:
    assert likely_cause(signal.SIGKILL).startswith("likely the kernel's OOM killer")
    assert "compiled code" in likely_cause(signal.SIGSEGV)
    assert likely_cause(signal.SIGTERM).startswith("sent by somebody")
