"""Experts' matrix products as operators of static shapes: rows, each of one expert, by torch's grouped matrix product,
which skips the rows that no expert of this rank computes.

Letters: S rows, E experts of a rank, H width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def computed(experts: Any, hidden: Tensor, numbers: Tensor, visits: int) -> Tensor:
    """Return what a rank's experts give, [S, H], one row for each number; 0 where the number is E.

    Args:
        experts: with this rank's gate_up_proj [E, 2 I, H] and down_proj [E, H, I].
        hidden: [S / visits, H], each token as often as it visits experts.
        numbers: int64 [S], of this rank's experts, or E: of none.
    """
    gate_up, down = experts.gate_up_proj, experts.down_proj
    count = len(gate_up)
    numbers, order = numbers.sort(stable=True)  # those of none are last
    ends = torch.searchsorted(numbers, torch.arange(count, device=numbers.device), right=True).int()
    back = order.argsort()
    own = (numbers < count)[:, None]
    # Rows of none are never written by the products, nor are their gradients: 0 before the first, and after the last.
    rows = rows_in_order(hidden, order, back, visits).where(own, 0.0)
    # Private: what transformers calls between the two products of its own experts (huggingface/transformers#42697), for
    # which each architecture has its activation.
    rows = grouped_product(experts._apply_gate(grouped_product(rows, gate_up, ends)), down, ends).where(own, 0.0)
    return rows_in_order(rows, back, order, 1)


def rows_in_order(rows: Tensor, order: Tensor, back: Tensor, visits: int) -> Tensor:
    """Return row `order[i] // visits` at i.

    Args:
        order: int64 [S], a permutation. back: its inverse.
    """
    return _Ordered.apply(rows, order, back, visits)


class _Ordered(torch.autograd.Function):
    """Its gradient is gathered, too, by the inverse permutation: no atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, visits: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.visits = visits
        return rows.index_select(0, order // visits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back).unflatten(0, (-1, ctx.visits)).sum(1), None, None, None


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return rows @ matrices[e].T of the rows before `ends[e]` and not before `ends[e - 1]`; of those behind
    the last, anything.

    Args:
        rows: [S, in]. matrices: [E, out, in]. ends: int32 [E], ascending.
    """
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)
    return _grouped_product(rows, matrices, ends)


# torch computes it in other precisions, but traces it in bf16 only: so it is one operator to whoever traces. No
# issue is known.


@torch.library.custom_op("sftkit::grouped_product", mutates_args=())
def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)


@torch.library.custom_op("sftkit::grouped_product_backward", mutates_args=())
def _grouped_product_backward(gradient: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and of matrices."""
    # The products want a row or a column of stride 1; the gradient of a sum is expanded, with strides of 0.
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
