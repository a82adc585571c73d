"""Format results as Markdown tables, from results.json alone, and keep results next to their plan.

Every FOLDER/results/*.json holds one kind of machine and collects the calls on it; its `machine`, not its name,
identifies the kind. The first file is results.json; that of another kind has its device's name. Results in a folder
below results/ appear in no table.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from labs.bench.plan import read_jobs, slug
from sftkit.errors import ConfigError

ResultRow = dict[str, Any]
_COLUMNS: tuple[tuple[str, Callable[[ResultRow, ResultRow | None], str]], ...] = (
    ("run", lambda row, _: row["name"]),
    ("attention", lambda row, _: row.get("attention", {}).get("backend", "-")),
    ("useful tok/s (windows)", lambda row, _: speed(row["tok_per_sec"])),
    ("target tok/s", lambda row, _: format_number(middle(row["target_tok_per_sec"]), "{:,.0f}")),
    ("documents/s", lambda row, _: format_number(middle(row.get("documents_per_sec")), "{:,.1f}")),
    ("steps/s", lambda row, _: format_number(steps_per_sec(row), "{:.2f}")),
    ("MFU, datasheet", lambda row, _: percent(middle(row["mfu"]))),
    ("MFU, measured ceiling", lambda row, _: percent(row["mfu_of_ceiling"])),
    ("peak GiB", lambda row, _: format_number(row["peak_memory_gib"], "{:.1f}")),
    ("reserved GiB", lambda row, _: format_number(row["reserved_memory_gib"], "{:.1f}")),
    ("first step s", lambda row, _: format_number(row["first_step_seconds"], "{:.1f}")),
    ("first steps s", lambda row, _: first_steps(row)),
    ("recompiles", lambda row, _: format_number(row["compile"].get("recompiles"), "{:.0f}")),
    ("graph breaks", lambda row, _: format_number(row["compile"].get("graph_breaks"), "{:.0f}")),
    ("data wait %", lambda row, _: format_number(middle(row["data_wait_pct"]), "{:.1f}")),
    ("padding %", lambda row, _: format_number(middle(row["padding_pct"]), "{:.1f}")),
    ("last loss", lambda row, _: format_number(last_loss(row), "{:.4f}")),
    ("ratio", lambda row, base: ratio(row, base)),
)
SEVERAL: tuple[tuple[str, Callable[[ResultRow, ResultRow | None], str]], ...] = (
    ("GPUs", lambda row, _: str(gpus(row))),
    ("topology", lambda row, _: topology(row)),
    ("tok/s per GPU", lambda row, _: format_number(middle(row.get("tok_per_sec_per_gpu")), "{:,.0f}")),
    ("scaling", lambda row, _: percent(row.get("scaling"))),
)
"Columns after the name for runs with more than one process. Results of one process from earlier versions lack them."


def markdown_report(results: dict[str, Any]) -> str:
    """Return the results as Markdown: machine, speeds, losses against a reference, graphs, failures, notes."""
    rows: list[ResultRow] = results["runs"]
    tables = [speed_table(rows), clock_line(rows, results["machine"]), loss_table(rows), graph_table(rows)]
    parts = [machine_lines(results["machine"]), ahead_line(rows), *tables, failures(rows), notes(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine_lines(machine: dict[str, Any]) -> str:
    """Return the machine of the runs, and its ceilings without a model."""
    if "device" not in machine:
        return f"Machine: not measured: {machine.get('error', 'unknown')}"
    known = [f"{name} {text}" for name, text in machine["versions"].items() if text]
    ceilings = [
        f"matrix products {format_number(machine['matmul_tflops'], '{:.0f} TFLOP/s')} (bf16, 8192 x 8192; datasheet "
        f"{format_number(machine['datasheet_tflops'], '{:.0f}')})",
        f"copies {format_number(machine['copy_tb_per_sec'], '{:.2f} TB/s')}",
    ]
    # Results of several calls have the newest call's machine, with those of the others under it.
    here, *others = dict.fromkeys(host(each) for each in (machine, *machine.get("earlier", {}).values()))
    lines = [f"Machine: {here}" + (f"; in earlier calls: {'; '.join(others)}" if others else "")]
    call = "the newest" if "earlier" in machine else "the same"
    lines += [f"Ceilings measured in {call} call: {', '.join(ceilings)}"] if machine["matmul_tflops"] else []
    # Two spaces at the end of a line break it in Markdown.
    return "  \n".join([*lines, f"Versions: {', '.join(known)}; commit {machine['git'] or '-'}"])


def ahead_line(rows: Sequence[ResultRow]) -> str:
    """Return which rows are of runs that were started ahead, and what their numbers therefore exclude."""
    names = [row["name"] for row in rows if row.get("ahead")]
    which = "all runs" if len(names) == len(rows) else ", ".join(names)
    return (
        f"Started while what came before was at work, and then let go (`--ahead`): {which}. What they had imported by "
        "then, the compiler too, is not in the seconds of their first steps."
        if names
        else ""
    )


def host(machine: dict[str, Any]) -> str:
    """Return devices, driver and host of one call."""
    count = f"{machine['gpus']} x " if machine.get("gpus", 0) > 1 else ""
    cpu = f", host {machine['cpu']} ({machine['cores']} cores)" if machine.get("cpu") else ""
    return f"{count}{machine['device']}, driver {machine['driver'] or '-'}, CUDA {machine['cuda'] or '-'}{cpu}"


def speed_table(rows: Sequence[ResultRow], replaced: Sequence[ResultRow] = ()) -> str:
    """Return a line for each successful run: the median of its timed windows, with the slowest and the fastest.

    `replaced` are rows of earlier calls that newer rows of the same name replaced: baselines of their own call.
    """
    good = [row for row in rows if not row["error"]]
    several = SEVERAL if any(gpus(row) > 1 for row in good) else ()
    columns = (*_COLUMNS[:1], *several, *_COLUMNS[1:])
    # Baselines may be rows that a newer call replaced: only they ran on the same host as the row.
    known = [*good, *replaced]
    cells = [[cell(row, reference_row(row["baseline"], row, known)) for _, cell in columns] for row in good]
    return markdown_table([name for name, _ in columns], cells) if cells else ""


def clock_line(rows: Sequence[ResultRow], machine: dict[str, Any]) -> str:
    """Return the clock and the power of the GPUs of each run: at its power limit a GPU lowers its clock."""

    def over(row: ResultRow, key: str) -> str:
        # Results of earlier versions lack it.
        values = [rank[key] for rank in row.get("ranks", ()) if rank.get(key) is not None]
        ends = dict.fromkeys(f"{value:,.0f}" for value in (min(values), max(values))) if values else {}
        return " to ".join(ends)

    limit = f" of {machine['power_limit_w']:,.0f}" if machine.get("power_limit_w") else ""
    known = [(row["name"], over(row, "sm_clock_mhz"), over(row, "power_w")) for row in rows if not row["error"]]
    runs = "; ".join(f"{name}: {clock} MHz, {power}{limit} W" for name, clock, power in known if clock)
    return f"Clock and power of a GPU, medians of the timed steps: {runs}." if runs else ""


def loss_table(rows: Sequence[ResultRow], replaced: Sequence[ResultRow] = ()) -> str:
    """Compare runs with their reference run over the steps that both logged; `replaced` as in `speed_table`."""
    good = [row for row in rows if not row["error"]]
    cells = []
    for row in good:
        # Steps are compared by number, so both runs must have had the same batches: `same_loss_as` promises it.
        reference = reference_row(row["same_loss_as"], row, [*good, *replaced])
        if reference and (gaps := loss_differences(row, reference)):
            worst = max(gaps, key=gaps.__getitem__)
            sizes = f"{gaps[worst]:.2e} (step {worst})", f"{sum(gaps.values()) / len(gaps):.2e}"
            ends = ", ".join(format_number(last_loss(each), "{:.4f}") for each in (reference, row))
            cells.append([row["name"], reference["name"], str(len(gaps)), *sizes, ends])
    header = ["run", "reference", "losses compared", "max difference", "mean difference", "last loss: reference, run"]
    return "Losses on the same batches, nats per target token:\n\n" + markdown_table(header, cells) if cells else ""


def graph_table(rows: Sequence[ResultRow]) -> str:
    """Return sizes and collectives of the captured graphs of each run, before and after every pass
    that changed them."""
    cells = []
    for row in rows:
        # A pass that changed nothing has no line.
        known: dict[str, str] = {}
        for each in row.get("graphs") or []:
            if known.get(each["graph"]) != each["size"]:
                cells.append([row["name"], each["graph"], each["after"], each["size"]])
            known[each["graph"]] = each["size"]
    header = ["run", "graph", "after", "size"]
    return "Captured graphs, of a run's largest shape:\n\n" + markdown_table(header, cells) if cells else ""


def loss_differences(row: ResultRow, reference: ResultRow) -> dict[str, float]:
    """Return step -> |loss - loss of the reference| for the steps that both have; infinite if a loss was not finite."""
    theirs = reference["losses"]
    shared = {step: (loss, theirs[step]) for step, loss in row["losses"].items() if step in theirs}
    # null means NaN and infinity, which JSON lacks.
    return {step: math.inf if a is None or b is None else abs(a - b) for step, (a, b) in shared.items()}


def failed(row: ResultRow) -> str:
    """Return the reason of a run's failure as a cell."""
    return f"failed: {' '.join(row['error'].split())[:200]}"


