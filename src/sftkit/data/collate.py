"""Rows of document indices become tensors of declared shape. Targets are shifted here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from sftkit.data.types import Examples

IGNORE = -100  # torch.nn.functional.cross_entropy's ignore_index


@dataclass(frozen=True)
class Batch:
    """A micro-batch: B rows of T positions, and host counts that need no device sync.

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
        )


def collate(examples: Examples, rows: tuple[tuple[int, ...], ...], row_length: int, pad_id: int) -> Batch:
    """Lay documents out in rows. A document of n tokens takes n - 1 positions; its last token is only a target."""
    shape = (len(rows), row_length)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    targets = np.full(shape, IGNORE, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    doc_ids = np.full(shape, -1, dtype=np.int32)
    num_tokens = attention_pairs = 0
    for r, row in enumerate(rows):
        start = 0
        for doc, i in enumerate(row):
            example = examples[i]
            n = len(example.ids) - 1
            at = (r, slice(start, start + n))
            input_ids[at] = example.ids[:-1]
            targets[at] = np.where(example.is_target[1:], example.ids[1:], IGNORE)
            position_ids[at] = np.arange(n)
            doc_ids[at] = doc
            start += n
            attention_pairs += n * (n + 1) // 2
        num_tokens += start
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(targets),
        torch.from_numpy(position_ids),
        torch.from_numpy(doc_ids),
        num_tokens=num_tokens,
        num_targets=int((targets != IGNORE).sum()),
        attention_pairs=attention_pairs,
    )


def warm_up_batch(rows: int, row_length: int, vocab_size: int) -> Batch:
    """A batch of a declared shape for compiling: random tokens, two documents a row, every position a target."""
    rng = np.random.default_rng(0)
    sizes = np.tile([row_length // 2 + 1, row_length - row_length // 2 + 1], rows)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = rng.integers(0, vocab_size, int(offsets[-1])).astype(np.int32)
    zeros = np.zeros(2 * rows, dtype=np.int64)
    examples = Examples(ids, np.ones(len(ids), bool), offsets, zeros, zeros.astype(np.int16), ("warm-up",), {})
    return collate(examples, tuple((2 * r, 2 * r + 1) for r in range(rows)), row_length, pad_id=0)
