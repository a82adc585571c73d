"""A small run that logs, saves and stops: for this process, and for ranks under torchrun, by test_resumed_metrics.py."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers import before_each_step, make_examples, tiny_llama, tiny_recipe
from transformers import AutoTokenizer

from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.checkpoint.resume import find_checkpoint, run_identity
from sftkit.config.load import to_yaml
from sftkit.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    LossConfig,
    NumericsConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from sftkit.data.batches.loader import StepBatches
from sftkit.engine.engine import Training
from sftkit.objectives.objective import ModelWithLoss, NextToken, Sums
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.runtime.start import Runtime
from sftkit.tracking.tracker import Tracker
from sftkit.train.assemble import lay_out, make_engine
from sftkit.train.loop import train
from sftkit.train.parts import EncodedDocuments, TrainServices

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4
STEPS, LOG_EVERY, SAVE_EVERY, BROKEN = 14, 4, 5, 9
"The step whose loss is not finite: before the checkpoint of step 10."


def config(folder: Path, log_every: int, layout: str = "packed", batch: int = 8, micro: int = 2) -> Config:
    return tiny_recipe(
        folder,
        data=DataConfig(train=(), layout=layout),  # type: ignore[arg-type]
        optim=OptimConfig(name="adamw", lr=1e-2),
        train=TrainConfig(max_steps=STEPS, global_batch_size=batch, micro_batch_size=micro),
        loss=LossConfig(token_metrics=True),
        numerics=NumericsConfig(on_nonfinite="skip"),
        attention=AttentionConfig(backend="reference"),
        compile=CompileConfig(enabled=False),
        checkpoint=CheckpointConfig(every=SAVE_EVERY, keep=5),
        eval=EvalConfig(every=7),
        log=LogConfig(every=log_every, wandb="off"),
    )


def run(
    folder: Path,
    tokenizer: Any,
    rt: Runtime,
    resume: str | None = None,
    stop_at: int | None = None,
    log_every: int = 4,
    broken_at: int | None = BROKEN,
    changes: tuple[str, ...] = (),
    **sizes: Any,
) -> dict[int, StepBatches]:
    """Train to the last step, or to one at which the main rank wishes to stop. Returns what each step has taken.

    Args:
        changes: train.resume_changes. sizes: see `config`.
    """
    cfg = config(folder, log_every, **sizes)
    folder.mkdir(exist_ok=True)
    examples = make_examples(LENGTHS, target_share=0.4)
    found, objective = find_checkpoint(folder, resume, rt), NextToken(cfg.loss)
    batches = lay_out(cfg, rt, EncodedDocuments(examples, 32), objective, found)
    orig_model = tiny_llama()
    engine = make_engine(cfg, rt, folder, Training(orig_model, objective, batches.layout))
    identity = run_identity(orig_model, tokenizer, examples, batches.layout)
    state = (orig_model, tokenizer, engine.optimizer)
    checkpoints = Checkpoints(folder, cfg.checkpoint, rt, *state, to_yaml(cfg), identity)
    resumed = checkpoints.resume(found, changes)
    at, forward = [0], ModelWithLoss.forward
    taken: dict[int, StepBatches] = {}

    def note(step: int, step_batches: StepBatches) -> None:
        at[0], taken[step] = step, step_batches

    def broken(self: ModelWithLoss, *args: Any, **kwargs: Any) -> Any:
        sums = forward(self, *args, **kwargs)
        return Sums(sums.loss * float("nan"), sums.measured) if at[0] == broken_at and rt.is_main else sums

    before_each_step(batches, note)
    ModelWithLoss.forward = broken  # type: ignore[method-assign]
    rt.stopping.stop_requested = lambda: at[0] == stop_at and rt.is_main  # type: ignore[method-assign]
    try:
        with Tracker(folder, cfg.log, rt, {}, step=resumed["step"]) as tracker:
            train(cfg, rt, engine, batches, TrainServices(lambda _: ({}, []), checkpoints, tracker, resumed))
    finally:
        ModelWithLoss.forward = forward  # type: ignore[method-assign]
    return taken


def runs(folder: Path, tokenizer: Any, rt: Runtime) -> None:
    """Uninterrupted; killed after a checkpoint; stopped between two lines."""
    run(folder / "whole", tokenizer, rt)
    run(folder / "killed", tokenizer, rt)
    if rt.is_main:
        shutil.rmtree(folder / "killed" / f"step-{STEPS:06d}")  # as if killed after step 10
    rt.barrier()
    run(folder / "killed", tokenizer, rt, resume="auto")
    run(folder / "stopped", tokenizer, rt, stop_at=6)
    run(folder / "stopped", tokenizer, rt, resume="auto")


def main(folder: str) -> None:
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    torch.manual_seed(0)
    runs(Path(folder), AutoTokenizer.from_pretrained(Path(folder) / "tokenizer"), rt)


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
