"""A causal convolution over a few positions that never reaches into another document of the row.

Hybrid models mix each channel over its last 3 or 4 positions before a recurrent layer, or instead of one. With so few
taps the convolution is a sum of shifted products. Written so, it needs no kernel of its own: the compiler makes one
kernel of the sum, its masks and the activation, and no shape depends on where documents start.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "swish": F.silu}


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, starts: Tensor) -> Tensor:
    """Return the convolution of each channel over the last K positions of the same document, [B, T, C].

    Sums are computed in fp32, or in fp64 if x is, and rounded before the activation, as convolutions of torch are.

    Args:
        x: [B, T, C]. weight: [C, K], the last column belongs to the position itself. bias: [C] or None.
        activation: applied to the sum, one of ACTIVATIONS.
        starts: int [B, T], each position's distance from the first position of its document.

    Raises:
        RuntimeError: another activation.
    """
    if activation not in ACTIVATIONS:
        raise RuntimeError(f"a short convolution with activation {activation} is not supported")
    return ACTIVATIONS[activation](_Convolution.apply(x, weight, bias, starts))


class _Convolution(torch.autograd.Function):
    """The sum, with gradients by shifts of its own gradient alone.

    Derived by autograd, the gradient of the weight is a product with the shifted inputs. A compiled block then keeps
    each of them from the forward pass, in fp32: three times what it keeps of the whole layer otherwise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor) -> Tensor:
        """Return the sum of the shifted products, [B, T, C]."""
        ctx.save_for_backward(x, weight, starts)
        ctx.bias = None if bias is None else bias.dtype
        exact = torch.promote_types(x.dtype, torch.float32)
        taps = weight.to(exact).unbind(1)
        out = x * taps[-1]
        for back in range(1, min(len(taps), x.shape[1])):
            earlier = F.pad(x, (0, 0, back, -back))
            # `where`, not a product: zero times an infinite value of another document is not zero.
            out = out + torch.where((starts >= back).unsqueeze(-1), earlier, 0) * taps[-1 - back]
        if bias is not None:
            out = out + bias
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients by input, weight and bias."""
        x, weight, starts = ctx.saved_tensors
        exact = torch.promote_types(x.dtype, torch.float32)
        taps = weight.to(exact).unbind(1)
        wide = x.to(exact)
        grad = grads[0].to(exact)
        of_input = grad * taps[-1]
        of_taps = [(grad * wide).sum((0, 1))]
        for back in range(1, len(taps)):
            if back >= x.shape[1]:
                of_taps.append(torch.zeros_like(of_taps[0]))
                continue
            later = F.pad(torch.where((starts >= back).unsqueeze(-1), grad, 0), (0, 0, -back, back))
            of_input = of_input + later * taps[-1 - back]
            of_taps.append((later * wide).sum((0, 1)))
        of_weight = torch.stack(of_taps[::-1], 1).to(weight.dtype)
        of_bias = None if ctx.bias is None else grad.sum((0, 1)).to(ctx.bias)
        return of_input.to(x.dtype), of_weight, of_bias, None
