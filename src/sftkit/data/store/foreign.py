"""Tokens that other programs wrote, read in place as the shards of a store; those at a URL from local copies.

| format | files | documents |
|---|---|---|
| Megatron | .bin and .idx | ranges of sequences, by the index |
| datatrove | .ds and .ds.index, perhaps .ds.loss and .ds.metadata | end where the index says |
| OLMo-core, Dolma | .npy or .bin without a header, or NumPy's own | end with eos |
| llm.c, modded-nanogpt | .bin with a header of 256 int32 | begin with eos, and the next one's eos ends them |

Ids are memory-mapped. What needs a pass over a file is kept in data.cache_dir: where eos is, and how many tokens of
each document are learned.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sftkit.config.commands import similar_paths
from sftkit.config.schema import DataConfig, SourceConfig, source_label, where_counts
from sftkit.data.reading import columns as findings
from sftkit.data.reading.origin import Origin, content_identity
from sftkit.data.store.shards import DOCS, HERE, Shard
from sftkit.data.store.view import CountBytes
from sftkit.errors import ConfigError, DataError, config_error, fault
from sftkit.rundir.files import flush, own_name
from sftkit.runtime.hub import hub_answers
from sftkit.runtime.script import first_of

SHARD_TOKENS = 2**23
"Tokens of a shard, whose columns are made at a time."
PASS = 2**24
"Tokens that a pass over a file holds at a time."
HEAD_TOKENS = 64
"Tokens by which a document goes to training or validation."
BORDERS_FORMAT = 1
"The version of what a pass over a file keeps."
MEGATRON = b"MMIDIDX\0\0\1\0\0\0\0\0\0\0"
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"Magic number and version of a file of llm.c -> the type of its ids."


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens of D documents."""

    path: Path
    ids: np.ndarray
    "memory-mapped, of the type that the file has"
    start: np.ndarray
    "int64 [D]: first token of each document"
    length: np.ndarray
    "int64 [D]"
    targets: np.ndarray
    "int64 [D]: tokens that are learned; the first one of a document never is"
    mask: np.ndarray | None = None
    "of each token whether it is learned, one byte; None: all are"


