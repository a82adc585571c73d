"""The result of a validation as Markdown and as a page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from labs.bench.report import format_number, markdown_table
from labs.validate.measure import Measured, format_spread
from sftkit.config.terminal import visible
from sftkit.reports.components import badge, check_table, html_table, section
from sftkit.reports.markup import el, join
from sftkit.reports.page import html_document

_CSS = "@media (min-width: 621px) { .proof .name { width: 24%; } }"
"What was found takes more room than the names of criteria."


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
    """Return how many criteria passed."""
    states = [verdict["ok"] for verdict in result["verdicts"]]
    unknown = f", {states.count(None)} not checked" if None in states else ""
    return f"{mark(ok=result['passed'])}: {states.count(True)} of {len(states) - states.count(None)} criteria{unknown}"


def _facts(result: dict[str, Any]) -> list[str]:
    """Return hardware, versions and how it was measured."""
    env, plan = result["environment"], result["plan"]
    versions = ", ".join(f"{name} {value}" for name, value in env.get("packages", {}).items() if value)
    return [
        f"{plan['recipe']} {' '.join(plan['overrides'])}, {plan['script']}".replace(" ,", ","),
        f"{env.get('device', 'unknown device')}; {versions}; Python {env.get('python')}; commit "
        f"{env.get('git') or 'unknown'}",
        f"{plan['steps']} steps a run, each run in processes of its own with empty compiler caches; the first "
        f"{plan['warm_up']} steps are left out; medians of windows of {plan['window']} steps, extremes in brackets",
    ]


RUN_COLUMNS = ("run", "tokens/s", "step p50 (s)", "MFU", "peak GiB", "last loss", "warm-up (s)", "graphs", "recompiles")


def run_cells(run: dict[str, Any], warm_up: int) -> list[str]:
    """Return a run in the table; a dash for what is not known."""
    measured = Measured(**run["measured"])
    if measured.error:
        return [run["name"], measured.error, *["-"] * (len(RUN_COLUMNS) - 2)]

    def windows(name: str, form: str) -> str:
        return format_spread([line[name] for line in measured.timed(warm_up) if line.get(name) is not None], form)

    return [
        run["name"],
        windows("perf/tok_per_sec", ",.0f"),
        windows("perf/step_p50_seconds", ".4f"),
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
    """Return the page; nothing in it is loaded from anywhere."""
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
