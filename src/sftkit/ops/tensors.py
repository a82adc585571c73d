"""Tensors spread over ranks, and random bits that are the same on all of them.

The shard of a tensor that a rank holds. The rows of context parallelism: each rank has an early and a late chunk of
every row and gathers the keys and values of all; queries stay where they are, so a rank attends from its chunks to
whole rows (as Llama 3, arXiv 2407.21783, section 3.3.2). And stochastic rounding of fp32 to bf16, with random bits from
a hash instead of a generator.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_into_tensor, distributed_c10d, reduce_scatter_tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_region(param: Tensor) -> list[tuple[int, int]]:
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


def local_part(whole: Any, param: Tensor) -> Any:
    """Return the part of a whole tensor, or of a safetensors slice, that this rank holds of `param`."""
    return whole[tuple(slice(start, start + size) for start, size in local_region(param))]


def as_sharded(shard: Tensor, param: Tensor) -> Tensor:
    """Return a shard as part of a DTensor that is sharded like `param`; where that is whole, the shard itself."""
    if not isinstance(param, DTensor):
        return shard
    whole: Any = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(shard, param.device_mesh, param.placements, run_check=False, **whole)


def gather_rows(key: Tensor, value: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return keys and values of whole rows in natural order, gathered from every rank's chunks;
    gradients go back summed.

    Args:
        key, value: [B, KV, C, D] of this rank's chunks, the early one first.
        group: name of the group of ranks whose chunks make whole rows.

    Returns:
        [B, KV, T, D] each, T = C x ranks
    """
    parts = _all_gather(torch.stack([key, value]), group).unflatten(-2, (2, -1))  # [n, 2, B, KV, 2, C/2, D]
    chunks = torch.cat([parts.select(-3, 0), parts.select(-3, 1).flip(0)])  # [2n, 2, B, KV, C/2, D]
    rows = chunks.movedim(0, 3).flatten(3, 4)
    return rows[0], rows[1]


def resolve_group(group: str) -> ProcessGroup:
    """Return the group of that name, as torch's own functional collectives find it."""
    # Private: operators take a name, which a graph can hold (pytorch/pytorch#93173), and torch has no public way from
    # it to the group.
    return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]


@torch.library.custom_op("sftkit::all_gather", mutates_args=())
def _all_gather(shard: Tensor, group: str) -> Tensor:
    """Return the shards of all ranks of a group, stacked: [n, *shard.shape]."""
    ranks = resolve_group(group)
    stacked = shard.new_empty(ranks.size(), *shard.shape)
    all_gather_into_tensor(stacked.view(-1), shard.reshape(-1), group=ranks)  # gloo takes flat tensors only
    return stacked


@torch.library.custom_op("sftkit::reduce_scatter", mutates_args=())
def _reduce_scatter(stacked: Tensor, group: str) -> Tensor:
    """Return this rank's shard of the sum over ranks of [n, ...]."""
    shard = torch.empty_like(stacked[0], memory_format=torch.contiguous_format)
    reduce_scatter_tensor(shard.view(-1), stacked.reshape(-1), group=resolve_group(group))
    return shard


@_all_gather.register_fake
def _(shard: Tensor, group: str) -> Tensor:
    return shard.new_empty(resolve_group(group).size(), *shard.shape)


@_reduce_scatter.register_fake
def _(stacked: Tensor, group: str) -> Tensor:
    return torch.empty_like(stacked[0], memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    """Keep the group for the backward pass."""
    ctx.group = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """Return the gradient of this rank's shard: the sum over ranks."""
    return _reduce_scatter(grad, ctx.group), None


_all_gather.register_autograd(_backward, setup_context=_save)


def elements(flat: Tensor) -> Tensor:
    """Return the index of each element, int32 [N]."""
    return torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)


def stochastic_round(value: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down with the probability that makes the mean exact; inf and nan stay.

    Args:
        noise: integers in [0, 65536), uniform: added to the 16 bits that bf16 drops, the carry rounds up.
    """
    bits = value.view(torch.int32) + noise.to(torch.int32)
    kept = (bits & -65536).view(torch.float32)
    return torch.where(value.isfinite(), kept, value).to(torch.bfloat16)


def noise16(index: Tensor, key0: Tensor, key1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three draws of 16 bits per element, int32: a stateless hash of (keys, element).

    The draws are the same in eager mode, compiled, and on any device.

    Args:
        index: int32, of the elements. key0, key1: int32 0-d.
    """
    first = mix32(index ^ key0)
    second = mix32(first ^ key1)
    return second & 0xFFFF, (second >> 16) & 0xFFFF, first & 0xFFFF


def mix32(x: Tensor) -> Tensor:
    """Permute the 32-bit numbers so that they look random: lowbias32 with the constants of hash-prospector's issue 19.

    int32 in and out, products wrap around. Masks take away the sign that a right shift of int32 brings in.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


def int32(bits: int) -> Tensor:
    """Return the lowest 32 bits as a signed number, 0-d."""
    return torch.tensor(signed32(bits), dtype=torch.int32)


def signed32(bits: int) -> int:
    """Return the lowest 32 bits as a signed number."""
    return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)


class ParameterShard(NamedTuple):
    """A parameter, or this rank's shard of it: contiguous tensors of the same number of elements."""

    weight: Tensor
    "fp32; bf16 if everything is rounded stochastically"
    rounded: Tensor | None
    "bf16, follows `weight` by stochastic rounding"
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    scalars: tuple[float, float, float, float]
    "learning rate times weight decay, 1 - beta1, 1 - beta2, eps"
    offset: int
    "index of its first element in the whole parameter, for the random bits"
    key: int
    "64 bits, for the random bits"
