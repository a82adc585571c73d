"""What a rank holds of a sharded tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_region(param: DTensor) -> list[tuple[int, int]]:
    """(start, size) in each dimension of the block of the whole that this rank holds.

    The mesh's first dimension cuts first; but where FSDP2 has cut what tensor parallelism left, which makes strided shards, the
    last one did. Pieces are those of torch.chunk.
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
            piece = -(-size // param.device_mesh.size(mesh_dim))
            first = min(coordinate[mesh_dim] * piece, size)
            region[placement.dim] = (start + first, min(piece, size - first))  # type: ignore[attr-defined]
    return region


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]
