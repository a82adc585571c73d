"""Turn rows of document indices into tensors of declared shapes. Targets are shifted here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from sftkit.data.batches import epoch, pack
from sftkit.data.types import EncoderInputs, Examples

IGNORE = -100  # torch.nn.functional.cross_entropy's ignore_index
OF_TOKENS = ("input_ids", "position_ids")
"The inputs with a value for each position of a row; others have one for each encoded input."
TARGET_MULTIPLE = 512  # the length of target_index is a multiple of this: few different sizes, little wasted work


@dataclass(frozen=True)
class Batch:
    """A micro-batch: B rows of T positions, D document slots, P positions with logits, and counts on the host.

    Position i holds token i of its document and is trained to predict `targets[i]`, token i + 1, or IGNORE. If n
    ranks share the rows, C = T / n positions of each row are local, with context parallelism two chunks of it
    ("chunks:" below, see epoch.RowShard); else C = T.

    Rows of trees ("tree:" below) hold the documents of a conversation as one prefix tree in preorder: a position that
    several documents share is there once, and sees its ancestors. Position k may have several children, so targets
    belong to edges, `edge_targets`, and `targets` is IGNORE everywhere.
    """

    inputs: dict[str, torch.Tensor]
    """arguments of the model by name; for causal models input_ids, int64 [B, C], and position_ids, int64, restarting
    at 0 in each document: [B, T], [B, C] for chunks. With an encoder also its inputs, [B K, ...]: entry r K + k is
    for the k-th document of row r, zeros if there is none"""
    targets: torch.Tensor
    "int64 [B, C], IGNORE where nothing is learned"
    doc_ids: torch.Tensor
    "int32 [B, T], number of the document within its row, tree: of the tree, -1 for padding"
    sources: torch.Tensor
    "int16 [B, C], number of the document's source, 0 for padding"
    cu_seqlens: torch.Tensor
    """int32 [D + 1], where documents start in the B * T positions, tree: where trees do, padding being documents too;
    B * T in unused slots"""
    target_index: torch.Tensor
    """int64 [P], unique positions among the local B * C: first those with a target, ascending, then others as filler.
    tree: of each edge with a target the position of its parent, ascending, so positions may repeat, then filler"""
    max_doc_length: int
    "upper bound of a document's length; the same in every batch of a run"
    num_tokens: int
    "positions of the whole rows that hold a document, not padding; tree: one that documents share counts once"
    num_targets: int
    "local targets: summed over the parts they are the targets of the rows; tree: the sum of edge_weights"
    columns: torch.Tensor | None = None
    "chunks: int64 [C], which columns of the rows the local ones are; else None"
    cu_seqlens_q: torch.Tensor | None = None
    """chunks: int32 [2, S + 1], for each of the two chunks where its sequences start in its B * C / 2 queries; S = D
    + 2 B; else None"""
    cu_seqlens_k: torch.Tensor | None = None
    "chunks: int32 [2, S + 1], where the same sequences start in the B * T keys, see `chunk_cu_seqlens`; else None"
    adapters: tuple[int, ...] = ()
    "with several adapters: the adapter of each share of the rows, which are of equal size; else ()"
    targets_of_shares: tuple[int, ...] = ()
    "number of targets of each share"
    noise: tuple[int, float] | None = None
    "in training steps with train.neftune_alpha: seed of the noise on the embeddings, and alpha; else None"
    tree_ends: torch.Tensor | None = None
    """tree: int32 [B, T], column behind each position's subtree: query q sees key k iff k <= q < tree_ends[k]; padding
    is chains of at most max_doc_length. Else None"""
    tree_documents: torch.Tensor | None = None
    "tree: int32 [B, T], number of documents that hold the position, 0 for padding; else None"
    edge_targets: torch.Tensor | None = None
    "tree: int64 [P], target of each edge of target_index, IGNORE for filler; else None"
    edge_weights: torch.Tensor | None = None
    "tree: fp32 [P], number of documents in which the edge is a target, 0 for filler; else None"
    num_edges: int = 0
    "tree: edges with a target, which several documents may have; else 0"

    @property
    def shape(self) -> tuple[int, int]:
        """Return (B, C)."""
        rows, columns = self.targets.shape
        return rows, columns

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device. Copies from pinned memory do not block."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned host memory."""
        return self.each(torch.Tensor.pin_memory)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the batch."""
        return [value for value in (*vars(self).values(), *self.inputs.values()) if isinstance(value, torch.Tensor)]

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with every tensor changed by a function, called in the order of `tensors`."""
        # Any: `replace` takes the tensors among the fields, which it cannot distinguish from the numbers
        changed: dict[str, Any] = {k: change(v) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, inputs={k: change(v) for k, v in self.inputs.items()}, **changed)


