"""What a run sees of its sources' shards: documents cut to data.max_length, dropped, or texts in chunks, with the
counts and findings that follow from it.

All follows from the columns of the shards; tokens are read only of documents that are cut. A view is a folder of the
cache that is complete or absent.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sftkit.config.schema import SourceConfig, source_label
from sftkit.data.reading import columns as findings
from sftkit.data.reading import folders, readers
from sftkit.data.reading.conversation import ROLES
from sftkit.data.store.making import POLL_SECONDS, Peers
from sftkit.data.store.shards import MOST_REASONS, NOTED, Shard
from sftkit.data.types import CUT, SPLIT_TOKENS, TOO_LONG, DocumentColumns, Examples, Finding
from sftkit.errors import ConfigError, DataError, fault, hint
from sftkit.runtime.script import counted

COUNTS = ("rows", "documents", "truncated", "dropped_too_long", "dropped_no_target", "dropped_where", "skipped_bad")
BECAME = {
    "truncated": "truncated",
    "dropped_too_long": "longer than data.max_length, dropped (data.too_long)",
    "dropped_no_target": "without a target: cut before the first one at data.max_length, or marked as not to be "
    "learned",
    "dropped_where": "left out by where",
    "skipped_bad": "skipped as bad",
}
ROLE_COUNTS = {role: f"messages_{role}" for role in ROLES}
"Role -> name of the count of its messages, in conversations that are learned from."
VIEW_COLUMNS: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("lengths", "num_targets", "num_bytes", "source", "shard"), np.dtype(np.int32)),
    "start": np.dtype(np.int64),
}
"Arrays of a view: columns of Examples, and of each document its shard and first token. SMALLER are written smaller."
CHOSEN_BY: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("row", "turns"), np.dtype(np.int32)),
    **dict.fromkeys(("content", "head"), np.dtype(np.uint64)),
}
"Arrays of DocumentColumns, which a view has if its shards would take a pass over their tokens for them."
SMALLER = ("source", "shard", "start")
"Columns that nothing computes with, so they may have the smallest type that holds them."
VIEW_FORMAT = 1
"The version of the files of a view, next to that of a store."
CountBytes = Callable[[np.ndarray, np.ndarray], int]
"Takes ids and is_target; returns the UTF-8 bytes of the targets."


class Limits(NamedTuple):
    """How documents are cut."""

    max_length: int
    too_long: str
    "data.too_long, or skip: what is an error elsewhere counts as a bad row that is left out"


class StoredSource(NamedTuple):
    """A source of a run with its shards, in order."""

    config: SourceConfig
    shards: list[Shard]


@dataclass(frozen=True)
class ShardTokens:
    """Tokens in shards."""

    shards: Sequence[Shard]
    shard: np.ndarray
    start: np.ndarray
    lengths: np.ndarray

    def gather(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, is_target) of documents, one after the other."""
        if not len(documents):
            return np.zeros(0, np.int32), np.zeros(0, bool)
        places = zip(*(column[documents].tolist() for column in (self.shard, self.start, self.lengths)), strict=True)
        found = [self.shards[shard].tokens(start, length + 1) for shard, start, length in places]
        ids, is_target = map(np.concatenate, zip(*found, strict=True))
        return ids, is_target

    def answers(self, documents: np.ndarray) -> Iterator[list[tuple[int, int]]]:
        """See types.StoredTokens."""
        for shard, entries, starts in self._stored(documents):
            for doc, start in zip(shard.docs[entries], starts.tolist(), strict=True):
                yield [(first, past) for first, past in shard.answers_of(doc, start).tolist()]

    def learned_answers(self, documents: np.ndarray) -> int:
        """See types.StoredTokens."""
        kept = self.lengths[documents].astype(np.int64) + 1
        total = first = 0
        for shard, entries, starts in self._stored(documents):
            docs = shard.docs[entries]
            own = kept[first : first + len(docs)]
            is_cut = docs["length"] > own
            total += int(docs["answers"][~is_cut].sum())
            for i in np.flatnonzero(is_cut & (docs["answers"] > 0)).tolist():
                total += int((shard.answers_of(docs[i], int(starts[i]))[:, 1] <= own[i]).sum())
            first += len(docs)
        return total

    def sizes(self, documents: np.ndarray) -> np.ndarray:
        """See types.StoredTokens."""
        found = [shard.sizes[entries] for shard, entries, _ in self._stored(documents)]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def columns(self) -> list[np.ndarray]:
        """Return row, turns, content and head of all documents (types.DocumentColumns), from their shards."""
        parts: list[tuple[np.ndarray, ...]] = [(np.zeros(0, np.int32),) * 2 + (np.zeros(0, np.uint64),) * 2]
        for shard, entries, _ in self._stored(np.arange(len(self.lengths))):
            docs = shard.docs[entries]
            numbers = docs["row"].astype(np.int32), docs["roles"].sum(1).astype(np.int32)
            parts.append((*numbers, docs["content"], docs["head"]))
        return [np.concatenate(one) for one in zip(*parts, strict=True)]

    def _stored(self, documents: np.ndarray) -> Iterator[tuple[Shard, np.ndarray, np.ndarray]]:
        """Yield (shard, numbers of its entries of some documents, their first tokens), in order."""
        borders = np.flatnonzero(np.diff(self.shard[documents])) + 1
        for here in np.split(documents, borders) if len(documents) else ():
            shard = self.shards[self.shard[here[0]]]
            starts = shard.starts
            entries = np.searchsorted(starts, self.start[here], side="right") - 1
            yield shard, entries, starts[entries]


