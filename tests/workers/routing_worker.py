"""Run on ranks by engine/test_router_loss.py: steps of a model with experts and what is logged of them; rank 0 writes what came out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers import make_examples, tiny_recipe
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sftkit.config.schema import (
    AttentionConfig,
    CompileConfig,
    Config,
    DataConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from sftkit.config.topology import Topology
from sftkit.engine.engine import Training
from sftkit.objectives.objective import NextToken
from sftkit.ops.tensors import local
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.tracking.health import ExpertLoad
from sftkit.tracking.names import Check
from sftkit.train.assemble import lay_out, make_engine
from sftkit.train.parts import EncodedDocuments
from sftkit.verify.proof import verified_warm_up

WEIGHT = 0.5
LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 2
TOPOLOGIES = {
    "ddp": Topology(replicas=2),
    "fsdp2": Topology(shards=2, sharded=True),
    "context": Topology(context=2, sharded=True),
}


def experts(**fields: Any) -> PreTrainedModel:
    """Of two layers with experts and one without; routers that prefer some."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    of_experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **of_experts, **fields))
    model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                p.normal_(std=0.3)
    return model


def recipe(**train: Any) -> Config:
    """Compiled blocks, rows of 32, eight a step."""
    return tiny_recipe(
        "unused",
        data=DataConfig(train=(), row_length=32),
        optim=OptimConfig(name="adamw", lr=1e-2, eps=1e-4),
        loss=LossConfig(router_aux_loss_coef=WEIGHT),
        train=TrainConfig(
            **{"max_steps": 3, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp32", **train}
        ),
        attention=AttentionConfig(backend="reference"),
        compile=CompileConfig(backend="eager", fullgraph=True),
    )


def trained(
    cfg: Config, rt: runtime.Runtime, folder: Path, orig_model: PreTrainedModel | None = None
) -> dict[str, Any]:
    """Three steps: what is logged of each, the load of the experts, checks, counts of graphs and a sum of each weight."""
    torch._dynamo.reset()
    objective, orig_model = NextToken(cfg.loss), orig_model or experts()
    batches = lay_out(cfg, rt, EncodedDocuments(make_examples(LENGTHS, target_share=0.4), 32), objective)
    engine = make_engine(cfg, rt, folder, Training(orig_model, objective, batches.layout))
    checks: list[Check] = verified_warm_up(engine, rt, lambda _: None).checks
    load, rows = ExpertLoad(engine.model.routing, rt), []
    with engine.guarded():
        for step in batches.steps(0, 3):
            outcome = engine.step(step, 1e-2)
            sums = replace(outcome.sums, vector=rt.sum(outcome.sums.vector))
            means = sums.means_of(sums.vector.tolist(), step.divisor)
            rows.append({**engine.model.objective.metrics(means), "norm": float(outcome.grad_norm)})
    found = load.read(3, folder)
    counts = engine.report().metrics
    engine.close()
    weights = {n: float(rt.sum(local(p).detach().double().square().sum())) for n, p in orig_model.named_parameters()}
    copies = 1 if rt.topology.sharded else rt.world_size
    return {
        "rows": rows,
        "load": found,
        "experts": json.loads((folder / "expert_load.json").read_text()) if rt.is_main else None,
        "checks": {check.name: check.ok for check in checks},
        "graphs": counts["compile/graphs"],
        "recompiles": counts["compile/recompiles"],
        "weights": {name: value / copies for name, value in weights.items()},
    }


def main(out: str, name: str) -> None:
    with runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1)) as rt:
        rt.topology = TOPOLOGIES[name]
        found = trained(recipe(), rt, Path(out).parent)
        if rt.is_main:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
