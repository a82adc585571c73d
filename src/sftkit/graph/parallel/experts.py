"""Routed experts inside the graph, and the exchanges between ranks that share rows, as operators of a graph.

Each exchange is the transpose of its gradient. So gradients are those of the sum of all ranks' losses, whatever part of
it a rank computes: the code need not know which values ranks have in common.

All shapes are known when a graph is captured: no size depends on the choices of a router. The matrix products of
experts are operators of static shapes: torch's grouped matrix product over rows of one expert each, which skips the
rows that no expert of this rank computes. Each tensor-parallel rank has experts of its own. The ranks gather each
other's tokens and what the router chose for them; each computes its own experts for all of these, and the results are
added up where the tokens came from. So the host waits for nothing, and no token is dropped.

Letters: N tokens of a rank, K experts that each token visits, E experts of a rank, S rows, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from transformers import PreTrainedModel

from sftkit.graph import compat
from sftkit.parallel.tensor import Activations


def gather(shard: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the shards of all ranks of a group, joined along a dimension."""
    return _Exchanged.apply(shard, compat.all_gather, compat.reduce_scatter, dim, group)


def add_and_scatter(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's shard, along a dimension, of the sum over the ranks of a group."""
    return _Exchanged.apply(tensor, compat.reduce_scatter, compat.all_gather, dim, group)


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
    numbers, order = numbers.sort(stable=True)  # those of none are last
    ends = torch.searchsorted(numbers, torch.arange(count, device=numbers.device), right=True).int()
    back = order.argsort()
    own = (numbers < count)[:, None]
    # Rows of none are never written by the products, nor are their gradients: 0 before the first, and after the last.
    rows = rows_in_order(hidden, order, back, visits).where(own, 0.0)
    # Private: what transformers calls between the two products of its own experts (huggingface/transformers#42697), for
    # which each architecture has its activation.
    rows = grouped_product(experts._apply_gate(grouped_product(rows, gate_up, ends)), down, ends).where(own, 0.0)
    return rows_in_order(rows, back, order, 1)


def rows_in_order(rows: Tensor, order: Tensor, back: Tensor, visits: int) -> Tensor:
    """Return row `order[i] // visits` at i.

    Args:
        order: int64 [S], a permutation. back: its inverse.
    """
    return _Ordered.apply(rows, order, back, visits)


class _Ordered(torch.autograd.Function):
    """Its gradient is gathered, too, by the inverse permutation: no atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, visits: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.visits = visits
        return rows.index_select(0, order // visits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back).unflatten(0, (-1, ctx.visits)).sum(1), None, None, None


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return rows @ matrices[e].T of the rows before `ends[e]` and not before `ends[e - 1]`; of those behind
    the last, anything.

    Args:
        rows: [S, in]. matrices: [E, out, in]. ends: int32 [E], ascending.
    """
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)
    return _grouped_product(rows, matrices, ends)


# torch computes the product in other precisions too, but traces it in bf16 only, so here it is one operator. No issue
# is known.


@torch.library.custom_op("sftkit::grouped_product", mutates_args=())
def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)


@torch.library.custom_op("sftkit::grouped_product_backward", mutates_args=())
def _grouped_product_backward(gradient: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and of matrices."""
    # The products want a row or a column of stride 1; the gradient of a sum is expanded, with strides of 0.
    gradient = gradient.contiguous()
    return F.grouped_mm(gradient, matrices, offs=ends), F.grouped_mm(gradient.t(), rows, offs=ends)


@_grouped_product.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), matrices.shape[1])


@_grouped_product_backward.register_fake
def _(gradient: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), matrices.new_empty(matrices.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_grouped_product_backward(gradient, *ctx.saved_tensors), None


_grouped_product.register_autograd(_backward, setup_context=_save)


_COMPUTE = "_sftkit_compute"
"Attribute of experts: the function that computes them."


def use_grouped_products(orig_model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
    """Let the experts of a model be computed here, in place; call it before weights are sharded.

    Args:
        group: each of its ranks has an equal share of every block's experts, in order.
    """
    compute = partial(added, first_expert=0) if group is None else partial(by_all_gather, group=group)
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
