"""AdamW of all parameters in one Triton launch.

A launch for each parameter costs the host more than the GPU: for a captioner of 200M parameters in 442 tensors it was
half of the host's time of a step (benchmarks/lab_captioning). Here the addresses of all tensors go to the GPU as one
table, and each program updates a chunk of one tensor, as in Apex's multi-tensor kernels.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sftkit.ops.tensors import ParameterShard

BLOCK = 1024
"Elements that a program holds at once."
CHUNK = 16 * BLOCK
"Elements of a tensor that a program updates, one block after the other."
ALIGNMENT = 16
"Bytes of the widest load. Tensors whose addresses or sizes are not multiples of it have a launch of their own."
COLUMNS = 12
"Columns of the table of addresses: int64, the last two hold four fp32 numbers."


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _stochastic_round(value, noise):
    bits = value.to(tl.uint32, bitcast=True)
    carried = ((bits + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, carried, value).to(tl.bfloat16)


@triton.jit
def _address(row, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(row + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


# Triton would compile kernels of their own for a number of rows that is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["rows"])
def _adamw(
    table,
    rows,
    clip,
    corrections,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    ROUNDED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update a chunk, one program each. `update_` says what goes in and out; _table the columns."""
    factor = tl.load(clip)
    if factor != factor:  # nan: everything stays
        return
    # Whose chunk it is, by a binary search in the table.
    chunk = tl.program_id(0)
    # Not 0: a variable that a loop assigns must keep its type.
    low = chunk * 0
    high = low + rows
    while high - low > 1:  # the last row whose first chunk is not beyond this one
        middle = (low + high) // 2
        if tl.load(table + middle * COLUMNS) <= chunk:
            low = middle
        else:
            high = middle
    # The columns of the row.
    row = table + low * COLUMNS
    elements = tl.load(row + 1)
    if ALIGNED:
        elements = tl.multiple_of(elements, 16)  # so that whole vectors are inside or not
    first = tl.load(row + 2)
    key = tl.load(row + 3).to(tl.uint64)
    key0 = (key & 0xFFFFFFFF).to(tl.uint32)
    key1 = (key >> 32).to(tl.uint32)
    corrected = corrections + 2 * tl.load(row + 4)
    step_size = tl.load(corrected).to(tl.float32)
    root2 = tl.load(corrected + 1).to(tl.float32)
    weight = _address(row, 5, WEIGHT, ALIGNED)
    rounded = _address(row, 6, tl.bfloat16, ALIGNED)
    grad = _address(row, 7, GRAD, ALIGNED)
    exp_avg = _address(row, 8, WEIGHT, ALIGNED)
    exp_avg_sq = _address(row, 9, WEIGHT, ALIGNED)
    scalars = (row + 10).to(tl.pointer_type(tl.float32))
    decay = tl.load(scalars)
    rate1 = tl.load(scalars + 1)
    rate2 = tl.load(scalars + 2)
    eps = tl.load(scalars + 3)

    begin = (chunk - tl.load(row)) * CHUNK
    for done in range(0, CHUNK, BLOCK):
        element = begin + done + tl.arange(0, BLOCK)
        inside = element < elements
        w = tl.load(weight + element, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + element, mask=inside, other=0.0).to(tl.float32) * factor
        m = tl.load(exp_avg + element, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq + element, mask=inside, other=0.0).to(tl.float32)
        # The operations of optim.adamw.adamw, in its order. div_rn and sqrt_rn round as torch's operators do, where
        # Triton's own division is an approximation.
        m = m + (g - m) * rate1
        v = v + (g * g - v) * rate2
        direction = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root2) + eps)
        w = w - (decay * w + step_size * direction)
        if ROUNDED or STOCHASTIC:
            # As ops.tensors.noise16 draws them, so that every device rounds alike; a draw has bits for two stores.
            draw1 = _mix32((element + first).to(tl.uint32) ^ key0)
            draw2 = _mix32(draw1 ^ key1)
        if STOCHASTIC:
            tl.store(weight + element, _stochastic_round(w, draw2 & 0xFFFF), mask=inside)
            tl.store(exp_avg + element, _stochastic_round(m, draw2 >> 16), mask=inside)
            tl.store(exp_avg_sq + element, _stochastic_round(v, draw1 & 0xFFFF), mask=inside)
        else:
            tl.store(weight + element, w, mask=inside)
            tl.store(exp_avg + element, m, mask=inside)
            tl.store(exp_avg_sq + element, v, mask=inside)
            if ROUNDED:
                tl.store(rounded + element, _stochastic_round(w, draw2 & 0xFFFF), mask=inside)


def update_(rows: Sequence[ParameterShard], clip: Tensor, corrected: Tensor) -> None:
    """Update all parameters in place, as optim.adamw.update_eagerly updates one.

    Args:
        rows: P of them.
        clip: fp32 0-d on the device, multiplies the gradients; nan: nothing changes.
        corrected: fp64 [P, 2] on the device, optim.adamw.corrections of each row.
    """
    # Constants of the kernel are dtypes, whether there is a rounded copy, and alignment. Each combination is a launch.
    alike: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[int]] = {}
    for i, row in enumerate(rows):
        if row.weight.numel():
            # Whether all addresses and the size suit the widest load.
            odd = row.weight.numel() % ALIGNMENT or any(tensor.data_ptr() % ALIGNMENT for tensor in _tensors(row))
            kind = row.weight.dtype, row.grad.dtype, row.rounded is not None, not odd
            alike.setdefault(kind, []).append(i)
    for (weight, grad, has_rounded, aligned), numbers in alike.items():
        table, chunks = _table([rows[i] for i in numbers], numbers)
        host = torch.from_numpy(table)
        if clip.is_cuda:  # no host sync from pinned memory, which torch's allocator reuses only after it was read
            host = host.pin_memory()
        constants = {"WEIGHT": _TYPES[weight], "GRAD": _TYPES[grad], "COLUMNS": COLUMNS, "CHUNK": CHUNK, "BLOCK": BLOCK}
        switches = {"ROUNDED": has_rounded, "STOCHASTIC": weight == torch.bfloat16, "ALIGNED": aligned}
        on_device = host.to(clip.device, non_blocking=True)
        _adamw[(chunks,)](on_device, len(numbers), clip, corrected, **constants, **switches)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def _tensors(row: ParameterShard) -> tuple[Tensor, ...]:
    """Return the tensors in the order of the table's columns; without `rounded` its column has the
    weight, which is not touched."""
    return row.weight, row.weight if row.rounded is None else row.rounded, row.grad, row.exp_avg, row.exp_avg_sq


def _table(rows: Sequence[ParameterShard], numbers: Sequence[int]) -> tuple[np.ndarray, int]:
    """Return int64 [rows, COLUMNS] and the number of chunks in all.

    Columns: number of the first chunk, elements, `offset`, `key`, row of `corrected`, five addresses,
    four fp32 scalars.
    """
    table = np.zeros((len(rows), COLUMNS), np.int64)
    elements = np.array([row.weight.numel() for row in rows])
    # A program finds its row by the first chunk of each, so chunks are numbered through all rows.
    ends = np.cumsum(-(-elements // CHUNK))
    table[1:, 0] = ends[:-1]
    table[:, 1] = elements
    table[:, 2] = [row.offset for row in rows]
    table[:, 3] = np.array([row.key for row in rows], np.uint64).view(np.int64)
    table[:, 4] = numbers
    table[:, 5:10] = [[tensor.data_ptr() for tensor in _tensors(row)] for row in rows]
    table[:, 10:].view(np.float32)[:] = [row.scalars for row in rows]
    return table, int(ends[-1])
