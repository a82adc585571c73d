"""The compile lab: run what this machine can of the plans benchmarks/lab_*/plan.yaml, and rebuild the tables of docs/compile_lab.md.

make lab                                      without a GPU benchmarks/lab_cpu alone, some minutes
make lab ARGS="lab_layouts lab_gpt2"          these
make lab ARGS='lab_captioning --only packed'  these runs of one
make lab ARGS=--ahead                         each run imports while the one before it is at work
make lab ARGS="--take FILE"                   results.json of a bench that ran elsewhere
make lab ARGS=--tables                        the tables alone, from the results that are there

Results of a plan lie in results/results.json beside it, once its runs have ended: raw, with machine, versions and commit. Those of
several calls come together there, the newest row of each run that succeeded, and the rows that it replaced if others of their call
are compared with them. A table on the page is made of them; what has none says that it was not measured.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import time
from pathlib import Path
from typing import Any

from sftkit.config.command_line import Parser, path
from sftkit.config.commands import running
from sftkit.config.terminal import print_text
from sftkit.errors import ConfigError
from sftkit.experiments.bench.jobs import read_jobs
from sftkit.experiments.bench.report import ahead_line, calls_line, loss_table, machine_lines, speed_table
from sftkit.experiments.bench.run import bench, plan_name, read_bench_results
from sftkit.launch.hardware import find_hardware
from sftkit.runtime.script import script

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "compile_lab.md"
CPU = "lab_cpu"
TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Run the labs, or take in their results, and rebuild their tables."""
    words = Parser((__doc__ or "").partition("\n")[0], prog=running("make lab"))
    words.add_argument("labs", nargs="*", metavar="LAB", help=f"these: {', '.join(labs())}; all that this machine can")
    words.add_argument("--only", nargs="+", metavar="RUN", help="these runs of one lab")
    words.add_argument("--ahead", action="store_true", help="start each run while the one before it is at work")
    words.add_argument("--take", nargs="+", type=path, default=(), metavar="FILE", help="take in results.json files")
    words.add_argument("--tables", action="store_true", help="only rebuild the tables")
    args = words.parse_args()
    gpus = find_hardware().gpus
    if args.only and len(args.labs) != 1:
        raise ConfigError("--only: name one lab whose runs they are")
    if unknown := set(args.labs) - set(labs()):
        raise ConfigError(f"{', '.join(sorted(unknown))}: no such lab. There are: {', '.join(labs())}")
    if not gpus and not (args.tables or args.take) and (larger := [lab for lab in args.labs if lab != CPU]):
        raise ConfigError(
            f"{', '.join(larger)}: made for a GPU, and this machine has none. Name {CPU} or nothing, or take in what ran "
            'elsewhere: make lab ARGS="--take FILE"'
        )
    failed = False
    for file in args.take:
        results = read_bench_results(file, "--take")
        if (lab := plan_name(Path(results["plan"]))) not in labs():
            raise ConfigError(f"--take: {file}: of {results['plan']}, which is no plan of a lab")
        keep(FOLDER / lab, results)
    for lab in () if args.tables or args.take else args.labs or [lab for lab in labs() if (lab == CPU) == (gpus == 0)]:
        failed |= run(lab, max(gpus, 1), args.only, ahead=args.ahead)
    PAGE.write_text(rebuilt(PAGE.read_text(), FOLDER))
    for tool in sorted(FOLDER.glob("lab_*/tables.py")):
        runpy.run_path(str(tool), run_name="__main__")
    print_text(f"tables: {PAGE}")
    return int(failed)


def labs() -> list[str]:
    """Return the folders that hold a plan."""
    return sorted(plan.parent.name for plan in FOLDER.glob("lab_*/plan.yaml"))


