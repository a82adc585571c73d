"""Turn data sources into tokenized examples: read rows, tokenize them in order, count their outcomes, cache.

A cache entry is a folder of flat arrays, see reading/store.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import runpy
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.config.commands import ROOT, is_ours
from sftkit.config.schema import DataConfig, SourceConfig, source_label
from sftkit.config.tables import STAGE_SCRIPTS
from sftkit.data import hygiene
from sftkit.data.reading import columns as findings
from sftkit.data.reading import conversation, readers, rows, store
from sftkit.data.reading.origin import find_source
from sftkit.data.reading.readers import RawRow
from sftkit.data.tokens import chat, text
from sftkit.data.tokens.batch import Batch
from sftkit.data.types import DocumentColumns, Examples, Finding, FlatTokens, Row, Tokenized, TokenizedExample
from sftkit.errors import ConfigError, DataError, LeftOut, WorkerError, hint
from sftkit.runtime.script import counted, likely_cause, working
from sftkit.runtime.signals import ignore_signals, starting_processes

FORMAT = 5
"The version of the files of a cache entry."
MASK_VERSION = 2
"""Raised whenever the same rows lead to other tokens, targets, counts or findings: entries of another version are not
read. tests/data/test_mask_version.py fails until it is raised."""
ARRAYS = {"ids": np.int32, "is_target": np.bool_, "offsets": np.int64, "num_bytes": np.int64, "source": np.int16}
ARRAYS |= {"row": np.int32, "turns": np.int32, "content": np.uint64, "head": np.uint64}
"Arrays of a cache entry, each in a file of its own."

log = logging.getLogger(__name__)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of what decides tokens: vocabulary and merges, special tokens, chat template."""
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    parts = [tokenizer.backend_tokenizer.to_str(), special, json.dumps(tokenizer.chat_template, sort_keys=True)]
    if (start := text.text_start(tokenizer)) is not None:
        parts.append(f"texts begin with {start}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def data_key(description: Mapping[str, object]) -> str:
    """Return the sha256 of everything that the tokenized data depends on."""
    whole = {"format": FORMAT, "mask_version": MASK_VERSION, **description}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def load_cached_examples(folder: Path, *, instead: str = "tokenizing again") -> Examples | None:
    """Return the examples in a folder, as store.load."""

    def build(arrays: dict[str, Any]) -> Examples:
        meta = json.loads((folder / "meta.json").read_text())
        tokens = FlatTokens(arrays["ids"], arrays["is_target"], arrays["offsets"])
        # The arrays must fit together.
        sizes = {"ids": tokens.offsets[-1], "is_target": tokens.offsets[-1], "offsets": len(tokens.offsets)}
        for name, dtype in ARRAYS.items():
            size = sizes.get(name, len(tokens.offsets) - 1)
            if arrays[name].dtype != dtype or arrays[name].shape != (size,):
                raise ValueError(f"{name} is {arrays[name].dtype}{arrays[name].shape}, {size} expected")
        return Examples(
            tokens,
            np.diff(tokens.offsets) - 1,
            tokens.num_targets(),
            num_bytes=arrays["num_bytes"],
            source=arrays["source"],
            source_names=tuple(meta["source_names"]),
            counts=meta["counts"],
            findings={name: tuple(Finding(**one) for one in found) for name, found in meta["findings"].items()},
            encoder_sources=meta["given"],
            columns=DocumentColumns(**{name: arrays[name] for name in DocumentColumns._fields}),
            key=folder.name,
        )

    return store.load(folder, ARRAYS, build, instead=instead)


def save_cached_examples(folder: Path, examples: Examples) -> Examples:
    """Write examples to a folder. Return the memory-mapped copy, or `examples` on a full disk."""

    def write(temporary: Path) -> None:
        flat = examples.tokens
        assert isinstance(flat, FlatTokens)
        assert examples.columns is not None
        arrays = {**vars(flat), "num_bytes": examples.num_bytes, "source": examples.source}
        arrays |= examples.columns._asdict()
        for name, dtype in ARRAYS.items():
            array: np.ndarray = np.asarray(arrays[name], dtype=dtype)
            np.save(temporary / f"{name}.npy", array, allow_pickle=False)
        findings = {name: [asdict(one) for one in found] for name, found in examples.findings.items()}
        meta = {"source_names": examples.source_names, "counts": examples.counts, "findings": findings}
        (temporary / "meta.json").write_text(json.dumps(meta | {"given": list(examples.encoder_sources)}, indent=1))

    def is_whole() -> bool:
        return load_cached_examples(folder, instead="") is not None

    store.save(folder, write, is_whole, instead="every start will tokenize")
    return load_cached_examples(folder, instead="") or examples


OnBadRow = Literal["error", "skip"]


@dataclass(frozen=True)
class RowTokenizer:
    """The mask policy of a stage: a rule and its settings, which turn a row into documents and their loss mask.

    Training and inspection of a stage share a cache, whose key names the rule and its settings.
    """

    rule: Callable[..., Tokenized]
    "chat.tokenize or one of text.py, for example; takes a row, the tokenizer and `settings`"
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    "most row positions of a document"
    too_long: str | None = None
    "data.too_long; None: the rule cuts a text into documents that fit"
    learning: chat.Learning | None = None
    "which tokens of a conversation are learned; None: the rule's own choice"
    special_tokens: str | None = None
    "data.special_tokens_in_text; None: the rule takes no plain texts"

    def __call__(self, row: Row) -> Tokenized:
        """Return the documents of a row."""
        return self.rule(row, self.tokenizer, **self.settings)

    def many(self, rows: Sequence[Row]) -> list[Tokenized | DataError]:
        """Return the documents of each row, or its error, as for one row; two to three times as fast."""
        return self._batch.many(rows)

    @cached_property
    def _batch(self) -> Batch:
        return Batch(self.rule, self.tokenizer, self.settings)

    @property
    def settings(self) -> dict[str, object]:
        """Return the keyword arguments of the rule."""
        given = {
            "learning": self.learning,
            "max_length": self.max_length,
            "too_long": self.too_long,
            "special_tokens": self.special_tokens,
        }
        return {name: value for name, value in given.items() if value is not None}

    @cached_property
    def identity(self) -> dict[str, str]:
        """Return what the documents of a row depend on besides the row, as text for the cache's key."""
        rule = f"{self.rule.__module__}.{self.rule.__qualname__}"
        # The fingerprint identifies the tokenizer: the text of the object would differ in every process.
        fingerprint = tokenizer_fingerprint(self.tokenizer)
        return {"cache_key": f"{rule} {fingerprint}", "bound": str(sorted(self.settings.items()))}


def stage_rule(stage: str) -> Callable[[DataConfig, PreTrainedTokenizerBase, int], RowTokenizer]:
    """Return `row_tokenizer` of the script that runs a stage here, which says what the stage learns.

    Raises:
        ConfigError: the script, a changed one, has no such function.
    """
    script = f"scripts/{STAGE_SCRIPTS[stage]}"
    script = script if is_ours(script) else str(ROOT / script)
    found = runpy.run_path(script).get("row_tokenizer")
    if found is None:
        raise ConfigError(f"{script}: no function row_tokenizer, which says what the stage learns")
    return found  # type: ignore[no-any-return]


COUNTS = ("rows", "documents", "truncated", "dropped_too_long", "dropped_no_target", "dropped_where", "skipped_bad")
BECAME = {
    "truncated": "truncated",
    "dropped_too_long": "longer than data.max_length, dropped (data.too_long)",
    "dropped_no_target": "without a target: cut before the first one at data.max_length, or marked as not to be "
    "learned",
    "dropped_where": "left out by where",
    "skipped_bad": "skipped as bad",
}
ROLE_COUNTS = {role: f"messages_{role}" for role in conversation.ROLES}
"Role -> name of the count of its messages, in conversations that are learned from."
ROWS_PER_CHUNK = 128
"Rows that a worker process gets at a time."


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_source(source: SourceConfig, on_bad_row: OnBadRow = "error", data: DataConfig | None = None) -> Iterator[Row]:
    """Yield the rows of a source in order, once (`repeat` is not applied). With "skip", bad rows are left out, and
    reported at the end.

    Args:
        data: as for find_source.
    """
    tally: findings.Tally = {}
    for raw in find_source(source, data).rows():
        try:
            row = rows.parse(raw)
        except LeftOut as out:
            findings.add(tally, "dropped", out.reason, str(out))
        except DataError as error:
            if on_bad_row == "error":
                raise findings.advised(error) from error
            findings.add(tally, "skipped", error.reason, str(error))
        else:
            yield row
    findings.log_findings(source_label(source), findings.sort_findings(tally))


# ---- tokenizing ------------------------------------------------------------------------------------------------------


@dataclass
class _TokenizedRows:
    """The outcome of some rows: arrays of their documents, and counts."""

    documents: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    "of each chunk that has any: ids, is_target, lengths and bytes of its documents, and DocumentColumns"
    encoder_sources: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    tally: findings.Tally = field(default_factory=dict)

    def add(self, other: _TokenizedRows) -> None:
        """Append the documents and counts of another part."""
        rows_before = self.counts["rows"]
        self.documents += [(*d[:4], d[4] + rows_before, *d[5:]) for d in other.documents]
        self.encoder_sources += other.encoder_sources
        self.counts += other.counts
        for one in other.tally.values():
            findings.add(self.tally, one.kind, one.reason, one.first, one.rows)


TokenizeChunks = Callable[[Iterable[list[RawRow]]], Iterator[_TokenizedRows]]


def load_sources(sources: Sequence[SourceConfig], data: DataConfig, tokenize: RowTokenizer) -> Examples:
    """Return all documents of the sources, source after source, from the cache on disk if they are there. What was
    found in their rows is reported either way.

    A source that yields no document is a DataError. With `repeat`, documents and counts are those of all passes.
    """
    origins = [find_source(source, data) for source in sources]
    # All that the tokenized data depends on, besides the code.
    description = {
        "sources": [[asdict(source), one.identity()] for source, one in zip(sources, origins, strict=True)],
        **tokenize.identity,
        "max_length": data.max_length,
        "too_long": data.too_long,
        "on_bad_row": data.on_bad_row,
    }
    folder = Path(data.cache_dir) / data_key(description)
    examples = load_cached_examples(folder)
    if examples is None:
        parts = []
        with _chunk_tokenizer(tokenize, data) as tokenize_chunks:
            for source, origin in zip(sources, origins, strict=True):
                with working(f"tokenizing {source_label(source)}"):
                    parts.append(_tokenize_source(source, tokenize_chunks(_chunks(origin.rows()))))
        examples = save_cached_examples(folder, _joined(parts, sources))
    for source, one in zip(sources, origins, strict=True):
        if one.said:
            log.info("%s: %s", source_label(source), one.said)
            examples.files[source_label(source)] = one.said
    for name, found in examples.findings.items():
        findings.log_findings(name, found)
    return examples


def _tokenize_source(source: SourceConfig, chunks: Iterator[_TokenizedRows]) -> _TokenizedRows:
    """Return what became of all rows of a source; reject a source without documents.

    Args:
        chunks: the source's rows, tokenized.
    """
    total = _TokenizedRows()
    for chunk_rows in chunks:
        total.add(chunk_rows)
    if not total.counts["rows"]:
        raise readers.no_rows(source)
    if not total.documents:
        became = ", ".join(f"{total.counts[c]} {words}" for c, words in BECAME.items() if total.counts[c])
        said = (one for one in findings.sort_findings(total.tally) if one.kind != "read")
        found = "".join(f". {findings.finding_text(finding)}" for finding in said)
        rows_read = counted(total.counts["rows"], "row")
        raise DataError(f"data source {source.path}: nothing to learn in its {rows_read} ({became}){found}")
    return total


def _tokenize_chunk(tokenize: RowTokenizer, on_bad_row: OnBadRow, chunk: list[RawRow]) -> _TokenizedRows:
    """Tokenize some rows, and count what became of each."""
    part = _TokenizedRows(counts=Counter(rows=len(chunk)))
    documents: list[TokenizedExample] = []
    of_rows: list[tuple[int, ...]] = []
    for number, raw in enumerate(chunk):
        # A bad row ends the run, or is counted and left out.
        try:
            row = rows.parse(raw)
            result = tokenize(row)
        except LeftOut as out:
            part.counts["dropped_where"] += 1
            findings.add(part.tally, "dropped", out.reason, str(out))
            continue
        except DataError as error:
            if on_bad_row == "error":
                raise findings.advised(error) from error
            part.counts["skipped_bad"] += 1
            findings.add(part.tally, "skipped", error.reason, str(error))
            continue
        is_first = ("read", row.shape) not in part.tally
        said = f"{row.where}: {rows.as_read(row, tokenize.tokenizer.decode)}" if is_first else ""
        findings.add(part.tally, "read", row.shape, said)
        for name in (*row.unused, *result.unused):
            findings.add(part.tally, "unused", name, row.where)
        # The outcome of the row: learned from, dropped, or learned from with data warnings.
        part.counts.update(result.counts)
        if result.note:
            part.counts[result.note] += 1
        if result.note in findings.DROPPED:
            findings.add(part.tally, "dropped", findings.DROPPED[result.note], f"{row.where}: {result.details}")
        if result.examples:
            part.counts.update(ROLE_COUNTS[message["role"]] for message in row.messages or ())
            for reason, where in result.odd.items():
                findings.add(part.tally, "accepted", reason, where)
        documents += result.examples
        of_row = number, len(row.messages or ()), hygiene.content_hash(row), hygiene.head_hash(row)
        of_rows += [of_row] * len(result.examples)
    # One array for the chunk: a worker hands it over at once.
    if documents:
        part.counts["documents"] = len(documents)
        columns = zip(*((d.ids, d.is_target, [len(d.ids)], [d.num_bytes]) for d in documents), strict=True)
        of_documents = zip(DocumentColumns._fields, zip(*of_rows, strict=True), strict=True)
        chosen_by = (np.array(values, ARRAYS[name]) for name, values in of_documents)
        part.documents = [(*map(np.concatenate, columns), *chosen_by)]
        part.encoder_sources = [d.encoder_source for d in documents if d.encoder_source]
    return part


def _chunks(items: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, ROWS_PER_CHUNK)):
        yield chunk


