"""The compile lab: run what this machine can of the plans benchmarks/lab_*/plan.yaml, and rebuild the tables of docs/compile_lab.md.

make lab                                      without a GPU benchmarks/lab_cpu alone, some minutes
make lab ARGS="lab_layouts lab_gpt2"          these
make lab ARGS='lab_captioning --only packed'  these runs of one
make lab ARGS=--ahead                         each run imports while the one before it is at work
make lab ARGS="--take FILE"                   results.json of a bench that ran elsewhere, on whatever machine
make lab ARGS=--tables                        the tables alone, from the results that are there

Results of a plan lie in results/ beside it, once its runs have ended: raw, with machine, versions and commit. Each kind of machine,
a device with these versions, has a file of its own: the first results.json, another one that of its device's name, such as
nvidia-h100-80gb-hbm3.json. Those of several calls on one kind come together in its file, the newest row of each run that succeeded,
and the rows that it replaced if others of their call are compared with them. A table on the page is made of one file; what no
machine has measured is named below the last of them.
"""

from __future__ import annotations

import os
import re
import runpy
import time
from pathlib import Path

from labs.bench.jobs import read_jobs
from labs.bench.kept import keep, kept_results, not_measured, run_names
from labs.bench.report import (
    ahead_line,
    calls_line,
    clock_line,
    failures,
    loss_table,
    machine_lines,
    speed_table,
)
from labs.bench.run import bench, plan_name, read_bench_results
from sftkit.config.command_line import Parser, path
from sftkit.config.commands import running
from sftkit.config.terminal import print_text
from sftkit.errors import ConfigError
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
        print_text(f"{file}: into {keep(FOLDER / lab, results)}")
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
    kept_results(FOLDER / lab)  # what does not belong there is refused before hours of runs
    out = Path("runs/lab") / f"{lab}-{time.strftime('%Y%m%d-%H%M%S')}"
    jobs = read_jobs(plan, out, only)
    fit = [job.name for job in jobs if job.processes.count <= processes]
    others = f"; the others need more than {processes} GPUs" * (len(fit) < len(jobs))
    print_text(f"\n=== {lab}: {len(fit)} of {len(jobs)} runs{others}")
    results = bench(plan, out, fit, ahead=ahead)
    try:
        keep(FOLDER / lab, results)
    except ConfigError as error:
        # The other labs still run, and these results lie in the folder of the runs.
        print_text(f"{lab}: not in the tables: {error}", level="error")
        return True
    return any(row["error"] for row in results["runs"])


def rebuilt(page: str, folder: Path) -> str:
    """Return the page, with each table made of the results that are there."""
    return TABLE.sub(lambda match: f"{match[1]}{tables(folder / match[2])}\n{match[3]}", page)


def tables(lab: Path) -> str:
    """Machine, speeds and losses of a lab for each kind of machine, and what of its plan was measured on none."""
    kept = kept_results(lab)
    folder = f"../benchmarks/{lab.name}"
    if not kept:
        return f"\nNot measured yet: none of the {len(run_names(lab))} runs of [the plan]({folder}/plan.yaml).\n"
    parts = []
    for results in kept.values():
        rows, replaced = results["runs"], results.get("replaced", ())
        parts += [
            machine_lines(results["machine"]),
            calls_line(rows),
            ahead_line(rows),
            speed_table(rows, replaced),
            clock_line(rows, results["machine"]),
            loss_table(rows, replaced),
        ]
    refused, missing = refused_in(lab), not_measured(lab, kept.values())
    others = [name for name in missing if name.rpartition(" ")[0] not in refused]
    failed = [row for results in kept.values() for row in results["runs"] if row["name"] in others]
    others = [name for name in others if name not in {row["name"] for row in failed}]
    parts += [f"Not measured: {', '.join(others)}."] if others else []
    parts += [failures(failed)]
    parts += [f"{name}: {why}." for name, why in refused.items()]
    raw = ", ".join(f"[{file.name}]({folder}/results/{file.name})" for file in kept)
    parts += [f"Raw: {raw}; [plan]({folder}/plan.yaml)."]
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"


def refused_in(lab: Path) -> dict[str, str]:
    """Return the layouts of a lab that the launch refuses on every machine, each with why: REFUSED of its tables.py."""
    tool = lab / "tables.py"
    return runpy.run_path(str(tool)).get("REFUSED", {}) if tool.exists() else {}


if __name__ == "__main__":
    script(main)
