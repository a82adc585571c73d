"""Check before training that the gradients of our step are those of the plain model, document by document.

A few short documents go through what the train step calls, micro-batches, masks, loss and exchange between ranks
included: in a declared shape through the compiled code, and in one short row without the compiler. The plain model
(engine.plain) gets the documents' own ids and masks, by transformers' own forward pass and torch's cross entropy.
Gradients are compared in a sample of each parameter (gradient_samples), so nothing as large as a gradient is kept.
Afterwards there are no gradients, and random state and weights are as before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from sftkit.compile.contract import random_state_kept, run_eagerly
from sftkit.data.batches.collate import Batch
from sftkit.data.batches.pack import Layout
from sftkit.engine.gradient_rows import ProbeBatch, declared_rows, same_rows, short_rows, tokens_of
from sftkit.engine.gradient_samples import (
    GradientDifference,
    block_names,
    largest,
    on_this_rank,
    sample_elements,
    taken,
    window,
)
from sftkit.engine.plain import PlainModel, documents_of, in_one_pass, plain_sums
from sftkit.engine.roundings import DRAWS, RoundingLimits, Roundings, rounded_at_random, worst
from sftkit.engine.step import MicroBatches, gradients
from sftkit.engine.warmup import has_dropout
from sftkit.models.float8 import position_multiple
from sftkit.models.stages import stages_of
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.sums import Totals
from sftkit.ops.attention import plain_attention, short_windows
from sftkit.ops.dtensor import local_part
from sftkit.parallel.fsdp import reshard
from sftkit.parallel.wrap import gradient_scale, gradient_sync
from sftkit.runtime.start import Runtime


@dataclass(frozen=True)
class GradientCheck:
    """Gradients of our step against the plain model's."""

    eager: GradientDifference
    compiled: GradientDifference | None
    skip_reason: str = ""
    "why the compiled step is not compared; empty where there is none"
    backend: str = ""
    "attention backend of the eager comparison"
    roundings: Roundings | None = None
    "how far rounding alone moves this model's gradients; measured if one of the two differences exceeds the limits"


def check_gradients(
    sides: Sides, layout: Layout, eager: str, allowed: RoundingLimits, *, compiled: bool
) -> GradientCheck:
    """Compare our gradients with the plain model's, after the warm-up; every rank calls it.

    Args:
        eager: attention backend where nothing is compiled.
        compiled: whether the step is compiled. It is not compared with dropout, where two passes differ.
        allowed: the limits; if one is exceeded in half precision, the effect of rounding alone is measured, see
            engine.roundings.
    """
    model, rt = sides.model, sides.rt
    orig_model, dropout = model.orig_model, has_dropout(model.orig_model)
    # Everything that is changed below is put back at the end, whatever happens: training goes on with this very model.
    was_training, attention = orig_model.training, model.backend
    with random_state_kept():
        try:
            # Two passes with dropout differ, so a model that has it is compared in eval mode, and only
            # without the compiler.
            orig_model.train(not dropout)
            model.backend = eager
            # Without the compiler, in one short row of two documents: sdpa takes only one document a row.
            with short_windows(orig_model), run_eagerly():
                micro_batches = short_rows(orig_model, layout, rt, alone=eager == "sdpa")
                with short_windows(sides.plain.orig_model):
                    same = GradientCheck(sides.compare(micro_batches), None, "", eager)
            # Through the compiled code, in a declared shape and in training mode, as its guards expect.
            model.backend = attention
            if compiled and dropout:
                same = replace(same, skip_reason="dropout")
            elif compiled:
                orig_model.train()
                micro_batches = declared_rows(orig_model, layout, rt)
                same = replace(same, compiled=sides.compare(micro_batches))
            # Beyond the limits: is this model that sensitive to rounding?
            known = [d for d in (same.eager, same.compiled) if d is not None]
            if allowed.gradients is None or orig_model.dtype == torch.float32 or all(map(allowed.hold, known)):
                return same
            return replace(same, roundings=sides.roundings(micro_batches))
        finally:
            model.backend = attention
            orig_model.train(was_training)
            # A failed pass may leave gathered weights and half of the gradients behind.
            model.zero_grad(set_to_none=True)
            reshard(orig_model)


