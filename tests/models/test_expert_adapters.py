"""Adapters of experts compute what peft's do, start from and write peft's files, and multiply active experts only."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import merged_weights, scalar_kernels, tiny
from safetensors.torch import save_file
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    JetMoeConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from sftkit.compile.contract import compile_model, small_modules
from sftkit.compile.modules import compiler_switches
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import AdapterConfig, CompileConfig, LossConfig, ModelConfig
from sftkit.errors import ConfigError
from sftkit.models.adapter_files import known_shapes, target_layers
from sftkit.models.adapters import (
    Adapters,
    adapted_experts,
    add_adapters,
    as_written,
    factors_moved,
    merge_files,
    peft_config,
    peft_config_text,
    with_factors,
)
from sftkit.models.files import adapter_at
from sftkit.models.load import load_model
from sftkit.models.structure import Work, count_parameters, train_flops
from sftkit.models.tokenizer import train_tokenizer
from sftkit.models.trained import adapters_of, factors
from sftkit.objectives.next_token import NextToken
from sftkit.objectives.objective import ModelWithLoss
from sftkit.verify.plain import PlainModel, Start


@pytest.fixture(scope="module")
def peft() -> Any:
    return importlib.import_module("peft")


LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
OWN = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "n_shared_experts": 1}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "deepseek_v3": (DeepseekV3Config, {**OWN, **LATENT, "n_routed_experts": 4}),
    "glm4_moe": (Glm4MoeConfig, {**OWN, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
    "granitemoe": (GraniteMoeConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
IDS = torch.arange(24).reshape(2, 12) * 5 % 61
BASE = ModelConfig(path="base")


def family(name: str, **more: Any) -> PreTrainedModel:
    config, fields = FAMILIES[name]
    model = tiny(config, **{**fields, **more})
    with torch.no_grad():  # some families leave them as the memory was
        for parameter_name, p in model.named_parameters():
            if p.ndim == 3 or parameter_name.endswith("_bias"):
                p.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(len(parameter_name)))
    return model


def adapted_model(model: PreTrainedModel, base: str = "base", **settings: Any) -> PreTrainedModel:
    """With adapters whose B is not zero."""
    add_adapters(model, Adapters(AdapterConfig(**settings), 7, ModelConfig(path=base), ""))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, factor in factors(model).items():
            if ".lora_B." in name:
                factor.normal_(0.0, 0.1, generator=generator)
    return model


def write_adapter(model: PreTrainedModel, folder: Path) -> Path:
    folder.mkdir(parents=True)
    tensors = {f"base_model.model.{name}": p.detach().clone() for name, p in factors(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(peft_config_text(model))
    return folder


def loss_of(model: Any) -> torch.Tensor:
    logits = model(input_ids=IDS, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def gradients_of(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert expected[name].norm() > 0
        assert float((gradient - expected[name]).norm() / expected[name].norm()) < tolerance, name


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_every_gradient_are_those_of_peft(name: str, tmp_path: Path, peft: Any) -> None:
    """Our files in peft's modules: names, orders, scales and the sum itself."""
    # peft takes names of a feed-forward layer beside experts for those of experts in older files.
    targets = ("attention", "experts")
    ours = adapted_model(family(name), rank=3, alpha=5.0, targets=targets)
    assert len(adapted_experts(ours)) == 2
    theirs = peft.PeftModel.from_pretrained(family(name), write_adapter(ours, tmp_path / "a"), is_trainable=True)
    loss, gradients = gradients_of(ours)
    expected, others = gradients_of(theirs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert gradients.keys() == factors(ours).keys()
    named = {key.replace(".default", ""): gradient for key, gradient in others.items()}
    assert_same({f"base_model.model.{key}": value for key, value in gradients.items()}, named, 1e-6)
