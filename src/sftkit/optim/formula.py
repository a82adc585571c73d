"""The arithmetic of AdamW by torch's operators, on flat tensors: for any device, and as the reference of the kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sftkit.ops.rounding import elements, int32, noise16, stochastic_round
from sftkit.optim.protocol import Group


class Scalars(NamedTuple):
    """The numbers that the update of a group needs: 0-d fp32 tensors on the CPU."""

    decay: torch.Tensor
    "learning rate times weight decay"
    rate1: torch.Tensor
    "1 - beta1"
    rate2: torch.Tensor
    "1 - beta2"
    eps: torch.Tensor


def numbers_of(group: Group) -> tuple[float, float, float, float]:
    """Return the numbers of a group, in the order of Scalars."""
    beta1, beta2 = group["betas"]
    return group["lr"] * group["weight_decay"], 1 - beta1, 1 - beta2, group["eps"]


@functools.lru_cache(maxsize=32)
def scalars(*numbers: float) -> Scalars:
    """Return the numbers of a group as tensors, the same objects for the same numbers."""
    return Scalars(*(torch.tensor(number, dtype=torch.float32) for number in numbers))


def corrections(counts: torch.Tensor, lr: float, betas: tuple[float, float]) -> torch.Tensor:
    """Return the two numbers of AdamW's bias correction after each count of updates.

    Args:
        counts: [P], update numbers from 1, on any device; of 0 the result is not finite.

    Returns:
        fp64 [P, 2] on that device: lr / (1 - beta1^count) and sqrt(1 - beta2^count). In fp32 the first count of
        beta2=0.999 would be off by 6e-5.
    """
    counts = counts.double()
    beta1, beta2 = betas
    return torch.stack((lr / (1 - beta1**counts), (1 - beta2**counts).sqrt()), dim=1)


class WeightAndMoments(NamedTuple):
    """The tensors of a parameter, or of this rank's shard of it, that an update changes, flat: [N]."""

    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class Coefficients(NamedTuple):
    """The numbers of an update of one parameter."""

    clip: torch.Tensor
    "fp32 0-d, multiplies the gradient; nan: everything stays as it is"
    scalars: Scalars
    "of its group"
    corrected: torch.Tensor
    "fp64 [2], a row of `corrections`"


class RandomBits(NamedTuple):
    """The random bits of an update, for stochastic rounding: all follow from these numbers, int32 0-d, or [B, 1] for B
    tensors of one size."""

    offset: torch.Tensor
    "index of the first element in the whole parameter"
    key0: torch.Tensor
    key1: torch.Tensor

    @classmethod
    def of(cls, offset: int, key: int) -> RandomBits:
        """Return the random bits of the shard that begins with the element `offset`. `key`: 64 bits, of the update."""
        return cls(int32(offset), int32(key), int32(key >> 32))

    def noise(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return three draws of 16 bits for each element, int32 [N] or [B, N]. `flat`: one of the tensors, [N]."""
        return noise16(elements(flat) + self.offset, self.key0, self.key1)


def adamw(old: WeightAndMoments, grad: torch.Tensor, scalars: Scalars, corrected: torch.Tensor) -> WeightAndMoments:
    """Return the new weight and moments, all fp32 of one shape (Loshchilov & Hutter 2019, algorithm 2).

    Args:
        corrected: fp64 [2], a row of `corrections`.
    """
    step_size, root2 = corrected.float().unbind()
    exp_avg = old.exp_avg + (grad - old.exp_avg) * scalars.rate1
    exp_avg_sq = old.exp_avg_sq + (grad * grad - old.exp_avg_sq) * scalars.rate2
    direction = exp_avg / (exp_avg_sq.sqrt() / root2 + scalars.eps)
    weight = old.weight - (scalars.decay * old.weight + step_size * direction)
    return WeightAndMoments(weight, exp_avg, exp_avg_sq)


def update_exact(
    stored: WeightAndMoments, rounded: torch.Tensor | None, grad: torch.Tensor, by: Coefficients, bits: RandomBits
) -> None:
    """Update flat fp32 weight and moments in place; `rounded`, the bf16 parameter of a master weight, follows.

    A `clip` of nan leaves everything as it is.

    `rounded` is rounded stochastically. Rounded to the nearest, a weight that starts at a bf16 number would stand still
    until its master has moved half the distance to the next one, and training would lag behind fp32
    (benchmarks/h200_step, losses).

    Args:
        stored: fp32 [N].
        rounded: bf16 [N]; None: the weight has no such copy.
        grad: [N].
    """
    new = adamw(stored, grad.float() * by.clip, by.scalars, by.corrected)
    usable = ~by.clip.isnan()
    if rounded is not None:
        rounded.copy_(torch.where(usable, stochastic_round(new.weight, bits.noise(rounded)[0]), rounded))
    for old, value in zip(stored, new, strict=True):
        old.copy_(torch.where(usable, value, old))


def update_stochastic(stored: WeightAndMoments, grad: torch.Tensor, by: Coefficients, bits: RandomBits) -> None:
    """Update flat bf16 tensors in place, in fp32 inside; every store is rounded stochastically (arXiv 2502.20566).

    A `clip` of nan leaves everything as it is.
    """
    precise = WeightAndMoments(*(old.float() for old in stored))
    new = adamw(precise, grad.float() * by.clip, by.scalars, by.corrected)
    usable = ~by.clip.isnan()
    for old, value, noise in zip(stored, new, bits.noise(stored.weight), strict=True):
        old.copy_(torch.where(usable, stochastic_round(value, noise), old))


def small_table(values: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a small table on the device. No host sync."""
    table = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
