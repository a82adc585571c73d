"""Layers joined into one product give the outputs and gradients of the layers one by one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.utils.flop_counter import FlopCounterMode

from sftkit.ops import joined
from sftkit.ops.joined import are_neighbours, joined_layers, joined_mlp
from sftkit.ops.quack_products import quack_unsupported_reason

ON_GPU = pytest.param("cuda", torch.bfloat16, "quack", marks=pytest.mark.gpu)


def draw(rows: int, columns: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(device, dtype)


def neighbours(outs: tuple[int, ...], width: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return leaves [out, width] in one storage."""
    parts = (draw(sum(outs), width, device, dtype, seed=1) * width**-0.5).split(outs)
    return [part.detach().requires_grad_() for part in parts]


def assert_same(found: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, exact, strict=True):
        assert (one.detach().to(other.dtype) - other.detach()).norm() <= tolerance * other.detach().norm()


def in_fp64(values: list[Tensor]) -> list[Tensor]:
    return [value.detach().double().requires_grad_() for value in values]


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        ("cpu", torch.float64, "cublas"),
        ("cpu", torch.float32, "cublas"),
        pytest.param("cuda", torch.bfloat16, "cublas", marks=pytest.mark.gpu),
        ON_GPU,
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_joined_layers_are_the_layers_one_by_one(device: str, dtype: torch.dtype, kernel: str, *, apart: bool) -> None:
    if kernel == "quack" and (reason := quack_unsupported_reason(torch.device(device))):
        pytest.skip(reason)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    x = draw(256, 64, device, dtype).requires_grad_()
    gate, up = neighbours((96, 96), 64, device, dtype)
    (down,) = neighbours((64,), 96, device, dtype)
    layers = neighbours((128, 64, 64), 64, device, dtype)
    if apart:  # a storage of its own for one of them
        up = up.detach().clone().requires_grad_()
        layers[1] = layers[1].detach().clone().requires_grad_()
    assert are_neighbours([gate, up]) is not apart
    assert are_neighbours(layers) is not apart

    given = [x, gate, up, down]
    grad = draw(256, 64, device, dtype, seed=2)
    y = joined_mlp(*given, kernel)[0]
    a, g, u, d = copies = in_fp64(given)
    exact = linear(silu(linear(a, g)) * linear(a, u), d)
    found = [y, *torch.autograd.grad(y, given, grad)]
    assert_same(found, [exact, *torch.autograd.grad(exact, copies, grad.double())], tolerance)

    grads = [draw(256, len(layer), device, dtype, seed=3) for layer in layers]
    outs = joined_layers(x, layers, kernel)
    copies = in_fp64([x, *layers])
    all_exact = [linear(copies[0], layer) for layer in copies[1:]]
    found = [*outs, *torch.autograd.grad(outs, [x, *layers], grads)]
    right = torch.autograd.grad(all_exact, copies, [part.double() for part in grads])
    assert_same(found, [*all_exact, *right], tolerance)


def test_neighbours_are_whole_matrices_in_order() -> None:
    first, second = torch.zeros(8, 4).split([3, 5])
    assert are_neighbours([first, second])
    assert not are_neighbours([second, first])
    assert not are_neighbours(list(torch.zeros(4, 8).split([3, 5], 1)))
    assert not are_neighbours([first, torch.zeros(5, 4)])


def test_the_operators_agree_with_what_compilers_are_told() -> None:
    x = draw(16, 32, "cpu", torch.float32).requires_grad_()
    gate, up = neighbours((48, 48), 32, "cpu", torch.float32)
    (down,) = neighbours((32,), 48, "cpu", torch.float32)
    checks = ("test_schema", "test_faketensor")
    y, both = joined_mlp(x, gate, up, down, "cublas")
    outs = [part.detach() for part in joined_layers(x, (gate, up), "cublas")]
    for name, given in {
        "joined_mlp": (x, gate, up, down),
        "joined_mlp_backward": (y, x, both, gate, up, down),
        "joined_linear": (x, [gate, up]),
        "joined_linear_backward": (outs, x, [gate, up]),
    }.items():
        torch.library.opcheck(getattr(torch.ops.sftkit, name), (*given, "cublas"), test_utils=checks)
    with FlopCounterMode(display=False) as joined:
        joined_mlp(x, gate, up, down, "cublas")[0].sum().backward()
        torch.autograd.backward([part.sum() for part in joined_layers(x, (gate, up), "cublas")])
    with FlopCounterMode(display=False) as plain:
        linear(silu(linear(x, gate)) * linear(x, up), down).sum().backward()
        torch.autograd.backward([linear(x, layer).sum() for layer in (gate, up)])
    assert joined.get_total_flops() == plain.get_total_flops()


def test_a_product_that_cannot_be_compiled_ahead_says_how_its_process_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joined, "kernels_folder", lambda: tmp_path)
    monkeypatch.setattr(joined, "quack", lambda: [SimpleNamespace(__file__="quack.py")])
    monkeypatch.setattr(joined, "TILES", {"unheard of": None})
    joined.compile_ahead()()
    (said,) = caplog.messages
    assert said.startswith(
        "QuACK's product 'unheard of' was not compiled ahead (exit code 1), which its first call does"
    )
    assert said.endswith("KeyError: 'unheard of'")
    assert not list(tmp_path.iterdir())
