"""Float8 is refused where it cannot run or does not pay; where it is used, what is saved stays as it was."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sftkit.errors import ConfigError
from sftkit.models.float8 import convert_to_fp8, convertible, fp8_unsupported_reason, swap_linears

CUDA = torch.device("cuda", 0)


def llama(hidden_size: int = 512, intermediate_size: int = 1024, device: str = "cpu") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def test_only_wide_matrices_of_the_blocks_are_chosen_never_the_head() -> None:
    model = llama()
    names = {id(module): name for name, module in model.named_modules()}
    chosen = {names[id(module)].rpartition(".")[2] for module in convertible(model)}
    assert chosen == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # k and v are 256 wide
    assert len(convertible(model)) == 10
    odd = llama(intermediate_size=1000)  # not a multiple of 16
    assert len(convertible(odd)) == 4  # q and o


def test_every_reason_against_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    large = llama(hidden_size=2048, device="meta")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8_unsupported_reason(large, CUDA, "bf16", compile=True) is None
    assert "compute capability 8.9" in str(fp8_unsupported_reason(large, torch.device("cpu"), "bf16", compile=True))
    assert "train.precision=bf16" in str(fp8_unsupported_reason(large, CUDA, "fp32", compile=True))
    assert "compile.enabled=true" in str(fp8_unsupported_reason(large, CUDA, "bf16", compile=False))
    assert "hidden size 512" in str(fp8_unsupported_reason(llama(), CUDA, "bf16", compile=True))
    large._no_split_modules = []
    assert "no linear layer" in str(fp8_unsupported_reason(large, CUDA, "bf16", compile=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "compute capability 8.9" in str(fp8_unsupported_reason(large, CUDA, "bf16", compile=True))


def test_a_refusal_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"train\.fp8=rowwise.*train\.fp8=null"):
        convert_to_fp8(llama(), "rowwise", torch.device("cpu"), "bf16", compile=True)


def test_a_missing_torchao_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.setattr("sftkit.models.float8.fp8_unsupported_reason", lambda *args, **_: None)
    with pytest.raises(ConfigError, match=r"sftkit\[fp8\]"):
        convert_to_fp8(llama(), "rowwise", CUDA, "bf16", compile=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_converted_layers_keep_weights_keys_and_files_and_compute_nearly_the_same(recipe: str, tmp_path: Path) -> None:
    float8 = pytest.importorskip("torchao.float8")
    model, reference = llama().bfloat16(), llama().bfloat16()
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    assert swap_linears(model, config) == 10
    converted = [name for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"]
    assert len(converted) == 10
    assert not any("lm_head" in name or "embed" in name for name in converted)

    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    assert all(type(state[key]) is torch.Tensor and torch.equal(state[key], expected[key]) for key in expected)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(loaded.state_dict()[key], expected[key]) for key in expected)

    ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))
    gradients = []
    for m in (model, reference):
        m(input_ids=ids, labels=ids).loss.backward()
        gradients.append(m.model.layers[0].mlp.up_proj.weight.grad.float().flatten())
    assert not torch.equal(*gradients)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.95
