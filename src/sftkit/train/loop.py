"""The only training loop, with its work before the first step and at each logged line. It takes parts and functions,
never a stage name.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sftkit.config.schema import Config
from sftkit.data.batches.loader import Batches, StepBatches
from sftkit.engine.engine import Engine
from sftkit.errors import Stopped, config_error
from sftkit.optim.protocol import learning_rate
from sftkit.rundir.names import step_dir
from sftkit.rundir.status import RunStatus
from sftkit.runtime import signals, watchdog
from sftkit.runtime.open import assert_same_on_ranks, claim_run_dir, data_identity
from sftkit.runtime.start import Runtime, garbage_collected_between_steps
from sftkit.tracking import meter, names
from sftkit.tracking.health import ExpertLoad, Health
from sftkit.train import end, parts
from sftkit.train.end import Trained, write_end
from sftkit.train.parts import TrainServices

if TYPE_CHECKING:
    from sftkit.verify.proof import WarmUp

AHEAD = 2
LONGEST_OPENING = 900.0
"Seconds that the end of training waits for the process that loads the first checkpoint: at most."


def on_device(steps: Iterable[StepBatches], device: torch.device) -> Iterator[StepBatches]:
    """Yield the same steps with their micro-batches on the device. Pinned batches are copied while earlier
    steps compute.
    """
    if device.type != "cuda":
        yield from steps
        return
    # On the compute stream a copy would wait for the steps already queued there.
    stream = torch.cuda.Stream(device)
    waiting: deque[tuple[StepBatches, torch.cuda.Event]] = deque()
    for step in steps:
        with torch.cuda.stream(stream):
            moved = replace(step, micro_batches=[batch.to(device) for batch in step.micro_batches])
        waiting.append((moved, stream.record_event()))
        # A step is yielded after the copies of the next ones are launched, so that they run while it computes.
        if len(waiting) > AHEAD:
            yield _arrived(*waiting.popleft())
    while waiting:
        yield _arrived(*waiting.popleft())


def _arrived(step: StepBatches, copied: torch.cuda.Event) -> StepBatches:
    """Make the compute stream, not the host, wait for the copy; its memory is not reused before that stream is done."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for batch in step.micro_batches:
        for tensor in batch.tensors():
            tensor.record_stream(current)
    return step


class Monitor:
    """Record each step in meter, health and expert load. Every rank has an instance and calls the same methods."""

    def __init__(self, cfg: Config, rt: Runtime, engine: Engine, batches: Batches, services: TrainServices) -> None:
        """Begin to measure; a resumed run restores its counts."""
        model = engine.model
        self.meter = meter.Meter(model.orig_model, model.objective, batches, rt)
        self.health = Health(cfg.numerics, rt, batches, model.objective, services.tracker)
        self.expert_load = ExpertLoad(model.routing, rt)
        self.meter.resume(services.resumed)
        counts = services.resumed.get(meter.RUN_COUNTS, {})  # checkpoints of earlier versions have none
        if health := counts.get("health"):
            self.health.restore(health)
        self._members = engine.training.members
        if self._members is not None and "members" in counts:
            self._members.restore(counts["members"])

    def add(self, step: int, step_batches: StepBatches, outcome: names.StepOutcome) -> None:
        """Add a launched step."""
        self.meter.add(step_batches, outcome)
        self.health.add(step, step_batches, outcome)

    def read_flags(self, *, wait: bool) -> bool:
        """Check the steps whose flags have arrived, or all steps if `wait`.

        Returns:
            whether a rank requests a stop

        Raises:
            NumericsError: see Health.read_flags.
        """
        stopped, skipped = self.health.read_flags(wait=wait)
        self.meter.add_skipped(skipped)
        return stopped

    def counts(self) -> meter.RunCounts:
        """Return the counts since the start of the run, for a checkpoint. Waits for the device."""
        members = {} if self._members is None else {"members": self._members.counts()}
        return {"meter": self.meter.counts(), "health": self.health.counts(), **members}


