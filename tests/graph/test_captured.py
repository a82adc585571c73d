"""What the step calls: graphs of the shapes that were captured, and what happens with any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from graph_worker import MODELS
from helpers import make_batch, make_examples

from sftkit.compile.contract import HookWatch
from sftkit.config.schema import LossConfig
from sftkit.data.batches.collate import Batch
from sftkit.errors import ConfigError, RecompileError
from sftkit.graph import compat
from sftkit.graph.capture import CapturedModel, signature_of
from sftkit.objectives.objective import ModelWithLoss, NextToken

EXAMPLES = make_examples([30, 4, 25, 8, 31, 3, 17, 29])
ROWS = ((0,), (1, 2))
OTHER_ROWS = ((3, 5, 6), (7,))


def batch_of(rows: tuple[tuple[int, ...], ...] = ROWS, row_length: int = 32, slots: int = 8) -> Batch:
    batch = make_batch(EXAMPLES, rows, row_length)
    cu_seqlens = torch.full((slots + 1,), batch.targets.numel(), dtype=torch.int32)
    cu_seqlens[: len(batch.cu_seqlens)] = batch.cu_seqlens
    return Batch(**{**vars(batch), "cu_seqlens": cu_seqlens})


@pytest.fixture(scope="module")
def graphed() -> CapturedModel:
    """With the graph of rows of 32, and token metrics, a soft cap and padded rows of the head in the loss."""
    model = CapturedModel(ModelWithLoss(MODELS["llama"](), "reference", NextToken(LossConfig(token_metrics=True))), ())
    model.capture(batch_of())
    return model


@pytest.fixture
def captured(graphed: CapturedModel) -> Iterator[CapturedModel]:
    """As it was before each test."""
    graphs, stages = dict(graphed._graphs), dict(graphed.stages)
    yield graphed
    graphed._graphs, graphed.stages = graphs, stages
    graphed.late.clear()
    graphed.zero_grad(set_to_none=True)


@pytest.mark.parametrize("rows", [ROWS, OTHER_ROWS])
def test_a_graph_gives_the_sums_and_gradients_of_documents_that_it_has_not_seen(captured, rows) -> None:
    batch, found = batch_of(rows), []
    for model in (captured, captured.model):
        sums = model(batch)
        sums.loss.backward()
        gradients = [p.grad.clone() for p in captured.parameters()]
        found.append((sums, gradients))
        captured.zero_grad(set_to_none=True)
    (ours, our_gradients), (plain, plain_gradients) = found
    assert ours.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert {k: v.item() for k, v in ours.measured.items()} == pytest.approx(
        {k: v.item() for k, v in plain.measured.items()}, rel=1e-5
    )
    assert float(ours.measured["entropy"]) > 0
    for a, b in zip(our_gradients, plain_gradients, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_what_stands_for_a_gradient_that_another_micro_batch_gives_never_reaches_the_parameter(captured) -> None:
    batch = batch_of()
    graph = replace(captured._graphs[signature_of(batch)], reduced_once={0, 2})
    graph(batch, reduces=False).loss.backward()
    trained = {at: p for at, p in enumerate(graph.state) if p.requires_grad}
    assert [at for at, p in trained.items() if p.grad is None] == [0, 2]
    graph(batch).loss.backward()
    assert all(p.grad is not None for p in trained.values())


def test_gradients_of_several_micro_batches_add_up(captured) -> None:
    for rows in (ROWS, OTHER_ROWS):
        captured(batch_of(rows)).loss.backward()
    both = [p.grad.clone() for p in captured.parameters()]
    captured.zero_grad(set_to_none=True)
    sum(captured.model(batch_of(rows)).loss for rows in (ROWS, OTHER_ROWS)).backward()
    for ours, p in zip(both, captured.parameters(), strict=True):
        assert (ours - p.grad).norm() <= 1e-5 * p.grad.norm()


def test_another_shape_is_an_error_that_names_it_and_those_that_there_are(captured) -> None:
    with (
        captured.contract("error"),
        pytest.raises(RecompileError, match=r"micro-batch of 2 x 48 positions; captured: 2 x 32\n.*data\.layout"),
    ):
        captured(batch_of(row_length=48))
    with (
        captured.contract("error"),
        pytest.raises(RecompileError, match=r"2 x 32 positions with cu_seqlens \[10\] \(captured: \[9\]\)"),
    ):
        captured(batch_of(slots=9))


def test_another_shape_is_captured_now_and_counted_on_demand(captured) -> None:
    batch = batch_of(row_length=48)
    expected = captured.model(batch).loss.item()
    with captured.contract("warn"):
        for _ in range(2):
            assert captured(batch).loss.item() == pytest.approx(expected, rel=1e-6)
    assert captured.late == ["a micro-batch of 2 x 48 positions; captured: 2 x 32"]
    assert captured.num_graphs == 2


def test_outside_the_contract_another_shape_runs_eagerly_and_nobody_is_told(captured) -> None:
    captured(batch_of(row_length=48))
    assert captured.late == []


def test_a_name_that_this_torch_lacks_is_an_error_that_says_which_and_what_was_run() -> None:
    with pytest.raises(ConfigError, match=r"has no torch\.fx\.graph\._NoSuchCodeGen.*2\.11, 2\.13.*blocks"):
        compat.private("torch.fx.graph", "_NoSuchCodeGen")
    with pytest.raises(ConfigError, match=r"has no torch\.no_such_module\.name"):
        compat.private("torch.no_such_module", "name")
    other = SimpleNamespace(overloadpacket=SimpleNamespace(__name__="send_by_pigeon"))
    with pytest.raises(
        ConfigError, match=r"has no torch\.ops\._c10d_functional\.send_by_pigeon_coalesced.*2\.11, 2\.13"
    ):
        compat.coalesced(other)


def test_inputs_that_this_torch_describes_otherwise_are_an_error_and_not_a_graph_without_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "parameter_of", lambda node: None)
    model = CapturedModel(ModelWithLoss(MODELS["llama"](), "reference", NextToken(LossConfig())), ())
    with pytest.raises(ConfigError, match=r'has no ParamAOTInput in node\.meta\["desc"\]'):
        model.capture(batch_of())


def test_arguments_that_this_torch_lacks_are_left_out() -> None:
    def of_2_11(graph: object, *, collective_bucketing: bool = False) -> None: ...

    assert compat.accepted(of_2_11, collective_bucketing=True, bucket_mode="custom_ops") == {
        "collective_bucketing": True
    }


@pytest.mark.parametrize("model", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_flex_attention_in_a_graph_keeps_documents_apart_that_differ_from_batch_to_batch(model) -> None:
    """A soft cap of the scores and sliding windows among it."""
    captured = CapturedModel(ModelWithLoss(MODELS[model](), "flex", NextToken(LossConfig())), ())
    captured.capture(batch_of())
    for rows in (ROWS, OTHER_ROWS):
        batch, found = batch_of(rows), []
        for compute in (captured, partial(captured.model, backend="reference")):
            loss = compute(batch).loss
            loss.backward()
            found.append((loss.item(), [p.grad.clone() for p in captured.parameters()]))
            captured.zero_grad(set_to_none=True)
        (ours, our_gradients), (plain, plain_gradients) = found
        assert ours == pytest.approx(plain, rel=1e-6)
        for a, b in zip(our_gradients, plain_gradients, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_what_has_no_graph_attends_without_flex_which_would_keep_all_scores(captured) -> None:
    other = CapturedModel(ModelWithLoss(captured.model.orig_model, "flex", captured.model.objective), ())
    assert other(batch_of()).loss.item() == pytest.approx(captured.model(batch_of()).loss.item())


@pytest.mark.slow
def test_a_budget_of_activations_keeps_less_for_the_backward_pass_and_computes_the_same() -> None:
    model = ModelWithLoss(MODELS["llama"](), "reference", NextToken(LossConfig()))
    kept = {}
    for budget in (1.0, 0.1):
        captured = CapturedModel(model, (), saves_memory=budget < 1.0)
        with torch._functorch.config.patch(activation_memory_budget=budget):
            captured.capture(batch_of())
        captured(batch_of()).loss.backward()
        kept[budget] = (
            {stage.graph: stage.counts.nodes for stage in captured.stages[2, 32]},
            [p.grad.clone() for p in model.parameters()],
        )
        model.zero_grad(set_to_none=True)
    (all_kept, expected), (few_kept, found) = kept[1.0], kept[0.1]
    assert few_kept["backward"] > all_kept["backward"] + 20, "what is not kept is computed again"
    for ours, plain in zip(found, expected, strict=True):
        assert (ours - plain).norm() <= 1e-5 * plain.norm()


def test_a_hook_that_a_captured_step_does_not_run_is_found() -> None:
    orig_model = MODELS["llama"]()
    watch = HookWatch(orig_model, captured=True)
    assert watch.unheeded() == []
    hook = orig_model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    (line,) = watch.unheeded()
    assert line.startswith("model.layers.0.mlp: forward hook added after the warm-up")
    hook.remove()
    assert watch.unheeded() == []
