"""The loss and its gradients: documents apart, accumulation exact, layouts equal."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers import (
    VOCAB_SIZE,
    cpu_runtime,
    make_batch,
    make_examples,
    make_layout_of,
    tiny_llama,
    tiny_qwen3_with_windows,
    tiny_recipe,
    token_nll,
)
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from sftkit.config.schema import CompileConfig, LossConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.data.batches.collate import Batch
from sftkit.data.batches.loader import Batches, StepBatches, StepDataset
from sftkit.engine.engine import Training
from sftkit.engine.step import TrainStep, forward_backward
from sftkit.errors import ConfigError
from sftkit.models.experts import compute_experts_here
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops import attention
from sftkit.ops.attention import dense_mask, plain_attention
from sftkit.ops.flex import document_ends
from sftkit.optim.protocol import build_optimizer
from sftkit.runtime import start as runtime
from sftkit.train.assemble import make_engine
from sftkit.verify import documents
from sftkit.verify.documents import check_documents, document_checks
from sftkit.verify.gradients import limits
from sftkit.verify.proof import verified_warm_up

MODELS = {"llama": tiny_llama, "qwen3 with sliding windows": tiny_qwen3_with_windows}


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS.keys())
def test_packed_losses_equal_those_of_each_document_alone_in_plain_transformers(make_model) -> None:
    model = make_model().eval()
    examples = make_examples([9, 14, 1, 6], target_share=1.0)
    batch = make_batch(examples, ((0, 1, 2, 3),), row_length=32)
    with torch.no_grad():
        packed = token_nll(model, batch)
        start = 0
        for i in range(4):
            ids = torch.tensor(examples[i].ids[None].copy(), dtype=torch.int64)
            with plain_attention(model):
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            alone = F.cross_entropy(logits[0], ids[0, 1:], reduction="none")
            torch.testing.assert_close(packed[0, start : start + len(alone)], alone, atol=5e-6, rtol=1e-5)
            start += len(alone)
        sums = ModelWithLoss(model, "reference", NextToken(LossConfig()))(batch)
    torch.testing.assert_close(sums.measured["nll"], packed.sum(), rtol=1e-6, atol=1e-4)


def test_perturbing_one_document_leaves_the_losses_of_the_others_unchanged() -> None:
    model = tiny_llama().eval()
    batch = make_batch(make_examples([9, 14, 6], target_share=1.0), ((0, 1, 2),), row_length=32)
    changed = batch.inputs["input_ids"].clone()
    changed[0, 9:23] = (changed[0, 9:23] + 7) % VOCAB_SIZE
    with torch.no_grad():
        before = token_nll(model, batch)
        after = token_nll(model, replace(batch, inputs={**batch.inputs, "input_ids": changed}))
    others = torch.ones(32, dtype=torch.bool)
    others[9:23] = False
    assert torch.equal(before[0, others], after[0, others])
    assert not torch.equal(before[0, 9:23], after[0, 9:23])


def test_padding_changes_no_loss() -> None:
    model = tiny_llama().eval()
    examples = make_examples([9, 14])
    with torch.no_grad():
        sums = [
            ModelWithLoss(model, "reference", NextToken(LossConfig()))(make_batch(examples, rows, 32)).measured["nll"]
            for rows in (((0, 1),), ((0, 1), (), ()))
        ]
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-6, atol=1e-5)
    assert torch.isfinite(sums[1])


def test_document_mask_is_causal_isolated_and_never_empty() -> None:
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    mask = dense_mask(document_ends(torch.tensor([0, 3, 5, 7, 7], dtype=torch.int32), 1, 7))[0, 0]
    assert mask.tolist() == [[j <= i and doc_ids[0, i] == doc_ids[0, j] for j in range(7)] for i in range(7)]
    assert mask.any(-1).all()


def step_of(micro_batch_size: int, layout_kind: str = "packed") -> tuple[dict[str, torch.Tensor], float, float]:
    """(weights, loss sum, gradient norm) after one step on 8 rows with unequal target counts."""
    rt = cpu_runtime()
    examples = make_examples([30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20], target_share=0.3)
    layout = make_layout_of(layout_kind, examples.lengths, micro=micro_batch_size)
    model = ModelWithLoss(tiny_llama(), "reference", NextToken(LossConfig()))
    optimizer = build_optimizer(model.orig_model, OptimConfig(name="adamw", lr=1e-2, eps=1e-4))
    (step,) = Batches(StepDataset(examples, layout), seed=0).steps(0, 1)
    sums, grad_norm, *_ = TrainStep(model, optimizer, model.objective, rt, max_grad_norm=1.0).step(step, 1e-2)
    return model.state_dict(), float(sums["nll"]), float(grad_norm)


def test_accumulation_of_8_micro_batches_of_1_equals_1_of_8() -> None:
    one, eight = step_of(micro_batch_size=8), step_of(micro_batch_size=1)
    assert one[1] == pytest.approx(eight[1], rel=1e-6)
    assert one[2] == pytest.approx(eight[2], rel=1e-5)
    for name, value in one[0].items():
        torch.testing.assert_close(value, eight[0][name], rtol=1e-4, atol=2e-6)


def test_the_gradient_is_that_of_the_mean_over_all_target_tokens() -> None:
    rt = cpu_runtime()
    examples = make_examples([30, 4, 25, 8], target_share=0.3)
    model = ModelWithLoss(tiny_llama(), "reference", NextToken(LossConfig()))
    parts = [make_batch(examples, rows, 32) for rows in (((0,),), ((1, 2),), ((3,),))]
    total = sum(part.num_targets for part in parts)
    for part in parts:
        forward_backward(model, part, total, rt)
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    nll = [token_nll(model.orig_model, make_batch(examples, ((i,),), 32)) for i in range(4)]
    (torch.stack([n.sum() for n in nll]).sum() / total).backward()
    for gradient, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-7)


def test_the_same_documents_give_the_same_loss_in_every_layout() -> None:
    examples = make_examples([30, 4, 25, 8, 16, 1], target_share=0.5)
    orig_model = tiny_llama()
    sums = {}
    for kind in ("packed", "bucketed", "fixed", "dynamic"):
        batches = Batches(StepDataset(examples, make_layout_of(kind, examples.lengths, batch=2)), seed=0)
        micro = [b for step in batches.steps(0, batches.num_steps(1)) for b in step.micro_batches]
        for backend in ("reference", "sdpa") if kind != "packed" else ("reference",):
            model = ModelWithLoss(orig_model, backend, NextToken(LossConfig()))
            with torch.no_grad():
                sums[kind, backend] = sum(float(model(b).measured["nll"]) for b in micro)
    for value in sums.values():
        assert value == pytest.approx(sums["packed", "reference"], rel=1e-6)


def test_a_step_without_any_target_changes_nothing_and_is_finite() -> None:
    rt = cpu_runtime()
    model = ModelWithLoss(tiny_llama(), "reference", NextToken(LossConfig()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    empty = make_batch(make_examples([4]), ((), ()), 16)
    step = StepBatches(0, [empty], num_targets=0, divisor=0, num_tokens=0, num_positions=32)
    optimizer = build_optimizer(model.orig_model, OptimConfig(name="adamw"))
    sums, grad_norm, *_ = TrainStep(model, optimizer, model.objective, rt, max_grad_norm=1.0).step(step, 1e-3)
    assert sums.vector.tolist() == [0.0] * 4
    assert float(grad_norm) == 0.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_accelerates_own_loss_division_stays_off(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    weight = torch.nn.Parameter(torch.ones(()))
    rt.accelerator.backward(8.0 * weight)
    assert float(weight.grad) == 8.0


def test_gradient_checkpointing_changes_no_gradient(tmp_path, tokenizer) -> None:
    from sftkit.models.load import load_model

    fields = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    gradients = []
    for checkpointing in (False, True):
        orig_model = load_model(ModelConfig(scratch={**fields, **heads}), tokenizer, seed=0)
        if checkpointing:  # as train.memory does in a run that compiles nothing
            orig_model.gradient_checkpointing_enable({"use_reentrant": False})
        model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig())).train()
        batch = make_batch(make_examples([9, 14]), ((0, 1),), 32)
        forward_backward(model, batch, batch.num_targets, cpu_runtime())
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_bf16_gradients_of_many_micro_batches_are_summed_in_fp32() -> None:
    """With the naive sum in bf16 the error grows with their number; in fp32 it stays that of a rounding or two."""
    examples = make_examples([31] * 64, target_share=0.5)
    whole, parts = (
        Batches(StepDataset(examples, make_layout_of("packed", examples.lengths, batch=64, micro=m)), seed=0)
        for m in (64, 1)
    )
    gradients = {}
    for name, batches, dtype in (("exact", whole, torch.float32), ("summed", parts, torch.bfloat16)):
        model = ModelWithLoss(tiny_llama().to(dtype), "reference", NextToken(LossConfig()))
        optimizer = GradientsOnly(model.parameters())
        (step,) = batches.steps(0, 1)
        TrainStep(model, optimizer, model.objective, cpu_runtime(), max_grad_norm=None).step(step, 0.0)
        gradients[name] = optimizer.seen
    naive = [torch.zeros_like(g, dtype=torch.bfloat16) for g in gradients["exact"]]
    model = ModelWithLoss(tiny_llama().to(torch.bfloat16), "reference", NextToken(LossConfig()))
    (step,) = parts.steps(0, 1)
    for batch in step.micro_batches:
        model.zero_grad()
        forward_backward(model, batch, step.num_targets, cpu_runtime())
        naive = [total + p.grad for total, p in zip(naive, model.parameters(), strict=True)]

    def error(got: list[torch.Tensor]) -> float:
        pairs = list(zip(got, gradients["exact"], strict=True))
        return sum(float((a.float() - b).norm() ** 2) for a, b in pairs) / sum(float(b.norm() ** 2) for _, b in pairs)

    assert error(gradients["summed"]) < 0.7 * error(naive)


class GradientsOnly(torch.optim.SGD):
    """Keeps the gradients that a step would use."""

    def update(self, learning_rate: float, coefficient: torch.Tensor) -> None:
        assert float(coefficient) == 1.0
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]


COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("phimoe", {"sliding_window": 10, "num_local_experts": 4}, " with sliding_window=10: .* in its mask alone"),
        ("doge", {}, ": its layers add numbers of their own to the scores"),
        ("git", {}, ": the layer .* not take its attention from transformers' registry"),
        ("xlstm", {"embedding_dim": 32, "num_heads": 4}, ": the logits of .* differ by"),
        # Mixes tokens outside attention.
        (
            "jamba",
            {"num_experts": 2, "use_mamba_kernels": False, "attn_layer_offset": 1, "attn_layer_period": 2},
            ": the layer .* carries tokens",
        ),
    ],
)
def test_a_model_that_our_forward_pass_does_not_reproduce_is_rejected_for_what_it_does(
    model_type: str, fields: dict[str, object], reason: str
) -> None:
    torch.manual_seed(0)
    orig_model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**COMMON, **fields}))
    with pytest.raises(ConfigError, match=f"is not supported{reason}"):
        check_documents(ModelWithLoss(orig_model, "reference", NextToken(LossConfig())), "reference", orig_model.device)


def test_a_window_in_the_mask_alone_costs_nothing_where_no_document_reaches_it() -> None:
    """As the error says: without the window, documents up to its length have the same logits."""
    fields = {**COMMON, "num_local_experts": 4, "attn_implementation": "eager"}
    logits = []
    for window in (16, None):
        torch.manual_seed(0)
        config = AutoConfig.for_model("phimoe", **fields, sliding_window=window)
        orig_model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            logits.append(orig_model(torch.arange(3, 19)[None]).logits)
    assert torch.equal(*logits)
    check_documents(ModelWithLoss(orig_model, "reference", NextToken(LossConfig())), "reference", orig_model.device)


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_logits_of_a_deep_model_may_differ_by_as_much_as_rounding_alone_moves_them(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "REFUSED_FROM", 1e-3)  # a few blocks in bf16 differ by more
    torch.manual_seed(0)
    fields = {**COMMON, "num_hidden_layers": 8, "initializer_range": 0.2}
    orig_model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields)).to(torch.bfloat16)
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *a, scaling, **n: attend(*a, scaling=scaling * scale, **n))
    model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig()))
    state = torch.get_rng_state()
    if scale != 1.0:
        with pytest.raises(ConfigError, match=r"differ by .* \(rounding alone moves them by \d"):
            check_documents(model, "reference", torch.device("cpu"))
        return
    found = check_documents(model, "reference", torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert 1e-3 < found.logits_difference < 3 * found.roundings
    row = document_checks(found, torch.bfloat16, "reference", logits_limit=1e-3)[0]
    assert row.ok
    assert "rounding noise alone" in row.found


def test_noise_around_a_limit_is_measured_on_documents_as_long_as_those_that_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(documents, "REFUSED_FROM", 1e-3)
    lengths, measure = [], documents._roundings
    monkeypatch.setattr(documents, "_roundings", lambda p, e: (lengths.append(e.lengths.tolist()), measure(p, e))[1])
    torch.manual_seed(0)
    fields = {**COMMON, "num_hidden_layers": 8, "initializer_range": 0.2, "sliding_window": 40}
    orig_model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mistral", **fields)).to(torch.bfloat16)
    model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig()))
    layout = make_layout_of("packed", [60, 10], row_length=80)
    found = check_documents(model, "reference", torch.device("cpu"), layout)
    assert lengths == [[48, 5], [8, 5]]
    assert 1e-3 < found.beyond < 3 * found.beyond_roundings
    row = document_checks(found, torch.bfloat16, "reference", logits_limit=1e-3)[0]
    assert row.ok
    assert row.found.count("rounding noise alone") == 2
    worse = replace(found, beyond=1.5 * found.allowed_beyond)
    assert not document_checks(worse, torch.bfloat16, "reference", logits_limit=1e-3)[0].ok


class Float8Linear(torch.nn.Linear):
    """Scales its input by the largest value of all positions, as tensorwise float8 does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 448 / x.abs().max()
        return super().forward((x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale)


def test_documents_are_compared_without_the_scales_of_float8_which_couple_them() -> None:
    orig_model = tiny_llama().train()
    layers = [block.mlp.down_proj for block in orig_model.model.layers]
    for layer in layers:
        layer.__class__ = Float8Linear
    model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig()))
    found = check_documents(model, "reference", torch.device("cpu"), make_layout_of("packed", [60, 10], row_length=80))
    assert found.leak == 0.0 < found.changed
    assert found.logits_difference < 1e-5
    assert not any("forward" in vars(layer) for layer in layers)


