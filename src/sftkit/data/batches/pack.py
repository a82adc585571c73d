"""The layout of a run: the row shapes that it declares up front, and best-fit packing of documents into rows.

`choose_buckets` finds the row lengths that waste least on the data at hand, by an exact dynamic programme.
"""

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.errors import ConfigError, config_error
from sftkit.runtime.script import counted

log = logging.getLogger(__name__)
_MULTIPLE = 8  # of the row lengths of buckets


def choose_buckets(
    lengths: np.ndarray, k: int, max_length: int, rows_in_batch: Callable[[int], int] = lambda _: 1
) -> tuple[int, ...]:
    """Return at most k row lengths, ascending, in which an epoch of one document per row takes the fewest positions.

    Candidates are the lengths that occur, rounded up to multiples of 8 and to max_length at most; the last one chosen
    holds the longest document. A row goes to its smallest bucket, and batches of `rows_in_batch(row_length)` rows are
    filled up with empty ones. O(k M^2) for M candidates, as one vector operation per candidate and bucket.

    Args:
        lengths: int [D], positions of each document, none above max_length.
    """
    candidates, counts = np.unique(np.minimum(-(-lengths // _MULTIPLE) * _MULTIPLE, max_length), return_counts=True)
    docs = np.concatenate([[0], np.cumsum(counts)])  # docs[j]: documents of the first j candidates
    # least[j]: positions of those documents in the best buckets found so far, the last of them candidate j - 1
    least = np.array([0, *(_positions(docs[j : j + 1], c, rows_in_batch)[0] for j, c in enumerate(candidates, 1))])
    splits = []  # for each further bucket, by j: how many of the first j candidates the buckets before it hold
    for _ in range(1, min(k, len(candidates))):
        split = [0]
        better = [0]
        for j, c in enumerate(candidates, 1):
            totals = least[:j] + _positions(docs[j] - docs[:j], c, rows_in_batch)
            split.append(int(totals.argmin()))
            better.append(int(totals[split[j]]))
        splits.append(split)
        least = np.array(better)
    ends = [len(candidates)]
    for split in reversed(splits):
        ends.append(split[ends[-1]])  # split[0] is 0: fewer buckets were enough
    return tuple(int(candidates[j - 1]) for j in reversed(ends) if j)


def _positions(documents: np.ndarray, row_length: np.integer, rows_in_batch: Callable[[int], int]) -> np.ndarray:
    """Return the positions of the whole batches that hold these documents, one per row."""
    rows = rows_in_batch(int(row_length))
    return -(-documents // rows) * rows * int(row_length)


OPEN_ROWS = 1024  # rows that best-fit keeps open: enough for > 99 % filled rows, and the shuffle stays a shuffle
_SAMPLE = 100_000  # documents packed on trial, 0.07 s
NUM_BUCKETS = 4  # row lengths of a bucketed layout, unless the recipe sets the number
PAD_MULTIPLE = 8  # of the row lengths of a dynamic layout, unless the recipe sets it
FULL_OF_INPUTS = 0.95  # share of the places for encoder inputs that must be filled: empty ones cost more than padding
SHORTEST_ROW = 8  # of a dynamic batch: torch.compile makes graphs of their own for sizes 0 and 1


@dataclass(frozen=True)
class BatchShape:
    """The sizes that a batch declares besides the number of its rows, whatever documents are in them."""

    row_length: int
    "T, positions of a row"
    max_docs: int
    "D, document slots of the batch, those for padding included"
    max_doc_length: int
    "no document is longer; also the most that one padding document covers"
    docs_per_row: int | None = None
    "K, encoded inputs of a row, of examples that have any; None: as many as the rows of a batch need"
    adapters: tuple[int, ...] = ()
    "with several adapters: the adapter of each share of the rows"
    tree: bool = False
    "rows hold prefix trees of documents; D and max_doc_length count trees"


@dataclass(frozen=True)
class Layout:
    """The row shapes that a run declares, and the number of rows of each in a global batch and a micro-batch."""

    kind: str
    row_lengths: tuple[int, ...]
    "ascending; dynamic: only those of the warm-up"
    global_batch_size: int
    micro_batch_size: int
    world_size: int
    max_length: int
    "most positions of a document; rows of a packed or tree layout may be longer"
    max_doc_length: int
    "length of the longest document, tree: of the largest tree, which attention kernels need"
    docs_per_row: int = 1
    "the most documents in a row, tree: trees"
    budget_rows: int = 1
    """bucketed: n rows of max_length are replaced by as many shorter rows as fit in their positions; the same on any
    number of ranks"""
    pad_multiple: int = 1
    "dynamic: what row lengths are a multiple of"
    encoded: bool = False
    "each document has an input for an encoder, for which a row has docs_per_row places"
    shares: int = 0
    "with several adapters: number of those that share the rows of a micro-batch equally; 0: there is one model"

    @property
    def dynamic(self) -> bool:
        """Return whether row lengths other than `row_lengths` occur."""
        return self.kind == "dynamic"

    @property
    def packs(self) -> bool:
        """Return whether a row holds several documents, or several trees of documents."""
        return self.kind in ("packed", "tree")

    @property
    def accumulation(self) -> int:
        """Return the number of micro-batches per optimizer step on each rank."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    def rows(self, row_length: int) -> int:
        """Return how many rows of this length a global batch has, whatever the world size: for buckets as many as
        the budget allows."""
        if self.kind != "bucketed":
            return self.global_batch_size
        return self.budget_rows * self.max_length // row_length * (self.global_batch_size // self.budget_rows)

    def micro_rows(self, row_length: int) -> int:
        """Return how many rows of this length a micro-batch has; the last ones of a global batch may be empty rows."""
        return -(-self.rows(row_length) // (self.accumulation * self.world_size))

    def positions(self, row_length: int) -> int:
        """Return the row positions that one optimizer step computes over all ranks, padding included."""
        return row_length * self.micro_rows(row_length) * self.accumulation * self.world_size

    def max_docs(self, rows: int, row_length: int) -> int:
        """Return the document slots of a micro-batch: each row's documents, and its padding in
        chunks of max_doc_length."""
        chunks_of_padding = -(-row_length // self.max_doc_length)
        return rows * (self.docs_per_row + chunks_of_padding)

    def batch_shape(self, rows: int, row_length: int) -> BatchShape:
        """Return what a batch of `rows` rows of this length declares."""
        slots = self.max_docs(rows, row_length)
        shares = tuple(range(self.shares))
        return BatchShape(row_length, slots, self.max_doc_length, self.docs_per_row, shares, self.kind == "tree")

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Return every (rows, row_length) of a micro-batch; for dynamic layouts the two from which the graph
        is made symbolic."""
        return tuple((self.micro_rows(t), t) for t in self.row_lengths)

    def declares(self, rows: int, row_length: int) -> bool:
        """Return whether a micro-batch may have this shape. No other shape reaches the compiled model."""
        if self.dynamic:
            return rows == self.micro_batch_size and row_length == self.padded(row_length) <= self.max_length
        return (rows, row_length) in self.shapes

    def padded(self, longest: int) -> int:
        """Return the row length of a dynamic batch whose longest document has `longest` positions."""
        return -(-max(longest, SHORTEST_ROW) // self.pad_multiple) * self.pad_multiple


class SourcePlan(NamedTuple):
    """A source as far as the order of documents depends on it."""

    name: str
    documents: int
    "those of all passes of an epoch"
    weight: float | None = None
    "share of tokens, over the sum of all; None: the run has no weights"
    max_epochs: int | None = None
    repeat: float = 1
    order: str = "global"
    "how documents follow one another: global, window or given"


class PlanSegment(NamedTuple):
    """Steps of a run whose global batches are made alike: from one step on until the next segment begins."""

    after_step: int
    "it begins with the step after this one"
    seed: int
    global_batch_size: int
    budget_rows: int
    sources: tuple[SourcePlan, ...] = ()
    "of the data; (): as one source, as checkpoints of earlier versions had it"


def make_layout(
    data: DataConfig,
    train: TrainConfig,
    lengths: np.ndarray,
    max_length: int,
    world_size: int = 1,
    earlier: Sequence[PlanSegment] = (),
    *,
    encoded: bool = False,
) -> Layout:
    """Return the layout of a run, from the recipe and the lengths of its training documents; equal on all ranks.

    The micro-batch is lowered to the largest that divides a rank's share of the global batch.

    Args:
        lengths: int [D], positions of each training document, or of each of their trees, equal on all ranks.
        max_length: most positions of a document, from the recipe or from the run that the model comes from.
        encoded: each document has an input for an encoder.
        world_size: groups of processes that hold different rows.
        earlier: plan segments of the resumed checkpoint. Buckets stay those that the run began with. Their numbers of
            rows change only with the global batch, so that another micro-batch leaves the global batches as they are.
    """
    share = train.global_batch_size // world_size
    # Lowered to a divisor, so that all micro-batches have one size.
    micro = largest_divisor(share, train.micro_batch_size)
    if micro != train.micro_batch_size:
        words = f"the largest number up to {train.micro_batch_size} that divides {share}"
        log.info("micro-batch of %s: %s", counted(micro, "row"), words)
    plain = Layout(
        data.layout,
        (max_length,),
        train.global_batch_size,
        micro,
        world_size,
        max_length,
        max_doc_length=max_length,
        budget_rows=largest_divisor(train.global_batch_size, train.micro_batch_size),
        pad_multiple=data.pad_multiple or PAD_MULTIPLE,
        encoded=encoded,
    )
    # A resumed run keeps the budget, so that another micro-batch leaves the global batches as they are.
    if earlier and earlier[-1].global_batch_size == train.global_batch_size:
        plain = replace(plain, budget_rows=earlier[-1].budget_rows)
    if plain.packs:
        return _packed(plain, data.row_length or max_length, lengths)
    if data.layout == "bucketed":
        # Buckets are chosen with the batch sizes that the run began with.
        begun = earlier[0] if earlier else plain
        first = replace(plain, global_batch_size=begun.global_batch_size, budget_rows=begun.budget_rows)
        buckets = data.bucket_lengths
        if buckets is None:
            buckets = choose_buckets(lengths, data.num_buckets or NUM_BUCKETS, max_length, rows_in_batch=first.rows)
        elif buckets[-1] != max_length:
            problem = f"data.bucket_lengths: the last one, {buckets[-1]}, must be data.max_length, {max_length}"
            raise ConfigError(problem)
        return replace(plain, row_lengths=buckets)
    if data.layout == "dynamic":
        if max_length % plain.pad_multiple:
            below = max_length // plain.pad_multiple * plain.pad_multiple
            wanted = below or plain.pad_multiple
            multiple = plain.pad_multiple
            raise config_error("max_length of dynamic rows", max_length=max_length, multiple=multiple, wanted=wanted)
        # The warm-up has the longest row and one of half its length.
        half = plain.padded(max_length // 2)
        return replace(plain, row_lengths=(half, max_length) if half < max_length else (max_length,))
    return plain


def validation_layout(layout: Layout, lengths: np.ndarray) -> Layout:
    """Return a run's layout for other documents of at most its max_length, in global batches of one
    micro-batch per rank. Trees are for training: rows of trees become packed rows."""
    micro = layout.micro_batch_size
    kind = "packed" if layout.packs else layout.kind
    layout = replace(layout, kind=kind, global_batch_size=micro * layout.world_size, budget_rows=micro, shares=0)
    if layout.kind == "packed":
        return _packed(layout, layout.row_lengths[-1], lengths)
    if lengths.max() > layout.row_lengths[-1]:
        return replace(layout, row_lengths=(*layout.row_lengths, layout.max_length))
    return layout


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` up to `limit`."""
    return max(d for d in range(1, min(limit, number) + 1) if number % d == 0)


def _packed(plain: Layout, row_length: int, lengths: np.ndarray) -> Layout:
    """Return a packed layout, with document slots and longest document as the data needs them."""
    if row_length < plain.max_length:
        raise config_error("short rows", row_length=row_length, max_length=plain.max_length)
    return replace(
        plain,
        row_lengths=(row_length,),
        docs_per_row=(_inputs_per_row if plain.encoded else _docs_per_row)(lengths, row_length),
        max_doc_length=min(-(-int(lengths.max()) // 128) * 128, row_length),
    )


def _sample(lengths: np.ndarray) -> np.ndarray:
    """Return the documents that are packed on trial."""
    rng = np.random.default_rng(0)
    if len(lengths) <= 2**17:
        return rng.permutation(len(lengths))[:_SAMPLE]
    return rng.choice(len(lengths), _SAMPLE, replace=False, shuffle=False)  # without an array of all


def _docs_per_row(lengths: np.ndarray, row_length: int) -> int:
    """Return the document slots of a row: twice the mean number of documents, doubled as long as this limit takes more
    than 0.5 % more rows, as it may in a mix of short and long documents.

    Slots are tight because attention kernels launch work for each of them, used or not.
    """
    cap = max(8, -(-int(2 * row_length / lengths.mean()) // 8) * 8)
    sample = _sample(lengths)
    fewest = len(pack(lengths, sample, row_length, row_length))
    while len(pack(lengths, sample, row_length, cap)) > 1.005 * fewest:
        cap *= 2
    return cap


def _inputs_per_row(lengths: np.ndarray, row_length: int) -> int:
    """Return the most documents of a row, each with an encoded input, at which nearly all places for
    inputs are taken."""
    sample = _sample(lengths)
    # A binary search: the more places a row has, the smaller is the share of the places that is taken.
    low = 1
    high = max(1, min(int(2 * row_length / lengths.mean()), len(lengths)))
    while low < high:
        middle = (low + high + 1) // 2
        rows = len(pack(lengths, sample, row_length, middle))
        low, high = (middle, high) if len(sample) >= FULL_OF_INPUTS * rows * middle else (low, middle - 1)
    return low


def pack(
    lengths: np.ndarray, order: Sequence[int] | np.ndarray, row_length: int, docs_per_row: int
) -> list[tuple[int, ...]]:
    """Pack documents best-fit: each goes whole into the fullest open row that still holds it. Every index appears once.

    A row that holds `docs_per_row` documents is closed.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (space left, row), ascending
    for i, length in zip(np.asarray(order).tolist(), lengths[order].tolist(), strict=True):
        at = bisect.bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            space, row = open_rows.pop(at)
        else:
            space = row_length
            row = len(rows)
            rows.append([])
        rows[row].append(i)
        if space > length and len(rows[row]) < docs_per_row:
            bisect.insort(open_rows, (space - length, row))
            # The fullest of too many open rows is closed: it has the least room left to use.
            if len(open_rows) > OPEN_ROWS:
                open_rows.pop(0)
    return [tuple(row) for row in rows]
