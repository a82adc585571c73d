"""Which collectives belong together: those of the weights of a decoder block, and those at the ends of the model."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from transformers import PreTrainedModel

from sftkit.graph import compat
from sftkit.graph.graphs import collective
from sftkit.models.structure import decoder_blocks, embedding_module

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
