"""What a step leaves on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StepOutcome(NamedTuple):
    """What a step leaves on the device."""

    sums: torch.Tensor
    "fp32 [4], this rank's sums as in `forward_backward`"
    grad_norm: torch.Tensor
    "fp32 0-d, global gradient norm before clipping, the same on every rank"
    flags: torch.Tensor
    "fp32 [2], the same on every rank: how many ask to stop; how many have a loss that is not finite, 1 if only the norm is"
