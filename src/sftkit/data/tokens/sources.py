"""Turn data sources into tokenized examples: read rows, tokenize them in order into the stores of their sources, and
make the view of a run.

A store is found by its key: the content of the source, and all else that its tokens depend on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import runpy
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.config.commands import ROOT, is_ours
from sftkit.config.schema import DataConfig, SourceConfig, source_label, where_columns
from sftkit.config.tables import STAGE_SCRIPTS
from sftkit.data.hygiene import content_hash, head_hash
from sftkit.data.reading import columns as findings
from sftkit.data.reading import rows
from sftkit.data.reading.origin import Origin, find_source
from sftkit.data.reading.readers import RawRow
from sftkit.data.store import foreign, making, view
from sftkit.data.store.making import Peers
from sftkit.data.store.shards import DOCS, FORMAT, MOST_ROLES, NOTED, Shard, Store, TokenizedRows
from sftkit.data.tokens import chat, text
from sftkit.data.tokens.batch import RowBatches
from sftkit.data.types import Examples, Row, Tokenized, TokenizedExample
from sftkit.errors import ConfigError, DataError, LeftOut, WorkerError, hint
from sftkit.runtime.script import likely_cause
from sftkit.runtime.signals import ignore_signals, starting_processes

MASK_VERSION = 2
"""Raised whenever the same rows lead to other tokens, targets, counts or findings: stores of another version are not
read. tests/data/test_mask_version.py fails until it is raised."""
WHOLE = 2**20
"""Most row positions of a conversation in a store, and of a piece of a text; data.max_length cuts what is read from
there."""
NOT_IN_TOKENS = (
    *("path", "name", "subset", "split", "repeat", "max_rows", "sample", "files", "revision"),
    *("weight", "max_epochs", "order"),
)
"Settings of a source that decide which of its files and documents are used, and how often; `identity` has its content."
FEW_ROWS = 20_000
FEW_BYTES = 30_000_000
"With data.num_proc null, this process alone tokenizes the first rows, unless the source's files have more bytes."
MOST_PROCESSES = 32
COMPARED_ROWS = 64
"ReadRows that are tokenized again if libraries have another version than those that a store was made with."

log = logging.getLogger(__name__)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of what decides tokens: vocabulary and merges, special tokens, chat template."""
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    parts = [tokenizer.backend_tokenizer.to_str(), special, json.dumps(tokenizer.chat_template, sort_keys=True)]
    if (start := text.text_start(tokenizer)) is not None:
        parts.append(f"texts begin with {start}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


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
    def _batch(self) -> RowBatches:
        return RowBatches(self.rule, self.tokenizer, self.settings)

    @property
    def settings(self) -> dict[str, object]:
        """Return the keyword arguments of the rule."""
        names = ("learning", "max_length", "too_long", "special_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def limits(self) -> view.Limits | None:
        """Return how documents from a store are cut; None: a rule of which that is not known cuts them itself."""
        if self.rule not in (chat.tokenize, text.tokenize, text.tokenize_any):
            return None
        return view.Limits(self.max_length, self.too_long or "truncate")

    @property
    def whole(self) -> RowTokenizer:
        """Return what makes the documents of a store: those of known rules are not cut."""
        if self.limits is None:
            return self
        return replace(self, max_length=WHOLE, too_long=None if self.too_long is None else "truncate")

    @cached_property
    def identity(self) -> dict[str, str]:
        """Return what the documents of a row depend on besides the row, as text for the key of a store."""
        rule = f"{self.rule.__module__}.{self.rule.__qualname__}"
        # The fingerprint identifies the tokenizer: the text of the object would differ in every process.
        return {
            "rule": rule,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "settings": str(sorted(self.settings.items())),
        }


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


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_source(source: SourceConfig, on_bad_row: OnBadRow = "error", data: DataConfig | None = None) -> Iterator[Row]:
    """Yield the rows of a source in order, once (`repeat` is not applied). With "skip", bad rows are left out, and
    reported at the end.

    Args:
        data: as for find_source.
    """
    tally: findings.Tally = {}
    for raw in find_source(source, data).part():
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


# ---- stores ----------------------------------------------------------------------------------------------------------


def load_sources(
    sources: Sequence[SourceConfig], data: DataConfig, tokenize: RowTokenizer, peers: Peers = making.NO_PEERS
) -> Examples:
    """Return all documents of the sources, source after source, from their stores, which are filled where shards are
    missing. What was found in their rows is reported either way.

    A source that yields no document is a DataError. With `repeat`, documents and counts are those of all passes.
    """
    origins = [find_source(source, data) for source in sources]
    stored = [
        view.StoredSource(source, prepare(source, origin, data, tokenize, peers))
        for source, origin in zip(sources, origins, strict=True)
    ]
    limits = tokenize.limits
    if limits is not None and (limits.too_long, data.on_bad_row) == ("error", "skip"):
        limits = limits._replace(too_long="skip")
    used = [(one.path, one.repeat, source_label(one), [shard.line for shard in shards]) for one, shards in stored]
    folder = Path(data.cache_dir) / "views" / _digest([used, limits, MASK_VERSION, FORMAT])
    count_bytes = partial(chat.count_bytes, tokenize.tokenizer)
    examples = view.make_examples(stored, limits, count_bytes, folder, peers)
    for counts in examples.counts.values():  # every source has every count, zeros too
        counts.update({name: counts.get(name, 0) for name in chat.ANSWER_COUNTS})
    for i, (source, one) in enumerate(zip(sources, origins, strict=True)):
        said = one.said
        if source.tokenizer_of is not None:
            # Nothing else shows whether the tokens are what they should be.
            first = examples[int(np.argmax(examples.source == i))].ids[:24]
            said = "; ".join(filter(None, (said, f"it begins {tokenize.tokenizer.decode(first)!r}")))
        if said:
            log.info("%s: %s", source_label(source), said)
            examples.files[source_label(source)] = said
    for name, found in examples.findings.items():
        findings.log_findings(name, found)
    return examples


def prepare(
    source: SourceConfig, origin: Origin, data: DataConfig, tokenize: RowTokenizer, peers: Peers = making.NO_PEERS
) -> list[Shard]:
    """Return the shards of a source in order, made where they are missing.

    Raises:
        DataError: a bad row, or one that is too long, if that is an error.
    """
    if source.tokenizer_of is not None:
        if tokenize.rule not in (text.tokenize, text.tokenize_any):
            problem = "tokens of another program are texts, and this stage does not learn from texts"
            raise ConfigError(f"data source {source.path}: {problem}. Take base_train.py or mid_train.py")
        return foreign.open_source(source, origin, tokenize.tokenizer, Path(data.cache_dir) / "borders")
    store, about = _store_of(source, origin, Path(data.cache_dir) / "stores", tokenize)
    per_shard = making.rows_per_shard(store, origin.rows, about)
    shards = []
    with suppress(OSError):  # `sftkit data prune` removes what was not used for long
        os.utime(store.folder / making.STORE_FILE)
    with _chunk_tokenizer(tokenize.whole, data, origin.num_bytes, store.dtype) as tokenize_chunks:
        settings: dict[str, Any] = {"per_shard": per_shard, "peers": peers}
        for shard in making.shards_of(store, source, origin.rows, origin.span(), tokenize_chunks, **settings):
            skipped = next((one for one in shard.tally(source.path).values() if one.kind == "skipped"), None)
            if skipped is not None and data.on_bad_row == "error":
                raise findings.advised(DataError(skipped.first, reason=skipped.reason))
            if tokenize.limits is not None and (tokenize.too_long, data.on_bad_row) == ("error", "error"):
                view.check_lengths(shard, source, tokenize.limits)
            shards.append(shard)
    return sorted(shards, key=lambda shard: shard.span)


def _store_of(
    source: SourceConfig, origin: Origin, folder: Path, tokenize: RowTokenizer
) -> tuple[Store, dict[str, Any]]:
    """Return the store of a source, which may be empty, and what decides its tokens."""
    kept = {name: value for name, value in asdict(source).items() if name not in NOT_IN_TOKENS}
    kept["where"] = where_columns(source)
    about = {
        **tokenize.whole.identity,
        "converter": kept,
        "content": origin.identity(),
        "mask_version": MASK_VERSION,
        "format": FORMAT,
        "vocabulary": len(tokenize.tokenizer),
    }
    if tokenize.limits is None:  # its documents may name pictures next to the rows
        about["place"] = str(Path(source.path).resolve())
    key = _digest(about)
    store = Store(folder / key, len(tokenize.tokenizer))
    libraries = [f"{name} {version(name)}" for name in ("transformers", "tokenizers", "jinja2")]
    about |= {"source": source.path, "libraries": [libraries]}
    there = making.read_about(store)
    if there and libraries not in there["libraries"]:
        if _is_same(store, source, origin, tokenize.whole):
            making.write_about(store, {**there, "libraries": [*there["libraries"], libraries]})
        else:
            store = Store(folder / _digest([key, libraries]), len(tokenize.tokenizer))
    return store, about


def _is_same(store: Store, source: SourceConfig, origin: Origin, tokenize: RowTokenizer) -> bool:
    """Return whether the first rows of a store lead to the same documents as when it was made."""
    line = min(store.lines().items(), default=None)
    if line is None:
        return True
    shard = store.find(line[0], said=True)
    rows_again = islice(origin.rows(), line[0].first, min(line[0].first + COMPARED_ROWS, line[0].past))
    part = _tokenize_chunk(tokenize, "skip", store.dtype, (line[0].first, list(rows_again)))
    docs = np.array(part.docs, DOCS)
    if shard is None or not np.array_equal(docs["length"], shard.docs["length"][: len(docs)]):
        return False
    ids, is_target = shard.tokens(0, int(docs["length"].sum()))
    is_target[np.cumsum(docs["length"])[:-1]] = False
    return not part.ids or (np.array_equal(ids, part.ids[0]) and np.array_equal(is_target, part.is_target[0]))


def _digest(description: object) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:32]


# ---- tokenizing ------------------------------------------------------------------------------------------------------


def _tokenize_chunk(
    tokenize: RowTokenizer, on_bad_row: OnBadRow, dtype: str, chunk: tuple[int, list[RawRow]]
) -> TokenizedRows:
    """Tokenize some rows, and keep what became of each.

    Args:
        dtype: of ids in the store.
        chunk: the number of the first row, and the rows.
    """
    part = TokenizedRows(where=[raw[0] for raw in chunk[1]])
    parsed: list[Row | DataError] = []
    for raw in chunk[1]:
        try:
            parsed.append(rows.parse(raw))
        except DataError as error:
            parsed.append(error)
    results = iter(tokenize.many([row for row in parsed if isinstance(row, Row)]))
    for number, row in enumerate(parsed, start=chunk[0]):
        result = next(results) if isinstance(row, Row) else row
        # A bad row ends the run, or is counted and left out.
        if isinstance(result, LeftOut):
            part.counts["dropped_where"] += 1
            findings.add(part.tally, "dropped", result.reason, str(result))
            continue
        if isinstance(result, DataError):
            if on_bad_row == "error":
                raise findings.advised(result) from result
            part.counts["skipped_bad"] += 1
            findings.add(part.tally, "skipped", result.reason, str(result))
            continue
        assert isinstance(row, Row)
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
        if not result.examples:
            continue
        roles = Counter(message["role"] for message in row.messages or ())
        part.counts.update({view.ROLE_COUNTS[role]: number for role, number in roles.items()})
        for reason, where in result.odd.items():
            findings.add(part.tally, "accepted", reason, where)
            part.odd.append((number, reason))
        own = (
            *(number, NOTED if result.note else 0, content_hash(row), head_hash(row)),
            tuple(min(roles[role], MOST_ROLES) for role in view.ROLE_COUNTS),
        )
        for one in _whole_text(result.examples):
            part.add(one, own)
    return part.packed(dtype)


def _whole_text(examples: list[TokenizedExample]) -> list[TokenizedExample]:
    """Return a text that is longer than WHOLE as one document: each of its pieces begins with the last token of the one
    before."""
    if len(examples) == 1 or any(one.size for one in examples):
        return examples
    ids = np.concatenate([examples[0].ids, *(one.ids[1:] for one in examples[1:])])
    is_target = np.concatenate([examples[0].is_target, *(one.is_target[1:] for one in examples[1:])])
    return [TokenizedExample(ids, is_target, sum(one.num_bytes for one in examples))]


# ---- processes -------------------------------------------------------------------------------------------------------


_worker: dict[str, Callable[[tuple[int, list[RawRow]]], TokenizedRows]] = {}
"The function that a worker process was started with."


@contextmanager
def _chunk_tokenizer(
    tokenize: RowTokenizer, data: DataConfig, num_bytes: int | None, dtype: str
) -> Iterator[making.TokenizeChunks]:
    """Yield what tokenizes chunks in order: in this process, or in others, which end with the block.

    Args:
        num_bytes: of the source's files, if that is known.
        dtype: of ids in the store.
    """
    tokenize_chunk = partial(_tokenize_chunk, tokenize, data.on_bad_row, dtype)
    processes = data.num_proc or available_processes()
    if processes == 1:
        yield partial(map, tokenize_chunk)
        return
    executor: ProcessPoolExecutor | None = None
    # A process imports for seconds, in which one tokenizes thousands of rows.
    alone = 0 if data.num_proc or (num_bytes or 0) > FEW_BYTES else FEW_ROWS

    def tokenize_chunks(chunks: Iterable[tuple[int, list[RawRow]]]) -> Iterator[TokenizedRows]:
        nonlocal alone, executor
        iterator = iter(chunks)
        while alone > 0:
            if (chunk := next(iterator, None)) is None:
                return
            alone -= len(chunk[1])
            yield tokenize_chunk(chunk)
        if executor is None:
            # Not fork: threads of this process, of torch or a tokenizer, may hold locks.
            spawn = multiprocessing.get_context("spawn")
            handed_over = (pickle.dumps(tokenize_chunk),)
            executor = ProcessPoolExecutor(processes, spawn, initializer=_start_worker, initargs=handed_over)
        yield from _in_processes(executor, processes, iterator)

    try:
        yield tokenize_chunks
    finally:
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)


