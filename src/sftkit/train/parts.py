"""The parts of a run, in the order in which train/assemble.py makes them, and the actions after a step: what is due,
evaluations, the state of the loop in a checkpoint, and reports about saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.checkpoint.resume import NO_CHECKPOINT, ResumeCheckpoint
from sftkit.config.schema import CheckpointConfig, Config, DataConfig, EvalConfig, LogConfig
from sftkit.data.batches.loader import Batches
from sftkit.data.tokens.chat import PromptedTargets
from sftkit.data.types import Examples, Row
from sftkit.engine.engine import Engine
from sftkit.errors import NumericsError, Stopped, config_error
from sftkit.rundir.files import has_row
from sftkit.rundir.names import EVALS
from sftkit.rundir.status import RunStatus
from sftkit.runtime.signals import save_seconds
from sftkit.runtime.start import Runtime
from sftkit.tracking import meter, names
from sftkit.tracking.tracker import Tracker

if TYPE_CHECKING:
    from sftkit.checkpoint.save import SaveEnd
    from sftkit.verify.round_trip import RoundTrip

Evaluate = Callable[[int], tuple[dict[str, float | None], list[dict[str, Any]]]]
"step -> (metrics, sample answers)"


@dataclass(frozen=True)
class Run:
    """A run on this process: recipe, ranks and directory, which every later step of the assembly needs."""

    cfg: Config
    stage: str
    "base, mid, sft or caption; also the run's name on a dashboard"
    rt: Runtime
    dir: Path
    "directory written before the first step is done: run.dir, or a folder in it if run.dir holds an earlier run"
    resume: ResumeCheckpoint = NO_CHECKPOINT
    "checkpoint to resume, by train.resume, or by auto if the launcher restarted the run"


@dataclass(frozen=True)
class LoadedModel:
    """The model and tokenizer that training starts from."""

    orig_model: PreTrainedModel
    "model for evaluation, samples and checkpoints; only a training step runs it compiled"
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    "maximum row positions of a document: from the recipe, or from the run that the model comes from"


@dataclass(frozen=True)
class Data:
    """The data of a run: for training, validation and samples."""

    batches: Batches
    validation: dict[str, Examples]
    samples: list[Row]
    "validation rows that the model answers as samples"
    prompted_targets: PromptedTargets | None
    "comparison of targets with a server's prompts, on small conversations; None: every token is a target"


@dataclass(frozen=True)
class EncodedDocuments:
    """Tokenized documents, before they are laid out in rows."""

    examples: Examples
    max_length: int
    "maximum row positions of a document"
    pad_id: int = 0


class Saves(Protocol):
    """The checkpoints of the loop: checkpoint.checkpoint.Checkpoints, or a stand-in for benchmarks and tests."""

    @property
    def run_dir(self) -> Path:
        """Return the parent of the step directories."""

    @property
    def resumed_from(self) -> Path | None:
        """Return the step directory that this start resumes from; None: it starts at step 0."""

    @property
    def skipped_checkpoints(self) -> Sequence[str]:
        """Return the reasons why newer checkpoints were skipped."""

    @property
    def last_save(self) -> Mapping[str, float]:
        """Return seconds and bytes of the newest save, by their metric names without ckpt/."""

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> Path:
        """Save a checkpoint in the background and return its step directory; `wait`: return after it is published."""

    def evaluated(self, step: int, values: dict[str, float | None]) -> None:
        """Choose the best checkpoint by the metrics of an evaluation."""

    def archive_later_steps(self, step: int) -> None:
        """Rename checkpoints of later steps, which will be trained again."""

    def finish(self) -> None:
        """Wait for a save in progress."""

    def ended_saves(self) -> Sequence[SaveEnd]:
        """Return the results of the saves that ended since the last call."""


@dataclass(frozen=True)
class TrainServices:
    """The functions with which the loop evaluates, saves and logs."""

    evaluate: Evaluate
    "evaluates orig_model at a step; every rank calls it"
    checkpoints: Saves
    tracker: Tracker
    resumed: Mapping[str, Any]
    "result of Checkpoints.resume"
    data_checks: Sequence[names.Check] = ()
    "earlier checks of the data, for proof.json"
    check_validation: Callable[[], list[names.Check]] = list
    "compares validation losses with an independent computation after the warm-up; every rank calls it"
    round_trip: RoundTrip | None = None
    "opens the first checkpoint as others do; None: nothing is opened"


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
        raise config_error("no time for a step", max_minutes=cfg.train.max_minutes)
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

    step: int
    epoch: int
    total_steps: int
    progress: names.Progress
    counts: meter.RunCounts
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
        names.PROGRESS: asdict(position.progress),
        "epoch": position.epoch,
        "total_steps": position.total_steps,
        "tracker": services.tracker.run_id,
        # Plan segments, under the name that all checkpoints use.
        "stretches": [segment._asdict() for segment in batches.segments],
        "order": batches.order.state(position.step),
        **{name: getattr(data, name) for name in DATA_KEYS},
        "save_seconds": save_seconds(services.checkpoints.last_save),
        meter.RUN_COUNTS: position.counts,
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


def opened(services: TrainServices, seconds: float | None = None) -> list[names.Check]:
    """Return the check of the first checkpoint once it is made. `seconds`: how long to wait; None: not at all."""
    return [] if services.round_trip is None else services.round_trip.checks(seconds)
