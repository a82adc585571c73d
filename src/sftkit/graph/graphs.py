"""Questions about graphs: what a node is, which decoder block it comes from, which collectives belong together.

The block is written on a node while the model's Python is traced. The collectives of a bucket are those of the weights
of a decoder block, or of one end of the model.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import flop_counter
from transformers import PreTrainedModel

from sftkit.graph import compat
from sftkit.models.structure import decoder_blocks, embedding_module
from sftkit.runtime.start import replaced_in_each

KINDS = ("all-gather", "reduce-scatter", "all-reduce")
"Collectives; names of their operators begin alike, with underscores."


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
    return next((kind for kind in KINDS if name.lstrip("_").startswith(kind.replace("-", "_"))), None)


def waits_for(node: Node) -> list[Node]:
    """Return the waits for the results of a collective."""
    users = list(node.users)
    return [wait for user in users for wait in (waits_for(user) if user.target is operator.getitem else [user])]


def source_of(node: Node) -> Node:
    """Return the node whose tuple of results a node takes one value of; any other node itself."""
    return source_of(node.args[0]) if node.target is operator.getitem else node  # type: ignore[arg-type]


def is_costly(node: Node) -> bool:
    """Return whether a node is a matrix product, attention, or an operator from outside of torch's core, such
    as a collective."""
    node = source_of(node)
    # torch has formulas for the operations of products and attention: its table lists them.
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
            before = reached(inputs, lambda node: node.all_input_nodes)
            whole |= {node, *(each for each in before if each.op != "placeholder")}
        elif inputs and whole.issuperset(inputs) and keeps_values(node):
            whole.add(node)
        elif len(inputs) == 1 and weights.issuperset(inputs) and keeps_values(node):
            weights.add(node)
    return [node for node in graph.graph.nodes if node in whole]


def reached(start: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the nodes of a start and all that `onward` leads to from them."""
    found: set[Node] = set()
    waiting = list(start)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(onward(node))
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
    """Tag the operators of a decoder block with its number in traces within the context."""

    def tagged(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            with compat.annotated({_BLOCK_MARK: number}):
                return forward(*args, **kwargs)

        return call

    # In the place of `forward`, not by hooks: those run outside of it, and a context has to be open while it runs.
    blocks = enumerate(decoder_blocks(orig_model))
    return replaced_in_each("forward", {block: tagged(block.forward, number) for number, block in blocks})


def block_of(node: Node) -> int | None:
    """Return the number of the block that a node belongs to, of the backward pass, too; None: to none, or
    it sums gradients."""
    return compat.annotation(node, _BLOCK_MARK)


EMBEDDING = "embedding"
HEAD = "head"
_MARK = "sftkit_bucket"
"Annotation of a collective: its bucket."
_WEIGHT = "sftkit_weight"
"Annotation of a collective: whose it is."


def buckets_of(orig_model: PreTrainedModel, prefix: str = "") -> dict[str, str]:
    """Return the bucket of each parameter by its name, in the order in which a forward pass uses them: the embedding,
    each block, then final norm and head. Tied weights belong to the embedding."""
    block_of = {id(p): f"block{i}" for i, block in enumerate(decoder_blocks(orig_model)) for p in block.parameters()}
    block_of |= {id(p): EMBEDDING for p in embedding_module(orig_model).parameters()}
    # A tied weight has two names, and the captured graph may know it by either.
    named = dict(orig_model.named_parameters(remove_duplicate=False))
    return {f"{prefix}{name}": block_of.get(id(p), HEAD) for name, p in named.items()}


def first_names(orig_model: PreTrainedModel, prefix: str = "") -> dict[str, str]:
    """Return the first name of each parameter by each of its names; a tied parameter has several."""
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

    def is_gather(node: Node) -> bool:
        return collective(node) == "all-gather"

    def onward(node: Node) -> list[Node]:
        users = [user for user in node.users if len(user.all_input_nodes) == 1 and user.op != "output"]
        return [] if is_gather(node) else [*users, *filter(is_gather, node.users)]

    return [node for node in reached([weight], onward) if is_gather(node)]


def _reductions(gradient: Node) -> list[Node]:
    """Return the reduce-scatters that a gradient's local shard comes from, and the all-reduces between copies behind
    them, through nodes with one input and sums of several."""

    def onward(node: Node) -> list[Node]:
        follows = len(node.all_input_nodes) == 1 or "add" in str(node.target)
        return node.all_input_nodes if follows and collective(node) != "reduce-scatter" else []

    return [node for node in reached([gradient], onward) if collective(node) is not None]


def added_inputs(graph: Graph, values: Sequence[Any], name: str) -> list[Node]:
    """Add inputs behind those that a graph has, NAME_0 and so on, and return them.

    Args:
        values: an example of each.
    """
    last = list(graph.find_nodes(op="placeholder"))[-1]
    found = []
    for number, value in enumerate(values):
        with graph.inserting_after(last):
            last = graph.placeholder(f"{name}_{number}")
        last.meta["val"] = value
        found.append(last)
    return found


def copy_of(graph: GraphModule) -> tuple[Graph, dict[Node, Node]]:
    """Return a copy of a graph with its output, and the copy of each node."""
    copies: dict[Node, Node] = {}
    copied = Graph()
    output = copied.output(copied.graph_copy(graph.graph, copies))
    output.meta = dict(graph.graph.output_node().meta)
    return copied, copies


def erase_unread(graph: Graph, nodes: Sequence[Node]) -> None:
    """Erase nodes that nothing reads, and what only they read."""
    # Not by eliminate_dead_code: torch keeps each wait, as one that nobody reads may be there for its effect.
    waiting = list(nodes)
    erased: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if not node.users and node.op != "placeholder" and node not in erased:
            waiting.extend(node.all_input_nodes)
            graph.erase_node(node)
            erased.add(node)