def failures(rows: Sequence[ResultRow]) -> str:
    """Return the runs without numbers, with the reasons."""
    # An error may be a page of traceback, but an item of a list is one line.
    lines = [f"- {row['name']}: {' '.join(str(row['error']).split())[:400]}" for row in rows if row["error"]]
    return "Failed:\n\n" + "\n".join(lines) if lines else ""


def notes(rows: Sequence[ResultRow]) -> str:
    """Return the notes in the rows."""
    lines = [f"- {row['name']}: {row['note']}" for row in rows if row.get("note")]
    return "Notes:\n\n" + "\n".join(lines) if lines else ""


def result_line(row: ResultRow) -> str:
    """Return one run as a line for the console when it ends."""
    if row["error"]:
        return f"{row['name']}: failed after {row['wall_seconds']:.0f} s: {' '.join(str(row['error']).split())[:300]}"
    return (
        f"{row['name']}: {speed(row['tok_per_sec'])} tok/s, MFU {percent(middle(row['mfu']))}, "
        f"{format_number(row['peak_memory_gib'], '{:.1f}')} GiB, first step "
        f"{format_number(row['first_step_seconds'], '{:.1f}')} s, loss {format_number(last_loss(row), '{:.4f}')}, "
        f"{row['wall_seconds']:.0f} s in all"
    )


