"""The shard of a tensor that a rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_region(param: torch.Tensor) -> list[tuple[int, int]]:
    """Return (start, size) in each dimension of the part of the whole that this rank holds; of no DTensor all of it.

    The mesh's first dimension shards first; but strided shards, which FSDP2 makes of tensor-parallel ones, are sharded
    by the last dimension first. Sizes are those of torch.chunk.
    """
    region = [(0, size) for size in param.shape]
    if not isinstance(param, DTensor):
        return region
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None
    # Private: torch's class for them, _StridedShard (pytorch/pytorch#126697), is known by this attribute.
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


def local_part(whole: Any, param: torch.Tensor) -> Any:
    """Return the part of a whole tensor, or of a safetensors slice, that this rank holds of `param`."""
    return whole[tuple(slice(start, start + size) for start, size in local_region(param))]


def as_sharded(shard: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a shard as part of a DTensor that is sharded like `param`; where that is whole, the shard itself."""
    if not isinstance(param, DTensor):
        return shard
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
