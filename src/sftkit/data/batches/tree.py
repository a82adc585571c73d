"""Rows of prefix trees: which documents form a tree, and how trees lie in rows.

The documents of a conversation (`data.split_turns`, paths of a tree of answers, branches of an agent's log) begin
alike, and a tree has each position that they share once. Its positions are the different beginnings of its documents,
without the last token of a document unless another one continues through it. They lie in preorder, so all ancestors of
a position come before it, and its subtree is one interval of columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch

from sftkit.config.schema import DataConfig
from sftkit.data.batches import pack
from sftkit.data.batches.collate import IGNORE, TARGET_MULTIPLE, Batch, cu_seqlens_of
from sftkit.data.types import Examples
from sftkit.errors import config_error
from sftkit.runtime.script import counted

WORTH_IT = 1.15
"Positions of the documents over those of their trees, below which rows of trees would change nothing that matters."
_PIECE_TOKENS = 2**21
"Tokens that are read at a time."


# ---- which documents form a tree -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trees:
    """The G trees of D documents. Plans take a tree as one document of `lengths[g]` positions."""

    documents: np.ndarray
    "int64 [D], tree after tree"
    first: np.ndarray
    "int64 [G + 1]; tree g has documents[first[g] : first[g + 1]]"
    shared: np.ndarray
    "int32 [D], positions of documents[i] that documents before it in its tree have"
    again: np.ndarray
    "int32 [D], targets of documents[i] that documents before it in its tree have, after the same tokens"
    lengths: np.ndarray
    "int64 [G], positions of each tree"
    source: np.ndarray
    "int [G], index into source_names"
    source_names: tuple[str, ...]
    cut: int = 0
    "trees that had to begin inside a larger one, which a row does not hold"

    def __len__(self) -> int:
        return len(self.lengths)

    def members(self, trees: np.ndarray) -> np.ndarray:
        """Return the places in `documents` of all documents of these trees, tree after tree, int64."""
        sizes = self.first[trees + 1] - self.first[trees]
        ends = np.cumsum(sizes)
        return np.asarray(np.arange(sizes.sum()) + np.repeat(self.first[trees] - (ends - sizes), sizes))

    def in_rows(self, rows: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
        """Return rows of documents for rows of trees, and the number of documents of each tree, row after row."""
        documents = tuple(tuple(self.documents[self.members(np.array(row, np.int64))].tolist()) for row in rows)
        trees = np.fromiter(chain.from_iterable(rows), np.int64)
        return documents, (self.first[trees + 1] - self.first[trees]).tolist()

    @property
    def expanded(self) -> np.ndarray:
        """Return the positions of the documents of each tree by themselves, int64 [G]."""
        saved = np.add.reduceat(self.shared, self.first[:-1], dtype=np.int64)
        return np.asarray(self.lengths + saved)

    def describe(self) -> str:
        """Return in a sentence what the trees save."""
        positions = int(self.lengths.sum())
        expanded = int(self.expanded.sum())
        text = f"trees: {counted(len(self), 'tree')} of {counted(len(self.documents), 'document')}, {positions:,} "
        text += f"positions for {expanded:,} (factor {expanded / positions:.2f})"
        if self.cut:
            text += f"; {self.cut:,} of them begin inside a tree that is longer than a row (data.row_length)"
        if expanded < WORTH_IT * positions:
            text += "; the documents share too little for it to matter: data.layout=packed does the same"
        return text


def trees_of(examples: Examples, data: DataConfig, row_length: int) -> Trees:
    """Return the trees of all documents, source after source, none longer than a row.

    Documents of one tree follow one another in a pass over their source, their rows begin with the same message, and
    they share at least their first token. A tree that a row does not hold falls apart at branches into several.

    Raises:
        ConfigError: the documents have inputs for an encoder.
    """
    if examples.encoded:
        raise config_error("trees with an encoder")
    begins = _group_begins(examples, data)
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts[1:], len(begins))
    documents = np.arange(len(begins))
    shared = np.zeros(len(begins), np.int32)
    again = np.zeros(len(begins), np.int32)
    several = lasts - firsts > 1
    cut = 0
    for a, b, found in _groups(examples, firsts[several], lasts[several]):
        order, own = _in_order([ids for ids, _ in found])
        documents[a:b] = order + a
        length = 0
        before = learned = np.zeros(0, bool)
        for i, (document, known) in enumerate(zip(order.tolist(), own.tolist(), strict=True)):
            ids, is_target = found[document]
            positions = len(ids) - 1
            too_long = length + positions - known > row_length
            if known and not too_long:
                shared[a + i] = known
                length += positions - known
                # Tokens that both have after the same tokens, and which of them some document of the path learns.
                same = known + (before[known] == ids[known])
                again[a + i] = np.count_nonzero(learned[:same] & is_target[:same])
                learned = np.concatenate([learned[:same] | is_target[:same], is_target[same:]])
            else:
                cut += bool(known)
                begins[a + i] = True
                length = positions
                learned = is_target
            before = ids
    first = np.flatnonzero(begins)
    new = examples.lengths[documents].astype(np.int64) - shared
    lengths = np.add.reduceat(new, first)
    source = np.asarray(examples.source)[first]
    return Trees(documents, np.append(first, len(begins)), shared, again, lengths, source, examples.source_names, cut)


def _group_begins(examples: Examples, data: DataConfig) -> np.ndarray:
    """Return which documents do not continue the group of the one before, bool [D]."""
    if examples.columns is None:  # made-up documents
        return np.ones(len(examples), bool)
    begins = np.ones(len(examples), bool)
    begins[1:] = np.diff(examples.source) != 0
    begins[1:] |= examples.columns.head[1:] != examples.columns.head[:-1]
    begins |= examples.columns.turns == 0  # pieces of a text have one head, and share nothing
    # `repeat` has stored its passes one after the other: a document and its copy are learned apart.
    sources = np.flatnonzero(np.diff(examples.source, prepend=-1))
    for source, start, stop in zip(data.train, sources, np.append(sources[1:], len(begins)), strict=False):
        begins[start : stop : (stop - start) // math.ceil(source.repeat)] = True
    return begins


def _groups(
    examples: Examples, firsts: np.ndarray, lasts: np.ndarray
) -> Iterator[tuple[int, int, list[tuple[np.ndarray, np.ndarray]]]]:
    """Yield (first document, one past the last, ids and targets of each) of groups, read several at a time."""
    ends = np.concatenate([[0], np.cumsum(examples.lengths, dtype=np.int64)])
    tokens = np.cumsum(ends[lasts] - ends[firsts])
    group = 0
    while group < len(firsts):
        before = tokens[group - 1] if group else 0
        past = max(int(np.searchsorted(tokens, before + _PIECE_TOKENS, side="right")), group + 1)
        own = np.concatenate([np.arange(a, b) for a, b in zip(firsts[group:past], lasts[group:past], strict=True)])
        borders = np.cumsum(examples.lengths[own] + 1)[:-1]
        split = list(zip(*(np.split(one, borders) for one in examples.gather(own)), strict=True))
        for a, b in zip(firsts[group:past].tolist(), lasts[group:past].tolist(), strict=True):
            yield a, b, split[: b - a]
            del split[: b - a]
        group = past


def _in_order(ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ascending order of documents by their tokens, and for each in this order the number of its positions
    that documents before it have: those that it shares with the one before.

    Args:
        ids: int32 of each document.
    """
    # Big-endian bytes compare as the numbers do.
    keys = [one.astype(">i4").tobytes() for one in ids]
    order = sorted(range(len(ids)), key=keys.__getitem__)
    shared = [0]
    for i, j in pairwise(order):
        size = min(len(ids[i]), len(ids[j])) - 1  # the last token of a document takes no position
        differ = ids[i][:size] != ids[j][:size]
        first = int(differ.argmax()) if size else 0
        shared.append(first if size and differ[first] else size)
    return np.array(order), np.array(shared)


