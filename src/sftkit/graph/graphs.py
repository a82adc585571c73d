"""Looking at graphs: which nodes are collectives, and how many of what kind a graph has."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils import flop_counter

from sftkit.graph import compat

KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
}
"How names of collective operators begin, and what they are called here."


class Counts(NamedTuple):
    """The size of a graph."""

    nodes: int
    "operators: neither inputs nor outputs"
    collectives: dict[str, int]
    "by kind, those that there are"
    kept: int | None = None
    "bytes that the forward half keeps for this one, weights and batch left out"

    def __str__(self) -> str:
        named = ", ".join(f"{count} {kind}" for kind, count in self.collectives.items())
        kept = "" if self.kept is None else f"; {self.kept / 2**20:.2f} MiB kept of the forward pass"
        return f"{self.nodes} operators, {named or 'no collectives'}{kept}"


def collective(node: Node) -> str | None:
    """Return the kind of a collective; None for any other node."""
    namespace, _, name = compat.schema_name(node).partition("::")
    # Two kinds have a collective's name: torch's functional ones, and exchanges that are an operator of this project.
    if namespace != "sftkit" and "c10d_functional" not in namespace:
        return None
    return next((kind for prefix, kind in KINDS.items() if name.lstrip("_").startswith(prefix)), None)


def waits_for(node: Node) -> list[Node]:
    """Return the waits for what a collective gives."""
    users = list(node.users)
    return [wait for user in users for wait in (waits_for(user) if user.target is operator.getitem else [user])]


def source_of(node: Node) -> Node:
    """Return the node that gives several values of which a node takes one; any other node itself."""
    return source_of(node.args[0]) if node.target is operator.getitem else node  # type: ignore[arg-type]


def is_costly(node: Node) -> bool:
    """Return whether a node is a matrix product, attention, or an operator from outside of torch's core, such
    as a collective."""
    node = source_of(node)
    # torch counts the operations of what is worth counting: its table of formulas is the list of
    # products and attention.
    known = getattr(node.target, "overloadpacket", node.target) in flop_counter.flop_registry
    target = compat.operator_of(node)
    return known or (target is not None and target.namespace not in ("aten", "prims"))


def counts_of(graph: GraphModule) -> Counts:
    """Count the operators of a graph."""
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call_")]
    return Counts(len(nodes), dict(Counter(kind for node in nodes if (kind := collective(node)) is not None)))


def tensor_bytes(nodes: Sequence[Node]) -> int:
    """Return the bytes of the tensors among nodes."""
    values = [node.meta.get("val") for node in nodes]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


def gathered_from(graph: GraphModule) -> list[Node]:
    """Return the nodes of a graph that lead from shards of weights to whole ones: casts, all-gathers, their waits, and
    views of what they give, in order."""
    # Two sets grow in one pass over the nodes, which are in the order of their dependencies: what is only a form of a
    # shard, and what is only a form of a whole weight. A node with any other input is neither.
    weights: set[Node] = set()
    whole: set[Node] = set()
    for node in graph.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            if compat.parameter_of(node) is not None:  # token ids may be all-gathered too
                weights.add(node)
        elif collective(node) == "all-gather" and weights.issuperset(inputs):
            # The cast before the gather goes too: the backward pass starts again from the shard, which is
            # in memory anyway.
            whole |= {node, *_leading_to(inputs[0])}
        elif inputs and whole.issuperset(inputs) and keeps_values(node):
            whole.add(node)
        elif len(inputs) == 1 and weights.issuperset(inputs) and keeps_values(node):
            weights.add(node)
    return [node for node in graph.graph.nodes if node in whole]


def _leading_to(node: Node) -> list[Node]:
    """Return a node and those before it up to an input, which is left out."""
    found = []
    while node.op != "placeholder":
        found.append(node)
        node = node.all_input_nodes[0]
    return found


CASTS = {"aten::_to_copy", "prims::convert_element_type"}
"Schema names of what only casts; the second in graphs for Inductor."
_COPIES = {"aten::_unsafe_view", "aten::clone", "aten::cat", "aten::constant_pad_nd", "aten::split"}
_COPIES |= {"_c10d_functional::wait_tensor", *CASTS}


def keeps_values(node: Node) -> bool:
    """Return whether a node only casts, cuts, joins, fills up or waits."""
    if node.target is operator.getitem:
        return True
    target = compat.operator_of(node)
    return target is not None and (bool(target.is_view) or compat.schema_name(node) in _COPIES)
