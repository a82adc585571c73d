"""Run on ranks by test_claims.py: what an engine says of itself where something is wrong on one rank, or between ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers import make_examples, make_layout_of, tiny_llama, tiny_recipe

from sftkit.config.schema import (
    AttentionConfig,
    CompileConfig,
    LossConfig,
    RunConfig,
    TrainConfig,
)
from sftkit.config.topology import Topology
from sftkit.data.batches.epoch import RankRows
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.engine.engine import Training
from sftkit.engine.step import TrainStep
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.parallel.wrap import Sharding, distribute, fsdp_modules
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.train.assemble import make_engine
from sftkit.verify.gradients import Sides, check_gradients, limits
from sftkit.verify.proof import report_checks, verified_warm_up

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4


def shared_gradients(rt: runtime.Runtime, factor: float, keep_gradients: bool) -> dict[str, Any]:
    """The gradient check of a sharded model whose ranks' gradients are divided by a factor when they are added up."""
    rt.topology = Topology(shards=2, sharded=True)
    orig_model = tiny_llama()
    model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig()))
    wrapped = distribute(model, None, Sharding(keep_gradients, keep_gradients), rt)
    for module in fsdp_modules(orig_model):
        module.set_gradient_divide_factor(factor)
    layout = make_layout_of("packed", make_examples(LENGTHS).lengths, world_size=2)
    trained = list(orig_model.parameters())
    optimizer: Any = torch.optim.SGD(trained)  # its groups alone are read
    train_step = TrainStep(wrapped, optimizer, model.objective, rt, max_grad_norm=None)
    return asdict(
        check_gradients(
            Sides(model, train_step.gradients, trained, rt),
            layout,
            "reference",
            limits(torch.float32, 2),
            compiled=False,
        )
    )


def one_rank_alone(rt: runtime.Runtime, folder: Path) -> dict[str, Any]:
    """What rank 0 reports when on rank 1 alone a guard fails and a hook is added."""
    rt.topology = Topology(replicas=2)
    cfg = tiny_recipe(
        folder,
        train=TrainConfig(max_steps=20),
        attention=AttentionConfig(backend="reference"),
        compile=CompileConfig(backend="eager", on_recompile="warn"),
    )
    examples = make_examples(LENGTHS, target_share=0.4)
    layout = make_layout_of("packed", examples.lengths, world_size=2)
    orig_model = tiny_llama()
    engine = make_engine(cfg, rt, folder, Training(orig_model, NextToken(LossConfig()), layout))
    verified_warm_up(engine, rt, rt.print)
    before = engine.report()
    if rt.rank == 1:
        orig_model.model.layers[0].eval()
        orig_model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    batches = Batches(StepDataset(examples, layout, RankRows(rt.data_rank)), seed=0)
    with engine.guarded():
        engine.step(next(iter(batches.steps(0, 1))), 1e-3)
        logged = engine.report()
    failed = engine.report(RuntimeError("ranks do not wait for each other")) if rt.is_main else None
    found = {
        name: {
            "metrics": report.metrics,
            "events": report.events(),
            "checks": [asdict(check) for check in report_checks(report)],
        }
        for name, report in (("before", before), ("logged", logged), ("failed", failed))
        if report
    }
    engine.close()
    return found


def main(out: str) -> None:
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    found = {
        "right": shared_gradients(rt, 1.0, True),
        "exchanged often": shared_gradients(rt, 1.0, False),
        "halved": shared_gradients(rt, 2.0, True),
        "alone": one_rank_alone(rt, Path(out).parent),
    }
    if rt.is_main:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
