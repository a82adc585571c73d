"""Results that are kept beside their plan: a file for each kind of machine, in which calls on that kind come together.

Every FOLDER/results/*.json is such a file, and its `machine`, not its name, says of which kind. The first is
results.json, that of another kind has its device's name. What shall be in no table lies in a folder below results/.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labs.bench.jobs import read_jobs
from labs.bench.plan import slug
from labs.bench.run import read_bench_results
from sftkit.errors import ConfigError

Results = dict[str, Any]


def kind(results: Results) -> tuple[str, str]:
    """Return what the rows of a table have in common: the device and the versions.

    Raises:
        ConfigError: the machine is not known.
    """
    machine = results["machine"]
    if not machine.get("device"):
        why = machine.get("error", "it was not measured")
        raise ConfigError(
            f"results of {results['started']}: of an unknown machine, so for no table: {why}. Run them again"
        )
    # A package that is not installed says no more than one that an earlier version did not ask for.
    return machine["device"], ", ".join(f"{name} {text}" for name, text in sorted(machine["versions"].items()) if text)


def kept_results(lab: Path) -> dict[Path, Results]:
    """Return the files of a lab with what they hold, each of another kind of machine; results.json is the first.

    Raises:
        ConfigError: a file holds something else, or results of the same kind as another one.
    """
    files = sorted((lab / "results").glob("*.json"), key=lambda file: (file.name != "results.json", file.name))
    kept = {file: read_bench_results(file, "kept results") for file in files}
    of_kind: dict[tuple[str, str], Path] = {}
    for file, results in kept.items():
        first = of_kind.setdefault(kind(results), file)
        if first != file:
            raise ConfigError(
                f"{first} and {file.name}: both of {' with '.join(kind(results))}, which has one file. Move one "
                'of them into a folder below; to have its rows in the other one: make lab ARGS="--take FILE"'
            )
    return kept


def keep(lab: Path, results: Results) -> Path:
    """Write results into the file of their kind of machine, or begin one, and return it.

    Raises:
        ConfigError: the machine is not known.
    """
    kept, mine = kept_results(lab), kind(results)
    file = next((file for file, old in kept.items() if kind(old) == mine), None)
    if file is None:
        file = _new_file(lab / "results", mine[0])
    else:
        results = merged(kept[file], results)
    names = run_names(lab)
    for rows in ("runs", "replaced"):
        planned = [row for row in results.get(rows, []) if row["name"] in names]
        results[rows] = sorted(planned, key=lambda row: names.index(row["name"]))
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    return file


def merged(old: Results, new: Results) -> Results:
    """Return the rows of both, which are of one kind of machine, with the commits of both.

    Of a run that is in both, `runs` has the newer row, but no failed row in place of one that succeeded. `replaced` has
    the other one while rows of its call are compared with it. `machine` is the newer call's; its `earlier` has those of
    the other calls whose rows are there, since their hosts and their number of GPUs may be others.
    """
    first, last = sorted((old, new), key=lambda results: str(results["started"]))
    machines = first["machine"], last["machine"]
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
    calls = machines[0].get("earlier", {}) | machines[1].get("earlier", {})
    calls[first["started"]] = {name: value for name, value in machines[0].items() if name != "earlier"}
    used = {row["call"] for row in (*newest, *replaced)} - {last["started"]}
    earlier = {call: calls[call] for call in sorted(used & calls.keys())}
    machine = {**machines[1], "git": ", ".join(commits), "earlier": earlier}
    return {**last, "machine": machine, "runs": list(newest), "replaced": replaced}


def run_names(lab: Path) -> list[str]:
    """Return the runs of the lab's plan, in its order."""
    return [job.name for job in read_jobs(lab / "plan.yaml", Path("unused"))]


def not_measured(lab: Path, kept: Iterable[Results]) -> list[str]:
    """Return the runs of the plan that succeeded on no machine."""
    measured = {row["name"] for results in kept for row in results["runs"] if not row["error"]}
    return [name for name in run_names(lab) if name not in measured]


def _new_file(folder: Path, device: str) -> Path:
    # A device with other versions than those of its file has a second file.
    name = slug(device).lower()
    names = itertools.chain(("results", name), (f"{name}-{number}" for number in itertools.count(2)))
    return next(file for name in names if not (file := folder / f"{name}.json").exists())
