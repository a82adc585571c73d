"""Plans: nothing lost, nothing doubled, only declared shapes, the same on every rank and at every world size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from helpers import make_examples

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.data.batches.collate import collate, warm_up_batch
from sftkit.data.batches.epoch import GlobalBatch, RankRows, num_positions, plan_epoch
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.pack import BatchShape, Layout, make_layout, pack, validation_layout
from sftkit.errors import ConfigError

LENGTHS = np.random.default_rng(1).integers(1, 65, 500)
KINDS = ("packed", "packed in longer rows", "bucketed", "chosen buckets", "fixed", "dynamic")
SETTINGS = {
    "packed": DataConfig(train=()),
    "packed in longer rows": DataConfig(train=(), row_length=200),
    "bucketed": DataConfig(train=(), layout="bucketed", bucket_lengths=(16, 40, 64)),
    "chosen buckets": DataConfig(train=(), layout="bucketed"),
    "fixed": DataConfig(train=(), layout="fixed"),
    "dynamic": DataConfig(train=(), layout="dynamic"),
}


def layout(kind: str, world_size: int = 1, micro: int = 2, batch: int = 8, lengths: np.ndarray = LENGTHS) -> Layout:
    train = TrainConfig(max_steps=1, global_batch_size=batch, micro_batch_size=micro)
    return make_layout(SETTINGS[kind], train, lengths, 64, world_size)


def chat_like(documents: int, longest: int = 2048) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(np.log(270), 0.9, documents), 8, longest).astype(int)


def padding_share(lengths: np.ndarray, of: Layout) -> float:
    return 1 - lengths.sum() / num_positions(plan_epoch(lengths, of, seed=0, epoch=0), of)


def steps_of(of: Layout, rank: int = 0) -> list:
    batches = Batches(StepDataset(make_examples(LENGTHS.tolist()), of, RankRows(rank)), seed=0)
    return list(batches.steps(0, batches.num_steps(epochs=1)))


def texts(plan: list[GlobalBatch]) -> list[str]:
    return [f"{batch.row_length} {batch.rows} {batch.pairs}" for batch in plan]


# ---- plans ----


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_appears_exactly_once_in_an_epoch(kind: str) -> None:
    plan = plan_epoch(LENGTHS, layout(kind), seed=3, epoch=1)
    seen = Counter(i for batch in plan for row in batch.rows for i in row)
    assert seen == Counter(range(len(LENGTHS)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_holds_more_than_its_length(kind: str) -> None:
    for batch in plan_epoch(LENGTHS, layout(kind), seed=3, epoch=1):
        assert all(sum(LENGTHS[i] for i in row) <= batch.row_length for row in batch.rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "micro"), [(1, 2), (2, 2), (8, 2), (1, 8)])
def test_each_layout_emits_only_the_shapes_it_declares(kind: str, world_size: int, micro: int) -> None:
    declared = layout(kind, world_size, micro)
    seen = set()
    for rank in {0, world_size - 1}:
        for step in steps_of(declared, rank):
            assert len(step.micro_batches) == declared.accumulation
            assert len({batch.inputs["input_ids"].shape for batch in step.micro_batches}) == 1
            seen |= {tuple(batch.inputs["input_ids"].shape) for batch in step.micro_batches}
    assert all(declared.declares(*shape) for shape in seen)
    assert declared.dynamic or seen == set(declared.shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_all_batches_of_a_shape_have_as_many_document_slots_and_of_a_run_one_maximum_length(kind: str) -> None:
    declared = layout(kind)
    batches = [batch for step in steps_of(declared) for batch in step.micro_batches]
    assert {batch.max_doc_length for batch in batches} == {declared.max_doc_length}
    for batch in batches:
        assert len(batch.cu_seqlens) == declared.max_docs(*batch.inputs["input_ids"].shape) + 1
        assert batch.cu_seqlens.diff().max() <= declared.max_doc_length


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "micro"), [(1, 2), (2, 2), (4, 4), (8, 8)])
def test_the_global_batches_do_not_change_with_the_world_size(kind: str, world_size: int, micro: int) -> None:
    one, split = layout(kind, 1, micro), layout(kind, world_size, micro)
    plan = plan_epoch(LENGTHS, one, seed=0, epoch=0)
    assert texts(plan) == texts(plan_epoch(LENGTHS, split, seed=0, epoch=0))
    for batch in plan:
        rows = [row for rank in range(world_size) for part in batch.micro_batches(split, rank) for row in part]
        assert sorted(filter(None, rows)) == sorted(filter(None, batch.rows))
        assert split.positions(batch.row_length) == len(rows) * batch.row_length


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_differ_and_a_plan_repeats(kind: str) -> None:
    plans = [texts(plan_epoch(LENGTHS, layout(kind), seed=0, epoch=epoch)) for epoch in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]


def test_buckets_pad_less_than_fixed_rows_and_packed_rows_less_than_buckets() -> None:
    kinds = ("packed in longer rows", "packed", "chosen buckets", "bucketed", "fixed")
    shares = [padding_share(LENGTHS, layout(kind)) for kind in kinds]
    assert shares == sorted(shares)
    assert padding_share(LENGTHS, layout("dynamic")) < shares[-1]


def test_steps_and_epochs_limit_a_run_whichever_comes_first() -> None:
    batches = Batches(StepDataset(make_examples(LENGTHS.tolist()), layout("packed")), seed=0)
    epoch = batches.num_steps(epochs=1)
    assert batches.num_steps(epochs=2) == epoch + len(plan_epoch(LENGTHS, layout("packed"), seed=0, epoch=1))
    assert batches.num_steps(epochs=2, max_steps=3) == 3
    assert batches.num_steps(epochs=1, max_steps=10**6) == epoch
    assert batches.num_steps(epochs=None, max_steps=7) == 7


# ---- packed ----


@pytest.mark.parametrize("row_length", [2048, 4096, 16384])
def test_packing_leaves_less_than_one_percent_of_chat_like_rows_empty(row_length: int) -> None:
    lengths = chat_like(40_000)
    data = DataConfig(train=(), row_length=row_length)
    made = make_layout(data, TrainConfig(max_steps=1, global_batch_size=1), lengths, 2048)
    assert made.docs_per_row <= 8 + 2 * row_length / lengths.mean()  # tight: twice the mean
    assert padding_share(lengths, made) < 0.01


def test_rows_of_short_and_long_documents_get_the_slots_they_need() -> None:
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(20_000) < 0.9, 10, 2000)  # twice the mean would leave 15 % of the rows empty
    made = make_layout(DataConfig(train=()), TrainConfig(max_steps=1, global_batch_size=1), lengths, 2048)
    assert padding_share(lengths, made) < 0.015


def test_no_row_holds_more_documents_than_the_cap_even_where_short_ones_cluster() -> None:
    lengths = np.array([2000] * 300 + [1] * 3000)
    rows = pack(lengths, np.arange(len(lengths)), 2048, docs_per_row=8)
    assert max(map(len, rows)) == 8
    assert Counter(i for row in rows for i in row) == Counter(range(len(lengths)))


def test_a_row_full_of_the_shortest_documents_has_slots_for_its_padding_too() -> None:
    made = make_layout(DataConfig(train=()), TrainConfig(max_steps=1), np.full(100, 128), 1024)
    cap, slots = made.docs_per_row, made.max_docs(1, 1024)
    batch = collate(
        make_examples([1] * cap),
        (tuple(range(cap)),),
        BatchShape(1024, max_docs=slots, max_doc_length=made.max_doc_length),
    )
    assert batch.cu_seqlens.unique().tolist() == [*range(cap), *range(cap, 1024, 128), 1024]


def test_rows_longer_than_any_document_count_in_batch_sizes_and_leave_the_inherited_max_length() -> None:
    made = layout("packed in longer rows")
    assert made.shapes == ((2, 200),)
    assert made.rows(200) == 8
    assert (made.max_length, made.max_doc_length) == (64, 128)
    assert any(sum(LENGTHS[i] for i in row) > 64 for row in plan_epoch(LENGTHS, made, 0, 0)[0].rows)


def test_a_row_must_hold_a_document_of_max_length() -> None:
    with pytest.raises(ConfigError, match=r"data\.row_length: 32 cannot hold"):
        make_layout(DataConfig(train=(), row_length=32), TrainConfig(max_steps=1), LENGTHS, 64)


# ---- bucketed ----


def test_bucketed_puts_each_document_in_its_smallest_bucket() -> None:
    for batch in plan_epoch(LENGTHS, layout("bucketed"), seed=0, epoch=0):
        low = {16: 0, 40: 16, 64: 40}[batch.row_length]
        assert all(low < LENGTHS[i] <= batch.row_length for row in batch.rows for i in row)


@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_of_all_buckets_hold_about_the_same_number_of_tokens(world_size: int) -> None:
    made = layout("bucketed", world_size, micro=4)
    assert made.shapes == ((16, 16), (6, 40), (4, 64))  # of a budget of 256 tokens
    for row_length in made.row_lengths:
        assert made.positions(row_length) == 2 * made.micro_rows(row_length) * row_length


def test_micro_batches_that_more_processes_lower_stay_within_the_budget_of_the_recipe() -> None:
    made = layout("bucketed", world_size=8, micro=8)
    assert made.micro_batch_size == 1
    assert all(rows * length <= 8 * 64 for rows, length in made.shapes)


def test_chosen_buckets_are_as_many_as_the_recipe_says_and_the_same_on_every_rank() -> None:
    assert len(layout("chosen buckets").row_lengths) == 4
    assert layout("chosen buckets").row_lengths == layout("chosen buckets", world_size=8).row_lengths


def test_buckets_must_end_at_max_length() -> None:
    data = DataConfig(train=(), layout="bucketed", bucket_lengths=(16, 32))
    with pytest.raises(ConfigError, match=r"data\.bucket_lengths"):
        make_layout(data, TrainConfig(max_steps=1), LENGTHS, 64)
    assert make_layout(data, TrainConfig(max_steps=1), LENGTHS // 2, 32).row_lengths == (16, 32)


# ---- dynamic ----


def test_a_dynamic_batch_is_as_long_as_its_longest_document_rounded_up() -> None:
    for batch in plan_epoch(LENGTHS, layout("dynamic"), seed=0, epoch=0):
        longest = max(LENGTHS[i] for row in batch.rows for i in row)
        assert batch.row_length == max(8, -(-longest // 8) * 8)
        assert len(batch.rows) == 8


def test_dynamic_rows_warm_up_with_two_lengths_and_declare_all_others() -> None:
    made = layout("dynamic")
    assert made.shapes == ((2, 32), (2, 64))
    assert all(made.declares(2, length) for length in range(8, 65, 8))
    assert not any(made.declares(*shape) for shape in [(2, 72), (2, 33), (3, 64), (2, 0)])
    assert {made.max_docs(2, length) for length in range(8, 65, 8)} == {4}


def test_max_length_must_be_a_multiple_of_pad_multiple() -> None:
    data = DataConfig(train=(), layout="dynamic", pad_multiple=32)
    with pytest.raises(ConfigError, match="take 64"):
        make_layout(data, TrainConfig(max_steps=1), LENGTHS, 72)


# ---- validation ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_validation_layout_holds_other_documents_one_micro_batch_a_rank(kind: str) -> None:
    short, others = LENGTHS[LENGTHS < 30], np.array([64, 1, 1, 30, 64] * 20)
    made = validation_layout(layout(kind, world_size=2, micro=4, lengths=short), others)
    assert made.accumulation == 1
    plan = plan_epoch(others, made, seed=None, epoch=0)
    assert sorted(i for batch in plan for row in batch.rows for i in row) == list(range(100))
    examples = make_examples(others.tolist())
    for batch in plan:
        (rows,) = batch.micro_batches(made, rank=1)
        slots = made.max_docs(len(rows), batch.row_length)
        collate(examples, rows, BatchShape(batch.row_length, max_docs=slots, max_doc_length=made.max_doc_length))


# ---- loading ----


@pytest.mark.parametrize("kind", KINDS)
def test_starting_at_a_later_step_gives_the_same_batches(kind: str) -> None:
    examples = make_examples(LENGTHS.tolist())
    batches = Batches(StepDataset(examples, layout(kind)), seed=0)
    per_epoch = batches.num_steps(1)
    last = per_epoch + 5
    whole = list(batches.steps(0, last))
    later = list(Batches(StepDataset(examples, layout(kind)), seed=0).steps(per_epoch - 2, last))
    assert len(later) == 7
    for a, b in zip(whole[per_epoch - 2 :], later, strict=True):
        assert a.epoch == b.epoch
        assert all(
            (x.inputs["input_ids"] == y.inputs["input_ids"]).all()
            for x, y in zip(a.micro_batches, b.micro_batches, strict=True)
        )


def test_data_workers_give_the_same_batches_in_the_same_order() -> None:
    examples = make_examples(LENGTHS.tolist())
    plain, workers = (
        list(Batches(StepDataset(examples, layout("packed")), seed=0, num_workers=n).steps(0, 6)) for n in (0, 2)
    )
    for a, b in zip(plain, workers, strict=True):
        assert a.num_targets == b.num_targets
        assert all((x.targets == y.targets).all() for x, y in zip(a.micro_batches, b.micro_batches, strict=True))


@pytest.mark.parametrize(("kind", "world_size"), [*((kind, 2) for kind in KINDS), ("packed", 8)])
def test_step_counts_are_those_of_the_global_batch(kind: str, world_size: int) -> None:
    ranks = [steps_of(layout(kind, world_size), rank)[:4] for rank in range(world_size)]
    for steps in zip(*ranks, strict=True):
        for name in ("num_targets", "num_tokens"):
            summed = sum(getattr(batch, name) for step in steps for batch in step.micro_batches)
            assert {getattr(step, name) for step in steps} == {summed}
        positions = sum(batch.inputs["input_ids"].numel() for step in steps for batch in step.micro_batches)
        assert {step.num_positions for step in steps} == {positions}


# ---- batches of a layout ----


@pytest.mark.parametrize("kind", KINDS)
def test_cu_seqlens_put_every_position_in_one_document_that_crosses_no_row(kind: str) -> None:
    for batch in (batch for step in steps_of(layout(kind)) for batch in step.micro_batches):
        rows, row_length = batch.inputs["input_ids"].shape
        cu_seqlens = batch.cu_seqlens
        assert (cu_seqlens[0], cu_seqlens[-1]) == (0, rows * row_length)
        document = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff()).view(rows, row_length)
        assert (document[1:, 0] > document[:-1, -1]).all()
        same = document[:, 1:] == document[:, :-1]
        real = batch.doc_ids[:, 1:] >= 0
        assert torch.equal(same & real, (batch.doc_ids[:, 1:] == batch.doc_ids[:, :-1]) & real)
        assert not (same & (batch.doc_ids[:, 1:] != batch.doc_ids[:, :-1])).any()


@pytest.mark.gpu
def test_a_loader_pins_every_tensor_of_a_batch() -> None:
    (step,) = Batches(StepDataset(make_examples(LENGTHS.tolist()), layout("packed")), seed=0, num_workers=1).steps(0, 1)
    for batch in step.micro_batches:
        on_device = batch.to(torch.device("cuda"))
        for name, tensor in vars(batch).items():
            if isinstance(tensor, torch.Tensor):
                assert tensor.is_pinned(), name
                assert torch.equal(getattr(on_device, name).cpu(), tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_batches_have_the_sizes_of_a_layouts_own(kind: str) -> None:
    made = layout(kind)
    for shape in made.shapes:
        slots = made.max_docs(*shape)
        assert len(warm_up_batch(shape[0], made.batch_shape(*shape), 10).cu_seqlens) == slots + 1


# ---- batch sizes ----


def test_micro_batch_is_lowered_to_a_divisor_of_the_ranks_share() -> None:
    made = layout("packed", world_size=2, micro=16, batch=24)
    assert (made.micro_batch_size, made.accumulation) == (12, 1)
    made = layout("packed", world_size=2, micro=5, batch=24)
    assert (made.micro_batch_size, made.accumulation) == (4, 3)
