"""Sharded models get their weights shard by shard: bitwise those of from_pretrained, in little memory, or a clear error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_llama, torchrun
from made_models import MODELS, SIZES
from safetensors.torch import load_file, save_file
from test_models import COMMON, FAMILIES, build
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError
from sftkit.models.load import DTYPES, empty_model, from_scratch, full_model, load_options
from sftkit.models.weights import load_model_weights, load_weights, make_room


def save_models(folder: Path) -> None:
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model: PreTrainedModel = make()
        model.save_pretrained(folder / name)
        model.save_pretrained(folder / f"{name} in files", max_shard_size="10KB")
        model.to(torch.bfloat16).save_pretrained(folder / f"{name} bf16")


def check_loaded(
    folder: Path, processes: int, cases: dict[str, tuple[str, str, str]], large: tuple[tuple[str, str], ...] = ()
) -> dict[str, Any]:
    """Every case that loads at all equals from_pretrained, buffers included.

    Returns:
        "problems" of the other cases, by rank; "memory" that it took to load each of `large` in halves, by rank.
    """
    (folder / "plan.json").write_text(json.dumps({"cases": cases, "large": large}))
    torchrun(processes, "sharded_worker.py", "load", str(folder))
    results = json.loads((folder / "found.json").read_text())
    problems = results["problems"]
    for name, (model, _, precision) in cases.items():
        if name in problems:
            continue
        whole = AutoModelForCausalLM.from_pretrained(folder / model, dtype=DTYPES[precision])
        expected = dict([*whole.named_parameters(), *whole.named_buffers()])
        found = torch.load(folder / f"{name}.pt")
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert found[key].dtype == value.dtype, (name, key)
            assert torch.equal(found[key], value), (name, key)
    return results


@pytest.mark.slow
def test_two_ranks_load_what_from_pretrained_loads_in_little_memory_and_name_what_is_wrong(tmp_path: Path) -> None:
    save_models(tmp_path)
    cases = {
        f"{model} {topology}": (model, topology, "fp32")
        for model in ("llama", "qwen3", "llama in files", "qwen3 in files")
        for topology in ("fsdp2", "tensor")
    }
    cases |= {f"{name} rounded": (name, "tensor", "bf16") for name in ("llama", "llama in files")}
    cases |= {"bf16 kept": ("qwen3 bf16", "fsdp2", "bf16"), "bf16 widened": ("llama bf16", "fsdp2", "fp32")}
    cases |= {
        "experts": ("qwen3_moe", "fsdp2", "fp32"),
        "experts rounded": ("qwen3_moe in files", "fsdp2", "bf16"),
    }
    broken = break_folders(tmp_path)
    cases |= {f"broken {name}": (name, "fsdp2", "fp32") for name in broken}
    num_bytes = save_large(tmp_path)
    large = (("large", "bf16"), ("large in files", "bf16"), ("large in files", "fp32"))
    found = check_loaded(tmp_path, 2, cases, large)
    for (model, precision), ranks in zip(large, found["memory"], strict=True):
        shard = (
            num_bytes / 2 * (2 if precision == "fp32" else 1)
        )  # which on a CPU is host memory itself, some of it freed before
        assert all(shard * 0.7 < peak < shard * 1.3 for peak in ranks), (model, precision, shard, ranks)
    problems = found["problems"]
    assert set(problems) == {f"broken {name}" for name in broken}
    for name, parts in broken.items():
        assert len(problems[f"broken {name}"]) == 2  # of both ranks
        for text in problems[f"broken {name}"]:
            assert str(tmp_path / name) in text, text
            assert all(part in text for part in parts), text


def save_large(folder: Path) -> int:
    """380 MB in bf16, as "large" in one file and as "large in files" in five; the number of bytes."""
    sizes = {"vocab_size": 16_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10}
    config = LlamaConfig(**{**SIZES, **sizes, "head_dim": 256}, dtype="bfloat16")
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in LlamaForCausalLM(config).state_dict().items()}
    tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    names, weight_map = list(tensors), {}
    one, several = folder / "large", folder / "large in files"
    config.save_pretrained(one)
    config.save_pretrained(several)
    save_file(tensors, one / "model.safetensors", {"format": "pt"})
    for i in range(5):
        file = f"model-{i + 1:05d}-of-00005.safetensors"
        save_file({name: tensors[name] for name in names[i::5]}, several / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[i::5], file)
    (several / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(t.nbytes for t in tensors.values())


def break_folders(folder: Path) -> dict[str, tuple[str, ...]]:
    """Name of a folder that cannot be loaded -> what the error has to say, besides the folder."""
    weight = "model.layers.1.mlp.up_proj.weight"
    for name in ("missing", "misshapen", "cut short", "no weights", "pickled"):
        shutil.copytree(folder / "llama", folder / name)
    for name in ("file lost", "index wrong", "index cut"):
        shutil.copytree(folder / "llama in files", folder / name)
    shutil.copytree(folder / "qwen3_moe", folder / "expert missing")
    shutil.copytree(folder / "qwen3_moe", folder / "expert misshapen")

    def edit(name: str, key: str, value: torch.Tensor | None) -> None:
        file = folder / name / "model.safetensors"
        tensors = load_file(file)
        del tensors[key]
        save_file(tensors | ({key: value} if value is not None else {}), file, {"format": "pt"})

    edit("missing", weight, None)
    edit("misshapen", weight, torch.zeros(66, 43))
    edit("expert missing", "model.layers.0.mlp.experts.3.up_proj.weight", None)
    edit("expert misshapen", "model.layers.1.self_attn.q_proj.weight", torch.zeros(8, 43))
    short = folder / "cut short" / "model.safetensors"
    short.write_bytes(short.read_bytes()[:-100])
    (folder / "no weights" / "model.safetensors").unlink()
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "pytorch_model.bin")
    index = folder / "file lost" / "model.safetensors.index.json"
    lost = json.loads(index.read_text())["weight_map"][weight]
    (folder / "file lost" / lost).unlink()
    wrong = folder / "index wrong" / "model.safetensors.index.json"
    entries = json.loads(wrong.read_text())
    entries["weight_map"][weight] = next(f for f in entries["weight_map"].values() if f != lost)
    wrong.write_text(json.dumps(entries))
    (folder / "index cut" / "model.safetensors.index.json").write_text(index.read_text()[:50])
    return {
        "missing": (weight,),
        "misshapen": (weight, "[66, 43]", "[66, 48]", "model.safetensors"),
        "cut short": ("model.safetensors",),
        "no weights": ("model.safetensors",),
        "pickled": ("model.safetensors",),
        "file lost": (lost,),
        "index wrong": (weight, entries["weight_map"][weight]),
        "index cut": ("model.safetensors.index.json",),
        "expert missing": ("model.layers.0.mlp.experts",),
        "expert misshapen": ("model.layers.1.self_attn.q_proj.weight",),
    }


@pytest.mark.slow
def test_three_ranks_load_sizes_that_they_do_not_divide_and_weights_shorter_than_they_are(tmp_path: Path) -> None:
    save_models(tmp_path)
    models = ("llama in files", "qwen3", "qwen3_moe")
    found = check_loaded(tmp_path, 3, {model: (model, "fsdp2 of 3", "fp32") for model in models})
    assert found["problems"] == {}


@pytest.mark.slow
def test_four_ranks_load_what_from_pretrained_loads(tmp_path: Path) -> None:
    save_models(tmp_path)
    cases = {
        f"{model} {topology}": (model, topology, "fp32")
        for model in ("llama", "qwen3 in files")
        for topology in ("hsdp", "fsdp2 x tensor")
    }
    cases["experts"] = ("qwen3_moe", "hsdp", "bf16")
    assert check_loaded(tmp_path, 4, cases)["problems"] == {}


@pytest.mark.parametrize(
    ("model_type", "precision"), [*((name, "bf16") for name in FAMILIES), ("llama", "fp32"), ("gpt_oss", "fp32")]
)
def test_an_empty_model_that_was_filled_is_the_one_of_from_pretrained(
    model_type: str, precision: str, tmp_path: Path
) -> None:
    saved = build(model_type)
    for name, buffer in saved.named_buffers():
        if name in saved.state_dict():
            buffer.uniform_()
    saved.save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPES[precision])
    source = ModelConfig(path=str(tmp_path))
    empty = empty_model(str(tmp_path), precision, load_options(str(tmp_path), source))
    assert all(p.is_meta for p in empty.parameters())
    make_room(empty, torch.device("cpu"))
    load_model_weights(empty, source)
    found = dict([*empty.named_parameters(), *empty.named_buffers()])
    expected = dict([*whole.named_parameters(), *whole.named_buffers()])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_a_model_with_a_soft_cap_of_its_scores_is_made_with_eager_attention_and_others_with_sdpa(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """transformers' sdpa has no such cap: 5.23 refuses to make the model with it, older versions leave the cap out."""
    for model_type, attention in (("gemma2", "eager"), ("llama", "sdpa")):
        fields = {**COMMON, **FAMILIES[model_type][1], "model_type": model_type, "vocab_size": len(tokenizer)}
        new = from_scratch(fields, tokenizer, seed=0)
        path = str(tmp_path / model_type)
        new.save_pretrained(path)
        options = load_options(path, ModelConfig(path=path))
        models = new, full_model(path, "fp32", options), empty_model(path, "fp32", options)
        assert [model.config._attn_implementation for model in models] == [attention] * 3


def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    with pytest.raises(ConfigError, match="leads out of the folder"):
        load_weights(tiny_llama(), tmp_path)
