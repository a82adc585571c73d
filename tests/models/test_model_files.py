"""Files of a model that somebody else wrote: a damaged one is named, a quantized one is rejected, before torch is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError, DataError
from sftkit.models.files import check_model_files, files_of_weights, num_elements, reading_files, size_of


def weights(path: Path, tensors: dict[str, str], cut: int = 0) -> None:
    """A safetensors file with tensors of two bytes, of these data types."""
    header = {
        name: {"dtype": dtype, "shape": [1], "data_offsets": [2 * i, 2 * i + 2]}
        for i, (name, dtype) in enumerate(tensors.items())
    }
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(2 * len(tensors))
    path.write_bytes(content[: len(content) - cut])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    weights(tmp_path / "model.safetensors", {"a.weight": "BF16", "a.bias": "F32"})
    return tmp_path


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model_files(folder)
    return str(caught.value)


def test_whole_and_plain_files_pass(folder: Path) -> None:
    check_model_files(folder)
    assert files_of_weights(folder) == dict.fromkeys(("a.weight", "a.bias"), folder / "model.safetensors")
    assert num_elements(folder / "model.safetensors") == 2


@pytest.mark.parametrize(
    ("fields", "method"),
    [
        ({"quantization_config": {"bits": 4, "quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"bits": 4, "quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes 4-bit"),
        ({"compression_config": {"format": "pack-quantized"}}, "pack-quantized"),
        ({"text_config": {"quantization_config": {"quant_method": "hqq"}}}, "hqq"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
    ],
)
def test_quantized_weights_are_rejected_by_the_name_of_their_method(
    folder: Path, fields: dict[str, Any], method: str
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    told = refused(folder)
    assert f"the weights are quantized ({method})" in told
    assert "Start from the model before it was quantized" in told


def test_a_config_that_says_that_nothing_is_quantized_passes(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": None, "text_config": {}}))
    check_model_files(folder)


def test_quantized_weights_are_rejected_where_config_json_does_not_say_so(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert "hf_quant_config.json: the weights are quantized (FP8)" in refused(folder)
    (folder / "hf_quant_config.json").unlink()
    weights(folder / "model.safetensors", {"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32"})
    assert "a.weight: the weights are quantized (stored as F8_E4M3)" in refused(folder)


@pytest.mark.parametrize(
    "name",
    [
        "a.q_proj.lora_A.default.weight",
        "a.q_proj.base_layer.weight",
        "a.q_proj.weight_scale_inv",
        "_orig_mod.a.bias",
        "a.qzeros",
    ],
)
def test_leftovers_of_what_wrapped_a_model_are_rejected_by_name(folder: Path, name: str) -> None:
    weights(folder / "model.safetensors", {"a.weight": "BF16", name: "BF16"})
    assert f"model.safetensors: {name}: " in refused(folder)


def test_adapters_that_would_be_left_out_are_rejected(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "it holds adapter_config.json and config.json" in refused(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"model_type": "llama"\x00}'),
        ("config.json", b"[" * 100_000),
        ("config.json", b"\xff\xfe{}"),
        ("config.json", b"[]"),
        ("config.json", b'{"model_type": "lla'),
        ("generation_config.json", b'{"eos_token_id": ' + b"[" * 100_000),
        ("tokenizer_config.json", b"\x00\x00"),
        ("model.safetensors", b""),
        ("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", (8).to_bytes(8, "little") + b"[[[[[[[["),
        ("model.safetensors", (100_000).to_bytes(8, "little") + b"[" * 100_000),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
        ("model.safetensors", (9).to_bytes(8, "little") + b'{"a": {}}'),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert refused(folder).startswith(f"{folder / name}: ")
    assert size_of(ModelConfig(path=str(folder))) is None or name.startswith(("generation", "tokenizer"))


@pytest.mark.parametrize("cut", [1, 3])
def test_a_file_that_was_not_copied_to_its_end_is_named(folder: Path, cut: int) -> None:
    weights(folder / "model.safetensors", {"a.weight": "BF16", "b.weight": "BF16"}, cut=cut)
    assert "model.safetensors: cannot read weights: " in refused(folder)


def test_a_shard_that_the_index_names_must_be_there_and_in_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert refused(folder).startswith(f"{folder}/one.safetensors: missing")
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    assert "leads out of the folder" in refused(folder)
    index.write_text(json.dumps({"weight_map": ["a"]}))
    assert refused(folder).startswith(f"{index}: cannot read weights")


class PanicException(BaseException):
    """As pyo3's, which is no Exception."""


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), RecursionError("deep"), KeyError("x")])
def test_whatever_a_library_raises_names_the_files(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(ConfigError, match=rf"^here: cannot load the model: {type(error).__name__}: "):
        _within(fail)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), DataError("a row"), SystemExit(3)])
def test_what_is_no_fault_of_the_files_passes_unchanged(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        _within(fail)
    assert caught.value is error


def _within(fail: Callable[[], None]) -> None:
    with reading_files("here"):
        fail()
