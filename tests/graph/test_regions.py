"""Regions of a block's operators in the halves of a graph: what is in them, and that the rest stays as and where it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import make_batch, make_examples, tiny_llama
from torch import Tensor
from torch.fx import GraphModule

from sftkit.config.schema import LossConfig
from sftkit.data.batches.collate import Batch
from sftkit.graph import compat
from sftkit.graph.capture import CapturedModel
from sftkit.objectives.objective import ModelWithLoss, NextToken

EXAMPLES = make_examples([30, 4, 25, 8, 31, 3, 17, 29])
ROWS: list[tuple[tuple[int, ...], ...]] = [((0,), (1, 2)), ((3, 5, 6), (7,))]


def batch_of(rows: tuple[tuple[int, ...], ...], device: str = "cpu") -> Batch:
    batch = make_batch(EXAMPLES, rows, 32)
    cu_seqlens = torch.full((9,), batch.targets.numel(), dtype=torch.int32)
    cu_seqlens[: len(batch.cu_seqlens)] = batch.cu_seqlens
    return Batch(**{**vars(batch), "cu_seqlens": cu_seqlens}).to(torch.device(device))


def captured(passes: tuple[str, ...], device: str = "cpu") -> CapturedModel:
    model = ModelWithLoss(tiny_llama(layers=3, head_dim=16).to(device), "flex", NextToken(LossConfig()))
    found = CapturedModel(model, passes)
    found.capture(batch_of(ROWS[0], device))
    return found


def same_as_eager(model: CapturedModel, device: str = "cpu") -> None:
    limit = 1e-5 if device == "cpu" else 1e-3  # of kernels that are not the reference's
    for rows in ROWS:
        batch, found = batch_of(rows, device), []
        for backend in (None, "reference"):
            loss = (model(batch) if backend is None else model.model(batch, backend)).loss
            loss.backward()
            found.append((loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
            model.zero_grad(set_to_none=True)
        (ours, our_gradients), (plain, plain_gradients) = found
        assert ours == pytest.approx(plain, rel=limit)
        for a, b in zip(our_gradients, plain_gradients, strict=True):
            assert (a - b).norm() <= limit * b.norm()


def text(model: CapturedModel, graph: str) -> str:
    """Of a half after its last pass."""
    return [stage.text for stage in model.stages[2, 32] if stage.graph == graph][-1]


@pytest.mark.slow
def test_regions_hold_what_can_be_fused_and_blocks_that_are_alike_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    regions: list[str] = []

    def called(region: GraphModule, examples: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        regions.append(region.code)

        def call(*inputs: Tensor) -> tuple[Tensor, ...]:
            return region(*inputs)

        return call

    monkeypatch.setattr(compat, "compiled_region", called)
    model = captured(("regional_inductor",))
    same_as_eager(model)
    forward, backward = text(model, "forward"), text(model, "backward")
    assert all(part not in "".join(regions) for part in ("flex_attention", "linear_nll"))
    assert forward.count("higher_order.flex_attention(") == backward.count("flex_attention_backward(") == 3
    assert "sftkit.linear_nll" in forward
    assert not any(".aten.mm." in half for half in (forward, backward)), "matrix products are in regions"
    calls = re.findall(r"= test_regions_call(?:_\d+)?\(", forward + backward)
    assert len(regions) < len(calls), "three blocks, and of those that are alike one"


@pytest.mark.slow
def test_regions_compiled_by_inductor_compute_the_same() -> None:
    same_as_eager(captured(("regional_inductor",)))


@pytest.mark.gpu
@pytest.mark.own_process
@pytest.mark.parametrize("passes", [(), ("regional_inductor",), ("full_inductor",)])
def test_on_a_gpu_flex_attention_is_compiled_with_any_passes(passes: tuple[str, ...]) -> None:
    model = captured(passes, "cuda")
    same_as_eager(model, "cuda")
    if "full_inductor" not in passes:
        for half in ("forward", "backward"):
            assert "higher_order.flex_attention" not in text(model, half)
