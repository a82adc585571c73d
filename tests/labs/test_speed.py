"""The speed of layouts on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from labs.patterns.paper import MODELS, PAPER_MODELS, chosen, shape
from labs.patterns.speed import Machines, choice, on_paper, ways
from sftkit.config.topology import HEAD_SHARE, Topology
from sftkit.launch.layouts import setups, shape_of_fields, topologies
from sftkit.memory.estimate import GIB, estimate
from sftkit.models.files import of_fields

QWEN = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


def taken(name: str, machines: Machines, rows: int = 64, row_length: int = 8192, **changes: Any) -> str | None:
    way = choice(ways(replace(shape(name), **changes), machines, rows, row_length))
    return way and way.config.partition(",")[0]


def test_the_simplest_layout_that_is_about_as_fast_is_taken() -> None:
    assert taken("8B", Machines(8)) == "ddp.yaml"  # a replica fits
    assert taken("8B", Machines(8, memory_bytes=80 * GIB)) == "fsdp2.yaml"  # a shard does
    assert taken("8B", Machines(64), rows=256) == "multi_node.yaml"  # copies over machines: gathering stays within them
    slow = choice(ways(shape("8B"), Machines(8, per_machine=1, between=1e9), 64, 8192))  # slow links
    assert slow is not None
    assert slow.config == "fsdp2.yaml, train.engine=pipeline, train.pipeline_stages=4"
    assert taken("8B", Machines(8), row_length=65536, rows=8) in ("cp.yaml", "tp.yaml")  # a row is too much for one GPU
    assert taken("70B", Machines(8)) == "tp.yaml"
    assert taken("405B", Machines(8)) is None


def test_published_models_have_their_sizes() -> None:
    billions = {name: round(shape(name).parameters / 1e9, 1) for name in MODELS}
    assert billions == {"8B": 8.0, "70B": 70.6, "405B": 405.8}


def test_every_row_of_the_worked_table_is_whole() -> None:
    header, cells = chosen()
    assert len(cells) == 9
    assert {len(row) for row in cells} == {len(header)}


def test_memory_is_the_estimate_of_the_run_and_topologies_are_whole() -> None:
    for setup, memory in list(setups(shape("8B"), topologies(16, 8, shape("8B")), 64, 8192, [2]))[::7]:
        assert on_paper(setup, memory, Machines(16)).estimate == estimate(setup)
    for topology in topologies(48, 8, shape("8B")):
        assert topology.world_size == 48
    families = {name: sum(belongs(t) for t in topologies(64, 8, shape("8B"))) for name, belongs in PAPER_MODELS.items()}
    assert all(families.values()), families


def test_exchanges_that_nothing_hides_cost_more_over_slower_links() -> None:
    fast, slow = Machines(8), Machines(8, inside=36e9)
    for setup, memory in setups(shape("8B"), topologies(8, 8, shape("8B")), 64, 8192, [1]):
        a, b = on_paper(setup, memory, fast), on_paper(setup, memory, slow)
        assert a.sent == b.sent
        assert b.share <= a.share <= 1.0 + 1e-9


@pytest.mark.parametrize("topology", [Topology(replicas=8), Topology(shards=8, sharded=True)])
def test_a_partly_frozen_model_takes_less_and_sends_fewer_gradients(topology: Topology) -> None:
    size = of_fields(QWEN)
    assert size is not None
    found = []
    for known in (size, size._replace(frozen=size.parameters - size.ends)):
        sizes = shape_of_fields(QWEN, known)
        assert sizes is not None
        setup, memory = next(setups(sizes, [topology], 8, 8192, [1]))
        found.append(on_paper(setup, memory, Machines(8)))
    whole, frozen = found
    assert whole.estimate.weights == frozen.estimate.weights
    # fp32 masters and two moments of the ends alone, on each GPU or shared by eight.
    assert frozen.estimate.optimizer == 12 * size.ends // (8 if topology.sharded else 1) < whole.estimate.optimizer
    # bf16 gradients, of DDP its buckets, when the backward pass begins.
    assert frozen.estimate.gradients == 2 * size.ends // (8 if topology.sharded else 1) < whole.estimate.gradients
    assert frozen.sent < whole.sent


def test_a_pipeline_is_as_fast_as_its_slowest_stage_and_fills_and_drains_once() -> None:
    llama, machines = shape("8B"), Machines(8, inside=1e18)  # of which sending takes no time
    found = {way.setup.topology.stages: way for way in ways(llama, machines, 64, 8192)}
    layer, head = (llama.parameters - llama.ends) / 32, HEAD_SHARE * llama.vocab * llama.hidden
    assert found[8].setup.stage_layers == (5, 4, 4, 4, 4, 4, 4, 3)  # the head is worth 1.7 layers
    assert found[8].share == pytest.approx(64 / 71 * (32 * layer + head) / 8 / (5 * layer))
    assert found[2].share > found[4].share > found[8].share
