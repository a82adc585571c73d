"""The gated delta rule over packed rows, as one operator: a recurrent state that every document begins with zero.

For each head, with state S [K, V], decay a = exp(g) and key k, S becomes a S + k (b (v - k a S)) and q S is its output.
Its fake, gradient and FLOP formula are registered, so that a compiled block has one node for any documents. On a GPU
flash-linear-attention computes it (extra hybrid); elsewhere it is torch's matrix products over chunks of positions.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from sftkit.config.commands import install

SCAN_CHUNK = 64
"Positions that are computed together; 64 is also the chunk of flash-linear-attention."


WRONG = 0.05
"Relative error above which kernels are wrong; bf16 rounds by 0.01."


@cache
def fla_unsupported_reason(heads: int, value_heads: int, key_size: int, value_size: int) -> str | None:
    """Return why flash-linear-attention cannot compute here for heads of these sizes; None if it can.

    Its kernels are compared once with torch's products, as their code, chosen by measuring, can be wrong: with Triton
    3.4 to 3.7.0 on Hopper for keys of 64 (fla-org/flash-linear-attention#640).
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "needs an NVIDIA GPU"
    try:
        from fla.ops.common import chunk_o

        # It rejects these versions for all sizes; only the comparison below knows which are wrong.
        chunk_o.TRITON_ABOVE_3_7_1 = True
        if torch.cuda.get_device_capability()[0] == 9 and key_size == value_size == 128:
            use_measured_settings()
        error = _largest_error(heads, value_heads, key_size, value_size)
    except Exception as failure:  # not installed, or versions that do not fit each other
        return f"does not run ({' '.join(str(failure).split())[:120]}): {install('sftkit[hybrid]')}"
    if error < WRONG:
        return None
    return f"computes wrong gradients here ({error:.0%} off): install Triton 3.7.1 (torch 2.12)"


MEASURED: dict[str, dict[str, int]] = {
    "chunk_fwd_kernel_o": {"BK": 64, "BV": 64, "num_stages": 3, "num_warps": 4},
    "chunk_bwd_kernel_dqkwg": {"num_stages": 3, "num_warps": 4},
    "chunk_bwd_kernel_dv_local": {"num_stages": 2, "num_warps": 2},
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {"BV": 64, "num_stages": 2, "num_warps": 4},
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": {"BV": 32, "num_stages": 2, "num_warps": 2},
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": {"BK": 64, "num_stages": 3, "num_warps": 1},
    "recompute_w_u_fwd_kernel": {"num_stages": 3, "num_warps": 4},
    "prepare_wy_repr_bwd_kernel": {"num_stages": 3, "num_warps": 4},
    "chunk_local_cumsum_scalar_kernel": {"num_stages": 3, "num_warps": 2},
}
"""Launch settings of flash-linear-attention's kernels on Hopper for heads of 128: the fastest for 16 and 32 heads
together, as benchmarks/h200_hybrids/kernels.py measured them. With them a start compiles 9 kernels instead of 64."""


def use_measured_settings() -> None:
    """Let each kernel of flash-linear-attention have its setting of `MEASURED`, instead of the fastest at each start: a
    resumed run computes with the same code."""
    from triton import Config

    for name, tuner in autotuners().items():
        if name in MEASURED:
            settings = dict(MEASURED[name])
            warps, stages = settings.pop("num_warps"), settings.pop("num_stages")
            tuner.configs = [Config(settings, num_warps=warps, num_stages=stages)]


def autotuners() -> dict[str, Any]:
    """Return, by name, the kernels of the gated delta rule whose launch settings flash-linear-attention measures."""
    modules = ("common.chunk_o", "common.chunk_delta_h", "gated_delta_rule.chunk_fwd", "gated_delta_rule.wy_fast")
    found = {}
    for module in (*modules, "utils.cumsum"):
        for name, kernel in vars(importlib.import_module(f"fla.ops.{module}")).items():
            while hasattr(kernel, "fn") and not hasattr(kernel, "configs"):
                kernel = kernel.fn
            if hasattr(kernel, "configs"):
                found[name] = kernel
    return found


def _largest_error(heads: int, value_heads: int, key_size: int, value_size: int) -> float:
    """Return the largest relative error of outputs and gradients of fla in bf16, over documents of 1 to 200."""
    lengths = torch.tensor([3, 64, 200, 1, 116])
    starts = F.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None].cuda()
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(1, int(lengths.sum()), *size, generator=generator, device="cuda")

    query, key = (normalized(random(heads, key_size)) for _ in range(2))
    value, grad = (random(value_heads, value_size) for _ in range(2))
    decay, beta = -F.softplus(random(value_heads)), random(value_heads).sigmoid()
    given = [query, key, value, decay, beta]
    rounded = [x if x is decay else x.bfloat16() for x in given]

    def computed(inputs: list[Tensor], borders: Tensor, kernel: str) -> tuple[Tensor, ...]:
        inputs = [x.clone().requires_grad_() for x in inputs]
        with torch.enable_grad():
            out, *_ = gated_delta_rule(*inputs, borders, kernel)
            return (out.detach(), *torch.autograd.grad((out * grad).sum(), inputs))

    pairs = zip(computed(rounded, starts, "fla"), computed(given, positions, "torch"), strict=True)
    return max(float((ours - exact).norm() / exact.norm()) for ours, exact in pairs)


