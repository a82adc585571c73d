"""Before anything is trained: are the gradients of our step those of the plain model, document by document?

A few short documents go through what the train step calls, micro-batches, masks, loss and exchange between ranks included:
in a declared shape through the compiled code, and in one short row without the compiler. The plain model sees each of them
alone, by transformers' own forward pass and torch's cross entropy. Gradients are compared in a sample of each parameter, so
nothing as large as a gradient is kept. Afterwards there are no gradients, and random state and weights are as before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.compile.contract import run_eagerly
from sftkit.data.collate import WHOLE, Batch, collate, documents, part_of
from sftkit.data.pack import Layout
from sftkit.data.types import Examples
from sftkit.engine.step import gradients
from sftkit.engine.warmup import has_dropout
from sftkit.models.structure import decoder_blocks, embedding_of, head, vocab_size
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.sums import Totals
from sftkit.ops.attention import plain_attention, short_windows
from sftkit.ops.dtensor import local, local_region
from sftkit.parallel.fsdp import let_go, plain_backward
from sftkit.parallel.tensor import whole_rows
from sftkit.parallel.wrap import gradient_scale, gradient_sync
from sftkit.runtime.start import Runtime

SIZES = (8, 5)
"Positions of the documents of a micro-batch, at most."
ROW_LENGTH = 16
"Of the row without the compiler, for each rank that shares it."
MICRO_BATCHES = 3
"At most: the fewest that make a step add bf16 gradients up in fp32."
SAMPLE = 4096
"Elements of a parameter that are compared, evenly spread; of embedding and head the rows of the documents' tokens."
FLOOR = 0.1
"""A parameter is measured against its own gradient, but against no less than this share of that of its block: some have none
but rounding errors (the bias of keys without positions)."""


@dataclass(frozen=True)
class Difference:
    """Of two sets of gradients: the largest of a parameter."""

    relative: float
    "norm of the difference over the norm, of the sample"
    parameter: str


@dataclass(frozen=True)
class GradientCheck:
    """Gradients of our step against the plain model's."""

    eager: Difference
    compiled: Difference | None
    why_not: str = ""
    "why the compiled step is not compared"


def check_gradients(
    model: ModelWithLoss,
    wrapped: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    layout: Layout,
    rt: Runtime,
    eager: str,
    compiled: bool,
) -> GradientCheck:
    """Compare, after the warm-up; every rank calls it.

    Args:
        wrapped: what the step calls: `model`, distributed.
        parameters: those that are trained.
        eager: attention backend where nothing is compiled.
        compiled: whether the step is. With dropout two passes differ, so only a model without is compared compiled.
    """
    orig_model, dropout = model.orig_model, has_dropout(model.orig_model)
    sides = _Sides(model, wrapped, parameters, rt)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    was_training, attention = orig_model.training, model.backend
    with torch.random.fork_rng(devices=devices):
        try:
            orig_model.train(not dropout)
            model.backend = "reference" if eager == "sdpa" else eager  # sdpa takes one document a row
            with short_windows(orig_model), run_eagerly():
                found = sides.compare(*_short_rows(orig_model, layout, rt))
            model.backend = attention
            if dropout or not compiled:
                return GradientCheck(found, None, "dropout" if compiled else "not compiled")
            orig_model.train()
            return GradientCheck(found, sides.compare(*_declared_rows(orig_model, layout, rt)))
        finally:
            model.backend = attention
            orig_model.train(was_training)
            model.zero_grad(set_to_none=True)
            let_go(orig_model)


class _Sides:
    """The two ways to the same gradients."""

    def __init__(
        self,
        model: ModelWithLoss,
        wrapped: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        rt: Runtime,
    ) -> None:
        self.model, self.wrapped, self.rt = model, wrapped, rt
        self.parameters = list(parameters)
        wanted = {id(p) for p in self.parameters if p.requires_grad}
        self.named = {name: p for name, p in model.orig_model.named_parameters() if id(p) in wanted}
        self.blocks = _block_of(model.orig_model)

    def compare(self, whole: list[Batch], own: list[Batch]) -> Difference:
        """
        Args:
            whole: micro-batches, the same on every rank. own: what this rank computes of each.
        """
        targets = sum(self.model.objective.count(batch) for batch in whole)
        tokens = torch.cat([batch.inputs["input_ids"].flatten() for batch in whole]).unique()
        with _alone(self.wrapped, self.rt):
            ours = self._ours(own, targets, tokens)
            plain = self._plain(whole, targets, tokens)
        return self._largest(ours, plain)

    def _ours(self, micro_batches: list[Batch], targets: int, tokens: Tensor) -> dict[str, Tensor]:
        """As in engine.step.optimizer_step, up to the update."""
        totals = Totals.zeros(self.model.objective.measured, self.rt.device, self.model.orig_model.dtype)
        divisor = targets * round(gradient_scale(self.rt))  # replicas do without the exchange that averages
        gradients(self.wrapped, self.parameters, micro_batches, divisor, totals, self.rt)
        return self._taken(tokens)

    def _plain(self, micro_batches: list[Batch], targets: int, tokens: Tensor) -> dict[str, Tensor]:
        """Document by document, uncompiled; ranks that share rows all have whole ones here, so there is more to add up."""
        model, topology = self.model, self.rt.topology
        orig_model = model.orig_model
        if topology.sharded:
            gradient_sync(self.wrapped, True, self.rt)
        with run_eagerly(), plain_attention(orig_model), plain_backward(orig_model), whole_rows(orig_model):
            for inputs, wanted in chain.from_iterable(documents(batch) for batch in micro_batches):
                logits = model.kind.plain_logits(orig_model, inputs)[0]
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                (model.objective.sums_of_logits(logits, wanted).loss / (targets * topology.context)).backward()
        found = self._taken(tokens)
        for name in found.keys() - self.blocks.keys():  # blocks add up over fewer ranks: see parallel.fsdp.Meshes
            found[name] /= topology.tensor
        return found

    def _taken(self, tokens: Tensor) -> dict[str, Tensor]:
        """A sample of each gradient, float64, for the parameters' gradients to be freed."""
        vocabulary = {id(embedding_of(self.model.orig_model)), id(head(self.model.orig_model).weight)}
        found = {name: sample(p, tokens if id(p) in vocabulary else None) for name, p in self.named.items()}
        self.model.zero_grad(set_to_none=True)
        return found

    def _largest(self, ours: dict[str, Tensor], plain: dict[str, Tensor]) -> Difference:
        """Over all ranks, which find the same."""
        squares = torch.stack(
            [
                torch.stack([(ours[name] - plain[name]).square().sum(), plain[name].square().sum()])
                * (local(p).numel() / max(plain[name].numel(), 1))  # what the whole of this rank's part would have
                for name, p in self.named.items()
            ]
        )
        return largest(dict(zip(self.named, self.rt.sum(squares).tolist(), strict=True)), self.blocks)


