"""Adapters compute what peft's do, start from and write peft's files, and leave the model under them as it is."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import merged_weights, scalar_kernels, tiny, tiny_llama
from made_adapters import IDS, adapted_model, loss_of, write_adapter
from safetensors.torch import load_file, save_file
from test_models import build
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sftkit.compile.contract import compile_model, compiler_switches, small_modules
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import (
    AdapterConfig,
    CompileConfig,
    LossConfig,
    ModelConfig,
    NamedAdapter,
    OptimConfig,
    TrainConfig,
)
from sftkit.errors import ConfigError
from sftkit.generation.decode import Batching, generate
from sftkit.launch.layouts import shape_of_fields
from sftkit.memory.plan import checkpoint_bytes
from sftkit.models.adapter_files import AS_STORED, base_digest, known_shapes, target_layers
from sftkit.models.adapters import (
    Adapters,
    DoraLinear,
    adapted,
    add_adapters,
    factors_moved,
    peft_config_text,
    target_modules,
)
from sftkit.models.files import adapter_at, replica_of, size_of
from sftkit.models.load import load_model
from sftkit.models.structure import Work, count_parameters, train_flops
from sftkit.models.tokenizer import load_tokenizer, train_tokenizer
from sftkit.models.trained import adapters_of, factors
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.optim.protocol import build_optimizer, parameter_groups
from sftkit.verify.documents import check_documents
from sftkit.verify.plain import PlainModel


@pytest.fixture(scope="module")
def peft() -> Any:
    return importlib.import_module("peft")


EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),  # with biases
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS),
}
BASE = ModelConfig(path="base")


def family(name: str) -> PreTrainedModel:
    config, fields = FAMILIES[name]
    return tiny(config, **fields)


@pytest.mark.parametrize(
    ("scaling", "method", "tolerance"),
    [("standard", "lora", 1e-6), ("rslora", "lora", 1e-6), ("standard", "dora", 5e-6)],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_every_gradient_are_those_of_peft(
    name: str, scaling: str, method: str, tolerance: float, tmp_path: Path, peft: Any
) -> None:
    """Our files in peft's modules: names, orders, scales and the sum itself."""
    ours = adapted_model(family(name), rank=3, alpha=5.0, scaling=scaling, method=method, experts=False)
    theirs = peft.PeftModel.from_pretrained(family(name), write_adapter(ours, tmp_path / "a"), is_trainable=True)
    found, expected = loss_of(ours), loss_of(theirs)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    found.backward()
    expected.backward()
    named = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if p.requires_grad}
    gradients = {n.replace("vector.weight", "vector"): p.grad for n, p in named.items()}
    assert gradients.keys() == {f"base_model.model.{n}" for n in factors(ours)}
    for key, p in factors(ours).items():
        gradient, other = p.grad, gradients[f"base_model.model.{key}"]
        assert gradient is not None
        assert other is not None
        assert other.norm() > 0
        assert float((gradient - other).norm() / other.norm()) < tolerance
    assert all(p.grad is None for n, p in ours.named_parameters() if n not in factors(ours))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model with its tokenizer."""
    tokenizer = train_tokenizer(["a few words about words"], 300, "{{ messages }}")
    folder = tmp_path / "base"
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokenizer_of(base: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base)


@pytest.mark.parametrize(("use_rslora", "use_dora"), [(False, False), (True, False), (False, True)])
def test_an_adapter_of_peft_is_merged_as_a_model_and_continued_with_adapter(
    base: Path, use_rslora: bool, use_dora: bool, tmp_path: Path, peft: Any
) -> None:
    kind = {"use_rslora": use_rslora, "use_dora": use_dora}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], **kind)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, float("magnitude" in name), 0.2)
    folder = tmp_path / "peft"
    model.save_pretrained(folder)
    expected = model(IDS).logits
    tokenizer = tokenizer_of(base)
    merged = load_model(ModelConfig(path=str(folder)), tokenizer, 0)
    assert adapters_of(merged) is None
    assert {n for n, _ in merged.named_parameters()} == {n for n, _ in tiny_llama().named_parameters()}
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    alpha = 6 / 2 * 4 if use_rslora else 6  # folded
    method: Any = "dora" if use_dora else "lora"
    going = AdapterConfig(rank=4, alpha=alpha, targets=("q_proj", "down_proj"), method=method)
    torch.testing.assert_close(
        load_model(ModelConfig(path=str(folder)), tokenizer, 0, adapter=going)(IDS).logits,
        expected,
        rtol=2e-6,
        atol=2e-6,
    )
    for change, told in (
        ({"rank": 8}, "rank 4 .* asks for .* of rank 8"),
        ({"method": "lora" if use_dora else "dora"}, f"set adapter.method={method}"),
        ({"alpha": 9.0}, "adapter.alpha=" + f"{alpha:g}"),
        ({"targets": ("q_proj",)}, "down_proj.* is only in the files: set adapter.targets"),
        ({"targets": ("q_proj", "down_proj", "up_proj")}, "up_proj.* is not in the files"),
    ):
        other = AdapterConfig(**{**vars(going), **change})
        with pytest.raises(ConfigError, match=told):
            load_model(ModelConfig(path=str(folder)), tokenizer, 0, adapter=other)


def test_transformers_opens_the_folder_as_the_model_with_its_adapter_or_not_at_all(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peft: Any
) -> None:
    ours = adapted_model(AutoModelForCausalLM.from_pretrained(base), str(base), rank=2)
    folder = write_adapter(ours, tmp_path / "a")
    opened = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(opened(IDS).logits, ours(IDS).logits)
    from transformers.models.auto import auto_factory

    monkeypatch.setattr(auto_factory, "is_peft_available", lambda: False)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(folder)


def test_merged_weights_give_the_logits_of_the_adapter(base: Path, tmp_path: Path) -> None:
    ours = adapted_model(AutoModelForCausalLM.from_pretrained(base), str(base), rank=4)
    plain = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, weight in merged_weights(ours):
            plain.get_parameter(name).copy_(weight)
    torch.testing.assert_close(plain(IDS).logits, ours(IDS).logits, rtol=1e-5, atol=1e-5)
    loaded = load_model(ModelConfig(path=str(write_adapter(ours, tmp_path / "a"))), tokenizer_of(base), 0)
    assert torch.equal(loaded(IDS).logits, plain(IDS).logits)
    rounded = load_model(ModelConfig(path=str(tmp_path / "a")), tokenizer_of(base), 0, "bf16")
    start = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    for name, layer in adapted(ours).items():
        exact = start.get_parameter(f"{name}.weight").float()
        exact = exact + layer.lora_scale * (layer.lora_B.weight @ layer.lora_A.weight)
        assert torch.equal(rounded.get_parameter(f"{name}.weight"), exact.bfloat16())  # once, from fp32
    expected = adapted_model(start, str(base), rank=4)(IDS).logits
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(rounded(IDS).logits, expected, rtol=0, atol=2e-2 * largest)


def test_greedy_answers_of_the_merged_model_are_those_of_the_adapter(base: Path, tmp_path: Path) -> None:
    ours = adapted_model(AutoModelForCausalLM.from_pretrained(base), str(base), rank=4)
    tokenizer, plain = tokenizer_of(base), AutoModelForCausalLM.from_pretrained(base)
    merged = load_model(ModelConfig(path=str(write_adapter(ours, tmp_path / "a"))), tokenizer, 0)
    prompts = [torch.randint(3, 270, (4,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(20)]

    def answers(model: PreTrainedModel) -> list[str]:
        found = generate(model.eval(), tokenizer, prompts, Batching(7), max_new_tokens=8, end_ids=[])
        return [answer.text for answer in found]

    assert answers(merged) == answers(ours)
    assert sum(one != other for one, other in zip(answers(plain), answers(ours), strict=True)) > 10


def test_lengths_of_rows_are_those_of_the_dense_sum() -> None:
    """Of DoRA, without a matrix of that size; a large B, so that no term is small."""
    model = adapted_model(tiny_llama(), rank=4, method="dora")
    for layer in adapted(model).values():
        assert isinstance(layer, DoraLinear)
        a, b = layer.lora_A.weight.detach(), 5 * layer.lora_B.weight.detach()
        dense = (layer.weight + layer.lora_scale * (b @ a)).norm(dim=1)
        torch.testing.assert_close(layer._lengths(a, b, torch.float32), dense, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"method": "dora"}], ids=["lora", "dora"])
def test_compiled_by_inductor_loss_and_gradients_are_those_of_eager(settings: dict[str, Any]) -> None:
    torch._dynamo.reset()
    eager, compiled = (adapted_model(tiny_llama(), rank=4, **settings).train() for _ in range(2))
    compile = CompileConfig(backend="inductor", fullgraph=True)
    compile_model(compiled, compile)
    with compiler_switches(compile), scalar_kernels():
        losses = [loss_of(model) for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    for name, p in factors(compiled).items():
        expected = eager.get_parameter(name).grad
        assert expected is not None
        assert p.grad is not None
        assert float((p.grad - expected).norm() / expected.norm()) < 1e-5


def test_a_layer_starts_from_the_same_numbers_whatever_the_other_targets_are() -> None:
    all_of_them, one = tiny_llama(), tiny_llama()
    add_adapters(all_of_them, Adapters(AdapterConfig(rank=4), 3, BASE, ""))
    add_adapters(one, Adapters(AdapterConfig(rank=4, targets=("layers.1.mlp.up_proj",)), 3, BASE, ""))
    mine = factors(one)
    assert set(mine) == {f"model.layers.1.mlp.up_proj.lora_{one}.weight" for one in "AB"}
    for name, factor in mine.items():
        assert torch.equal(factor, factors(all_of_them)[name])
    a = [p for name, p in factors(all_of_them).items() if ".lora_A." in name]
    assert all(p.dtype == torch.float32 and 0 < p.abs().max() <= 32**-0.5 for p in a)
    assert not torch.equal(a[0], a[1])
    assert all(not p.any() for name, p in factors(all_of_them).items() if ".lora_B." in name)
    assert {n for n, p in all_of_them.named_parameters() if p.requires_grad} == factors(all_of_them).keys()


@pytest.mark.parametrize(
    ("targets", "last"),
    [
        (("attention",), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (("mlp",), {"gate_proj", "up_proj", "down_proj"}),
        (("all-linear",), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (("attention", "up_proj"), {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj"}),
    ],
)
def test_groups_name_the_layers_of_every_block_and_never_the_head(targets: tuple[str, ...], last: set[str]) -> None:
    model = tiny_llama()
    modules = add_adapters(model, Adapters(AdapterConfig(rank=2, targets=targets), 0, BASE, "")).modules
    assert {*modules} == {n for n, _ in model.named_modules() if n.rpartition(".")[2] in last}
    assert json.loads(peft_config_text(model))["target_modules"] == sorted(last)


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        (
            "llama",
            {"targets": ("q_prj",)},
            'q_prj is no linear layer in the blocks of the model. Did you mean "q_proj"',
        ),
        ("llama", {"targets": ("lm_head",)}, "lm_head is the head, which gets no adapter"),
        ("llama", {"targets": ("q_proj,v_proj",)}, r"q_proj,v_proj is one name with .* list, \[q_proj, v_proj\]"),
        ("llama", {"rank": 17}, "k_proj has 32 inputs and 16 outputs.* set adapter.rank=16 or less"),
        ("qwen3_moe", {"targets": ("mlp",), "experts": False}, "mlp is no linear layer"),
    ],
)
def test_targets_that_cannot_be_are_errors_and_leave_the_model_as_it_was(
    name: str, settings: dict[str, Any], told: str
) -> None:
    model = family(name)
    with pytest.raises(ConfigError, match=told):
        add_adapters(model, Adapters(AdapterConfig(**{"rank": 4, **settings}), 0, BASE, ""))
    assert all(p.requires_grad for p in model.parameters())
    assert adapters_of(model) is None


def test_documents_of_a_row_are_computed_as_each_alone_and_a_wrong_product_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ModelWithLoss(adapted_model(tiny_llama(), rank=4), "reference", NextToken(LossConfig()))
    found = check_documents(model, "reference", torch.device("cpu"))
    assert found.logits_difference < 1e-6
    assert found.leak == 0.0
    from sftkit.models import adapters

    right = adapters.low_rank
    monkeypatch.setattr(adapters, "low_rank", lambda y, x, a, b, scale: right(y, x, a, b, 1.5 * scale))
    with pytest.raises(ConfigError, match="logits of its own forward pass and sftkit's differ by"):
        check_documents(model, "reference", torch.device("cpu"))


def test_b_is_moved_for_the_comparison_and_has_its_bits_back() -> None:
    model = tiny_llama()
    add_adapters(model, Adapters(AdapterConfig(rank=4), 0, BASE, ""))
    before = {name: p.detach().clone() for name, p in factors(model).items()}
    places = {name: p.data_ptr() for name, p in factors(model).items()}
    with factors_moved(model):
        moved = {name: p for name, p in factors(model).items() if not torch.equal(p, before[name])}
        assert {*moved} == {name for name in before if ".lora_B." in name}
        loss_of(model).backward()
        for name in adapted(model):  # neither would be lost beside the other
            a, b = (model.get_parameter(f"{name}.lora_{one}.weight").grad for one in "AB")
            assert a is not None
            assert b is not None
            assert 0.1 < a.norm() / b.norm() < 10
    assert all(torch.equal(p, before[name]) for name, p in factors(model).items())
    assert places == {name: p.data_ptr() for name, p in factors(model).items()}


@pytest.mark.parametrize(
    ("settings", "tied", "checkpointing"),
    [
        ({"dropout": 0.5}, True, False),
        ({"method": "dora"}, False, False),
        ({"base": "nf4"}, False, True),
    ],
    ids=["dropout, tied", "dora", "nf4, checkpointing"],
)
def test_one_graph_for_all_blocks_and_none_after_the_first_pass(
    settings: dict[str, Any], tied: bool, checkpointing: bool
) -> None:
    torch._dynamo.reset()
    model = adapted_model(tiny_llama(layers=3, tie_word_embeddings=tied), rank=4, **settings)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compile = CompileConfig(backend="aot_eager", fullgraph=True)
    compile_model(model, compile)
    with compiler_switches(compile), scalar_kernels():
        watch = CompileWatch()
        model.train()
        loss_of(model).backward()
        watch.warm_up_done()
        loss_of(model).backward()
        counts = watch.counts()
    watch.close()
    assert counts["compile/graphs"] == 1 + len(small_modules(model))
    assert counts["compile/recompiles"] == 0
    assert counts["compile/graph_breaks"] == 0


def test_the_plain_model_has_the_adapters_of_the_files_and_finds_a_changed_factor(base: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(base)
    config = AdapterConfig(rank=4)
    start = ModelConfig(path=str(base))
    live = load_model(start, tokenizer, 5, adapter=config)
    plain = PlainModel(ModelWithLoss(live, "reference", NextToken(LossConfig())), torch.device("cpu"), start)
    assert plain.differing == {}
    assert plain.compared == sum(1 for _ in live.named_parameters())
    with torch.no_grad():
        factors(live)["model.layers.0.mlp.up_proj.lora_A.weight"][0, 0] += 0.1
    plain = PlainModel(ModelWithLoss(live, "reference", NextToken(LossConfig())), torch.device("cpu"), start)
    assert [*plain.differing] == ["model.layers.0.mlp.up_proj.lora_A.weight"]


@pytest.mark.parametrize(("stored", "precision"), [("bfloat16", "fp32"), ("float32", "bf16")])
@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=4, method="dora")], ids=["merged", "dora"])
def test_weights_stored_in_another_precision_than_the_run_has_are_those_of_the_files(
    base: Path, stored: str, precision: str, adapter: AdapterConfig | None, tmp_path: Path
) -> None:
    """The run rounds the model first and adds or measures then, and so does the model that it is compared with."""
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.to(getattr(torch, stored)).save_pretrained(base)
    tokenizer = tokenizer_of(base)
    path = base if adapter else write_adapter(adapted_model(plain, str(base), rank=4), tmp_path / "a")
    start = ModelConfig(path=str(path))
    live = load_model(start, tokenizer, 5, precision, adapter=adapter)
    found = PlainModel(ModelWithLoss(live, "reference", NextToken(LossConfig())), torch.device("cpu"), start)
    assert found.differing == {}


def test_a_file_without_factors_or_with_half_of_a_pair_is_an_error(base: Path, tmp_path: Path) -> None:
    live = adapted_model(AutoModelForCausalLM.from_pretrained(base), str(base), rank=4)
    file = write_adapter(live, tmp_path / "a") / "adapter_model.safetensors"
    whole = load_file(file)
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_"
    extra = {f"{key}magnitude_vector": torch.ones(live.config.intermediate_size)}
    for tensors, told in (
        ({}, "holds no adapter, so its model would be used alone"),
        ({name: t for name, t in whole.items() if name != f"{key}B.weight"}, r"lora_B.weight is missing"),
        (whole | extra, r"lora_magnitude_vector is not loaded here"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=told):
            load_model(ModelConfig(path=str(file.parent)), tokenizer_of(base), 0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_of_a_head_is_merged_unless_the_embedding_would_change_too(
    base: Path, tmp_path: Path, peft: Any
) -> None:
    for tied in (False, True):
        start = tiny_llama(vocab_size=len(tokenizer_of(base)), tie_word_embeddings=tied)
        start.save_pretrained(base)
        model = peft.get_peft_model(start, peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
        model.peft_config["default"].base_model_name_or_path = str(base)
        folder = tmp_path / f"peft-{tied}"
        model.save_pretrained(folder, save_embedding_layers=False)
        if tied:
            with pytest.raises(ConfigError, match="lm_head shares its weight with the embedding"):
                load_model(ModelConfig(path=str(folder)), tokenizer_of(base), 0)
            continue
        merged = load_model(ModelConfig(path=str(folder)), tokenizer_of(base), 0)
        torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_local_model_is_named_by_its_whole_path_and_one_without_weights_is_an_error(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    live = load_model(ModelConfig(path="base"), tokenizer_of(base), 5, adapter=AdapterConfig(rank=2))
    assert json.loads(peft_config_text(live))["base_model_name_or_path"] == str(base)
    weights = base / "model.safetensors"
    named = base_digest(base)
    weights.rename(base / "pytorch_model.bin")
    assert base_digest(base) not in ("", named)
    (base / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match="no weights in it"):
        base_digest(base)


def test_weights_that_changed_under_an_adapter_are_an_error(base: Path, tmp_path: Path) -> None:
    live = load_model(ModelConfig(path=str(base)), tokenizer_of(base), 5, adapter=AdapterConfig(rank=4))
    record = adapters_of(live)
    assert record is not None
    assert record.digest == base_digest(base)
    folder = write_adapter(live, tmp_path / "a")
    (folder / "manifest.json").write_text(json.dumps({"base": {"sha256": record.digest}, "files": {}}))
    load_model(ModelConfig(path=str(folder)), tokenizer_of(base), 0)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] += 2**-20
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"trained on other weights than .*base has now"):
        load_model(ModelConfig(path=str(folder)), tokenizer_of(base), 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3: only adapters of the type LORA"),
        ({"bias": "all"}, "bias='all' is not loaded here"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*is not loaded here"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern=.*is not loaded here"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not loaded here"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens=\[1, 2\] is not loaded here"),
        ({"r": "4"}, "needs r, lora_alpha and base_model_name_or_path"),
        ({"base_model_name_or_path": None}, "needs r, lora_alpha and base_model_name_or_path"),
        (
            {"base_model_name_or_path": "/no/model"},
            "/no/model is not there. Move the model back there, or write its new",
        ),
        (
            {"base_model_name_or_path": "runs/no/step-000009"},
            "base_model.* runs/no/step-000009 is not there. Start in the folder where the training was started",
        ),
    ],
)
def test_what_an_adapter_has_beyond_factors_is_an_error(
    base: Path, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    live = adapted_model(AutoModelForCausalLM.from_pretrained(base), str(base), rank=4)
    folder = write_adapter(live, tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=told):
        adapter_at(ModelConfig(path=str(folder)))


def test_the_command_that_is_told_merges_an_adapter_with_the_tokenizer_of_its_model(base: Path, tmp_path: Path) -> None:
    live = adapted_model(AutoModelForCausalLM.from_pretrained(base), str(base), rank=4)
    folder = write_adapter(live, tmp_path / "a")
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.bin: .* not loaded here\. Merge it: python -c") as told:
        adapter_at(ModelConfig(path=str(folder)))
    (code,) = re.findall('python -c "(.*)" and name', str(told.value))
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    merged = ModelConfig(path=f"{folder}-merged")
    assert load_tokenizer(merged).get_vocab() == tokenizer_of(base).get_vocab()
    model = load_model(merged, load_tokenizer(merged), 0)
    torch.testing.assert_close(loss_of(model), loss_of(live), rtol=1e-5, atol=0)


def test_a_folder_with_a_whole_model_and_an_adapter_is_an_error(base: Path, tmp_path: Path) -> None:
    live = adapted_model(AutoModelForCausalLM.from_pretrained(base), str(base), rank=4)
    shutil.copytree(base, tmp_path / "both")
    shutil.copytree(write_adapter(live, tmp_path / "a"), tmp_path / "both", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match=r"it holds adapter_config.json and config.json"):
        load_model(ModelConfig(path=str(tmp_path / "both")), tokenizer_of(base), 0)


def test_b_learns_at_its_own_rate() -> None:
    model = adapted_model(tiny_llama(), rank=4, lr_ratio_b=4.0)
    groups = parameter_groups(model, OptimConfig(name="adamw", weight_decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {group.get("lr_scale", 1.0): {names[id(p)].split(".")[-2] for p in group["params"]} for group in groups}
    assert found == {1.0: {"lora_A"}, 4.0: {"lora_B"}}
    assert {n for group in groups for n in group["numbers"]} == set(range(len(factors(model))))
    before = {name: p.detach().clone() for name, p in factors(model).items()}
    optimizer = build_optimizer(model, OptimConfig(name="adamw"))
    loss_of(model).backward()
    optimizer.update(1e-3, torch.ones(()))
    for name, p in factors(model).items():  # the first step of Adam is the learning rate
        moved = (p.detach() - before[name]).abs().max()
        torch.testing.assert_close(float(moved), 4e-3 if ".lora_B." in name else 1e-3, rtol=1e-3, atol=0)


def test_a_model_with_adapters_counts_them_and_its_checkpoint_alone() -> None:
    model = adapted_model(tiny_llama(), rank=4)
    size = sum(p.numel() for p in factors(model).values())
    assert size == 4 * sum(sum(layer.weight.shape) for layer in adapted(model).values())
    assert count_parameters(model).trained == size
    plan = SimpleNamespace(optim=OptimConfig(name="adamw"))
    assert checkpoint_bytes(model, plan) == 12 * size  # type: ignore[arg-type]
    # 4 a token for a frozen weight, 6 for a factor; a head only 4 a target.
    length = 16
    frozen = sum(p.numel() for block in model.model.layers for p in block.parameters() if not p.requires_grad)
    pairs = 2 * length**2
    attention = train_flops(model, Work(0, 0, pairs))
    found = train_flops(model, Work(tokens=length, targets=0, layer_pairs=pairs)) - attention
    assert found == pytest.approx(length * (4 * frozen + 6 * size), rel=0.01)  # the final norm


def test_a_launch_counts_no_gradients_of_a_frozen_model(base: Path) -> None:
    model, train = ModelConfig(path=str(base)), TrainConfig()
    whole = replica_of(model, OptimConfig(), train)
    adapter = replica_of(model, OptimConfig(), train, AdapterConfig(rank=1))
    assert whole is not None
    assert adapter is not None
    size = size_of(model, adapter=AdapterConfig(rank=1))
    assert size is not None
    assert adapter.held_bytes == 2 * adapter.parameters + 16 * size.factors < whole.held_bytes / 2


MIXTURE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("targets", [("all-linear",), ("attention",)])
@pytest.mark.parametrize("several", [(), (NamedAdapter(name="a", rank=2), NamedAdapter(name="b"))])
@pytest.mark.parametrize("kind", ["dense", "mixture", "config"])
def test_a_launch_counts_the_factors_of_experts_and_of_several_adapters(
    tmp_path: Path, kind: str, several: Any, targets: tuple[str, ...]
) -> None:
    model = tiny(Qwen3MoeConfig, **MIXTURE) if kind == "mixture" else tiny(Qwen3Config)
    model.save_pretrained(tmp_path)
    if kind == "config":  # all that the hub's cache may have
        (tmp_path / "model.safetensors").unlink()
    config, source = AdapterConfig(rank=4, targets=targets), ModelConfig(path=str(tmp_path))
    size = size_of(source, adapter=config, several=several)
    ranks = [one.rank or 4 for one in several] or [4]
    found = Adapters(replace(config, rank=1), 0, source, digest="")
    add_adapters(model, found)
    assert size is not None
    assert size.factors == sum(ranks) * sum(p.numel() for p in factors(model).values()) > 0
    shape = shape_of_fields(model.config.to_dict(), size)
    if shape is not None:
        assert shape.trained == size.factors


@pytest.mark.parametrize("model_type", AS_STORED)
def test_layers_that_the_headers_of_files_name_are_those_of_the_model(tmp_path: Path, model_type: str) -> None:
    model = build(model_type)
    model.save_pretrained(tmp_path)
    known = known_shapes(ModelConfig(path=str(tmp_path)))
    assert known is not None
    live = target_modules(model, AdapterConfig(rank=1))
    assert {*target_layers(known[0], AdapterConfig(rank=1), experts=known[1])} == {*live}
    shapes = {n: tuple(m.weight.shape) for n, m in live.items() if isinstance(m, torch.nn.Linear)}
    assert {name: known[0][name] for name in shapes} == shapes


def test_a_model_without_linear_layers_gets_no_adapter() -> None:
    with pytest.raises(ConfigError, match=r"all-linear is no linear layer .* It has none: adapter=null trains all"):
        target_modules(build("gpt2"), AdapterConfig())
    with pytest.raises(
        ConfigError, match=r"attention is no linear layer in the blocks of the model\. There are up_proj"
    ):
        target_layers({"model.layers.0.mlp.up_proj": (8, 4)}, AdapterConfig(rank=1, targets=("attention",)))