def log_window(
    monitor: Monitor, engine: Engine, services: TrainServices, status: RunStatus, values: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Close the window of steps since the last line and log it; every rank calls it. Waits for the device.

    Args:
        values: values of the last step.

    Returns:
        metrics of the line
    """
    assert status.total_steps is not None
    tracker, checkpoints = services.tracker, services.checkpoints
    # Each of these calls exchanges sums with the other ranks, so all ranks must use the same order.
    loads = monitor.expert_load.read(status.step, checkpoints.run_dir)
    report = engine.report()
    members = engine.training.members
    of_members, events = ({}, []) if members is None else members.read()
    metrics = {**monitor.meter.read(), **values, **loads, **report.metrics, **of_members}
    metrics |= {f"ckpt/{name}": value for name, value in checkpoints.last_save.items()} | monitor.health.read()
    tracker.log_metrics(status.step, status.total_steps, metrics)
    for kind, texts in [*report.events(), *events]:
        tracker.new_events(kind, status.step, texts)
    return metrics


def open_status(rt: Runtime, services: TrainServices, total_steps: int, max_minutes: float | None) -> RunStatus:
    """Return the run's status at the step that this start resumes from; start the time limit of the main rank.

    Args:
        max_minutes: value of train.max_minutes.
    """
    status = rt.open_status(rt.output_dir(services.checkpoints.run_dir))
    status.step, status.total_steps = services.resumed["step"], total_steps
    # One clock decides: the flags of a step carry its stop to the other ranks.
    if max_minutes is not None and rt.is_main:
        rt.stopping.deadline = signals.Deadline(max_minutes, save_seconds=services.resumed.get("save_seconds"))
    return status


def warm_up_engine(
    cfg: Config, engine: Engine, batches: Batches, services: TrainServices, status: RunStatus, rt: Runtime
) -> tuple[WarmUp, list[names.Check]]:
    """Warm up the engine, make all checks that need no step, and write them to proof.json.

    Raises:
        ConfigError: the run cannot work with these settings, or the time of train.max_minutes is up.
    """
    from sftkit.verify import proof
    from sftkit.verify.counts import flops_check, rates_check
    from sftkit.verify.proof import verified_warm_up

    status.at(status.step, "warm-up")
    ready = verified_warm_up(engine, rt, rt.print)
    try:
        validation = services.check_validation()
    except Stopped:
        raise config_error("no time for a step", max_minutes=cfg.train.max_minutes) from None
    checks = [
        *ready.checks,
        *services.data_checks,
        *validation,
        rates_check(status.total_steps or 1, cfg.optim),
        flops_check(engine.model),
        proof.mask_check(batches.examples, proof.eos_token_ids_of(engine.model.orig_model)),
        proof.resume_check(status.step, services.checkpoints.resumed_from),
    ]
    # A failed check only warns here: the engine already rejected certain failures. None: not checked.
    end.reported(checks, rt)
    # A start with no steps left keeps the proof of the start that trained.
    if rt.is_main and status.step != status.total_steps:
        end.write_proof(status.run_dir, checks)
    return ready, checks


def start_summary(status: RunStatus, ready: WarmUp, evaluation: parts.Evaluation, run_dir: Path) -> Trained:
    """Return the summary of a start before its first step.

    Args:
        evaluation: evaluation before the first step, empty without one.
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
    rt: Runtime, services: TrainServices, step: int, evaluation: parts.Evaluation, axes: dict[str, float | None]
) -> float:
    """Claim the run directory and begin to write in it, after the first step of this start, or if no step is
    left to do.

    Args:
        step: step that this start resumed from, or 0. evaluation: evaluation of that step, empty if there was none.
            axes: see Meter.axes.

    Returns:
        seconds that this took.
    """
    started = time.perf_counter()
    # In this order: claim the directory, archive checkpoints of steps that are trained again, and only then append
    # lines after the resumed step. A start that fails before its first step thus changes nothing of an earlier run.
    claim_run_dir(rt)
    services.checkpoints.archive_later_steps(step)
    services.tracker.open()
    for problem in services.checkpoints.skipped_checkpoints:
        services.tracker.record_event("checkpoint_fallback", step, problem)  # printed when it was found
    if evaluation.metrics or evaluation.samples:
        parts.record_evaluation(services, step, evaluation, axes)
    # All ranks wait until the main rank has prepared the directory.
    rt.barrier()
    return time.perf_counter() - started


