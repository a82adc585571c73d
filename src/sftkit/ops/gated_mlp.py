"""The MLP down(silu(gate(x)) * up(x)) of frozen layers with low-rank factors, without a pass over activations for them.

As operators of their own, the three low-rank products of an MLP read and write its widest activations some 30 times;
at small sizes that costs more than the gradients of frozen weights save. Here the kernels of the gated product read
them once, as they do without factors: they add what gate's and up's factors give in registers, and multiply the result
with A of down on its way out. B of down is a part of down's own product, whose inner dimension grows by the rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.utils.flop_counter import register_flop_formula


def gated_mlp(
    x: Tensor, weights: tuple[Tensor, ...], a: tuple[Tensor, ...], b: tuple[Tensor, ...], scale: float
) -> Tensor:
    """Return down(silu(gate(x)) * up(x)), each layer W x + scale * B A x.

    Args:
        x: [..., H].
        weights: of gate and up, [F, H], and of down, [H, F]; frozen: they get no gradient.
        a: three factors [rank, H], [rank, H], [rank, F] in the dtype of x; b: [F, rank], [F, rank], [H, rank].
    """
    flat = x.reshape(-1, x.shape[-1])
    u = linear(flat, torch.cat(a[:2]))
    transposed = b[0].t().contiguous(), b[1].t().contiguous()
    gated, u_down = gated_product(linear(flat, weights[0]), linear(flat, weights[1]), u, *transposed, a[2], scale)
    return _Down.apply(gated, u_down, weights[2], b[2], scale).view(x.shape)  # type: ignore[no-untyped-call,no-any-return]


class _Down(torch.autograd.Function):
    """[h | u] [W | scale B]ᵀ: one product instead of three and a sum."""

    @staticmethod
    def forward(ctx: Any, gated: Tensor, u: Tensor, weight: Tensor, b: Tensor, scale: float) -> Tensor:
        """Multiply [N, F + rank]; `u`: its last columns, kept alone for the gradient of B."""
        ctx.save_for_backward(u, weight, b)
        ctx.scale = scale
        return linear(gated, torch.cat([weight, scale * b], 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `gated` and of B; the weight is frozen."""
        u, weight, b = ctx.saved_tensors
        return grad @ torch.cat([weight, ctx.scale * b], 1), None, None, ctx.scale * (grad.t() @ u), None


@torch.library.custom_op("sftkit::gated_product", mutates_args=())
def gated_product(
    gate: Tensor, up: Tensor, u: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return h = silu(gate + scale u₁ B₁) * (up + scale u₂ B₂) with h A₃ᵀ behind it, and the latter alone.

    Args:
        gate, up: [N, F].
        u: [N, 2 rank], products of the inputs with A of gate and of up.
        b_gate, b_up, a_down: [rank, F]: B of gate and up transposed, A of down.

    Returns:
        [N, F + rank] and [N, rank], in the dtype of gate.
    """
    if gate.is_cuda:
        from sftkit.ops.gated_mlp_kernel import forward  # Triton is not installed on CPU machines

        return forward(gate, up, u, b_gate, b_up, a_down, scale)
    g, v, _ = _sums(gate, up, u, b_gate, b_up, scale)
    gated = (silu(g) * v).to(gate.dtype)
    u_down = gated @ a_down.t()
    return torch.cat([gated, u_down], 1), u_down


@gated_product.register_fake
def _(gate: Tensor, up: Tensor, u: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor, scale: float) -> Any:
    rank = len(a_down)
    return gate.new_empty(len(gate), gate.shape[1] + rank), gate.new_empty(len(gate), rank)


@torch.library.custom_op("sftkit::gated_product_backward", mutates_args=())
def gated_product_backward(
    grad: Tensor, gate: Tensor, up: Tensor, u: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `gated_product` by gate, up and u, and fp32 [3, rank, F]: those of the factors.

    Args:
        grad: [N, F + rank].
    """
    if gate.is_cuda:
        from sftkit.ops.gated_mlp_kernel import backward  # Triton is not installed on CPU machines

        return backward(grad, gate, up, u, b_gate, b_up, a_down, scale)
    g, v, rank = _sums(gate, up, u, b_gate, b_up, scale)
    exact = g.dtype
    u_gate, u_up = u.to(exact).split(rank, 1)
    d_gated, d_down = grad.to(exact).split([gate.shape[1], rank], 1)
    d_gated = d_gated + d_down @ a_down.to(exact)
    sigmoid = torch.sigmoid(g)
    d_g = d_gated * v * (sigmoid * (1 + g * (1 - sigmoid)))
    d_v = d_gated * silu(g)
    d_u = scale * torch.cat([d_g @ b_gate.to(exact).t(), d_v @ b_up.to(exact).t()], 1)
    factors = torch.stack([scale * (u_gate.t() @ d_g), scale * (u_up.t() @ d_v), d_down.t() @ (silu(g) * v)])
    return d_g.to(gate.dtype), d_v.to(gate.dtype), d_u.to(gate.dtype), factors.float()


@gated_product_backward.register_fake
def _(
    grad: Tensor, gate: Tensor, up: Tensor, u: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor, scale: float
) -> Any:
    exact = a_down.new_empty(3, *a_down.shape, dtype=torch.float32)
    return torch.empty_like(gate), torch.empty_like(up), torch.empty_like(u), exact


def _sums(
    gate: Tensor, up: Tensor, u: Tensor, b_gate: Tensor, b_up: Tensor, scale: float
) -> tuple[Tensor, Tensor, int]:
    """Return the outputs of gate and up with their factors, at least in fp32, and the rank."""
    exact = torch.promote_types(gate.dtype, torch.float32)
    rank = len(b_gate)
    u_gate, u_up = u.to(exact).split(rank, 1)
    g = gate.to(exact) + scale * (u_gate @ b_gate.to(exact))
    return g, up.to(exact) + scale * (u_up @ b_up.to(exact)), rank


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of `gated_product`; its second output is the end of the first, and passes none on."""
    d_gate, d_up, d_u, factors = gated_product_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale)
    dtype = d_gate.dtype
    return d_gate, d_up, d_u, *factors.to(dtype).unbind(), None


gated_product.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.sftkit.gated_product)
def _forward_flops(gate: Any, up: Any, u: Any, b_gate: Any, b_up: Any, a_down: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of three low-rank products."""
    return 6 * gate[0] * gate[1] * a_down[0]  # type: ignore[no-any-return]


@register_flop_formula(torch.ops.sftkit.gated_product_backward)
def _backward_flops(grad: Any, gate: Any, up: Any, u: Any, b: Any, b_up: Any, a: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the six products of their gradients; those computed again are not counted."""
    return 12 * gate[0] * gate[1] * a[0]  # type: ignore[no-any-return]
