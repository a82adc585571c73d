"""Norm and rotary embedding of queries and keys in Triton, one pass each way; rotary.py says what they compute.

A program takes some positions with all their heads, so that a position's cosines and sines are read once from memory
and again from the cache. Everything between a load and its store is fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_TILE = {"POSITIONS": 8, "ROWS": 32, "num_warps": 4}
BACKWARD_TILE = {"POSITIONS": 8, "ROWS": 16, "num_warps": 4}
"A program computes POSITIONS positions, ROWS heads at a time."


@triton.jit
def _rows(first, done, positions, HEADS: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr):
    """Return position and head of each of ROWS heads, and whether this program has them."""
    row = done + tl.arange(0, ROWS)
    position = first + row // HEADS
    here = (row < POSITIONS * HEADS) & (position < positions)
    return position.to(tl.int64), row % HEADS, here[:, None]


@triton.jit
def _place(position, head, position_stride, head_stride: tl.constexpr, SIZE: tl.constexpr):
    """Return the offsets of the first SIZE elements of each head, [ROWS, SIZE]."""
    return (position * position_stride + head * head_stride)[:, None] + tl.arange(0, SIZE)[None, :]


@triton.jit
def _angles(cos, sin, position, stride, here, HALF: tl.constexpr):
    """Load cosines and sines of the first half; the second half has the same."""
    place = position[:, None] * stride + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + place, mask=here, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=here, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def _rotate(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    x, out, weight, cos, sin, first, stride, out_stride, angle_stride, positions, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute all heads of some positions of the queries, or of the keys."""
    if NORM:
        w1 = tl.load(weight + tl.arange(0, HALF)).to(tl.float32)[None, :]
        w2 = tl.load(weight + HALF + tl.arange(0, HALF)).to(tl.float32)[None, :]
    for done in range(0, POSITIONS * HEADS, ROWS):
        position, head, here = _rows(first, done, positions, HEADS, POSITIONS, ROWS)
        place = _place(position, head, stride, 2 * HALF, HALF)
        x1 = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        x2 = tl.load(x + place + HALF, mask=here, other=0.0).to(tl.float32)
        c, s = _angles(cos, sin, position, angle_stride, here, HALF)
        if NORM:
            r = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
            x1 = x1 * r * w1
            x2 = x2 * r * w2
        goal = _place(position, head, out_stride, 2 * HALF, HALF)
        tl.store(out + goal, (x1 * c - x2 * s).to(out.dtype.element_ty), mask=here)
        tl.store(out + goal + HALF, (x2 * c + x1 * s).to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["positions"])
