"""The few short documents whose gradients are compared, in rows as the step takes them."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedModel

from sftkit.data.collate import WHOLE, Batch, collate, part_of
from sftkit.data.pack import Layout
from sftkit.data.types import Examples
from sftkit.models.kinds import kind_of
from sftkit.models.structure import vocab_size
from sftkit.runtime.start import Runtime

_SIZES = (8, 5)
"Positions of the documents of a micro-batch, at most."
_ROW_LENGTH = 16
"Of the row without the compiler, for each rank that shares it."
MICRO_BATCHES = 3
"At most: the fewest that make a step add bf16 gradients up in fp32; in a pipeline also as many as it has stages."
TOKENS = 32
"Different tokens in the documents, at most: the rows of embedding and head that all ranks compare are the same few."


def same_rows(rt: Runtime) -> bool:
    """Whether all ranks get the same documents: under tensor parallelism, where both sides go through the same exchange."""
    return rt.topology.tensor > 1


def tokens_of(orig_model: PreTrainedModel) -> np.ndarray:
    """What documents are made of: int64 [K], ascending; and what padding is."""
    return np.unique([0, *np.random.default_rng(0).integers(0, vocab_size(orig_model), TOKENS - 1)])


def short_rows(
    orig_model: PreTrainedModel, layout: Layout, rt: Runtime, alone: bool
) -> tuple[list[Batch], list[Batch]]:
    """(whole micro-batches, this rank's parts of them) of one row with two documents and padding, or of two rows with one
    each if `alone`."""
    row_length = _ROW_LENGTH * rt.topology.parts
    rows: list[tuple[int, ...]] = [(0,), (1,)] if alone else [(0, 1)]
    return _micro_batches(orig_model, layout, rt, rows, row_length, 4, row_length)


def declared_rows(orig_model: PreTrainedModel, layout: Layout, rt: Runtime) -> tuple[list[Batch], list[Batch]]:
    """The same in the smallest declared shape, a document a row where rows have no more; the other rows are padding."""
    rows, row_length = layout.shapes[0]
    several = layout.kind == "packed" and layout.docs_per_row > 1
    recipe: list[tuple[int, ...]] = [(0, 1)] if several else [(0,), (1,)]
    recipe = [*recipe, *[()] * rows][:rows]
    slots = layout.max_docs(rows, row_length)
    return _micro_batches(orig_model, layout, rt, recipe, row_length, slots, layout.max_doc_length, layout.docs_per_row)


def _micro_batches(
    orig_model: PreTrainedModel,
    layout: Layout,
    rt: Runtime,
    rows: list[tuple[int, ...]],
    row_length: int,
    max_docs: int,
    max_doc_length: int,
    docs_per_row: int | None = None,
) -> tuple[list[Batch], list[Batch]]:
    """(whole micro-batches, this rank's parts of them): random tokens, others for each rank that has other rows, every third
    of them no target."""
    room = min(max_doc_length, row_length // max(map(len, rows)))
    sizes = [min(size, room) for size in _SIZES]
    random, tokens = np.random.default_rng(0 if same_rows(rt) else rt.data_rank), tokens_of(orig_model)
    inputs = kind_of(orig_model.config).made_up_inputs(orig_model, len(sizes), layout.max_length)
    whole, own = [], []
    for _ in range(min(layout.accumulation, max(MICRO_BATCHES, rt.topology.stages))):
        examples = Examples.of(random.choice(tokens, sum(sizes) + len(sizes)), sizes, inputs)
        examples.is_target[2::3] = False
        collated = (
            collate(examples, tuple(rows), row_length, 0, max_docs, max_doc_length, part, docs_per_row)
            for part in (WHOLE, part_of(rt.topology, rt.rank))
        )
        batch, part = (each.to(rt.device) for each in collated)
        whole.append(batch)
        own.append(part)
    return whole, own
