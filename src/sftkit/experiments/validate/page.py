"""The result of a validation as Markdown and as a page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from sftkit.config.terminal import visible
from sftkit.experiments.validate.measure import Measured, spread

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5d636b; --line: #dfe2e6; --paper: #fff; --good: #176b3a;
  --good-back: #e3f4e9; --bad: #a11919; --bad-back: #fbe6e6; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ec; --soft: #a2a9b2; --line: #353a41; --paper: #14171a;
  --good: #7ddc9e; --good-back: #12301d; --bad: #ff9a93; --bad-back: #3b1616; --card: #1c2025; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 28px 20px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 34px 0 10px; }
p { margin: 6px 0; } .soft { color: var(--soft); }
.not-checked { color: var(--soft); background: var(--card); }
.verdict { display: inline-block; white-space: nowrap; font-weight: 650; padding: 2px 10px; border-radius: 5px; }
.PASS { color: var(--good); background: var(--good-back); } .FAIL { color: var(--bad); background: var(--bad-back); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.criteria td:nth-child(2) { min-width: 170px; } .criteria td:nth-child(3) { overflow-wrap: anywhere; }
.criteria td:nth-child(4) { min-width: 190px; }
td.number { text-align: right; white-space: nowrap; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 10px 12px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 12.5px; }
@media (max-width: 640px) { .criteria thead { display: none; } .criteria tr { display: block; padding: 8px 0;
  border-bottom: 1px solid var(--line); } .criteria td { display: block; border: 0; padding: 2px 0; } .criteria td:nth-child(4)::before { content: "wanted: "; } }
@media print { body { max-width: none; padding: 0; font-size: 11px; } h2, tr { break-inside: avoid; } }
"""


def groups(result: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (heading, verdicts) of each layout and number of processes."""
    keys = dict.fromkeys((v["layout"], v["processes"]) for v in result["verdicts"])
    for layout, processes in keys:
        rows = [v for v in result["verdicts"] if (v["layout"], v["processes"]) == (layout, processes)]
        yield f"{layout} rows, {processes} process{'es' * (processes > 1)}", rows


def mark(*, ok: bool | None) -> str:
    """Return the word for a verdict."""
    return {True: "PASS", False: "FAIL", None: "not checked"}[ok]


def headline(result: dict[str, Any]) -> str:
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
        f"{env.get('device', 'unknown device')}; {versions}; Python {env.get('python')}; commit {env.get('git') or 'unknown'}",
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
        return spread([line[name] for line in measured.timed(warm_up) if line.get(name) is not None], form)

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        run["name"],
        windows("perf/tok_per_sec", ",.0f"),
        windows("perf/step_p50_seconds", ".4f"),
        windows("perf/mfu", ".1%"),
        number(measured.most("mem/peak_gib"), ".2f"),
        number(measured.last("train/loss"), ".4f"),
        number(measured.summary.get("warm_up_seconds"), ".1f"),
        number(measured.last("compile/graphs"), ".0f"),
        number(measured.last("compile/recompiles"), ".0f"),
    ]


def markdown(result: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    lines = ["# Does compiling pay?", "", f"**{headline(result)}**", "", *(f"- {fact}" for fact in _facts(result))]
    for heading, rows in groups(result):
        cells = ([mark(ok=v["ok"]), v["criterion"], v["found"], v["wanted"]] for v in rows)
        lines += ["", f"## {heading}", "", *_table(("", "criterion", "found", "wanted"), cells)]
    lines += ["", "## Runs", "", *_table(RUN_COLUMNS, _cells_of_runs(result)), "", "```"]
    return "\n".join([*lines, *(run["command"] for run in result["runs"]), "```", ""])


def _cells_of_runs(result: dict[str, Any]) -> Iterator[list[str]]:
    return (run_cells(run, result["plan"]["warm_up"]) for run in result["runs"])


def _table(columns: Sequence[str], rows: Iterator[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def html(result: dict[str, Any]) -> str:
    """Return the page; nothing in it is loaded from anywhere."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>Validation: {escape(result['plan']['recipe'])}</title><style>{_STYLE}</style>",
        f"<h1>Does compiling pay?</h1><p><span class='verdict {mark(ok=result['passed'])}'>{escape(headline(result))}</span>",
        *(f"<p class=soft>{escape(fact)}</p>" for fact in _facts(result)),
    ]
    for heading, rows in groups(result):
        parts.append(
            f"<h2>{escape(heading)}</h2><table class=criteria><thead><tr><th>result<th>criterion<th>found<th>wanted"
        )
        parts.append("</thead><tbody>")
        parts += [
            f"<tr><td><span class='verdict {mark(ok=v['ok']).replace(' ', '-')}'>{mark(ok=v['ok'])}</span><td><b>{escape(v['criterion'])}</b>"
            f"<td>{escape(v['found'])}<td class=soft>{escape(v['wanted'])}"
            for v in rows
        ]
        parts.append("</tbody></table>")
    parts.append("<h2>Runs</h2><div class=wide><table><thead><tr>")
    parts += [f"<th>{escape(column)}" for column in RUN_COLUMNS]
    parts.append("</thead><tbody>")
    for name, *cells in _cells_of_runs(result):
        parts.append(f"<tr><td>{escape(name)}" + "".join(f"<td class=number>{escape(cell)}" for cell in cells))
    parts.append("</tbody></table></div><h2>Commands</h2><pre>")
    parts.append(escape("\n".join(run["command"] for run in result["runs"])))
    return visible("".join([*parts, "</pre></html>\n"]))
