"""What a checkpoint would hold is what plain transformers makes of its config.json: no more, no less, the same shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny, tiny_recipe
from made_models import MODELS, tiny_gemma2
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from sftkit.checkpoint.states import check_saved_names
from sftkit.errors import ConfigError
from sftkit.models.structure import use_document_lengths
from sftkit.models.vocabulary import pad_vocabulary
from sftkit.train.assemble import open_checkpoints
from sftkit.train.parts import LoadedModel


def captioner() -> PreTrainedModel:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    decoder = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, is_decoder=True, add_cross_attention=True)
    encoder = ViTConfig(image_size=8, patch_size=4, **small)
    return VisionEncoderDecoderModel(VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))


WHOLE: dict[str, Callable[[], PreTrainedModel]] = {
    **MODELS,
    "gemma2": tiny_gemma2,
    "gpt_oss": lambda: tiny(GptOssConfig, num_local_experts=4),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, num_layers=1, num_heads=2, d_ff=16)),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(
            vocab_size=32,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
        )
    ),
    "captioner": captioner,
}


@pytest.mark.parametrize("family", WHOLE)
def test_a_model_of_transformers_passes(family: str) -> None:
    model = WHOLE[family]()
    check_saved_names(model)
    if not model.config.is_encoder_decoder:
        pad_vocabulary(model, 64)
        use_document_lengths(model)
        check_saved_names(model)


def injected(model: Any) -> None:
    model.model.layers[0].self_attn.lora_A = torch.nn.Linear(2, 2)


def leftover_buffer(model: Any) -> None:
    model.model.register_buffer("history", torch.zeros(3))


def removed(model: Any) -> None:
    del model.model.norm
    model.model.norm = torch.nn.Identity()


def renamed(model: Any) -> None:
    layer = model.model.layers[0].mlp
    layer.up, layer.up_proj = layer.up_proj, torch.nn.Identity()


def larger(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(48, 80, bias=False)


def untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.all_tied_weights_keys = {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (injected, r"they hold what it does not have, model\.layers\.0\.self_attn\.lora_A\.bias"),
        (leftover_buffer, r"hold what it does not have, model\.history"),
        (removed, r"they lack model\.norm\.weight"),
        (renamed, r"hold .*mlp\.up\.weight; lack .*mlp\.up_proj\.weight"),
        (larger, r"have another shape of model\.layers\.1\.mlp\.up_proj\.weight"),
        (untied, r"hold what it does not have, lm_head\.weight"),
    ],
)
def test_a_model_that_was_changed_is_rejected(change: Callable[[Any], None], told: str) -> None:
    model = MODELS["qwen3"]()
    change(model)
    with pytest.raises(ConfigError, match=told):
        check_saved_names(model)


class Mine(LlamaForCausalLM):
    """Not the class that transformers makes of a Llama config."""


def test_another_class_than_that_of_the_config_is_rejected() -> None:
    model = Mine(MODELS["llama"]().config)
    with pytest.raises(ConfigError, match=r"names Mine, and transformers makes a LlamaForCausalLM"):
        check_saved_names(model)


def test_a_run_of_a_model_with_a_foreign_parameter_ends_before_it_trains(tmp_path: Path) -> None:
    model: Any = MODELS["qwen3"]()
    model.model.layers[1].mlp.register_parameter("gate", torch.nn.Parameter(torch.ones(2)))
    run: Any = SimpleNamespace(cfg=tiny_recipe(tmp_path))
    # As run_to_end calls it: after the engine is built, before it is warmed up.
    with pytest.raises(
        ConfigError, match=r"they hold what it does not have, model\.layers\.1\.mlp\.gate\. Something added"
    ):
        open_checkpoints(run, LoadedModel(model, None, 8), None, None)  # type: ignore[arg-type]