def _joined(parts: list[_TokenizedRows], sources: Sequence[SourceConfig]) -> Examples:
    """Concatenate the documents of all sources, with those of `repeat` passes."""
    # `repeat` stores real copies: later stages treat each copy as an independent document.
    repeated = [(i, part) for i, part in enumerate(parts) for _ in range(sources[i].repeat)]
    # Every source has every count, zeros too.
    count_names = (*COUNTS, *chat.ANSWER_COUNTS, *ROLE_COUNTS.values())
    names = tuple(map(source_label, sources))
    by_name = list(zip(names, parts, sources, strict=True))
    columns = zip(*(chunk for _, part in repeated for chunk in part.documents), strict=True)
    ids, is_target, lengths, num_bytes, *chosen_by = map(np.concatenate, columns)
    tokens = FlatTokens(ids, is_target, np.concatenate([[0], np.cumsum(lengths)]))
    return Examples(
        tokens,
        lengths - 1,
        tokens.num_targets(),
        num_bytes=num_bytes,
        source=np.concatenate([np.full(part.counts["documents"], i, dtype=np.int16) for i, part in repeated]),
        source_names=names,
        counts={n: {count: part.counts[count] * one.repeat for count in count_names} for n, part, one in by_name},
        findings={name: findings.sort_findings(part.tally, source.repeat) for name, part, source in by_name},
        encoder_sources=[name for _, part in repeated for name in part.encoder_sources],
        columns=DocumentColumns(*chosen_by),
    )