def normalized(x: Tensor) -> Tensor:
    """Return vectors of length 1, in at least fp32, as transformers' models normalize queries and keys."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@torch.library.custom_op("sftkit::gated_delta_rule", mutates_args=())
def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, borders: Tensor, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gated delta rule within documents.

    Args:
        query, key: [B, T, H, K], normalized, the queries not yet scaled; value: [B, T, HV, V] with HV a multiple of H.
        decay: fp32 [B, T, HV], the logarithm of the factor of the state; beta: [B, T, HV], the rate of its update.
        borders: of the documents. With kernel torch int64 [B, T], distance from the first position of the document;
            with fla int32 [D + 1], where they start in the B * T positions, zero-length ones last.
        kernel: torch, or fla.

    Returns:
        (output [B, T, HV, V] in value's dtype, and what fla's backward pass needs: sums of the decays, inverses of the
        chunks' systems)
    """
    if kernel == "fla":
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

        given = [_flat(x) for x in (query, key, value, decay, beta)]
        named = {"scale": query.shape[-1] ** -0.5, "initial_state": None, "output_final_state": False}
        named |= _segments(borders, given[0].shape[1])
        cumulated, out, inverse, *_ = chunk_gated_delta_rule_fwd(*given, **named)
        return out.view(value.shape), cumulated, inverse
    chunks = _Chunks.of(query, key, value, decay, beta, borders)
    states, updates, _ = _scan(chunks)
    out = (chunks.head * chunks.query) @ states + chunks.scores @ updates
    return _joined(out, value), value.new_zeros(0), value.new_zeros(0)


@gated_delta_rule.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads, _ = value.shape
    if rest[-1] != "fla":
        return value.new_empty(value.shape), value.new_empty(0), value.new_empty(0)
    sums = value.new_empty(1, batch * length, heads, dtype=torch.float32)
    return value.new_empty(value.shape), sums, key.new_empty(1, batch * length, heads, SCAN_CHUNK)


_Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("sftkit::gated_delta_rule_backward", mutates_args=())
def gated_delta_rule_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    borders: Tensor,
    cumulated: Tensor,
    inverse: Tensor,
    kernel: str,
) -> _Gradients:
    """Return the gradients of `gated_delta_rule` by its first five arguments, in their shapes and dtypes."""
    given = (query, key, value, decay, beta)
    if kernel == "fla":
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

        q, k, v, b, do = (_flat(x) for x in (query, key, value, beta, grad))
        named = {"scale": q.shape[-1] ** -0.5, "initial_state": None, "do": do, "dht": None}
        named |= _segments(borders, q.shape[1])
        dq, dk, dv, db, dg, *_ = chunk_gated_delta_rule_bwd(q, k, v, cumulated, b, inverse, **named)
        found = (dq, dk, dv, dg, db)
        return tuple(x.to(like.dtype).reshape(like.shape) for x, like in zip(found, given, strict=True))
    chunks = _Chunks.of(*given, borders)
    return _torch_backward(chunks, grad, given)


