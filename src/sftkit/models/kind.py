"""The protocol of model kinds: what loads such models, and how a batch becomes hidden states and logits.

MODEL_KINDS has all; that of causal language models, token ids in, a decoder, a linear head, is here too.
"""

from __future__ import annotations

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
from sftkit.errors import ConfigError, DataError
from sftkit.models import files
from sftkit.models.structure import decoder, logit_softcap, output_projection
from sftkit.ops.attention import document_boundaries, kernel_order, plain_attention
from sftkit.ops.linear_cross_entropy import Head


class Continuation(NamedTuple):
    """A function that is called for each next token of generated texts, and its arguments that stay the same."""

    read: Callable[..., Any]
    """called as transformers' causal models are, with input_ids [B, T], attention_mask, position_ids, past_key_values,
    use_cache and logits_to_keep; returns an output with `logits`"""
    model_kwargs: dict[str, Tensor]
    "further arguments of each call, each [B, ...]: what was encoded for the texts"


class ModelKind(Protocol):
    """A family of architectures that are trained alike."""

    auto_class: Any
    "class of transformers that loads such a model from a folder, a hub id or a config"

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Fill in those fields of a new model's config that follow from the tokenizer."""

    def prepare(self, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set what training and generation need in a model that was just made or loaded: nothing here.

        Parameters on which nothing depends are not trained.
        """

    def check(self, orig_model: PreTrainedModel, topology: Topology, train: TrainConfig) -> None:
        """Reject what these models cannot do: nothing here.

        Raises:
            ConfigError: with what to do instead.
        """

    def with_inputs(
        self,
        orig_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples,
        max_length: int,
        data: DataConfig,
    ) -> Examples:
        """Return the documents with what an encoder is given for each, made once and kept in data.cache_dir;
        without an encoder as they are.

        Raises:
            DataError: they name nothing that could be encoded, or what they name cannot be read.
        """

    def made_up_inputs(self, orig_model: PreTrainedModel, documents: int, length: int) -> EncoderInputs | None:
        """Return the encoder's inputs for made-up documents, always the same; None without an encoder.

        Args:
            length: data.max_length, to which texts for an encoder are padded.
        """
        return None

    def plain_inputs(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return an encoder's inputs, given as batches have them, as transformers' own forward pass
        and generation take them; none without an encoder."""
        return {}

    def files(self, orig_model: PreTrainedModel) -> dict[str, bytes]:
        """Return the files, by name, that a checkpoint of such a model has beside config, weights and
        tokenizer: none here."""
        return {}

    def encoder_positions(self, orig_model: PreTrainedModel, length: int) -> int:
        """Return S, the positions of an encoded input; 0 without an encoder. `length`: data.max_length."""
        return 0

    def decoder_inputs(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> dict[str, Any]:
        """Return the arguments of the decoder for a batch; what it looks at is encoded here.

        Arguments as in hidden_states.
        """

    def hidden_states(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> Tensor:
        """Return the hidden states that the head projects, for the local positions of a batch: [B, C, H].

        Args:
            backend: of attention, see ops.attention.
            context_group: name of the group of ranks whose chunks make whole rows; None: rows are whole here.
        """

    def head(self, orig_model: PreTrainedModel) -> Head:
        """Return the output projection and the soft cap of its logits; weights are gathered by whoever
        shards the model."""
        projection = output_projection(orig_model)
        return Head(projection.weight, projection.bias, logit_softcap(orig_model))

    def continuation(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Continuation:
        """Return what generates texts token by token, each for one encoder input.

        Args:
            inputs: of the encoder, as batches have them; they are encoded here, once.
        """

    def plain_logits(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits [1, L, V] of one document by transformers' own forward pass and attention, without our
        operators: the reference that ours are checked against.

        Args:
            inputs: tokens [1, L] and what is encoded for the document [1, ...].
        """


def ids_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the fields of a new model's config that follow from its tokenizer."""
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"vocab_size": len(tokenizer), **special}


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

    auto_class = getattr(transformers, files.CAUSAL)

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Fill in the vocabulary size and the special ids."""
        return {**ids_of(tokenizer), **fields}

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


MODEL_KINDS = {
    files.CAUSAL: "sftkit.models.kind:CausalLM",
    files.CAPTIONS: "sftkit.models.vision:VisionToText",
    files.TEXT_TO_TEXT: "sftkit.models.text_to_text:TextToText",
}
"The kinds of model that can be trained, each by the class of transformers that loads it: module:class."


@cache
def model_kind(name: str) -> ModelKind:
    """Return a kind of MODEL_KINDS, whose module is imported now."""
    module, _, cls = MODEL_KINDS[name].partition(":")
    kind: ModelKind = getattr(importlib.import_module(module), cls)()
    return kind


def kind_of(config: PretrainedConfig) -> ModelKind:
    """Return the kind of the models with this config."""
    return model_kind(files.auto_class(config.to_dict()))


def check_causal(config: PretrainedConfig, what: str) -> None:
    """Reject a model with an encoder where only a text is continued.

    Raises:
        ConfigError: `what` is done with causal models.
    """
    if config.is_encoder_decoder:
        raise ConfigError(files.not_causal(config.model_type, what))