def make_examples(
    sources: Sequence[StoredSource], limits: Limits | None, count_bytes: CountBytes, folder: Path, peers: Peers
) -> Examples:
    """Return the documents of the sources, source after source, from the view in a folder if it is there.

    Args:
        limits: None: the documents were cut when they were tokenized.

    Raises:
        DataError: a source has no document. ConfigError: the disk is full, and other processes wait for the view.
    """
    shards = list(chain.from_iterable(source.shards for source in sources))
    found = load_view(folder, shards, "making it again" if peers.makes else "")
    while found is None and not peers.makes:
        done = peers.look()
        if (found := load_view(folder, shards, "")) is None and done:
            break
        time.sleep(POLL_SECONDS)
    if found is not None:
        return found
    documents = partial(_documents, sources, limits, count_bytes)
    write = partial(_write, documents, _kept_columns(shards))
    instead = "every start will tokenize"
    folders.save(folder, write, lambda: load_view(folder, shards, "") is not None, instead=instead)
    if (found := load_view(folder, shards, "")) is not None:
        return found
    if not peers.alone:
        raise ConfigError(hint("full data cache", folder=str(folder), error="no view could be written"))
    about: dict[str, Any] = {}
    parts = list(documents(about))
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in _kept_columns(shards)}
    return _examples(arrays, about, shards, "")


def _kept_columns(shards: Sequence[Shard]) -> dict[str, np.dtype[Any]]:
    return VIEW_COLUMNS | (CHOSEN_BY if any(shard.slow_docs for shard in shards) else {})


def load_view(folder: Path, shards: Sequence[Shard], instead: str) -> Examples | None:
    """Return the examples of a view, as folders.load."""

    kept = _kept_columns(shards)

    def build(arrays: dict[str, Any]) -> Examples:
        about = json.loads((folder / "about.json").read_text())
        for name, dtype in kept.items():
            is_narrow = name in SMALLER and arrays[name].dtype.kind == "u"
            if (arrays[name].dtype != dtype and not is_narrow) or arrays[name].shape != arrays["lengths"].shape:
                raise ValueError(f"{name} is {arrays[name].dtype}{arrays[name].shape}")
        return _examples(arrays, about, shards, folder.name)

    return folders.load(folder, kept, build, instead=instead)