def _forward(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    query, key, query_weight, key_weight, cos, sin, out_query, out_key, query_stride, key_stride, angle_stride,
    positions, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, POSITIONS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute some positions. rotary.rotate says what goes in and out."""
    first = tl.program_id(0) * POSITIONS
    _rotate(
        query, out_query, query_weight, cos, sin, first, query_stride, HEADS * 2 * HALF, angle_stride, positions,
        eps, HEADS, HALF, NORM, POSITIONS, ROWS,
    )  # fmt: skip
    _rotate(
        key, out_key, key_weight, cos, sin, first, key_stride, KEY_HEADS * 2 * HALF, angle_stride, positions,
        eps, KEY_HEADS, HALF, NORM, POSITIONS, ROWS,
    )  # fmt: skip


@triton.jit
def _grouped(pointer, place, here, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Load a gradient summed over the GROUPS heads that share a key."""
    total = tl.load(pointer + place, mask=here, other=0.0).to(tl.float32)
    for group in tl.static_range(1, GROUPS):
        total += tl.load(pointer + place + group * SIZE, mask=here, other=0.0).to(tl.float32)
    return total


@triton.jit
def _rotate_back(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    grad, x, out, weight, cos, sin, partial, first, grad_stride, stride, out_stride, angle_stride, positions, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, POSITIONS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of all heads of some positions, and this program's share of the weight's gradient."""
    if NORM:
        w1 = tl.load(weight + tl.arange(0, HALF)).to(tl.float32)[None, :]
        w2 = tl.load(weight + HALF + tl.arange(0, HALF)).to(tl.float32)[None, :]
        total1 = tl.zeros([ROWS, HALF], tl.float32)
        total2 = tl.zeros([ROWS, HALF], tl.float32)
    for done in range(0, POSITIONS * HEADS, ROWS):
        position, head, here = _rows(first, done, positions, HEADS, POSITIONS, ROWS)
        incoming = _place(position, head, grad_stride, GROUPS * 2 * HALF, HALF)
        g1 = _grouped(grad, incoming, here, GROUPS, 2 * HALF)
        g2 = _grouped(grad, incoming + HALF, here, GROUPS, 2 * HALF)
        c, s = _angles(cos, sin, position, angle_stride, here, HALF)
        d1 = g1 * c + g2 * s
        d2 = g2 * c - g1 * s
        if NORM:
            place = _place(position, head, stride, 2 * HALF, HALF)
            x1 = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
            x2 = tl.load(x + place + HALF, mask=here, other=0.0).to(tl.float32)
            r = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
            x1 = x1 * r
            x2 = x2 * r
            total1 += d1 * x1
            total2 += d2 * x2
            d1 = d1 * w1
            d2 = d2 * w2
            mean = ((tl.sum(d1 * x1, 1) + tl.sum(d2 * x2, 1)) / (2 * HALF))[:, None]
            d1 = (d1 - x1 * mean) * r
            d2 = (d2 - x2 * mean) * r
        goal = _place(position, head, out_stride, 2 * HALF, HALF)
        tl.store(out + goal, d1.to(out.dtype.element_ty), mask=here)
        tl.store(out + goal + HALF, d2.to(out.dtype.element_ty), mask=here)
    if NORM:
        tl.store(partial + tl.arange(0, HALF), tl.sum(total1, 0))
        tl.store(partial + HALF + tl.arange(0, HALF), tl.sum(total2, 0))


@triton.jit(do_not_specialize=["positions"])
def _backward(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    grad_query, grad_key, grad_value, query, key, query_weight, key_weight, cos, sin, d_query, d_key, d_value, partial,
    query_stride, key_stride, d_query_stride, d_key_stride, d_value_stride, angle_stride, positions, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    POSITIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute some positions. rotary.rotate_back says what goes in and out."""
    first = tl.program_id(0) * POSITIONS
    share = partial + tl.program_id(0).to(tl.int64) * (4 * HALF)
    _rotate_back(
        grad_query, query, d_query, query_weight, cos, sin, share, first, HEADS * 2 * HALF, query_stride,
        d_query_stride, angle_stride, positions, eps, HEADS, 1, HALF, NORM, POSITIONS, ROWS,
    )  # fmt: skip
    _rotate_back(
        grad_key, key, d_key, key_weight, cos, sin, share + 2 * HALF, first, KEY_HEADS * GROUPS * 2 * HALF, key_stride,
        d_key_stride, angle_stride, positions, eps, KEY_HEADS, GROUPS, HALF, NORM, POSITIONS, ROWS,
    )  # fmt: skip
    for done in range(0, POSITIONS * KEY_HEADS, ROWS):
        position, head, here = _rows(first, done, positions, KEY_HEADS, POSITIONS, ROWS)
        incoming = _place(position, head, KEY_HEADS * GROUPS * 2 * HALF, GROUPS * 2 * HALF, 2 * HALF)
        total = _grouped(grad_value, incoming, here, GROUPS, 2 * HALF)
        goal = _place(position, head, d_value_stride, 2 * HALF, 2 * HALF)
        tl.store(d_value + goal, total.to(d_value.dtype.element_ty), mask=here)


def _rows_of_heads(x: Tensor) -> Tensor:
    """Return [N, H, D] whose heads are neighbours in memory; positions may lie apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def rotate_heads(
    query: Tensor, key: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute rotary.rotate."""
    query, key = _rows_of_heads(query), _rows_of_heads(key)
    positions, heads, head_dim = query.shape
    out = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    weights = (cos, cos) if query_weight is None else (query_weight, key_weight)
    constants = {"HEADS": heads, "KEY_HEADS": key.shape[1], "HALF": head_dim // 2, "NORM": query_weight is not None}
    _forward[(triton.cdiv(positions, FORWARD_TILE["POSITIONS"]),)](
        query, key, *weights, cos, sin, *out, query.stride(0), key.stride(0), cos.stride(0), positions, eps,
        **constants, **FORWARD_TILE,
    )  # fmt: skip
    return out[0], out[1]


def rotate_heads_back(
    grads: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor, query_weight: Tensor | None,
    key_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute rotary.rotate_back. Shares of the weights' gradients are added up in a fixed order: no atomics."""
    query, key = _rows_of_heads(query), _rows_of_heads(key)
    positions, heads, head_dim = query.shape
    key_heads = key.shape[1]
    norm = query_weight is not None
    programs = triton.cdiv(positions, BACKWARD_TILE["POSITIONS"])
    out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, key)]
    partial = torch.empty(programs if norm else 0, 2, head_dim, dtype=torch.float32, device=query.device)
    weights = (query_weight, key_weight) if norm else (cos, cos)
    constants = {"HEADS": heads, "KEY_HEADS": key_heads, "GROUPS": grads[1].shape[1] // key_heads}
    _backward[(programs,)](
        *(grad.contiguous() for grad in grads), query, key, *weights, cos, sin, *out, partial,
        *(x.stride(0) for x in (query, key, *out, cos)), positions, eps, **constants, HALF=head_dim // 2, NORM=norm,
        **BACKWARD_TILE,
    )  # fmt: skip
    return out[0], out[1], out[2], partial.sum(0)


@triton.jit
def _repeat(
    key, value, out, positions, key_stride, value_stride, KEY_HEADS: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, POSITIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy some heads of the keys, or of the values, GROUPS times."""
    position, head, here = _rows(tl.program_id(0) * POSITIONS, 0, positions, KEY_HEADS, POSITIONS, ROWS)
    if tl.program_id(1) == 0:
        x = tl.load(key + _place(position, head, key_stride, SIZE, SIZE), mask=here)
    else:
        x = tl.load(value + _place(position, head, value_stride, SIZE, SIZE), mask=here)
    out += tl.program_id(1).to(tl.int64) * positions * (KEY_HEADS * GROUPS * SIZE)
    goal = _place(position, head, KEY_HEADS * GROUPS * SIZE, GROUPS * SIZE, SIZE)
    for group in tl.static_range(GROUPS):
        tl.store(out + goal + group * SIZE, x, mask=here)


def repeat_heads(key: Tensor, value: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Compute rotary.repeated."""
    key, value = _rows_of_heads(key), _rows_of_heads(value)
    positions, key_heads, head_dim = key.shape
    out = torch.empty(2, positions, key_heads * groups, head_dim, dtype=key.dtype, device=key.device)
    rows = max(32, triton.next_power_of_2(key_heads))
    constants = {"KEY_HEADS": key_heads, "GROUPS": groups, "SIZE": head_dim, "POSITIONS": rows // key_heads}
    _repeat[(triton.cdiv(positions, rows // key_heads), 2)](
        key, value, out, positions, key.stride(0), value.stride(0), ROWS=rows, **constants
    )
    return out[0], out[1]
