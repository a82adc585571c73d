"""A causal convolution over a few positions that never reaches into another document of the row.

Hybrid models mix each channel over its last 3 or 4 positions before a recurrent layer, or instead of one. With so few
taps the convolution is a sum of shifted products. Written so, it needs no kernel of its own: the compiler makes one
kernel of the sum, its masks and the activation, and no shape depends on where documents start.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "swish": F.silu}


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, starts: Tensor) -> Tensor:
    """Return the convolution of each channel over the last K positions of the same document, [B, T, C].

    Sums are computed in fp32, or in fp64 if x is.

    Args:
        x: [B, T, C]. weight: [C, K], the last column belongs to the position itself. bias: [C] or None.
        activation: applied to the sum, one of ACTIVATIONS.
        starts: int [B, T], each position's distance from the first position of its document.

    Raises:
        RuntimeError: another activation.
    """
    if activation not in ACTIVATIONS:
        raise RuntimeError(f"a short convolution with activation {activation} is not supported")
    exact = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(exact).unbind(1)
    wide = x.to(exact)
    out = wide * taps[-1]
    for back in range(1, min(len(taps), x.shape[1])):
        earlier = F.pad(wide, (0, 0, back, -back))
        # `where`, not a product: zero times an infinite value of another document is not zero.
        out = out + torch.where((starts >= back).unsqueeze(-1), earlier, 0) * taps[-1 - back]
    if bias is not None:
        out = out + bias
    return ACTIVATIONS[activation](out).to(x.dtype)