@gated_delta_rule_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *_: Any) -> _Gradients:
    return tuple(x.new_empty(x.shape) for x in (query, key, value, decay, beta))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save the tensors of the backward pass; what it needs of the forward pass is not differentiable."""
    *tensors, ctx.kernel = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads = gated_delta_rule_backward(grad.contiguous(), *ctx.saved_tensors, ctx.kernel)
    return (*grads, None, None)


gated_delta_rule.register_autograd(_backward, setup_context=_save)


def _flat(x: Tensor) -> Tensor:
    """Return all rows as one, as flash-linear-attention wants documents of different lengths: [1, B * T, ...]."""
    return x.flatten(0, 1).unsqueeze(0).contiguous()


def _segments(cu_seqlens: Tensor, total: int) -> dict[str, Any]:
    """Return the documents for flash-linear-attention: their starts, and the number and chunk of as many chunks as
    there can be, int32 [chunks, 2].

    Its own function asks the device how many chunks there are. Here unused places point to a document of no length,
    for which its kernels load and store nothing.
    """
    ends = torch.cat([cu_seqlens, cu_seqlens[-1:]])
    first = F.pad((cu_seqlens.diff() + (SCAN_CHUNK - 1)).div(SCAN_CHUNK, rounding_mode="floor").cumsum(0), (1, 0))
    places = torch.arange(total // SCAN_CHUNK + len(cu_seqlens) - 1, device=cu_seqlens.device)
    document = torch.searchsorted(first, places, right=True) - 1
    chunk = torch.where(document < len(cu_seqlens) - 1, places - first[document], 0)
    return {"cu_seqlens": ends, "chunk_indices": torch.stack([document, chunk], 1).to(cu_seqlens.dtype)}


class _Chunks(NamedTuple):
    """The inputs by chunk, N of them with C positions, in at least fp32, and what follows from one chunk alone.

    Decays are summed from the first position of the document or of the chunk, whichever is later: another document's
    decays enter no sum, not even as rounding.
    """

    query: Tensor
    "[B, HV, N, C, K], as key"
    key: Tensor
    value: Tensor
    "[B, HV, N, C, V]"
    beta: Tensor
    "[B, HV, N, C, 1], as head and tail"
    same: Tensor
    "[B, 1, N, C, C]: 1 where position j is in the document of position i and not after it, else 0"
    decay: Tensor
    "[B, HV, N, C, C]: the factor from position j to i, 0 where same is 0"
    head: Tensor
    "factor from the state before the chunk, 0 in documents that begin in it"
    tail: Tensor
    "factor to the state after the chunk, 0 in documents that end before"
    kept: Tensor
    "[B, HV, N, 1, 1], the factor from the state before to that after"
    scores: Tensor
    "[B, HV, N, C, C], decayed products of queries and keys"
    system: Tensor
    "[B, HV, N, C, C], decayed products of keys times beta, below the diagonal"

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, positions: Tensor) -> "_Chunks":
        """Cut the arguments of `gated_delta_rule` into chunks; positions behind the last are documents of their own."""
        dtype = torch.promote_types(value.dtype, torch.float32)
        groups = value.shape[2] // query.shape[2]
        behind = -value.shape[1] % SCAN_CHUNK

        query, key = (_cut(x, behind, dtype).repeat_interleave(groups, 1) for x in (query, key))
        value, decay, beta = (_cut(x, behind, dtype) for x in (value, decay, beta))
        query = query * query.shape[-1] ** -0.5
        places = torch.arange(SCAN_CHUNK, device=value.device)
        within = F.pad(positions, (0, behind)).unflatten(1, (-1, SCAN_CHUNK))[:, None]
        # A document's first position in a chunk has the largest of these numbers so far; 0 or less: it began before.
        start = places - within
        same = ((start[..., None, :] == start[..., :, None]) & (places <= places[:, None])).to(dtype)
        sums = (same * decay.squeeze(-1)[..., None, :]).sum(-1)
        # Masked before exp, which would overflow above the diagonal.
        difference = (sums[..., :, None] - sums[..., None, :]) * same
        factor = difference.exp() * same
        before = (start < 0).to(dtype)[..., None]
        head = sums.exp()[..., None] * before
        tail = factor[..., -1, :, None]
        products = key @ key.transpose(-1, -2)
        system = (beta * products * factor).tril(-1)
        scores = (query @ key.transpose(-1, -2)) * factor
        return cls(query, key, value, beta, same, factor, head, tail, head[..., -1:, :], scores, system)


def _scan(chunks: _Chunks) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state before each chunk, [B, HV, N, K, V], what is written into it, [B, HV, N, C, V], and the inverse
    of each chunk's system of equations."""
    eye = torch.eye(SCAN_CHUNK, dtype=chunks.value.dtype, device=chunks.value.device).expand_as(chunks.system)
    inverse = torch.linalg.solve_triangular(chunks.system, eye, upper=False, unitriangular=True)
    own = inverse @ (chunks.beta * chunks.value)
    read = inverse @ (chunks.beta * chunks.head * chunks.key)
    written = (chunks.tail * chunks.key).transpose(-1, -2)
    state = chunks.value.new_zeros(*chunks.key.shape[:2], chunks.key.shape[-1], chunks.value.shape[-1])
    states, updates = [], []
    for n in range(chunks.key.shape[2]):
        states.append(state)
        updates.append(own[:, :, n] - read[:, :, n] @ state)
        state = chunks.kept[:, :, n] * state + written[:, :, n] @ updates[-1]
    return torch.stack(states, 2), torch.stack(updates, 2), inverse