def with_many_experts() -> ModelWithLoss:
    """Return a model in bf16 whose routers' scores are so close that roundings change which experts are chosen."""
    torch.manual_seed(0)
    fields = {"hidden_size": 64, "num_hidden_layers": 12, "num_local_experts": 32, "num_experts_per_tok": 4}
    config = AutoConfig.for_model("gpt_oss", **{**COMMON, **fields, "head_dim": 16, "initializer_range": 0.15})
    orig_model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    return ModelWithLoss(orig_model, "reference", NextToken(LossConfig()))


def test_logits_are_compared_with_the_experts_that_the_plain_model_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_many_experts()
    limit = limits(torch.bfloat16, 12).logits
    found = check_documents(model, "reference", torch.device("cpu"), limit=limit)
    assert 0 < found.other_experts <= found.allowed_experts
    assert limit < found.logits_difference < 3 * found.roundings
    row = document_checks(found, torch.bfloat16, "reference", logits_limit=limit)[0]
    assert row.ok
    assert "of the experts chosen otherwise" in row.found
    assert not any(module._forward_pre_hooks for module in model.orig_model.modules())
    monkeypatch.setattr(documents, "_taking", lambda *_: nullcontext())
    with pytest.raises(ConfigError, match="the logits of its own forward pass and sftkit's differ by"):
        check_documents(model, "reference", torch.device("cpu"))


