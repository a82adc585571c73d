"""Small models with an encoder, and documents for them, for the tests of captioning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from helpers import VOCAB_SIZE, make_examples
from transformers import PreTrainedModel

from sftkit.data.types import EncoderInputs, Examples
from sftkit.models.kind import kind_of
from sftkit.models.load import from_scratch

ENCODER = {"model_type": "vit", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER |= {"intermediate_size": 48, "image_size": 12, "patch_size": 4}
DECODER = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
DECODER |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
CAPTIONER = {"model_type": "vision-encoder-decoder", "encoder": ENCODER, "decoder": DECODER}
TRANSLATOR = {"model_type": "t5", "d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 64}
TRANSLATOR |= {"dropout_rate": 0.0}
OWN_POSITIONS = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
OWN_POSITIONS |= {
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
"Sizes of translators whose decoders number the positions of a row themselves: BART, Marian."
TEXT_LENGTH = 12
"Number of positions of the texts that a translator's encoder reads."


class Words:
    """The fields of a tokenizer that determine a new model."""

    bos_token_id, eos_token_id, pad_token_id = None, 0, 1

    def __len__(self) -> int:
        return VOCAB_SIZE


def made(fields: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A new model from load_model; its cross-attention scores are spread out, because those of new models
    hardly differ.
    """
    orig_model = from_scratch(fields, Words(), seed)  # type: ignore[arg-type]
    kind_of(orig_model.config).prepare(orig_model, Words())  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in orig_model.named_parameters():
            if "crossattention" in name and parameter.ndim == 2:
                parameter.mul_(20)
    return orig_model


def captions(orig_model: PreTrainedModel, lengths: Sequence[int], shared: bool = False) -> Examples:
    """Documents of these lengths with an encoder input for each; with `shared`, two successive documents have
    the same.
    """
    inputs = kind_of(orig_model.config).made_up_inputs(orig_model, len(lengths), TEXT_LENGTH)
    assert inputs is not None
    if shared:
        inputs = EncoderInputs(inputs.arrays, np.arange(len(lengths)) // 2)
    return replace(make_examples(lengths, target_share=1.0), encoder_inputs=inputs)