def _torch_backward(chunks: _Chunks, grad: Tensor, given: Sequence[Tensor]) -> _Gradients:
    """Return the gradients, through the states from the last to the first.

    With U the updates, (1 + system) U = R and R = beta (value - head key S): the gradient of R is that of U through the
    transposed inverse, and the gradient of the system is minus the outer product of both.
    """
    query, key, value, beta, same, factor, head, tail, kept, scores, system = chunks
    states, updates, inverse = _scan(chunks)
    grad = _cut(grad, -grad.shape[1] % SCAN_CHUNK, value.dtype)
    of_out = scores.mT @ grad
    after = torch.zeros_like(states[:, :, 0])
    of_states, of_systems = [], []
    for n in reversed(range(states.shape[2])):
        of_states.append(after)
        of_updates = of_out[:, :, n] + (tail * key)[:, :, n] @ after
        of_systems.append(inverse[:, :, n].mT @ of_updates)
        after = kept[:, :, n] * after + (head * query)[:, :, n].mT @ grad[:, :, n]
        after = after - (head * key)[:, :, n].mT @ (beta[:, :, n] * of_systems[-1])
    after = torch.stack(of_states[::-1], 2)
    residual = torch.stack(of_systems[::-1], 2)
    d_value = beta * residual
    # Of the products with a state: queries and keys times head, keys times tail.
    d_read = grad @ states.mT
    d_erased = -d_value @ states.mT
    d_written = updates @ after.mT
    d_scores = (grad @ updates.mT) * same
    d_system = -(residual @ updates.mT).tril(-1) * same
    products = key @ key.mT * factor
    d_beta = (residual * (value - (head * key) @ states)).sum(-1) + (d_system * products).sum(-1)
    d_queries = d_scores * factor
    d_keys = beta * d_system * factor
    d_query = d_queries @ key + head * d_read
    d_key = d_queries.mT @ query + (d_keys + d_keys.mT) @ key + head * d_erased + tail * d_written
    # Of the sums of decays: those between two positions of a chunk, those from its beginning, those to its end.
    between = d_scores * scores + d_system * system
    to_end = (d_written * key).sum(-1) * tail.squeeze(-1)
    d_sums = between.sum(-1) - between.sum(-2) + ((d_read * query + d_erased * key).sum(-1) * head.squeeze(-1)) - to_end
    d_sums[..., -1] += to_end.sum(-1) + (after * states).sum((-2, -1)) * kept.squeeze((-2, -1))
    d_decay = (same * d_sums[..., None]).sum(-2)
    d_query = d_query * given[0].shape[-1] ** -0.5
    grads = (d_query, d_key, d_value, d_decay[..., None], d_beta[..., None])
    return tuple(_joined(x, like) for x, like in zip(grads, given, strict=True))  # type: ignore[return-value]


def _cut(x: Tensor, behind: int, dtype: torch.dtype) -> Tensor:
    """Return [B, T, heads, ...] by chunk, zeros behind: [B, heads, N, C, ...], one column where nothing follows."""
    x = x.to(dtype) if x.ndim == 4 else x.to(dtype)[..., None]
    return F.pad(x, (0, 0, 0, 0, 0, behind)).transpose(1, 2).unflatten(2, (-1, SCAN_CHUNK)).contiguous()


def _joined(x: Tensor, like: Tensor) -> Tensor:
    """Return [B, HV, N, C, ...] in the shape and dtype of an argument; heads that share one are summed."""
    x = x.flatten(2, 3).transpose(1, 2)[:, : like.shape[1]]
    return x.unflatten(2, (like.shape[2], -1)).sum(3).reshape(like.shape).to(like.dtype)


def _flops(key: Sequence[int], value: Sequence[int]) -> int:
    """Return the FLOPs of a forward pass over chunks: three products with the state, five within a chunk."""
    batch, length, heads, width = value
    return 2 * batch * length * heads * (3 * key[-1] * width + SCAN_CHUNK * (3 * key[-1] + 2 * width))


@register_flop_formula(torch.ops.sftkit.gated_delta_rule)
def _forward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return _flops(key, value)


@register_flop_formula(torch.ops.sftkit.gated_delta_rule_backward)
def _backward_flops(
    grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Count the forward pass again, as states are not kept, and two products for each of its products."""
    return 3 * _flops(key, value)
