"""Run by test_distributed.py under a launcher: a few steps on this rank's share; rank 0 writes what came out."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
from helpers import make_examples, make_layout_of, tiny_llama

from sftkit import runtime
from sftkit.compilation import compile_model, warm_up
from sftkit.compile_watch import CompileWatch
from sftkit.config import CompileConfig, LogConfig, LossConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.data.loader import Batches
from sftkit.evals.validation import validate
from sftkit.optim import build_optimizer
from sftkit.step import ModelWithLoss, optimizer_step
from sftkit.warmup import shape_runner


def main(out: str, dtype: str, lr: str) -> None:
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1), LogConfig(wandb="off"))
    examples = make_examples([30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4, target_share=0.3)
    layout = make_layout_of("packed", examples.lengths, world_size=rt.world_size)
    batches = Batches(examples, layout, seed=0, rank=rt.rank, pad_id=0)
    orig_model = tiny_llama().to(getattr(torch, dtype))
    model = ModelWithLoss(orig_model, "reference", LossConfig())
    compile = CompileConfig(backend="aot_eager", fullgraph=True)
    compile_model(model, compile, activation_memory_budget=1.0)
    wrapped = rt.prepare(model)
    optimizer = build_optimizer(orig_model, OptimConfig(name="adamw", eps=1e-4))
    watch = CompileWatch()
    run_shape = shape_runner(rt, wrapped, orig_model, layout)
    warm_up(wrapped, run_shape, layout.shapes, compile, rt.any_rank)
    watch.warm_up_done()
    rows = []
    for step in batches.steps(0, 6):
        sums, grad_norm, _ = optimizer_step(wrapped, optimizer, step, float(lr), 1.0, rt)
        rows.append([float(rt.sum(sums)[1]) / step.num_targets, float(grad_norm)])
    values = validate(model, {"val": make_examples([5, 9, 13, 30, 31, 2, 7])}, layout, 0, rt)
    sums = torch.stack([value.double().sum() for value in orig_model.state_dict().values()])
    apart = float((rt.sum(sums.clone()) - rt.world_size * sums).abs().max())
    if rt.is_main:
        weights = {name: value.double().sum().item() for name, value in orig_model.state_dict().items()}
        result = {
            "world_size": rt.world_size,
            "rows": rows,
            "weights": weights,
            "val": values,
            "apart": apart,
            **watch.counts(),
        }
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    runtime.script(partial(main, *sys.argv[1:]))
