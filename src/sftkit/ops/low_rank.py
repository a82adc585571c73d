"""The low-rank product that an adapter adds to the output of a frozen layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear


def low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return y + scale * (x Aᵀ) Bᵀ.

    Args:
        y: [..., out], the output of the frozen layer.
        x: [..., in], its input, after the adapter's dropout.
        a: [rank, in], b: [out, rank], the factors in the dtype of x.
    """
    return y + scale * linear(linear(x, a), b)
