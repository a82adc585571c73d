"""The beginning of a start: before its first step, and right after it, when it claims the run directory."""

from __future__ import annotations

import time
from pathlib import Path

from sftkit.config.schema import OptimConfig
from sftkit.data.batches.loader import Batches
from sftkit.engine.engine import Engine, WarmUp
from sftkit.rundir.names import step_dir
from sftkit.rundir.status import RunStatus
from sftkit.runtime.open import claim_run_dir
from sftkit.runtime.signals import Deadline
from sftkit.runtime.start import Runtime
from sftkit.tracking.checks import Check
from sftkit.train import proof
from sftkit.train.evaluation import Evaluation, record_evaluation
from sftkit.train.parts import TrainServices
from sftkit.train.summary import Trained
from sftkit.verify.counts import flops_check, rates_check


def open_status(rt: Runtime, services: TrainServices, total_steps: int, max_minutes: float | None) -> RunStatus:
    """Return the status of the run, at the step that this start resumes from; start the time limit of the main rank.

    Args:
        max_minutes: train.max_minutes.
    """
    status = rt.open_status(rt.output_dir(services.checkpoints.run_dir))
    status.step, status.total_steps = services.resumed["step"], total_steps
    # One clock decides: the other ranks learn of its stop from the flags of a step.
    if max_minutes is not None and rt.is_main:
        rt.stopping.deadline = Deadline(max_minutes, save_seconds=services.resumed.get("save_seconds"))
    return status


def warm_up_engine(
    engine: Engine, batches: Batches, services: TrainServices, status: RunStatus, rt: Runtime, optim: OptimConfig
) -> tuple[WarmUp, list[Check]]:
    """Warm up the engine, make all checks that need no step, and write them to proof.json.

    Raises:
        ConfigError: the run cannot work like this.
    """
    status.at(status.step, "warm-up")
    ready = engine.warm_up(rt.print)
    checks = [
        *ready.checks,
        *services.data_checks,
        *services.check_validation(),
        rates_check(status.total_steps or 1, optim),
        flops_check(engine.model),
        proof.mask_check(batches.examples, proof.eos_token_ids_of(engine.model.orig_model)),
        proof.resume_check(status.step, services.checkpoints.resumed_from),
    ]
    # A failed check only warns here: what makes training wrong for certain, the engine has refused. None: not checked.
    proof.reported(checks, rt)
    # A start that has nothing left to train leaves the proof of the one that trained.
    if rt.is_main and status.step != status.total_steps:
        proof.write_proof(status.run_dir, checks)
    return ready, checks


def start_summary(status: RunStatus, ready: WarmUp, evaluation: Evaluation, run_dir: Path) -> Trained:
    """Return the summary of a start before its first step.

    Args:
        evaluation: the one before the first step, empty without one.
    """
    assert status.total_steps is not None
    return Trained(
        status.step,
        status.total_steps,
        warm_up_seconds=ready.seconds,
        compiled=ready.compiled,
        evals=evaluation.metrics,
        samples=evaluation.samples,
        evals_at_start={} if status.step else evaluation.metrics,
        checkpoint=str(step_dir(run_dir, status.step)) if status.step else "",
    )


def begin_writing(
    rt: Runtime, services: TrainServices, step: int, evaluation: Evaluation, axes: dict[str, float | None]
) -> float:
    """Claim the run directory and begin to write in it, after the first step of this start, or if no step is
    left to do.

    Args:
        step: that this start resumed from, or 0. evaluation: of that step, empty if there was none. axes: see
            Meter.axes.

    Returns:
        the seconds that this took.
    """
    started = time.perf_counter()
    # In this order: the directory becomes ours, checkpoints of steps that are trained again go aside, and only
    # then lines are appended after the resumed step. A start that fails before its first step thus changes nothing
    # of an earlier run.
    claim_run_dir(rt)
    services.checkpoints.archive_later_steps(step)
    services.tracker.open()
    for problem in services.checkpoints.skipped_checkpoints:
        services.tracker.record_event("checkpoint_fallback", step, problem)  # printed when it was found
    if evaluation.metrics or evaluation.samples:
        record_evaluation(services, step, evaluation, axes)
    # No rank goes on before the directory is as the main rank leaves it.
    rt.barrier()
    return time.perf_counter() - started
