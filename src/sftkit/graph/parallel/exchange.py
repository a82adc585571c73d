"""Activations between the ranks that share rows, as operators of a graph: each the transpose of its gradient.

So a gradient is that of the sum of all ranks' losses, whatever a rank computes of it: nothing has to be known of which
values ranks have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sftkit.graph import compat
from sftkit.parallel.tensor import Activations


def gather(shard: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the shards of all ranks of a group, joined along a dimension."""
    return _Exchanged.apply(shard, compat.all_gather, compat.reduce_scatter, dim, group)


def add_and_scatter(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's shard, along a dimension, of the sum over the ranks of a group."""
    return _Exchanged.apply(tensor, compat.reduce_scatter, compat.all_gather, dim, group)


def exchange_counts(sent: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Exchange how many rows the ranks of a group are about to send each other.

    Args:
        sent: int64 [R, E], rows of this rank for each expert of each rank.

    Returns:
        (int64 [R, E], rows of each rank for each expert of this one; int64 [2, R] on the host: rows to and from each
        rank)
    """
    return _exchange_counts(sent, group.group_name)


def send(rows: Tensor, sizes: Tensor, room: int, group: ProcessGroup, *, back: bool = False) -> Tensor:
    """Return the rows of all ranks for this one, [room, H], by rank; 0 behind the last.

    Args:
        rows: [S, H], those for the first rank first; behind the last anything.
        sizes: of exchange_counts. back: in the other direction, for the results of rows that were received.
        room: rows that may come at most.
    """
    return _Send.apply(rows, sizes, room, group.group_name, back)


class Exchange(Activations):
    """Between the layers of a tensor-parallel model; in `without_sequence_parallel` every rank has all positions."""

    def gather(self, positions: Tensor) -> Tensor:
        """Gather whole rows, [B, T, H], from the ranks' columns of them, [B, C, H]."""
        return gather(positions, 1, self.group) if self.sequence_parallel else positions

    def add_up(self, partial: Tensor) -> Tensor:
        """Return the sum of the ranks' parts of whole rows, [B, T, H]: this rank's columns of it, [B, C, H]."""
        if self.sequence_parallel:
            return add_and_scatter(partial, 1, self.group)
        return _Exchanged.apply(partial, compat.all_reduce, compat.all_reduce, self.group)


class _Exchanged(torch.autograd.Function):
    """What a linear exchange gives; its gradient is exchanged by the transpose. `where`: further arguments of both."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, exchange: Callable[..., Tensor], transpose: Callable[..., Tensor], *where: Any
    ) -> Tensor:
        ctx.transpose, ctx.where = transpose, where
        return exchange(tensor, *where)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Linear, so that nothing of the forward pass has to be kept for it.
        return ctx.transpose(gradient, *ctx.where), None, None, *(None for _ in ctx.where)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sizes: Tensor,
        room: int,
        group: str,
        back: bool,  # noqa: FBT001 - as above
    ) -> Tensor:
        ctx.save_for_backward(sizes)
        ctx.room, ctx.group, ctx.back = len(rows), group, back
        return _all_to_all(rows, sizes, room, group, back)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (sizes,) = ctx.saved_tensors
        return _all_to_all(gradient, sizes, ctx.room, ctx.group, not ctx.back), None, None, None, None


# torch's own all-to-all has sizes that are numbers to whoever traces: a graph for each way that a router may choose.
# Here they are a tensor, and what arrives has room for all.


@torch.library.custom_op("sftkit::all_to_all", mutates_args=())
def _all_to_all(
    rows: Tensor,
    sizes: Tensor,
    room: int,
    group: str,
    back: bool,  # noqa: FBT001 - an operator takes its arguments by place
) -> Tensor:
    # On the host already: _exchange_counts has waited for them, once for tokens, results and the gradients of both.
    given, taken = reversed(sizes.tolist()) if back else sizes.tolist()
    arrived = rows.new_zeros(room, *rows.shape[1:])
    leaving = rows[: sum(given)].contiguous()
    dist.all_to_all_single(arrived[: sum(taken)], leaving, taken, given, group=compat.group_named(group))
    return arrived


@torch.library.custom_op("sftkit::all_to_all_counts", mutates_args=())
def _exchange_counts(sent: Tensor, group: str) -> tuple[Tensor, Tensor]:
    received = torch.zeros_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=compat.group_named(group))
    return received, torch.stack([sent.sum(1), received.sum(1)]).cpu()


@_all_to_all.register_fake
def _(rows: Tensor, sizes: Tensor, room: int, group: str, back: bool) -> Tensor:  # noqa: FBT001 - as the operator
    return rows.new_empty(room, *rows.shape[1:])


@_exchange_counts.register_fake
def _(sent: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return sent.new_empty(sent.shape), sent.new_empty((2, len(sent)), device="cpu")
