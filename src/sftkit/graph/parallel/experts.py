"""Routed experts inside the graph, and the exchanges between ranks that share rows, as operators of a graph.

Each exchange is the transpose of its gradient. So gradients are those of the sum of all ranks' losses, whatever part of
it a rank computes: the code need not know which values ranks have in common.

All shapes are known when a graph is captured: no size depends on the choices of a router. The matrix products of
experts are operators of static shapes: torch's grouped matrix product over rows of one expert each, which skips the
rows that no expert of this rank computes. Each tensor-parallel rank has experts of its own. Tokens reach them by

- allgather: the ranks gather each other's tokens and what the router chose for them; each computes its own experts for
  all of these, and the results are added up where the tokens came from. The host waits for nothing.
- alltoall: a token is sent once for each expert that it visits, to the rank that has it, and the result comes back.
  Only real rows are sent, so the host waits for their number. They arrive in room for the worst case, so no token is
  dropped.

Letters: N tokens of a rank, R ranks, K experts that each token visits, E experts of a rank, S rows, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from sftkit.graph import compat
from sftkit.ops.grouped import by_expert, grouped_product, rows_in_order
from sftkit.ops.tensors import resolve_group
from sftkit.parallel.tensor import Activations


def gather(shard: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the shards of all ranks of a group, joined along a dimension."""
    return _Exchanged.apply(shard, compat.all_gather, compat.reduce_scatter, dim, group)


