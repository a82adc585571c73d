"""Sections of the page on data, compiler, events, settings and machine."""

from collections.abc import Iterator, Sequence
from typing import Any

from sftkit.reports import values
from sftkit.reports.values import (
    Html,
    Report,
    Rows,
    dicts,
    drawable_number,
    el,
    facts,
    format_value,
    histogram,
    mapping,
    section,
)

SOURCES = (
    *("name", "rows", "documents", "tokens", "targets", "truncated"),
    *("dropped_too_long", "dropped_no_target", "skipped_bad"),
)
FINDINGS = ("name", "kind", "rows", "reason", "first")
LAYOUTS = ("layout", "shapes", "padding_pct", "steps", "positions")
_MARKS = {"p50": "median", "p90": "p90", "p99": "p99"}
_MAX_EVENTS = 200


def data(report: Report) -> Html:
    """Return the section on the data: lengths, sources, layouts and masks, as found before training."""
    found: dict[str, Any] = report["preflight"]
    lead = None if found else "This run has no preflight.json: its data was not looked at."
    tables = [*warnings_section(found), *data_tables(found)] if found else []
    counted = {n.removeprefix("data/"): v for n, v in sorted(report["last"].items()) if n.startswith("data/")}
    return section("data", "Data", tables, facts(_leaves(counted), "Counted in training, last line"), lead=lead)


def warnings_section(preflight: dict[str, Any]) -> list[Html]:
    """Return the warnings of preflight.json."""
    texts = preflight["warnings"] if isinstance(preflight.get("warnings"), list) else []
    return [el("p", values.value_text(text), class_="warning") for text in texts]


def data_tables(preflight: dict[str, Any]) -> list[Html | None]:
    """Return the rest of preflight.json: lengths, masks, sources, answers, findings, layouts and costs."""
    roles = [f"{format_value(count)} {role}" for role, count in mapping(preflight.get("roles")).items()]
    masks = {
        "target tokens": _percent(preflight.get("target_pct")),
        "end of turn is the last target": _percent(preflight.get("end_of_turn_pct")),
        "chat template sha256": preflight.get("template_sha256"),
        "messages": ", ".join(roles) or None,
        "duplicate documents": _percent(preflight.get("duplicate_pct")),
    }
    # Files of older versions, and of runs that ended early, lack keys: what is not there is left out, never an error.
    overlap = mapping(preflight.get("validation_in_train"))
    masks |= {f"{name}: validation rows in training": count for name, count in overlap.items()}
    known = facts({name: value for name, value in masks.items() if value is not None}, "Masks and rows")
    validation = dicts(preflight.get("validation"))
    held_out = [source | {"name": f"{source.get('name')} (validation)"} for source in validation]
    sources = [*dicts(preflight.get("sources")), *held_out]
    answers = [mapping(source["answers"]) | {"name": source.get("name")} for source in sources if source.get("answers")]
    # Most runs lose answers for one or two reasons of ten: a column of zeros for each other would hide them.
    keys = dict.fromkeys(key for row in answers for key in row)
    counts = [key for key in keys if key != "name" and any(row.get(key) for row in answers)]
    findings = [row | {"name": source.get("name")} for source in sources for row in dicts(source.get("findings"))]
    layouts = [
        row | {"layout": f"{row.get('layout')}{' (this run)' if row.get('own') else ''}"}
        for row in dicts(preflight.get("layouts"))
    ]
    memory, *others = [facts(_leaves(preflight.get(key)), key.capitalize()) for key in ("memory", "disk", "time")]
    return [
        el("div", _lengths(mapping(preflight.get("lengths"))), known, class_="two"),
        _table(dicts(preflight.get("sources")), SOURCES, "Sources"),
        _table(validation, SOURCES, "Validation sources"),
        _table([one for one in sources if one.get("files")], ("name", "files"), "Files of folders", text=(1,)),
        _table(answers, ["name", *counts], "Answers"),
        _table(findings, FINDINGS, "Rows left out or odd, and columns not used", text=(1, 3, 4)),
        _table(layouts, LAYOUTS, "Layouts"),
        el("div", memory, el("div", others), class_="two"),
    ]


def _table(rows: Rows, names: Sequence[str], caption: str, text: tuple[int, ...] = ()) -> Html | None:
    """Return a table of the columns that any row has; None without rows."""
    return values.html_table(*values.columns(rows, names), caption, text) if rows else None


def _percent(value: Any) -> str | None:
    """Return a percentage as text; None for what is no number."""
    return format_value(value, "%") if drawable_number(value) is not None else None


def _leaves(value: Any) -> dict[str, Any]:
    """Return the values of nested mappings, named by the words on the way to them; unknown values are left out."""

    def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
        for key, item in mapping(value).items():
            words = values.label(f"{name} {key}")
            if isinstance(item, dict):
                yield from leaves(item, words)
            elif item is not None and item != []:
                yield words, item

    return dict(leaves(value))


