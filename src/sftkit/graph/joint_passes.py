"""Passes over the captured forward-backward graph: what of the forward pass is kept for the backward pass."""

from __future__ import annotations

from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from sftkit.graph.graphs import gathered_from


def reshard_after_forward(graph: GraphModule) -> None:
    """Mark what leads from a weight's piece to the whole weight, so that the backward pass gathers it again."""
    for node in gathered_from(graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
