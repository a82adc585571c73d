"""Models that caption pictures, as transformers composes them: a picture encoder (ViT) and a decoder that attends to
it (GPT-2).
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import ImageProcessingMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig
from sftkit.data.reading import store
from sftkit.data.types import EncoderInputs, Examples
from sftkit.errors import ConfigError
from sftkit.models import files
from sftkit.models.kind import Continuation, ids_of
from sftkit.models.structure import inference
from sftkit.models.text_to_text import EncoderDecoder, require_inputs, special_ids
from sftkit.ops.attention import plain_attention
from sftkit.runtime.hub import hub_answers

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
            raise ConfigError(
                f"model.scratch: {fields['model_type']} needs encoder and decoder, each with model_type and its own "
                "fields"
            )
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
        pictures = store.load_images(examples.encoder_sources, PIXELS, size, Path(data.cache_dir))
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
        resizing = {"do_resize": True, "size": size, "resample": store.RESAMPLE}
        rescaling = {"do_rescale": True, "rescale_factor": 1 / 255}
        normalising = {"do_normalize": True, "image_mean": pixels.mean, "image_std": pixels.std}
        processor = {"image_processor_type": "ViTImageProcessor", **resizing, **rescaling, **normalising}
        return {PROCESSOR: json.dumps(processor, indent=2).encode()}

    def encoder_positions(self, orig_model: PreTrainedModel, length: int) -> int:
        """Return the positions of a picture: its patches, and the tokens that the encoder puts before them."""
        pixels = pixels_of(orig_model.config)
        empty = torch.zeros(1, *pixels[:3], dtype=orig_model.dtype, device=orig_model.device)
        # A single picture is not a shape of the run: compiled code would recompile for it.
        with inference(orig_model), plain_attention(orig_model):
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
                return (
                    f"{encoder}: with pictures of {pixels.height} x {pixels.width} pixels in patches of {down} x "
                    f"{across}, the encoder does not see {' and '.join(left)}; an image_size that is a multiple of "
                    "patch_size loses none"
                )
    return ""


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (pixels / 255 - mean) / std in fp32, for uint8 [I, channels, height, width].

    Mean and std stay on the host: no sync.
    """
    channels = [
        pixels[:, i].float().mul(1 / (255 * s)).sub(m / s) for i, (m, s) in enumerate(zip(mean, std, strict=True))
    ]
    return torch.stack(channels, 1)
