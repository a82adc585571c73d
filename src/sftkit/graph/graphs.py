"""Looking at graphs: which nodes are collectives, and how many of what kind a graph has.

Which decoder block a node of a captured graph comes from, written on it while the model's Python is traced.

Which collectives belong together: those of the weights of a decoder block, and those at the ends of the model.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils import flop_counter
from transformers import PreTrainedModel

from sftkit.graph import compat
from sftkit.models.structure import decoder_blocks, embedding_module
from sftkit.runtime.start import replaced_in_each

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


_BLOCK_MARK = "sftkit_block"
"Annotation of a node, which those of its gradient get, too."


def blocks_tagged(orig_model: PreTrainedModel) -> AbstractContextManager[None]:
    """Tag what a decoder block computes with the number of the block, for whoever traces within the context."""
    # In the place of `forward`, not by hooks: those run outside of it, and a context has to be open while it runs.
    blocks = enumerate(decoder_blocks(orig_model))
    return replaced_in_each("forward", {block: _tagged(block.forward, number) for number, block in blocks})


def block_of(node: Node) -> int | None:
    """Return the number of the block that a node belongs to, of the backward pass, too; None: to none, or
    it sums gradients."""
    return compat.annotation(node, _BLOCK_MARK)


def _tagged(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
    @wraps(forward)
    def tagged(*args: Any, **kwargs: Any) -> Any:
        with compat.annotated({_BLOCK_MARK: number}):
            return forward(*args, **kwargs)

    return tagged


EMBEDDING, HEAD = "embedding", "head"
_MARK, _WEIGHT = "sftkit_bucket", "sftkit_weight"
"Annotations of a collective: its bucket, and whose it is."


def buckets_of(orig_model: PreTrainedModel, prefix: str = "") -> dict[str, str]:
    """Return the bucket of each parameter by its name, in the order in which a forward pass uses them: the embedding,
    each block, then final norm and head. Tied weights belong to the embedding."""
    block_of = {id(p): f"block{i}" for i, block in enumerate(decoder_blocks(orig_model)) for p in block.parameters()}
    block_of |= {id(p): EMBEDDING for p in embedding_module(orig_model).parameters()}
    # A tied weight has two names, and the captured graph may know it by either.
    named = dict(orig_model.named_parameters(remove_duplicate=False))
    return {f"{prefix}{name}": block_of.get(id(p), HEAD) for name, p in named.items()}


def first_names(orig_model: PreTrainedModel, prefix: str = "") -> dict[str, str]:
    """Return the first name of each parameter by each of its names, of which a tied one has several."""
    first: dict[int, str] = {}
    named = orig_model.named_parameters(remove_duplicate=False)
    return {f"{prefix}{name}": first.setdefault(id(p), f"{prefix}{name}") for name, p in named}


def mark_buckets(graph: GraphModule, buckets: dict[str, str], first: dict[str, str]) -> None:
    """Write on each collective of a weight or its gradient, in a captured graph, which bucket and which weight it
    belongs to.

    Args:
        buckets, first: of buckets_of and first_names.

    Raises:
        ConfigError: no input of the graph says that it is a weight, as this torch describes inputs otherwise.
    """
    inputs = [(compat.parameter_of(node), node) for node in graph.graph.find_nodes(op="placeholder")]
    # The name in an input is all that ties it to a weight. Without any, every pass that merges or moves collectives
    # would do nothing, and nobody would see why.
    if buckets.keys().isdisjoint(name for name, _ in inputs):
        raise compat.missing_name_error('ParamAOTInput in node.meta["desc"]')
    collectives = [(name, _gathers(node)) for name, node in inputs]
    collectives += [(name, _reductions(node)) for name, node in compat.gradients_of(graph).items()]
    for name, found in collectives:
        if name in buckets:
            for node in found:
                compat.annotate(node, _MARK, buckets[name])
                compat.annotate(node, _WEIGHT, first[name])


def bucket_of(node: Node) -> str | None:
    """Return the bucket that a collective belongs to; None of any other node."""
    return compat.annotation(node, _MARK)


def weight_of(node: Node) -> str | None:
    """Return the first name of the weight that a collective belongs to; None of any other node."""
    return compat.annotation(node, _WEIGHT)


def _gathers(weight: Node) -> list[Node]:
    """Return the all-gathers that a weight's local shard goes into, through nodes with no other input."""
    found, waiting = [], [weight]
    while waiting:
        for user in waiting.pop().users:
            if collective(user) == "all-gather":
                found.append(user)
            elif len(user.all_input_nodes) == 1 and user.op != "output":
                waiting.append(user)
    return found


def _reductions(gradient: Node) -> list[Node]:
    """Return the reduce-scatters that a gradient's local shard comes from, and the all-reduces between copies behind
    them, through nodes with one input and sums of several."""
    found, waiting = [], [gradient]
    while waiting:
        node = waiting.pop()
        kind = collective(node)
        if kind is not None:
            found.append(node)
        if kind != "reduce-scatter" and (len(node.all_input_nodes) == 1 or "add" in str(node.target)):
            waiting.extend(node.all_input_nodes)
    return found
