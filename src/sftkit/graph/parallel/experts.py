"""Routed experts inside the graph, and how the tokens of tensor-parallel ranks come to the experts of their own
that each has.

All shapes are known when a graph is captured; it knows no sizes that depend on what a router chooses. Tokens come
to experts by

- allgather: the ranks gather each other's tokens and what the router chose for them; each computes its own experts for
  all of these, and the results are added up where the tokens came from. The host waits for nothing.
- alltoall: a token is sent once for each expert that it visits, to the rank that has it, and the result comes back.
  What is sent is what there is to send, so the host waits for its size; what arrives lies in room for all that could,
  so no token is dropped.

Letters: N tokens of a rank, R ranks, K experts that each token visits, E experts of a rank, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from sftkit.graph import compat
from sftkit.graph.parallel.exchange import add_and_scatter, exchange_counts, gather, send
from sftkit.graph.parallel.grouped import computed, rows_in_order

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
    """Return what the experts of all ranks add to this rank's tokens, [N, H].

    Args:
        experts, hidden, chosen, weights: of added.
    """
    hidden, weights = gather(hidden, 0, group), gather(weights, 0, group)
    first = group.rank() * len(experts.gate_up_proj)
    return add_and_scatter(added(experts, hidden, compat.all_gather(chosen, 0, group), weights, first), 0, group)


def by_all_to_all(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    """Return the same as by_all_gather. Rows travel in the order of experts, and so in that of ranks; weights stay.

    Args:
        chosen: as there, no expert twice for one token.
    """
    ranks, count, (tokens, visits) = group.size(), len(experts.gate_up_proj), chosen.shape
    # Sorted by expert, so that the rows of a rank lie together, as the exchange sends them. Stable: equal numbers keep
    # the order of tokens, so a result does not depend on the kernel of the sort.
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
    results = computed(experts, arrived, _experts_of(received, room), 1)
    results = rows_in_order(send(results, sizes, tokens * visits, group, back=True), back, order, 1)
    return _weighted(results, weights).to(hidden.dtype)


DISPATCHERS: dict[str, Callable[..., Tensor]] = {"allgather": by_all_gather, "alltoall": by_all_to_all}
"By graph.token_dispatcher."


def added(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, first_expert: int) -> Tensor:
    """Return what a rank's experts add to tokens, [N, H]: 0 to those that visit none of them.

    Args:
        experts: of grouped.computed.
        hidden: [N, H]. chosen: int64 [N, K], numbers of experts. weights: [N, K].
        first_expert: number of its first expert.
    """
    num_experts, visits = len(experts.gate_up_proj), chosen.shape[1]
    numbers = chosen.flatten() - first_expert
    # Others than this rank's become one number behind the last: sorted, they come last, where the products skip them.
    numbers = torch.where((numbers >= 0) & (numbers < num_experts), numbers, num_experts)
    return _weighted(computed(experts, hidden, numbers, visits), weights).to(hidden.dtype)


def _weighted(results: Tensor, weights: Tensor) -> Tensor:
    """Sum each token's rows, [N K, H], by its weights, [N, K]."""
    return (results.unflatten(0, weights.shape) * weights[..., None]).sum(1)


def _experts_of(received: Tensor, room: int) -> Tensor:
    """Return which of this rank's experts each row in a room is for, int64; E behind the last row.

    Args:
        received: int64 [R, E], how many rows of each rank for each expert lie there, in this order.
    """
    ends = received.flatten().cumsum(0)
    # Blocks lie by rank, then by expert, so the remainder is the expert.
    place = torch.searchsorted(ends, torch.arange(room, device=ends.device), right=True)
    count = received.shape[1]
    return torch.where(place < len(ends), place % count, count)
