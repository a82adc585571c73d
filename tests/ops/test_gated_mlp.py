"""The MLP of frozen layers with low-rank factors equals its three layers one after the other."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.utils.flop_counter import FlopCounterMode

from sftkit.ops.low_rank import adapted_linear, gated_mlp, gated_product, gated_product_backward

Given = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...], float]


def given(tokens: int, hidden: int, width: int, rank: int) -> Given:
    """Return the arguments of gated_mlp; the weights are frozen."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, factor: float = 0.1) -> Tensor:
        return factor * torch.randn(shape, generator=generator)

    x = draw(2, tokens, hidden, factor=1.0).requires_grad_()
    sizes = ((hidden, width), (hidden, width), (width, hidden))
    weights = tuple(draw(b, a) for a, b in sizes)
    factors_a = tuple(draw(rank, a).requires_grad_() for a, _ in sizes)
    factors_b = tuple(draw(b, rank).requires_grad_() for _, b in sizes)
    return x, weights, factors_a, factors_b, 1.7


def joined(
    x: Tensor, weights: tuple[Tensor, ...], a: tuple[Tensor, ...], b: tuple[Tensor, ...], scale: float
) -> Tensor:
    """Return gated_mlp of these weights."""
    return gated_mlp(x, tuple(partial(linear, weight=weight) for weight in weights), a, b, scale)


def one_by_one(
    x: Tensor, weights: tuple[Tensor, ...], a: tuple[Tensor, ...], b: tuple[Tensor, ...], scale: float
) -> Tensor:
    """Return the MLP of three layers W x + scale * B A x."""

    def layer(index: int, value: Tensor) -> Tensor:
        return linear(value, weights[index]) + scale * linear(linear(value, a[index]), b[index])

    return layer(2, silu(layer(0, x)) * layer(1, x))


def assert_same(output: Tensor, expected: Tensor, arguments: Given) -> None:
    """Compare outputs, and the gradients of the input and of all factors."""
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    inputs = [arguments[0], *arguments[2], *arguments[3]]
    grad = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    for found, right in zip(
        torch.autograd.grad(output, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        assert (found - right).norm() <= 1e-6 * right.norm()


@pytest.mark.parametrize("rank", [1, 8, 24])
def test_output_and_all_gradients_are_those_of_the_layers_one_by_one(rank: int) -> None:
    arguments = given(21, 32, 80, rank)
    assert_same(joined(*arguments), one_by_one(*arguments), arguments)


def test_one_graph_computes_the_same() -> None:
    arguments = given(12, 16, 48, 4)
    compiled = torch.compile(joined, backend="aot_eager", fullgraph=True)
    assert_same(compiled(*arguments), one_by_one(*arguments), arguments)


def test_operators_keep_the_rules_of_operators() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(6, 10), (6, 10), (6, 8), (4, 10), (4, 10), (4, 10)]
    tensors = [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]
    torch.library.opcheck(gated_product, (*tensors, 0.5))
    grads = [torch.randn(size, generator=generator) for size in ((6, 10), (6, 4))]
    layer = [torch.randn(size, generator=generator, requires_grad=True) for size in ((2, 6, 10), (2, 6, 4), (8, 4))]
    weight = torch.randn(8, 10, generator=generator)
    torch.library.opcheck(adapted_linear, (layer[0], weight, *layer[1:], 0.5))
    torch.library.opcheck(gated_product_backward, (*grads, *(t.detach() for t in tensors), 0.5))


def test_flops_are_those_of_the_layers_one_by_one() -> None:
    arguments = given(12, 16, 48, 4)
    counts = []
    for function in (joined, one_by_one):
        with FlopCounterMode(display=False) as counter:
            function(*arguments).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_a_layer_with_its_factors_equals_two_products_and_counts_their_flops() -> None:
    x, weights, a, b, scale = given(21, 32, 80, 4)
    ours, counts = [], []
    for output in (
        lambda: adapted_linear(x, weights[0], linear(x, a[0]), b[0], scale),
        lambda: linear(x, weights[0]) + scale * linear(linear(x, a[0]), b[0]),
    ):
        with FlopCounterMode(display=False) as counter:
            y = output()
            grads = torch.autograd.grad(y, (x, a[0], b[0]), torch.linspace(-1, 1, y.numel()).view_as(y))
        ours.append((y, *grads))
        counts.append(counter.get_total_flops())
    for found, right in zip(*ours, strict=True):
        assert (found - right).norm() <= 1e-6 * right.norm()
    assert counts[0] == counts[1]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width", "rank"), [(1000, 520, 16), (16384, 3072, 16), (300, 256, 8), (513, 384, 64)])
def test_kernels_equal_the_operators_on_the_host_and_themselves_bitwise(rows: int, width: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((rows, width), (rows, width), (rows, 2 * rank), (rank, width), (rank, width), (rank, width))
    tensors = [torch.randn(size, generator=generator).bfloat16() * 0.5 for size in sizes]
    grads = [torch.randn(size, generator=generator).bfloat16() for size in ((rows, width), (rows, rank))]
    on_gpu = [t.cuda() for t in tensors]
    grads_on_gpu = [t.cuda() for t in grads]
    forward = gated_product(*on_gpu, 2.0)
    backward = gated_product_backward(*grads_on_gpu, *on_gpu, 2.0)
    exact = [t.float() for t in tensors]
    right = [
        *gated_product(*exact, 2.0),
        *gated_product_backward(*(t.float() for t in grads), *exact, 2.0),
    ]
    for found, expected in zip((*forward, *backward), right, strict=True):
        assert (found.float().cpu() - expected).norm() <= 5e-3 * expected.norm()
    again = (*gated_product(*on_gpu, 2.0), *gated_product_backward(*grads_on_gpu, *on_gpu, 2.0))
    assert all(torch.equal(one, other) for one, other in zip((*forward, *backward), again, strict=True))
