"""The only training loop. It takes things and functions, never a stage name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from sftkit.config.schema import Config, EvalConfig
from sftkit.data.loader import Batches
from sftkit.engine.engine import Engine
from sftkit.engine.replicas import Replicas
from sftkit.errors import ConfigError, Stopped
from sftkit.optim.schedule import learning_rate
from sftkit.rundir.names import EVALS, step_dir
from sftkit.runtime.consistency import assert_same_on_ranks, data_identity
from sftkit.runtime.open import claim_run_dir
from sftkit.runtime.signals import Deadline, save_seconds
from sftkit.runtime.start import Runtime, garbage_collected_between_steps
from sftkit.runtime.watchdog import watched
from sftkit.tracking.checks import Check
from sftkit.tracking.experts import ExpertLoad
from sftkit.tracking.health import Health, Reports
from sftkit.tracking.meter import Meter
from sftkit.tracking.progress import PROGRESS
from sftkit.tracking.rows import has_row
from sftkit.tracking.trace import Trace
from sftkit.tracking.tracker import Tracker
from sftkit.tracking.window import WINDOW, open_window, resume_window
from sftkit.train import proof
from sftkit.train.prefetch import on_device
from sftkit.train.saves import Saves, finish_checkpoint_on_error, report_saves
from sftkit.train.summary import Trained

Evaluation = tuple[dict[str, float | None], list[dict[str, Any]]]
"(metrics, sample answers)"
Evaluate = Callable[[int], Evaluation]
"step -> its evaluation"


@dataclass(frozen=True)
class Bookkeeping:
    """What is measured, kept and told of a run beside its steps."""

    evaluate: Evaluate
    "evaluates orig_model at a step; every rank calls it"
    checkpoints: Saves
    tracker: Tracker
    resumed: Mapping[str, Any]
    "what Checkpoints.resume returned"
    checked: Sequence[Check] = ()
    "what was checked of the data before, for proof.json"


def train(cfg: Config, rt: Runtime, engine: Engine, batches: Batches, books: Bookkeeping) -> Trained:
    """Train from books.resumed["step"] to the last step, logging, evaluating and saving on the way.

    Args:
        engine: how a step is computed. `engine.model.orig_model` is all that evaluation and checkpoints see.

    Raises:
        NumericsError: as numerics.on_nonfinite, on_spike and check_replicas_every say.
        CheckpointError: the last checkpoint could not be written.
        WorkerError: a data worker was killed.
    """
    evaluate, checkpoints, tracker, resumed = books.evaluate, books.checkpoints, books.tracker, books.resumed
    # How many steps there are is known before the first, and all ranks must have planned the same documents.
    total_steps = batches.num_steps(cfg.train.epochs, cfg.train.max_steps)
    assert_same_on_ranks(rt, data_identity(batches.examples.lengths))
    status = rt.open_status(rt.output_dir(checkpoints.run_dir))
    status.step, status.total_steps = resumed["step"], total_steps
    if cfg.train.max_minutes is not None and rt.is_main:
        rt.stopping.deadline = Deadline(cfg.train.max_minutes, save_seconds=resumed.get("save_seconds"))
    step = first = resumed["step"]
    orig_model, objective = engine.model.orig_model, engine.model.objective
    # What the summary reports: the newest values of each.
    metrics: dict[str, float | None] = {}
    evals: dict[str, float | None] = {}
    evals_at_start: dict[str, float | None] = {}
    samples: list[dict[str, Any]] = []
    with watched(rt, status, cfg.run), closing(engine):
        # Warm-up: every graph is compiled now, for every declared shape. Its checks and those of the data go to proof.json.
        status.at(step, "warm-up")
        ready = engine.warm_up(tracker.print)
        ends = end_tokens(orig_model)
        checks = [
            *ready.checks,
            *books.checked,
            proof.mask_check(batches.examples, ends),
            proof.resume_check(step, checkpoints.resumed_from),
        ]
        for check in checks:
            if check.ok is False:
                tracker.print(f"check failed: {check.name}: {check.found} (expected: {check.expected})", "warning")
        already_done = step == total_steps  # then the proof.json of the start that trained it stays
        if rt.is_main and not already_done:
            proof.write(status.run_dir, checks)
        # After the warm-up, so that a run that cannot train is refused before an evaluation is spent on it.
        stopped = rt.stop_requested()
        if not stopped and evaluates_first(cfg.eval, step, total_steps, rt, checkpoints.run_dir):
            status.at(step, "evaluation")
            with engine.evaluating():
                evals, samples, stopped = _evaluated(evaluate, step)
            evals_at_start = {} if step else evals
        if stopped:  # a signal would have ended the process
            raise ConfigError(
                f"train.max_minutes={cfg.train.max_minutes:g}: the time was up before the first step, so this start has "
                "trained nothing. Allow more than loading, compiling and the evaluation before it take"
            )

        orig_model.train()
        # What is measured and watched; a resumed run takes over counts and the window of steps not yet logged.
        meter = Meter(orig_model, objective, batches, rt)
        health = Health(cfg.numerics, rt, batches, objective, Reports(tracker, status))
        if line := resume_window(resumed, meter, health, rt, cfg.log.every):
            rt.print(line)
        load, first_axes = ExpertLoad(engine.model.routing, rt), meter.axes()
        replicas = Replicas(orig_model, engine.optimizer, rt, cfg.numerics.check_replicas_every)
        report_ended = partial(report_saves, checkpoints, tracker, status, rt)
        # Before the progress bar: data workers are forked, which its thread could break.
        steps = on_device(batches.steps(step, total_steps), rt.device)
        tracker.start_progress(step, total_steps)
        folder = step_dir(checkpoints.run_dir, step)
        with (
            proof.write_proof_on_error(
                status, rt, checks, lambda error: proof.closing_checks(meter, batches, engine, error)
            ),
            engine.guarded(),
            finish_checkpoint_on_error(checkpoints, report_ended),
            batches.workers_named(),
            garbage_collected_between_steps() as collect,
            Trace(cfg.log.trace_at, checkpoints.run_dir, rt) as trace,
        ):
            meter.start()
            if already_done:
                _begin(rt, books, step, (evals, samples), first_axes)
            while step < total_steps and not stopped:
                # Data: the batches of this step, on the device.
                started = time.perf_counter()
                step += 1
                status.at(step, "data")
                step_batches = next(steps)
                meter.waited(time.perf_counter() - started)

                # Step: forward, backward, update. The host should not wait for the device in it: `syncs` counts if it does.
                status.at(step, "step")
                lr = learning_rate(step, total_steps, cfg.optim)
                wish = rt.stopping.stop_requested()
                with meter.syncs.watching():
                    outcome = engine.step(step_batches, lr, stop=wish, spikes=health.spikes)
                meter.add(step_batches, outcome)
                health.add(step, step_batches, outcome)
                # Only a start that has done a step takes its place in the run directory.
                if step == first + 1:
                    float(outcome.grad_norm)  # waits: the device has done the step
                    pausing = time.perf_counter()
                    _begin(rt, books, first, (evals, samples), first_axes)
                    pause = time.perf_counter() - pausing
                    meter.paused(pause)
                    started += pause
                # What is due after this step.
                tracker.advance(step)
                if paused := trace.after(step):
                    meter.paused(paused)

                last = step == total_steps
                logs = last or step % cfg.log.every == 0
                saves = last or bool(cfg.checkpoint.every and step % cfg.checkpoint.every == 0)
                evaluates = evaluation_due(cfg.eval, step, total_steps)
                # Where the host is about to wait anyway, read the flags of all steps; else only those that have arrived.
                stopped, left_out = health.read_flags(wait=logs or saves or evaluates)
                meter.add_skipped(left_out)
                report_ended()
                # What ranks hold alike is compared before it is saved or evaluated.
                replicas.check(step, is_kept=saves or evaluates or stopped)
                if rt.stopping.deadline is not None:
                    rt.stopping.deadline.stepped(time.perf_counter() - started, checkpoints.last_save)
                window = None
                # A checkpoint between two lines keeps the open window, so that a resume writes the lines of an unbroken run.
                if (saves or evaluates or stopped) and not logs:
                    window = open_window(meter, health)
                # Log: close the window of steps since the last line, on all ranks together.
                if logs or stopped:
                    values: dict[str, float | None] = {"train/lr": lr, "train/epoch": step_batches.epoch}
                    values |= load.read(step, checkpoints.run_dir)
                    report = engine.report()
                    saved = {f"ckpt/{name}": value for name, value in checkpoints.last_save.items()}
                    metrics = {**meter.read(), **values, **report.metrics, **saved, **health.read()}
                    tracker.log_metrics(step, total_steps, metrics)
                    for kind, texts in report.events:
                        tracker.new_events(kind, step, texts)
                    collect(1)

                # The checkpoint comes before the evaluation, so that a failed evaluation loses no step.
                pausing = time.perf_counter()
                if saves or evaluates or stopped:
                    # What a resume needs besides weights, optimizer states and random states.
                    progress, axes = meter.progress, meter.axes()
                    state: dict[str, Any] = {"tokens": progress.tokens, "max_length": batches.layout.max_length}
                    state[PROGRESS] = progress.state()
                    state |= {"epoch": step_batches.epoch, "total_steps": total_steps, "tracker": tracker.run_id}
                    state["stretches"] = [segment._asdict() for segment in batches.segments]
                    state |= {
                        name: getattr(cfg.data, name) for name in ("thinking", "split_turns", "targets", "too_long")
                    }
                    state["save_seconds"] = save_seconds(checkpoints.last_save)
                    state[WINDOW] = window or open_window(meter, health)
                if saves or stopped:
                    status.at(step, "checkpoint")
                    folder = checkpoints.save(step, state, wait=last or stopped)
                if evaluates and not stopped:
                    status.at(step, "evaluation")
                    with engine.evaluating():
                        evals, samples, stopped = _evaluated(evaluate, step)
                    if not stopped:
                        tracker.log_evals(step, evals, samples, axes)
                        checkpoints.evaluated(step, evals)
                    else:
                        folder = checkpoints.save(step, state, wait=True)  # only waits if it is there or on its way
                    collect()
                if saves or evaluates or stopped:
                    meter.paused(time.perf_counter() - pausing)
        status.at(step, "checkpoint")
        checkpoints.finish()
        report_ended()
        # Proof: the checks of the whole run, and logits to compare a loaded checkpoint with.
        logits = proof.logits_of(orig_model)
        checks += proof.closing_checks(meter, batches, engine, None)
        if rt.is_main and not already_done:
            proof.write(status.run_dir, checks, logits)
        # Only one rank may have received the signal.
        number = rt.agreed_signal() if stopped else None
        if rt.is_main:
            status.write_end(number, stopped=stopped)

    return Trained(
        step=step,
        total_steps=total_steps,
        tokens=meter.progress.tokens,
        train_seconds=meter.total_step_seconds,
        warm_up_seconds=ready.seconds,
        compiled=ready.compiled,
        stopped=stopped,
        metrics=metrics,
        evals=evals,
        samples=samples,
        evals_at_start=evals_at_start,
        checkpoint=str(folder) if step else "",
    )


def _begin(rt: Runtime, books: Bookkeeping, step: int, evaluation: Evaluation, axes: dict[str, float | None]) -> None:
    """Claim the run directory and begin to write in it: the first step of this start is done, or none is left to do.

    Args:
        step: the last one before this start. evaluation: (metrics, samples) at it, empty without one. axes: see Meter.axes.
    """
    checkpoints, tracker, (evals, samples) = books.checkpoints, books.tracker, evaluation
    claim_run_dir(rt)
    checkpoints.archive_later_steps(step)
    tracker.open()
    for problem in checkpoints.skipped_checkpoints:
        tracker.event("checkpoint_fallback", step, problem)
    if evals or samples:
        tracker.log_evals(step, evals, samples, axes)
        checkpoints.evaluated(step, evals)
    rt.barrier()


def evaluation_due(cfg: EvalConfig, step: int, total_steps: int) -> bool:
    """Return whether a step is followed by an evaluation."""
    return step == total_steps or bool(cfg.every and step % cfg.every == 0)


def evaluates_first(cfg: EvalConfig, step: int, total_steps: int, rt: Runtime, run_dir: Path) -> bool:
    """Return whether an evaluation comes before the first step of this start: eval.at_start at step 0; else the one
    that the resumed step lacks, because a stop cut it short or because the checkpoint is another run's."""
    if step == 0:
        return cfg.at_start
    if not evaluation_due(cfg, step, total_steps):
        return False
    return not (rt.resumes and rt.from_main(lambda: has_row(run_dir / EVALS, step)))


def end_tokens(orig_model: PreTrainedModel) -> list[int]:
    """Return the tokens that end a turn or text, as generation knows them."""
    ends = orig_model.generation_config.eos_token_id if orig_model.generation_config else None
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _evaluated(evaluate: Evaluate, step: int) -> tuple[dict[str, float | None], list[dict[str, Any]], bool]:
    """Evaluate; return (metrics, samples, stopped). If a stop was requested meanwhile, metrics and samples are
    empty."""
    try:
        return *evaluate(step), False
    except Stopped:
        return {}, [], True