@dataclass(kw_only=True)
class ForeignShard(Shard):
    """Some documents of a file of tokens."""

    slow_docs = True
    file: TokenFile
    documents: np.ndarray
    "int64: those that have something to learn, by number in the file"
    vocabulary: int
    count_bytes: CountBytes
    "takes ids and is_target of a document"

    @property
    def starts(self) -> np.ndarray:
        """Return the first token of each document in the file."""
        return np.asarray(self.file.start[self.documents])

    @property
    def sizes(self) -> np.ndarray:
        """Return the tokens of each document, int64 [D], without those tokens: `docs` reads them all."""
        return np.asarray(self.file.length[self.documents])

    @property
    def docs(self) -> np.ndarray:
        """Return the columns of its documents, DOCS [D].

        Raises:
            DataError: an id is not in the vocabulary.
        """
        made = np.zeros(len(self.documents), DOCS)
        length = self.file.length[self.documents]
        first = int(self.starts[0])
        # Not as a map, of which each slice takes long.
        ids = np.asarray(self.file.ids[first : int(self.starts[-1] + length[-1])])
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            wrong = int(np.flatnonzero((ids < 0) | (ids >= self.vocabulary))[0])
            words = {"id": int(ids[wrong]), "at": first + wrong, "vocabulary": self.vocabulary}
            raise fault(str(self.file.path), "id out of range", **words)
        begin = self.starts - first
        end = begin + length
        made["length"] = length
        made["targets"] = self.file.targets[self.documents]
        made["row"] = self.line["first"] + self.documents - self.line["at"]
        places = zip(self.starts.tolist(), length.tolist(), strict=True)
        made["bytes"] = [self.count_bytes(*self.tokens(*place)) for place in places]
        for name, past in (("content", end), ("head", np.minimum(end, begin + HEAD_TOKENS))):
            ends = zip(begin.tolist(), past.tolist(), strict=True)
            hashes = (blake2b(ids[a:b].tobytes(), digest_size=8) for a, b in ends)
            made[name] = [int.from_bytes(one.digest(), "little") for one in hashes]
        return made

    def tokens(self, start: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32, is_target bool) of some tokens as a document; its first one is no target."""
        ids = self.file.ids[start : start + number].astype(np.int32)
        is_target = np.ones(number, bool) if self.file.mask is None else self.file.mask[start : start + number] != 0
        is_target[:1] = False
        return ids, is_target


# ---- files -----------------------------------------------------------------------------------------------------------


def open_tokens(path: Path, *, eos: int | None, vocabulary: int, cache: Path) -> TokenFile:
    """Open a file of tokens.

    Args:
        eos: the id that separates documents where nothing else says where they are.
        vocabulary: number of ids, which decides the type of those in a file that does not say it.
        cache: folder of what is found in a pass over the file.

    Raises:
        DataError: it is damaged, or of no known format.
    """
    try:
        if path.with_suffix(".idx").is_file():
            return _megatron(path)
        if path.suffix == ".ds":
            return _datatrove(path, cache)
        return _flat(path, eos, vocabulary, cache)
    except (OSError, ValueError, IndexError) as error:
        raise DataError(f"{path}: cannot be read as tokens: {error}") from error


def _megatron(path: Path) -> TokenFile:
    raw = np.memmap(path.with_suffix(".idx"), np.uint8, "r")
    if raw[:17].tobytes() != MEGATRON or int(raw[17]) not in MEGATRON_TYPES:
        raise ValueError("the .idx is no index of Megatron of version 1 with whole numbers")
    ids = np.memmap(path, MEGATRON_TYPES[int(raw[17])], "r")
    sequences, borders = np.frombuffer(raw, "<u8", 2, 18).tolist()
    if len(raw) != 34 + 12 * sequences + 8 * borders:
        raise ValueError(f"the .idx has {len(raw):,} bytes, not those of {sequences:,} sequences, or modes of them")
    ends = np.append(0, np.cumsum(np.frombuffer(raw, "<i4", sequences, 34), dtype=np.int64))
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    border = np.frombuffer(raw, "<i8", borders, 34 + 12 * sequences)
    if not np.array_equal(pointers, ends[:-1] * ids.itemsize) or ends[-1] != len(ids):
        raise ValueError(f"the sequences of the .idx do not follow each other, or are not its {len(ids):,} tokens")
    if border[0] != 0 or border[-1] != sequences:
        raise ValueError("the documents of the .idx are not all of its sequences")
    return _between(path, ids, ends[border])


def _datatrove(path: Path, cache: Path) -> TokenFile:
    ends = np.fromfile(f"{path}.index", "<u8").astype(np.int64)
    size = path.stat().st_size
    about = Path(f"{path}.metadata")
    # Newer versions write the bytes of a token after the name of the tokenizer.
    width = re.search(r"\|(\d+)$", about.read_text().split("\n")[0]) if about.is_file() else None
    itemsize = int(width[1]) if width else size // int(ends[-1])
    if itemsize not in (2, 4) or size % itemsize or ends[-1] * itemsize > size or (not width and size % ends[-1]):
        raise ValueError(f"its {size:,} bytes are not the {ends[-1]:,} tokens of its .index, of 2 or 4 bytes each")
    if (ends[1:] < ends[:-1]).any():
        raise ValueError("the ends of documents in its .index do not ascend")
    ids = np.memmap(path, f"<u{itemsize}", "r")
    borders = np.unique(np.concatenate([[0], ends, [len(ids)]]))  # what was cut into blocks may end within a document
    if not Path(f"{path}.loss").is_file():
        return _between(path, ids, borders)
    mask = np.memmap(f"{path}.loss", np.uint8, "r")
    if len(mask) != len(ids):
        raise ValueError(f"its .loss has {len(mask):,} bytes for {len(ids):,} tokens")

    def count() -> np.ndarray:
        # The first token of a document is no target, whatever the mask says.
        return np.asarray(np.add.reduceat(mask, borders[:-1], dtype=np.int64) - mask[borders[:-1]])

    return _between(path, ids, borders, mask, _kept(cache, [Path(f"{path}.loss"), Path(f"{path}.index")], "", count))


def _flat(path: Path, eos: int | None, vocabulary: int, cache: Path) -> TokenFile:
    with path.open("rb") as file:
        head = file.read(1024)
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
    begins = len(numbers) == 256 and (int(numbers[0]), int(numbers[1])) in LLM_C
    if head.startswith(b"\x93NUMPY"):
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"an array {ids.dtype}{list(ids.shape)}, not one row of whole numbers")
    elif begins:
        ids = np.memmap(path, LLM_C[int(numbers[0]), int(numbers[1])], "r", 1024)
        if len(ids) != numbers[2]:
            raise ValueError(f"{len(ids):,} tokens, but its header says {numbers[2]:,}")
    elif len(numbers) and 20240500 < numbers[0] < 20250000 and not numbers[4:].any():
        raise ValueError("a file of llm.c that holds no tokens of documents, or a version that is not known")
    else:
        ids = np.memmap(path, "<u2" if vocabulary <= 2**16 else "<u4", "r")
        if ids.itemsize == 2 and len(ids) >= 16 and len(ids) % 2 == 0 and not ids[1 : 2**20 : 2].any():
            ids = ids.view("<u4")  # every second number is zero
    if eos is None:
        raise ValueError("its documents are separated by eos, which the tokenizer does not have")

    def find() -> np.ndarray:
        parts = (np.flatnonzero(ids[i : i + PASS] == eos) + i for i in range(0, len(ids), PASS))
        return np.concatenate(list(parts))

    found = _kept(cache, [path], f"{eos} {ids.dtype}", find)
    if not len(found):
        raise ValueError(f"eos ({eos}) is not in it. Is tokenizer_of the tokenizer that made it?")
    start = np.unique(np.append(0, found + (not begins)))
    start = start[start < len(ids)]
    end = np.append(start[1:], len(ids))
    if begins:
        end[:-1] += 1
    length = end - start
    return TokenFile(path, ids, start, length, np.maximum(length - 1, 0))


def _between(
    path: Path, ids: np.ndarray, borders: np.ndarray, mask: np.ndarray | None = None, targets: np.ndarray | None = None
) -> TokenFile:
    """Return a file of which the documents are between borders."""
    length = np.diff(borders)
    if (length < 0).any():
        raise ValueError("the borders of its documents do not ascend")
    return TokenFile(path, ids, borders[:-1], length, np.maximum(length - 1, 0) if targets is None else targets, mask)


def _kept(cache: Path, files: Sequence[Path], what: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return what a pass over files finds, from the cache if it was found before in files of this content."""
    digest = blake2b(repr([BORDERS_FORMAT, content_identity(files), what]).encode(), digest_size=16).hexdigest()
    path = cache / f"{digest}.npy"
    with suppress(OSError, ValueError, EOFError):  # there is none, it was pruned, or it is damaged
        os.utime(path)  # `sftkit data prune` removes what was not used for long
        known: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        if known.dtype == np.int64 and known.ndim == 1:
            return known
    found = make().astype(np.int64)
    temporary = own_name(path)
    with suppress(OSError):  # a full disk: each start makes the pass
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                np.save(file, found, allow_pickle=False)
            os.replace(temporary, path)
            return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return] # as numpy types it
        finally:
            temporary.unlink(missing_ok=True)
    return found


