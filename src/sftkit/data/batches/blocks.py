"""The order of documents where an epoch is larger than a block, or sources have weights.

A part of a run is planned in blocks of documents, whose rows follow one another. No array is as long as the data: a
place in the order is a number, and a permutation by rounds of a Feistel network says which document comes there. A
block depends only on its `Cursor`, a few integers, so a resume plans one block.
"""

import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sftkit.config.schema import LARGEST
from sftkit.data.batches.epoch import GlobalBatch, global_batches, plan_rows
from sftkit.data.batches.order import BLOCK, Cursor, Order, Step, Steps
from sftkit.data.batches.pack import Layout, PlanSegment, SourcePlan
from sftkit.data.hygiene import mixed
from sftkit.errors import config_error, hint

log = logging.getLogger(__name__)

WINDOW = 2**22
"Documents of a source that are shuffled among themselves in the order window."
SPARE_ROWS = 2**-10
"""Empty rows for each row of an epoch of several packed blocks, and one a block, so that its number of steps is known
before all are planned. How full the rows of such blocks are differs by 0.01 to 0.02 %."""
_FEWEST = 256
"Documents of a block with weights if all data has less."
_CHUNK = 64
"Steps of bucketed rows that are planned ahead together."
_ROUNDS = 4
_U = np.uint64


