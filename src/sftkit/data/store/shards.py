"""The files of a store: the tokens of one source, in shards that are whole or absent. No torch.

A shard holds the documents of rows `first` to `past` of a source, and its bytes follow from the store's key alone,
whoever makes it. What it consists of is in a line of the store's manifest, written after its files. Shards are named by
their rows, with these endings:

| file | content |
|---|---|
| .ids.bin | uint16 or uint32 |
| .mask.bin | one bit a token; absent: every token but the first of each document is a target |
| .docs.npy | the columns of DOCS, each in the smallest type that holds the shard's values (_packed) |
| .kinds.npy | the different values of the columns that repeat, which .docs.npy has the numbers of |
| .answers.npy | the tokens where answers begin and end, of documents where they are not the runs of targets |
| .given.json | what an encoder reads for each document |
| .chunks.json | rows, counts and findings of each chunk of rows, which parts of a shard add up; absent: there is one |
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sftkit.data.reading import columns as findings
from sftkit.data.reading.conversation import ROLES
from sftkit.data.types import Finding, TokenizedExample
from sftkit.rundir.files import alone, flush, make_folder, own_name, replace_shared, sha256_of
from sftkit.rundir.lock import Holder, pid_scope, process_start

FORMAT = 6
"The version of the files of a store and of a view."
DOCS = np.dtype(
    [
        ("length", "<u4"),  # tokens
        ("size", "<u4"),  # of a conversation: tokens before those after the last target were cut off; 0: a text
        ("targets", "<u4"),
        ("bytes", "<u4"),  # of the targets
        ("row", "<u4"),  # of the source; the documents of a row follow one another
        ("answers", "<u2"),  # that are learned whole in it
        ("odd", "<u2"),  # NOTED, and which of the shard's reasons for a data warning the row has
        ("content", "<u8"),  # hygiene.content_hash of the row
        ("head", "<u8"),  # hygiene.head_hash of the row, of which a file keeps the upper half
        ("roles", "<u2", (len(ROLES),)),  # messages of the row by role
        ("told", "<i4"),  # where its answers are in .answers.npy; -1: they are its runs of targets
    ]
)
"A document of a shard."
NOTED = 1 << 15
"The bit of `odd` of a row that counts as truncated although none of its documents is too long."
MOST_REASONS = 15
"The first reasons for data warnings that have a bit in `odd`."
MOST_ROLES = 2**16 - 1
"Messages of a role that are counted in one row."
HERE = "\0"
"Stands in a store for the path of the source, which may move."
LINES_FILE = "manifest.jsonl"
STAMPS = "stamps.json"
"The stamps that files had when they were compared with their sha256."
LOCKS = "locks"
"An empty file, which the kernel locks while a lock of a shard is taken or removed."
ABANDONED_SECONDS = 120.0
"Age from which the lock of another machine counts as left behind: its holder renews it with every chunk of rows."

log = logging.getLogger(__name__)


class RowSpan(NamedTuple):
    """Rows of a source, first to past - 1."""

    first: int
    past: int

    def __str__(self) -> str:
        return f"{self.first:010d}-{self.past:010d}"


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


@dataclass
class Shard:
    """A shard that is there."""

    line: dict[str, Any]
    "of the manifest"
    dtype: str
    folder: Path | None
    content: dict[str, bytes] = field(default_factory=dict)
    "its files, by ending, where they are not on disk"
    of: RowSpan | None = None
    "rows of the shard of which this is a part; None: it is a whole one"

    @property
    def span(self) -> RowSpan:
        """Return the rows that it was made for."""
        return RowSpan(self.line["first"], self.line["past"])

    @property
    def ends(self) -> bool:
        """Return whether the source has no rows after it."""
        return bool(self.line["rows"] < self.line["past"] - self.line["first"])

    def _array(self, ending: str, dtype: Any) -> np.ndarray:
        if ending not in self.line["files"]:
            return np.zeros(0, dtype)
        if self.folder is None:
            raw = self.content[ending]
            return np.load(io.BytesIO(raw)) if ending.endswith("npy") else np.frombuffer(raw, dtype)
        path = self.folder / f"{self.of or self.span}.{ending}"
        if ending.endswith("npy"):
            return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]  # as numpy types it
        # Memory-mapped, so that ranks of a machine share the pages; the map stays when the name is pruned.
        return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.zeros(0, dtype)

    @property
    def docs(self) -> np.ndarray:
        """Return the columns of its documents, DOCS [D]."""
        docs = self._docs()
        return docs[self._own(docs)]

    def _docs(self) -> np.ndarray:
        return _unpacked(
            self._array("docs.npy", DOCS), self._array("kinds.npy", np.int64), (self.of or self.span).first
        )

    def _own(self, docs: np.ndarray) -> slice:
        """Return which documents of the whole shard are its own."""
        return slice(None) if self.of is None else slice(*np.searchsorted(docs["row"], self.span).tolist())

    @property
    def starts(self) -> np.ndarray:
        """Return the first token of each document, int64 [D]."""
        docs = self._docs()
        length = docs["length"].astype(np.int64)
        return (np.cumsum(length) - length)[self._own(docs)]

    @property
    def sizes(self) -> np.ndarray:
        """Return the tokens of each document before any were cut off, int64 [D]."""
        docs = self.docs
        return np.where(docs["size"] > 0, docs["size"], docs["length"]).astype(np.int64)

    def answers_of(self, doc: np.void, start: int) -> np.ndarray:
        """Return (first token, one past the last) of each answer within its document, int [A, 2].

        Args:
            doc: an entry of `docs`, and start: its entry of `starts`.
        """
        if doc["told"] >= 0:
            return self._answers[int(doc["told"]) :][: int(doc["answers"])]
        return _runs_of_targets(self.tokens(start, int(doc["length"]))[1])

    @cached_property
    def _answers(self) -> np.ndarray:
        return self._array("answers.npy", np.uint32).reshape(-1, 2)

    @property
    def given(self) -> list[str]:
        """Return what an encoder reads for each document."""
        found = self._list("given.json")
        return found[self._own(self._docs())] if found else []

    def _list(self, ending: str) -> list[Any]:
        if ending not in self.line["files"]:
            return []
        if self.folder is None:
            return list(json.loads(self.content[ending]))
        return list(json.loads((self.folder / f"{self.of or self.span}.{ending}").read_bytes()))

    def part(self, rows: RowSpan) -> Shard | None:
        """Return what it has of some rows, in whole chunks; None: not one."""
        if rows.first <= self.span.first and self.span.past <= rows.past:
            return self
        its_findings = [[one[name] for name in ("kind", "reason", "first", "rows")] for one in self.line["findings"]]
        chunks = self._list("chunks.json") or [[self.line["rows"], self.line["counts"], its_findings]]
        borders = self.span.first + np.cumsum([0, *(number for number, *_ in chunks)])
        begin = int(np.searchsorted(borders, rows.first))
        end = int(np.searchsorted(borders, rows.past, side="right")) - 1
        if end <= begin:
            return None
        counts: Counter[str] = Counter()
        tally: findings.Tally = {}
        for _, its_counts, found in chunks[begin:end]:
            counts.update(its_counts)
            for one in found:
                findings.add(tally, *one)
        line = {
            "first": int(borders[begin]),
            "past": rows.past if self.ends and end == len(chunks) else int(borders[end]),
            "rows": int(borders[end] - borders[begin]),
            "counts": dict(counts),
            "findings": [asdict(one) for one in tally.values()],
            **{name: self.line[name] for name in ("odd", "where", "files")},
        }
        return Shard(line, self.dtype, self.folder, self.content, of=self.span)

    @cached_property
    def _ids(self) -> np.ndarray:
        return self._array("ids.bin", self.dtype)

    @cached_property
    def _mask(self) -> np.ndarray:
        return self._array("mask.bin", np.uint8)

    def tokens(self, start: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32, is_target bool) of some tokens as a document; its first one is no target."""
        ids = self._ids[start : start + number].astype(np.int32)
        if len(self._mask):
            bits = np.unpackbits(self._mask[start // 8 : (start + number + 7) // 8], bitorder="little")
            is_target = bits[start % 8 : start % 8 + number].astype(bool)
        else:
            is_target = np.ones(number, bool)
        is_target[:1] = False
        return ids, is_target

    def tally(self, path: str) -> findings.Tally:
        """Return what was found in its rows, with the source at `path`."""
        found = [Finding(**{**one, "first": one["first"].replace(HERE, path)}) for one in self.line["findings"]]
        return {(one.kind, one.reason): one for one in found}

    def where(self, row: int, path: str) -> str:
        """Return the place of a row, with the source at `path`."""
        at, prefix, number, suffix = next(run for run in reversed(self.line["where"]) if run[0] <= row)
        counted = "" if number is None else number + row - at
        return f"{prefix}{counted}{suffix}".replace(HERE, path)


class Store:
    """A folder of shards of one source."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """Open a store, which may not exist yet.

        Args:
            vocabulary: len(tokenizer), with added tokens.
        """
        self.folder = folder
        self.dtype = "<u2" if vocabulary <= 2**16 else "<u4"
        self._parsed: dict[str, tuple[list[int], dict[Any, Any]]] = {}
        "File -> its stamp, and what it held then: a store of 10^11 tokens has thousands of shards."

    def lines(self) -> dict[RowSpan, dict[str, Any]]:
        """Return the manifest by rows of the shards; a line that was torn counts as absent."""

        def parse(content: bytes) -> dict[RowSpan, dict[str, Any]]:
            whole = map(json.loads, takewhile(_is_whole, content.splitlines(keepends=True)))
            return {RowSpan(one["first"], one["past"]): one for one in whole}

        return self._content(LINES_FILE, parse)

    def _content(self, name: str, parse: Callable[[bytes], dict[Any, Any]]) -> dict[Any, Any]:
        """Return what a file holds, which is parsed once until the file changes; empty without the file."""
        try:
            stamp = _stamp(self.folder / name)
            if name not in self._parsed or self._parsed[name][0] != stamp:
                self._parsed[name] = stamp, parse((self.folder / name).read_bytes())
            return self._parsed[name][1]
        except (OSError, ValueError, TypeError):
            return {}

    def find(self, span: RowSpan, *, said: bool = False) -> Shard | None:
        """Return the shard of some rows if it is there and its files are what was written; a warning names damage,
        unless it was `said`."""
        line = self.lines().get(span)
        if line is None:
            return None
        if problem := self.damage(line):
            if not said:
                log.warning("%s: damaged cache (%s), tokenizing again", self.folder, problem)
            return None
        return Shard(line, self.dtype, self.folder)

    def damage(self, line: dict[str, Any], *, again: bool = False) -> str | None:
        """Return what is wrong with the files of a shard. A file that did not change since it was compared with its
        sha256 is not read, except `again`."""
        paths = {
            self.folder / f"{RowSpan(line['first'], line['past'])}.{end}": known for end, known in line["files"].items()
        }
        try:
            stamps = {path.name: _stamp(path) for path in paths}
            known = self._content(STAMPS, json.loads)
            changed = [path for path in paths if again or known.get(path.name) != stamps[path.name]]
            for path, found in zip(changed, sha256_of(changed), strict=True):
                if found != paths[path]:
                    return f"{path.name} is not what was written: sha256 {found}, not {paths[path]}"
        except OSError as error:
            return str(error)
        if changed:
            self._keep_stamps(stamps)
        return None

    def _keep_stamps(self, stamps: dict[str, list[int]]) -> None:
        with suppress(OSError):  # a store that only others may write: each start compares
            replace_shared(self.folder / STAMPS, json.dumps(self._content(STAMPS, json.loads) | stamps))

    def write(self, span: RowSpan, parts: Iterator[TokenizedRows], path: str, *, on_disk: bool) -> Shard:
        """Write the shard of some rows: its files, then its line.

        Args:
            parts: of its rows, in order.
            path: of the source, which texts are freed of.
            on_disk: False: keep it in memory.

        Raises:
            OSError: the disk is full.
        """
        if on_disk:
            make_folder(self.folder)
            for draft in self.folder.glob(f".{span}.*.tmp"):
                # Of a process that was killed, unless two took one shard at the same moment.
                if not Path(f"/proc/{draft.name.split('.')[-3]}").exists():
                    draft.unlink(missing_ok=True)
        total = TokenizedRows()
        chunks: list[list[Any]] = []
        sinks = {end: _Sink(self.folder / f"{span}.{end}" if on_disk else None) for end in ("ids.bin", "mask.bin")}
        docs, answers = [], []
        left = np.zeros(0, bool)
        try:
            for part in parts:
                if part.ids:
                    sinks["ids.bin"].add(part.ids[0].tobytes())
                    bits = np.concatenate([left, *part.is_target])
                    whole = len(bits) // 8 * 8
                    sinks["mask.bin"].add(np.packbits(bits[:whole], bitorder="little").tobytes())
                    left = bits[whole:]
                    docs.append(np.array(part.docs, DOCS))
                    answers.append(_told(docs[-1], part.is_target[0], np.array(part.answers, np.int64).reshape(-1, 2)))
                total.given += part.given
                total.odd += part.odd
                total.counts += part.counts
                total.where += part.where
                chunks.append([len(part.where), dict(+part.counts), []])
                for one in part.tally.values():
                    chunks[-1][2].append((one.kind, one.reason, _freed(one.first, path), one.rows))
                    findings.add(total.tally, *chunks[-1][2][-1])
            sinks["mask.bin"].add(np.packbits(left, bitorder="little").tobytes())
            table = np.concatenate(docs) if docs else np.zeros(0, DOCS)
            reasons = list(dict.fromkeys(reason for _, reason in total.odd))[:MOST_REASONS]
            for row, reason in total.odd:
                if reason in reasons:
                    table["odd"][slice(*np.searchsorted(table["row"], (row, row + 1)))] |= 1 << reasons.index(reason)
            if int(table["targets"].sum(dtype=np.int64)) == int(table["length"].sum(dtype=np.int64)) - len(table):
                sinks.pop("mask.bin").drop()
            arrays = _packed(table, span.first)
            arrays["answers.npy"] = _smallest(np.concatenate([np.zeros((0, 2), np.int64), *answers]))
            for ending, array in arrays.items():
                if ending == "docs.npy" or len(array):
                    sinks[ending] = _Sink(self.folder / f"{span}.{ending}" if on_disk else None)
                    raw = io.BytesIO()
                    np.save(raw, array, allow_pickle=False)
                    sinks[ending].add(raw.getvalue())
            for ending, items in {"given.json": total.given, "chunks.json": chunks[1:] and chunks}.items():
                if items:
                    sinks[ending] = _Sink(self.folder / f"{span}.{ending}" if on_disk else None)
                    sinks[ending].add(json.dumps(items).encode())
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
                return Shard(line, self.dtype, None, contents)
            for sink in sinks.values():
                sink.finish()
        finally:
            for sink in sinks.values():
                sink.drop()
        flush(self.folder)
        self._append(line)
        names = [f"{span}.{ending}" for ending in line["files"]]
        self._keep_stamps({name: _stamp(self.folder / name) for name in names})
        return Shard(line, self.dtype, self.folder)

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line to the manifest if it is not there, after what a torn one has left is cut off."""
        text = json.dumps(line, sort_keys=True) + "\n"
        new = not (self.folder / LINES_FILE).exists()
        with (self.folder / LINES_FILE).open("a+b", buffering=0) as file:
            with suppress(OSError):  # a file system without locks: two writers write the same
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            lines: list[bytes] = file.read().splitlines(keepends=True)
            whole = b"".join([*takewhile(_is_whole, lines)])
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
            flush(self.folder)

    # ---- one maker a shard -------------------------------------------------------------------------------------------

    @contextmanager
    def claim(self, span: RowSpan) -> Iterator[bool]:
        """Take the lock of a shard for the block; False: another process, here or on another machine, makes it. The
        lock of a process that is gone is taken over, by one process at a time. Two makers, which there may be on a file
        system that cannot lock, would only work twice."""
        lock = self.folder / f"{span}.lock"
        own = json.dumps(asdict(Holder(*pid_scope(), os.getpid(), process_start(os.getpid()), time.time())))
        claimed = False
        with suppress(OSError):  # a full disk, or one that only others may write: the maker finds out
            make_folder(self.folder)
            with alone(self.folder / LOCKS):
                if not (claimed := self.is_claimed(span)):
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
            with suppress(OSError), alone(self.folder / LOCKS):
                if not claimed and lock.read_text() == own:
                    lock.unlink()

    def renew(self, span: RowSpan) -> None:
        """Tell other machines that the shard is being made."""
        with suppress(OSError):
            os.utime(self.folder / f"{span}.lock")

    def is_claimed(self, span: RowSpan) -> bool:
        """Return whether a process that is not known to be gone makes a shard."""
        lock = self.folder / f"{span}.lock"
        try:
            age = time.time() - lock.stat().st_mtime
            holder = Holder(**json.loads(lock.read_text()))
        except (OSError, ValueError, TypeError):  # there is none, or a power failure has cut it off
            return False
        return holder.lives() if holder.is_here() else age < ABANDONED_SECONDS


# ---- columns of documents --------------------------------------------------------------------------------------------


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


def _unpacked(packed: np.ndarray, kinds: np.ndarray, first: int) -> np.ndarray:
    """Return the DOCS [D] of which _packed made the files."""
    docs = np.zeros(len(packed), DOCS)
    if len(packed):
        cut_off, docs["answers"], docs["odd"], told, *roles = kinds.astype(np.int64)[packed["kind"]].T
        docs["roles"] = np.stack(roles, axis=1)
        docs["length"] = packed["length"]
        docs["size"] = np.where(cut_off < 0, 0, docs["length"] + cut_off)
        docs["targets"] = docs["length"] - packed["unlearned"]
        docs["row"] = first + np.cumsum(packed["rows"], dtype=np.int64)
        docs["bytes"] = packed["bytes"]
        docs["content"] = packed["content"]
        docs["head"] = packed["head"].astype(np.uint64) << np.uint64(32)
        entries = np.where(told < 0, 0, docs["answers"])
        docs["told"] = np.where(told < 0, -1, np.cumsum(entries) - entries)
    return docs


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
    runs = _runs_of_targets(is_target)
    owner_of_run = np.searchsorted(past, runs[:, 0], side="right")
    same = np.bincount(owner_of_run, minlength=len(docs)) == docs["answers"]
    differ = (answers[same[owner]] != (runs - first[owner_of_run, None])[same[owner_of_run]]).any(1)
    same[owner[same[owner]][differ]] = False
    docs["told"] = np.where(same | (docs["answers"] == 0), -1, 0)
    return np.asarray(answers[~same[owner]])


def _runs_of_targets(is_target: np.ndarray) -> np.ndarray:
    """Return (first, one past the last) of each run of targets, int64 [R, 2]. The first token is none."""
    more = np.append(is_target, False)
    return (np.flatnonzero(more[1:] != more[:-1]) + 1).reshape(-1, 2)


# ---- files -----------------------------------------------------------------------------------------------------------


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


def _is_whole(line: bytes) -> bool:
    with suppress(ValueError):
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    return False


def _stamp(path: Path) -> list[int]:
    # The time of a file's entry changes with every write and cannot be set; device and inode are others after a mount.
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _freed(text: str, path: str) -> str:
    """Return a text about a row without the path of its source."""
    return HERE + text[len(path) :] if text.startswith(path) else text


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
