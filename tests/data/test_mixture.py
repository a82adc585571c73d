"""The order of documents over a run: blocks, weights, stages, passes, and a resume from a few integers."""

from __future__ import annotations

import hashlib
import json
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from helpers import make_examples

from sftkit.checkpoint.resume import run_identity, source_differences
from sftkit.config.schema import DataConfig, SourceConfig, StageConfig, TrainConfig
from sftkit.data.batches import blocks, order
from sftkit.data.batches.blocks import BlockOrder, BucketOrder
from sftkit.data.batches.epoch import GlobalBatch, RankRows, plan_epoch, plan_rows
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.order import Cursor, Mixture, Order, known_by_source, mixture_of, segments_of
from sftkit.data.batches.pack import Layout, PlanSegment, SourcePlan, make_layout
from sftkit.data.types import DocumentColumns, Examples
from sftkit.errors import ConfigError

KINDS = ("packed", "bucketed", "fixed", "dynamic")
Item = tuple[int, int, GlobalBatch]


def layout(lengths: np.ndarray, kind: str = "packed", batch: int = 12, longest: int = 64) -> Layout:
    data = DataConfig(train=(), layout=kind)  # type: ignore[arg-type]
    return make_layout(data, TrainConfig(max_steps=1, global_batch_size=batch, micro_batch_size=4), lengths, longest)


def rows(items: Iterable[Item]) -> list[Any]:
    return [(step, epoch, batch.row_length, batch.rows, batch.pairs.tolist()) for step, epoch, batch in items]


def taken(items: Iterable[Item]) -> Counter[int]:
    return Counter(int(i) for _, _, batch in items for i in batch.documents)


def as_saved(cursors: Sequence[Cursor]) -> list[Cursor]:
    """The cursors after a checkpoint was written and read."""
    return [Cursor(a, b, c, tuple(n), tuple(t)) for a, b, c, n, t in json.loads(json.dumps(cursors))]


# ---- one block ----


@pytest.mark.parametrize("kind_of_order", [Order, BlockOrder])
def test_what_fits_one_block_is_planned_as_before_there_were_blocks_bit_for_bit(kind_of_order: type[Order]) -> None:
    lengths = np.random.default_rng(0).integers(1, 33, 300)
    golden = {"packed": "4d92f529711fa4b8", "bucketed": "8016ee770bbbabfc", "fixed": "92944dc295906142"}
    for kind, digest in golden.items():
        made = layout(lengths, kind, longest=32)
        found = kind_of_order(
            lengths, made, [PlanSegment(0, 3, 12, 4), PlanSegment(5, 3, 8, 4), PlanSegment(9, 7, 16, 4)]
        )
        text = repr([(s, e, b.row_length, b.rows, tuple(b.pairs.tolist())) for s, e, b in found.batches(0, 60)])
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest, kind


# ---- bucketed rows of more than a block ----


def test_large_bucketed_epochs_take_each_document_once_and_any_step_is_planned_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 999)
    made = layout(lengths, "bucketed")
    segments = [PlanSegment(0, 3, 12, 4), PlanSegment(15, 3, 8, 4), PlanSegment(25, 7, 16, 4)]
    found = order.order_of(lengths, made, segments[:1], block=100)
    assert type(found) is BucketOrder
    steps = found.num_steps(1)
    # As many steps as the same documents take if the epoch is planned whole.
    assert steps == Order(lengths, made, segments[:1]).num_steps(1)
    items = list(found.batches(0, 2 * steps))
    for epoch in (0, 1):
        own = [item for item in items if item[1] == epoch]
        assert taken(own) == Counter(range(999))
        assert len(own) == steps
        for _, _, batch in own:
            assert len(batch.borders) - 1 == made.rows(batch.row_length)
            sizes = lengths[batch.documents]
            assert (
                (sizes <= batch.row_length)
                & (np.searchsorted(made.row_lengths, sizes) == made.row_lengths.index(batch.row_length))
            ).all()
    assert rows(items[:steps]) != rows(items[steps:])
    assert len({batch.row_length for _, _, batch in items[:20]}) > 1, "buckets are mixed"
    again = order.order_of(lengths, made, segments[:1], as_saved(found.state(steps + 5)), block=100)
    assert rows(again.batches(steps + 5, 2 * steps)) == rows(items[steps + 5 :])
    # Another global batch and another seed within an epoch: each document is still taken once.
    begun = order.order_of(lengths, made, segments, block=100)
    end = begun.num_steps(1)
    assert end > 25
    assert taken(begun.batches(0, end)) == Counter(range(999))
    given = order.order_of(lengths, made, [PlanSegment(0, 3, 12, 4, (SourcePlan("a", 999, order="given"),))], block=100)
    every = [list(batch.documents) for _, _, batch in given.batches(0, steps)]
    assert all(one == sorted(one) for one in every)
    assert begun.first_batches()[1] == len(begun._planned(begun._part(0)))


