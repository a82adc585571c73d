"""What a step leaves on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sftkit.objectives.sums import Totals


@dataclass(frozen=True)
class Flags:
    """What all ranks must know of a step, in one small vector, so that it reaches the host in one copy."""

    vector: Tensor
    "fp32 [2], the same on every rank"

    @property
    def stop(self) -> Tensor:
        """How many ranks ask to stop."""
        return self.vector[0]

    @property
    def nonfinite(self) -> Tensor:
        """How many ranks have a loss that is not finite; 1 if only the gradient norm is not."""
        return self.vector[1]


class StepOutcome(NamedTuple):
    """All that is known when a step has been launched; nothing of it has been waited for."""

    sums: Totals
    "this rank's, over its micro-batches"
    grad_norm: Tensor
    "fp32 0-d, global gradient norm before clipping, the same on every rank"
    flags: Flags
    losses: Tensor
    "fp32 (float64 of a model in float64) [A], this rank's sum that is minimised, of each micro-batch"
