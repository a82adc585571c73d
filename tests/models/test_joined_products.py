"""Blocks whose layers are one product train as blocks whose layers are apart, and nobody else notices."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import cpu_runtime, tiny_llama
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sftkit.config.schema import AdapterConfig, CompileConfig, ModelConfig, OptimConfig
from sftkit.errors import ConfigError
from sftkit.models.adapters import Adapters, add_adapters
from sftkit.models.joined_products import Joining, chosen_products, join_products
from sftkit.models.weights import load_weights
from sftkit.ops.joined import are_neighbours
from sftkit.optim.protocol import build_optimizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
}


def made(model_type: str = "qwen3", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**SIZES)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model.to(dtype)


def both(model_type: str = "qwen3", dtype: torch.dtype = torch.float64) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a model, and the same with joined products."""
    plain = made(model_type, dtype)
    joined = copy.deepcopy(plain)
    assert join_products(joined, "cublas") == 4
    return plain, joined


def backward(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(40).reshape(2, 20) % 64
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def stored_together(model: Any) -> bool:
    layers = [layer for block in model.model.layers for layer in (block.self_attn, block.mlp)]
    names = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    found = [[getattr(m, n, None) for n in some] for m in layers for some in names if hasattr(m, some[0])]
    return all(are_neighbours([layer.weight for layer in some]) for some in found)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "mistral"])
def test_losses_and_gradients_are_those_of_layers_apart(model_type: str) -> None:
    plain, joined = both(model_type)
    torch.testing.assert_close(backward(joined), backward(plain), rtol=1e-12, atol=0)
    gradients = dict(joined.named_parameters())
    for name, parameter in plain.named_parameters():
        found = gradients[name].grad
        assert found is not None
        assert parameter.grad is not None
        assert (found - parameter.grad).norm() <= 1e-12 * parameter.grad.norm(), name


def test_parameters_names_and_evaluated_bits_stay() -> None:
    plain = made(dtype=torch.float32)
    joined = copy.deepcopy(plain)
    before = dict(joined.named_parameters())
    join_products(joined, "cublas")
    after = dict(joined.named_parameters())
    assert [*after] == [*before]
    assert all(after[name] is before[name] for name in before)
    assert stored_together(joined)
    ids = torch.arange(40).reshape(2, 20) % 64
    with torch.no_grad():
        assert torch.equal(joined(ids).logits, plain(ids).logits)
    assert join_products(joined, "cublas") == 0


def test_weights_are_loaded_into_the_common_storage(tmp_path: Path) -> None:
    plain, joined = both(dtype=torch.float32)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1.0)
    plain.save_pretrained(tmp_path)
    load_weights(joined, tmp_path)
    assert stored_together(joined)
    states = joined.state_dict()
    assert all(torch.equal(value, states[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon"])
def test_an_update_is_that_of_layers_apart(name: Any) -> None:
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    plain, joined = both(dtype=torch.float32)
    for model in (plain, joined):
        optimizer = build_optimizer(model, OptimConfig(name=name, lr=1e-2), 0)
        for _ in range(2):
            backward(model)
            optimizer.update(1e-2, torch.tensor(1.0))
    assert stored_together(joined)
    after = dict(joined.named_parameters())
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(after[key], parameter, rtol=1e-3, atol=2e-4)


def test_compiled_blocks_are_one_graph_that_no_step_builds_again() -> None:
    _, joined = both(dtype=torch.float32)
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    for block in joined.model.layers:
        block.compile(backend=counter, fullgraph=True, dynamic=False)
    for _ in range(3):
        backward(joined)
    assert counter.frame_count == 1


def test_layers_that_are_not_trained_whole_stay_apart() -> None:
    frozen = made()
    frozen.model.layers[0].mlp.up_proj.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    frozen.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    assert join_products(frozen, "cublas") == 2
    adapted = made(dtype=torch.float32)
    add_adapters(adapted, Adapters(AdapterConfig(rank=4), 0, base=ModelConfig(path="base"), digest=""))
    assert join_products(adapted, "cublas") == 0


@pytest.mark.parametrize(
    ("named", "partial", "dtype", "found"),
    [
        ("quack", False, torch.float32, "quack needs a GPU and bf16 weights"),
        ("cublas", True, torch.bfloat16, "cublas needs whole weights in every process"),
        ("cublas", False, torch.bfloat16, "cublas needs compile.enabled"),
    ],
)
def test_a_recipe_that_names_what_does_not_run_here_is_told_why(
    named: Any, *, partial: bool, dtype: torch.dtype, found: str
) -> None:
    rt: Any = SimpleNamespace(device=torch.device("cuda"), topology=SimpleNamespace(partial=partial))
    with pytest.raises(ConfigError, match=f"compile.products: {found}"):
        chosen_products(CompileConfig(products=named, enabled=False), tiny_llama().to(dtype), rt)
    assert chosen_products(CompileConfig(products="auto"), tiny_llama(), cpu_runtime()) is None


def test_a_share_of_activations_becomes_one_that_keeps_as_many_bytes_or_layers_stay_apart() -> None:
    by_itself, named = (Joining("cublas", is_named, lambda: None) for is_named in (False, True))
    assert by_itself.budget(1.0) == 1.0
    assert by_itself.budget(0.9) == 0.95
    assert by_itself.budget(0.5) is None
    with pytest.raises(ConfigError, match=r"compile.products: cublas needs an activation budget of 0.9 or more"):
        named.budget(0.5)
