"""Spikes: losses and gradient norms far above those of earlier steps, found on the device before the update."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sftkit.tracking.window import Window

_WINDOW = 128
"Number of earlier steps that a step is compared with."
ENOUGH = 32
"With fewer earlier steps than this there are no spikes."
SIGMAS = 6.0
"A spike is more than this many standard deviations above the mean."
LEAST = 0.01
"A standard deviation counts as at least this share of the mean."
JUDGED = ("loss", "gradient norm")


class Spike(NamedTuple):
    """A value far above earlier ones."""

    name: str
    value: float
    mean: float
    deviation: float

    def __str__(self) -> str:
        before = f"the mean before it, {self.mean:.4g} (sd {self.deviation:.2g})"
        return f"{self.name} {self.value:.4g} is far above {before}"


class Spikes:
    """The values of the last 128 steps that were not skipped, and the rule that compares the next step with them.

    All ranks compare the same numbers in the same order, so they decide alike, to the bit. The values of a skipped
    step are not kept: if the loss stays high, steps are skipped until numerics.max_skips ends the run.
    """

    def __init__(self, on_spike: Literal["warn", "skip", "error"], monitored: str, device: torch.device) -> None:
        """Begin without a history.

        Args:
            monitored: name of the objective's sum whose mean is compared.
        """
        self.monitored = monitored
        self._leaves_out = on_spike != "warn"
        self._history = torch.full((_WINDOW, len(JUDGED)), math.nan, dtype=torch.float64, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Compare a step with the history, and add it unless it is skipped. No host sync.

        Args:
            loss: 0-d, per target, of all ranks. norm: 0-d. finite: bool 0-d; false: the step is skipped in any case.

        Returns:
            (fp32 [2, 4]: for each of JUDGED its value, the mean and the standard deviation before it, and 1 for a
            spike; bool 0-d: whether the step is skipped)
        """
        # NaN marks an empty place of the history, so the count of known ones needs no number on the host.
        values = torch.stack([loss.double(), norm.double()])
        known = ~self._history.isnan()
        count = known.sum(0)
        divisor = count.clamp(min=1)
        mean = torch.where(known, self._history, 0.0).sum(0) / divisor
        variance = torch.where(known, self._history - mean, 0.0).square().sum(0) / divisor
        # After a long plateau the standard deviation is tiny, and any step would be many of them away.
        deviation = torch.maximum(variance.sqrt(), LEAST * mean.abs())
        # A NaN compares as False: it would be no spike, enter the history and spoil every later mean.
        usable = finite & values.isfinite().all()
        spikes = usable & (count >= ENOUGH) & (values > mean + SIGMAS * deviation)
        skipped = ~finite | spikes.any() if self._leaves_out else ~finite
        # Shifted, not written in a ring: the place would be a number on the host that differs after a skipped step.
        later = torch.cat([self._history[1:], values[None]])
        self._history.copy_(torch.where(usable & ~skipped, later, self._history))
        return torch.stack([values, mean, deviation, spikes.double()], dim=1).float(), skipped

    def window(self) -> Window:
        """Return the history, for a checkpoint. Waits for the device."""
        taken = self._history[~self._history.isnan().any(1)].tolist()
        return {"losses": [loss for loss, _ in taken], "norms": [norm for _, norm in taken]}

    def restore_window(self, window: Window) -> None:
        """Resume from a checkpoint, before the first step. Earlier versions kept two histories, of unequal lengths."""
        count = min(len(window["losses"]), len(window["norms"]))
        if count:
            taken = torch.tensor([window["losses"][-count:], window["norms"][-count:]], dtype=torch.float64)
            self._history[-count:] = taken.T.to(self._history.device)


def spikes_in(verdict: Tensor) -> list[Spike]:
    """Return the spikes of a step from the verdict of `judge`: fp32 [2, 4], on the host."""
    rows = zip(JUDGED, verdict.tolist(), strict=True)
    return [Spike(name, value, mean, deviation) for name, (value, mean, deviation, is_spike) in rows if is_spike]
