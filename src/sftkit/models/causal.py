"""Causal language models: token ids in, a decoder, a linear head."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from sftkit.data.collate import Batch
from sftkit.models import auto_classes
from sftkit.models.kind import Head
from sftkit.models.structure import decoder, head, logit_softcap
from sftkit.ops.attention import dense_kernels, documents_of, plain_attention


class CausalLM:
    """Whatever `get_decoder` and `get_output_embeddings` of transformers take apart."""

    @property
    def auto_class(self) -> Any:
        """See auto_classes.CAUSAL."""
        return getattr(transformers, auto_classes.CAUSAL)

    def hidden_states(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> Tensor:
        """The decoder's last hidden states; documents of a row do not see each other."""
        with dense_kernels() if backend == "sdpa" else nullcontext():
            outputs = decoder(orig_model)(
                **batch.inputs, use_cache=False, documents=documents_of(batch, backend, context_group)
            )
        hidden = outputs.last_hidden_state
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def head(self, orig_model: PreTrainedModel) -> Head:
        """The output projection and the soft cap of its logits."""
        projection = head(orig_model)
        return Head(projection.weight, projection.bias, logit_softcap(orig_model))

    def plain_logits(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """The whole model's, which caps them itself."""
        with plain_attention(orig_model):
            logits = orig_model(**inputs, use_cache=False).logits
        assert isinstance(logits, torch.Tensor)
        return logits
