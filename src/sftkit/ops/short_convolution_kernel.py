"""The short convolution of documents in Triton; ops/short_convolution.py says what it computes.

A program walks down the rows of some columns and keeps the last inputs in registers, so that each value is read once.
The backward pass computes the sum before the activation again instead of reading it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILES = {"ROWS": 32, "COLUMNS": 256, "UNROLL": 2, "num_warps": 2}
_BACKWARD_TILES = {"ROWS": 64, "COLUMNS": 128, "UNROLL": 2, "num_warps": 1}
"Rows and columns of a program, and rows of its loop that are unrolled: the fastest of 30 on an H200 for 6,144 columns."


@triton.jit
def _tap(weight, column, known, back: tl.constexpr, TAPS: tl.constexpr):
    """Return the weights of the inputs `back` positions before, fp32."""
    if back < TAPS:
        return tl.load(weight + column * TAPS + (TAPS - 1 - back), mask=known, other=0.0).to(tl.float32)
    return tl.zeros([column.shape[0]], tl.float32)


@triton.jit
def _row(x, row, column, inside, width):
    return tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _weights(weight, bias, column, known, TAPS: tl.constexpr, BIAS: tl.constexpr):
    """Return the four taps of some columns and what is added to their sum."""
    added = tl.zeros([column.shape[0]], tl.float32)
    if BIAS:
        added = tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    tap_0 = _tap(weight, column, known, 0, TAPS)
    tap_1 = _tap(weight, column, known, 1, TAPS)
    tap_2 = _tap(weight, column, known, 2, TAPS)
    return tap_0, tap_1, tap_2, _tap(weight, column, known, 3, TAPS), added


@triton.jit
def _rows_before(x, first, column, known, width):
    """Return the three inputs before a program's first row, zero where there are none."""
    x_1 = _row(x, first - 1, column, known & (first >= 1), width)
    x_2 = _row(x, first - 2, column, known & (first >= 2), width)
    return x_1, x_2, _row(x, first - 3, column, known & (first >= 3), width)


@triton.jit
def _forward(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    x, weight, bias, starts, out, rows, width, length,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute some rows of some columns."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    tap_0, tap_1, tap_2, tap_3, added = _weights(weight, bias, column, known, TAPS, BIAS)
    x_1, x_2, x_3 = _rows_before(x, first, column, known, width)
    for index in tl.range(0, ROWS, loop_unroll_factor=UNROLL):
        row = first + index
        inside = known & (row < rows)
        distance = tl.minimum(tl.load(starts + row, mask=row < rows, other=0), row % length)
        x_0 = _row(x, row, column, inside, width)
        total = x_0 * tap_0 + added
        total += tl.where(distance >= 1, x_1, 0.0) * tap_1
        total += tl.where(distance >= 2, x_2, 0.0) * tap_2
        if TAPS > 3:
            total += tl.where(distance >= 3, x_3, 0.0) * tap_3
        total = total.to(out.dtype.element_ty)
        if SILU:
            total = total.to(tl.float32)
            total = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
        tl.store(out + row * width + column, total, mask=inside)
        x_3 = x_2
        x_2 = x_1
        x_1 = x_0


@triton.jit
def _backward(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    grad, x, weight, bias, starts, d_x, sums, rows, width, length,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute some rows of d_x, and the gradients of taps and bias over these rows: sums, [parts, TAPS + 1, width].

    A row has its gradient when the sums of the rows behind it that reach back to it have theirs: up to three rows are
    still incomplete, d_1 to d_3 rows before the last.
    """
    part = tl.program_id(0).to(tl.int64)
    first = part * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    tap_0, tap_1, tap_2, tap_3, added = _weights(weight, bias, column, known, TAPS, BIAS)
    x_1, x_2, x_3 = _rows_before(x, first, column, known, width)
    none = tl.zeros([COLUMNS], tl.float32)
    d_1, d_2, d_3 = none, none, none
    of_bias, of_0, of_1, of_2, of_3 = none, none, none, none, none
    for index in tl.range(0, ROWS + TAPS - 1, loop_unroll_factor=UNROLL):
        row = first + index
        inside = known & (row < rows)
        distance = tl.minimum(tl.load(starts + row, mask=row < rows, other=0), row % length)
        x_0 = _row(x, row, column, inside, width)
        seen_1 = tl.where(distance >= 1, x_1, 0.0)
        seen_2 = tl.where(distance >= 2, x_2, 0.0)
        seen_3 = tl.where(distance >= 3, x_3, 0.0)
        d_sum = _row(grad, row, column, inside, width)
        if SILU:
            total = x_0 * tap_0 + added + seen_1 * tap_1 + seen_2 * tap_2
            if TAPS > 3:
                total += seen_3 * tap_3
            total = total.to(x.dtype.element_ty).to(tl.float32)
            sigmoid = tl.sigmoid(total)
            d_sum *= sigmoid * (1.0 + total * (1.0 - sigmoid))
        d_0 = d_sum * tap_0
        d_1 += tl.where(distance >= 1, d_sum, 0.0) * tap_1
        d_2 += tl.where(distance >= 2, d_sum, 0.0) * tap_2
        done = d_2
        if TAPS > 3:
            d_3 += tl.where(distance >= 3, d_sum, 0.0) * tap_3
            done = d_3
        before = index - (TAPS - 1)
        target = d_x + (row - (TAPS - 1)) * width + column
        tl.store(target, done.to(d_x.dtype.element_ty), mask=known & (before >= 0) & (row - (TAPS - 1) < rows))
        d_3 = d_2
        d_2 = d_1
        d_1 = d_0
        own = tl.where(index < ROWS, d_sum, 0.0)
        of_bias += own
        of_0 += own * x_0
        of_1 += own * seen_1
        of_2 += own * seen_2
        if TAPS > 3:
            of_3 += own * seen_3
        x_3 = x_2
        x_2 = x_1
        x_1 = x_0
    target = sums + part * (TAPS + 1) * width + column
    tl.store(target + TAPS * width, of_bias, mask=known)
    tl.store(target + (TAPS - 1) * width, of_0, mask=known)
    tl.store(target + (TAPS - 2) * width, of_1, mask=known)
    tl.store(target + (TAPS - 3) * width, of_2, mask=known)
    if TAPS > 3:
        tl.store(target, of_3, mask=known)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, *, silu: bool) -> Tensor:
    """Compute ops.short_convolution.convolved; all tensors are contiguous."""
    width, taps = weight.shape
    rows = x.numel() // width
    out = torch.empty_like(x)
    grid = triton.cdiv(rows, _TILES["ROWS"]), triton.cdiv(width, _TILES["COLUMNS"])
    given = (x, weight, bias, starts, out, rows, width, x.shape[1])
    _forward[grid](*given, TAPS=taps, BIAS=bias is not None, SILU=silu, **_TILES)
    return out


def convolve_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, *, silu: bool
) -> tuple[Tensor, Tensor]:
    """Compute ops.short_convolution.convolved_backward. Partial sums are added up in a fixed order: no atomics."""
    width, taps = weight.shape
    rows = x.numel() // width
    d_x = torch.empty_like(x)
    grid = triton.cdiv(rows, _BACKWARD_TILES["ROWS"]), triton.cdiv(width, _BACKWARD_TILES["COLUMNS"])
    sums = torch.empty(grid[0], taps + 1, width, dtype=torch.float32, device=x.device)
    given = (grad, x, weight, bias, starts, d_x, sums, rows, width, x.shape[1])
    _backward[grid](*given, TAPS=taps, BIAS=bias is not None, SILU=silu, **_BACKWARD_TILES)
    return d_x, sums.sum(0)
