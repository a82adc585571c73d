"""Parts of rows: what processes that share rows compute fits together to what one process computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import make_examples

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.data.batches.collate import IGNORE, TARGET_MULTIPLE, Batch, collate, warm_up_batch
from sftkit.data.batches.epoch import FULL_ROW, RankRows, RowShard, check_row_shard, plan_epoch
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.pack import BatchShape, Layout, make_layout
from sftkit.errors import ConfigError

LENGTHS = np.random.default_rng(5).integers(1, 49, 200)
SPLITS = [("columns", 1), ("columns", 2), ("columns", 4), ("chunks", 1), ("chunks", 2), ("chunks", 4)]
KINDS = ("packed", "bucketed", "fixed", "dynamic")


def layout(kind: str = "packed", max_length: int = 48, lengths: np.ndarray = LENGTHS, **settings: object) -> Layout:
    data = DataConfig(train=(), layout=kind, **settings)  # type: ignore[arg-type]
    train = TrainConfig(max_steps=1, global_batch_size=6, micro_batch_size=3)
    return make_layout(data, train, lengths, max_length)


def shards_of(kind: str, count: int) -> list[RowShard]:
    return [RowShard(kind, index, count) for index in range(count)]  # type: ignore[arg-type]


def micro_batches(made: Layout, shard: RowShard = FULL_ROW, share: float = 0.5) -> list[Batch]:
    batches = Batches(
        StepDataset(make_examples(LENGTHS.tolist(), target_share=share), made, RankRows(shard=shard)), seed=0
    )
    return [batch for step in batches.steps(0, batches.num_steps(1)) for batch in step.micro_batches]


def split_rows(kind: str, count: int) -> list[tuple[Batch, list[Batch]]]:
    """(whole, its parts) for every micro-batch of an epoch, the last with empty rows."""
    made = layout(row_length=96)
    shards = [micro_batches(made, shard) for shard in shards_of(kind, count)]
    return list(zip(micro_batches(made), map(list, zip(*shards, strict=True)), strict=True))


def joined(local: list[torch.Tensor], shards: list[RowShard], row_length: int) -> torch.Tensor:
    """[B, T] from the [B, T / n] of all parts; every column must come exactly once."""
    columns = np.concatenate([shard.columns(row_length) for shard in shards])
    assert sorted(columns.tolist()) == list(range(row_length))
    return torch.cat(local, 1)[:, np.argsort(columns)]


def named(batch: Batch) -> dict[str, torch.Tensor]:
    """Every tensor of a batch, the model's inputs by their own names."""
    return {**batch.inputs, **{name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}}


@pytest.mark.parametrize(("kind", "count"), SPLITS)
def test_the_parts_of_all_processes_make_the_whole_batch(kind: str, count: int) -> None:
    shards = shards_of(kind, count)
    for whole, local in split_rows(kind, count):
        row_length = whole.inputs["input_ids"].shape[1]
        names = ("input_ids", "targets", "position_ids") if kind == "chunks" else ("input_ids", "targets")
        for name in names:
            assert torch.equal(joined([named(b)[name] for b in local], shards, row_length), named(whole)[name]), name
        for batch in local:
            shared = ("doc_ids", "cu_seqlens") if kind == "chunks" else ("doc_ids", "cu_seqlens", "position_ids")
            assert all(torch.equal(named(batch)[name], named(whole)[name]) for name in shared)
            counts = ("max_doc_length", "num_tokens")
            assert all(getattr(batch, name) == getattr(whole, name) for name in counts)


def test_columns_are_consecutive_and_chunks_an_early_and_a_late_one() -> None:
    assert RowShard("columns", 1, 3).columns(12).tolist() == [4, 5, 6, 7]
    assert RowShard("chunks", 1, 3).columns(12).tolist() == [2, 3, 8, 9]
    assert RowShard("chunks", 2, 3).columns(12).tolist() == [4, 5, 6, 7]
    for shard in shards_of("chunks", 3):
        causal = shard.columns(120) + 1
        assert causal.sum() == 120 * 121 // 2 // 3  # the same work for all where a document fills the row


