"""Gradients sent in the precision that they have, and added up in fp32 where they arrive.

A reduce-scatter that adds up in fp32 sends fp32. An all-to-all in bf16 sends half of that, and each rank adds up the
parts that it gets, in fp32: the same sums (Megatron-LM's --reduce-scatter-with-fp32-accumulation).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sftkit.graph import compat
from sftkit.graph.buckets import bucket_of
from sftkit.graph.graphs import collective, waits_for

_CASTS = {"aten::_to_copy", "prims::convert_element_type"}
_VIEWS = {"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::constant_pad_nd"}
"What may stand between a gradient's cast and its reduce-scatter: on narrower numbers it does the same."


def fp32_accumulation(graph: GraphModule, *, for_inductor: bool) -> None:
    """Put all-to-alls, and sums behind their waits, in the place of reduce-scatters of gradients that were cast to
    fp32."""
    for node in list(graph.graph.nodes):
        if collective(node) == "reduce-scatter" and bucket_of(node) is not None:
            inputs = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            narrow = [_before_cast(each) for each in inputs]
            # All or none of a bucket: what is left of it would be an exchange more.
            if all(each is not None for each in narrow):
                _replace(graph.graph, node, narrow)


def _before_cast(given: Node) -> tuple[Node, list[Node]] | None:
    """Return what was cast to fp32, and the views of it that lead to an input of a reduce-scatter, last first; None: it
    was fp32 already."""
    views: list[Node] = []
    node = given
    while compat.schema_name(node) in _VIEWS:
        views.append(node)
        node = node.all_input_nodes[0]
    if compat.schema_name(node) not in _CASTS or node.meta["val"].dtype != torch.float32:
        return None
    source = node.all_input_nodes[0]
    return (source, views) if source.meta["val"].dtype == torch.bfloat16 else None


def _replace(graph: Graph, node: Node, narrow: list[Any]) -> None:
    """Start an all-to-all for each input of a reduce-scatter where that starts, and add up where it is waited for."""
    _, ranks, group = node.args[1:]
    outputs = [node] if isinstance(node.meta["val"], torch.Tensor) else _in_order(node)
    unused = list(node.all_input_nodes)
    for output, (source, views) in zip(outputs, narrow, strict=True):
        with graph.inserting_before(node):
            given = _contiguous(graph, _viewed(graph, source, views))
            rows = len(given.meta["val"]) // ranks
            args = (given, [rows] * ranks, [rows] * ranks, group)
            sent = _call(graph, compat.all_to_all(), args, given.meta["val"], node)
        for wait in waits_for(output):
            with graph.inserting_before(wait):
                arrived = _call(graph, wait.target, (sent,), given.meta["val"], wait)
                parts = given.meta["val"].view(ranks, rows, *given.meta["val"].shape[1:])
                parted = _call(graph, torch.ops.aten.view.default, (arrived, list(parts.shape)), parts, wait)
                total = graph.call_function(torch.ops.aten.sum.dim_IntList, (parted, [0]), {"dtype": torch.float32})
                total.meta = dict(wait.meta)
            wait.replace_all_uses_with(total)
            graph.erase_node(wait)
    for old in (*(output for output in outputs if output is not node), node):
        graph.erase_node(old)
    # The casts: fp32 gradients that nobody reads any more.
    while unused:
        old = unused.pop()
        if old.op == "call_function" and not old.users:
            unused.extend(old.all_input_nodes)
            graph.erase_node(old)


def _in_order(merged: Node) -> list[Node]:
    """Return the users of an operator with several results that take one each, in the order of the results."""
    return sorted(merged.users, key=lambda user: user.args[1])  # type: ignore[arg-type, return-value]


def _viewed(graph: Graph, source: Node, views: list[Node]) -> Node:
    """Return a source as views of what it was cast to show it."""
    node = source
    for view in reversed(views):
        if view.meta["val"].shape == node.meta["val"].shape:
            continue
        copied = graph.node_copy(view, lambda _, node=node: node)  # type: ignore[misc]
        copied.meta = {**view.meta, "val": view.meta["val"].to(source.meta["val"].dtype)}
        node = copied
    return node


def _contiguous(graph: Graph, node: Node) -> Node:
    """Return a node whose memory a collective can read from start to end."""
    value = node.meta["val"]
    if value.is_contiguous():
        return node
    copied = graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copied.meta = {**node.meta, "val": value.contiguous()}
    return copied


def _call(graph: Graph, target: Any, args: tuple[Any, ...], value: torch.Tensor, like: Node) -> Node:
    """Return a new node with the annotations of another one."""
    node = graph.call_function(target, args)
    node.meta = {**like.meta, "val": value}
    return node