def test_bucketed_data_that_grows_beyond_a_block_within_an_epoch_loses_no_document_and_takes_none_twice() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 500)
    made = layout(lengths, "bucketed")
    segments = [PlanSegment(0, 3, 12, 4, (SourcePlan("a", 300),)), PlanSegment(9, 3, 12, 4, (SourcePlan("a", 500),))]
    begun = order.order_of(lengths[:300], made, segments[:1], block=400)
    known = as_saved(begun.state(9))
    grown = order.order_of(lengths, made, segments, known, block=400)
    assert type(begun) is Order
    assert type(grown) is BucketOrder
    rest = grown.batches(9, grown.num_steps(1))
    assert taken(begun.batches(0, 9)) + taken(rest) == Counter(range(500))
    part_of_a_pass = PlanSegment(9, 3, 12, 4, (SourcePlan("a", 600, repeat=1.5),))
    with pytest.raises(ConfigError, match="bucketed epochs of more than 200 documents cannot begin to take a part"):
        order.order_of(np.tile(lengths[:300], 2), made, [segments[0], part_of_a_pass], known, block=200)


# ---- permutations ----


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 256, 257, 5000])
def test_a_permutation_moves_each_place_of_any_range_to_another_one_under_every_key(size: int) -> None:
    seen = set()
    for key in range(4):
        found = blocks.permuted(np.arange(size), size, blocks.key_of(7, key))
        assert sorted(found.tolist()) == list(range(size))
        seen.add(tuple(found.tolist()))
    assert len(seen) == 4 or size < 5
    both = blocks.permuted(np.repeat(np.arange(size), 2), size, blocks.key_of(7, np.tile([0, 1], size)))
    assert both[::2].tolist() == blocks.permuted(np.arange(size), size, blocks.key_of(7, 0)).tolist()


def test_neighbours_of_a_permutation_are_as_far_apart_as_by_chance() -> None:
    found = blocks.permuted(np.arange(50_000), 50_000, blocks.key_of(1, 2))
    assert abs(np.diff(found)).mean() == pytest.approx(50_000 / 3, rel=0.02)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02


# ---- several blocks ----


def blocks_of(lengths: np.ndarray, kind: str = "packed", how: str = "global", **known: Any) -> Order:
    sources = (SourcePlan("a", 1800, order=how), SourcePlan("b", len(lengths) - 1800, order=how))
    return BlockOrder(lengths, layout(lengths, kind), [PlanSegment(0, 1, 12, 4, sources)], block=700, **known)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["global", "window", "given"])
