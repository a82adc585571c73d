"""Several adapters in one model: each share of the rows is computed by its own, and only by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny, tiny_llama
from made_adapters import move_b
from transformers import PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from sftkit.config.schema import AdapterConfig, ModelConfig, NamedAdapter
from sftkit.errors import ConfigError
from sftkit.models.adapters import Adapters, add_adapters
from sftkit.models.joined_adapters import join_layers
from sftkit.models.many_adapters import active, member_factors, members_of
from sftkit.models.structure import Work, count_parameters, train_flops
from sftkit.models.trained import adapters_of, factors
from sftkit.train.several import EvaluationOfEach

ENTRIES = (NamedAdapter(name="a"), NamedAdapter(name="b", rank=2, alpha=3.0, seed=5), NamedAdapter(name="c", rank=7))
CPU = torch.device("cpu")
IDS = torch.arange(72).reshape(6, 12) * 5 % 61


def shared(**settings: Any) -> Adapters:
    return Adapters(AdapterConfig(rank=4, **settings), 7, ModelConfig(path="base"), "")


def several(model: PreTrainedModel) -> PreTrainedModel:
    """With three adapters whose B is not zero."""
    add_adapters(model, members_of(shared(), seed=7, entries=ENTRIES))
    join_layers(model)
    return move_b(model)


def alone(model: PreTrainedModel, like: PreTrainedModel, k: int) -> PreTrainedModel:
    """With the adapter of one of the members by itself."""
    adapters = adapters_of(like)
    assert adapters is not None
    member = adapters.members[k]
    add_adapters(model, Adapters(member.config, member.seed, member.base, ""))
    with torch.no_grad():
        for name, factor in member_factors(like, k).items():
            model.get_parameter(name).copy_(factor)
    return model


def selection(model: PreTrainedModel) -> Any:
    return adapters_of(model).selection  # type: ignore[union-attr]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("config", [None, Qwen3Config])
def test_each_share_of_a_batch_is_computed_as_in_a_model_with_its_adapter_alone(config: Any, order: Any) -> None:
    make = tiny_llama if config is None else lambda: tiny(config)
    model = several(make()).train()
    selection(model).begin(order, CPU)
    together = model(input_ids=IDS).logits
    together.square().sum().backward()
    for share, k in enumerate(order):
        own = alone(make(), model, k).train()
        logits = own(input_ids=IDS[2 * share : 2 * share + 2]).logits
        torch.testing.assert_close(together[2 * share : 2 * share + 2], logits, rtol=1e-5, atol=1e-6)
        logits.square().sum().backward()
        for name, factor in member_factors(model, k).items():
            expected = own.get_parameter(name).grad
            assert factor.grad is not None
            assert expected is not None
            assert float((factor.grad - expected).norm() / expected.norm()) < 1e-5
    assert all(p.grad is None for name, p in model.named_parameters() if ".lora_" not in name)


def test_an_adapter_without_a_share_has_the_gradient_zero_and_a_nan_stays_in_its_share() -> None:
    model = several(tiny_llama()).train()
    with torch.no_grad():
        member_factors(model, 2)["model.layers.0.mlp.up_proj.lora_A.weight"][0, 0] = torch.nan
    selection(model).begin((0, 2), CPU)
    logits = model(input_ids=IDS[:4]).logits
    logits.square().sum().backward()
    assert logits[:2].isfinite().all()
    assert logits[2:].isnan().all()
    for p in member_factors(model, 0).values():
        assert p.grad is not None
        assert p.grad.isfinite().all()
        assert p.grad.any()
    assert not any(p.grad.any() for p in member_factors(model, 1).values() if p.grad is not None)


def test_the_factors_of_all_adapters_share_one_tensor_and_its_gradient_also_after_the_model_was_moved() -> None:
    model = several(tiny_llama()).train().to(torch.float64)
    selection(model).begin((0, 1, 2), CPU)
    for _ in range(2):  # the second gradient is added to the first
        model(input_ids=IDS).logits.square().sum().backward()
    for name in member_factors(model, 0):
        layer, which = model.get_submodule(name.partition(".lora_")[0]), name.split("_")[-1][0]
        own = [member_factors(model, k)[name] for k in range(3)]
        joint, _ = layer.joined[which]
        assert joint.grad is None
        assert {factor.untyped_storage().data_ptr() for factor in own} == {joint.untyped_storage().data_ptr()}
        assert joint.untyped_storage().nbytes() == 3 * max(factor.nbytes for factor in own)
        assert all(factor.grad is not None and factor.grad.any() for factor in own)


def test_outside_of_training_one_adapter_computes_all_rows() -> None:
    model = several(tiny_llama())
    for k in (0, 1, 2):
        own = alone(tiny_llama(), model, k)
        with active(model, k), torch.no_grad():
            model.eval()
            assert torch.equal(model(input_ids=IDS[:1]).logits, own.eval()(input_ids=IDS[:1]).logits)
            model.train()
            selection(model).begin((), CPU)
            torch.testing.assert_close(model(input_ids=IDS[:1]).logits, own(input_ids=IDS[:1]).logits)
    assert selection(model).active == 0


def test_factors_begin_as_those_of_an_adapter_alone_with_the_same_seed() -> None:
    model = add_many(tiny_llama())
    for k, seed, rank in ((0, 7, 4), (1, 5, 2), (2, 7, 7)):
        own = tiny_llama()
        add_adapters(own, Adapters(AdapterConfig(rank=rank), seed, ModelConfig(path="base"), ""))
        assert all(torch.equal(p, own.get_parameter(name)) for name, p in member_factors(model, k).items())


def add_many(model: PreTrainedModel) -> PreTrainedModel:
    add_adapters(model, members_of(shared(), seed=7, entries=ENTRIES))
    return model


def test_all_adapters_are_trained_parameters_and_a_token_works_with_one() -> None:
    model, own = add_many(tiny_llama()), tiny_llama()
    counted = count_parameters(model)
    factors_of_all = sum(p.numel() for p in factors(model).values())
    assert counted.trained == factors_of_all
    assert counted.total == count_parameters(own).total + factors_of_all
    same = tiny_llama()
    entries = [NamedAdapter(name=name) for name in "abcd"]
    add_adapters(same, members_of(shared(), seed=0, entries=entries))
    add_adapters(own, shared())
    work = Work(tokens=100, targets=50, layer_pairs=1000)
    assert train_flops(same, work) == pytest.approx(train_flops(own, work), rel=1e-6)


def test_models_with_experts_and_ranks_above_a_layer_are_rejected() -> None:
    moe = tiny(Qwen3MoeConfig, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    with pytest.raises(ConfigError, match=r"adapters: models with experts"):
        add_adapters(moe, members_of(shared(experts=False), seed=0, entries=ENTRIES))
    wide = (NamedAdapter(name="a"), NamedAdapter(name="b", rank=64))
    with pytest.raises(ConfigError, match=r"adapter.rank=64: .* has 32 inputs"):
        add_adapters(tiny_llama(), members_of(shared(), seed=0, entries=wide))


@dataclass
class Stub:
    """What EvaluationOfEach needs of a suite."""

    orig_model: PreTrainedModel
    part: str = ""
    tasks: tuple[Any, ...] | None = None
    encoded_tasks: tuple[Any, ...] = field(default=())
    run_dir: Path = Path()

    def evaluate(self, step: int) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        return {"val/loss": float(selection(self.orig_model).active), "eval/mmlu/acc": step}, [{"answer": self.part}]


def test_an_evaluation_is_made_with_each_adapter_under_its_name() -> None:
    model = several(tiny_llama())
    metrics, samples = EvaluationOfEach(Stub(model), ["a", "b", "c"]).evaluate(3)  # type: ignore[arg-type]
    assert metrics == {
        **{f"val/{name}/loss": float(k) for k, name in enumerate("abc")},
        **{f"eval/{name}/mmlu/acc": 3 for name in "abc"},
    }
    assert samples == [{"adapter": name, "answer": name} for name in "abc"]
