"""Train a small transformer on one, two and four processes of this CPU in every layout; say what each rank holds, \
sends, waits for.

python -m labs.patterns [--out FILE.json] [--processes N ...]
python -m labs.patterns --show FILE.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from labs.bench.processes import run_logged
from labs.patterns.cases import MODEL, ROW_LENGTH, ROWS, TOPOLOGY_CASES, TRAINED_STEPS, TopologyCase
from labs.patterns.tables import terminal_tables
from sftkit.config.command_line import Parser, path
from sftkit.config.commands import program_path, running
from sftkit.config.terminal import print_text
from sftkit.errors import ConfigError
from sftkit.runtime.signals import exit_on_signals, starting_processes

_TIMEOUT_SECONDS = 3600
"That all layouts of one number of processes may take together."
# One thread each: processes that share the cores must not wait for each other's threads.
_ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def main() -> int:
    """Measure, or show earlier numbers, as the words say. Return the exit code: 1 if some could not be measured."""
    prog = running(f"{program_path('python')} -m labs.patterns")
    words = Parser((__doc__ or "").partition("\n")[0], prog=prog)
    words.add_argument(
        "--out", type=path, metavar="FILE.json", help="where the raw numbers go (runs/patterns-TIME.json)"
    )
    words.add_argument(
        "--processes", nargs="+", type=int, choices=(1, 2, 4), default=(1, 2, 4), metavar="N", help="1, 2, 4"
    )
    words.add_argument("--show", type=path, metavar="FILE.json", help="the tables of earlier raw numbers")
    args = words.parse_args()
    if args.show:
        print_text(terminal_tables(read_pattern_results(args.show)))
        return 0
    out = args.out or Path(f"runs/patterns-{time.strftime('%Y%m%d-%H%M%S')}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "model": MODEL,
        "rows": ROWS,
        "row_length": ROW_LENGTH,
        "steps": TRAINED_STEPS,
        "environment": {},
        "cases": {},
    }
    failed = False
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="sftkit-patterns-") as folder:
        for processes in sorted({1, *args.processes}):  # what one computes is what the others are compared with
            cases = [case for case in TOPOLOGY_CASES if case.processes == processes]
            started = time.perf_counter()
            found, problem = _measure(cases, Path(folder))
            results["environment"] |= found.get("environment", {})
            results["cases"] |= found.get("cases", {})
            failed |= problem is not None
            plural = "es" if processes > 1 else ""
            print_text(
                f"{processes} process{plural}: "
                f"{problem or f'{len(cases)} layouts in {time.perf_counter() - started:.0f} s'}"
            )
    out.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    print_text(f"\n{terminal_tables(results)}\nraw: {out}")
    return int(failed)


def read_pattern_results(file: Path) -> dict[str, Any]:
    """Return the raw numbers that `main` wrote.

    Raises:
        ConfigError: there are none.
    """
    try:
        results: dict[str, Any] = json.loads(file.read_text())
        results["cases"]["1 one process"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--show: {file}: no raw numbers of this command ({type(error).__name__}: {error}): name what --out wrote"
        ) from None
    return results


def _measure(cases: list[TopologyCase], folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return (what the processes wrote, why they failed or None) of layouts of the same number of processes."""
    (processes,) = {case.processes for case in cases}
    out, log = folder / f"{processes}.json", folder / f"{processes}.log"
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    words = [*launcher, "-m", "labs.patterns.measure", str(out), *(case.key for case in cases)]
    # Ctrl-C reaches this process alone, which then ends the ranks: those of a terminal would get it too,
    # amid their imports.
    with starting_processes():
        problem = run_logged([sys.executable, *words], log, _ENVIRONMENT, _TIMEOUT_SECONDS)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found, problem and f"{problem}\n{log.read_text()[-3000:]}"
