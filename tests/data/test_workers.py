"""A process that makes data and is killed, really: what it was making is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import make_examples, make_layout_of

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.batches import loader
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.tokens import sources
from sftkit.data.types import Row, Tokenized
from sftkit.errors import WorkerError

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29] * 40


def batches_of(workers: int) -> Batches:
    examples = make_examples(LENGTHS)
    return Batches(StepDataset(examples, make_layout_of("packed", examples.lengths)), seed=0, num_workers=workers)


def documents_of(step: int, number: int) -> list[str]:
    """Names of a step's documents in a micro-batch, from 0."""
    (found,) = batches_of(0).steps(step - 1, step)
    before = sum(found.documents_per_micro_batch[:number])
    return [f"test #{i}" for i in found.documents[before : before + found.documents_per_micro_batch[number]]]


def stands_in(monkeypatch: pytest.MonkeyPatch, step: int, number: int, do: Callable[[], None]) -> None:
    """Have whoever makes this micro-batch do something first."""
    documents = documents_of(step, number)
    collate = loader.collate

    def standing(examples: Any, rows: Any, *rest: Any) -> Any:
        if [f"test #{i}" for row in rows for i in row] == documents:
            do()
        return collate(examples, rows, *rest)

    monkeypatch.setattr(loader, "collate", standing)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forks of the patched module")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_data_worker_that_is_killed_names_the_documents_that_it_was_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def wait_for_it() -> None:
        (tmp_path / "pid.part").write_text(str(os.getpid()))
        (tmp_path / "pid.part").rename(tmp_path / "pid")
        time.sleep(1000)

    names = documents_of(5, 2)
    stands_in(monkeypatch, 5, 2, wait_for_it)
    batches = batches_of(2)
    steps, seen = batches.steps(0, 40), []

    def train() -> None:
        with batches.workers_named():
            while True:
                if len(seen) == 4:
                    while not (tmp_path / "pid").exists():
                        time.sleep(0.01)
                    os.kill(int((tmp_path / "pid").read_text()), number)
                seen.append(next(steps))

    with pytest.raises(WorkerError) as error:
        train()
    text = str(error.value)
    assert text.startswith(f"a data worker (process {(tmp_path / 'pid').read_text()}) was killed by {number.name}: ")
    assert f"It was building step 5, micro-batch 3: documents {', '.join(names[:5])}" in text
    assert len(seen) == 4


def test_a_data_worker_that_is_killed_with_nothing_in_hand_says_so() -> None:
    batches = batches_of(1)
    steps = batches.steps(0, 3)

    def train() -> None:
        with batches.workers_named():
            next(steps)
            idle = 0
            while idle < 50:  # between two micro-batches it is idle for a moment, too
                idle = idle + 1 if batches._dataset.at_work[0, 1] == 0 else 0
                time.sleep(0.01)
            os.kill(int(batches._dataset.at_work[0, 0]), signal.SIGKILL)
            for _ in range(1000):  # torch says so in a signal handler, wherever this is
                time.sleep(0.01)

    with pytest.raises(WorkerError, match=r"was killed by SIGKILL: .* It was idle"):
        train()


def test_an_error_that_is_not_of_a_data_worker_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="cheese"), batches_of(0).workers_named():
        raise RuntimeError("cheese")


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
    assert f"{file}:641 to {file}:768" in str(error.value)
