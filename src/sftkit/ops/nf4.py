"""Frozen matrices in NF4, the 4-bit format of QLoRA (arXiv 2305.14314), and products with them.

A matrix is cut into blocks of 64 elements in the order of its rows. An element is the nearest of 16 quantiles of a
normal distribution, times the largest magnitude of its block. These magnitudes are stored in 8 bits: their mean, the
offset, is subtracted, and the rest is the nearest of 256 numbers times the largest magnitude of 256 such rests. Tables
and rounding are those of bitsandbytes.

A product contains its dequantization: as two operators, or in an autograd function, a compiled step would keep the
dequantized matrix for its backward pass, or find it twice in its graph and compute it once.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.flop_counter import register_flop_formula

QUANTILES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BLOCK = 64
"Elements that share a magnitude."
GROUP = 256
"Blocks whose magnitudes share a scale."


class Nf4(NamedTuple):
    """A quantized matrix [out, in]."""

    packed: Tensor
    "[out, in / 2], uint8: two elements a byte, the first in the upper half"
    absmax: Tensor
    "[blocks], uint8: numbers of the blocks' magnitudes"
    absmax_scale: Tensor
    "[groups], fp32"
    absmax_offset: Tensor
    "fp32, 0-d"


@lru_cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers that 4 and 8 bits stand for, ascending: fp32 [16] and [256]."""
    # Seven powers of ten, each with twice as many numbers as the one below, evenly spaced and of both signs; 0 and 1.
    positive = []
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        positive += (10 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    numbers = sorted([*(-number for number in positive), 0.0, *positive, 1.0])
    return torch.tensor(QUANTILES, device=device), torch.tensor(numbers, device=device)


def _nearest(values: Tensor, largest: Tensor, table: Tensor) -> Tensor:
    """Return the index of the number in the table that is nearest to each value over the largest of its row: uint8.

    Args:
        values: [rows, columns], fp32. largest: [rows].
    """
    # A row of zeros is divided by the smallest normal number.
    scaled = values * (1.0 / largest.clamp_min(torch.finfo(torch.float32).tiny))[:, None]
    return torch.bucketize(scaled, (table[:-1] + table[1:]) * 0.5, out_int32=True).to(torch.uint8)


def _rows(values: Tensor, width: int) -> Tensor:
    """Return the values in rows of a width, with zeros after the last one."""
    flat = values.float().reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % width)).view(-1, width)


@torch.no_grad()
def quantize(weight: Tensor) -> Nf4:
    """Return the matrix in NF4, with the same bits on every device.

    Args:
        weight: [out, in], `in` even.
    """
    quantiles, numbers = tables(weight.device)
    blocks = _rows(weight, BLOCK)
    largest = blocks.abs().amax(1)
    codes = _nearest(blocks, largest, quantiles).view(-1)[: weight.numel()].view(-1, 2)
    # In fp64, where the order of addition, which devices differ in, does not reach the bits of the result.
    offset = largest.double().mean().float()
    groups = _rows(largest - offset, GROUP)
    scale = groups.abs().amax(1)
    absmax = _nearest(groups, scale, numbers).view(-1)[: len(largest)].clone()
    return Nf4((codes[:, 0] << 4 | codes[:, 1]).view(len(weight), -1), absmax, scale, offset)


def dequantize(matrix: Nf4, dtype: torch.dtype) -> Tensor:
    """Return the matrix [out, in] that the bits stand for, computed in fp32 and rounded once."""
    quantiles, numbers = tables(matrix.packed.device)
    largest = numbers[matrix.absmax.long()] * matrix.absmax_scale.repeat_interleave(GROUP)[: len(matrix.absmax)]
    codes = torch.stack([matrix.packed >> 4, matrix.packed & 15], -1).view(-1)
    per_element = (largest + matrix.absmax_offset).repeat_interleave(BLOCK)[: len(codes)]
    return (quantiles[codes.long()] * per_element).to(dtype).view(len(matrix.packed), -1)


