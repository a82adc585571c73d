"""The short convolution of documents in Triton; ops/short_convolution.py says what it computes.

Shifted inputs overlap, so a program finds all but the first of them in its cache: each value is read from memory once,
and the backward pass computes the sum before the activation again instead of keeping it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_TILES = {"ROWS": 32, "COLUMNS": 128, "num_warps": 4, "num_stages": 2}
BACKWARD_TILES = {"ROWS": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}


@triton.jit
def _place(starts, row, rows, length):
    """Return for each row the number of rows before it that its document has, and whether there is such a row."""
    here = row < rows
    return tl.minimum(tl.load(starts + row, mask=here, other=0), row % length), here


@triton.jit
def _shifted(x, row, column, back, seen, width):
    """Load the rows before these by `back`, 0 where they are not seen."""
    inside = seen[:, None] & (column < width)[None, :]
    return tl.load(x + (row - back)[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sum(x, weight, bias, row, column, distance, here, width, TAPS: tl.constexpr, BIAS: tl.constexpr):
    """Return the sum over the taps, rounded to the dtype of x."""
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for back in tl.static_range(TAPS):
        tap = tl.load(weight + column * TAPS + (TAPS - 1 - back), mask=column < width, other=0.0).to(tl.float32)
        total += _shifted(x, row, column, back, here & (distance >= back), width) * tap[None, :]
    if BIAS:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    return total.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _forward(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    x, weight, bias, starts, out, rows, width, length,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute one tile."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    distance, here = _place(starts, row, rows, length)
    total = _sum(x, weight, bias, row, column, distance, here, width, TAPS, BIAS)
    if SILU:
        total *= tl.sigmoid(total)
    inside = here[:, None] & (column < width)[None, :]
    tl.store(out + row[:, None] * width + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    grad, x, weight, bias, starts, d_x, sums, rows, width, length,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of d_x, and the gradients of taps and bias over its rows: sums, fp32 [tiles, TAPS + 1, width]."""
    group = tl.program_id(0).to(tl.int64)
    row = group * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    d_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for back in tl.static_range(TAPS):
        # What the value of a row does to the sum of the row that is `back` later.
        distance, here = _place(starts, row + back, rows, length)
        seen = here & (distance >= back)
        d_sum = _shifted(grad, row, column, -back, seen, width)
        if SILU:
            total = _sum(x, weight, bias, row + back, column, distance, seen, width, TAPS, BIAS)
            sigmoid = tl.sigmoid(total)
            d_sum *= sigmoid * (1.0 + total * (1.0 - sigmoid))
        tap = tl.load(weight + column * TAPS + (TAPS - 1 - back), mask=known, other=0.0).to(tl.float32)
        d_total += d_sum * tap[None, :]
        if back == 0:
            target = sums + group * (TAPS + 1) * width + column
            for other in tl.static_range(TAPS):
                value = _shifted(x, row, column, other, here & (distance >= other), width)
                tl.store(target + (TAPS - 1 - other) * width, tl.sum(d_sum * value, 0), mask=known)
            tl.store(target + TAPS * width, tl.sum(d_sum, 0), mask=known)
    inside = (row < rows)[:, None] & known[None, :]
    tl.store(d_x + row[:, None] * width + column[None, :], d_total.to(d_x.dtype.element_ty), mask=inside)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, *, silu: bool) -> Tensor:
    """Compute ops.short_convolution.convolved; x and weight are contiguous."""
    width, taps = weight.shape
    rows = x.numel() // width
    out = torch.empty_like(x)
    grid = triton.cdiv(rows, FORWARD_TILES["ROWS"]), triton.cdiv(width, FORWARD_TILES["COLUMNS"])
    given = (x, weight, bias, starts, out, rows, width, x.shape[1])
    _forward[grid](*given, TAPS=taps, BIAS=bias is not None, SILU=silu, **FORWARD_TILES)
    return out


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, *, silu: bool
) -> tuple[Tensor, Tensor]:
    """Compute ops.short_convolution.convolved_backward. Partial sums are added up in a fixed order: no atomics."""
    width, taps = weight.shape
    rows = x.numel() // width
    d_x = torch.empty_like(x)
    grid = triton.cdiv(rows, BACKWARD_TILES["ROWS"]), triton.cdiv(width, BACKWARD_TILES["COLUMNS"])
    sums = torch.empty(grid[0], taps + 1, width, dtype=torch.float32, device=x.device)
    given = (grad, x, weight, bias, starts, d_x, sums, rows, width, x.shape[1])
    _backward[grid](*given, TAPS=taps, BIAS=bias is not None, SILU=silu, **BACKWARD_TILES)
    return d_x, sums.sum(0)
