"""The shard of a tensor that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_region(param: DTensor) -> list[tuple[int, int]]:
    """Return (start, size) in each dimension of the part of the whole that this rank holds.

    The mesh's first dimension shards first; but strided shards, which FSDP2 makes of tensor-parallel ones, are sharded
    by the last dimension first. Sizes are those of torch.chunk.
    """
    region = [(0, size) for size in param.shape]
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None
    strided = any(hasattr(place, "split_factor") for place in param.placements)
    for mesh_dim in sorted(range(param.device_mesh.ndim), reverse=strided):
        placement = param.placements[mesh_dim]
        # Not is_shard(): it is false of the strided shards that FSDP makes of tensor-parallel ones.
        if not placement.is_replicate():
            start, size = region[placement.dim]  # type: ignore[attr-defined]
            chunk = -(-size // param.device_mesh.size(mesh_dim))
            first = min(coordinate[mesh_dim] * chunk, size)
            region[placement.dim] = (start + first, min(chunk, size - first))  # type: ignore[attr-defined]
    return region


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]