@lru_cache
def _kernel() -> Any:
    """Return the kernel of `dequantize`. Triton is not installed on CPU machines."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        packed, absmax, scale, offset, quantiles, numbers, out, size, blocks, BLOCKS: tl.constexpr,
    ):  # fmt: skip
        """Write some blocks, of 32 bytes and 64 elements."""
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        here = block < blocks
        number = tl.load(numbers + tl.load(absmax + block, mask=here, other=0).to(tl.int32))
        largest = number * tl.load(scale + block // 256, mask=here, other=0.0) + tl.load(offset)
        byte = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        pair = tl.load(packed + byte, mask=2 * byte < size, other=0).to(tl.int32)
        first = tl.load(quantiles + (pair >> 4)) * largest[:, None]
        second = tl.load(quantiles + (pair & 15)) * largest[:, None]
        element = block[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(out + element, tl.interleave(first, second).to(out.dtype.element_ty), mask=element < size)

    return kernel


def dense_matrix(matrix: Nf4, dtype: torch.dtype) -> Tensor:
    """Return what `dequantize` returns, by a kernel on a GPU: the same bits in one pass."""
    if not matrix.packed.is_cuda:
        return dequantize(matrix, dtype)
    packed, size, blocks, at_once = matrix.packed, 2 * matrix.packed.numel(), len(matrix.absmax), 32
    out = torch.empty(len(packed), 2 * packed.shape[1], dtype=dtype, device=packed.device)
    with torch.cuda.device(packed.device):
        # Sum and product are rounded separately, as on the host.
        _kernel()[(-(-blocks // at_once),)](
            *matrix, *tables(packed.device), out, size, blocks, BLOCKS=at_once, enable_fp_fusion=False
        )
    return out


@torch.library.custom_op("sftkit::nf4_linear", mutates_args=())
def nf4_linear(
    x: Tensor, packed: Tensor, absmax: Tensor, absmax_scale: Tensor, absmax_offset: Tensor, *, transposed: bool = False
) -> Tensor:
    """Return x Wᵀ, or x W if transposed, of a frozen matrix W [out, in] in NF4, dequantized to the dtype of x.

    Args:
        x: [..., in], or [..., out] if transposed.
    """
    weight = dense_matrix(Nf4(packed, absmax, absmax_scale, absmax_offset), x.dtype)
    return x @ weight if transposed else linear(x, weight)


@nf4_linear.register_fake
def _(x: Tensor, packed: Tensor, absmax: Tensor, scale: Tensor, offset: Tensor, *, transposed: bool = False) -> Tensor:
    return x.new_empty(*x.shape[:-1], 2 * packed.shape[1] if transposed else packed.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.transposed = keyword_only_inputs["transposed"]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return nf4_linear(grad, *ctx.saved_tensors, transposed=not ctx.transposed), None, None, None, None


nf4_linear.register_autograd(_gradient, setup_context=_save)


@register_flop_formula(torch.ops.sftkit.nf4_linear)
def _flops(x: Any, packed: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the product."""
    return 4 * math.prod(x[:-1]) * packed[0] * packed[1]


class Nf4Linear(torch.nn.Linear):
    """A frozen linear layer whose weight is in NF4: the parameter `weight` holds the packed bits."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, [..., out]."""
        return frozen_linear(self, x, self.bias)


SCALES = Nf4._fields[1:]
"Names of the buffers next to the weight."


def matrix_of(layer: torch.nn.Linear) -> Nf4 | None:
    """Return the quantized weight of a layer; None: it is not quantized."""
    if layer.weight.dtype != torch.uint8:
        return None
    return Nf4(layer.weight, *(layer.get_buffer(name) for name in SCALES))


def frozen_linear(layer: torch.nn.Linear, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return W x + bias with the weight of a frozen layer, which may be in NF4."""
    matrix = matrix_of(layer)
    if matrix is None:
        return linear(x, layer.weight, bias)
    y = nf4_linear(x, *matrix)
    return y if bias is None else y + bias


def quantize_layer(layer: torch.nn.Linear, device: torch.device | None) -> None:
    """Turn a layer into one with a frozen weight in NF4, which stays where it was.

    Args:
        device: which computes it; None: the one that it is on. On the meta device the bits are not computed.
    """
    weight = layer.weight.detach()
    if weight.is_meta:
        blocks = -(-weight.numel() // BLOCK)
        packed = weight.new_empty(len(weight), weight.shape[1] // 2, dtype=torch.uint8)
        absmax = torch.empty(blocks, dtype=torch.uint8)
        matrix = Nf4(packed, absmax, torch.empty(-(-blocks // GROUP)), torch.empty(()))
    else:
        matrix = Nf4(*(tensor.to(weight.device) for tensor in quantize(weight.to(device or weight.device))))
    layer.weight = torch.nn.Parameter(matrix.packed, requires_grad=False)
    for name in SCALES:
        layer.register_buffer(name, getattr(matrix, name))
    layer.__class__ = Nf4Linear


@torch.no_grad()
def fill_layer(layer: torch.nn.Linear, weight: Tensor) -> None:
    """Quantize a dense weight [out, in] into the memory of a layer in NF4, on its device."""
    held = matrix_of(layer)
    assert held is not None
    for tensor, found in zip(held, quantize(weight.to(layer.weight.device)), strict=True):
        tensor.copy_(found)