def key_of(*numbers: int | np.ndarray) -> np.ndarray:
    """Return the key of a permutation for each combination of numbers, uint64 [1] or [n]."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mixed(key + np.asarray(number).astype(np.uint64).reshape(-1) + _U(0x9E3779B97F4A7C15))
    return key


def permuted(indices: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Return where permutations of range(size) move these indices, int64 [n].

    Args:
        key: uint64 [1], or [n] with the permutation of each index.
    """
    # The smallest power of two that holds the range is permuted, by halves of bits in turn: each line is its own
    # inverse. What leaves the range is moved again, until it returns.
    bits = max(size - 1, 1).bit_length()
    low = _U(bits // 2)
    of_low = _U(2 ** (bits // 2) - 1)
    of_high = _U(2 ** (bits - bits // 2) - 1)
    keys = [mixed(key + _U(n + 1)) for n in range(2 * _ROUNDS)]
    found = indices.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        x = found[outside]
        for n in range(0, 2 * _ROUNDS, 2):
            first, second = (k if len(k) == 1 else k[outside] for k in keys[n : n + 2])
            x ^= mixed((x >> low) + first) & of_low
            x ^= (mixed((x & of_low) + second) & of_high) << low
        found[outside] = x
        outside = outside[x >= size]
    return found.astype(np.int64)


class _Layer(NamedTuple):
    """A permutation of the places of an epoch from `start` on."""

    start: int
    size: int
    "documents in the epoch"
    seed: int
    order: str
    "global, window or given"

    def moved(self, places: np.ndarray, number: int, epoch: np.ndarray) -> np.ndarray:
        """Return where places from `start` on move to. number: of the stream. epoch: int [1] or [n]."""
        if self.order == "given":
            return places
        inside = places - self.start
        size = self.size - self.start
        key = key_of(self.seed, number, epoch)
        if self.order == "global" or size <= WINDOW:
            return self.start + permuted(inside, size, key)
        # In later epochs whole windows change places; the rest behind them stays where it is.
        whole = size // WINDOW
        window, place = np.divmod(inside, WINDOW)
        key, epoch = np.broadcast_to(key, window.shape), np.broadcast_to(epoch, window.shape)
        move = (window < whole) & (epoch > 0)
        window[move] = permuted(window[move], whole, key[move])
        rest = window == whole
        key = key_of(key, window)
        place[~rest] = permuted(place[~rest], WINDOW, key[~rest])
        place[rest] = permuted(place[rest], size - whole * WINDOW, key[rest])
        return self.start + window * WINDOW + place


Ranges = tuple[tuple[int, int], ...]
"First document and number of documents of each range, in the order in which their documents are numbered."


@dataclass(frozen=True)
class DocumentOrder:
    """The endless order of a source's documents, or without weights of all documents, from a place on."""

    number: int
    epoch: int
    position: int
    "places of this epoch that were passed"
    layers: tuple[_Layer, ...]
    "of this epoch: one for each change of seed or data within it, the oldest first"
    ranges: Ranges
    "the documents of this epoch; those of a source that has grown are behind all others"
    later: tuple[_Layer, Ranges]
    "of the epochs after this one"

    @classmethod
    def begun(cls, number: int, epoch: int, seed: int, order: str, ranges: Ranges) -> "DocumentOrder":
        """Return a stream at the beginning of an epoch."""
        layer = _Layer(0, sum(count for _, count in ranges), seed, order)
        return cls(number, epoch, 0, (layer,), ranges, (layer, ranges))

    @property
    def left(self) -> int:
        """Return the number of documents until the epoch ends."""
        return self.layers[-1].size - self.position

    def next_epoch(self) -> "DocumentOrder":
        """Return the stream at the beginning of the next epoch."""
        layer, ranges = self.later
        return replace(self, epoch=self.epoch + 1, position=0, layers=(layer,), ranges=ranges)

    def passed(self, count: int) -> "DocumentOrder":
        """Return the stream `count` documents further."""
        if count < self.left or not count:
            return replace(self, position=self.position + count)
        epochs, position = divmod(count - self.left, self.later[0].size)
        stream = self.next_epoch()
        return replace(stream, epoch=stream.epoch + epochs, position=position)

    def changed(self, layer: _Layer, ranges: Ranges) -> "DocumentOrder":
        """Return the stream with another seed or more documents from here on, in the rest of this epoch too. `layer`
        and `ranges`: of later epochs."""
        if (layer, ranges) == self.later:
            return self
        grown = [(a + n, m - n) for (a, n), (_, m) in zip(self.later[1], ranges, strict=True) if m > n]
        size = self.layers[-1].size + sum(count for _, count in grown)
        rest = layer._replace(start=self.position, size=size)
        return replace(self, layers=(*self.layers, rest), ranges=(*self.ranges, *grown), later=(layer, ranges))

    def documents(self, start: int, stop: int) -> np.ndarray:
        """Return the documents start .. stop - 1 from this place on, int64."""
        here = min(stop, self.left)
        if start >= here:
            return self._of_epochs(self.next_epoch(), start - self.left, stop - self.left)
        found = self._of_epochs(self, start, here)
        return found if here == stop else np.concatenate([found, self.documents(here, stop)])

    @staticmethod
    def _of_epochs(stream: "DocumentOrder", start: int, stop: int) -> np.ndarray:
        """Return documents of this epoch or, if it has just begun, of several epochs."""
        epoch, places = np.divmod(np.arange(start, stop) + stream.position, max(stream.layers[-1].size, 1))
        for layer in reversed(stream.layers):
            older = places < layer.size
            places[older] = layer.moved(places[older], stream.number, (epoch + stream.epoch)[older])
        firsts, counts = np.array(stream.ranges, np.int64).reshape(-1, 2).T
        ends = np.cumsum(counts)
        piece = np.searchsorted(ends, places, "right")
        return np.asarray(places + (firsts - ends + counts)[piece])


@dataclass(frozen=True, eq=False)
class _Part:
    """See order.Steps; with weights the epoch is that of the source with the fewest at its beginning."""

    segment: int
    first: int
    "it begins after this step"
    epoch: int
    streams: tuple[DocumentOrder, ...]
    pending: tuple[np.ndarray, ...]
    "by stream: documents that the part before has drawn and not taken; they come first"
    work: int
    "without weights: positions of all its documents if they are packed, else their number"
    cursors: list[Cursor]
    "of the blocks that are known, in order"

    @property
    def begins_an_epoch(self) -> bool:
        """Return whether nothing of an epoch was drawn before."""
        return not any(map(len, self.pending)) and not any(stream.position for stream in self.streams)


class _Block(NamedTuple):
    documents: np.ndarray
    counts: np.ndarray
    "documents of each row"
    after: Cursor


class BlockOrder(Order):
    """The global batches of a run in blocks. State: the parts and cursors that are known, the blocks planned last."""

    def __init__(
        self,
        lengths: np.ndarray,
        layout: Layout,
        segments: Sequence[PlanSegment],
        known: Sequence[Cursor] = (),
        block: int = BLOCK,
    ) -> None:
        """See Order."""
        super().__init__(lengths, layout, segments, known, LARGEST if layout.kind == "bucketed" else block)
        self._row_length = layout.row_lengths[-1]
        self._packed = layout.packs
        self._weighted = self._segments[-1].sources[0].weight is not None
        borders = [*self._starts.values(), len(lengths)]
        self._ends = np.array(borders[1:])
        self.tokens = [int(lengths[a:b].sum()) for a, b in pairwise(borders)]
        "positions of each source"
        self._means = [self._mean_lengths(segment) for segment in self._segments]
        self._known = {cursor.first: cursor for cursor in known}
        if self._weighted:  # the first part is that of the run, in which no source has begun
            self._begins = (0, 0)
        self._block_at = lru_cache(maxsize=2)(self._plan_mixed if self._weighted else self._plan_block)

    # ---- parts ----

    def _streams(self, segment: PlanSegment, epoch: int) -> tuple[DocumentOrder, ...]:
        """Return the streams of a segment at the beginning of an epoch: of each source, or without weights one."""
        found = self._sources(segment)
        ranges = [(self._starts[source.name], source.documents) for source in found]
        by_stream = [(one,) for one in ranges] if self._weighted else [tuple(ranges)]
        return tuple(
            DocumentOrder.begun(_number(source.name) if self._weighted else 0, epoch, segment.seed, source.order, own)
            for source, own in zip(found, by_stream, strict=False)
        )

    def _mean_lengths(self, segment: PlanSegment) -> list[float]:
        """Return the mean length of each source's documents in a segment; without weights nothing."""
        if not self._weighted:
            return []
        sizes = [(self._starts[source.name], source.documents) for source in self._sources(segment)]
        return [float(self._lengths[start : start + n].mean()) if n else 1.0 for start, n in sizes]

    def _begun(self, first: int, epoch: int, late: np.ndarray | None = None) -> _Part:
        """Return a part that begins an epoch, or the run. late: documents of the epoch before, which come first."""
        index = self._segment_at(first)
        segment = self._segments[index]
        streams = self._streams(segment, epoch)
        pending = (np.zeros(0, np.int64) if late is None else late,) * len(streams)
        return self._part_of(index, first, streams, pending, self._work_of_an_epoch(segment))

    def _part_of(
        self, index: int, first: int, streams: tuple[DocumentOrder, ...], pending: tuple[np.ndarray, ...], work: int
    ) -> _Part:
        part = _Part(index, first, min(stream.epoch for stream in streams), streams, pending, work, [])
        known = self._known.get(first)
        usable = known is not None and len(known.documents) == len(streams)
        part.cursors.append(known if known is not None and usable else self._beginning(part))
        return part

    def _beginning(self, part: _Part) -> Cursor:
        zeros = (0,) * len(part.streams)
        return Cursor(part.first, part.epoch, 0, zeros, zeros)

    def _work(self, documents: np.ndarray | slice) -> int:
        """Return the positions of documents if they are packed, else their number."""
        lengths = self._lengths[documents]
        return int(lengths.sum()) if self._packed else len(lengths)

    def _work_of_an_epoch(self, segment: PlanSegment) -> int:
        work = 0
        for source in segment.sources:
            start = self._starts[source.name]
            work += self._work(slice(start, start + source.documents))
            # Epochs take different documents of a last pass that is not whole: their positions are a mean.
            last, share = _last_pass(source)
            if share < last:
                of_last = slice(start + source.documents - last, start + source.documents)
                left_out = self._work(of_last) * (1 - share / last)
                spread = self._lengths[of_last][:: -(-last // BLOCK)].std() if self._packed else 0.0
                # Four standard deviations of their sum, so that they have room in nearly every epoch.
                work -= round(left_out - 4 * float(spread) * math.sqrt(share * (1 - share / last)))
        return work

    def _blocks(self, part: _Part) -> int:
        """Return how many blocks the rest of an epoch has; 0: there are weights, so it has no end."""
        return 0 if self._weighted else max(1, -(-self._left(part) // self._block))

    @staticmethod
    def _left(part: _Part) -> int:
        return sum(map(len, part.pending)) + sum(stream.left for stream in part.streams)

    def _epoch_end(self, part: _Part) -> float:
        blocks = self._blocks(part)
        if blocks == 1:
            return super()._epoch_end(part)
        return part.first + self._steps(part) if blocks else math.inf

    def _steps_of_later(self, part: _Part) -> int | None:
        if self._blocks(part) <= 1 or self._cut(part) < math.inf:
            return None
        # Documents that are late move to the next epoch, and change no number of steps.
        return self._steps(replace(part, work=self._work_of_an_epoch(self._segments[part.segment])))

    def _steps(self, part: _Part) -> int:
        """Return the steps of a part of several blocks: as many as if all had rows as full as the first of the run."""
        return -(-self._room(part) // self._rows(part))

    def _room(self, part: _Part) -> int:
        """Return the rows of a part of several blocks, those that stay empty included."""
        if not self._packed:
            return part.work
        return math.ceil(part.work * self.rows_of_work * (1 + SPARE_ROWS)) + self._blocks(part)

    def _rows(self, part: _Part) -> int:
        return self._layouts[part.segment].rows(self._row_length)

    @cached_property
    def rows_of_work(self) -> float:
        """Return the rows that a position takes in the first block of the run; without packing those of a document."""
        if not self._packed:
            return 1.0
        part = self._begun(0, 0)
        if self._weighted:
            block = self._plan_mixed(part, self._beginning(part))
            assert block is not None
            documents, counts = block.documents, block.counts
        else:
            documents = self._documents(part, 0, -(-part.streams[0].left // self._blocks(part)))
            order = np.random.default_rng(self._segments[0].seed).permutation(documents)
            _, counts = plan_rows(self._lengths, self._layouts[0], self._row_length, order, None)
        return float(len(counts) / self._lengths[documents].sum())

    def _following(self, part: _Part) -> _Part:
        """Return the part after this one. What this one has drawn and not taken comes first in it."""
        epoch_end = self._epoch_end(part)
        end = int(min(epoch_end, self._cut(part)))
        single = self._blocks(part) == 1
        if single and end == epoch_end:
            return self._begun(end, part.epoch + 1)
        if single:
            taken = np.concatenate([batch.documents for batch in self._planned(part)[: end - part.first]])
            left = np.setdiff1d(self._documents(part, 0, self._left(part)), taken)
            drawn = [self._left(part)]
            work = self._work(left)
        else:
            left, before, after = self._untaken(part, end)
            drawn = [*after.documents]
            work = part.work - (after.tokens[0] if self._packed else after.rows) + self._work(left)
        untaken = [left]
        if self._weighted:
            untaken, drawn = self._given_back(part, left, before, after)
        both = zip(untaken, part.pending, drawn, strict=True)
        pending = tuple(np.concatenate([own, waiting[count:]]) for own, waiting, count in both)
        counts = [max(0, count - len(waiting)) for waiting, count in zip(part.pending, drawn, strict=True)]
        if not self._weighted:
            # All that is left of this epoch comes before another begins.
            stream = replace(part.streams[0], position=part.streams[0].position + counts[0])
            if end == epoch_end:
                late = np.concatenate([pending[0], stream.documents(0, stream.left)])
                return self._begun(end, part.epoch + 1, late)
            streams: tuple[DocumentOrder, ...] = (stream,)
        else:
            streams = tuple(stream.passed(count) for stream, count in zip(part.streams, counts, strict=True))
        index = part.segment + 1
        segment = self._segments[index]
        then = self._streams(segment, 0)
        streams = tuple(stream.changed(*new.later) for stream, new in zip(streams, then, strict=True))
        work += self._work_of_an_epoch(segment) - self._work_of_an_epoch(self._segments[part.segment])
        return self._part_of(index, end, streams, pending, work)

    def _untaken(self, part: _Part, end: int) -> tuple[np.ndarray, Cursor, Cursor]:
        """Return the documents of the same block that follow the rows of a part's last step, and the cursors of
        this block and of the next."""
        rows = (end - part.first) * self._rows(part)
        cursor = _last(part.cursors, rows)
        while cursor.rows < rows and (block := self._block_at(part, cursor)) is not None:
            if block.after.rows >= rows:
                return block.documents[block.counts[: rows - cursor.rows].sum() :], cursor, block.after
            cursor = block.after
        return np.zeros(0, np.int64), cursor, cursor

    def _given_back(
        self, part: _Part, left: np.ndarray, before: Cursor, after: Cursor
    ) -> tuple[list[np.ndarray], list[int]]:
        """Return by stream the untaken documents of a block that were drawn before its last taken one, and the number
        of documents up to that one. Those behind it count as not drawn, so that what changes holds from here on."""
        pending = []
        drawn = []
        stream_of = np.searchsorted(self._ends, left, "right")
        for k, (start, stop) in enumerate(zip(before.documents, after.documents, strict=True)):
            own = self._documents(part, start, stop, k)
            # A document that was drawn several times was taken the first of them.
            found, numbers = np.unique(own, return_inverse=True)
            backwards = np.lexsort((-np.arange(len(own)), numbers))
            firsts = np.searchsorted(numbers[backwards], np.arange(len(found)))
            rank = np.zeros(len(own), np.int64)
            rank[backwards] = np.arange(len(own)) - firsts[numbers[backwards]]
            waiting = np.bincount(np.searchsorted(found, left[stream_of == k]), minlength=len(found))
            untaken = rank < waiting[numbers]
            end = len(own) - int(np.argmin(untaken[::-1])) if len(own) and not untaken.all() else 0
            pending.append(own[:end][untaken[:end]])
            drawn.append(start + end)
        return pending, drawn

    # ---- blocks ----

    def _documents_of(self, part: _Part) -> np.ndarray:
        return self._documents(part, 0, self._left(part))

    def _documents(self, part: _Part, start: int, stop: int, number: int = 0) -> np.ndarray:
        """Return the documents start .. stop - 1 of a stream in a part. Without weights ascending, and without those
        that a last pass leaves out."""
        waiting = part.pending[number]
        places = [max(place - len(waiting), 0) for place in (start, stop)]
        documents = np.concatenate([waiting[start:stop], part.streams[number].documents(*places)])
        segment = self._segments[part.segment]
        if self._weighted:
            return documents
        for source in segment.sources:
            last, share = _last_pass(source)
            if share < last:
                place = documents - (self._starts[source.name] + source.documents - last)
                passes = (place >= 0) & (place < last)
                key = key_of(segment.seed, _number(source.name), part.streams[0].epoch)
                kept = ~passes
                kept[passes] = permuted(place[passes], last, key) < share
                documents = documents[kept]
        return documents if segment.sources[0].order == "given" else np.sort(documents)

    def _plan_block(self, part: _Part, cursor: Cursor) -> _Block | None:
        """Plan a block without weights; None: all documents of the epoch were drawn."""
        total = self._left(part)
        start = cursor.documents[0]
        if start >= total:
            return None
        stop = min(start - (-total // self._blocks(part)), total)
        documents = self._documents(part, start, stop)
        layout = self._layouts[part.segment]
        seed = self._seed(part)
        rng = None
        if seed is not None:
            rng = np.random.default_rng([seed, cursor.epoch, start])
            documents = rng.permutation(documents)
        documents, counts = plan_rows(self._lengths, layout, self._row_length, documents, rng)
        tokens = cursor.tokens[0] + int(self._lengths[documents].sum())
        # Empty rows, evenly in each block, make the number of steps what it was said to be.
        rows = self._room(part) * tokens // part.work if self._packed else 0
        if stop == total:
            rows = self._steps(part) * self._rows(part)
        spare = max(0, rows - cursor.rows - len(counts))
        if stop == total and (late := cursor.rows + len(counts) - rows) > 0:
            log.warning(hint("rows for the next epoch", late=late, epoch=cursor.epoch))
        counts = np.insert(counts, np.arange(spare) * len(counts) // max(spare, 1), 0)
        return _Block(
            documents, counts, Cursor(part.first, cursor.epoch, cursor.rows + len(counts), (stop,), (tokens,))
        )

    def _plan_mixed(self, part: _Part, cursor: Cursor) -> _Block | None:
        """Plan a block with weights; None: every source has ended.

        A document of n positions takes n / weight of its source's time, and documents come in the order of the middles
        of their times: at any moment each source has had the share that it should have, to within a document.
        """
        segment = self._segments[part.segment]
        sources = self._sources(segment)
        # In a block of many passes over all data short documents of later ones would fill rows of earlier ones.
        size = min(self._block, max(sum(source.documents for source in sources), _FEWEST))
        # More documents than a source will give, by its mean length; a source that gives all of them ends the block.
        means = self._means[part.segment]
        rates = np.array([(source.weight or 0.0) / mean for source, mean in zip(sources, means, strict=True)])
        found = []
        horizon = math.inf
        for k, (source, rate) in enumerate(zip(sources, rates / max(rates.sum(), 1e-300), strict=True)):
            start = cursor.documents[k]
            stop = start + int(size * rate * 1.1) + 64
            ends = int(min(stop, self._given_by(part, k, source))) if source.weight and source.documents else start
            documents = self._documents(part, start, ends, k)
            lengths = self._lengths[documents]
            until = cursor.tokens[k] + np.cumsum(lengths)
            middles = (until - lengths / 2) / (source.weight or 1.0)
            if ends == stop:
                horizon = min(horizon, middles[-1])
            found.append((documents, lengths, middles, np.full(len(documents), k)))
        documents, lengths, middles, stream = map(np.concatenate, zip(*found, strict=True))
        chosen = np.argsort(middles, kind="stable")[:size]
        chosen = chosen[middles[chosen] <= horizon]
        if not len(chosen):
            return None
        count = len(sources)
        documents_after = np.bincount(stream[chosen], minlength=count) + cursor.documents
        tokens_after = np.bincount(stream[chosen], lengths[chosen], minlength=count).astype(np.int64) + cursor.tokens
        layout = self._layouts[part.segment]
        # Rows stay in the order in which they were opened, so the shares hold in every step.
        documents, counts = plan_rows(self._lengths, layout, self._row_length, documents[chosen], None)
        epoch = min(
            stream.passed(max(0, int(n) - len(waiting))).epoch
            for stream, n, waiting, source in zip(part.streams, documents_after, part.pending, sources, strict=True)
            if source.documents
        )
        drawn = tuple(documents_after.tolist()), tuple(tokens_after.tolist())
        return _Block(documents, counts, Cursor(part.first, epoch, cursor.rows + len(counts), *drawn))

    @staticmethod
    def _given_by(part: _Part, number: int, source: SourcePlan) -> float:
        """Return the documents that a source gives in a part, by its max_epochs."""
        if source.max_epochs is None:
            return math.inf
        stream = part.streams[number]
        rest = (source.max_epochs - stream.epoch - 1) * source.documents + stream.left
        return len(part.pending[number]) + max(0, rest)

    # ---- steps ----

    def batches(self, first_step: int, last_step: int) -> Iterator[Step]:
        """Yield steps first_step + 1 .. last_step. Blocks are planned one ahead, in a thread."""
        chunks = self.chunks(first_step, last_step)
        with ThreadPoolExecutor(1, "plans") as pool:
            following = pool.submit(next, chunks, None)
            while (chunk := following.result()) is not None:
                following = pool.submit(next, chunks, None)
                yield from chunk

    def _chunks_of(self, part: _Part, step: int, end: int) -> Iterator[list[Step]]:
        """Yield the steps step + 1 .. end of a part in blocks; a batch on a border is counted in the later block."""
        if self._blocks(part) == 1:
            yield from super()._chunks_of(part, step, end)
            return
        size = self._rows(part)
        layout = self._layouts[part.segment]
        cursor = _last(part.cursors, (step - part.first) * size)
        skipped = (step - part.first) * size - cursor.rows
        documents = counts = np.zeros(0, np.int64)
        while step < end:
            block = self._block_at(part, cursor)
            if block is None:
                raise config_error("sources end", step=step)
            if block.after.rows > part.cursors[-1].rows:
                part.cursors.append(block.after)
            gone = min(skipped, len(block.counts))
            skipped -= gone
            documents = np.concatenate([documents, block.documents[block.counts[:gone].sum() :]])
            counts = np.concatenate([counts, block.counts[gone:]])
            rows = min(len(counts) // size, end - step) * size
            used = counts[:rows].sum()
            batches = global_batches(self._lengths, layout, self._row_length, documents[:used], counts[:rows])
            yield [(n, cursor.epoch, batch) for n, batch in enumerate(batches, step + 1)]
            step += len(batches)
            documents = documents[used:]
            counts = counts[rows:]
            cursor = block.after

    def first_batches(self) -> tuple[list[GlobalBatch], int]:
        """See Order."""
        part = self._first_part()
        if self._blocks(part) == 1:
            return super().first_batches()
        rows = math.ceil(sum(self.tokens) * self.rows_of_work)
        steps = -(-rows // self._rows(part)) if self._weighted else self._steps(part)
        first = next(chunk for chunk in self._chunks_of(part, 0, LARGEST) if chunk)
        return [batch for _, _, batch in first], steps

    def forecast(self, steps: int) -> list[tuple[float, int | None]]:
        """See Order."""
        if not self._weighted:
            return super().forecast(steps)
        tokens = np.maximum(np.array(self.tokens, float), 1.0)
        taken = np.zeros(len(tokens))
        ended: list[int | None] = [None] * len(tokens)
        step = 0.0
        starts = [segment.after_step for segment in self._segments[1:]]
        for i, end in enumerate([*starts, steps]):
            sources = self._sources(self._segments[i])
            most = tokens * [source.max_epochs or math.inf for source in sources]
            weights = np.array([source.weight or 0.0 for source in sources])
            per_step = self._layouts[i].rows(self._row_length) / self.rows_of_work
            while step < min(end, steps):
                weights[taken >= most * (1 - 1e-9)] = 0.0
                if not weights.any():
                    raise config_error("sources end", step=round(step))
                rates = weights / weights.sum() * per_step
                times = (most - taken)[weights > 0] / rates[weights > 0]
                span = min(min(end, steps) - step, times.min())
                taken += rates * span
                step += span
                for k in np.flatnonzero((weights > 0) & (taken >= most * (1 - 1e-9))):
                    ended[k] = round(step)
        return list(zip((taken / tokens).tolist(), ended, strict=True))

    def state(self, step: int) -> list[Cursor]:
        """See Order."""
        self._part(0)
        last = max((i for i, part in enumerate(self._parts) if part.first <= step), default=0)
        first = last
        while first and (self._weighted or not self._parts[first].begins_an_epoch):
            first -= 1
        parts = self._parts[first : last + 1]
        ends = [*(part.first for part in parts[1:]), step]
        return [_last(p.cursors, (end - p.first) * self._rows(p)) for p, end in zip(parts, ends, strict=True)]


class BucketOrder(Order):
    """The global batches of bucketed rows where an epoch is larger than a block. Each bucket has its own permutation,
    and so have the batches of all, so any step is planned alone and the number of steps is exact."""

    _every: tuple[np.ndarray, np.ndarray] | None = None
    "documents of whole epochs by their bucket, int32, and the number in each"

    def _plan_epoch(self, part: Steps) -> Sequence[GlobalBatch]:
        """Return the batches of an epoch, or of its rest, each planned when it is asked for."""
        layout = self._layouts[part.segment]
        sources = self._segments[part.segment].sources
        if (sum(one.documents for one in sources) if part.left is None else len(part.left)) <= self._block:
            return super()._plan_epoch(part)  # as in a run whose data has grown since
        whole = part.left is None and len(self._segments) == 1
        if (found := self._every if whole else None) is None:
            documents = self._documents_of(part).astype(np.int32)
            bucket = np.searchsorted(layout.row_lengths, self._lengths[documents]).astype(np.uint8)
            found = documents[np.argsort(bucket, kind="stable")], np.bincount(bucket, minlength=len(layout.row_lengths))
            self._every = found if whole else None
        return _Bucketed(self._lengths, layout, found[0], found[1], self._seed(part), part.epoch)

    def _chunks_of(self, part: Steps, step: int, end: int) -> Iterator[list[Step]]:
        planned = self._planned(part)
        for first in range(step, end, _CHUNK):
            batches = planned[first - part.first : min(first + _CHUNK, end) - part.first]
            yield [(number, part.epoch, batch) for number, batch in enumerate(batches, first + 1)]

    def first_batches(self) -> tuple[list[GlobalBatch], int]:
        """See Order."""
        planned = self._planned(self._first_part())
        documents = len(self._lengths) // len(planned)
        return list(planned[: max(1, BLOCK // max(documents, 1))]), len(planned)


@dataclass(frozen=True, eq=False)
class _Bucketed(Sequence[GlobalBatch]):
    """The batches of an epoch of bucketed rows, by their place in it."""

    lengths: np.ndarray
    layout: Layout
    documents: np.ndarray
    "by their bucket"
    counts: np.ndarray
    "documents of each bucket"
    seed: int | None
    epoch: int

    @cached_property
    def _ends(self) -> np.ndarray:
        """Return the number of batches of each bucket and those before it."""
        return np.cumsum(-(-self.counts // [self.layout.rows(length) for length in self.layout.row_lengths]))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        number = int(self._moved(np.array([at]), len(self), 0)[0])
        k = int(np.searchsorted(self._ends, number, "right"))
        row_length = self.layout.row_lengths[k]
        rows = self.layout.rows(row_length)
        start = (number - (self._ends[k - 1] if k else 0)) * rows
        places = self._moved(np.arange(start, min(start + rows, self.counts[k])), int(self.counts[k]), k + 1)
        documents = self.documents[self.counts[:k].sum() + places].astype(np.int64)
        counts = np.repeat((1, 0), (len(places), rows - len(places)))
        return global_batches(self.lengths, self.layout, row_length, documents, counts)[0]

    def _moved(self, places: np.ndarray, size: int, number: int) -> np.ndarray:
        return places if self.seed is None else permuted(places, size, key_of(self.seed, number, self.epoch))


def _number(name: str) -> int:
    """Return the number of a source in its permutations, which stays when others come before it."""
    return zlib.crc32(name.encode())


def _last(cursors: Sequence[Cursor], rows: int) -> Cursor:
    """Return the last cursor with at most `rows` rows before it."""
    return max((cursor for cursor in cursors if cursor.rows <= rows), key=lambda cursor: cursor.rows)


def _last_pass(source: SourcePlan) -> tuple[int, int]:
    """Return the documents of the last pass over a source in an epoch, and how many of them an epoch takes."""
    copies = math.ceil(source.repeat)
    documents = source.documents // copies
    return documents, round(documents * (source.repeat - copies + 1))
