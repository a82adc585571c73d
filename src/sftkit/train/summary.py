"""The run directory is the interface: config.yaml before anything starts, summary.json when it has ended."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sftkit.launch.launch import check_launcher
from sftkit.reports.write import try_report
from sftkit.runtime.consistency import agree, identity, neighbours
from sftkit.runtime.files import replace_text, set_aside
from sftkit.runtime.hardware import environment
from sftkit.runtime.rundir import LATEST
from sftkit.runtime.signals import end_process
from sftkit.runtime.start import Runtime
from sftkit.runtime.status import RunStatus, open_status


@dataclass
class Trained:
    """What the loop reports when it ends."""

    step: int
    total_steps: int
    tokens: int
    train_seconds: float
    "time in steps, without evaluation, checkpoints and warm-up"
    warm_up_seconds: float
    compiled: bool
    stopped: bool
    "ended early, by a signal or train.max_minutes"
    metrics: dict[str, float | None]
    "the last logged line"
    evals: dict[str, float | None]
    "the last evaluation"
    samples: list[dict[str, Any]]
    "the last sample answers"
    evals_at_start: dict[str, float | None]
    "the evaluation before the first step, empty without eval.at_start"
    checkpoint: str
    "the newest step directory; empty if no step was done"


def open_run(run_dir: str, resume: str | None, recipe: str, rt: Runtime) -> Path:
    """Create the directory and write config.yaml, environment.json and run_status.json; from here on a signal is written
    there. An earlier run in it is renamed, never overwritten, unless this one resumes it.

    Raises:
        ConfigError: the ranks have not the same recipe and versions.
    """
    agree(rt, identity(recipe))
    folder = Path(run_dir)
    status = open_status(folder, rt.rank, rt.world_size)
    status.neighbours = neighbours(rt)
    if rt.is_main:
        if resume is None and (folder / "config.yaml").exists():
            rt.say(
                f"{folder} holds an earlier run: it is now {set_aside(folder)} (train.resume=auto would continue it)"
            )
        folder.mkdir(parents=True, exist_ok=True)
        status.begin(os.environ)
        replace_text(folder / "config.yaml", recipe)
        replace_text(folder / "environment.json", json.dumps(environment(rt.device, rt.world_size), indent=1))
        if warning := check_launcher(os.environ):
            rt.say(warning)
    rt.barrier()
    rt.stopping.end_at_once(partial(_end_of_signal, status))
    return folder


def _end_of_signal(status: RunStatus, number: int) -> NoReturn:
    try:
        status.end_of_signal(number)
    finally:
        end_process(128 + number)


def write_summary(run_dir: Path, trained: Trained, rt: Runtime) -> None:
    """summary.json, the report and the closing lines on the console."""
    if not rt.is_main:
        return
    file = run_dir / "summary.json"
    if not trained.metrics and not trained.stopped and _finished(file):
        rt.say(f"\nalready finished at step {trained.step}; {file} is left as it is")
        return
    try:
        replace_text(file, json.dumps(asdict(trained), indent=1, ensure_ascii=False))
    except OSError as error:  # the checkpoint is there: this is no failed run
        rt.say(f"{file} cannot be written: {error}")
    speed = trained.metrics.get("perf/tok_per_sec")
    how = "stopped at" if trained.stopped else "finished"
    rt.say(
        f"\n{how} step {trained.step} of {trained.total_steps}: {trained.tokens:,} tokens, {speed or 0:,.0f} tok/s, "
        f"{trained.train_seconds:.0f} s in steps"
    )
    where = f"{trained.checkpoint} (also {run_dir}/{LATEST})" if trained.checkpoint else "none: no step was done"
    rt.say(f"checkpoint: {where}")
    try_report(run_dir, rt.say)


def _finished(summary: Path) -> bool:
    """Whether an earlier start of the run has ended with its last evaluation."""
    return summary.exists() and not json.loads(summary.read_text())["stopped"]
