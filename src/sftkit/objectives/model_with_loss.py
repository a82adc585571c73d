"""A model with its objective: what the train step calls, compiles and wraps."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from sftkit.config.schema import LossConfig
from sftkit.data.collate import Batch
from sftkit.models.structure import decoder, head, logit_softcap
from sftkit.ops.attention import dense_kernels, documents_of, use_document_attention
from sftkit.ops.linear_cross_entropy import LossSums, linear_nll


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
