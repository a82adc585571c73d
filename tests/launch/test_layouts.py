"""Layouts on paper: which one is taken, and what a launch says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from labs.patterns.paper import MODELS, PAPER_MODELS, chosen, shape
from sftkit.config.rules import PIPELINE_MODEL_TYPES
from sftkit.config.schema import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.launch.layouts import (
    SHARDABLE,
    Machines,
    advice,
    choice,
    has_room,
    layers_on_paper,
    on_paper,
    setups,
    shape_of_fields,
    topologies,
    ways,
)
from sftkit.memory.estimate import GIB, estimate
from sftkit.models.files import of_fields
from sftkit.parallel import tensor
from sftkit.rundir.names import TRAINING_STATE

QWEN = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip

FSDP2 = Topology(shards=8, sharded=True)


def taken(name: str, machines: Machines, rows: int = 64, row_length: int = 8192, **changes: Any) -> str | None:
    way = choice(ways(replace(shape(name), **changes), machines, rows, row_length))
    return way and way.config.partition(",")[0]


def test_the_simplest_layout_that_is_about_as_fast_is_taken() -> None:
    assert taken("8B", Machines(8)) == "ddp.yaml"  # a replica fits
    assert taken("8B", Machines(8, memory_bytes=80 * GIB)) == "fsdp2.yaml"  # a shard does
    assert taken("8B", Machines(64), rows=256) == "multi_node.yaml"  # copies over machines: gathering stays within them
    slow = choice(ways(shape("8B"), Machines(8, per_machine=1, between=1e9), 64, 8192))  # slow links
    assert slow is not None
    assert slow.setup.topology.stages == 8
    assert slow.config == "pp.yaml, train.engine=pipeline, train.pipeline_stages=8"
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
    for setup, memory in list(setups(shape("8B"), topologies(Machines(16), shape("8B")), 64, 8192, [2]))[::7]:
        assert on_paper(setup, memory, Machines(16)).estimate == estimate(setup)
    for topology in topologies(Machines(48), shape("8B")):
        assert topology.world_size == 48
    families = {
        name: sum(belongs(t) for t in topologies(Machines(64), shape("8B"))) for name, belongs in PAPER_MODELS.items()
    }
    assert all(families.values()), families


def test_exchanges_that_nothing_hides_cost_more_over_slower_links() -> None:
    fast, slow = Machines(8), Machines(8, inside=36e9)
    for setup, memory in setups(shape("8B"), topologies(fast, shape("8B")), 64, 8192, [1]):
        a, b = on_paper(setup, memory, fast), on_paper(setup, memory, slow)
        assert a.sent == b.sent
        assert b.share <= a.share <= 1.0 + 1e-9


def test_a_pipeline_is_as_fast_as_its_passes_in_their_order() -> None:
    llama, machines = shape("8B"), Machines(8, inside=1e18)  # of which sending takes no time
    found = {way.setup.topology.stages: way for way in ways(llama, machines, 64, 8192)}
    layer, head = (llama.parameters - llama.ends) / 32, llama.vocab * llama.hidden
    assert found[8].setup.stage_layers == (5, 5, 4, 4, 4, 4, 4, 2)  # the head is worth 2.4 layers
    # At most as the slowest stage is; at least as if every stage were as slow while it fills and drains.
    assert 64 / 71 < found[8].share / ((32 * layer + head) / 8 / (5 * layer)) < 1
    # Of two stages the second, 15 layers and the head, is slower: it has something to do from the first hidden states on.
    first, last, count = 17 * layer, 15 * layer + head, found[2].setup.layout.accumulation
    assert found[2].share == pytest.approx(count * (first + last) / 2 / (first + count * last))
    assert found[2].share > found[4].share > found[8].share


def test_two_stages_on_each_rank_fill_the_pipeline_in_half_of_a_micro_batch() -> None:
    llama, machines, interleaved = shape("8B"), Machines(4, inside=1e18), TrainConfig(pipeline_schedule="interleaved")
    setup = next(way.setup for way in ways(llama, machines, 64, 8192) if way.setup.topology.stages == 4)
    layers = layers_on_paper(llama, interleaved, 4)
    layer, head = (llama.parameters - llama.ends) / 32, llama.vocab * llama.hidden
    slowest = max(layers[0] + layers[4], layers[1] + layers[5], layers[2] + layers[6]) * layer
    slowest = max(slowest, (layers[3] + layers[7]) * layer + head)
    count = setup.layout.accumulation
    found = on_paper(replace(setup, stage_layers=layers, schedule="interleaved"), "speed", machines)
    assert count / (count + 3 / 2) < found.share / ((32 * layer + head) / 4 / slowest) < 1


def test_a_model_that_cannot_be_cut_is_the_same_everywhere() -> None:
    assert SHARDABLE == tensor.TENSOR_MODEL_TYPES == PIPELINE_MODEL_TYPES


def recipe(row_length: int | None, **train: Any) -> Config:
    return Config(
        run=RunConfig(dir="unused"),
        model=ModelConfig(scratch=QWEN, tokenizer="unused"),
        data=DataConfig(train=(), max_length=row_length),
        train=TrainConfig(max_steps=1, global_batch_size=8, micro_batch_size=1, **train),
    )


def test_a_launch_says_what_the_layout_takes_or_which_one_fits() -> None:
    line = advice(recipe(8192), FSDP2, 140 * GIB, "fsdp2.yaml")
    assert line is not None
    assert line.startswith("on paper: fsdp2.yaml takes ")
    assert " of 140 GiB on each GPU with train.memory=speed, optim.name=adamw" in line
    line = advice(recipe(262144), Topology(replicas=8), 140 * GIB, "ddp.yaml")
    assert line is not None
    assert line.startswith("on paper: rows of 262,144 positions do not fit with ddp.yaml; ")
    assert "p.yaml, " in line
    assert line.endswith("(docs/parallelism.md)")
    line = advice(recipe(8192), Topology(shards=2, sharded=True), 16 * GIB, "fsdp2.yaml")
    assert line is not None
    assert "nor does another layout" in line


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


def test_what_is_said_is_of_the_recipes_settings_or_names_those_that_fit() -> None:
    def said(gib: int, optimizer: str = "auto", **train: Any) -> str:
        cfg = recipe(8192, **train)
        cfg = replace(cfg, optim=replace(cfg.optim, name=optimizer))
        line = advice(cfg, Topology(shards=4, sharded=True), gib * GIB, "fsdp2.yaml")
        assert line is not None
        return line

    assert said(140).endswith(" of 140 GiB on each GPU with train.memory=speed, optim.name=adamw")
    assert said(140, "muon").endswith(" with train.memory=speed, optim.name=muon")
    assert said(140, memory="balanced").endswith(" with train.memory=balanced, optim.name=adamw")
    assert said(60, "adamw").endswith(
        " with train.memory=balanced, optim.name=adamw_sr; it does not fit with train.memory=speed, optim.name=adamw"
    )
    takes = [int(said(400, precision=precision).split(" takes ")[1].split()[0]) for precision in ("bf16", "fp32")]
    assert takes[1] > 1.3 * takes[0]


def test_rows_are_as_long_as_the_documents_of_the_run_that_a_recipe_starts_from(tmp_path: Path) -> None:
    run = tmp_path / "run" / "step-000004"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(QWEN))
    (run / TRAINING_STATE).parent.mkdir()
    (run / TRAINING_STATE).write_text(json.dumps({"max_length": 8192}))
    cfg = recipe(None)
    started = replace(cfg, model=ModelConfig(path=str(run)))
    assert advice(started, FSDP2, 140 * GIB, "fsdp2.yaml") == advice(recipe(8192), FSDP2, 140 * GIB, "fsdp2.yaml")
    (tmp_path / "empty").mkdir()
    for path in ("none", "empty"):
        cfg = replace(cfg, model=ModelConfig(path=str(tmp_path / path)))
        assert advice(cfg, FSDP2, 140 * GIB, "fsdp2.yaml") is None
    (run / TRAINING_STATE).write_text("{")
    assert advice(started, FSDP2, 140 * GIB, "fsdp2.yaml") is None


def test_a_gpipe_that_does_not_fit_is_told_of_the_schedule_that_does() -> None:
    cfg = recipe(8192, engine="pipeline", pipeline_schedule="gpipe")
    cfg = replace(cfg, train=replace(cfg.train, global_batch_size=64))
    line = advice(cfg, Topology(stages=2), 80 * GIB, "pp.yaml")
    assert line is not None
    assert line.startswith(
        "on paper: rows of 8,192 positions do not fit with pp.yaml and train.pipeline_schedule=gpipe; "
        "train.pipeline_schedule=1f1b takes "
    )


def test_the_1f1b_that_a_gpipe_is_told_of_has_as_many_micro_batches_as_stages() -> None:
    cfg = recipe(8192, engine="pipeline", pipeline_schedule="gpipe")
    cfg = replace(cfg, train=replace(cfg.train, global_batch_size=16, micro_batch_size=8))
    line = advice(cfg, Topology(stages=4), 66 * GIB, "pp.yaml")
    assert line is not None
    # 8 rows would fit as well, and make two micro-batches.
    assert "; train.pipeline_schedule=1f1b takes " in line
    assert line.endswith(", train.micro_batch_size=7 (docs/parallelism.md)")


def test_a_recipe_of_fp32_is_told_that_other_layouts_are_estimated_in_bf16() -> None:
    line = advice(recipe(65536, precision="fp32"), Topology(replicas=8), 140 * GIB, "ddp.yaml")
    assert line is not None
    assert line.endswith(", train.precision=bf16 (docs/parallelism.md)")


def test_nothing_is_said_of_an_optimizer_that_cannot_be_sharded() -> None:
    cfg = recipe(8192)
    cfg = replace(cfg, optim=replace(cfg.optim, name="adamw8bit"))
    assert advice(cfg, FSDP2, 140 * GIB, "fsdp2.yaml") is None
    assert advice(cfg, Topology(replicas=8), 140 * GIB, "ddp.yaml") is not None


def test_nothing_is_said_of_what_is_unknown() -> None:
    ddp = Topology(replicas=8)
    assert advice(recipe(None), ddp, 140 * GIB, "ddp.yaml") is None
    assert advice(recipe(8192), ddp, None, "ddp.yaml") is None
    assert advice(recipe(8192), Topology(), 140 * GIB, "single_gpu.yaml") is None
    assert advice(recipe(8192, engine="pipeline"), Topology(stages=40), 140 * GIB, "pp.yaml") is None  # of 36 layers
    unfit = {"1f1b": ((12, 12, 12), (1, 1)), "interleaved": ((18, 18), (12, 12, 12))}
    for schedule, layers in ((schedule, layers) for schedule, several in unfit.items() for layers in several):
        cfg = recipe(8192, engine="pipeline", pipeline_schedule=schedule, pipeline_layers=layers)
        assert advice(cfg, Topology(stages=2), 140 * GIB, "pp.yaml") is None


def test_of_a_pipeline_its_own_stages_and_schedule_are_counted() -> None:
    def said(topology: Topology, **train: Any) -> str:
        line = advice(recipe(8192, engine="pipeline", **train), topology, 140 * GIB, "pp.yaml")
        assert line is not None
        return line

    one = said(Topology(stages=4))
    assert one.startswith("on paper: pp.yaml takes ")
    assert said(Topology(stages=4), pipeline_schedule="gpipe") != one  # which holds activations of all micro-batches
    assert said(Topology(stages=4, shards=2, sharded=True)) != said(Topology(stages=4, replicas=2))
    assert said(Topology(stages=4), pipeline_layers=(1, 1, 1, 33)) != one
    assert said(Topology(stages=4), pipeline_schedule="interleaved").startswith("on paper: pp.yaml takes ")
    line = advice(recipe(262144, engine="pipeline"), Topology(stages=2, replicas=4), 80 * GIB, "pp.yaml")
    assert line is not None
    assert line.startswith("on paper: rows of 262,144 positions do not fit with pp.yaml; ")


def small_recipe(rows: int, micro: int, row_length: int) -> Config:
    cfg = recipe(row_length)
    return replace(cfg, train=replace(cfg.train, global_batch_size=rows, micro_batch_size=micro))


def test_a_pipeline_with_fewer_micro_batches_than_stages_is_never_named() -> None:
    """As config.engine_rules refuses it."""
    for setup, _ in setups(shape("8B"), [Topology(stages=4)], 8, 512, [4]):
        assert setup.layout.accumulation == 2
    assert not any(way.setup.topology.stages == 4 for way in ways(shape("8B"), Machines(4), 8, 512, [4]))
    assert any(way.setup.topology.stages == 4 for way in ways(shape("8B"), Machines(4), 8, 512, [2]))
    line = advice(small_recipe(8, 4, 512), Topology(shards=4, sharded=True), 28 * GIB, "fsdp2.yaml")
    assert line is not None
    assert line.startswith("on paper: 2 rows of 512 positions in a micro-batch do not fit with fsdp2.yaml; ")
    assert "pipeline" not in line


def test_fewer_rows_in_a_micro_batch_are_tried_before_more_gpus_are_asked_for() -> None:
    line = advice(small_recipe(16, 4, 4096), FSDP2, 24 * GIB, "fsdp2.yaml")
    assert line is not None
    assert "train.micro_batch_size=1" in line


def test_gpus_of_several_machines_are_no_single_machine() -> None:
    topology = Topology(replicas=16)
    cfg = small_recipe(16, 1, 65536)
    one, two = (advice(cfg, topology, 80 * GIB, "ddp.yaml", machines) for machines in (1, 2))
    assert one is not None
    assert two is not None
    assert "; fsdp2.yaml takes " not in two
    assert one != two


def test_a_layout_has_room_or_not_or_nothing_is_known() -> None:
    cfg = recipe(16384)
    assert has_room(cfg, FSDP2, 140 * GIB) is True
    assert has_room(cfg, Topology(replicas=8), 60 * GIB) is False
    assert has_room(cfg, FSDP2, None) is None


def test_tensor_ranks_need_rows_of_a_multiple_of_their_number_and_context_ranks_of_twice_that() -> None:
    for topology, said in ((Topology(tensor=2, sharded=True), True), (Topology(context=2, sharded=True), False)):
        assert (advice(small_recipe(8, 1, 8194), topology, 140 * GIB, "x.yaml") is not None) is said