def run(lab: str, processes: int, only: list[str] | None, *, ahead: bool = False) -> bool:
    """Run the runs of a plan that need no more processes, and keep their results; whether one of them failed."""
    plan = Path(os.path.relpath(FOLDER / lab / "plan.yaml"))
    out = Path("runs/lab") / f"{lab}-{time.strftime('%Y%m%d-%H%M%S')}"
    jobs = read_jobs(plan, out, only)
    fit = [job.name for job in jobs if job.processes.count <= processes]
    others = f"; the others need more than {processes} GPUs" * (len(fit) < len(jobs))
    print_text(f"\n=== {lab}: {len(fit)} of {len(jobs)} runs{others}")
    results = bench(plan, out, fit, ahead=ahead)
    keep(FOLDER / lab, results)
    return any(row["error"] for row in results["runs"])


def keep(lab: Path, results: dict[str, Any]) -> None:
    """Write results into those of a lab, or begin them."""
    file = lab / "results" / "results.json"
    if file.exists():
        results = merged(json.loads(file.read_text()), results)
    names = [job.name for job in read_jobs(lab / "plan.yaml", Path("unused"))]
    for rows in ("runs", "replaced"):
        planned = [row for row in results.get(rows, []) if row["name"] in names]
        results[rows] = sorted(planned, key=lambda row: names.index(row["name"]))
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of both, with the commits of both.

    Of a run that is in both, `runs` has the newer row, but no failed row in place of one that succeeded. `replaced` has
    the other one while rows of its call are compared with it.

    Raises:
        ConfigError: they are of other devices or versions, so that one table of them would compare what cannot be compared.
    """
    first, last = sorted((old, new), key=lambda results: str(results["started"]))
    machines = first["machine"], last["machine"]
    for what in ("device", "versions"):
        if machines[0].get(what) != machines[1].get(what):
            raise ConfigError(
                f"results of {last['started']}: {what} {machines[1].get(what)}, but those that are there have "
                f"{machines[0].get(what)}: take results/results.json away, or run all of them again"
            )
    commits = dict.fromkeys(one for machine in machines for one in str(machine.get("git") or "-").split(", "))
    # Each row keeps its call: hosts differ, so that speeds of two calls cannot be divided.
    rows = [
        {"call": results["started"], **row}
        for results in (first, last)
        for row in (*results.get("replaced", ()), *results["runs"])
    ]
    rows.sort(key=lambda row: (not row["error"], row["call"]))
    newest = {row["name"]: row for row in rows}.values()
    needed = {(row["call"], name) for row in newest for name in (row["baseline"], row["same_loss_as"])}
    replaced = [row for row in rows if (row["call"], row["name"]) in needed and not row["error"] and row not in newest]
    machine = {**machines[1], "git": ", ".join(commits)}
    return {**last, "machine": machine, "runs": list(newest), "replaced": replaced}


def rebuilt(page: str, folder: Path) -> str:
    """Return the page, with each table made of the results that are there."""
    return TABLE.sub(lambda match: f"{match[1]}{tables(folder / match[2])}\n{match[3]}", page)


def tables(lab: Path) -> str:
    """Machine, speeds and losses of a lab, and what of its plan was not measured."""
    names = [job.name for job in read_jobs(lab / "plan.yaml", Path("unused"))]
    file = lab / "results" / "results.json"
    if not file.exists():
        return f"\nNot measured yet: none of the {len(names)} runs of [the plan](../benchmarks/{lab.name}/plan.yaml).\n"
    results: dict[str, Any] = json.loads(file.read_text())
    rows, replaced = results["runs"], results.get("replaced", ())
    missing = [name for name in names if name not in {row["name"] for row in rows if not row["error"]}]
    parts = [machine_lines(results["machine"]), calls_line(rows), ahead_line(rows)]
    parts += [speed_table(rows, replaced), loss_table(rows, replaced)]
    parts += [f"Not measured: {', '.join(missing)}."] if missing else []
    folder = f"../benchmarks/{lab.name}"
    parts += [f"Raw: [results.json]({folder}/results/results.json); [plan]({folder}/plan.yaml)."]
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    script(main)
