"""The few short documents whose gradients are compared, in rows as the step takes them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from sftkit.data.batches.collate import Batch, collate
from sftkit.data.batches.pack import BatchShape, Layout
from sftkit.data.batches.shard import row_shard
from sftkit.data.types import Examples
from sftkit.models.kinds import kind_of
from sftkit.models.structure import vocab_size
from sftkit.runtime.start import Runtime

_SIZES = (8, 5)
"Largest lengths of the documents of a micro-batch, in positions."
_ROW_LENGTH = 16
"Positions of the row without the compiler, for each rank that shares it."
MICRO_BATCHES = 3
"Maximum number of micro-batches, or the pipeline stages if more: from 3 on a step adds up bf16 gradients in fp32."
TOKENS = 32
"Maximum number of different tokens in the documents: all ranks compare the same few rows of embedding and head."


class ProbeBatch(NamedTuple):
    """A micro-batch whose gradients are compared."""

    examples: Examples
    rows: tuple[tuple[int, ...], ...]
    "which documents each row has; all ranks that share rows have the same"
    own: Batch
    "what this rank computes of them, collated as in a step"


def same_rows(rt: Runtime) -> bool:
    """Return whether all ranks get the same documents, as under tensor parallelism, through
    whose exchange both sides pass."""
    return rt.topology.tensor > 1


def tokens_of(orig_model: PreTrainedModel) -> np.ndarray:
    """Return the tokens of the documents, and 0, which is padding: int64 [K], ascending."""
    return np.unique([0, *np.random.default_rng(0).integers(0, vocab_size(orig_model), TOKENS - 1)])


def short_rows(orig_model: PreTrainedModel, layout: Layout, rt: Runtime, *, alone: bool) -> list[ProbeBatch]:
    """Return micro-batches of one row with two documents and padding, or of two rows with one document each if
    `alone`."""
    row_length = _ROW_LENGTH * rt.topology.ranks_per_row
    rows: list[tuple[int, ...]] = [(0,), (1,)] if alone else [(0, 1)]
    return _micro_batches(orig_model, layout, rt, rows, BatchShape(row_length, max_docs=4, max_doc_length=row_length))


def declared_rows(orig_model: PreTrainedModel, layout: Layout, rt: Runtime) -> list[ProbeBatch]:
    """Return what `short_rows` returns, in the smallest declared shape.

    If rows hold one document each, two rows have one, and the others are padding.
    """
    rows, row_length = layout.shapes[0]
    # A packed row takes both documents, so that their isolation is part of what is compared.
    several = layout.kind == "packed" and layout.docs_per_row > 1
    recipe: list[tuple[int, ...]] = [(0, 1)] if several else [(0,), (1,)]
    recipe = [*recipe, *[()] * rows][:rows]
    return _micro_batches(orig_model, layout, rt, recipe, layout.batch_shape(rows, row_length))


def _micro_batches(
    orig_model: PreTrainedModel, layout: Layout, rt: Runtime, rows: list[tuple[int, ...]], shape: BatchShape
) -> list[ProbeBatch]:
    """Build micro-batches of random tokens, every third of them no target.

    Each rank with rows of its own gets other tokens.
    """
    # Declared shapes may be shorter than the usual sizes.
    room = min(shape.max_doc_length, shape.row_length // max(map(len, rows)))
    sizes = [min(size, room) for size in _SIZES]
    # Ranks with rows of their own need different tokens, or a missing exchange would go unseen; ranks that share rows
    # need the same ones.
    random, tokens = np.random.default_rng(0 if same_rows(rt) else rt.data_rank), tokens_of(orig_model)
    inputs = kind_of(orig_model.config).made_up_inputs(orig_model, len(sizes), layout.max_length)
    found = []
    for _ in range(min(layout.accumulation, max(MICRO_BATCHES, rt.topology.stages))):
        examples = Examples.of(random.choice(tokens, sum(sizes) + len(sizes)), sizes, inputs)
        # A loss that ignored the mask, or counted wrong, would show in every gradient.
        examples.is_target[2::3] = False
        own = collate(examples, tuple(rows), shape, shard=row_shard(rt.topology, rt.rank)).to(rt.device)
        found.append(ProbeBatch(examples, tuple(rows), own))
    return found
