"""The auxiliary loss of routers: transformers' own of a row, and when it is asked for."""

from __future__ import annotations

import pytest
import torch
from helpers import make_batch, make_examples
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sftkit.config.schema import LossConfig
from sftkit.errors import ConfigError
from sftkit.models.routing import coefficient, routing_of
from sftkit.objectives.objective import ModelWithLoss, NextToken

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "mlp_only_layers": [1]},
    "olmoe": EXPERTS,
    "flex_olmo": EXPERTS,
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 8},
}
ROUTERS = ("gate.weight", "router.weight", "router.bias")
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def made(model_type: str, **fields) -> PreTrainedModel:
    """In fp64, some experts chosen more often than others."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **fields})).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(ROUTERS):
                p.normal_(std=0.5)
    return model.train()


def routed(model: PreTrainedModel, override: float | None = None) -> ModelWithLoss:
    return ModelWithLoss(model, "reference", NextToken(LossConfig()), routing_of(model, override))


@pytest.mark.parametrize("model_type", KINDS)
def test_loss_and_gradients_are_those_of_transformers_for_a_row(model_type: str) -> None:
    model = made(model_type, **KINDS[model_type])
    model.router_aux_loss_coef = 0.7
    batch = make_batch(make_examples([32], target_share=0.5), ((0,),), 32)
    given = {"input_ids": batch.inputs["input_ids"], "labels": batch.targets, "shift_labels": batch.targets}
    plain = model(**given, output_router_logits=True, use_cache=False)
    plain.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    sums = routed(model, 0.7)(batch)
    (sums.loss / batch.num_targets).backward()
    assert sums.measured["aux_loss"].item() / batch.num_targets == pytest.approx(plain.aux_loss.item(), abs=1e-6)
    assert sums.loss.item() / batch.num_targets == pytest.approx(plain.loss.item(), rel=4e-7)  # of fp32
    assert plain.aux_loss.item() > 2.05, "no even shares"
    for name, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-5, atol=1e-6)
    assert any(name.endswith(ROUTERS) and gradient.abs().max() > 1e-3 for name, gradient in gradients.items())


def test_each_row_counts_as_much_as_its_targets_and_padding_not_at_all() -> None:
    model = made("qwen3_moe", **KINDS["qwen3_moe"])
    examples = make_examples([20, 7, 30])
    together = routed(model)(make_batch(examples, ((0, 1), (2,), ()), 32))
    alone = [routed(model)(make_batch(examples, (row,), length)) for row, length in (((0, 1), 27), ((2,), 30))]
    total = sum(sums.measured["aux_loss"].item() for sums in alone)
    assert together.measured["aux_loss"].item() == pytest.approx(total, rel=1e-6)


def test_the_load_of_each_expert_is_counted_without_padding_and_only_in_training() -> None:
    model = made("deepseek_v3", **DEEPSEEK)
    ours = routed(model)
    batch = make_batch(make_examples([20, 7]), ((0,), (1,)), 32)
    assert "aux_loss" not in ours(batch).measured
    model.eval()
    ours(batch)
    assert ours.routing is not None
    load = ours.routing.take_load()
    assert load is not None
    assert load.shape == (2, 4)  # the first layer is dense
    assert load.sum(1).tolist() == [27 * 2, 27 * 2]
    assert ours.routing.take_load() is None


def test_evaluation_has_no_auxiliary_loss() -> None:
    model = made("qwen3_moe", **KINDS["qwen3_moe"]).eval()
    sums = routed(model, 0.7)(make_batch(make_examples([20]), ((0,),), 32))
    assert sums.loss.item() == sums.measured["nll"].item()
    assert sums.measured["aux_loss"].item() == 0.0


@pytest.mark.parametrize(
    ("fields", "given", "weight"),
    [
        ({}, None, 0.0),  # as the models are published: transformers adds none
        ({"output_router_logits": True}, None, 0.02),
        ({"output_router_logits": True}, 0.0, 0.0),
        ({}, 0.3, 0.3),
    ],
)
def test_the_weight_is_the_recipes_else_what_the_config_adds(fields: dict, given: float | None, weight: float) -> None:
    config = AutoConfig.for_model("qwen3_moe", **{**SIZES, **EXPERTS, "router_aux_loss_coef": 0.02}, **fields)
    assert coefficient(config, given) == weight


def test_a_weight_for_a_model_without_such_a_loss_is_refused() -> None:
    for model_type in ("llama", "deepseek_v3"):
        config = AutoConfig.for_model(model_type)
        assert coefficient(config, None) == coefficient(config, 0.0) == 0.0
        with pytest.raises(ConfigError, match=f"{model_type} has no auxiliary loss"):
            coefficient(config, 0.1)
