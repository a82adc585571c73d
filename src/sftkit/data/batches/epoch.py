"""Plan documents that are laid out together: their global batches, which rank computes which row, and which positions
of it. `order` decides which documents these are.

The rows of a step all have the same length, so the work that grows with positions (the linear layers) is equal on all
ranks. Attention, whose cost is quadratic in the length of a document, is balanced: in each micro-batch every rank gets
about the same attention work.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import Literal

import numpy as np

from sftkit.config.topology import Topology
from sftkit.data.batches.pack import Layout, pack
from sftkit.errors import ConfigError, config_error


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
    """Reject a layout with a row that does not split evenly.

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
        words = {"uneven": ", ".join(map(str, uneven)), "split": split, "better": better, "longest": better[-1]}
        raise config_error("buckets that do not split", **words)
    if layout.dynamic and layout.pad_multiple % multiple:
        wanted = _nearest(layout.pad_multiple, multiple, multiple)
        raise config_error("rows that do not split", multiple=layout.pad_multiple, split=split, wanted=wanted)
    if uneven:
        setting, least = ("data.row_length", layout.max_length) if layout.packs else ("data.max_length", multiple)
        wanted = _nearest(uneven[0], multiple, least)
        raise ConfigError(f"{setting}: rows of {uneven[0]} positions do not split into {split}: take {wanted}")


def _nearest(number: int, multiple: int, least: int) -> str:
    """Format the multiples just below and above a number that is none, at least `least`, for messages."""
    below = number // multiple * multiple
    return f"{below} or {below + multiple}" if below >= least else str(below + multiple)


def row_pairs(
    lengths: np.ndarray, counts: np.ndarray, row_lengths: np.ndarray | int, max_doc_length: int
) -> np.ndarray:
    """Return the (query, key) pairs that causal attention computes in each row, int64 [R]: of its documents
    and its padding.

    Kernels see padding as documents of at most max_doc_length positions (`collate`), so it costs like them.

    Args:
        lengths: int [M], positions of the documents, one row after the other. counts: int [R], documents of each row.
        row_lengths: int [R], or one for all.
    """
    row = np.repeat(np.arange(len(counts)), counts)
    # float64 sums are exact: below 2**53 for rows of up to 10**8 positions
    pairs = np.bincount(row, weights=_pairs(lengths), minlength=len(counts)).astype(np.int64)
    used = np.bincount(row, weights=lengths, minlength=len(counts)).astype(np.int64)
    whole, rest = np.divmod(row_lengths - used, max_doc_length)
    of_rows: np.ndarray = pairs + whole * _pairs(max_doc_length) + _pairs(rest)
    return of_rows


