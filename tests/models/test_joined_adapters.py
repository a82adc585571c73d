"""Adapters that are computed together give what they give one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sftkit.compile.contract import replays_blocks
from sftkit.config.schema import AdapterConfig, CompileConfig, ModelConfig
from sftkit.data.batches.pack import Layout
from sftkit.models import joined_adapters
from sftkit.models.adapters import Adapters, add_adapters
from sftkit.models.joined_adapters import JoinedAttention, JoinedMlp, join_layers
from sftkit.models.trained import ADAPTERS, factors

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
}


def model_with_adapters(model_type: str = "qwen3", **adapter: Any) -> PreTrainedModel:
    """Return a small model with adapters whose B is not zero."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**SIZES)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    add_adapters(model, Adapters(AdapterConfig(rank=4, **adapter), 0, base=ModelConfig(path="base"), digest=""))
    for name, factor in factors(model).items():
        if "lora_B" in name:
            torch.nn.init.normal_(factor, std=0.1)
    return model


def loss_and_gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.arange(40).reshape(2, 20) % 64
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in factors(model).items() if p.grad is not None}


def assert_equal_to(one_by_one: tuple[torch.Tensor, dict[str, torch.Tensor]], model: PreTrainedModel) -> None:
    loss, gradients = loss_and_gradients(model)
    torch.testing.assert_close(loss, one_by_one[0], rtol=1e-6, atol=0)
    assert gradients.keys() == one_by_one[1].keys()
    for name, gradient in gradients.items():
        assert (gradient - one_by_one[1][name]).norm() <= 1e-5 * one_by_one[1][name].norm(), name


def kinds(model: PreTrainedModel) -> set[type]:
    """Return which joined classes are in the model."""
    return {kind for kind in (JoinedMlp, JoinedAttention) for module in model.modules() if isinstance(module, kind)}


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of the kernels, whose operators compute on a CPU too."""
    monkeypatch.setattr(joined_adapters, "has_kernel", lambda _: True)


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "qwen2", "mistral"])
@pytest.mark.usefixtures("with_kernels")
def test_loss_and_gradients_are_those_of_layers_one_by_one(model_type: str) -> None:
    model = model_with_adapters(model_type)
    expected = loss_and_gradients(model)
    join_layers(model)
    assert kinds(model) == {JoinedMlp, JoinedAttention}
    assert_equal_to(expected, model)


@pytest.mark.usefixtures("with_kernels")
def test_blocks_are_one_graph_that_computes_the_same() -> None:
    torch._dynamo.reset()
    model = model_with_adapters()
    expected = loss_and_gradients(model)
    join_layers(model)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.model.layers:
        block.compile(backend=counter, fullgraph=True)
    model.model.embed_tokens.register_forward_hook(lambda _, __, output: output.requires_grad_(torch.is_grad_enabled()))
    assert_equal_to(expected, model)
    assert_equal_to(expected, model)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("with_kernels")
def test_without_gradients_the_bits_are_those_of_layers_one_by_one() -> None:
    model = model_with_adapters()
    ids = torch.arange(40).reshape(2, 20) % 64
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        join_layers(model)
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_other_mlps_and_other_adapters_stay_as_they_are() -> None:
    for model, joined in (
        (model_with_adapters("gemma2"), {JoinedAttention}),  # another activation function
        (model_with_adapters(dropout=0.5), set()),
        (model_with_adapters(targets=("q_proj", "up_proj")), set()),
        (model_with_adapters(targets=("mlp",)), {JoinedMlp}),
        (model_with_adapters(method="dora"), set()),
    ):
        join_layers(model)
        assert kinds(model) == joined


def test_the_kernels_are_for_ranks_that_fit_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for largest, joined in ((4, {JoinedMlp, JoinedAttention}), (3, {JoinedAttention})):
        monkeypatch.setattr(joined_adapters, "LARGEST_RANK", largest)
        model = model_with_adapters()
        join_layers(model)
        assert kinds(model) == joined


@pytest.mark.parametrize(
    ("change", "replays"),
    [
        ({}, True),
        ({"compile": CompileConfig(mode="default")}, False),
        ({"compile": CompileConfig(options={"shape_padding": True})}, False),
        ({"adapter": {"dropout": 0.1}}, False),
        ({"adapter": None}, False),
        ({"adapter": {"base": "nf4"}}, False),
        ({"adapter": {"method": "dora"}}, False),
        ({"compile": CompileConfig(scope="model")}, False),
        ({"row_length": 1 << 40}, False),  # so long a block that the host is ahead
        ({"kind": "dynamic"}, False),
        ({"world_size": 2}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_short_blocks_with_adapters_are_replayed_where_nothing_speaks_against_it(
    change: dict[str, Any], replays: bool
) -> None:
    made = {"adapter": {}, "compile": CompileConfig(), "row_length": 1024, "kind": "packed", "world_size": 1}
    made |= {"device": "cuda", **change}
    model = model_with_adapters(**made["adapter"] or {})
    if made["adapter"] is None:
        delattr(model, ADAPTERS)
    length = made["row_length"]
    layout = Layout(made["kind"], (length,), 1, 1, 1, length, length)
    rt: Any = SimpleNamespace(device=torch.device(made["device"]), world_size=made["world_size"])
    assert replays_blocks(made["compile"], model, layout, rt) == replays
