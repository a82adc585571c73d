"""One collective for all weights of a decoder block, and for all their gradients, without a copy of either.

The tensors of a bucket go into one coalesced operator, which NCCL runs as one group: each is read and written where it
lies. Buffers that a bucket is copied into and out of would cost memory traffic in every micro-batch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from sftkit.graph import compat
from sftkit.graph.buckets import bucket_of
from sftkit.graph.graphs import collective
from sftkit.graph.passes.order import order_for_inductor, overlap_buckets


def block_bucketing(graph: GraphModule, *, for_inductor: bool) -> None:
    """Merge the collectives of each bucket; gather a bucket while the one before it is used, reduce it while the
    next one is."""
    for nodes in _mergeable(graph.graph):
        _merge(graph.graph, nodes)
    overlap_buckets(graph)
    if for_inductor:
        compat.keep_order(graph, order_for_inductor(graph))


def prefetching(graph: GraphModule, *, for_inductor: bool) -> None:
    """Move collectives as `block_bucketing` does and merge none, so that a half computes the same to the last bit."""
    overlap_buckets(graph)


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
