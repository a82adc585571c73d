"""The global batches of an epoch, and which of them each step of a run takes: the plans of its epochs, one after the
other, also if batch size or seed was changed in the middle of an epoch.

A pure function of lengths, layout and plan segments (seeds and batch sizes), equal on every rank, so that a resume
needs only the step number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from sftkit.data.batches import balance
from sftkit.data.batches.pack import Layout, PlanSegment, pack


@dataclass(frozen=True)
class GlobalBatch:
    """The rows of one optimizer step over all ranks, as document indices; an empty row is padding."""

    row_length: int
    rows: tuple[tuple[int, ...], ...]
    pairs: tuple[int, ...]
    "(query, key) pairs that attention computes in each row, padding included: the part of the cost that differs by row"

    def micro_batches(self, layout: Layout, rank: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield the rows of each micro-batch of this rank; the union over ranks and micro-batches
        is `rows`, then padding.

        One rank takes them in order; several so that each has about the same work (`balance.assign_rows`).
        """
        _, assigned = self._assigned_rows(layout)
        for micro in assigned[:, rank].tolist():
            yield tuple(self.rows[i] if i < len(self.rows) else () for i in micro)

    def rank_skew(self, layout: Layout) -> float:
        """Return the (query, key) pairs of the busiest rank in this step, divided by the mean of all
        ranks; 1.0: all the same."""
        return balance.skew(*self._assigned_rows(layout))

    def _assigned_rows(self, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
        """Return (costs of the rows, empty ones that fill the last micro-batch included; rows of
        each rank), as `assign_rows` does."""
        count = layout.micro_rows(self.row_length) * layout.accumulation * layout.world_size
        empty = balance.row_pairs(np.zeros(0, np.int64), [()], self.row_length, layout.max_doc_length)
        costs = np.concatenate([self.pairs, np.repeat(empty, count - len(self.rows))])
        return costs, balance.assign_rows(costs, layout.accumulation, layout.world_size)


def plan_epoch(
    lengths: np.ndarray, layout: Layout, seed: int | None, epoch: int, documents: np.ndarray | None = None
) -> list[GlobalBatch]:
    """Plan all global batches of an epoch. Each document appears exactly once; the last batch
    is filled with empty rows.

    Args:
        seed: with the epoch it decides the shuffle; None: documents, rows and batches keep their order.
        documents: those that the epoch still has to take, indices in ascending order; None: all.
    """
    assert lengths.max(initial=0) <= layout.row_lengths[-1]
    # One generator for all draws of an epoch, in a fixed order, so that every rank shuffles alike.
    rng = None if seed is None else np.random.default_rng([seed, epoch])
    order = np.arange(len(lengths)) if documents is None else documents
    if rng is not None:
        order = order[rng.permutation(len(order))]
    batches = []
    buckets = layout.row_lengths[-1:] if layout.dynamic else layout.row_lengths
    # Each document goes to the smallest bucket that holds it; there is one bucket for other layouts.
    for low, row_length in zip((0, *buckets), buckets, strict=False):
        mine = order[(lengths[order] > low) & (lengths[order] <= row_length)]
        rows: list[tuple[int, ...]] = [(i,) for i in mine.tolist()]
        if layout.kind == "packed":
            rows = pack(lengths, mine, row_length, layout.docs_per_row)
        if rng is not None:
            rows = [rows[j] for j in rng.permutation(len(rows))]
        # After the shuffle: padding is in the last batch of a bucket, and that batch somewhere in the epoch.
        rows += [()] * (-len(rows) % layout.rows(row_length))
        batches += _global_batches(lengths, layout, row_length, rows)
    return batches if rng is None else [batches[j] for j in rng.permutation(len(batches))]


def _global_batches(
    lengths: np.ndarray, layout: Layout, row_length: int, rows: list[tuple[int, ...]]
) -> list[GlobalBatch]:
    """Make a batch of every `layout.rows(row_length)` rows; a dynamic one is as long as its longest document needs."""
    size = layout.rows(row_length)
    batches = [tuple(rows[j : j + size]) for j in range(0, len(rows), size)]
    row_lengths = [row_length] * len(batches)
    if layout.dynamic:
        row_lengths = [layout.padded(max(int(lengths[i]) for row in batch for i in row)) for batch in batches]
    pairs = balance.row_pairs(lengths, rows, np.repeat(row_lengths, size), layout.max_doc_length).tolist()
    return [
        GlobalBatch(t, batch, tuple(pairs[j * size : (j + 1) * size]))
        for j, (t, batch) in enumerate(zip(row_lengths, batches, strict=True))
    ]


def num_positions(plan: Sequence[GlobalBatch], layout: Layout) -> int:
    """Return the row positions that a plan computes over all ranks, padding included."""
    return sum(layout.positions(batch.row_length) for batch in plan)


def with_segment(earlier: Sequence[PlanSegment], step: int, layout: Layout, seed: int) -> tuple[PlanSegment, ...]:
    """Return the segments of a run that goes on at `step`, with a new one only if batches are made differently
    from there on.

    Args:
        earlier: the segments before `step`, of the checkpoint that is resumed; empty: one segment from the beginning.
    """
    now = PlanSegment(step if earlier else 0, seed, layout.global_batch_size, layout.budget_rows)
    return tuple(earlier) if earlier and earlier[-1][1:] == now[1:] else (*earlier, now)


class Order:
    """The global batches of all epochs of a run. State: only the epochs that were planned last, and
    where epochs begin."""

    def __init__(self, lengths: np.ndarray, layout: Layout, segments: Sequence[PlanSegment]) -> None:
        """Begin with no epoch planned.

        Args:
            lengths: int [D], positions of each document.
        """
        self._lengths, self._segments = lengths, segments
        self._layouts = [
            replace(layout, global_batch_size=segment.global_batch_size, budget_rows=segment.budget_rows)
            for segment in segments
        ]
        self._starts = [0]
        "step after which each epoch begins, as far as known"
        self.plan = lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> list[GlobalBatch]:
        """Return all global batches of an epoch. Each document appears exactly once,
        whatever was changed on the way."""
        start, left = self._start(epoch), np.arange(len(self._lengths))
        batches: list[GlobalBatch] = []
        ends = [segment.after_step for segment in self._segments[1:]]
        for segment, layout, end in zip(self._segments, self._layouts, [*ends, None], strict=True):
            # how many batches this segment has in the epoch; None: the rest
            steps = None if end is None else end - start - len(batches)
            if steps is not None and steps <= 0:
                continue
            planned = plan_epoch(self._lengths, layout, segment.seed, epoch, documents=left)
            batches += planned[:steps]
            if steps is None or len(planned) <= steps:
                break
            # The next segment plans what this one has not taken, so each document is still met once in the epoch.
            left = np.setdiff1d(left, [i for batch in planned[:steps] for row in batch.rows for i in row])
        return batches

    def _start(self, epoch: int) -> int:
        """Return the step after which an epoch begins."""
        # An epoch begins where the one before it ends, so all before it are planned once.
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + len(self.plan(len(self._starts) - 1)))
        return self._starts[epoch]

    def num_steps(self, epochs: int | None, max_steps: int | None = None) -> int:
        """Return the optimizer steps of a run: those of so many epochs, but at most max_steps; None is no limit."""
        if epochs is None:
            assert max_steps is not None, "checked with the recipe"
            return max_steps
        epoch, most = 0, math.inf if max_steps is None else max_steps
        while epoch < epochs and self._start(epoch) < most:
            epoch += 1
        return int(min(self._start(epoch), most))

    def batches(self, first_step: int, last_step: int) -> Iterator[tuple[int, int, GlobalBatch]]:
        """Yield (step, epoch, global batch) of steps first_step + 1 .. last_step."""
        step, epoch = 0, 0
        while step < last_step:
            plan = self.plan(epoch)
            first = max(first_step - step, 0)
            for number, batch in enumerate(plan[first : last_step - step], start=step + first + 1):
                yield number, epoch, batch
            step += len(plan)
            epoch += 1
