"""The sum of squares of many tensors in one Triton launch, as ops/adamw_kernel.py updates many."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sftkit.ops.adamw_kernel import ALIGNMENT, _address

SQUARES_BLOCK = 4096
"Elements that a program holds at once."
SQUARES_CHUNK = 16 * SQUARES_BLOCK
"Elements of a tensor that a program adds up, one block after the other."
TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}


@triton.jit
def _row_of(table, rows, chunk, COLUMNS: tl.constexpr):
    """Return the row of the table whose tensor has this chunk, by a binary search."""
    # Not 0: a variable that a loop assigns must keep its type.
    low = chunk * 0
    high = low + rows
    while high - low > 1:  # the last row whose first chunk is not beyond this one
        middle = (low + high) // 2
        if tl.load(table + middle * COLUMNS) <= chunk:
            low = middle
        else:
            high = middle
    return table + low * COLUMNS


@triton.jit(do_not_specialize=["rows"])
def _squares(
    table, rows, sums,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of squares of a chunk, one program each."""
    chunk = tl.program_id(0)
    row = _row_of(table, rows, chunk, COLUMNS)
    elements = tl.load(row + 1)
    if ALIGNED:
        elements = tl.multiple_of(elements, 16)
    address = _address(row, 2, TYPE, ALIGNED)
    begin = (chunk - tl.load(row)) * CHUNK
    total = tl.zeros([BLOCK], tl.float32)
    for done in range(0, CHUNK, BLOCK):
        element = begin + done + tl.arange(0, BLOCK)
        x = tl.load(address + element, mask=element < elements, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums + chunk, tl.sum(total, 0))


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements of tensors, fp32 0-d. No host sync.

    The order of additions depends on the sizes alone, so the same gradients always give the same norm.
    """
    alike: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for tensor in (tensor.contiguous() for tensor in tensors):
        if tensor.numel():
            odd = tensor.numel() % ALIGNMENT or tensor.data_ptr() % ALIGNMENT
            alike.setdefault((tensor.dtype, not odd), []).append(tensor)
    sums = []
    for (dtype, aligned), same in alike.items():
        table = np.zeros((len(same), 3), np.int64)
        table[:, 1] = [tensor.numel() for tensor in same]
        # A program finds its row by the first chunk of each, so chunks are numbered through all rows.
        ends = np.cumsum(-(-table[:, 1] // SQUARES_CHUNK))
        table[1:, 0] = ends[:-1]
        table[:, 2] = [tensor.data_ptr() for tensor in same]
        chunks = int(ends[-1])
        device = same[0].device
        sums.append(torch.empty(chunks, dtype=torch.float32, device=device))
        constants = {"TYPE": TYPES[dtype], "ALIGNED": aligned, "CHUNK": SQUARES_CHUNK, "BLOCK": SQUARES_BLOCK}
        # No host sync from pinned memory, which torch's allocator reuses only after it was read.
        on_device = torch.from_numpy(table).pin_memory().to(device, non_blocking=True)
        _squares[(chunks,)](on_device, len(same), sums[-1], COLUMNS=3, **constants)
    return torch.cat(sums).sum() if sums else torch.zeros((), device=tensors[0].device)
