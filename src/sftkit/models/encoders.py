"""Models with an encoder: each document's input is encoded once, and its text attends to the result.

A row of several documents has a place for the encoded input of each; boundaries stop a text from attending to the
inputs of others (ops.cross_attention). `EncoderDecoder` is shared by all such models, `TextToText` holds those that
read and write text: T5 and its kin; `VisionToText` captions pictures, as transformers composes such models: a picture
encoder (ViT) and a decoder that attends to it (GPT-2).
"""

import json
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import ImageProcessingMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.batches.collate import OF_TOKENS, Batch
from sftkit.data.reading import pictures as reading
from sftkit.data.tokens.text import around_text, start_id
from sftkit.data.types import EncoderInputs, Examples
from sftkit.errors import ConfigError, DataError, config_error, hint
from sftkit.models import files
from sftkit.models.kind import Continuation, ModelKind, ids_of, without_router_logits
from sftkit.models.structure import decoder, inference, vocab_size
from sftkit.ops import attention, flex
from sftkit.runtime.hub import hub_answers


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
                raise config_error(
                    "start token of another tokenizer", config=orig_model.config, holder=holder, start=start
                )
        forced = getattr(orig_model.generation_config, "forced_bos_token_id", None)
        before, _ = around_text(tokenizer)
        if forced is not None and before[1:2] != [forced]:
            raise config_error("forced first token", model_type=orig_model.config.model_type, forced=forced)
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
            raise config_error("encoder in parts", model_type=name)
        if train.fp8 is not None:
            raise config_error("encoder in float8", fp8=train.fp8, model_type=name)

    def hidden_states(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> Tensor:
        """Return the decoder's last hidden states, [B, C, H]; a text of a row attends neither to other texts nor to
        their inputs.
        """
        module = decoder(orig_model)
        given = {name: value for name, value in batch.inputs.items() if name not in OF_TOKENS}
        with attention.kernel_order(backend), positions_of_documents(module, batch.inputs["position_ids"]):
            encoded, visible = self.encode(orig_model, given)
            # A row's inputs are concatenated to [B, K S, H], with K places for documents in a row, so that a position
            # attends along one axis and a mask selects its own input.
            rows = batch.shape[0]
            places, length, _ = encoded.shape
            visible = None if visible is None else visible.view(rows, -1)
            outputs = module(
                **{name: batch.inputs[name] for name in OF_TOKENS},
                encoder_hidden_states=encoded.view(rows, places // rows * length, -1),
                encoder_attention_mask=flex.input_boundaries(batch.doc_ids, places // rows, length, backend, visible),
                use_cache=False,
                documents=attention.document_boundaries(batch, backend, context_group),
            )
        return self.scaled(orig_model, outputs.last_hidden_state)

    def plain_logits(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits of the whole model, [1, L, V]."""
        given = self.plain_inputs(orig_model, {name: value for name, value in inputs.items() if name not in OF_TOKENS})
        with attention.plain_attention(orig_model):
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

    with table.register_forward_hook(looked_up):
        yield


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


log = logging.getLogger(__name__)

PIXELS = "pixel_values"
PROCESSOR = "preprocessor_config.json"
"File of an image processor, as transformers names it."
_MIDDLE = 0.5
"ViT's mean and standard deviation of pixels, used if neither the model nor its image processor gives them."


class Pixels(NamedTuple):
    """The input of an encoder: its sizes, and the mean and standard deviation that normalise pixels in 0..1."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


class VisionToText(EncoderDecoder):
    """transformers' VisionEncoderDecoderModel. See models.kind.ModelKind."""

    auto_class = getattr(transformers, files.CAPTIONS)

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Fill in the decoder's vocabulary size and special ids, and its cross-attention.

        Raises:
            ConfigError: the encoder or the decoder is missing.
        """
        parts = [fields.get(name) for name in ("encoder", "decoder")]
        if not all(isinstance(part, dict) and "model_type" in part for part in parts):
            raise config_error("parts of a caption model", model_type=fields["model_type"])
        decoder = {**ids_of(tokenizer), "is_decoder": True, "add_cross_attention": True, **fields["decoder"]}
        # copies, because transformers removes model_type from both
        return {**special_ids(tokenizer), **fields, "encoder": dict(fields["encoder"]), "decoder": decoder}

    def prepare(self, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Store the pixels' mean and standard deviation in the config if the image processor next to the weights
        gives them.
        """
        super().prepare(orig_model, tokenizer)
        # With a pad id GPT-2 searches every batch for padding to warn about it, which waits for the device.
        orig_model.config.decoder.pad_token_id = None
        if not hasattr(orig_model.config.encoder, "image_mean"):
            _normalise_as_beside(orig_model)
        if unseen := unseen_pixels(orig_model):
            log.warning(unseen)

    def with_inputs(
        self,
        orig_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples,
        max_length: int,
        data: DataConfig,
    ) -> Examples:
        """Read the pictures: uint8 [I, channels, height, width], resized to the encoder's input."""
        require_inputs(examples, "picture")
        size = pixels_of(orig_model.config)[:3]
        pictures = reading.load_images(examples.encoder_sources, PIXELS, size, Path(data.cache_dir))
        return replace(examples, encoder_inputs=pictures)

    def made_up_inputs(self, orig_model: PreTrainedModel, documents: int, length: int) -> EncoderInputs | None:
        """Return noise: uint8 [documents, channels, height, width]."""
        size = pixels_of(orig_model.config)[:3]
        noise = np.random.default_rng(1).integers(0, 256, (documents, *size), dtype=np.uint8)
        return EncoderInputs({PIXELS: noise}, np.arange(documents))

    def files(self, orig_model: PreTrainedModel) -> dict[str, bytes]:
        """Return the config of an image processor, with which other programs prepare pictures for the model."""
        pixels = pixels_of(orig_model.config)
        size = {"height": pixels.height, "width": pixels.width}
        resizing = {"do_resize": True, "size": size, "resample": reading.RESAMPLE}
        rescaling = {"do_rescale": True, "rescale_factor": 1 / 255}
        normalising = {"do_normalize": True, "image_mean": pixels.mean, "image_std": pixels.std}
        processor = {"image_processor_type": "ViTImageProcessor", **resizing, **rescaling, **normalising}
        return {PROCESSOR: json.dumps(processor, indent=2).encode()}

    def encoder_positions(self, orig_model: PreTrainedModel, length: int) -> int:
        """Return the positions of a picture: its patches, and the tokens that the encoder puts before them."""
        pixels = pixels_of(orig_model.config)
        empty = torch.zeros(1, *pixels[:3], dtype=orig_model.dtype, device=orig_model.device)
        # A single picture is not a shape of the run: compiled code would recompile for it.
        with inference(orig_model), attention.plain_attention(orig_model):
            return int(orig_model.get_encoder()(pixel_values=empty).last_hidden_state.shape[1])

    def encode(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[Tensor, None]:
        """Return all positions of the encoder in the decoder's size, [I, S, H]; none of them is padding."""
        encoded = orig_model.get_encoder()(**self.plain_inputs(orig_model, inputs)).last_hidden_state
        projection = getattr(orig_model, "enc_to_dec_proj", None)
        return (encoded if projection is None else projection(encoded)), None

    def continuation(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Continuation:
        """Return the decoder with its head, called with the encoded pictures."""
        decoder = orig_model.decoder
        assert isinstance(decoder, PreTrainedModel)
        return Continuation(decoder, {"encoder_hidden_states": self.encode(orig_model, inputs)[0]})

    def plain_inputs(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the normalised pixels on their device, in the precision of the weights. No host sync."""
        pixels = pixels_of(orig_model.config)
        return {PIXELS: normalised(inputs[PIXELS], pixels.mean, pixels.std).to(orig_model.dtype)}


def _normalise_as_beside(orig_model: PreTrainedModel) -> None:
    """Write the mean and standard deviation of a loaded model's image processor into the encoder's config; the
    processor is in the model's folder or on the hub.

    Our pixels are in 0..1, so both are divided by the processor's scale.
    """
    path = str(orig_model.name_or_path)
    config = orig_model.config.encoder
    if not path:
        return
    # Private: the commit that the config was loaded from, so that both files have the same version. If transformers
    # drops it (huggingface/transformers#47611), the newest file is used.
    commit = getattr(orig_model.config, "_commit_hash", None)
    where = {"revision": commit, "local_files_only": os.path.isdir(path) or not hub_answers()}
    try:
        said, _ = ImageProcessingMixin.get_image_processor_dict(path, **where)
    except OSError:
        log.warning("%s has no %s, so pixels are normalised with mean and std %g", path, PROCESSOR, _MIDDLE)
        return
    # The processor's output for a pixel of 255, which is 1 here.
    scale = 255 * (said.get("rescale_factor", 1 / 255) if said.get("do_rescale", True) else 1.0)
    # No normalisation means mean 0 and deviation 1.
    if not said.get("do_normalize", True):
        channels = pixels_of(orig_model.config).channels
        said |= {"image_mean": [0.0] * channels, "image_std": [1.0] * channels}
    for name in ("image_mean", "image_std"):
        if said.get(name) is not None:
            setattr(config, name, [value / scale for value in said[name]])


def pixels_of(config: PretrainedConfig) -> Pixels:
    """Return the input of a model's encoder.

    Raises:
        ConfigError: the config does not give the size of pictures, or gives too few means.
    """
    own = config.encoder
    size = getattr(own, "image_size", None)
    channels = getattr(own, "num_channels", 3)
    if size is None:
        raise ConfigError(f"{own.model_type} is not supported as an encoder: its config has no image_size")
    height, width = size if isinstance(size, list | tuple) else (size, size)
    mean, std = (tuple(getattr(own, name, None) or [_MIDDLE] * channels) for name in ("image_mean", "image_std"))
    if len(mean) != channels or len(std) != channels:
        raise ConfigError(f"{own.model_type}: image_mean and image_std need a number for each of {channels} channels")
    return Pixels(channels, height, width, mean, std)


def unseen_pixels(orig_model: PreTrainedModel) -> str:
    """Return the rows and columns of a picture that are in no patch of the encoder; empty if it sees all.

    Patches are a convolution with its kernel size as stride, which drops a partial patch, as in ViT; Swin pads it
    instead. Published encoders may do so (384 pixels in patches of 14), so it is no reason to reject one.
    """
    pixels = pixels_of(orig_model.config)
    for module in orig_model.get_encoder().modules():
        for layer in module.children():
            if not isinstance(layer, torch.nn.Conv2d) or layer.in_channels != pixels.channels:
                continue
            pads = layer.padding not in ("valid", (0, 0)) or hasattr(module, "maybe_pad")
            if pads or layer.kernel_size != layer.stride:
                continue
            down, across = layer.stride
            rest = {"rows": pixels.height % down, "columns": pixels.width % across}
            if left := [f"the last {number} {name}" for name, number in rest.items() if number]:
                encoder = orig_model.config.encoder.model_type
                return hint("unseen pixels", encoder=encoder, size=pixels, stride=layer.stride, left=" and ".join(left))
    return ""


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (pixels / 255 - mean) / std in fp32, for uint8 [I, channels, height, width].

    Mean and std stay on the host: no sync.
    """
    channels = [
        pixels[:, i].float().mul(1 / (255 * s)).sub(m / s) for i, (m, s) in enumerate(zip(mean, std, strict=True))
    ]
    return torch.stack(channels, 1)
