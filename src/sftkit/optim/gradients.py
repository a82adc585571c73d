"""The norm of all gradients and the factor that clips them. No host sync."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from sftkit.ops.dtensor import local

SUM_CHUNK = 1 << 16
"Elements whose squares are added up at once on a CPU: their copy in fp64 stays in the cache."


@torch.no_grad()
def squared_norm(
    parameters: Iterable[torch.Tensor], world_size: int, copies: Mapping[int, int] | None = None
) -> torch.Tensor:
    """Return this rank's share of the squared L2 norm of all gradients: the shares of all ranks add up to it.

    A gradient that n ranks hold, such as that of a replica or an unsharded weight, counts 1/n on each.

    Args:
        copies: id of a parameter -> number of ranks that hold it; others, and None: all ranks.

    Returns:
        0-d on the device, no host sync: fp32 on a GPU, whose sums are trees; fp64 on a CPU, which adds one by one.
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    device = torch.device("cpu")
    for p in parameters:
        device = p.device
        if p.grad is not None:
            by_copies.setdefault(_copies(p, (copies or {}).get(id(p), world_size)), []).append(local(p.grad))
    if not by_copies:  # in the dtype of ranks that have gradients, since the shares are added up
        return torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    return torch.stack([_sum_of_squares(grads) / copies for copies, grads in by_copies.items()]).sum()


def _sum_of_squares(grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of all squares, 0-d: fp32 on a GPU, fp64 on a CPU."""
    if grads[0].device.type != "cpu":
        # Private: one launch for many tensors. The public get_total_norm (pytorch/pytorch#139662) calls it too, but in
        # the dtype of the gradients.
        return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()
    # In fp32 torch's sum on a CPU loses 6e-4 of a norm of 2^24 elements, 5e-3 of 2^26.
    chunks = (chunk for grad in grads for chunk in grad.reshape(-1).split(SUM_CHUNK))
    return torch.stack([torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]).square().sum()


def _copies(param: torch.Tensor, world_size: int) -> int:
    """Return how many ranks hold the same shard of a parameter."""
    if not isinstance(param, DTensor):
        return world_size
    # Not is_shard(): it is false of the strided shards that FSDP makes of tensor-parallel ones.
    shards = (param.device_mesh.size(i) for i, place in enumerate(param.placements) if not place.is_replicate())
    return world_size // math.prod(shards)


def clip_coefficient(norm: torch.Tensor, usable: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    """Return the factor that brings gradients to `max_norm`: min(1, max_norm / (norm + 1e-6)); nan if not usable.

    Args:
        norm: fp32 0-d, of the gradients. usable: bool 0-d, whether there may be an update.
        max_norm: None: gradients are not clipped.
    """
    factor = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(usable, factor, torch.nan)


@torch.no_grad()
def multiply_gradients(parameters: Iterable[torch.nn.Parameter], coefficient: torch.Tensor) -> None:
    """Multiply gradients in place, for optimizers that cannot do it inside their update; nan
    leaves them as they are."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        # Private: a few kernels for all gradients. The public clip_grads_with_norm_ (pytorch/pytorch#139662) takes a
        # norm, not a factor.
        torch._foreach_mul_(grads, coefficient.nan_to_num(1.0))
