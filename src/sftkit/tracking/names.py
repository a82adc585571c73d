"""What a step and a run have to show: a check that the run made of itself, the outcome of a step on the device, the
progress over all starts of the run, and every name in metrics.jsonl and evals.jsonl with its unit and the value
that stands for a whole run. Formulas: docs/metrics.md.
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
    """Return what a check has found that has nothing to check in this run."""
    return f"{DOES_NOT_APPLY}: {reason}"


@dataclass(frozen=True)
class Flags:
    """The flags of a step, equal on all ranks, in one small vector, so that one copy brings them to the host."""

    vector: Tensor
    "fp32 [11], the same on every rank"

    @classmethod
    def of(cls, stop: Tensor, nonfinite: Tensor, skipped: Tensor, verdict: Tensor | None = None) -> Flags:
        """Combine the flags, each 0-d, with `verdict`, fp32 [2, 4], from Spikes.judge; None: not compared."""
        flags = torch.stack([stop, nonfinite, skipped.to(stop.dtype)]).float()
        return cls(torch.cat([flags, flags.new_zeros(8) if verdict is None else verdict.flatten()]))

    @property
    def stop(self) -> Tensor:
        """Return the number of ranks that request a stop, 0-d."""
        return self.vector[0]

    @property
    def nonfinite(self) -> Tensor:
        """Return the number of ranks whose loss is not finite, 0-d; 1 if only the gradient norm is not."""
        return self.vector[1]

    @property
    def skipped(self) -> Tensor:
        """Return 1 if the update was skipped, 0-d."""
        return self.vector[2]

    @property
    def verdict(self) -> Tensor:
        """Return what Spikes.judge found: [2, 4]."""
        return self.vector[3:].view(2, 4)


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
    pairs: int = 0
    "(query, key) pairs, summed over layers: see Meter"
    seconds: float = 0.0
    "time in steps, without evaluation, checkpoints and warm-up"
    is_whole: bool = True
    "False: it continues a checkpoint of an earlier version, which has only the tokens"
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
    """Return how far a run was at the checkpoint that it continues; `resumed`: what Checkpoints.resume returned."""
    if PROGRESS in resumed:
        return Progress(**resumed[PROGRESS])
    # A checkpoint of an earlier version has only the tokens, so the counts are whole only if no step was done.
    return Progress(tokens=resumed.get("tokens", 0), is_whole=resumed["step"] == 0)


Summary = Literal["last", "min", "max", "mean"]


@dataclass(frozen=True)
class Metric:
    """One documented name; <words> in it stand for any source, task, metric, phase or number."""

    name: str
    unit: str
    summary: Summary = "last"
    "which value of its curve stands for the run"


METRICS = (
    Metric("compile/graphs", "graphs", "max"),
    Metric("compile/recompiles", "graphs", "max"),
    Metric("compile/fallbacks", "calls", "max"),
    Metric("compile/graph_breaks", "graphs", "max"),
    Metric("compile/cuda_graphs", "graphs", "max"),
    Metric("compile/seconds", "s", "max"),
    Metric("compile/seconds/<phase>", "s", "max"),
    Metric("compile/cache_hits", "hits", "max"),
    Metric("shape/id", "index"),
    Metric("shape/undeclared", "micro-batches", "max"),
    Metric("shape/<rows>x<length>", "micro-batches", "max"),
    Metric("health/spikes", "steps", "max"),
    Metric("health/skipped_steps", "steps", "max"),
    Metric("health/nonfinite_steps", "steps", "max"),
    Metric("health/rank_skew_pct", "%", "mean"),
    Metric("train/loss", "nats per target"),
    Metric("train/objective", "nats per target"),
    Metric("train/token_accuracy", "0 to 1"),
    Metric("train/aux_loss", "-"),
    Metric("train/expert_load_max", "even shares"),
    Metric("train/expert_load_min", "even shares"),
    Metric("train/entropy", "nats per target"),
    Metric("train/grad_norm", "-"),
    Metric("train/lr", "-"),
    Metric("train/epoch", "epochs"),
    Metric("train/tokens", "tokens"),
    Metric("train/flops", "FLOPs"),
    Metric("train/seconds", "s"),
    Metric("val/loss", "nats per target", "min"),
    Metric("val/bpb", "bits per byte", "min"),
    Metric("val/<source>/loss", "nats per target", "min"),
    Metric("val/<source>/bpb", "bits per byte", "min"),
    Metric("eval/centred_mean", "up to 1", "max"),
    Metric("eval/families/acc", "0 to 1", "max"),
    Metric("eval/<task>/low", "as the task"),
    Metric("eval/<task>/high", "as the task"),
    Metric("eval/<task>/<metric>", "0 to 1", "max"),
    Metric("perf/tok_per_sec", "tokens/s", "mean"),
    Metric("perf/tok_per_sec_per_gpu", "tokens/s", "mean"),
    Metric("perf/target_tok_per_sec", "tokens/s", "mean"),
    Metric("perf/target_tok_per_sec_per_gpu", "tokens/s", "mean"),
    Metric("perf/encoded_per_sec", "inputs/s", "mean"),
    Metric("perf/mfu", "0 to 1", "mean"),
    Metric("perf/step_seconds", "s", "mean"),
    Metric("perf/step_p50_seconds", "s", "mean"),
    Metric("perf/step_p95_seconds", "s", "mean"),
    Metric("perf/data_wait_pct", "%", "mean"),
    Metric("perf/pipeline_bubble_pct", "%"),
    Metric("perf/host_syncs", "waits", "max"),
    Metric("mem/peak_gib", "GiB", "max"),
    Metric("mem/reserved_gib", "GiB", "max"),
    Metric("mem/alloc_retries", "retries", "max"),
    Metric("mem/ooms", "errors", "max"),
    Metric("data/padding_pct", "%", "mean"),
    Metric("data/target_pct", "%", "mean"),
    Metric("data/encoded", "inputs"),
    Metric("data/dropped_rows", "rows"),
    Metric("data/truncated_rows", "rows"),
    Metric("data/unused_columns", "columns"),
    Metric("data/share/<source>", "0 to 1", "mean"),
    Metric("ckpt/block_seconds", "s", "max"),
    Metric("ckpt/write_seconds", "s", "max"),
    Metric("ckpt/bytes", "bytes"),
)

RUN_VALUES = {
    "run/state": "word",
    "run/signal": "name",
    "run/error": "text",
    "proof/passed": "checks",
    "proof/failed": "checks",
    "proof/not_checked": "checks",
    "preflight/documents": "documents",
    "preflight/tokens": "tokens",
    "preflight/target_pct": "%",
    "preflight/duplicate_pct": "%",
    "preflight/padding_pct": "%",
    "preflight/epochs": "epochs",
    "preflight/estimated_gib": "GiB",
    "preflight/warnings_count": "warnings",
    "validate/passed": "criteria",
    "validate/failed": "criteria",
    "validate/not_checked": "criteria",
    "validate/speedup": "times",
}
"Values of a whole run that a dashboard gets, with their units; they are in no row."
TABLES = (
    *("samples", "eval/results", "proof", "preflight/sources", "preflight/layouts", "preflight/findings"),
    *("preflight/warnings", "validate/verdicts", "validate/speed"),
)
"Tables on a dashboard."

# What each <word> of a pattern may stand for, as a regular expression.
_WORDS = {"rows": r"[0-9]+", "length": r"[0-9]+", "source": r".+", "metric": r"[^/]+", "task": r"[^/]+", "phase": r".+"}


def regex(name: str) -> str:
    """Return a regular expression, without anchors, of the names that a pattern stands for."""
    return re.sub(r"<(\w+)>", lambda word: _WORDS[word[1]], name)


@cache
def find_metric(name: str) -> Metric | None:
    """Return the metric that a name in metrics.jsonl or evals.jsonl belongs to; None: it is not documented."""
    # A name without <words> fits itself alone, and METRICS has it before the patterns that it fits as well.
    return next((metric for metric in METRICS if re.fullmatch(regex(metric.name), name)), None)


def summary_of(name: str) -> Summary:
    """Return which value of its curve stands for the run; "last" for a name that is not documented."""
    metric = find_metric(name)
    return "last" if metric is None else metric.summary