def collate(
    examples: Examples,
    rows: tuple[tuple[int, ...], ...],
    shape: pack.BatchShape,
    pad_id: int = 0,
    shard: epoch.RowShard = epoch.FULL_ROW,
    trees: Sequence[int] | None = None,
) -> Batch:
    """Lay documents out in rows. A document of n tokens takes n - 1 positions; its last token is only a target.

    Args:
        shard: what of the rows this process computes; the row length is a multiple of `shard.multiple`.
        trees: rows of trees: number of documents of each, row after row; None: documents of a row that follow one
            another and begin with the same token are a tree.
    """
    if shape.tree:
        from sftkit.data.batches.tree import collate_trees  # few runs have rows of trees

        assert shard.kind == "full", "rejected with the recipe"
        return collate_trees(examples, rows, shape, pad_id, trees)
    # For each of the M documents: its row, its positions, and its start in the B * T positions.
    row_length = shape.row_length
    max_doc_length = shape.max_doc_length
    total = len(rows) * row_length
    docs = np.fromiter(chain.from_iterable(rows), np.int64)
    docs_in_row = np.array([len(row) for row in rows])
    row = np.repeat(np.arange(len(rows)), docs_in_row)
    lengths = np.asarray(examples.lengths[docs], dtype=np.int64)
    before = np.cumsum(lengths) - lengths  # document positions in front, padding not counted
    used = np.bincount(row, weights=lengths, minlength=len(rows)).astype(np.int64)
    starts = before + (np.arange(len(rows)) * row_length - (np.cumsum(used) - used))[row]
    assert lengths.max(initial=0) <= max_doc_length
    assert used.max(initial=0) <= row_length

    # For each document position: its place in the document, in the batch, and in the tokens of these documents.
    ids, is_target = examples.gather(docs)
    within = np.arange(lengths.sum()) - np.repeat(before, lengths)
    at = within + np.repeat(starts, lengths)
    source = within + np.repeat(before + np.arange(len(docs)), lengths)  # each has a token more than positions
    # Padding first, then the documents over it. Targets are the next tokens.
    input_ids = np.full(total, pad_id, dtype=np.int64)
    targets = np.full(total, IGNORE, dtype=np.int64)
    position_ids = np.zeros(total, dtype=np.int64)
    doc_ids = np.full(total, -1, dtype=np.int32)
    sources = np.zeros(total, dtype=np.int16)
    input_ids[at] = ids[source]
    targets[at] = np.where(is_target[source + 1], ids[source + 1], IGNORE)
    position_ids[at] = within
    number_in_row = np.arange(len(docs)) - np.repeat(np.cumsum(docs_in_row) - docs_in_row, docs_in_row)
    doc_ids[at] = np.repeat(number_in_row, lengths)
    if len(examples.source_names) > 1:
        sources[at] = np.repeat(examples.source[docs], lengths)

    has_target = targets != IGNORE
    size = (len(rows), row_length)
    per_row = shape.docs_per_row or max(docs_in_row.max(), 1)
    max_docs = number_in_row.max(initial=-1) + 1
    assert examples.encoder_inputs is None or max_docs <= per_row, f"{max_docs} documents for {per_row} encoded inputs"
    batch = Batch(
        {
            "input_ids": torch.from_numpy(input_ids.reshape(size)),
            "position_ids": torch.from_numpy(position_ids.reshape(size)),
            **_encoder_inputs(examples, docs, row * per_row + number_in_row, len(rows) * per_row),
        },
        torch.from_numpy(targets.reshape(size)),
        torch.from_numpy(doc_ids.reshape(size)),
        torch.from_numpy(sources.reshape(size)),
        torch.from_numpy(cu_seqlens_of(starts, used, shape)),
        torch.from_numpy(_target_index(has_target)),
        max_doc_length=max_doc_length,
        num_tokens=int(lengths.sum()),
        num_targets=int(has_target.sum()),
        adapters=shape.adapters,
        targets_of_shares=tuple(
            int(share.sum()) for share in (np.split(has_target, len(shape.adapters)) if shape.adapters else ())
        ),
    )
    return batch if shard.kind == "full" else _shard_batch(batch, shard)


def _encoder_inputs(examples: Examples, docs: np.ndarray, at: np.ndarray, slots: int) -> dict[str, torch.Tensor]:
    """Return an encoder's inputs by argument name, [slots, ...]. docs and at are int [M]: documents, and the
    place of each."""
    if examples.encoder_inputs is None:
        return {}
    entries = examples.encoder_inputs.index[docs]
    found = {}
    for name, array in examples.encoder_inputs.arrays.items():
        filled = np.zeros((slots, *array.shape[1:]), array.dtype)
        filled[at] = array[entries]
        found[name] = torch.from_numpy(filled)
    return found


def _shard_batch(batch: Batch, shard: epoch.RowShard) -> Batch:
    """Return the local positions of whole rows; document boundaries stay those of whole rows."""
    row_length = batch.shape[1]
    columns = torch.from_numpy(shard.columns(row_length))
    targets = batch.targets[:, columns]
    is_target = targets.numpy().ravel() != IGNORE
    local = replace(
        batch,
        inputs={**batch.inputs, "input_ids": batch.inputs["input_ids"][:, columns]},
        targets=targets,
        sources=batch.sources[:, columns],
        target_index=torch.from_numpy(_target_index(is_target)),
        num_targets=int(is_target.sum()),
    )
    # Tensor-parallel ranks gather the positions before attention, so boundaries and position ids stay whole.
    if shard.kind == "columns":
        return local
    chunks = [chunk_cu_seqlens(batch.cu_seqlens.numpy(), row_length, chunk) for chunk in columns.numpy().reshape(2, -1)]
    queries, keys = (torch.from_numpy(np.stack(side)) for side in zip(*chunks, strict=True))
    inputs = {**local.inputs, "position_ids": batch.inputs["position_ids"][:, columns]}
    return replace(local, inputs=inputs, columns=columns, cu_seqlens_q=queries, cu_seqlens_k=keys)


