"""Which parameters are trained: patterns of train.freeze, and the work that a step saves by them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import cpu_runtime, make_layout_of, tiny_llama
from made_adapters import adapted_model
from made_captioners import CAPTIONER, made
from torch.utils.flop_counter import FlopCounterMode

from sftkit.config.schema import ModelConfig, OptimConfig
from sftkit.errors import ConfigError
from sftkit.memory.estimate import EstimateInputs, estimate, held_bytes
from sftkit.memory.plan import checkpoint_bytes, shape_of
from sftkit.models.files import frozen_in_files, size_of, training_bytes
from sftkit.models.structure import Work, count_parameters, train_flops
from sftkit.models.trained import freeze, learning_rate_scales
from sftkit.optim.protocol import build_optimizer, parameter_groups, set_learning_rate
from sftkit.verify.replicas import FrozenWeights


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_patterns_freeze_the_parameters_that_they_match_and_no_others() -> None:
    model = tiny_llama()
    everything = trained(model)
    freeze(model, [])
    assert trained(model) == everything
    freeze(model, ["model.embed_tokens.*", "model.layers.[0]*.mlp.*"])
    gone = everything - trained(model)
    assert gone == {"model.embed_tokens.weight", *(n for n in everything if n.startswith("model.layers.0.mlp."))}
    assert all(p.requires_grad is (name not in gone) for name, p in model.named_parameters())


@pytest.mark.parametrize("pattern", ["lm_head.*", "model.embed_tokens.*"])
def test_a_tied_weight_is_frozen_under_both_of_its_names(pattern: str) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    freeze(model, [pattern])
    assert not model.lm_head.weight.requires_grad
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.model.embed_tokens.weight.requires_grad
    assert trained(model)


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (
            ["model.embed_token.*"],
            r'"model.embed_token.\*" matches no parameter .* did you mean "model.embed_tokens.\*"',
        ),
        (["model.layers.1"], r'"model.layers.1" matches no parameter .* did you mean "model.layers.1.\*"\?'),
        (["lm_head.*", "zzz"], r'^train.freeze: "zzz" matches no parameter of the model; one is lm_head.weight$'),
        (["*.mpl.*"], r'"\*.mpl.\*" matches no parameter of the model: did you mean "\*.mlp.\*"\?$'),
        (["model.layrs.*"], r'"model.layrs.\*" matches no parameter of the model: did you mean "model.layers.\*"\?$'),
        (["*"], "freezes every parameter"),
        (["model.*", "lm_head.*"], "freezes every parameter"),
    ],
)
def test_a_pattern_without_a_parameter_and_freezing_everything_are_errors(patterns: list[str], told: str) -> None:
    model = tiny_llama()
    with pytest.raises(ConfigError, match=told):
        freeze(model, patterns)
    assert trained(model) == {name for name, _ in model.named_parameters()}


def counted_by_torch(model: Any, length: int) -> float:
    """FLOPs of a step of a document, by torch: an input of the blocks has a gradient where the model's has one."""
    counter = FlopCounterMode(display=False)
    ids = torch.arange(length)[None] % 32
    model.config._attn_implementation = "eager"
    with counter:
        model(ids, use_cache=False).logits.sum().backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize(
    "patterns",
    [
        [],
        ["model.embed_tokens.*"],
        ["lm_head.*"],
        ["model.*.mlp.*", "lm_head.*"],
        ["model.embed_tokens.*", "model.layers.[01].*"],
        ["model.embed_tokens.*", "model.layers.*"],
        ["model.layers.*", "model.norm.*"],
        ["model.layers.2.*"],
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_flops_of_a_partly_frozen_model_are_those_that_torch_counts(patterns: list[str], tied: bool) -> None:
    model = tiny_llama(layers=3, tie_word_embeddings=tied)
    freeze(model, patterns)
    length = 16
    ours = train_flops(model, Work(tokens=length, targets=length, layer_pairs=3 * length**2))
    assert ours == pytest.approx(counted_by_torch(model, length), rel=0.015)  # norms are no products for torch


def test_what_a_frozen_model_holds_is_counted_with_and_without_torch(tmp_path: Path) -> None:
    """Weights whole; gradients and states as an optimizer really makes them; the same from the names in the files."""
    patterns = ["model.embed_tokens.*", "model.layers.0.*", "*.mlp.up_proj.*"]
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    freeze(model, patterns)
    optimizer = build_optimizer(model, OptimConfig(name="adamw"))
    model(torch.arange(9)[None]).logits.sum().backward()
    optimizer.update(1e-3, torch.ones(()))
    weights = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    states = sum(t.nbytes for state in optimizer.state.values() for name, t in state.items() if name != "step")
    assert gradients == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad) < weights

    shape, layout = shape_of(model), make_layout_of("packed", [8])
    assert shape is not None
    setup = EstimateInputs(shape, layout, "adamw", "fp32", 64, 1.0, compiled=True, checkpointing=False)
    assert held_bytes(setup) == weights + gradients + states
    assert estimate(setup).optimizer == states
    assert checkpoint_bytes(model, SimpleNamespace(optim=OptimConfig(name="adamw"))) == weights + states  # type: ignore[arg-type]
    size = size_of(ModelConfig(path=str(tmp_path)), patterns)
    assert size is not None
    assert training_bytes(size, "adamw", "fp32") == weights + gradients + states
    assert size.frozen_ends == shape.frozen_ends == model.model.embed_tokens.weight.numel()
    assert frozen_in_files(tmp_path, patterns).keys() == {n for n, p in model.named_parameters() if not p.requires_grad}


def test_an_estimate_has_no_activations_of_frozen_first_blocks_and_no_gradient_of_a_frozen_head() -> None:
    whole, prefix, head = tiny_llama(layers=4), tiny_llama(layers=4), tiny_llama(layers=4)
    freeze(prefix, ["model.embed_tokens.*", "model.layers.[01].*"])
    freeze(head, ["lm_head.*"])
    found = []
    for model in (whole, prefix, head):
        shape = shape_of(model)
        assert shape is not None
        layout = make_layout_of("packed", [64], row_length=64, batch=1, micro=1)
        setup = EstimateInputs(shape, layout, "adamw", "fp32", 64, 1.0, compiled=True, checkpointing=False)
        found.append(estimate(setup))
    assert found[1].activations * 2 == found[0].activations == found[2].activations
    assert found[0].weights == found[1].weights == found[2].weights
    assert found[2].transient < found[0].transient
    assert found[0].optimizer - found[2].optimizer == 8 * head.lm_head.weight.numel()


def test_a_tied_head_is_frozen_under_its_other_name_in_the_files_too(tmp_path: Path) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert frozen_in_files(tmp_path, ["lm_head.*"]).keys() == {"model.embed_tokens.weight"}
    assert frozen_in_files(tmp_path, []) == {}


@pytest.mark.parametrize("step", [None, 4])
def test_a_changed_element_of_a_frozen_weight_turns_the_row_red_and_names_it(step: int | None, tmp_path: Path) -> None:
    model = tiny_llama()
    freeze(model, ["model.embed_tokens.*", "model.layers.1.*"])
    watch = FrozenWeights(model, cpu_runtime())
    watch.compare(3)
    if step is not None:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 5] *= 1 + 2**-23
        watch.compare(step)
    (row,) = watch.check(9)
    assert row.ok is (step is None)
    assert row.found == (
        "10 weights with 11,328 parameters" if step is None else "model.layers.1.mlp.up_proj.weight (seen at step 4)"
    )
    assert FrozenWeights(tiny_llama(), cpu_runtime()).check(9) == []


