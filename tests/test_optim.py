"""Schedules are pure functions of the step; weight decay touches matrices only."""

from __future__ import annotations

import pytest
import torch
from helpers import tiny_llama

from sftkit.config import OptimConfig
from sftkit.optim import build_optimizer, learning_rate

STEPS = 100


def curve(**settings) -> list[float]:
    optim = OptimConfig(lr=1.0, warmup_ratio=0.1, **settings)
    return [learning_rate(step, STEPS, optim) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "linear", "constant"])
def test_every_schedule_warms_up_to_the_peak_and_stays_within_it(schedule: str) -> None:
    lrs = curve(schedule=schedule)
    assert lrs[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(lrs) == 1.0
    assert min(lrs) > 0.0


def test_wsd_is_flat_until_the_decay_and_then_falls_linearly() -> None:
    lrs = curve(schedule="wsd", decay_ratio=0.2)
    assert set(lrs[10:80]) == {1.0}
    assert lrs[80:] == pytest.approx([1.0 - i / 20 for i in range(20)])


def test_cosine_and_linear_meet_in_the_middle_and_end_at_the_minimum() -> None:
    cosine, linear = (curve(schedule=kind, min_lr_ratio=0.1) for kind in ("cosine", "linear"))
    assert cosine[55] == pytest.approx(linear[55], abs=1e-6)
    assert cosine[-1] == pytest.approx(0.1, abs=0.01)
    assert linear[-1] == pytest.approx(0.11, abs=1e-6)


def test_constant_stays() -> None:
    assert set(curve(schedule="constant")[10:]) == {1.0}


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(1, 10, OptimConfig(lr=1.0, warmup_ratio=0.0, schedule="constant")) == 1.0


def test_norms_and_embeddings_are_not_decayed() -> None:
    model = tiny_llama()
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in optimizer.param_groups}
    assert all("norm" in name or "embed" in name for name in groups[0.0])
    assert not any("norm" in name or "embed" in name for name in groups[0.3])
    assert groups[0.0] | groups[0.3] == set(names.values())


def test_fused_adamw_equals_the_formula_of_the_paper() -> None:
    p = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    module = torch.nn.Module()
    module.p = p
    optimizer = build_optimizer(module, OptimConfig(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5))
    p.grad = torch.tensor([[0.3, -0.6]])
    optimizer.step()
    expected = torch.tensor([[1.0, -2.0]]) * (1 - 0.1 * 0.5) - 0.1 * torch.tensor([[1.0, -1.0]])
    torch.testing.assert_close(p.data, expected, rtol=1e-5, atol=1e-6)
