"""Speed, utilisation, memory, shapes and data of the steps between two logged lines, a window; and how often the host
waits for the device. Names, units and formulas: docs/metrics.md.

A line is logged before every save, so no checkpoint has to keep the sums of an open window.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from sftkit.data.batches import epoch, pack
from sftkit.data.batches.loader import Batches, StepBatches
from sftkit.data.types import Examples
from sftkit.models.kind import kind_of
from sftkit.models.structure import Work, attention_windows, train_flops
from sftkit.objectives.objective import Objective, Totals, nll_of
from sftkit.runtime.hardware import memory_counters, peak_flops, peak_memory_gib
from sftkit.runtime.start import Runtime
from sftkit.tracking.names import Progress, StepOutcome, progress_of

SYNC = "called a synchronizing CUDA operation"
"Part of torch's warning in its sync debug mode (c10/cuda/CUDAFunctions.cpp)."


class SyncCounter:
    """Counts how often the host waits for the GPU, from torch's own sync debug mode."""

    def __init__(self, device: torch.device) -> None:
        self.num_syncs: int | None = 0 if device.type == "cuda" else None
        "waits so far; None: there is no GPU to wait for"
        self._shown: set[tuple[str, str, int]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count waits within the context. Every other warning is passed on, once."""
        if self.num_syncs is None:
            yield
            return
        # A switch of the whole process, put back afterwards. Warnings are recorded here, so others
        # are shown again below.
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            warnings.filterwarnings("always", message=SYNC)
            # A prototype in torch, and not thread-local: waits of other threads count too (pytorch/pytorch#62092).
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in seen:
            known = (str(warning.message), warning.filename, warning.lineno)
            if SYNC in known[0]:
                self.num_syncs += 1
            elif known not in self._shown:
                self._shown.add(known)
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)


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
        tokens = np.bincount(self._examples.source, self._examples.lengths, len(self._examples.source_names))
        passes = {source.name: math.ceil(source.repeat) for source in batches.mixture.sources}
        self._pass_tokens = [max(n, 1.0) / passes.get(name, 1) for name, n in zip(self.sources, tokens, strict=True)]
        self._run_tokens = np.zeros(len(tokens), np.int64)
        "tokens of each source in the logged steps of the run"
        self._before = Progress()
        "progress before this window"
        self.total_step_seconds = 0.0
        self.seen_targets = self.planned_targets = 0
        """targets of all logged steps: as counted in the batches of all ranks, and as planned, which is what
        gradients are divided by"""
        self._several = False
        "whether steps are of several adapters, which may share a source"
        self._reset()

    def _reset(self) -> None:
        """Begin a new window."""
        self._steps = self._tokens = self._targets = self._positions = self._pairs = self._encoded = 0
        self._edges = 0  # targets with logits of their own: those that documents of a tree share have them once
        self._shared = self._own_divisor = self._divisor = self._skipped_divisor = 0
        self._learned = np.zeros(len(self._examples.source_names), np.int64)
        "targets of each source in the steps that were not skipped"
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
        counts = self._tokens, self._edges, self._pairs, self._seconds(), self._encoded, self._shared
        return self._before.plus(*counts)

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
        self._edges += step_batches.num_targets - step_batches.targets_again
        # In a pipeline only the last stage has a loss: targets that every stage counted would add up to several
        # times as many.
        if self._rt.has_loss:
            self._own_divisor += sum(map(self._objective.count, step_batches.micro_batches))
        self._positions += step_batches.num_positions
        # (query, key) pairs that the layers' windows allow, summed over layers; 0 where those are unknown.
        lengths = np.asarray(step_batches.document_lengths, np.int64)
        shared = np.asarray(
            step_batches.document_shared, np.int64
        )  # in trees, whose shared positions are computed once
        self._shared += int(shared.sum())
        for (window, chunked), count in (self._windows or {}).items():
            pairs = (int(epoch.causal_pairs(some, window, chunked=chunked).sum()) for some in (lengths, shared))
            self._pairs += count * (next(pairs) - next(pairs))
        self._encoded += len(step_batches.document_lengths) if self._encoder_positions else 0
        self._skew += step_batches.rank_skew - 1.0
        self._divisor += step_batches.divisor
        self._several |= bool(step_batches.adapters)
        self._learned += np.asarray(step_batches.source_targets)
        # Chosen on the device: the host does not know yet whether the step was skipped, and must not wait for it here.
        usable = torch.where(outcome.flags.skipped > 0, 0.0, outcome.sums.vector)
        self._sums.add_(Totals(outcome.sums.names, usable))
        self._grad_norm = outcome.grad_norm

    def add_skipped(self, steps: Sequence[StepBatches]) -> None:
        """Exclude steps of this window that were skipped from the means."""
        for step_batches in steps:
            self._skipped_divisor += step_batches.divisor
            self._learned -= np.asarray(step_batches.source_targets)

    def read(self) -> dict[str, float | None]:
        """Return the window's metrics and begin a new one; every rank must call it. Waits for the device, once."""
        # Sums over all ranks: means are over the targets of the steps that were not skipped. Reading sums is the one
        # wait for the device in a window. Times are taken after it, so that they hold whole steps.
        sums, waits, peaks = self._exchange()
        means = self._sums.means_of(sums, self._divisor - self._skipped_divisor)
        self.planned_targets += self._divisor
        # Add the window to the totals of the run.
        seconds = self._seconds()
        counts = self._tokens, self._edges, self._pairs, seconds, self._encoded, self._shared
        self._before = self._before.plus(*counts)
        self.total_step_seconds += seconds
        # Rates: None where the model's FLOPs or the GPU's peak are unknown.
        computed = self._tokens - self._shared
        work = Work(computed, self._edges, self._pairs, self._encoded, self._encoder_positions)
        flops = train_flops(self._orig_model, work)
        peak = self._peak * self._rt.world_size if self._peak else None
        total = max(int(self._source_tokens.sum()), 1)
        self._run_tokens += self._source_tokens
        each = zip(self.sources, self._source_tokens, self._run_tokens, self._pass_tokens, strict=True)
        of_sources: dict[str, float | None] = {}
        for name, count, of_run, of_pass in each:
            of_sources[f"data/share/{name}"] = count / total
            of_sources[f"data/tokens/{name}"] = int(of_run)
            of_sources[f"data/epochs/{name}"] = of_run / of_pass
        of_sums = dict(zip(self._sums.names, sums, strict=True))
        learned = max(int(self._learned.sum()), 1)
        for source, (name, targets) in enumerate(zip(self.sources, self._learned.tolist(), strict=True)):
            if (key := nll_of(source)) in of_sums:  # as in a run with several sources
                of_sources[f"data/target_share/{name}"] = targets / learned
                of_sources[f"train/{name}/loss"] = of_sums[key] / targets if targets else None
        encoded = {"data/encoded": self._encoded, "perf/encoded_per_sec": self._encoded / seconds}
        trees = {
            "perf/unique_tok_per_sec": computed / seconds,
            "perf/unique_tok_per_sec_per_gpu": computed / seconds / self._rt.world_size,
            "data/tree_factor": self._tokens / max(computed, 1),
        }
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
            "data/padding_pct": 100.0 * (1.0 - computed / max(self._positions, 1)),
            "data/target_pct": 100.0 * self._targets / max(self._tokens, 1),
            **(trees if self.shapes.layout.kind == "tree" else {}),
            **(encoded if self._encoder_positions else {}),
            **(of_sources if len(self.sources) > 1 and not self._several else {}),
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
        tokens = dict(zip(self.sources, self._run_tokens.tolist(), strict=True))
        return {"shapes": shapes, "undeclared": self.shapes.undeclared, "source_tokens": tokens}

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
        known = counts.get("source_tokens", {})
        self._run_tokens += [known.get(name, 0) for name in self.sources]

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

    def __init__(self, layout: pack.Layout, parts: int) -> None:
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
