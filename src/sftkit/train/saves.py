"""Actions after a step: what is due, evaluations, the state of the loop in a checkpoint, and reports about saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sftkit.config.schema import CheckpointConfig, Config, DataConfig, EvalConfig, LogConfig
from sftkit.data.batches.loader import Batches
from sftkit.engine.engine import Engine
from sftkit.errors import ConfigError, NumericsError, Stopped
from sftkit.rundir.files import has_row
from sftkit.rundir.names import EVALS
from sftkit.rundir.status import RunStatus
from sftkit.runtime.signals import save_seconds
from sftkit.runtime.start import Runtime
from sftkit.tracking.meter import RUN_COUNTS, RunCounts
from sftkit.tracking.names import PROGRESS, Check, Progress
from sftkit.train.parts import Evaluate, Saves, TrainServices


@dataclass(frozen=True)
class Due:
    """The actions after a step, in this order."""

    log: bool
    "also before every save and evaluation, so that a checkpoint ends a window"
    save: bool
    wait_for_save: bool
    "wait until the checkpoint is published"
    evaluate: bool

    @property
    def keeps_weights(self) -> bool:
        """Return whether the weights of this step are saved or evaluated."""
        return self.save or self.evaluate

    def if_stopped(self) -> Due:
        """Return what is due if training ends early at this step: a line and a checkpoint, no evaluation."""
        return Due(log=True, save=True, wait_for_save=True, evaluate=False)


def due_after(step: int, total_steps: int, log: LogConfig, checkpoint: CheckpointConfig, eval: EvalConfig) -> Due:
    """Return the actions after a step, according to the recipe."""
    last = step == total_steps
    saves = last or bool(checkpoint.every and step % checkpoint.every == 0)
    evaluates = evaluation_due(eval, step, total_steps)
    logs = saves or evaluates or step % log.every == 0
    return Due(log=logs, save=saves, wait_for_save=last, evaluate=evaluates)


def evaluation_due(eval: EvalConfig, step: int, total_steps: int) -> bool:
    """Return whether an evaluation follows a step."""
    return step == total_steps or bool(eval.every and step % eval.every == 0)


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation; empty if there was none."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    "sample answers"
    stopped: bool = False
    "a stop was requested during the evaluation, so there are no results"


def first_evaluation(
    cfg: Config, status: RunStatus, rt: Runtime, engine: Engine, services: TrainServices
) -> Evaluation:
    """Evaluate before the first step of this start if that is due; every rank calls it.

    Args:
        status: status at the step from which this start continues.

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
    """Return whether an evaluation precedes the first step of this start: at step 0 if eval.at_start is set; later if
    the resumed step lacks its evaluation, because a stop interrupted it or the checkpoint belongs to another run.
    """
    if step == 0:
        return eval.at_start
    if not evaluation_due(eval, step, total_steps):
        return False
    # One rank reads the file for all: every rank must decide alike, and only the main rank's disk surely has it.
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
    """Log an evaluation and let it choose the best checkpoint.

    Args:
        axes: see Meter.axes.
    """
    services.tracker.log_evals(step, evaluation.metrics, evaluation.samples, axes)
    services.checkpoints.evaluated(step, evaluation.metrics)


DATA_KEYS = ("thinking", "split_turns", "targets", "too_long")
"Keys of the recipe's data section that define the targets of a document."


@dataclass(frozen=True)
class LoopPosition:
    """The position of the loop when a step is saved."""

    epoch: int
    total_steps: int
    progress: Progress
    counts: RunCounts
    "Monitor.counts"


def checkpoint_state(
    position: LoopPosition, data: DataConfig, batches: Batches, services: TrainServices
) -> dict[str, Any]:
    """Return the state as JSON values under the names that Checkpoints.resume returns."""
    return {
        # Besides weights, optimizer and random states, a resume needs only this: the counts and plans that it must
        # not redo.
        "tokens": position.progress.tokens,
        "max_length": batches.layout.max_length,
        PROGRESS: asdict(position.progress),
        "epoch": position.epoch,
        "total_steps": position.total_steps,
        "tracker": services.tracker.run_id,
        # Plan segments, under the name that all checkpoints use.
        "stretches": [segment._asdict() for segment in batches.segments],
        **{name: getattr(data, name) for name in DATA_KEYS},
        "save_seconds": save_seconds(services.checkpoints.last_save),
        RUN_COUNTS: position.counts,
    }


@contextmanager
def finish_checkpoint_on_error(checkpoints: Saves, report: Callable[[], None]) -> Iterator[None]:
    """Finish the checkpoint in progress if numerics end training, which happens on all ranks together."""
    try:
        yield
    except NumericsError:
        checkpoints.finish()
        report()
        raise


def report_saves(services: TrainServices, status: RunStatus, rt: Runtime) -> None:
    """Log an event for each save that failed since the last call; record a failure of the newest in run_status.json."""
    for saved, failure in services.checkpoints.ended_saves():
        if failure is not None:
            text = f"checkpoint not written: {failure}. Older ones stay, the next save tries again"
            services.tracker.event("checkpoint_failed", saved, text)
        if rt.is_main:
            status.save_ended(saved, failure)
            if services.round_trip is not None:
                services.round_trip.ended_save(saved, failure, services.checkpoints.run_dir)


def opened(services: TrainServices, seconds: float | None = None) -> list[Check]:
    """Return the check of the first checkpoint once it is made. `seconds`: how long to wait; None: not at all."""
    return [] if services.round_trip is None else services.round_trip.checks(seconds)
