"""The gated product of an MLP with low-rank factors in Triton; ops/low_rank.py says what it computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_TILES = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}
BACKWARD_TILES = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}
HALVES = 2
"Programs that share the columns of the same rows in the backward pass."


@triton.jit
def _factor(pointer, column, lane, width, rank):
    """Load columns of a factor [rank, width], zero where there are none."""
    inside = (lane[:, None] < rank) & (column[None, :] < width)
    return tl.load(pointer + lane[:, None] * width + column[None, :], mask=inside, other=0.0)


@triton.jit
def _forward(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    gate, up, u, b_gate, b_up, a_down, h, u_down, rows, width, rank, scale,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute some rows, all columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row[:, None] < rows
    lane = tl.arange(0, RANK)
    own = here & (lane[None, :] < rank)
    u_gate = tl.load(u + row[:, None] * (2 * rank) + lane[None, :], mask=own, other=0.0)
    u_up = tl.load(u + row[:, None] * (2 * rank) + rank + lane[None, :], mask=own, other=0.0)
    down = tl.zeros([ROWS, RANK], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = here & (column[None, :] < width)
        place = row[:, None] * width + column[None, :]
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        g += scale * tl.dot(u_gate, _factor(b_gate, column, lane, width, rank))
        v = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        v += scale * tl.dot(u_up, _factor(b_up, column, lane, width, rank))
        product = (g * tl.sigmoid(g) * v).to(h.dtype.element_ty)
        tl.store(h + place, product, mask=inside)
        down = tl.dot(product, tl.trans(_factor(a_down, column, lane, width, rank)), down)
    tl.store(u_down + row[:, None] * rank + lane[None, :], down.to(h.dtype.element_ty), mask=own)


@triton.jit
def _tile(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    d_h, d_down, gate, up, u, d_gate, d_up, row, column, fg, fu, fd, du_gate, du_up, one, two, three,
    rows, width, rank, scale, RANK: tl.constexpr,
):  # fmt: skip
    """Compute one tile of d_gate and d_up; return the sums with its share added."""
    lane = tl.arange(0, RANK)
    here = row[:, None] < rows
    own = here & (lane[None, :] < rank)
    inside = here & (column[None, :] < width)
    place = row[:, None] * width + column[None, :]
    u_gate = tl.load(u + row[:, None] * (2 * rank) + lane[None, :], mask=own, other=0.0)
    u_up = tl.load(u + row[:, None] * (2 * rank) + rank + lane[None, :], mask=own, other=0.0)
    u_down = tl.load(d_down + row[:, None] * rank + lane[None, :], mask=own, other=0.0)
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32) + scale * tl.dot(u_gate, fg)
    v = tl.load(up + place, mask=inside, other=0.0).to(tl.float32) + scale * tl.dot(u_up, fu)
    d = tl.load(d_h + place, mask=inside, other=0.0).to(tl.float32) + tl.dot(u_down, fd)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    dg = (d * v * (sigmoid + silu * (1.0 - sigmoid))).to(d_gate.dtype.element_ty)
    dv = (d * silu).to(d_gate.dtype.element_ty)
    product = (silu * v).to(d_gate.dtype.element_ty)
    tl.store(d_gate + place, dg, mask=inside)
    tl.store(d_up + place, dv, mask=inside)
    du_gate = tl.dot(dg, tl.trans(fg), du_gate)
    du_up = tl.dot(dv, tl.trans(fu), du_up)
    # Sums over rows with the tile as the first operand: its columns fill a tensor core, a rank would not.
    one = tl.dot(tl.trans(dg), u_gate, one)
    two = tl.dot(tl.trans(dv), u_up, two)
    three = tl.dot(tl.trans(product), u_down, three)
    return du_gate, du_up, one, two, three


@triton.jit
def _backward(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    d_h, d_down, gate, up, u, b_gate, b_up, a_down, d_gate, d_up, d_u, d_factors, rows, width, rank, scale,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Compute two tiles of rows and PART columns; sums over rows and over columns are partial."""
    group = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, RANK)
    row_0 = 2 * group * ROWS + tl.arange(0, ROWS)
    row_1 = row_0 + ROWS
    du_gate_0 = tl.zeros([ROWS, RANK], tl.float32)
    du_gate_1 = tl.zeros([ROWS, RANK], tl.float32)
    du_up_0 = tl.zeros([ROWS, RANK], tl.float32)
    du_up_1 = tl.zeros([ROWS, RANK], tl.float32)
    for start in range(0, PART, COLUMNS):
        column = part * PART + start + tl.arange(0, COLUMNS)
        fg = _factor(b_gate, column, lane, width, rank)
        fu = _factor(b_up, column, lane, width, rank)
        fd = _factor(a_down, column, lane, width, rank)
        empty = tl.zeros([COLUMNS, RANK], tl.float32)
        du_gate_0, du_up_0, one, two, three = _tile(
            d_h, d_down, gate, up, u, d_gate, d_up, row_0, column, fg, fu, fd, du_gate_0, du_up_0,
            empty, empty, empty, rows, width, rank, scale, RANK,
        )  # fmt: skip
        du_gate_1, du_up_1, one, two, three = _tile(
            d_h, d_down, gate, up, u, d_gate, d_up, row_1, column, fg, fu, fd, du_gate_1, du_up_1,
            one, two, three, rows, width, rank, scale, RANK,
        )  # fmt: skip
        target = d_factors + (group * 3 * width + column[:, None]) * rank + lane[None, :]
        kept = (column[:, None] < width) & (lane[None, :] < rank)
        tl.store(target, scale * one, mask=kept)
        tl.store(target + rank * width, scale * two, mask=kept)
        tl.store(target + 2 * rank * width, three, mask=kept)
    d_u += part * rows * 2 * rank + lane[None, :]
    own_0 = (row_0[:, None] < rows) & (lane[None, :] < rank)
    own_1 = (row_1[:, None] < rows) & (lane[None, :] < rank)
    tl.store(d_u + row_0[:, None] * (2 * rank), scale * du_gate_0, mask=own_0)
    tl.store(d_u + row_0[:, None] * (2 * rank) + rank, scale * du_up_0, mask=own_0)
    tl.store(d_u + row_1[:, None] * (2 * rank), scale * du_gate_1, mask=own_1)
    tl.store(d_u + row_1[:, None] * (2 * rank) + rank, scale * du_up_1, mask=own_1)


