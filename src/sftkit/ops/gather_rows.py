"""Context parallelism: each rank has an early and a late chunk of every row, and gathers the keys and values of all.

Queries stay where they are, so a rank attends from its chunks to whole rows (as Llama 3, arXiv
2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup, all_gather_into_tensor, distributed_c10d, reduce_scatter_tensor


def gather_rows(key: torch.Tensor, value: torch.Tensor, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of whole rows in natural order, gathered from every rank's chunks;
    gradients go back summed.

    Args:
        key, value: [B, KV, C, D] of this rank's chunks, the early one first.
        group: name of the group of ranks whose chunks make whole rows.

    Returns:
        [B, KV, T, D] each, T = C x ranks
    """
    parts = _all_gather(torch.stack([key, value]), group).unflatten(-2, (2, -1))  # [n, 2, B, KV, 2, C/2, D]
    early, late = parts.select(-3, 0), parts.select(-3, 1).flip(0)
    chunks = torch.cat([early, late])  # [2n, 2, B, KV, C/2, D], chunk by chunk
    rows = chunks.movedim(0, 3).flatten(3, 4)
    return rows[0], rows[1]


def resolve_group(group: str) -> ProcessGroup:
    """Return the group of that name, as torch's own functional collectives find it."""
    # Private: operators take a name, which a graph can hold (pytorch/pytorch#93173), and torch has no public way from
    # it to the group.
    return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]


@torch.library.custom_op("sftkit::all_gather", mutates_args=())
def _all_gather(shard: torch.Tensor, group: str) -> torch.Tensor:
    """Return the shards of all ranks of a group, stacked: [n, *shard.shape]."""
    ranks = resolve_group(group)
    stacked = shard.new_empty(ranks.size(), *shard.shape)
    all_gather_into_tensor(stacked.view(-1), shard.reshape(-1), group=ranks)  # gloo takes flat tensors only
    return stacked


@torch.library.custom_op("sftkit::reduce_scatter", mutates_args=())
def _reduce_scatter(stacked: torch.Tensor, group: str) -> torch.Tensor:
    """Return this rank's shard of the sum over ranks of [n, ...]."""
    shard = torch.empty_like(stacked[0], memory_format=torch.contiguous_format)
    reduce_scatter_tensor(shard.view(-1), stacked.reshape(-1), group=resolve_group(group))
    return shard


@_all_gather.register_fake
def _(shard: torch.Tensor, group: str) -> torch.Tensor:
    return shard.new_empty(resolve_group(group).size(), *shard.shape)


@_reduce_scatter.register_fake
def _(stacked: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(stacked[0], memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    """Keep the group for the backward pass."""
    ctx.group = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Return the gradient of this rank's shard: the sum over ranks."""
    return _reduce_scatter(grad, ctx.group), None


_all_gather.register_autograd(_backward, setup_context=_save)