# ---- processes -------------------------------------------------------------------------------------------------------


_worker: dict[str, Callable[[list[RawRow]], _TokenizedRows]] = {}
"The function that a worker process was started with."


@contextmanager
def _chunk_tokenizer(tokenize: RowTokenizer, data: DataConfig) -> Iterator[TokenizeChunks]:
    """Yield what tokenizes chunks in order: in this process or in data.num_proc others, which end with the block."""
    tokenize_chunk = partial(_tokenize_chunk, tokenize, data.on_bad_row)
    if data.num_proc == 1:
        yield partial(map, tokenize_chunk)
        return
    # Not fork: threads of this process, of torch or a tokenizer, may hold locks.
    spawn = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(data.num_proc, spawn, initializer=_start_worker, initargs=(tokenize_chunk,))
    try:
        yield partial(_in_processes, executor, data.num_proc)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _in_processes(
    executor: ProcessPoolExecutor, processes: int, chunks: Iterable[list[RawRow]]
) -> Iterator[_TokenizedRows]:
    """Yield the parts of the chunks in order; only a few chunks are ahead of them. Raises WorkerError, with what was
    being tokenized, if a process is gone."""
    # Each chunk is kept with its first and last row, to name the rows in work if a process dies.
    waiting: deque[tuple[Future[_TokenizedRows], str]] = deque()
    try:
        for chunk in chunks:
            # The pool starts a process at a submit, and what it inherits of signals is decided then.
            with starting_processes():
                tokenized = executor.submit(_work, chunk)
            waiting.append((tokenized, f"{chunk[0][0]} to {chunk[-1][0]}"))
            if len(waiting) > 4 * processes:
                yield waiting[0][0].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][0].result()
            waiting.popleft()
    except BrokenProcessPool as error:
        left = [rows for future, rows in waiting if not future.done() or future.exception() is not None]
        cause = likely_cause(signal.SIGKILL)
        raise WorkerError(hint("dead tokenizing process", cause=cause, rows="; ".join(left[:processes]))) from error


def _start_worker(tokenize_chunk: Callable[[list[RawRow]], _TokenizedRows]) -> None:
    ignore_signals()  # the main process decides
    _worker["tokenize"] = tokenize_chunk


def _work(chunk: list[RawRow]) -> _TokenizedRows:
    return _worker["tokenize"](chunk)
