"""The seam of objectives: what a new one has to say. The script of a stage names it; loop, engines and metrics ask it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from sftkit.data.collate import Batch
from sftkit.data.types import Examples
from sftkit.models.kind import Head
from sftkit.objectives.sums import Sums


class Objective(Protocol):
    """What is minimised, as sums: batches, micro-batches and ranks add up, and the step divides once."""

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the sums beside the loss, in the order in which `sums` gives them."""

    @property
    def watched(self) -> str:
        """The one whose mean a person watches: train/loss, spikes, the loss in messages."""

    def select(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The hidden states that `sums` needs, so that the others are freed before it: [N, H].

        Args:
            hidden: [B, C, H] of the batch's local positions.
        """

    def sums(self, chosen: Tensor, batch: Batch, head: Head) -> Sums:
        """The sums of a batch.

        Args:
            chosen: what `select` gave for it.
            head: what projects hidden states to the vocabulary.
        """

    def sums_of_logits(self, logits: Tensor, targets: Tensor) -> Sums:
        """The same sums from whole logits, in plain torch operators and the dtype of the logits: the side that the rest is
        checked against.

        Args:
            logits: [N, V], final: scaled and capped. targets: int64 [N], IGNORE where nothing is learned.
        """

    def count(self, batch: Batch) -> int:
        """What a batch adds to the divisor, counted in the batch itself: of all ranks' it adds up to that of `divisors`."""

    def divisors(self, examples: Examples) -> np.ndarray:
        """What each document adds to the number that the sums of a step are divided by: int64 [D].

        Counted on the host before an epoch begins, so every rank knows the divisor of all ranks without asking.
        """

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """What is logged of the means of the sums, train/loss among it."""
