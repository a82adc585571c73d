"""Quantized start files are de-quantized while they are read, to the numbers that the formats define and that
transformers computes; others are rejected by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sftkit.config.schema import AdapterConfig, LossConfig, ModelConfig
from sftkit.errors import ConfigError
from sftkit.models.files import check_model_files, format_of, num_elements, size_of, stored_format
from sftkit.models.load import full_model, load_model, load_options, model_of_files
from sftkit.models.quantized import Packed, Weight, float8, mxfp4, settings_for_transformers
from sftkit.models.weights import materialize_weights
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops.nf4 import matrix_of, quantize
from sftkit.verify.plain import PlainModel

IDS = torch.arange(24).reshape(2, 12) * 5 % 61
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


def channels(strategy: str, **more: Any) -> dict[str, Any]:
    """The settings of compressed-tensors for float8 weights."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def declare(folder: Path, settings: dict[str, Any]) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": settings}))


def quantized_fp8(folder: Path, settings: dict[str, Any], block: tuple[int, int], suffix: str) -> dict[str, Tensor]:
    """Replace the matrices of blocks in a folder by float8 and scales; return the weights that they stand for in fp32,
    element by element.
    """
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim != 2 or "proj" not in name:
            stored[name] = meant[name] = weight
            continue
        rows, columns = (-(-size // width) for size, width in zip(weight.shape, block, strict=True))
        scales = torch.rand(rows, columns) / 50 + 0.01
        values = (torch.randn(weight.shape) * 30).to(torch.float8_e4m3fn)
        stored |= {name: values, f"{name}{suffix}": scales, f"{name.removesuffix('weight')}input_scale": torch.ones(1)}
        meant[name] = values.float()
        for i, row in enumerate(meant[name]):
            for j in range(len(row)):
                row[j] *= scales[i // block[0], j // block[1]]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    declare(folder, settings)
    return meant


def quantized_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Replace the experts in a folder by packed 4-bit floats; return the weights that they stand for."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "experts." not in name or name.endswith("bias"):
            stored[name] = meant[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole = torch.empty(experts, inputs, outputs)
        for e, o, i in torch.cartesian_prod(*map(torch.arange, (experts, outputs, inputs))).tolist():
            byte = int(blocks[e, o, i // 32, i % 32 // 2])
            whole[e, i, o] = values[byte >> 4 if i % 2 else byte & 15] * 2.0 ** (int(scales[e, o, i // 32]) - 127)
        meant[name] = whole
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    declare(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return meant


def saved(folder: Path, tokenizer: Any, config: Any, **fields: Any) -> PreTrainedModel:
    model = tiny(config, vocab_size=len(tokenizer), **fields)
    model.save_pretrained(folder)
    return model


MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 64, "moe_layers": [1], "no_rope_layers": [1, 0]}


def fp8(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    saved(folder, tokenizer, Qwen3Config)
    return quantized_fp8(folder, FP8, (16, 16), "_scale_inv")


def partial(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    """The last blocks of both dimensions are partial, as DeepSeek's are: 576 rows in blocks of 128."""
    saved(folder, tokenizer, Qwen3Config, intermediate_size=40, hidden_size=24)
    return quantized_fp8(folder, FP8, (16, 16), "_scale_inv")


def experts(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    """The files have a matrix for each expert, which transformers joins."""
    saved(folder, tokenizer, Qwen3MoeConfig, **MOE)
    return quantized_fp8(folder, FP8, (16, 16), "_scale_inv")


def latent(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    saved(folder, tokenizer, DeepseekV3Config, **LATENT)
    return quantized_fp8(folder, FP8, (16, 16), "_scale_inv")


def channel(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    saved(folder, tokenizer, Qwen3Config)
    return quantized_fp8(folder, channels("channel"), (1, 999), "_scale")


def whole(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    saved(folder, tokenizer, Qwen3Config)
    return quantized_fp8(folder, channels("tensor"), (999, 999), "_scale")


def packed(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    saved(folder, tokenizer, Llama4TextConfig, **LLAMA4)
    return quantized_mxfp4(folder)


def gpt_oss(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    saved(folder, tokenizer, GptOssConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    return quantized_mxfp4(folder)


STARTS = {f.__name__: f for f in (fp8, partial, experts, latent, channel, whole, packed, gpt_oss)}
ODD = " with settings that are not supported here"
Make = Callable[[Path, Any], dict[str, Tensor]]


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture(params=STARTS)
def made(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Any) -> tuple[str, dict[str, Tensor]]:
    torch.manual_seed(1)
    return request.param, STARTS[request.param](tmp_path, tokenizer)


def test_every_way_of_loading_gives_the_weights_that_the_format_defines(
    made: tuple[str, dict[str, Tensor]], tmp_path: Path, tokenizer: Any
) -> None:
    source, meant = ModelConfig(path=str(tmp_path)), made[1]
    check_model_files(tmp_path)
    model = load_model(source, tokenizer, 0, "fp32")
    empty = load_model(source, tokenizer, 0, "fp32", empty=True)
    assert all(p.is_meta for p in empty.parameters())
    materialize_weights(empty, source, torch.device("cpu"))
    model.save_pretrained(tmp_path / "saved")
    again = load_file(tmp_path / "saved" / "model.safetensors")
    assert again.keys() == meant.keys(), "the names of plain files, without scales"
    assert all(torch.equal(again[name], weight.float()) for name, weight in meant.items())
    filled = empty.state_dict()
    assert all(torch.equal(filled[name], weight) for name, weight in model.state_dict().items())
    for one in (model, empty):
        assert not hasattr(one.config, "quantization_config")
        assert one.generation_config.to_dict() == model.generation_config.to_dict()
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    # In fp32 experts have another operator in training (models/load.py).
    assert torch.allclose(logits(opened), logits(model), rtol=1e-4, atol=1e-4)


def test_the_plain_model_of_the_checks_is_dequantized_by_transformers_and_agrees(
    made: tuple[str, dict[str, Tensor]], tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelConfig(path=str(tmp_path))
    live = load_model(source, tokenizer, 0, "bf16")
    if made[0] not in ("partial", "channel", "whole"):  # which transformers cannot
        monkeypatch.setattr(Weight, "__getitem__", None)
    plain = PlainModel(ModelWithLoss(live, "reference", NextToken(LossConfig())), torch.device("cpu"), source)
    assert plain.differing == {}
    assert plain.compared == len(list(live.named_parameters(remove_duplicate=False)))
    name, weight = max(live.named_parameters(), key=lambda item: item[1].numel())
    with torch.no_grad():
        weight.mul_(1.5)
    plain = PlainModel(ModelWithLoss(live, "reference", NextToken(LossConfig())), torch.device("cpu"), source)
    assert name in plain.differing


def test_the_plain_model_under_an_adapter_has_the_precision_of_the_run(tmp_path: Path, tokenizer: Any) -> None:
    gpt_oss(tmp_path, tokenizer)
    plain = full_model(str(tmp_path), "fp32", load_options(str(tmp_path), ModelConfig()), independent=True)
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.float32}


def test_sizes_are_those_of_the_weights_that_are_trained(
    made: tuple[str, dict[str, Tensor]], tmp_path: Path, tokenizer: Any
) -> None:
    size = size_of(ModelConfig(path=str(tmp_path)))
    assert size is not None
    assert size.parameters == sum(weight.numel() for weight in made[1].values())
    assert size.parameters != num_elements(tmp_path / "model.safetensors")
    assert stored_format(ModelConfig(path=str(tmp_path))) == {
        "packed": "mxfp4",
        "gpt_oss": "mxfp4",
        "channel": "compressed-tensors in blocks of 1xall",
        "whole": "compressed-tensors in blocks of allxall",
    }.get(made[0], "fp8 in blocks of 16x16")


def test_a_frozen_base_goes_from_float8_to_nf4_matrix_by_matrix(tmp_path: Path, tokenizer: Any) -> None:
    meant, source = fp8(tmp_path, tokenizer), ModelConfig(path=str(tmp_path))
    adapter = AdapterConfig(rank=2, base="nf4")
    model = load_model(source, tokenizer, 5, "bf16", empty=True, adapter=adapter)
    materialize_weights(model, source, torch.device("cpu"))
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    expected = quantize(meant["model.layers.1.mlp.up_proj.weight"].to(torch.bfloat16))
    found = matrix_of(layer)  # type: ignore[arg-type]
    assert found is not None
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert model_of_files(source, precision="bf16") is not None


def test_a_part_of_a_weight_reads_the_same_numbers_as_the_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "matrix": (torch.randn(40, 24) * 9).to(torch.float8_e4m3fn),
        "matrix_scale_inv": torch.rand(3, 2),
        "cube": (torch.randn(3, 40, 24) * 9).to(torch.float8_e4m3fn),
        "cube_scale_inv": torch.rand(3, 3, 2),
        "packed_blocks": torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8),
        "packed_scales": torch.randint(110, 140, (3, 8, 2), dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    files = dict.fromkeys(tensors, tmp_path / "a.safetensors")
    weights = [
        Weight(Packed("matrix", "matrix_scale_inv", (40, 24), (16, 16)), files),
        Weight(Packed("cube", "cube_scale_inv", (3, 40, 24), (16, 16)), files),
        Weight(Packed("packed_blocks", "packed_scales", (3, 64, 8)), files),
    ]
    for weight in weights:
        all_of_it = weight[...]
        assert [*all_of_it.shape] == weight.get_shape()
        assert torch.equal(weight[:], all_of_it)
        part = (slice(1, 3), slice(3, 20), slice(5, 8))[: all_of_it.ndim]
        assert torch.equal(weight[part], all_of_it[part])


def test_mxfp4_is_exact_in_bf16_over_the_whole_range_of_exponents() -> None:
    exponents = torch.arange(1, 251, dtype=torch.uint8)
    blocks = torch.arange(16, dtype=torch.uint8).repeat(250, 1) * 17  # each code twice
    found = mxfp4(blocks.view(1, 250, 1, 16), exponents.view(1, 250, 1))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    expected = values.repeat_interleave(2) * 2.0 ** (exponents.double() - 127)[:, None]
    assert torch.equal(found[0].T.double(), expected)


def test_scales_that_are_powers_of_two_in_eight_bits_are_read(tmp_path: Path) -> None:
    values = torch.randn(4, 4).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.25, 2.0]]).to(torch.float8_e8m0fnu)
    found = float8(values, scales, Packed("a", "b", (4, 4), (4, 2)), slice(None))
    assert torch.equal(found, values.float() * torch.tensor([0.25, 0.25, 2, 2]))


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"bits": 4, "quant_method": "gptq"}, "gptq"),
        ({"bits": 4, "quant_method": "awq"}, "awq"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"},
            "bitsandbytes nf4 4-bit",
        ),
        ({"load_in_8bit": True}, "bitsandbytes 8-bit"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors pack-quantized"),
        (channels("tensor", num_bits=4), f"compressed-tensors float-quantized{ODD}"),
        (channels("channel", symmetric=False), f"compressed-tensors float-quantized{ODD}"),
        ({**channels("tensor"), "config_groups": {"group_0": "x"}}, f"compressed-tensors float-quantized{ODD}"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, f"fp8{ODD}"),
        ({"quant_method": "fp8", "weight_block_size": ["a"]}, f"fp8{ODD}"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, f"fp8{ODD}"),
        ("int8", "an unknown method"),
    ],
)
def test_a_method_that_is_not_dequantized_is_rejected_by_name(settings: Any, method: str) -> None:
    with pytest.raises(ConfigError) as caught:
        format_of({"quantization_config": settings}, "m: config.json")
    assert f"quantized ({method})" in str(caught.value)


@pytest.mark.parametrize("fault", ["no scales", "other shape", "no settings", "integers", "blocks without scales"])
def test_files_that_are_not_what_their_config_says_are_rejected(fault: str, tmp_path: Path, tokenizer: Any) -> None:
    torch.manual_seed(1)
    (packed if fault == "blocks without scales" else fp8)(tmp_path, tokenizer)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    if fault == "no scales":
        del tensors[f"{name}_scale_inv"]
    elif fault == "other shape":
        tensors[f"{name}_scale_inv"] = torch.ones(3, 2)
    elif fault == "no settings":
        tensors = {key: tensor for key, tensor in tensors.items() if "scale" not in key}
        declare(tmp_path, {})
    elif fault == "integers":
        tensors[name] = torch.zeros(64, 32, dtype=torch.int8)
    else:
        name = next(one for one in tensors if one.endswith("_blocks"))
        del tensors[name.replace("_blocks", "_scales")]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=name.rpartition(".")[2]):
        check_model_files(tmp_path)


def test_plain_weights_under_the_settings_of_a_format_stay_as_they_are(tmp_path: Path, tokenizer: Any) -> None:
    model = saved(tmp_path, tokenizer, Qwen3Config)
    declare(tmp_path, FP8)
    check_model_files(tmp_path)
    loaded = load_model(ModelConfig(path=str(tmp_path)), tokenizer, 0, "fp32")
    assert torch.equal(logits(loaded), logits(model))
    assert not hasattr(loaded.config, "quantization_config")


def test_blocks_whose_size_transformers_would_guess_wrongly_are_not_left_to_it(tmp_path: Path, tokenizer: Any) -> None:
    """24 rows in blocks of 16 have 2 scales: by their number transformers takes blocks of 12."""
    fp8(tmp_path, tokenizer)
    assert settings_for_transformers(tmp_path) == FP8 | {"dequantize": True}
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].repeat(2, 1)[:24]
    tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].repeat(2, 1)[:2]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert settings_for_transformers(tmp_path) is None
