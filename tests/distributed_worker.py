"""Run by test_distributed.py under a launcher: a few steps on this rank's share; rank 0 writes what came out."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from helpers import make_examples, tiny_llama

from sftkit import runtime
from sftkit.compilation import CompileWatch, compile_model
from sftkit.config import CompileConfig, LogConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.data.loader import Batches
from sftkit.data.pack import Layout
from sftkit.evals.validation import validate
from sftkit.optim import build_optimizer
from sftkit.step import ModelWithLoss, optimizer_step
from sftkit.train import warm_up_step


def main(out: str) -> None:
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1), LogConfig(wandb="off"))
    examples = make_examples([30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4, target_share=0.3)
    layout = Layout("packed", (32,), global_batch_size=8, micro_batch_size=2, world_size=rt.world_size)
    batches = Batches(examples, layout, seed=0, rank=rt.rank, pad_id=0)
    orig_model = tiny_llama()
    model = ModelWithLoss(orig_model)
    compile = CompileConfig(backend="aot_eager", fullgraph=True)
    compile_model(model, compile)
    model, optimizer = rt.prepare(model, build_optimizer(orig_model, OptimConfig(eps=1e-4)))
    watch = CompileWatch()
    warm_up_step(rt, model, orig_model, batches, compile)
    watch.warm_up_done()
    rows = []
    for step in batches.steps(0, 6):
        loss_sum, grad_norm = optimizer_step(model, optimizer, step, 1e-2, 1.0, rt)
        rows.append([float(rt.sum(loss_sum)) / step.num_targets, float(grad_norm)])
    values = validate(orig_model, {"val": make_examples([5, 9, 13, 30, 31, 2, 7])}, layout, 0, rt)
    if rt.is_main:
        weights = {name: value.double().sum().item() for name, value in orig_model.state_dict().items()}
        result = {"world_size": rt.world_size, "rows": rows, "weights": weights, "val": values, **watch.counts()}
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    runtime.script(partial(main, sys.argv[1]))
