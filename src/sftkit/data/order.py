"""Which documents each step of a run takes: the plans of its epochs, one after the other, also if batch size or seed
was changed in the middle of an epoch. A pure function of lengths, layout and segments, so that a resume needs only the
step number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from sftkit.data.epoch import GlobalBatch, plan_epoch
from sftkit.data.pack import Layout, PlanSegment


def with_segment(earlier: Sequence[PlanSegment], step: int, layout: Layout, seed: int) -> tuple[PlanSegment, ...]:
    """Return the segments of a run that goes on at `step`, with a new one only if batches are made differently from
    there on.

    Args:
        earlier: the segments before `step`, of the checkpoint that is resumed; empty: one segment from the beginning.
    """
    now = PlanSegment(step if earlier else 0, seed, layout.global_batch_size, layout.budget_rows)
    return tuple(earlier) if earlier and earlier[-1][1:] == now[1:] else (*earlier, now)


class Order:
    """The global batches of all epochs of a run. State: only the epochs that were planned last, and where epochs
    begin."""

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
            left = np.setdiff1d(left, [i for batch in planned[:steps] for row in batch.rows for i in row])
        return batches

    def _start(self, epoch: int) -> int:
        """Return the step after which an epoch begins."""
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + len(self.plan(len(self._starts) - 1)))
        return self._starts[epoch]

    def num_steps(self, epochs: int | None, max_steps: int | None = None) -> int:
        """Return the optimizer steps of a run: those of so many epochs, but at most max_steps; None is no limit."""
        if epochs is None:
            assert max_steps is not None, "checked with the recipe"
            return max_steps
        steps = 0
        for epoch in range(epochs):
            if max_steps is not None and steps >= max_steps:
                break
            steps = self._start(epoch) + len(self.plan(epoch))
        return steps if max_steps is None else min(steps, max_steps)

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
