"""What ranks exchange, by formula: the bytes that were counted."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from helpers import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from labs.patterns.run import MODEL, ROW_LENGTH, ROWS, TOPOLOGY_CASES, TopologyCase
from labs.patterns.traffic import traffic
from sftkit.config.topology import Sharding
from sftkit.data.batches.pack import Layout
from sftkit.memory.estimate import EstimateInputs, Shape
from sftkit.memory.plan import shape_of

RAW: dict[str, Any] = json.loads((ROOT / "benchmarks/patterns/results/results.json").read_text())


@pytest.fixture(scope="module")
def shape() -> Shape:
    with torch.device("meta"):
        found = shape_of(AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL)))
    assert found is not None
    return found


def by_kind(exchanged: list[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for kind, size in exchanged:
        found[kind] += size
    return found


@pytest.mark.parametrize("case", [case for case in TOPOLOGY_CASES if case.processes > 1], ids=lambda case: case.key)
def test_bytes_by_formula_are_the_bytes_that_were_counted(case: TopologyCase, shape: Shape) -> None:
    t = case.topology
    layout = Layout("packed", (ROW_LENGTH,), ROWS, 1, t.row_ranks, ROW_LENGTH // 2, ROW_LENGTH // 2)
    stages = t.stages * (2 if case.schedule == "interleaved" else 1)
    setup = EstimateInputs(
        shape, layout, "adamw", "fp32", 4096, 1.0, False, False, topology=t, schedule=case.schedule or "1f1b",
        sharding=Sharding(not case.lean, not case.lean), stage_layers=(8 // stages,) * stages if t.stages > 1 else (),
    )  # fmt: skip
    ranks = [rank["exchanged"] for rank in RAW["cases"][case.key]]
    largest = max(ranks, key=lambda exchanged: sum(each["sent"] for each in exchanged))
    counted = by_kind([(each["kind"], each["bytes"]) for each in largest])
    formula = by_kind([(each.kind, each.size) for each in traffic(setup)])
    left_out = by_kind([("all_reduce", 32.0)])  # four numbers of each step
    if not t.partial:
        left_out["broadcast"] += 312  # of bucket sizes, once
    if t.tensor > 1:  # two norms of each of 8 blocks, which tensor ranks hold alike
        norms = 2 * 8 * 64 * 4
        left_out["all_reduce"] += norms
        for kind in ("all_gather", "reduce_scatter") if t.shards > 1 else ():
            left_out[kind] += norms * (1 - 1 / t.tensor)
    for kind in counted.keys() | formula.keys():
        assert formula[kind] + left_out[kind] == counted[kind], kind
    sent = sum(each["sent"] for each in largest)
    assert sum(each.sent for each in traffic(setup)) == pytest.approx(sent, abs=2 * sum(left_out.values()))
