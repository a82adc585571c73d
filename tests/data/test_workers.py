"""A process that makes data and is killed, really: the run ends with the cause."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_examples, make_layout_of, of_two_sources

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.batches.epoch import RankRows, RowShard
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.tokens import sources
from sftkit.data.types import Row, Tokenized
from sftkit.errors import WorkerError

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29] * 40


def batches_of(workers: int) -> Batches:
    examples = make_examples(LENGTHS)
    return Batches(StepDataset(examples, make_layout_of("packed", examples.lengths)), seed=0, num_workers=workers)


def too_long(*_: object) -> None:
    pytest.fail("the run waits for a lock of a worker that is gone")


@pytest.mark.parametrize("held", [False, True])
def test_a_data_worker_that_is_killed_ends_the_run_with_its_cause(held: bool) -> None:
    """`held`: while it had the lock that torch takes to end the others."""
    batches = batches_of(2)
    steps = batches.steps(0, 40)
    workers: list[Any] = []

    def train() -> None:
        with batches.workers_named():
            next(steps)
            workers.extend(batches._iterator._workers)  # type: ignore[attr-defined]
            if held:
                batches._iterator._workers_done_event._cond.acquire()  # type: ignore[attr-defined]
            os.kill(workers[0].pid, signal.SIGKILL)
            for _ in range(1000):  # torch says so in a signal handler, wherever this is
                time.sleep(0.01)

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    try:
        with pytest.raises(
            WorkerError, match=r"^DataLoader worker \(pid \d+\) is killed by signal: Killed: .*data.num_workers"
        ):
            train()
        for worker in workers:
            worker.join(20)
            assert not worker.is_alive()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for worker in workers:
            worker.kill()


def test_an_error_that_is_not_of_a_data_worker_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="cheese"), batches_of(0).workers_named():
        raise RuntimeError("cheese")


@pytest.mark.parametrize("kind", ["full", "columns", "chunks"])
def test_a_step_from_another_process_is_the_one_that_was_built_in_one_block_of_memory(kind: str) -> None:
    examples = of_two_sources(make_examples([30, 4, 25, 8, 31, 3, 17, 29] * 4))
    layout = make_layout_of("packed", examples.lengths, world_size=2)
    share = RankRows(1, RowShard(kind, 1, 1 if kind == "full" else 2))  # type: ignore[arg-type]
    (built,) = Batches(StepDataset(examples, layout, share), seed=0).steps(0, 1)
    arrived = pickle.loads(pickle.dumps(built))
    assert len(built.micro_batches) > 1
    for ours, theirs in zip(arrived.micro_batches, built.micro_batches, strict=True):
        assert [*map(torch.equal, ours.tensors(), theirs.tensors())] == [True] * len(theirs.tensors())
        assert ours.each(lambda _: torch.empty(0)).inputs.keys() == theirs.inputs.keys()
        for name in ("adapters", "num_targets", "num_tokens", "max_doc_length", "noise"):
            assert getattr(ours, name) == getattr(theirs, name)
    tensors = [tensor for batch in arrived.micro_batches for tensor in batch.tensors()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(tensor.is_contiguous() and tensor.storage_offset() * tensor.itemsize % 64 == 0 for tensor in tensors)
    assert replace(arrived, micro_batches=[]) == replace(built, micro_batches=[])


def test_workers_end_after_the_last_step_and_not_while_it_is_waited_for() -> None:
    """Several ranks would wait for each other's workers to end, too."""
    batches = batches_of(1)
    with batches.workers_named():
        assert len(list(batches.steps(0, 3))) == 3
        (worker,) = batches._iterator._workers  # type: ignore[attr-defined]
        assert worker.is_alive()
    worker.join(20)
    assert not worker.is_alive()


def ends_at_seven(row: Row, tokenizer: Any, max_length: int) -> Tokenized:
    if row.text == "row 700":
        os.kill(os.getpid(), signal.SIGKILL)
    return Tokenized([], "dropped_no_target")


@pytest.mark.slow
def test_a_process_that_tokenizes_and_is_killed_names_the_rows_in_hand(
    tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(1, 1001)))
    data = DataConfig(train=(), num_proc=2, cache_dir=str(tmp_path / "cache"))
    tokenize = sources.RowTokenizer(ends_at_seven, make_tokenizer(), 8)
    with pytest.raises(WorkerError) as error:
        sources.load_sources((SourceConfig(path=str(file)),), data, tokenize)
    assert f"{file}:513 to {file}:1000" in str(error.value)
