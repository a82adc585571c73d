"""Compute the loss, sums over target tokens, in chunks together with its gradients.

So the logits of a whole batch never exist. Division by the global number of targets happens in engine/step.py, once.

Letters: N rows of hidden states, H their width, V the vocabulary.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sftkit.config.schema import LossConfig
from sftkit.data.batches.collate import IGNORE
from sftkit.runtime.start import replaced


class Head(NamedTuple):
    """The head, which turns hidden states into logits: softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)."""

    weight: Tensor
    "[V, H]"
    bias: Tensor | None = None
    "[V]"
    softcap: float | None = None
    "bound of the logits (Gemma 2, arXiv 2408.00118); None: the product itself"
    tokens: int | None = None
    """rows of the vocabulary that belong to tokens: those behind them are padding (models/vocabulary.py), which is in
    the products, gets no probability and has gradient 0; None: all of them. `ModelKind.head` leaves it None"""
    own_ids: Tensor | None = None
    "[n]: tokens whose rows of a frozen weight are not used, but `own_rows`"
    own_rows: Tensor | None = None
    "fp32 [n, H], trained"
    scale: float = 1.0
    "factor of the logits (Cohere, Granite), which the product applies before it rounds"


class LossSums(NamedTuple):
    """Sums over the targets, each times the weight of its row, 0-d, and the nll of each row, in nats: fp32 (float64 for
    float64 inputs)."""

    loss: Tensor
    """differentiable: the nll, its smoothed form, or with options.dft its product with the probability of the target,
    which has no gradient; plus z_loss * log-partition squared"""
    nll: Tensor
    "negative log-likelihood"
    correct: Tensor
    "how many targets are the argmax (the first of equals); 0 unless options.token_metrics"
    entropy: Tensor
    "entropy of the predicted distributions; 0 unless options.token_metrics"
    each: Tensor
    "[N], the nll of each row times its weight, 0 for a row that is not a target"


_operator = False
"Whether linear_nll calls its computation as one operator."


def loss_as_operator() -> AbstractContextManager[None]:
    """Make the chunks of a batch one operator in traces within the context: no graph has their loop or kernel."""
    return replaced(sys.modules[__name__], "_operator", value=True)


# Not compiled: the loss stays outside the compiler's graphs (compile.contract.compile_model).
@torch.compiler.disable
def linear_nll(
    hidden: Tensor, head: Head, targets: Tensor, options: LossConfig, weights: Tensor | None = None
) -> LossSums:
    """Return the cross entropy of the head's logits against the targets, summed.

    With gradients enabled, one pass over chunks of `options.chunk_tokens` rows computes the loss and all gradients, and
    the logits of a chunk become their own gradient in place (as in Liger Kernel, arXiv 2410.10989). Memory beyond the
    results: one chunk of logits and an fp32 gradient of the head. No host sync.

    Args:
        hidden: [N, H]; N may be 0.
        head: weight and bias in the dtype of hidden; the weight may be shared with the embedding.
        targets: int64 [N], in [0, V) or IGNORE: such rows add nothing, and their gradient is 0.
        weights: fp32 [N], factor of all that a row adds, such as the number of documents with this target; None: 1.
    """
    assert not (_operator and weights is not None), "no captured graph has weights"
    assert hidden.dtype == head.weight.dtype, f"hidden states are {hidden.dtype}, the head is {head.weight.dtype}"
    with _rows_written(head):
        differentiable = (hidden, head.weight, head.bias, head.own_rows)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable):
            return LossSums(*_LinearNLL.apply(hidden, *head, targets, options, weights))
        with torch.no_grad():
            sums, *_ = _sums_and_gradients(hidden, head, targets, options, (False,) * 4, weights)
        return LossSums(*sums)


@contextmanager
def _rows_written(head: Head) -> Iterator[None]:
    """Put the head's own rows into its weight within the context: a copy of the weight would take its memory again."""
    if head.own_ids is None or head.own_rows is None:
        yield
        return
    weight = head.weight.detach()
    before = weight[head.own_ids]
    weight.index_copy_(0, head.own_ids, head.own_rows.detach().to(weight.dtype))
    try:
        yield
    finally:
        weight.index_copy_(0, head.own_ids, before)


