"""Speed, utilisation and padding between two logged lines. Names, units and formulas: docs/metrics.md."""

from __future__ import annotations

import math
import time

import torch
from transformers import PreTrainedModel

from sftkit.anatomy import train_flops
from sftkit.config import LossConfig
from sftkit.data.loader import StepBatches
from sftkit.hardware import peak_flops, peak_memory_gib
from sftkit.runtime import Runtime
from sftkit.step import StepOutcome


class Meter:
    """Counts what happened since the last `read`; the losses and norms stay on the device until then."""

    def __init__(self, orig_model: PreTrainedModel, loss: LossConfig, rt: Runtime) -> None:
        self._orig_model, self._loss, self._rt = orig_model, loss, rt
        self._peak = peak_flops(rt.device) if rt.precision == "bf16" else None
        self.total_tokens = 0
        self.total_step_seconds = 0.0
        self._reset()

    def _reset(self) -> None:
        self._steps = self._tokens = self._targets = self._positions = self._pairs = self._left_out = 0
        self._wait_seconds = self._paused_seconds = self._skew = 0.0
        self._sums = torch.zeros(4, device=self._rt.device)
        self._grad_norm = torch.zeros((), device=self._rt.device)
        self._start = time.perf_counter()

    def start(self) -> None:
        """The window begins now."""
        self._start = time.perf_counter()

    @property
    def seen_tokens(self) -> int:
        """Document tokens since the start of the run, this window included."""
        return self.total_tokens + self._tokens

    def waited(self, seconds: float) -> None:
        """Time the loop stood still for data."""
        self._wait_seconds += seconds

    def paused(self, seconds: float) -> None:
        """Time spent in evaluation and checkpoints, which is not training time."""
        self._paused_seconds += seconds

    def add(self, step_batches: StepBatches, outcome: StepOutcome) -> None:
        """One step. The sums of one that is not finite are left out here, its targets by `left_out`."""
        self._steps += 1
        self._tokens += step_batches.num_tokens
        self._targets += step_batches.num_targets
        self._positions += step_batches.num_positions
        self._pairs += step_batches.attention_pairs
        self._skew += step_batches.rank_skew - 1.0
        self._sums += torch.where(outcome.flags[1] > 0, 0.0, outcome.sums)
        self._grad_norm = outcome.grad_norm

    def left_out(self, num_targets: int) -> None:
        """A step of this window turned out not to be finite: its targets are in no mean."""
        self._left_out += num_targets

    def read(self) -> dict[str, float | None]:
        """The window's metrics; every rank must call it. Waits for the device, once."""
        targets = self._targets - self._left_out
        means = (value / targets if targets else None for value in self._rt.sum(self._sums).tolist())
        objective, nll, correct, entropy = means
        seconds = time.perf_counter() - self._start - self._paused_seconds
        self.total_tokens += self._tokens
        self.total_step_seconds += seconds
        flops = train_flops(self._orig_model, self._tokens, self._targets, self._pairs)
        peak = self._peak * self._rt.world_size if self._peak else None
        values: dict[str, float | None] = {
            "train/loss": nll,
            "train/grad_norm": _finite(float(self._grad_norm)),
            "perf/tok_per_sec": self._tokens / seconds,
            "perf/target_tok_per_sec": self._targets / seconds,
            "perf/mfu": flops / seconds / peak if peak else None,
            "perf/step_seconds": seconds / max(self._steps, 1),
            "perf/data_wait_pct": 100.0 * self._wait_seconds / seconds,
            "perf/peak_memory_gib": peak_memory_gib(self._rt.device),
            "data/rank_skew_pct": 100.0 * self._skew / max(self._steps, 1),
            "data/padding_pct": 100.0 * (1.0 - self._tokens / max(self._positions, 1)),
        }
        if self._loss.z_loss or self._loss.label_smoothing:
            values["train/objective"] = objective
        if self._loss.token_metrics:
            values |= {"train/token_accuracy": correct, "train/entropy": entropy}
        self._reset()
        return values


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
