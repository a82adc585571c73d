"""Models with an encoder: each document's input is encoded once, and its text attends to the result.

A row of several documents has a place for the encoded input of each; boundaries stop a text from attending to the
inputs of others (ops.cross_attention). `EncoderDecoder` is shared by all such models, `TextToText` holds those that
read and write text: T5 and its kin.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.batches.collate import OF_TOKENS, Batch
from sftkit.data.tokens.text import around_text, start_id
from sftkit.data.types import EncoderInputs, Examples
from sftkit.errors import ConfigError, DataError
from sftkit.models import files
from sftkit.models.kind import Continuation, ModelKind, ids_of, without_router_logits
from sftkit.models.structure import decoder, vocab_size
from sftkit.ops.attention import document_boundaries, kernel_order, plain_attention
from sftkit.ops.flex import input_boundaries


class EncoderDecoder(ModelKind):
    """A model that encodes, then decodes. See models.kind.ModelKind."""

    @abstractmethod
    def encode(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Encode the inputs of a batch.

        Returns:
            (encoded inputs for the decoder's attention, [I, S, H]; bool [I, S], False at padding, or None
            without padding).

        Args:
            inputs: encoder inputs of a batch by name, [I, ...], without its tokens.
        """

    def scaled(self, orig_model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Return the decoder's hidden states, [B, C, H], scaled for the head: unchanged here."""
        return hidden

    def prepare(self, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set the start token of texts and the padding token in the configs.

        A pooler, which the decoder ignores, is neither trained nor computed.

        Raises:
            ConfigError: the model's texts begin with a token other than the tokenizer's.
        """
        start = start_id(tokenizer)
        # Training shifts targets by the start token and generation begins with it, so model and tokenizer must agree.
        for holder in (orig_model.config, orig_model.generation_config):
            if getattr(holder, "decoder_start_token_id", None) is None:
                holder.decoder_start_token_id = start
            if holder.decoder_start_token_id != start:
                raise ConfigError(
                    f"{orig_model.config.model_type}: its texts begin with token {holder.decoder_start_token_id} "
                    f"(decoder_start_token_id), the tokenizer's texts with {start}: use the model's own tokenizer"
                )
        forced = getattr(orig_model.generation_config, "forced_bos_token_id", None)
        before, _ = around_text(tokenizer)
        if forced is not None and before[1:2] != [forced]:
            raise ConfigError(
                f"{orig_model.config.model_type}: generation would write token {forced} first (forced_bos_token_id "
                "in generation_config.json), but no training text begins with it: use the model's own tokenizer, "
                "set to the language that is trained, or set the field to null"
            )
        orig_model.config.pad_token_id = tokenizer.pad_token_id
        pooler = getattr(orig_model.get_encoder(), "pooler", None)
        if pooler is not None and next(pooler.parameters(), None) is not None:
            # DDP would wait for its gradient, which no step computes.
            pooler.requires_grad_(requires_grad=False)
            # Not pooler = None: checkpoints keep its weights, as transformers expects.
            pooler.forward = _nothing

    def check(self, orig_model: PreTrainedModel, topology: Topology, train: TrainConfig) -> None:
        """Reject models in parts and float8: these models train as replicas in the run's precision."""
        name = orig_model.config.model_type
        if topology.partial:
            raise ConfigError(
                f"{name} has an encoder and is trained as replicas: start it with accelerate_configs/ddp.yaml or "
                "single_gpu.yaml and train.engine=blocks; FSDP2, tensor and context parallelism and pipelines do "
                "not support it"
            )
        if train.fp8 is not None:
            raise ConfigError(
                f"train.fp8={train.fp8}: {name} has an encoder, which is not trained in float8: set it to null"
            )

    def decoder_inputs(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> dict[str, Any]:
        """Return the tokens, the boundaries of their documents, the encoded inputs [B, K S, H] (K places for
        documents in a row), and the input that each document sees.
        """
        given = {name: value for name, value in batch.inputs.items() if name not in OF_TOKENS}
        encoded, visible = self.encode(orig_model, given)
        # A row's inputs are concatenated, so that a position attends along one axis and a mask selects its own input.
        rows = batch.shape[0]
        places, length, _ = encoded.shape
        visible = None if visible is None else visible.view(rows, -1)
        return {
            **{name: batch.inputs[name] for name in OF_TOKENS},
            "encoder_hidden_states": encoded.view(rows, places // rows * length, -1),
            "encoder_attention_mask": input_boundaries(batch.doc_ids, places // rows, length, backend, visible),
            "use_cache": False,
            "documents": document_boundaries(batch, backend, context_group),
        }

    def hidden_states(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> Tensor:
        """Return the decoder's last hidden states, [B, C, H]; a text of a row attends neither to other texts nor to
        their inputs.
        """
        module = decoder(orig_model)
        with kernel_order(backend), positions_of_documents(module, batch.inputs["position_ids"]):
            outputs = module(**self.decoder_inputs(orig_model, batch, backend, context_group))
        return self.scaled(orig_model, outputs.last_hidden_state)

    def plain_logits(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits of the whole model, [1, L, V]."""
        given = self.plain_inputs(orig_model, {name: value for name, value in inputs.items() if name not in OF_TOKENS})
        with plain_attention(orig_model):
            asked = without_router_logits(orig_model)
            return orig_model(**given, decoder_input_ids=inputs["input_ids"], use_cache=False, **asked).logits


@contextmanager
def positions_of_documents(module: torch.nn.Module, position_ids: Tensor) -> Iterator[None]:
    """Make a decoder that numbers the positions of a row itself (BART, Marian) use the documents' positions.

    Args:
        position_ids: int64 [B, T], from 0 in each document.
    """
    table = getattr(module, "embed_positions", None)
    if not isinstance(table, torch.nn.Embedding):
        yield
        return

    def looked_up(table: torch.nn.Embedding, _: Any, own: Tensor) -> Tensor:
        with torch.set_grad_enabled(own.requires_grad):  # Marian's sinusoids are not trained
            return torch.nn.Embedding.forward(table, position_ids + getattr(table, "offset", 0))

    hook = table.register_forward_hook(looked_up)
    try:
        yield
    finally:
        hook.remove()


def _nothing(hidden: Tensor) -> None:
    """Return None in place of a pooler's forward pass."""


def require_inputs(examples: Examples, what: str) -> None:
    """Reject documents without an encoder input.

    Raises:
        DataError: the documents have no input.
    """
    if not examples.encoder_sources:
        raise DataError(f"{examples.source_names[0]}: its rows have no {what} to encode, and the model needs one")


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the config fields that follow from the tokenizer: the padding token and the start token of texts."""
    return {"decoder_start_token_id": start_id(tokenizer), "pad_token_id": tokenizer.pad_token_id}


IDS = "encoder_input_ids"
MASK = "encoder_attention_mask"


class TextToText(EncoderDecoder):
    """A model that reads a text and writes another; encoder texts are padded to data.max_length.
    See models.kind.ModelKind.
    """

    auto_class = getattr(transformers, files.TEXT_TO_TEXT)

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Fill in the vocabulary size and the special ids."""
        return {**ids_of(tokenizer), **special_ids(tokenizer), **fields}

    def with_inputs(
        self,
        orig_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples,
        max_length: int,
        data: DataConfig,
    ) -> Examples:
        """Tokenize the encoder's texts: ids, int64 [I, data.max_length], truncated there, and a bool mask of that
        shape, True at tokens.
        """
        require_inputs(examples, "text")
        texts = list(dict.fromkeys(examples.encoder_sources))
        number = {text: i for i, text in enumerate(texts)}
        found = tokenizer(texts, truncation=True, max_length=max_length, padding="max_length", verbose=False)
        arrays = {IDS: np.asarray(found["input_ids"]), MASK: np.asarray(found["attention_mask"], dtype=bool)}
        index = np.fromiter((number[text] for text in examples.encoder_sources), np.int64)
        return replace(examples, encoder_inputs=EncoderInputs(arrays, index))

    def made_up_inputs(self, orig_model: PreTrainedModel, documents: int, length: int) -> EncoderInputs | None:
        """Return random tokens; every second text has half the length."""
        ids = np.random.default_rng(1).integers(0, vocab_size(orig_model), (documents, length))
        mask = np.ones((documents, length), dtype=bool)
        mask[1::2, length // 2 :] = False
        return EncoderInputs({IDS: ids, MASK: mask}, np.arange(documents))

    def encoder_positions(self, orig_model: PreTrainedModel, length: int) -> int:
        """Return data.max_length."""
        return length

    def encode(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the encoded positions [I, S, H] and bool [I, S], True at tokens."""
        mask = _seen(inputs[MASK])
        encoded = orig_model.get_encoder()(input_ids=inputs[IDS], attention_mask=mask[:, None, None, :])
        return encoded.last_hidden_state, mask

    def continuation(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Continuation:
        """Return the whole model, called with its encoder's output."""
        given = self.plain_inputs(orig_model, inputs)
        encoded = orig_model.get_encoder()(**given).last_hidden_state

        # encoder_outputs: otherwise transformers would encode the text again for each token.
        def read(*, encoded: Tensor, seen: Tensor, **call: Any) -> Any:
            return orig_model(
                encoder_outputs=(encoded,),
                attention_mask=seen,
                decoder_input_ids=call["input_ids"],
                decoder_attention_mask=call["attention_mask"],
                past_key_values=call["past_key_values"],
                use_cache=True,
            )

        return Continuation(read, {"encoded": encoded, "seen": given["attention_mask"]})

    def plain_inputs(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ids and mask under the names that transformers gives them."""
        return {"input_ids": inputs[IDS], "attention_mask": _seen(inputs[MASK]).long()}

    def scaled(self, orig_model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Return the hidden states, scaled down if the embedding is also the head, as in T5."""
        config = orig_model.config
        return hidden * config.hidden_size**-0.5 if getattr(config, "scale_decoder_outputs", False) else hidden


def _seen(mask: Tensor) -> Tensor:
    """Return the mask with one visible position in empty places: a softmax over nothing is NaN."""
    first = mask.new_zeros(mask.shape[-1])
    first[0] = True
    return mask | first
