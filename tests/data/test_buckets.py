"""The buckets that are chosen are the best there are."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from sftkit.data.batches.pack import choose_buckets


def padded_positions(lengths: np.ndarray, buckets: tuple[int, ...], rows_in_batch=lambda _: 1) -> int:
    """Positions of an epoch: each document in its smallest bucket, batches filled up with empty rows."""
    which = np.searchsorted(buckets, lengths)
    rows = np.bincount(which, minlength=len(buckets)).tolist()
    return sum(-(-n // rows_in_batch(t)) * rows_in_batch(t) * t for n, t in zip(rows, buckets, strict=True))


def by_brute_force(lengths: np.ndarray, candidates: list[int], k: int, rows_in_batch=lambda _: 1) -> int:
    *others, last = candidates
    sets = (chosen for n in range(k) for chosen in combinations(others, n))
    return min(padded_positions(lengths, (*chosen, last), rows_in_batch) for chosen in sets)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("seed", range(5))
def test_no_other_buckets_pad_less(k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(3, 0.7, rng.integers(1, 60)).astype(int) + 1, 80)
    every_multiple = list(range(8, -(-int(lengths.max()) // 8) * 8 + 1, 8))
    chosen = choose_buckets(lengths, k, max_length=80)
    assert len(chosen) <= k
    assert padded_positions(lengths, chosen) == by_brute_force(lengths, every_multiple, min(k, len(every_multiple)))


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_empty_rows_that_fill_the_last_batch_of_a_bucket_count(k: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 81, 70)
    candidates = np.unique(-(-lengths // 8) * 8).tolist()

    def rows(row_length: int) -> int:
        return 4 * 80 // row_length

    chosen = choose_buckets(lengths, k, max_length=80, rows_in_batch=rows)
    assert padded_positions(lengths, chosen, rows) == by_brute_force(lengths, candidates, k, rows)


def test_buckets_ascend_hold_every_document_and_never_exceed_max_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 102, 500)
    buckets = choose_buckets(lengths, 5, max_length=101)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == 101  # not 104
    assert all(bucket % 8 == 0 for bucket in buckets[:-1])
    assert choose_buckets(np.array([3, 9, 17]), 2, max_length=101)[-1] == 24


def test_data_of_few_lengths_needs_few_buckets() -> None:
    assert choose_buckets(np.array([10, 12, 16, 40]), 8, max_length=64) == (16, 40)
    assert choose_buckets(np.array([5]), 4, max_length=64) == (8,)
