"""A model with its objective: what the train step calls, compiles and wraps."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from sftkit.data.batches.collate import Batch
from sftkit.models.kinds import kind_of
from sftkit.models.routing import Routing
from sftkit.models.stages import from_last, stages_of
from sftkit.models.structure import vocab_size
from sftkit.objectives.balanced import Balanced
from sftkit.objectives.objective import Objective
from sftkit.objectives.sums import Sums
from sftkit.ops.attention import use_document_attention


class ModelWithLoss(torch.nn.Module):
    """A module that takes a batch and returns its sums, so no logits ever cross a wrapper.

    `orig_model` inside is the plain transformers model; evaluation, generation and checkpoints use that one.
    """

    def __init__(
        self, orig_model: PreTrainedModel, backend: str, objective: Objective, routing: Routing | None = None
    ) -> None:
        """Put the model's attention under our control and add the auxiliary loss to the objective where there is one.

        Args:
            backend: of attention in training.
            routing: reads the routers of a model with experts; None: they are not read.
        """
        super().__init__()
        use_document_attention(orig_model)
        self.orig_model = orig_model
        self.routing, self.backend, self.kind = routing, backend, kind_of(orig_model.config)
        self.objective = Balanced(objective, routing.weight) if routing is not None and routing.has_loss else objective
        self.context_group: str | None = None
        "name of the group of ranks that hold chunks of the same rows; set where the model is sharded"

    def forward(self, batch: Batch, backend: str | None = None) -> Sums:
        """Return the sums of a batch.

        Args:
            backend: attention backend of this call; None: that of training.
        """
        return self.sums(batch, backend or self.backend)

    # The next three are entered from outside: parallel/fsdp.py makes each of them gather the weights that it uses.

    def sums(self, batch: Batch, backend: str) -> Sums:
        """Return the sums of a batch, as `forward` does."""
        # All hidden states stay unnamed, so that those that are not selected are freed here.
        selected = self.objective.select(self._hidden(batch, backend), batch)
        return self.sums_of_selected(selected, batch)

    def hidden_states(self, batch: Batch, backend: str) -> torch.Tensor:
        """Return the hidden states that the head projects: [B, C, H]; in a pipeline on all its
        ranks, without gradient."""
        return from_last(self.orig_model, self._hidden(batch, backend))

    def sums_of_selected(self, selected: torch.Tensor, batch: Batch) -> Sums:
        """Return the sums of a batch from the hidden states that its objective selects, [N, H]. In a pipeline all
        stages but the last return zeros, so that the sum over ranks counts each row once."""
        stages = stages_of(self.orig_model)
        if stages is not None and not stages.last:
            nothing = selected.new_zeros((), dtype=torch.promote_types(selected.dtype, torch.float32))
            return Sums(nothing, dict.fromkeys(self.objective.measured, nothing))
        projection = self.kind.head(self.orig_model)._replace(tokens=vocab_size(self.orig_model))
        sums = self.objective.sums(selected, batch, projection)
        if self.routing is None:
            return sums
        # The auxiliary loss of what the routers have chosen in the last pass; in training only.
        aux_loss = self.routing.loss_of(batch, self.context_group) if self.orig_model.training else None
        return self.objective.added(sums, aux_loss) if isinstance(self.objective, Balanced) else sums

    def _hidden(self, batch: Batch, backend: str) -> torch.Tensor:
        """Return the hidden states [B, C, H] and let the routers count the positions with a token, in training only."""
        # Routers must not count padding: it would be balanced, too. Chunks of rows have their own positions only.
        if self.routing is not None:
            own = batch.doc_ids if batch.columns is None else batch.doc_ids.index_select(1, batch.columns)
            self.routing.begin(own >= 0 if self.orig_model.training else None)
        return self.kind.hidden_states(self.orig_model, batch, backend, self.context_group)
