"""FLOPs of hybrids and of mixtures of experts, as counted for train/flops, against what torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_models import COMMON, FAMILIES
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_next import modeling_qwen3_next

from sftkit.config.schema import AdapterConfig, LossConfig, ModelConfig
from sftkit.models import hybrids, structure
from sftkit.models.adapters import Adapters, add_adapters
from sftkit.models.trained import freeze
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.verify import counts
from sftkit.verify.counts import flops_check


def checked(orig_model: Any) -> Any:
    return flops_check(ModelWithLoss(orig_model, "reference", NextToken(LossConfig())))


def family(model_type: str) -> Any:
    config = AutoConfig.for_model(model_type, **COMMON | FAMILIES[model_type][1])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def of_real_sizes(model_type: str, layers: int) -> Any:
    """As transformers' config has them, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, num_hidden_layers=layers))


RECURRENT = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "falcon_h1": "FalconH1Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "bamba": "BambaMixer",
    "nemotron_h": "NemotronHMamba2Mixer",
}
EXPERTS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe_swa", "mimo_v2_flash", "lfm2_moe", "qwen3_next")


@pytest.mark.parametrize("model_type", RECURRENT)
def test_flops_of_recurrent_layers_are_those_of_their_definition_and_none_or_more_are_found(
    model_type: str, monkeypatch
) -> None:
    orig_model = family(model_type)
    check = checked(orig_model)
    assert check.ok is True, check
    mixer = hybrids.MIXERS[RECURRENT[model_type]]
    for share in (0, 2):
        wrong = mixer._replace(products=lambda layer, share=share: share * mixer.products(layer))  # type: ignore[misc]
        monkeypatch.setitem(hybrids.MIXERS, RECURRENT[model_type], wrong)
        assert checked(orig_model).ok is False


def test_the_flops_of_short_convolutions_are_counted() -> None:
    assert checked(family("lfm2")).ok is True


@pytest.mark.parametrize("model_type", EXPERTS)
def test_flops_of_experts_are_those_of_the_ones_that_a_token_visits_and_those_of_all_are_found(
    model_type: str, monkeypatch
) -> None:
    orig_model = family(model_type)
    check = checked(orig_model)
    assert check.ok is True, check
    monkeypatch.setattr(structure, "num_experts", lambda _: 0)
    assert checked(orig_model).ok is False


def test_at_real_sizes_a_recurrence_of_one_percent_is_found(monkeypatch) -> None:
    orig_model = of_real_sizes("qwen3_5_text", layers=4)
    assert checked(orig_model).ok is True
    name = RECURRENT["qwen3_5_text"]
    monkeypatch.setitem(hybrids.MIXERS, name, hybrids.MIXERS[name]._replace(products=lambda _: 0))
    check = checked(orig_model)
    ours, torchs = (float(check.found.split()[i]) for i in (0, 2))
    assert ours / torchs == pytest.approx(1, abs=0.012)
    assert check.ok is False


def test_the_definition_of_the_gated_delta_rule_computes_what_transformers_does() -> None:
    """So that its products are those of the model, and not of another rule."""
    query, key, value = (torch.randn(2, 70, 3, size) for size in (8, 8, 5))
    decay, beta = -torch.rand(2, 70, 3), torch.rand(2, 70, 3)
    expected, _ = modeling_qwen3_next.torch_chunk_gated_delta_rule(
        query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True
    )
    found, _ = counts.delta_rule(query, key, value, g=decay, beta=beta)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_the_definition_of_mamba2_computes_what_transformers_does() -> None:
    x, steps, decay = torch.randn(2, 21, 4, 5), torch.randn(2, 21, 4), -torch.rand(4)
    B, C = torch.randn(2, 21, 2, 8), torch.randn(2, 21, 2, 8)
    given = {"D": torch.randn(4), "dt_bias": torch.randn(4), "dt_limit": (0.01, 2.0)}
    more = {"chunk_size": 8, "z": None, "dt_softplus": True, "initial_states": None, "return_final_states": False}
    expected = modeling_bamba.mamba2_chunk_scan(x, steps, decay, B, C, **given, **more)
    found = counts.scan(x, steps, decay, B, C, **given, **more)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_positions_counted_alone_have_the_products_of_positions_one_after_another() -> None:
    """A start counts them alone, since one after another takes seconds."""
    query, key, value = (torch.randn(2, 7, 3, size, device="meta") for size in (8, 8, 5))
    given = {"g": torch.randn(2, 7, 3, device="meta"), "beta": torch.randn(2, 7, 3, device="meta")}
    in_order, alone = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with in_order:
        expected, _ = counts.delta_rule(query, key, value, **given)
    with alone:
        found, _ = counts.apart(counts.delta_rule, query, key, value, **given)
    assert found.shape == expected.shape
    assert alone.get_total_flops() == in_order.get_total_flops() == 3 * 2 * (2 * 7 * 3) * 8 * 5


def test_the_definition_of_a_convolution_computes_what_torch_does() -> None:
    x, weight = torch.randn(2, 6, 11), torch.randn(6, 4)
    expected = torch.nn.functional.conv1d(x, weight[:, None], padding=3, groups=6)[..., :11]
    torch.testing.assert_close(counts.convolution(x, weight), expected)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "lfm2", "nemotron_h", "bamba", "falcon_h1"])
@pytest.mark.parametrize("frozen", [("*embed*",), ("*embed*", "*.layers.0.*", "*.layers.1.*")], ids=["table", "half"])
def test_flops_of_frozen_layers_are_left_out_by_what_those_layers_compute(
    model_type: str, frozen: tuple[str, ...]
) -> None:
    """A frozen layer without attention spares no pairs, and one with it no products with a state."""
    orig_model = family(model_type)
    freeze(orig_model, frozen)
    check = checked(orig_model)
    assert check.ok is True, check


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5_text", "falcon_h1"])
def test_flops_with_adapters_are_those_that_torch_counts(model_type: str) -> None:
    orig_model = family(model_type)
    add_adapters(orig_model, Adapters(AdapterConfig(rank=8), 0, ModelConfig(path="x"), ""))
    check = checked(orig_model)
    assert check.ok is True, check


def test_what_is_not_counted_is_named() -> None:
    assert checked(family("llama4_text")).found == "not counted for experts in Llama4TextExperts"
    orig_model = family("qwen3_moe")
    add_adapters(orig_model, Adapters(AdapterConfig(rank=4), 0, ModelConfig(path="x"), ""))
    assert checked(orig_model).found == "not counted for adapters of experts whose rank is no multiple of 8"
