"""Cross entropy of rows of logits and its gradient in one Triton kernel, written over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sftkit.config.schema import LossConfig
from sftkit.data.batches.collate import IGNORE

BLOCK = 4096
WARPS = 16
PLAIN_BLOCK = 8192
PLAIN_WARPS = 32
"""For large vocabularies without smoothing and token metrics: a lane has few sums, so a program can be large, and fewer
rows share the L2 cache (labs/beside.py kernels)."""


@triton.jit
def _softcapped(logits, softcap):
    return softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)  # softcap * tanh(logits / softcap)


@triton.jit
def _cross_entropy_row(  # noqa: PLR0913 - a Triton kernel takes pointers and numbers
    logits,
    row_stride,
    targets,
    weights,
    sums,
    sums_stride,
    vocab,
    softcap,
    z_loss,
    label_smoothing,
    IGNORED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    DFT: tl.constexpr,
    METRICS: tl.constexpr,
    GRADIENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a row, one program each. `cross_entropy_` says what goes in and out."""
    row = tl.program_id(0).to(tl.int64)  # row * row_stride may pass 2^31
    logits += row * row_stride
    sums += row
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)

    if target == IGNORED:
        for part in tl.static_range(4):
            tl.store(sums + part * sums_stride, 0.0)
        if GRADIENTS:
            for start in range(0, vocab, BLOCK):
                column = start + columns
                tl.store(logits + column, tl.zeros([BLOCK], logits.dtype.element_ty), mask=column < vocab)
        return

    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + row)

    # Pass 1: every lane keeps its own online maximum and sum, so that the loop has no reduction over the block.
    raw_target = tl.load(logits + target).to(tl.float32)
    highest = tl.full([BLOCK], -3.0e38, tl.float32)  # finite: -inf minus -inf is NaN
    exp_sum = tl.zeros([BLOCK], tl.float32)  # of exp(x - highest)
    weighted = tl.zeros([BLOCK], tl.float32)  # of exp(x - highest) * x
    plain = tl.zeros([BLOCK], tl.float32)  # of x
    beaten = tl.zeros([BLOCK], tl.int32)  # 1 where a token ranks above the target; ties go to the first, as in argmax
    for start in range(0, vocab, BLOCK):
        column = start + columns
        inside = column < vocab
        raw = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        x = raw
        if SOFTCAP:
            x = tl.where(inside, _softcapped(raw, softcap), float("-inf"))
        distance = x - highest
        shrink = tl.exp(-tl.abs(distance))  # of the old sum where x is a new maximum, else of x itself
        higher = distance > 0.0
        if METRICS:
            beaten |= ((raw > raw_target) | ((raw == raw_target) & (column < target))).to(tl.int32)
            x_share = tl.where(shrink > 0.0, shrink * x, 0.0)  # 0 * -inf is NaN
            weighted = tl.where(higher, weighted * shrink + x, weighted + x_share)
        if SMOOTHING:
            plain += tl.where(inside, x, 0.0)
        exp_sum = tl.where(higher, exp_sum * shrink + 1.0, exp_sum + shrink)
        highest = tl.maximum(highest, x)

    row_highest = tl.max(highest, 0)
    rescale = tl.exp(highest - row_highest)
    row_exp_sum = tl.sum(exp_sum * rescale, 0)
    lse = row_highest + tl.log(row_exp_sum)
    x_target = raw_target
    if SOFTCAP:
        x_target = _softcapped(raw_target, softcap)
    nll = lse - x_target
    loss = nll + z_loss * lse * lse
    lse_weight = 1.0 + 2.0 * z_loss * lse
    target_weight = 1.0 - label_smoothing
    if DFT:
        target_weight = tl.exp(-nll)
        loss += (target_weight - 1.0) * nll
        lse_weight += target_weight - 1.0
    if SMOOTHING:
        loss += label_smoothing * (x_target - tl.sum(plain, 0) / vocab)
    tl.store(sums, weight * loss)
    tl.store(sums + sums_stride, weight * nll)
    if METRICS:
        tl.store(sums + 2 * sums_stride, weight * (1.0 - tl.max(beaten, 0).to(tl.float32)))
        tl.store(sums + 3 * sums_stride, weight * (lse - tl.sum(weighted * rescale, 0) / row_exp_sum))
    else:
        tl.store(sums + 2 * sums_stride, 0.0)
        tl.store(sums + 3 * sums_stride, 0.0)

    # Pass 2, from the end: what pass 1 read last is still in cache. The reductions above put all reads of pass 1 first.
    if GRADIENTS:
        last = (vocab - 1) // BLOCK * BLOCK
        for done in range(0, vocab, BLOCK):
            column = last - done + columns
            inside = column < vocab
            # Read and written for the last time here: what other rows still need stays in the cache.
            x = tl.load(logits + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if SOFTCAP:
                x = _softcapped(x, softcap)
            gradient = tl.exp(x - lse) * lse_weight - tl.where(column == target, target_weight, 0.0)
            if SMOOTHING:
                gradient -= label_smoothing / vocab
            if SOFTCAP:
                gradient *= 1.0 - (x / softcap) * (x / softcap)
            if WEIGHTED:
                gradient *= weight
            result = gradient.to(logits.dtype.element_ty)
            tl.store(logits + column, result, mask=inside, eviction_policy="evict_first")


def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    options: LossConfig,
    softcap: float | None,
    *,
    gradients: bool,
    weights: Tensor | None = None,
) -> None:
    """Measure every row of logits and, if `gradients`, replace it by the gradient of its loss. Math in fp32.

    Args:
        logits: [N, V], fp32, bf16 or fp16, unit stride in V.
        targets: int64 [N], unit stride, each IGNORE or in [0, V).
        sums: fp32 [4, N], written; rows as in `linear_cross_entropy.LossSums`; unit stride in N.
        weights: fp32 [N], unit stride, factor of all that a row adds; None: 1.
    """
    plain = logits.shape[1] > PLAIN_BLOCK and not (options.label_smoothing or options.token_metrics)
    assert logits.stride(1) == targets.stride(0) == sums.stride(1) == 1, "rows must be dense"
    parts = (options.z_loss, options.label_smoothing)
    given = targets if weights is None else weights  # any pointer: without weights none is read
    assert given.stride(0) == 1, "weights must be dense"
    switches: dict[str, bool] = {"WEIGHTED": weights is not None}
    switches |= {"SOFTCAP": softcap is not None, "SMOOTHING": options.label_smoothing > 0.0, "DFT": options.dft}
    sizes = {"BLOCK": PLAIN_BLOCK if plain else BLOCK, "num_warps": PLAIN_WARPS if plain else WARPS}
    _cross_entropy_row[(logits.shape[0],)](
        *(logits, logits.stride(0), targets, given, sums, sums.stride(0), logits.shape[1], softcap or 1.0, *parts),
        **{"IGNORED": IGNORE, "METRICS": options.token_metrics, "GRADIENTS": gradients, **switches, **sizes},
    )


@triton.jit
def _scale(given, factor, out, elements, BLOCK: tl.constexpr):
    """Write given * factor to out, a block a program."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    value = tl.load(given + element, mask=inside, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + element, value.to(out.dtype.element_ty), mask=inside)


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dense gradient * scale (0-d) in `dtype`, rounded once.

    torch's product whose result has another dtype takes twice as long: it does not load whole vectors.
    """
    out = torch.empty_like(gradient, dtype=dtype)
    grid = (triton.cdiv(gradient.numel(), BLOCK),)
    _scale[grid](gradient, scale, out, gradient.numel(), BLOCK=BLOCK)
    return out
