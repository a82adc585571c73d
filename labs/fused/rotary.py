"""Norm and rotary embedding of queries and keys with attention within documents, as one operator.

Compiled apart, each direction takes several passes over queries and keys, and where the backward pass of attention
repeats keys and values, two more over their gradients. Here each direction has one pass (rotary_kernel.py), which
also adds up the gradients of the heads that share a key. Arithmetic is fp32, as the compiler fuses what transformers
writes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sftkit.ops import flash

Rotation = tuple[Tensor | None, Tensor | None, Tensor, Tensor, float]
"Weights of the norms of queries and keys, [D] or None without norms; cosines and sines, [N, D]; the norms' epsilon."


def rotate(query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return normalized and rotated queries and keys, contiguous.

    Args:
        query: [N, H, D] whose heads are neighbours. key: [N, KV, D], the same.
    """
    query_weight, key_weight, cos, sin, eps = rotation
    if query.is_cuda:
        from labs.fused import rotary_kernel  # Triton is not installed on CPU machines

        return rotary_kernel.rotate_heads(query, key, *rotation)
    exact = torch.promote_types(query.dtype, torch.float32)
    normed = (_normed(x.to(exact), weight, eps)[0] for x, weight in ((query, query_weight), (key, key_weight)))
    rotated = (x * cos[:, None].to(exact) + _turned(x) * sin[:, None].to(exact) for x in normed)
    one, two = (x.to(query.dtype).contiguous() for x in rotated)
    return one, two


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return x over its root mean square, times the weight, and that factor; without a weight x and 1."""
    if weight is None:
        return x, x.new_ones(())
    factor = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * factor * weight.to(x.dtype), factor


def _turned(x: Tensor) -> Tensor:
    """Return (-b, a) of the halves (a, b) of each head."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_back(
    grads: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients by query, key and value, as `rotate` was given them, and by the weights, fp32 [2, D].

    Args:
        grads: by rotated queries [N, H, D], and by rotated keys and values that were repeated G times, [N, G KV, D].
    """
    query_weight, key_weight, cos, sin, eps = rotation
    if query.is_cuda:
        from labs.fused import rotary_kernel

        return rotary_kernel.rotate_heads_back(grads, query, key, *rotation)
    exact = torch.promote_types(query.dtype, torch.float32)
    groups = grads[1].shape[1] // key.shape[1]
    of_key, of_value = (x.to(exact).unflatten(1, (-1, groups)).sum(2) for x in grads[1:])
    found = []
    of_weights = []
    for grad, x, weight in ((grads[0].to(exact), query, query_weight), (of_key, key, key_weight)):
        d = grad * cos[:, None].to(exact) - _turned(grad * sin[:, None].to(exact))
        if weight is not None:
            _, factor = _normed(x.to(exact), weight, eps)
            unit = x.to(exact) * factor
            of_weights.append((d * unit).sum((0, 1)))
            d = d * weight.to(exact)
            d = (d - unit * (d * unit).mean(-1, keepdim=True)) * factor
        found.append(d.to(x.dtype))
    weights = torch.stack(of_weights) if of_weights else cos.new_zeros(2, cos.shape[1], dtype=exact)
    return found[0], found[1], of_value.to(grads[2].dtype), weights


@torch.library.custom_op("sftkit::rotary_attention", mutates_args=())
def rotary_attention(  # noqa: PLR0913 - an operator takes tensors and numbers
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    cu_seqlens: Tensor,
    max_length: int,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize and rotate queries and keys, and attend causally within each document.

    Args:
        query: [N, H, D] whose heads are neighbours. key, value: [N, KV, D], the same.
        query_weight, key_weight: [D]; None: there are no norms.
        cos, sin: [N, D], both halves of D the same.
        eps: of the norms. Others: see flash.document_attention.

    Returns:
        (attended values [N, H, D], log-sum-exp fp32 [H, N], rotated queries and keys)
    """
    rotated = rotate(query, key, (query_weight, key_weight, cos, sin, eps))
    starts = (cu_seqlens, cu_seqlens)
    out, lse = flash.document_attention(*rotated, value, *starts, max_length, scale, window, kernel)
    return out, lse, *rotated


@rotary_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *more: Any) -> tuple[Tensor, ...]:
    positions, heads, _ = query.shape
    lse = query.new_empty(heads, positions, dtype=torch.float32)
    return query.new_empty(query.shape), lse, query.new_empty(query.shape), key.new_empty(key.shape)


@torch.library.custom_op("sftkit::rotary_attention_backward", mutates_args=())
def rotary_attention_backward(  # noqa: PLR0913 - an operator takes tensors and numbers
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    lse: Tensor,
    rotated_query: Tensor,
    rotated_key: Tensor,
    eps: float,
    cu_seqlens: Tensor,
    max_length: int,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `rotary_attention` as `rotate_back` does.

    Keys and values are repeated as in flash.document_attention; in one operator, since partitioners would keep the
    repeated keys from the forward pass.
    """
    keys = (rotated_key, value)
    groups = query.shape[1] // key.shape[1]
    if 1 < groups <= flash.MAX_REPEATS[kernel]:
        keys = repeated(*keys, groups)
    starts = (cu_seqlens, cu_seqlens)
    given = (rotated_query, *keys, out, lse, *starts, max_length, scale, window, kernel)
    grads = flash.document_attention_backward(grad, *given)
    return rotate_back(grads, query, key, (query_weight, key_weight, cos, sin, eps))


def repeated(key: Tensor, value: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return keys and values with each head `groups` times, [N, groups KV, D]."""
    if key.is_cuda:
        from labs.fused import rotary_kernel

        return rotary_kernel.repeat_heads(key, value, groups)
    one, two = (x.unsqueeze(2).expand(-1, -1, groups, -1).flatten(1, 2) for x in (key, value))
    return one, two


@rotary_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any) -> tuple[Tensor, ...]:
    exact = torch.promote_types(query.dtype, torch.float32)
    found = (x.new_empty(x.shape) for x in (query, key, value))
    return *found, query.new_empty(2, query.shape[-1], dtype=exact)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the tensors of the backward pass; only the attended values are differentiable."""
    *tensors, eps, cu_seqlens, max_length, scale, window, kernel = inputs
    ctx.save_for_backward(*tensors, *output, cu_seqlens)
    ctx.numbers = (eps, max_length, scale, window, kernel)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients."""
    *saved, cu_seqlens = ctx.saved_tensors
    eps, *sizes = ctx.numbers
    *found, of_weights = rotary_attention_backward(grad, *saved, eps, cu_seqlens, *sizes)
    by_weights = (None if w is None else of.to(w.dtype) for w, of in zip(saved[3:5], of_weights, strict=True))
    return *found, *by_weights, *(None,) * 8


rotary_attention.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.sftkit.rotary_attention)
def _forward_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *more: Any, out_shape: object, **named: Any
) -> int:
    """Count the products of attention."""
    return 2 * flash._pair_flops(query, value, None, None, *more[6:10])


@register_flop_formula(torch.ops.sftkit.rotary_attention_backward)
def _backward_flops(*given: Any, out_shape: object, **named: Any) -> int:
    """Count the products of attention's backward pass."""
    _, query, _, value, *more = given
    return 5 * flash._pair_flops(query, value, None, None, *more[10:14])
