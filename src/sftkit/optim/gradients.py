"""The norm of all gradients and what clipping multiplies them by; no host sync."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from sftkit.ops.dtensor import local

CHUNK = 1 << 16
"Elements whose squares are added up at once on a CPU: their copy in fp64 stays in the cache."


@torch.no_grad()
def squared_norm(
    parameters: Iterable[torch.Tensor], world_size: int, copies: Mapping[int, int] | None = None
) -> torch.Tensor:
    """This rank's share of the squared L2 norm of all gradients: the shares of all ranks add up to it.

    What several ranks hold, a replica or an unsharded weight, each counts for one part of that many.

    Args:
        copies: id of a parameter -> ranks that hold it; None: all of them.

    Returns:
        0-d on the device, no host sync: fp32 on a GPU, whose sums are trees; fp64 on a CPU, which adds one by one.
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    device = torch.device("cpu")
    for p in parameters:
        device = p.device
        if p.grad is not None:
            by_copies.setdefault(_copies(p, (copies or {}).get(id(p), world_size)), []).append(local(p.grad))
    if not by_copies:  # as ranks with gradients have it: they add up their shares
        return torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    return torch.stack([_sum_of_squares(grads) / copies for copies, grads in by_copies.items()]).sum()


def _sum_of_squares(grads: list[torch.Tensor]) -> torch.Tensor:
    if grads[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()
    # In fp32 torch's sum on a CPU loses 6e-4 of a norm of 2^24 elements, 5e-3 of 2^26.
    chunks = (chunk for grad in grads for chunk in grad.reshape(-1).split(CHUNK))
    return torch.stack([torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]).square().sum()


def _copies(param: torch.Tensor, world_size: int) -> int:
    """How many ranks hold the same piece of a parameter."""
    if not isinstance(param, DTensor):
        return world_size
    # Not is_shard(): it is false of the strided shards that FSDP makes of tensor-parallel ones.
    pieces = (param.device_mesh.size(i) for i, place in enumerate(param.placements) if not place.is_replicate())
    return world_size // math.prod(pieces)


def clip_coefficient(norm: torch.Tensor, usable: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    """The factor that brings gradients of this norm to `max_norm`: min(1, max_norm / (norm + 1e-6)); nan if not usable.

    Args:
        norm: fp32 0-d. usable: bool 0-d, whether there may be an update.
    """
    factor = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(usable, factor, torch.nan)


@torch.no_grad()
def multiply_gradients(parameters: Iterable[torch.nn.Parameter], coefficient: torch.Tensor) -> None:
    """Multiply in place, for optimizers that cannot inside their update; a coefficient of nan leaves them."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, coefficient.nan_to_num(1.0))
