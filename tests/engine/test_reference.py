"""The two engines against each other: packed, compiled and chunked gives what each document alone in plain torch gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import (
    cpu_runtime,
    make_batch,
    make_examples,
    make_layout_of,
    of_two_sources,
    tiny_llama,
    tiny_qwen3_with_windows,
    tiny_recipe,
    torchrun,
)
from made_models import tiny_gemma2
from reference_worker import train
from torch.nn import functional as F
from transformers import PreTrainedModel

from sftkit.config.schema import (
    CompileConfig,
    Config,
    LossConfig,
    OptimConfig,
    TrainConfig,
)
from sftkit.config.topology import Topology
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.engine import blocks
from sftkit.engine.engine import Engine, Training
from sftkit.engine.reference import documents
from sftkit.errors import ConfigError
from sftkit.objectives.objective import NextToken
from sftkit.train.assemble import make_engine
from sftkit.verify.proof import verified_warm_up

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 2
MODELS = {"llama": tiny_llama, "qwen3 with windows": tiny_qwen3_with_windows, "gemma2": tiny_gemma2}
LOSSES = {"plain": LossConfig(), "all": LossConfig(z_loss=1e-3, label_smoothing=0.1, token_metrics=True)}


def recipe(folder: Path, engine: str, compile: CompileConfig, loss: LossConfig = LOSSES["plain"], **optim) -> Config:
    return tiny_recipe(
        folder,
        optim=OptimConfig(name="adamw", lr=1e-2, weight_decay=0.1, eps=1e-4, **optim),
        train=TrainConfig(max_steps=4, engine=engine, precision="fp32"),  # type: ignore[arg-type]
        loss=loss,
        compile=compile,
    )


def steps(
    cfg: Config, orig_model: PreTrainedModel, kind: str = "packed"
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], Engine, dict[str, float]]:
    """(means of the sums and the gradient norm of four steps, weights afterwards, the engine, its metrics)."""
    torch._dynamo.reset()
    examples = of_two_sources(make_examples(LENGTHS, target_share=0.4))
    layout = make_layout_of(kind, examples.lengths)
    batches = Batches(StepDataset(examples, layout), seed=0)
    objective = NextToken(cfg.loss, num_sources=2)
    engine = make_engine(cfg, cpu_runtime(), Path(cfg.run.dir), Training(orig_model, objective, layout))
    verified_warm_up(engine, cpu_runtime(), lambda _: None)
    rows = []
    with engine.guarded():
        for step in batches.steps(0, 4):
            outcome = engine.step(step, 1e-2)
            rows.append(
                {
                    **outcome.sums.means_of(outcome.sums.vector.tolist(), step.divisor),
                    "grad_norm": float(outcome.grad_norm),
                }
            )  # type: ignore[dict-item]
            assert outcome.flags.vector[:2].tolist() == [0, 0]
    counts = engine.report().metrics
    engine.close()
    return rows, {name: value.detach().clone() for name, value in orig_model.named_parameters()}, engine, counts


def assert_same(ours, plain, rel: float) -> None:
    for got, expected in zip(ours[0], plain[0], strict=True):
        assert expected["nll/0"] + expected["nll/1"] == pytest.approx(expected["nll"], rel=1e-5)
        assert min(expected["nll/0"], expected["nll/1"]) > 0
        assert got == {name: pytest.approx(value, rel=rel, abs=1e-6) for name, value in expected.items()}
    for name, value in plain[1].items():
        torch.testing.assert_close(ours[1][name].to(value.dtype), value, rtol=1e-3, atol=2e-5)


EAGER = CompileConfig(enabled=False)
COMPILED = CompileConfig(backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        *(("packed", "llama"), ("bucketed", "llama")),
        *(("packed", "qwen3 with windows"), ("fixed", "qwen3 with windows")),
        ("dynamic", "gemma2"),
    ],
)
def test_four_steps_of_every_layout_equal_those_of_the_reference(tmp_path: Path, kind: str, model: str) -> None:
    plain = steps(recipe(tmp_path, "reference", EAGER), MODELS[model](), kind)
    assert_same(steps(recipe(tmp_path, "blocks", EAGER), MODELS[model](), kind), plain, rel=2e-5)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_the_compiled_step_equals_the_reference_with_every_loss_and_clipping(tmp_path: Path, loss: LossConfig) -> None:
    plain = steps(recipe(tmp_path, "reference", EAGER, loss, max_grad_norm=0.1), tiny_llama())
    ours = steps(recipe(tmp_path, "blocks", COMPILED, loss, max_grad_norm=0.1), tiny_llama())
    assert ours[3]["compile/graphs"] == 2  # block and final norm
    assert plain[3]["compile/graphs"] == 0
    assert_same(ours, plain, rel=2e-5)
    assert plain[0][0]["grad_norm"] > 0.1
    assert (plain[0][0]["entropy"] > 0) == loss.token_metrics


def test_the_reference_takes_adamw_for_auto(tmp_path: Path) -> None:
    named = recipe(tmp_path, "reference", EAGER)
    auto = replace(named, optim=replace(named.optim, name="auto"))
    assert_same(steps(auto, tiny_llama()), steps(named, tiny_llama()), rel=0.0)


def test_in_float64_the_reference_is_what_float32_rounds(tmp_path: Path) -> None:
    exact = steps(recipe(tmp_path, "reference", EAGER), tiny_llama().double())
    assert exact[1]["lm_head.weight"].dtype == torch.float64
    assert_same(steps(recipe(tmp_path, "blocks", EAGER), tiny_llama()), exact, rel=2e-5)


def test_a_step_that_is_not_finite_leaves_weights_and_moments_as_they_were(tmp_path: Path, monkeypatch) -> None:
    cfg = recipe(tmp_path, "reference", EAGER)
    rows, before, engine, _ = steps(cfg, tiny_llama())
    plain = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args, **kwargs: plain(*args, **kwargs) * float("nan"))
    examples = make_examples(LENGTHS, target_share=0.4)
    (step,) = Batches(StepDataset(examples, make_layout_of("packed", examples.lengths)), seed=0).steps(0, 1)
    outcome = engine.step(step, 1e-2)
    assert float(outcome.flags.nonfinite) == 1
    for name, value in engine.model.orig_model.named_parameters():
        assert torch.equal(value, before[name])
    assert len(rows) == 4


@pytest.mark.slow
def test_two_ranks_of_which_one_has_padding_only_compute_what_one_does(tmp_path: Path) -> None:
    torchrun(2, "reference_worker.py", str(tmp_path / "found.json"))
    found, alone = json.loads((tmp_path / "found.json").read_text()), train(cpu_runtime())
    assert found["empty"], "a rank without documents is what this is about"
    assert found["same"], "replicas stay equal"
    for ours, theirs in zip(found["rows"], alone, strict=True):
        for name in ("nll", "norm", "weights"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name


def test_an_engine_that_cannot_be_built_leaves_the_compiler_as_it_was(tmp_path: Path, monkeypatch) -> None:
    before = torch._dynamo.config.optimize_ddp
    monkeypatch.setattr(blocks, "build_optimizer", Mock(side_effect=ConfigError("no such optimizer")))
    cfg = recipe(tmp_path, "blocks", COMPILED)
    with pytest.raises(ConfigError, match="no such optimizer"):
        make_engine(
            cfg, cpu_runtime(), tmp_path, Training(tiny_llama(), NextToken(cfg.loss), make_layout_of("packed", LENGTHS))
        )
    assert torch._dynamo.config.optimize_ddp == before is not False


def test_a_run_that_ends_before_its_first_step_puts_the_compilers_settings_back(tmp_path: Path) -> None:
    before = torch._dynamo.config.optimize_ddp
    cfg = recipe(tmp_path, "blocks", COMPILED)
    with cpu_runtime() as rt:
        make_engine(cfg, rt, tmp_path, Training(tiny_llama(), NextToken(cfg.loss), make_layout_of("packed", LENGTHS)))
        assert torch._dynamo.config.optimize_ddp is False
    assert torch._dynamo.config.optimize_ddp == before is not False


def test_rows_are_taken_apart_into_their_documents() -> None:
    examples = make_examples([9, 14, 6, 20], target_share=0.5)
    examples = replace(examples, source=np.asarray([2, 0, 1, 2], np.int16), source_names=("a", "b", "c"))
    found = list(documents(make_batch(examples, ((0, 1), (2,), (), (3,)), 32)))
    assert len(found) == 4
    for i, (inputs, targets, source, *_) in enumerate(found):
        assert inputs.keys() == {"input_ids"}
        assert source == examples.source[i]
        assert inputs["input_ids"][0].tolist() == examples[i].ids[:-1].tolist()
        expected = np.where(examples[i].is_target[1:], examples[i].ids[1:], -100)
        assert targets.tolist() == expected.tolist()


@pytest.mark.parametrize("change", ["bf16", "sharded", "muon"])
def test_what_the_reference_cannot_compute_is_refused_with_the_cure(tmp_path: Path, change: str) -> None:
    cfg, rt, model = recipe(tmp_path, "reference", EAGER), cpu_runtime(), tiny_llama()
    if change == "muon":
        cfg = recipe(tmp_path, "reference", EAGER)
        object.__setattr__(cfg.optim, "name", "muon")
    if change == "sharded":
        rt.topology = Topology(shards=1, sharded=True)
    if change == "bf16":
        model = model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"train\.engine=reference"):
        make_engine(cfg, rt, tmp_path, Training(model, NextToken(cfg.loss), make_layout_of("packed", LENGTHS)))
