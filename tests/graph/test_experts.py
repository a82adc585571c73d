"""Experts by grouped products are transformers' own, on one rank and shared out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_worker import MODELS
from torch import Tensor

from sftkit.graph.sharding import added, share_experts
from sftkit.models.experts import compute_experts_here


def tokens(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of 20 tokens, what each visits, and weights; nobody visits expert 3, and everybody expert 5."""
    torch.manual_seed(0)
    hidden = torch.randn(20, 32, dtype=dtype, requires_grad=True)
    others = torch.tensor([0, 1, 2, 4, 6, 7])[torch.randint(6, (20,))]
    chosen = torch.stack([others, torch.full((20,), 5)], 1)
    return hidden, chosen, torch.rand(20, 2, requires_grad=True)


def results(experts: Any, forward: Any, dtype: torch.dtype) -> list[Tensor]:
    """What comes out, and the gradients of hidden states, weights and matrices."""
    hidden, chosen, weights = tokens(dtype)
    out = forward(hidden, chosen, weights)
    (out.float() * torch.linspace(-1, 1, 32)).sum().backward()
    found = [out.detach(), hidden.grad, weights.grad, *(p.grad for p in experts.parameters())]
    experts.zero_grad(set_to_none=True)
    assert all(torch.isfinite(each).all() for each in found)
    return [each.float() for each in found]


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_each_rank_computes_its_experts_and_together_they_are_transformers_own(
    dtype: torch.dtype, allowed: float
) -> None:
    model: Any = MODELS["deepseek_v3"]().to(dtype)
    model.set_experts_implementation("eager")
    experts = model.model.layers[1].mlp.experts
    expected = results(experts, experts, dtype)
    compute_experts_here(model)

    def halves(*given: Tensor) -> Tensor:
        shares = []
        for first in (0, 4):
            own = slice(first, first + 4)
            share = SimpleNamespace(
                gate_up_proj=experts.gate_up_proj[own],
                down_proj=experts.down_proj[own],
                **{name: getattr(experts, name) for name in ("_apply_gate", "has_gate", "has_bias", "is_transposed")},
            )
            shares.append(added(share, *given, first))
        return shares[0] + shares[1]

    for forward in (experts, halves):
        for ours, plain in zip(results(experts, forward, dtype), expected, strict=True):
            assert (ours - plain).norm() <= allowed * plain.norm()


def test_experts_of_another_form_stay_transformers_own() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    share_experts(model, None)  # type: ignore[arg-type]
    assert type(model[0]) is torch.nn.Linear
