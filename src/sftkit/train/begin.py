"""What a start does before its first step, and when it has done that: then the run directory is its own."""

from __future__ import annotations

import time

from sftkit.data.loader import Batches
from sftkit.engine.engine import Engine, WarmUp
from sftkit.rundir.status import RunStatus
from sftkit.runtime.open import claim_run_dir
from sftkit.runtime.signals import Deadline
from sftkit.runtime.start import Runtime
from sftkit.tracking.checks import Check
from sftkit.train import proof
from sftkit.train.evaluation import Evaluation, record_evaluation
from sftkit.train.parts import TrainServices


def open_status(rt: Runtime, services: TrainServices, total_steps: int, max_minutes: float | None) -> RunStatus:
    """Return the status of the run, at the step that this start goes on from; the main rank's time limit begins.

    Args:
        max_minutes: train.max_minutes.
    """
    status = rt.open_status(rt.output_dir(services.checkpoints.run_dir))
    status.step, status.total_steps = services.resumed["step"], total_steps
    if max_minutes is not None and rt.is_main:
        rt.stopping.deadline = Deadline(max_minutes, save_seconds=services.resumed.get("save_seconds"))
    return status


def warm_up(engine: Engine, batches: Batches, services: TrainServices, status: RunStatus) -> tuple[WarmUp, list[Check]]:
    """Warm the engine up; return what it tells of it, and all checks that can be made before the first step.

    Raises:
        ConfigError: the run cannot work like this.
    """
    status.at(status.step, "warm-up")
    tracker, checkpoints = services.tracker, services.checkpoints
    ready = engine.warm_up(tracker.print)
    checks = [
        *ready.checks,
        *services.data_checks,
        proof.mask_check(batches.examples, proof.eos_token_ids_of(engine.model.orig_model)),
        proof.resume_check(status.step, checkpoints.resumed_from),
    ]
    for check in checks:
        if check.ok is False:
            tracker.print(f"check failed: {check.name}: {check.found} (expected: {check.expected})", "warning")
    return ready, checks


def begin_writing(
    rt: Runtime, services: TrainServices, step: int, evaluation: Evaluation, axes: dict[str, float | None]
) -> float:
    """Claim the run directory and begin to write in it: the first step of this start is done, or none is left to do.

    Args:
        step: the last one before this start. evaluation: the one at it, empty without one. axes: see Meter.axes.

    Returns:
        the seconds that this took.
    """
    started = time.perf_counter()
    claim_run_dir(rt)
    services.checkpoints.archive_later_steps(step)
    services.tracker.open()
    for problem in services.checkpoints.skipped_checkpoints:
        services.tracker.event("checkpoint_fallback", step, problem)
    if evaluation.metrics or evaluation.samples:
        record_evaluation(services, step, evaluation, axes)
    rt.barrier()
    return time.perf_counter() - started
