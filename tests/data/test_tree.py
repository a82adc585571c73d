"""Rows of prefix trees hold exactly the documents: each is a path from the root, with its own targets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import cpu_runtime, tiny_llama

from sftkit.config.schema import DataConfig, LossConfig, SourceConfig, StageConfig, TrainConfig
from sftkit.data.batches.collate import IGNORE, TARGET_MULTIPLE, Batch, collate, warm_up_batch
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.order import mixture_of
from sftkit.data.batches.pack import BatchShape, make_layout
from sftkit.data.batches.tree import Trees, largest_first, trees_of
from sftkit.data.types import DocumentColumns, Examples
from sftkit.errors import ConfigError
from sftkit.models.structure import Work, train_flops
from sftkit.objectives.objective import NextToken, Totals
from sftkit.preflight.data import tree_facts, trees_line
from sftkit.tracking.meter import Meter
from sftkit.tracking.names import Flags, StepOutcome


def of_documents(documents: list[list[int]], is_target: list[list[bool]] | None = None) -> Examples:
    ids = np.concatenate([np.array(one, np.int32) for one in documents])
    learned = None if is_target is None else np.concatenate([np.array(one, bool) for one in is_target])
    return Examples.of(ids, [len(one) - 1 for one in documents], is_target=learned)


def of_group(documents: list[list[int]]) -> Examples:
    same = np.zeros(len(documents), np.uint64)
    columns = DocumentColumns(lambda: (same.astype(int), same.astype(int) + 2, same, same))
    return replace(of_documents(documents), columns=columns)


def conversations(rng: np.random.Generator, groups: int, tokens: int = 3, longest: int = 9) -> Examples:
    """Documents of groups that begin with one token, of few different tokens so that they share much."""
    documents, targets, heads = [], [], []
    for group in range(groups):
        for _ in range(rng.integers(1, 6)):
            body = rng.integers(10, 10 + tokens, rng.integers(1, longest)).tolist()
            documents.append([group % 7, *body])
            targets.append([False, *(rng.random(len(body)) < 0.6).tolist()])
            heads.append(group)
    made = of_documents(documents, targets)
    head = np.array(heads, np.uint64)
    turns = np.full(len(heads), 2)
    return replace(
        made, columns=DocumentColumns(lambda: (head.astype(np.int64), turns, head, head)), source_names=("made",)
    )


def settings(repeat: float = 1, **more: object) -> DataConfig:
    return DataConfig(train=(SourceConfig(path="made", repeat=repeat),), layout="tree", **more)  # type: ignore[arg-type]


def beginnings(documents: list[list[int]]) -> set[tuple[int, ...]]:
    """The positions of a tree by hand: all beginnings of documents without their last token."""
    return {tuple(one[:n]) for one in documents for n in range(1, len(one))}


def paths(batch: Batch, row: int) -> list[tuple[int, ...]]:
    """The tokens that each position of a row sees, by tree_ends alone."""
    assert batch.tree_ends is not None
    ids, ends = batch.inputs["input_ids"][row].tolist(), batch.tree_ends[row].tolist()
    return [tuple(ids[k] for k in range(q + 1) if q < ends[k]) for q in range(len(ids))]


def edges(batch: Batch) -> list[tuple[int, int, float]]:
    """(position, token, weight) of the edges that are targets."""
    assert batch.edge_targets is not None
    assert batch.edge_weights is not None
    every = zip(*(one.tolist() for one in (batch.target_index, batch.edge_targets, batch.edge_weights)), strict=True)
    found = [edge for edge in every if edge[1] != IGNORE]
    assert all(weight == 0 for _, token, weight in every if token == IGNORE)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_row_of_trees_has_each_document_as_a_path_and_each_target_as_an_edge(seed: int) -> None:
    rng = np.random.default_rng(seed)
    examples = conversations(rng, groups=12)
    trees = trees_of(examples, settings(), row_length=64)
    rows, sizes = trees.in_rows([tuple(range(5)), (), tuple(range(5, len(trees)))])
    length = 8 + max(int(trees.lengths[:5].sum()), int(trees.lengths[5:].sum()))
    batch = collate(examples, rows, BatchShape(length, 99, 32, tree=True), pad_id=2, trees=sizes)
    assert batch.tree_documents is not None
    all_edges = edges(batch)
    seen = Counter[int]()
    number = 0
    for row, docs in enumerate(rows):
        visible = paths(batch, row)
        column = 0
        for tree in range(len((range(5), (), range(5, len(trees)))[row])):
            own = [examples[i] for i in docs[: sizes[number]]]
            docs = docs[sizes[number] :]
            expected = beginnings([one.ids.tolist() for one in own])
            here = range(column, column + len(expected))
            # Each beginning of a document is one position, which sees itself and what is before it.
            assert {visible[q] for q in here} == expected
            assert len(expected) == trees.lengths[number]
            assert set(batch.doc_ids[row, column : column + len(expected)].tolist()) == {tree}
            holders = Counter(tuple(one.ids[:n].tolist()) for one in own for n in range(1, len(one.ids)))
            learned = Counter(
                tuple(one.ids[: n + 1].tolist()) for one in own for n in range(1, len(one.ids)) if one.is_target[n]
            )
            for q in here:
                assert batch.inputs["position_ids"][row, q] == len(visible[q]) - 1
                assert batch.tree_documents[row, q] == holders[visible[q]]
            mine = [(q - row * length, *rest) for q, *rest in all_edges if q // length == row]
            found = {(*visible[q], token): weight for q, token, weight in mine if q in here}
            assert found == learned
            seen.update({row: len(found)})
            column += len(expected)
            number += 1
        # Padding is causal in chunks of max_doc_length, and holds nothing.
        assert [len(one) for one in visible[column:]] == [i % 32 + 1 for i in range(length - column)]
        assert set(batch.doc_ids[row, column:].tolist()) <= {-1}
        assert not batch.tree_documents[row, column:].any()
    assert sum(seen.values()) == len(all_edges)
    assert batch.num_targets == int(examples.num_targets.sum()) == sum(weight for *_, weight in all_edges)
    assert int(batch.tree_documents.sum()) == int(examples.lengths.sum())
    assert batch.num_edges == len(all_edges) == batch.num_targets - trees.again.sum()
    assert batch.num_tokens == int(trees.lengths.sum())
    positions = batch.target_index[: len(all_edges)]
    assert torch.equal(positions, positions.sort().values)
    assert len(batch.target_index) % TARGET_MULTIPLE == 0
    assert (batch.targets == IGNORE).all()
    starts = batch.cu_seqlens.tolist()
    assert {row * length for row in range(3)} <= {*starts}


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_counts_what_the_rows_hold(seed: int) -> None:
    examples = conversations(np.random.default_rng(seed), groups=40)
    trees = trees_of(examples, settings(), row_length=64)
    assert sorted(trees.documents.tolist()) == list(range(len(examples)))
    for g, (a, b) in enumerate(pairwise(trees.first.tolist())):
        own = [examples[i].ids.tolist() for i in trees.documents[a:b]]
        assert trees.lengths[g] == len(beginnings(own))
        assert int(trees.shared[a:b].sum()) == sum(len(one) - 1 for one in own) - trees.lengths[g]
        heads = examples.columns.content[trees.documents[a:b]]  # type: ignore[union-attr]
        assert len(set(heads.tolist())) == 1


def test_the_largest_branch_comes_first() -> None:
    trunk = [1, *range(100, 140)]
    side, late = [1, 100, 101, 7, 7], [1, *range(100, 130), 9, 9]
    ids = [np.array(one, np.int32) for one in (side, late, trunk)]
    assert largest_first(ids) == [(2, 0), (1, 31), (0, 3)]


def test_the_drawing_in_the_documentation_is_what_a_row_holds() -> None:
    q, t, a, u, c, stop = range(1, 7)
    examples = of_documents(
        [[q, t, a, stop], [q, a, u, c, stop]], [[False, True, True, True], [False] * 3 + [True] * 2]
    )
    batch = collate(examples, ((0, 1),), BatchShape(6, 4, 6, tree=True))
    assert batch.tree_ends is not None
    assert batch.inputs["input_ids"].tolist() == [[q, a, u, c, t, a]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 1, 2]]
    assert batch.tree_ends.tolist() == [[6, 4, 4, 4, 6, 6]]
    assert edges(batch) == [(0, t, 1.0), (2, c, 1.0), (3, stop, 1.0), (4, a, 1.0), (5, stop, 1.0)]


def test_a_tree_that_a_row_does_not_hold_falls_apart_at_a_branch() -> None:
    documents = [[*range(20), 50 + i, *range(60, 69)] for i in range(4)]
    trees = trees_of(of_group(documents), settings(), row_length=40)
    # 29 positions for the first, 9 for each that shares 20 with it.
    assert trees.lengths.tolist() == [38, 38]
    assert trees.cut == 1
    assert [*trees.shared] == [0, 20, 0, 20]


def test_copies_of_a_pass_are_no_tree() -> None:
    once = conversations(np.random.default_rng(0), groups=1)
    twice = once.take(np.tile(np.arange(len(once)), 2))
    trees = trees_of(twice, settings(repeat=2), row_length=64)
    half = trees_of(once, settings(), row_length=64)
    assert len(trees) == 2 * len(half)
    assert trees.lengths.tolist() == [*half.lengths, *half.lengths]


def test_texts_are_no_trees() -> None:
    examples = of_group([[1, 2, 3, 4], [1, 2, 3, 5]])
    assert examples.columns is not None
    row, _, own, head = examples.columns
    no_turns = DocumentColumns(lambda: (row, np.zeros(2, np.int64), own, head))
    texts = replace(examples, columns=no_turns)
    assert len(trees_of(examples, settings(), row_length=64)) == 1
    assert len(trees_of(texts, settings(), row_length=64)) == 2


def test_documents_with_encoder_inputs_are_rejected_with_the_cure() -> None:
    examples = replace(of_group([[1, 2, 3], [1, 2, 4]]), encoder_sources=("a.png", "b.png"))
    with pytest.raises(ConfigError, match=r"tree does not go with a model with an encoder.*take"):
        trees_of(examples, settings(), row_length=64)


def planned(examples: Examples, data: DataConfig, **run: object) -> tuple[Batches, Trees]:
    train = TrainConfig(global_batch_size=4, micro_batch_size=2, max_steps=40)
    trees = trees_of(examples, data, 64)
    layout = make_layout(data, train, trees.lengths, 32)
    dataset = StepDataset(examples, layout, trees=trees)
    mixture = mixture_of(data, train, trees, layout)
    return Batches(dataset, seed=3, mixture=mixture, **run), trees  # type: ignore[arg-type]


def test_a_plan_of_trees_takes_each_document_once_and_counts_all_of_them() -> None:
    examples = conversations(np.random.default_rng(5), groups=200)
    batches, trees = planned(examples, settings(max_length=32, row_length=64))
    steps = batches.num_steps(epochs=1)
    taken: list[int] = []
    for step in batches.steps(0, steps):
        taken += step.documents
        assert step.num_tokens == sum(step.document_lengths)
        held = [one.tree_documents for one in step.micro_batches if one.tree_documents is not None]
        assert step.num_tokens == int(torch.stack(held).sum())
        assert step.num_tokens - sum(step.document_shared) == sum(one.num_tokens for one in step.micro_batches)
        assert step.num_targets - step.targets_again == sum(one.num_edges for one in step.micro_batches)
        assert step.num_targets == step.divisor == sum(one.num_targets for one in step.micro_batches)
        assert sum(step.documents_per_micro_batch) == len(step.documents)
    assert sorted(taken) == list(range(len(examples)))
    assert batches.num_documents(0, steps) == len(examples)
    assert batches.layout.max_doc_length >= trees.lengths.max()


def test_flops_have_the_logits_of_a_target_once_that_documents_of_a_tree_share() -> None:
    batches, _ = planned(conversations(np.random.default_rng(5), groups=50), settings(max_length=32, row_length=64))
    model, objective = tiny_llama(), NextToken(LossConfig())
    meter = Meter(model, objective, batches, cpu_runtime())
    zero = torch.zeros(())
    outcome = StepOutcome(Totals.zeros(objective.measured, zero.device), zero, Flags.of(zero, zero, zero), zero[None])
    for step in batches.steps(0, 3):
        meter.add(step, outcome)
        assert step.targets_again > 0
    micro = [one for step in batches.steps(0, 3) for one in step.micro_batches]
    work = Work(sum(one.num_tokens for one in micro), sum(one.num_edges for one in micro), meter.progress.pairs)
    assert meter.axes()["train/flops"] == train_flops(model, work)


def test_weights_are_shares_of_the_tokens_of_documents_and_not_of_what_trees_compute() -> None:
    rng = np.random.default_rng(0)
    logs = [rng.integers(10, 99, 200).tolist() for _ in range(200)]
    documents = [[1, *log[: 20 * k]] for log in logs for k in range(1, 11)]
    documents += [[2, *rng.integers(10, 99, 100).tolist()] for _ in range(2000)]
    head = np.repeat(np.arange(2200), [10] * 200 + [1] * 2000).astype(np.uint64)
    source = np.repeat([0, 1], 2000)
    columns = DocumentColumns(lambda: (head, np.full(len(head), 2), head, head))
    examples = replace(of_documents(documents), columns=columns, source_names=("logs", "chats"), source=source)
    sources = tuple(SourceConfig(path=name, weight=weight) for name, weight in (("logs", 0.25), ("chats", 0.75)))
    late = (StageConfig(at=0.5, weights={"logs": 0.75, "chats": 0.25}),)
    data = DataConfig(train=sources, layout="tree", max_length=256, row_length=256, stages=late)
    train = TrainConfig(global_batch_size=8, micro_batch_size=2, max_steps=60)
    trees = trees_of(examples, data, 256)
    layout = make_layout(data, train, trees.lengths, 256)
    mixture = mixture_of(data, train, trees, layout)
    batches = Batches(StepDataset(examples, layout, trees=trees), seed=3, mixture=mixture)
    for first, share in ((0, 0.25), (30, 0.75)):
        tokens = np.sum([step.source_tokens for step in batches.steps(first, first + 30)], axis=0)
        assert tokens[0] / tokens.sum() == pytest.approx(share, abs=0.05)


def test_a_resumed_plan_of_trees_continues_bit_for_bit() -> None:
    examples = conversations(np.random.default_rng(6), groups=200)
    data = settings(max_length=32, row_length=64)
    whole, _ = planned(examples, data)
    steps = [*whole.steps(0, 12)]
    resumed, _ = planned(examples, data, earlier=whole.segments, first_step=7, known=whole.order.state(7))
    for there, here in zip(steps[7:], resumed.steps(7, 12), strict=True):
        assert there.documents == here.documents
        for a, b in zip(there.micro_batches, here.micro_batches, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))


def test_the_warm_up_of_trees_has_a_target_at_every_position() -> None:
    batch = warm_up_batch(2, BatchShape(1024, 8, 512, tree=True), vocab_size=50)
    assert batch.num_targets == batch.num_tokens == batch.num_edges == 2048
    assert torch.equal(batch.target_index, torch.arange(2048))
    assert batch.tree_ends is not None
    assert batch.tree_ends.unique().tolist() == [512, 1024]


def test_inspection_says_what_the_trees_of_a_source_save() -> None:
    trees = trees_of(of_group([[*range(40), i, 99] for i in range(3)]), settings(), row_length=64)
    (found,) = tree_facts(trees)
    assert found == {"trees": 1, "expanded": 123, "unique": 43, "factor": 123 / 43}
    assert "factor 2.86: data.layout=tree computes only those" in str(trees_line({"name": "a", "trees": found}))
    apart = trees_of(of_group([[i, *range(40)] for i in range(3)]), settings(), row_length=64)
    (found,) = tree_facts(apart)
    assert "factor 1.00: below 1.15, so data.layout=tree would change nothing" in str(
        trees_line({"name": "a", "trees": found})
    )
    assert "data.layout=packed does the same" in apart.describe()
