"""Routed experts inside the graph: grouped matrix products of static shapes, and experts of their own for tensor-parallel ranks.

The ranks of a group gather each other's tokens and what the router chose for them; each computes its own experts for all of
these tokens, and the results are added up where the tokens came from. A graph knows no sizes that depend on what is chosen, and
the host waits for nothing; torch's matrix product skips the rows that are another rank's.

Letters: N tokens, K experts that each visits, E experts of a rank, H width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from transformers import PreTrainedModel

from sftkit.graph import compat
from sftkit.graph.exchange import add_and_scatter, gather

_GROUP = "_sftkit_experts_of"
"Attribute of experts: the group that they are shared out over; None: every rank has all."


def use_grouped_products(orig_model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
    """Let the experts of a model be computed here, in place; before weights are cut.

    Args:
        group: each of its ranks has an equal share of every block's experts, in order.
    """
    for module in orig_model.modules():
        if is_experts(module):
            module.__class__ = _grouped(type(module))  # type: ignore[arg-type]  # torch hashes modules
            module.__dict__[_GROUP] = group


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module is experts as most architectures have them: gated, without biases, [experts, out, in]."""
    form = {"has_gate": True, "has_bias": False, "is_transposed": False}
    return all(getattr(module, name, None) is wanted for name, wanted in form.items())


@cache
def _grouped(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class of the same name whose experts are computed here."""

    def forward(self: torch.nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        group = self.__dict__[_GROUP]
        if group is None:
            return computed(self, hidden, top_k_index, top_k_weights, 0)
        hidden, top_k_weights = gather(hidden, 0, group), gather(top_k_weights, 0, group)
        chosen = compat.all_gather(top_k_index, 0, group)
        first = group.rank() * self.gate_up_proj.shape[0]  # type: ignore[union-attr,index,operator]
        return add_and_scatter(computed(self, hidden, chosen, top_k_weights, first), 0, group)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def computed(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, first: int) -> Tensor:
    """What a rank's experts add to tokens, [N, H]: 0 to those that visit none of them.

    Args:
        experts: with this rank's gate_up_proj [E, 2 I, H] and down_proj [E, H, I].
        hidden: [N, H]. chosen: int64 [N, K], numbers of experts. weights: [N, K].
        first: number of its first expert.
    """
    gate_up, down = experts.gate_up_proj, experts.down_proj
    count, visits = len(gate_up), chosen.shape[1]
    numbers = chosen.flatten() - first
    is_own = (numbers >= 0) & (numbers < count)
    numbers, order = torch.where(is_own, numbers, count).sort(stable=True)  # other ranks' are last
    ends = torch.searchsorted(numbers, torch.arange(count, device=numbers.device), right=True).int()
    back = order.argsort()
    own = (numbers < count)[:, None]
    # Rows of other ranks are never written by the products, nor are their gradients: 0 before the first, and after the last.
    rows = _Rows.apply(hidden, order, back, visits).where(own, 0.0)
    rows = grouped_product(experts._apply_gate(grouped_product(rows, gate_up, ends)), down, ends).where(own, 0.0)
    results = _Rows.apply(rows, back, order, 1).unflatten(0, (-1, visits))
    return (results * weights[..., None]).sum(1).to(hidden.dtype)


class _Rows(torch.autograd.Function):
    """Row `order[i] // visits` at i. Its gradient is gathered, too, by the inverse permutation: no atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, visits: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.visits = visits
        return rows.index_select(0, order // visits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back).unflatten(0, (-1, ctx.visits)).sum(1), None, None, None


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows @ matrices[e].T of the rows before `ends[e]` and not before `ends[e - 1]`; of those behind the last, anything.

    Args:
        rows: [S, in]. matrices: [E, out, in]. ends: int32 [E], ascending.
    """
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)
    return _grouped_product(rows, matrices, ends)


# torch computes it in other precisions, but traces it in bf16 only: so it is one operator to whoever traces.


@torch.library.custom_op("sftkit::grouped_product", mutates_args=())
def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)


@torch.library.custom_op("sftkit::grouped_product_backward", mutates_args=())
def _grouped_product_backward(gradient: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and of matrices."""
    gradient = gradient.contiguous()
    return F.grouped_mm(gradient, matrices, offs=ends), F.grouped_mm(gradient.t(), rows, offs=ends)


@_grouped_product.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), matrices.shape[1])


@_grouped_product_backward.register_fake
def _(gradient: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), matrices.new_empty(matrices.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_grouped_product_backward(gradient, *ctx.saved_tensors), None


_grouped_product.register_autograd(_backward, setup_context=_save)
