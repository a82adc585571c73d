"""Check before training that the gradients of our step are those of the plain model, document by document.

A few short documents go through what the train step calls, micro-batches, masks, loss and exchange between ranks
included: in a declared shape through the compiled code, and in one short row without the compiler. The plain model sees
each of them alone, by transformers' own forward pass and torch's cross entropy. Gradients are compared in a sample of
each parameter (gradient_samples), so nothing as large as a gradient is kept. Afterwards there are no gradients, and
random state and weights are as before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftkit.compile.contract import random_state_kept, run_eagerly
from sftkit.data.batches.collate import Batch
from sftkit.data.batches.pack import Layout
from sftkit.engine.gradient_rows import declared_rows, same_rows, short_rows, tokens_of
from sftkit.engine.gradient_samples import (
    GradientDifference,
    block_names,
    largest,
    on_this_rank,
    sample_elements,
    taken,
)
from sftkit.engine.plain import plain_sums
from sftkit.engine.roundings import DRAWS, RoundingLimits, Roundings, rounded_at_random, worst
from sftkit.engine.step import MicroBatches, gradients
from sftkit.engine.warmup import has_dropout
from sftkit.models.float8 import position_multiple
from sftkit.models.stages import stages_of
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.sums import Totals
from sftkit.ops.attention import plain_attention, short_windows
from sftkit.parallel.fsdp import fsdp_modules, plain_backward, reshard
from sftkit.parallel.stagewise import stagewise
from sftkit.parallel.tensor import without_sequence_parallel
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
                same = GradientCheck(sides.compare(*micro_batches), None, "", eager)
            # Through the compiled code, in a declared shape and in training mode, as its guards expect.
            model.backend = attention
            if compiled and dropout:
                same = replace(same, skip_reason="dropout")
            elif compiled:
                orig_model.train()
                micro_batches = declared_rows(orig_model, layout, rt)
                same = replace(same, compiled=sides.compare(*micro_batches))
            # Beyond the limits: is this model that sensitive to rounding?
            known = [d for d in (same.eager, same.compiled) if d is not None]
            if allowed.gradients is None or orig_model.dtype == torch.float32 or all(map(allowed.hold, known)):
                return same
            return replace(same, roundings=sides.roundings(micro_batches[0]))
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
    ) -> None:
        """Choose what is compared, before anything is computed.

        Args:
            wrapped: what the step calls: `model`, distributed.
            parameters: those that are trained.
        """
        self.model, self.wrapped, self.rt = model, wrapped, rt
        self.parameters = list(parameters)
        # Tied weights have one parameter and several names: the first one stands for it, as named_parameters gives it.
        wanted = {id(p) for p in self.parameters if p.requires_grad}
        self.named = {name: p for name, p in model.orig_model.named_parameters() if id(p) in wanted}
        self.blocks = block_names(model.orig_model)
        tokens = torch.from_numpy(tokens_of(model.orig_model)).to(rt.device)
        self.sampled = sample_elements(model.orig_model, self.named, tokens)
        self.names = rt.united(list(self.sampled))
        "names of all ranks: a pipeline stage has elements of its own parameters only"

    def compare(self, full_batches: list[Batch], own: list[Batch]) -> GradientDifference:
        """Return the difference between our gradients and the plain model's.

        Args:
            full_batches: micro-batches of this rank's rows. own: what this rank computes of each.
        """
        targets = self._targets(full_batches)
        with _without_exchange(self.wrapped, self.rt):
            ours = self._ours(own, targets)
            plain = self._plain(full_batches, targets)
        return self._largest(ours, plain)

    def roundings(self, full_batches: list[Batch]) -> Roundings:
        """Return how far the plain model's gradients move when it is rounded at random."""
        targets, draws = self._targets(full_batches), []
        with _without_exchange(self.wrapped, self.rt):
            plain = self._plain(full_batches, targets)
            for _ in range(DRAWS):
                with rounded_at_random(self.model.orig_model):
                    draws.append(self._largest(self._plain(full_batches, targets), plain))
        return worst(draws)

    def _targets(self, full_batches: list[Batch]) -> int:
        """Return the number of targets in all batches that add to the gradients of a rank."""
        targets = sum(self.model.objective.count(batch) for batch in full_batches)
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

    def _plain(self, micro_batches: list[Batch], targets: int) -> dict[str, Tensor]:
        """Return the samples of the plain model's gradients: document by document, uncompiled.

        Ranks that share rows all compute the whole rows here, so the sum over ranks has each row several times.
        Gradients are read where autograd gives them to a parameter, before any exchange, and added up over the ranks by
        a plain sum. Two cases keep the exchange: tensor parallelism, where no rank has the gradient of a whole matrix,
        and weights that are gathered without FSDP2, where the exchange is part of the backward pass.
        """
        model, topology = self.model, self.rt.topology
        orig_model = model.orig_model
        # As in the last micro-batch of a step: gradients are exchanged and gathered weights freed.
        last = gradient_sync(self.wrapped, self.rt, sync=True) if topology.sharded else nullcontext()
        # Weights that are not FSDP2's are gathered, and their gradients exchanged, where the model reads them.
        gathered = topology.sharded and next(fsdp_modules(orig_model), None) is None
        exchanged = gathered or same_rows(self.rt)
        whole = nullcontext(dict[str, Tensor]()) if exchanged else self._whole_gradients()
        with stagewise(orig_model), whole as sums, run_eagerly(), last:
            multiple = position_multiple(orig_model)
            with plain_attention(orig_model), plain_backward(orig_model), without_sequence_parallel(orig_model):
                for plain in chain.from_iterable(plain_sums(model, batch, multiple) for batch in micro_batches):
                    (plain.loss / (targets * topology.context)).backward()
        # After an exchange a parameter's gradient is that of all ranks already; else the sums of the hooks still have
        # to be added up.
        if exchanged:
            found = self._taken()
            # FSDP2's blocks add up over fewer ranks: see parallel.fsdp.Meshes
            for name, elements in self.sampled.items():
                if gathered or elements.parameter not in self.blocks:
                    found[name] /= topology.tensor
            return found
        self.model.zero_grad(set_to_none=True)
        sums = self._over_ranks(sums)
        return {name: sums[name][on_this_rank(self.named[p], at)] for name, (p, at, _) in self.sampled.items()}

    def _over_ranks(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up over the ranks that have elements of the same parameters, and then what the first and the last stage
        of a pipeline found of a weight that both hold, as embedding and as head."""
        stages = stages_of(self.model.orig_model)
        if self.rt.topology.sharded:
            # One exchange for all samples. In a pipeline only ranks of the same stage have the same names.
            values = torch.cat(list(sums.values()))
            if stages is None:
                values = self.rt.sum(values)
            else:
                torch.distributed.all_reduce(values, group=stages.mesh.get_group("alike"))
            sums = dict(zip(sums, values.split([len(each) for each in sums.values()]), strict=True))
        if stages is not None:
            for name, elements in self.sampled.items():
                if len(stages.holders[elements.parameter]) > 1:
                    torch.distributed.all_reduce(sums[name], group=stages.ends)
        return sums

    @contextmanager
    def _whole_gradients(self) -> Iterator[dict[str, Tensor]]:
        """Add up what autograd gives each whole parameter within the context, at its sampled elements:
        name -> float64 [N]."""
        sums = {
            name: torch.zeros(len(at), dtype=torch.float64, device=at.device)
            for name, (_, at, _) in self.sampled.items()
        }
        of: dict[str, list[str]] = defaultdict(list)
        for name, elements in self.sampled.items():
            of[elements.parameter].append(name)

        def add(parameter: str, gradient: Tensor) -> None:
            flat = gradient.detach().flatten()
            for name in of[parameter]:
                sums[name] += flat[self.sampled[name].at].double()

        # FSDP2 swaps a module's sharded parameters for whole ones when it gathers. Hooks belong on the whole ones,
        # which a module has only between unshard() and reshard(), so modules are visited one after the other; None:
        # what is never gathered.
        heard, orig_model = set[str](), self.model.orig_model
        with ExitStack() as stack:
            for fsdp_module in [None, *(fsdp_modules(orig_model) if stages_of(orig_model) is None else ())]:
                if fsdp_module is not None:
                    # After unshard() the module's parameters are the whole weights, the same objects each time, so
                    # hooks on them stay valid.
                    fsdp_module.unshard()
                for name, p in orig_model.named_parameters():
                    if name in of and name not in heard and not isinstance(p, DTensor):
                        stack.callback(p.register_hook(partial(add, name)).remove)
                        heard.add(name)
                if fsdp_module is not None:
                    fsdp_module.reshard()
            assert heard == of.keys(), sorted(of.keys() - heard)
            yield sums

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
