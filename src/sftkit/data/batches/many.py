"""The batches of several adapters that are trained side by side: each adapter's step has the rows that it would have
alone, in the order of its plan.

A micro-batch has rows of one group of G adapters, the same number of each: first those of the first adapter, and so on.
An adapter whose data has ended has padding there; a group whose adapters have all ended is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import numpy as np

from sftkit.config.schema import TrainConfig
from sftkit.data.batches.collate import Batch, collate
from sftkit.data.batches.epoch import GlobalBatch, row_pairs
from sftkit.data.batches.loader import AdapterStep, Batches, StepBatches, StepDataset
from sftkit.data.batches.order import order_of
from sftkit.data.batches.pack import BatchShape, Layout, PlanSegment, largest_divisor
from sftkit.data.types import Examples
from sftkit.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """The documents of one adapter, and how they would be laid out if it were alone."""

    layout: Layout
    seed: int
    first: int
    "index of its first document among all"
    documents: int


def joint_layout(layouts: Sequence[Layout], train: TrainConfig) -> Layout:
    """Return the layout of the micro-batches that the adapters share. Of train.micro_batch_size rows they have as many
    adapters as fit and divide their number, then as many rows of each. `layouts`: of each adapter alone."""
    count, rows = len(layouts), train.global_batch_size
    shares = largest_divisor(count, min(count, train.micro_batch_size))
    micro = shares * largest_divisor(rows, train.micro_batch_size // shares)
    return replace(
        layouts[0],
        global_batch_size=count * rows,
        micro_batch_size=micro,
        budget_rows=1,
        docs_per_row=max(layout.docs_per_row for layout in layouts),
        max_doc_length=max(layout.max_doc_length for layout in layouts),
        shares=shares,
    )


@dataclass(frozen=True)
class _Joined:
    """Tokens of several data sets, whose documents are numbered one set after the other."""

    parts: list[Examples]
    starts: np.ndarray
    "int [parts + 1], the first document of each"

    def gather(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, is_target) of documents, one after the other."""
        if not len(documents):
            return self.parts[0].gather(documents)
        owners = np.searchsorted(self.starts, documents, side="right") - 1
        # Runs of documents of the same part.
        runs = np.split(np.arange(len(documents)), np.flatnonzero(np.diff(owners)) + 1)
        found = [self.parts[owners[run[0]]].gather(documents[run] - self.starts[owners[run[0]]]) for run in runs]
        ids, is_target = map(np.concatenate, zip(*found, strict=True))
        return ids, is_target


def joined(parts: Sequence[tuple[str, Examples]]) -> Examples:
    """Return the documents of several data sets one after the other; sources are named after the first adapter that
    has them.

    Args:
        parts: name of an adapter, and its documents.
    """
    if len(parts) == 1:
        return parts[0][1]
    every = [examples for _, examples in parts]
    names = [tuple(f"{name}/{source}" for source in examples.source_names) for name, examples in parts]
    first = np.cumsum([0, *map(len, names)])
    return Examples(
        _Joined(every, np.cumsum([0, *map(len, every)])),
        np.concatenate([examples.lengths for examples in every]),
        np.concatenate([examples.num_targets for examples in every]),
        np.concatenate([examples.num_bytes for examples in every]),
        np.concatenate([one.source + at for one, at in zip(every, first, strict=False)]),
        tuple(chain.from_iterable(names)),
        {f"{name}/{source}": counts for name, one in parts for source, counts in one.counts.items()},
        {f"{name}/{source}": found for name, one in parts for source, found in one.findings.items()},
        {f"{name}/{source}": files for name, one in parts for source, files in one.files.items()},
    )


@dataclass(frozen=True, eq=False)
class JointBatch(GlobalBatch):
    """The rows of a step of all adapters, in the order of the micro-batches."""

    steps: tuple[tuple[int, int] | None, ...]
    "of each adapter the step and the number of its steps; None: its data has ended"


class ManyDataset(StepDataset):
    """Builds the micro-batches of a step of all adapters."""

    members: int
    "number of adapters"

    def __getitem__(self, item: tuple[int, int, GlobalBatch]) -> StepBatches:
        """Build the batches of one (step, epoch, global batch)."""
        _, _, batch = item
        assert isinstance(batch, JointBatch)
        made = super().__getitem__(item)
        divisors = [0] * len(batch.steps)
        kept = []
        for i, micro in enumerate(made.micro_batches):
            for k, targets in zip(micro.adapters, micro.targets_of_shares, strict=True):
                divisors[k] += targets
            if any(batch.steps[k] is not None for k in micro.adapters):  # others have no documents
                kept.append(i)
        steps = zip(batch.steps, divisors, strict=True)
        return replace(
            made,
            micro_batches=[made.micro_batches[i] for i in kept],
            documents_per_micro_batch=tuple(made.documents_per_micro_batch[i] for i in kept),
            num_positions=made.num_positions * len(kept) // len(made.micro_batches),
            adapters=tuple(None if step is None else AdapterStep(*step, divisor) for step, divisor in steps),
        )

    def _collated(self, number: int, rows: tuple[tuple[int, ...], ...], shape: BatchShape) -> Batch:
        shares = self.layout.shares
        first = number // (self.layout.accumulation * shares // self.members) * shares
        return collate(self.examples, rows, replace(shape, adapters=tuple(range(first, first + shares))), self.pad_id)


