"""Run on ranks by engine/test_reference.py: the reference engine on ranks of which one has padding only."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from helpers import make_examples, tiny_llama, tiny_recipe

from sftkit.config.schema import DataConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.engine.engine import Training
from sftkit.objectives.objective import NextToken
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.train.assemble import lay_out, make_engine
from sftkit.train.parts import EncodedDocuments


def train(rt: runtime.Runtime) -> list[dict[str, Any]]:
    """Steps over five documents in rows of one, four rows a step: the second step has one document, so an empty rank."""
    cfg = tiny_recipe(
        "unused",
        data=DataConfig(train=(), layout="fixed"),
        optim=OptimConfig(name="adamw", eps=1e-4),
        train=TrainConfig(max_steps=4, global_batch_size=4, micro_batch_size=2, engine="reference", precision="fp32"),
    )
    objective, orig_model = NextToken(cfg.loss), tiny_llama()
    batches = lay_out(cfg, rt, EncodedDocuments(make_examples([30, 4, 25, 8, 16]), 32), objective)
    engine = make_engine(cfg, rt, Path("unused"), Training(orig_model, objective, batches.layout))
    rows = []
    for step in batches.steps(0, 4):
        outcome = engine.step(step, 1e-2)
        nll = float(rt.sum(outcome.sums["nll"])) / step.divisor
        weights = sum(p.double().square().sum().item() for p in orig_model.parameters())
        rows.append({"nll": nll, "norm": float(outcome.grad_norm), "weights": weights, "here": len(step.documents)})
    return rows


def main(out: str) -> None:
    with runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1)) as rt:
        rows = train(rt)
        empty = rt.any_rank(any(row["here"] == 0 for row in rows))
        same = not rt.any_rank(abs(float(rt.from_main(lambda: rows[-1]["weights"])) - rows[-1]["weights"]) > 0)
        if rt.is_main:
            Path(out).write_text(json.dumps({"rows": rows, "empty": empty, "same": same}))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
