"""One optimizer step: micro-batches and ranks return sums, and only this file divides them, by the divisor of the
global batch. And the batches that a warm-up runs: the worst case of every declared shape."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from sftkit.compile.contract import begin_step
from sftkit.data.batches.collate import Batch, warm_up_batch
from sftkit.data.batches.epoch import row_shard
from sftkit.data.batches.loader import StepBatches
from sftkit.data.batches.pack import Layout
from sftkit.models import kind, structure
from sftkit.objectives.objective import LOSS, ModelWithLoss, Objective, Totals
from sftkit.ops.attention import DROPOUTS
from sftkit.optim.protocol import Optimizer, clip_coefficient, parameters_of, squared_norm
from sftkit.parallel.wrap import gradient_scale, gradient_sync
from sftkit.runtime.hardware import uses_cuda_graphs
from sftkit.runtime.start import Runtime
from sftkit.tracking import health, names


@runtime_checkable
class SharesInStep(Protocol):
    """A model whose micro-batches of a step share something."""

    def step_of(self, micro_batches: int) -> AbstractContextManager[None]:
        """Return a context within which n micro-batches, forward and backward, are a step."""


@runtime_checkable
class RunsOwnSchedule(Protocol):
    """A model that runs all micro-batches of a step by itself, such as the stages of a pipeline."""

    def gradients(self, micro_batches: Sequence[Batch], divisor: int, totals: Totals) -> torch.Tensor:
        """Do what engine.step.gradients does."""

    def copies(self) -> dict[int, int]:
        """Return id of each parameter that this rank has -> ranks that have the same shard, where it is no DTensor."""


class GradientSum:
    """Sums the gradients of all micro-batches but the last in fp32: a bf16 sum would lose small addends.

    fp32 gradients need no such sum: autograd accumulates them in place. Only those in the memory of a CUDA graph are
    moved here too, as its next replay would overwrite them.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], micro_batches: int) -> None:
        """Choose the parameters whose gradients are summed here. `micro_batches`: their number in a step."""
        # The sum of two bf16 gradients is rounded once either way. With CUDA graphs the first of two must be moved,
        # too, before the next replay overwrites it.
        graphs = uses_cuda_graphs()
        few = micro_batches < (2 if graphs else 3)
        self._parameters = [
            p for p in parameters if not few and p.requires_grad and (graphs or p.dtype != torch.float32)
        ]
        self._sums: dict[int, torch.Tensor] = {}

    def take(self) -> None:
        """Add the gradients of a micro-batch to the sum, and clear them."""
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            # A copy even of fp32: the gradient's own memory may belong to a CUDA graph.
            if i in self._sums:
                self._sums[i].add_(parameter.grad)
            else:
                self._sums[i] = parameter.grad.to(torch.float32, copy=True)
            parameter.grad = None

    def put_back(self) -> None:
        """Make the sum, rounded once, the gradients that the last micro-batch adds to."""
        for i, total in self._sums.items():
            self._parameters[i].grad = total.to(self._parameters[i].dtype)
        self._sums.clear()


def forward_backward(model: torch.nn.Module, batch: Batch, divisor: int, rt: Runtime) -> Totals:
    """Run a micro-batch forward and backward: add its share of the gradient of loss / divisor, the mean over the global
    batch. No host sync.

    Returns:
        the micro-batch's sums, detached, on the device.
    """
    begin_step()
    sums = model(batch)
    # Divided before the backward pass, by a number that the host knows from the epoch's plan: no rank waits for a
    # count. A global batch without targets has the divisor 0, and then gradients of 0.
    rt.accelerator.backward(sums.loss * (gradient_scale(rt) / max(divisor, 1)))
    return Totals.of(sums)


