"""Which parameters are trained: patterns of train.freeze, and the work that a step saves by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny_llama
from torch.utils.flop_counter import FlopCounterMode

from sftkit.errors import ConfigError
from sftkit.models.structure import Work, train_flops
from sftkit.models.trained import freeze


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
            r'"model.embed_token.\*" matches no parameter .* did you mean "model.embed_tokens.weight"',
        ),
        (["model.layers.1"], r'"model.layers.1" matches no parameter .* did you mean "model.layers.1.\*"\?'),
        (["lm_head.*", "zzz"], r'^train.freeze: "zzz" matches no parameter of the model$'),
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
