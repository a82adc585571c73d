"""Settings by which attention scores, the products of queries and keys, become weights; the same for every kernel."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scores(NamedTuple):
    """Settings of the scores. A tuple, so that a compiled block unpacks it."""

    scale: float
    "factor of the products"
    window: int | None = None
    "most keys that a query sees, itself included; None: all"
    softcap: float | None = None
    "c in c * tanh(score / c); None: scores stay as they are"
    dropout: float = 0.0
    "of the weights"
    bias: Tensor | None = None
    "[1, H, T, keys], added: relative positions"