class ManyBatches(Batches):
    """The training data of several adapters as a function of the step number."""

    def __init__(
        self,
        dataset: ManyDataset,
        sources: Sequence[Source],
        train: TrainConfig,
        *,
        num_workers: int | None = 0,
        earlier: Sequence[PlanSegment] = (),
        first_step: int = 0,
    ) -> None:
        """See Batches. The plans of the adapters begin at step 0 in every start."""
        super().__init__(dataset, sources[0].seed, num_workers=num_workers, earlier=earlier, first_step=first_step)
        if len(self.segments) > 1:
            raise ConfigError("adapters: the checkpoint has other batches: set train.global_batch_size back")
        dataset.members = len(sources)
        self._sources = sources
        self._orders = []
        for source in sources:
            own = dataset.lengths[source.first : source.first + source.documents]
            segment = PlanSegment(0, source.seed, source.layout.global_batch_size, source.layout.budget_rows)
            self._orders.append(order_of(own, source.layout, [segment]))
        self.totals = [order.num_steps(train.epochs, train.max_steps) for order in self._orders]
        "number of steps of each adapter"
        self._epochs = train.epochs
        self._items = self._joint_items

    def of_each(self) -> list[dict[str, int]]:
        """Return the steps of each adapter, and the documents, tokens and targets of its data."""
        found = []
        for source, steps in zip(self._sources, self.totals, strict=True):
            own = slice(source.first, source.first + source.documents)
            tokens, targets = (int(n[own].sum()) for n in (self.examples.lengths, self.examples.num_targets))
            found.append({"steps": steps, "documents": source.documents, "tokens": tokens, "targets": targets})
        return found

    def num_steps(self, epochs: int | None, max_steps: int | None = None) -> int:
        """Return the steps of the adapter with the most; the recipe says how many."""
        return max(self.totals)

    def first_epoch(self) -> tuple[list[GlobalBatch], int]:
        """Return the batches of an epoch of the most data; adapters with less repeat theirs, up to train.epochs."""
        size = max(order.num_steps(1) for order in self._orders)
        ends = [size if self._epochs is None else min(size, o.num_steps(self._epochs)) for o in self._orders]
        of_each = [order.batches(0, end) for order, end in zip(self._orders, ends, strict=True)]
        none = (None,) * len(ends)
        return [self._joint([one and one[2] for one in found], none) for found in zip_longest(*of_each)], size

    def _joint_items(self, first_step: int, last_step: int) -> Iterator[tuple[int, int, GlobalBatch]]:
        """Yield (step, largest epoch of an adapter, global batch) of steps first_step + 1 .. last_step."""
        of_each = [
            order.batches(first_step, min(last_step, total))
            for order, total in zip(self._orders, self.totals, strict=True)
        ]
        for step in range(first_step + 1, last_step + 1):
            found = [next(items) if step <= n else None for items, n in zip(of_each, self.totals, strict=True)]
            steps = tuple(None if one is None else (step, n) for one, n in zip(found, self.totals, strict=True))
            epoch = max(one[1] for one in found if one is not None)
            yield step, epoch, self._joint([one and one[2] for one in found], steps)

    def _joint(self, batches: Sequence[GlobalBatch | None], steps: tuple[tuple[int, int] | None, ...]) -> JointBatch:
        """Return the rows of all adapters in the order of the micro-batches."""
        layout, size = self.layout, self._sources[0].layout.global_batch_size
        none = np.zeros(0, np.int64)
        own: list[list[np.ndarray]] = []
        for source, batch in zip(self._sources, batches, strict=True):
            rows = [] if batch is None else np.split(batch.documents + source.first, batch.borders[1:-1])
            own.append([*rows, *[none] * (size - len(rows))])
        each = layout.micro_batch_size // layout.shares
        in_order = [
            row
            for first in range(0, len(own), layout.shares)
            for start in range(0, size, each)
            for k in range(first, first + layout.shares)
            for row in own[k][start : start + each]
        ]
        length = layout.row_lengths[-1]
        counts = np.array([len(row) for row in in_order])
        documents = np.concatenate(in_order)
        pairs = row_pairs(self._dataset.lengths[documents], counts, length, layout.max_doc_length)
        return JointBatch(length, documents, np.concatenate([[0], np.cumsum(counts)]), pairs, steps)
