"""The outcome of a step, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sftkit.objectives.sums import Totals


@dataclass(frozen=True)
class Flags:
    """Flags of a step that all ranks must know, in one small vector, so that they reach the host in one copy."""

    vector: Tensor
    "fp32 [11], the same on every rank"

    @classmethod
    def of(cls, stop: Tensor, nonfinite: Tensor, skipped: Tensor, verdict: Tensor | None = None) -> Flags:
        """Put together what was found, each 0-d, and `verdict`, fp32 [2, 4], as Spikes.judge
        returns it; None: not judged."""
        flags = torch.stack([stop, nonfinite, skipped.to(stop.dtype)]).float()
        return cls(torch.cat([flags, flags.new_zeros(8) if verdict is None else verdict.flatten()]))

    @property
    def stop(self) -> Tensor:
        """Return how many ranks ask to stop, 0-d."""
        return self.vector[0]

    @property
    def nonfinite(self) -> Tensor:
        """Return how many ranks have a loss that is not finite, 0-d; 1 if only the gradient norm is not."""
        return self.vector[1]

    @property
    def skipped(self) -> Tensor:
        """Return 1 for a step that has changed nothing, 0-d."""
        return self.vector[2]

    @property
    def verdict(self) -> Tensor:
        """Return what Spikes.judge found: [2, 4]."""
        return self.vector[3:].view(2, 4)


NUM_FLAGS = 11


class StepOutcome(NamedTuple):
    """All that is known when a step has been launched. The host has not waited for any of it."""

    sums: Totals
    "this rank's, over its micro-batches"
    grad_norm: Tensor
    "fp32 0-d, global gradient norm before clipping, the same on every rank"
    flags: Flags
    losses: Tensor
    "fp32 (float64 of a model in float64) [A], the sum that is minimised in each of this rank's micro-batches"
