"""Layers spread over the stages of a pipeline, and how long a step then takes. No torch in this file."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

PROPORTIONS = 16
"Steps between the evenest split of the backward passes and that of the forward passes."
MOST_PASSES = 50_000
"Passes of a step that are followed one by one: some tenths of a second."


def balanced(num_layers: int, layer: float, head: float, stages: int, embedding: float = 0.0) -> tuple[int, ...]:
    """Return the layers of each stage of a pipeline, one or more, so that the slowest takes least.

    Args:
        layer, head, embedding: what a layer takes, and what the last and the first stage take beside their layers.
    """
    # Greedy is exact here: layers are alike, so the next one belongs where the stage is still the lightest.
    costs = [layer] * (stages - 1) + [layer + head]
    costs[0] += embedding
    layers = [1] * stages
    for _ in range(num_layers - stages):
        lightest = min(range(stages), key=lambda stage: costs[stage])
        costs[lightest] += layer
        layers[lightest] += 1
    return tuple(layers)


def stages_fit(stages: int, schedule: str, pipeline_size: int) -> bool:
    """Return whether a pipeline of so many ranks can have so many stages: one a rank, interleaved two or more."""
    if schedule != "interleaved":
        return stages == pipeline_size
    return stages % pipeline_size == 0 and stages >= 2 * pipeline_size


def slowest_rank(costs: Sequence[float], pipeline_size: int) -> float:
    """Return what the stages of the slowest rank of a pipeline cost together; each rank has every
    `pipeline_size`-th of them."""
    return max(sum(costs[rank::pipeline_size]) for rank in range(pipeline_size))


@dataclass(frozen=True)
class StageTimes:
    """Seconds that a stage, or a part of one, takes for a micro-batch; on paper parameters that it passes."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def both(self) -> float:
        """Return what the two take together."""
        return self.forward + self.backward

    def plus(self, other: StageTimes, times: int = 1) -> StageTimes:
        """Return what this and so many of another take; below 0 is noise."""
        forward, backward = self.forward + times * other.forward, self.backward + times * other.backward
        return StageTimes(max(forward, 0.0), max(backward, 0.0))


@dataclass(frozen=True)
class PartTimes:
    """What the parts of a model take for a micro-batch; the head with its loss."""

    layer: StageTimes
    head: StageTimes
    embedding: StageTimes = StageTimes()

    def of_stages(self, layers: Sequence[int]) -> list[StageTimes]:
        """Return what each of these stages takes."""
        first, *between = [StageTimes().plus(self.layer, count) for count in layers]
        *between, last = [first.plus(self.embedding), *between]
        return [*between, last.plus(self.head)]


@dataclass(frozen=True)
class PipelineStep:
    """How a step passes through the stages of a pipeline."""

    layers: tuple[int, ...]
    "of each stage"
    schedule: str
    micro_batches: int
    pipeline_size: int
    "ranks that the rows pass through"

    @property
    def filling(self) -> float:
        """Return for how many micro-batches a step fills and drains: for (ranks - 1), with several stages on each rank
        for that fraction of it (Megatron-LM, arXiv 2104.04473)."""
        return (self.pipeline_size - 1) * self.pipeline_size / len(self.layers)


