"""The compile lab: run the plans benchmarks/lab_*/plan.yaml that this machine supports, and rebuild the tables of \
labs/compile_lab.md.

make lab                                      without a GPU benchmarks/lab_cpu alone, some minutes
make lab ARGS="lab_layouts lab_gpt2"          these labs
make lab ARGS='lab_captioning --only packed'  these runs of one lab
make lab ARGS=--ahead                         each run imports during the previous one
make lab ARGS="--take FILE"                   results.json of a bench that ran elsewhere, on any machine
make lab ARGS=--tables                        only the tables, from existing results

The results of a plan are in results/ next to it, once its runs have ended: raw, with machine, versions and commit.
labs/tables.py explains how results of several machines and calls are combined.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from labs.bench.plan import read_jobs
from labs.bench.run import bench
from labs.pages import BENCHMARKS, PAGES, PICTURES, write
from labs.tables import keep, kept_results, plan_name, read_bench_results
from sftkit.config.commands import Parser, path, running
from sftkit.config.terminal import print_text
from sftkit.errors import ConfigError
from sftkit.launch.launch import find_hardware
from sftkit.runtime.script import script

CPU = "lab_cpu"


def main() -> int:
    """Run the labs, or take in their results, and rebuild their tables."""
    known = sorted(plan.parent.name for plan in BENCHMARKS.glob("lab_*/plan.yaml"))
    words = Parser((__doc__ or "").partition("\n\n")[0], prog=running("make lab"))
    words.add_argument(
        "labs", nargs="*", metavar="LAB", help=f"these labs: {', '.join(known)}; default: all that this machine can run"
    )
    words.add_argument("--only", nargs="+", metavar="RUN", help="these runs of one lab")
    words.add_argument("--ahead", action="store_true", help="start each run during the previous one")
    words.add_argument("--take", nargs="+", type=path, default=(), metavar="FILE", help="take in results.json files")
    words.add_argument("--tables", action="store_true", help="only rebuild the tables")
    args = words.parse_args()
    gpus = find_hardware().gpus
    if args.only and len(args.labs) != 1:
        raise ConfigError("--only: name one lab whose runs they are")
    if unknown := set(args.labs) - set(known):
        raise ConfigError(f"{', '.join(sorted(unknown))}: no such lab. There are: {', '.join(known)}")
    if not gpus and not (args.tables or args.take) and (larger := [lab for lab in args.labs if lab != CPU]):
        raise ConfigError(
            f"{', '.join(larger)}: made for a GPU, and this machine has none. Name {CPU} or nothing, or take in what "
            'ran elsewhere: make lab ARGS="--take FILE"'
        )
    failed = False
    for file in args.take:
        results = read_bench_results(file, "--take")
        if (lab := plan_name(Path(results["plan"]))) not in known:
            raise ConfigError(f"--take: {file}: of {results['plan']}, which is not the plan of a lab")
        print_text(f"{file}: into {keep(BENCHMARKS / lab, results)}")
    for lab in () if args.tables or args.take else args.labs or [lab for lab in known if (lab == CPU) == (gpus == 0)]:
        failed |= run(lab, max(gpus, 1), args.only, ahead=args.ahead)
    write(
        {page: make for page, make in PAGES.items() if "lab_" in page or page.endswith("lab.md")},
        PICTURES[:1],
    )
    return int(failed)


def run(lab: str, processes: int, only: list[str] | None, *, ahead: bool = False) -> bool:
    """Run the runs of a plan that need no more processes than this, and keep their results; return
    whether one failed.
    """
    plan = Path(os.path.relpath(BENCHMARKS / lab / "plan.yaml"))
    kept_results(BENCHMARKS / lab)  # rejects foreign results before hours of runs
    out = Path("runs/lab") / f"{lab}-{time.strftime('%Y%m%d-%H%M%S')}"
    jobs = read_jobs(plan, out, only)
    fit = [job.name for job in jobs if job.processes <= processes]
    others = f"; the others need more than {processes} GPUs" * (len(fit) < len(jobs))
    print_text(f"\n=== {lab}: {len(fit)} of {len(jobs)} runs{others}")
    results = bench(plan, out, fit, ahead=ahead)
    try:
        keep(BENCHMARKS / lab, results)
    except ConfigError as error:
        # The other labs still run, and these results are in the folder of the runs.
        print_text(f"{lab}: not in the tables: {error}", level="error")
        return True
    return any(row["error"] for row in results["runs"])


if __name__ == "__main__":
    script(main)
