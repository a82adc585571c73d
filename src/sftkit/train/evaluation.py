"""An evaluation in the loop: the one before the first step, and those after a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sftkit.config.schema import Config, EvalConfig
from sftkit.engine.engine import Engine
from sftkit.errors import ConfigError, Stopped
from sftkit.rundir.names import EVALS
from sftkit.rundir.status import RunStatus
from sftkit.runtime.start import Runtime
from sftkit.tracking.rows import has_row
from sftkit.train.due import evaluation_due
from sftkit.train.parts import Evaluate, TrainServices


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation; empty if there was none."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    "sample answers"
    stopped: bool = False
    "a stop was requested meanwhile, so it has found nothing"


def first_evaluation(
    cfg: Config, status: RunStatus, rt: Runtime, engine: Engine, services: TrainServices
) -> Evaluation:
    """Evaluate before the first step of this start, if that is due; every rank calls it.

    Args:
        status: at the step that this start goes on from.

    Raises:
        ConfigError: the time of train.max_minutes is up.
    """
    step, run_dir = status.step, services.checkpoints.run_dir
    assert status.total_steps is not None
    stopped, evaluation = rt.stop_requested(), Evaluation()
    if not stopped and first_evaluation_due(cfg.eval, step, status.total_steps, rt, run_dir):
        evaluation = evaluate_at(step, status, engine, services.evaluate)
        stopped = evaluation.stopped
    if stopped:  # a signal would have ended the process
        raise ConfigError(
            f"train.max_minutes={cfg.train.max_minutes:g}: the time was up before the first step, so nothing was "
            "trained. Allow more time than loading, compiling and the first evaluation take"
        )
    return evaluation


def first_evaluation_due(eval: EvalConfig, step: int, total_steps: int, rt: Runtime, run_dir: Path) -> bool:
    """Return whether an evaluation comes before the first step of this start: at step 0 if eval.at_start says so; later
    if the resumed step lacks its own, because a stop cut it short or because the checkpoint is another run's."""
    if step == 0:
        return eval.at_start
    if not evaluation_due(eval, step, total_steps):
        return False
    # One rank reads the file for all: each must decide alike, and only the main rank's disk is sure to have it.
    return not (rt.resumes and rt.from_main(lambda: has_row(run_dir / EVALS, step)))


def evaluate_at(step: int, status: RunStatus, engine: Engine, evaluate: Evaluate) -> Evaluation:
    """Evaluate the weights after a step; every rank calls it."""
    status.at(step, "evaluation")
    with engine.evaluating():
        try:
            return Evaluation(*evaluate(step))
        except Stopped:
            return Evaluation(stopped=True)


def record_evaluation(
    services: TrainServices, step: int, evaluation: Evaluation, axes: dict[str, float | None]
) -> None:
    """Log an evaluation, and let it choose the best checkpoint.

    Args:
        axes: see Meter.axes.
    """
    services.tracker.log_evals(step, evaluation.metrics, evaluation.samples, axes)
    services.checkpoints.evaluated(step, evaluation.metrics)
