"""Run on ranks by engine/test_tree_rows.py: the gradients of a step on rows of trees next to those of the documents
alone, and the checks of a run; rank 0 writes what came out."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from made_trees import EXAMPLES, ROWS, tree_batch
from routing_worker import WEIGHT, experts, recipe
from torch.distributed.tensor import DTensor

from sftkit.config.schema import RunConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.batches.pack import Layout
from sftkit.engine.engine import Training
from sftkit.engine.reference import documents_of, plain_sums
from sftkit.engine.step import gradients as gradients_of
from sftkit.models.routing import routing_of
from sftkit.objectives.objective import ModelWithLoss, NextToken, Totals
from sftkit.ops.attention import plain_attention
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.train.assemble import make_engine
from sftkit.verify.proof import verified_warm_up

TOPOLOGIES = {"ddp": Topology(replicas=2), "fsdp2": Topology(shards=2, sharded=True)}


def learned_by_engine(rt: runtime.Runtime, folder: Path) -> dict[str, Any]:
    """Checks, the largest relative difference of a gradient, and recompiles."""
    torch._dynamo.reset()
    cfg = recipe()
    layout = Layout("tree", (96,), len(ROWS), 1, rt.world_size, max_length=60, max_doc_length=96, docs_per_row=4)
    orig_model = experts()
    engine = make_engine(cfg, rt, folder, Training(orig_model, NextToken(cfg.loss), layout))
    checks = verified_warm_up(engine, rt, lambda _: None).checks
    divisor = int(EXAMPLES.num_targets.sum())
    own = ROWS[rt.rank :: rt.world_size]
    orig_model.train()
    with engine.guarded():
        # As a step does it, with the exchange of replicas, which engine.gradients leaves out.
        batches = [tree_batch(EXAMPLES, [row], 96) for row in own]
        totals = Totals.zeros(engine.model.objective.measured, rt.device)
        gradients_of(engine._wrapped, list(orig_model.parameters()), batches, divisor, totals, rt)
    gradients = {}
    for name, p in orig_model.named_parameters():
        assert p.grad is not None
        gradients[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
    recompiles = engine.report().metrics["compile/recompiles"]
    engine.close()

    plain = experts().train()
    model = ModelWithLoss(plain, "reference", NextToken(cfg.loss), routing_of(plain, WEIGHT))
    rows = [tuple(chain.from_iterable(row)) for row in ROWS]
    with plain_attention(plain):
        for sums in plain_sums(model, documents_of(EXAMPLES, rows, rt.device)):
            (sums.loss / divisor).backward()
    differences = [
        float((gradients[name] - p.grad).norm() / p.grad.norm())
        for name, p in plain.named_parameters()
        if p.grad is not None
    ]
    return {
        "checks": {check.name: check.ok for check in checks},
        "difference": max(differences),
        "recompiles": recompiles,
    }


def main(out: str, name: str) -> None:
    with runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1)) as rt:
        rt.topology = TOPOLOGIES[name]
        found = learned_by_engine(rt, Path(out).parent)
        if rt.is_main:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
