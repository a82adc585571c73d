"""The size of a model is known before anything is loaded, from whatever says it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import huggingface_hub
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
from sftkit.config.tables import OPTIMIZERS
from sftkit.launch.launch import USABLE
from sftkit.memory import plan as memory
from sftkit.models import files as model_size
from sftkit.models.files import ModelSize, Replica, replica_of, size_of, training_bytes
from sftkit.optim.protocol import build_optimizer

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


def parameters_of(model: ModelConfig) -> int | None:
    size = size_of(model)
    return None if size is None else size.parameters


def recipe(name: str = "auto", precision: str = "auto", **model: Any) -> Config:
    data = DataConfig(train=(SourceConfig(path="x"),))
    optim, train = OptimConfig(name=name), TrainConfig(precision=precision)  # type: ignore[arg-type]
    return Config(run=RunConfig(dir="x"), model=ModelConfig(**model), data=data, optim=optim, train=train)


def replica_by(cfg: Config) -> Replica | None:
    return replica_of(cfg.model, cfg.optim, cfg.train)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", model_size.GATED)
def test_the_fields_of_a_new_model_give_its_size(model_type: str, tied: bool) -> None:
    fields = {"head_dim": 32} if model_type in model_size.NAMED else {}
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
        "import sys; from sftkit.config.schema import ModelConfig; from sftkit.models.files import size_of as p\n"
        "print(p(ModelConfig(path='some/model')).parameters, p(ModelConfig(path='some/other')), 'torch' in sys.modules)"
    )
    env = {"HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": ":".join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [
        str(parameters_of(ModelConfig(scratch={"model_type": "llama", **SIZES}))),
        "None",
        "False",
    ]


def test_the_config_of_a_hub_model_is_fetched_where_the_hub_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    asked: list[tuple[Any, ...]] = []

    def download(*args: Any, revision: str | None) -> str:
        asked.append((*args, revision))
        if args[0] == "gated/model":
            raise OSError("401")
        return str(tmp_path / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(model_size, "hub_answers", lambda: True)
    known = parameters_of(ModelConfig(path=str(tmp_path)))
    assert known is not None
    assert parameters_of(ModelConfig(path="some/model", revision="v1")) == known
    assert parameters_of(ModelConfig(path="gated/model")) is None
    assert asked == [("some/model", "config.json", "v1"), ("gated/model", "config.json", None)]
    monkeypatch.setattr(model_size, "hub_answers", lambda: False)
    assert parameters_of(ModelConfig(path="some/model")) is None
    assert len(asked) == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "mamba"}'])
def test_what_cannot_be_read_is_unknown_and_no_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert parameters_of(ModelConfig(path=str(tmp_path))) is None
    assert parameters_of(ModelConfig(path=str(tmp_path / "lost"))) is None
    assert replica_by(recipe(path=str(tmp_path))) is None


def test_bytes_per_parameter_are_those_of_the_optimizers() -> None:
    assert {"auto", *OPTIMIZERS} == set(get_args(get_type_hints(OptimConfig)["name"]))
    blocks = ModelSize(1000, 0)
    for name, width in [("auto", 8), ("adamw", 16), ("adamw_sr", 8), ("adamw8bit", 6), ("muon", 12)]:
        assert training_bytes(blocks, name, "bf16") == 1000 * width
    for name, width in [("auto", 16), ("adamw", 16), ("muon", 12)]:
        assert training_bytes(blocks, name, "fp32") == 1000 * width
    for precision in ("bf16", "fp32"):  # embedding and head have AdamW's states
        assert training_bytes(ModelSize(1000, 300), "muon", precision) == 700 * 12 + 300 * 16
        assert training_bytes(ModelSize(1000, 300), "adamw", precision) == 1000 * 16
    assert USABLE == memory.USABLE


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("source", ["scratch", "folder"])
def test_muon_is_estimated_at_what_it_really_keeps(tmp_path: Path, source: str, tied: bool) -> None:
    built = model("qwen3", head_dim=32, tie_word_embeddings=tied)
    optimizer = build_optimizer(built, OptimConfig(name="muon"))
    states = [optimizer.new_state(p, group) for group in optimizer.param_groups for p in group["params"]]
    kept = sum(v.numel() * v.element_size() for state in states for v in state.values() if isinstance(v, torch.Tensor))
    scratch = {"model_type": "qwen3", **SIZES, "head_dim": 32, "tie_word_embeddings": tied}
    if source == "folder":
        built.save_pretrained(tmp_path)
    size = size_of(ModelConfig(scratch=scratch) if source == "scratch" else ModelConfig(path=str(tmp_path)))
    assert size is not None
    assert size.ends == SIZES["vocab_size"] * SIZES["hidden_size"] * (1 if tied else 2)
    assert training_bytes(size, "muon", "fp32") == pytest.approx(8 * parameters(built) + kept, rel=0.005)


def test_a_replica_needs_its_states_and_a_quarter_more() -> None:
    scratch = {"model_type": "llama", **SIZES}
    count = parameters_of(ModelConfig(scratch=scratch))
    assert count is not None
    for name, precision, width in [("auto", "auto", 8), ("adamw", "bf16", 16), ("auto", "fp32", 16)]:
        found = replica_by(recipe(name, precision, scratch=scratch))
        assert found is not None
        assert (found.parameters, found.num_bytes) == (count, int(1.25 * width * count))
        assert found.held_bytes == (6 if (name, precision) == ("auto", "auto") else width) * count
    assert "(optim.name auto)" in replace(found, parameters=10**9).describe()
