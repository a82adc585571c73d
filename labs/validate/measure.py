"""Read what a run's files say, for the judge. Only files are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from sftkit.rundir.files import read_object
from sftkit.rundir.names import (
    ENVIRONMENT,
    ERRORS,
    EVALS,
    EVALUATIONS,
    METRICS_FILE,
    PROOF,
    RESULTS,
    STATUS,
    STEP_DIRS,
    SUMMARY,
)
from sftkit.tracking.rows import MetricsLine, read_metric_rows, read_results


@dataclass(frozen=True)
class Measured:
    """One run, as its own files tell it."""

    error: str | None
    "why it did not finish; then the rest may be missing"
    lines: list[MetricsLine] = field(default_factory=list)
    "metrics.jsonl"
    evals: MetricsLine = field(default_factory=dict)
    "the last evaluation, without step and time"
    results: list[dict[str, Any]] = field(default_factory=list)
    "tasks of that evaluation: value, low and high of its 95 % interval"
    summary: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    proof: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    rank_errors: list[str] = field(default_factory=list)

    def timed(self, warm_up: int) -> list[MetricsLine]:
        """Return the windows after so many steps."""
        return [line for line in self.lines if line["step"] > warm_up]

    def speeds(self, warm_up: int) -> list[float]:
        """Return the useful tokens/s of each timed window."""
        return [line["perf/tok_per_sec"] for line in self.timed(warm_up)]

    def step_seconds(self, warm_up: int) -> list[float]:
        """Return the seconds per step of each timed window."""
        return [found for line in self.timed(warm_up) if (found := line.get("perf/step_seconds")) is not None]

    def losses(self, warm_up: int) -> dict[int, float]:
        """Return step -> training loss of the window that ends there, after the warm-up, in nats per target token."""
        return {line["step"]: line["train/loss"] for line in self.timed(warm_up) if line["train/loss"] is not None}

    def last(self, name: str) -> float | None:
        """Return the last logged value."""
        return self.lines[-1].get(name) if self.lines else None

    def largest(self, name: str) -> float | None:
        """Return the largest logged value."""
        return max((line[name] for line in self.lines if line.get(name) is not None), default=None)

    def proof_row(self, name: str) -> dict[str, Any] | None:
        """Return a row of proof.json by its name."""
        return next((row for row in self.proof.get("rows", []) if row["name"] == name), None)


def measure(folder: Path, error: str | None) -> Measured:
    """Read what a run left in its folder.

    Args:
        error: how its process ended; None: well.
    """
    evals = read_metric_rows(folder / EVALS)
    newest = max((folder / EVALUATIONS).glob(f"{STEP_DIRS}/{RESULTS}"), default=None)
    return Measured(
        error=error,
        lines=read_metric_rows(folder / METRICS_FILE),
        results=read_results(newest) if newest else [],
        evals={k: v for k, v in (evals[-1] if evals else {}).items() if k not in ("step", "time")},
        summary=read_object(folder / SUMMARY),
        status=read_object(folder / STATUS),
        proof=read_object(folder / PROOF),
        environment=read_object(folder / ENVIRONMENT),
        rank_errors=sorted(path.name for path in (folder / ERRORS).glob("*")),
    )


def format_spread(values: list[float], form: str) -> str:
    """Return the median, and the extremes in brackets."""
    if not values:
        return "-"
    return f"{format(median(values), form)} ({format(min(values), form)} to {format(max(values), form)})"
