"""Move the starts and the waits of collectives in a graph, so that computation hides them; results do not change.

`auto_bucketing` is torch's own scheduler of collectives, with estimates of times that are the same on every rank.
`block_bucketing` makes one collective for all weights of a decoder block, and for all their gradients, without a copy
of either: the tensors of a bucket go into one coalesced operator, which NCCL runs as one group, so each is read and
written where it lies. Buffers that a bucket is copied into and out of would cost memory traffic in every micro-batch.
"""

import heapq
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import flop_counter

from sftkit.graph import compat
from sftkit.graph.graphs import bucket_of, collective, counts_of, is_costly, reached, source_of, waits_for

Positions = dict[Node, float]
"Wanted places of nodes among the numbers of all nodes in their order."


def overlap_buckets(graph: GraphModule) -> None:
    """Put the collectives of a half in order: a bucket is gathered while the one before it is used, and reduced while
    the next one is."""
    # In two rounds: an all-reduce between replicas follows its reduce-scatter, so where it is wanted is known when that
    # one has moved.
    index = {node: number for number, node in enumerate(graph.graph.nodes)}
    _sort(graph, index, _started_early(index) | _awaited_late(index, "reduce-scatter"))
    index = {node: number for number, node in enumerate(graph.graph.nodes)}
    _sort(graph, index, _awaited_late(index, "all-reduce"))  # which follow reduce-scatters that have moved


def order_for_inductor(graph: GraphModule) -> dict[Node, list[Node]]:
    """Return the nodes that a node must wait for although it does not read them: Inductor reorders nodes without a
    dependency.

    A wait for a bucket: what starts before it, and the last matrix product or attention, which hides the exchange.
    The first products behind the start of a reduction: that start, as Inductor would else put it off, with the
    gradients that it reads, to the end.
    """
    after: dict[Node, list[Node]] = {}
    started: list[Node] = []
    computed: Node | None = None
    reduction: Node | None = None
    behind: set[Node] = set()  # the first products behind that start, and all that reads them
    of_buckets = {
        wait for node in graph.graph.nodes if bucket_of(node) and collective(node) for wait in waits_for(node)
    }
    for node in graph.graph.nodes:
        follows = not behind.isdisjoint(node.all_input_nodes)
        if node in of_buckets:
            after[node] = [*started, *([computed] if computed else [])]
            started = [node]  # others of its bucket come with it
        elif (kind := collective(node)) is not None:
            started.append(next(iter(node.users)) if isinstance(node.meta["val"], list) else node)
            if kind == "reduce-scatter" and bucket_of(node):
                reduction = started[-1]
                behind = set()
                follows = False
        elif _computes(node):
            computed = node
            if reduction is not None and not follows:
                after[node] = [reduction]
                follows = True
        if follows:
            behind.add(node)
    return {node: others for node, others in after.items() if others}


def _computes(node: Node) -> bool:
    """Return whether a node is a tensor that a matrix product or attention gives."""
    # Collectives and their waits are costly too, and hide nothing.
    exchanges = "c10d_functional" in str(source_of(node).target)
    return not exchanges and is_costly(node) and isinstance(node.meta.get("val"), torch.Tensor)


def _buckets(index: dict[Node, int], kind: str) -> list[list[Node]]:
    """Return the collectives of a kind by bucket, in the order of each bucket's first."""
    found: dict[str, list[Node]] = {}
    for node in index:
        bucket = bucket_of(node)
        if collective(node) == kind and bucket is not None:
            found.setdefault(bucket, []).append(node)
    return list(found.values())


def _started_early(index: dict[Node, int]) -> Positions:
    """Return where all-gathers, and what leads to them, should be: those of a bucket just before the first wait for the
    bucket before. Waits for one operator are together."""
    buckets = _buckets(index, "all-gather")
    wanted = Positions()
    first_wait = [min(index[wait] for node in bucket for wait in waits_for(node)) for bucket in buckets]
    for number, bucket in enumerate(buckets):
        # The first bucket has none before it, and starts where it is.
        start = first_wait[number - 1] if number else index[bucket[0]]
        for node in bucket:
            waits = waits_for(node)
            parts = [user for user in node.users if user not in waits]  # of the list that a merged one gives
            # Its dependencies, without the inputs of the graph.
            before = (read for read in reached([node], lambda node: node.all_input_nodes) if read.op != "placeholder")
            for leading in (*before, *parts):
                wanted[leading] = min(start - 0.5, wanted.get(leading, index[leading]))
            wanted |= dict.fromkeys(waits, min(index[wait] for wait in waits))
    return wanted


