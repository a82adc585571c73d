"""Speed, utilisation, memory, shapes and data of the steps between two logged lines, a window. Names, units and
formulas: docs/metrics.md.

A line is logged before every save, so no checkpoint has to keep the sums of an open window.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from sftkit.data.batches.epoch import causal_pairs
from sftkit.data.batches.loader import Batches, StepBatches
from sftkit.data.batches.pack import Layout
from sftkit.data.types import Examples
from sftkit.models.kind import kind_of
from sftkit.models.structure import Work, attention_windows, train_flops
from sftkit.objectives.objective import Objective, Totals
from sftkit.runtime.hardware import memory_counters, peak_flops, peak_memory_gib
from sftkit.runtime.start import Runtime
from sftkit.tracking.names import Progress, StepOutcome, progress_of
from sftkit.tracking.trace import SyncCounter

RUN_COUNTS = "window"
"Name, in the state of a checkpoint, of the counts of the meter and of Health, each under its name."
RunCounts = dict[str, Any]
"JSON values, the same on every rank."


class Meter:
    """Adds up the metrics of a window, the steps since the last `read`; losses and norms stay on the
    device until then."""

    def __init__(self, orig_model: PreTrainedModel, objective: Objective, batches: Batches, rt: Runtime) -> None:
        """Begin a window; find out what can be counted for this model."""
        self._orig_model = orig_model
        self._objective = objective
        self._rt = rt
        self._examples = batches.examples
        self._windows = attention_windows(orig_model)
        self._encoder_positions = 0
        if batches.examples.encoder_inputs is not None:
            kind = kind_of(orig_model.config)
            self._encoder_positions = kind.encoder_positions(orig_model, batches.layout.max_length)
        # The datasheet's peak is that of bf16: an fp32 run has another one, and a share of it would mislead.
        self._peak = peak_flops(rt.device) if rt.precision == "bf16" else None
        "peak FLOPs per second of one GPU; None: the MFU is unknown"
        if self._peak and self._windows is None:
            self._peak = None
            rt.print("no MFU: the model has layers whose FLOPs are not known here")
        self.shapes = ShapeCounts(batches.layout, rt.topology.ranks_per_row)
        self.syncs = SyncCounter(rt.device)
        self._before = Progress()
        "progress before this window"
        self.total_step_seconds = 0.0
        self.seen_targets = self.planned_targets = 0
        """targets of all logged steps: as counted in the batches of all ranks, and as planned, which is what
        gradients are divided by"""
        self._reset()

    def _reset(self) -> None:
        """Begin a new window."""
        self._steps = self._tokens = self._targets = self._positions = self._pairs = self._encoded = 0
        self._own_divisor = self._divisor = self._skipped_divisor = 0
        self._wait_seconds = self._paused_seconds = self._skew = 0.0
        self._source_tokens = np.zeros(len(self._examples.source_names), np.int64)
        self._sums = Totals.zeros(self._objective.measured, self._rt.device)
        self._grad_norm = torch.zeros((), device=self._rt.device)
        self._start = time.perf_counter()

    def start(self) -> None:
        """Begin the window now."""
        self._start = time.perf_counter()

    @property
    def progress(self) -> Progress:
        """Return the progress since the start of the run, this window included."""
        return self._before.plus(self._tokens, self._targets, self._pairs, self._seconds(), self._encoded)

    def axes(self, progress: Progress | None = None) -> dict[str, float | None]:
        """Return train/tokens, train/flops and train/seconds so far, over which a dashboard can draw an evaluation.

        Args:
            progress: None: this window included.
        """
        return (progress or self.progress).axes(
            self._orig_model, counts_attention=self._windows is not None, encoder_positions=self._encoder_positions
        )

    @property
    def sources(self) -> list[str]:
        """Return the names of the sources, in the order of their counts."""
        return list(self._examples.source_names)

    def waited(self, seconds: float) -> None:
        """Add time that the loop waited for data."""
        self._wait_seconds += seconds

    def paused(self, seconds: float) -> None:
        """Add time spent in evaluation and checkpoints, which is not training time."""
        self._paused_seconds += seconds

    def add(self, step_batches: StepBatches, outcome: StepOutcome) -> None:
        """Count a step. The sums of a skipped step are excluded here, its divisor later by `add_skipped`."""
        self._steps += 1
        self.shapes.add(step_batches)
        self._source_tokens += np.asarray(step_batches.source_tokens)
        self._tokens += step_batches.num_tokens
        self._targets += step_batches.num_targets
        # In a pipeline only the last stage has a loss: targets that every stage counted would add up to several
        # times as many.
        if self._rt.has_loss:
            self._own_divisor += sum(map(self._objective.count, step_batches.micro_batches))
        self._positions += step_batches.num_positions
        # (query, key) pairs that the layers' windows allow, summed over layers; 0 where those are unknown.
        lengths = np.asarray(step_batches.document_lengths, np.int64)
        for (window, chunked), count in (self._windows or {}).items():
            self._pairs += count * int(causal_pairs(lengths, window, chunked=chunked).sum())
        self._encoded += len(step_batches.document_lengths) if self._encoder_positions else 0
        self._skew += step_batches.rank_skew - 1.0
        self._divisor += step_batches.divisor
        # Chosen on the device: the host does not know yet whether the step was skipped, and must not wait for it here.
        usable = torch.where(outcome.flags.skipped > 0, 0.0, outcome.sums.vector)
        self._sums.add_(Totals(outcome.sums.names, usable))
        self._grad_norm = outcome.grad_norm

    def add_skipped(self, divisor: int) -> None:
        """Exclude steps of this window that were skipped from the means. `divisor`: their sum."""
        self._skipped_divisor += divisor

    def read(self) -> dict[str, float | None]:
        """Return the window's metrics and begin a new one; every rank must call it. Waits for the device, once."""
        # Sums over all ranks: means are over the targets of the steps that were not skipped. Reading sums is the one
        # wait for the device in a window. Times are taken after it, so that they hold whole steps.
        sums, waits, peaks = self._exchange()
        means = self._sums.means_of(sums, self._divisor - self._skipped_divisor)
        self.planned_targets += self._divisor
        # Add the window to the totals of the run.
        seconds = self._seconds()
        self._before = self._before.plus(self._tokens, self._targets, self._pairs, seconds, self._encoded)
        self.total_step_seconds += seconds
        # Rates: None where the model's FLOPs or the GPU's peak are unknown.
        work = Work(self._tokens, self._targets, self._pairs, self._encoded, self._encoder_positions)
        flops = train_flops(self._orig_model, work)
        peak = self._peak * self._rt.world_size if self._peak else None
        total = max(int(self._source_tokens.sum()), 1)
        counts = zip(self.sources, self._source_tokens.tolist(), strict=True)
        shares = {f"data/share/{name}": count / total for name, count in counts}
        encoded = {"data/encoded": self._encoded, "perf/encoded_per_sec": self._encoded / seconds}
        values: dict[str, float | None] = {
            **self._objective.metrics(means),
            "train/grad_norm": norm if math.isfinite(norm := float(self._grad_norm)) else None,
            "perf/tok_per_sec": self._tokens / seconds,
            "perf/tok_per_sec_per_gpu": self._tokens / seconds / self._rt.world_size,
            "perf/target_tok_per_sec": self._targets / seconds,
            "perf/target_tok_per_sec_per_gpu": self._targets / seconds / self._rt.world_size,
            "perf/mfu": flops / seconds / peak if peak else None,
            "perf/step_seconds": seconds / max(self._steps, 1),
            # Ranks meet in each step, so all wait as long as the slowest.
            "perf/data_wait_pct": 100.0 * max(waits) / seconds,
            "perf/host_syncs": self.syncs.num_syncs,
            "mem/peak_gib": max(peaks),
            **memory_counters(self._rt.device),
            "data/padding_pct": 100.0 * (1.0 - self._tokens / max(self._positions, 1)),
            "data/target_pct": 100.0 * self._targets / max(self._tokens, 1),
            **(encoded if self._encoder_positions else {}),
            **(shares if len(shares) > 1 else {}),
            **skipped_rows(self._examples),
            **self.shapes.values(),
            "health/rank_skew_pct": 100.0 * self._skew / max(self._steps, 1),
            **self.axes(self._before),
        }
        self._reset()
        return values

    def _seconds(self) -> float:
        """Return the training seconds of the window so far."""
        return time.perf_counter() - self._start - self._paused_seconds

    def counts(self) -> RunCounts:
        """Return the counts since the start of the run, next to `progress`, for a checkpoint."""
        shapes = [[*shape, count] for shape, count in sorted(self.shapes.seen.items())]
        return {"shapes": shapes, "undeclared": self.shapes.undeclared}

    def resume(self, resumed: Mapping[str, Any]) -> None:
        """Take over progress and counts of a checkpoint, before the first step. What was declared then may not be now:
        micro-batches may have changed.

        Args:
            resumed: what Checkpoints.resume returned.
        """
        self._before = progress_of(resumed)
        # Checkpoints of earlier versions have no counts, or not all.
        counts = resumed.get(RUN_COUNTS, {}).get("meter", {})
        for rows, length, count in counts.get("shapes", ()):
            self.shapes.seen[rows, length] += count
        self.shapes.undeclared += counts.get("undeclared", 0)

    def _exchange(self) -> tuple[list[float], list[float], list[float]]:
        """Return (sums over ranks in the order of their names, each rank's seconds of waiting for data,
        each rank's peak in GiB)."""
        # A row for each kind of value, a column for each rank, zeros elsewhere: one sum then gathers them, with the
        # losses in the same collective.
        ranks = self._rt.world_size
        own = torch.zeros(3, ranks)
        own[:, self._rt.rank] = torch.tensor([self._wait_seconds, peak_memory_gib(self._rt.device), self._own_divisor])
        vector = self._sums.vector
        known = self._rt.sum(torch.cat([vector, own.flatten().to(vector.device)])).tolist()
        count = len(vector)
        waits, peaks, targets = (known[count + i * ranks : count + (i + 1) * ranks] for i in range(3))
        self.seen_targets += round(sum(targets))
        return known[:count], waits, peaks


