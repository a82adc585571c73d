"""The model families that users train: each compiles into one graph per distinct block, with the eager loss and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import VOCAB_SIZE, make_batch, make_examples, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sftkit.compile.contract import compile_model, compiler_switches, small_modules
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import CompileConfig, LossConfig
from sftkit.data.batches.collate import Batch
from sftkit.models.structure import inference
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.verify.documents import check_documents

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
RECURRENT = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 8,
}
SHARED = {"num_experts": 4, "shared_expert_intermediate_size": 16, **MOE}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
LLAMA4 = {
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
    "head_dim": 8,
    "attention_chunk_size": 7,
    "floor_scale": 5,
    "no_rope_layers": [1, 0, 1, 0],
    "moe_layers": [2, 3],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 12,
    "llama_4_scaling_beta": 0.1,
}
SCAN = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
FALCON = {
    "mamba_d_ssm": 64,
    "ssm_multipliers": [0.5, 0.7, 1.3, 0.9, 1.1],
    "mlp_multipliers": [0.9, 1.2],
    "lm_head_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
}
GRANITE = {"logits_scaling": 6.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "head_dim": 8,
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 32,
}
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (1, {}),
    "mistral": (1, {"sliding_window": 16}),
    "qwen2": (1, {}),
    "qwen3": (1, {"head_dim": 8}),
    "qwen3_moe": (1, {"head_dim": 8, "num_experts": 4, **MOE}),
    "gemma2": (2, {"head_dim": 8, "sliding_window": 16}),
    "gemma3_text": (2, {"head_dim": 8, "sliding_window": 16, "sliding_window_pattern": 2}),
    "phi": (1, {"num_key_value_heads": 4}),
    "phi3": (1, {}),
    "smollm3": (2, {"no_rope_layer_interval": 2}),
    "gpt2": (1, GPT2),
    "cohere": (1, {"logit_scale": 0.3}),
    "cohere2": (2, {"logit_scale": 0.3, "sliding_window": 16, "sliding_window_pattern": 2}),
    "granite": (1, {"logits_scaling": 6.0, "embedding_multiplier": 3.0}),
    "hyperclovax": (1, {"logits_scaling": 0.3}),
    "llama4_text": (4, LLAMA4),
    "ministral3": (1, {"head_dim": 8, "rope_parameters": YARN}),
    "olmo": (1, {}),
    "olmo2": (1, {}),
    "olmo3": (2, {"sliding_window": 16}),
    "deepseek_v3": (
        2,
        {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
        | {"num_key_value_heads": 4, **MOE, **LATENT},
    ),
    "gpt_oss": (2, {"head_dim": 8, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite_swa": (2, {"sliding_window": 16}),
    "granitemoe_swa": (2, {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mimo_v2_flash": (
        2,
        {"head_dim": 8, "swa_head_dim": 8, "sliding_window": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | MOE,
    ),
    "lfm2": (2, {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": (
        3,
        {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 4, **MOE},
    ),
    "falcon_h1": (1, {"head_dim": 8, **SCAN, **FALCON}),
    "nemotron_h": (4, {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], **NEMOTRON, **MOE}),
    "granitemoehybrid": (
        2,
        {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32, **SCAN, **GRANITE},
    ),
    "bamba": (2, {"attn_layer_indices": [1], **SCAN}),
    "qwen3_next": (2, {**RECURRENT, **SHARED}),
    "qwen3_5_text": (2, RECURRENT),
    "qwen3_5_moe_text": (2, {**RECURRENT, **SHARED}),
    "olmo_hybrid": (2, RECURRENT),
}
"By model_type: the number of distinct blocks, and the fields of a small config."
QUICK = ("qwen3_moe", "gemma3_text", "gpt2", "granite", "qwen3_5_text", "lfm2", "falcon_h1")
"""One with experts, one whose blocks are of two kinds, one with neither rotary factors nor RMS norms, one with scaled
logits, and one of each kind of recurrent layers."""


def build(model_type: str, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **FAMILIES[model_type][1], **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    return model.train()


def batches() -> list[Batch]:
    examples = make_examples([9, 14, 1, 6, 20, 3, 11, 30, 5], target_share=1.0)
    return [make_batch(examples, rows, 32) for rows in (((0, 1, 2, 3), (4,)), ((5, 6), (8, 2)), ((7,), ()))]


def losses_and_gradients(model: ModelWithLoss) -> list[tuple[torch.Tensor, torch.Tensor]]:
    results = []
    for batch in batches():
        model.zero_grad()
        loss = model(batch).loss
        loss.backward()
        results.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    return results


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES]
)
def test_each_family_compiles_into_one_graph_per_distinct_block_and_computes_the_same(model_type: str) -> None:
    torch._dynamo.reset()
    model = ModelWithLoss(build(model_type), "reference", NextToken(LossConfig()))
    check_documents(model, "reference", torch.device("cpu"))
    eager = losses_and_gradients(model)
    config = CompileConfig(backend="aot_eager", fullgraph=True)
    modules = compile_model(model.orig_model, config)
    assert modules == COMMON["num_hidden_layers"] + len(small_modules(model.orig_model))
    with compiler_switches(config, graphs=modules):
        watch = CompileWatch()
        compiled = losses_and_gradients(model)
        counts = watch.counts()
    assert counts["compile/graphs"] == FAMILIES[model_type][0] + len(small_modules(model.orig_model))
    assert counts["compile/graph_breaks"] == 0
    for (loss, gradient), (wanted, exact) in zip(compiled, eager, strict=True):
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-5)
        assert float((gradient - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(  # FlexAttention with a cap of its scores has taken the CUDA context down
    "model_type", [pytest.param(name, marks=[pytest.mark.own_process] * (name == "gemma2")) for name in FAMILIES]
)
def test_on_a_gpu_each_family_trains_compiled_in_bf16(model_type: str) -> None:
    """With FlashAttention-2; Gemma 2, which caps its scores, with FlexAttention, which wants heads of 16 or more."""
    torch._dynamo.reset()
    backend, fields = ("flex", {"head_dim": 16}) if model_type == "gemma2" else ("varlen", {})
    orig_model = build(model_type, **fields)
    if orig_model._can_set_experts_implementation():
        orig_model.set_experts_implementation("grouped_mm")
    for parameter in orig_model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model = ModelWithLoss(orig_model.cuda(), backend, NextToken(LossConfig()))
    check_documents(model, "varlen" if backend == "varlen" else "reference", torch.device("cuda"))
    config = CompileConfig(fullgraph=True)
    modules = compile_model(orig_model, config)
    with compiler_switches(config, graphs=modules):
        for batch in batches():
            batch = batch.to(torch.device("cuda"))
            got = model(batch)
            got.loss.backward()
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                wanted = model(batch, "reference")
            torch.testing.assert_close(got.measured["nll"], wanted.measured["nll"], rtol=2e-2, atol=0.5)


def test_inference_computes_without_gradients_and_puts_training_mode_back() -> None:
    orig_model = tiny_llama().train()
    with inference(orig_model):
        assert not orig_model.training
        assert not orig_model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.requires_grad
    assert orig_model.training
    assert torch.is_grad_enabled()
    with pytest.raises(AttributeError), inference(orig_model):
        orig_model.none_such()
    assert orig_model.training
