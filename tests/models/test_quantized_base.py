"""A frozen model in NF4 with adapters computes what the dequantized model does, and keeps no dense weight."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cpu_runtime, make_layout_of, tiny, tiny_llama, tiny_recipe
from made_adapters import move_b
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from sftkit.compile.contract import compile_model, compiler_switches, inputs_with_gradient
from sftkit.config.schema import AdapterConfig, CompileConfig, LossConfig, ModelConfig, OptimConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.errors import ConfigError
from sftkit.launch.launch import Hardware, needs_of
from sftkit.memory.estimate import EstimateInputs, Shape, estimate, held_bytes
from sftkit.memory.plan import shape_of
from sftkit.models import joined_adapters
from sftkit.models.adapters import Adapters, adapted, add_adapters
from sftkit.models.files import NF4_BYTES, format_of, replica_of, size_of
from sftkit.models.joined_adapters import JoinedAttention, JoinedMlp, join_layers
from sftkit.models.load import load_model, model_of_files
from sftkit.models.structure import Work, count_parameters, train_flops
from sftkit.models.trained import factors
from sftkit.models.weights import materialize_weights
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops import nf4
from sftkit.ops.nf4 import Nf4, Nf4Linear, dequantize, matrix_of, quantize
from sftkit.train.assemble import load_orig_model
from sftkit.train.parts import Run
from sftkit.verify.plain import PlainModel
from sftkit.verify.replicas import FrozenWeights

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {}),  # with biases
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
}
IDS = torch.arange(26).reshape(2, 13) * 5 % 61


def with_adapters(model: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    """With adapters whose B is not zero."""
    add_adapters(model, Adapters(AdapterConfig(rank=4, **settings), 7, ModelConfig(path="base"), ""))
    return move_b(model)


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the weights of the blocks' layers by what their bits stand for in NF4."""
    for block in model.model.layers:
        for layer in block.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.data = dequantize(quantize(layer.weight.data), layer.weight.dtype)
    return model


def loss_of(model: Any) -> Tensor:
    logits = model(input_ids=IDS, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def gradients_of(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in factors(model).items() if p.grad is not None}


@pytest.mark.parametrize("targets", ["all-linear", "attention"])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_bitwise_those_of_the_dequantized_model(name: str, targets: str) -> None:
    config, fields = FAMILIES[name]
    dense = with_adapters(dequantized(tiny(config, **fields)), targets=(targets,))
    model = with_adapters(tiny(config, **fields), targets=(targets,), base="nf4")
    (loss, found), (expected, gradients) = gradients_of(model), gradients_of(dense)
    assert torch.equal(loss, expected)
    assert found.keys() == gradients.keys() == factors(model).keys()
    assert all(torch.equal(found[key], gradients[key]) for key in found)
    # Embedding, head and norms are as they were.
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.uint8}
    assert kept == {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)} - {
        "lm_head.weight"
    }
    others = [m for m in model.modules() if type(m) is Nf4Linear]
    assert len(others) == (3 * model.config.num_hidden_layers if targets == "attention" else 0)


