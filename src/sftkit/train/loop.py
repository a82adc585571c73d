"""The only training loop. It takes things and functions, never a stage name."""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from functools import partial

from sftkit.config.schema import Config
from sftkit.data.batches.loader import Batches
from sftkit.engine.engine import Engine
from sftkit.engine.replicas import Replicas
from sftkit.optim.schedule import learning_rate
from sftkit.runtime.consistency import assert_same_on_ranks, data_identity
from sftkit.runtime.start import Runtime, garbage_collected_between_steps
from sftkit.runtime.watchdog import Watchdog
from sftkit.tracking.trace import Trace
from sftkit.train import proof
from sftkit.train.begin import begin_writing, open_status, start_summary, warm_up_engine
from sftkit.train.due import due_after
from sftkit.train.evaluation import evaluate_at, first_evaluation, record_evaluation
from sftkit.train.monitor import Monitor, log_window
from sftkit.train.parts import TrainServices
from sftkit.train.prefetch import on_device
from sftkit.train.saves import LoopPosition, checkpoint_state, finish_checkpoint_on_error, report_saves
from sftkit.train.summary import Trained, write_end
from sftkit.verify.counts import FirstWindow
from sftkit.verify.update import FirstUpdate


def train(cfg: Config, rt: Runtime, engine: Engine, batches: Batches, services: TrainServices) -> Trained:
    """Train from services.resumed["step"] to the last step, logging, evaluating and saving on the way.

    Args:
        cfg: how long the run is, what is due after which step, and what is watched; not how a step is computed.
        engine: how a step is computed. Evaluation and checkpoints see `engine.model.orig_model`, not the wrapped model.
        batches: this rank's batches of every step, by the plans of the epochs, which also give the number of steps.
        services: for evaluating, saving and logging; and the state that this start resumes.

    Raises:
        NumericsError: as numerics.on_nonfinite, on_spike and check_replicas_every say.
        CheckpointError: the last checkpoint could not be written.
        WorkerError: a data worker was killed.
    """
    checkpoints, tracker, orig_model = services.checkpoints, services.tracker, engine.model.orig_model
    # The number of steps is known before the first one. All ranks must have planned the same documents.
    step = start_step = services.resumed["step"]
    total_steps = batches.num_steps(cfg.train.epochs, cfg.train.max_steps)
    assert_same_on_ranks(rt, data_identity(batches.examples.lengths))
    status = open_status(rt, services, total_steps, cfg.train.max_minutes)
    already_done = step == total_steps  # then the proof.json of the earlier start stays
    with Watchdog(rt, status, cfg.run), closing(engine):
        # Warm-up: every graph is compiled now, for every declared shape. Its checks and those of the data
        # go to proof.json.
        ready, checks = warm_up_engine(engine, batches, services, status, rt, cfg.optim)
        # After the warm-up, so that a run that cannot train is refused before it spends time on an evaluation.
        evaluation = first_evaluation(cfg, status, rt, engine, services)
        trained = start_summary(status, ready, evaluation, checkpoints.run_dir)

        # What is measured, watched and written; the run directory is claimed when the first step is done.
        orig_model.train()
        monitor, stopped = Monitor(cfg, rt, engine, batches, services), False
        begin = partial(begin_writing, rt, services, step, evaluation, monitor.meter.axes())
        update = FirstUpdate(engine, cfg.optim, rt)
        window = FirstWindow(batches.examples, rt, engine.model, start_step, cfg.log.every)
        replicas = Replicas(orig_model, engine.optimizer, rt, cfg.numerics.check_replicas_every)
        report_ended_saves = partial(report_saves, checkpoints, tracker, status, rt)
        # Before the progress bar, which has a thread: data workers are forked, which is not safe beside threads
        # (pytorch/pytorch#138957).
        steps = on_device(batches.steps(step, total_steps), rt.device)
        tracker.start_progress(step, total_steps)
        closing_checks = partial(proof.closing_checks, monitor.meter, batches, engine)
        # Left in the reverse order: an error first lets the checkpoint that is being written finish, then the engine
        # adds what to do about it, and last it goes into proof.json.
        with (
            proof.write_proof_on_error(status, rt, checks, closing_checks),
            engine.guarded(),
            finish_checkpoint_on_error(checkpoints, report_ended_saves),
            batches.workers_named(),
            garbage_collected_between_steps() as collect,
            Trace(cfg.log.trace_at, checkpoints.run_dir, rt) as trace,
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
                # if it does.
                status.at(step, "step")
                lr = learning_rate(step, total_steps, cfg.optim)
                stop_requested = rt.stopping.stop_requested()
                watched = update.watching() if step == start_step + 1 else nullcontext()
                with monitor.meter.syncs.watching(), watched:
                    outcome = engine.step(step_batches, lr, stop=stop_requested, spikes=monitor.health.spikes)
                monitor.add(step, step_batches, outcome)
                window.add(step_batches, outcome)
                # A step is done, so this start can train: from here on the run directory is its own.
                if step == start_step + 1:
                    grad_norm = float(outcome.grad_norm)  # waits until the device has done the step
                    pausing = time.perf_counter()
                    checks += proof.reported(update.checks(grad_norm, lr), rt)
                    begin()
                    if rt.is_main:
                        proof.write_proof(status.run_dir, checks)
                    pause = time.perf_counter() - pausing
                    monitor.meter.paused(pause)
                    started += pause
                tracker.advance(step)
                if trace_seconds := trace.after(step):
                    monitor.meter.paused(trace_seconds)

                # What is due after this step. All ranks see a stop request at the same step.
                due = due_after(step, total_steps, cfg.log, cfg.checkpoint, cfg.eval)
                stopped = monitor.read_flags(wait=due.waits)  # without waiting: only those that have arrived
                due = due.if_stopped() if stopped else due
                report_ended_saves()
                open_window = monitor.open_window() if due.window else None

                # Log: one line about the steps since the last line; all ranks compute it together.
                if due.log:
                    values = {"train/lr": lr, "train/epoch": step_batches.epoch}
                    trained.metrics = log_window(monitor, engine, services, status, values)
                    checks += proof.reported(window.check(trained.metrics), rt)
                    collect(1)  # young objects only, and here, where the ranks have just waited for each other

                # Compare replicas: every so many steps, and before they are kept, which is a pause. The device has
                # nothing left to do then, so no step's time is in it.
                comparing = time.perf_counter()
                replicas.check(step, is_kept=due.keeps_weights)
                if due.keeps_weights:
                    monitor.meter.paused(time.perf_counter() - comparing)
                rt.stopping.add_step(time.perf_counter() - started, checkpoints.last_save)

                # Save, then evaluate, so that a failed evaluation loses no step.
                if due.keeps_weights:
                    pausing = time.perf_counter()
                    rt.check_run_dir(checkpoints.run_dir)
                    progress, axes = monitor.meter.progress, monitor.meter.axes()
                    position = LoopPosition(
                        step_batches.epoch, total_steps, progress, open_window or monitor.open_window()
                    )
                    state = checkpoint_state(position, cfg.data, batches, services)
                    if due.save:
                        status.at(step, "checkpoint")
                        trained.checkpoint = str(checkpoints.save(step, state, wait=due.wait_for_save))
                    if due.evaluate:
                        evaluation = evaluate_at(step, status, engine, services.evaluate)
                        trained.evals, trained.samples = evaluation.metrics, evaluation.samples
                        if (
                            stopped := evaluation.stopped
                        ):  # if this step is already saved or being saved, this only waits
                            trained.checkpoint = str(checkpoints.save(step, state, wait=True))
                        else:
                            record_evaluation(services, step, evaluation, axes)
                        collect()
                    monitor.meter.paused(time.perf_counter() - pausing)

        # The last checkpoint, the checks of the whole run, and logits to compare a loaded checkpoint with.
        status.at(step, "checkpoint")
        checkpoints.finish()
        report_ended_saves()
        rt.check_run_dir(checkpoints.run_dir)
        logits = proof.logits_of(orig_model)
        checks += closing_checks(None)
        if rt.is_main and not already_done:
            proof.write_proof(status.run_dir, checks, logits)
        write_end(status, rt, stopped=stopped)
    trained.step, trained.stopped = step, stopped
    progress = monitor.meter.progress
    trained.tokens, trained.train_seconds = progress.tokens, progress.seconds if progress.is_whole else None
    trained.start_train_seconds = monitor.meter.total_step_seconds
    return trained
