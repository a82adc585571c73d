"""Optimizers of bf16 weights do what AdamW does with fp32 ones, resume bit for bit, and compile once."""

from __future__ import annotations

import copy
import importlib.util
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import scalar_kernels
from torch._dynamo import utils as dynamo_utils

from sftkit.config.schema import OptimConfig
from sftkit.config.tables import OPTIMIZERS
from sftkit.errors import ConfigError
from sftkit.ops.tensors import ParameterShard, int32, noise16, stochastic_round
from sftkit.optim.adamw import FusedAdamW, corrections, update_eagerly
from sftkit.optim.protocol import Optimizer, build_optimizer, learning_rate
from sftkit.runtime.open import random_key

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
TORCHAO = pytest.param("adamw8bit", marks=pytest.mark.skipif(not HAS_TORCHAO, reason="needs torchao, the extra fp8"))
BF16_OPTIMIZERS = ["adamw", "adamw_sr", "muon", TORCHAO]


@pytest.fixture(autouse=True)
def _cpu_kernels_that_are_soon_compiled() -> Iterator[None]:
    with scalar_kernels():
        yield


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.ones(64, 64))
        self.norm = torch.nn.Parameter(torch.ones(64))
        self.scale = torch.nn.Parameter(torch.ones(1))


class Small(torch.nn.Module):
    """A parameter of each kind; 64 x 64 is the smallest that torchao quantizes."""

    _no_split_modules = ("Block",)

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.block = Block()
        self.head = torch.nn.Parameter(torch.ones(7, 9))
        self.to(dtype)


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p)


def run_steps(model: torch.nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.update(1e-3 / (step + 1), torch.tensor(0.5))


def make(name: str, model: torch.nn.Module, seed: int = 0, **settings) -> Optimizer:
    return build_optimizer(model, OptimConfig(name=name, **{"lr": 1e-3, "weight_decay": 0.1, **settings}), seed)


def plain_tensors(state: dict) -> list[torch.Tensor]:
    """The tensors of a parameter's state; a quantized one as its codes and scales."""
    tensors = [torch.as_tensor(value) for value in state.values()]
    parts = [[t.codes, t.scale] if hasattr(t, "codes") else [t] for t in tensors]
    return [part for both in parts for part in both]


def assert_same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)


def distance_after_training(make_optimizer, dtype: torch.dtype, steps: int = 300) -> float:
    """Mean signed distance to a minimum at first 3% away, in updates of 1/20 of the spacing of bf16 numbers and less."""
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    target = 1.03 + 0.003 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    module = torch.nn.Module()
    module.weight = weight
    optimizer = make_optimizer(module)
    for step in range(1, steps + 1):
        weight.grad = (weight.detach().float() - target).to(dtype)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, OptimConfig(lr=4e-4, warmup_ratio=0.0, schedule="linear"))
        optimizer.step()
    return (optimizer.state[weight].get("master", weight.detach().float().flatten()) - target.flatten()).mean().item()


def test_plain_bf16_adamw_loses_small_updates_which_is_why_the_others_exist() -> None:
    plain = distance_after_training(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4), torch.bfloat16)
    exact = distance_after_training(lambda m: make("adamw", m, weight_decay=0.0), torch.float32)
    assert plain == pytest.approx(-0.03, abs=1e-3)
    assert abs(exact) < 0.003


@pytest.mark.parametrize("name", ["adamw", "adamw_sr", TORCHAO])
def test_bf16_optimizers_converge_like_fp32_adamw(name: str) -> None:
    exact = distance_after_training(lambda m: make("adamw", m, weight_decay=0.0), torch.float32)
    ours = distance_after_training(lambda m: make(name, m, weight_decay=0.0), torch.bfloat16)
    assert ours == pytest.approx(exact, abs=1e-3)


