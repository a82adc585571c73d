"""Run on ranks by test_distributed.py: a few steps on this rank's share; rank 0 writes what came out."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers import make_examples, make_layout_of, over_ranks, tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sftkit.config.schema import LossConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.data.batches.epoch import RankRows
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.engine.step import TrainStep, exchange
from sftkit.errors import DataError
from sftkit.objectives.objective import ModelWithLoss, NextToken, Totals
from sftkit.optim.protocol import build_optimizer, squared_norm
from sftkit.parallel.wrap import replicate
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script


def train(rt: runtime.Runtime) -> dict[str, Any]:
    """Loss and norm of the gradients of six steps, and how far the replicas are apart in the end."""
    examples = make_examples([30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4, target_share=0.3)
    layout = make_layout_of("packed", examples.lengths, world_size=rt.world_size)
    batches = Batches(StepDataset(examples, layout, RankRows(rt.rank)), seed=0)
    orig_model = tiny_llama().to(torch.bfloat16)
    model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig()))
    wrapped = replicate(model, rt)
    optimizer = build_optimizer(orig_model, OptimConfig(name="adamw", eps=1e-4))
    rows = []
    for step in batches.steps(0, 6):
        outcome = TrainStep(wrapped, optimizer, model.objective, rt, max_grad_norm=1.0).step(step, 1e-3)
        sums = over_ranks(rt, outcome.sums)
        rows.append([float(sums["nll"]) / step.num_targets, float(outcome.grad_norm)])
    values = torch.stack([value.double().sum() for value in orig_model.state_dict().values()])
    apart = float((rt.sum(values) - rt.world_size * values).abs().max())
    return {"rows": rows, "apart": apart}


def large_norms(rt: runtime.Runtime) -> dict[str, float]:
    """The norm of a gradient of 4 million elements as a step logs it: of replicas, and of shards where there are ranks."""
    gradient = torch.randn(1 << 11, 1 << 11, generator=torch.Generator().manual_seed(0)) * 1e-3 + 1e-3
    replica = torch.nn.Parameter(torch.zeros_like(gradient))
    replica.grad = gradient
    parameters = {"replicas": replica}
    if rt.world_size > 1:
        mesh = init_device_mesh("cpu", (rt.world_size,))
        shard = torch.nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, [Shard(0)]))
        shard.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        parameters["shards"] = shard
    return {
        name: float(exchange(squared_norm([p], rt.world_size), Totals.zeros((), rt.device), 1, rt, stop=False)[0])
        for name, p in parameters.items()
    }


def errors_of_main(rt: runtime.Runtime) -> list[str]:
    """What each rank gets where the main rank alone raises: class and message."""

    def decide() -> None:
        raise DataError(f"found by rank {rt.rank}", reason="test")

    try:
        rt.from_main(decide)
    except DataError as error:
        return rt.gathered(f"{error}, {error.reason}")
    return []


def main(out: str) -> None:
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    found = {**train(rt), "norms": large_norms(rt), "errors": errors_of_main(rt)}
    if rt.is_main:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
