"""An objective with the auxiliary loss of a model's routers beside it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sftkit.objectives.objective import Objective
from sftkit.objectives.sums import Sums

AUX_LOSS = "aux_loss"
"Name of the sum of the auxiliary loss."


class Balanced:
    """An objective with one more sum, the auxiliary loss. See objective.Objective.

    `added` brings that sum in, since what routers choose is in no hidden state.
    """

    def __init__(self, objective: Objective, weight: float) -> None:
        """Wrap an objective. `weight`: of the auxiliary loss in what is minimised; 0: it is measured only."""
        self._objective, self._weight = objective, weight
        self.measured, self.monitored = (*objective.measured, AUX_LOSS), objective.monitored
        # The rest is the wrapped objective's, which knows nothing of routers.
        self.select, self.sums, self.sums_of_logits = objective.select, objective.sums, objective.sums_of_logits
        self.count, self.divisors = objective.count, objective.divisors

    def added(self, sums: Sums, aux_loss: Tensor | None) -> Sums:
        """Return the sums of a batch with the auxiliary loss of its rows; None, as in an evaluation, counts as 0."""
        if aux_loss is None:
            return Sums(sums.loss, {**sums.measured, AUX_LOSS: sums.loss.new_zeros(())})
        # With weight 0 the auxiliary loss must not enter the graph at all: 0 times infinity is NaN.
        loss = sums.loss + self._weight * aux_loss.to(sums.loss.dtype) if self._weight else sums.loss
        return Sums(loss, {**sums.measured, AUX_LOSS: aux_loss.detach().to(sums.loss.dtype)})

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the wrapped objective's metrics, train/aux_loss, and train/objective where the loss is part of it."""
        values = {**self._objective.metrics(means), "train/aux_loss": means[AUX_LOSS]}
        return values | ({"train/objective": means["loss"]} if self._weight else {})
