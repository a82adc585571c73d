"""Causal language models: token ids in, a decoder, a linear head."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.collate import Batch
from sftkit.data.types import EncoderInputs, Examples
from sftkit.errors import DataError
from sftkit.models import auto_classes
from sftkit.models.kind import Continuation, Head
from sftkit.models.structure import decoder, logit_softcap, output_projection
from sftkit.models.tokenizer import ids_of
from sftkit.ops.attention import dense_kernels, documents_of, plain_attention


def _inputs_of(
    given: dict[str, Tensor], batch: Batch, backend: str, context_group: str | None = None
) -> dict[str, Any]:
    """Arguments of a decoder: what it is given, and where the documents of the batch are."""
    return {**given, "use_cache": False, "documents": documents_of(batch, backend, context_group)}


def without_router_logits(module: torch.nn.Module) -> dict[str, bool]:
    """Arguments with which a model whose config asks for them does not keep the logits of its routers (models.routing)."""
    asked = getattr(getattr(module, "config", None), "output_router_logits", False)
    return {"output_router_logits": False} if asked else {}


def decoded(
    module: torch.nn.Module, inputs: dict[str, Tensor], batch: Batch, backend: str, context_group: str | None = None
) -> Tensor:
    """What a decoder makes of a batch, [B, C, H]; the other arguments as in kind.ModelKind.hidden_states.

    Args:
        module: the decoder, or one with some of its layers. inputs: what it is given beside the documents.
    """
    with dense_kernels() if backend == "sdpa" else nullcontext():
        outputs = module(**_inputs_of(inputs, batch, backend, context_group), **without_router_logits(module))
    hidden = outputs.last_hidden_state
    assert isinstance(hidden, torch.Tensor)
    return hidden


class CausalLM:
    """Whatever `get_decoder` and `get_output_embeddings` of transformers take apart."""

    @property
    def auto_class(self) -> Any:
        """See auto_classes.CAUSAL."""
        return getattr(transformers, auto_classes.CAUSAL)

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Vocabulary and special ids."""
        return {**ids_of(tokenizer), **fields}

    def prepare(self, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Nothing: all of it is trained."""

    def check(self, orig_model: PreTrainedModel, topology: Topology, train: TrainConfig) -> None:
        """Nothing is refused here."""

    def with_inputs(
        self,
        orig_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples,
        max_length: int,
        data: DataConfig,
    ) -> Examples:
        """As they are.

        Raises:
            DataError: they have something to encode.
        """
        if examples.given:
            raise DataError(
                f"{examples.source_names[0]}: {orig_model.config.model_type} has no encoder for {examples.given[0][:80]}: "
                "take a model with one (model.scratch.model_type=vision-encoder-decoder for pictures)"
            )
        return examples

    def made_up_inputs(self, orig_model: PreTrainedModel, documents: int, length: int) -> EncoderInputs | None:
        """None."""
        return None

    def plain_inputs(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """None."""
        return {}

    def files(self, orig_model: PreTrainedModel) -> dict[str, bytes]:
        """None."""
        return {}

    def encoder_positions(self, orig_model: PreTrainedModel, length: int) -> int:
        """0."""
        return 0

    def decoder_inputs(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> dict[str, Any]:
        """Tokens and where their documents are."""
        return _inputs_of(batch.inputs, batch, backend, context_group)

    def hidden_states(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> Tensor:
        """The decoder's last hidden states; documents of a row do not see each other."""
        return decoded(decoder(orig_model), batch.inputs, batch, backend, context_group)

    def head(self, orig_model: PreTrainedModel) -> Head:
        """The output projection and the soft cap of its logits."""
        projection = output_projection(orig_model)
        return Head(projection.weight, projection.bias, logit_softcap(orig_model))

    def continuation(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Continuation:
        """The model itself."""
        return Continuation(orig_model, {})

    def plain_logits(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """The whole model's, which caps them itself."""
        with plain_attention(orig_model):
            logits = orig_model(**inputs, use_cache=False, **without_router_logits(orig_model)).logits
        assert isinstance(logits, torch.Tensor)
        return logits