def _examples(
    arrays: Mapping[str, np.ndarray], about: Mapping[str, Any], shards: Sequence[Shard], key: str
) -> Examples:
    own: dict[str, Any] = {name: arrays[name] for name in ("lengths", "num_targets", "num_bytes", "source")}
    tokens = ShardTokens(shards, arrays["shard"], arrays["start"], arrays["lengths"])
    return Examples(
        tokens,
        **own,
        source_names=tuple(about["source_names"]),
        counts=about["counts"],
        findings={name: tuple(Finding(**one) for one in found) for name, found in about["findings"].items()},
        encoder_sources=about["encoder_sources"],
        columns=DocumentColumns(partial(itemgetter(*CHOSEN_BY), arrays) if "row" in arrays else tokens.columns),
        key=key,
    )


def _write(
    documents: Callable[[dict[str, Any]], Iterator[dict[str, np.ndarray]]],
    columns: Mapping[str, np.dtype[Any]],
    folder: Path,
) -> None:
    """Write the columns piece by piece, as .npy files whose header is written last."""
    about: dict[str, Any] = {}
    number = 0
    with ExitStack() as opened:
        files: dict[str, BinaryIO] = {}
        for name, dtype in columns.items():
            files[name] = opened.enter_context((folder / f"{name}.npy").open("wb"))
            _write_header(files[name], dtype, 0)
        for part in documents(about):
            number += len(part["start"])
            for name, dtype in columns.items():
                files[name].write(part[name].astype(dtype).tobytes())
        for name, file in files.items():
            file.seek(0)
            _write_header(file, columns[name], number)
    for name in SMALLER if number else ():
        path = folder / f"{name}.npy"
        wide = np.load(path, mmap_mode="r")
        path.unlink()  # the map stays
        narrow = np.lib.format.open_memmap(path, "w+", np.min_scalar_type(int(wide.max()) + 1), wide.shape)
        for i in range(0, number, 2**20):
            narrow[i : i + 2**20] = wide[i : i + 2**20]
        narrow.flush()
    (folder / "about.json").write_text(json.dumps(about, indent=1))


def _write_header(file: BinaryIO, dtype: np.dtype[Any], number: int) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": (number,)}
    np.lib.format.write_array_header_1_0(file, header)
    assert file.tell() == 128  # whatever the number


