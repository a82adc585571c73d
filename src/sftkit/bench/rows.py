"""What one run's row of the results holds, from its logged lines; the same for sftkit and for whatever stands beside it."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sftkit.bench.jobs import Job
from sftkit.bench.plan import Steps

Line = dict[str, Any]
"A line of metrics.jsonl; the keys are those of docs/metrics.md."


def read_lines(path: Path) -> list[Line]:
    """The logged lines of a run."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def timed(lines: Sequence[Line], steps: Steps) -> list[Line]:
    """The windows after the warm-up steps."""
    return [line for line in lines if line["step"] > steps.warm_up]


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Median, extremes and all windows of a quantity; None where it is unknown."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": median(known), "min": min(known), "max": max(known), "windows": known}


def head(job: Job) -> dict[str, Any]:
    """What a row says of its run whether or not it succeeds."""
    return {
        "name": job.name,
        "model": job.model_name,
        "by": "sftkit" if job.worker is None else Path(job.worker).stem,
        "set": job.changes,
        "options": job.options,
        "environment": job.environment,
        "warm_from": job.warm_from,
        "baseline": job.baseline,
        "same_loss_as": job.same_loss_as,
        "steps": {"total": job.steps.total, "warm_up": job.steps.warm_up, "window": job.steps.window},
    }


def measured(lines: Sequence[Line], steps: Steps) -> dict[str, Any]:
    """Speed, memory, padding and losses out of the logged lines of a run.

    Memory is that of all steps, speed that of the timed windows, a loss the mean per target of its window.
    """
    windows = timed(lines, steps)

    def of(key: str) -> dict[str, Any] | None:
        return spread([line.get(key) for line in windows])

    last = lines[-1]
    return {
        "steps_timed": steps.total - steps.warm_up,
        "tok_per_sec": of("perf/tok_per_sec"),
        "target_tok_per_sec": of("perf/target_tok_per_sec"),
        "step_seconds": of("perf/step_seconds"),
        "mfu": of("perf/mfu"),
        "data_wait_pct": of("perf/data_wait_pct"),
        "padding_pct": of("data/padding_pct"),
        "peak_memory_gib": max((line["perf/peak_memory_gib"] for line in lines), default=None),
        "compile": {key.removeprefix("compile/"): last[key] for key in last if key.startswith("compile/")},
        "losses": {str(line["step"]): line["train/loss"] for line in lines},
        "grad_norms": {str(line["step"]): line["train/grad_norm"] for line in lines},
    }


def run_job(job: Job, run: Callable[[Job], dict[str, Any]]) -> None:
    """What the process of a run does: run it and write its row, which says so if it failed; exit code 1 then."""
    try:
        write_row(job, {**head(job), **run(job), "error": None})
    except Exception as error:
        traceback.print_exc()
        write_row(job, {**head(job), "error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def write_row(job: Job, row: dict[str, Any]) -> None:
    """row.json in the run's folder: what the bench reads when the process has ended."""
    (job.folder / "row.json").write_text(json.dumps(row, indent=1))