def add_and_scatter(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's shard, along a dimension, of the sum over the ranks of a group."""
    return _Exchanged.apply(tensor, compat.reduce_scatter, compat.all_gather, dim, group)


def exchange_counts(sent: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Exchange how many rows the ranks of a group are about to send each other.

    Args:
        sent: int64 [R, E], rows of this rank for each expert of each rank.

    Returns:
        (int64 [R, E], rows of each rank for each expert of this one; int64 [2, R] on the host: rows to and from each
        rank)
    """
    return _exchange_counts(sent, group.group_name)


def send(rows: Tensor, sizes: Tensor, room: int, group: ProcessGroup, *, back: bool = False) -> Tensor:
    """Return the rows of all ranks for this one, [room, H], by rank; 0 behind the last.

    Args:
        rows: [S, H], those for the first rank first; behind the last anything.
        sizes: of exchange_counts. back: in the other direction, for the results of rows that were received.
        room: rows that may come at most.
    """
    return _Send.apply(rows, sizes, room, group.group_name, back)


class Exchange(Activations):
    """Between the layers of a tensor-parallel model; in `without_sequence_parallel` every rank has all positions."""

    def gather(self, positions: Tensor) -> Tensor:
        """Gather whole rows, [B, T, H], from the ranks' columns of them, [B, C, H]."""
        return gather(positions, 1, self.group) if self.sequence_parallel else positions

    def add_up(self, partial: Tensor) -> Tensor:
        """Return the sum of the ranks' parts of whole rows, [B, T, H]: this rank's columns of it, [B, C, H]."""
        if self.sequence_parallel:
            return add_and_scatter(partial, 1, self.group)
        return _Exchanged.apply(partial, compat.all_reduce, compat.all_reduce, self.group)


class _Exchanged(torch.autograd.Function):
    """A linear exchange, whose gradient is exchanged by the transpose. `where`: further arguments of both."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, exchange: Callable[..., Tensor], transpose: Callable[..., Tensor], *where: Any
    ) -> Tensor:
        ctx.transpose = transpose
        ctx.where = where
        return exchange(tensor, *where)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Linear, so that nothing of the forward pass has to be kept for it.
        return ctx.transpose(gradient, *ctx.where), None, None, *(None for _ in ctx.where)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Tensor, room: int, group: str, back: bool) -> Tensor:  # noqa: FBT001
        ctx.save_for_backward(sizes)
        ctx.room = len(rows)
        ctx.group = group
        ctx.back = back
        return _all_to_all(rows, sizes, room, group, back)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (sizes,) = ctx.saved_tensors
        return _all_to_all(gradient, sizes, ctx.room, ctx.group, not ctx.back), None, None, None, None


# The sizes of torch's own all-to-all are numbers in a trace: a graph for each choice of a router. Here they are a
# tensor, and the received rows have room for the worst case.


@torch.library.custom_op("sftkit::all_to_all", mutates_args=())
def _all_to_all(rows: Tensor, sizes: Tensor, room: int, group: str, back: bool) -> Tensor:  # noqa: FBT001 - an operator
    # On the host already: _exchange_counts has waited for them, once for tokens, results and the gradients of both.
    given, taken = reversed(sizes.tolist()) if back else sizes.tolist()
    arrived = rows.new_zeros(room, *rows.shape[1:])
    leaving = rows[: sum(given)].contiguous()
    dist.all_to_all_single(arrived[: sum(taken)], leaving, taken, given, group=resolve_group(group))
    return arrived


@torch.library.custom_op("sftkit::all_to_all_counts", mutates_args=())
def _exchange_counts(sent: Tensor, group: str) -> tuple[Tensor, Tensor]:
    received = torch.zeros_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=resolve_group(group))
    return received, torch.stack([sent.sum(1), received.sum(1)]).cpu()


@_all_to_all.register_fake
def _(rows: Tensor, sizes: Tensor, room: int, group: str, back: bool) -> Tensor:  # noqa: FBT001 - as the operator
    return rows.new_empty(room, *rows.shape[1:])


@_exchange_counts.register_fake
def _(sent: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return sent.new_empty(sent.shape), sent.new_empty((2, len(sent)), device="cpu")


def computed(experts: Any, hidden: Tensor, numbers: Tensor, visits: int) -> Tensor:
    """Return the results of a rank's experts, [S, H], one row for each number; 0 where the number is E.

    Args:
        experts: with this rank's gate_up_proj [E, 2 I, H] and down_proj [E, H, I].
        hidden: [S / visits, H], each token as often as it visits experts.
        numbers: int64 [S], of this rank's experts, or E: of none.
    """
    gate_up = experts.gate_up_proj
    down = experts.down_proj
    count = len(gate_up)
    numbers, order, back, ends = by_expert(numbers, count)  # those of none are last
    own = (numbers < count)[:, None]
    # Rows of none are never written by the products, nor are their gradients: 0 before the first, and after the last.
    rows = rows_in_order(hidden, order, back, visits).where(own, 0.0)
    # Private: what transformers calls between the two products of its own experts (huggingface/transformers#42697), for
    # which each architecture has its activation.
    rows = grouped_product(experts._apply_gate(grouped_product(rows, gate_up, ends)), down, ends).where(own, 0.0)
    return rows_in_order(rows, back, order, 1)


_COMPUTE = "_sftkit_compute"
"Attribute of experts: the function that computes them, of DISPATCHERS where they are shared out over a group."


def use_grouped_products(
    orig_model: PreTrainedModel, group: ProcessGroup | None = None, dispatcher: str = "allgather"
) -> None:
    """Let the experts of a model be computed here, in place; call it before weights are sharded.

    Args:
        group: each of its ranks has an equal share of every block's experts, in order.
        dispatcher: graph.token_dispatcher.
    """
    compute = partial(added, first_expert=0) if group is None else partial(DISPATCHERS[dispatcher], group=group)
    for module in orig_model.modules():
        if is_experts(module):
            module.__class__ = _grouped(type(module))  # type: ignore[arg-type]  # torch hashes modules
            module.__dict__[_COMPUTE] = compute


def is_experts(module: torch.nn.Module) -> bool:
    """Return whether a module is experts as most architectures have them: gated, without biases, [experts, out, in]."""
    form = {"has_gate": True, "has_bias": False, "is_transposed": False}
    return all(getattr(module, name, None) is wanted for name, wanted in form.items())


@cache
def _grouped(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a class of the same name whose experts are computed here."""

    def forward(self: torch.nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.__dict__[_COMPUTE](self, hidden, top_k_index, top_k_weights)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def by_all_gather(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    """Return the contribution of the experts of all ranks to this rank's tokens, [N, H].

    Args:
        experts, hidden, chosen, weights: of added.
    """
    hidden = gather(hidden, 0, group)
    weights = gather(weights, 0, group)
    first = group.rank() * len(experts.gate_up_proj)
    return add_and_scatter(added(experts, hidden, compat.all_gather(chosen, 0, group), weights, first), 0, group)


def by_all_to_all(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    """Return the same as by_all_gather. Rows travel in the order of experts, and so in that of ranks; weights stay.

    Args:
        chosen: as there, no expert twice for one token.
    """
    ranks = group.size()
    count = len(experts.gate_up_proj)
    tokens, visits = chosen.shape
    # Sorted by expert, so that the rows of a rank are contiguous for the exchange. Stable: equal numbers keep the order
    # of tokens, so a result does not depend on the kernel of the sort.
    numbers, order = chosen.flatten().sort(stable=True)
    back = order.argsort()
    # How many rows each expert gets, as differences of where the next one begins: the size of bincount's result depends
    # on its input, which a graph cannot have.
    every = torch.arange(-1, ranks * count, device=numbers.device)
    sent = torch.searchsorted(numbers, every, right=True).diff().view(ranks, count)
    received, sizes = exchange_counts(sent, group)
    # The worst case: every token of every rank visits as many experts of this one as it can. Fewer would drop tokens.
    room = ranks * tokens * min(visits, count)
    arrived = send(rows_in_order(hidden, order, back, visits), sizes, room, group)
    # Blocks lie by rank, then by expert, so the remainder is the expert of a row; E behind the last row.
    ends = received.flatten().cumsum(0)
    place = torch.searchsorted(ends, torch.arange(room, device=ends.device), right=True)
    results = computed(experts, arrived, torch.where(place < len(ends), place % count, count), 1)
    results = rows_in_order(send(results, sizes, tokens * visits, group, back=True), back, order, 1)
    return _weighted(results, weights).to(hidden.dtype)


DISPATCHERS: dict[str, Callable[..., Tensor]] = {"allgather": by_all_gather, "alltoall": by_all_to_all}
"By graph.token_dispatcher."


def added(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, first_expert: int) -> Tensor:
    """Return the contribution of a rank's experts to tokens, [N, H]: 0 for tokens that visit none of them.

    Args:
        experts: of grouped.computed.
        hidden: [N, H]. chosen: int64 [N, K], numbers of experts. weights: [N, K].
        first_expert: number of its first expert.
    """
    num_experts = len(experts.gate_up_proj)
    visits = chosen.shape[1]
    numbers = chosen.flatten() - first_expert
    # Others than this rank's become one number behind the last: sorted, they come last, where the products skip them.
    numbers = torch.where((numbers >= 0) & (numbers < num_experts), numbers, num_experts)
    return _weighted(computed(experts, hidden, numbers, visits), weights).to(hidden.dtype)


def _weighted(results: Tensor, weights: Tensor) -> Tensor:
    """Sum each token's rows, [N K, H], by its weights, [N, K]."""
    return (results.unflatten(0, weights.shape) * weights[..., None]).sum(1)
