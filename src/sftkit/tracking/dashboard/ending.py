"""The end of a run, for a dashboard: its state, an exit code, and why."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftkit.config.secrets import secret_in
from sftkit.errors import ConfigError, DataError
from sftkit.rundir.failure import describe_error
from sftkit.rundir.names import STATUS
from sftkit.rundir.status import RunStatus, read_status

TIMED_OUT = 124
"Exit code of a run that train.max_minutes has ended, as timeout(1) gives it."


@dataclass(frozen=True)
class Ending:
    """The end of training, with its last checkpoint or with an error."""

    state: str
    "finished, stopped (Ctrl-C), preempted (another signal, or the time limit) or failed, as in run_status.json"
    exit_code: int
    """0 of a finished run alone: a process that was told to stop and has saved ends with 0, its
    training is not at its end"""
    summary: dict[str, Any]
    "run/*, for the table of runs"


def begun(*, resumed: bool) -> dict[str, Any]:
    """Return what stands for a run while it goes on, and stays if it is killed; of a resumed one
    without its earlier end."""
    return {"run/state": "running", **({"run/signal": "", "run/error": ""} if resumed else {})}


def ending_of(run_dir: Path, status: RunStatus | None, error: BaseException | None) -> Ending:
    """Return how a run ends.

    Args:
        run_dir: with the run_status.json that training has written, if no error ended it.
        status: of this process; None: there is none.
    """
    if error is not None:
        # A rank whose error follows from another's would hide the cause: wandb shows one text.
        causes = [failure for failure in status.failures() if not failure.symptom] if status else []
        text = str(causes[0]) if causes else describe_error(error)
        # The text leaves this machine, and may quote a URL or a setting with a key in it.
        if kind := secret_in(text):
            text = f"{type(error).__name__}: its text holds what looks like {kind}, and is in {STATUS} alone"
        code = 2 if isinstance(error, ConfigError | DataError) else 1
        return Ending("failed", code, {"run/state": "failed", "run/error": text})
    found = read_status(run_dir)
    state, name = str(found.get("status", "finished")), found.get("signal")
    summary = {"run/state": state, **({"run/signal": name} if name else {})}
    # As a shell has it: 128 + signal. The process itself ends with 0, since it has saved.
    if state not in ("stopped", "preempted"):
        return Ending(state, 0, summary)
    return Ending(state, 128 + signal.Signals[name] if name else TIMED_OUT, summary)
