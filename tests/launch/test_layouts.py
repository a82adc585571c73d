"""Layouts on paper: which one is taken, and what a launch says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from labs.patterns.paper import shape
from labs.patterns.speed import Machines, ways
from sftkit.config.rules import PIPELINE_MODEL_TYPES
from sftkit.config.schema import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.launch.layouts import SHARDABLE, advice, has_room, setups
from sftkit.memory.estimate import GIB
from sftkit.parallel import tensor
from sftkit.rundir.names import TRAINING_STATE

QWEN = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip

FSDP2 = Topology(shards=8, sharded=True)


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
        "on paper: rows of 8,192 positions do not fit with pp.yaml and train.pipeline_schedule=gpipe, which keeps more "
        "activations than 1f1b; "
    )


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
