"""The graph engine computes what one eager process does, on one process and on two, in every loss and every gradient."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_worker import MODELS, config, made, train
from helpers import cpu_runtime, make_batch, make_examples, torchrun

from sftkit.config.topology import Topology
from sftkit.errors import ConfigError, RecompileError
from sftkit.graph.engine import GraphEngine, check_topology

EAGER, JOINT = "llama; eager", "llama; graph"
TWO = (EAGER, JOINT, "qwen3; graph; reshard_after_forward")
CHECKS = {
    "Same logits as the plain model",
    "Loss equals plain cross entropy",
    "Documents in a row do not see each other",
    "Same gradients as the plain model",
    "Compiled step computes what eager does",
    "The step is compiled",
    "No recompiles after the warm-up",
}


@cache
def ranks(processes: int, *cases: str) -> dict[str, dict[str, Any]]:
    """What graph_worker found of these cases with so many gloo ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun(processes, "graph_worker.py", f"{folder}/found.json", *cases, timeout=500)
        return json.loads(Path(folder, "found.json").read_text())


@cache
def alone(model: str) -> dict[str, Any]:
    """One process, eager, the engine that everything else is trained with."""
    return train(cpu_runtime(), model, config("blocks"))


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["names"] == expected["names"]
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-4)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, theirs in expected["gradients"].items():
        ours, plain = torch.tensor(found["gradients"][name]), torch.tensor(theirs)
        assert (ours - plain).norm() <= 1e-5 * plain.norm(), name


def check_proved(found: dict[str, Any]) -> None:
    assert {name for name, ok in found["checks"].items() if ok} >= CHECKS
    assert False not in found["checks"].values()
    assert found["metrics"]["compile/graphs"] == 1
    assert found["metrics"]["compile/recompiles"] == found["metrics"]["compile/fallbacks"] == 0


def test_one_process_by_its_graph_computes_what_it_does_eagerly() -> None:
    found = train(cpu_runtime(), "llama", config("graph"))
    same(found, alone("llama"))
    check_proved(found)
    assert [stage["counts"]["collectives"] for stage in found["stages"]] == [{}, {}, {}]


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_compute_what_one_eager_process_does(case: str) -> None:
    found = ranks(2, *TWO)[case]
    model = case.partition(";")[0]
    same(found, alone(model))
    assert found["pieces"] == sum(p.numel() for p in MODELS[model]().parameters()) / 2
    if case == EAGER:
        assert found["checks"]["Same gradients as the plain model"] is True
        assert found["stages"] == []
    else:
        check_proved(found)
