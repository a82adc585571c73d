"""The protocol of objectives: what a new one must define. A stage's script names it; loop,
engines and metrics call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from sftkit.data.collate import Batch
from sftkit.data.types import Examples
from sftkit.objectives.sums import Sums
from sftkit.ops.linear_cross_entropy import Head


class Objective(Protocol):
    """What is minimised, as sums: those of micro-batches and ranks add up, and the step divides once."""

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the names of the sums beside the loss, in the order in which `sums` returns them."""

    @property
    def monitored(self) -> str:
        """Return the name of the sum whose mean is monitored: train/loss, spikes, the loss in messages."""

    def select(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the hidden states that `sums` needs, [N, H], so that the others can be freed before it.

        Args:
            hidden: [B, C, H] of the batch's local positions.
        """

    def sums(self, chosen: Tensor, batch: Batch, head: Head) -> Sums:
        """Return the sums of a batch.

        Args:
            chosen: [N, H], as `select` has returned it for this batch.
            head: projects hidden states to the vocabulary.
        """

    def sums_of_logits(self, logits: Tensor, targets: Tensor) -> Sums:
        """Return the same sums from whole logits, in plain torch operators and the dtype of the logits.

        It is the reference that `sums` is checked against.

        Args:
            logits: [N, V], final: scaled and capped. targets: int64 [N], IGNORE where nothing is learned.
        """

    def count(self, batch: Batch) -> int:
        """Return what a batch adds to the divisor, counted in the batch itself.

        Over all ranks this adds up to `divisors`.
        """

    def divisors(self, examples: Examples) -> np.ndarray:
        """Return what each document adds to the divisor of a step, which its sums are divided by: int64 [D].

        Counted on the host before an epoch begins, so every rank knows the divisor of all ranks without asking.
        """

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return what is logged, train/loss among it, from the means of the sums; None: there is no mean."""
