"""What loads a checkpoint looks at its files first: the next stage, chat, evaluation, validation."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from checkpoint_worker import Run
from helpers import ROOT, cpu_runtime, tiny_llama
from transformers import PreTrainedModel

from sftkit.checkpoint.states import WeightSnapshot, write_weights
from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError
from sftkit.models.load import load_model
from sftkit.models.tokenizer import load_tokenizer
from sftkit.models.weights import load_model_weights
from sftkit.rundir.names import step_dir
from sftkit.verify.round_trip import verify_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Run(tmp_path / "run", tokenizer, cpu_runtime(), model=model_for(tokenizer)).steps(0, 1, every=1, wait=True)
    return step_dir(tmp_path / "run", 1)


def model_for(tokenizer: Any) -> PreTrainedModel:
    """A small model that embeds every token of the tokenizer."""
    model = tiny_llama()
    model.resize_token_embeddings(len(tokenizer))
    return model


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


LOADERS: dict[str, Callable[[ModelConfig, Any], Any]] = {
    "tokenizer": lambda source, tokenizer: load_tokenizer(source),
    "model": lambda source, tokenizer: load_model(source, tokenizer, seed=0),
    "shards": lambda source, tokenizer: load_model_weights(model_for(tokenizer), source),
    "validation": lambda source, tokenizer: verify_checkpoint(Path(str(source.path)) / "step-000001", {}),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_flipped_bit_is_found_by_whatever_loads_the_checkpoint(
    checkpoint: Path, tokenizer, loader: str, name: str
) -> None:
    source = ModelConfig(path=str(checkpoint.parent))  # a run stands for its latest checkpoint
    if loader != "validation":
        LOADERS[loader](source, tokenizer)
    flip(checkpoint / name)
    with pytest.raises(ConfigError, match=rf"{checkpoint / name}: content does not match its sha256: .* remove"):
        LOADERS[loader](source, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["scripts/chat.py", "RUN", "--prompt", "Hello"],
        ["scripts/evaluate.py", "RUN", "families", "--max-examples", "1"],
        ["scripts/chat_sft.py", "recipes/smoke/sft.yaml", "model.path=RUN", "run.dir=runs/never", "data.max_length=64"],
    ],
)
def test_scripts_refuse_a_damaged_checkpoint_with_the_file_and_what_to_do(checkpoint: Path, words: list[str]) -> None:
    flip(checkpoint / "model.safetensors")
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT / "src")}
    done = preloaded.run([word.replace("RUN", str(checkpoint.parent)) for word in words], env=env)
    assert done.returncode == 2, done.stderr[-3000:]
    assert f"{checkpoint}/model.safetensors: content does not match its sha256" in done.stdout + done.stderr
    assert not (ROOT / "runs" / "never").exists()


@pytest.fixture(params=[0o027, 0o002])
def umask(request: pytest.FixtureRequest) -> Any:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(path): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


def test_every_file_of_a_checkpoint_has_the_mode_that_the_umask_leaves(tmp_path: Path, tokenizer, umask: int) -> None:
    Run(tmp_path / "run", tokenizer, cpu_runtime()).steps(0, 1, every=1, wait=True)
    found = modes(tmp_path / "run")
    assert any("model.safetensors" in name for name in found)
    assert set(found.values()) == {0o666 & ~umask}, json.dumps(found, indent=1)
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "config.json").write_text("{}")
    files = {"model-00001-of-00002.safetensors": {"weight": torch.ones(2)}}
    write_weights(WeightSnapshot(None, files), tiny_llama(), shards)
    assert set(modes(shards).values()) == {0o666 & ~umask}
