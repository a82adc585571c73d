"""Every optimizer of the table keeps the promises of the protocol, and the bytes that its spec states."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import sftkit
from sftkit.config.keys import key_table
from sftkit.config.schema import OptimConfig
from sftkit.config.tables import OPTIMIZERS
from sftkit.optim.protocol import Optimizer, build_optimizer, named_states, states_loaded

BF16, FP32 = torch.bfloat16, torch.float32
NAN = float("nan")
KINDS = {  # in state.json of checkpoints: they must never change
    ("adamw", BF16): "AdamW bfloat16",
    ("adamw", FP32): "AdamW float32",
    ("adamw_sr", BF16): "AdamW stochastic bfloat16",
    ("adamw8bit", BF16): "AdamW8bit bfloat16",
    ("muon", BF16): "Muon bfloat16",
    ("muon", FP32): "Muon float32",
}


def cases() -> list[Any]:
    """Each optimizer in each precision that its spec names."""
    found = []
    for spec in OPTIMIZERS.values():
        missing = spec.extra is not None and importlib.util.find_spec(spec.extra.package) is None
        marks = pytest.mark.skipif(missing, reason=f"needs {spec.extra and spec.extra.package}")
        for precision in spec.state_bytes:
            dtype = {"bf16": BF16, "fp32": FP32}[precision]
            found.append(pytest.param(spec.name, dtype, id=f"{spec.name}-{precision}", marks=marks))
    return found


every_optimizer = pytest.mark.parametrize(("name", "dtype"), cases())


def small_model(dtype: torch.dtype) -> PreTrainedModel:
    """Matrices of 4,096 elements and more, which torchao quantizes, and norms, which it does not."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen3", vocab_size=64, num_key_value_heads=4, head_dim=16, **sizes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def make(name: str, model: PreTrainedModel) -> Optimizer:
    return build_optimizer(model, OptimConfig(name=name, lr=1e-2, eps=1e-3, weight_decay=0.1), seed=3)


def set_gradients(model: PreTrainedModel, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * factor


def states(model: PreTrainedModel, optimizer: Optimizer, step: bool = False) -> list[torch.Tensor]:
    """Tensors of all states, a quantized one as its codes and scales."""
    found = []
    for p in model.parameters():
        for key, value in optimizer.state[p].items():
            if key != "step" or step:
                found += [value.codes, value.scale] if hasattr(value, "codes") else [torch.as_tensor(value)]
    return found


def everything(model: PreTrainedModel, optimizer: Optimizer) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *states(model, optimizer))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@every_optimizer
def test_it_fulfils_the_protocol_and_is_of_the_kind_that_checkpoints_name(name: str, dtype: torch.dtype) -> None:
    optimizer = make(name, small_model(dtype))
    assert isinstance(optimizer, Optimizer)
    for verb in ("warm_up", "update", "new_state"):
        assert list(inspect.signature(getattr(optimizer, verb)).parameters) == [
            *list(inspect.signature(getattr(Optimizer, verb)).parameters)[1:]
        ]
    assert optimizer.kind == KINDS[name, dtype]


def test_every_optimizer_has_a_kind() -> None:
    assert {name for name, _ in KINDS} == set(OPTIMIZERS)