def gpus(row: ResultRow) -> int:
    """Return the number of processes of a run, with a GPU each."""
    # Results of earlier versions have no world size: they all ran in one process.
    return int(row.get("world_size", 1))


def topology(row: ResultRow) -> str:
    """Return the topology's name, and the sizes of the mesh that are not 1: `fsdp2 (dp_shard 2, tp 2)`."""
    mesh = {key.removesuffix("_size"): size for key, size in row.get("mesh", {}).items() if size > 1}
    sizes = ", ".join(f"{key} {size}" for key, size in mesh.items())
    return (row.get("topology") or "-") + (f" ({sizes})" if sizes else "")


def middle(values: dict[str, Any] | None) -> float | None:
    """Return the median of a `spread` result; None if it is unknown."""
    return None if values is None else float(values["median"])


def steps_per_sec(row: ResultRow) -> float | None:
    """Return optimizer steps per second in the median window; None if unknown."""
    seconds = middle(row.get("step_seconds"))
    return 1.0 / seconds if seconds else None


def first_steps(row: ResultRow) -> str:
    """Return the seconds from before compilation to the end of the warm-up steps, and the number of those steps."""
    seconds = row.get("first_steps_seconds")
    return "-" if seconds is None else f"{seconds:.1f} ({row['steps']['warm_up']} steps)"


def last_loss(row: ResultRow) -> float | None:
    """Return the loss of the last logged window, in nats per target token; None without one."""
    # The losses are in the order of their steps.
    return next(reversed(list(row["losses"].values())), None)


def same_call(row: ResultRow, other: ResultRow) -> bool:
    """Return whether two rows were measured in one call of the bench, and so on one host."""
    return row.get("call") == other.get("call")


def reference_row(name: str | None, row: ResultRow, rows: Sequence[ResultRow]) -> ResultRow | None:
    """Return the run `name` from the call of `row` if it succeeded there, otherwise from another call; None if there
    is neither.
    """
    # A run of the same call ran on the same host; a run of another call is still good enough to compare losses.
    named = [each for each in rows if each["name"] == name and not each["error"]]
    return next((each for each in named if same_call(each, row)), named[0] if named else None)


