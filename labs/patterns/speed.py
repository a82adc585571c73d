"""Estimate the speed of layouts on paper: that of one GPU, less the exchanges that nothing hides and the wait of a
pipeline. Memory is that of memory.estimate. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from labs.patterns.run import bubble_by_formula
from labs.patterns.traffic import traffic
from sftkit.config.topology import HEAD_SHARE, Topology
from sftkit.launch.layouts import Way, config_of, is_within, setups, topologies, work_of
from sftkit.memory.estimate import BUDGETS, GIB, Estimate, EstimateInputs, Shape, estimate

DATASHEET = 989e12
"bf16 operations per second of an H100 or H200."
NEARLY = 0.97
"A simpler layout is taken before one that is faster by less than this."


@dataclass(frozen=True)
class Machines:
    """GPUs, and how fast they compute and send. The defaults are those of H200s, eight in a machine, with 400 Gb/s of
    network each."""

    gpus: int
    per_machine: int = 8
    memory_bytes: int = 140 * GIB
    flops: float = 0.5 * DATASHEET
    "that one GPU reaches of a model, per second: half of the datasheet's bf16 rate"
    inside: float = 360e9
    "bytes per second that a GPU sends in a collective within its machine"
    between: float = 40e9
    "the same between machines"


@dataclass(frozen=True)
class OnPaper:
    """A layout for a model on some GPUs."""

    setup: EstimateInputs
    machines: Machines
    memory: str
    "train.memory"
    estimate: Estimate
    share: float
    "of one GPU's speed, per GPU, 0-1"
    hidden: float
    "seconds of exchanges that take place while a GPU computes, over those of all exchanges; 1.0 if there are none"
    sent: float
    "bytes that a GPU sends in a step"

    @property
    def config(self) -> str:
        """Return the accelerate config, and the settings that go with it."""
        return config_of(self.setup.topology, self.machines.per_machine)


def on_paper(setup: EstimateInputs, memory: str, machines: Machines) -> OnPaper:
    """Return memory, traffic and speed of one layout.

    Args:
        memory: train.memory.
    """
    shape = setup.shape
    t = setup.topology
    count = setup.layout.accumulation
    tokens = max(rows * length for rows, length in setup.layout.shapes)
    # Computed again in the backward pass is what the memory budget does not keep: at most one forward pass more, a
    # third of the work.
    again = 1.0 + (BUDGETS["speed"] - setup.budget) / BUDGETS["speed"] / 3
    work = 6.0 * shape.parameters * tokens / machines.flops / t.ranks_per_row / t.stages  # seconds of a micro-batch
    spared = work / 3 * shape.frozen / shape.parameters  # frozen parameters have no gradient
    passes = {"forward": work / 3, "backward": work * (again - 1 / 3) - spared}
    alone, hidden = _exchanging(setup, machines, passes)
    step = count * sum(passes.values()) + alone
    if t.stages > 1:
        # A full pipeline is as fast as its slowest process; it fills and drains once a step, and its exchanges take as
        # much longer.
        layer, head = work_of(shape)
        costs = [blocks * layer for blocks in setup.stage_layers]
        costs[-1] += HEAD_SHARE * head
        slowest = max(sum(costs[rank :: t.stages]) for rank in range(t.stages))
        uneven = slowest * t.stages / sum(costs)
        waits = bubble_by_formula(t.stages, count, len(setup.stage_layers) // t.stages)
        step = (count * sum(passes.values()) * uneven + alone) / (1.0 - waits)
    share = hidden / (hidden + alone) if hidden + alone else 1.0
    sent = sum(each.sent for each in traffic(setup))
    return OnPaper(setup, machines, memory, estimate(setup), count * (work - spared) / step, share, sent)


def _exchanging(setup: EstimateInputs, machines: Machines, passes: Mapping[str, float]) -> tuple[float, float]:
    """Return the seconds of the exchanges of a step for which a GPU waits, and of those that take place while it
    computes.

    Weights are gathered behind forward passes; where they are gathered again for each pass, half of that is behind
    backward passes. Gradients are exchanged behind backward passes: of every micro-batch, or of one where that is done
    once a step.

    Args:
        passes: seconds of the forward and of the backward pass of a micro-batch.
    """
    # What covers an exchange is used up: passes are filled in turn with the seconds of exchanges, and what does not fit
    # is waited for.
    t = setup.topology
    room = dict(passes)
    # A group is as wide as the ranks from its first to its last: wider than a machine, it sends over the network. Ranks
    # of a copy are neighbours, tensor and context ranks are nearest, stages farthest.
    copy = t.shards * t.ranks_per_row
    widths = {"tensor": t.tensor, "context": t.context, "shards": copy, "ends": copy, "replicas": t.stage_ranks}
    alone = hidden = 0.0
    for each in traffic(setup):
        within = widths.get(each.among, t.world_size) <= machines.per_machine
        seconds = each.sent / (machines.inside if within else machines.between)
        gathers = each.kind == "all_gather"
        # Within a layer, or between stages, the next operation needs the result: nothing hides it.
        if each.among in ("tensor", "context", "stages"):
            alone += seconds
            continue
        once = setup.sharding.keep_weights if gathers else setup.sharding.keep_gradients
        times = 1 if once or not t.sharded or t.stages > 1 else setup.layout.accumulation
        shares = {"forward": 1.0} if gathers else {"backward": 1.0}
        if gathers and times > 1 and each.among == "shards":
            shares = {"forward": 0.5, "backward": 0.5}
        for which, share in shares.items():
            covered = min(share * seconds, room[which] * times)
            room[which] -= covered / times
            hidden += covered
            alone += share * seconds - covered
    return alone, hidden


def ways(shape: Shape, machines: Machines, rows: int, row_length: int, micro: Sequence[int] = (1,)) -> list[OnPaper]:
    """Return each topology that fits, the simplest first, with the settings that leave it most speed. The arguments are
    those of `setups`."""
    found = setups(shape, topologies(machines.gpus, machines.per_machine, shape), rows, row_length, micro)
    # A pipeline of this schedule, 1f1b, has as many micro-batches in flight as stages (config.engine_rules).
    return best_fitting((each for each in found if each[0].layout.accumulation >= each[0].topology.stages), machines)


def best_fitting(found: Iterable[Way], machines: Machines) -> list[OnPaper]:
    """Return, for each topology that fits, its fastest setup."""
    best: dict[Topology, OnPaper] = {}
    for setup, memory in found:
        t = setup.topology
        fitting = on_paper(setup, memory, machines) if is_within(setup, machines.memory_bytes) else None
        if fitting is not None and (t not in best or fitting.share > best[t].share):
            best[t] = fitting
    return list(best.values())


def choice(fitting: list[OnPaper]) -> OnPaper | None:
    """Return the simplest that is about as fast as the fastest; None: nothing fits."""
    highest = max((each.share for each in fitting), default=0.0)
    return next((each for each in fitting if each.share >= NEARLY * highest), None)
