"""The outcome of a step, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sftkit.objectives.sums import Totals


@dataclass(frozen=True)
class Flags:
    """The flags of a step, equal on all ranks, in one small vector, so that one copy brings them to the host."""

    vector: Tensor
    "fp32 [11], the same on every rank"

    @classmethod
    def of(cls, stop: Tensor, nonfinite: Tensor, skipped: Tensor, verdict: Tensor | None = None) -> Flags:
        """Combine the flags, each 0-d, with `verdict`, fp32 [2, 4], from Spikes.judge; None: not compared."""
        flags = torch.stack([stop, nonfinite, skipped.to(stop.dtype)]).float()
        return cls(torch.cat([flags, flags.new_zeros(8) if verdict is None else verdict.flatten()]))

    @property
    def stop(self) -> Tensor:
        """Return the number of ranks that request a stop, 0-d."""
        return self.vector[0]

    @property
    def nonfinite(self) -> Tensor:
        """Return the number of ranks whose loss is not finite, 0-d; 1 if only the gradient norm is not."""
        return self.vector[1]

    @property
    def skipped(self) -> Tensor:
        """Return 1 if the update was skipped, 0-d."""
        return self.vector[2]

    @property
    def verdict(self) -> Tensor:
        """Return what Spikes.judge found: [2, 4]."""
        return self.vector[3:].view(2, 4)


NUM_FLAGS = 11


class StepOutcome(NamedTuple):
    """The results of a step as tensors on the device; the host has waited for none of them."""

    sums: Totals
    "this rank's, over its micro-batches"
    grad_norm: Tensor
    "fp32 0-d, global gradient norm before clipping, the same on every rank"
    flags: Flags
    losses: Tensor
    "fp32 (float64 of a model in float64) [A], the sum that is minimised in each of this rank's micro-batches"