def calls_line(rows: Sequence[ResultRow]) -> str:
    """Return the calls of the rows, if there are several; results of earlier versions lack them."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if not row["error"]:
            names.setdefault(row.get("call") or "unknown", []).append(row["name"])
    if len(names) < 2:
        return ""
    calls = "; ".join(f"{call}: {', '.join(of_call)}" for call, of_call in sorted(names.items()))
    return f"Measured in {len(names)} calls, whose hosts may differ; ratios are of rows of one call. {calls}."


def ratio(row: ResultRow, baseline: ResultRow | None) -> str:
    """Return useful tokens/s over those of the baseline, with the baseline's name; a dash if they are of
    different calls.
    """
    # Speeds of two hosts are not compared, even with the same kind of GPU.
    if baseline and not same_call(row, baseline):
        return "-"
    mine, its = middle(row["tok_per_sec"]), middle(baseline["tok_per_sec"]) if baseline else None
    return f"{mine / its:.2f} x {baseline['name']}" if mine and its and baseline else "-"


def speed(values: dict[str, Any] | None) -> str:
    """Return the median of a `spread` result, with its extremes."""
    return "-" if values is None else f"{values['median']:,.0f} ({values['min']:,.0f} to {values['max']:,.0f})"


def percent(value: float | None) -> str:
    """Return a share, 0-1, in percent, or a dash if it is unknown."""
    return format_number(None if value is None else 100.0 * value, "{:.1f} %")


def format_number(value: float | None, form: str) -> str:
    """Return the number, or a dash if it is unknown."""
    return "-" if value is None else form.format(value)


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def plan_name(plan: Path) -> str:
    """Return the name of a plan: h200_step for benchmarks/h200_step/plan.yaml, the file's own name for another file."""
    return plan.resolve().parent.name if plan.stem == "plan" else plan.stem


_RESULTS = ("plan", "started", "machine", "runs")
"Keys of results.json."


def read_bench_results(path: Path, flag: str = "--report") -> dict[str, Any]:
    """Read a results.json that `bench` wrote.

    Args:
        flag: command line option that names the file.

    Raises:
        ConfigError: the file cannot be read, or has other content.
    """
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: {path}: cannot be read as JSON: {error}") from error
    lacks = [key for key in _RESULTS if not isinstance(results, dict) or key not in results]
    if lacks:
        raise ConfigError(
            f"{flag}: {path}: not results of this bench, whose results.json has {', '.join(_RESULTS)}: it lacks "
            f"{', '.join(lacks)}"
        )
    return results


Results = dict[str, Any]


def kind(results: Results) -> tuple[str, str]:
    """Return the device and the versions, which the rows of a table share.

    Raises:
        ConfigError: the machine is unknown.
    """
    machine = results["machine"]
    if not machine.get("device"):
        why = machine.get("error", "it was not measured")
        raise ConfigError(
            f"results of {results['started']}: of an unknown machine, so for no table: {why}. Run them again"
        )
    # A missing package means the same as one that an earlier version did not record.
    return machine["device"], ", ".join(f"{name} {text}" for name, text in sorted(machine["versions"].items()) if text)


def kept_results(lab: Path) -> dict[Path, Results]:
    """Return the files of a lab with their contents, each of a different kind of machine; results.json is the first.

    Raises:
        ConfigError: a file has other content, or results of the same kind as another file.
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
    """Write results into the file of their kind of machine, creating it if necessary, and return the file.

    Raises:
        ConfigError: the machine is unknown.
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
    """Merge the rows of two results of one kind of machine, with the commits of both.

    For a run in both, `runs` keeps the newer row, except that a failed row never replaces a successful one.
    `replaced` keeps the other row while rows of its call are compared with it. `machine` is the newer call's; its
    `earlier` holds the machines of the other calls with rows, because hosts and number of GPUs may differ.
    """
    first, last = sorted((old, new), key=lambda results: str(results["started"]))
    machines = first["machine"], last["machine"]
    commits = dict.fromkeys(one for machine in machines for one in str(machine.get("git") or "-").split(", "))
    # Each row keeps its call: hosts differ, so speeds of two calls cannot be divided.
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
    """Return the runs of the plan without a success on any machine."""
    measured = {row["name"] for results in kept for row in results["runs"] if not row["error"]}
    return [name for name in run_names(lab) if name not in measured]


def _new_file(folder: Path, device: str) -> Path:
    # A device with other versions than its file gets a second file.
    name = slug(device).lower()
    names = itertools.chain(("results", name), (f"{name}-{number}" for number in itertools.count(2)))
    return next(file for name in names if not (file := folder / f"{name}.json").exists())
