"""Matrix products of the experts of a mixture: rows in the order of their experts, and one matrix for each expert.

All shapes are known when a graph is captured: no size depends on the choices of a router.

Letters: S rows, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort rows by the experts that they are for.

    Args:
        chosen: int64 [S], the number of each row's expert; one that is not below `experts` is of none.

    Returns:
        (the sorted numbers; int64 [S], the rows in this order; its inverse; int32 [E], where each expert's rows end)
    """
    numbers, order = chosen.sort(stable=True)
    ends = torch.searchsorted(numbers, torch.arange(experts, device=numbers.device), right=True).int()
    return numbers, order, order.argsort(), ends


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


def rows_of_experts(bias: Tensor, numbers: Tensor, ends: Tensor) -> Tensor:
    """Return row `numbers[i]` of a bias [E, out] at i, of numbers and ends from `by_expert`."""
    return _OfExperts.apply(bias, numbers, ends)


class _OfExperts(torch.autograd.Function):
    """Its gradient, a sum over the rows of each expert, is a grouped product with ones: in a fixed order."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, numbers: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return bias.index_select(0, numbers.clamp(max=len(bias) - 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        ones = gradient.new_ones(len(gradient), 8)  # products take rows of a multiple of 16 bytes
        return _gradient_of_matrices(gradient, ones, ends)[..., 0], None, None


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor, *, computed: bool = False) -> Tensor:
    """Return rows @ matrices[e].T of the rows before `ends[e]` and not before `ends[e - 1]`; of those behind
    the last, anything.

    Args:
        rows: [S, in]. matrices: [E, out, in]. ends: int32 [E], ascending.
        computed: the matrices are no parameter but made from some in the same graph.
    """
    # Inductor may give a computed operand other strides than it was traced with, which the kernel rejects on a GPU
    # (torch 2.11); operands of a custom operator keep theirs.
    if rows.dtype == torch.bfloat16 and not computed:
        return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)
    return _grouped_product(rows, matrices, ends)


# torch computes the product in other precisions too, but traces it in bf16 only, so here it is one operator. No issue
# is known.


@torch.library.custom_op("sftkit::grouped_product", mutates_args=())
def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    # The products want a row or a column of stride 1; the gradient of a sum is expanded, with strides of 0.
    return F.grouped_mm(rows.contiguous(), matrices.transpose(-2, -1), offs=ends)


@torch.library.custom_op("sftkit::grouped_product_backward", mutates_args=())
def _gradient_of_matrices(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the matrices, [E, out, in]."""
    return F.grouped_mm(gradient.contiguous().t(), rows.contiguous(), offs=ends)


@_grouped_product.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), matrices.shape[1])


@_gradient_of_matrices.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(ends), gradient.shape[1], rows.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, matrices, ends = ctx.saved_tensors
    of_rows = _grouped_product(gradient, matrices.transpose(-2, -1), ends) if ctx.needs_input_grad[0] else None
    # Frozen matrices need none: it would be as large as they are.
    of_matrices = _gradient_of_matrices(gradient, rows, ends) if ctx.needs_input_grad[1] else None
    return of_rows, of_matrices, None


_grouped_product.register_autograd(_backward, setup_context=_save)