def available_processes() -> int:
    """Return the cores of this machine for each process of the run on it, at most MOST_PROCESSES."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1), MOST_PROCESSES)


def _in_processes(
    executor: ProcessPoolExecutor, processes: int, chunks: Iterable[tuple[int, list[RawRow]]]
) -> Iterator[TokenizedRows]:
    """Yield the parts of the chunks in order; only a few chunks are ahead of them. Raises WorkerError, with what was
    being tokenized, if a process is gone."""
    # Each chunk is kept with its first and last row, to name the rows in work if a process dies.
    waiting: deque[tuple[Future[TokenizedRows], str]] = deque()
    try:
        for chunk in chunks:
            # The pool starts a process at a submit, and what it inherits of signals is decided then.
            with starting_processes():
                tokenized = executor.submit(_work, chunk)
            waiting.append((tokenized, f"{chunk[1][0][0]} to {chunk[1][-1][0]}"))
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


def _start_worker(tokenize_chunk: bytes) -> None:
    """Make ready for tokenizing. `tokenize_chunk` is pickled."""
    import transformers.utils
    from transformers.utils import import_utils

    ignore_signals()  # the main process decides
    # A tokenizer of transformers would import torch, to read weights in GGUF files: seconds, and memory, for nothing.
    transformers.utils.is_torch_available = import_utils.is_torch_available = lambda: False
    _worker["tokenize"] = pickle.loads(tokenize_chunk)


def _work(chunk: tuple[int, list[RawRow]]) -> TokenizedRows:
    return _worker["tokenize"](chunk)