def largest(squares: Mapping[str, Sequence[float]], blocks: Mapping[str, str]) -> Difference:
    """The parameter with the largest relative difference.

    Args:
        squares: by parameter, squared norms of the difference and of the plain model's gradient.
        blocks: by parameter of a block, the block.
    """
    of_block: dict[str, float] = defaultdict(float)
    for name, (_, norm) in squares.items():
        of_block[blocks.get(name, name)] += norm
    found = Difference(0.0, "")
    for name, (difference, norm) in squares.items():
        against = max(norm, FLOOR**2 * of_block[blocks.get(name, name)])
        relative = math.sqrt(difference / against) if against else math.inf if difference else 0.0
        relative = math.inf if math.isnan(relative) else relative
        if relative > found.relative or not found.parameter:
            found = Difference(relative, name)
    return found


def sample(parameter: torch.nn.Parameter, tokens: Tensor | None) -> Tensor:
    """Some elements of a parameter's gradient, of a sharded one of this rank's part: float64 [N].

    Args:
        tokens: int64 [K]; of an embedding or head [V, H] the rows of these are taken, else elements at even distances.
    """
    source = parameter.detach() if parameter.grad is None else parameter.grad
    piece = local(source)
    if tokens is None:
        taken = piece.reshape(-1)[:: piece.numel() // SAMPLE | 1]  # an odd distance passes through all columns
    else:
        first = local_region(parameter)[0][0] if isinstance(parameter, DTensor) else 0
        rows = tokens - first
        taken = piece[rows[(rows >= 0) & (rows < len(piece))]].flatten()
    taken = taken.to(torch.float64, copy=True)
    return taken.zero_() if parameter.grad is None else taken


def _block_of(orig_model: PreTrainedModel) -> dict[str, str]:
    """Name of each parameter of a block -> name of the block."""
    names = {id(module): name for name, module in orig_model.named_modules()}
    blocks = [(names[id(block)], block) for block in decoder_blocks(orig_model)]
    return {f"{name}.{inner}": name for name, block in blocks for inner, _ in block.named_parameters()}


def _alone(wrapped: torch.nn.Module, rt: Runtime) -> AbstractContextManager[object]:
    """Inside, replicas keep their gradients to themselves: what DDP exchanges first decides how it exchanges later."""
    return nullcontext() if rt.topology.sharded else gradient_sync(wrapped, False, rt)


def _short_rows(orig_model: PreTrainedModel, layout: Layout, rt: Runtime) -> tuple[list[Batch], list[Batch]]:
    """(whole micro-batches, this rank's parts of them) of one row with two documents and padding."""
    row_length = ROW_LENGTH * rt.topology.parts
    return _micro_batches(orig_model, layout, rt, [(0, 1)], row_length, 4, row_length)


def _declared_rows(orig_model: PreTrainedModel, layout: Layout, rt: Runtime) -> tuple[list[Batch], list[Batch]]:
    """The same in the smallest declared shape, a document a row where rows have no more; the other rows are padding."""
    rows, row_length = layout.shapes[0]
    several = layout.kind == "packed" and layout.docs_per_row > 1
    recipe: list[tuple[int, ...]] = [(0, 1)] if several else [(0,), (1,)]
    recipe = [*recipe, *[()] * rows][:rows]
    return _micro_batches(
        orig_model, layout, rt, recipe, row_length, layout.max_docs(rows, row_length), layout.max_doc_length
    )


def _micro_batches(
    orig_model: PreTrainedModel,
    layout: Layout,
    rt: Runtime,
    rows: list[tuple[int, ...]],
    row_length: int,
    max_docs: int,
    max_doc_length: int,
) -> tuple[list[Batch], list[Batch]]:
    """(whole micro-batches, this rank's parts of them): random tokens, every third of them no target."""
    room = min(max_doc_length, row_length // max(map(len, rows)))
    sizes = [min(size, room) for size in SIZES]
    random = np.random.default_rng(0)
    whole, own = [], []
    for _ in range(min(layout.accumulation, MICRO_BATCHES)):
        examples = Examples.of(random.integers(0, vocab_size(orig_model), sum(sizes) + len(sizes)), sizes)
        examples.is_target[2::3] = False
        collated = (
            collate(examples, tuple(rows), row_length, 0, max_docs, max_doc_length, part)
            for part in (WHOLE, part_of(rt.topology, rt.rank))
        )
        batch, part = (each.to(rt.device) for each in collated)
        whole.append(batch)
        own.append(part)
    return whole, own
