"""The order of documents over a run: which are planned together, and from where a resume plans on.

A plan is a pure function of lengths, layout and plan segments, equal on every rank, whatever is asked first. A run is
planned in *parts*, the steps of one segment and, without weights, of one epoch. Here an epoch fits one block of
documents and is planned whole (`epoch.plan_epoch`); larger data, weights and parts of a pass are those of `blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sftkit.config.schema import DataConfig, TrainConfig, source_label
from sftkit.data.batches.epoch import GlobalBatch, plan_epoch
from sftkit.data.batches.pack import Layout, PlanSegment, SourcePlan
from sftkit.data.types import Examples
from sftkit.errors import config_error

if TYPE_CHECKING:
    from sftkit.data.batches.tree import Trees

BLOCK = 2**17
"Documents that are planned together: 0.2 s, and 0.01 % of the positions more than if all were."
LARGEST_GLOBAL = 2**24
"Documents of a source above which data.shuffle is window, unless the recipe sets it."
Step = tuple[int, int, GlobalBatch]
"(step, epoch, global batch)"


class Cursor(NamedTuple):
    """Where a block begins: what a checkpoint keeps."""

    first: int
    "the part begins after this step"
    epoch: int
    rows: int
    "rows of the part before the block"
    documents: tuple[int, ...]
    "by stream: documents of the part before the block"
    tokens: tuple[int, ...]
    "by stream: their positions"


class Mixture(NamedTuple):
    """The settings of a run from which its order of documents follows."""

    sources: tuple[SourcePlan, ...] = ()
    "of all documents; (): one"
    max_steps: int | None = None
    "length of the run, by train.max_steps or data.tokens; None: by train.epochs"
    stages: tuple[tuple[int, tuple[float, ...]], ...] = ()
    "step after which each stage begins, ascending, and the weights of all sources from there on"


NO_MIXTURE = Mixture()


def mixture_of(data: DataConfig, train: TrainConfig, examples: Examples | Trees, layout: Layout) -> Mixture:
    """Return the mixture that a recipe describes, for documents (or trees) of its sources, or for others without
    weights."""
    named = {source_label(source): source for source in data.train}
    names = examples.source_names
    # Documents are numbered source after source.
    ends = np.searchsorted(examples.source, np.arange(1, len(names) + 1, dtype=examples.source.dtype))
    counts = np.diff(ends, prepend=0).tolist()
    # A weight is a share of the documents' tokens, and a plan of trees counts their positions.
    ratios = dict.fromkeys(names, 1.0)
    if not isinstance(examples, Examples):
        sizes = [np.bincount(examples.source, one, len(names)) for one in (examples.lengths, examples.expanded)]
        ratios = dict(zip(names, (sizes[0] / np.maximum(sizes[1], 1)).tolist(), strict=True))
    found = []
    for name, count in zip(names, counts, strict=True):
        source = named.get(name)
        size = len(examples) if source is None or source.weight is None else count
        order = data.shuffle or ("window" if size > LARGEST_GLOBAL else "global")
        if source is None:
            found.append(SourcePlan(name, count, order=order))
            continue
        own: Any = "given" if source.order == "given" else order
        weight = source.weight and source.weight * ratios[name]
        found.append(SourcePlan(name, count, weight, source.max_epochs, source.repeat, own))
    steps = train.max_steps
    if data.tokens is not None:
        steps = math.ceil(data.tokens / layout.positions(layout.row_lengths[-1]))
    assert steps is not None or not data.stages, "checked with the recipe"
    stages = [
        (round(one.at * (steps or 0)), tuple(one.weights.get(name, 0.0) * ratios[name] for name in names))
        for one in data.stages
    ]
    return Mixture(tuple(found), steps, tuple(stages))


def known_by_source(known: Sequence[Cursor], earlier: Sequence[PlanSegment], mixture: Mixture) -> list[Cursor]:
    """Return the cursors of a checkpoint with an entry for each source of this run, if there are weights."""
    then = [source.name for source in earlier[-1].sources] if earlier else []
    now = [source.name for source in mixture.sources]
    if then == now or not now or mixture.sources[0].weight is None:
        return list(known)
    return [
        cursor._replace(
            documents=tuple(dict(zip(then, cursor.documents, strict=True)).get(name, 0) for name in now),
            tokens=tuple(dict(zip(then, cursor.tokens, strict=True)).get(name, 0) for name in now),
        )
        for cursor in known
    ]


def segments_of(
    earlier: Sequence[PlanSegment], step: int, layout: Layout, seed: int, mixture: Mixture = NO_MIXTURE
) -> tuple[PlanSegment, ...]:
    """Return the segments of a run that continues at `step`, with a new segment only if batches are made differently
    from there on, and with those of its later stages.

    Args:
        earlier: the segments before `step`, of the checkpoint that is resumed; empty: one segment from the beginning.
    """
    sources, _, stages = mixture
    weighted = bool(sources) and sources[0].weight is not None
    if earlier and earlier[-1].sources and weighted != (earlier[-1].sources[0].weight is not None):
        raise config_error("weights from a step on", step=step)
    found = [segment if segment.sources else segment._replace(sources=tuple(sources)) for segment in earlier]
    start = step if earlier else 0
    begun = [weights for after, weights in stages if after <= start]
    then = [(start, begun[-1] if begun else None), *(stage for stage in stages if stage[0] > start)]
    for after, weights in then:
        mixed = sources if weights is None else [s._replace(weight=w) for s, w in zip(sources, weights, strict=True)]
        now = PlanSegment(after, seed, layout.global_batch_size, layout.budget_rows, tuple(mixed))
        if not found or found[-1][1:] != now[1:]:
            found.append(now)
    return tuple(found)


def order_of(
    lengths: np.ndarray,
    layout: Layout,
    segments: Sequence[PlanSegment],
    known: Sequence[Cursor] = (),
    block: int = BLOCK,
) -> Order:
    """Return the order of documents of a run, see Order."""
    whole = [all(one.weight is None and one.repeat % 1 == 0 for one in segment.sources) for segment in segments]
    if all(whole) and len(lengths) <= block:
        return Order(lengths, layout, segments, known, block)
    from sftkit.data.batches.blocks import BlockOrder, BucketOrder

    if all(whole) and layout.kind == "bucketed":
        return BucketOrder(lengths, layout, segments, known, block)
    planned = [sum(one.documents for one in segment.sources) for segment in segments[: [*whole, False].index(False)]]
    if layout.kind == "bucketed" and max(planned, default=0) > block:
        raise config_error("part of a pass from a step on", most=block)
    return BlockOrder(lengths, layout, segments, known, block)


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps that are planned alike: of a segment and, without weights, of an epoch."""

    segment: int
    first: int
    "it begins after this step"
    epoch: int
    left: np.ndarray | None = None
    "documents of an epoch in progress, ascending; None: all"


