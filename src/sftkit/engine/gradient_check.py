"""Before anything is trained: are the gradients of our step those of the plain model, document by document?

A few short documents go through what the train step calls, micro-batches, masks, loss and exchange between ranks included:
in a declared shape through the compiled code, and in one short row without the compiler. The plain model sees each of them
alone, by transformers' own forward pass and torch's cross entropy. Gradients are compared in a sample of each parameter
(gradient_samples), so nothing as large as a gradient is kept. Afterwards there are no gradients, and random state and weights are as before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from sftkit.engine.gradient_samples import Difference, block_of, largest, own_part, places_of, taken
from sftkit.engine.step import gradients
from sftkit.engine.warmup import has_dropout
from sftkit.models.structure import vocab_size
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.sums import Totals
from sftkit.ops.attention import plain_attention, short_windows
from sftkit.parallel.fsdp import fsdp_modules, let_go, plain_backward
from sftkit.parallel.tensor import whole_rows
from sftkit.parallel.wrap import gradient_scale, gradient_sync
from sftkit.runtime.start import Runtime

SIZES = (8, 5)
"Positions of the documents of a micro-batch, at most."
ROW_LENGTH = 16
"Of the row without the compiler, for each rank that shares it."
MICRO_BATCHES = 3
"At most: the fewest that make a step add bf16 gradients up in fp32."
TOKENS = 32
"Different tokens in the documents, at most: the rows of embedding and head that all ranks compare are the same few."


@dataclass(frozen=True)
class GradientCheck:
    """Gradients of our step against the plain model's."""

    eager: Difference
    compiled: Difference | None
    why_not: str = ""
    "why the compiled step is not compared; empty where there is none"
    backend: str = ""
    "attention of the eager one"


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
            model.backend = eager
            with short_windows(orig_model), run_eagerly():
                found = sides.compare(
                    *_short_rows(orig_model, layout, rt, alone=eager == "sdpa")
                )  # takes no more a row
            model.backend = attention
            if dropout or not compiled:
                return GradientCheck(found, None, "dropout" if compiled else "", eager)
            orig_model.train()
            return GradientCheck(found, sides.compare(*_declared_rows(orig_model, layout, rt)), "", eager)
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
        self.blocks = block_of(model.orig_model)
        tokens = torch.from_numpy(_tokens(model.orig_model)).to(rt.device)
        self.places = places_of(model.orig_model, self.named, tokens)

    def compare(self, whole: list[Batch], own: list[Batch]) -> Difference:
        """
        Args:
            whole: micro-batches of this rank's rows. own: what it computes of each.
        """
        targets = sum(self.model.objective.count(batch) for batch in whole)
        if self.rt.topology.sharded and not same_rows(self.rt):
            count = torch.tensor(float(targets), dtype=torch.float64, device=self.rt.device)
            targets = round(float(self.rt.sum(count)) / self.rt.topology.parts)
        with _alone(self.wrapped, self.rt):
            ours = self._ours(own, targets)
            plain = self._plain(whole, targets)
        return self._largest(ours, plain)

    def _ours(self, micro_batches: list[Batch], targets: int) -> dict[str, Tensor]:
        """As in engine.step.optimizer_step, up to the update."""
        totals = Totals.zeros(self.model.objective.measured, self.rt.device, self.model.orig_model.dtype)
        divisor = targets * round(gradient_scale(self.rt))  # replicas do without the exchange that averages
        gradients(self.wrapped, self.parameters, micro_batches, divisor, totals, self.rt)
        return self._taken()

    def _plain(self, micro_batches: list[Batch], targets: int) -> dict[str, Tensor]:
        """Document by document, uncompiled; ranks that share rows all have whole ones here, so there is more to add up.

        Gradients are read where autograd gives them to a parameter, before any exchange, and added up over the ranks by a
        plain sum; but not under tensor parallelism, where no rank has those of a whole matrix.
        """
        model, topology = self.model, self.rt.topology
        orig_model = model.orig_model
        if topology.sharded:
            gradient_sync(self.wrapped, True, self.rt)
        exchanged = same_rows(self.rt)
        with ExitStack() as stack:
            sums = {} if exchanged else stack.enter_context(self._heard())
            for inside in (
                run_eagerly(),
                plain_attention(orig_model),
                plain_backward(orig_model),
                whole_rows(orig_model),
            ):
                stack.enter_context(inside)
            for inputs, wanted in chain.from_iterable(documents(batch) for batch in micro_batches):
                logits = model.kind.plain_logits(orig_model, inputs)[0]
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                (model.objective.sums_of_logits(logits, wanted).loss / (targets * topology.context)).backward()
        if exchanged:
            found = self._taken()
            for name, places in self.places.items():  # blocks add up over fewer ranks: see parallel.fsdp.Meshes
                if places.parameter not in self.blocks:
                    found[name] /= topology.tensor
            return found
        self.model.zero_grad(set_to_none=True)
        if topology.sharded:
            whole = self.rt.sum(torch.cat(list(sums.values()))).split([len(each) for each in sums.values()])
            sums = dict(zip(sums, whole, strict=True))
        return {name: sums[name][own_part(self.named[p], at)] for name, (p, at, _) in self.places.items()}

    @contextmanager
    def _heard(self) -> Iterator[dict[str, Tensor]]:
        """Inside, what autograd gives a parameter is added up, of whole parameters at the places of each: float64."""
        sums = {
            name: torch.zeros(len(at), dtype=torch.float64, device=at.device)
            for name, (_, at, _) in self.places.items()
        }
        of: dict[str, list[str]] = defaultdict(list)
        for name, places in self.places.items():
            of[places.parameter].append(name)

        def add(parameter: str, gradient: Tensor) -> None:
            flat = gradient.detach().flatten()
            for name in of[parameter]:
                sums[name] += flat[self.places[name].at].double()

        handles, heard = [], set[str]()
        orig_model = self.model.orig_model
        for piece in [None, *fsdp_modules(orig_model)]:
            if piece is not None:
                piece.unshard()  # from then on the module has the whole weights, the same objects each time
            for name, p in orig_model.named_parameters():
                if name in of and name not in heard and not isinstance(p, DTensor):
                    handles.append(p.register_hook(partial(add, name)))
                    heard.add(name)
            if piece is not None:
                piece.reshard()
        assert heard == of.keys(), sorted(of.keys() - heard)
        try:
            yield sums
        finally:
            for handle in handles:
                handle.remove()

    def _taken(self) -> dict[str, Tensor]:
        """A sample of each gradient, float64, for the parameters' gradients to be freed."""
        found = {name: taken(self.named[parameter], at) for name, (parameter, at, _) in self.places.items()}
        self.model.zero_grad(set_to_none=True)
        return found

    def _largest(self, ours: dict[str, Tensor], plain: dict[str, Tensor]) -> Difference:
        """Over all ranks, which find the same."""
        sums = []
        for name, places in self.places.items():
            a, b = ours[name], plain[name]
            sums.append(torch.stack([(a - b).square().sum(), b.square().sum(), (a * b).sum()]) * places.each)
        return largest(dict(zip(self.places, self.rt.sum(torch.stack(sums)).tolist(), strict=True)), self.blocks)


