"""Named sums: those that an objective returns for a batch, and their totals over the micro-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LOSS = "loss"
"Name of the differentiable sum among the totals of a step."


class Sums(NamedTuple):
    """Sums over the targets of a batch, 0-d, losses in nats: fp32 (float64 for float64 inputs)."""

    loss: Tensor
    "differentiable; loss / divisor of the step is what is minimised"
    measured: dict[str, Tensor]
    "other sums by name, without gradient; an objective returns the same names for every batch"


@dataclass(frozen=True)
class Totals:
    """Sums over several batches, in one vector on the device, so that one exchange adds them over ranks."""

    names: tuple[str, ...]
    vector: Tensor
    "fp32 (float64 of a model in float64) [len(names)], without gradient"

    @classmethod
    def zeros(cls, measured: tuple[str, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Totals:
        """Return totals of 0 for an objective that measures these sums besides its loss."""
        names = (LOSS, *measured)
        return cls(names, torch.zeros(len(names), device=device, dtype=dtype))

    @classmethod
    def of(cls, sums: Sums) -> Totals:
        """Return the sums of one batch, detached. No host sync."""
        values = (sums.loss, *sums.measured.values())
        return cls((LOSS, *sums.measured), torch.stack([value.detach() for value in values]))

    def __getitem__(self, name: str) -> Tensor:
        """Return the sum of that name, a 0-d view."""
        return self.vector[self.names.index(name)]

    def add_(self, other: Totals) -> None:
        """Add in place; the names must be the same."""
        assert other.names == self.names, f"{other.names} to {self.names}"
        self.vector.add_(other.vector)

    def means_of(self, values: list[float], divisor: float) -> dict[str, float | None]:
        """Return each value over the divisor, None where that is 0; `values`: the vector, of all ranks together."""
        return {name: value / divisor if divisor else None for name, value in zip(self.names, values, strict=True)}
