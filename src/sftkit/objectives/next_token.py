"""Next-token prediction and captioning: cross entropy of each target token.

Each prediction depends on all earlier tokens of the document, and for a caption on the encoder's output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sftkit.config.schema import LossConfig
from sftkit.data.batches.collate import IGNORE, Batch
from sftkit.data.types import Examples
from sftkit.objectives.objective import Sums
from sftkit.ops.linear_cross_entropy import Head, linear_nll


@dataclass(frozen=True)
class NextToken:
    """The mean negative log-likelihood over target tokens, its smoothed form or that of loss.dft, plus z_loss *
    log-partition squared.

    It also measures `nll` (nats), `correct` (number of targets that are the argmax) and `entropy` (nats) of the
    predicted distributions; the last two are 0 unless loss.token_metrics is set.
    """

    config: LossConfig
    measured = ("nll", "correct", "entropy")
    monitored = "nll"

    def select(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the hidden states of the positions with a target, and of a few others as filler: [P, H]."""
        return hidden.flatten(0, 1).index_select(0, batch.target_index)

    def sums(self, selected: Tensor, batch: Batch, head: Head) -> Sums:
        """Return the sums, computed in chunks, without logits of the whole batch."""
        targets = batch.targets.flatten().index_select(0, batch.target_index)
        found = linear_nll(selected, head, targets, self.config)
        return Sums(found.loss, {"nll": found.nll, "correct": found.correct, "entropy": found.entropy})

    def sums_of_logits(self, logits: Tensor, targets: Tensor) -> Sums:
        """Return the sums from torch's own cross entropy."""
        smoothing = self.config.label_smoothing
        is_target = targets != IGNORE
        nll = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
        loss = nll
        # A separate call: the monitored nll is measured without smoothing.
        if smoothing:
            loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
        if self.config.dft:
            each = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
            loss = (each.detach().neg().exp() * each).sum()
        if self.config.z_loss:
            loss = loss + self.config.z_loss * logits.logsumexp(-1)[is_target].square().sum()
        correct = entropy = nll.new_zeros(())
        if self.config.token_metrics:
            correct = (logits.argmax(-1) == targets).sum().to(nll.dtype)
            entropy = torch.special.entr(logits[is_target].softmax(-1)).sum()
        return Sums(loss, {"nll": nll.detach(), "correct": correct, "entropy": entropy.detach()})

    def count(self, batch: Batch) -> int:
        """Return the number of target tokens."""
        return batch.num_targets

    def divisors(self, examples: Examples) -> np.ndarray:
        """Return the number of target tokens of each document."""
        return examples.num_targets

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return train/loss; train/objective if it differs; token_accuracy and entropy if measured."""
        values = {"train/loss": means["nll"]}
        if self.config.z_loss or self.config.label_smoothing or self.config.dft:
            values["train/objective"] = means["loss"]
        if self.config.token_metrics:
            values |= {"train/token_accuracy": means["correct"], "train/entropy": means["entropy"]}
        return values


class Caption(NextToken):
    """The sums of NextToken, always with token metrics.

    Texts are short and have few tokens, so the share of correct predictions, train/token_accuracy, is informative in
    addition to the captions that an evaluation generates.
    """

    def __init__(self, config: LossConfig) -> None:
        super().__init__(replace(config, token_metrics=True))
