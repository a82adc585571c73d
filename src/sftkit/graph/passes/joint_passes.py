"""Passes over the captured forward-backward graph: what of the forward pass is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from sftkit.graph import compat
from sftkit.graph.graphs import gathered_from, is_costly, source_of
from sftkit.graph.tags import block_of


def reshard_after_forward(graph: GraphModule) -> None:
    """Mark what leads from a weight's shard to the whole weight, so that the backward pass gathers it again."""
    for node in gathered_from(graph):
        compat.save_or_recompute(node, save=False)


def full_checkpointing(graph: GraphModule) -> None:
    """Keep what goes into each decoder block, and compute the rest of the block again (arXiv 1604.06174)."""
    _recompute_blocks(graph, _random)


def selective_checkpointing(graph: GraphModule) -> None:
    """Keep the outputs of matrix products and attention, too; what is computed again is cheap (arXiv 2205.05198)."""
    _recompute_blocks(graph, _keeps)


def _recompute_blocks(graph: GraphModule, keeps: Callable[[Node], bool]) -> None:
    """Mark what a decoder block computes in the forward pass, but for what the next one reads."""
    of_weights = set(gathered_from(graph))
    for node in graph.graph.nodes:
        block = block_of(node)
        # Whole weights are another decision (reshard_after_forward), and sums of gradients belong to no block.
        if block is None or node in of_weights or node.op == "get_attr" or compat.is_backward(node):
            continue
        # What the next block reads is where recomputation starts: kept, or the first block would be computed again in
        # the backward pass of each.
        leaves = any(block_of(user) != block and not compat.is_backward(user) for user in node.users)
        compat.save_or_recompute(node, save=leaves or keeps(node), region=block)


def _keeps(node: Node) -> bool:
    """Return whether a node is a matrix product, attention, a collective, or gives random numbers."""
    return is_costly(node) or _random(node)


def _random(node: Node) -> bool:
    target = compat.operator_of(source_of(node))
    return target is not None and torch.Tag.nondeterministic_seeded in target.tags
