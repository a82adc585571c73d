"""An epoch is a plan made before it starts: a pure function of lengths, seed, epoch and layout, equal on every rank."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sftkit.config import DataConfig, TrainConfig
from sftkit.errors import ConfigError

log = logging.getLogger(__name__)
OPEN_ROWS = 1024  # rows that best-fit keeps open: enough for > 99 % filled rows, and the shuffle stays a shuffle


@dataclass(frozen=True)
class Layout:
    """The row lengths that a run declares up front, and how many rows of each make a global and a micro-batch."""

    kind: str
    row_lengths: tuple[int, ...]
    global_batch_size: int
    micro_batch_size: int
    world_size: int

    @property
    def max_length(self) -> int:
        return self.row_lengths[-1]

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on each rank."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    def rows(self, row_length: int) -> int:
        """Rows of this length in a global batch: shorter rows come in proportionally larger numbers."""
        return self.global_batch_size * (self.max_length // row_length)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (rows, row_length) that a micro-batch may have. Nothing else ever reaches the compiled model."""
        return tuple((self.micro_batch_size * (self.max_length // t), t) for t in self.row_lengths)


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step over all ranks: rows of document indices; an empty row is padding."""

    row_length: int
    rows: tuple[tuple[int, ...], ...]

    def micro_batches(self, layout: Layout, rank: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        """The rows of each micro-batch of this rank; the union over ranks and micro-batches is `rows`."""
        size = layout.micro_batch_size * (layout.max_length // self.row_length)
        for micro in range(layout.accumulation):
            start = (micro * layout.world_size + rank) * size
            yield self.rows[start : start + size]


def make_layout(data: DataConfig, max_length: int, train: TrainConfig, world_size: int) -> Layout:
    """The layout of a run; the micro-batch is lowered to the largest that divides a rank's share of the global batch."""
    share = train.global_batch_size // world_size
    micro = max(m for m in range(1, min(train.micro_batch_size, share) + 1) if share % m == 0)
    lengths = data.bucket_lengths if data.layout == "bucketed" and data.bucket_lengths else (max_length,)
    if lengths[-1] != max_length:
        raise ConfigError(f"data.bucket_lengths: the last one, {lengths[-1]}, must be the row length, {max_length}")
    if micro != train.micro_batch_size:
        log.info("micro-batch of %d rows, the most up to %d that divides %d", micro, train.micro_batch_size, share)
    return Layout(data.layout, tuple(lengths), train.global_batch_size, micro, world_size)


def pack(lengths: np.ndarray, order: Sequence[int] | np.ndarray, row_length: int) -> list[tuple[int, ...]]:
    """Best-fit: each document goes whole into the fullest open row that still holds it. Every index appears once."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (space left, row), ascending
    for i in order:
        length = int(lengths[i])
        at = bisect.bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            space, row = open_rows.pop(at)
        else:
            space, row = row_length, len(rows)
            rows.append([])
        rows[row].append(int(i))
        if space - length > 0:
            bisect.insort(open_rows, (space - length, row))
            if len(open_rows) > OPEN_ROWS:
                open_rows.pop(0)
    return [tuple(row) for row in rows]


def plan_epoch(lengths: np.ndarray, layout: Layout, seed: int, epoch: int, shuffle: bool = True) -> list[GlobalBatch]:
    """All global batches of an epoch. Each document appears exactly once; the last batch is filled with empty rows."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths)) if shuffle else np.arange(len(lengths))
    batches = []
    for low, row_length in zip((0, *layout.row_lengths), layout.row_lengths, strict=False):
        mine = order[(lengths[order] > low) & (lengths[order] <= row_length)]
        rows: list[tuple[int, ...]] = [(int(i),) for i in mine]
        if layout.kind == "packed":
            rows = pack(lengths, mine, row_length)
        if shuffle:
            rows = [rows[j] for j in rng.permutation(len(rows))]
        size = layout.rows(row_length)
        rows += [()] * (-len(rows) % size)
        batches += [GlobalBatch(row_length, tuple(rows[j : j + size])) for j in range(0, len(rows), size)]
    return [batches[j] for j in rng.permutation(len(batches))] if shuffle else batches


def padding_share(lengths: np.ndarray, layout: Layout) -> float:
    """Share of all row positions of one epoch that hold no document."""
    plan = plan_epoch(lengths, layout, seed=0, epoch=0)
    positions = sum(batch.row_length * len(batch.rows) for batch in plan)
    return 1.0 - float(lengths.sum()) / positions
