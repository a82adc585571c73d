"""The only training loop. It takes things and functions, never a stage name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from sftkit.checkpoint import Checkpoints
from sftkit.compilation import CompileWatch, step_contract
from sftkit.config import Config
from sftkit.data.loader import Batches
from sftkit.memory import MemoryPlan, explained
from sftkit.metrics import Meter
from sftkit.optim import learning_rate
from sftkit.prefetch import on_device
from sftkit.runtime import Runtime, garbage_collected_between_steps
from sftkit.step import optimizer_step
from sftkit.tracker import Tracker
from sftkit.warmup import prepare_step

Evaluate = Callable[[], tuple[dict[str, float | None], list[dict[str, Any]]]]


@dataclass
class Trained:
    """What the loop reports when it ends."""

    step: int
    total_steps: int
    tokens: int
    train_seconds: float
    "time in steps, without evaluation, checkpoints and warm-up"
    warm_up_seconds: float
    compiled: bool
    stopped: bool
    "ended by a signal before the last step"
    metrics: dict[str, float | None]
    "the last logged line"
    evals: dict[str, float | None]
    "the last evaluation"
    samples: list[dict[str, Any]]
    "the last sample answers"
    evals_at_start: dict[str, float | None]
    "the evaluation before the first step, empty without eval.at_start"
    checkpoint: str


def train(
    cfg: Config,
    rt: Runtime,
    model: torch.nn.Module,
    orig_model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    plan: MemoryPlan,
    *,
    evaluate: Evaluate,
    checkpoints: Checkpoints,
    tracker: Tracker,
    resumed: dict[str, int],
) -> Trained:
    """Train from resumed["step"] to the last step, logging, evaluating and saving on the way.

    Args:
        model: what the step calls: compiled and wrapped. `orig_model`, the plain model inside it, is all that
            `evaluate` and `checkpoints` see.
        plan: how memory is spent, for the warm-up and for the message when it runs out.
        evaluate: (metrics, sample answers) of orig_model; every rank calls it.
        resumed: what Checkpoints.resume returned.
    """
    total_steps = batches.num_steps(cfg.train.epochs, cfg.train.max_steps)
    rt.catch_signals()
    step = resumed["step"]
    metrics: dict[str, float | None] = {}
    watch = CompileWatch()
    compiled, warm_up_seconds = prepare_step(
        cfg, rt, model, orig_model, optimizer, batches.layout, plan, watch, tracker
    )
    # After the warm-up, which refuses what cannot train before an evaluation is spent on it.
    evals_at_start, samples = evaluate() if cfg.eval.at_start and step == 0 else ({}, [])
    tracker.log_evals(step, evals_at_start, samples)
    evals = evals_at_start

    orig_model.train()
    meter = Meter(orig_model, cfg.loss, rt)
    meter.total_tokens = resumed.get("tokens", 0)
    tracker.start_progress(step, total_steps)
    steps = on_device(batches.steps(step, total_steps), rt.device)
    stopped = False
    folder = checkpoints.run_dir / f"step-{step:06d}"
    on_recompile = cfg.compile.on_recompile if compiled else "warn"
    with (
        step_contract(on_recompile, watch.graph_break_reasons()),
        explained(plan, cfg, batches.layout),
        garbage_collected_between_steps() as collect,
    ):
        meter.start()
        while step < total_steps and not stopped:
            waiting = time.perf_counter()
            step_batches = next(steps)
            meter.waited(time.perf_counter() - waiting)

            step += 1
            lr = learning_rate(step, total_steps, cfg.optim)
            sums, grad_norm = optimizer_step(model, optimizer, step_batches, lr, cfg.optim.max_grad_norm, rt)
            meter.add(step_batches, sums, grad_norm)
            tracker.advance(step)

            last = step == total_steps
            logs = last or step % cfg.log.every == 0
            # With several ranks asking waits for all of them, so they ask where they wait anyway.
            stopped = not last and (logs or rt.world_size == 1) and rt.stop_requested()
            if logs or stopped:
                metrics = {**meter.read(), "train/lr": lr, "train/epoch": step_batches.epoch, **watch.counts()}
                tracker.log_metrics(step, total_steps, metrics)
                collect(1)

            # The checkpoint comes before the evaluation: whatever that one does, the work is kept.
            pausing = time.perf_counter()
            if last or stopped or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
                state = {"tokens": meter.seen_tokens, "max_length": batches.layout.max_length}
                folder = checkpoints.save(step, state)
            if last or (cfg.eval.every and step % cfg.eval.every == 0 and not stopped):
                evals, samples = evaluate()
                tracker.log_evals(step, evals, samples)
                collect()
            meter.paused(time.perf_counter() - pausing)

    for reason in watch.recompile_reasons():
        tracker.say(f"recompile after warm-up: {reason}")
    watch.close()
    return Trained(
        step=step,
        total_steps=total_steps,
        tokens=meter.total_tokens,
        train_seconds=meter.total_step_seconds,
        warm_up_seconds=warm_up_seconds,
        compiled=compiled,
        stopped=stopped,
        metrics=metrics,
        evals=evals,
        samples=samples,
        evals_at_start=evals_at_start,
        checkpoint=str(folder),
    )
