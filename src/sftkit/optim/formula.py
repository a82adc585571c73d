"""The arithmetic of AdamW by torch's operators, on flat tensors: for any device, and as the reference of the kernel."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from sftkit.ops.rounding import elements, noise16, stochastic_round


class Scalars(NamedTuple):
    """The numbers that the update of a group needs: 0-d fp32 tensors on the CPU."""

    decay: torch.Tensor
    "learning rate times weight decay"
    rate1: torch.Tensor
    "1 - beta1"
    rate2: torch.Tensor
    "1 - beta2"
    eps: torch.Tensor


@functools.lru_cache(maxsize=32)
def scalars(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Scalars:
    """Return the numbers of a group as tensors, the same objects for the same numbers."""
    beta1, beta2 = betas
    return Scalars(*(torch.tensor(x, dtype=torch.float32) for x in (lr * weight_decay, 1 - beta1, 1 - beta2, eps)))


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


Moments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    s: Scalars,
    corrected: torch.Tensor,
) -> Moments:
    """Return the new weight, exp_avg and exp_avg_sq, all fp32 of one shape (Loshchilov & Hutter 2019, algorithm 2).

    Args:
        corrected: fp64 [2], a row of `corrections`.
    """
    step_size, root2 = corrected.float().unbind()
    exp_avg = exp_avg + (grad - exp_avg) * s.rate1
    exp_avg_sq = exp_avg_sq + (grad * grad - exp_avg_sq) * s.rate2
    direction = exp_avg / (exp_avg_sq.sqrt() / root2 + s.eps)
    return weight - (s.decay * weight + step_size * direction), exp_avg, exp_avg_sq


def update_exact(
    weight: torch.Tensor,
    rounded: torch.Tensor | None,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor,
    s: Scalars,
    corrected: torch.Tensor,
    offset: torch.Tensor,
    key0: torch.Tensor,
    key1: torch.Tensor,
) -> None:
    """Update flat fp32 weight and moments in place; `rounded`, the bf16 parameter of a master weight, follows.

    A `clip` of nan leaves everything as it is.

    `rounded` is rounded stochastically. Rounded to the nearest, a weight that starts at a bf16 number would stand still
    until its master has moved half the distance to the next one, and training would lag behind fp32
    (benchmarks/h200_step, losses).

    Args:
        weight, exp_avg, exp_avg_sq: fp32 [N].
        rounded: bf16 [N]; None: the weight has no such copy.
        grad: [N].
        clip: fp32 0-d, multiplies the gradient.
        corrected: fp64 [2], a row of `corrections`.
        offset: int32 0-d, index of the first element in the whole parameter. key0, key1: int32 0-d, of the random bits.
    """
    new = adamw(weight, grad.float() * clip, exp_avg, exp_avg_sq, s, corrected)
    usable = ~clip.isnan()
    if rounded is not None:
        bits = noise16(elements(rounded) + offset, key0, key1)[0]
        rounded.copy_(torch.where(usable, stochastic_round(new[0], bits), rounded))
    for stored, value in zip((weight, exp_avg, exp_avg_sq), new, strict=True):
        stored.copy_(torch.where(usable, value, stored))


def update_stochastic(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor,
    s: Scalars,
    corrected: torch.Tensor,
    offset: torch.Tensor,
    key0: torch.Tensor,
    key1: torch.Tensor,
) -> None:
    """Update flat bf16 tensors in place, in fp32 inside; every store is rounded stochastically (arXiv 2502.20566).

    A `clip` of nan leaves everything as it is. Arguments as in update_exact.
    """
    new = adamw(param.float(), grad.float() * clip, exp_avg.float(), exp_avg_sq.float(), s, corrected)
    usable = ~clip.isnan()
    noise = noise16(elements(param) + offset, key0, key1)
    for stored, value, bits in zip((param, exp_avg, exp_avg_sq), new, noise, strict=True):
        stored.copy_(torch.where(usable, stochastic_round(value, bits), stored))
