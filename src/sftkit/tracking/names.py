"""Every name in metrics.jsonl and evals.jsonl: its unit, and which value stands for a whole run.
Formulas: docs/metrics.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

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
