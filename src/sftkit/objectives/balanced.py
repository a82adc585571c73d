"""An objective with the auxiliary loss of a model's routers beside it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from sftkit.data.collate import Batch
from sftkit.data.types import Examples
from sftkit.objectives.objective import Objective
from sftkit.objectives.sums import Sums
from sftkit.ops.linear_cross_entropy import Head

AUX_LOSS = "aux_loss"
"Name of the sum of the auxiliary loss."


class Balanced:
    """An objective with one more sum, the auxiliary loss. See objective.Objective.

    `added` brings that sum in, since what routers choose is in no hidden state.
    """

    monitored: str

    def __init__(self, objective: Objective, weight: float) -> None:
        """Wrap an objective. `weight`: of the auxiliary loss in what is minimised; 0: it is measured only."""
        self._objective, self._weight = objective, weight
        self.measured, self.monitored = (*objective.measured, AUX_LOSS), objective.monitored

    def added(self, sums: Sums, aux_loss: Tensor | None) -> Sums:
        """Return the sums of a batch with the auxiliary loss of its rows; None, as in an evaluation, counts as 0."""
        if aux_loss is None:
            return Sums(sums.loss, {**sums.measured, AUX_LOSS: sums.loss.new_zeros(())})
        loss = sums.loss + self._weight * aux_loss.to(sums.loss.dtype) if self._weight else sums.loss
        return Sums(loss, {**sums.measured, AUX_LOSS: aux_loss.detach().to(sums.loss.dtype)})

    def select(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return what the wrapped objective selects of the hidden states."""
        return self._objective.select(hidden, batch)

    def sums(self, chosen: Tensor, batch: Batch, head: Head) -> Sums:
        """Return the wrapped objective's sums, which know nothing of routers."""
        return self._objective.sums(chosen, batch, head)

    def sums_of_logits(self, logits: Tensor, targets: Tensor) -> Sums:
        """Return the wrapped objective's sums of ready logits."""
        return self._objective.sums_of_logits(logits, targets)

    def count(self, batch: Batch) -> int:
        """Return what a batch adds to the wrapped objective's divisor."""
        return self._objective.count(batch)

    def divisors(self, examples: Examples) -> np.ndarray:
        """Return what each document adds to the wrapped objective's divisor of a step."""
        return self._objective.divisors(examples)

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the wrapped objective's metrics, train/aux_loss, and train/objective where the loss is part of it."""
        values = {**self._objective.metrics(means), "train/aux_loss": means[AUX_LOSS]}
        return values | ({"train/objective": means["loss"]} if self._weight else {})
