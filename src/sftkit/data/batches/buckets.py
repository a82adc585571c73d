"""Which row lengths waste least on the lengths of the data at hand: an exact dynamic programme."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_MULTIPLE = 8  # of the row lengths


def choose_buckets(
    lengths: np.ndarray, k: int, max_length: int, rows_in_batch: Callable[[int], int] = lambda _: 1
) -> tuple[int, ...]:
    """Return at most k row lengths, ascending, in which an epoch of one document per row takes the fewest positions.

    Candidates are the lengths that occur, rounded up to multiples of 8 and to max_length at most; the last one chosen
    holds the longest document. A row goes to its smallest bucket, and batches of `rows_in_batch(row_length)` rows are
    filled up with empty ones. O(k M^2) for M candidates, as one vector operation per candidate and bucket.

    Args:
        lengths: int [D], positions of each document, none above max_length.
    """
    candidates, counts = np.unique(np.minimum(-(-lengths // _MULTIPLE) * _MULTIPLE, max_length), return_counts=True)
    docs = np.concatenate([[0], np.cumsum(counts)])  # docs[j]: documents of the first j candidates
    # least[j]: positions of those documents in the best buckets found so far, the last of them candidate j - 1
    least = np.array([0, *(_positions(docs[j : j + 1], c, rows_in_batch)[0] for j, c in enumerate(candidates, 1))])
    splits = []  # for each further bucket, by j: how many of the first j candidates the buckets before it hold
    for _ in range(1, min(k, len(candidates))):
        split, better = [0], [0]
        for j, c in enumerate(candidates, 1):
            totals = least[:j] + _positions(docs[j] - docs[:j], c, rows_in_batch)
            split.append(int(totals.argmin()))
            better.append(int(totals[split[j]]))
        splits.append(split)
        least = np.array(better)
    ends = [len(candidates)]
    for split in reversed(splits):
        ends.append(split[ends[-1]])  # split[0] is 0: fewer buckets were enough
    return tuple(int(candidates[j - 1]) for j in reversed(ends) if j)


def _positions(documents: np.ndarray, row_length: np.integer, rows_in_batch: Callable[[int], int]) -> np.ndarray:
    """Return how many positions the whole batches take that hold so many documents, one per row."""
    rows = rows_in_batch(int(row_length))
    return -(-documents // rows) * rows * int(row_length)