def test_our_function_of_the_experts_of_llama_4_computes_those_that_the_router_chose() -> None:
    torch.manual_seed(0)
    experts = {"num_local_experts": 32, "num_experts_per_tok": 4, "interleave_moe_layer_step": 1}
    fields = {"hidden_size": 64, "num_hidden_layers": 8, "head_dim": 16, "intermediate_size_mlp": 96}
    config = AutoConfig.for_model("llama4_text", **{**COMMON, **fields, **experts, "initializer_range": 0.1})
    orig_model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    compute_experts_here(orig_model)
    model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig()))
    found = check_documents(model, "reference", torch.device("cpu"))
    assert found.logits_difference < 0.05
    assert found.choices is not None


def test_a_router_without_the_bias_of_its_choice_is_rejected_although_the_weights_are_right() -> None:
    torch.manual_seed(0)
    groups = {
        "n_routed_experts": 32,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
    }
    heads = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    fields = {
        **COMMON,
        **groups,
        **heads,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "moe_intermediate_size": 32,
    }
    orig_model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **fields)).to(torch.bfloat16)
    routers = [m for m in orig_model.modules() if hasattr(m, "e_score_correction_bias")]
    assert routers
    for router in routers:
        torch.nn.init.normal_(router.e_score_correction_bias, std=0.02)
    model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig()))
    check_documents(model, "reference", torch.device("cpu"))
    for router in routers:
        zeros = patch.dict(router._buffers, e_score_correction_bias=torch.zeros(32))
        router.forward = zeros(router.forward)
    with pytest.raises(ConfigError, match="its routers chose other experts"):
        check_documents(model, "reference", torch.device("cpu"))


