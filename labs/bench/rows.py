"""What one run's row of the results holds, from its logged lines; the same for sftkit and for whatever
stands beside it.

The keys of a line of metrics.jsonl are those of docs/metrics.md.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from labs.bench.jobs import Job
from labs.bench.plan import Steps
from sftkit.rundir.names import GRAPHS
from sftkit.tracking.rows import MetricsLine


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return median, extremes and all windows of a quantity; None where it is unknown."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": median(known), "min": min(known), "max": max(known), "windows": known}


def row_head(job: Job) -> dict[str, Any]:
    """Return what a row says of its run whether or not it succeeds."""
    return {
        "name": job.name,
        "model": job.model_name,
        "by": "sftkit" if job.worker is None else Path(job.worker).stem,
        "set": job.changes,
        "options": job.options,
        "environment": job.environment,
        "warm_from": job.warm_from,
        "baseline": job.baseline,
        "same_loss_as": job.same_loss_as,
        "topology": job.processes.topology,
        "mesh": job.processes.sizes,
        "world_size": job.processes.count,
        "steps": {"total": job.steps.total, "warm_up": job.steps.warm_up, "window": job.steps.window},
    }


def graphs_of(folder: Path) -> list[dict[str, str]]:
    """Return what graph.dump has written of a run's largest shape: each graph, the pass that it comes from and its
    size, in order."""
    files = sorted((folder / GRAPHS).glob("*/*.txt"))
    shapes = (path.parent.name for path in files)  # ROWSxLENGTH
    largest = max(shapes, key=lambda shape: math.prod(map(int, shape.split("x"))), default=None)
    rows = []
    for path in files:
        if path.parent.name == largest:
            _, graph, after = path.stem.split("-", 2)
            with path.open() as file:
                rows.append({"graph": graph, "after": after, "size": file.readline().removeprefix("#").strip()})
    return rows


def measured_row(
    lines: Sequence[MetricsLine], steps: Steps, world_size: int = 1, documents: Callable[[int, int], int] | None = None
) -> dict[str, Any]:
    """Return speed, memory, padding and losses from the logged lines of a run.

    Memory is that of all steps, speed that of the timed windows, a loss the mean per target of its window. Tokens/s are
    those of all ranks together, and of one rank on average in tok_per_sec_per_gpu.

    Args:
        documents: of all ranks in the steps after one step, up to another; None: unknown.
    """
    windows = [line for line in lines if line["step"] > steps.warm_up]

    def per_second(line: MetricsLine, counted: Callable[[int, int], int]) -> float:
        return counted(line["step"] - steps.window, line["step"]) / (line["perf/step_seconds"] * steps.window)

    def of(key: str) -> dict[str, Any] | None:
        return spread([line.get(key) for line in windows])

    last = lines[-1]
    return {
        "steps_timed": steps.total - steps.warm_up,
        "tok_per_sec": of("perf/tok_per_sec"),
        "tok_per_sec_per_gpu": spread([line["perf/tok_per_sec"] / world_size for line in windows]),
        "target_tok_per_sec": of("perf/target_tok_per_sec"),
        "documents_per_sec": spread([per_second(line, documents) for line in windows] if documents else []),
        "step_seconds": of("perf/step_seconds"),
        "mfu": of("perf/mfu"),
        "data_wait_pct": of("perf/data_wait_pct"),
        "pipeline_bubble_pct": last.get("perf/pipeline_bubble_pct"),
        "padding_pct": of("data/padding_pct"),
        "peak_memory_gib": max((line["mem/peak_gib"] for line in lines), default=None),
        "compile": {key.removeprefix("compile/"): last[key] for key in last if key.startswith("compile/")},
        "losses": {str(line["step"]): line["train/loss"] for line in lines},
        "grad_norms": {str(line["step"]): line["train/grad_norm"] for line in lines},
    }


def over_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what every rank counted, and for the row the most of it on any rank: one recompile anywhere
    is a recompile.

    Args:
        ranks: one entry a rank, in order: peak_memory_gib, reserved_memory_gib (None where unknown) and compile, its
            counters by name.
    """
    sizes = ("peak_memory_gib", "reserved_memory_gib")
    return {
        **{key: max((rank[key] for rank in ranks if rank[key] is not None), default=None) for key in sizes},
        "compile": {key: max(rank["compile"][key] for rank in ranks) for key in ranks[0]["compile"]},
        "ranks": list(ranks),
    }


def run_job(job: Job, run: Callable[[Job], dict[str, Any]]) -> None:
    """Run a job in this process and write its row, which says so if the run failed; the exit code is 1 then.

    Of several ranks the main one writes the row; one that fails writes in its place, and the first to do so is kept.
    """
    # From the environment: the error may be that the process group could not be made.
    rank, several = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        row = run(job)
        if rank == 0:
            write_row(job, {**row_head(job), **row, "error": None})
    except Exception as error:
        traceback.print_exc()
        where = f"rank {rank}: " if several else ""
        write_row(job, {**row_head(job), "error": f"{where}{type(error).__name__}: {error}"})
        if several:  # at once: closing the process group would wait for ranks that wait for this one
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        sys.exit(1)


def write_row(job: Job, row: dict[str, Any]) -> None:
    """Write row.json into the run's folder, for the bench to read when the processes have ended; a row that
    is there stays."""
    temporary = job.folder / f".row-{os.getpid()}.tmp"
    temporary.write_text(json.dumps(row, indent=1))
    with suppress(FileExistsError):
        os.link(temporary, job.folder / "row.json")  # whole or not at all, and the first one wins
    temporary.unlink()
