"""Which models are of which kind, and what is said of those that are of none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import tiny_llama
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
)

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError
from sftkit.models.files import CAPTIONS, CAUSAL, TEXT_TO_TEXT, auto_class, auto_class_in
from sftkit.models.kind import MODEL_KINDS, CausalLM, check_causal, kind_of, model_kind
from sftkit.models.load import load_model
from sftkit.models.weights import load_model_weights, make_room


def test_a_decoder_is_a_causal_model_by_its_config_and_by_the_files_of_its_checkpoint(tmp_path: Path) -> None:
    model = tiny_llama()
    assert isinstance(kind_of(model.config), CausalLM)
    model.save_pretrained(tmp_path)
    assert auto_class_in(tmp_path) == CAUSAL
    assert type(model_kind(CAUSAL).auto_class.from_pretrained(tmp_path)) is type(model)


def test_every_class_that_a_config_leads_to_has_a_kind_of_that_class() -> None:
    for name in MODEL_KINDS:
        assert model_kind(name).auto_class.__name__ == name
    assert auto_class({"model_type": "llama"}) == CAUSAL
    assert auto_class({"model_type": "t5", "is_encoder_decoder": True}) == TEXT_TO_TEXT
    assert auto_class({"model_type": "vision-encoder-decoder"}) == CAPTIONS
    assert {CAUSAL, TEXT_TO_TEXT, CAPTIONS} == MODEL_KINDS.keys()


def test_a_model_with_an_encoder_is_refused_where_a_text_is_continued() -> None:
    check_causal(tiny_llama().config, "chat.py")
    with pytest.raises(ConfigError, match=r"t5 has an encoder: chat.py is for models that continue a text"):
        check_causal(T5Config(), "chat.py")


def sees_images(vocab_size: int) -> PreTrainedModel:
    """Gemma 3 as from 4B on: a text model with an encoder of images beside it."""
    torch.manual_seed(0)
    text = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))


@pytest.mark.parametrize("names", ["of the hub", "of transformers 5"])
@pytest.mark.parametrize("empty", [False, True], ids=["whole", "sharded"])
def test_of_a_model_that_sees_images_the_text_model_is_trained_and_saved(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, empty: bool, names: str
) -> None:
    whole = sees_images(len(tokenizer)).eval()
    whole.save_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    weights = load_file(file)
    assert any(name.startswith("language_model.model.layers") for name in weights)
    if names == "of transformers 5":
        weights = {name.replace("language_model.model.", "model.language_model."): w for name, w in weights.items()}
    save_file(weights, file, metadata={"format": "pt"})
    source = ModelConfig(path=str(tmp_path / "whole"))
    model = load_model(source, tokenizer, 0, empty=empty)
    if empty:
        make_room(model, torch.device("cpu"))
        load_model_weights(model, source)
    assert (type(model).__name__, model.config.model_type) == ("Gemma3ForCausalLM", "gemma3_text")
    ids = torch.arange(3, 20)[None]
    assert torch.equal(model.eval()(input_ids=ids).logits, whole(input_ids=ids).logits)
    model.save_pretrained(tmp_path / "text")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert type(saved) is type(model)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))
    assert all(name.startswith("model.") for name in load_file(tmp_path / "text" / "model.safetensors"))