def gradients(
    model: torch.nn.Module,
    parameters: Iterable[torch.nn.Parameter],
    batches: Sequence[Batch],
    divisor: int,
    totals: Totals,
    rt: Runtime,
) -> torch.Tensor:
    """Compute the gradients of all micro-batches, divided by the divisor and exchanged between ranks, into the
    parameters' `grad`; add the sums of each micro-batch to `totals`. No host sync.

    Returns:
        the loss sum of each micro-batch, [A], on the device.
    """
    if isinstance(model, RunsOwnSchedule):
        return model.gradients(batches, divisor, totals)
    # The last micro-batch adds to the sum of the earlier ones. Replicas exchange gradients in that one only, shards as
    # their plan says.
    losses = []
    last = len(batches) - 1
    earlier = GradientSum(parameters, len(batches))
    with model.step_of(len(batches)) if isinstance(model, SharesInStep) else nullcontext():
        for i, batch in enumerate(batches):
            if i == last:
                earlier.put_back()
            with gradient_sync(model, rt, sync=i == last):
                sums = forward_backward(model, batch, divisor, rt)
            totals.add_(sums)
            losses.append(sums[LOSS])
            if i < last:
                earlier.take()
    return torch.stack(losses)


@dataclass(frozen=True)
class TrainStep:
    """The parts of a step that stay the same in a run, and the step."""

    model: torch.nn.Module
    "compiled and wrapped; returns the sums of a batch"
    optimizer: Optimizer
    objective: Objective
    rt: Runtime
    max_grad_norm: float | None
    "the gradient is scaled down to this norm; None: it is not clipped"

    def gradients(self, batches: Sequence[Batch], divisor: int) -> None:
        """See engine.Engine.gradients. Replicas do not exchange: DDP lays out its buckets by the first exchange, which
        must be one of training."""
        totals = Totals.zeros(self.objective.measured, self.rt.device)
        parameters = parameters_of(self.optimizer.param_groups)
        alone = nullcontext() if self.rt.topology.sharded else gradient_sync(self.model, self.rt, sync=False)
        with alone:
            # The factor stands for the exchange, which averages.
            divisor *= round(gradient_scale(self.rt))
            gradients(self.model, parameters, batches, divisor, totals, self.rt)

    def step(
        self, batches: StepBatches, learning_rate: float, *, stop: bool = False, spikes: health.Spikes | None = None
    ) -> names.StepOutcome:
        """See engine.Engine.step."""
        # Everything stays on the device from here to the outcome, so the host runs ahead of it. Only the update of
        # optim.adamw8bit waits.
        rt = self.rt
        parameters = list(parameters_of(self.optimizer.param_groups))
        totals = Totals.zeros(self.objective.measured, rt.device)
        losses = gradients(self.model, parameters, batches.micro_batches, batches.divisor, totals, rt)
        copies = self.model.copies() if isinstance(self.model, RunsOwnSchedule) else None
        # The update is skipped on the device: a coefficient of nan changes nothing.
        squared = squared_norm(parameters, rt.world_size, copies)
        grad_norm, flags = exchange(squared, totals, batches.divisor, rt, stop=stop, spikes=spikes)
        coefficient = clip_coefficient(grad_norm, flags.skipped == 0, self.max_grad_norm)
        self.optimizer.update(learning_rate, coefficient)
        # After the update, not before the next backward pass, so that evaluation and saving find the memory free.
        self.optimizer.zero_grad(set_to_none=True)
        return names.StepOutcome(totals, grad_norm, flags, losses)