def same_rows(rt: Runtime) -> bool:
    """Whether all ranks get the same documents: under tensor parallelism, where both sides go through the same exchange."""
    return rt.topology.tensor > 1


def _tokens(orig_model: PreTrainedModel) -> np.ndarray:
    """What documents are made of: int64 [K], ascending; and what padding is."""
    return np.unique([0, *np.random.default_rng(0).integers(0, vocab_size(orig_model), TOKENS - 1)])


def _alone(wrapped: torch.nn.Module, rt: Runtime) -> AbstractContextManager[object]:
    """Inside, replicas keep their gradients to themselves: what DDP exchanges first decides how it exchanges later."""
    return nullcontext() if rt.topology.sharded else gradient_sync(wrapped, False, rt)


def _short_rows(
    orig_model: PreTrainedModel, layout: Layout, rt: Runtime, alone: bool
) -> tuple[list[Batch], list[Batch]]:
    """(whole micro-batches, this rank's parts of them) of one row with two documents and padding, or of two rows with one
    each if `alone`."""
    row_length = ROW_LENGTH * rt.topology.parts
    rows: list[tuple[int, ...]] = [(0,), (1,)] if alone else [(0, 1)]
    return _micro_batches(orig_model, layout, rt, rows, row_length, 4, row_length)


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
    """(whole micro-batches, this rank's parts of them): random tokens, others for each rank that has other rows, every third
    of them no target."""
    room = min(max_doc_length, row_length // max(map(len, rows)))
    sizes = [min(size, room) for size in SIZES]
    random, tokens = np.random.default_rng(0 if same_rows(rt) else rt.data_rank), _tokens(orig_model)
    whole, own = [], []
    for _ in range(min(layout.accumulation, MICRO_BATCHES)):
        examples = Examples.of(random.choice(tokens, sum(sizes) + len(sizes)), sizes)
        examples.is_target[2::3] = False
        collated = (
            collate(examples, tuple(rows), row_length, 0, max_docs, max_doc_length, part)
            for part in (WHOLE, part_of(rt.topology, rt.rank))
        )
        batch, part = (each.to(rt.device) for each in collated)
        whole.append(batch)
        own.append(part)
    return whole, own