def test_master_weights_follow_fp32_adamw_fed_the_same_gradients() -> None:
    model, reference = Small(), Small(torch.float32)
    optimizer, reference_optimizer = make("adamw", model), make("adamw", reference)
    assert type(reference_optimizer) is FusedAdamW
    assert isinstance(reference_optimizer, torch.optim.AdamW)
    run_steps(model, optimizer, range(20))
    run_steps(reference, reference_optimizer, range(20))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        master = optimizer.state[ours]["master"].view(ours.shape)
        torch.testing.assert_close(master, theirs.detach(), rtol=2e-6, atol=0)
        assert ((ours.float() - master).abs() <= master.abs() * 2**-7).all()  # one of the two bf16 neighbours


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_bf16_copies_of_masters_move_from_the_first_step_on_and_on_average_as_far(name: str) -> None:
    """To the nearest, no weight would move: the update is an eighth of the distance to the next bf16 number."""
    model = torch.nn.Module()
    model.block = torch.nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
    model._no_split_modules = ["Linear"]
    torch.nn.init.constant_(model.block.weight, 1.0)
    lr = 2**-10 if name == "adamw" else 2**-10 / (0.2 * 512**0.5 / 512)
    optimizer = make(name, model, weight_decay=0.0, lr=lr)
    model.block.weight.grad = torch.ones_like(model.block.weight)
    optimizer.step()
    master = optimizer.state[model.block.weight]["master"]
    moved = 1.0 - model.block.weight.float()
    assert 0.01 < (moved > 0).float().mean() < 0.99
    assert moved.mean().item() == pytest.approx((1.0 - master).mean().item(), rel=0.02)


@pytest.mark.parametrize("name", ["adamw", "adamw_sr", "muon"])
def test_a_tensor_that_the_model_keeps_in_fp32_stays_exact(name: str) -> None:
    model, reference = Small(), Small(torch.float32)
    model.block.norm.data = model.block.norm.data.float()
    optimizer = make(name, model)
    run_steps(model, optimizer, range(3))
    run_steps(reference, make("adamw", reference), range(3))
    torch.testing.assert_close(model.block.norm, reference.block.norm, rtol=1e-6, atol=0)
    state = optimizer.state[model.block.norm]
    assert "master" not in state
    assert state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("name", BF16_OPTIMIZERS)
def test_resuming_is_bitwise_and_states_keep_their_dtypes(name: str) -> None:
    straight = Small()
    optimizer = make(name, straight)
    run_steps(straight, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    resumed = copy.deepcopy(straight)
    run_steps(straight, optimizer, range(3, 6))

    torch.manual_seed(12345)
    file.seek(0)
    fresh = make(name, resumed)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    run_steps(resumed, fresh, range(3, 6))
    assert_same(straight, resumed)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        ours, theirs = plain_tensors(optimizer.state[a]), plain_tensors(fresh.state[b])
        assert [t.dtype for t in ours] == [t.dtype for t in theirs]
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", BF16_OPTIMIZERS)
def test_replicas_stay_equal_whatever_their_own_random_state_and_leave_it_alone(name: str) -> None:
    models = [Small(), Small()]
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        run_steps(model, make(name, model, seed=7), range(3))
        assert torch.equal(torch.get_rng_state(), before)
    assert_same(*models)


@pytest.mark.parametrize("name", BF16_OPTIMIZERS)
def test_another_seed_rounds_otherwise(name: str) -> None:
    models = [Small(), Small()]
    for seed, model in enumerate(models):
        run_steps(model, make(name, model, seed=seed), range(3))
    assert not torch.equal(models[0].block.matrix, models[1].block.matrix)


@pytest.mark.parametrize("name", BF16_OPTIMIZERS)
def test_warm_up_touches_nothing(name: str) -> None:
    model = Small()
    optimizer = make(name, model)
    rng = torch.get_rng_state()
    optimizer.warm_up(compiled=True)
    assert_same(model, Small())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("name", BF16_OPTIMIZERS)
def test_nothing_is_compiled_after_the_warm_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo_utils, "_compilation_metrics", dynamo_utils._compilation_metrics)  # of the next test
    torch._dynamo.reset()
    model = Small()
    optimizer = make(name, model)
    optimizer.warm_up(compiled=True)
    dynamo_utils.set_compilation_metrics_limit(100_000)
    before = len(dynamo_utils.get_compilation_metrics())
    run_steps(model, optimizer, range(3))
    assert len(dynamo_utils.get_compilation_metrics()) == before


def test_gradients_may_be_missing_or_strided() -> None:
    model, reference = Small(), Small()
    for m in (model, reference):
        set_gradients(m, 0)
        m.head.grad = None
    model.block.matrix.grad = model.block.matrix.grad.T.contiguous().T
    assert not model.block.matrix.grad.is_contiguous()
    for m in (model, reference):
        make("adamw", m, lr=0.1).step()
    assert_same(model, reference)
    assert torch.equal(model.head, Small().head)
    assert not torch.equal(model.block.matrix, Small().block.matrix)