def chunk_cu_seqlens(cu_seqlens: np.ndarray, row_length: int, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each sequence starts when variable-length attention takes the queries of one chunk of every row
    and the keys of whole rows.

    A row becomes these sequences, in order:
    - the keys before the chunk's first document, without queries
    - for each document in the chunk: its queries in the chunk, and its keys up to the end of the chunk
    - the keys after the chunk, without queries

    The last query and the last key of a sequence are the same position, as kernels expect that align the causal mask
    at the bottom right.

    Args:
        cu_seqlens: int32 [D + 1] of whole rows; the last value is B * T. columns: int [c] of the chunk, contiguous.

    Returns:
        (starts in the B * c queries, in the B * T keys), int32 [D + 2 B + 1]; unused slots repeat B * c and B * T.
    """
    # For each document: its row and its columns. Documents outside the chunk drop out, the others end with the chunk.
    starts = cu_seqlens[: np.searchsorted(cu_seqlens, cu_seqlens[-1])].astype(np.int64)
    ends = np.append(starts[1:], cu_seqlens[-1])
    row, starts, ends = starts // row_length, starts % row_length, (ends - 1) % row_length + 1
    first = columns[0]
    end = columns[-1] + 1
    inside = (starts < end) & (ends > first)
    row, starts, ends = row[inside], starts[inside], np.minimum(ends[inside], end)
    rows = np.arange(cu_seqlens[-1] // row_length)
    none = np.zeros(len(rows), np.int64)

    # Row by row: the keys in front, the documents, the keys behind.
    order = np.argsort(np.concatenate([3 * rows, 3 * row + 1, 3 * rows + 2]), kind="stable")
    in_front = starts[np.searchsorted(row, rows)]
    queries = np.concatenate([none, ends - np.maximum(starts, first), none])[order]
    keys = np.concatenate([in_front, ends - starts, none + row_length - end])[order]
    slots = len(cu_seqlens) - 1 + 2 * len(rows)
    return _starts(queries, slots), _starts(keys, slots)


def _starts(sizes: np.ndarray, slots: int) -> np.ndarray:
    """Return the running sum from 0, the total repeated in unused slots: int32 [slots + 1]."""
    return np.pad(np.cumsum(sizes), (1, slots - len(sizes)), constant_values=(0, sizes.sum())).astype(np.int32)


def cu_seqlens_of(starts: np.ndarray, used: np.ndarray, shape: pack.BatchShape) -> np.ndarray:
    """Return the starts of the documents, and of each row's padding in chunks of max_doc_length: int32 [D + 1]."""
    row_length = shape.row_length
    max_docs = shape.max_docs
    max_doc_length = shape.max_doc_length
    padding = [np.arange(r * row_length + n, (r + 1) * row_length, max_doc_length) for r, n in enumerate(used)]
    all_starts = np.sort(np.concatenate([starts, *padding]))
    assert len(all_starts) <= max_docs, f"{len(all_starts)} documents in {max_docs} slots"
    return _starts(np.diff(all_starts, append=len(used) * row_length), max_docs)


def _target_index(is_target: np.ndarray) -> np.ndarray:
    """Return the positions of the targets, then of the first others up to a multiple of TARGET_MULTIPLE: int64 [P]."""
    positions = np.flatnonzero(is_target)
    size = max(-(-len(positions) // TARGET_MULTIPLE), 1) * TARGET_MULTIPLE
    filler = np.flatnonzero(~is_target)[: size - len(positions)]
    return np.concatenate([positions, filler])


def warm_up_batch(
    rows: int,
    shape: pack.BatchShape,
    vocab_size: int,
    shard: epoch.RowShard = epoch.FULL_ROW,
    made_up: Callable[[int], EncoderInputs | None] = lambda _: None,
) -> Batch:
    """Make the worst case of a declared shape: random tokens, as many and as long documents as a row may hold, and
    every position a target.

    Args:
        made_up: returns the encoder inputs of n documents.
    """
    whole, rest = divmod(shape.row_length, shape.max_doc_length)
    # The longest documents cost attention most; what is left of the row is one more, if it has a slot.
    row = ([shape.max_doc_length] * whole + [rest] * (rest > 0))[: shape.docs_per_row]
    sizes = row * rows
    ids = np.random.default_rng(0).integers(0, vocab_size, sum(sizes) + len(sizes))
    recipe = tuple(map(tuple, np.arange(len(sizes)).reshape(rows, len(row)).tolist()))
    examples = Examples.of(ids, sizes, made_up(len(sizes)))
    return collate(examples, recipe, shape, shard=shard, trees=[1] * len(sizes))
