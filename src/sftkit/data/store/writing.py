"""Write a shard of a store, as its only maker: its files under other names, then their names, then its line in the
manifest. No torch."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sftkit.data.reading import columns as findings
from sftkit.data.store import shards
from sftkit.data.types import TokenizedExample
from sftkit.rundir.files import alone, flush, make_folder, own_name, write_stamp
from sftkit.rundir.lock import Holder, pid_scope, process_start

LOCKS = "locks"
"An empty file, which the kernel locks while a lock of a shard is taken or removed."
ABANDONED_SECONDS = 120.0
"Age from which the lock of another machine counts as left behind: its holder renews it with every chunk of rows."


@dataclass
class TokenizedRows:
    """What became of some rows, one after the other."""

    ids: list[np.ndarray] = field(default_factory=list)
    "of each document, or `packed` of all"
    is_target: list[np.ndarray] = field(default_factory=list)
    docs: list[tuple[Any, ...]] = field(default_factory=list)
    "of each document the values of DOCS, `odd` with NOTED alone, `told` 0"
    answers: list[tuple[int, int]] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    odd: list[tuple[int, str]] = field(default_factory=list)
    "(row, reason of a data warning)"
    counts: Counter[str] = field(default_factory=Counter)
    tally: findings.Tally = field(default_factory=dict)
    where: list[str] = field(default_factory=list)
    "of each row"
    differs: str = ""
    "place of a row whose result differs when it is tokenized alone; empty: there is none"

    def add(self, one: TokenizedExample, row: tuple[Any, ...]) -> None:
        """Add a document; `row` has the values of DOCS that its row decides."""
        self.ids.append(one.ids)
        self.is_target.append(one.is_target)
        numbers = len(one.ids), one.size, np.count_nonzero(one.is_target), one.num_bytes, row[0], len(one.answers)
        self.docs.append((*numbers, *row[1:], 0))
        self.answers += one.answers
        if one.encoder_source:
            self.given.append(one.encoder_source)

    def packed(self, dtype: str) -> TokenizedRows:
        """Return the part with its tokens in one array, which a worker process hands over at once."""
        if self.ids:
            self.ids = [np.concatenate(self.ids).astype(dtype)]
            self.is_target = [np.concatenate(self.is_target)]
        return self


@contextmanager
def claim(store: shards.Store, span: shards.RowSpan) -> Iterator[bool]:
    """Take the lock of a shard for the block; False: another process, here or on another machine, makes it. The
    lock of a process that is gone is taken over, by one process at a time. Two makers, which there may be on a file
    system that cannot lock, would only work twice."""
    lock = store.folder / f"{span}.lock"
    own = json.dumps(asdict(Holder(*pid_scope(), os.getpid(), process_start(os.getpid()), time.time())))
    claimed = False
    with suppress(OSError):  # a full disk, or one that only others may write: the maker finds out
        make_folder(store.folder)
        with alone(store.folder / LOCKS):
            if not (claimed := is_claimed(store, span)):
                lock.unlink(missing_ok=True)
                temporary = own_name(lock)
                temporary.write_text(own)
                try:
                    os.link(temporary, lock)  # with its content, unless another process was faster
                except FileExistsError:
                    claimed = True
                finally:
                    temporary.unlink()
    try:
        yield not claimed
    finally:
        with suppress(OSError), alone(store.folder / LOCKS):
            if not claimed and lock.read_text() == own:
                lock.unlink()


def renew(store: shards.Store, span: shards.RowSpan) -> None:
    """Tell other machines that the shard is being made."""
    with suppress(OSError):
        os.utime(store.folder / f"{span}.lock")


def is_claimed(store: shards.Store, span: shards.RowSpan) -> bool:
    """Return whether a process that is not known to be gone makes a shard."""
    lock = store.folder / f"{span}.lock"
    try:
        age = time.time() - lock.stat().st_mtime
        holder = Holder(**json.loads(lock.read_text()))
    except (OSError, ValueError, TypeError):  # there is none, or a power failure has cut it off
        return False
    return holder.lives() if holder.is_here() else age < ABANDONED_SECONDS


def write_shard(
    store: shards.Store, span: shards.RowSpan, parts: Iterator[TokenizedRows], path: str, *, on_disk: bool
) -> shards.Shard:
    """Write the shard of some rows: its files, then its line.

    Args:
        parts: of its rows, in order.
        path: of the source, which texts are freed of.
        on_disk: False: keep it in memory.

    Raises:
        OSError: the disk is full.
    """
    if on_disk:
        make_folder(store.folder)
        for draft in store.folder.glob(f".{span}.*.tmp"):
            # Of a process that was killed, unless two took one shard at the same moment.
            if not Path(f"/proc/{draft.name.split('.')[-3]}").exists():
                draft.unlink(missing_ok=True)
    total = TokenizedRows()
    chunks: list[list[Any]] = []
    sinks: dict[str, _Sink] = {}

    def write(ending: str, raw: bytes) -> None:
        if ending not in sinks:
            sinks[ending] = _Sink(store.folder / f"{span}.{ending}" if on_disk else None)
        sinks[ending].add(raw)

    docs, answers = [], []
    left = np.zeros(0, bool)
    try:
        write("ids.bin", b"")
        for part in parts:
            if part.ids:
                write("ids.bin", part.ids[0].tobytes())
                bits = np.concatenate([left, *part.is_target])
                whole = len(bits) // 8 * 8
                write("mask.bin", np.packbits(bits[:whole], bitorder="little").tobytes())
                left = bits[whole:]
                docs.append(np.array(part.docs, shards.DOCS))
                answers.append(_told(docs[-1], part.is_target[0], np.array(part.answers, np.int64).reshape(-1, 2)))
            total.given += part.given
            total.odd += part.odd
            total.counts += part.counts
            total.where += part.where
            chunks.append([len(part.where), dict(+part.counts), []])
            for one in part.tally.values():
                chunks[-1][2].append((one.kind, one.reason, _freed(one.first, path), one.rows))
                findings.add(total.tally, *chunks[-1][2][-1])
        write("mask.bin", np.packbits(left, bitorder="little").tobytes())
        table = np.concatenate(docs) if docs else np.zeros(0, shards.DOCS)
        reasons = list(dict.fromkeys(reason for _, reason in total.odd))[: shards.MOST_REASONS]
        for row, reason in total.odd:
            if reason in reasons:
                table["odd"][slice(*np.searchsorted(table["row"], (row, row + 1)))] |= 1 << reasons.index(reason)
        if int(table["targets"].sum(dtype=np.int64)) == int(table["length"].sum(dtype=np.int64)) - len(table):
            sinks.pop("mask.bin").drop()
        arrays = _packed(table, span.first)
        arrays["answers.npy"] = _smallest(np.concatenate([np.zeros((0, 2), np.int64), *answers]))
        for ending, array in arrays.items():
            if ending == "docs.npy" or len(array):
                raw = io.BytesIO()
                np.save(raw, array, allow_pickle=False)
                write(ending, raw.getvalue())
        for ending, items in {"given.json": total.given, "chunks.json": chunks[1:] and chunks}.items():
            if items:
                write(ending, json.dumps(items).encode())
        line = {
            **span._asdict(),
            "rows": len(total.where),
            "documents": len(table),
            "tokens": int(table["length"].sum(dtype=np.int64)),
            "targets": int(table["targets"].sum(dtype=np.int64)),
            "lengths": np.bincount(np.ceil(np.log2(table["length"])).astype(int)).tolist(),
            "counts": dict(+total.counts),
            "findings": [asdict(one) for one in total.tally.values()],
            "odd": reasons,
            "where": _runs([_freed(one, path) for one in total.where], span.first),
            "files": {ending: sink.digest.hexdigest() for ending, sink in sorted(sinks.items())},
        }
        if not on_disk:
            contents = {ending: sink.file.getvalue() for ending, sink in sinks.items()}  # type: ignore[attr-defined]
            return shards.Shard(line, store.dtype, None, contents)
        for sink in sinks.values():
            sink.finish()
    finally:
        for sink in sinks.values():
            sink.drop()
    flush(store.folder)
    _append(store, line)
    names = [f"{span}.{ending}" for ending in line["files"]]
    store.keep_stamps({name: write_stamp(store.folder / name) for name in names})
    return shards.Shard(line, store.dtype, store.folder)


def _append(store: shards.Store, line: dict[str, Any]) -> None:
    """Append a line to the manifest if it is not there, after what a torn one has left is cut off."""
    text = json.dumps(line, sort_keys=True) + "\n"
    new = not (store.folder / shards.LINES_FILE).exists()
    with (store.folder / shards.LINES_FILE).open("a+b", buffering=0) as file:
        with suppress(OSError):  # a file system without locks: two writers write the same
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        lines: list[bytes] = file.read().splitlines(keepends=True)
        whole = b"".join([*takewhile(shards.is_whole, lines)])
        size = len(whole)
        if text.encode() not in whole:
            file.truncate(size)
            try:
                if file.write(text.encode()) < len(text.encode()):
                    raise OSError("no room for a line of the manifest")
            except OSError:
                file.truncate(size)
                raise
            os.fsync(file.fileno())
    if new:
        flush(store.folder)


def _packed(docs: np.ndarray, first: int) -> dict[str, np.ndarray]:
    """Return what the files of a shard keep of DOCS, by ending.

    Args:
        first: row of the shard.
    """
    length, size, row = (docs[name].astype(np.int64) for name in ("length", "size", "row"))
    cut_off = np.where(size > 0, size - length, -1)  # -1: a text
    repeating = np.column_stack([cut_off, *(docs[name] for name in ("answers", "odd", "told", "roles"))])
    repeating = np.ascontiguousarray(_smallest(repeating))
    # As bytes: the rows of an array are compared ten times as slowly.
    raw = repeating.view(f"V{repeating.itemsize * repeating.shape[1]}").ravel()
    _, at, kind = np.unique(raw, return_index=True, return_inverse=True)
    columns = {
        "length": length,
        "unlearned": length - docs["targets"],
        "bytes": docs["bytes"],
        "rows": np.diff(row, prepend=first),
        "kind": kind,
        # On which side of data.val_fraction a document falls: 2^-32 is as exact as any share, and two documents that
        # have these bytes in common may fall on one side. Copies are found by all 8 bytes of their content.
        "head": docs["head"] >> np.uint64(32),
        "content": docs["content"],
    }
    small = {name: _smallest(values) for name, values in columns.items()}
    packed = np.zeros(len(docs), [(name, one.dtype) for name, one in small.items()])
    for name, one in small.items():
        packed[name] = one
    return {"docs.npy": packed, "kinds.npy": repeating[at]}


def _smallest(values: np.ndarray) -> np.ndarray:
    """Return whole numbers in the smallest type that holds them all."""
    ends = (values.min(), values.max()) if values.size else (0, 0)
    return values.astype(np.result_type(*map(np.min_scalar_type, ends)).newbyteorder("<"))


def _told(docs: np.ndarray, is_target: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Set `told` of documents, and return the entries of .answers.npy: of documents whose answers are not their runs of
    targets."""
    owner = np.repeat(np.arange(len(docs)), docs["answers"])
    past = np.cumsum(docs["length"], dtype=np.int64)
    first = past - docs["length"]
    runs = shards.runs_of_targets(is_target)
    owner_of_run = np.searchsorted(past, runs[:, 0], side="right")
    same = np.bincount(owner_of_run, minlength=len(docs)) == docs["answers"]
    differ = (answers[same[owner]] != (runs - first[owner_of_run, None])[same[owner_of_run]]).any(1)
    same[owner[same[owner]][differ]] = False
    docs["told"] = np.where(same | (docs["answers"] == 0), -1, 0)
    return np.asarray(answers[~same[owner]])


