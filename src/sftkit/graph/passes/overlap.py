"""torch's own scheduler of collectives, with estimates of times that are the same on every rank."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.utils import flop_counter

from sftkit.graph import compat
from sftkit.graph.graphs import collective, counts_of

CPU_FLOPS, CPU_BYTES = 1e11, 1e9
"Per second: where nothing is known of the device, compute and collectives of a CPU have some order of magnitude."
GPU_FLOPS = 5e14
"Per second, of a matrix product in bf16 on an H100 or H200."


def auto_bucketing(graph: GraphModule, *, for_inductor: bool) -> None:
    """Let torch's scheduler merge and move collectives, by estimates that are the same on every rank."""
    if counts_of(graph).collectives:
        compat.overlap_collectives(graph, _milliseconds, for_inductor=for_inductor)


def _milliseconds(node: Node, num_bytes: int | None) -> float | None:
    """Return an estimate for a node, in milliseconds; None: torch's own, of a collective between GPUs.

    Args:
        num_bytes: that a collective moves, instead of those that it does.
    """
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value  # attention gives several
    on_gpu = isinstance(first, torch.Tensor) and first.device.type == "cuda"
    if collective(node) is not None:
        # Known from sizes and the group alone, so the same on every rank.
        if on_gpu:
            return None
        # On a CPU torch's own estimate would ask for a GPU's bandwidth.
        size = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
        return 1e3 * (size if num_bytes is None else num_bytes) / CPU_BYTES
    packet = getattr(node.target, "overloadpacket", node.target)  # FlexAttention has none
    # By the number of operations, which is the same on every rank and at every start: what is measured is neither, and
    # ranks that order collectives differently wait for each other for ever.
    formula = flop_counter.flop_registry.get(packet)
    if formula is None:
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return 1e3 * formula(*args, **kwargs, out_val=value) / (GPU_FLOPS if on_gpu else CPU_FLOPS)
