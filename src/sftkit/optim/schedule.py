"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from fractions import Fraction

from sftkit.config.schema import OptimConfig


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Return the learning rate of optimizer step 1..total_steps."""
    warmup = math.ceil(share(optim.warmup_ratio, total_steps))
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.schedule == "constant":
        return optim.lr
    decay = max(round(share(optim.decay_ratio, total_steps)), 1) if optim.schedule == "wsd" else total_steps - warmup
    # Counted up to the step before, so that the first step of a decay has the full rate and the last is not lost at 0.
    progress = min(max((step - 1 - (total_steps - decay)) / decay, 0.0), 1.0)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1.0 - progress
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * remaining)


def share(ratio: float, total_steps: int) -> Fraction:
    """Return the exact product with the decimal number that a recipe writes: in floats 0.07 of
    100 steps is more than 7."""
    return Fraction(str(ratio)) * total_steps
