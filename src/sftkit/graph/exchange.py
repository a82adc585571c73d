"""Activations between the ranks that share rows, as operators of a graph: each the transpose of its gradient.

So a gradient is that of the sum of all ranks' losses, whatever a rank computes of it: nothing has to be known of which values
ranks have in common.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sftkit.graph import compat
from sftkit.parallel.tensor import Activations


def gather(piece: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The pieces of all ranks of a group, joined along a dimension."""
    return _Gather.apply(piece, dim, group)  # type: ignore[no-any-return]


def add_and_scatter(whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's piece, along a dimension, of the sum over the ranks of a group."""
    return _Scatter.apply(whole, dim, group)  # type: ignore[no-any-return]


class Exchange(Activations):
    """Between the layers of a tensor-parallel model; in `whole_rows` every rank has all positions."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def gather(self, positions: Tensor) -> Tensor:
        """Whole rows, [B, T, H], of this rank's columns of them, [B, C, H]."""
        return gather(positions, 1, self.group) if self.cut_by_position else positions

    def add_up(self, parts: Tensor) -> Tensor:
        """The sum of the ranks' parts of whole rows, [B, T, H]: this rank's columns of it, [B, C, H]."""
        return add_and_scatter(parts, 1, self.group) if self.cut_by_position else _Sum.apply(parts, self.group)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return compat.all_gather(piece, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return compat.reduce_scatter(gradient, ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return compat.reduce_scatter(whole, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return compat.all_gather(gradient, ctx.dim, ctx.group), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return compat.all_reduce(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return compat.all_reduce(gradient, ctx.group), None
