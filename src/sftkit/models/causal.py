"""Causal language models: token ids in, a decoder, a linear head."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.batches.collate import Batch
from sftkit.data.types import Examples
from sftkit.errors import DataError
from sftkit.models import auto_classes
from sftkit.models.kind import Continuation, ModelKind, ids_of
from sftkit.models.structure import decoder
from sftkit.ops.attention import document_boundaries, kernel_order, plain_attention


def _model_inputs(inputs: dict[str, Tensor], batch: Batch, backend: str, context_group: str | None) -> dict[str, Any]:
    """Return the arguments of a decoder: its inputs, and the boundaries of the batch's documents."""
    return {**inputs, "use_cache": False, "documents": document_boundaries(batch, backend, context_group)}


def without_router_logits(module: torch.nn.Module) -> dict[str, bool]:
    """Return arguments that keep a model from collecting its routers' logits where its config asks for them
    (models.routing reads the routers by itself); empty for any other."""
    asked = getattr(getattr(module, "config", None), "output_router_logits", False)
    return {"output_router_logits": False} if asked else {}


def decoded(
    module: torch.nn.Module, inputs: dict[str, Tensor], batch: Batch, backend: str, context_group: str | None = None
) -> Tensor:
    """Return the hidden states that a decoder computes for a batch, [B, C, H]; the other arguments as in
    kind.ModelKind.hidden_states.

    Args:
        module: the decoder, or one with some of its layers. inputs: its arguments by name, besides the documents.
    """
    # Whatever the config asks, transformers collects no logits of routers: models.routing has hooks on them.
    with kernel_order(backend):
        outputs = module(**_model_inputs(inputs, batch, backend, context_group), **without_router_logits(module))
    return outputs.last_hidden_state


class CausalLM(ModelKind):
    """A model with `get_decoder` and `get_output_embeddings` of transformers. See models.kind.ModelKind."""

    auto_class = getattr(transformers, auto_classes.CAUSAL)

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Fill in the vocabulary size and the special ids."""
        return {**ids_of(tokenizer), **fields}

    def prepare(self, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Do nothing: all of the model is trained."""

    def check(self, orig_model: PreTrainedModel, topology: Topology, train: TrainConfig) -> None:
        """Refuse nothing."""

    def with_inputs(
        self,
        orig_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples,
        max_length: int,
        data: DataConfig,
    ) -> Examples:
        """Return the documents as they are.

        Raises:
            DataError: the documents have something to encode, and there is no encoder.
        """
        if examples.encoder_sources:
            raise DataError(
                f"{examples.source_names[0]}: {orig_model.config.model_type} has no encoder for "
                f"{examples.encoder_sources[0][:80]}: take a model with one "
                "(model.scratch.model_type=vision-encoder-decoder for pictures)"
            )
        return examples

    def decoder_inputs(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> dict[str, Any]:
        """Return the tokens, their positions, and where their documents are."""
        return _model_inputs(batch.inputs, batch, backend, context_group)

    def hidden_states(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> Tensor:
        """Return the decoder's last hidden states, [B, C, H]; documents of a row do not see each other."""
        return decoded(decoder(orig_model), batch.inputs, batch, backend, context_group)

    def continuation(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Continuation:
        """Return the model itself: it needs nothing besides the tokens."""
        return Continuation(orig_model, {})

    def plain_logits(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits of the whole model, [1, L, V]; it applies its soft cap itself."""
        with plain_attention(orig_model):
            return orig_model(**inputs, use_cache=False, **without_router_logits(orig_model)).logits
