"""Fill a store: find the shards of a source that are missing, make them, or wait for the process that makes them.

Which rows make a shard follows from the first rows of the source alone, so all processes agree. Processes with a store
in common make different shards; of a node, one process makes and the others wait.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from sftkit.config.schema import SourceConfig, source_label
from sftkit.data.reading.readers import RawRow
from sftkit.data.store.shards import RowSpan, Shard, Store
from sftkit.errors import ConfigError, hint
from sftkit.rundir.files import make_folder, read_object, replace_shared
from sftkit.runtime.script import working

if TYPE_CHECKING:
    from sftkit.data.store.writing import TokenizedRows

CHUNK_ROWS = 512
"Rows that are tokenized at a time, by one process."
SHARD_CHARACTERS = 2**27
"Characters of rows that make some 2**25 tokens, a shard: at the end of each, processes wait for one another."
MOST_ROWS = 2**20
"Rows of a shard, whatever they hold."
POLL_SECONDS = 0.2
STORE_FILE = "store.json"
"What decides the tokens of a store, and the rows of a shard."

log = logging.getLogger(__name__)
ReadRows = Callable[[], Iterator[RawRow]]
TokenizeChunks = Callable[[Iterable[tuple[int, list[RawRow]]]], Iterator["TokenizedRows"]]
"Takes chunks of rows, each with the number of its first row."


@dataclass(frozen=True)
class Peers:
    """What a process has to do with others of its run that need the same shards."""

    makes: bool = True
    "False: another process of this node makes them, and this one waits."
    alone: bool = True
    "Nobody waits for this process, so that what the disk has no room for may stay in memory."
    look: Callable[[], bool] = lambda: False
    """Called now and then; raises the error of another process that failed. True: the process of this node that makes
    shards has made all, so that what cannot be seen must be made here."""


NO_PEERS = Peers()
DIFFERS = "differs"
"Key of store.json: place of a row whose result differs when it is tokenized alone, so shards may be wrong."


class RowsDiffer(Exception):
    """The result of a row, which is named, differs when the row is tokenized alone."""


def read_about(store: Store) -> dict[str, Any]:
    """Return store.json; empty if it is not there."""
    return read_object(store.folder / STORE_FILE)


def write_about(store: Store, about: dict[str, Any]) -> None:
    """Write store.json, unless the disk is full: it is found out again at each start."""
    with suppress(OSError):
        make_folder(store.folder)
        replace_shared(store.folder / STORE_FILE, json.dumps(about, indent=1, sort_keys=True))


def rows_per_shard(store: Store, rows: ReadRows, about: dict[str, Any]) -> int:
    """Return how many rows of a source make a shard, from store.json, or from its first rows, which decide it."""
    if known := read_about(store).get("rows"):
        return int(known)
    sizes = [len(str(raw[1])) for raw in islice(rows(), CHUNK_ROWS)]
    mean = max(sum(sizes) / max(len(sizes), 1), 1.0)
    found = min(max(int(SHARD_CHARACTERS / mean / CHUNK_ROWS), 1) * CHUNK_ROWS, MOST_ROWS)
    write_about(store, {**about, "rows": found})
    return found


def shards_of(
    store: Store,
    source: SourceConfig,
    rows: ReadRows,
    span: tuple[int, int | None],
    tokenize: TokenizeChunks,
    *,
    per_shard: int,
    peers: Peers = NO_PEERS,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Shard]:
    """Yield the shards of some rows of a source when they are there, in any order.

    Args:
        rows: yields all rows of the source.
        span: the first row, and one past the last; None: to the end.
        check: called before a shard counts as made; raises a DataError if the source is not what it was.

    Raises:
        ConfigError: the disk is full. DataError: a bad row. RowsDiffer: rows must be tokenized by themselves.
    """
    spans = partial(_spans, store, past=span[1], per_shard=per_shard)
    stream = _Stream(store, _Reader(rows), spans, tokenize)

    def made(one: RowSpan) -> tuple[Shard | None, bool]:
        """Return the shard, None if the source ends before it; and whether no other process is making it."""
        if not stream.claim(one):
            return None, False
        try:
            return store.find(one, said=True) or _make(store, source, one, stream, peers, check), True
        finally:
            stream.locks.pop(one).close()

    with closing(stream):
        made_elsewhere: list[RowSpan] = []
        for one, part in spans(span[0]):
            shard = part or store.find(one)
            if shard is None and not peers.makes:
                shard = _wait(store, one, peers)
            known = shard is not None
            if not known:
                shard, known = made(one)
            if shard is not None:
                yield shard
            if not known:
                made_elsewhere.append(one)
            elif shard is None or shard.ends:
                break
        for one in made_elsewhere:
            known = False
            while not known:
                shard = _wait(store, one, peers)
                known = shard is not None
                if not known:  # its maker is gone
                    shard, known = made(one)
            if shard is not None:
                yield shard


def _spans(store: Store, first: int, past: int | None, per_shard: int) -> Iterator[tuple[RowSpan, Shard | None]]:
    """Yield the rows of each shard from a row on: whole ones, and at the borders of a slice parts of them, each with
    what another shard on disk has of it."""
    while past is None or first < past:
        end = (first // per_shard + 1) * per_shard
        rows = RowSpan(first, end if past is None else min(end, past))
        is_known = rows.past - first == per_shard or rows in store.lines()
        near = [] if is_known else [one for one in store.lines() if one.first < rows.past and first < one.past]
        shards = filter(None, (store.find(one, said=True) for one in near))
        parts = filter(None, (shard.part(rows) for shard in shards))
        largest = max(parts, key=lambda part: int(part.line["rows"]), default=None)
        if largest is None:
            yield rows, None
            first = rows.past
        else:
            if first < largest.span.first:
                yield RowSpan(first, largest.span.first), None
            yield largest.span, largest
            first = largest.span.past


class _Reader:
    """Reads the rows of a source in order, again from the beginning where it must go back."""

    def __init__(self, rows: ReadRows) -> None:
        self._rows = rows
        self._iterator: Iterator[RawRow] = iter(())
        self._next: int | None = None
        "number of the row that is read next; None: not begun"

    def reaches(self, row: int) -> bool:
        """Go to a row; return whether the source has that many rows."""
        if self._next is None or self._next > row:
            self._iterator = iter(self._rows())
            self._next = 0
        self._next += sum(1 for _ in islice(self._iterator, row - self._next))
        return self._next == row

    def chunks(self, span: RowSpan) -> Iterator[tuple[int, list[RawRow]]]:
        """Yield the rows of a span in chunks, each with the number of its first row."""
        if not self.reaches(span.first):
            return
        for first in range(span.first, span.past, CHUNK_ROWS):
            chunk = list(islice(self._iterator, min(CHUNK_ROWS, span.past - first)))
            self._next = first + len(chunk)
            if chunk:
                yield first, chunk
            if self._next < min(first + CHUNK_ROWS, span.past):
                return


class _Stream:
    """Tokenizes the shards that this process makes, one after the other. Rows are read on into the shards after the one
    that is being written, so that processes which tokenize never wait for the end of a shard."""

    def __init__(
        self,
        store: Store,
        reader: _Reader,
        spans: Callable[[int], Iterator[tuple[RowSpan, Shard | None]]],
        tokenize: TokenizeChunks,
    ) -> None:
        """Take nothing in hand yet. `spans`: as _spans, of all shards from a row on."""
        self.locks: dict[RowSpan, ExitStack] = {}
        "of the shards that are read or written"
        self._store = store
        self._reader = reader
        self._spans = spans
        self._tokenize = tokenize
        self._parts: Iterator[TokenizedRows] | None = None
        self._read: deque[RowSpan] = deque()
        "shard of each chunk whose part was not taken yet"
        self._first = -1
        "row with which the shard begins that is read"

    def claim(self, one: RowSpan) -> bool:
        """Take the lock of a shard; False: another process has it."""
        from sftkit.data.store import writing

        with ExitStack() as stack:
            if one not in self.locks and stack.enter_context(writing.claim(self._store, one)):
                self.locks[one] = stack.pop_all()
        return one in self.locks

    def close(self) -> None:
        """Release all locks."""
        while self.locks:
            self.locks.popitem()[1].close()

    def _chunks(self, first: RowSpan) -> Iterator[tuple[int, list[RawRow]]]:
        later = (one for one, part in self._spans(first.past) if part is None)
        for one in chain([first], later):
            if one not in self.locks and (self._store.find(one, said=True) or not self.claim(one)):
                continue
            if not self._reader.reaches(one.first):
                return
            self._first = one.first
            left = one.past - one.first
            for chunk in self._reader.chunks(one):
                self._read.append(one)
                left -= len(chunk[1])
                yield chunk
            if left:
                return

    def parts(self, one: RowSpan, *, again: bool = False) -> Iterator[TokenizedRows] | None:
        """Return the parts of a shard that is claimed; None: the source ends before it. `again`: from its first row,
        though some were taken."""
        if again or self._parts is None or (one not in self._read and self._first >= one.first):
            self._read.clear()
            self._first = -1
            self._parts = self._tokenize(self._chunks(one))
        found = next(self._parts, None)
        if found is None:
            return iter(()) if self._first == one.first else None
        if self._read[0] != one:  # its lock was free only after rows of a later shard were read
            return self.parts(one, again=True)

        def rest(left: int) -> Iterator[TokenizedRows]:
            assert self._parts is not None
            self._read.popleft()
            while left > 0 and (part := next(self._parts, None)) is not None:
                self._read.popleft()
                left -= len(part.where)
                yield part

        return chain([found], rest(one.past - one.first - len(found.where)))


def _make(
    store: Store, source: SourceConfig, span: RowSpan, stream: _Stream, peers: Peers, check: Callable[[], None]
) -> Shard | None:
    """Make a shard; None if the source ends before it."""
    from sftkit.data.store import writing  # most starts find all shards

    def checked(parts: Iterator[TokenizedRows]) -> Iterator[TokenizedRows]:
        for part in parts:
            if part.differs:
                raise RowsDiffer(part.differs)
            peers.look()
            for one in stream.locks:
                writing.renew(store, one)
            yield part
        check()

    begins = f", from row {span.first:,}" if span.first else ""
    with working(f"tokenizing {source_label(source)}{begins}"):
        parts = stream.parts(span)
        if parts is None:
            return None
        try:
            return writing.write_shard(store, span, checked(parts), source.path, on_disk=True)
        except OSError as error:
            if not peers.alone:
                raise ConfigError(hint("full data cache", folder=str(store.folder), error=str(error))) from error
            log.warning("%s: cannot write the cache (%s), every start will tokenize", store.folder, error)
            again = stream.parts(span, again=True) or iter(())
            return writing.write_shard(store, span, checked(again), source.path, on_disk=False)


def _wait(store: Store, span: RowSpan, peers: Peers) -> Shard | None:
    """Wait for a shard that another process makes; None: this one must make it."""
    from sftkit.data.store import writing

    while (shard := store.find(span, said=True)) is None:
        if where := read_about(store).get(DIFFERS):
            raise RowsDiffer(where)
        done = peers.look()
        if done or (peers.makes and not writing.is_claimed(store, span)):
            return None
        time.sleep(POLL_SECONDS)
    return shard