class _LinearNLL(torch.autograd.Function):
    """Forward computes the gradients of the loss sum; backward scales them by the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *given: Any) -> tuple[Tensor, ...]:
        """Compute the sums and, where wanted, the gradients of their loss. `given`: Head, targets, options, weights."""
        *head, targets, options, weights = given
        wanted = (*ctx.needs_input_grad[:3], ctx.needs_input_grad[6])
        # The gradients are made here, with the logits at hand, and kept instead of them.
        ctx.traced = _operator
        if _operator:
            sums, *gradients = _called_as_operator(hidden, Head(*head), targets, options, wanted)
        else:
            sums, *gradients = _sums_and_gradients(hidden, Head(*head), targets, options, wanted, weights)
        ctx.save_for_backward(*gradients)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Scale the gradients by the incoming one."""
        *whole, own = ctx.saved_tensors
        scaled = (_scaled(gradient, scale, ctx.dtype, traced=ctx.traced) for gradient in whole)
        # Of rows in fp32, whatever the hidden states are.
        of_rows = None if own is None else _scaled(own, scale, own.dtype, traced=ctx.traced)
        return *scaled, None, None, None, of_rows, None, None, None, None


@torch.library.custom_op("sftkit::linear_nll", mutates_args=())
def _linear_nll(  # noqa: PLR0913 - an operator takes tensors and numbers
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk_tokens: int,
    z_loss: float,
    label_smoothing: float,
    dft: bool,  # noqa: FBT001 - as above
    token_metrics: bool,  # noqa: FBT001
    softcap: float | None,
    tokens: int | None,
    scale: float,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Return the sums, [4], the nll of each row, and the gradients that are wanted."""
    options = LossConfig(
        chunk_tokens=chunk_tokens, z_loss=z_loss, label_smoothing=label_smoothing, dft=dft, token_metrics=token_metrics
    )
    whole = Head(head, bias, softcap, tokens, scale=scale)
    (*sums, each), *gradients = _sums_and_gradients(hidden, whole, targets, options, wanted)
    return [torch.stack(sums), each, *(gradient for gradient in gradients if gradient is not None)]


@_linear_nll.register_fake
def _(hidden: Tensor, head: Tensor, *more: Any) -> list[Tensor]:
    *_, wanted = more
    exact = torch.promote_types(hidden.dtype, torch.float32)
    d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    gradients = (d_hidden, head.new_empty(head.shape, dtype=exact), head.new_empty(len(head), dtype=exact))
    sums = (hidden.new_empty(4, dtype=exact), hidden.new_empty(len(hidden), dtype=exact))
    return [*sums, *(g for g, is_wanted in zip(gradients, wanted, strict=True) if is_wanted)]


def _called_as_operator(
    hidden: Tensor, head: Head, targets: Tensor, options: LossConfig, wanted: Sequence[bool]
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None, Tensor | None, None]:
    """Compute `_sums_and_gradients` as one node of a graph; a head there has no separate rows."""
    wanted = wanted[:3]
    numbers = (options.chunk_tokens, options.z_loss, options.label_smoothing, options.dft, options.token_metrics)
    given = (hidden, head.weight, head.bias, targets, *numbers, head.softcap, head.tokens, head.scale, wanted)
    sums, each, *found = _linear_nll(*given)
    gradients = iter(found)
    d_hidden, d_head, d_bias = (next(gradients) if is_wanted else None for is_wanted in wanted)
    return (*(one.clone() for one in sums), each), d_hidden, d_head, d_bias, None


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype, *, traced: bool) -> Tensor | None:
    """Return gradient * scale in `dtype`, rounded once: no wider temporary, and not by a scale that was itself rounded.

    `traced`: the operators go into a graph, which cannot hold a kernel of ours that is no operator.
    """
    if gradient is None:
        return None
    if gradient.is_cuda and not traced and gradient.dtype == torch.float32 and gradient.is_contiguous():
        from sftkit.ops.cross_entropy_kernel import scaled  # Triton is not installed on CPU machines

        return scaled(gradient, scale, dtype)
    # A 0-d scale would be cast to the gradient's dtype before the product; one with dimensions is not.
    return torch.mul(gradient, scale.view([1] * gradient.dim()), out=torch.empty_like(gradient, dtype=dtype))


def _sums_and_gradients(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    options: LossConfig,
    wanted: Sequence[bool],
    weights: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return (the sums of LossSums, gradients of the loss by hidden, head, bias and own rows where wanted).

    The gradients of head, bias and rows add up over chunks, so they are at least fp32; that of hidden has its dtype.
    """
    weight, bias, softcap, tokens, own_ids, own_rows, scale = head
    # Where sums and gradients go.
    num_rows = len(hidden)
    chunk = options.chunk_tokens
    exact = torch.promote_types(hidden.dtype, torch.float32)
    sums = torch.zeros(4, num_rows, dtype=exact, device=hidden.device)
    d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
    new = torch.empty if num_rows else torch.zeros  # the first chunk overwrites
    d_head = new(weight.shape, dtype=exact, device=weight.device) if wanted[1] else None
    d_bias = torch.zeros(len(weight), dtype=exact, device=weight.device) if wanted[2] else None
    d_rows = None if own_rows is None or not wanted[3] else new(own_rows.shape, dtype=exact, device=weight.device)
    buffer = _logits_buffer(min(chunk, num_rows), len(weight), hidden)
    if buffer.is_cuda and exact == torch.float32:
        from sftkit.ops.cross_entropy_kernel import cross_entropy_  # Triton is not installed on CPU machines
    else:
        cross_entropy_ = _reference_cross_entropy_
    # A chunk at a time: its logits, their sums and gradient in place, and what that adds to the gradients.
    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        logits = buffer[: len(hidden[rows])]
        if bias is None:
            _product_(logits, hidden[rows], weight.t(), scale)
        else:
            torch.addmm(bias, hidden[rows], weight.t(), beta=scale, alpha=scale, out=logits)
        own = None if weights is None else weights[rows]
        given = (logits[:, :tokens], targets[rows], sums[:, rows], options, softcap)
        cross_entropy_(*given, gradients=any(wanted), weights=own)
        logits[:, len(weight) if tokens is None else tokens :].zero_()  # padding passes no gradient on
        if d_hidden is not None:
            _product_(d_hidden[rows], logits, weight, scale)
        if d_head is not None:
            _add_product_(d_head, logits.t(), hidden[rows], scale, first=start == 0)
        if d_bias is not None:
            d_bias.add_(logits.sum(0, dtype=exact), alpha=scale)
        if d_rows is not None:
            _add_product_(d_rows, logits[:, own_ids].t(), hidden[rows], scale, first=start == 0)
    return (*(row.sum() for row in sums), sums[1]), d_hidden, d_head, d_bias, d_rows


def _logits_buffer(rows: int, vocab: int, like: Tensor) -> Tensor:
    """Return [rows, vocab] for every chunk's logits.

    Each row starts at a multiple of 128 bytes or more, as fast products need.

    The columns between rows are zeros: on a CPU the bf16 product of torch before 2.15 reads them when the logits are
    its left factor, and what the memory happened to hold, or NaN, would get into the gradients.
    """
    buffer = like.new_empty(rows, -(-vocab // 64) * 64)
    buffer[:, vocab:].zero_()
    return buffer[:, :vocab]


def _product_(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Write scale * (left @ right) to out, rounded once."""
    if scale == 1.0:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(out, left, right, beta=0.0, alpha=scale, out=out)  # beta 0: whatever out held


def _add_product_(total: Tensor, left: Tensor, right: Tensor, scale: float, *, first: bool) -> None:
    """Add scale * (left @ right) to total (or set it if `first`, whatever total held), in total's precision
    however narrow the factors are."""
    # With beta 0 the total is not read, so it need not be cleared. On a GPU the product itself is stored in fp32; on a
    # CPU the factors are widened for it.
    beta = 0.0 if first else 1.0
    if total.dtype == right.dtype:
        total.addmm_(left, right, beta=beta, alpha=scale)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, alpha=scale, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), beta=beta, alpha=scale)


def _reference_cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    options: LossConfig,
    softcap: float | None,
    *,
    gradients: bool,
    weights: Tensor | None = None,
) -> None:
    """Write what each row adds to LossSums to `sums` ([4, N]) and, if `gradients`, its loss's gradient to `logits`: as
    the kernel, by torch's operators, for any device; math in the dtype of `sums`."""
    smoothing = options.label_smoothing
    is_target = targets != IGNORE
    factor = is_target.to(sums.dtype) if weights is None else torch.where(is_target, weights.to(sums.dtype), 0.0)
    column = torch.where(is_target, targets, 0)[:, None]
    x = logits.to(sums.dtype)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    lse = x.logsumexp(1)
    nll = lse - x.gather(1, column)[:, 0]
    own = (-nll).exp() if options.dft else torch.full_like(nll, 1 - smoothing)  # weight of the nll
    objective = own * nll + options.z_loss * lse.square()
    if smoothing:
        objective += smoothing * (lse - x.mean(1))
    measured = [objective, nll]
    probability = (x - lse[:, None]).exp_() if gradients or options.token_metrics else x
    if options.token_metrics:
        correct = logits.argmax(1) == targets
        measured += [correct.to(sums.dtype), torch.special.entr(probability).sum(1)]
    for total, values in zip(sums, measured, strict=False):
        total.copy_(torch.where(is_target, values * factor, 0.0))
    if gradients:
        gradient = probability.mul_(((own if options.dft else 1) + 2 * options.z_loss * lse)[:, None])
        gradient.scatter_add_(1, column, -own[:, None])
        if smoothing:
            gradient -= smoothing / x.shape[1]
        if softcap is not None:
            gradient *= 1 - (x / softcap).square()
        logits.copy_(gradient.mul_(factor[:, None]).masked_fill_(~is_target[:, None], 0.0))