class ShapeCounts:
    """Counts the shapes of the micro-batches that reach the compiled model, against those that the layout declares."""

    def __init__(self, layout: Layout, parts: int) -> None:
        """Begin to count. `parts`: processes that share a row."""
        self.layout = layout
        self._parts = parts
        self.seen: Counter[tuple[int, int]] = Counter()
        "(rows, row length) -> micro-batches of this rank since the start of the run"
        self.undeclared = 0
        "micro-batches of a shape that the layout did not declare when they ran"
        self._last = (0, 0)

    def add(self, step_batches: StepBatches) -> None:
        """Count the micro-batches of a step by the shapes that they have, whatever the plan says."""
        for batch in step_batches.micro_batches:
            rows, columns = batch.shape
            self._last = (rows, columns * self._parts)
            self.seen[self._last] += 1
            self.undeclared += not self.layout.declares(*self._last)

    def values(self) -> dict[str, float | None]:
        """Return shape/*: the counts of every declared shape; with symbolic sizes only those not declared."""
        declared = () if self.layout.dynamic else self.layout.shapes
        known = declared.index(self._last) if self._last in declared else None
        counts = {f"shape/{rows}x{length}": self.seen[rows, length] for rows, length in declared}
        return {"shape/id": known, **counts, "shape/undeclared": self.undeclared}


def skipped_rows(examples: Examples) -> dict[str, float | None]:
    """Return data/dropped_rows and data/truncated_rows: what became of the training rows before the first step; and
    data/unused_columns, the columns and keys of them that nothing reads."""
    totals = sum(map(Counter, examples.counts.values()), Counter[str]())
    dropped = totals["dropped_too_long"] + totals["dropped_no_target"] + totals["skipped_bad"]
    unused = sum(one.kind == "unused" for found in examples.findings.values() for one in found)
    counts = {"dropped_rows": dropped, "truncated_rows": totals["truncated"], "unused_columns": unused}
    return {f"data/{name}": count for name, count in counts.items()}
