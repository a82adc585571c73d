"""Which rows of a global batch a process computes, and which positions of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sftkit.config.topology import Topology
from sftkit.data.batches.pack import Layout
from sftkit.errors import ConfigError


@dataclass(frozen=True)
class RowShard:
    """The positions of each row that one of `num_shards` processes sharing the rows computes."""

    kind: Literal["full", "columns", "chunks"]
    """columns (tensor parallel): the index-th of num_shards equal chunks, embedded and projected here; attention sees
    all. chunks (context parallel): numbers index and 2 num_shards - 1 - index of 2 num_shards chunks, as late queries
    see more keys."""
    index: int
    num_shards: int

    @property
    def multiple(self) -> int:
        """Return what the length of every row must be a multiple of."""
        return 2 * self.num_shards if self.kind == "chunks" else self.num_shards

    def columns(self, row_length: int) -> np.ndarray:
        """Return the positions of a row that belong to this shard, in its order: int64 [T / num_shards]."""
        assert row_length % self.multiple == 0, f"rows of {row_length} in {self.multiple} chunks"
        chunks = np.arange(row_length).reshape(self.multiple, -1)
        at = [self.index, self.multiple - 1 - self.index] if self.kind == "chunks" else [self.index]
        return chunks[at].ravel()


FULL_ROW = RowShard("full", 0, 1)


def row_shard(topology: Topology, rank: int) -> RowShard:
    """Return which positions of its group's rows a rank computes."""
    index = rank % topology.ranks_per_row
    if topology.context > 1:
        return RowShard("chunks", index, topology.context)
    return RowShard("columns", index, topology.tensor) if topology.tensor > 1 else FULL_ROW


@dataclass(frozen=True)
class RankRows:
    """Which rows of a global batch a process computes, and which positions of each."""

    rank: int = 0
    "number of its group; the layout.world_size groups of processes hold different rows"
    shard: RowShard = FULL_ROW
    "the positions of each row that this process of its group computes"


ALL_ROWS = RankRows()
"The rows of a single process."


def check_row_shard(layout: Layout, shard: RowShard) -> None:
    """Refuse a layout with a row that does not split evenly.

    Raises:
        ConfigError: it does not; with the setting that decides the row length and the nearest values that do.
    """
    multiple = shard.multiple
    each = "two for each of {} context" if shard.kind == "chunks" else "one for each of {} tensor"
    split = f"{multiple} chunks of equal length ({each.format(shard.num_shards)}-parallel processes)"
    lengths = layout.row_lengths
    if layout.kind == "bucketed":  # a longer document of the validation data takes a row of max_length
        lengths = tuple(sorted({*lengths, layout.max_length}))
    uneven = [length for length in lengths if length % multiple]
    if layout.kind == "bucketed" and uneven:
        better = sorted({-(-length // multiple) * multiple for length in lengths})
        raise ConfigError(
            f"data.bucket_lengths: rows of {', '.join(map(str, uneven))} positions do not split into {split}: take "
            f"data.bucket_lengths={better} and data.max_length={better[-1]}, or data.layout=packed"
        )
    if layout.dynamic and layout.pad_multiple % multiple:
        wanted = _nearest(layout.pad_multiple, multiple, multiple)
        raise ConfigError(
            f"data.pad_multiple: rows of a multiple of {layout.pad_multiple} positions do not split into {split}: take "
            f"{wanted}, with a multiple of it as data.max_length"
        )
    if uneven:
        packed = layout.kind == "packed"
        setting, least = ("data.row_length", layout.max_length) if packed else ("data.max_length", multiple)
        wanted = _nearest(uneven[0], multiple, least)
        raise ConfigError(f"{setting}: rows of {uneven[0]} positions do not split into {split}: take {wanted}")


def _nearest(number: int, multiple: int, least: int) -> str:
    """Format the multiples just below and above a number that is none, at least `least`, for messages."""
    below = number // multiple * multiple
    return f"{below} or {below + multiple}" if below >= least else str(below + multiple)