def assign_rows(costs: np.ndarray, accumulation: int, ranks: int) -> np.ndarray:
    """Assign rows to every rank in every micro-batch, so that all ranks have about the same work, in each micro-batch
    and in the step.

    Rows of similar cost go into the same micro-batch of all ranks, the most expensive first: ranks that exchange
    weights or gradients wait for the slowest one in each. Within it the next most expensive row goes to the cheapest
    share that has room; the most expensive share goes to the rank with the least work so far.

    Args:
        costs: int [A * W * B] of the rows of a step: A micro-batches, W ranks, B rows.

    Returns:
        int64 [A, W, B], indices into costs, each once; one rank: in order.
    """
    if ranks == 1:
        return np.arange(len(costs)).reshape(accumulation, 1, -1)
    # Stable sorts: with equal costs every rank must still come to the same assignment.
    descending = np.argsort(-costs, kind="stable").reshape(accumulation, -1)
    assigned = np.empty((accumulation, ranks, len(costs) // (accumulation * ranks)), np.int64)
    totals = np.zeros(ranks, np.int64)
    for micro, rows in enumerate(descending):
        shares = _even_shares(costs, rows, ranks)
        most_expensive_first = np.argsort(-costs[shares].sum(1), kind="stable")
        assigned[micro, np.argsort(totals, kind="stable")] = shares[most_expensive_first]
        totals += costs[assigned[micro]].sum(1)
    return assigned


def skew(costs: np.ndarray, assigned: np.ndarray) -> float:
    """Return the largest work of a rank over the mean of all, 1.0 if all have the same; takes `assign_rows`'s
    costs and result."""
    by_rank = costs[assigned].sum((0, 2))
    return float(by_rank.max() / by_rank.mean())


def _even_shares(costs: np.ndarray, descending: np.ndarray, shares: int) -> np.ndarray:
    """Return equally many rows for each share, int64 [W, B]: each row goes to the lightest share that
    still has room."""
    room = len(descending) // shares
    assigned: list[list[int]] = [[] for _ in range(shares)]
    # A heap of (work so far, share), from which a share drops out when it is full.
    lightest = [(0, share) for share in range(shares)]
    for row, cost in zip(descending.tolist(), costs[descending].tolist(), strict=True):
        total, share = heapq.heappop(lightest)
        assigned[share].append(row)
        if len(assigned[share]) < room:
            heapq.heappush(lightest, (total + cost, share))
    return np.array(assigned)


def causal_pairs(lengths: np.ndarray, window: int | None = None, *, chunked: bool = False) -> np.ndarray:
    """Return the (query, key) pairs of causal attention in each document: the sum over its positions i of min(i + 1,
    window) or, with chunks, of i % window + 1.

    Args:
        lengths: int [D], positions of each document. window: most keys a query sees, itself included; None: all.
        chunked: a query sees no key of the chunk before its own; chunks have `window` positions.

    Returns:
        int64 [D].
    """
    if window is None:
        return _pairs(lengths)
    if chunked:
        whole, rest = np.divmod(lengths, window)
        chunks: np.ndarray = whole * _pairs(window) + _pairs(rest)
        return chunks
    ramp = np.minimum(lengths, window)
    pairs: np.ndarray = _pairs(ramp) + (lengths - ramp).astype(np.int64) * window
    return pairs


def _pairs(lengths: np.ndarray | int) -> np.ndarray:
    """Return n (n + 1) / 2 of each length n, int64: the pairs without a window."""
    wide = np.asarray(lengths, np.int64)
    return wide * (wide + 1) // 2


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The R rows of one optimizer step over all ranks, with M documents; an empty row is padding."""

    row_length: int
    documents: np.ndarray
    "int64 [M], indices of the documents, one row after the other"
    borders: np.ndarray
    "int64 [R + 1]; row r has documents[borders[r] : borders[r + 1]]"
    pairs: np.ndarray
    """int64 [R], (query, key) pairs that attention computes in each row, padding included: the part of the cost that
    differs by row"""

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Return the document indices of each row."""
        documents = self.documents.tolist()
        return tuple(tuple(documents[a:b]) for a, b in pairwise(self.borders.tolist()))

    def micro_batches(self, layout: Layout, rank: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield the rows of each micro-batch of this rank; the union over ranks and micro-batches is
        `rows`, then padding.

        One rank takes them in order; several so that each has about the same work (`balance.assign_rows`).
        """
        _, assigned = _assigned_rows(self, layout)
        for micro in assigned[:, rank].tolist():
            yield tuple(self.rows[i] if i < len(self.rows) else () for i in micro)

    def rank_skew(self, layout: Layout) -> float:
        """Return the (query, key) pairs of the busiest rank in this step, divided by the mean of all ranks; 1.0:
        all the same."""
        return skew(*_assigned_rows(self, layout))


@lru_cache(maxsize=1)  # rows and skew of a step follow from it
def _assigned_rows(batch: GlobalBatch, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return (costs of the rows, empty ones that fill the last micro-batch included; rows of each rank), as
    `assign_rows` does."""
    costs = batch.pairs
    missing = layout.micro_rows(batch.row_length) * layout.accumulation * layout.world_size - len(costs)
    if missing:
        none = np.zeros(missing, np.int64)
        costs = np.concatenate([costs, row_pairs(none[:0], none, batch.row_length, layout.max_doc_length)])
    return costs, assign_rows(costs, layout.accumulation, layout.world_size)


def plan_epoch(
    lengths: np.ndarray, layout: Layout, seed: int | None, epoch: int, documents: np.ndarray | None = None
) -> list[GlobalBatch]:
    """Plan all global batches of an epoch. Each document appears exactly once; the last batch is filled
    with empty rows.

    Args:
        seed: with the epoch it decides the shuffle; None: documents, rows and batches keep their order.
        documents: those that the epoch still has to take, indices in ascending order; None: all.
    """
    # One generator for all draws of an epoch, in a fixed order, so that every rank shuffles alike.
    rng = None if seed is None else np.random.default_rng([seed, epoch])
    order = np.arange(len(lengths)) if documents is None else documents
    if rng is not None:
        order = order[rng.permutation(len(order))]
    sizes = lengths[order]
    assert sizes.max(initial=0) <= layout.row_lengths[-1]
    batches = []
    buckets = layout.row_lengths[-1:] if layout.dynamic else layout.row_lengths
    # Each document goes to the smallest bucket that holds it; there is one bucket for other layouts.
    for low, row_length in zip((0, *buckets), buckets, strict=False):
        mine, counts = plan_rows(lengths, layout, row_length, order[(sizes > low) & (sizes <= row_length)], rng)
        # After the shuffle: padding is in the last batch of a bucket, and that batch somewhere in the epoch.
        counts = np.append(counts, np.zeros(-len(counts) % layout.rows(row_length), np.int64))
        batches += global_batches(lengths, layout, row_length, mine, counts)
    return batches if rng is None else [batches[j] for j in rng.permutation(len(batches))]


def plan_rows(
    lengths: np.ndarray, layout: Layout, row_length: int, documents: np.ndarray, rng: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray]:
    """Lay documents out in rows, in their order. Return them one row after the other, and the number in each row.

    Args:
        rng: shuffles the rows; None: they keep their order.
    """
    counts = np.ones(len(documents), np.int64)
    if layout.packs:
        rows = pack(lengths, documents, row_length, layout.docs_per_row)
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        documents = np.fromiter(chain.from_iterable(rows), np.int64, len(documents))
    if rng is None:
        return documents, counts
    chosen = rng.permutation(len(counts))
    starts = (np.cumsum(counts) - counts)[chosen]
    counts = counts[chosen]
    # For each document its row's old start, plus its number within the row.
    places = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(len(documents))
    return documents[places], counts


def global_batches(
    lengths: np.ndarray, layout: Layout, row_length: int, documents: np.ndarray, counts: np.ndarray
) -> list[GlobalBatch]:
    """Make a batch of every `layout.rows(row_length)` rows; a dynamic one is as long as its longest document needs."""
    size = layout.rows(row_length)
    borders = np.concatenate([[0], np.cumsum(counts)])
    sizes = lengths[documents]
    starts = range(0, len(counts), size)
    row_lengths = [row_length] * len(starts)
    if layout.dynamic:
        row_lengths = [layout.padded(int(sizes[borders[j] : borders[j + size]].max())) for j in starts]
    pairs = row_pairs(sizes, counts, np.repeat(row_lengths, size), layout.max_doc_length)
    return [
        GlobalBatch(
            t, documents[borders[j] : borders[j + size]], borders[j : j + size + 1] - borders[j], pairs[j : j + size]
        )
        for j, t in zip(starts, row_lengths, strict=True)
    ]


def num_positions(plan: Sequence[GlobalBatch], layout: Layout) -> int:
    """Return the row positions that a plan computes over all ranks, padding included."""
    return sum(layout.positions(batch.row_length) for batch in plan)