@every_optimizer
def test_a_coefficient_of_nan_leaves_weights_and_states_bitwise(name: str, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    optimizer = make(name, model)
    set_gradients(model, 0)
    optimizer.update(1e-2, torch.tensor(1.0))
    before = everything(model, optimizer)
    for factor in (1.0, float("nan")):
        set_gradients(model, 1, factor)
        optimizer.update(1e-2, torch.tensor(float("nan")))
        assert same(before, everything(model, optimizer))
    set_gradients(model, 2)
    optimizer.step()  # type: ignore[attr-defined]  # nothing of the nan is left
    assert not same(before, everything(model, optimizer))


def run_steps(model: PreTrainedModel, optimizer: Optimizer, steps: list[int | None], device: str = "cpu") -> None:
    """Updates with the gradients of these seeds; None: a gradient of nan, whose update is left out."""
    for seed in steps:
        set_gradients(model, seed or 0, 1.0 if seed is not None else NAN)
        optimizer.update(1e-2, torch.tensor(0.5 if seed is not None else NAN, device=device))


def ask(optimizer: Optimizer) -> None:
    """Count an update that nobody makes, for those who draw random bits by them."""
    for group in optimizer.param_groups:
        if "attempts" in group:
            group["attempts"] += 1


@every_optimizer
@pytest.mark.parametrize("left_out", [0, 2])
def test_a_step_that_is_left_out_counts_in_no_bias_correction(name: str, dtype: torch.dtype, left_out: int) -> None:
    """After it, weights and states are those of a run in which it never was; the first step may be such a one."""
    skipping, plain = small_model(dtype), small_model(dtype)
    ours, theirs = make(name, skipping), make(name, plain)
    run_steps(skipping, ours, [*range(left_out), None, left_out, left_out + 1])
    run_steps(plain, theirs, [*range(left_out)])
    ask(theirs)
    run_steps(plain, theirs, [left_out, left_out + 1])
    steps = {int(ours.state[p]["step"]) for p in skipping.parameters()}
    assert steps == {left_out + 2}
    assert same(everything(skipping, ours), everything(plain, theirs))


@every_optimizer
def test_a_parameter_without_a_gradient_counts_no_update(name: str, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    optimizer = make(name, model)
    run_steps(model, optimizer, [0])
    set_gradients(model, 1)
    first, *others = model.parameters()
    first.grad = None
    optimizer.update(1e-2, torch.tensor(1.0))
    assert int(optimizer.state[first]["step"]) == 1
    assert {int(optimizer.state[p]["step"]) for p in others} == {2}


@every_optimizer
def test_a_resume_after_a_step_that_was_left_out_is_bitwise(name: str, dtype: torch.dtype) -> None:
    """Through the tensors of a checkpoint and the step of the run, which counts what was left out."""
    straight = small_model(dtype)
    optimizer = make(name, straight)
    run_steps(straight, optimizer, [0, None, 1])
    resumed = copy.deepcopy(straight)
    saved = {key: value.clone() for key, value in named_states(optimizer, straight).items()}
    assert {int(value) for key, value in saved.items() if key.startswith("step.")} == {2}
    run_steps(straight, optimizer, [2, None, 3])

    fresh = make(name, resumed)
    tensors = named_states(fresh, resumed)
    for key, value in saved.items():
        tensors[key].copy_(value)
    states_loaded(fresh, resumed, tensors, steps=3)
    run_steps(resumed, fresh, [2, None, 3])
    assert same(everything(straight, optimizer), everything(resumed, fresh))
    assert same(states(straight, optimizer, step=True), states(resumed, fresh, step=True))


@pytest.mark.gpu
@every_optimizer
def test_an_update_makes_the_host_wait_for_no_gpu_whether_it_is_left_out_or_not(name: str, dtype: torch.dtype) -> None:
    if OPTIMIZERS[name].extra is not None:
        pytest.skip("torchao counts on the host, so that one is read there")
    model, on_cpu = small_model(dtype).cuda(), small_model(dtype)
    optimizer, reference = make(name, model), make(name, on_cpu)
    optimizer.warm_up(compiled=True)
    for seed in (0, None, 1, 2):
        set_gradients(on_cpu, seed or 0, 1.0 if seed is not None else NAN)
        for p, q in zip(model.parameters(), on_cpu.parameters(), strict=True):
            p.grad = q.grad.cuda()
        coefficient = torch.tensor(0.5 if seed is not None else NAN)
        there = coefficient.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.update(1e-2, there)
            named_states(optimizer, model)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reference.update(1e-2, coefficient)
    assert {int(optimizer.state[p]["step"]) for p in model.parameters()} == {3}
    for ours, theirs in zip(model.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(
            ours.cpu(), theirs, rtol=2**-5 if dtype == BF16 else 1e-4, atol=5e-3 if name == "muon" else 1e-3
        )


@every_optimizer
@pytest.mark.parametrize("coefficient", [0.25, 0.3])
def test_an_update_is_that_of_the_rate_and_of_multiplied_gradients(
    name: str, dtype: torch.dtype, coefficient: float
) -> None:
    """Exactly for a power of two; else as far as the product is rounded to the precision of the gradients."""
    clipped, scaled = small_model(dtype), small_model(dtype)
    ours, reference = make(name, clipped), make(name, scaled)
    for step in range(2):
        set_gradients(clipped, step)
        set_gradients(scaled, step, coefficient)
        ours.update(1e-3, torch.tensor(coefficient))
        for group in reference.param_groups:
            group["lr"] = 1e-3
        reference.step()  # type: ignore[attr-defined]
    assert {group["lr"] for group in ours.param_groups} == {1e-3}
    if coefficient == 0.25 or dtype == FP32:
        assert same(everything(clipped, ours), everything(scaled, reference))
    for a, b in zip(clipped.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6 if dtype == BF16 else 1e-6, atol=2e-4 if dtype == BF16 else 1e-7)


@every_optimizer
@pytest.mark.parametrize("compiled", [True, False])
def test_a_warm_up_changes_nothing(name: str, dtype: torch.dtype, compiled: bool) -> None:
    model, twin = small_model(dtype), small_model(dtype)
    optimizer, other = make(name, model), make(name, twin)
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    rng = torch.get_rng_state()
    optimizer.warm_up(compiled=compiled)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not optimizer.state
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    for m, o in ((model, optimizer), (twin, other)):
        set_gradients(m, 0)
        o.update(1e-2, torch.tensor(0.5))
    before = everything(model, optimizer)
    assert same(before, everything(twin, other))
    optimizer.warm_up(compiled=compiled)
    assert same(before, everything(model, optimizer))


@every_optimizer
def test_new_states_are_those_that_a_first_update_makes(name: str, dtype: torch.dtype) -> None:
    model, twin = small_model(dtype), small_model(dtype)
    optimizer, other = make(name, model), make(name, twin)
    named_states(optimizer, model)  # makes them, as a resumed run does
    for m, o in ((model, optimizer), (twin, other)):
        set_gradients(m, 0)
        o.update(1e-2, torch.tensor(0.5))
    assert same(everything(model, optimizer), everything(twin, other))
    assert same(states(model, optimizer, step=True), states(twin, other, step=True))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        ours, theirs = optimizer.state[p], other.state[q]
        assert [(k, type(v), getattr(v, "shape", ())) for k, v in ours.items()] == [
            (k, type(v), getattr(v, "shape", ())) for k, v in theirs.items()
        ]


@every_optimizer
def test_the_bytes_of_the_spec_are_those_of_the_states(name: str, dtype: torch.dtype) -> None:
    """Of matrices; torchao keeps what is smaller than 4,096 elements, norms here, unquantized."""
    model = small_model(dtype)
    optimizer = make(name, model)
    set_gradients(model, 0)
    optimizer.update(1e-2, torch.tensor(1.0))
    spec, precision, seen = OPTIMIZERS[name], "bf16" if dtype == BF16 else "fp32", set()
    for parameter_name, p in model.named_parameters():
        if spec.extra is not None and p.ndim < 2:
            continue
        values = [v for k, v in optimizer.state[p].items() if k != "step"]
        tensors = [t for v in values for t in ((v.codes, v.scale) if hasattr(v, "codes") else (v,))]
        in_block = ".layers." in parameter_name and p.ndim == 2
        seen.add(in_block)
        made = sum(t.numel() * t.element_size() for t in tensors)
        assert made == p.numel() * spec.state_width(precision, block_matrix=in_block), parameter_name
    assert seen == {True, False}


def test_the_help_of_optim_name_describes_every_optimizer_with_its_bytes() -> None:
    key = key_table()["optim.name"]
    assert key.kind == " | ".join(["auto", *OPTIMIZERS])
    assert all(f"{spec.name}: {spec.summary} (" in key.doc for spec in OPTIMIZERS.values())
    for text in ("copies (16 bytes)", "(8 bytes)", "(about 6 bytes)", "(12 to 16 bytes)"):
        assert text in key.doc


def test_what_is_known_of_an_optimizer_stands_in_its_spec_and_its_code_alone() -> None:
    """No other file of the package names one in code, but the table of other trainers' names; the names that auto
    knows are constants beside the table."""
    root = Path(sftkit.__file__).parent
    tables = {root / "config" / name for name in ("tables.py", "convert.py")}
    constants = {
        path: {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
        for path in root.rglob("*.py")
    }
    for spec in OPTIMIZERS.values():
        code = root.parent / f"{spec.code.partition(':')[0].replace('.', '/')}.py"
        for path in constants.keys() - {*tables, code}:
            assert spec.name not in constants[path], f"{path.relative_to(root)} names {spec.name}"