def check_whole_sources(data: DataConfig) -> None:
    """Reject settings that choose documents: an export has all of its sources.

    Raises:
        ConfigError: names them.
    """
    chosen = [name for name in ("val_fraction", "dedup", "decontaminate") if getattr(data, name)]
    limited = [source_label(source) for source in data.train if source.sample or where_counts(source)]
    if names := [*chosen, *(f"where or sample of {name}" for name in limited)]:
        raise config_error("choice in export", names=", ".join(names))


def write_megatron(prefix: Path, shards: Sequence[Shard], vocabulary: int) -> tuple[int, int]:
    """Write documents whole as PREFIX.bin and PREFIX.idx of Megatron, a sequence each. Return (documents, tokens).

    Raises:
        ConfigError: some tokens are not learned, which these files cannot say; or there is such a file.
    """
    ends = (".bin", ".idx")  # the index last: without it the tokens are no data set
    if found := [f"{prefix}{end}" for end in ends if Path(f"{prefix}{end}").exists()]:
        raise ConfigError(f"{found[0]} is there already: name another --out, or move it away")
    code = 8 if vocabulary <= 2**16 else 4
    temporary = [own_name(Path(f"{prefix}{end}")) for end in ends]
    lengths: list[int] = []
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with temporary[0].open("wb") as file:
            for shard in shards:
                docs = shard.docs
                if (masked := np.flatnonzero(docs["targets"] + np.uint32(1) < docs["length"])).size:
                    raise config_error("mask in megatron", name=prefix.name, row=int(docs["row"][masked[0]]) + 1)
                for start, length in zip(shard.starts.tolist(), docs["length"].tolist(), strict=True):
                    file.write(shard.tokens(start, length)[0].astype(MEGATRON_TYPES[code]).tobytes())
                lengths += docs["length"].tolist()
        size = np.array(lengths, "<i8")
        head = MEGATRON + struct.pack("<BQQ", code, len(size), len(size) + 1)
        pointers = (np.cumsum(size) - size) * np.dtype(MEGATRON_TYPES[code]).itemsize
        arrays = (size.astype("<i4"), pointers, np.arange(len(size) + 1, dtype="<i8"))
        temporary[1].write_bytes(head + b"".join(one.tobytes() for one in arrays))
        for path, end in zip(temporary, ends, strict=True):
            flush(path)
            os.replace(path, f"{prefix}{end}")
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    return len(size), int(size.sum())


