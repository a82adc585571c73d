"""One optimizer step: everything inside the timed region. Sums flow; the division by the global count happens here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sftkit.compile.contract import begin_step, uses_cuda_graphs
from sftkit.data.collate import Batch
from sftkit.data.loader import StepBatches
from sftkit.objectives.objective import Objective
from sftkit.objectives.sums import LOSS, Totals
from sftkit.optim.gradients import clip_coefficient, squared_norm
from sftkit.optim.protocol import Optimizer, parameters_of
from sftkit.parallel.wrap import gradient_scale, gradient_sync
from sftkit.runtime.start import Runtime
from sftkit.tracking.outcome import Flags, StepOutcome


class GradientSum:
    """The gradients of all micro-batches but the last, added up in fp32: bf16 sums lose what is small against them.

    fp32 gradients add up by themselves; but those that lie in the memory of a CUDA graph do not outlive its next replay.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], micro_batches: int) -> None:
        graphs = uses_cuda_graphs()
        few = micro_batches < (2 if graphs else 3)  # two bf16 gradients make one rounding, with or without us
        self._parameters = [
            p for p in parameters if not few and p.requires_grad and (graphs or p.dtype != torch.float32)
        ]
        self._sums: dict[int, torch.Tensor] = {}

    def take(self) -> None:
        """Move the gradients of a micro-batch into the sum."""
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            if i in self._sums:
                self._sums[i].add_(parameter.grad)
            else:
                self._sums[i] = parameter.grad.to(torch.float32, copy=True)
            parameter.grad = None

    def put_back(self) -> None:
        """The sum as gradients, rounded once, for the last micro-batch to add to."""
        for i, total in self._sums.items():
            self._parameters[i].grad = total.to(self._parameters[i].dtype)
        self._sums.clear()


def forward_backward(model: torch.nn.Module, batch: Batch, divisor: int, rt: Runtime) -> Totals:
    """Add this micro-batch's share to the gradients of loss / divisor, the mean over the global batch.

    Returns:
        the micro-batch's sums, on the device, detached. No host sync.
    """
    begin_step()
    sums = model(batch)
    rt.accelerator.backward(sums.loss * (gradient_scale(rt) / max(divisor, 1)))
    return Totals.of(sums)


def gradients(
    model: torch.nn.Module,
    parameters: Iterable[torch.nn.Parameter],
    micro_batches: Sequence[Batch],
    divisor: int,
    totals: Totals,
    rt: Runtime,
) -> torch.Tensor:
    """Leave the gradients of all micro-batches over the divisor in the parameters, exchanged between the ranks, and add the
    sums of each to `totals`. No host sync.

    Returns:
        the minimised sum of each micro-batch, 1-d, on the device
    """
    losses = []
    last, earlier = len(micro_batches) - 1, GradientSum(parameters, len(micro_batches))
    for i, batch in enumerate(micro_batches):
        if i == last:
            earlier.put_back()
        with gradient_sync(model, i == last, rt):
            sums = forward_backward(model, batch, divisor, rt)
        totals.add_(sums)
        losses.append(sums[LOSS])
        if i < last:
            earlier.take()
    return torch.stack(losses)


def optimizer_step(
    model: torch.nn.Module,
    optimizer: Optimizer,
    objective: Objective,
    step_batches: StepBatches,
    learning_rate: float,
    max_grad_norm: float | None,
    rt: Runtime,
    *,
    stop: bool = False,
) -> StepOutcome:
    """All micro-batches, one update; no update where the loss of any rank or the gradient norm is not finite.

    Args:
        model: what gives the sums of a batch: compiled and wrapped.
        step_batches: with micro-batches on the device.
        stop: this rank asks to end training, which all ranks find in the flags.
    """
    parameters = list(parameters_of(optimizer.param_groups))
    totals = Totals.zeros(objective.measured, rt.device)
    losses = gradients(model, parameters, step_batches.micro_batches, step_batches.divisor, totals, rt)
    grad_norm, flags = exchange(squared_norm(parameters, rt.world_size), totals, stop, rt)
    optimizer.update(learning_rate, clip_coefficient(grad_norm, flags.nonfinite == 0, max_grad_norm))
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(totals, grad_norm, flags, losses)


def exchange(squared: torch.Tensor, totals: Totals, stop: bool, rt: Runtime) -> tuple[torch.Tensor, Flags]:
    """Gradient norm and flags of a step: one small exchange between the ranks, no host sync.

    Args:
        squared: this rank's share of the squared norm of all gradients, 0-d, fp32 or fp64: the precision of the sum over
            ranks. The norm is its root in fp32.
    """
    share = squared.to(rt.device)
    asked = torch.full_like(share, float(stop))
    broken = (~totals[LOSS].isfinite()).to(share.dtype)
    norm, stops, losses = rt.sum(torch.stack([share, asked, broken]))
    grad_norm = norm.sqrt().float()
    nonfinite = torch.where(grad_norm.isfinite(), losses, losses.clamp(min=1.0))
    return grad_norm, Flags(torch.stack([stops, nonfinite]).float())
