"""Where in a graph collectives start and are waited for, so that compute hides them; what is computed
does not change."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.fx import GraphModule, Node

from sftkit.graph.buckets import bucket_of
from sftkit.graph.graphs import collective, is_costly, source_of, waits_for

Positions = dict[Node, float]
"Wanted places of nodes among the numbers of all nodes in their order."


def overlap_buckets(graph: GraphModule) -> None:
    """Put the collectives of a half in order: a bucket is gathered while the one before it is used, and reduced while
    the next one is."""
    # In two rounds: an all-reduce between replicas follows its reduce-scatter, so where it is wanted is known when that
    # one has moved.
    index = _numbered(graph)
    _sort(graph, index, _started_early(index) | _awaited_late(index, "reduce-scatter"))
    index = _numbered(graph)
    _sort(graph, index, _awaited_late(index, "all-reduce"))  # which follow reduce-scatters that have moved


def order_for_inductor(graph: GraphModule) -> dict[Node, list[Node]]:
    """Return, of each node that has to wait for others than it reads, those others: Inductor orders anew what nothing
    holds.

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
                reduction, behind, follows = started[-1], set(), False
        elif _computes(node):
            computed = node
            if reduction is not None and not follows:
                after[node], follows = [reduction], True
        if follows:
            behind.add(node)
    return {node: others for node, others in after.items() if others}


def _computes(node: Node) -> bool:
    """Return whether a node is a tensor that a matrix product or attention gives."""
    # Collectives and their waits are costly too, and hide nothing.
    exchanges = "c10d_functional" in str(source_of(node).target)
    return not exchanges and is_costly(node) and isinstance(node.meta.get("val"), torch.Tensor)


def _numbered(graph: GraphModule) -> dict[Node, int]:
    return {node: number for number, node in enumerate(graph.graph.nodes)}


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
    buckets, wanted = _buckets(index, "all-gather"), Positions()
    first_wait = [min(index[wait] for node in bucket for wait in waits_for(node)) for bucket in buckets]
    for number, bucket in enumerate(buckets):
        # The first bucket has none before it, and starts where it is.
        start = first_wait[number - 1] if number else index[bucket[0]]
        for node in bucket:
            waits = waits_for(node)
            parts = [user for user in node.users if user not in waits]  # of the list that a merged one gives
            for leading in (node, *_ancestors(node), *parts):
                wanted[leading] = min(start - 0.5, wanted.get(leading, index[leading]))
            wanted |= dict.fromkeys(waits, min(index[wait] for wait in waits))
    return wanted


def _ancestors(node: Node) -> Iterator[Node]:
    """Yield what a collective of a weight depends on, inputs of the graph left out."""
    waiting = list(node.all_input_nodes)
    while waiting:
        read = waiting.pop()
        if read.op != "placeholder":
            yield read
            waiting.extend(read.all_input_nodes)


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
    """Order the nodes by where they are wanted, in place, each as early as what it reads allows."""
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
