"""Moving collectives without merging them: weights are gathered while the block before theirs computes, and nobody waits for a
reduced gradient before the next block's gradients are on their way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch.fx import GraphModule, Node

from sftkit.graph.buckets import bucket_of
from sftkit.graph.graphs import collective


def prefetching(graph: GraphModule, _: Sequence[str], *, for_inductor: bool) -> None:
    """Change the order of a half in place, so that it computes the same to the last bit."""
    nodes = list(graph.graph.nodes)
    index = {node: number for number, node in enumerate(nodes)}
    wanted = {**_started_early(nodes, index), **_awaited_late(nodes, index)}
    when: dict[Node, float] = {}
    for node in nodes:  # never before what it reads
        when[node] = max([wanted.get(node, index[node]), *(when[read] for read in node.all_input_nodes)])
    first, *others = sorted(nodes, key=lambda node: (when[node], index[node]))
    for node in others:
        first.append(node)
        first = node
    graph.graph.lint()


def _buckets(nodes: Sequence[Node], kind: str) -> list[list[Node]]:
    """Return the collectives of a kind by bucket, in the order of each bucket's first."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        bucket = bucket_of(node)
        if collective(node) == kind and bucket is not None:
            found.setdefault(bucket, []).append(node)
    return list(found.values())


def _started_early(nodes: Sequence[Node], index: dict[Node, int]) -> dict[Node, float]:
    """Where all-gathers, and what leads to them, should be: those of a bucket just before the first wait for the bucket before."""
    buckets, wanted = _buckets(nodes, "all-gather"), dict[Node, float]()
    for number, bucket in enumerate(buckets):
        start = min(index[user] for user in buckets[number - 1][0].users) if number else index[bucket[0]]
        for node in bucket:
            for leading in [node, *_ancestors(node)]:
                wanted[leading] = min(start - 0.5, wanted.get(leading, index[leading]))
    return wanted


def _ancestors(node: Node) -> list[Node]:
    """Return what a collective of a weight depends on, inputs of the graph left out."""
    found: list[Node] = []
    waiting = list(node.all_input_nodes)
    while waiting:
        read = waiting.pop()
        if read.op != "placeholder":
            found.append(read)
            waiting.extend(read.all_input_nodes)
    return found


def _awaited_late(nodes: Sequence[Node], index: dict[Node, int]) -> dict[Node, float]:
    """Where waits for reduce-scatters should be: those of a bucket just before the next bucket's first starts."""
    buckets = _buckets(nodes, "reduce-scatter")
    return {
        wait: max(index[wait], index[after[0]] - 0.5)
        for bucket, after in pairwise(buckets)
        for node in bucket
        for wait in node.users
    }
