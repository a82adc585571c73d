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
from sftkit.config.keys import table
from sftkit.config.optimizers import OPTIMIZERS
from sftkit.config.schema import OptimConfig
from sftkit.optim.build import build_optimizer
from sftkit.optim.protocol import Optimizer
from sftkit.optim.state import named_states

BF16, FP32 = torch.bfloat16, torch.float32
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
    optimizer.warm_up(compiled)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not optimizer.state
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    for m, o in ((model, optimizer), (twin, other)):
        set_gradients(m, 0)
        o.update(1e-2, torch.tensor(0.5))
    before = everything(model, optimizer)
    assert same(before, everything(twin, other))
    optimizer.warm_up(compiled)
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
        assert made == p.numel() * spec.state_width(precision, in_block), parameter_name
    assert seen == {True, False}


def test_the_help_of_optim_name_describes_every_optimizer_with_its_bytes() -> None:
    key = table()["optim.name"]
    assert key.kind == " | ".join(["auto", *OPTIMIZERS])
    assert all(f"{spec.name}: {spec.summary} (" in key.doc for spec in OPTIMIZERS.values())
    for text in ("copies (16 bytes)", "(8 bytes)", "(about 6 bytes)", "(12 to 16 bytes)"):
        assert text in key.doc


def test_what_is_known_of_an_optimizer_stands_in_its_spec_and_its_code_alone() -> None:
    """No other file of the package names one in code; the names that auto knows are constants beside the table."""
    root = Path(sftkit.__file__).parent
    for spec in OPTIMIZERS.values():
        code = root.parent / f"{spec.code.partition(':')[0].replace('.', '/')}.py"
        allowed = {root / "config" / "optimizers.py", code}
        for path in set(root.rglob("*.py")) - allowed:
            constants = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
            assert spec.name not in constants, f"{path.relative_to(root)} names {spec.name}"
