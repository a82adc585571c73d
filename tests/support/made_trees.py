"""Rows of prefix trees, token by token: what tests of their computation use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sftkit.data.batches.collate import IGNORE, TARGET_MULTIPLE, Batch
from sftkit.data.types import Examples


@dataclass
class Node:
    """A token after those of its ancestors."""

    depth: int = -1
    held: int = 0
    "documents that go on behind it"
    learned: Counter[int] = field(default_factory=Counter)
    "by token: documents in which the token that follows is a target"
    children: dict[int, Node] = field(default_factory=dict)

    def size(self) -> int:
        """Positions of the subtree."""
        return bool(self.held and self.depth >= 0) + sum(child.size() for child in self.children.values())


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
    """Rows of trees of documents. Children of a node stand in the order of the documents that bring them."""
    size = (len(rows), row_length)
    ids, depths = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
    doc_ids = torch.full(size, -1, dtype=torch.int32)
    ends = torch.full(size, row_length, dtype=torch.int32)
    documents = torch.zeros(size, dtype=torch.int32)
    edges: list[tuple[int, int, int]] = []
    starts = []
    for r, row in enumerate(rows):
        column = 0
        for number, tree in enumerate(row):
            starts.append(r * row_length + column)
            root = Node()
            for document in tree:
                tokens, is_target = examples.gather([document])
                node = root
                for i, token in enumerate(tokens.tolist()):
                    node.held += 1
                    node.learned[token] += bool(is_target[i])
                    node = node.children.setdefault(token, Node(depth=i))
            # Preorder; a token behind which no document goes on is only a target.
            waiting = [*root.children.items()][::-1]
            while waiting:
                token, node = waiting.pop()
                if not node.held:
                    continue
                at = (r, column)
                ids[at], depths[at], doc_ids[at], documents[at] = token, node.depth, number, node.held
                ends[at] = column + node.size()
                edges += [(r * row_length + column, token, n) for token, n in node.learned.items() if n]
                waiting += [*node.children.items()][::-1]
                column += 1
        if column < row_length:
            starts.append(r * row_length + column)
    positions, targets, weights = (list(one) for one in zip(*edges, strict=True))
    filler = -len(edges) % TARGET_MULTIPLE
    unused = [i for i in range(len(rows) * row_length) if i not in set(positions)][:filler]
    none = [0] * len(unused)
    return Batch(
        {"input_ids": ids, "position_ids": depths},
        torch.full(size, IGNORE),
        doc_ids,
        torch.zeros(size, dtype=torch.int16),
        torch.tensor([*starts, *[len(rows) * row_length] * 8], dtype=torch.int32),
        torch.tensor(positions + unused),
        max_doc_length=row_length,
        num_tokens=int((doc_ids >= 0).sum()),
        num_targets=sum(weights),
        tree_ends=ends,
        tree_documents=documents,
        edge_targets=torch.tensor(targets + [IGNORE] * len(unused)),
        edge_weights=torch.tensor([*weights, *none], dtype=torch.float32),
        num_expanded=int(documents.sum()),
    )
