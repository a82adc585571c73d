"""Builds report.html: one file, no script, nothing from the network."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from sftkit.reports import details, results, sections
from sftkit.reports.compare import speed_words
from sftkit.reports.components import badge, headline_tiles, html_table, value_text
from sftkit.reports.files import drawable_number
from sftkit.reports.markup import Html, el, join
from sftkit.reports.numbers import duration, format_value, moment, parameters
from sftkit.reports.style import CSS

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
SECTIONS = (
    ("proof", "Proof", sections.proof),
    ("curves", "Curves", sections.curves),
    ("evaluations", "Evaluations", results.evaluations_section),
    ("samples", "Samples", sections.samples),
    ("data", "Data", details.data),
    ("compile", "Compiler", details.compiler),
    ("events", "Events", details.events),
    ("settings", "Settings", details.settings_section),
    ("environment", "Environment", details.environment_section),
)
_GOOD = {"finished": True, "failed": False, "killed": False}


def render_report(report: dict[str, Any]) -> str:
    """Return the whole page, from what `gather_report` returns."""
    # Sections and navigation come from one table, so that no link leads nowhere.
    main = el("main", [build(report) for _, _, build in SECTIONS])
    words = "Made from the files of the run directory; report.json beside this page has the same content as data."
    body = join(_header(report), main, el("footer", words))
    return html_document(f"{report['run']['name']} · training report", body)


def html_document(title: str, body: Html, more_style: str = "") -> str:
    """Return a page that loads nothing and runs nothing."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        # Text of data is escaped (markup.py). Should some of it still get through, the policy lets nothing run or load.
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", title),
        el("style", Html(CSS + more_style)),
    )
    return f"<!doctype html>\n{el('html', head, el('body', body), lang='en')}\n"


def _header(report: dict[str, Any]) -> Html:
    """Return the head of the page: name, status, facts, headline, comparison, navigation."""
    status = report["status"]
    word = status.get("status") if isinstance(status.get("status"), str) else "status not known"
    facts = [el("li", el("b", value), f" {name}") for name, value in _facts(report) if value]
    error = el("div", value_text(status["error"]), class_="error", role="alert") if status.get("error") else None
    links = [el("a", title, href=f"#{name}") for name, title, _ in SECTIONS]
    parts = [
        el("div", el("h1", report["run"]["name"]), badge(word, ok=_GOOD.get(word)), class_="title"),
        el("ul", facts, class_="facts"),
        error,
        headline_tiles((row["name"], row["text"], row["how"]) for row in report["headline"]),
        _comparison(report),
        el("nav", links, aria_label="Sections"),
    ]
    return el("header", el("div", parts))


def _facts(report: dict[str, Any]) -> list[tuple[str, str | Html | None]]:
    """Return (what it is, value) for the line under the title."""
    run, status, summary = report["run"], report["status"], report["summary"]
    size = f"({parameters(run['parameters'])} parameters)" if run["parameters"] else ""
    device = f"{run['world_size']} × {run['device']}" if (run["world_size"] or 1) > 1 else run["device"]
    steps = drawable_number(status.get("step"))
    total = drawable_number(status.get("total_steps"))
    numbers = (
        ("tokens", summary.get("tokens"), format_value),
        ("in steps", summary.get("train_seconds"), duration),
        ("warm-up", summary.get("warm_up_seconds"), duration),
        ("", status.get("time"), moment),
    )
    return [
        (size, _origin(run)),
        ("", value_text(device) if device else None),
        (f"of {format_value(total)} steps" if total else "steps", format_value(steps) if steps is not None else None),
        *((name, words(value)) for name, value, words in numbers if drawable_number(value)),
    ]


def _origin(run: dict[str, Any]) -> str | Html | None:
    """Return what was trained: the run that it started from, with its report, or the name of a model."""
    if run["parent_report"] is None:
        return value_text(run["model"]) if run["model"] else None
    return el("span", "from ", el("a", value_text(run["model"]), href=quote(run["parent_report"])))


def _comparison(report: dict[str, Any]) -> Html | None:
    """Return both runs at equal steps, how much faster this one is, and what cannot be compared."""
    if not report["against"]:
        return None
    names = [report["run"]["name"], report["against"]["run"]["name"]]
    found = report["against"]["comparison"]
    rows = []
    for row in found["rows"]:
        change = None if row["change"] is None else f"{100 * row['change']:+.1f} %"
        rows.append([row["name"], row["step"], row["value"], row["other"], change, row["how"]])
    table = html_table(["", "step", *names, "change", ""], rows, f"Compared with {names[1]}", text=(5,))
    return el("div", table, [el("p", note, class_="soft") for note in (speed_words(found, *names), *found["notes"])])
