"""Destinations of verdicts: a page, the dashboard of the recipe, and the ledger of earlier commits, one JSON object a
line, against which the next validation is compared.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import NoneType
from typing import Any

from labs.tables import format_number, markdown_table
from labs.validate.judge import (
    EVALUATION,
    Measured,
    Trio,
    Verdict,
    around,
    format_spread,
    speedup,
    trio_verdict,
    trios,
    within_tolerance,
)
from sftkit.config.schema import LogConfig
from sftkit.config.terminal import secret_in, visible
from sftkit.errors import ConfigError
from sftkit.reports.values import badge, check_table, el, html_document, html_table, join, section
from sftkit.rundir.files import digest, replace_text
from sftkit.rundir.names import resolve

_CSS = "@media (min-width: 621px) { .proof .name { width: 24%; } }"
"The findings need more room than the names of criteria."


def groups(result: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (heading, verdicts) of each layout and number of processes."""
    keys = dict.fromkeys((v["layout"], v["processes"]) for v in result["verdicts"])
    for layout, processes in keys:
        rows = [v for v in result["verdicts"] if (v["layout"], v["processes"]) == (layout, processes)]
        yield f"{layout} rows, {processes} process{'es' * (processes > 1)}", rows


def mark(*, ok: bool | None) -> str:
    """Return the word for a verdict."""
    return {True: "PASS", False: "FAIL", None: "not checked"}[ok]


def criteria_passed(result: dict[str, Any]) -> str:
    """Return how many criteria passed, or how many failed and which."""
    states = [verdict["ok"] for verdict in result["verdicts"]]
    judged = len(states) - states.count(None)
    unknown = f", {states.count(None)} not checked" if None in states else ""
    if result["passed"]:
        return f"PASS: {judged} of {judged} criteria passed{unknown}"
    failed = dict.fromkeys(verdict["criterion"] for verdict in result["verdicts"] if verdict["ok"] is False)
    named = f": {', '.join(failed)}" if len(failed) <= 3 else ""
    return f"FAIL: {states.count(False)} of {judged} criteria failed{unknown}{named}"


def _facts(result: dict[str, Any]) -> list[str]:
    """Return hardware, versions and the method of measurement."""
    env, plan = result["environment"], result["plan"]
    versions = ", ".join(f"{name} {value}" for name, value in env.get("packages", {}).items() if value)
    return [
        f"{plan['recipe']} {' '.join(plan['overrides'])}, {plan['script']}".replace(" ,", ","),
        f"{env.get('device', 'unknown device')}; {versions}; Python {env.get('python')}; commit "
        f"{env.get('git') or 'unknown'}",
        f"{plan['steps']} steps a run, each run in processes of its own with empty compiler caches; the first "
        f"{plan['warm_up']} steps are left out; medians of windows of {plan['window']} steps, extremes in brackets",
    ]


RUN_COLUMNS = ("run", "tokens/s", "step (s)", "MFU", "peak GiB", "last loss", "warm-up (s)", "graphs", "recompiles")


def run_cells(run: dict[str, Any], warm_up: int) -> list[str]:
    """Return a run's cells in the table; a dash for an unknown value."""
    measured = Measured(**run["measured"])
    if measured.error:
        return [run["name"], measured.error, *["-"] * (len(RUN_COLUMNS) - 2)]

    def windows(name: str, form: str) -> str:
        return format_spread([line[name] for line in measured.timed(warm_up) if line.get(name) is not None], form)

    return [
        run["name"],
        windows("perf/tok_per_sec", ",.0f"),
        windows("perf/step_seconds", ".4f"),
        windows("perf/mfu", ".1%"),
        format_number(measured.largest("mem/peak_gib"), "{:.2f}"),
        format_number(measured.last("train/loss"), "{:.4f}"),
        format_number(measured.summary.get("warm_up_seconds"), "{:.1f}"),
        format_number(measured.last("compile/graphs"), "{:.0f}"),
        format_number(measured.last("compile/recompiles"), "{:.0f}"),
    ]


