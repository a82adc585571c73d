"""The graph engine computes what one eager process does, on one process and on two, in every loss and every gradient."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_worker import MODELS, config, train
from helpers import cpu_runtime, torchrun
from transformers import T5Config

from sftkit.config.topology import Topology
from sftkit.errors import ConfigError
from sftkit.graph.place import check_possible

BLOCKS = "reshard_after_forward,block_bucketing"
TWO = (f"llama; graph; {BLOCKS}",)
SLOW_TWO = (
    "qwen3; graph",
    "llama; eager",
    "qwen3; eager",
    f"deep llama; graph; {BLOCKS}",
    "deep llama; graph; reshard_after_forward,auto_bucketing",
    f"qwen3; graph; {BLOCKS}",
    f"uneven llama; graph; {BLOCKS}",
    "llama; graph; reshard_after_forward,full_inductor",
    "bf16 llama; graph; reshard_after_forward",
)
CHECKS = {
    "Same logits as the plain model",
    "Loss equals plain cross entropy",
    "Documents in a row do not see each other",
    "Same gradients as the plain model",
    "Compiled step computes what eager does",
    "The step is compiled",
    "No recompiles after the warm-up",
    "The step runs the hooks that the model has",
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


@pytest.mark.slow
def test_one_process_by_its_graph_computes_what_it_does_eagerly() -> None:
    found = train(cpu_runtime(), "llama", config("graph"))
    same(found, alone("llama"))
    check_proved(found)
    assert [stage["counts"]["collectives"] for stage in found["stages"]] == [{}, {}, {}]


@pytest.mark.parametrize("case", [*TWO, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_TWO[:-1])])
def test_two_ranks_compute_what_one_eager_process_does(case: str) -> None:
    found = ranks(2, *(TWO if case in TWO else SLOW_TWO))[case]
    model, how, *_ = case.split("; ")
    same(found, alone(model))
    whole = sum(p.numel() for p in MODELS[model]().parameters())
    assert found["pieces"] == whole / 2 if "uneven" not in model else whole / 2 < found["pieces"] < 0.51 * whole
    if how == "graph":
        check_proved(found)
    else:
        assert found["checks"]["Same gradients as the plain model"] is True
        assert found["stages"] == []


FOUR = (f"llama; graph; {BLOCKS}", "qwen3; graph; reshard_after_forward,auto_bucketing")


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_two_copies_of_two_shards_compute_what_one_eager_process_does(case: str) -> None:
    found, model = ranks(4, *FOUR)[case], case.partition(";")[0]
    same(found, alone(model))
    check_proved(found)
    assert found["pieces"] == sum(p.numel() for p in MODELS[model]().parameters()) / 2
    summed = [line for line in found["stages"][0]["text"].splitlines() if ".all_reduce.default(" in line]
    assert len(summed) == collectives(case, {case: found})["joint captured"]["all-reduce"] > 0
    assert all(".all_reduce.default(wait_tensor" in line for line in summed), "copies sum pieces, not whole gradients"


def collectives(case: str, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Of each graph of a case, after each pass."""
    return {f"{stage['graph']} {stage['after']}": stage["counts"]["collectives"] for stage in found[case]["stages"]}


def test_passes_change_how_often_ranks_exchange_as_they_say() -> None:
    of_blocks = collectives(*TWO, ranks(2, *TWO))
    # Of a block 9 weights, norms among them, and at the ends the embedding, and the final norm with the head.
    assert of_blocks["joint captured"] == {"all-gather": 12, "reduce-scatter": 12}
    assert of_blocks["forward split"] == {"all-gather": 12}
    assert of_blocks["forward block_bucketing"] == {"all-gather": 3}
    assert of_blocks["backward split"] == {"reduce-scatter": 12, "all-gather": 10}  # not the embedding, not the head
    assert of_blocks["backward block_bucketing"] == {"all-gather": 2, "reduce-scatter": 3}


@pytest.mark.slow
def test_without_resharding_nothing_is_gathered_again() -> None:
    assert collectives("qwen3; graph", ranks(2, *SLOW_TWO))["backward split"].keys() == {"reduce-scatter"}


@pytest.mark.slow
def test_automatic_bucketing_merges_what_fits_a_bucket() -> None:
    found = collectives("deep llama; graph; reshard_after_forward,auto_bucketing", ranks(2, *SLOW_TWO))
    assert found["forward auto_bucketing"]["all-gather"] < found["forward split"]["all-gather"]
    assert found["backward auto_bucketing"]["reduce-scatter"] < found["backward split"]["reduce-scatter"]


@pytest.mark.slow
def test_bf16_gradients_are_summed_in_fp32() -> None:
    found = ranks(2, *SLOW_TWO)["bf16 llama; graph; reshard_after_forward"]
    assert found["checks"]["Same gradients as the plain model"] is True
    text = next(stage["text"] for stage in found["stages"] if stage["graph"] == "joint")
    reductions = [line for line in text.splitlines() if ".reduce_scatter_tensor.default(" in line]
    assert len(reductions) == 12
    assert all(': "f32[' in line for line in reductions)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (Topology(replicas=2), r"shards weights over its 2 processes, and ddp keeps.*fsdp2\.yaml or hsdp\.yaml"),
        (Topology(tensor=2, sharded=True), r"no tensor or context parallelism yet.*tp_size and cp_size to 1"),
    ],
)
def test_processes_that_it_has_no_sharding_for_are_refused(topology: Topology, message: str) -> None:
    rt: Any = SimpleNamespace(topology=topology, world_size=2)
    with pytest.raises(ConfigError, match=message):
        check_possible(rt, MODELS["llama"]())


def test_a_model_with_an_encoder_is_refused() -> None:
    rt: Any = SimpleNamespace(topology=Topology(), world_size=1)
    t5: Any = SimpleNamespace(config=T5Config())
    with pytest.raises(ConfigError, match=r"decoders alone, and t5 has an encoder: set train\.engine=blocks"):
        check_possible(rt, t5)