def test_a_router_that_chooses_by_something_else_in_long_documents_alone_is_rejected() -> None:
    model = with_many_experts()
    layout = make_layout_of("packed", [170, 10], row_length=192)
    check_documents(model, "reference", torch.device("cpu"), layout)

    def of_others(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return (given[0].roll(1, -1),) if given[0].numel() > 64 * 100 else None  # longer than the window

    for router in model.orig_model.modules():
        if type(router).__name__ == "GptOssTopKRouter":
            router.register_forward_pre_hook(of_others)
    with pytest.raises(ConfigError, match="its routers chose other experts"):
        check_documents(model, "reference", torch.device("cpu"), layout)


def test_a_router_that_chooses_by_something_else_is_rejected() -> None:
    model = with_many_experts()
    routers = [m for m in model.orig_model.modules() if type(m).__name__ == "GptOssTopKRouter"]
    for router in routers:
        router.register_forward_pre_hook(lambda _, given: (given[0].roll(1, -1),))
    with pytest.raises(ConfigError, match=r"its routers chose other experts .* as rounding alone changes \d"):
        check_documents(model, "reference", torch.device("cpu"))


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS.keys())
def test_verification_leaves_the_model_as_it_was(make_model) -> None:
    model = ModelWithLoss(make_model(), "sdpa", NextToken(LossConfig())).train()
    windows = [getattr(m, "sliding_window", None) for m in model.modules()]
    check_documents(model, "sdpa", torch.device("cpu"))
    assert [getattr(m, "sliding_window", None) for m in model.modules()] == windows
    assert model.orig_model.training


