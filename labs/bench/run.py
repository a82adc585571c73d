"""Run a bench plan: each run in a separate process, its results written when it ends, a table last.

python -m labs.bench PLAN.yaml [--out DIR] [--only NAME ...] [--ahead]
python -m labs.bench --report results.json"""

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
    """Return median, extremes and all windows of a quantity; None where it is unknown."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": median(known), "min": min(known), "max": max(known), "windows": known}


def row_head(job: Job) -> dict[str, Any]:
    """Return what a row says of its run whether or not it succeeds."""
    same = ("name", "model", "set", "options", "environment", "warm_from", "baseline", "same_loss_as", "topology")
    return {
        **{key: getattr(job, key) for key in same},
        "by": "sftkit" if job.worker is None else Path(job.worker).stem,
        "mesh": job.started.sizes,
        "world_size": job.processes,
        "steps": asdict(job.steps),
    }


def graphs_of(folder: Path) -> list[dict[str, str]]:
    """Return what graph.dump has written of a run's largest shape: each graph, the pass that it comes from and its
    size, in order."""
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


MACHINE_TIMEOUT_SECONDS = 300


def main() -> int:
    """Run a plan, or print earlier results, as the words say. Return the exit code: 1 if a run failed."""
    prog = running(f"{program_path('python')} -m labs.bench")
    words = Parser((__doc__ or "").partition("\n")[0], prog=prog)
    words.add_argument("plan", nargs="?", type=path, help="the plan, a YAML file")
    words.add_argument("--out", type=path, help="a new folder for the results (runs/bench/PLAN-TIME)")
    words.add_argument("--only", nargs="+", metavar="NAME", help="these runs of the plan")
    words.add_argument("--ahead", action="store_true", help="start each run while the one before it is at work")
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
    """Run a plan, one run after the other. out/results.json is whole after each of them, out/report.md too.

    Args:
        ahead: have the processes of each run import while the run before it is at work.

    Returns:
        what results.json holds.

    Raises:
        ConfigError: the plan is wrong, or `out` holds results already.
    """
    jobs = read_jobs(plan, out, only)
    if (out / "results.json").exists():
        raise ConfigError(f"--out: {out} holds results already: name another folder")
    out.mkdir(parents=True, exist_ok=True)
    called = time.strftime("%Y-%m-%d %H:%M:%S")
    results: dict[str, Any] = {"plan": str(plan), "started": called, "machine": {}, "runs": []}
    # Caches live as long as the call: a later one must not start warm.
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
                # Each is replaced as a whole: a kill leaves those of the run before.
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
    """Return the job with compile.cache where others start warm from it, or it from another: that one saves its
    compiled code in a file, and the others load it."""
    source = job.warm_from or (job.name if any(other.warm_from == job.name for other in jobs) else None)
    if source is None:
        return job
    compile = replace(job.config.compile, cache=str(caches / f"{slug(source)}.compiled"))
    return replace(job, config=replace(job.config, compile=compile))


def _finished(run: Started) -> dict[str, Any]:
    """Wait for a run, and return its row, which says so if the run failed."""
    job, written = run.job, run.job.folder / "row.json"
    ended = finish_logged(run.command, job.timeout_seconds)
    # A process may end badly after its row was written, or without one: then the row says how it ended.
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
    """Add mfu_of_ceiling: the MFU over what matrix products reach on this machine instead of the datasheet."""
    datasheet, ceiling = machine.get("datasheet_tflops"), machine.get("matmul_tflops")
    mfu = row.get("mfu")
    row["mfu_of_ceiling"] = mfu["median"] * datasheet / ceiling if mfu and datasheet and ceiling else None


def add_scaling(row: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
    """Add scaling: tokens/s per GPU over those of a baseline of another number of GPUs; None without one that ran."""
    base = next((other for other in earlier if other["name"] == row["baseline"] and not other["error"]), None)
    row["scaling"] = None
    if base and not row["error"] and row["world_size"] != base["world_size"]:
        row["scaling"] = row["tok_per_sec_per_gpu"]["median"] / base["tok_per_sec_per_gpu"]["median"]
