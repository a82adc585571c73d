"""Rows of document indices become tensors of declared shape. Targets are shifted here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from sftkit.data.types import Examples

IGNORE = -100  # torch.nn.functional.cross_entropy's ignore_index
TARGET_MULTIPLE = 512  # target_index has a multiple of so many entries: few sizes, and little is computed in vain


@dataclass(frozen=True)
class Batch:
    """A micro-batch: B rows of T positions, D document slots, P projected positions, and counts on the host.

    Position i holds token i of its document and is trained to predict `targets[i]`, token i + 1, or IGNORE.
    """

    input_ids: torch.Tensor
    "int64 [B, T]"
    targets: torch.Tensor
    "int64 [B, T], IGNORE where nothing is learned"
    position_ids: torch.Tensor
    "int64 [B, T], restart at 0 in each document"
    doc_ids: torch.Tensor
    "int32 [B, T], number of the document within its row, -1 for padding"
    cu_seqlens: torch.Tensor
    "int32 [D + 1], where documents start in the B * T positions, padding being documents too; B * T in unused slots"
    target_index: torch.Tensor
    "int64 [P], unique positions among the B * T: those of targets, ascending, then the first others as filler"
    max_doc_length: int
    "no document is longer; the same in every batch of a run"
    num_tokens: int
    "positions that hold a document"
    num_targets: int
    attention_pairs: int
    "sum of L (L + 1) / 2 over documents: (query, key) pairs that causal, document-isolated attention computes"

    def to(self, device: torch.device) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return replace(
            self,
            input_ids=change(self.input_ids),
            targets=change(self.targets),
            position_ids=change(self.position_ids),
            doc_ids=change(self.doc_ids),
            cu_seqlens=change(self.cu_seqlens),
            target_index=change(self.target_index),
        )


def collate(
    examples: Examples,
    rows: tuple[tuple[int, ...], ...],
    row_length: int,
    pad_id: int,
    max_docs: int,
    max_doc_length: int,
) -> Batch:
    """Lay documents out in rows. A document of n tokens takes n - 1 positions; its last token is only a target.

    Args:
        max_docs: D, document slots of the batch, those for padding included.
        max_doc_length: also the most that one padding document covers.
    """
    total = len(rows) * row_length
    docs = np.fromiter(chain.from_iterable(rows), np.int64)
    docs_in_row = np.array([len(row) for row in rows])
    row = np.repeat(np.arange(len(rows)), docs_in_row)
    lengths = examples.offsets[docs + 1] - examples.offsets[docs] - 1
    before = np.cumsum(lengths) - lengths  # document positions in front, padding not counted
    used = np.bincount(row, weights=lengths, minlength=len(rows)).astype(np.int64)
    starts = before + (np.arange(len(rows)) * row_length - (np.cumsum(used) - used))[row]
    assert lengths.max(initial=0) <= max_doc_length
    assert used.max(initial=0) <= row_length

    within = np.arange(lengths.sum()) - np.repeat(before, lengths)
    at = within + np.repeat(starts, lengths)
    source = within + np.repeat(examples.offsets[docs], lengths)
    input_ids = np.full(total, pad_id, dtype=np.int64)
    targets = np.full(total, IGNORE, dtype=np.int64)
    position_ids = np.zeros(total, dtype=np.int64)
    doc_ids = np.full(total, -1, dtype=np.int32)
    input_ids[at] = examples.ids[source]
    targets[at] = np.where(examples.is_target[source + 1], examples.ids[source + 1], IGNORE)
    position_ids[at] = within
    number_in_row = np.arange(len(docs)) - np.repeat(np.cumsum(docs_in_row) - docs_in_row, docs_in_row)
    doc_ids[at] = np.repeat(number_in_row, lengths)

    is_target = targets != IGNORE
    shape = (len(rows), row_length)
    return Batch(
        torch.from_numpy(input_ids.reshape(shape)),
        torch.from_numpy(targets.reshape(shape)),
        torch.from_numpy(position_ids.reshape(shape)),
        torch.from_numpy(doc_ids.reshape(shape)),
        torch.from_numpy(_cu_seqlens(starts, used, row_length, max_docs, max_doc_length)),
        torch.from_numpy(_target_index(is_target)),
        max_doc_length=max_doc_length,
        num_tokens=int(lengths.sum()),
        num_targets=int(is_target.sum()),
        attention_pairs=int((lengths * (lengths + 1) // 2).sum()),
    )


def _cu_seqlens(
    starts: np.ndarray, used: np.ndarray, row_length: int, max_docs: int, max_doc_length: int
) -> np.ndarray:
    """Starts of the documents and of what is left of each row, cut into pieces of max_doc_length; int32 [D + 1]."""
    padding = [np.arange(r * row_length + n, (r + 1) * row_length, max_doc_length) for r, n in enumerate(used)]
    all_starts = np.sort(np.concatenate([starts, *padding]))
    assert len(all_starts) <= max_docs, f"{len(all_starts)} documents in {max_docs} slots"
    cu_seqlens = np.full(max_docs + 1, len(used) * row_length, dtype=np.int32)
    cu_seqlens[: len(all_starts)] = all_starts
    return cu_seqlens


def _target_index(is_target: np.ndarray) -> np.ndarray:
    """Positions of the targets, then of the first others up to a multiple of TARGET_MULTIPLE; int64 [P]."""
    positions = np.flatnonzero(is_target)
    size = max(-(-len(positions) // TARGET_MULTIPLE), 1) * TARGET_MULTIPLE
    filler = np.flatnonzero(~is_target)[: size - len(positions)]
    return np.concatenate([positions, filler])


def warm_up_batch(rows: int, row_length: int, vocab_size: int, max_docs: int, max_doc_length: int) -> Batch:
    """The heaviest batch of a declared shape: random tokens, documents as long as allowed, every position a target."""
    whole, rest = divmod(row_length, max_doc_length)
    row = [max_doc_length] * whole + [rest] * (rest > 0)
    sizes = row * rows
    ids = np.random.default_rng(0).integers(0, vocab_size, sum(sizes) + len(sizes))
    numbers = np.arange(len(sizes)).reshape(rows, len(row))
    recipe = tuple(map(tuple, numbers.tolist()))
    return collate(Examples.of(ids, sizes), recipe, row_length, 0, max_docs, max_doc_length)