class Sides:
    """The two ways to the same gradients: our step and the plain model."""

    def __init__(
        self,
        model: ModelWithLoss,
        wrapped: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        rt: Runtime,
        plain: PlainModel | None = None,
    ) -> None:
        """Choose what is compared, before anything is computed.

        Args:
            wrapped: what the step calls: `model`, distributed.
            parameters: those that are trained.
            plain: None: one without files.
        """
        self.model, self.wrapped, self.rt = model, wrapped, rt
        self.plain = plain or PlainModel(model, rt.device, rt=rt)
        self.parameters = list(parameters)
        # Tied weights have one parameter and several names: the first one stands for it, as named_parameters gives it.
        wanted = {id(p) for p in self.parameters if p.requires_grad}
        self.named = {name: p for name, p in model.orig_model.named_parameters() if id(p) in wanted}
        self.blocks = block_names(model.orig_model)
        tokens = torch.from_numpy(tokens_of(model.orig_model)).to(rt.device)
        self.sampled = sample_elements(model.orig_model, self.named, tokens)
        self.names = rt.united(list(self.sampled))
        "names of all ranks: a pipeline stage has elements of its own parameters only"

    def compare(self, micro_batches: Sequence[ProbeBatch]) -> GradientDifference:
        """Return the difference between our gradients and the plain model's."""
        targets = self._targets(micro_batches)
        with _without_exchange(self.wrapped, self.rt):
            ours = self._ours([one.own for one in micro_batches], targets)
            plain = self._plain(micro_batches, targets)
        return self._largest(ours, plain)

    def roundings(self, micro_batches: Sequence[ProbeBatch]) -> Roundings:
        """Return how far the plain model's gradients move when it is rounded at random."""
        targets, draws = self._targets(micro_batches), []
        plain = self._plain(micro_batches, targets)
        for _ in range(DRAWS):
            with rounded_at_random(self.plain.orig_model):
                draws.append(self._largest(self._plain(micro_batches, targets), plain))
        return worst(draws)

    def _targets(self, micro_batches: Sequence[ProbeBatch]) -> int:
        """Return the number of targets in all documents that add to the gradients of a rank, by their own masks."""
        targets = sum(int(self.model.objective.divisors(one.examples).sum()) for one in micro_batches)
        # Shards add gradients up over all ranks. Ranks that share a row, or a pipeline, counted the same targets each.
        if self.rt.topology.sharded and not same_rows(self.rt):
            count = torch.tensor(float(targets), dtype=torch.float64, device=self.rt.device)
            targets = round(float(self.rt.sum(count)) / (self.rt.topology.ranks_per_row * self.rt.topology.stages))
        return targets

    def _ours(self, micro_batches: list[Batch], targets: int) -> dict[str, Tensor]:
        """Return the samples of our gradients, made as in engine.step.optimizer_step up to the update."""
        # The sums themselves are not compared here: engine.self_check has compared the loss.
        totals = Totals.zeros(self.model.objective.measured, self.rt.device, self.model.orig_model.dtype)
        divisor = targets * round(gradient_scale(self.rt))  # replicas do without the exchange that averages
        gradients(self.wrapped, self.parameters, MicroBatches(micro_batches, divisor), totals, self.rt)
        return self._taken()

    def _plain(self, micro_batches: Sequence[ProbeBatch], targets: int) -> dict[str, Tensor]:
        """Return the samples of the plain model's gradients, uncompiled, of this rank's elements.

        Each rank computes whole gradients of its rows, which are added up over ranks by a plain sum: nothing goes
        through the exchange of a step.
        """
        plain, orig_model = self.plain, self.plain.orig_model
        multiple = position_multiple(orig_model)
        rows = [documents_of(one.examples, one.rows, self.rt.device, multiple) for one in micro_batches]
        # Where weights are gathered for each pass, one pass takes all documents. Routers count each by itself.
        if plain.gathers and plain.routing is None:
            rows = [[[in_one_pass(chain.from_iterable(chain.from_iterable(rows)))]]]
        sums = {
            name: torch.zeros(len(at), dtype=torch.float64, device=at.device)
            for name, (_, at, _) in self.sampled.items()
        }
        of: dict[str, list[str]] = defaultdict(list)
        for name, elements in self.sampled.items():
            of[elements.parameter].append(name)

        def add(parameter: str, gradient: Tensor) -> None:
            for name in of.get(parameter, ()):
                # Of a parameter that is sharded by columns this rank's shard counts as the whole.
                live = self.named[parameter]
                part = gradient if window(live)[1] == live.numel() else local_part(gradient, live)
                sums[name] += part.flatten()[self.sampled[name].at].double()

        orig_model.train(self.model.orig_model.training)
        with run_eagerly(), plain_attention(orig_model), plain.gradients_to(add):
            for one in plain_sums(plain, chain.from_iterable(rows)):
                (one.loss / targets).backward()
        sums = self._over_ranks(sums)
        return {name: sums[name][on_this_rank(self.named[p], at)] for name, (p, at, _) in self.sampled.items()}

    def _over_ranks(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up over the ranks whose gradients a step adds up here: replicas do without their exchange."""
        stages, topology = stages_of(self.model.orig_model), self.rt.topology
        if not topology.sharded:
            return sums
        if same_rows(self.rt):
            return {name: value * self.rt.data_world_size for name, value in sums.items()}
        # One exchange for all samples. In a pipeline only ranks of the same stage have the same names.
        values = torch.cat(list(sums.values()))
        if stages is None:
            values = self.rt.sum(values) / topology.ranks_per_row
        else:
            torch.distributed.all_reduce(values, group=stages.mesh.get_group("alike"))
        return dict(zip(sums, values.split([len(each) for each in sums.values()]), strict=True))

    def _taken(self) -> dict[str, Tensor]:
        """Return a sample of each gradient, float64 [N], and free the parameters' gradients."""
        found = {name: taken(self.named[parameter], at) for name, (parameter, at, _) in self.sampled.items()}
        self.model.zero_grad(set_to_none=True)
        return found

    def _largest(self, ours: dict[str, Tensor], plain: dict[str, Tensor]) -> GradientDifference:
        """Return the largest difference over all ranks, the same on each."""
        # A rank has the elements of its own shards only. Squares and products add up over ranks, relative
        # differences do not, so these are exchanged and the differences taken afterwards; `each` makes a sample
        # stand for the whole parameter.
        sums = torch.zeros(len(self.names), 3, dtype=torch.float64, device=self.rt.device)
        rows = {name: row for row, name in enumerate(self.names)}
        for name, elements in self.sampled.items():
            a, b = ours[name], plain[name]
            found = torch.stack([(a - b).square().sum(), b.square().sum(), (a * b).sum()])
            sums[rows[name]] = found * elements.each
        return largest(dict(zip(self.names, self.rt.sum(sums).tolist(), strict=True)), self.blocks)


def _without_exchange(wrapped: torch.nn.Module, rt: Runtime) -> AbstractContextManager[object]:
    """Return a context in which replicas do not exchange gradients: DDP lays out its buckets by the first exchange,
    which must be one of training."""
    return nullcontext() if rt.topology.sharded else gradient_sync(wrapped, rt, sync=False)
