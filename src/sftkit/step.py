"""One optimizer step: everything inside the timed region. Sums flow; the division by the global count happens here."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from sftkit.anatomy import decoder, head, logit_softcap, vocab_size
from sftkit.attention import (
    dense_kernels,
    documents_of,
    mixes_tokens,
    plain_attention,
    short_windows,
    use_document_attention,
)
from sftkit.compilation import begin_step, run_eagerly, uses_cuda_graphs
from sftkit.config import LossConfig
from sftkit.data.collate import Batch, collate
from sftkit.data.loader import StepBatches
from sftkit.data.types import Examples
from sftkit.errors import ConfigError
from sftkit.loss import LossSums, linear_nll
from sftkit.optim import apply_clipping, clip_coefficient, squared_norm
from sftkit.runtime import Runtime
from sftkit.tensor_parallel import whole_rows

log = logging.getLogger(__name__)


class ModelWithLoss(torch.nn.Module):
    """What the train step calls, compiles and wraps: a batch in, sums out, so no logits ever cross a wrapper.

    `orig_model` inside is the plain transformers model; evaluation, generation and checkpoints use that one.
    """

    def __init__(self, orig_model: PreTrainedModel, backend: str, loss: LossConfig) -> None:
        super().__init__()
        use_document_attention(orig_model)
        self.orig_model = orig_model
        self.backend, self.loss = backend, loss

    def forward(self, batch: Batch, backend: str | None = None) -> LossSums:
        """The sums over the targets of a batch.

        Args:
            backend: attention backend of this call; None: that of training.
        """
        return self.sums(batch, backend or self.backend)

    # The next three are entered from outside: parallel.py makes each of them gather the weights that it uses.

    def sums(self, batch: Batch, backend: str) -> LossSums:
        """What `forward` returns."""
        hidden = self._decoded(batch, backend).flatten(0, 1).index_select(0, batch.target_index)
        return self.nll(hidden, batch.targets.flatten().index_select(0, batch.target_index))

    def hidden_states(self, batch: Batch, backend: str) -> torch.Tensor:
        """What the head projects: [B, T, H]."""
        return self._decoded(batch, backend)

    def nll(self, hidden: torch.Tensor, targets: torch.Tensor) -> LossSums:
        """The sums for hidden states [N, H] and targets [N], through the head."""
        projection, softcap = head(self.orig_model), logit_softcap(self.orig_model)
        return linear_nll(hidden, projection.weight, targets, self.loss, bias=projection.bias, softcap=softcap)

    def _decoded(self, batch: Batch, backend: str) -> torch.Tensor:
        with dense_kernels() if backend == "sdpa" else nullcontext():
            outputs = decoder(self.orig_model)(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                documents=documents_of(batch, backend),
            )
        hidden = outputs.last_hidden_state
        assert isinstance(hidden, torch.Tensor)
        return hidden


def verify_logits(model: ModelWithLoss, backend: str, device: torch.device) -> None:
    """Two documents and padding in one row through our forward pass, and each document alone through the model's own,
    must give the same logits; sliding windows are made shorter than the documents for it.

    Raises:
        ConfigError: they do not, or the model does not take our arguments: this architecture does something that our
            attention or head leaves out, or mixes the tokens of a row outside attention.
    """
    orig_model, name = model.orig_model, type(model.orig_model).__name__
    mixer = mixes_tokens(orig_model)
    if mixer:
        raise ConfigError(f"{name} is not supported: {mixer} carries tokens from one document of a row to the next")
    was_training = orig_model.training
    orig_model.eval()
    try:
        with torch.no_grad(), run_eagerly(), short_windows(orig_model), whole_rows():
            difference = _logits_difference(model, backend, device)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(f"{name} is not supported: {' '.join(str(error).split())[:300]}") from error
    finally:
        orig_model.train(was_training)
    if not difference < 0.05:
        raise ConfigError(
            f"{name} is not supported: the logits of its own forward pass and sftkit's differ by {difference:.0%}, so it "
            "does more than attend within documents, project and soft-cap"
        )
    if getattr(orig_model.config.get_text_config(), "output_router_logits", False):
        log.warning("%s: the router's auxiliary loss (output_router_logits) is not part of training here", name)


def _logits_difference(model: ModelWithLoss, backend: str, device: torch.device) -> float:
    """Relative, over all tokens of two documents of 8 and 5 tokens. The reference kernel stands in for sdpa, which has one."""
    sizes = (8, 5)
    examples = Examples.of(np.random.default_rng(0).integers(0, vocab_size(model.orig_model), sum(sizes) + 2), sizes)
    batch = collate(examples, ((0, 1),), 16, 0, max_docs=3, max_doc_length=8).to(device)
    projection, softcap = head(model.orig_model), logit_softcap(model.orig_model)
    ours = projection(model.hidden_states(batch, "reference" if backend == "sdpa" else backend)).float()
    ours = ours if softcap is None else softcap * torch.tanh(ours / softcap)
    with plain_attention(model.orig_model):
        alone = [
            model.orig_model(input_ids=ids, use_cache=False).logits.float()
            for ids in batch.input_ids[:, : sum(sizes)].split(sizes, 1)
        ]
    theirs = torch.cat(alone, 1)
    return float((ours[:, : sum(sizes)] - theirs).norm() / theirs.norm())


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


class StepOutcome(NamedTuple):
    """What a step leaves on the device."""

    sums: torch.Tensor
    "fp32 [4], this rank's sums as in `forward_backward`"
    grad_norm: torch.Tensor
    "fp32 0-d, global gradient norm before clipping, the same on every rank"
    flags: torch.Tensor
    "fp32 [2], the same on every rank: how many ask to stop; how many have a loss that is not finite, 1 if only the norm is"


def optimizer_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
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
    coefficient = clip_coefficient(grad_norm, flags[1] == 0, max_grad_norm)
    apply_clipping(optimizer, coefficient, parameters)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
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