def test_learning_rates_of_groups_are_scaled_and_random_bits_do_not_depend_on_frozen_weights() -> None:
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "lr_scale": 16.0}]
    set_learning_rate(groups, 0.25)
    assert [group["lr"] for group in groups] == [0.25, 4.0]
    model = tiny_llama()
    freeze(model, ["model.layers.0.*"])
    numbers = [n for group in parameter_groups(model, OptimConfig(name="adamw")) for n in group["numbers"]]
    assert numbers == list(range(len(trained(model))))


PATTERNS = {"*": 0.5, "model.embed_tokens.*": 0.1, "*.mlp.*": 2.0, "model.layers.1.mlp.up_proj.*": 4.0}
"the last one that matches counts"


def scale_of(name: str) -> float:
    at = [name.startswith("model.embed_tokens."), ".mlp." in name, name.startswith("model.layers.1.mlp.up_proj.")]
    return next((scale for scale, matches in zip((4.0, 2.0, 0.1), at[::-1], strict=True) if matches), 0.5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_update_has_the_size_of_each_patterns_learning_rate(name: str) -> None:
    """The first update of AdamW is the learning rate, and Muon's is linear in it: one rate for all is the measure."""
    found = []
    for scales in ({}, PATTERNS):
        torch.manual_seed(0)
        model = tiny_llama()
        freeze(model, ["model.layers.0.mlp.gate_proj.*"])
        optimizer = build_optimizer(model, OptimConfig(name=name, eps=1e-30, lr_scale=scales))
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
        optimizer.update(1e-3, torch.ones(()))
        found.append({n: float((p.detach() - before[n]).abs().max()) for n, p in model.named_parameters()})
    one, scaled = found
    assert scaled["model.layers.0.mlp.gate_proj.weight"] == 0
    for parameter in trained(model):
        assert scaled[parameter] == pytest.approx(one[parameter] * scale_of(parameter), rel=0.02), parameter
    groups = parameter_groups(model, OptimConfig(name=name, lr_scale=PATTERNS))
    assert sorted(n for group in groups for n in group["numbers"]) == list(range(len(trained(model))))


def test_factors_of_tied_weights_and_of_adapters_and_patterns_without_a_trained_parameter() -> None:
    tied = tiny_llama(tie_word_embeddings=True)
    assert learning_rate_scales(tied, {"lm_head.*": 3.0}) == {id(tied.model.embed_tokens.weight): 3.0}
    adapted = adapted_model(tiny_llama(), rank=4, lr_ratio_b=4.0)
    names = {id(p): name for name, p in adapted.named_parameters()}
    groups = parameter_groups(adapted, OptimConfig(name="adamw", lr_scale={"*.mlp.*": 0.5}))
    found = {
        (names[id(p)].split(".")[-2], ".mlp." in names[id(p)], group["lr_scale"])
        for group in groups
        for p in group["params"]
    }
    assert found == {("lora_A", False, 1.0), ("lora_B", False, 4.0), ("lora_A", True, 0.5), ("lora_B", True, 2.0)}
    model = tiny_llama()
    freeze(model, ["model.norm.*"])
    for pattern, told in (("model.norm.*", "matches no trained"), ("lm_head", r'did you mean "lm_head.\*"')):
        with pytest.raises(ConfigError, match=told):
            learning_rate_scales(model, {pattern: 2.0})


def test_an_optimizer_of_matrices_alone_says_so_if_all_of_them_are_frozen() -> None:
    model = tiny_llama()
    freeze(model, ["model.layers.*.self_attn.*", "model.layers.*.mlp.*"])
    with pytest.raises(ConfigError, match=r"no trained matrix in a decoder block \(_no_split_modules, train.freeze\)"):
        parameter_groups(model, OptimConfig(name="muon"))
    freeze(model, ["model.norm.*"])
    assert parameter_groups(model, OptimConfig(name="adamw"))


def test_a_frozen_encoder_costs_its_forward_pass_alone() -> None:
    model = made(CAPTIONER)
    whole = train_flops(model, Work(7, 5, 100, 3, 10))
    vit, between = count_parameters(model), sum(p.numel() for p in model.enc_to_dec_proj.parameters())
    keys = sum(p.numel() for h in model.decoder.transformer.h for p in h.crossattention.c_attn.parameters())
    freeze(model, ["encoder.*"])
    # Of the encoder neither gradient, of the projection after it none of its inputs; a third of the encoder's scores.
    spared = 2 * (2 * (vit.encoder - between - keys) + between) * 3 * 10 + 8 * 24 * 2 * 3 * 10**2
    assert whole - train_flops(model, Work(7, 5, 100, 3, 10)) == pytest.approx(spared)
    freeze(model, ["enc_to_dec_proj.*"])
    more = 2 * (between + keys) * 3 * 10
    assert whole - train_flops(model, Work(7, 5, 100, 3, 10)) == pytest.approx(spared + more)
