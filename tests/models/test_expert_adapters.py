"""Adapters of experts compute what peft's do, start from and write peft's files, and multiply active experts only."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import merged_weights, scalar_kernels, tiny
from made_adapters import IDS, adapted_model, loss_of, write_adapter
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

from sftkit.compile.contract import compile_model, compiler_switches, small_modules
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
    with_factors,
)
from sftkit.models.files import adapter_at
from sftkit.models.load import load_model
from sftkit.models.structure import Work, count_parameters, train_flops
from sftkit.models.tokenizer import train_tokenizer
from sftkit.models.trained import adapters_of, factors
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops.grouped import grouped_product
from sftkit.verify.plain import PlainModel


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
BASE = ModelConfig(path="base")


def family(name: str, **more: Any) -> PreTrainedModel:
    config, fields = FAMILIES[name]
    model = tiny(config, **{**fields, **more})
    with torch.no_grad():  # some families leave them as the memory was
        for parameter_name, p in model.named_parameters():
            if p.ndim == 3 or parameter_name.endswith("_bias"):
                p.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(len(parameter_name)))
    return model


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


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in FAMILIES), ("glm4_moe", {"experts": False})])
def test_loss_and_every_gradient_are_those_of_peft(
    name: str, settings: dict[str, Any], tmp_path: Path, peft: Any
) -> None:
    """Our files in peft's modules: names, orders, scales and the sum itself."""
    ours = adapted_model(family(name), rank=3, alpha=5.0, **settings)
    assert len(adapted_experts(ours)) == (2 if settings.get("experts", True) else 0)
    theirs = peft.PeftModel.from_pretrained(family(name), write_adapter(ours, tmp_path / "a"), is_trainable=True)
    loss, gradients = gradients_of(ours)
    expected, others = gradients_of(theirs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert gradients.keys() == factors(ours).keys()
    named = {key.replace(".default", ""): gradient for key, gradient in others.items()}
    # Norms within its attention make roundings grow.
    tolerance = 5e-6 if name == "deepseek_v3" else 2e-6
    assert_same({f"base_model.model.{key}": value for key, value in gradients.items()}, named, tolerance)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A mixture with its tokenizer."""
    tokenizer = train_tokenizer(["a few words about words"], 300, "{{ messages }}")
    folder = tmp_path / "base"
    family("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokenizer_of(base: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base)


def test_an_adapter_of_peft_is_merged_as_a_model_and_continued_with_adapter(
    base: Path, tmp_path: Path, peft: Any
) -> None:
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, 0.0, 0.2)
    folder = tmp_path / "peft"
    model.save_pretrained(folder)
    expected = model(IDS).logits
    tokenizer = tokenizer_of(base)
    merged = load_model(ModelConfig(path=str(folder)), tokenizer, 0)
    assert adapters_of(merged) is None
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    going = AdapterConfig(rank=3, alpha=6.0, targets=("q_proj", "experts"))
    live = load_model(ModelConfig(path=str(folder)), tokenizer, 0, adapter=going)
    torch.testing.assert_close(live(IDS).logits, expected, rtol=2e-6, atol=2e-6)
    with pytest.raises(ConfigError, match=r"experts.* is only in the files: set adapter.targets"):
        load_model(
            ModelConfig(path=str(folder)), tokenizer, 0, adapter=AdapterConfig(rank=3, alpha=6.0, targets=("q_proj",))
        )
    # Ours, with a layer among the parameters, is loaded too.
    shared = adapted_model(family("glm4_moe"), str(base), rank=2)
    assert adapter_at(ModelConfig(path=str(write_adapter(shared, tmp_path / "shared")))) is not None
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"target_parameters": ["experts.down_proj"]}))
    with pytest.raises(ConfigError, match=r"target_parameters=\['experts.down_proj'\] is not loaded here"):
        adapter_at(ModelConfig(path=str(folder)))


def test_transformers_opens_the_folder_as_the_model_with_its_adapter(base: Path, tmp_path: Path) -> None:
    ours = adapted_model(AutoModelForCausalLM.from_pretrained(base), str(base), rank=2)
    opened = AutoModelForCausalLM.from_pretrained(write_adapter(ours, tmp_path / "a"))
    torch.testing.assert_close(opened(IDS).logits, ours(IDS).logits, rtol=2e-6, atol=2e-6)


def test_merged_weights_give_the_logits_of_the_adapter_and_are_rounded_once(base: Path, tmp_path: Path) -> None:
    ours = adapted_model(AutoModelForCausalLM.from_pretrained(base), str(base), rank=4)
    plain = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, weight in merged_weights(ours):
            plain.get_parameter(name).copy_(weight)
    torch.testing.assert_close(plain(IDS).logits, ours(IDS).logits, rtol=1e-5, atol=1e-5)
    folder = ModelConfig(path=str(write_adapter(ours, tmp_path / "a")))
    loaded = load_model(folder, tokenizer_of(base), 0)
    assert {n for n, _ in loaded.named_parameters()} == {n for n, _ in plain.named_parameters()}
    assert all(torch.equal(p, plain.get_parameter(name)) for name, p in loaded.named_parameters())
    rounded = load_model(folder, tokenizer_of(base), 0, "bf16")
    for name, experts in adapted_experts(ours).items():
        for key, pair in (("gate_up_proj", experts.base_layer), ("down_proj", experts)):
            a, b = pair.lora_A.weight.view(4, 4, -1), pair.lora_B.weight.view(-1, 4, 4)
            start = getattr(experts, key).bfloat16().float()
            exact = start + experts.lora_scale * torch.einsum("ore,eri->eoi", b, a)
            torch.testing.assert_close(rounded.get_parameter(f"{name}.{key}"), exact.bfloat16(), rtol=2**-8, atol=1e-7)


def test_transposed_matrices_are_merged_too(tmp_path: Path) -> None:
    base = tmp_path / "base"
    family("gpt_oss").save_pretrained(base)
    ours = adapted_model(AutoModelForCausalLM.from_pretrained(base), str(base), rank=3)
    plain = AutoModelForCausalLM.from_pretrained(base)
    files = adapter_at(ModelConfig(path=str(write_adapter(ours, tmp_path / "a"))))
    assert files is not None
    merge_files(plain, files)
    torch.testing.assert_close(plain(IDS).logits, ours(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "last", "with_experts"),
    [
        ({"targets": ("attention",)}, {"q_proj", "k_proj", "v_proj", "o_proj"}, False),
        ({"targets": ("mlp",)}, {"gate_proj", "up_proj", "down_proj"}, True),
        ({"targets": ("mlp",), "experts": False}, {"gate_proj", "up_proj", "down_proj"}, False),
        ({}, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, True),
        ({"targets": ("experts",), "experts": False}, set(), True),
    ],
)
def test_groups_have_experts_or_not_and_never_a_router(
    settings: dict[str, Any], last: set[str], with_experts: bool
) -> None:
    model = family("glm4_moe")  # with a shared expert, which is an MLP of linear layers
    modules = add_adapters(model, Adapters(AdapterConfig(rank=2, **settings), 0, BASE, "")).modules
    found = {name for name in modules if not name.endswith(".experts")}
    assert found == {n for n, _ in model.named_modules() if n.rpartition(".")[2] in last}
    assert {*modules} - found == ({f"model.layers.{i}.mlp.experts" for i in (0, 1)} if with_experts else set())
    told = peft_config(model)
    shared = sorted(name for name in last if name in ("gate_proj", "up_proj", "down_proj"))
    assert told["target_modules"] == sorted(last - {*shared})
    parameters = ["experts.gate_up_proj", "experts.down_proj"] * with_experts + [f"{name}.weight" for name in shared]
    assert told["target_parameters"] == (parameters or None)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == factors(model).keys()
    # One of two blocks: by its whole name.
    one = family("qwen3_moe")
    add_adapters(one, Adapters(AdapterConfig(rank=2, targets=("layers.1.mlp.experts",)), 0, BASE, ""))
    assert peft_config(one)["target_parameters"][1] == "model.layers.1.mlp.experts.down_proj"


def test_what_experts_cannot_have_is_an_error_that_leaves_the_model_as_it_was() -> None:
    for name, settings, told in (
        ("qwen3_moe", {"dropout": 0.1}, "experts has an adapter only without adapter.dropout: set adapter.experts=f"),
        ("qwen3_moe", {"method": "dora"}, "experts has an adapter only without adapter.method=dora: set adapter.expe"),
        ("qwen3_moe", {"rank": 17, "targets": ("mlp",)}, "experts has 16 inputs and 32 outputs.* adapter.rank=16"),
        ("jetmoe", {}, r"JetMoeParallelExperts\) have a form that gets no adapters: set adapter.experts=false"),
    ):
        model = tiny(JetMoeConfig, kv_channels=8, num_local_experts=4) if name == "jetmoe" else family(name)
        with pytest.raises(ConfigError, match=told):
            add_adapters(model, Adapters(AdapterConfig(**{"rank": 4, **settings}), 0, BASE, ""))
        assert all(p.requires_grad for p in model.parameters())
        assert adapters_of(model) is None
    for settings in ({"dropout": 0.1}, {"method": "dora"}):
        model = family("qwen3_moe")
        add_adapters(model, Adapters(AdapterConfig(rank=4, experts=False, **settings), 0, BASE, ""))  # type: ignore[arg-type]
        assert adapted_experts(model) == {}


def test_experts_are_known_from_the_headers_of_the_files(base: Path) -> None:
    known = known_shapes(ModelConfig(path=str(base)))
    assert known is not None
    shapes, experts = known
    assert experts == {f"model.layers.{i}.mlp.experts" for i in (0, 1)}
    model = AutoModelForCausalLM.from_pretrained(base)
    for settings in ({}, {"experts": False}, {"targets": ("experts", "q_proj")}):
        config = AdapterConfig(rank=4, **settings)  # type: ignore[arg-type]
        added = add_adapters(AutoModelForCausalLM.from_config(model.config), Adapters(config, 0, BASE, ""))
        assert {*target_layers(shapes, config, experts=experts)} == {*added.modules}
    with pytest.raises(ConfigError, match=r"only without adapter.dropout"):
        target_layers(shapes, AdapterConfig(rank=4, dropout=0.1), experts=experts)


def test_only_experts_that_tokens_visit_are_multiplied() -> None:
    """An expert that no token visits has gradients of zero, and what its factors hold reaches nothing."""
    model = adapted_model(family("qwen3_moe"), rank=4)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    index, weights = torch.tensor([[0, 3], [3, 1]] * 3), torch.rand(6, 2)  # never expert 2
    experts(x, index, weights).square().sum().backward()
    for pair in (experts, experts.base_layer):
        a, b = pair.lora_A.weight, pair.lora_B.weight
        assert a.grad.view(4, 4, -1).flatten(1).norm(dim=1).ne(0).tolist() == [True, True, False, True]
        assert b.grad.view(-1, 4).norm(dim=0).ne(0).tolist() == [True, True, False, True]
    expected = experts(x, index, weights)
    with torch.no_grad():
        for pair in (experts, experts.base_layer):
            pair.lora_A.weight.view(4, 4, -1)[2] = torch.nan
            pair.lora_B.weight.view(-1, 4)[:, 2] = torch.nan
    assert torch.equal(experts(x, index, weights), expected)


def test_a_router_that_chooses_no_expert_adds_nothing() -> None:
    experts = adapted_model(family("qwen3_moe"), rank=4).model.layers[0].mlp.experts
    x = torch.randn(6, 32)
    weights = torch.rand(6, 2)
    both = torch.tensor([[0, 3], [3, 1]] * 3)
    first = both.clone()
    first[:, 1] = 4  # of four
    torch.testing.assert_close(
        experts(x, first, weights), experts(x, both, weights * torch.tensor([1.0, 0.0])), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_gradients_are_those_of_the_sum_as_the_paper_writes_it(name: str) -> None:
    ours = adapted_model(family(name), rank=3)
    loss, gradients = gradients_of(ours)
    as_written(ours)
    expected, others = gradients_of(ours)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert_same(gradients, others, 1e-5)


def test_b_is_moved_for_the_comparison_and_has_its_bits_back() -> None:
    model = family("qwen3_moe")
    add_adapters(model, Adapters(AdapterConfig(rank=4), 0, BASE, ""))
    before = {name: p.detach().clone() for name, p in factors(model).items()}
    assert all(bool(p.any()) == (".lora_A." in name) for name, p in before.items())
    with factors_moved(model):
        moved = {name for name, p in factors(model).items() if not torch.equal(p, before[name])}
        assert moved == {name for name in before if ".lora_B." in name}
        loss_of(model).backward()
        for pair in with_factors(model).values():  # neither would be lost beside the other
            assert 0.1 < pair.lora_A.weight.grad.norm() / pair.lora_B.weight.grad.norm() < 10
    assert all(torch.equal(p, before[name]) for name, p in factors(model).items())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("qwen3_moe", torch.bfloat16), ("gpt_oss", torch.float32)])
def test_one_graph_for_all_blocks_that_computes_the_same(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model = adapted_model(family(name, num_hidden_layers=2).to(dtype), rank=4)
    expected, eager = gradients_of(model)
    compile = CompileConfig(backend="aot_eager", fullgraph=True)
    compile_model(model, compile)
    with compiler_switches(compile), scalar_kernels():
        watch = CompileWatch()
        model.train()
        gradients_of(model)
        watch.warm_up_done()
        loss, gradients = gradients_of(model)
        counts = watch.counts()
    watch.close()
    assert counts["compile/graphs"] == 1 + len(small_modules(model))
    assert counts["compile/recompiles"] == 0
    assert counts["compile/graph_breaks"] == 0
    exact = dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6 if exact else 2e-2, atol=0)
    assert all(p.dtype == torch.float32 for p in gradients.values())
    assert_same(gradients, eager, 1e-5 if exact else 0.1)


def test_the_plain_model_has_the_adapters_of_the_files_and_finds_a_changed_factor(base: Path) -> None:
    start = ModelConfig(path=str(base))
    live = load_model(start, tokenizer_of(base), 5, adapter=AdapterConfig(rank=4))
    model = ModelWithLoss(live, "reference", NextToken(LossConfig()))
    plain = PlainModel(model, torch.device("cpu"), start)
    assert plain.differing == {}
    with torch.no_grad():
        factors(live)["model.layers.0.mlp.experts.base_layer.lora_A.weight"][0, 0] += 0.1
    plain = PlainModel(model, torch.device("cpu"), start)
    assert [*plain.differing] == ["model.layers.0.mlp.experts.base_layer.lora_A.weight"]


def test_flops_and_sizes_count_the_experts_that_a_token_visits() -> None:
    model = adapted_model(family("qwen3_moe", tie_word_embeddings=True), rank=8)
    size = sum(p.numel() for p in factors(model).values())
    # Of each of 4 experts: A and B of 32 -> 32 outputs (two of 16), and of 16 -> 32.
    assert sum(p.numel() for n, p in factors(model).items() if ".experts." in n) == 2 * 4 * 8 * (64 + 48)
    assert count_parameters(model).trained == size
    length = 16
    model.model.embed_tokens.register_forward_hook(lambda _, __, y: y.requires_grad_(torch.is_grad_enabled()))
    with FlopCounterMode(display=False) as counter:
        hidden = model.model(input_ids=torch.arange(length)[None]).last_hidden_state
        hidden.sum().backward()
    counted = sum(
        flops
        for name, flops in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(name) and "bmm" not in str(name)
    )
    expected = train_flops(model, Work(tokens=length, targets=0, layer_pairs=0))
    assert counted == pytest.approx(expected, rel=0.02)


@pytest.mark.gpu
def test_the_compiled_products_of_factors_are_those_of_eager_on_a_gpu() -> None:
    torch.manual_seed(0)
    experts, rank, width, outputs = 32, 16, 256, 384
    a = torch.randn(experts * rank, width, device="cuda", requires_grad=True)
    b = torch.randn(outputs, rank * experts, device="cuda", requires_grad=True)
    rows = torch.randn(512, width, device="cuda", dtype=torch.bfloat16)
    ends = torch.arange(16, 528, 16, device="cuda", dtype=torch.int32)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        by_expert_a = a.view(experts, -1, width).bfloat16()
        # As in the file, the expert is the fastest index: the copy has other strides than its source.
        by_expert_b = b.view(outputs, -1, experts).permute(2, 0, 1).bfloat16().contiguous()
        inner = grouped_product(rows, by_expert_a, ends)
        return grouped_product(inner, by_expert_b, ends).float()

    eager = torch.autograd.grad(product(a, b).square().mean(), (a, b))
    compiled = torch.autograd.grad(torch.compile(product, fullgraph=True)(a, b).square().mean(), (a, b))
    assert all(one.any() and torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))
