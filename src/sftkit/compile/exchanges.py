"""Exchanges inside a compiled block of a tensor-parallel model, and what computes beside them.

Ranks exchange activations four times a pass of a block, and what follows needs what has arrived. Only gradients of
weights are needed by nobody until the optimizer: in the backward pass they are put where the block would wait. On two
H100 at 8B, on rank 0 9 % of a step are exchanges with nothing beside, 11 % before that (benchmarks/h200_patterns).

Asynchronously, compile.options: {_micro_pipeline_tp: true}, Inductor merges an all-gather with the matrix products
behind it, and a product with the reduce-scatter behind it, and sends one part while it computes another
(https://discuss.pytorch.org/t/209487). Parts go through symmetric memory; multicast is not needed. All exchanges of a
forward pass are merged, and the first of a backward pass; the others stay behind gradients of weights.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.ir import ExternKernelOut
from torch._inductor.utils import contains_collective, contains_wait
from torch.distributed import ProcessGroup
from torch.fx import Graph

from sftkit.config.schema import CompileConfig

OPTION = "_micro_pipeline_tp"
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
SchedulerNode = Any
"A node of Inductor's scheduler: a kernel, a product, the start of an exchange, or the wait for one."


@contextmanager
def exchanges_hidden() -> Iterator[None]:
    """Order what Inductor compiles within the context by `behind_products`."""
    # Private, but meant for passes of one's own (pytorch/pytorch#150074); Inductor's hide the last exchange of a block
    # at most (torch 2.11 and 2.13), as they know no order but that of dependencies and measured times, which differ by
    # rank.
    passes = {"reorder_for_compute_comm_overlap_passes": [_BehindProducts()]}
    here = {"reorder_for_compute_comm_overlap": True, **passes}
    with torch._inductor.config.patch(here):
        yield


class _BehindProducts:
    """What a function lacks: its code is in the key of cached code, as all that a pass of the configuration has is."""

    def __init__(self) -> None:
        self.code = get_hash_for_files((__file__,))

    def __call__(self, nodes: list[SchedulerNode]) -> list[SchedulerNode]:
        return behind_products(nodes)


def behind_products(nodes: list[SchedulerNode]) -> list[SchedulerNode]:
    """Return the nodes of a graph in another order: what no exchange depends on is put off until there is one to wait
    for, a matrix product at each wait and the rest at the last.

    The same on every rank, as it follows from the graph alone.
    """
    needs = _dependencies(nodes)
    put_off = dict.fromkeys(sorted(_free(nodes, needs)))
    order: dict[int, None] = {}
    waits = [i for i, node in enumerate(nodes) if contains_wait(node)]
    for i in range(len(nodes)):
        if i in put_off:
            continue
        if i in waits:
            # In their own order, so that each finds what it needs; what needs this exchange stays put off.
            for other in [other for other in put_off if other not in order]:
                if needs[other] <= order.keys():
                    order[other] = None
                    if i != waits[-1] and _is_product(nodes[other]):
                        break
        order[i] = None
    return [nodes[i] for i in (*order, *(i for i in put_off if i not in order))]


def _dependencies(nodes: list[SchedulerNode]) -> list[set[int]]:
    """Return the indices of the nodes that each one reads, or must come after."""
    makers = {name: i for i, node in enumerate(nodes) for name in node.get_buffer_names()}
    return [{makers[d.name] for d in node.unmet_dependencies if d.name in makers} - {i} for i, node in enumerate(nodes)]


def _free(nodes: list[SchedulerNode], needs: list[set[int]]) -> set[int]:
    """Return the indices of the nodes that no exchange depends on, exchanges aside."""
    readers: dict[int, set[int]] = defaultdict(set)
    for i, read in enumerate(needs):
        for maker in read:
            readers[maker].add(i)
    free: set[int] = set()
    # From the end: a reader comes after what it reads.
    for i in reversed(range(len(nodes))):
        exchange = contains_collective(nodes[i]) or contains_wait(nodes[i])
        if not exchange and readers[i] <= free:
            free.add(i)
    return free


def _is_product(node: SchedulerNode) -> bool:
    """Return whether a node is a matrix product: a template, or one that torch computes into memory of Inductor's. Of
    other calls of torch some compute nothing: they name one of several results."""
    return bool(node.is_template() or isinstance(node.node, ExternKernelOut))


# ---- asynchronously ----


def asynchronous(compile: CompileConfig) -> bool:
    """Return whether the recipe asks for it."""
    return compile.enabled and bool((compile.options or {}).get(OPTION))


def mergeable_products(compile: CompileConfig) -> AbstractContextManager[object]:
    """Let Inductor find what it can merge, for what is compiled within the context, if the recipe asks for it."""
    # Private, as is the option: a pass of one's own over Inductor's graphs has no public place (pytorch/pytorch#153532
    # proposes one).
    here = torch._inductor.config.patch(post_grad_custom_pre_pass=_OneView())
    return here if asynchronous(compile) else nullcontext()


def use_symmetric_memory(group: ProcessGroup) -> None:
    """Let a group exchange through symmetric memory; every rank calls it. Where this was not called, Inductor merges
    nothing and says nothing."""
    # Private: torch 2.11 to 2.13 warn that nobody needs it any more, and Inductor still asks whether it was called
    # (pytorch/pytorch#193027).
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*enable_symm_mem_for_group", category=FutureWarning)
        enable_symm_mem_for_group(group.group_name)


class _OneView(CustomGraphPass):
    """Makes one view of a chain of them, and none where it changes nothing. Between a collective and a matrix product
    Inductor looks for one view at most, and gathered rows have two: back to [1, T, H], and to the matrix."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.target not in _VIEWS:
                continue
            while node.args[0].target in _VIEWS:
                node.replace_input_with(node.args[0], node.args[0].args[0])
            if node.meta["val"].shape == node.args[0].meta["val"].shape:
                node.replace_all_uses_with(node.args[0])
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Return what is in the key of cached code: without it nothing would be cached (pytorch/pytorch#137298)."""
        return get_hash_for_files((__file__,))
