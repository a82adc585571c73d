"""Schedules are pure functions of the step; the right parameters reach the right optimizer; clipping equals torch's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from helpers import tiny_llama

from sftkit.config.schema import OptimConfig
from sftkit.errors import ConfigError
from sftkit.models.structure import Stages
from sftkit.optim import muon
from sftkit.optim.adamw import Numbered
from sftkit.optim.muon import Muon
from sftkit.optim.protocol import Optimizer, build_optimizer, clip_coefficient, learning_rate, squared_norm

STEPS = 100


def curve(**settings) -> list[float]:
    optim = OptimConfig(lr=1.0, warmup_ratio=0.1, **settings)
    return [learning_rate(step, STEPS, optim) for step in range(1, STEPS + 1)]


def make(name: str, model: torch.nn.Module, **settings) -> Optimizer:
    return build_optimizer(model, OptimConfig(name=name, **{"lr": 1e-3, "weight_decay": 0.1, **settings}))


def llama_with_gradients(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = tiny_llama().to(dtype)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return model


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


def test_the_warm_up_ends_at_the_first_whole_step_of_the_decimal_ratio() -> None:
    """Floats say 0.07 x 100 = 7.000000000000001, which is not 8 steps."""
    optim = [OptimConfig(lr=1.0, warmup_ratio=percent / 100, schedule="constant") for percent in range(1, 101)]
    for percent, one in enumerate(optim, start=1):
        for total in (50, 100, 300, 1000, 1700):
            ramp = -(-percent * total // 100)
            near = [step for step in range(max(ramp - 2, 1), total + 1)[:5] if learning_rate(step, total, one) == 1.0]
            assert near[0] == ramp, (percent, total)


def test_the_decay_of_wsd_takes_the_decimal_ratio_rounded_half_to_even() -> None:
    """Floats put 0.41 x 150 a little below 61.5, and 0.07 x 150 a little above 10.5."""
    for ratio, expected in ((0.41, 62), (0.07, 10)):
        optim = OptimConfig(lr=1.0, warmup_ratio=0.0, schedule="wsd", decay_ratio=ratio)
        lrs = [learning_rate(step, 150, optim) for step in range(1, 151)]
        assert sum(lr == 1.0 for lr in lrs) == 150 - expected + 1  # the first of the decay is at the peak too


def test_norms_and_embeddings_are_not_decayed() -> None:
    model = tiny_llama()
    optimizer = build_optimizer(model, OptimConfig(name="adamw", weight_decay=0.3))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in optimizer.param_groups}
    assert all("norm" in name or "embed" in name for name in groups[0.0])
    assert not any("norm" in name or "embed" in name for name in groups[0.3])
    assert groups[0.0] | groups[0.3] == set(names.values())


def test_fused_adamw_equals_the_formula_of_the_paper() -> None:
    p = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    module = torch.nn.Module()
    module.p = p
    optim = OptimConfig(name="adamw", lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5)
    optimizer = build_optimizer(module, optim)
    p.grad = torch.tensor([[0.3, -0.6]])
    optimizer.step()
    expected = torch.tensor([[1.0, -2.0]]) * (1 - 0.1 * 0.5) - 0.1 * torch.tensor([[1.0, -1.0]])
    torch.testing.assert_close(p.data, expected, rtol=1e-5, atol=1e-6)


def test_stochastic_rounding_needs_bf16_weights() -> None:
    with pytest.raises(ConfigError, match=r"train\.precision=bf16"):
        make("adamw_sr", tiny_llama())


def test_a_missing_torchao_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sftkit.optim.adamw8bit", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"sftkit\[fp8\]"):
        make("adamw8bit", tiny_llama())


def test_states_in_blocks_are_refused_for_a_weight_of_two_stages() -> None:
    model = tiny_llama()
    holders = {"model.embed_tokens.weight": (0, 1), "model.norm.weight": (1,)}
    model._stages = Stages((1, 1), None, holders, None)  # type: ignore[assignment, arg-type]
    with pytest.raises(ConfigError, match=r"adamw8bit: its random numbers .* use optim\.name=adamw_sr"):
        make("adamw8bit", model)


def norm_and_coefficient(model: torch.nn.Module, max_norm: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    norm = squared_norm(model.parameters(), world_size=1).sqrt().float()
    return norm, clip_coefficient(norm, norm.isfinite(), max_norm)


@pytest.mark.parametrize("max_norm", [0.5, 1e6, None])
def test_clipping_equals_torch_in_fp32(max_norm: float | None) -> None:
    model, reference = llama_with_gradients(), llama_with_gradients()
    norm, coefficient = norm_and_coefficient(model, max_norm)
    make("adamw", model).update(1e-3, coefficient)  # torch's fused update: it multiplies the gradients first
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf") if max_norm is None else max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    assert norm.ndim == coefficient.ndim == 0
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["adamw", "adamw_sr", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_is_not_finite_changes_no_weight_and_no_state(name: str, dtype: torch.dtype) -> None:
    if name == "adamw_sr" and dtype == torch.float32:
        pytest.skip("rounds bf16 only")
    model = llama_with_gradients(dtype)
    optimizer = make(name, model, lr=1e-2)
    optimizer.step()
    before = [value.clone() for value in tensors_of(model, optimizer)]
    set_random_gradients(model)
    next(model.parameters()).grad[0] = float("nan")
    norm, coefficient = norm_and_coefficient(model, 1.0)
    assert norm.isnan()
    optimizer.update(1e-2, coefficient)
    for old, new in zip(before, tensors_of(model, optimizer), strict=True):
        assert torch.equal(old, new)
    set_random_gradients(model)
    optimizer.update(1e-2, norm_and_coefficient(model, 1.0)[1])
    assert not torch.equal(before[0], tensors_of(model, optimizer)[0])


def tensors_of(model: torch.nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    states = [v for p in model.parameters() for k, v in optimizer.state[p].items() if k != "step"]
    return [*model.parameters(), *states]


def set_random_gradients(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p.dtype)


def test_the_norm_of_bf16_gradients_is_taken_in_fp32() -> None:
    model = llama_with_gradients(torch.bfloat16)
    exact = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()
    norm, _ = norm_and_coefficient(model, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_large_gradient_is_exact_to_fp32_and_the_same_on_one_process_and_on_two(
    dtype: torch.dtype,
) -> None:
    """torch's sum in fp32 on a CPU loses 6e-4 here."""
    weight = torch.nn.Parameter(torch.zeros(1 << 12, 1 << 12, dtype=dtype))
    odd = torch.nn.Parameter(torch.zeros(7, (1 << 16) + 3, dtype=dtype).t())  # not contiguous, no multiple of a chunk
    for seed, p in enumerate((weight, odd)):
        p.grad = (torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 1e-3 + 1e-3).to(dtype)
    exact = float(sum(p.grad.double().square().sum() for p in (weight, odd)).sqrt())
    share = squared_norm([weight, odd], world_size=1)
    assert share.sqrt().item() == pytest.approx(exact, rel=1e-12)
    halves = sum(squared_norm([weight, odd], world_size=2) for _ in range(2))
    assert halves.sqrt().float() == share.sqrt().float()


