"""The progress of a run since its first step, over all its starts: curves can be drawn over it as over `step`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from sftkit.models.structure import Work, train_flops

PROGRESS = "progress"
"Name of the progress in the state of a checkpoint."


@dataclass(frozen=True)
class Progress:
    """Counts of all ranks together."""

    tokens: int = 0
    targets: int = 0
    pairs: int = 0
    "(query, key) pairs, summed over layers: see Meter"
    seconds: float = 0.0
    "time in steps, without evaluation, checkpoints and warm-up"
    is_whole: bool = True
    "False: it goes on from a checkpoint of an earlier version, which has only the tokens"
    encoded: int = 0
    "inputs of an encoder"

    def plus(self, tokens: int, targets: int, pairs: int, seconds: float, encoded: int = 0) -> Progress:
        """Return the progress after so much more."""
        counts = (self.tokens + tokens, self.targets + targets, self.pairs + pairs, self.seconds + seconds)
        return Progress(*counts, self.is_whole, self.encoded + encoded)

    def axes(
        self, orig_model: PreTrainedModel, *, counts_attention: bool, encoder_positions: int = 0
    ) -> dict[str, float | None]:
        """Return train/tokens, train/flops and train/seconds; None for what is not known.

        Args:
            counts_attention: False: not all work of this model can be counted.
            encoder_positions: positions of one input of its encoder; 0: it has none.
        """
        flops = train_flops(orig_model, Work(self.tokens, self.targets, self.pairs, self.encoded, encoder_positions))
        return {
            "train/tokens": self.tokens,
            "train/flops": flops if self.is_whole and counts_attention else None,
            "train/seconds": self.seconds if self.is_whole else None,
        }


def progress_of(resumed: Mapping[str, Any]) -> Progress:
    """Return how far a run was at the checkpoint that it goes on from; `resumed`: what Checkpoints.resume returned."""
    if PROGRESS in resumed:
        return Progress(**resumed[PROGRESS])
    # Of an earlier version: it has the tokens alone, so the counts are whole only where no step was done.
    return Progress(tokens=resumed.get("tokens", 0), is_whole=resumed["step"] == 0)