@pytest.mark.gpu
def test_no_step_waits_for_the_gpu() -> None:
    from sftkit.train.loop import on_device

    device = torch.device("cuda")
    examples = make_examples([30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 8, target_share=0.3)
    batches = Batches(StepDataset(examples, make_layout_of("packed", examples.lengths)), seed=0)
    model = ModelWithLoss(tiny_llama().to(device, torch.bfloat16), "varlen", NextToken(LossConfig()))
    optimizer = build_optimizer(model.orig_model, OptimConfig(name="adamw"))
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    steps = on_device(batches.steps(0, 6), device)
    TrainStep(model, optimizer, model.objective, rt, max_grad_norm=1.0).step(next(steps), 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            TrainStep(model, optimizer, model.objective, rt, max_grad_norm=1.0).step(step, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def first_inputs(model: ModelWithLoss, batch: Batch) -> torch.Tensor:
    """What the first block gets, [B, T, H]."""
    seen: list[torch.Tensor] = []
    block = model.orig_model.model.layers[0]
    handle = block.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(batch)
    handle.remove()
    return seen[0]


def noisy_dataset(alpha: float | None, seed: int = 0, micro: int = 4) -> StepDataset:
    examples = make_examples([20, 4, 16, 8, 12, 3, 17, 9], target_share=0.3)
    layout = make_layout_of("packed", examples.lengths, batch=4, micro=micro)
    return StepDataset(examples, layout, noise=None if alpha is None else (seed, alpha))


def test_noise_on_embeddings_is_uniform_by_the_length_of_each_document_and_in_steps_alone() -> None:
    dataset = noisy_dataset(alpha=5.0)
    model = ModelWithLoss(tiny_llama(), "reference", NextToken(LossConfig()))
    (step,) = Batches(dataset, seed=0).steps(0, 1)
    (batch,) = step.micro_batches
    plain = replace(batch, noise=None)
    noise = first_inputs(model, batch) - first_inputs(model, plain)
    seen = 0
    for row, numbers in enumerate(batch.doc_ids):
        for document in numbers[numbers >= 0].unique():
            own = noise[row][numbers == document] * (int((numbers == document).sum()) * 32) ** 0.5 / 5.0
            assert 0.8 < float(own.abs().max()) < 1.0001
            assert float(own.mean()) == pytest.approx(0.0, abs=0.2)
            assert float(own.std()) == pytest.approx(3**-0.5, rel=0.15)
            seen += 1
    assert seen == len(dataset.examples) > len(batch.doc_ids), "several documents of different lengths in a row"
    # Other batches have none: those of evaluations, the warm-up and the checks.
    assert make_batch(dataset.examples, ((0, 1),), 40).noise is None
    assert [each.noise for each in next(iter(Batches(noisy_dataset(None), seed=0).steps(0, 1))).micro_batches] == [None]


def test_noise_is_that_of_seed_step_and_documents_so_a_resumed_run_repeats_it() -> None:
    def drawn(first: int, last: int, **given: int) -> list[list[tuple[int, float] | None]]:
        steps = Batches(noisy_dataset(5.0, **given), seed=0).steps(first, last)
        return [[batch.noise for batch in step.micro_batches] for step in steps]

    whole = drawn(0, 4, micro=2)
    assert drawn(2, 4, micro=2) == whole[2:]
    seeds = [noise[0] for step in whole for noise in step if noise is not None]
    assert len(set(seeds)) == len(seeds) == sum(map(len, whole))
    assert drawn(0, 4, micro=2, seed=1) != whole


def test_noise_needs_no_graph_that_the_warm_up_did_not_build_and_repeats_bit_for_bit(tmp_path: Path) -> None:
    cfg = tiny_recipe(
        tmp_path,
        train=TrainConfig(max_steps=1, global_batch_size=4, micro_batch_size=2, precision="fp32"),
        compile=CompileConfig(backend="aot_eager"),
    )
    found = []
    for alpha in (5.0, 5.0, None):
        dataset, rt = noisy_dataset(alpha, micro=2), cpu_runtime()
        objective = NextToken(LossConfig())
        engine = make_engine(cfg, rt, tmp_path, Training(tiny_llama(), objective, dataset.layout))
        ready = verified_warm_up(engine, rt, lambda _: None)
        assert ready.compiled
        assert all(check.ok is not False for check in ready.checks)
        (step,) = Batches(dataset, seed=0).steps(0, 1)
        with engine.guarded():
            outcome = engine.step(step, 1e-2)
        assert engine.report().metrics["compile/recompiles"] == 0
        engine.close()
        weights = [p.detach().clone() for p in engine.model.orig_model.parameters()]
        found.append((float(outcome.sums["nll"]), weights))
    first, second, plain = found
    assert first[0] == second[0] != plain[0]
    assert all(map(torch.equal, first[1], second[1]))
