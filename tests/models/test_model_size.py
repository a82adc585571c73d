"""The size of a model is known before anything is loaded, from whatever says it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sftkit.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    TokenizerTraining,
    TrainConfig,
)
from sftkit.launch.launch import USABLE
from sftkit.memory import plan as memory
from sftkit.models import size as model_size
from sftkit.models.size import parameters_of, replica_of
from sftkit.optim.build import optimizer_bytes

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def model(model_type: str, **changes: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **changes}))


def parameters(model: PreTrainedModel) -> int:
    return sum(p.numel() for p in model.parameters())


def recipe(name: str = "auto", precision: str = "auto", **model: Any) -> Config:
    data = DataConfig(train=(SourceConfig(path="x"),))
    optim, train = OptimConfig(name=name), TrainConfig(precision=precision)  # type: ignore[arg-type]
    return Config(run=RunConfig(dir="x"), model=ModelConfig(**model), data=data, optim=optim, train=train)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", model_size.GATED)
def test_the_fields_of_a_new_model_give_its_size(model_type: str, tied: bool) -> None:
    fields = {"head_dim": 32} if model_type == "qwen3" else {}
    fields["tie_word_embeddings"] = tied
    counted = parameters_of(ModelConfig(scratch={"model_type": model_type, **SIZES, **fields}))
    with torch.device("meta"):
        assert counted == pytest.approx(parameters(model(model_type, **fields)), rel=0.02)


def test_the_vocabulary_of_a_new_model_is_that_of_its_new_tokenizer() -> None:
    scratch = {"model_type": "llama", **SIZES}
    known = parameters_of(ModelConfig(scratch=scratch))
    del scratch["vocab_size"]
    assert parameters_of(ModelConfig(scratch=scratch)) is None
    new = TokenizerTraining(vocab_size=SIZES["vocab_size"])
    assert parameters_of(ModelConfig(scratch=scratch, train_tokenizer=new)) == known


@pytest.mark.parametrize("shard_size", ["10GB", "200KB"])
def test_a_folder_of_safetensors_and_a_run_are_counted_exactly(tmp_path: Path, shard_size: str) -> None:
    saved = model("gemma3_text", head_dim=16)
    saved.save_pretrained(tmp_path / "run" / "step-000010", max_shard_size=shard_size)
    (tmp_path / "run" / "LATEST").write_text("step-000010\n")
    index = tmp_path / "run" / "step-000010" / "model.safetensors.index.json"
    assert index.is_file() == (shard_size == "200KB")
    for path in ("run", "run/step-000010"):
        assert parameters_of(ModelConfig(path=str(tmp_path / path))) == parameters(saved)


def test_an_index_that_names_bytes_alone_is_read_with_the_precision_of_the_config(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 2_000_000}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for config, expected in [
        ({"torch_dtype": "bfloat16"}, 1_000_000),
        ({"text_config": {"dtype": "float32"}}, 500_000),
        ({}, None),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert parameters_of(ModelConfig(path=str(tmp_path))) == expected


def test_a_hub_model_is_known_once_it_is_in_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    code = (
        "import sys; from sftkit.config.schema import ModelConfig; from sftkit.models.size import parameters_of as p\n"
        "print(p(ModelConfig(path='some/model')), p(ModelConfig(path='some/other')), 'torch' in sys.modules)"
    )
    env = {"HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [
        str(parameters_of(ModelConfig(scratch={"model_type": "llama", **SIZES}))),
        "None",
        "False",
    ]


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "mamba"}'])
def test_what_cannot_be_read_is_unknown_and_no_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert parameters_of(ModelConfig(path=str(tmp_path))) is None
    assert parameters_of(ModelConfig(path=str(tmp_path / "lost"))) is None
    assert replica_of(recipe(path=str(tmp_path))) is None


def test_bytes_per_parameter_are_those_of_the_optimizers() -> None:
    table, in_fp32 = model_size.BYTES_PER_PARAMETER, model_size.FP32_BYTES_PER_PARAMETER
    assert set(table) == set(get_args(get_type_hints(OptimConfig)["name"]))
    for name in ("adamw", "adamw_sr", "adamw8bit"):
        assert table[name] == pytest.approx(optimizer_bytes(name, "bf16"), rel=0.01)
    assert table["auto"] == optimizer_bytes("adamw_sr", "bf16")  # what auto falls back to
    assert in_fp32["auto"] == in_fp32["adamw"] == optimizer_bytes("adamw", "fp32")
    for precision, widths in (("bf16", table), ("fp32", in_fp32)):  # matrices of blocks, the rest has AdamW's
        assert optimizer_bytes("muon", precision) <= widths["muon"] <= optimizer_bytes("adamw", precision)
    assert USABLE == memory.USABLE


def test_a_replica_needs_its_states_and_a_quarter_more() -> None:
    scratch = {"model_type": "llama", **SIZES}
    count = parameters_of(ModelConfig(scratch=scratch))
    assert count is not None
    for name, precision, width in [("auto", "auto", 8), ("adamw", "bf16", 16), ("auto", "fp32", 16)]:
        found = replica_of(recipe(name, precision, scratch=scratch))
        assert found is not None
        assert (found.parameters, found.num_bytes) == (count, int(1.25 * width * count))
    assert "(optim.name auto)" in replace(found, parameters=10**9).describe()
