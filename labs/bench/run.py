"""Run a bench plan: each run in a separate process, its results written when it ends, and a table at the end.

python -m labs.bench PLAN.yaml [--out DIR] [--only NAME ...] [--ahead]
python -m labs.bench --report results.json
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from labs.bench.plan import Job, Steps, read_jobs, slug
from labs.jobs import Runs, Started, finish_logged, first_failure, run_logged
from labs.tables import markdown_report, plan_name, read_bench_results, result_line
from sftkit.config.commands import Parser, path, program_path, running, shipped
from sftkit.config.terminal import print_text
from sftkit.errors import ConfigError
from sftkit.rundir.files import MetricsLine, replace_text
from sftkit.rundir.names import GRAPHS
from sftkit.runtime.signals import exit_on_signals


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return median, extremes and all windows of a quantity; None if it is unknown."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": median(known), "min": min(known), "max": max(known), "windows": known}


def row_head(job: Job) -> dict[str, Any]:
    """Return the part of a row that does not depend on the run's success."""
    same = ("name", "model", "set", "options", "environment", "warm_from", "baseline", "same_loss_as", "topology")
    return {
        **{key: getattr(job, key) for key in same},
        "by": "sftkit" if job.worker is None else Path(job.worker).stem,
        "mesh": job.started.sizes,
        "world_size": job.processes,
        "steps": asdict(job.steps),
    }


def graphs_of(folder: Path) -> list[dict[str, str]]:
    """Return the graph.dump files of a run's largest shape: each graph, its pass and its size, in order."""
    files = sorted((folder / GRAPHS).glob("*/*.txt"))
    shapes = (path.parent.name for path in files)  # ROWSxLENGTH
    largest = max(shapes, key=lambda shape: math.prod(map(int, shape.split("x"))), default=None)
    rows = []
    for dump in files:
        if dump.parent.name == largest:
            _, graph, after = dump.stem.split("-", 2)
            with dump.open() as lines:
                rows.append({"graph": graph, "after": after, "size": lines.readline().removeprefix("#").strip()})
    return rows


def measured_row(
    lines: Sequence[MetricsLine], steps: Steps, world_size: int = 1, documents: Callable[[int, int], int] | None = None
) -> dict[str, Any]:
    """Return speed, memory, padding and losses from the logged lines of a run.

    Memory covers all steps, speed the timed windows; a loss is the mean per target of its window. Tokens/s are the
    sum over all ranks, and in tok_per_sec_per_gpu the average over ranks.

    Args:
        documents: number of documents of all ranks between two steps; None: unknown.
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
        "padding_pct": of("data/padding_pct"),
        "peak_memory_gib": max((line["mem/peak_gib"] for line in lines), default=None),
        "compile": {key.removeprefix("compile/"): last[key] for key in last if key.startswith("compile/")},
        "losses": {str(line["step"]): line["train/loss"] for line in lines},
        "grad_norms": {str(line["step"]): line["train/grad_norm"] for line in lines},
    }


def over_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return every rank's counts, and for the row the maximum over ranks: one recompile anywhere is a recompile.

    Args:
        ranks: one entry for each rank, in order: peak_memory_gib, reserved_memory_gib (None if unknown) and compile,
            its counters by name.
    """
    sizes = ("peak_memory_gib", "reserved_memory_gib")
    return {
        **{key: max((rank[key] for rank in ranks if rank[key] is not None), default=None) for key in sizes},
        "compile": {key: max(rank["compile"][key] for rank in ranks) for key in ranks[0]["compile"]},
        "ranks": list(ranks),
    }


def run_job(job: Job, run: Callable[[Job], dict[str, Any]]) -> None:
    """Run a job in this process and write its row. If the run failed, the row records it and the exit code is 1.

    The main rank writes the row for all ranks; a failing rank writes it instead, and the first row is kept.
    """
    # Read from the environment: the error may be that the process group could not be created.
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
    """Write row.json into the run's folder, for the bench to read when the processes have ended; an existing
    row stays.
    """
    temporary = job.folder / f".row-{os.getpid()}.tmp"
    temporary.write_text(json.dumps(row, indent=1))
    with suppress(FileExistsError):
        os.link(temporary, job.folder / "row.json")  # written atomically, and the first one wins
    temporary.unlink()


MACHINE_TIMEOUT_SECONDS = 300


