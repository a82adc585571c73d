"""A causal convolution over a few positions that never reaches into another document of the row, as one operator.

Hybrid models mix each channel over its last 3 or 4 positions before a recurrent layer, or instead of one. With so few
taps the convolution is a sum of shifted products. On a GPU one kernel computes the sum, its masks and the activation;
in the code that a compiler makes of them each shift reads its input again. No shape depends on where documents start.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

KERNEL_TAPS = (3, 4)
"Positions of a convolution that the kernel computes."
SILU = {None: False, "silu": True, "swish": True}
"By the name of the activation: whether it is SiLU."


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, starts: Tensor) -> Tensor:
    """Return the convolution of each channel over the last K positions of the same document, [B, T, C].

    Sums are computed in fp32, or in fp64 if x is, and rounded before the activation, as convolutions of torch are.

    Args:
        x: [B, T, C]. weight: [C, K], the last column belongs to the position itself. bias: [C] or None.
        activation: applied to the sum: None, silu or swish, which is the same.
        starts: int [B, T], each position's distance from the first position of its document.

    Raises:
        RuntimeError: another activation.
    """
    if activation not in SILU:
        raise RuntimeError(f"a short convolution with activation {activation} is not supported")
    # Kernels read all tensors by rows: a stride they do not know would be another value, without an error.
    bias = None if bias is None else bias.contiguous()
    starts = starts.expand(x.shape[:2]).contiguous()
    return convolved(x.contiguous(), weight.contiguous(), bias, starts, SILU[activation])


@torch.library.custom_op("sftkit::short_convolution", mutates_args=())
def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool) -> Tensor:  # noqa: FBT001
    """Compute `short_convolution` of contiguous tensors."""
    if _has_kernel(x, weight):
        from sftkit.ops.short_convolution_kernel import convolve  # Triton is not installed on CPU machines

        return convolve(x, weight, bias, starts, silu=silu)
    total = _sum(x, weight, bias, starts)
    return F.silu(total) if silu else total


@convolved.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("sftkit::short_convolution_backward", mutates_args=())
def convolved_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    silu: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `convolved` by x, and by the taps, from first to last, and bias: [K + 1, C], in fp32 or
    fp64. The sum before the activation is computed again: kept, it would be as large as the input.
    """
    if _has_kernel(x, weight):
        from sftkit.ops.short_convolution_kernel import convolve_backward  # as above

        return convolve_backward(grad, x, weight, bias, starts, silu=silu)
    exact = torch.promote_types(x.dtype, torch.float32)
    d_sum = grad.to(exact)
    if silu:
        total = _sum(x, weight, bias, starts).to(exact)
        sigmoid = total.sigmoid()
        d_sum = d_sum * sigmoid * (1 + total * (1 - sigmoid))
    taps = weight.to(exact).unbind(1)
    wide = x.to(exact)
    d_x = d_sum * taps[-1]
    of_taps = [(d_sum * wide).sum((0, 1))]
    for back in range(1, len(taps)):
        reached = torch.where((starts >= back).unsqueeze(-1), d_sum, 0)
        later = F.pad(reached[:, back:], (0, 0, 0, min(back, x.shape[1])))
        d_x = d_x + later * taps[-1 - back]
        of_taps.append((later * wide).sum((0, 1)))
    return d_x.to(x.dtype), torch.stack([*of_taps[::-1], d_sum.sum((0, 1))])


@convolved_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    width, taps = weight.shape
    exact = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), x.new_empty(taps + 1, width, dtype=exact)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and weight.shape[1] in KERNEL_TAPS


def _sum(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor) -> Tensor:
    """Return the sum of the shifted products in the dtype of x."""
    taps = weight.to(torch.promote_types(x.dtype, torch.float32)).unbind(1)
    out = x * taps[-1]
    for back in range(1, min(len(taps), x.shape[1])):
        earlier = F.pad(x, (0, 0, back, -back))
        # `where`, not a product: zero times an infinite value of another document is not zero.
        out = out + torch.where((starts >= back).unsqueeze(-1), earlier, 0) * taps[-1 - back]
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, starts = ctx.saved_tensors
    d_x, sums = convolved_backward(grad.contiguous(), x, weight, bias, starts, ctx.silu)
    d_bias = None if bias is None else sums[-1].to(bias.dtype)
    return d_x, sums[:-1].t().to(weight.dtype), d_bias, None, None


convolved.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.sftkit.short_convolution)
def _forward_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[1]


@register_flop_formula(torch.ops.sftkit.short_convolution_backward)
def _backward_flops(grad: Any, x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of both gradients; the sum that is computed again is not counted."""
    return 4 * math.prod(x) * weight[1]