def test_the_norm_of_no_gradient_and_of_empty_ones_is_zero_and_of_nan_nan() -> None:
    empty, small = torch.nn.Parameter(torch.zeros(0, 4)), torch.nn.Parameter(torch.zeros(3))
    assert squared_norm([empty, small], world_size=1) == 0.0
    empty.grad, small.grad = torch.zeros(0, 4), torch.zeros(3)
    assert squared_norm([empty, small], world_size=1) == 0.0
    assert squared_norm([empty], world_size=1) == 0.0
    without = torch.nn.Parameter(torch.zeros(3))
    alike = [(share.dtype, share.device) for share in (squared_norm([without], 2), squared_norm([small], 2))]
    assert alike[0] == alike[1], "ranks add them up"
    small.grad[1] = float("nan")
    assert squared_norm([empty, small], world_size=1).isnan()


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = tiny_llama()
    optimizer = make("muon", model)
    names = {id(p): name for name, p in model.named_parameters()}
    muon = {names[id(p)] for g in optimizer.param_groups if g["block_matrices"] for p in g["params"]}
    assert muon == {n for n in names.values() if n.startswith("model.layers.") and "norm" not in n}
    everything = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(everything) == sorted(names)
    decayed = {names[id(p)] for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed == muon | {"lm_head.weight"}


def test_muon_without_named_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="_no_split_modules"):
        make("muon", torch.nn.Linear(4, 4))


NOISE = 3e-4
"A fiftieth of an update: products of bf16 matrices in a batch are not rounded as single ones are."
MATRICES = [(16, 48), (48, 16), (32, 32), (48, 16), (16, 48), (16, 48)]


def muon_steps(
    dtype: torch.dtype,
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    shapes: Sequence[tuple[int, int]] = MATRICES,
) -> list[torch.nn.Parameter]:
    """Matrices of a block after four updates."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    optimizer = make(params)
    for _ in range(4):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    return params


def muon_of(params: list[torch.nn.Parameter]) -> Muon:
    groups = [{"params": params, "weight_decay": 0.1, "block_matrices": True}]
    return Muon(groups, OptimConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-8))


def torchs_muon(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, 1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_muon_in_fp32_equals_torch_bitwise(shape: tuple[int, int]) -> None:
    (ours,), (theirs,) = (muon_steps(torch.float32, make, [shape]) for make in (muon_of, torchs_muon))
    assert torch.equal(ours, theirs)


def test_muon_of_many_matrices_in_fp32_equals_torch() -> None:
    ours, theirs = (muon_steps(torch.float32, make) for make in (muon_of, torchs_muon))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=NOISE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_updates_a_matrix_alike_whatever_others_are_in_its_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[list[int]] = []
    batches = muon._batches

    def noted(matrices: list[Numbered]) -> Iterator[list[Numbered]]:
        made = list(batches(matrices))
        sizes.append([len(batch) for batch in made])
        return iter(made)

    monkeypatch.setattr(muon, "_batches", noted)
    trained = []
    for elements in (muon.BATCH_ELEMENTS, 2 * 16 * 48, 1):
        monkeypatch.setattr(muon, "BATCH_ELEMENTS", elements)
        trained.append(muon_steps(dtype, muon_of))
    assert [sizes[0], sizes[4], sizes[8]] == [[3, 2, 1], [2, 1, 2, 1], [1, 1, 1, 1, 1, 1]]
    for others in trained[1:]:
        for p, q in zip(trained[0], others, strict=True):
            torch.testing.assert_close(p, q, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=NOISE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adamw_sr", "muon"])
def test_a_bf16_model_learns_like_its_fp32_twin(name: str) -> None:
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(0))

    def final_loss(name: str, dtype: torch.dtype) -> float:
        model = tiny_llama().to(dtype)
        optimizer = make(name, model, lr=5e-3)
        for _ in range(40):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            _, coefficient = norm_and_coefficient(model, 1.0)
            optimizer.update(5e-3, coefficient)
            optimizer.zero_grad()
        return loss.item()

    reference = final_loss("adamw" if name == "adamw_sr" else name, torch.float32)
    assert reference < 2.5  # from ln 64 = 4.16
    assert final_loss(name, torch.bfloat16) == pytest.approx(reference, abs=0.15)
