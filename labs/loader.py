"""Measure whether the data workers of a node build batches as fast as its GPUs take them, without GPUs.

python -m labs.loader [OUT.json] [--ranks 8] [--tokens-per-second 1e6] [--seconds 10] [--busy 0.5] [--way NAME]

Each rank is a process that takes its batches as the training loop does, from `Batches.steps` with data workers, and the
ranks meet after each step. Documents are made up, as long as those of chats, in packed rows of 16,384 tokens.

- build: CPU seconds for the batches of a step on all ranks, in one process without workers.
- free: steps taken as fast as they come.
- paced: a step takes as long as GPUs that compute --tokens-per-second would; for the share --busy of it the rank's
  process computes, as one that launches kernels does. `wait_pct` is what perf/data_wait_pct of a run would be: the
  share of the time in which the rank that waits most waits for the next step.

Each row is the median of three measurements. With a GPU batches are copied to pinned memory, as in a run. OUT.json
keeps the rows of other versions under their --way; benchmarks/loader has its table.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from labs.pages import loader_table
from sftkit.config.commands import Parser
from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.config.terminal import print_text
from sftkit.data.batches.epoch import RankRows
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.pack import make_layout
from sftkit.data.types import Examples
from sftkit.runtime.script import script

MEDIAN, SIGMA, LONGEST = 270, 0.9, 2048
"Lengths of documents, lognormal."
ROW_LENGTH = 16_384
SOURCES = 4
STARTING = 5
"Steps that are not counted: workers begin with empty queues."
FREE_STEPS = 30
"Steps taken as fast as they come, at least: many times what the workers have ready when it begins."


def made_up(documents: int) -> Examples:
    """Return documents of several sources, with random tokens of which all are targets."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(np.log(MEDIAN), SIGMA, documents).astype(np.int64)
    sizes = sizes.clip(8, LONGEST)
    examples = Examples.of(rng.integers(0, 50_000, int(sizes.sum()) + documents), sizes.tolist())
    source = rng.integers(0, SOURCES, documents).astype(np.int16)
    return replace(examples, source=source, source_names=tuple(f"source {i}" for i in range(SOURCES)))


def dataset_of(examples: Examples, rows: int, ranks: int, rank: int) -> StepDataset:
    """Return a rank's dataset of steps. `rows`: in a step, over all ranks; a micro-batch has one."""
    data = DataConfig(train=(), max_length=LONGEST, row_length=ROW_LENGTH)
    train = TrainConfig(max_steps=1, global_batch_size=rows, micro_batch_size=1)
    layout = make_layout(data, train, examples.lengths, LONGEST, ranks)
    return StepDataset(examples, layout, RankRows(rank))


def build_seconds(examples: Examples, rows: int, ranks: int, steps: int = 40) -> float:
    """Return the CPU seconds of one process for a million tokens of steps, built for all ranks."""
    dataset = dataset_of(examples, rows, ranks, 0)
    # Enough for every step. The shares of all ranks have the same size, so one is measured.
    items = [(1, 0, batch) for batch in Batches(dataset, 0).first_epoch()[0][:steps]]
    started = time.process_time()
    tokens = sum(dataset[item].num_tokens for item in items)
    return (time.process_time() - started) * ranks / tokens * 1e6


def take(rank: int, ranks: int, examples: Examples, settings: dict[str, Any], meet: Any, found: Any) -> None:
    """Take a rank's steps and put (seconds, seconds waited, tokens of all ranks) of those that count into `found`."""
    torch.set_num_threads(1)
    rate = settings["rate"]
    dataset = dataset_of(examples, settings["rows"], ranks, rank)
    last = STARTING + settings["steps"]
    steps = Batches(dataset, 0, num_workers=settings["workers"]).steps(0, last)
    for number in range(last):
        asked = time.perf_counter()
        step = next(steps)
        now = time.perf_counter()
        if number == STARTING:
            begun = asked
            waited = 0.0
            tokens = 0
        if number >= STARTING:
            waited += now - asked
            tokens += step.num_tokens
        if rate:
            end = now + step.num_tokens / rate
            launched = now + settings["busy"] * step.num_tokens / rate
            while time.perf_counter() < launched:
                sum(range(100))
            time.sleep(max(end - time.perf_counter(), 0.0))
        meet.wait()
    found.put((time.perf_counter() - begun, waited, tokens))


def measured(examples: Examples, ranks: int, **settings: Any) -> dict[str, float]:
    """Return tokens/s of all ranks together and the share of the time that the rank which waits most waits, in %."""
    context = mp.get_context("fork")  # so that all ranks share the documents
    found, meet = context.Queue(), context.Barrier(ranks)
    processes = [
        context.Process(target=take, args=(rank, ranks, examples, settings, meet, found)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    rows = [found.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    seconds = max(row[0] for row in rows)
    return {"tokens_per_second": rows[0][2] / seconds, "wait_pct": 100 * max(row[1] / row[0] for row in rows)}


def median(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each value."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def cases(examples: Examples, args: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each size of a step and number of data workers."""
    for rows in (args.ranks, 8 * args.ranks):
        build = statistics.median(build_seconds(examples, rows, args.ranks) for _ in range(3))
        steps = max(round(args.seconds * args.rate / (rows * ROW_LENGTH)), 3)
        for workers in args.workers:
            same = {"rows": rows, "workers": workers, "busy": args.busy}
            free, paced = (
                median([measured(examples, args.ranks, rate=rate, steps=count, **same) for _ in range(3)])
                for rate, count in ((0.0, max(steps, FREE_STEPS)), (args.rate, steps))
            )
            yield {**same, "steps": steps, "build_seconds": build, "free": free, "paced": paced}


def main() -> None:
    """Measure and print the table; write the raw file."""
    parser = Parser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--way", default="a block for each step")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens-per-second", dest="rate", type=float, default=1e6)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--busy", type=float, default=0.5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--documents", type=int, default=100_000)
    args = parser.parse_args()
    # Asked of NVML, a GPU can still be used by the ranks, which are forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    rows = list(cases(made_up(args.documents), args))
    found = {
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "ranks": args.ranks,
        "asked_tokens_per_second": args.rate,
        "rows": rows,
    }
    # A file may have several ways that were measured on one machine: each call replaces its own.
    results = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    results[args.way] = found
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    print_text(loader_table({args.way: found}))


if __name__ == "__main__":
    script(main)