@pytest.mark.parametrize(("kind", "count"), SPLITS)
def test_targets_of_all_parts_add_up_and_each_is_projected_where_it_lies(kind: str, count: int) -> None:
    for whole, local in split_rows(kind, count):
        assert sum(batch.num_targets for batch in local) == whole.num_targets
        for batch in local:
            targets, index = batch.targets.flatten(), batch.target_index
            assert torch.equal(index[: batch.num_targets], torch.nonzero(targets != IGNORE).flatten())
            assert len(index.unique()) == len(index) == min(TARGET_MULTIPLE, len(targets))


def test_a_part_without_targets_still_projects_something() -> None:
    examples = make_examples([700])
    batch = collate(
        examples, ((0,),), BatchShape(2048, max_docs=3, max_doc_length=704), shard=RowShard("columns", 1, 2)
    )
    assert (batch.num_targets, len(batch.target_index)) == (0, TARGET_MULTIPLE)
    assert batch.target_index.max() < 1024


def visible_by_cu_seqlens(batch: Batch, chunk: int) -> torch.Tensor:
    """Which of the B * T keys the queries of a chunk see by (cu_seqlens_q, cu_seqlens_k), causal at the bottom right."""
    assert batch.cu_seqlens_q is not None
    assert batch.cu_seqlens_k is not None
    queries, keys = batch.cu_seqlens_q[chunk].tolist(), batch.cu_seqlens_k[chunk].tolist()
    seen = torch.zeros(batch.inputs["input_ids"].numel() // 2, batch.doc_ids.numel(), dtype=torch.bool)
    assert (queries[0], queries[-1], keys[0], keys[-1]) == (0, seen.shape[0], 0, seen.shape[1])
    for s in range(len(queries) - 1):
        rows, columns = queries[s + 1] - queries[s], keys[s + 1] - keys[s]
        assert 0 <= rows <= columns
        corner = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        seen[queries[s] : queries[s + 1], keys[s] : keys[s + 1]] = corner
    return seen


def visible_by_documents(batch: Batch) -> torch.Tensor:
    """[B * T, B * T]: causal attention within the documents of whole rows and the chunks of their padding."""
    document = torch.repeat_interleave(torch.arange(len(batch.cu_seqlens) - 1), batch.cu_seqlens.diff())
    return torch.ones(len(document), len(document), dtype=torch.bool).tril() & (document[:, None] == document)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_chunks_attend_as_their_positions_do_in_whole_rows(count: int) -> None:
    for whole, local in split_rows("chunks", count):
        expected = visible_by_documents(whole)
        rows, row_length = whole.inputs["input_ids"].shape
        for shard, batch in zip(shards_of("chunks", count), local, strict=True):
            assert batch.columns is not None
            assert batch.columns.tolist() == shard.columns(row_length).tolist()
            for chunk, columns in enumerate(batch.columns.view(2, -1)):
                positions = (torch.arange(rows)[:, None] * row_length + columns).flatten()
                assert torch.equal(visible_by_cu_seqlens(batch, chunk), expected[positions])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_sequences_of_chunks_fill_fixed_slots_and_none_is_longer_than_a_document(count: int) -> None:
    sizes = set()
    for whole, local in split_rows("chunks", count):
        real = whole.cu_seqlens.diff() > 0
        for batch in local:
            assert batch.cu_seqlens_q is not None
            assert batch.cu_seqlens_k is not None
            sizes.add((batch.cu_seqlens_q.shape, batch.cu_seqlens_k.shape))
            assert batch.cu_seqlens_q.dtype == batch.cu_seqlens_k.dtype == torch.int32
            has_queries = batch.cu_seqlens_q.diff() > 0
            assert has_queries.sum() <= 2 * real.sum()
            assert batch.cu_seqlens_k.diff()[has_queries].max() <= batch.max_doc_length
    slots = layout(row_length=96).max_docs(3, 96)
    assert sizes == {(torch.Size([2, slots + 2 * 3 + 1]),) * 2}


def test_a_document_across_chunks_by_hand() -> None:
    # row 0: documents of 5 and 3 positions; row 1: 2 of a document, 6 of padding. Chunks: columns 2-3 and 4-5.
    batch = collate(
        make_examples([5, 3, 2]),
        ((0, 1), (2,)),
        BatchShape(8, max_docs=6, max_doc_length=6),
        shard=RowShard("chunks", 1, 2),
    )
    assert batch.columns is not None
    assert batch.cu_seqlens_q is not None
    assert batch.cu_seqlens_k is not None
    assert batch.columns.tolist() == [2, 3, 4, 5]
    # row 0: none | 0-4 up to 4 | rest; row 1: front 0-2 | padding | rest
    assert batch.cu_seqlens_q[0].tolist() == [0, 0, 2, 2, 2, 4, 4, 4, 4, 4, 4]
    assert batch.cu_seqlens_k[0].tolist() == [0, 0, 4, 8, 10, 12, 16, 16, 16, 16, 16]
    # row 0: none | 0-5 | 5-6 | rest; row 1: front 0-2 | padding | rest
    assert batch.cu_seqlens_q[1].tolist() == [0, 0, 1, 2, 2, 2, 4, 4, 4, 4, 4]
    assert batch.cu_seqlens_k[1].tolist() == [0, 0, 5, 6, 8, 10, 14, 16, 16, 16, 16]


@pytest.mark.parametrize(
    ("shard", "tensors"), [(FULL_ROW, 7), (RowShard("columns", 0, 2), 7), (RowShard("chunks", 0, 2), 10)]
)
def test_every_tensor_of_a_part_moves(shard: RowShard, tensors: int) -> None:
    batch = warm_up_batch(2, BatchShape(64, max_docs=4, max_doc_length=64), 10, shard=shard)
    moved = batch.to(torch.device("meta"))
    assert len(named(moved)) == len(moved.tensors()) == tensors
    assert all(tensor.is_meta for tensor in [*named(moved).values(), *moved.tensors()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", [RowShard("columns", 1, 2), RowShard("chunks", 1, 2)])
def test_warm_up_parts_have_the_shapes_of_the_runs_own(kind: str, shard: RowShard) -> None:
    made = layout(kind, pad_multiple=8 if kind == "dynamic" else None)
    seen = {tuple(batch.inputs["input_ids"].shape): batch for batch in micro_batches(made, shard, share=1.0)}
    for rows, row_length in made.shapes:
        made_up = warm_up_batch(rows, made.batch_shape(rows, row_length), 10, shard=shard)
        assert made_up.num_targets == made_up.inputs["input_ids"].numel()
        own = seen.get((rows, row_length // 2))
        assert own is not None or made.dynamic
        if own is None:
            continue
        assert named(own).keys() == named(made_up).keys()
        for name, value in named(own).items():
            if name != "target_index":
                assert (value.shape, value.dtype) == (named(made_up)[name].shape, named(made_up)[name].dtype), name


# ---- which rows split ----


@pytest.mark.parametrize(
    ("made", "shard", "message"),
    [
        (layout(row_length=100), RowShard("chunks", 0, 4), r"data\.row_length: rows of 100 .* take 96 or 104"),
        (layout(max_length=50), RowShard("columns", 0, 4), r"data\.row_length: rows of 50 .* take 52$"),
        (layout("fixed", 50), RowShard("columns", 0, 4), r"data\.max_length: rows of 50 .* take 48 or 52"),
        (layout("dynamic"), RowShard("chunks", 0, 8), r"data\.pad_multiple: rows of a multiple of 8 .* take 16, with"),
        (layout("dynamic", pad_multiple=12), RowShard("columns", 0, 8), r"data\.pad_multiple: .* take 8 or 16, with"),
        (
            layout("bucketed", bucket_lengths=(12, 24, 48)),
            RowShard("chunks", 0, 4),
            r"data\.bucket_lengths: rows of 12 .* take data\.bucket_lengths=\[16, 24, 48\] and data\.max_length=48",
        ),
    ],
)
def test_rows_that_do_not_split_evenly_are_an_error_with_the_nearest_that_do(
    made: Layout, shard: RowShard, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Batches(StepDataset(make_examples(LENGTHS.tolist()), made, RankRows(shard=shard)), seed=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", [FULL_ROW, RowShard("columns", 0, 8), RowShard("chunks", 0, 4)])
def test_what_passes_the_check_splits_in_every_row_of_an_epoch(kind: str, shard: RowShard) -> None:
    made = layout(kind, bucket_lengths=(16, 48) if kind == "bucketed" else None)
    check_row_shard(made, shard)
    assert all(batch.row_length % shard.multiple == 0 for batch in plan_epoch(LENGTHS, made, 0, 0))
