"""One optimizer step: everything inside the timed region. Sums flow; the division by the global count happens here."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from sftkit.attention import attention_masks
from sftkit.data.collate import Batch
from sftkit.data.loader import StepBatches
from sftkit.loss import sum_nll
from sftkit.runtime import Runtime


class SumNLL(torch.nn.Module):
    """`loss.sum_nll` as a module, so that it can be compiled in place."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return sum_nll(logits, targets)


class ModelWithLoss(torch.nn.Module):
    """What the train step calls, compiles and wraps: tensors in, one scalar out, so no logits cross a wrapper.

    `orig_model` inside is the plain transformers model; evaluation, generation and checkpoints use that one.
    """

    def __init__(self, orig_model: PreTrainedModel) -> None:
        super().__init__()
        self.orig_model = orig_model
        self.loss = SumNLL()

    def forward(
        self, input_ids: torch.Tensor, targets: torch.Tensor, position_ids: torch.Tensor, doc_ids: torch.Tensor
    ) -> torch.Tensor:
        """Sum of the negative log-likelihoods of all targets: fp32, 0-d. Shapes as in data.collate.Batch."""
        masks = attention_masks(self.orig_model.config, doc_ids)
        outputs = self.orig_model(input_ids=input_ids, position_ids=position_ids, attention_mask=masks, use_cache=False)
        return self.loss(outputs.logits, targets)


def forward_backward(model: torch.nn.Module, batch: Batch, num_targets: int, rt: Runtime) -> torch.Tensor:
    """Add this micro-batch's share to the gradients of loss_sum / num_targets, the mean over the global batch.

    Returns:
        the micro-batch's loss sum: fp32, 0-d, on the device, detached. No host sync.
    """
    loss_sum = model(batch.input_ids, batch.targets, batch.position_ids, batch.doc_ids)
    # Data-parallel wrappers average gradients over ranks; times world size makes that the sum.
    rt.accelerator.backward(loss_sum * (rt.world_size / max(num_targets, 1)))
    return loss_sum.detach()


def optimizer_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step_batches: StepBatches,
    learning_rate: float,
    max_grad_norm: float | None,
    rt: Runtime,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All micro-batches, one update.

    Returns:
        (this rank's loss sum, global gradient norm before clipping), both 0-d and on the device.
    """
    loss_sum = torch.zeros((), device=rt.device)
    last = len(step_batches.micro_batches) - 1
    for i, batch in enumerate(step_batches.micro_batches):
        with rt.gradient_sync(model, sync=i == last):
            loss_sum += forward_backward(model, batch.to(rt.device), step_batches.num_targets, rt)
    limit = max_grad_norm if max_grad_norm is not None else float("inf")
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss_sum, grad_norm
