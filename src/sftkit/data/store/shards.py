"""The files of a store: the tokens of one source, in shards that are whole or absent. No torch.

A shard holds the documents of rows `first` to `past` of a source, and its bytes follow from the store's key alone,
whoever makes it. What it consists of is in a line of the store's manifest, written after its files. Shards are named by
their rows, with these endings:

| file | content |
|---|---|
| .ids.bin | uint16 or uint32 |
| .mask.bin | one bit a token; absent: every token but the first of each document is a target |
| .docs.npy | the columns of DOCS, each in the smallest type that holds the shard's values (writing.py) |
| .kinds.npy | the different values of the columns that repeat, which .docs.npy has the numbers of |
| .answers.npy | the tokens where answers begin and end, of documents where they are not the runs of targets |
| .given.json | what an encoder reads for each document |
| .chunks.json | rows, counts and findings of each chunk of rows, which parts of a shard add up; absent: there is one |
"""

from __future__ import annotations

import io
import json
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sftkit.data.reading import columns as findings
from sftkit.data.reading.conversation import ROLES
from sftkit.data.types import Finding
from sftkit.rundir.files import replace_shared, sha256_of, write_stamp

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

log = logging.getLogger(__name__)


class RowSpan(NamedTuple):
    """Rows of a source, first to past - 1."""

    first: int
    past: int

    def __str__(self) -> str:
        return f"{self.first:010d}-{self.past:010d}"


@dataclass
class Shard:
    """A shard that is there."""

    slow_docs: ClassVar[bool] = False
    "Whether `docs` takes a pass over its tokens."
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
        return runs_of_targets(self.tokens(start, int(doc["length"]))[1])

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
            whole = map(json.loads, takewhile(is_whole, content.splitlines(keepends=True)))
            return {RowSpan(one["first"], one["past"]): one for one in whole}

        return self._content(LINES_FILE, parse)

    def _content(self, name: str, parse: Callable[[bytes], dict[Any, Any]]) -> dict[Any, Any]:
        """Return what a file holds, which is parsed once until the file changes; empty without the file."""
        try:
            found = write_stamp(self.folder / name)
            if name not in self._parsed or self._parsed[name][0] != found:
                self._parsed[name] = found, parse((self.folder / name).read_bytes())
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
            stamps = {path.name: write_stamp(path) for path in paths}
            known = self._content(STAMPS, json.loads)
            changed = [path for path in paths if again or known.get(path.name) != stamps[path.name]]
            for path, found in zip(changed, sha256_of(changed), strict=True):
                if found != paths[path]:
                    return f"{path.name} is not what was written: sha256 {found}, not {paths[path]}"
        except OSError as error:
            return str(error)
        if changed:
            self.keep_stamps(stamps)
        return None

    def keep_stamps(self, stamps: dict[str, list[int]]) -> None:
        """Keep stamps of files whose sha256 is known."""
        with suppress(OSError):  # a store that only others may write: each start compares
            replace_shared(self.folder / STAMPS, json.dumps(self._content(STAMPS, json.loads) | stamps))


# ---- columns of documents --------------------------------------------------------------------------------------------


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
        entries = np.where(told < 0, 0, docs["answers"]).astype(np.int64)  # unsigned numbers have no -1
        docs["told"] = np.where(told < 0, -1, np.cumsum(entries) - entries)
    return docs


def runs_of_targets(is_target: np.ndarray) -> np.ndarray:
    """Return (first, one past the last) of each run of targets, int64 [R, 2]. The first token is none."""
    more = np.append(is_target, False)
    return (np.flatnonzero(more[1:] != more[:-1]) + 1).reshape(-1, 2)


# ---- files -----------------------------------------------------------------------------------------------------------


def is_whole(line: bytes) -> bool:
    """Return whether a line of a manifest was written to its end."""
    with suppress(ValueError):
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    return False