def _awaited_late(index: dict[Node, int], kind: str) -> Positions:
    """Return where waits for reduced gradients should be: those of a bucket just before the next
    bucket's reduction starts."""
    return {
        wait: max(index[wait], index[after[0]] - 0.5)
        for bucket, after in pairwise(_buckets(index, kind))
        for node in bucket
        for wait in waits_for(node)
    }


def _sort(graph: GraphModule, index: dict[Node, int], wanted: Positions) -> None:
    """Order the nodes by their wanted places, in place, each as early as its inputs allow."""
    # Kahn's algorithm with a heap: among the nodes that may come next, the one whose wanted place is the earliest; the
    # number breaks ties, so that the order is the same on every rank, as that of collectives must be.
    missing = {node: len(node.all_input_nodes) for node in index}
    ready = [(wanted.get(node, number), number, node) for node, number in index.items() if not missing[node]]
    heapq.heapify(ready)
    ordered: list[Node] = []
    while ready:
        *_, node = heapq.heappop(ready)
        ordered.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (wanted.get(user, index[user]), index[user], user))
    for before, node in pairwise(ordered):
        before.append(node)
    graph.graph.lint()


CPU_FLOPS = 1e11
CPU_BYTES = 1e9
"Per second: where nothing is known of the device, compute and collectives of a CPU have some order of magnitude."
GPU_FLOPS = 5e14
"Per second, of a matrix product in bf16 on an H100 or H200."


def auto_bucketing(graph: GraphModule, *, for_inductor: bool) -> None:
    """Let torch's scheduler merge and move collectives, by estimates that are the same on every rank."""
    if counts_of(graph).collectives:
        compat.overlap_collectives(graph, _milliseconds, for_inductor=for_inductor)


def _milliseconds(node: Node, num_bytes: int | None) -> float | None:
    """Return an estimate for a node, in milliseconds; None: torch's own, of a collective between GPUs.

    Args:
        num_bytes: that a collective moves, instead of those that it does.
    """
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value  # attention gives several
    on_gpu = isinstance(first, torch.Tensor) and first.device.type == "cuda"
    if collective(node) is not None:
        # Known from sizes and the group alone, so the same on every rank.
        if on_gpu:
            return None
        # On a CPU torch's own estimate would ask for a GPU's bandwidth.
        size = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
        return 1e3 * (size if num_bytes is None else num_bytes) / CPU_BYTES
    packet = getattr(node.target, "overloadpacket", node.target)  # FlexAttention has none
    # By the number of operations, which is the same on every rank and at every start. Measured times are not, and ranks
    # that order collectives differently wait for each other for ever.
    formula = flop_counter.flop_registry.get(packet)
    if formula is None:
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return 1e3 * formula(*args, **kwargs, out_val=value) / (GPU_FLOPS if on_gpu else CPU_FLOPS)


def block_bucketing(graph: GraphModule, *, for_inductor: bool) -> None:
    """Merge the collectives of each bucket; gather a bucket while the one before it is used, reduce it while the
    next one is."""
    for nodes in _mergeable(graph.graph):
        _merge(graph.graph, nodes)
    overlap_buckets(graph)
    if for_inductor:
        compat.keep_order(graph, order_for_inductor(graph))


def _mergeable(graph: Graph) -> list[list[Node]]:
    """Return the collectives of a bucket that can be one: of one kind, one group of ranks and one dtype."""
    found: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        bucket = bucket_of(node)
        if bucket is not None and collective(node) is not None:
            found.setdefault((bucket, node.target, node.args[1:], node.meta["val"].dtype), []).append(node)
    return [nodes for nodes in found.values() if len(nodes) > 1]


def _merge(graph: Graph, nodes: Sequence[Node]) -> None:
    """Put one operator in the place of the last of them."""
    # Behind the last, where all inputs are there; overlap_buckets then moves it to where it should start.
    with graph.inserting_after(nodes[-1]):
        inputs = [node.args[0] for node in nodes]
        merged = graph.call_function(compat.coalesced(nodes[0].target), (inputs, *nodes[0].args[1:]))
    merged.meta = {**nodes[0].meta, "val": [node.meta["val"] for node in nodes]}
    last = merged
    # Each wait keeps its own tensor: only what starts is merged.
    for number, node in enumerate(nodes):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (merged, number))
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
