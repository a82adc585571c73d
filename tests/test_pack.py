"""Plans: nothing lost, nothing doubled, only declared shapes, the same on every rank and at every world size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers import make_examples

from sftkit.config import DataConfig, SourceConfig, TrainConfig
from sftkit.data.collate import IGNORE, collate, warm_up_batch
from sftkit.data.loader import Batches
from sftkit.data.pack import Layout, make_layout, pack, padding_share, plan_epoch
from sftkit.errors import ConfigError

LENGTHS = np.random.default_rng(1).integers(1, 65, 500)


def layout(kind: str, world_size: int = 1, micro: int = 2) -> Layout:
    lengths = (16, 32, 64) if kind == "bucketed" else (64,)
    return Layout(kind, lengths, global_batch_size=8, micro_batch_size=micro, world_size=world_size)


@pytest.mark.parametrize("kind", ["packed", "bucketed", "fixed"])
def test_every_document_appears_exactly_once_in_an_epoch(kind: str) -> None:
    plan = plan_epoch(LENGTHS, layout(kind), seed=3, epoch=1)
    seen = Counter(i for batch in plan for row in batch.rows for i in row)
    assert seen == Counter(range(len(LENGTHS)))


@pytest.mark.parametrize("kind", ["packed", "bucketed", "fixed"])
def test_no_row_holds_more_than_its_length(kind: str) -> None:
    for batch in plan_epoch(LENGTHS, layout(kind), seed=3, epoch=1):
        assert all(sum(LENGTHS[i] for i in row) <= batch.row_length for row in batch.rows)


@pytest.mark.parametrize("kind", ["packed", "bucketed", "fixed"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_layout_emits_only_the_shapes_it_declares(kind: str, world_size: int) -> None:
    examples = make_examples(LENGTHS.tolist())
    declared = layout(kind, world_size)
    seen = set()
    for rank in range(world_size):
        batches = Batches(examples, declared, seed=0, rank=rank, pad_id=0)
        steps = list(batches.steps(0, batches.num_steps(epochs=1)))
        seen |= {tuple(b.input_ids.shape) for step in steps for b in step.micro_batches}
        assert all(len(step.micro_batches) == declared.accumulation for step in steps)
    assert seen == set(declared.shapes)


def test_bucketed_puts_each_document_in_its_smallest_bucket() -> None:
    for batch in plan_epoch(LENGTHS, layout("bucketed"), seed=0, epoch=0):
        low = {16: 0, 32: 16, 64: 32}[batch.row_length]
        assert all(low < LENGTHS[i] <= batch.row_length for row in batch.rows for i in row)


def test_the_global_batches_do_not_change_with_the_world_size() -> None:
    one, two = (plan_epoch(LENGTHS, layout("packed", world), seed=0, epoch=0) for world in (1, 2))
    assert one == two
    split = layout("packed", world_size=2)
    rows = [row for rank in (0, 1) for micro in two[0].micro_batches(split, rank) for row in micro]
    assert sorted(rows) == sorted(one[0].rows)


def test_epochs_differ_and_a_plan_repeats() -> None:
    plans = [plan_epoch(LENGTHS, layout("packed"), seed=0, epoch=epoch) for epoch in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]


def test_best_fit_fills_chat_like_rows_to_more_than_99_percent() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(270), 0.9, 20_000), 8, 2048).astype(int)
    rows = pack(lengths, rng.permutation(len(lengths)), 4096)
    assert lengths.sum() / (len(rows) * 4096) > 0.99


def test_packing_pads_less_than_buckets_and_buckets_less_than_fixed() -> None:
    shares = [padding_share(LENGTHS, layout(kind)) for kind in ("packed", "bucketed", "fixed")]
    assert shares[0] < shares[1] < shares[2]


def test_starting_at_a_later_step_gives_the_same_batches() -> None:
    examples = make_examples(LENGTHS.tolist())
    batches = Batches(examples, layout("packed"), seed=0, rank=0, pad_id=0)
    per_epoch = batches.num_steps(1)
    last = per_epoch + 5
    whole = list(batches.steps(0, last))
    later = list(Batches(examples, layout("packed"), 0, 0, 0).steps(per_epoch - 2, last))
    assert len(later) == 7
    for a, b in zip(whole[per_epoch - 2 :], later, strict=True):
        assert a.epoch == b.epoch
        assert all((x.input_ids == y.input_ids).all() for x, y in zip(a.micro_batches, b.micro_batches, strict=True))


def test_data_workers_give_the_same_batches_in_the_same_order() -> None:
    examples = make_examples(LENGTHS.tolist())
    plain, workers = (list(Batches(examples, layout("packed"), 0, 0, 0, num_workers=n).steps(0, 6)) for n in (0, 2))
    for a, b in zip(plain, workers, strict=True):
        assert a.num_targets == b.num_targets
        assert all((x.targets == y.targets).all() for x, y in zip(a.micro_batches, b.micro_batches, strict=True))


def test_step_counts_are_those_of_the_global_batch() -> None:
    examples = make_examples(LENGTHS.tolist())
    ranks = [Batches(examples, layout("packed", world_size=2), 0, rank, 0) for rank in (0, 1)]
    for pair in zip(*(batches.steps(0, 4) for batches in ranks), strict=True):
        for name in ("num_targets", "num_tokens", "attention_pairs"):
            summed = sum(getattr(batch, name) for step in pair for batch in step.micro_batches)
            assert getattr(pair[0], name) == getattr(pair[1], name) == summed


def test_targets_are_the_next_tokens_of_the_same_document() -> None:
    examples = make_examples([5, 3, 1])
    batch = collate(examples, ((0, 1), (2,), ()), row_length=10, pad_id=0)
    for row, docs in enumerate([(0, 1), (2,), ()]):
        start = 0
        for number, i in enumerate(docs):
            ids, is_target = examples[i].ids, examples[i].is_target
            at = slice(start, start + len(ids) - 1)
            assert batch.input_ids[row, at].tolist() == ids[:-1].tolist()
            assert batch.targets[row, at].tolist() == [
                t if w else IGNORE for t, w in zip(ids[1:], is_target[1:], strict=True)
            ]
            assert batch.position_ids[row, at].tolist() == list(range(len(ids) - 1))
            assert set(batch.doc_ids[row, at].tolist()) == {number}
            start += len(ids) - 1
        assert (batch.targets[row, start:] == IGNORE).all()
        assert (batch.doc_ids[row, start:] == -1).all()
    assert batch.num_tokens == 9
    assert batch.attention_pairs == 15 + 6 + 1
    assert batch.num_targets == int((batch.targets != IGNORE).sum())


def test_warm_up_batch_has_the_declared_shape_and_several_documents() -> None:
    batch = warm_up_batch(3, 17, vocab_size=10)
    assert batch.input_ids.shape == (3, 17)
    assert batch.doc_ids.unique().tolist() == [0, 1]
    assert batch.num_targets == 3 * 17


def test_micro_batch_is_lowered_to_a_divisor_of_the_ranks_share() -> None:
    data = DataConfig(train=(SourceConfig(path="builtin:tasks"),))
    made = make_layout(data, 64, TrainConfig(max_steps=1, global_batch_size=24, micro_batch_size=16), world_size=2)
    assert (made.micro_batch_size, made.accumulation) == (12, 1)
    made = make_layout(data, 64, TrainConfig(max_steps=1, global_batch_size=24, micro_batch_size=5), world_size=2)
    assert (made.micro_batch_size, made.accumulation) == (4, 3)


def test_buckets_must_end_at_the_row_length() -> None:
    data = DataConfig(train=(SourceConfig(path="builtin:tasks"),), layout="bucketed", bucket_lengths=(16, 32))
    with pytest.raises(ConfigError, match=r"data\.bucket_lengths"):
        make_layout(data, 64, TrainConfig(max_steps=1), world_size=1)
    assert make_layout(data, 32, TrainConfig(max_steps=1), 1).row_lengths == (16, 32)


def test_shapes_of_buckets_hold_the_same_number_of_tokens() -> None:
    made = replace(layout("bucketed"), micro_batch_size=4)
    assert [rows * length for rows, length in made.shapes] == [256, 256, 256]


def test_steps_and_epochs_limit_a_run_whichever_comes_first() -> None:
    batches = Batches(make_examples(LENGTHS.tolist()), layout("packed"), seed=0, rank=0, pad_id=0)
    epoch = batches.num_steps(epochs=1)
    assert batches.num_steps(epochs=2) == epoch + len(batches.plan(1))
    assert batches.num_steps(epochs=2, max_steps=3) == 3
    assert batches.num_steps(epochs=1, max_steps=10**6) == epoch
    assert batches.num_steps(epochs=None, max_steps=7) == 7