# ---- how trees lie in rows -------------------------------------------------------------------------------------------


class _Node(NamedTuple):
    """A document, or a branching point of several."""

    depth: int
    "positions of the document, or up to the branching point"
    below: int
    "positions behind that"
    content: int | list[_Node]
    "number of the document, or what follows the branching point"


def largest_first(ids: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Return (document, number of its positions that those before it have) of a tree's documents in preorder.

    The largest branch comes first, so that the trunk of a conversation is one piece of columns and short branches
    follow it: attention then masks few blocks in part.
    """
    order, shared = (found.tolist() for found in _in_order(ids))
    open_nodes: list[_Node] = []
    node = _Node(len(ids[order[0]]) - 1, 0, order[0])
    for document, known in [*zip(order[1:], shared[1:], strict=True), (-1, -1)]:
        while open_nodes and open_nodes[-1].depth > known:
            node = _closed(open_nodes.pop(), node)
        if document < 0:
            break
        if open_nodes and open_nodes[-1].depth == known:
            open_nodes[-1].content.append(node)  # type: ignore[union-attr]
        else:
            open_nodes.append(_Node(known, 0, [node]))
        node = _Node(len(ids[document]) - 1, 0, document)
    found = []
    waiting = [(node, 0)]
    while waiting:
        node, known = waiting.pop()
        if isinstance(node.content, int):
            found.append((node.content, known))
            continue
        children = sorted(node.content, key=lambda child: -(child.depth + child.below))
        waiting += [(child, node.depth if i else known) for i, child in reversed([*enumerate(children)])]
    return found


def _closed(branching: _Node, last: _Node) -> _Node:
    """Return a branching point with its last child."""
    children = [*branching.content, last]  # type: ignore[misc]
    return branching._replace(
        below=sum(child.depth - branching.depth + child.below for child in children), content=children
    )


def collate_trees(
    examples: Examples,
    rows: tuple[tuple[int, ...], ...],
    shape: pack.BatchShape,
    pad_id: int,
    trees: Sequence[int] | None,
) -> Batch:
    """Lay the trees of documents out in rows, see collate.collate.

    Args:
        trees: number of documents of each tree, row after row; None: documents of a row that follow one another and
            begin with the same token are a tree.
    """
    docs = np.fromiter(chain.from_iterable(rows), np.int64)
    ids, is_target = examples.gather(docs)
    ends = np.cumsum(examples.lengths[docs].astype(np.int64) + 1)[:-1]
    row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    ids_of = np.split(ids, ends)[: len(docs)]
    is_target_of = np.split(is_target, ends)
    if trees is None:
        begins = [i == 0 or row_of[i] != row_of[i - 1] or ids_of[i][0] != ids_of[i - 1][0] for i in range(len(docs))]
        trees = np.diff(np.flatnonzero([*begins, True])).tolist()

    row_length = shape.row_length
    total = len(rows) * row_length
    input_ids = np.full(total, pad_id, np.int64)
    depths = np.zeros(total, np.int64)
    tree_ids = np.full(total, -1, np.int32)
    sources = np.zeros(total, np.int16)
    subtree_ends = np.zeros(total, np.int64)  # in the B * T positions
    holders = np.zeros(total, np.int32)
    parents, tokens = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]  # of each target of a document
    starts = np.zeros(len(trees), np.int64)
    used = np.zeros(len(rows), np.int64)
    in_row = [0] * len(rows)
    first = 0
    for number, count in enumerate(trees):
        row = int(row_of[first])
        own = ids_of[first : first + count]
        starts[number] = size = row * row_length + int(used[row])
        # path[d]: position at depth d of the document that is laid out; those before open_depth have no end yet.
        path = np.zeros(max(map(len, own)), np.int64)
        open_depth = 0
        for document, known in largest_first(own):
            positions = len(own[document]) - 1
            past = size + positions - known
            if past > size:
                subtree_ends[path[known:open_depth]] = size
                path[known:positions] = np.arange(size, past)
                input_ids[size:past] = own[document][known:-1]
                depths[size:past] = np.arange(known, positions)
                open_depth = positions
                size = past
            holders[path[:positions]] += 1
            at = np.flatnonzero(is_target_of[first + document][1:])
            parents.append(path[at])
            tokens.append(own[document][at + 1])
        subtree_ends[path[:open_depth]] = size
        tree_ids[starts[number] : size] = in_row[row]
        if len(examples.source_names) > 1:
            sources[starts[number] : size] = examples.source[docs[first]]
        assert size - starts[number] <= shape.max_doc_length
        used[row] += size - starts[number]
        in_row[row] += 1
        first += count
    assert used.max(initial=0) <= row_length

    for row, start in enumerate(used.tolist()):
        padding = np.arange(row_length - start)
        chunk_ends = (padding // shape.max_doc_length + 1) * shape.max_doc_length
        subtree_ends[row * row_length + start : (row + 1) * row_length] = row * row_length + np.minimum(
            start + chunk_ends, row_length
        )
    # An edge is a position with a next token. It is there once, however many documents learn it.
    edges, weights = np.unique(np.concatenate(parents) << 32 | np.concatenate(tokens), return_counts=True)
    filler = np.arange(-len(edges) % TARGET_MULTIPLE if len(edges) else TARGET_MULTIPLE) % total
    no_target = np.full(len(filler), IGNORE)
    grid = (len(rows), row_length)
    starts_of_rows = np.arange(0, total, row_length)[:, None]
    return Batch(
        {
            "input_ids": torch.from_numpy(input_ids.reshape(grid)),
            "position_ids": torch.from_numpy(depths.reshape(grid)),
        },
        torch.full(grid, IGNORE),
        torch.from_numpy(tree_ids.reshape(grid)),
        torch.from_numpy(sources.reshape(grid)),
        torch.from_numpy(cu_seqlens_of(starts, used, shape)),
        torch.from_numpy(np.concatenate([edges >> 32, filler])),
        max_doc_length=shape.max_doc_length,
        num_tokens=int(used.sum()),
        num_targets=int(weights.sum()),
        tree_ends=torch.from_numpy((subtree_ends.reshape(grid) - starts_of_rows).astype(np.int32)),
        tree_documents=torch.from_numpy(holders.reshape(grid)),
        edge_targets=torch.from_numpy(np.concatenate([edges & 0xFFFFFFFF, no_target])),
        edge_weights=torch.from_numpy(np.concatenate([weights, np.zeros(len(filler))]).astype(np.float32)),
        num_edges=len(edges),
    )