def _lengths(lengths: dict[str, Any]) -> Html | None:
    """Draw the lengths of documents, or list them if there is no histogram."""
    marks = {name: value for key, name in _MARKS.items() if (value := drawable_number(lengths.get(key))) is not None}
    edges = values.plain_numbers(lengths.get("edges"))
    counts = values.plain_numbers(lengths.get("counts"))
    drawing = histogram(edges, counts, marks, "tokens", "Number of documents by their length in tokens")
    known = {"mean": lengths.get("mean"), **marks, "longest": lengths.get("max")}
    found = {name: value for name, value in known.items() if drawable_number(value) is not None}
    words = ", ".join(f"{name} {format_value(value)}" for name, value in found.items())
    # Nothing can be drawn without bins, but mean and percentiles are still useful.
    if drawing is None:
        return el("p", f"Lengths: {words}") if words else None
    return values.macros.framed(drawing, "Document lengths", words)


def compiler(report: Report) -> Html:
    """Return the section on the compiler: graphs, seconds by phase, the shapes that ran, and why anything was compiled
    late."""
    last: dict[str, Any] = report["last"]
    names = ("graphs", "recompiles", "graph_breaks", "cuda_graphs", "cache_hits", "seconds")
    counts = {name.replace("_", " "): last[f"compile/{name}"] for name in names if f"compile/{name}" in last}
    # All from the last line: these counters only grow.
    phases = [[n.removeprefix("compile/seconds/"), v] for n, v in last.items() if n.startswith("compile/seconds/")]
    of_shapes = {n.removeprefix("shape/"): v for n, v in last.items() if n.startswith("shape/")}
    # shape/id is the index of a shape and no count.
    shapes = [[name.replace("x", " x "), value] for name, value in of_shapes.items() if name != "id"]
    if not (counts or phases or shapes):
        return section("compile", "Compiler", lead="Nothing of the compiler was logged.")
    late_kinds = ("recompile", "graph_break", "cuda_graph")
    late = [event for event in report["events"] if event.get("kind") in late_kinds]
    # A run that recompiles at every step would make the page too long to open.
    whys = [el("pre", values.value_text(event.get("text"))) for event in late[:20]]
    reasons = [el("h3", "Why"), whys] if late else None
    tables = el(
        "div",
        values.html_table(["phase", "seconds"], phases, "Seconds by phase") if phases else None,
        values.html_table(["rows x length", "micro-batches"], shapes, "Shapes that ran") if shapes else None,
    )
    both = el("div", facts(counts, "Graphs"), tables, class_="two")
    return section("compile", "Compiler", both, reasons)


def events(report: Report) -> Html:
    """Return the section on unwanted events, by step."""
    rows: Rows = report["events"]
    if not rows:
        lead = "None: no recompile, no value that was not finite, no spike, no waiting for data."
        return section("events", "Events", lead=lead)
    cells = [
        [
            format_value(drawable_number(row.get("step"))),
            values.label(values.value_text(row.get("kind"))),
            values.value_text(row.get("text")),
            values.moment(row.get("time")),
        ]
        for row in rows[:_MAX_EVENTS]
    ]
    cut = f"The first {_MAX_EVENTS} of {len(rows)}." if len(rows) > _MAX_EVENTS else None
    table = values.html_table(["step", "kind", "what", "when"], cells, text=(1, 2, 3))
    return section("events", "Events", table, lead=cut)


def settings_section(report: Report) -> Html:
    """Return the section on settings that differ from the defaults, and from the other run if there is one."""

    def table(rows: Rows, second: str, titles: Sequence[str], caption: str) -> Html | None:
        cells = [[row["key"], values.setting(row["value"]), values.setting(row[second])] for row in rows]
        return values.html_table(["setting", *titles], cells, caption, text=(1, 2)) if cells else None

    parts = []
    # The other run's settings first: a user who names a second run wants the differences.
    if report["against"]:
        its = report["against"]["run"]["name"]
        other = table(report["against"]["config_diff"], "other", ("this run", its), f"Different in {its}")
        parts.append(other or el("p", f"No setting differs from {its}."))
    if own := table(report["config_changed"], "default", ("value", "default"), "Different from the defaults"):
        parts.append(own)
    return section("settings", "Settings", parts, lead=None if parts else "The settings cannot be read.")


def environment_section(report: Report) -> Html:
    """Return the section on versions, machine, git state and the exact command."""
    found = dict(report["environment"])
    packages = mapping(found.pop("packages", None))
    tables = el("div", facts(_leaves(found), "Machine"), facts(packages, "Versions"), class_="two")
    command = [el("h3", "Command"), el("pre", report["command"])] if report["command"] else None
    lacking = el("ul", [el("li", note) for note in report["notes"]])
    notes = [el("h3", "What this page lacks"), lacking] if report["notes"] else None
    return section("environment", "Environment", tables, command, notes)
