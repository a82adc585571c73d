"""Define the protocol of model kinds: how to load a model, and how a batch becomes hidden states and logits.

MODEL_KINDS lists all kinds. This module also holds the causal language model: token ids, a decoder, a linear head.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.batches.collate import Batch
from sftkit.data.types import EncoderInputs, Examples
from sftkit.errors import ConfigError, DataError, hint
from sftkit.models import files, structure
from sftkit.ops import attention, linear_cross_entropy


class Continuation(NamedTuple):
    """The function that computes each next token of a generated text, with its constant arguments."""

    read: Callable[..., Any]
    """called like transformers' causal models, with input_ids [B, T], attention_mask, position_ids, past_key_values,
    use_cache and logits_to_keep; returns an output with `logits`
    """
    model_kwargs: dict[str, Tensor]
    "further arguments of each call, each [B, ...]: the encoder's outputs for the texts"


class ModelKind(Protocol):
    """A family of architectures that share one way of training."""

    auto_class: Any
    "class of transformers that loads the model from a folder, a hub id or a config"

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Fill in the fields of a new model's config that follow from the tokenizer."""

    def prepare(self, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set up a model that was just made or loaded for training and generation; nothing by default.

        Parameters that do not affect the output are not trained.
        """

    def check(self, orig_model: PreTrainedModel, topology: Topology, train: TrainConfig) -> None:
        """Reject settings that these models do not support; nothing by default.

        Raises:
            ConfigError: names the alternative.
        """

    def with_inputs(
        self,
        orig_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples,
        max_length: int,
        data: DataConfig,
    ) -> Examples:
        """Return the documents with an encoder input for each, computed once and kept in data.cache_dir; unchanged
        without an encoder.

        Raises:
            DataError: a document names no encoder input, or one that cannot be read, or one without an encoder.
        """
        if examples.encoder_sources:
            raise DataError(hint("no encoder", examples=examples, model_type=orig_model.config.model_type))
        return examples

    def made_up_inputs(self, orig_model: PreTrainedModel, documents: int, length: int) -> EncoderInputs | None:
        """Return deterministic encoder inputs for made-up documents; None without an encoder.

        Args:
            length: data.max_length, to which encoder texts are padded.
        """
        return None

    def plain_inputs(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert an encoder's inputs from the form in batches to the arguments of transformers' forward pass and
        generation; empty without an encoder.
        """
        return {}

    def files(self, orig_model: PreTrainedModel) -> dict[str, bytes]:
        """Return extra files of a checkpoint by name, besides config, weights and tokenizer; none by default."""
        return {}

    def encoder_positions(self, orig_model: PreTrainedModel, length: int) -> int:
        """Return S, the positions of an encoded input; 0 without an encoder. `length` is data.max_length."""
        return 0

    def hidden_states(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> Tensor:
        """Return the hidden states that the head projects, for the local positions of a batch: [B, C, H].

        Args:
            backend: attention backend, see ops.attention.
            context_group: name of the group of ranks whose chunks form whole rows; None if each rank has whole rows.
        """

    def head(self, orig_model: PreTrainedModel) -> linear_cross_entropy.Head:
        """Return the output projection, the scale and the soft cap of its logits; the sharding code gathers its
        weights."""
        projection = structure.output_projection(orig_model)
        # Trained rows of a frozen head (models/token_rows.py).
        ids, rows = projection.own_rows() if hasattr(projection, "own_rows") else (None, None)  # type: ignore[operator]
        softcap = structure.logit_softcap(orig_model)
        scale = structure.logit_scale(orig_model)
        return linear_cross_entropy.Head(projection.weight, projection.bias, softcap, None, ids, rows, scale)

    def continuation(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Continuation:
        """Return a function that generates texts token by token, one text for each encoder input.

        Args:
            inputs: encoder inputs in the form of batches, encoded here once.
        """

    def plain_logits(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits [1, L, V] of one document from transformers' own forward pass and attention, without our
        operators: the reference for our operators.

        Args:
            inputs: tokens [1, L] and the document's encoder inputs [1, ...].
        """


def ids_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the fields of a new model's config that follow from its tokenizer."""
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"vocab_size": len(tokenizer), **special}


def without_router_logits(module: torch.nn.Module) -> dict[str, bool]:
    """Return arguments that stop a model from collecting router logits if its config asks for them (models.routing
    reads the routers itself); empty for other models.
    """
    asked = getattr(getattr(module, "config", None), "output_router_logits", False)
    return {"output_router_logits": False} if asked else {}


def decoded(
    module: torch.nn.Module, inputs: dict[str, Tensor], batch: Batch, backend: str, context_group: str | None = None
) -> Tensor:
    """Return the hidden states that a decoder computes for a batch, [B, C, H]; other arguments as
    in kind.ModelKind.hidden_states.

    Args:
        module: the decoder, or a module with some of its layers. inputs: its arguments by name, without
            the documents.
    """
    # transformers never collects router logits, whatever the config asks: models.routing reads them with hooks.
    with attention.kernel_order(backend):
        chunk = attention.attention_chunk(getattr(module, "config", None))
        documents = attention.document_boundaries(batch, backend, context_group, chunk)
        asked = without_router_logits(module)
        return module(**inputs, use_cache=False, documents=documents, **asked).last_hidden_state


class CausalLM(ModelKind):
    """A model with the methods `get_decoder` and `get_output_embeddings` of transformers. See models.kind.ModelKind."""

    auto_class = getattr(transformers, files.CAUSAL)

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Fill in the vocabulary size and the special ids."""
        return {**ids_of(tokenizer), **fields}

    def hidden_states(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> Tensor:
        """Return the decoder's last hidden states, [B, C, H]; the documents of a row do not attend to each other."""
        return decoded(structure.decoder(orig_model), batch.inputs, batch, backend, context_group)

    def continuation(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Continuation:
        """Return the model itself: it needs only the tokens."""
        return Continuation(orig_model, {})

    def plain_logits(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits of the whole model, [1, L, V]; the model applies its soft cap itself."""
        with attention.plain_attention(orig_model):
            return orig_model(**inputs, use_cache=False, **without_router_logits(orig_model)).logits


MODEL_KINDS = {
    files.CAUSAL: "sftkit.models.kind:CausalLM",
    files.CAPTIONS: "sftkit.models.encoders:VisionToText",
    files.TEXT_TO_TEXT: "sftkit.models.encoders:TextToText",
}
"The model kinds by the class of transformers that loads them: module:class."


@cache
def model_kind(name: str) -> ModelKind:
    """Import and return a kind of MODEL_KINDS."""
    module, _, cls = MODEL_KINDS[name].partition(":")
    kind: ModelKind = getattr(importlib.import_module(module), cls)()
    return kind


def kind_of(config: PretrainedConfig) -> ModelKind:
    """Return the kind of a model with this config."""
    return model_kind(files.auto_class(config.to_dict()))


def check_causal(config: PretrainedConfig, what: str) -> None:
    """Reject a model with an encoder for work that only continues a text.

    Raises:
        ConfigError: `what` needs a causal model.
    """
    if config.is_encoder_decoder:
        raise ConfigError(files.not_causal(config.model_type, what))
