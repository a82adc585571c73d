"""The protocol of objectives, their sums, a model with its objective, which a step calls, and next-token prediction.

A stage's script names the objective; loop, engines and metrics call it. `Totals` are named sums over the
micro-batches of a step. `Balanced` adds the auxiliary loss of a model's routers to an objective. `NextToken` is the
cross entropy of each target token, which depends on all earlier tokens of the document and, for a caption, on the
encoder's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from sftkit.config.schema import LossConfig
from sftkit.data.batches.collate import IGNORE, Batch
from sftkit.data.types import Examples
from sftkit.models import kind, structure, trained
from sftkit.ops import attention, linear_cross_entropy

if TYPE_CHECKING:
    from sftkit.models.routing import Routing

LOSS = "loss"
"Name of the differentiable sum among the totals of a step."


class Sums(NamedTuple):
    """Sums over the targets of a batch, 0-d, losses in nats: fp32 (float64 for float64 inputs)."""

    loss: Tensor
    "differentiable; the step minimises loss / number of target tokens"
    measured: dict[str, Tensor]
    "other sums by name, without gradient; an objective returns the same names for every batch"


@dataclass(frozen=True)
class Totals:
    """Sums over several batches in one vector on the device, so that one collective adds them over ranks."""

    names: tuple[str, ...]
    vector: Tensor
    "fp32 (float64 for a model in float64) [len(names)], without gradient"

    @classmethod
    def zeros(cls, measured: tuple[str, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Totals:
        """Return totals of 0 for an objective that measures these sums besides its loss."""
        names = (LOSS, *measured)
        return cls(names, torch.zeros(len(names), device=device, dtype=dtype))

    @classmethod
    def of(cls, sums: Sums) -> Totals:
        """Return the sums of one batch, detached. No host sync."""
        values = (sums.loss, *sums.measured.values())
        return cls((LOSS, *sums.measured), torch.stack([value.detach() for value in values]))

    def __getitem__(self, name: str) -> Tensor:
        """Return the sum of that name, a 0-d view."""
        return self.vector[self.names.index(name)]

    def add_(self, other: Totals) -> None:
        """Add in place; the names must be the same."""
        assert other.names == self.names, f"{other.names} to {self.names}"
        self.vector.add_(other.vector)

    def means_of(self, values: list[float], divisor: float) -> dict[str, float | None]:
        """Return each value over the divisor, None if that is 0. `values`: the vector summed over ranks."""
        return {name: value / divisor if divisor else None for name, value in zip(self.names, values, strict=True)}


class Objective(Protocol):
    """The minimised quantity as sums: they add up over micro-batches and ranks, and the step divides once."""

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the names of the sums other than the loss, in the order of `sums`."""

    @property
    def monitored(self) -> str:
        """Return the name of the sum whose mean is monitored: for train/loss, for spikes, and in messages."""

    def select(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the hidden states that `sums` needs, [N, H]; the others can then be freed.

        Args:
            hidden: [B, C, H], at the batch's local positions.
        """

    def sums(self, selected: Tensor, batch: Batch, head: linear_cross_entropy.Head) -> Sums:
        """Return the sums of a batch.

        Args:
            selected: [N, H], returned by `select` for this batch.
            head: head that projects hidden states to the vocabulary.
        """

    def sums_of_logits(self, logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Sums:
        """Return the same sums from full logits, in plain torch operators and the dtype of the logits.

        It is the reference for `sums`.

        Args:
            logits: [N, V], final: scaled and capped. targets: int64 [N], IGNORE at positions without a target.
            weights: fp32 [N], factor of all that a position adds; None: 1.
        """

    def count(self, batch: Batch) -> int:
        """Return a batch's contribution to the divisor, counted in the batch itself: summed over ranks it
        equals `divisors`.
        """

    def divisors(self, examples: Examples) -> np.ndarray:
        """Return each document's contribution to the divisor of its step: int64 [D].

        Counted on the host before an epoch begins, so every rank knows the global divisor without communication.
        """

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the metrics to log, including train/loss, from the means of the sums; None: no mean."""


AUX_LOSS = "aux_loss"
"Name of the sum of the auxiliary loss."


def nll_of(source: int) -> str:
    """Return the name of the sum of a source's nll."""
    return f"nll/{source}"


class Balanced:
    """An objective with one more sum, the auxiliary loss. See objective.Objective.

    `added` adds that sum, because the routers' choices are not in the hidden states.
    """

    def __init__(self, objective: Objective, weight: float) -> None:
        """Wrap an objective. `weight`: weight of the auxiliary loss in the minimised loss; 0: it is only measured."""
        self._objective = objective
        self._weight = weight
        self.measured = (*objective.measured, AUX_LOSS)
        # All other methods are the wrapped objective's, which does not know about routers.
        self.monitored = objective.monitored
        self.select = objective.select
        self.sums = objective.sums
        self.sums_of_logits = objective.sums_of_logits
        self.count = objective.count
        self.divisors = objective.divisors

    def added(self, sums: Sums, aux_loss: Tensor | None) -> Sums:
        """Return the sums of a batch with the auxiliary loss of its rows; None, as in an evaluation, counts as 0."""
        if aux_loss is None:
            return Sums(sums.loss, {**sums.measured, AUX_LOSS: sums.loss.new_zeros(())})
        # With weight 0 the auxiliary loss must not enter the graph at all: 0 times infinity is NaN.
        loss = sums.loss + self._weight * aux_loss.to(sums.loss.dtype) if self._weight else sums.loss
        return Sums(loss, {**sums.measured, AUX_LOSS: aux_loss.detach().to(sums.loss.dtype)})

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the wrapped objective's metrics, train/aux_loss, and train/objective if the loss includes it."""
        values = {**self._objective.metrics(means), "train/aux_loss": means[AUX_LOSS]}
        return values | ({"train/objective": means["loss"]} if self._weight else {})


class ModelWithLoss(torch.nn.Module):
    """A module that takes a batch and returns its sums, so that logits never cross a wrapper.

    `orig_model` inside is the plain transformers model, for evaluation, generation and checkpoints.
    """

    def __init__(
        self, orig_model: PreTrainedModel, backend: str, objective: Objective, routing: Routing | None = None
    ) -> None:
        """Replace the model's attention by ours, and add the auxiliary loss to the objective if there is one.

        Args:
            backend: attention backend of training.
            routing: reader of the routers of a model with experts; None: they are not read.
        """
        super().__init__()
        attention.use_document_attention(orig_model)
        if structure.has_convolutions(orig_model):
            from sftkit.models.hybrids import use_operators  # most models have no recurrent layers

            use_operators(orig_model)
        self.orig_model = orig_model
        self.routing = routing
        self.backend = backend
        self.kind = kind.kind_of(orig_model.config)
        self.objective = Balanced(objective, routing.weight) if routing is not None and routing.has_loss else objective
        self.context_group: str | None = None
        "name of the group of ranks that hold chunks of the same rows; set when the model is sharded"

    def forward(self, batch: Batch, backend: str | None = None) -> Sums:
        """Return the sums of a batch.

        Args:
            backend: attention backend of this call; None: that of training.
        """
        return self.sums(batch, backend or self.backend)

    # The next three are entered from outside: parallel/wrap.py makes each of them gather its weights.

    def sums(self, batch: Batch, backend: str) -> Sums:
        """Return the sums of a batch, as `forward` does."""
        # No name refers to all hidden states, so that those not selected are freed here.
        return self.sums_of_selected(self.objective.select(self._hidden(batch, backend), batch), batch)

    def hidden_states(self, batch: Batch, backend: str) -> Tensor:
        """Return the hidden states that the head projects: [B, C, H]; in a pipeline on all its ranks,
        without gradient.
        """
        return structure.from_last(self.orig_model, self._hidden(batch, backend))

    def sums_of_selected(self, selected: Tensor, batch: Batch) -> Sums:
        """Return the sums of a batch from the hidden states that its objective selects, [N, H]. In a pipeline all
        stages but the last return zeros, so that the sum over ranks counts each row once."""
        stages = structure.stages_of(self.orig_model)
        if stages is not None and not stages.last:
            nothing = selected.new_zeros((), dtype=torch.promote_types(selected.dtype, torch.float32))
            return Sums(nothing, dict.fromkeys(self.objective.measured, nothing))
        projection = self.kind.head(self.orig_model)._replace(tokens=structure.vocab_size(self.orig_model))
        sums = self.objective.sums(selected, batch, projection)
        if self.routing is None:
            return sums
        # The auxiliary loss of the routers' choices in the last pass; in training only.
        aux_loss = self.routing.loss_of(batch, self.context_group) if self.orig_model.training else None
        return self.objective.added(sums, aux_loss) if isinstance(self.objective, Balanced) else sums

    def _hidden(self, batch: Batch, backend: str) -> Tensor:
        """Return the hidden states [B, C, H]; in training, the routers count the positions with a token."""
        if (adapters := trained.adapters_of(self.orig_model)) is not None and adapters.selection is not None:
            adapters.selection.begin(batch.adapters, batch.targets.device)
        # Routers must not count padding, or the loss would balance it too. Chunks of rows have their own
        # positions only.
        if self.routing is not None:
            self.routing.begin(self.routing.counted(batch) if self.orig_model.training else None)
        noisy = batch if batch.noise is None else with_noise(self.orig_model, batch, *batch.noise)
        return self.kind.hidden_states(self.orig_model, noisy, backend, self.context_group)


def with_noise(orig_model: PreTrainedModel, batch: Batch, seed: int, alpha: float) -> Batch:
    """Return a batch with noisy embeddings in place of its tokens: uniform noise up to alpha / sqrt(L H) on a document
    of L positions (NEFTune). The noise is of the seed alone, so the generator of dropout does not change."""
    inputs = dict(batch.inputs)
    embedded = structure.embedding_module(orig_model)(inputs.pop("input_ids"))
    generator = torch.Generator(embedded.device).manual_seed(seed)
    noise = torch.zeros_like(embedded, requires_grad=False).uniform_(-alpha, alpha, generator=generator)
    size = (structure.document_lengths(inputs["position_ids"]) * embedded.shape[-1]).rsqrt()[..., None]
    return replace(batch, inputs={"inputs_embeds": embedded + noise * size.to(noise.dtype), **inputs})


@dataclass(frozen=True)
class NextToken:
    """The mean negative log-likelihood over target tokens, its smoothed form or that of loss.dft, plus z_loss *
    log-partition squared.

    It also measures `nll` (nats), `correct` (number of targets that are the argmax) and `entropy` (nats) of the
    predicted distributions; the last two are 0 unless loss.token_metrics is set. And the `nll` of each source.
    """

    config: LossConfig
    num_sources: int = 0
    "sources whose nll is measured; 0: of none"
    measured = ("nll", "correct", "entropy")
    monitored = "nll"

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", (*self.measured, *map(nll_of, range(self.num_sources))))

    def select(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the hidden states of the positions with a target, and of a few others as filler: [P, H]."""
        if batch.edge_targets is not None:
            # Positions may repeat: the gradient of this form adds them up in a fixed order on a GPU, that of
            # index_select does not.
            return hidden.flatten(0, 1)[batch.target_index]
        return hidden.flatten(0, 1).index_select(0, batch.target_index)

    def sums(self, selected: Tensor, batch: Batch, head: linear_cross_entropy.Head) -> Sums:
        """Return the sums, computed in chunks, without logits of the whole batch."""
        targets = batch.edge_targets
        if targets is None:
            targets = batch.targets.flatten().index_select(0, batch.target_index)
        found = linear_cross_entropy.linear_nll(selected, head, targets, self.config, batch.edge_weights)
        measured = {"nll": found.nll, "correct": found.correct, "entropy": found.entropy}
        if self.num_sources:
            # A sum over a row for each source: the order of a scatter-add would differ from run to run on a GPU.
            own = batch.sources.flatten().index_select(0, batch.target_index)
            numbers = torch.arange(self.num_sources, dtype=own.dtype, device=own.device)
            sums = torch.where(own == numbers[:, None], found.each, 0.0).sum(1)
            measured |= {nll_of(source): value for source, value in enumerate(sums.unbind())}
        return Sums(found.loss, measured)

    def sums_of_logits(self, logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Sums:
        """Return the sums from torch's own cross entropy; those of sources are 0, logits have none."""
        smoothing = self.config.label_smoothing
        is_target = targets != IGNORE
        given: Any = {"ignore_index": IGNORE, "reduction": "none"}
        each = F.cross_entropy(logits, targets, **given)
        loss = each
        # A separate call: the monitored nll is measured without smoothing.
        if smoothing:
            loss = F.cross_entropy(logits, targets, label_smoothing=smoothing, **given)
        if self.config.dft:
            loss = each.detach().neg().exp() * each
        if self.config.z_loss:
            loss = loss + self.config.z_loss * logits.logsumexp(-1).square().where(is_target, 0.0)
        correct = entropy = torch.zeros_like(each)
        if self.config.token_metrics:
            correct = (logits.argmax(-1) == targets).to(each.dtype)
            entropy = torch.special.entr(logits.detach().softmax(-1)).sum(-1).where(is_target, 0.0)

        def summed(values: Tensor) -> Tensor:
            return (values if weights is None else values * weights).sum()

        found = {"nll": summed(each.detach()), "correct": summed(correct), "entropy": summed(entropy)}
        return Sums(summed(loss), dict.fromkeys(self.measured, each.new_zeros(())) | found)

    def count(self, batch: Batch) -> int:
        """Return the number of target tokens."""
        return batch.num_targets

    def divisors(self, examples: Examples) -> np.ndarray:
        """Return the number of target tokens of each document."""
        return examples.num_targets

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return train/loss; train/objective if it differs; token_accuracy and entropy if measured."""
        values = {"train/loss": means["nll"]}
        if self.config.z_loss or self.config.label_smoothing or self.config.dft:
            values["train/objective"] = means["loss"]
        if self.config.token_metrics:
            values |= {"train/token_accuracy": means["correct"], "train/entropy": means["entropy"]}
        return values


class Caption(NextToken):
    """The sums of NextToken, always with token metrics.

    Texts are short and have few tokens, so the share of correct predictions, train/token_accuracy, is informative in
    addition to the captions that an evaluation generates.
    """

    def __init__(self, config: LossConfig, num_sources: int = 0) -> None:
        super().__init__(replace(config, token_metrics=True), num_sources)
