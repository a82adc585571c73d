"""The end of training: summary.json, the report, and the closing lines on the console."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sftkit.reports.write import try_report
from sftkit.rundir.files import replace_text
from sftkit.rundir.names import LATEST, SUMMARY
from sftkit.rundir.status import RunStatus, resume_command
from sftkit.runtime.start import Runtime


@dataclass
class Trained:
    """The result of the loop; until it ends, the newest values."""

    step: int
    total_steps: int
    tokens: int = 0
    train_seconds: float | None = 0.0
    """time in steps over all starts of the run, as step and tokens are, without evaluation, checkpoints and warm-up;
    None: not known, of a run that a version began which did not keep it"""
    start_train_seconds: float = 0.0
    "the same, of this start alone"
    warm_up_seconds: float = 0.0
    "of this start"
    compiled: bool = False
    stopped: bool = False
    "ended early, by a signal or train.max_minutes"
    metrics: dict[str, float | None] = field(default_factory=dict)
    "the last logged line"
    evals: dict[str, float | None] = field(default_factory=dict)
    "the last evaluation"
    samples: list[dict[str, Any]] = field(default_factory=list)
    "the last sample answers"
    evals_at_start: dict[str, float | None] = field(default_factory=dict)
    "the evaluation before the first step, empty without eval.at_start"
    checkpoint: str = ""
    "the newest step directory; empty if no step was done"


def write_end(status: RunStatus, rt: Runtime, *, stopped: bool) -> None:
    """Write to run_status.json that training has ended; every rank calls it.

    Args:
        stopped: before its last step; then the signal is written, too, which only one rank may have received.
    """
    number = rt.signal_of_any_rank() if stopped else None
    if rt.is_main:
        status.write_end(number, stopped=stopped)


def _seconds(trained: Trained) -> str:
    """Return the time in steps in words; of a resumed run, that of this start too."""
    own, whole = f"{trained.start_train_seconds:.0f} s", trained.train_seconds
    if whole is None:
        return f"{own} of this start"
    return own if whole <= trained.start_train_seconds + 0.5 else f"{whole:.0f} s, {own} of them in this start"


def write_summary(run_dir: Path, trained: Trained, rt: Runtime) -> None:
    """Write summary.json and the report, and print the closing lines."""
    if not rt.is_main:
        return
    file = run_dir / SUMMARY
    # An earlier start of the run has ended with its last evaluation.
    if not trained.metrics and not trained.stopped and file.exists() and not json.loads(file.read_text())["stopped"]:
        rt.print(f"\nalready finished at step {trained.step}; {file} is unchanged")
        return
    try:
        replace_text(file, json.dumps(asdict(trained), indent=1, ensure_ascii=False))
    except OSError as error:  # the checkpoint is there: this is no failed run
        rt.print(f"{file} cannot be written: {error}")
    speed = trained.metrics.get("perf/tok_per_sec")
    how = "stopped at" if trained.stopped else "finished"
    rt.print(
        f"\n{how} step {trained.step} of {trained.total_steps}: {trained.tokens:,} tokens\n"
        f"training time: {_seconds(trained)}; speed of the last line: {speed or 0:,.0f} tok/s"
    )
    where = f"{trained.checkpoint} (also {run_dir}/{LATEST})" if trained.checkpoint else "none: no step was done"
    rt.print(f"checkpoint: {where}")
    if trained.stopped:
        rt.print(f"resume with: {resume_command(sys.argv)}")
    try_report(run_dir, rt.print)
