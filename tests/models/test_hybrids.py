"""Hybrid models: what of a run depends on their recurrent layers, next to what test_models.py asks of every family."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import make_batch, make_examples, make_layout_of
from test_models import COMMON, FAMILIES, build
from transformers import AutoModelForCausalLM, PreTrainedModel

from sftkit.compile.contract import compile_model, compiler_switches
from sftkit.config.schema import AdapterConfig, CompileConfig, LossConfig, ModelConfig, OptimConfig
from sftkit.config.topology import Topology
from sftkit.engine.reference import documents
from sftkit.errors import ConfigError
from sftkit.generation.decode import Batching, generate
from sftkit.memory.estimate import BUDGETS, EstimateInputs, kept_elements
from sftkit.memory.plan import shape_of
from sftkit.models import hybrids
from sftkit.models.adapters import Adapters, add_adapters
from sftkit.models.structure import Work, attention_windows, count_parameters, decoder_blocks, train_flops
from sftkit.models.trained import factors
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops import recurrent
from sftkit.ops.attention import document_boundaries, plain_attention
from sftkit.optim.protocol import build_optimizer
from sftkit.verify.documents import check_documents

DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
SCANS = ("falcon_h1", "nemotron_h", "granitemoehybrid", "bamba")
CONVOLUTIONS = ("lfm2", "lfm2_moe")


def lively(model_type: str, **fields: Any) -> PreTrainedModel:
    """Larger weights, so that different prompts have different answers."""
    model = build(model_type, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    return model


@pytest.mark.parametrize("model_type", [*DELTA, *SCANS, *CONVOLUTIONS])
def test_documents_in_a_row_have_the_loss_and_gradients_of_plain_transformers_alone(model_type: str) -> None:
    """Over borders of chunks, and with queries and keys that serve several value heads."""
    model = ModelWithLoss(lively(model_type), "reference", NextToken(LossConfig()))
    examples = make_examples([3, 90, 1, 40, 20], target_share=1.0)
    batch = make_batch(examples, (tuple(range(5)),), 160)
    model(batch).loss.backward()
    found = {name: p.grad.clone() for name, p in model.orig_model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for inputs, targets, *_ in documents(batch):
        logits = model.kind.plain_logits(model.orig_model, inputs)
        torch.nn.functional.cross_entropy(logits[0], targets, reduction="sum").backward()
    exact = {name: p.grad for name, p in model.orig_model.named_parameters() if p.grad is not None}
    typical = torch.stack([gradient.norm() for gradient in exact.values()]).median()
    for name, gradient in exact.items():
        # A gradient that is a sum of what nearly cancels has the rounding of its terms.
        assert float((found.pop(name) - gradient).norm() / max(gradient.norm(), 1e-2 * typical)) < 1e-3, name
    assert not found


@pytest.mark.parametrize("model_type", [*DELTA, *SCANS, *CONVOLUTIONS])
def test_answers_in_batches_are_those_without_a_cache(tokenizer: Any, model_type: str) -> None:
    """Prompts are padded on the left, and rows leave the batch: neither may reach a recurrent state."""
    model = lively(model_type).eval()
    ModelWithLoss(model, "reference", NextToken(LossConfig()))  # as in training
    prompts = [torch.arange(3, 4 + 5 * i % 17).tolist() for i in range(1, 6)]
    lengths = [2, 9, 4, 7, 3]
    found = generate(model, tokenizer, prompts, Batching(5), end_ids=[10**6], max_new_tokens=lengths, groups=["a"] * 5)
    assert len({answer.ids for answer in found}) == 5
    with torch.no_grad():
        for prompt, answer, length in zip(prompts, found, lengths, strict=True):
            assert answer.tokens == length
            with plain_attention(model):
                logits = model(torch.tensor([[*prompt, *answer.ids]]), use_cache=False).logits[0]
            assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == list(answer.ids)


def test_a_saved_model_is_the_same_in_plain_transformers(tmp_path: Any) -> None:
    model = lively("qwen3_5_text").eval()
    ModelWithLoss(model, "reference", NextToken(LossConfig()))
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 60)[None] % 64
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("model_type", DELTA)
def test_recurrent_layers_cost_products_with_their_state_and_no_pairs(model_type: str) -> None:
    model = build(model_type)
    assert attention_windows(model) == {(None, False): 1}
    states = 3 * 4 * 3 * 8 * 8
    "of three layers with four heads: read, written and asked for, a state of 8 x 8"
    counted = count_parameters(model)
    alone = 6 * (counted.body * 1000 + counted.head * 10)
    assert train_flops(model, Work(1000, 10, 0)) == alone + 6 * states * 1000


@pytest.mark.parametrize(
    ("model_type", "layers", "recurrent"),
    [("falcon_h1", 4, 4), ("nemotron_h", 1, 1), ("granitemoehybrid", 2, 2), ("bamba", 1, 3), ("lfm2", 1, 0)],
)
def test_state_spaces_cost_two_products_with_their_state_and_convolutions_none(
    model_type: str, layers: int, recurrent: int
) -> None:
    """Layers with attention, and layers with eight heads whose state is 8 x 16."""
    model = build(model_type)
    assert attention_windows(model) == {(None, False): layers}
    counted = count_parameters(model)
    alone = 6 * (counted.body * 1000 + counted.head * 10)
    assert train_flops(model, Work(1000, 10, 0)) == alone + 6 * 2 * recurrent * 8 * 8 * 16 * 1000


@pytest.mark.parametrize(
    ("model_type", "inside"),
    [
        ("lfm2", {"conv.in_proj", "conv.out_proj", "self_attn.q_proj"}),
        ("bamba", {"mamba.in_proj", "mamba.out_proj", "self_attn.q_proj"}),
        ("nemotron_h", {"mixer.in_proj", "mixer.q_proj"}),
    ],
)
def test_the_group_attention_has_the_projections_of_all_layers_that_mix_tokens(
    model_type: str, inside: set[str]
) -> None:
    model = build(model_type)
    add_adapters(model, Adapters(AdapterConfig(rank=2, targets=("attention",)), 0, ModelConfig(path="x"), ""))
    adapted = {re.sub(r".*layers\.\d+\.|\.lora_.*", "", name) for name in factors(model)}
    assert inside <= adapted
    assert all(re.match(r"(self_attn|mamba|conv|mixer)\.(q|k|v|o|in|out)_proj$", name) for name in adapted)


@pytest.mark.parametrize("model_type", ["falcon_h1", "nemotron_h", "bamba"])
def test_peft_takes_the_layers_that_get_adapters(model_type: str) -> None:
    """It rejects the output projections of some architectures with Mamba."""
    peft = pytest.importorskip("peft")
    model = build(model_type)
    adapters = Adapters(AdapterConfig(rank=2, targets=("attention",)), 0, ModelConfig(path="x"), "")
    add_adapters(model, adapters)
    names = {re.sub(r"\.lora_.*", "", name) for name in factors(model)}
    assert any(name.endswith(".in_proj") for name in names)
    theirs = peft.get_peft_model(build(model_type), peft.LoraConfig(target_modules=sorted(names)))
    assert sum(name.endswith(".lora_A.default") for name, _ in theirs.named_modules()) == len(names)


def test_adapters_go_to_the_projections_and_leave_convolution_and_decay_frozen() -> None:
    """Also if their rank is larger than the number of heads."""
    model = build("qwen3_5_text")
    add_adapters(model, Adapters(AdapterConfig(rank=8), 0, ModelConfig(path="x"), ""))
    adapted = {name.split(".lora_")[0].removeprefix("model.layers.0.") for name in factors(model) if ".0." in name}
    inside = ("in_proj_qkv", "in_proj_z", "out_proj")
    assert adapted == {*(f"linear_attn.{name}" for name in inside), *(f"mlp.{n}_proj" for n in ("gate", "up", "down"))}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {*factors(model)}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_decay_of_a_state_is_not_decayed_and_a_convolution_is_no_matrix_of_muon(name: Any) -> None:
    model = build("olmo_hybrid")
    optimizer = build_optimizer(model, OptimConfig(name=name, weight_decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    layer = "model.layers.0.linear_attn."
    assert groups[f"{layer}A_log"]["weight_decay"] == groups[f"{layer}dt_bias"]["weight_decay"] == 0.0
    assert groups[f"{layer}conv1d.weight"]["weight_decay"] == groups[f"{layer}q_proj.weight"]["weight_decay"] == 0.1
    if name == "muon":
        assert groups[f"{layer}q_proj.weight"]["block_matrices"]
        assert not groups[f"{layer}conv1d.weight"]["block_matrices"]


def test_the_parameters_of_a_state_space_that_are_no_matrices_are_not_decayed() -> None:
    model = build("bamba")
    optimizer = build_optimizer(model, OptimConfig(name="adamw", weight_decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    inside = {name.partition(".mamba.")[2]: value for name, value in decay.items() if ".layers.0.mamba." in name}
    assert {name for name, value in inside.items() if not value} == {
        *("A_log", "D", "dt_bias", "conv1d.bias", "norm.weight"),
    }


STATE = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_chunk_size": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "fields", "of_kernels"),
    [
        (
            "qwen3_5_text",
            {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": 4}
            | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "head_dim": 64},
            64 * 4,  # flash-linear-attention alone keeps the inverses
        ),
        ("bamba", {"attn_layer_indices": [1], **STATE}, 0),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, 0),
    ],
)
def test_what_compiled_blocks_keep_is_what_the_memory_estimate_says(
    model_type: str, fields: dict[str, Any], of_kernels: int
) -> None:
    """Of both kinds of blocks together, in bf16 at the budget of train.memory=speed."""
    torch._dynamo.reset()
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_key_value_heads": 1, "num_hidden_layers": 2}
    orig_model = build(model_type, **sizes, **fields).bfloat16()
    model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig()))
    batch = make_batch(make_examples([100, 100, 50], target_share=1.0), ((0, 1, 2),), 256)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    config = CompileConfig(backend="aot_eager_decomp_partition")
    modules = compile_model(orig_model, config)
    position_ids = batch.inputs["position_ids"]
    inputs = {"position_ids": position_ids, "documents": document_boundaries(batch, "reference")}
    hidden = torch.randn(1, 256, 256, dtype=torch.bfloat16, requires_grad=True)
    of_pictures = model_type == "qwen3_5_text"
    rotary = orig_model.model.rotary_emb(hidden, position_ids.expand(3, 1, -1) if of_pictures else position_ids)
    with compiler_switches(config, BUDGETS["speed"], graphs=modules):
        for _ in range(2):
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                held = [block(hidden, position_embeddings=rotary, **inputs) for block in decoder_blocks(orig_model)]
    assert len(held) == 2
    found = sum(size for place, size in kept.items() if place not in weights) / (2 * 256 * 2)
    layout = make_layout_of("packed", [256], row_length=256, batch=1, micro=1)
    shape = shape_of(orig_model)
    estimated = kept_elements(
        EstimateInputs(shape, layout, "adamw", "bf16", 512, BUDGETS["speed"], compiled=True, checkpointing=False)
    )
    # The input of both blocks is the same here.
    assert found + 256 / 2 + of_kernels / 2 == pytest.approx(estimated, rel=0.05)


def test_context_parallelism_is_rejected_by_name() -> None:
    model = build("qwen3_next")
    hybrids.check_topology(model, Topology(shards=2, sharded=True))
    with pytest.raises(ConfigError, match=r"qwen3_next is not supported with context.*model.layers.0.linear_attn"):
        hybrids.check_topology(model, Topology(context=2))


def test_a_version_of_transformers_without_the_function_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("olmo_hybrid")
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid

    monkeypatch.delattr(modeling_olmo_hybrid, "causal_conv1d_fn")
    with pytest.raises(
        ConfigError, match=r"OlmoHybridForCausalLM is not supported with transformers .*causal_conv1d_fn"
    ):
        ModelWithLoss(model, "reference", NextToken(LossConfig()))


def test_without_documents_a_cpu_and_the_plain_model_compute_in_torch_whatever_kernels_transformers_found() -> None:
    def torch_function(*args: Any, **kwargs: Any) -> str:
        return "torch"

    @functools.wraps(torch_function)
    def kernel(*args: Any, **kwargs: Any) -> str:
        raise RuntimeError("no GPU")

    x = torch.ones(1, 1, 1, 1)
    functions = hybrids.MIXERS["Qwen3_5GatedDeltaNet"].functions
    for name, given in {
        "causal_conv1d_fn": {"weight": x},
        "torch_chunk_gated_delta_rule": {"key": x, "value": x, "g": x, "beta": x, "output_final_state": True},
        "torch_recurrent_gated_delta_rule": {},
    }.items():
        assert functions[name](kernel)(x, **given) == "torch"


def test_every_row_of_the_table_is_a_family_that_is_tested() -> None:
    classes = {type(layer).__name__ for name in FAMILIES for _, layer, _ in hybrids.mixers(build(name))}
    assert classes == {*hybrids.MIXERS}
    assert COMMON["num_hidden_layers"] == len(FAMILIES["qwen3_5_text"][1]["layer_types"])


@pytest.mark.parametrize("max_length", [300, 40])
@pytest.mark.parametrize("part", ["head", "tail", "kept"])
def test_state_that_crosses_the_border_of_a_chunk_into_another_document_is_found_at_the_start(
    part: str, max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelWithLoss(lively("qwen3_5_text"), "reference", NextToken(LossConfig()))
    layout = make_layout_of("packed", [max_length, 5], row_length=320)
    given = model, "reference", torch.device("cpu"), layout
    assert check_documents(*given).leak == 0.0
    of = recurrent._Chunks.of

    def other(_: object, *parts: torch.Tensor) -> recurrent._Chunks:
        return (made := of(*parts))._replace(**{part: torch.ones_like(getattr(made, part))})

    monkeypatch.setattr(recurrent._Chunks, "of", classmethod(other))
    with pytest.raises(ConfigError, match="replacing documents of a row changes"):
        check_documents(*given)


def test_a_document_whose_state_goes_on_into_the_next_one_is_found_at_the_start() -> None:
    """Only one that is longer than the documents whose logits are compared."""
    model = ModelWithLoss(build("qwen3", max_position_embeddings=512), "reference", NextToken(LossConfig()))
    layout = make_layout_of("packed", [400, 90], row_length=1024)
    assert check_documents(model, "reference", torch.device("cpu"), layout).leak == 0.0

    def carry(_: object, __: object, named: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        starts = [*torch.nonzero(named["position_ids"][0] == 0).flatten().tolist(), out.shape[1]]
        carried = out.clone()
        for begin, end, after in zip(starts, starts[1:], starts[2:], strict=False):
            if end - begin > 256:
                carried[:, end:after] += 10 * out[:, begin:end].mean(1, keepdim=True)
        return carried

    decoder_blocks(model.orig_model)[0].register_forward_hook(carry, with_kwargs=True)
    with pytest.raises(ConfigError, match="replacing documents of a row changes"):
        check_documents(model, "reference", torch.device("cpu"), layout)


def test_documents_of_a_tree_that_begin_alike_do_not_count_as_a_leak() -> None:
    model = ModelWithLoss(build("qwen3"), "reference", NextToken(LossConfig()))
    # Short documents: of 60 neighbours in the row some begin with the same token.
    layout = replace(make_layout_of("tree", [4, 3], row_length=320), max_length=4)
    found = check_documents(model, "reference", torch.device("cpu"), layout)
    assert found.leak == 0.0 < found.changed


def test_hidden_states_that_are_no_numbers_in_a_longer_row_are_found_at_the_start() -> None:
    model = ModelWithLoss(build("qwen3"), "reference", NextToken(LossConfig()))

    def spoil(_: object, __: object, out: torch.Tensor) -> torch.Tensor:
        spoiled = out.clone()
        spoiled[:, 100:] = torch.nan
        return spoiled

    decoder_blocks(model.orig_model)[0].register_forward_hook(spoil)
    with pytest.raises(ConfigError, match="replacing documents of a row changes"):
        check_documents(model, "reference", torch.device("cpu"), make_layout_of("packed", [40, 5], row_length=320))


def test_other_experts_by_rounding_alone_are_no_leak() -> None:
    """With these weights replaced documents change the rounding of others, and with it two experts in a near tie."""
    torch.manual_seed(137)
    sizes = {"head_dim": 16, "hidden_size": 64, "num_experts": 128, "num_experts_per_tok": 2, "norm_topk_prob": True}
    orig_model = build("qwen3_moe", num_hidden_layers=20, max_position_embeddings=2048, **sizes)
    generator = torch.Generator().manual_seed(137)
    with torch.no_grad():
        for parameter in orig_model.model.layers.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    orig_model.set_experts_implementation("grouped_mm")
    model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig()))
    layout = make_layout_of("packed", [400, 90], row_length=1024)
    found = check_documents(model, "reference", torch.device("cpu"), layout)
    assert found.leak < 1e-4 * found.changed