class Order:
    """The global batches of a run. State: the parts that are known, and the epochs planned last."""

    def __init__(
        self,
        lengths: np.ndarray,
        layout: Layout,
        segments: Sequence[PlanSegment],
        known: Sequence[Cursor] = (),
        block: int = BLOCK,
    ) -> None:
        """Begin with nothing planned.

        Args:
            lengths: int [D], positions of each document, source after source.
            known: what `state` returned for the checkpoint that is resumed.
            block: documents that are planned together.
        """
        self._lengths = lengths
        every = (SourcePlan("", len(lengths)),)
        self._segments = [segment if segment.sources else segment._replace(sources=every) for segment in segments]
        self._layouts = [
            replace(layout, global_batch_size=segment.global_batch_size, budget_rows=segment.budget_rows)
            for segment in segments
        ]
        now = self._segments[-1].sources
        ends = np.cumsum([0, *(source.documents for source in now)])
        assert ends[-1] == len(lengths), f"{ends[-1]} documents of sources, {len(lengths)} in the data"
        self._starts = {source.name: int(start) for source, start in zip(now, ends, strict=False)}
        self._begins = known[0][:2] if known else (0, 0)
        self._block = block
        # Any: those of BlockOrder are of another type
        self._parts: list[Any] = []
        self._planned = lru_cache(maxsize=2)(self._plan_epoch)

    def _sources(self, segment: PlanSegment) -> list[SourcePlan]:
        """Return all sources of the run as they are in a segment."""
        named = {source.name: source for source in segment.sources}
        return [named.get(name, SourcePlan(name, 0)) for name in self._starts]

    def _segment_at(self, step: int) -> int:
        """Return the number of the segment that a part beginning after this step belongs to."""
        return max(i for i, segment in enumerate(self._segments) if segment.after_step <= step)

    def _begun(self, first: int, epoch: int) -> Any:
        """Return a part that begins an epoch."""
        return Steps(self._segment_at(first), first, epoch)

    def _part(self, i: int) -> Any:
        """Return a part by its number from the first that is known."""
        if not self._parts:
            self._parts.append(self._begun(*self._begins))
        while len(self._parts) <= i:
            self._parts.append(self._following(self._parts[-1]))
        return self._parts[i]

    def _cut(self, part: Any) -> float:
        """Return the step after which the next segment begins."""
        return min((s.after_step for s in self._segments[part.segment + 1 :]), default=math.inf)

    def _epoch_end(self, part: Any) -> float:
        """Return the step after which the epoch ends if nothing changes before."""
        return float(part.first + len(self._planned(part)))

    def _following(self, part: Any) -> Any:
        """Return the part after this one, with the documents of the epoch that this one has not taken."""
        epoch_end = self._epoch_end(part)
        end = int(min(epoch_end, self._cut(part)))
        if end == epoch_end:
            return self._begun(end, part.epoch + 1)
        taken = [batch.documents for batch in self._planned(part)[: end - part.first]]
        left = np.setdiff1d(self._documents_of(part), np.concatenate(taken))
        then, now = (self._documents_in(self._segments[part.segment + k]) for k in (0, 1))
        return Steps(part.segment + 1, end, part.epoch, np.union1d(left, np.setdiff1d(now, then)))

    def _documents_in(self, segment: PlanSegment) -> np.ndarray:
        """Return the documents that the sources have in a segment, ascending."""
        starts = [(self._starts[source.name], source.documents) for source in self._sources(segment)]
        return np.concatenate([np.arange(start, start + count) for start, count in starts])

    def _documents_of(self, part: Any) -> np.ndarray:
        """Return the documents of a part that is planned whole."""
        return self._documents_in(self._segments[part.segment]) if part.left is None else part.left

    def _seed(self, part: Any) -> int | None:
        segment = self._segments[part.segment]
        return None if segment.sources[0].order == "given" else segment.seed

    def _plan_epoch(self, part: Any) -> Sequence[GlobalBatch]:
        """Return all batches of an epoch, or of its rest."""
        layout = self._layouts[part.segment]
        return plan_epoch(self._lengths, layout, self._seed(part), part.epoch, self._documents_of(part))

    def num_steps(self, epochs: int | None, max_steps: int | None = None) -> int:
        """Return the optimizer steps of a run: those of n epochs, but at most max_steps. None is no limit."""
        if epochs is None:
            assert max_steps is not None, "checked with the recipe"
            return max_steps
        most = math.inf if max_steps is None else max_steps
        i = 0
        while True:
            part = self._part(i)
            if part.epoch >= epochs or part.first >= most:
                return int(min(part.first, most))
            if (later := self._steps_of_later(part)) is not None:
                return int(min(self._epoch_end(part) + (epochs - part.epoch - 1) * later, most))
            i += 1

    def _steps_of_later(self, part: Any) -> int | None:
        """Return the steps of each epoch after this one; None: they differ."""
        return None

    def batches(self, first_step: int, last_step: int) -> Iterator[Step]:
        """Yield steps first_step + 1 .. last_step."""
        for chunk in self.chunks(first_step, last_step):
            yield from chunk

    def chunks(self, first_step: int, last_step: int) -> Iterator[list[Step]]:
        """Yield the same in lists of steps that are planned together."""
        step = first_step
        i = 0
        while step < last_step:
            part = self._part(i)
            end = int(min(self._epoch_end(part), self._cut(part), last_step))
            i += 1
            if end > step:
                yield from self._chunks_of(part, step, end)
                step = end

    def _chunks_of(self, part: Any, step: int, end: int) -> Iterator[list[Step]]:
        """Yield the steps step + 1 .. end of a part."""
        batches = self._planned(part)[step - part.first : end - part.first]
        yield [(number, part.epoch, batch) for number, batch in enumerate(batches, step + 1)]

    def _first_part(self) -> Any:
        return self._part(0) if self._begins == (0, 0) else self._begun(0, 0)

    def first_batches(self) -> tuple[list[GlobalBatch], int]:
        """Return the batches of the first epoch, or of its first block, and the steps of an epoch: with weights those
        that would take each document once."""
        planned = self._planned(self._first_part())
        return list(planned), len(planned)

    def forecast(self, steps: int) -> list[tuple[float, int | None]]:
        """Return for each source its passes in a run of `steps` steps, and after which step it has reached its
        max_epochs; None: it does not.

        Raises:
            ConfigError: all sources end before.
        """
        _, of_epoch = self.first_batches()
        return [(steps / of_epoch * source.repeat, None) for source in self._segments[-1].sources]

    def state(self, step: int) -> list[Cursor]:
        """Return from where a resume after this step plans on: a cursor of each part that it depends on."""
        self._part(0)
        begun = [part for part in self._parts if part.left is None and part.first <= step]
        return [Cursor(part.first, part.epoch, 0, (0,), (0,)) for part in begun[-1:]]
