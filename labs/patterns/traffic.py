"""The bytes that ranks exchange in a step, from model, rows and settings. `make patterns` counts them on small models.
No torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sftkit.config.tables import BYTES
from sftkit.memory.estimate import EstimateInputs, pipeline_rank_shape

REDUCED = 4
"Bytes per element of a gradient that shards or stages add up: fp32."


class CollectiveTraffic(NamedTuple):
    """All calls of one kind of collective within a group of ranks, in a step."""

    kind: str
    "all_reduce, all_gather, reduce_scatter or send"
    among: str
    """kind of group: replicas, shards (of blocks), ends (all that share a copy of embedding and head), tensor,
    context, stages
    """
    ranks: int
    size: float
    "bytes of the whole tensors that the calls start from or produce"

    @property
    def sent(self) -> float:
        """Return the bytes that each rank sends."""
        return self.size * ring_share(self.kind, self.ranks)


def ring_share(kind: str, ranks: int) -> float:
    """Return the bytes that a rank sends per byte of the whole tensor with the bandwidth-optimal ring algorithm."""
    share = (ranks - 1) / ranks
    shares = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "broadcast": share, "send": 1.0}
    return shares[kind]


def traffic(s: EstimateInputs) -> list[CollectiveTraffic]:
    """Return the traffic of a rank in a step; in a pipeline, of the rank that sends most.

    Small items are left out: the four numbers of each step, gradients of norms replicated over tensor ranks, and
    those of a tied embedding between the first and last pipeline stage.
    """
    if s.topology.stages > 1:
        of_ranks = [_of_pipeline_rank(s, place) for place in range(s.topology.stages)]
        return max(of_ranks, key=lambda traffic: sum(e.sent for e in traffic))
    # DDP exchanges gradients in the precision of the weights.
    gradients = BYTES[s.precision] * s.shape.trained
    replicas = CollectiveTraffic("all_reduce", "replicas", s.topology.replicas, gradients)
    traffic = _of_weights(s) if s.topology.sharded else [replicas]
    return [each for each in [*traffic, *_of_tensor(s), *_of_context(s)] if each.ranks > 1]


def _of_weights(s: EstimateInputs) -> list[CollectiveTraffic]:
    """Return the traffic of FSDP2: weights gathered, gradients scattered; blocks among shards, embedding and head
    among tensor ranks too.
    """
    t, m, width, count = s.topology, s.shape, BYTES[s.precision], s.layout.accumulation
    body, shards = (m.parameters - m.ends) / t.tensor, t.shards * t.context
    gathers = (1, 1) if s.sharding.keep_weights else (2 * count, count)  # ends: only in the forward pass
    times = 1 if s.sharding.keep_gradients else count
    traffic = []
    trained_end = m.ends - m.frozen_ends
    parts = (
        ("shards", shards, body, (m.trained - trained_end) / t.tensor, gathers[0]),
        ("ends", shards * t.tensor, m.ends, trained_end, gathers[1]),
    )
    for among, ranks, size, trained, gathered in parts:
        traffic.append(CollectiveTraffic("all_gather", among, ranks, width * size * gathered))
        traffic.append(CollectiveTraffic("reduce_scatter", among, ranks, REDUCED * trained * times))
        traffic.append(CollectiveTraffic("all_reduce", "replicas", t.replicas, REDUCED * trained / ranks * times))
    return traffic


def _hidden_bytes(s: EstimateInputs) -> float:
    """Return the bytes of the hidden states of a micro-batch, whole rows."""
    return BYTES[s.precision] * max(rows * length for rows, length in s.layout.shapes) * s.shape.hidden


def _of_tensor(s: EstimateInputs) -> list[CollectiveTraffic]:
    """Return the traffic of tensor ranks: rows gathered before attention and feed-forward layer, reduced and
    scattered after them; the reverse in the backward pass.
    """
    # The forward pass of a block has two gathers and two scatters, around attention and around the feed-forward
    # layer; the backward pass has as many.
    size = 4 * s.shape.blocks * s.layout.accumulation * _hidden_bytes(s)
    return [CollectiveTraffic(kind, "tensor", s.topology.tensor, size) for kind in ("all_gather", "reduce_scatter")]


def _of_context(s: EstimateInputs) -> list[CollectiveTraffic]:
    """Return the traffic of context ranks: keys and values of whole rows in each block, and their gradients."""
    # Keys and values: 2. Queries stay on their rank.
    size = 2 * s.shape.key / s.shape.hidden * s.shape.blocks * s.layout.accumulation * _hidden_bytes(s)
    return [CollectiveTraffic(kind, "context", s.topology.context, size) for kind in ("all_gather", "reduce_scatter")]


def _of_pipeline_rank(s: EstimateInputs, pipeline_rank: int) -> list[CollectiveTraffic]:
    """Return the traffic of a pipeline process: hidden states sent forward, gradients sent back, and the traffic of
    the copies or shards of its stages.
    """
    t, pipeline_size = s.topology, s.topology.stages
    # Each stage sends states forward and gradients back, but the first has no predecessor and the last no successor.
    ends = (pipeline_rank == 0) + (pipeline_rank == pipeline_size - 1)
    sends = 2 * len(s.stage_layers[pipeline_rank::pipeline_size]) - ends
    traffic = [CollectiveTraffic("send", "stages", 2, sends * s.layout.accumulation * _hidden_bytes(s))]
    own = replace(s, shape=pipeline_rank_shape(s, pipeline_rank), topology=replace(t, stages=1))
    if t.sharded:
        # A pipeline gathers weights once a step and exchanges gradients at its end, regardless of the sharding
        # planned for blocks.
        own = replace(own, sharding=replace(s.sharding, keep_weights=True, keep_gradients=True))
        return traffic + [each for each in _of_weights(own) if each.ranks > 1]
    # From three micro-batches on, gradients are added up in fp32: see estimate.sums_in_fp32.
    width = REDUCED if s.layout.accumulation > 2 else BYTES[s.precision]
    gradients = CollectiveTraffic("all_reduce", "replicas", t.replicas, width * own.shape.parameters)
    return traffic + [gradients] * (t.replicas > 1)