def exchange(
    squared: torch.Tensor, totals: Totals, divisor: int, rt: Runtime, *, stop: bool, spikes: health.Spikes | None = None
) -> tuple[torch.Tensor, names.Flags]:
    """Return the global gradient norm (fp32 0-d) and the flags of a step: one all-reduce of four numbers, no host sync.

    Args:
        squared: 0-d, this rank's share of the squared norm of all gradients; its dtype, fp32 or fp64, is that of
            the sum over ranks.
        totals: this rank's sums over its micro-batches.
        divisor: of the global batch.
        stop: this rank requests a stop.
        spikes: compares the step with earlier ones; None: no comparison.
    """
    # Everything that ranks must know of each other goes into one vector, since a small exchange costs as much as a
    # larger one. A sum serves all four: a squared norm, two counts of ranks, and the loss that is judged.
    share = squared.to(rt.device)
    stop_requested = torch.full_like(share, float(stop))
    nonfinite_loss = (~totals[LOSS].isfinite()).to(share.dtype)
    monitored = torch.zeros_like(share) if spikes is None else totals[spikes.monitored].to(share.dtype)
    norm, stops, losses, total = rt.sum(torch.stack([share, stop_requested, nonfinite_loss, monitored]))
    grad_norm = norm.sqrt().float()
    # Finite losses may still have a gradient that is not finite: then the count is 1, of no rank in particular.
    nonfinite = torch.where(grad_norm.isfinite(), losses, losses.clamp(min=1.0))
    if spikes is None:
        return grad_norm, names.Flags.of(stops, nonfinite, nonfinite > 0)
    verdict, skipped = spikes.judge(total / max(divisor, 1), grad_norm, nonfinite == 0)
    return grad_norm, names.Flags.of(stops, nonfinite, skipped, verdict)


def has_dropout(orig_model: PreTrainedModel) -> bool:
    """Return whether two training passes of the same batch differ."""
    layers = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in orig_model.modules())
    parts = [orig_model.config.get_text_config(), getattr(structure.encoder(orig_model), "config", None)]
    return layers or any(getattr(config, name, 0.0) for config in parts for name in DROPOUTS)


def worst_case_batch(rt: Runtime, orig_model: PreTrainedModel, layout: Layout, rows: int, row_length: int) -> Batch:
    """Build this rank's part of the worst-case batch of a shape, [rows, row_length], on the device."""
    shape = layout.batch_shape(rows, row_length)
    shard = row_shard(rt.topology, rt.rank)
    made_up = partial(kind.kind_of(orig_model.config).made_up_inputs, orig_model, length=layout.max_length)
    return warm_up_batch(rows, shape, structure.vocab_size(orig_model), shard, made_up).to(rt.device)


def shape_runner(
    rt: Runtime, wrapped: torch.nn.Module, model: ModelWithLoss, layout: Layout, losses: dict[tuple[int, int], float]
) -> Callable[[int, int], None]:
    """Return a function that runs the worst-case batch of a shape, forward and backward.

    Replicas run it without communication; a sharded model as in a step of several micro-batches, if the run's steps
    have several; pipeline stages as in a step.

    Args:
        wrapped: what the step calls: `model`, compiled and distributed.
        losses: filled with the objective per target of each shape, (rows, row_length) -> nats.
    """
    objective = model.objective

    def run_shape(rows: int, row_length: int) -> None:
        batch = worst_case_batch(rt, model.orig_model, layout, rows, row_length)
        if isinstance(wrapped, RunsOwnSchedule):
            dtype = torch.promote_types(model.orig_model.dtype, torch.float32)
            totals = Totals.zeros(objective.measured, rt.device, dtype)
            # A schedule needs all its micro-batches: one alone would fill no pipeline, and no stage would
            # reach its peak.
            count = max(layout.accumulation * objective.count(batch), 1)
            wrapped.gradients([batch] * layout.accumulation, count, totals)
            losses[rows, row_length] = float(rt.sum(totals[LOSS])) / rt.data_world_size / count
            return
        # Shards may keep gradients and weights until the last micro-batch of a step, so both kinds of micro-batch are
        # run: each has its own communication and peak of memory.
        syncs = [False] * (layout.accumulation > 1) + [True] if rt.topology.sharded else [False]
        for sync in syncs:
            with gradient_sync(wrapped, rt, sync=sync):
                total = float(forward_backward(wrapped, batch, objective.count(batch), rt)[LOSS])
                losses[rows, row_length] = total / max(objective.count(batch), 1)

    return run_shape
