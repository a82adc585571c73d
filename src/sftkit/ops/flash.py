"""Document-isolated FlashAttention as one operator: causal within a text, or from texts to their encoded inputs.

Kernels know no sinks, scores that join the sum of the weights and have no value. A sink s multiplies the output by
sigmoid(lse - s) and makes the log-sum-exp log(exp(lse) + exp(s)). Given these two in place of its own, a kernel's
backward pass computes the exact gradients of queries, keys and values: it makes each weight from the log-sum-exp, and
the sum over a row of weight times gradient from the output.

Its fake, gradient and FLOP formula are registered, so that a compiled block has it as one node, whatever the documents
are, and activation budgets know what it costs.
"""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sftkit.config.commands import install
from sftkit.runtime.hardware import user_cache

MAX_REPEATS = {"fa4": 4, "varlen": 2}
"Maximum number of query heads per key head for which the backward pass repeats keys and values."


def kernel_unsupported_reason(kernel: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run on this device with inputs of this dtype; None if it can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "needs an NVIDIA GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "needs bf16 weights (train.precision)"
    major, _ = torch.cuda.get_device_capability(device)
    if kernel == "varlen":
        return None if major >= 8 else "needs an Ampere GPU or a newer one"
    if major not in (9, 10):
        return "needs a Hopper or Blackwell GPU"
    try:
        fa4()
    except Exception as error:  # not installed, or versions that do not fit each other
        return f"cannot be imported ({' '.join(str(error).split())[:120]}): {install('sftkit[attention-fa4]')}"
    return None


def fa4_folder() -> Path:
    """Return where compiled kernels of FlashAttention-4 are kept: a folder per version of its
    code, object files inside."""
    return Path(os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR") or user_cache() / "fa4")


@cache
def fa4() -> ModuleType:
    """Import FlashAttention-4 with its kernels kept on disk, since building them takes 8 s a direction."""
    # Read when the module is imported. The folder is the user's own, not the shared temporary one that is the default:
    # what lies there is run.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(fa4_folder()))
    from flash_attn.cute import interface

    return interface


@torch.library.custom_op("sftkit::document_attention", mutates_args=())
def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    max_length: int,
    scale: float,
    window: int,
    kernel: str,
    causal: bool = True,  # noqa: FBT001, FBT002 - as above
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend within each document of a flat batch, causally or not.

    Args:
        query: bf16 or fp16 [N, H, D]; key, value: [M, KV, D] with H a multiple of KV.
        cu_seqlens: int32 [D + 1], document starts; zero-length documents are allowed, every position must be in one.
        cu_seqlens_k: the same for the keys. A document with fewer queries than keys has the last ones: query i of n
            sees the first m - n + i + 1 of m keys.
        max_length: at least the length of the longest document.
        scale: factor of the scores. window: most keys that a query sees, itself included; 0: all.
        kernel: fa4, flash_attn.cute (extra attention-fa4), or varlen, the FlashAttention-2 that torch ships.
        causal: False: each query sees all keys of its document, and there is no window.
        sinks: [H], a score for each head that joins the sum of the weights and has no value; None: there is none.

    Returns:
        (attended values [N, H, D], log-sum-exp fp32 [H, N] with sinks)
    """
    # Private, both kernels: an operator with its own gradient needs forward and backward apart, and the public
    # functions, flash_attn.cute's (Dao-AILab/flash-attention#2154) and torch's varlen_attn (pytorch/pytorch#164502),
    # give it the forward pass alone.
    if kernel == "fa4":
        named = _fa4_rows(cu_seqlens, cu_seqlens_k, max_length, window)
        named |= {"softmax_scale": scale, "causal": causal, "return_lse": True}
        out, lse = fa4()._flash_attn_fwd(query, key, value, **named)
    else:
        rows = (cu_seqlens, cu_seqlens_k, max_length, max_length)
        # No dropout; and torch has no name for the last one by place: no debug mask is returned.
        options = (0.0, causal, False)
        sizes = _aten_window(window, causal=causal)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(query, key, value, *rows, *options, scale=scale, **sizes)
    if sinks is not None:
        with_sinks = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
        out.mul_((lse - with_sinks).exp().t()[..., None])  # in fp32, rounded once
        lse = with_sinks
    return out, lse


def _fa4_rows(cu_seqlens: Tensor, cu_seqlens_k: Tensor, max_length: int, window: int) -> dict[str, Any]:
    """Return the arguments of both passes of FlashAttention-4 for documents and window."""
    starts = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
    longest = {"max_seqlen_q": max_length, "max_seqlen_k": max_length}
    return {**starts, **longest, "window_size_left": window - 1 if window else None}


def _aten_window(window: int, *, causal: bool) -> dict[str, int]:
    """Return the arguments of both passes of torch's FlashAttention for the window; -1: no bound."""
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0 if causal else -1}


@document_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
    positions, heads, _ = query.shape
    out = query.new_empty(positions, heads, value.shape[-1])
    return out, query.new_empty(heads, positions, dtype=torch.float32)


@torch.library.custom_op("sftkit::document_attention_backward", mutates_args=())
def document_attention_backward(  # noqa: PLR0913 - an operator takes tensors and numbers
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    max_length: int,
    scale: float,
    window: int,
    kernel: str,
    causal: bool = True,  # noqa: FBT001, FBT002 - as above
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `document_attention` by query, key and value, in their shapes and dtypes."""
    if kernel == "fa4":
        named = _fa4_rows(cu_seqlens, cu_seqlens_k, max_length, window)
        grads = fa4()._flash_attn_bwd(query, key, value, out, grad, lse, scale, causal, **named)
        return _cleared(grads, cu_seqlens, cu_seqlens_k, causal=causal)
    # Private, as in document_attention: torch.nn.attention.varlen has a backward pass of its own, but no function for
    # it.
    rows = (cu_seqlens, cu_seqlens_k, max_length, max_length)
    no_dropout = (torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device))
    given = (grad, query, key, value, out, lse, *rows, 0.0, causal, *no_dropout)
    sizes = _aten_window(window, causal=causal)
    grads = torch.ops.aten._flash_attention_backward(*given, scale=scale, **sizes)
    return _cleared(grads, cu_seqlens, cu_seqlens_k, causal=causal)


Gradients = tuple[Tensor, Tensor, Tensor]


def _cleared(grads: Gradients, cu_seqlens: Tensor, cu_seqlens_k: Tensor, *, causal: bool) -> Gradients:
    """Set the gradients of keys that no query sees to 0: kernels leave the memory of such documents as it was."""
    query, key, value = grads
    if causal and len(key) == len(query):  # every key has its query
        return grads
    # Cleared by a mask over all keys, since how many documents have no query is known on the device only.
    document = torch.searchsorted(cu_seqlens_k[1:], torch.arange(len(key), device=key.device), right=True)
    seen = (cu_seqlens.diff() > 0)[document][:, None, None]
    return query, torch.where(seen, key, 0), torch.where(seen, value, 0)


@document_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Gradients:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors of the backward pass; the log-sum-exp is not differentiable."""
    *tensors, ctx.max_length, ctx.scale, ctx.window, ctx.kernel, ctx.causal, sinks = inputs
    ctx.save_for_backward(*tensors, *output, sinks)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients, with repeated keys and values where there are few query heads per key head.

    Repeating is then faster: no fp32 accumulators to clear, add to and convert, and the sum over the heads of a group
    fuses with what follows it. H200, 16/8 heads of 128, documents of 350 tokens: 598 us against 424 us for the kernel,
    and 60 us for the repeating and summing.
    """
    query, key, value, cu_seqlens, cu_seqlens_k, out, lse, sinks = ctx.saved_tensors
    groups = query.shape[1] // key.shape[1]
    repeat = 1 < groups <= MAX_REPEATS[ctx.kernel]
    if repeat:
        key, value = (x.unsqueeze(2).expand(-1, -1, groups, -1).flatten(1, 2) for x in (key, value))
    starts = (cu_seqlens, cu_seqlens_k)
    grads = document_attention_backward(
        grad, query, key, value, out, lse, *starts, ctx.max_length, ctx.scale, ctx.window, ctx.kernel, ctx.causal
    )
    if repeat:
        grads = (grads[0], *(x.unflatten(1, (-1, groups)).sum(2) for x in grads[1:]))
    of_sinks = None
    if sinks is not None and ctx.needs_input_grad[-1]:
        # The weights of a row add up to 1, so a sink takes from all of them what they gain together.
        gained = (out.to(lse.dtype) * grad.to(lse.dtype)).sum(-1).t()
        of_sinks = -((sinks[:, None].to(lse.dtype) - lse).exp() * gained).sum(1).to(sinks.dtype)
    return (*grads, None, None, None, None, None, None, None, of_sinks)


document_attention.register_autograd(_backward, setup_context=_save)


def _pair_flops(query: Sequence[int], value: Sequence[int], *more: Any, **named: Any) -> int:
    """Return the FLOPs of one product of [N, H, D] with its visible keys, for documents of max_length: an upper bound.

    Not causal, for documents with equally many keys.
    """
    positions, heads, head_dim = query
    _, cu_seqlens_k, max_length, _, window, _, *causal = more
    if not named.get("causal", all(causal[:1])):
        return positions * heads * (head_dim + value[-1]) * (value[0] // (cu_seqlens_k[0] - 1))
    return positions * heads * (head_dim + value[-1]) * min(window or max_length, max_length) // 2


@register_flop_formula(torch.ops.sftkit.document_attention)
def _forward_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *more: Any, out_shape: object, **named: Any
) -> int:
    """Count two products: scores and values."""
    return 2 * _pair_flops(query, value, *more, **named)


@register_flop_formula(torch.ops.sftkit.document_attention_backward)
def _backward_flops(*given: Any, out_shape: object, **named: Any) -> int:
    """Count five products: the scores again, and those of the gradients."""
    _, query, _, value, _, _, *more = given
    return 5 * _pair_flops(query, value, *more, **named)
