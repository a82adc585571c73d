"""Stochastic rounding of fp32 to bf16, with random bits from a hash instead of a generator."""

from __future__ import annotations

import torch


def elements(flat: torch.Tensor) -> torch.Tensor:
    """Return the index of each element, int32 [N]."""
    return torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)


def stochastic_round(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16, up or down with the probability that makes the mean exact; inf and nan stay.

    Args:
        noise: integers in [0, 65536), uniform: added to the 16 bits that bf16 drops, the carry rounds up.
    """
    bits = value.view(torch.int32) + noise.to(torch.int32)
    kept = (bits & -65536).view(torch.float32)
    return torch.where(value.isfinite(), kept, value).to(torch.bfloat16)


def noise16(
    index: torch.Tensor, key0: torch.Tensor, key1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three draws of 16 bits per element, int32: a stateless hash of (keys, element).

    The draws are the same in eager mode, compiled, and on any device.

    Args:
        index: int32, of the elements. key0, key1: int32 0-d.
    """
    first = mix32(index ^ key0)
    second = mix32(first ^ key1)
    return second & 0xFFFF, (second >> 16) & 0xFFFF, first & 0xFFFF


def mix32(x: torch.Tensor) -> torch.Tensor:
    """Permute the 32-bit numbers so that they look random: lowbias32 with the constants of hash-prospector's issue 19.

    int32 in and out, products wrap around. Masks take away the sign that a right shift of int32 brings in.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


def int32(bits: int) -> torch.Tensor:
    """Return the lowest 32 bits as a signed number, 0-d."""
    return torch.tensor(signed32(bits), dtype=torch.int32)


def signed32(bits: int) -> int:
    """Return the lowest 32 bits as a signed number."""
    return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)