def test_states_of_another_optimizer_are_refused() -> None:
    model = Small()
    optimizer = make("adamw", model)
    run_steps(model, optimizer, range(1))
    with pytest.raises(ConfigError, match=r"optim\.name"):
        make("adamw_sr", Small()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", BF16_OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_per_parameter_are_what_is_allocated(name: str, dtype: torch.dtype) -> None:
    if (name, dtype) == ("adamw_sr", torch.float32):
        return
    model = Small(dtype)
    optimizer = make(name, model)
    run_steps(model, optimizer, range(1))
    matrix = model.block.matrix
    states = [t for t in plain_tensors(optimizer.state[matrix]) if t.numel() > 1]
    allocated = sum(t.numel() * t.element_size() for t in (matrix, matrix.grad, *states)) / matrix.numel()
    assert OPTIMIZERS[name].training_width({torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]) == allocated


def noise(step: int, numel: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    key = random_key(seed, step, 0)
    return noise16(torch.arange(numel, dtype=torch.int32), int32(key), int32(key >> 32))


def test_draws_are_uniform_uncorrelated_and_a_function_of_seed_and_step() -> None:
    n = 1 << 17
    draws = noise(1, n)
    for draw in (*draws, noise(2, n)[0]):
        assert draw.min() >= 0
        assert draw.max() < 65536
        counts = torch.bincount(draw >> 8, minlength=256).double()
        chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
        assert 140 < chi2 < 390  # 255 degrees of freedom: beyond 5 standard deviations either way
    pairs = torch.stack([*draws, noise(2, n)[0], noise(1, n, seed=1)[0], draws[0].roll(1)]).double()
    correlations = torch.corrcoef(pairs) - torch.eye(len(pairs))
    assert correlations.abs().max() < 5 / n**0.5
    assert all(torch.equal(a, b) for a, b in zip(draws, noise(1, n), strict=True))


def test_stochastic_rounding_is_unbiased() -> None:
    values = torch.tensor([1.0 + 1e-4, -1.0 - 3e-3, 3e-39, 1e-6, 12345.678, -7.1e30]).repeat_interleave(1 << 16)
    rounded = stochastic_round(values, noise(1, values.numel())[0]).double().view(6, -1)
    exact = values.double().view(6, -1)
    spacing = rounded.amax(1) - rounded.amin(1)
    assert torch.all((rounded - exact).abs() <= spacing[:, None])
    # The standard deviation of one rounding is half the spacing at most; five of the mean of 65536.
    assert torch.all((rounded.mean(1) - exact[:, 0]).abs() < 5 * spacing / 2 / 256)


def test_rounding_keeps_what_bf16_can_hold_and_inf_and_nan() -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rounded = stochastic_round(every.float(), torch.full((65536,), 65535))
    torch.testing.assert_close(rounded, every, rtol=0, atol=0, equal_nan=True)
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert stochastic_round(odd, torch.full((3,), 65535)).isnan().all()


def rows_of_the_kernel(stochastic: bool, device: str) -> list[Any]:
    """Parameters of odd sizes, gradients that lie oddly, numbers of elements beyond 2^31."""
    from sftkit.ops.adamw_kernel import CHUNK

    rows, generator = [], torch.Generator().manual_seed(0)
    for i, size in enumerate((1, 33, 0, 128 * 64, CHUNK, 2 * CHUNK + 7, 100_003, 16)):
        weight, avg, avg_sq = (torch.rand(size, generator=generator) * 0.1 for _ in range(3))
        grad = torch.randn(size + 1, generator=generator)[i % 2 :][:size].to(torch.bfloat16 if i % 3 else torch.float32)
        rounded = weight.bfloat16().to(device) if i % 2 and not stochastic else None
        weight, avg, avg_sq = (
            t.to(device, torch.bfloat16 if stochastic else torch.float32) for t in (weight, avg, avg_sq)
        )
        decays = (1e-3 * 0.1 * i, 1 - 0.9, 1 - 0.95, 1e-8)
        rows.append(ParameterShard(weight, rounded, grad.to(device), avg, avg_sq, decays, 2**31 - 5 + i, random_key(i)))
    return rows


@pytest.mark.gpu
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_kernel_of_all_parameters_computes_what_torch_does_for_each_with_the_same_random_bits(
    stochastic: bool,
) -> None:
    from sftkit.ops.adamw_kernel import update_

    clip = torch.tensor(0.7, device="cuda")
    ours, theirs = rows_of_the_kernel(stochastic, "cuda"), rows_of_the_kernel(stochastic, "cuda")
    corrected = corrections(torch.arange(1.0, len(ours) + 1, device="cuda"), 1e-3, (0.9, 0.95))
    update_(ours, clip * float("nan"), corrected)
    for row, before in zip(ours, theirs, strict=True):
        assert torch.equal(row.weight, before.weight)
        assert torch.equal(row.exp_avg, before.exp_avg)
    update_(ours, clip, corrected)
    for row, other, factors in zip(ours, theirs, corrected, strict=True):
        update_eagerly(other, clip, factors)
        pairs = [(getattr(row, name), getattr(other, name)) for name in ("weight", "exp_avg", "exp_avg_sq", "rounded")]
        for a, b in pairs:
            if b is not None:
                # Fused products differ in the last bit of fp32, which now and then decides a rounding.
                tolerance = 2**-7 if b.dtype == torch.bfloat16 else 2e-6
                torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-7)
                assert b.dtype != torch.bfloat16 or (a != b).sum() <= 1 + 0.001 * a.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "adamw_sr", "muon"])