def test_dora_begins_and_learns_as_on_the_dequantized_model() -> None:
    models = [with_adapters(dequantized(tiny_llama()), method="dora")]
    models.append(with_adapters(tiny_llama(), method="dora", base="nf4"))
    (expected, gradients), (loss, found) = map(gradients_of, models)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        assert (gradient - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name


def test_layers_that_are_computed_together_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_adapters, "has_kernel", lambda _: True)
    expected, gradients = gradients_of(with_adapters(tiny_llama(), base="nf4"))
    model = with_adapters(tiny_llama(), base="nf4")
    join_layers(model)
    assert {JoinedMlp, JoinedAttention} <= {cls for m in model.modules() for cls in type(m).__mro__}
    loss, found = gradients_of(model)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, gradient in found.items():
        assert (gradient - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name


def kept_matrices(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, *, naive: bool) -> int:
    """Return how many tensors a step keeps for its backward pass that are as large as a dense weight and share its
    shape."""
    if naive:

        def two_operators(x: Tensor, *matrix: Tensor) -> Tensor:
            return F.linear(x, _alone(*matrix))

        monkeypatch.setattr(nf4, "nf4_linear", two_operators)
    shapes = {(layer.out_features, layer.in_features) for layer in adapted(model).values()}
    shapes |= {(columns, rows) for rows, columns in shapes}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss_of(model).backward()
    own = {p.data_ptr() for p in model.parameters()}  # of the head
    return sum(tuple(t.shape) in shapes and t.is_floating_point() and t.data_ptr() not in own for t in kept)


@torch.library.custom_op("sftkit_tests::dequantize", mutates_args=())
def _alone(packed: Tensor, absmax: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Dequantize in an operator of its own."""
    return dequantize(Nf4(packed, absmax, scale, offset), torch.float32)


@_alone.register_fake
def _(packed: Tensor, *_: Tensor) -> Tensor:
    return packed.new_empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)


@pytest.mark.parametrize(
    ("budget", "checkpointing", "naive"),
    [
        *((0.9, False, False), (1.0, True, False), pytest.param(1.0, False, True, marks=pytest.mark.slow)),
        *((None, False, False), (None, True, False), (None, False, True)),
    ],
)
def test_a_step_keeps_no_dense_weight_for_its_backward_pass(
    budget: float | None, checkpointing: bool, naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled with a budget of activations, or eagerly (None); two operators would keep all of them."""
    torch._dynamo.reset()
    model = with_adapters(tiny_llama(), base="nf4")
    inputs_with_gradient(model, [])
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    compile = CompileConfig(enabled=budget is not None, backend="aot_eager")
    if budget is None:
        kept = kept_matrices(model, monkeypatch, naive=naive)
    else:
        with compiler_switches(compile, budget, graphs=4):
            compile_model(model, compile)
            kept = kept_matrices(model, monkeypatch, naive=naive)
    assert kept == (len(adapted(model)) if naive else 0)


def test_counts_are_those_of_the_model_before_it_was_quantized() -> None:
    plain, model = with_adapters(tiny_llama()), with_adapters(tiny_llama(), base="nf4")
    assert count_parameters(model) == count_parameters(plain)
    work = Work(tokens=16, targets=5, layer_pairs=100)
    assert train_flops(model, work) == train_flops(plain, work)
    shape, expected = shape_of(model), shape_of(plain)
    assert shape is not None
    assert expected is not None
    matrices = sum(layer.in_features * layer.out_features for layer in adapted(model).values())
    assert shape == replace(expected, nf4=matrices)


def test_an_estimate_counts_four_bits_and_one_dense_matrix() -> None:
    shape = Shape(
        parameters=8_000_000_000, ends=1_000_000_000, matrices=7_000_000_000, blocks=36, hidden=4096, query=4096,
        key=1024, inner=12288, head_dim=128, vocab=150_000, frozen=8_000_000_000, frozen_ends=1_000_000_000,
        frozen_matrices=7_000_000_000, frozen_head=True,
    )  # fmt: skip
    layout = make_layout_of("packed", [4096], row_length=4096, micro=1)
    dense = EstimateInputs(shape, layout, "adamw", "bf16", 1024, budget=0.9, compiled=True, checkpointing=False)
    packed = replace(dense, shape=replace(shape, nf4=7_000_000_000))
    less = (2 - NF4_BYTES) * 7_000_000_000
    assert held_bytes(dense) - held_bytes(packed) == pytest.approx(less, abs=1)
    assert estimate(dense).weights - estimate(packed).weights == pytest.approx(less, abs=1)
    assert estimate(packed).transient - estimate(dense).transient in (0, 2 * 4096 * 12288)


@pytest.fixture
def base(tmp_path: Path, tokenizer: Any) -> Path:
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_a_launch_counts_four_bits_and_takes_replicas(base: Path, tmp_path: Path) -> None:
    model = ModelConfig(path=str(base))
    found = [replica_of(model, OptimConfig(), TrainConfig(), AdapterConfig(base=kind)) for kind in ("bf16", "nf4")]
    dense, packed = found
    assert dense is not None
    assert packed is not None
    size = size_of(model, (), AdapterConfig(base="nf4"))
    assert size is not None
    assert size.nf4 == dense.parameters - size.ends > 0
    assert dense.held_bytes - packed.held_bytes == int((2 - NF4_BYTES) * size.nf4)
    cfg = tiny_recipe(tmp_path, model=model, adapter=AdapterConfig(base="nf4"))
    needs = needs_of(cfg, Hardware(gpus=4, gpu_name="GPU", gpu_memory_bytes=1 << 40, cpu_cores=8))
    assert needs.rows_fit(Topology(replicas=4)) is None


def test_the_plain_model_has_the_dequantized_weights_of_the_files_and_finds_a_changed_bit(base: Path) -> None:
    live = model_of_files(ModelConfig(path=str(base)))
    assert live is not None
    add_adapters(live, Adapters(AdapterConfig(rank=2, base="nf4"), 5, ModelConfig(path=str(base)), ""))
    model = ModelWithLoss(live, "reference", NextToken(LossConfig()))
    start = ModelConfig(path=str(base))
    plain = PlainModel(model, torch.device("cpu"), start)
    assert plain.differing == {}
    name = "model.layers.1.mlp.up_proj"
    layer = live.get_submodule(name)
    assert isinstance(layer, torch.nn.Linear)
    matrix = matrix_of(layer)
    assert matrix is not None
    assert torch.equal(plain._whole(f"{name}.weight"), dequantize(matrix, torch.float32))
    held = plain.orig_model.get_parameter(f"{name}.weight")
    assert held.shape == (layer.out_features, layer.in_features)
    assert held.isnan().all(), "nothing dense is held between its uses"
    for changed, found in ((matrix.packed, f"{name}.weight"), (matrix.absmax, f"{name}.absmax")):
        with torch.no_grad():
            changed.view(-1)[0] ^= 16
        assert [*PlainModel(model, torch.device("cpu"), start).differing] == [found]
        with torch.no_grad():
            changed.view(-1)[0] ^= 16


@pytest.mark.parametrize("converted", [False, True], ids=["names-of-the-files", "other-names"])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_matrices_that_are_quantized_while_they_are_read_have_the_same_bits_and_one_is_dense_at_a_time(
    base: Path, tokenizer: Any, method: Any, converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files with other names than the model are read by transformers, which maps them into memory."""
    if converted:
        weights = load_file(base / "model.safetensors")
        weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        save_file(weights, base / "model.safetensors", {"format": "pt"})
    source = ModelConfig(path=str(base))
    adapter = AdapterConfig(rank=2, base="nf4", method=method)
    whole = load_model(source, tokenizer, 5, "bf16", adapter=adapter)
    empty = load_model(source, tokenizer, 5, "bf16", empty=True, adapter=adapter)
    assert all(p.is_meta for p in empty.parameters())
    dense: list[weakref.ref[Tensor]] = []

    def watched(weight: Tensor) -> Nf4:
        assert not any(other() is not None for other in dense)
        dense.append(weakref.ref(weight))
        return quantize(weight)

    monkeypatch.setattr(nf4, "quantize", watched)
    materialize_weights(empty, source, torch.device("cpu"))
    assert len(dense) == len(adapted(whole))
    found, expected = (model.state_dict(keep_vars=True) for model in (empty, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    for one, other in zip(adapted(empty).values(), adapted(whole).values(), strict=True):
        assert method == "lora" or torch.equal(one.squared_rows, other.squared_rows)  # type: ignore[attr-defined]
    assert torch.equal(loss_of(empty), loss_of(whole))


@pytest.mark.parametrize("kind", ["bf16", "nf4"])
def test_a_run_starts_with_a_model_without_weights_where_they_are_quantized(
    base: Path, tokenizer: Any, kind: Any, tmp_path: Path
) -> None:
    cfg = tiny_recipe(tmp_path, model=ModelConfig(path=str(base)), adapter=AdapterConfig(rank=2, base=kind))
    cfg = replace(cfg, data=replace(cfg.data, max_length=32))
    loaded = load_orig_model(Run(cfg, "sft", cpu_runtime(), tmp_path), tokenizer)
    assert {p.is_meta for p in loaded.orig_model.parameters()} == {kind == "nf4"}


@pytest.mark.parametrize("wrong", ["shape", "missing"])
def test_a_matrix_that_does_not_fit_is_rejected_while_it_is_read(base: Path, tokenizer: Any, wrong: str) -> None:
    weights, name = load_file(base / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name][1:]
    if wrong == "missing":
        del weights[name]
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    source = ModelConfig(path=str(base))
    empty = load_model(source, tokenizer, 5, empty=True, adapter=AdapterConfig(rank=2, base="nf4"))
    expected = rf"{name} has shape \[\d+, \d+\] in the files" if wrong == "shape" else f"its files lack {name}"
    with pytest.raises(ConfigError, match=expected):
        materialize_weights(empty, source, torch.device("cpu"))


def test_a_changed_bit_of_weights_or_scales_is_seen() -> None:
    model = with_adapters(tiny_llama(), base="nf4")
    frozen = FrozenWeights(model, cpu_runtime())
    assert frozen.check(1)[0].ok
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.absmax_offset"):
        watch = FrozenWeights(model, cpu_runtime())
        tensor = dict(model.named_parameters())[name] if name.endswith("weight") else model.get_buffer(name)
        with torch.no_grad():
            tensor.add_(1)
        row = watch.check(2)[0]
        assert not row.ok
        assert name in row.found


def test_models_that_would_stay_large_are_rejected() -> None:
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(ConfigError, match=r"mlp.experts have three-dimensional weights.*set adapter.base=bf16"):
        with_adapters(tiny(Qwen3MoeConfig, **sizes), base="nf4", experts=False)
    with pytest.raises(ConfigError, match=r"q_proj has 33 inputs, an odd number"):
        with_adapters(tiny_llama(hidden_size=33, num_attention_heads=1, head_dim=32), base="nf4")


def test_a_base_that_is_quantized_already_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"for QLoRA set adapter.base=nf4, which quantizes it while loading"):
        format_of({"quantization_config": {"load_in_4bit": True}}, "base: config.json")
