"""Batches: targets are shifted once, every position has one document, every tensor moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import make_examples

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.data.batches.collate import IGNORE, TARGET_MULTIPLE, Batch, collate, warm_up_batch
from sftkit.data.batches.many import joined
from sftkit.data.batches.pack import BatchShape, make_layout
from sftkit.data.types import EncoderInputs


def test_targets_are_the_next_tokens_of_the_same_document() -> None:
    examples = make_examples([5, 3, 1])
    batch = collate(examples, ((0, 1), (2,), ()), BatchShape(10, max_docs=12, max_doc_length=5))
    for row, docs in enumerate([(0, 1), (2,), ()]):
        start = 0
        for number, i in enumerate(docs):
            ids, is_target = examples[i].ids, examples[i].is_target
            at = slice(start, start + len(ids) - 1)
            assert batch.inputs["input_ids"][row, at].tolist() == ids[:-1].tolist()
            assert batch.targets[row, at].tolist() == [
                t if w else IGNORE for t, w in zip(ids[1:], is_target[1:], strict=True)
            ]
            assert batch.inputs["position_ids"][row, at].tolist() == list(range(len(ids) - 1))
            assert set(batch.doc_ids[row, at].tolist()) == {number}
            start += len(ids) - 1
        assert (batch.targets[row, start:] == IGNORE).all()
        assert (batch.doc_ids[row, start:] == -1).all()
        assert (batch.inputs["input_ids"][row, start:] == 0).all()
        assert (batch.inputs["position_ids"][row, start:] == 0).all()
    assert batch.num_tokens == 9
    assert batch.num_targets == int((batch.targets != IGNORE).sum())


def test_cu_seqlens_are_the_documents_and_padding_in_pieces() -> None:
    batch = collate(make_examples([5, 3, 1]), ((0, 1), (2,), ()), BatchShape(10, max_docs=12, max_doc_length=5))
    assert batch.cu_seqlens.dtype == torch.int32
    # rows: 5 + 3 + 2 of padding | 1 + 5 + 4 | 5 + 5, and four unused slots
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 10, 11, 16, 20, 25, 30, 30, 30, 30, 30]


def check_target_index(batch: Batch) -> None:
    index, targets = batch.target_index, batch.targets.view(-1)
    assert index.dtype == torch.int64
    assert len(index.unique()) == len(index)
    assert torch.equal(index[: batch.num_targets], torch.nonzero(targets != IGNORE).view(-1))
    filler = index[batch.num_targets :]
    assert torch.equal(filler, torch.nonzero(targets == IGNORE).view(-1)[: len(filler)])
    full = max(1, -(-batch.num_targets // TARGET_MULTIPLE)) * TARGET_MULTIPLE
    assert len(index) == min(full, targets.numel())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_target_index_has_every_target_and_unique_filler_up_to_a_multiple(share: float) -> None:
    examples = make_examples([700, 400, 300], target_share=share)
    for row_length in (700, 1100, 1500):
        check_target_index(
            collate(examples, ((0,), (), (2, 1)), BatchShape(row_length, max_docs=9, max_doc_length=750))
        )


def test_a_batch_without_documents_still_projects_something() -> None:
    small, large = (
        collate(make_examples([4]), ((), ()), BatchShape(length, max_docs=2, max_doc_length=length))
        for length in (16, 400)
    )
    assert (small.num_targets, len(small.target_index), len(large.target_index)) == (0, 32, 512)
    check_target_index(large)


def test_every_tensor_of_a_batch_moves() -> None:
    moved = collate(make_examples([4]), ((0,),), BatchShape(8, max_docs=2, max_doc_length=8)).to(torch.device("meta"))
    found = [*moved.inputs.values(), *(value for value in vars(moved).values() if isinstance(value, torch.Tensor))]
    assert len(found) == len(moved.tensors()) == 7
    assert all(tensor.is_meta for tensor in [*found, *moved.tensors()])


def test_a_warm_up_batch_has_no_more_documents_in_a_row_than_places_for_inputs() -> None:
    """As of a data set of one picture, whose short caption leaves room for another."""
    layout = make_layout(
        DataConfig(train=(), row_length=256),
        TrainConfig(global_batch_size=2, micro_batch_size=2),
        np.array([7]),
        256,
        encoded=True,
    )
    shape = layout.batch_shape(*layout.shapes[-1])
    assert (shape.docs_per_row, shape.max_doc_length) == (1, 128)
    pixels = EncoderInputs({"pixel_values": np.zeros((2, 3), np.uint8)}, np.arange(2))
    batch = warm_up_batch(2, shape, 10, made_up=lambda count: replace(pixels, index=np.arange(count)))
    assert (len(batch.inputs["pixel_values"]), batch.num_targets) == (2, 2 * 128)


def test_the_warm_up_batch_is_the_worst_case_of_its_shape() -> None:
    batch = warm_up_batch(3, BatchShape(17, max_docs=12, max_doc_length=7), 10)
    assert batch.inputs["input_ids"].shape == (3, 17)
    assert batch.cu_seqlens.tolist() == [0, 7, 14, 17, 24, 31, 34, 41, 48, 51, 51, 51, 51]
    assert batch.num_targets == len(batch.target_index) == 3 * 17


def test_documents_of_several_data_sets_are_gathered_by_their_new_numbers() -> None:
    one, other = make_examples([5, 3, 1]), make_examples([4, 2], seed=1)
    both = joined([("a", one), ("b", other)])
    documents = [4, 0, 2, 3, 1, 1]
    expected = [other[1], one[0], one[2], other[0], one[1], one[1]]
    ids, is_target = both.gather(documents)
    assert ids.tolist() == [token for document in expected for token in document.ids]
    assert is_target.tolist() == [flag for document in expected for flag in document.is_target]
    assert [len(array) for array in both.gather([])] == [0, 0]
    assert both.lengths.tolist() == [5, 3, 1, 4, 2]
    assert both.source_names == ("a/test", "b/test")
