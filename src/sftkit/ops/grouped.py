"""Matrix products of the experts of a mixture: rows in the order of their experts, and one matrix for each expert.

All shapes are known when a graph is captured: no size depends on the choices of a router.

Letters: S rows, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula


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


@torch.library.custom_op("sftkit::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return rows @ matrices[e].T of the rows before `ends[e]` and not before `ends[e - 1]`; of those behind
    the last, anything.

    Args:
        rows: [S, in]. matrices: [E, out, in], contiguous, or the transpose of a contiguous tensor.
        ends: int32 [E], ascending.
    """
    # A custom operator, because Inductor may give an operand other strides than it traced, and the GPU kernel then
    # fails an assertion (torch 2.11). torch also traces the plain function in bf16 only.
    # The products want a row or a column of stride 1; the gradient of a sum is expanded, with strides of 0.
    # The kernel pads the rows of its result to 16 bytes.
    return F.grouped_mm(rows.contiguous(), matrices.transpose(-2, -1), offs=ends).contiguous()


@torch.library.custom_op("sftkit::grouped_product_backward", mutates_args=())
def _gradient_of_matrices(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the matrices, [E, out, in]."""
    return F.grouped_mm(gradient.contiguous().t(), rows.contiguous(), offs=ends).contiguous()


@grouped_product.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), matrices.shape[1])


@_gradient_of_matrices.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(ends), gradient.shape[1], rows.shape[1])


@register_flop_formula(torch.ops.sftkit.grouped_product)
def _flops(rows: Any, matrices: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the products: each row with one matrix."""
    return 2 * rows[0] * matrices[1] * matrices[2]


@register_flop_formula(torch.ops.sftkit.grouped_product_backward)
def _backward_flops(gradient: Any, rows: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the matrices' gradient."""
    return 2 * rows[0] * gradient[1] * rows[1]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, matrices, ends = ctx.saved_tensors
    of_rows = grouped_product(gradient, matrices.transpose(-2, -1), ends) if ctx.needs_input_grad[0] else None
    # Frozen matrices need none: it would be as large as they are.
    if not ctx.needs_input_grad[1]:
        return of_rows, None, None
    # In the strides of the matrices, or a copy of all of them would follow.
    if matrices.stride(-1) == 1:
        return of_rows, _gradient_of_matrices(gradient, rows, ends), None
    return of_rows, _gradient_of_matrices(rows, gradient, ends).transpose(-2, -1), None


grouped_product.register_autograd(_backward, setup_context=_save)
