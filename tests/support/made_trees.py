"""Documents that branch off one another, and rows of their trees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from sftkit.data.batches.collate import Batch, collate
from sftkit.data.batches.pack import BatchShape
from sftkit.data.types import Examples


def branching(seed: int, vocab_size: int, shape: Sequence[Sequence[int]], target_share: float = 0.5) -> Examples:
    """Documents of one tree, as many as `shape` has: a row (n, m) shares its first n tokens with the document before it
    and has m tokens of its own."""
    random = np.random.default_rng(seed)
    documents: list[list[int]] = []
    for shared, own in shape:
        before = documents[-1][:shared] if documents else []
        taken = {one[shared] for one in documents if one[:shared] == before and len(one) > shared}
        first = random.choice([token for token in range(vocab_size) if token not in taken])
        documents.append([*before, int(first), *random.integers(0, vocab_size, own - 1).tolist()])
    ids = np.array([token for one in documents for token in one])
    is_target = random.random(len(ids)) < target_share
    is_target[np.cumsum([len(one) for one in documents]) - 1] = True
    return Examples.of(ids, [len(one) - 1 for one in documents], is_target=is_target)


def tree_batch(examples: Examples, rows: Sequence[Sequence[Sequence[int]]], row_length: int) -> Batch:
    """Rows of trees of documents."""
    recipe = tuple(tuple(chain.from_iterable(row)) for row in rows)
    trees = [len(tree) for row in rows for tree in row]
    shape = BatchShape(row_length, max_docs=len(trees) + len(rows), max_doc_length=row_length, tree=True)
    return collate(examples, recipe, shape, trees=trees)


SHAPE = [(0, 20), (12, 9), (5, 20), (25, 1), (18, 8)]
"One tree: what each document shares with the one before it, and its own tokens."
EXAMPLES = branching(0, 64, [*SHAPE, (0, 6), (4, 3), *SHAPE])
ROWS: list[list[range]] = [[range(5), range(5, 7)], [], [range(7, 10)], [range(10, 12)]]
"Trees of these documents in rows of 96; those of the last two rows are one tree in the data."
