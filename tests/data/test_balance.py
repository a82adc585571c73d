"""Rows on ranks: each document once, the same steps at every number of ranks, about the same work for all."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from helpers import make_examples

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.data.batches.epoch import GlobalBatch, RankRows, assign_rows, causal_pairs, plan_epoch, skew
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.pack import Layout, make_layout

LENGTHS = np.random.default_rng(1).integers(1, 65, 500)
KINDS = {
    "packed": DataConfig(train=()),
    "packed in longer rows": DataConfig(train=(), row_length=200),
    "bucketed": DataConfig(train=(), layout="bucketed", bucket_lengths=(16, 40, 64)),
    "fixed": DataConfig(train=(), layout="fixed"),
    "dynamic": DataConfig(train=(), layout="dynamic"),
}


def layout(kind: str, world_size: int = 1, micro: int = 2, batch: int = 8, lengths: np.ndarray = LENGTHS) -> Layout:
    train = TrainConfig(max_steps=1, global_batch_size=batch, micro_batch_size=micro)
    return make_layout(KINDS[kind], train, lengths, 64, world_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_ranks_compute_each_document_of_a_global_batch_once_in_equal_shapes(kind: str, world_size: int) -> None:
    made = layout(kind, world_size, micro=3, batch=24)
    for batch in plan_epoch(LENGTHS, made, seed=0, epoch=0):
        ranks = [list(batch.micro_batches(made, rank)) for rank in range(world_size)]
        assert ranks == [list(batch.micro_batches(made, rank)) for rank in range(world_size)]
        rows = [len(micro) for mine in ranks for micro in mine]
        assert rows == [made.micro_rows(batch.row_length)] * (made.accumulation * world_size)
        seen = Counter(i for mine in ranks for micro in mine for row in micro for i in row)
        assert seen == Counter(i for row in batch.rows for i in row)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_same_documents_at_every_number_of_ranks(kind: str) -> None:
    def documents(world_size: int, first_step: int) -> list[list[int]]:
        made = layout(kind, world_size, micro=4)
        ranks = [
            Batches(StepDataset(make_examples(LENGTHS.tolist()), made, RankRows(rank)), seed=0)
            for rank in range(world_size)
        ]
        steps = zip(*(batches.steps(first_step, first_step + 6) for batches in ranks), strict=True)
        return [sorted(i for one in step for i in one.documents) for step in steps]

    one = documents(1, 0)
    assert [documents(world_size, 0) for world_size in (2, 4)] == [one, one]
    assert [documents(world_size, 2)[:4] for world_size in (1, 2, 4)] == [one[2:]] * 3  # resumed after two steps


def test_a_step_names_the_documents_of_its_own_rows_in_order() -> None:
    made, examples = layout("packed", world_size=2), make_examples(LENGTHS.tolist())
    (step,) = Batches(StepDataset(examples, made, RankRows(1)), seed=0).steps(0, 1)
    ids = torch.cat([batch.inputs["input_ids"][batch.doc_ids >= 0] for batch in step.micro_batches])
    assert ids.tolist() == [token for i in step.documents for token in examples[i].ids[:-1].tolist()]


# ---- the same work for all ----


def long_tailed(documents: int = 60_000) -> np.ndarray:
    """Median 300, mean 600, at most 8,192: a few rows of one or two long documents cost as much as ten of short ones."""
    drawn = np.random.default_rng(0).lognormal(np.log(300), np.sqrt(2 * np.log(2)), documents)
    return np.clip(drawn, 8, 8192).astype(int)


def pairs_of_ranks(lengths: np.ndarray, batch: GlobalBatch, made: Layout, in_order: bool = False) -> np.ndarray:
    """(query, key) pairs of the documents of each micro-batch and rank, int64 [A, W], counted one by one."""

    def pairs(rows: tuple[tuple[int, ...], ...]) -> int:
        return sum(int(lengths[i]) * (int(lengths[i]) + 1) // 2 for row in rows for i in row)

    if in_order:
        return np.array([pairs((row,)) for row in batch.rows]).reshape(made.accumulation, made.world_size, -1).sum(-1)
    return np.array([[pairs(m) for m in batch.micro_batches(made, rank)] for rank in range(made.world_size)]).T


def waits(pairs: np.ndarray) -> np.ndarray:
    """(slowest rank of every micro-batch, slowest of the step) over the mean: float [2]."""
    return np.array([pairs.max(1).sum() / pairs.mean(1).sum(), pairs.sum(0).max() / pairs.sum(0).mean()])


@pytest.mark.parametrize(
    ("world_size", "micro", "before", "after"),
    [
        (4, 1, (1.60, 1.12), (1.09, 1.01)),
        (4, 4, (1.30, 1.12), (1.03, 1.02)),
        (8, 1, (1.95, 1.25), (1.20, 1.05)),
        (8, 4, (1.40, 1.25), (1.07, 1.06)),
    ],
)
def test_ranks_have_about_the_same_attention_work_in_each_micro_batch_and_step(
    world_size: int, micro: int, before: tuple[float, float], after: tuple[float, float]
) -> None:
    lengths = long_tailed()
    train = TrainConfig(max_steps=1, global_batch_size=64, micro_batch_size=micro)
    made = make_layout(DataConfig(train=(), row_length=16384), train, lengths, 8192, world_size)
    plan = plan_epoch(lengths, made, seed=0, epoch=0)[:20]
    unbalanced, balanced = (
        np.mean([waits(pairs_of_ranks(lengths, batch, made, in_order)) for batch in plan], axis=0)
        for in_order in (True, False)
    )
    assert all(unbalanced > before)
    assert all(balanced < after)


def test_the_most_expensive_share_of_a_micro_batch_goes_to_the_rank_with_the_least_work_so_far() -> None:
    costs = np.array([1, 40, 9, 50, 5, 40, 9, 10])
    assigned = assign_rows(costs, accumulation=2, ranks=2)
    assert sorted(assigned.ravel().tolist()) == list(range(8))
    assert costs[assigned].tolist() == [[[40, 40], [50, 10]], [[9, 1], [9, 5]]]
    assert skew(costs, assigned) == pytest.approx(90 / 82)


def test_padding_costs_what_kernels_compute_for_it() -> None:
    made = layout("packed in longer rows", lengths=np.array([30] * 40))  # 200 positions, documents of at most 128
    (first, *_) = plan_epoch(np.array([30] * 40), made, seed=None, epoch=0)
    assert (first.rows[0], first.rows[-1]) == ((0, 1, 2, 3, 4, 5), ())
    assert first.pairs[0] == 6 * 30 * 31 // 2 + 20 * 21 // 2
    assert first.pairs[-1] == 128 * 129 // 2 + 72 * 73 // 2


@pytest.mark.parametrize("window", [None, 1, 2, 5, 31, 32, 1000])
def test_the_pairs_of_a_document_are_those_that_its_mask_lets_through(window: int | None) -> None:
    lengths = np.array([0, 1, 2, 4, 5, 6, 31, 32, 33, 64], np.int32)
    expected = []
    for length in lengths.tolist():
        i, j = np.indices((length, length))
        mask = (j <= i) if window is None else (j <= i) & (i - j < window)
        expected.append(int(mask.sum()))
    assert causal_pairs(lengths, window).tolist() == expected
    for chunk in {window, 5} - {None}:
        of_rows = [[j // chunk == i // chunk for i in range(n) for j in range(i + 1)] for n in lengths.tolist()]
        assert causal_pairs(lengths, chunk, chunked=True).tolist() == [sum(pairs) for pairs in of_rows]
    assert causal_pairs(np.array([200_000]), 3000)[0] == 3000 * 3001 // 2 + 197_000 * 3000


def test_one_rank_takes_the_rows_in_the_order_of_the_plan() -> None:
    made = layout("packed", micro=4)
    for batch in plan_epoch(LENGTHS, made, seed=0, epoch=0):
        assert tuple(row for micro in batch.micro_batches(made, 0) for row in micro) == batch.rows
        assert batch.rank_skew(made) == 1.0


def test_the_skew_of_a_step_is_the_most_work_of_a_rank_over_the_mean() -> None:
    made, examples = layout("packed", world_size=3, batch=24), make_examples(LENGTHS.tolist())
    ranks = [list(Batches(StepDataset(examples, made, RankRows(rank)), seed=0).steps(0, 4)) for rank in range(3)]
    for steps in zip(*ranks, strict=True):
        cuts = [[batch.cu_seqlens.diff() for batch in step.micro_batches] for step in steps]
        work = [sum(int((n * (n + 1) // 2).sum()) for n in mine) for mine in cuts]
        assert [step.rank_skew for step in steps] == pytest.approx([max(work) / np.mean(work)] * 3)
