"""Run a bench plan: every run in a process of its own, results written after each, a table at the end.

python -m labs.bench PLAN.yaml [--out DIR] [--only NAME ...] [--ahead]
python -m labs.bench --report results.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from labs.bench.jobs import Job, read_jobs
from labs.bench.plan import slug
from labs.bench.processes import finish_logged, first_failure, run_logged
from labs.bench.report import markdown_report, result_line
from labs.bench.rows import row_head
from labs.bench.start import Runs, Started
from sftkit.config.command_line import Parser, path
from sftkit.config.commands import program_path, running, shipped
from sftkit.config.terminal import print_text
from sftkit.errors import ConfigError
from sftkit.rundir.files import replace_text
from sftkit.runtime.signals import exit_on_signals

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


def plan_name(plan: Path) -> str:
    """Return the name of a plan: benchmarks/h200_step/plan.yaml is h200_step, another file its own name."""
    return plan.resolve().parent.name if plan.stem == "plan" else plan.stem


_RESULTS = ("plan", "started", "machine", "runs")
"Keys of results.json."


def read_bench_results(path: Path, flag: str = "--report") -> dict[str, Any]:
    """Return results.json as `bench` wrote it.

    Args:
        flag: which names the file on the command line.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: {path}: cannot be read as JSON: {error}") from error
    lacks = [key for key in _RESULTS if not isinstance(results, dict) or key not in results]
    if lacks:
        raise ConfigError(
            f"{flag}: {path}: no results of this bench, whose results.json has {', '.join(_RESULTS)}: it lacks "
            f"{', '.join(lacks)}"
        )
    return results


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
    if job.processes.topology is not None and ended and ended.startswith("ended"):
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