def step_seconds(step: PipelineStep, times: Sequence[StageTimes]) -> float:
    """Return how long a step takes, from what each stage takes for a micro-batch: every rank goes through its passes in
    the order of the schedule, and begins one as soon as what it reads is there. Sends take no time.

    Args:
        times: of each stage.
    """
    if step.schedule == "gpipe":
        # All forward passes, then all backward passes: each of the two is as slow as its own slowest stage. The head's
        # gradients are computed with the loss, in the forward pass, so that is not the same stage in both.
        phases = ([each.forward for each in times], [each.backward for each in times])
        return sum(sum(phase) + (step.micro_batches - 1) * max(phase) for phase in phases)
    # Of a long step the first rounds, of as many micro-batches as ranks, are followed. A pipeline that is full takes as
    # long for a micro-batch as its slowest rank.
    longest = max(MOST_PASSES // (2 * len(times)), 2 * step.pipeline_size)
    left_out = max(0, -((longest - step.micro_batches) // step.pipeline_size)) * step.pipeline_size
    followed = _followed(replace(step, micro_batches=step.micro_batches - left_out), tuple(times))
    return followed + left_out * slowest_rank([each.both for each in times], step.pipeline_size)


@lru_cache(maxsize=1024)
def _followed(step: PipelineStep, times: tuple[StageTimes, ...]) -> float:
    """Return when the last pass of a step ends, each of them followed."""
    left = [deque(passes_of_rank(step, rank)) for rank in range(step.pipeline_size)]
    ends, free, last = dict[StagePass, float](), [0.0] * step.pipeline_size, len(times) - 1
    while any(left):
        for rank, passes in enumerate(left):
            while passes:
                stage, micro_batch, forward = at = passes[0]
                # A stage reads what the one before it gives, backward the one behind it; the loss is the last one's.
                turns = not forward and stage == last
                read = StagePass(stage if turns else stage - 1 if forward else stage + 1, micro_batch, forward or turns)
                if read.stage >= 0 and read not in ends:
                    break
                seconds = times[stage].forward if forward else times[stage].backward
                free[rank] = ends[at] = max(free[rank], ends.get(read, 0.0)) + seconds
                passes.popleft()
    return max(free)


class StagePass(NamedTuple):
    """What a rank does at a time: the forward or the backward pass of a stage for a micro-batch."""

    stage: int
    micro_batch: int
    forward: bool


def passes_of_rank(step: PipelineStep, rank: int) -> list[StagePass]:
    """Return the passes of a rank in the order of `1f1b` or `interleaved` (arXiv 2104.04473): forward ones until the
    first gradient can arrive, then one forward and one backward in turn, then the backward ones that are left. Of
    several stages of a rank each has a round of micro-batches at a time.

    torch.distributed.pipelining, whose schedules the engine runs, has the same order.
    """
    ranks, stages = step.pipeline_size, range(rank, len(step.layers), step.pipeline_size)
    # One round where there are fewer micro-batches than ranks.
    size = step.micro_batches // max(1, step.micro_batches // ranks)
    rounds = [range(begin, min(begin + size, step.micro_batches)) for begin in range(0, step.micro_batches, size)]
    forward = [StagePass(stage, each, forward=True) for turn in rounds for stage in stages for each in turn]
    backward = [StagePass(stage, each, forward=False) for turn in rounds for stage in reversed(stages) for each in turn]
    hops = ranks - 1 - rank
    ahead = min(hops if len(stages) == 1 else (len(stages) - 1) * size + 2 * hops, len(forward))
    turns = chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *turns, *backward[len(forward) - ahead :]]


def bubble(step: PipelineStep, times: Sequence[StageTimes]) -> float:
    """Return the share of a step in which a process of a pipeline waits, on average."""
    computed = step.micro_batches * sum(each.both for each in times) / step.pipeline_size
    return 1.0 - computed / step_seconds(step, times)


def fastest_split(step: PipelineStep, parts: PartTimes) -> tuple[int, ...]:
    """Return how the layers of all stages are spread so that a step takes least.

    Args:
        step: with any split of the layers.
    """
    num_layers, stages = sum(step.layers), len(step.layers)
    # What gpipe waits for lies between the evenest split of the forward and that of the backward passes.
    proportions = [part / PROPORTIONS for part in range(PROPORTIONS + 1)] if step.schedule == "gpipe" else [0.5]

    def split(proportion: float) -> tuple[int, ...]:
        layer, head, embedding = (
            proportion * part.forward + (1.0 - proportion) * part.backward
            for part in (parts.layer, parts.head, parts.embedding)
        )
        return balanced(num_layers, layer, head, stages, embedding)

    splits = [split(each) for each in proportions]
    return min(splits, key=lambda layers: step_seconds(replace(step, layers=layers), parts.of_stages(layers)))


def times_on_paper(layer: float, head: float) -> PartTimes:
    """Return what parts take in proportion to the parameters that a token passes: a backward pass twice as much as a
    forward pass. The head's gradients are computed with its loss, in the forward pass.

    Args:
        layer, head: parameters that a token passes in a layer and in the head.
    """
    return PartTimes(StageTimes(layer, 2 * layer), StageTimes(3 * head))


def split_on_paper(num_layers: int, layer: float, head: float, stages: int, schedule: str) -> tuple[int, ...]:
    """Return the layers of all stages where nothing was timed. With two micro-batches or more it is the same for any
    number of them.

    Args:
        layer, head: as of `times_on_paper`.
    """
    step = PipelineStep(balanced(num_layers, layer, head, stages), schedule, micro_batches=2, pipeline_size=stages)
    return fastest_split(step, times_on_paper(layer, head))
