"""Mamba2's recurrent layer, computed for all positions at once, with a new state at the start of every document.

A head has a matrix as its state. Each position multiplies it by a decay, adds the product of its input x and a vector
B, and reads it by a vector C. In chunks of the row this becomes products of matrices: positions of a chunk see each
other as in linear attention, and see earlier chunks through the state that these leave behind. Memory grows with the
row length times the chunk, not with its square.

Letters: T positions of a row, n chunks of c positions (m and k number chunks, i and j positions of one), H heads in G
groups of R that share B and C, P the size of a head, N that of B and C.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def state_space(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    chunk_size: int,
    starts: Tensor,
) -> Tensor:
    """Return the output of the recurrence, [batch, T, H, P].

    Decays and sums of them are computed in fp32, or in fp64 if x is; products of matrices take operands of x's dtype.

    Args:
        x: [batch, T, H, P]. B, C: [batch, T, G, N].
        dt: [batch, T, H], the size of each step before dt_bias [H], softplus and the limits.
        A: [H], negative: a step of size 1 multiplies the state by exp(A).
        D: [H], the share of x that is added to the output.
        chunk_size: c; the result does not depend on it beyond rounding.
        starts: int [batch, T], each position's distance from the first position of its document.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    step = _steps(dt, dt_bias, dt_limit, exact)
    out = _scan(x, step, step * A.to(exact), B, C, starts, chunk_size)
    # Models view the heads of the output as one dimension.
    return (out + D.to(exact)[:, None] * x).to(x.dtype).contiguous()


def last_state(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *, dt_bias: Tensor, dt_limit: tuple[float, float]
) -> Tensor:
    """Return the state after the last position of rows that are one document each, [batch, H, P, N], from which an
    answer continues; arguments as in `state_space`.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    step = _steps(dt, dt_bias, dt_limit, exact)
    decay = F.pad(step * A.to(exact), (0, 0, 0, 1))[:, 1:]
    since = decay.flip(1).cumsum(1).flip(1).exp()
    added = (x * (step * since)[..., None]).unflatten(2, (B.shape[2], -1))
    return torch.einsum("btgrp,btgs->bgrps", added, B.to(exact)).flatten(1, 2)


def _steps(dt: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float], exact: torch.dtype) -> Tensor:
    return F.softplus(dt.to(exact) + dt_bias.to(exact)).clamp(*dt_limit)


def _scan(x: Tensor, step: Tensor, decay: Tensor, B: Tensor, C: Tensor, starts: Tensor, chunk_size: int) -> Tensor:
    """Return the sum over earlier positions of the same document of exp(decays since) * step * (C . B) * x."""
    batch, length, heads, size = x.shape
    groups = B.shape[2]

    # Zeros behind the row, which no position before them sees. Free row lengths are padded whatever they are.
    behind = -length % chunk_size
    whole = isinstance(behind, int) and behind == 0

    def chunks(tensor: Tensor) -> Tensor:
        padded = tensor if whole else F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, behind))
        return padded.unflatten(1, (-1, chunk_size))

    x, B, C = (chunks(tensor) for tensor in (x.unflatten(2, (groups, -1)), B, C))  # [b, n, c, G, (R, P) or N]
    step, decay = (chunks(tensor).movedim(-1, 2) for tensor in (step, decay))  # [b, n, H, c]
    starts = chunks(starts)  # [b, n, c]
    place = torch.arange(chunk_size, device=x.device)
    apart = place[:, None] - place
    seen = (apart >= 0) & (apart <= starts[..., None])  # [b, n, i, j]
    # Sums of the decays since the beginning of the chunk or the document. Differences of sums over the whole chunk
    # would round a document's decays by those of the one before it.
    since = torch.einsum("bnij,bnhj->bnhi", seen.to(decay.dtype), decay)

    # Positions of one chunk.
    weights = _exp(since[..., None] - since[..., None, :], seen[:, :, None]) * step[..., None, :]  # [b, n, H, i, j]
    alike = torch.einsum("bnigs,bnjgs->bngij", C, B)
    weights = (weights.unflatten(2, (groups, -1)) * alike[:, :, :, None]).to(x.dtype)
    within = torch.einsum("bngrij,bnjgrp->bnigrp", weights, x)

    # What each chunk leaves behind of the document that it ends in.
    at_end = chunk_size - 1 - place <= starts[..., -1:]
    left = (_exp(since[..., -1:] - since, at_end[:, :, None]) * step).movedim(2, -1).unflatten(-1, (groups, -1))
    state = torch.einsum("bnjgs,bnjgrp->bngsrp", B, (x * left[..., None]).to(x.dtype))

    # The state at each chunk's beginning: a sum over earlier chunks, decayed by the chunks between.
    count = since.shape[1]
    order = torch.arange(count, device=x.device)
    later = order[:, None] - order
    # Sums of the decays after chunk k, each for itself: differences of one long sum would lose their last digits.
    between = (since[..., -1].movedim(1, 2)[..., None] * (later > 0)).cumsum(2)  # [b, H, m, k], chunk m included
    between = F.pad(between, (0, 0, 1, -1))
    # The last position of chunk k is so far from the first of chunk m, whose document has to reach back to it.
    reach = (later > 0) & ((later - 1) * chunk_size + 1 <= starts[..., :1])
    carried = _exp(between, reach[:, None]).to(x.dtype).unflatten(1, (groups, -1))
    state = torch.einsum("bgrmk,bkgsrp->bmgsrp", carried, state)

    read = torch.einsum("bnigs,bngsrp->bnigrp", C, state)
    decayed = _exp(since, (starts > place)[:, :, None]).movedim(2, -1).unflatten(-1, (groups, -1))
    out = within + read * decayed[..., None]
    return out.flatten(1, 2)[:, :length].reshape(batch, length, heads, size)


def _exp(exponent: Tensor, where: Tensor) -> Tensor:
    """Return the exponential of sums of decays, 0 elsewhere, where such sums may be too large for one."""
    return exponent.masked_fill(~where, -torch.inf).exp()