def markdown_page(result: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    lines = ["# Does compiling pay?", "", f"**{criteria_passed(result)}**", ""]
    lines += [f"- {fact}" for fact in _facts(result)]
    for heading, rows in groups(result):
        cells = [[mark(ok=v["ok"]), v["criterion"], v["found"], v["wanted"]] for v in rows]
        lines += ["", f"## {heading}", "", markdown_table(("", "criterion", "found", "wanted"), cells)]
    runs = [run_cells(run, result["plan"]["warm_up"]) for run in result["runs"]]
    lines += ["", "## Runs", "", markdown_table(RUN_COLUMNS, runs), "", "```"]
    return "\n".join([*lines, *(run["command"] for run in result["runs"]), "```", ""])


def html(result: dict[str, Any]) -> str:
    """Return the page, which loads nothing from elsewhere."""
    title = el(
        "div", el("h1", "Does compiling pay?"), badge(criteria_passed(result), ok=result["passed"]), class_="title"
    )
    header = el("header", el("div", title, [el("p", fact, class_="soft") for fact in _facts(result)]))
    parts = []
    for number, (heading, rows) in enumerate(groups(result), 1):
        checks = [v | {"name": v["criterion"], "expected": v["wanted"]} for v in rows]
        parts.append(section(f"criteria-{number}", heading, check_table(checks, ("Criterion", "Found", "Wanted"))))
    runs = [run_cells(run, result["plan"]["warm_up"]) for run in result["runs"]]
    parts.append(section("runs", "Runs", html_table(RUN_COLUMNS, runs)))
    parts.append(section("commands", "Commands", el("pre", "\n".join(run["command"] for run in result["runs"]))))
    return visible(html_document(f"Validation: {result['plan']['recipe']}", join(header, el("main", parts)), _CSS))


VERDICT_COLUMNS = ("layout", "processes", "criterion", "verdict", "found", "wanted")
SPEED_COLUMNS = (
    *("layout", "processes", "speedup", "eager_step_seconds", "compiled_step_seconds", "compile_seconds"),
    *("saved_seconds_per_1000_steps", "steps"),
)


def send_result(result: Mapping[str, Any], out: Path, config: LogConfig) -> str | None:
    """Send a judged result to the dashboard of the recipe's `log`; never raise an error. Return a message for the
    user; None without a dashboard.

    Args:
        out: folder of the result, which also receives offline files.
    """
    from sftkit.tracking.dashboard.remote import (
        DashboardWriter,
        Ending,
        RunFile,
        open_dashboard,
        own_tags,
        record_table,
        run_name,
    )

    verdicts = [verdict | {"verdict": mark(ok=verdict["ok"])} for verdict in result["verdicts"]]
    speeds = speeds_of(result)
    failed_first = sorted(verdicts, key=lambda verdict: verdict["ok"] is not False)
    tables = [
        record_table("validate/verdicts", VERDICT_COLUMNS, failed_first),
        record_table("validate/speed", SPEED_COLUMNS, speeds),
    ]
    about = {
        "name": run_name(out),
        "group": os.environ.get("WANDB_RUN_GROUP"),
        "job_type": "validate",
        "tags": tuple(own_tags()),
        "notes": os.environ.get("WANDB_NOTES") or criteria_passed(dict(result)),
    }
    settings = {"plan": result["plan"], "environment": result["environment"]}
    dashboard = open_dashboard(config, out, None, about, settings)
    if dashboard is None:
        return None
    remote_logger = DashboardWriter(dashboard)
    remote_logger.record(0, lambda: RunFile([each for each in tables if each.rows], values(verdicts, speeds)))
    said = remote_logger.finish(Ending("finished", 0 if result["passed"] else 1, {"run/state": "finished"}))
    return f"wandb: {said}" if said else None


def values(verdicts: list[dict[str, Any]], speeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers that summarise the validation: criteria by verdict, and the speed-up of the first layout on
    the fewest processes.
    """
    states = [verdict["ok"] for verdict in verdicts]
    counts = {"passed": states.count(True), "failed": states.count(False), "not_checked": states.count(None)}
    found = {f"validate/{name}": count for name, count in counts.items()}
    return found | ({"validate/speedup": speeds[0]["speedup"]} if speeds else {})


def speeds_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the speed-up of each layout and number of processes whose runs finished, with its meaning in time."""
    every = {(trio.layout, trio.processes): trio for of_layout in trios(result) for trio in of_layout}
    return [{**time, "speedup": speedup(every[time["layout"], time["processes"]])} for time in result["times"]]


LedgerEntry = dict[str, Any]
"A line of the ledger."
LEDGER = Path("benchmarks/ledger.jsonl")
"The ledger of this repository, from its root."
CRITERION = "evaluation as in the ledger"
_WANTED = f"losses within two seeds, or {100 * EVALUATION:.1f} %, of the newest entry; tasks within its 95 % interval"
KEY = ("recipe", "script", "overrides", "start", "layout", "processes", "steps", "hardware")
"Fields that two comparable entries share."
_KINDS: Mapping[str, tuple[type, ...]] = {
    "date": (str,),
    "commit": (str, NoneType),
    "dirty": (bool, NoneType),
    "hardware": (str,),
    "versions": (dict,),
    "recipe": (str,),
    "script": (str,),
    "overrides": (list,),
    "start": (str, NoneType),
    "layout": (str,),
    "processes": (int,),
    "steps": (int,),
    "seed": (int,),
    "kind": (str,),
    "tokens_per_second": (dict,),
    "ratio": (int, float),
    "last_loss": (int, float),
    "val": (dict,),
    "tasks": (dict,),
}
"Name -> its types in JSON. An entry has exactly these names; labs/validate/README.md describes them."
_PACKAGES = ("torch", "transformers", "accelerate")
_TASK = ("metric", "value", "low", "high")
_MACHINE_PATH = re.compile(r"""(?:^|file://|[\s=\[{(:,'"])(?:~[\w-]*/|/[^/\s]|\.\./)""")
"Absolute paths, in a home folder, or above the repository; not the // of a URL."


@dataclass(frozen=True)
class Ledger:
    """A ledger as it was when the validation began."""

    path: Path
    entries: list[tuple[int, LedgerEntry]]
    "(number of the line, entry)"
    records: bool
    "whether to append this validation"


def open_ledger(path: Path | None, *, records: bool) -> Ledger | None:
    """Read the named ledger, or the repository's; None: none was named and the repository has none.

    Raises:
        ConfigError: it is missing and not to be created, cannot be read, or has an invalid line.
    """
    found = path or LEDGER
    if not found.exists() and not records:
        if path is None:
            return None
        raise ConfigError(f"--ledger: {path}: no such file; --record makes it")
    if not found.parent.is_dir():
        raise ConfigError(f"--ledger: {found.parent}/: no such folder; start in the repository's root or name a file")
    return Ledger(found, read_ledger(found), records)


def read_ledger(path: Path) -> list[tuple[int, LedgerEntry]]:
    """Return (number of the line, entry) of each line; [] for a missing file.

    Raises:
        ConfigError: gives FILE:LINE and the error.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}; fix or delete the line") from error
        if problem := problem_of(entry):
            raise ConfigError(f"{path}:{number}: not an entry of a ledger: {problem}; fix or delete the line")
        entries.append((number, entry))
    return entries


def problem_of(entry: Any) -> str | None:
    """Return why a value is not an entry; None if it is one."""
    if not isinstance(entry, dict):
        return "not a JSON object"
    for words, names in (("it lacks", _KINDS.keys() - entry.keys()), ("unknown:", entry.keys() - _KINDS.keys())):
        if names:
            return f"{words} {', '.join(sorted(names))}"
    for name, kinds in _KINDS.items():
        if type(entry[name]) not in kinds:
            allowed = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
            return f"{name} must be {allowed}, not {json.dumps(entry[name])}"
    numbers = {"ratio": entry["ratio"], "last_loss": entry["last_loss"]}
    numbers |= {f"val.{name}": value for name, value in entry["val"].items()}
    numbers |= {f"tokens_per_second.{name}": entry["tokens_per_second"].get(name) for name in ("eager", "compiled")}
    for task, found in entry["tasks"].items():
        if not isinstance(found, dict) or set(found) != set(_TASK):
            return f"tasks.{task} must hold {', '.join(_TASK)}"
        numbers |= {f"tasks.{task}.{name}": found[name] for name in _TASK[1:]}
    wrong = [name for name, value in numbers.items() if type(value) not in (int, float) or not math.isfinite(value)]
    return f"{wrong[0]} must be a number, not {json.dumps(numbers[wrong[0]])}" if wrong else None


# ---- comparing ----


def as_in_ledger(trio: Trio, result: Mapping[str, Any], ledger: Ledger) -> Verdict:
    """Compare the compiled run's evaluation with that of the newest entry of the same key; not checked without one."""
    if trio.eager.error or trio.compiled.error or trio.other_seed.error:
        return trio_verdict(trio, CRITERION, "not measured: a run failed", _WANTED, ok=False)
    key, started = key_of(trio, result), result.get("started")
    # Compared with itself, as when recorded runs are judged again, everything would pass.
    known = [(number, entry) for number, entry in ledger.entries if same(entry, key) and entry["date"] != started]
    if not known:
        where, names = in_repository(str(ledger.path)), f"{', '.join(KEY[:-1])} and {KEY[-1]}"
        found = f"{where} has no other validation with the same {names}"
        return trio_verdict(trio, CRITERION, found, _WANTED, ok=None)
    number, entry = max(known, key=lambda one: (one[1]["date"], one[0]))
    ok, found = compared(trio, entry)
    commit = f"commit {entry['commit']}{' with changes' if entry['dirty'] else ''}" if entry["commit"] else "no commit"
    return trio_verdict(trio, CRITERION, f"line {number}, {entry['date']}, {commit}: {found}", _WANTED, ok=ok)


def compared(trio: Trio, entry: LedgerEntry) -> tuple[bool, str]:
    """Return whether validation losses are within the difference of two seeds or 0.5 %, and tasks within the entry's
    95 % interval; and the finding.
    """
    wanted = {name: around(value, name, trio) for name, value in entry["val"].items()}
    got = dict(trio.compiled.evals)
    for name, task in entry["tasks"].items():
        wanted[f"{name} ({task['metric']})"] = (task["value"], task["low"], task["high"])
    got |= {f"{name} ({task['metric']})": task["value"] for name, task in tasks_of(trio).items()}
    return within_tolerance(wanted, got)


def key_of(trio: Trio, result: Mapping[str, Any]) -> LedgerEntry:
    """Return the fields that an entry must share with a trio to be compared with it."""
    plan, device = result["plan"], str(trio.compiled.environment.get("device", "unknown"))
    # The last of two words for a setting counts; their order has no other meaning.
    overrides = dict(word.partition("=")[::2] for word in plan["overrides"])
    return {
        "recipe": in_repository(plan["recipe"]),
        "script": in_repository(plan["script"]),
        "overrides": [f"{key}={value}" for key, value in sorted(overrides.items())],
        "start": result.get("start"),
        "layout": trio.layout,
        "processes": trio.processes,
        "steps": plan["steps"],
        "hardware": "cpu" if device.startswith("CPU") else device,
    }


def start_of(path: str | None) -> str | None:
    """Return an identifier of the start checkpoint: 16 digits of the sha256 of its manifest, so that two runs are not
    compared if the base of the same recipe was trained twice. None for a new model, or a third-party one.

    Args:
        path: value of model.path.
    """
    found = digest(Path(resolve(path))) if path is not None else None
    return found[:16] if found else None


def same(entry: LedgerEntry, key: LedgerEntry) -> bool:
    """Return whether an entry has this key."""
    return all(entry[name] == key[name] for name in KEY)


def in_repository(path: str) -> str:
    """Return a path relative to this folder, if it leads to something below."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


# ---- recording ----


def record_validation(result: Mapping[str, Any], path: Path) -> str:
    """Append a successful validation, with an entry for each layout and number of processes. Return a description of
    what was done.

    Raises:
        ConfigError: an entry would contain a path of this machine or a secret, the runs are of several commits, a
            field is missing, or the file cannot be written.
    """
    failed = [f"{v['criterion']} ({v['layout']}, {v['processes']})" for v in result["verdicts"] if v["ok"] is False]
    if failed:
        return f"--record: nothing was recorded in {path}: failed: {', '.join(failed)}"
    # All checks precede the first written byte: the file is in the repository.
    check_portable(key_words(result["plan"]))
    check_one_commit(result)
    found = [entry_of(trio, result) for of_layout in trios(result) for trio in of_layout]
    for entry in found:
        if problem := problem_of(entry):
            raise ConfigError(f"--record: {entry['layout']}, {entry['processes']} processes: {problem}")
    # Read it again: another validation may have written to it since this one began.
    known = read_ledger(path)
    new = [e for e in found if not any(same(old, e) and old["date"] == e["date"] for _, old in known)]
    if not new:
        return f"--record: {path} has these runs already"
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        before += "\n" if before and not before.endswith("\n") else ""
        lines = "".join(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n" for entry in new)
        replace_text(path, before + lines)
    except OSError as error:
        raise ConfigError(f"--record: {path} cannot be written: {error}") from error
    return f"recorded: {len(new)} in {path}"


def check_one_commit(result: Mapping[str, Any]) -> None:
    """Reject runs of several commits, between which the checkout changed: an entry has one commit.

    Raises:
        ConfigError: lists the commits.
    """
    environments = [run["measured"]["environment"] for run in result["runs"]]
    commits = dict.fromkeys(str(known["git"] or "unknown") for known in environments if "git" in known)
    if len(commits) > 1:
        raise ConfigError(
            f"--record: the runs are of several commits, {', '.join(commits)}: nothing was recorded; leave the "
            "checkout as it is while they run"
        )


def entry_of(trio: Trio, result: Mapping[str, Any]) -> LedgerEntry:
    """Return the entry of a trio."""
    environment, commit = trio.compiled.environment, trio.compiled.environment.get("git")
    eager, compiled = (median(run.speeds(trio.warm_up)) for run in (trio.eager, trio.compiled))
    return {
        "date": result.get("started"),
        "commit": commit.removesuffix("-dirty") if commit else None,
        "dirty": commit.endswith("-dirty") if commit else None,
        **key_of(trio, result),
        "versions": {name: environment.get("packages", {}).get(name) for name in _PACKAGES},
        "seed": seed_of(trio, result),
        "kind": "compiled",
        "tokens_per_second": {"eager": eager, "compiled": compiled},
        "ratio": speedup(trio),
        "last_loss": trio.compiled.last("train/loss"),
        "val": {k: v for k, v in trio.compiled.evals.items() if k.startswith("val/") and v is not None},
        "tasks": tasks_of(trio),
    }


def seed_of(trio: Trio, result: Mapping[str, Any]) -> int | None:
    """Return the seed of the compiled run, from its command."""
    wanted = (trio.layout, trio.processes, "compiled")
    command = next(r["command"] for r in result["runs"] if (r["layout"], r["processes"], r["kind"]) == wanted)
    seeds = re.findall(r"\brun\.seed=(\d+)", command)
    return int(seeds[-1]) if seeds else None


def tasks_of(trio: Trio) -> dict[str, LedgerEntry]:
    """Return task -> metric, value and its 95 % interval."""
    return {row["task"]: {name: row[name] for name in _TASK} for row in trio.compiled.results}


def key_words(plan: Mapping[str, Any]) -> list[str]:
    """Return the words of a plan that an entry holds."""
    return [in_repository(plan["recipe"]), in_repository(plan["script"]), *plan["overrides"]]


def check_portable(words: Iterable[str]) -> None:
    """Reject words that other users cannot read or must not see.

    Raises:
        ConfigError: the first word with an absolute path or with what looks like a secret.
    """
    for word in words:
        key, _, value = word.partition("=")
        if secret_in(value, key) or secret_in(key):
            raise ConfigError(f"--record: {key}: looks like a secret, which the ledger must not hold")
        if _MACHINE_PATH.search(word):
            raise ConfigError(
                f"--record: {word}: a path of this machine, which the ledger must not hold; name it from the "
                "repository's root (a link will do) or leave out --record"
            )