# ---- shards ----------------------------------------------------------------------------------------------------------


def open_source(
    source: SourceConfig, found: Origin, tokenizer: PreTrainedTokenizerBase, count_bytes: CountBytes, cache: Path
) -> list[Shard]:
    """Return the shards of the documents that a slice of the source and max_rows ask for.

    Args:
        tokenizer: of the run.
        count_bytes: of targets (ids, is_target).
        cache: folder of what is found in a pass over a file.

    Raises:
        ConfigError: the tokens are those of another tokenizer. DataError: a file is damaged, or of no known format.
    """
    theirs = _tokenizer_of(source, tokenizer)
    words: dict[str, Any] = {"vocabulary": len(theirs), "count_bytes": count_bytes}
    eos = theirs.eos_token_id
    paths = found.files or found.fetch()
    files = [open_tokens(path, eos=eos, vocabulary=len(theirs), cache=cache) for path in paths]
    total = sum(len(file.start) for file in files)
    first, past = replace(found, rows=lambda: repeat(("", None), total)).span()
    past = total if past is None else min(past, total)
    made: list[Shard] = []
    row = 0
    for file in files:
        beside = [file.path.with_suffix(".idx"), *(Path(f"{file.path}.{end}") for end in ("index", "loss"))]
        identity = [eos, len(theirs), *content_identity([file.path, *(one for one in beside if one.is_file())])]
        place = str(file.path).replace(source.path, HERE, 1) if found.files else f"{HERE} {file.path.name}"
        for begin, end in _pieces(file, max(first - row, 0), min(past - row, len(file.start))):
            learned = np.flatnonzero((file.targets[begin:end] > 0) & (file.length[begin:end] > 1)) + begin
            dropped = end - begin - len(learned)
            line: dict[str, Any] = {
                "first": row + begin, "past": row + end, "at": begin, "rows": end - begin, "documents": len(learned),
                "counts": {"dropped_no_target": dropped} if dropped else {}, "findings": [], "odd": [], "files": {},
                "where": [(row + begin, f"{place}: document ", begin, "")], "content": identity,
            }  # fmt: skip
            if dropped:
                reason = findings.DROPPED["dropped_no_target"]
                text = f"{place}: a document of fewer than two tokens, or none of them is learned"
                line["findings"] = [{"kind": "dropped", "reason": reason, "rows": dropped, "first": text}]
            if len(learned):
                made.append(ForeignShard(line, "", None, file=file, documents=learned, **words))
            else:
                made.append(Shard(line, "<u4", None))
        row += len(file.start)
    return made


def _pieces(file: TokenFile, first: int, past: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents that are small enough for a shard."""
    while first < past:
        end = int(np.searchsorted(file.start, file.start[first] + SHARD_TOKENS))
        end = min(max(end, first + 1), past)
        yield first, end
        first = end


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def _tokenizer_of(source: SourceConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer that made the tokens of a source.

    Raises:
        ConfigError: it is not the run's, so that the ids would mean other texts. Tokens that the run adds, templates
            and which tokens are special do not count.
    """
    name = str(source.tokenizer_of)
    try:
        theirs = AutoTokenizer.from_pretrained(name, local_files_only=os.path.isdir(name) or not hub_answers())
    except Exception as error:  # transformers raises anything
        why = "" if os.path.exists(name) else f"no such folder (looked in {Path.cwd()}){similar_paths(name)}; the hub: "
        raise ConfigError(f"data source {source.path}: tokenizer_of {name}: {why}{str(error).strip()}") from error
    both = [json.loads(one.backend_tokenizer.to_str()) for one in (theirs, tokenizer)]
    ours = tokenizer.get_vocab()
    moved = [token for token, i in theirs.get_vocab().items() if ours.get(token) != i]
    differ = [part for part in ("model", "normalizer", "pre_tokenizer") if both[0][part] != both[1][part]]
    if moved or differ:
        what = f"the ids of {first_of(list(map(repr, moved)))}" if moved else f"its {differ[0]}"
        raise config_error("tokens of another tokenizer", path=source.path, name=name, what=what)
    return theirs