class _Sink:
    """A file that is being written under another name, or in memory, with its sha256."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.temporary = None if path is None else own_name(path)
        self.file: BinaryIO = io.BytesIO() if self.temporary is None else self.temporary.open("wb")
        self.digest = hashlib.sha256()

    def add(self, raw: bytes) -> None:
        self.file.write(raw)
        self.digest.update(raw)

    def finish(self) -> None:
        """Give the file its name, with its content on the disk."""
        assert self.path is not None
        assert self.temporary is not None
        self.file.flush()
        os.fsync(self.file.fileno())
        os.replace(self.temporary, self.path)

    def drop(self) -> None:
        """Close the file, and remove it if it has no name yet."""
        with suppress(OSError):  # of a full disk: it was raised before
            self.file.close()
        if self.temporary is not None:
            self.temporary.unlink(missing_ok=True)


def _freed(text: str, path: str) -> str:
    """Return a text about a row without the path of its source."""
    return shards.HERE + text[len(path) :] if text.startswith(path) else text


_NUMBERED = re.compile(r"(.*?)(0|[1-9]\d*)?(\D*)", re.DOTALL)


def _runs(places: Sequence[str], first: int) -> list[list[Any]]:
    """Return the places of rows as runs of [first row, text before its last number, number, text after it], from which
    the rows after the first count up."""
    runs: list[list[Any]] = []
    for row, place in enumerate(places, start=first):
        prefix, digits, suffix = _NUMBERED.fullmatch(place).groups()  # type: ignore[union-attr]  # matches any text
        number = None if digits is None else int(digits)
        if runs and (runs[-1][1], runs[-1][3]) == (prefix, suffix):
            before = runs[-1][2]
            if number == (None if before is None else before + row - runs[-1][0]):
                continue
        runs.append([row, prefix, number, suffix])
    return runs