def test_cuda_loads_its_kernels_in_the_warm_up_only_and_follows_the_cpu(name: str) -> None:
    from sftkit.ops.adamw_kernel import _adamw

    on_cpu, on_cuda = Small(), Small().cuda()
    run_steps(on_cpu, make(name, on_cpu), range(5))
    optimizer = make(name, on_cuda)
    optimizer.warm_up(compiled=True)
    loaded = len(_adamw.device_caches[torch.cuda.current_device()][0])
    for step in range(5):
        set_gradients(on_cpu, step)
        for ours, theirs in zip(on_cuda.parameters(), on_cpu.parameters(), strict=True):
            ours.grad = theirs.grad.cuda()
        optimizer.update(1e-3 / (step + 1), torch.tensor(0.5, device="cuda"))
    assert len(_adamw.device_caches[torch.cuda.current_device()][0]) == loaded > 0
    for ours, theirs in zip(on_cuda.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2**-6, atol=0)


@pytest.mark.parametrize("name", ["adamw", "adamw_sr", "muon"])
def test_the_coefficient_acts_inside_one_update_and_gradients_stay(name: str) -> None:
    clipped, scaled = Small(), Small()
    for model, coefficient in ((clipped, 0.25), (scaled, 1.0)):
        optimizer = make(name, model, eps=1.0)  # a large eps: AdamW notices the scale at once
        set_gradients(model, 0)
        grads = [p.grad.clone() for p in model.parameters()]
        if coefficient == 1.0:
            for p in model.parameters():
                p.grad.mul_(0.25)
            optimizer.step()
        else:
            optimizer.update(1e-3, torch.tensor(coefficient))
        assert coefficient == 1.0 or all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
        set_gradients(model, 1)
        optimizer.step()  # the coefficient was for one update
    assert_same(clipped, scaled)


@pytest.mark.parametrize("name", ["adamw", "adamw_sr", "muon"])
def test_a_weight_that_two_stages_of_a_pipeline_hold_is_rounded_alike_by_both_and_as_in_one_process(name: str) -> None:
    """Its random bits follow from its number among all parameters, and not among those of a stage."""
    found = []
    for held in (("first", "last"), ("first",), ("last",)):
        model = torch.nn.Module()
        model._no_split_modules = ("Block",)  # type: ignore[assignment]
        model.blocks = torch.nn.ModuleDict({"first": torch.nn.ModuleList([Block(), Block()]), "last": Block()})
        # Behind the blocks, so that its number among those of a stage is another one.
        model.head = torch.nn.Linear(9, 7, bias=False)
        torch.nn.init.ones_(model.head.weight)
        model.bfloat16()
        for stage in {"first", "last"}.difference(held):
            model.blocks[stage].to("meta")
        optimizer = make(name, model)
        assert not any(p.is_meta for group in optimizer.param_groups for p in group["params"])
        model.head.weight.grad = torch.randn(7, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
        optimizer.update(1e-3, torch.tensor(1.0))
        found.append(model.head.weight.detach().clone())
    assert not torch.equal(found[0], torch.ones_like(found[0]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
