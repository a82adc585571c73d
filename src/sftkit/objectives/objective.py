"""The protocol of objectives: what a new one must define. The script of a stage names the objective; loop, engines and
metrics call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from sftkit.data.batches.collate import Batch
from sftkit.data.types import Examples
from sftkit.objectives.sums import Sums
from sftkit.ops.linear_cross_entropy import Head


class Objective(Protocol):
    """What is minimised, as sums: they add up over micro-batches and ranks, and the step divides once."""

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the names of the sums other than the loss, in the order in which `sums` returns them."""

    @property
    def monitored(self) -> str:
        """Return the name of the sum whose mean is monitored: for train/loss, for spikes, and in messages."""

    def select(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the hidden states that `sums` needs, [N, H]; the others can then be freed.

        Args:
            hidden: [B, C, H] of the batch's local positions.
        """

    def sums(self, selected: Tensor, batch: Batch, head: Head) -> Sums:
        """Return the sums of a batch.

        Args:
            selected: [N, H], what `select` returned for this batch.
            head: projects hidden states to the vocabulary.
        """

    def sums_of_logits(self, logits: Tensor, targets: Tensor) -> Sums:
        """Return the same sums from whole logits, in plain torch operators and the dtype of the logits.

        `sums` is checked against it.

        Args:
            logits: [N, V], final: scaled and capped. targets: int64 [N], IGNORE where nothing is learned.
        """

    def count(self, batch: Batch) -> int:
        """Return what a batch adds to the divisor, counted in the batch itself: summed over ranks
        it equals `divisors`."""

    def divisors(self, examples: Examples) -> np.ndarray:
        """Return what each document adds to the divisor of its step: int64 [D].

        Counted on the host before an epoch begins, so every rank knows the global divisor without communication.
        """

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the metrics to log, among them train/loss, from the means of the sums; None: no mean."""