def _documents(
    sources: Sequence[StoredSource], limits: Limits | None, count_bytes: CountBytes, about: dict[str, Any]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the columns of the documents, and put what is known of the sources into `about`."""
    about |= {"source_names": [source_label(one.config) for one in sources], "counts": {}, "findings": {}}
    given: list[str] = []
    first = 0
    for number, (config, shards) in enumerate(sources):
        counts: Counter[str] = Counter()
        tally: findings.Tally = {}
        parts = (_of_shard(shard, config.path, limits, count_bytes, counts, tally) for shard in shards)
        copies = math.ceil(config.repeat)  # of a part of a pass, plans leave the rest out
        # `repeat` makes real copies: later stages treat each copy as an independent document.
        passes = [parts] if copies == 1 else [list(parts)] * copies
        for one in passes:
            for at, part in enumerate(one, start=first):
                entries = np.full(len(part["start"]), 1, np.int32)
                yield {**part, "source": entries * number, "shard": entries * at}
        _check(config, counts, tally)
        label = source_label(config)
        # Every source has every count, zeros too.
        names = (*COUNTS, *ROLE_COUNTS.values())
        every = dict.fromkeys(names, 0) | counts
        about["counts"][label] = {name: round(count * config.repeat) for name, count in every.items()}
        about["findings"][label] = [asdict(one) for one in findings.sort_findings(tally, config.repeat)]
        given += [name for shard in shards for name in shard.given] * copies
        first += len(shards)
    about["encoder_sources"] = given


def _check(source: SourceConfig, counts: Counter[str], tally: findings.Tally) -> None:
    """Reject a source without documents."""
    if not counts["rows"]:
        raise readers.no_rows(source)
    if not counts["documents"]:
        became = ", ".join(f"{counts[c]} {words}" for c, words in BECAME.items() if counts[c])
        said = (one for one in findings.sort_findings(tally) if one.kind != "read")
        found = "".join(f". {findings.finding_text(finding)}" for finding in said)
        rows_read = counted(counts["rows"], "row")
        raise DataError(f"data source {source.path}: nothing to learn in its {rows_read} ({became}){found}")


def check_lengths(shard: Shard, source: SourceConfig, limits: Limits) -> None:
    """Reject the first document that is longer than data.max_length."""
    docs = shard.docs
    long = np.flatnonzero(docs["size"] > limits.max_length + 1)
    if len(long):
        first = docs[long[0]]
        raise fault(shard.where(int(first["row"]), source.path), "too long", size=_size(first["size"], limits))


def _size(tokens: int, limits: Limits) -> str:
    return f"{tokens} tokens, but data.max_length {limits.max_length} holds {limits.max_length + 1}"


def _of_shard(
    shard: Shard,
    path: str,
    limits: Limits | None,
    count_bytes: CountBytes,
    counts: Counter[str],
    tally: findings.Tally,
) -> dict[str, np.ndarray]:
    """Return the columns of the documents that a shard has within the limits; add to counts and tally."""
    docs = shard.docs
    counts.update(rows=shard.line["rows"], **shard.line["counts"])
    found = shard.tally(path)
    length = docs["length"].astype(np.int64)
    starts = shard.starts
    pieces = np.ones(len(docs), np.int64)
    targets = docs["targets"].astype(np.int64)
    num_bytes = docs["bytes"].astype(np.int64)
    entry = np.arange(len(docs))
    if limits is not None:
        most = limits.max_length + 1
        is_text = docs["size"] == 0
        long = docs["size"] > most
        # The last token of a chunk is the first of the next, so each token of a text is a target exactly once.
        pieces[is_text] = -(-(length[is_text] - 1) // limits.max_length)
        if limits.too_long == "drop":
            pieces[long] = 0
        elif limits.too_long == "skip":
            pieces[np.isin(docs["row"], docs["row"][long])] = 0
        else:
            for i in np.flatnonzero(long & (length > most)).tolist():
                ids, is_target = shard.tokens(int(starts[i]), most)
                past = int(np.flatnonzero(is_target)[-1]) + 1 if is_target.any() else 0
                length[i] = past
                pieces[i] = past > 0
                targets[i] = np.count_nonzero(is_target)
                num_bytes[i] = count_bytes(ids[:past], is_target[:past]) if past else 0
        _count_cut(shard, docs, length, pieces, limits, counts)
        _count_lost(shard, path, docs, long, pieces, limits, counts, found)
        entry = np.repeat(np.arange(len(docs)), pieces)
        within = np.arange(len(entry)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = starts[entry] + within * limits.max_length
        is_split = (pieces > 1)[entry]
        length = np.where(is_split, np.minimum(length[entry] - within * limits.max_length, most), length[entry])
        targets = targets[entry]
        num_bytes = num_bytes[entry]
        for i in np.flatnonzero(is_split).tolist():
            ids, is_target = shard.tokens(int(starts[i]), int(length[i]))
            # Of a text that was tokenized elsewhere, some tokens may be no targets.
            length[i] = np.flatnonzero(is_target)[-1] + 1 if is_target.any() else 0
            targets[i] = np.count_nonzero(is_target)
            num_bytes[i] = count_bytes(ids[: length[i]], is_target[: length[i]]) if length[i] else 0
        there = length > 0
        entry, starts, length, targets, num_bytes = (a[there] for a in (entry, starts, length, targets, num_bytes))
    counts["documents"] += len(starts)
    for one in found.values():
        if one.rows:
            findings.add(tally, one.kind, one.reason, one.first, one.rows)
    of_rows = {"row": docs["row"], "turns": docs["roles"].sum(1), "content": docs["content"], "head": docs["head"]}
    own = {"lengths": length - 1, "num_targets": targets, "num_bytes": num_bytes, "start": starts}
    return {**own, **({name: array[entry] for name, array in of_rows.items()} if shard.slow_docs else {})}


def _count_cut(
    shard: Shard, docs: np.ndarray, length: np.ndarray, pieces: np.ndarray, limits: Limits, counts: Counter[str]
) -> None:
    """Count the answers that are beyond the limits or cut there, and what documents of split_turns take.

    Args:
        length: of the documents as they are cut. pieces: 0 for a document that is dropped.
    """
    if limits.too_long == "skip":  # bad rows have no answers
        bad = int(docs["answers"][pieces == 0].sum())
        counts.update({"answers": -bad, "answers_learned": -bad})
    else:
        kept = limits.max_length + 1
        beyond = int(docs["answers"][pieces == 0].sum())
        cut = 0
        starts = shard.starts
        for i in np.flatnonzero((pieces > 0) & (docs["length"] > kept) & (docs["answers"] > 0)).tolist():
            begins, ends = shard.answers_of(docs[i], int(starts[i])).T
            beyond += int((begins >= kept).sum())
            cut += int(((begins < kept) & (ends > kept)).sum())
        counts.update({TOO_LONG: beyond, CUT: cut, "answers_learned": -beyond - cut})
    # All of a row's documents but the last are there because of split_turns.
    there = np.flatnonzero((pieces > 0) & (docs["size"] > 0))
    row = docs["row"][there]
    before_another = np.append(row[1:] == row[:-1], np.zeros(min(len(row), 1), bool))
    counts[SPLIT_TOKENS] += int((length[there][before_another] - 1).sum()) - shard.line["counts"].get(SPLIT_TOKENS, 0)


def _count_lost(
    shard: Shard,
    path: str,
    docs: np.ndarray,
    long: np.ndarray,
    pieces: np.ndarray,
    limits: Limits,
    counts: Counter[str],
    found: findings.Tally,
) -> None:
    """Count rows with documents that are too long, as truncated, or, if nothing is left of them, as dropped."""
    if not long.any():
        return
    firsts = np.flatnonzero(np.diff(docs["row"].astype(np.int64), prepend=-1))
    is_left = np.logical_or.reduceat(pieces > 0, firsts)
    is_long = np.logical_or.reduceat(long, firsts)
    noted = (docs["odd"][firsts] & NOTED) > 0
    counts["truncated"] += int((is_left & is_long & ~noted).sum()) - int((~is_left & noted).sum())
    lost = docs[firsts[~is_left]]
    if not len(lost):
        return
    row = lost["row"][0]
    size = _size(docs["size"][long & (docs["row"] == row)][0], limits)
    where = shard.where(int(row), path)
    if limits.too_long == "skip":
        counts["skipped_bad"] += len(lost)
        findings.add(found, "skipped", "too long", str(fault(where, "too long", size=size)), len(lost))
    else:
        note = "dropped_too_long" if limits.too_long == "drop" else "dropped_no_target"
        counts[note] += len(lost)
        beyond = "" if limits.too_long == "drop" else ", and the first target is beyond them"
        findings.add(found, "dropped", findings.DROPPED[note], f"{where}: {size}{beyond}", len(lost))
    for name, number in zip(ROLE_COUNTS.values(), lost["roles"].sum(0, dtype=np.int64).tolist(), strict=True):
        counts[name] -= number
    for i, reason in enumerate(shard.line["odd"][:MOST_REASONS]):
        if one := found.get(("accepted", reason)):  # a part of a shard does not have all of its reasons
            found["accepted", reason] = Finding(**{**asdict(one), "rows": one.rows - int((lost["odd"] >> i & 1).sum())})