def train(cfg: Config, rt: Runtime, engine: Engine, batches: Batches, services: TrainServices) -> Trained:
    """Train from services.resumed["step"] to the last step, with logging, evaluation and saving.

    Args:
        cfg: recipe: length of the run, actions after each step, and monitoring; it does not define how a step
            is computed.
        engine: engine that computes a step. Evaluation and checkpoints use `engine.model.orig_model`, not the
            wrapped model.
        batches: this rank's batches of every step, from the plans of the epochs, which also determine the
            number of steps.
        services: functions that evaluate, save and log; and the state that this start resumes.

    Raises:
        NumericsError: as numerics.on_nonfinite, on_spike and check_replicas_every define.
        CheckpointError: the last checkpoint could not be written.
        WorkerError: a data worker was killed.
    """
    from sftkit.verify.counts import FirstWindow
    from sftkit.verify.replicas import FrozenWeights, Replicas
    from sftkit.verify.round_trip import logits_of
    from sftkit.verify.update import FirstUpdate, UpdatesOfMembers

    members = engine.training.members
    checkpoints, tracker, orig_model = services.checkpoints, services.tracker, engine.model.orig_model
    # The number of steps is known before the first one. All ranks must have planned the same documents.
    step = start_step = services.resumed["step"]
    total_steps = batches.num_steps(cfg.train.epochs, cfg.train.max_steps)
    assert_same_on_ranks(rt, data_identity(batches.examples.lengths))
    status = open_status(rt, services, total_steps, cfg.train.max_minutes)
    already_done = step == total_steps  # keeps the proof.json of the earlier start
    with watchdog.Watchdog(rt, status, cfg.run), closing(engine):
        # Warm-up: compile every graph for every declared shape. Its checks and those of the data go to proof.json.
        frozen = FrozenWeights(orig_model, rt)
        ready, checks = warm_up_engine(cfg, engine, batches, services, status, rt)
        # After the warm-up, so that a run that cannot train fails before it spends time on an evaluation.
        evaluation = parts.first_evaluation(cfg, status, rt, engine, services)
        trained = start_summary(status, ready, evaluation, checkpoints.run_dir)
        trained.compile_mode = engine.setup.compile_mode if ready.compiled else ""

        # Measuring, monitoring and writing; the run directory is claimed when the first step is done.
        orig_model.train()
        monitor, stopped = Monitor(cfg, rt, engine, batches, services), False
        begin = partial(begin_writing, rt, services, step, evaluation, monitor.meter.axes())
        update = FirstUpdate(engine, cfg.optim, rt) if members is None else UpdatesOfMembers(engine, cfg.optim, rt)
        window = FirstWindow(batches.examples, rt, engine.model, start_step, cfg.log.every)
        replicas = Replicas(orig_model, engine.optimizer, rt, cfg.numerics.check_replicas_every)
        report_ended_saves = partial(parts.report_saves, services, status, rt)
        # Before the progress bar, which has a thread: data workers are forked, which is unsafe next to
        # threads (pytorch/pytorch#138957).
        steps = on_device(batches.steps(step, total_steps), rt.device)
        traced: Trace | None = None
        if cfg.log.trace_at is not None:
            from sftkit.tracking.trace import Trace

            traced = Trace(cfg.log.trace_at, checkpoints.run_dir, rt)
        closing_checks = partial(end.closing_checks, monitor.meter, batches, engine)
        # Exited in reverse order: on an error the checkpoint in progress is finished first, then the engine adds its
        # advice, and last the error goes into proof.json.
        with (
            end.write_proof_on_error(status, rt, checks, closing_checks),
            engine.guarded(),
            parts.finish_checkpoint_on_error(checkpoints, report_ended_saves),
            batches.workers_named(),
            garbage_collected_between_steps() as collect,
            traced or nullcontext(),
        ):
            monitor.meter.start()
            if already_done:
                begin()
            while step < total_steps and not stopped:
                # Data: the batches of this step, on the device.
                started = time.perf_counter()
                step += 1
                status.at(step, "data")
                step_batches = next(steps)
                monitor.meter.waited(time.perf_counter() - started)

                # Step: forward, backward, update. The host should not wait for the device here; `syncs` counts
                # such waits.
                status.at(step, "step")
                lr = learning_rate(step, total_steps, cfg.optim)
                stop_requested = rt.stopping.stop_requested()
                watched = update.watching() if step == start_step + 1 else nullcontext()
                with monitor.meter.syncs.watching(), watched:
                    outcome = engine.step(step_batches, lr, stop=stop_requested, spikes=monitor.health.spikes)
                monitor.add(step, step_batches, outcome)
                window.add(step_batches, outcome)
                # A step is done, so this start can train: claim the run directory now.
                if step == start_step + 1:
                    grad_norm = float(outcome.grad_norm)  # waits until the device has done the step
                    pausing = time.perf_counter()
                    checks += end.reported(update.checks(grad_norm, lr), rt)
                    begin()
                    if rt.is_main:
                        end.write_proof(status.run_dir, checks)
                    pause = time.perf_counter() - pausing
                    monitor.meter.paused(pause)
                    started += pause
                tracker.advance(step)
                if traced is not None:
                    monitor.meter.paused(traced.after(step))

                # Actions after this step. All ranks see a stop request at the same step.
                due = parts.due_after(step, total_steps, cfg.log, cfg.checkpoint, cfg.eval)
                stopped = monitor.read_flags(wait=due.log)  # without waiting: only flags that have arrived
                due = due.if_stopped() if stopped else due
                pausing = time.perf_counter()
                report_ended_saves()  # may load a small checkpoint again
                monitor.meter.paused(time.perf_counter() - pausing)

                # Log: one line about the steps since the last line; all ranks compute it together.
                if due.log:
                    values = {"train/lr": lr, "train/epoch": step_batches.epoch}
                    trained.metrics = log_window(monitor, engine, services, status, values)
                    checks += end.reported([*window.check(trained.metrics), *parts.opened(services)], rt)
                    collect(1)  # collect young objects only, and here, where the ranks have just waited for each other

                # Compare replicas every few steps, and before weights are kept, which is a pause. The device is idle
                # then, so the time of no step includes it.
                comparing = time.perf_counter()
                replicas.check(step, is_kept=due.keeps_weights)
                if due.keeps_weights:
                    frozen.compare(step)
                    monitor.meter.paused(time.perf_counter() - comparing)
                rt.stopping.add_step(time.perf_counter() - started, checkpoints.last_save)

                # Save, then evaluate, so that a failed evaluation loses no step.
                if due.keeps_weights:
                    pausing = time.perf_counter()
                    rt.check_run_dir(checkpoints.run_dir)
                    progress, axes = monitor.meter.progress, monitor.meter.axes()
                    position = parts.LoopPosition(step, step_batches.epoch, total_steps, progress, monitor.counts())
                    state = parts.checkpoint_state(position, cfg.data, batches, services)
                    if due.save:
                        status.at(step, "checkpoint")
                        trained.checkpoint = str(checkpoints.save(step, state, wait=due.wait_for_save))
                        if services.round_trip is not None:
                            services.round_trip.expect(step)
                    if due.evaluate:
                        evaluation = parts.evaluate_at(step, status, engine, services.evaluate)
                        trained.evals, trained.samples = evaluation.metrics, evaluation.samples
                        stopped = evaluation.stopped
                        if stopped:  # if this step is already saved or being saved, this only waits
                            trained.checkpoint = str(checkpoints.save(step, state, wait=True))
                        else:
                            parts.record_evaluation(services, step, evaluation, axes)
                        collect()
                    monitor.meter.paused(time.perf_counter() - pausing)

        progress = monitor.meter.progress  # before work that is no training
        # Save the last checkpoint, the checks of the whole run, and logits for comparison with a loaded checkpoint.
        status.at(step, "checkpoint")
        checkpoints.finish()
        report_ended_saves()
        rt.check_run_dir(checkpoints.run_dir)
        logits = logits_of(orig_model)
        opened = parts.opened(services, 0.0 if stopped else LONGEST_OPENING)
        checks += [*closing_checks(None), *end.reported([*opened, *frozen.check(step)], rt)]
        if rt.is_main and not already_done:
            end.write_proof(status.run_dir, checks, logits)
        write_end(status, rt, stopped=stopped)
    trained.step, trained.stopped = step, stopped
    trained.tokens, trained.train_seconds = progress.tokens, progress.seconds if progress.is_whole else None
    trained.start_train_seconds = monitor.meter.total_step_seconds
    return trained
