"""Cut the documents of shards to data.max_length, drop them, or split texts into chunks, with the counts and findings
that follow from it: the columns of a view.

All follows from the columns of the shards; tokens are read only of documents that are cut.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sftkit.config.schema import SourceConfig, source_label
from sftkit.data.reading import columns as findings
from sftkit.data.reading import readers
from sftkit.data.store.shards import MOST_REASONS, NOTED, Shard
from sftkit.data.store.view import COUNTS, NARROW_COLUMNS, ROLE_COUNTS, CountBytes, Limits, StoredSource, excess_text
from sftkit.data.types import CUT, SPLIT_TOKENS, TOO_LONG, Finding
from sftkit.errors import DataError, fault, hint
from sftkit.runtime.script import counted

BECAME = {
    "truncated": "truncated",
    "dropped_too_long": "longer than data.max_length, dropped (data.too_long)",
    "dropped_no_target": "without a target: cut before the first one at data.max_length, or marked as not to be "
    "learned",
    "dropped_where": "left out by where",
    "skipped_bad": "skipped as bad",
}


def write(
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
    for name in NARROW_COLUMNS if number else ():
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


def cut_documents(
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
    """Reject a source without documents, or whose `columns` names the column of messages or texts that no row has."""
    if not counts["rows"]:
        raise readers.no_rows(source)
    read = [one for one in tally.values() if one.kind == "read"]
    for name, path in (source.columns or {}).items():
        missing = tally.get(("unused", findings.missing_column(name, path)))
        if missing and missing.rows == sum(one.rows for one in read) and findings.is_recognised(name):
            words = {"source": source.path, "name": name, "path": path, "read": findings.finding_text(read[0])}
            raise DataError(hint("column of no row", **words))
    if not counts["documents"]:
        became = ", ".join(f"{counts[c]} {words}" for c, words in BECAME.items() if counts[c])
        said = (one for one in findings.sort_findings(tally) if one.kind != "read")
        found = "".join(f". {findings.finding_text(finding)}" for finding in said)
        rows_read = counted(counts["rows"], "row")
        raise DataError(f"data source {source.path}: nothing to learn in its {rows_read} ({became}){found}")


def _of_shard(
    shard: Shard, path: str, limits: Limits | None, count_bytes: CountBytes, counts: Counter[str], tally: findings.Tally
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
        _count_cut(shard, length, pieces, limits, counts)
        _count_lost(shard, path, pieces, limits, counts, found)
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
    return {**own, **{name: array[entry] for name, array in of_rows.items()}}


def _count_cut(shard: Shard, length: np.ndarray, pieces: np.ndarray, limits: Limits, counts: Counter[str]) -> None:
    """Count the answers that are beyond the limits or cut there, and what documents of split_turns take.

    Args:
        length: of the documents as they are cut. pieces: 0 for a document that is dropped.
    """
    docs = shard.docs
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
    shard: Shard, path: str, pieces: np.ndarray, limits: Limits, counts: Counter[str], found: findings.Tally
) -> None:
    """Count rows with documents that are too long, as truncated, or, if nothing is left of them, as dropped."""
    docs = shard.docs
    long = docs["size"] > limits.max_length + 1
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
    size = excess_text(docs["size"][long & (docs["row"] == row)][0], limits)
    where = shard.where(int(row), path)
    if limits.too_long == "skip":
        counts["skipped_bad"] += len(lost)
        findings.add(found, "skipped", "too long", str(fault(where, "too long", size=size)), len(lost))
    else:
        note = "dropped_too_long" if limits.too_long == "drop" else "dropped_no_target"
        counts[note] += len(lost)
        beyond = "" if limits.too_long == "drop" else ", and the first target is beyond them: raise data.max_length"
        findings.add(found, "dropped", findings.DROPPED[note], f"{where}: {size}{beyond}", len(lost))
    for name, number in zip(ROLE_COUNTS.values(), lost["roles"].sum(0, dtype=np.int64).tolist(), strict=True):
        counts[name] -= number
    for i, reason in enumerate(shard.line["odd"][:MOST_REASONS]):
        if one := found.get(("accepted", reason)):  # a part of a shard does not have all of its reasons
            found["accepted", reason] = Finding(**{**asdict(one), "rows": one.rows - int((lost["odd"] >> i & 1).sum())})
