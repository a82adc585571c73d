"""The compile contract: one graph per block kind, declared shapes only, no recompile after warm-up, eager elsewhere."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers import VOCAB_SIZE, cpu_runtime, make_examples, tiny_llama

from sftkit.compilation import CompileWatch, compile_model, decoder_blocks, run_eagerly, warm_up
from sftkit.config import CompileConfig, OptimConfig
from sftkit.data.collate import warm_up_batch
from sftkit.data.loader import Batches
from sftkit.data.pack import Layout
from sftkit.errors import ConfigError
from sftkit.evals.validation import validate
from sftkit.generate import generate
from sftkit.optim import build_optimizer
from sftkit.step import ModelWithLoss, forward_backward, optimizer_step


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layout(kind: str = "packed") -> Layout:
    return Layout(kind, (16, 32) if kind == "bucketed" else (32,), 4, 2, 1)


def warmed_up(kind: str = "packed", **settings) -> tuple[ModelWithLoss, CompileWatch, bool]:
    rt = cpu_runtime()
    model = ModelWithLoss(tiny_llama())
    config = CompileConfig(**{"backend": "aot_eager", **settings})
    watch = CompileWatch()
    compile_model(model, config)

    def run_shape(rows: int, row_length: int) -> None:
        batch = warm_up_batch(rows, row_length, VOCAB_SIZE)
        forward_backward(model, batch, batch.num_targets, rt)

    compiled = warm_up(model, run_shape, layout(kind).shapes, config, rt.any_rank)
    watch.warm_up_done()
    return model, watch, compiled


@pytest.mark.parametrize(
    ("kind", "scope", "graphs"),
    [("packed", "block", 2), ("fixed", "block", 2), ("bucketed", "block", 4), ("packed", "model", 1)],
)
def test_zero_recompiles_over_20_varied_steps_with_an_evaluation_in_the_middle(
    tokenizer, kind: str, scope: str, graphs: int
) -> None:
    rt = cpu_runtime()
    model, watch, compiled = warmed_up(kind, scope=scope, fullgraph=True)
    examples = make_examples([int(n) for n in torch.randint(1, 33, (120,))])
    optimizer = build_optimizer(model.orig_model, OptimConfig())
    batches = Batches(examples, layout(kind), seed=0, rank=0, pad_id=0)
    for i, step in enumerate(batches.steps(0, 20)):
        optimizer_step(model, optimizer, step, 1e-3, 1.0, rt)
        if i == 9:
            validate(model.orig_model, {"val": make_examples([5, 9, 13])}, layout(), 0, rt)
            prompts = [[5, 6, 7], [8, 9]]
            generate(model.orig_model, tokenizer, prompts, stop_ids=[1], max_new_tokens=3, batch_size=2)
            assert model.orig_model.training
    assert compiled
    assert watch.counts()["compile/graphs"] == graphs
    assert watch.counts()["compile/recompiles"] == 0, watch.recompile_reasons()
    assert watch.counts()["compile/graph_breaks"] == 0
    assert watch.counts()["compile/seconds"] > 0


def test_a_shape_that_was_not_declared_is_counted_and_explained() -> None:
    rt = cpu_runtime()
    model, watch, _ = warmed_up()
    batch = warm_up_batch(1, 24, VOCAB_SIZE)
    forward_backward(model, batch, batch.num_targets, rt)
    assert watch.counts()["compile/recompiles"] > 0
    assert any("size" in reason for reason in watch.recompile_reasons())


def test_a_graph_break_is_counted() -> None:
    watch = CompileWatch()

    @torch.compile(backend="eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    broken(torch.ones(3))
    assert watch.counts()["compile/graph_breaks"] == 1


@pytest.mark.parametrize("scope", ["block", "model"])
def test_compiled_equals_eager_with_inductor(scope: str) -> None:
    rt = cpu_runtime()
    eager = ModelWithLoss(tiny_llama())
    compiled, _, works = warmed_up(backend="inductor", scope=scope)
    assert works
    batch = warm_up_batch(2, 32, VOCAB_SIZE)
    losses = [float(forward_backward(m, batch, batch.num_targets, rt)) for m in (eager, compiled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6)


def test_warm_up_leaves_random_state_and_gradients_as_they_were() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    state = torch.get_rng_state()
    model = ModelWithLoss(tiny_llama(dropout=0.5))
    torch.set_rng_state(state)
    config = CompileConfig(backend="aot_eager")
    compile_model(model, config)
    model.train()

    def run_shape(rows: int, row_length: int) -> None:
        batch = warm_up_batch(rows, row_length, VOCAB_SIZE)
        forward_backward(model, batch, 1, cpu_runtime())

    warm_up(model, run_shape, [(2, 32)], config, lambda flag: flag)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_compiling_in_place_keeps_orig_model_and_its_keys() -> None:
    orig_model = tiny_llama()
    keys = list(orig_model.state_dict())
    model = ModelWithLoss(orig_model)
    compile_model(model, CompileConfig(backend="aot_eager"))
    assert model.orig_model is orig_model
    assert list(orig_model.state_dict()) == keys
    assert not any("_orig_mod" in name for name, _ in model.named_parameters())
    assert len(decoder_blocks(model)) == 2


def test_orig_model_runs_any_shape_eagerly_inside_run_eagerly() -> None:
    model, watch, _ = warmed_up()
    before = watch.counts()["compile/graphs"]
    with torch.no_grad(), run_eagerly():
        for length in (3, 7, 19):
            model.orig_model(input_ids=torch.ones(1, length, dtype=torch.int64))
    assert watch.counts()["compile/graphs"] == before


def broken_compiler(*_: object) -> None:
    raise RuntimeError("no working C++ compiler found")


@pytest.mark.parametrize("on_failure", ["warn", "error"])
def test_a_machine_without_a_compiler_trains_eagerly_after_one_warning_or_stops(on_failure, caplog) -> None:
    rt = cpu_runtime()
    model = ModelWithLoss(tiny_llama())
    config = CompileConfig(on_failure=on_failure)
    for block in decoder_blocks(model):
        block.compile(backend=broken_compiler)

    def run_shape(rows: int, row_length: int) -> None:
        batch = warm_up_batch(rows, row_length, VOCAB_SIZE)
        forward_backward(model, batch, batch.num_targets, rt)

    if on_failure == "error":
        with pytest.raises(ConfigError, match=r"no working C\+\+ compiler"):
            warm_up(model, run_shape, [(2, 32)], config, rt.any_rank)
        return
    with caplog.at_level(logging.WARNING):
        assert warm_up(model, run_shape, [(2, 32)], config, rt.any_rank) is False
    ours = [r for r in caplog.records if r.name.startswith("sftkit")]
    assert len(ours) == 1
    assert "training eagerly" in ours[0].getMessage()
    run_shape(2, 32)  # eager now, so it works


def test_disabled_compile_builds_no_graph() -> None:
    model, watch, compiled = warmed_up(enabled=False)
    assert not compiled
    batch = warm_up_batch(2, 32, VOCAB_SIZE)
    forward_backward(model, batch, batch.num_targets, cpu_runtime())
    assert watch.counts()["compile/graphs"] == 0
