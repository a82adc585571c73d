"""Which models are of which kind, and what is said of those that are of none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import tiny_llama
from transformers import AutoTokenizer, T5Config

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError
from sftkit.models.auto_classes import CAUSAL, auto_class, auto_class_in
from sftkit.models.causal import CausalLM
from sftkit.models.kinds import KINDS, kind_of
from sftkit.models.load import load_model


def test_a_decoder_is_a_causal_model_by_its_config_and_by_the_files_of_its_checkpoint(tmp_path: Path) -> None:
    model = tiny_llama()
    assert isinstance(kind_of(model.config), CausalLM)
    model.save_pretrained(tmp_path)
    assert auto_class_in(tmp_path) == CAUSAL
    assert type(KINDS[CAUSAL].auto_class.from_pretrained(tmp_path)) is type(model)


def test_every_class_that_a_config_leads_to_has_a_kind_of_that_class() -> None:
    for name, kind in KINDS.items():
        assert kind.auto_class.__name__ == name
    assert auto_class({"model_type": "llama"}) in KINDS


@pytest.mark.parametrize("empty", [False, True], ids=["whole", "sharded"])
def test_a_model_with_an_encoder_is_refused_with_what_can_be_trained(tmp_path: Path, empty: bool) -> None:
    T5Config(vocab_size=64, d_model=16, num_layers=1, num_heads=2, d_kv=8, d_ff=16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["is_encoder_decoder"]
    with pytest.raises(ConfigError, match=r"t5 has an encoder.*AutoModelForCausalLM"):
        load_model(ModelConfig(path=str(tmp_path)), AutoTokenizer, 0, empty=empty)  # type: ignore[arg-type]
