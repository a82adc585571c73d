"""One optimizer step: everything inside the timed region. Sums flow; the division by the global count happens here."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sftkit.compile.contract import begin_step, uses_cuda_graphs
from sftkit.data.collate import Batch
from sftkit.data.loader import StepBatches
from sftkit.optim.gradients import clip_coefficient, squared_norm
from sftkit.optim.protocol import Optimizer
from sftkit.runtime.start import Runtime
from sftkit.tracking.outcome import StepOutcome


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


def forward_backward(model: torch.nn.Module, batch: Batch, num_targets: int, rt: Runtime) -> torch.Tensor:
    """Add this micro-batch's share to the gradients of objective / num_targets, the mean over the global batch.

    Returns:
        the micro-batch's sums, in the order of LossSums: fp32 [4], on the device, detached. No host sync.
    """
    begin_step()
    sums = model(batch)
    rt.accelerator.backward(sums.loss * (rt.gradient_scale / max(num_targets, 1)))
    return torch.stack([value.detach() for value in sums])


def optimizer_step(
    model: torch.nn.Module,
    optimizer: Optimizer,
    step_batches: StepBatches,
    learning_rate: float,
    max_grad_norm: float | None,
    rt: Runtime,
    *,
    stop: bool = False,
) -> StepOutcome:
    """All micro-batches, one update; no update where the loss of any rank or the gradient norm is not finite.

    Args:
        step_batches: with micro-batches on the device.
        stop: this rank's wish to end training, which all ranks find in the flags.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sums = torch.zeros(4, device=rt.device)
    last = len(step_batches.micro_batches) - 1
    earlier = GradientSum(parameters, len(step_batches.micro_batches))
    for i, batch in enumerate(step_batches.micro_batches):
        if i == last:
            earlier.put_back()
        with rt.gradient_sync(model, sync=i == last):
            sums += forward_backward(model, batch, step_batches.num_targets, rt)
        if i < last:
            earlier.take()
    grad_norm, flags = _agree(parameters, sums, stop, rt)
    optimizer.update(learning_rate, clip_coefficient(grad_norm, flags[1] == 0, max_grad_norm))
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(sums, grad_norm, flags)


def _agree(
    parameters: list[torch.nn.Parameter], sums: torch.Tensor, stop: bool, rt: Runtime
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient norm, flags) of StepOutcome: one small exchange between the ranks, no host sync."""
    share = squared_norm(parameters, rt.world_size).to(rt.device)
    wish = torch.full_like(share, float(stop))
    total = rt.sum(torch.stack([share, wish, (~sums[0].isfinite()).float()]))
    grad_norm = total[0].sqrt()
    broken = torch.where(grad_norm.isfinite(), total[2], total[2].clamp(min=1.0))
    return grad_norm, torch.stack([total[1], broken])