def forward(
    gate: Tensor, up: Tensor, u: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute ops.low_rank.gated_product."""
    rows, width = gate.shape
    rank = len(a_down)
    h = torch.empty_like(gate)
    u_down = gate.new_empty(rows, rank)
    factors = [factor.contiguous() for factor in (b_gate, b_up, a_down)]
    _forward[(triton.cdiv(rows, FORWARD_TILES["ROWS"]),)](
        gate, up, u, *factors, h, u_down, rows, width, rank, scale, RANK=_lanes(rank), **FORWARD_TILES
    )
    return h, u_down


def backward(
    d_h: Tensor, d_down: Tensor, gate: Tensor, up: Tensor, u: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ops.low_rank.gated_product_backward. Partial sums are added up in a fixed order: no atomics."""
    rows, width = gate.shape
    rank = len(a_down)
    groups = triton.cdiv(rows, 2 * BACKWARD_TILES["ROWS"])
    part = triton.cdiv(triton.cdiv(width, BACKWARD_TILES["COLUMNS"]), HALVES) * BACKWARD_TILES["COLUMNS"]
    d_gate = torch.empty_like(gate)
    d_up = torch.empty_like(up)
    d_u = torch.empty(HALVES, rows, 2 * rank, dtype=torch.float32, device=gate.device)
    d_factors = torch.empty(groups, 3, width, rank, dtype=torch.float32, device=gate.device)
    factors = [factor.contiguous() for factor in (b_gate, b_up, a_down)]
    _backward[(groups, HALVES)](
        d_h, d_down, gate, up, u, *factors, d_gate, d_up, d_u, d_factors, rows, width, rank, scale,
        RANK=_lanes(rank), PART=part, **BACKWARD_TILES,
    )  # fmt: skip
    d_factors = d_factors.sum(0).transpose(1, 2).contiguous()
    return d_gate, d_up, d_u.sum(0).to(u.dtype), d_factors


def _lanes(rank: int) -> int:
    """Return the columns of a tile of factors: a power of 2 that a tensor core takes."""
    return int(max(16, triton.next_power_of_2(rank)))