def main() -> int:
    """Run a plan or print earlier results, as the arguments request. Return the exit code: 1 if a run failed."""
    prog = running(f"{program_path('python')} -m labs.bench")
    words = Parser((__doc__ or "").partition("\n")[0], prog=prog)
    words.add_argument("plan", nargs="?", type=path, help="the plan, a YAML file")
    words.add_argument("--out", type=path, help="a new folder for the results (runs/bench/PLAN-TIME)")
    words.add_argument("--only", nargs="+", metavar="NAME", help="these runs of the plan")
    words.add_argument("--ahead", action="store_true", help="start each run during the previous one")
    words.add_argument("--report", type=path, metavar="RESULTS.json", help="print the tables of earlier results")
    args = words.parse_args()
    if (args.plan is None) == (args.report is None):
        words.error("name a plan, or earlier results with --report")
    if args.report:
        print_text(markdown_report(read_bench_results(args.report)), end="")
        return 0
    plan = Path(shipped(str(args.plan)))
    out = args.out or Path("runs/bench") / f"{plan_name(plan)}-{time.strftime('%Y%m%d-%H%M%S')}"
    return int(any(row["error"] for row in bench(plan, out, args.only, ahead=args.ahead)["runs"]))


def bench(plan: Path, out: Path, only: list[str] | None = None, *, ahead: bool = False) -> dict[str, Any]:
    """Run a plan, one run after the other. out/results.json and out/report.md are complete after each run.

    Args:
        ahead: whether the processes of each run import during the previous run.

    Returns:
        contents of results.json.

    Raises:
        ConfigError: the plan is invalid, or `out` already holds results.
    """
    jobs = read_jobs(plan, out, only)
    if (out / "results.json").exists():
        raise ConfigError(f"--out: {out} holds results already: name another folder")
    out.mkdir(parents=True, exist_ok=True)
    called = time.strftime("%Y-%m-%d %H:%M:%S")
    results: dict[str, Any] = {"plan": str(plan), "started": called, "machine": {}, "runs": []}
    # Caches live as long as the call: a later call must not start warm.
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="sftkit-bench-") as folder:
        caches = Path(folder)
        with Runs([with_saved_code(job, jobs, caches) for job in jobs], caches, ahead=ahead) as runs:
            results["machine"] = machine_ceilings(out)
            for number, run in enumerate(runs, 1):
                row = _finished(run)
                row["call"] = called
                over_ceiling(row, results["machine"])
                add_scaling(row, results["runs"])
                results["runs"].append(row)
                # Each file is replaced atomically: if the bench is killed, the results of the earlier runs remain.
                replace_text(out / "results.json", json.dumps(results, indent=1))
                replace_text(out / "report.md", markdown_report(results))
                print_text(f"[{number}/{len(jobs)}] {result_line(row)}")
    print_text(f"\n{markdown_report(results)}\nresults: {out}/results.json")
    return results


def machine_ceilings(out: Path) -> dict[str, Any]:
    """Return the ceilings of this machine, or why they could not be measured."""
    path = out / "machine.json"
    command = [sys.executable, "-m", "labs.bench.machine", str(path)]
    ended = run_logged(command, out / "machine.log", {}, MACHINE_TIMEOUT_SECONDS)
    return json.loads(path.read_text()) if path.exists() else {"error": ended or "nothing was measured"}


def with_saved_code(job: Job, jobs: list[Job], caches: Path) -> Job:
    """Return the job with compile.cache if other runs start warm from it, or if it starts from another run: the first
    saves its compiled code in a file, and the others load it.
    """
    source = job.warm_from or (job.name if any(other.warm_from == job.name for other in jobs) else None)
    if source is None:
        return job
    compile = replace(job.config.compile, cache=str(caches / f"{slug(source)}.compiled"))
    return replace(job, config=replace(job.config, compile=compile))


def _finished(run: Started) -> dict[str, Any]:
    """Wait for a run and return its row, which records a failure."""
    job, written = run.job, run.job.folder / "row.json"
    ended = finish_logged(run.command, job.timeout_seconds)
    # A process may fail after its row was written, or without a row: then the row records how it ended.
    row: dict[str, Any] = json.loads(written.read_text()) if written.exists() else {**row_head(job), "error": None}
    if row["error"] is None and (ended or not written.exists()):
        row["error"] = ended or "it wrote no row"
    if job.topology is not None and ended and ended.startswith("ended"):
        row["error"] = first_failure(run.command.log, row["error"] if row["error"] != ended else None)
    if run.hold is not None:
        row["ahead"] = True
    row["wall_seconds"] = time.perf_counter() - run.since
    return row


def over_ceiling(row: dict[str, Any], machine: dict[str, Any]) -> None:
    """Add mfu_of_ceiling: the MFU relative to the matrix products measured on this machine instead of the datasheet."""
    datasheet, ceiling = machine.get("datasheet_tflops"), machine.get("matmul_tflops")
    mfu = row.get("mfu")
    row["mfu_of_ceiling"] = mfu["median"] * datasheet / ceiling if mfu and datasheet and ceiling else None


def add_scaling(row: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
    """Add scaling: tokens/s per GPU over those of a baseline on another number of GPUs; None if no
    such baseline ran.
    """
    base = next((other for other in earlier if other["name"] == row["baseline"] and not other["error"]), None)
    row["scaling"] = None
    if base and not row["error"] and row["world_size"] != base["world_size"]:
        row["scaling"] = row["tok_per_sec_per_gpu"]["median"] / base["tok_per_sec_per_gpu"]["median"]
