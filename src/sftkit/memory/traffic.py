"""What the ranks of a run exchange in a step, by formula; `make patterns` counts the bytes on
small models. No torch here."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from sftkit.config.optimizers import BYTES
from sftkit.memory.estimate import EstimateInputs, pipeline_rank_shape

REDUCED = 4
"Bytes per element of a gradient that shards or stages add up: fp32."


class CollectiveTraffic(NamedTuple):
    """All calls of one kind of collective among the ranks of a group, in a step."""

    kind: str
    "all_reduce, all_gather, reduce_scatter or send"
    among: str
    """which ranks: replicas, shards (of blocks), ends (of embedding and head: all that share a
    copy), tensor, context, stages"""
    ranks: int
    size: float
    "bytes of the whole tensors that the calls begin or end with"

    @property
    def sent(self) -> float:
        """Return the bytes that each rank sends."""
        return self.size * ring_share(self.kind, self.ranks)


def ring_share(kind: str, ranks: int) -> float:
    """Return the bytes that a rank sends per byte of the whole tensor, by the bandwidth-optimal ring algorithm."""
    share = (ranks - 1) / ranks
    shares = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "broadcast": share, "send": 1.0}
    return shares[kind]


def traffic(s: EstimateInputs) -> list[CollectiveTraffic]:
    """Return what a rank exchanges in a step; in a pipeline, the rank that sends most.

    What is small is left out: the four numbers of each step, gradients of norms that tensor ranks hold alike, and those
    of a tied embedding between the ends of a pipeline.
    """
    if s.topology.stages > 1:
        of_ranks = [_of_pipeline_rank(s, place) for place in range(s.topology.stages)]
        return max(of_ranks, key=lambda traffic: sum(e.sent for e in traffic))
    # DDP exchanges gradients in the precision of the weights.
    gradients = BYTES[s.precision] * s.shape.parameters
    replicas = CollectiveTraffic("all_reduce", "replicas", s.topology.replicas, gradients)
    traffic = _of_weights(s) if s.topology.sharded else [replicas]
    return [each for each in [*traffic, *_of_tensor(s), *_of_context(s)] if each.ranks > 1]


def _of_weights(s: EstimateInputs) -> list[CollectiveTraffic]:
    """Return what FSDP2 exchanges: weights gathered, gradients scattered; blocks among shards, the ends of the model
    among tensor ranks too."""
    t, m, width, count = s.topology, s.shape, BYTES[s.precision], s.layout.accumulation
    body, shards = (m.parameters - m.ends) / t.tensor, t.shards * t.context
    gathers = (1, 1) if s.sharding.keep_weights else (2 * count, count)  # of ends none in the backward pass
    times = 1 if s.sharding.keep_gradients else count
    traffic = []
    parts = (("shards", shards, body, gathers[0]), ("ends", shards * t.tensor, m.ends, gathers[1]))
    for among, ranks, size, gathered in parts:
        traffic.append(CollectiveTraffic("all_gather", among, ranks, width * size * gathered))
        traffic.append(CollectiveTraffic("reduce_scatter", among, ranks, REDUCED * size * times))
        traffic.append(CollectiveTraffic("all_reduce", "replicas", t.replicas, REDUCED * size / ranks * times))
    return traffic


def _hidden_bytes(s: EstimateInputs) -> float:
    """Return the bytes of the hidden states of a micro-batch, whole rows."""
    return BYTES[s.precision] * max(rows * length for rows, length in s.layout.shapes) * s.shape.hidden


def _of_tensor(s: EstimateInputs) -> list[CollectiveTraffic]:
    """Return what tensor ranks exchange: rows gathered before attention and feed-forward layer, reduced and scattered
    after them; the same backwards."""
    # Two gathers and two scatters in the forward pass of a block, around attention and around the feed-forward layer,
    # and as many backwards.
    size = 4 * s.shape.blocks * s.layout.accumulation * _hidden_bytes(s)
    return [CollectiveTraffic(kind, "tensor", s.topology.tensor, size) for kind in ("all_gather", "reduce_scatter")]


def _of_context(s: EstimateInputs) -> list[CollectiveTraffic]:
    """Return what context ranks exchange: keys and values of whole rows in each block, and their gradients."""
    # Keys and values: 2. Queries stay where they are.
    size = 2 * s.shape.key / s.shape.hidden * s.shape.blocks * s.layout.accumulation * _hidden_bytes(s)
    return [CollectiveTraffic(kind, "context", s.topology.context, size) for kind in ("all_gather", "reduce_scatter")]


def _of_pipeline_rank(s: EstimateInputs, pipeline_rank: int) -> list[CollectiveTraffic]:
    """Return what a process of a pipeline exchanges: hidden states on, gradients back, and what the copies or
    shards of its stages exchange."""
    t, pipeline_size = s.topology, s.topology.stages
    # Each stage sends states on and gradients back, but the first has nobody before it and the last nobody after it.
    ends = (pipeline_rank == 0) + (pipeline_rank == pipeline_size - 1)
    sends = 2 * len(s.stage_layers[pipeline_rank::pipeline_size]) - ends
    traffic = [CollectiveTraffic("send", "stages", 2, sends * s.layout.accumulation * _hidden_bytes(s))]
    own = replace(s, shape=pipeline_rank_shape(s, pipeline_rank), topology=replace(t, stages=1))
    if t.sharded:
        # A pipeline gathers weights once a step and exchanges gradients at its end, whatever the plan chose for blocks.
        own = replace(own, sharding=replace(s.sharding, keep_weights=True, keep_gradients=True))
        return traffic + [each for each in _of_weights(own) if each.ranks > 1]
    # From three micro-batches on gradients are added up in fp32: see estimate.sums_in_fp32.
    width = REDUCED if s.layout.accumulation > 2 else BYTES[s.precision]
    gradients = CollectiveTraffic("all_reduce", "replicas", t.replicas, width * own.shape.parameters)
    return traffic + [gradients] * (t.replicas > 1)
