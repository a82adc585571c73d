"""The auxiliary loss of a model's experts in a compiled step: the same however rows are shared out, and what the plain model has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import cpu_runtime, torchrun
from routing_worker import TOPOLOGIES, WEIGHT, experts, recipe, trained

from sftkit.config.schema import CompileConfig, DataConfig, LossConfig
from sftkit.engine.engine import Training
from sftkit.errors import ConfigError
from sftkit.objectives.objective import NextToken
from sftkit.train.assemble import make_engine

GRADIENTS = "Same gradients as the plain model"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, four micro-batches a step."""
    return trained(recipe(), cpu_runtime(), tmp_path_factory.mktemp("alone"))


def assert_same(actual: dict[str, Any], other: dict[str, Any], rel: float = 1e-5) -> None:
    for ours, theirs in zip(actual["rows"], other["rows"], strict=True):
        assert ours == pytest.approx(theirs, rel=rel)
    assert actual["weights"] == pytest.approx(other["weights"], rel=1e-4)
    assert actual["load"] == other["load"]
    assert actual["experts"] == other["experts"]


def test_it_is_logged_minimised_and_compiled_without_a_graph_more(alone: dict[str, Any]) -> None:
    for row in alone["rows"]:
        assert row["train/objective"] == pytest.approx(row["train/loss"] + WEIGHT * row["train/aux_loss"])
        assert row["train/aux_loss"] > 2.02  # two experts for each token: 2 where all get the same
    assert (alone["graphs"], alone["recompiles"]) == (3, 0)  # blocks with and without experts, norm
    assert alone["checks"][GRADIENTS]
    load = alone["experts"]["load"]
    assert [len(row) for row in load] == [6, 6]
    assert [sum(row) for row in load] == pytest.approx([6.0, 6.0], abs=1e-3)
    assert alone["load"]["train/expert_load_max"] == pytest.approx(max(map(max, load)), abs=1e-4)
    assert alone["load"]["train/expert_load_min"] == pytest.approx(min(map(min, load)), abs=1e-4)


@pytest.mark.slow
def test_accumulated_is_what_one_micro_batch_is_and_the_reference_engine(alone: dict[str, Any], tmp_path: Path) -> None:
    assert_same(alone, trained(recipe(micro_batch_size=8), cpu_runtime(), tmp_path))
    assert_same(alone, trained(recipe(engine="reference"), cpu_runtime(), tmp_path), rel=2e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ddp")) for name in TOPOLOGIES]
)
def test_two_ranks_log_and_learn_what_one_does(alone: dict[str, Any], tmp_path: Path, name: str) -> None:
    torchrun(2, "routing_worker.py", str(tmp_path / "found.json"), name, timeout=1200)
    found = json.loads((tmp_path / "found.json").read_text())
    assert_same(found, alone)
    assert found["checks"][GRADIENTS]
    assert found["recompiles"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, "marked"])
def test_rows_of_any_length_need_no_graph_more(tmp_path: Path, dynamic: Any) -> None:
    cfg = recipe()
    cfg = replace(cfg, data=DataConfig(train=(), layout="dynamic"), compile=replace(cfg.compile, dynamic=dynamic))
    assert trained(cfg, cpu_runtime(), tmp_path)["recompiles"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("again", [{"activation_memory_budget": 0.0}, {}])
def test_what_is_computed_again_in_the_backward_pass_changes_nothing(tmp_path: Path, again: dict[str, Any]) -> None:
    compile = CompileConfig(backend="aot_eager_decomp_partition", fullgraph=True)
    kept = trained(replace(recipe(), compile=compile), cpu_runtime(), tmp_path)
    orig_model = experts()
    if not again:
        orig_model.gradient_checkpointing_enable({"use_reentrant": False})
    cfg = replace(recipe(), compile=replace(compile, **again))
    found = trained(cfg, cpu_runtime(), tmp_path, orig_model)
    assert_same(found, kept, rel=1e-6)
    assert found["recompiles"] == 0


@pytest.mark.slow
def test_a_config_that_asks_for_it_is_followed_and_the_recipe_can_turn_it_off(tmp_path: Path) -> None:
    cfg = replace(recipe(), loss=LossConfig(), compile=CompileConfig(enabled=False))
    asked = trained(cfg, cpu_runtime(), tmp_path, experts(output_router_logits=True, router_aux_loss_coef=0.25))
    row = asked["rows"][0]
    assert row["train/objective"] == pytest.approx(row["train/loss"] + 0.25 * row["train/aux_loss"])
    off = replace(cfg, loss=LossConfig(router_aux_loss_coef=0.0))
    measured = trained(off, cpu_runtime(), tmp_path, experts(output_router_logits=True))["rows"][0]
    assert "train/objective" not in measured
    assert measured["train/aux_loss"] == pytest.approx(row["train/aux_loss"])


def test_the_graph_engine_says_that_it_has_none(tmp_path: Path) -> None:
    cfg = recipe(engine="graph")
    with pytest.raises(ConfigError, match=r"loss\.router_aux_loss_coef=0"):
        make_engine(
            cfg, cpu_runtime(), tmp_path, Training(experts(), NextToken(cfg.loss), SimpleNamespace(kind="packed"))
        )  # type: ignore[arg-type]