def test_epochs_of_several_blocks_have_each_document_once_in_steps_that_are_known_before(
    kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "WINDOW", 500)
    lengths = np.random.default_rng(1).integers(1, 65, 3000)
    made = blocks_of(lengths, kind, how)
    last = made.num_steps(2)
    one = made.num_steps(1)
    assert last == 2 * one
    items = list(made.batches(0, last))
    assert [step for step, _, _ in items] == list(range(1, last + 1))
    assert taken(items[:one]) == taken(items[one:]) == Counter(range(3000))
    assert [epoch for _, epoch, _ in items] == [0] * one + [1] * one
    assert all(len(batch.documents) for _, _, batch in items)
    differ = rows(items[:one])[0][3] != rows(items[one:])[0][3]
    assert differ == (how != "given")
    if kind == "packed":
        empty = sum(int((np.diff(batch.borders) == 0).sum()) for _, _, batch in items)
        assert empty <= 2 * (12 + 5 * 4)
    for step in np.random.default_rng(2).integers(0, last, 4).tolist():
        again = blocks_of(lengths, kind, how, known=as_saved(made.state(step)))
        assert rows(again.batches(step, last)) == rows(items[step:])
        assert again.num_steps(2) == last


def test_windows_keep_documents_together_and_change_places_in_later_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "WINDOW", 500)
    stream = blocks.DocumentOrder.begun(0, 0, 5, "window", ((0, 2300),))
    first, second = stream.documents(0, 2300), stream.documents(2300, 4600)
    assert [set((first[a : a + 500] // 500).tolist()) for a in range(0, 2300, 500)] == [{0}, {1}, {2}, {3}, {4}]
    windows = [set((second[a : a + 500] // 500).tolist()) for a in range(0, 2300, 500)]
    assert sorted(map(min, windows)) == [0, 1, 2, 3, 4]
    assert windows != [{0}, {1}, {2}, {3}, {4}]
    assert all(len(window) == 1 for window in windows)
    assert Counter(first.tolist()) == Counter(second.tolist()) == Counter(range(2300))


def test_a_resume_in_a_later_block_plans_that_block_and_the_first() -> None:
    lengths = np.random.default_rng(1).integers(1, 65, 6000)
    made = blocks_of(lengths)
    items = list(made.batches(0, made.num_steps(1)))
    step = len(items) * 3 // 4
    planned = []

    def counting(lengths: np.ndarray, made: Layout, row_length: int, documents: np.ndarray, rng: Any) -> Any:
        planned.append(len(documents))
        return plan_rows(lengths, made, row_length, documents, rng)

    again = blocks_of(lengths, known=as_saved(made.state(step)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "plan_rows", counting)
        assert rows(again.chunks(step, step + 1).__next__()[:1]) == rows(items[step : step + 1])
    assert len(planned) <= 2


def test_documents_that_do_not_fit_the_steps_of_an_epoch_come_first_in_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Later documents fill their rows worse than those by which the steps are counted.
    lengths = np.concatenate([np.full(1000, 16), np.full(1000, 33)])
    made = BlockOrder(
        lengths, layout(lengths), [PlanSegment(0, 1, 12, 4, (SourcePlan("a", 2000, order="given"),))], block=500
    )
    one = made.num_steps(1)
    items = list(made.batches(0, 4 * one))
    late = set(range(2000)) - set(taken(items[:one]))
    assert late
    assert " rows of epoch 0 do not fit its steps" in caplog.text
    assert late <= set(taken(items[one : one + len(late) // 12 + 2]))
    assert set(taken(items[: 3 * one])) == set(range(2000))


# ---- weights ----


def random_sources(rng: np.random.Generator, count: int) -> tuple[np.ndarray, tuple[SourcePlan, ...]]:
    sizes = rng.integers(1, 600, count).tolist()
    weights = (rng.random(count) + 0.02).tolist()
    lengths = rng.integers(1, 65, sum(sizes))
    return lengths, tuple(SourcePlan(f"s{i}", n, w) for i, (n, w) in enumerate(zip(sizes, weights, strict=True)))


@pytest.mark.parametrize("seed", range(6))
def test_shares_hold_to_a_document_from_the_start_and_each_epoch_has_each_document_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, sources = random_sources(np.random.default_rng(seed), 1 + seed)
    drawn: list[int] = []

    def noted(lengths: np.ndarray, made: Layout, row_length: int, documents: np.ndarray, rng: Any) -> Any:
        assert rng is None
        drawn.extend(documents.tolist())
        return plan_rows(lengths, made, row_length, documents, rng)

    monkeypatch.setattr(blocks, "plan_rows", noted)
    made = BlockOrder(lengths, layout(lengths), [PlanSegment(0, seed, 12, 4, sources)], block=900)
    part = made._part(0)
    cursor = part.cursors[0]
    for _ in range(4):
        block = made._plan_mixed(part, cursor)
        assert block is not None
        cursor = block.after
    documents = np.array(drawn)
    ends = np.cumsum([source.documents for source in sources])
    source_of = np.searchsorted(ends, documents, "right")
    tokens = np.cumsum((source_of[:, None] == np.arange(len(sources))) * lengths[documents][:, None], axis=0)
    weights = np.array([source.weight for source in sources], float)
    behind = tokens - tokens.sum(1)[:, None] * weights / weights.sum()
    assert abs(behind).max() <= lengths.max()
    assert np.ptp(behind, axis=0).max() <= 1.5 * lengths.max()  # windows that begin anywhere
    for k, source in enumerate(sources):
        own = documents[source_of == k]
        for epoch in range(len(own) // source.documents):
            assert len(set(own[epoch * source.documents : (epoch + 1) * source.documents].tolist())) == source.documents


@pytest.mark.parametrize("seed", range(4))
def test_stages_seeds_and_batch_sizes_change_in_a_mixture_and_no_document_is_lost_or_taken_again(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, sources = random_sources(rng, 3)
    other = [source._replace(weight=float(w)) for source, w in zip(sources, (0.0, *rng.random(2)), strict=True)]
    segments = [
        PlanSegment(0, 1, 12, 4, sources),
        PlanSegment(40, 1, 12, 4, tuple(other)),
        PlanSegment(61, 2, 8, 4, sources),
    ]
    made = BlockOrder(lengths, layout(lengths), segments, block=300)
    items = list(made.batches(0, 90))
    part = made._parts[2]
    left, _, after = made._untaken(part, 90)
    waiting = np.concatenate([p[n:] for p, n in zip(part.pending, after.documents, strict=True)])
    every = taken(items) + Counter(left.tolist()) + Counter(waiting.tolist())
    ends = np.cumsum([0, *(source.documents for source in sources)]).tolist()
    for start, end in pairwise(ends):
        passes = {every[i] for i in range(start, end)}
        assert max(passes) - min(passes) <= 1
    first = ends[1]
    assert not any((batch.documents < first).any() for step, _, batch in items if 40 < step <= 61)
    for step in rng.integers(0, 90, 4).tolist():
        again = BlockOrder(lengths, layout(lengths), segments, known=as_saved(made.state(step)), block=300)
        assert rows(again.batches(step, 90)) == rows(items[step:])


def test_a_source_ends_after_its_max_epochs_when_it_was_said_and_the_others_keep_their_proportions() -> None:
    lengths = np.full(600, 32)
    sources = (SourcePlan("a", 100, 0.5, 2), SourcePlan("b", 400, 0.3), SourcePlan("c", 100, 0.2))
    made = BlockOrder(lengths, layout(lengths), [PlanSegment(0, 0, 12, 4, sources)], block=200)
    passes, ends = zip(*made.forecast(60), strict=True)
    assert ends[1:] == (None, None)
    items = list(made.batches(0, 60))
    of_source = [sum(n for i, n in taken(items).items() if a <= i < b) for a, b in ((0, 100), (100, 500), (500, 600))]
    assert of_source[0] == 200
    assert of_source[1] / of_source[2] == pytest.approx(1.5, rel=0.02)
    assert [n / size for n, size in zip(of_source, (100, 400, 100), strict=True)] == pytest.approx(passes, rel=0.02)
    last = max(step for step, _, batch in items if (batch.documents < 100).any())
    assert abs(last - ends[0]) <= 1
    ending = [source._replace(max_epochs=1) for source in sources]
    with pytest.raises(ConfigError, match=r"all sources with a weight have reached their max_epochs at about step 25"):
        BlockOrder(lengths, layout(lengths), [PlanSegment(0, 0, 12, 4, tuple(ending))]).forecast(60)


# ---- passes ----


@pytest.mark.parametrize("block", [10_000, 250])
def test_a_part_of_a_pass_takes_that_many_documents_and_others_in_each_epoch(block: int) -> None:
    lengths = np.random.default_rng(3).integers(1, 65, 900)
    sources = (SourcePlan("a", 600, repeat=1.25), SourcePlan("b", 300))
    made = BlockOrder(lengths, layout(lengths), [PlanSegment(0, 1, 12, 4, sources)], block=block)
    one, two = made.num_steps(1), made.num_steps(2)
    items = list(made.batches(0, two))
    epochs = [taken(items[:one]), taken(items[one:])]
    for seen in epochs:
        assert set(range(300)) | set(range(600, 900)) <= set(seen)
        assert max(seen.values()) == 1
        assert len(seen) == 600 + 75
    assert epochs[0].keys() != epochs[1].keys()


# ---- changes of a run ----


@pytest.mark.parametrize("block", [10_000, 250])
@pytest.mark.parametrize("weight", [None, 1.0])
def test_longer_and_new_sources_join_the_epoch_and_nothing_is_lost_or_taken_again(
    block: int, weight: float | None
) -> None:
    rng = np.random.default_rng(4)
    parts = {name: rng.integers(1, 65, n) for name, n in (("a", 500), ("new", 200), ("b", 400))}
    before = np.concatenate([parts["a"][:300], parts["b"]])
    after = np.concatenate([*parts.values()])
    old = (SourcePlan("a", 300, weight), SourcePlan("b", 400, weight))
    new = tuple(SourcePlan(name, len(lengths), weight) for name, lengths in parts.items())
    begun = BlockOrder(before, layout(before), [PlanSegment(0, 1, 12, 4, old)], block=block)
    first = list(begun.batches(0, 9))
    segments = segments_of([PlanSegment(0, 1, 12, 4, old)], 9, layout(after), 1, Mixture(new))
    assert [segment.after_step for segment in segments] == [0, 9]
    made = BlockOrder(
        after,
        layout(before),
        segments,
        known=known_by_source(as_saved(begun.state(9)), segments[:1], Mixture(new)),
        block=block,
    )
    last = made.num_steps(1) if weight is None else 60
    items = list(made.batches(9, last))
    now = Counter({i if i < 300 else i + 400: n for i, n in taken(first).items()})  # b stands behind what is new
    seen = now + taken(items)
    if weight is None:
        assert seen == Counter(range(1100))
        return
    part = made._parts[1]
    left, _, after_block = made._untaken(part, last)
    waiting = np.concatenate([p[n:] for p, n in zip(part.pending, after_block.documents, strict=True)])
    seen += Counter(left.tolist()) + Counter(waiting.tolist())
    assert set(seen) <= set(range(1100))
    for start, end in ((0, 300), (300, 500), (500, 700), (700, 1100)):
        passes = {seen[i] for i in range(start, end)}
        assert max(passes) - min(passes) <= 1


def test_weights_cannot_begin_or_end_within_a_run() -> None:
    made = layout(np.array([3, 4]))
    plain = segments_of((), 0, made, 1, Mixture((SourcePlan("a", 2),)))
    with pytest.raises(ConfigError, match="the checkpoint of step 5 is of a run in which sources had weights, or"):
        segments_of(plain, 5, made, 1, Mixture((SourcePlan("a", 2, 1.0),)))


def named_examples(sizes: dict[str, int], changed: int | None = None) -> Examples:
    lengths = [3 + i % 7 for n in sizes.values() for i in range(n)]
    ids = np.concatenate([np.arange(n + 1) for n in lengths])
    if changed is not None:
        ids[sum(n + 1 for n in lengths[:changed]) + 1] += 1
    source = np.repeat(np.arange(len(sizes)), [*sizes.values()]).astype(np.int16)
    return replace(Examples.of(ids, lengths), source=source, source_names=tuple(sizes))


def test_data_that_is_no_continuation_is_rejected_by_the_name_of_its_source(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sftkit.checkpoint.resume.padding_rows", lambda _: 0)
    monkeypatch.setattr("sftkit.checkpoint.resume.adapters_of", lambda _: None)

    class Model:
        class config:
            @staticmethod
            def to_json_string(use_diff: bool) -> str:
                return "{}"

    def identity(examples: Examples) -> dict[str, Any]:
        return run_identity(Model(), tokenizer, examples, layout(examples.lengths))  # type: ignore[arg-type]

    there = json.loads(json.dumps(identity(named_examples({"a": 20, "b": 9}))))["sources"]
    assert source_differences(there, named_examples({"a": 20, "b": 9})) == ([], [])
    for sizes, changed, words in (
        ({"a": 20, "b": 9}, 22, r"source b does not begin with the 9 documents .*\(others are in their places\)"),
        ({"a": 19, "b": 9}, None, r"source a does not begin with the 20 documents .*\(it has 19\)"),
        ({"a": 20}, None, r"source b .*\(no source has that name: keep it, with weight 0"),
    ):
        grown, (line,) = source_differences(there, named_examples(sizes, changed))
        assert not grown
        assert re.match(words, line)
    more = ["source new is new", "source a has 2 documents more than the checkpoint knows"]
    assert source_differences(there, named_examples({"a": 22, "new": 3, "b": 9})) == (more, [])
    # A plan of trees has planned the last one: rows of the same conversation would change it.
    for last, turns, lines in ((1, 2, 1), (2, 2, 0), (1, 0, 0)):
        examples = named_examples({"b": 9, "a": 22})
        head = np.array([*range(100, 109), *([1] * 20), last, 3], np.uint64)
        columns = (head, np.full(len(head), turns), head, head)
        examples = replace(examples, columns=DocumentColumns(lambda columns=columns: columns))
        assert len(source_differences(there, examples)[1]) == 0
        _, found = source_differences(there, examples, trees=True)
        assert len(found) == lines
        assert all(line.startswith("source a goes on with the conversation") for line in found)


# ---- whole runs ----


def data_of(weighted: bool) -> tuple[DataConfig, Examples]:
    rng = np.random.default_rng(6)
    examples = make_examples(rng.integers(3, 33, 400).tolist())
    source = np.repeat([0, 1], [300, 100]).astype(np.int16)
    weights = (3.0, 1.0) if weighted else (None, None)
    sources = tuple(SourceConfig(path=name, weight=w) for name, w in zip("ab", weights, strict=True))
    stages = (StageConfig(at=0.5, weights={"b": 1.0}),) if weighted else ()
    return DataConfig(train=sources, stages=stages), replace(examples, source=source, source_names=("a", "b"))


def batches_of(
    weighted: bool, ranks: int, rank: int, workers: int = 0, resumed: dict[str, Any] | None = None
) -> Batches:
    data, examples = data_of(weighted)
    train = TrainConfig(max_steps=30, global_batch_size=8, micro_batch_size=1)
    made = make_layout(data, train, examples.lengths, 32, ranks)
    dataset = StepDataset(examples, made, RankRows(rank))
    return Batches(dataset, 1, num_workers=workers, mixture=mixture_of(data, train, examples, made), **(resumed or {}))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_run_resumed_on_other_ranks_and_workers_goes_on_with_the_same_steps(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order.order_of, "__defaults__", ((), 90))
    whole = batches_of(weighted, 1, 0)
    steps = [sorted(step.documents) for step in whole.steps(0, 30)]
    if weighted:
        assert all(i >= 300 for step in steps[15:] for i in step)
        assert any(i < 300 for step in steps[:15] for i in step)
    rng = np.random.default_rng(7)
    for ranks, workers in ((1, 2), (2, 0), (4, 0), (8, 0)):
        step = int(rng.integers(1, 29))
        resumed = {
            "earlier": [segment for segment in whole.segments if segment.after_step < step],
            "first_step": step,
            "known": as_saved(whole.order.state(step)),
        }
        found = [list(batches_of(weighted, ranks, rank, workers, resumed).steps(step, 30)) for rank in range(ranks)]
        together = [sorted(i for one in same for i in one.documents) for same in zip(*found, strict=True)]
        assert together == steps[step:]
        targets = [one.num_targets for one in whole.steps(step, 30)]
        assert [[one.num_targets for one in of_rank] for of_rank in found] == [targets] * ranks


def test_a_budget_of_tokens_is_the_number_of_steps() -> None:
    data, examples = data_of(weighted=True)
    made = layout(examples.lengths, batch=8, longest=32)
    train = TrainConfig(global_batch_size=8)
    found = mixture_of(replace(data, tokens=8 * 32 * 99 + 1.0), train, examples, made)
    assert found.max_steps == 100
    assert found.stages == ((50, (0.0, 1.0)),)


# ---- size ----


def lengths_on_disk(folder: Path, documents: int) -> np.ndarray:
    made = np.memmap(folder / f"{documents}.bin", np.int32, "w+", shape=(documents,))
    made[:] = np.clip(np.random.default_rng(0).lognormal(np.log(270), 0.9, documents), 8, 2048)
    return made


@pytest.mark.parametrize("weight", [None, 1.0])
def test_the_memory_of_plans_does_not_grow_with_the_corpus(tmp_path: Path, weight: float | None) -> None:
    peaks = []
    for documents in (10_000, 100_000):  # 4 and 40 million tokens
        lengths = lengths_on_disk(tmp_path, documents)
        made = layout(lengths[:5000], batch=64, longest=2048)
        sources = (SourcePlan("a", documents // 2, weight), SourcePlan("b", documents - documents // 2, weight))
        tracemalloc.start()
        begun = BlockOrder(lengths, made, [PlanSegment(0, 0, 64, 8, sources)], block=2000)
        last = begun.num_steps(1) if weight is None else 15
        for _ in begun.batches(0, 15):
            pass
        again = BlockOrder(lengths, made, [PlanSegment(0, 0, 64, 8, sources)], known=begun.state(12), block=2000)
        for _ in again.batches(12, min(15, last)):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.slow
@pytest.mark.parametrize("weight", [None, 1.0])
def test_plans_of_ten_million_documents_start_and_resume_in_about_the_time_of_a_block(
    tmp_path: Path, weight: float | None
) -> None:
    lengths = lengths_on_disk(tmp_path, 10_000_000)
    made = layout(lengths[:100_000], batch=64, longest=2048)
    sources = tuple(SourcePlan(name, 2_500_000, weight) for name in "abcd")
    segments = [PlanSegment(0, 0, 64, 8, sources)]

    def timed(known: Sequence[Cursor], step: int) -> tuple[float, Order]:
        started = time.process_time()
        begun = BlockOrder(lengths, made, segments, known=known)
        last = begun.num_steps(1) if weight is None else 10**5
        next(begun.chunks(step, last))  # without the next block, which is planned meanwhile
        return time.process_time() - started, begun

    def block() -> float:
        started = time.process_time()
        plan_epoch(lengths, made, 0, 0, np.arange(order.BLOCK))
        return time.process_time() - started

    _, begun = timed((), 0)
    for _ in begun.batches(0, 3000):
        pass
    known = begun.state(3000)
    assert known[-1].rows > 150_000
    blocks, starts, resumes = [], [], []
    for _ in range(3):
        blocks.append(block())
        starts.append(timed((), 0)[0])
        resumes.append(timed(known, 3000)[0])
    print(f"block {median(blocks):.2f} s, start {median(starts):.2f} s, resume {median(resumes):.2f} s")
    # 10 million documents are 76 blocks; machines differ in what their other work costs next to a block.
    most = 8 * median(blocks)
    assert median(starts) <= most
    assert median(resumes) <= most
