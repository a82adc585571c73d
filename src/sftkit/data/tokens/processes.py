"""Tokenize the rows of a source in chunks, in order: in this process, or in others.

Loaded by a start that has rows to tokenize.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial

import numpy as np

from sftkit.config.schema import DataConfig
from sftkit.data.hygiene import content_hash, head_hash
from sftkit.data.reading import columns as findings
from sftkit.data.reading import rows
from sftkit.data.reading.readers import RawRow
from sftkit.data.store import view
from sftkit.data.store.making import TokenizeChunks
from sftkit.data.store.shards import MOST_ROLES, NOTED
from sftkit.data.store.writing import TokenizedRows
from sftkit.data.tokens.sources import OnBadRow, RowTokenizer
from sftkit.data.types import Row, TokenizedExample
from sftkit.errors import DataError, LeftOut, WorkerError, hint
from sftkit.runtime.script import likely_cause
from sftkit.runtime.signals import ignore_signals, starting_processes

FEW_ROWS = 20_000
FEW_BYTES = 30_000_000
"With data.num_proc null, this process alone tokenizes the first rows, unless the source's files have more bytes."
MOST_PROCESSES = 32


def tokenize_chunk(
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
    part.differs = tokenize.differs
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
def chunk_tokenizer(
    tokenize: RowTokenizer, data: DataConfig, num_bytes: int | None, dtype: str
) -> Iterator[TokenizeChunks]:
    """Yield what tokenizes chunks in order: in this process, or in others, which end with the block.

    Args:
        num_bytes: of the source's files, if that is known.
        dtype: of ids in the store.
    """
    work = partial(tokenize_chunk, tokenize, data.on_bad_row, dtype)
    processes = data.num_proc or available_processes()
    if processes == 1:
        yield partial(map, work)
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
            yield work(chunk)
        if executor is None:
            # Not fork: threads of this process, of torch or a tokenizer, may hold locks. Of a process without threads,
            # which imports once for all.
            forks = multiprocessing.get_context("forkserver")
            forks.set_forkserver_preload(["sftkit.data.tokens.preloaded"])
            handed_over = (pickle.dumps(work),)
            executor = ProcessPoolExecutor(processes, forks, initializer=_start_worker, initargs=handed_over)
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
    ignore_signals()  # the main process decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    _worker["tokenize"] = pickle.loads(tokenize_chunk)


def _work(chunk: tuple[int, list[RawRow]]) -> TokenizedRows:
    return _worker["tokenize"](chunk)
