"""The results of a step and of a run: a check that the run makes of itself, the outcome of a step on the device, the
progress over all starts of the run, and every name in metrics.jsonl and evals.jsonl with its unit and the value that
stands for a whole run. Formulas: docs/metrics.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sftkit.errors import texts
from sftkit.models.structure import Work, train_flops
from sftkit.objectives.objective import Totals
from sftkit.rundir.names import DOES_NOT_APPLY


@dataclass(frozen=True)
class Check:
    """One check, ready to show."""

    name: str
    ok: bool | None
    "None: it does not apply here, or could not be made"
    found: str
    expected: str
    how: str
    "what was compared with what"


def does_not_apply(reason: str) -> str:
    """Return the finding of a check that does not apply to this run."""
    return f"{DOES_NOT_APPLY}: {reason}"


class Flags:
    """The flags of a step, equal on all ranks, in one small vector, so that one copy brings them to the host."""

    def __init__(self, vector: Tensor) -> None:
        """Name the parts of fp32 [11]."""
        self.vector = vector
        self.stop, self.nonfinite, self.skipped, *_ = vector
        """0-d: the number of ranks that request a stop; that of ranks whose loss is not finite, 1 if only the gradient
        norm is not; 1 if the update was skipped"""
        self.verdict = vector[3:].view(2, 4)
        "what Spikes.judge found"

    @classmethod
    def of(cls, stop: Tensor, nonfinite: Tensor, skipped: Tensor, verdict: Tensor | None = None) -> Flags:
        """Combine the flags, each 0-d, with `verdict`, fp32 [2, 4], from Spikes.judge; None: not compared."""
        flags = torch.stack([stop, nonfinite, skipped.to(stop.dtype)]).float()
        return cls(torch.cat([flags, flags.new_zeros(8) if verdict is None else verdict.flatten()]))


NUM_FLAGS = 11


class StepOutcome(NamedTuple):
    """The results of a step as tensors on the device; the host has waited for none of them."""

    sums: Totals
    "this rank's, over its micro-batches"
    grad_norm: Tensor
    "fp32 0-d, global gradient norm before clipping, the same on every rank"
    flags: Flags
    losses: Tensor
    "fp32 (float64 of a model in float64) [A], the sum that is minimised in each of this rank's micro-batches"


PROGRESS = "progress"
"Name of the progress in the state of a checkpoint."


@dataclass(frozen=True)
class Progress:
    """Counts of all ranks together."""

    tokens: int = 0
    targets: int = 0
    "those that documents of a tree share count once"
    pairs: int = 0
    "(query, key) pairs, summed over layers: see Meter"
    seconds: float = 0.0
    "time in steps, without evaluation, checkpoints and warm-up"
    is_whole: bool = True
    "False: it continues a checkpoint of an earlier version, which has only the tokens"
    encoded: int = 0
    "inputs of an encoder"
    shared: int = 0
    "those of the tokens that were not computed, as other documents of their tree have them"

    def plus(
        self, tokens: int, targets: int, pairs: int, seconds: float, encoded: int = 0, shared: int = 0
    ) -> Progress:
        """Return the progress after so much more."""
        counts = (self.tokens + tokens, self.targets + targets, self.pairs + pairs, self.seconds + seconds)
        return Progress(*counts, self.is_whole, self.encoded + encoded, self.shared + shared)

    def axes(
        self, orig_model: PreTrainedModel, *, counts_attention: bool, encoder_positions: int = 0
    ) -> dict[str, float | None]:
        """Return train/tokens, train/flops and train/seconds; None for what is not known.

        Args:
            counts_attention: False: not all work of this model can be counted.
            encoder_positions: positions of one input of its encoder; 0: it has none.
        """
        computed = self.tokens - self.shared
        flops = train_flops(orig_model, Work(computed, self.targets, self.pairs, self.encoded, encoder_positions))
        return {
            "train/tokens": self.tokens,
            "train/flops": flops if self.is_whole and counts_attention else None,
            "train/seconds": self.seconds if self.is_whole else None,
        }


def progress_of(resumed: Mapping[str, Any]) -> Progress:
    """Return how far a run was at the checkpoint that it continues; `resumed`: what Checkpoints.resume returned."""
    if PROGRESS in resumed:
        return Progress(**resumed[PROGRESS])
    # A checkpoint of an earlier version has only the tokens, so the counts are whole only if no step was done.
    return Progress(tokens=resumed.get("tokens", 0), is_whole=resumed["step"] == 0)


Summary = Literal["last", "min", "max", "mean"]


@dataclass(frozen=True)
class Metric:
    """A documented name. <words> in it stand for any source, task, metric, phase or number."""

    name: str
    unit: str
    summary: Summary
    "which value of its curve stands for the run"


_TABLE: Any = texts("tracking/metrics.yaml")
METRICS = [Metric(name, one["unit"], one["summary"]) for one in _TABLE["metrics"] for name in one["names"]]
METRICS.sort(key=lambda metric: metric.name.count("<"))  # a name fits itself before a pattern that it fits as well
RUN_VALUES: dict[str, str] = _TABLE["run"]
"Values of a whole run that a dashboard gets, with their units; they are in no row."
TABLES: tuple[str, ...] = tuple(_TABLE["tables"])
"Tables on a dashboard."

# What each <word> of a pattern may stand for, as a regular expression.
_WORDS = dict.fromkeys(("adapter", "metric", "task"), r"[^/]+")
_WORDS |= {"rows": r"[0-9]+", "length": r"[0-9]+", "source": r".+", "phase": r".+"}


@cache
def find_metric(name: str) -> Metric | None:
    """Return the metric that a name in metrics.jsonl or evals.jsonl belongs to; None: it is not documented."""
    patterns = (re.sub(r"<(\w+)>", lambda word: _WORDS[word[1]], metric.name) for metric in METRICS)
    return next((metric for metric, one in zip(METRICS, patterns, strict=True) if re.fullmatch(one, name)), None)


def summary_of(name: str) -> Summary:
    """Return which value of its curve stands for the run; "last" for a name that is not documented."""
    metric = find_metric(name)
    return "last" if metric is None else metric.summary
