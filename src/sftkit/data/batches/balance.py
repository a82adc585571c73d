"""Which rank computes which row: in each micro-batch every rank gets about the same attention work.

The rows of a step all have the same length, so the work that grows with positions (the linear layers) is equal on all
ranks already. What differs is attention, whose cost is quadratic in the length of a document.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain

import numpy as np


def row_pairs(
    lengths: np.ndarray, rows: Sequence[tuple[int, ...]], row_lengths: np.ndarray | int, max_doc_length: int
) -> np.ndarray:
    """Return the (query, key) pairs that causal attention computes in each row, int64 [R]: of its
    documents and its padding.

    Kernels see padding as documents of at most max_doc_length positions (`collate`), so it costs like them.

    Args:
        lengths: int [D], positions of each document. rows: R rows of document indices.
        row_lengths: int [R], or one for all.
    """
    docs = np.fromiter(chain.from_iterable(rows), np.int64)
    row = np.repeat(np.arange(len(rows)), np.fromiter(map(len, rows), np.int64, len(rows)))
    # float64 sums are exact: below 2**53 for rows of up to 10**8 positions
    pairs = np.bincount(row, weights=_pairs(lengths[docs]), minlength=len(rows)).astype(np.int64)
    used = np.bincount(row, weights=lengths[docs], minlength=len(rows)).astype(np.int64)
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
    """Return the largest work of a rank over the mean of all, 1.0 if all have the same; takes
    `assign_rows`'s costs and result."""
    by_rank = costs[assigned].sum((0, 2))
    return float(by_rank.max() / by_rank.mean())


def _even_shares(costs: np.ndarray, descending: np.ndarray, shares: int) -> np.ndarray:
    """Return equally many rows for each share, int64 [W, B]: each row goes to the lightest
    share that still has room."""
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
