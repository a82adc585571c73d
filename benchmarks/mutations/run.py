"""Make each mutation of plan.py, by itself, in a copy of the tree, and find out what catches it.

    .venv/bin/python benchmarks/mutations/run.py --out benchmarks/mutations/results.json ["name of a mutation" ...]

First a short chat SFT run starts from a checkpoint of the tree without mutations (rooms in TRAINED). It catches a
mutation by a failed row of its proof.json, or because it cannot be done. Then the tests that the plan names run, then those of its room, then
the slow ones of the named files, until one fails. What nothing catches is a survivor, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

sys.path.insert(0, str(Path(__file__).parent))
from plan import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
SFT = Path(__file__).with_name("sft.yaml")
LANES = 2
NO_TESTS = 5
"Exit code of pytest that found no test to run."
LIMIT = 900
"Seconds of a run or a pytest."
TRAINED = ("compile", "data", "engine", "evals", "models", "objectives", "ops", "optim", "tracking", "train")
"Rooms whose code a short run passes through, so that a row of its proof.json may catch a mutation."


def main() -> None:
    """Run the mutations that are named, or all, in LANES copies of the tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="what goes wrong in a mutation of the plan; none: all")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"))
    parser.add_argument("--no-run", action="store_true", help="only the tests")
    given = parser.parse_args()
    unknown = set(given.names) - {m.what for m in MUTATIONS}
    if unknown:
        parser.error(f"not in the plan: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTATIONS if not given.names or m.what in given.names]
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for lane in range(LANES):
            trees.put(copy_of_tree(Path(folder) / f"tree{lane}"))
        base = Path(folder) / "base"
        first = trees.get()
        started = script(first, "base_train.py", "recipes/smoke/base.yaml", f"run.dir={base}", "train.max_steps=4")
        assert started.returncode == 0, started.stdout + started.stderr
        assert row_of(sft(first, base)) is None, "the run without a mutation has a failed row"
        trees.put(first)

        def tried(mutation: Mutation) -> dict[str, object]:
            tree = trees.get()
            try:
                return try_mutation(mutation, tree, None if given.no_run else base)
            finally:
                trees.put(tree)

        results = []
        with ThreadPoolExecutor(LANES) as pool:
            for result in pool.map(tried, chosen):
                results.append(result)
                print(f"{result['mutation']}: {result['row'] or '-'} | {result['test'] or '-'}", flush=True)
                given.out.write_text(json.dumps(results, indent=1) + "\n")
    survivors = [r["mutation"] for r in results if not r["row"] and not r["test"]]
    by_row, by_test = (sum(bool(r[kind]) for r in results) for kind in ("row", "test"))
    print(f"{len(results)} mutations: {by_row} caught by a run, {by_test} by a test, {len(survivors)} by nothing")
    sys.exit(bool(survivors))


def copy_of_tree(tree: Path) -> Path:
    """Copy the tracked files of the working tree."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of a process that imports the package of a copy."""
    return {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def script(tree: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of a copy."""
    command = [sys.executable, f"scripts/{name}", *arguments, "log.tracker=none", f"data.cache_dir={tree}/cache"]
    return ended(command, tree)


def ended(command: list[str], tree: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a copy; one that takes longer than a mutation should is ended, with the exit code 124."""
    try:
        return subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, f"not done after {LIMIT} seconds", "")


def sft(tree: Path, base: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the short SFT run; return how it ended and its directory."""
    run_dir = tree / "runs/sft"
    shutil.rmtree(run_dir, ignore_errors=True)
    return script(tree, "chat_sft.py", str(SFT), f"model.path={base}", f"run.dir={run_dir}"), run_dir


def row_of(finished: tuple[subprocess.CompletedProcess[str], Path]) -> str | None:
    """Return the failed rows of a run's proof.json, else the last line of a run that failed; None: nothing failed."""
    process, run_dir = finished
    proof = run_dir / "proof.json"
    rows = json.loads(proof.read_text())["rows"] if proof.is_file() else []
    failed = [row["name"] for row in rows if row["ok"] is False]
    if failed:
        return "row: " + "; ".join(failed)
    if process.returncode == 0:
        return None
    lines = [line for line in (process.stdout + process.stderr).splitlines() if line.strip()]
    return f"run ended: {lines[-1][:160]}" if lines else f"run ended with {process.returncode}"


def try_mutation(mutation: Mutation, tree: Path, base: Path | None) -> dict[str, object]:
    """Return what catches a mutation."""
    path = tree / "src/sftkit" / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file}: {mutation.old!r} occurs {text.count(mutation.old)} times"
    began = time.time()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        row = None if base is None or mutation.room not in TRAINED else row_of(sft(tree, base))
        own = (f"tests/{name}" for name in mutation.tests.split())
        test = next(filter(None, (failed_test(tree, where) for where in own)), None)
        room = f"tests/{mutation.room}"
        if test is None and row is None and (tree / room).is_dir() and mutation.room not in mutation.tests.split():
            test = failed_test(tree, room)
        if test is None and row is None:
            own = (f"tests/{name}" for name in mutation.tests.split() if name.endswith(".py"))
            test = next(filter(None, (failed_test(tree, where, "-m", "slow") for where in own)), None)
    finally:
        path.write_text(text)
    return {
        "mutation": mutation.what,
        "file": mutation.file,
        "row": row,
        "test": test,
        "seconds": round(time.time() - began),
    }


def failed_test(tree: Path, where: str, *options: str) -> str | None:
    """Return the first test that fails, by its id; None: all pass, or none is of the tier."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, where]
    process = ended(command, tree)
    if process.returncode in (0, NO_TESTS):
        return None
    lines = process.stdout.splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), None)
    return failed.split(" ")[1] if failed else f"pytest ended with {process.returncode}: {lines[-1] if lines else ''}"


if __name__ == "__main__":
    main()
