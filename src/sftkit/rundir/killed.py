"""Tell of a run that was killed what it could not tell itself, from its directory: for the launcher, the next start and
the report. No torch."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftkit.rundir.files import UNREADABLE, replace_shared
from sftkit.rundir.lock import at_work
from sftkit.rundir.names import METRICS_FILE, STATUS, latest_checkpoint
from sftkit.rundir.status import read_status, resume_command, start_command

_TAIL = 1 << 16
"Bytes at the end of METRICS_FILE in which its last line is looked for."


def killed_by(code: int) -> signal.Signals | None:
    """Return the signal that killed a process of this exit code (128 + the signal's number).

    Returns:
        None: no signal did, or it was one that asks for a stop (runtime.signals.SIGNALS).
    """
    queues = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU}
    asked = {*queues, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
    return next((number for number in signal.Signals if number == code - 128 and number not in asked), None)


def where_it_was(run_dir: Path) -> str:
    """Return the newest step that a run has logged and its newest checkpoint, in words."""
    step, checkpoint = last_step(run_dir), None
    with suppress(OSError):
        checkpoint = latest_checkpoint(run_dir)
    logged = "no step was logged" if step is None else f"newest logged step {step}"
    return f"{logged}, {f'newest checkpoint {checkpoint}' if checkpoint else 'no checkpoint'}"


def how_to_go_on(run_dir: Path, resume: str, start: str) -> str:
    """Return what to do next, in words: resume from the newest checkpoint or, without one, start again.

    Args:
        resume: command that resumes from the newest checkpoint.
        start: command that started the run.
    """
    with suppress(OSError):
        if latest_checkpoint(run_dir) is not None:
            return f"resume from there: {resume}"
    return f"start it again: {start}"


def last_step(run_dir: Path) -> int | None:
    """Return the step of the last whole line of METRICS_FILE; None without one."""
    try:
        # From the end, backwards: the file may be large, and its last line a half one.
        with (run_dir / METRICS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return None
    for line in reversed(lines):
        with suppress(*UNREADABLE):
            return int(json.loads(line)["step"])
    return None


def as_killed(run_dir: Path, status: dict[str, Any]) -> dict[str, Any]:
    """Return the status; if it says `running` but the run is gone, `killed`, with what is known of the end."""
    # "Not known" is not "gone": the lock may be of another machine, whose processes are not seen from here.
    if status.get("status") != "running" or at_work(run_dir) is not False:
        return status
    resume, start = (str(status.get(name) or "") for name in ("resume", "start"))
    text = f"killed (kill -9, out of memory, or the machine went down): {where_it_was(run_dir)}"
    step = last_step(run_dir)
    next_one = f"; {how_to_go_on(run_dir, resume, start)}" if resume and start else ""
    values = {"status": "killed", "step": status.get("step") if step is None else step, "error": text + next_one}
    return status | values


def report_killed(run_dir: Path, number: signal.Signals, cause: str, earlier: str | None, words: list[str]) -> str:
    """Return the message about a run that was killed. Write it to run_status.json too, unless a surviving rank
    has done so.

    Args:
        number: the signal that killed it.
        cause: what has likely sent the signal, in words (runtime.oom.likely_cause).
        earlier: status.newest_start before the run was started.
        words: script and arguments that started it.
    """
    status = read_status(run_dir)
    # The launcher can be killed alone: then the run goes on, and nothing of it may be overwritten.
    if at_work(run_dir):
        return f"error: the launcher was killed by {number.name}: {cause}\n{run_dir}: the run itself is still at work"
    who = "the run"
    # What is there is of an earlier run.
    if status.get("start_id") == earlier:
        end = f"It had not begun to train. Start it again: {start_command(words)}"
        return f"error: {who} was killed by {number.name}: {cause}\n{end}"
    # Nobody was left to write the end. Where a rank was, it knows more than the exit code does.
    if status.get("status") == "running":
        step = last_step(run_dir)
        values = {"status": "failed", "error": f"killed by {number.name}: {cause}", "time": round(time.time(), 3)}
        values |= {} if step is None else {"step": step}
        with suppress(OSError):
            replace_shared(run_dir / STATUS, json.dumps(status | values, indent=1))
    elif status.get("first_failing_rank") is not None:
        who = f"rank {status['first_failing_rank']}"
    where = f"{run_dir}: {where_it_was(run_dir)}; {how_to_go_on(run_dir, resume_command(words), start_command(words))}"
    return f"error: {who} was killed by {number.name}: {cause}\n{where}"
