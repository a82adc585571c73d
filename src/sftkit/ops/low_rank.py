"""The low-rank products that adapters add to frozen layers: of one layer, and of a whole gated MLP.

As separate operators, the three low-rank products of an MLP down(silu(gate(x)) * up(x)) make some twelve passes
over its widest activations; at small sizes that costs more than the gradients of frozen weights save. gated_mlp makes
none: the kernels of the gated product read these activations once, as they do without factors. They add the products of
gate's and up's factors in registers, and multiply the result with A of down on its way out.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.utils.flop_counter import register_flop_formula

Product = Callable[[Tensor], Tensor]


def low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return y + scale * (x Aᵀ) Bᵀ.

    Args:
        y: [..., out], the output of the frozen layer.
        x: [..., in], its input, after the adapter's dropout.
        a: [rank, in], b: [out, rank], the factors in the dtype of x.
    """
    return y + scale * linear(linear(x, a), b)


@torch.library.custom_op("sftkit::adapted_linear", mutates_args=())
def adapted_linear(x: Tensor, weight: Tensor, u: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return x Wᵀ + scale * u Bᵀ. As one operator, the second product adds to the first where it lies: as two, it is
    written and read once more, and so is the sum.

    Args:
        x: [..., in]. weight: [out, in], frozen.
        u: [..., rank], the product of x with A. b: [out, rank].
    """
    y = x.reshape(-1, x.shape[-1]) @ weight.t()
    return y.addmm_(u.reshape(-1, u.shape[-1]), b.t(), alpha=scale).view(*x.shape[:-1], len(weight))


@adapted_linear.register_fake
def _(x: Tensor, weight: Tensor, u: Tensor, b: Tensor, scale: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, u, b, ctx.scale = inputs
    ctx.save_for_backward(weight, u, b)


def _linear_gradients(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of `adapted_linear`; the weight has none."""
    weight, u, b = ctx.saved_tensors
    d_b = d_y.reshape(-1, d_y.shape[-1]).t() @ u.reshape(-1, u.shape[-1])
    return d_y @ weight, None, ctx.scale * (d_y @ b), ctx.scale * d_b, None


adapted_linear.register_autograd(_linear_gradients, setup_context=_save_linear)


@register_flop_formula(torch.ops.sftkit.adapted_linear)
def _linear_flops(x: Any, weight: Any, u: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of both products."""
    return 2 * math.prod(x[:-1]) * weight[0] * (weight[1] + b[1])


def gated_mlp(
    x: Tensor, frozen: tuple[Product, ...], a: tuple[Tensor, ...], b: tuple[Tensor, ...], scale: float
) -> Tensor:
    """Return down(silu(gate(x)) * up(x)), each layer W x + scale * B A x.

    Args:
        x: [..., H].
        frozen: products with W of gate and up, [F, H], and of down, [H, F].
        a: three factors [rank, H], [rank, H], [rank, F] in the dtype of x; b: [F, rank], [F, rank], [H, rank].
    """
    flat = x.reshape(-1, x.shape[-1])
    u = linear(flat, torch.cat(a[:2]))
    transposed = b[0].t().contiguous(), b[1].t().contiguous()
    gated, u_down = gated_product(frozen[0](flat), frozen[1](flat), u, *transposed, a[2], scale)
    return (frozen[2](gated) + scale * linear(u_down, b[2])).view(x.shape)


@torch.library.custom_op("sftkit::gated_product", mutates_args=())
def gated_product(
    gate: Tensor, up: Tensor, u: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return h = silu(gate + scale u₁ B₁) * (up + scale u₂ B₂) and h A₃ᵀ.

    Args:
        gate, up: [N, F].
        u: [N, 2 rank], products of the inputs with A of gate and of up.
        b_gate, b_up, a_down: [rank, F]: B of gate and up transposed, A of down.

    Returns:
        [N, F] and [N, rank], in the dtype of gate.
    """
    if gate.is_cuda:
        from sftkit.ops.gated_mlp_kernel import forward  # Triton is not installed on CPU machines

        return forward(gate, up, u, b_gate, b_up, a_down, scale)
    g, v, _ = _sums(gate, up, u, b_gate, b_up, scale)
    gated = (silu(g) * v).to(gate.dtype)
    return gated, gated @ a_down.t()


@gated_product.register_fake
def _(gate: Tensor, up: Tensor, u: Tensor, b_gate: Tensor, b_up: Tensor, a_down: Tensor, scale: float) -> Any:
    return torch.empty_like(gate), gate.new_empty(len(gate), len(a_down))


@torch.library.custom_op("sftkit::gated_product_backward", mutates_args=())
def gated_product_backward(
    d_h: Tensor,
    d_down: Tensor,
    gate: Tensor,
    up: Tensor,
    u: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
    a_down: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `gated_product` by gate, up and u, and fp32 [3, rank, F]: those of the factors.

    Args:
        d_h, d_down: [N, F] and [N, rank].
    """
    if gate.is_cuda:
        from sftkit.ops.gated_mlp_kernel import backward  # Triton is not installed on CPU machines

        return backward(d_h, d_down, gate, up, u, b_gate, b_up, a_down, scale)
    g, v, rank = _sums(gate, up, u, b_gate, b_up, scale)
    exact = g.dtype
    u_gate, u_up = u.to(exact).split(rank, 1)
    d_down = d_down.to(exact)
    d_gated = d_h.to(exact) + d_down @ a_down.to(exact)
    sigmoid = torch.sigmoid(g)
    d_g = d_gated * v * (sigmoid * (1 + g * (1 - sigmoid)))
    d_v = d_gated * silu(g)
    d_u = scale * torch.cat([d_g @ b_gate.to(exact).t(), d_v @ b_up.to(exact).t()], 1)
    factors = torch.stack([scale * (u_gate.t() @ d_g), scale * (u_up.t() @ d_v), d_down.t() @ (silu(g) * v)])
    return d_g.to(gate.dtype), d_v.to(gate.dtype), d_u.to(gate.dtype), factors.float()


@gated_product_backward.register_fake
def _(d_h: Tensor, d_down: Tensor, gate: Tensor, up: Tensor, u: Tensor, *more: Any) -> Any:
    a_down = more[2]
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


def _gradients(ctx: Any, d_h: Tensor, d_down: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of `gated_product`."""
    given = d_h.contiguous(), d_down.contiguous(), *ctx.saved_tensors
    d_gate, d_up, d_u, factors = gated_product_backward(*given, ctx.scale)
    return d_gate, d_up, d_u, *factors.to(d_gate.dtype).unbind(), None


gated_product.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.sftkit.gated_product)
def _forward_flops(gate: Any, up: Any, u: Any, b_gate: Any, b_up: Any, a_down: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of three low-rank products."""
    return 6 * gate[0] * gate[1] * a_down[0]


@register_flop_formula(torch.ops.sftkit.gated_product_backward)
def _backward_flops(d_h: Any, d_down: Any, *more: Any, **named: Any) -> int:
    """Return the FLOPs of the six products of their gradients; those computed again are not counted."""
    return 12 * d_h[0] * d_h[1] * d_down[1]
