"""Sections of the page on data, compiler, events, settings and machine, and the drawing of the load of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sftkit.reports import values
from sftkit.reports.charts import histogram
from sftkit.reports.values import Html, Report, Rows, dicts, drawable_number, el, facts, format_value, mapping, section

LEFT, WIDTH, MAX_CELL_HEIGHT = 30.0, 960.0, 20.0
_MAX_TITLES = 2000
FULL = 2.0
"Load, in even shares, from which on a cell is as dark as it gets."


def load_of(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of expert_load.json, {"step", "load"}, with the loads in even shares [L, E]; empty if it is
    not usable."""
    rows = content.get("load")
    numbers = [values.plain_numbers(row) for row in rows] if isinstance(rows, list) else []
    if not numbers or not all(numbers) or len({len(row) for row in numbers}) > 1:
        return {}
    return {"step": drawable_number(content.get("step")), "load": rows}


def experts(report: Report) -> Html | None:
    """Draw the load of experts, a row for each layer: which get more than an even share of the tokens, and which next
    to none. None for a run without experts."""
    if not (found := mapping(report.get("experts"))):
        return None
    # The drawing is as wide as the page, its cells no higher than they need to be.
    rows: list[list[float]] = found["load"]
    count = len(rows[0])
    across = (WIDTH - LEFT) / count
    down = min(MAX_CELL_HEIGHT, max(across, 8.0))
    height = len(rows) * down + 22
    # Each cell shows its value when pointed at, unless there are too many.
    titled = count * len(rows) <= _MAX_TITLES
    cells = []
    for layer, row in enumerate(rows):
        for expert, load in enumerate(row):
            text = f"layer {layer + 1} of those with experts, expert {expert}: {format_value(load)}"
            place = {"x": round(LEFT + expert * across, 1), "y": round(layer * down, 1)}
            size = {"width": round(across, 1), "height": round(down, 1)}
            opacity = round(min(load / FULL, 1.0), 2)
            title = el("title", text) if titled else None
            cells.append(el("rect", title, **place, **size, class_="load", fill_opacity=opacity))
    ends = f"most {format_value(max(map(max, rows)))}, least {format_value(min(map(min, rows)))}"
    label = f"Load of {count} experts in {len(rows)} layers: {ends} of an even share"
    step = format_value(found["step"])
    words = f"as of step {step}; a row for each layer that has some, half dark at an even share; {ends}"
    names = [
        el("text", layer, x=LEFT - 6, y=down * (layer - 0.5) + 4, class_="tick", text_anchor="end")
        for layer in sorted({1, len(rows)})
    ]
    names.append(el("text", f"experts 0 to {count - 1}", x=LEFT, y=height - 4, class_="axis"))
    drawing = el("svg", cells, names, viewBox=f"0 0 {WIDTH:g} {height:g}", role="img", aria_label=label)
    return values.macros.framed(drawing, "Load of the experts", words)


SOURCES = {
    "name": "source",
    **{key: key for key in ("rows", "documents", "tokens", "targets", "truncated")},
    "dropped_too_long": "dropped, too long",
    "dropped_no_target": "dropped, no target",
    "skipped_bad": "skipped, bad",
}
_ANSWERS = {
    "name": "source",
    "answers": "answers",
    "answers_learned": "learned",
    "answers_cut": "cut",
    "not_learned_prompt": "in a prompt",
    "not_learned_marked": "marked",
    "not_learned_earlier_turn": "earlier turn",
    "not_learned_history": "other as history",
    "not_learned_border": "token shared with prompt",
    "not_learned_too_long": "too long",
    "reasoning_left_out": "reasoning left out",
    "split_tokens": "tokens of split turns",
    "thinking_turned_off": "thinking turned off",
}
FINDINGS = {"name": "source", "kind": "what", "rows": "rows", "reason": "because", "first": "the first"}
FILES = {"name": "source", "files": "read and left out"}
_LAYOUTS = {
    "layout": "layout",
    "shapes": "shapes",
    "padding_pct": "padding %",
    "steps": "steps",
    "positions": "positions",
    "x_dynamic": "x dynamic",
    "break_even": "break-even",
    "tok_per_sec": "measured tokens/s",
}
_MARKS = {"p50": "median", "p90": "p90", "p99": "p99"}
_EVENTS = {
    "recompile": "compiled after the warm-up",
    "graph_break": "graph break",
    "cuda_graph": "CUDA graphs recorded late",
    "hook": "hook not run",
    "nonfinite": "not finite",
    "spike": "spike",
    "checkpoint_fallback": "older checkpoint used",
    "starvation": "waiting for data",
}
_UNITS = {"gib": "GiB", "pct": "%", "gpu": "GPU", "mfu": "MFU"}
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
    reasons = {key: name for key, name in _ANSWERS.items() if any(row.get(key) for row in answers)}
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
        _table([one for one in sources if one.get("files")], FILES, "Files of folders", text=(1,)),
        _table(answers, {key: _ANSWERS[key] for key in ("name", "answers", "answers_learned")} | reasons, "Answers"),
        _table(findings, FINDINGS, "Rows left out or odd, and columns not used", text=(1, 3, 4)),
        _table(layouts, _LAYOUTS, "Layouts"),
        el("div", memory, el("div", others), class_="two"),
    ]


def _table(rows: Rows, names: dict[str, str], caption: str, text: tuple[int, ...] = ()) -> Html | None:
    """Return a table of the columns that any row has; None without rows."""
    return values.html_table(*values.columns(rows, names), caption, text) if rows else None


def _percent(value: Any) -> str | None:
    """Return a percentage as text; None for what is no number."""
    return format_value(value, "%") if drawable_number(value) is not None else None


def _leaves(value: Any) -> dict[str, Any]:
    """Return the values of nested mappings, named by the words on the way to them; unknown values are left out."""

    def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
        for key, item in mapping(value).items():
            # Keys may end in units, which are words of a label: peak_gib becomes "peak GiB".
            words = f"{name} {key}".strip().replace("_", " ").split()
            label = " ".join(_UNITS.get(word, word) for word in words)
            if isinstance(item, dict):
                yield from leaves(item, label)
            elif item is not None and item != []:
                yield label, item

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
    return section("compile", "Compiler", both, reasons, lead=report["compiling"])


def events(report: Report) -> Html:
    """Return the section on unwanted events, by step."""
    rows: Rows = report["events"]
    if not rows:
        lead = "None: no recompile, no value that was not finite, no spike, no waiting for data."
        return section("events", "Events", lead=lead)
    cells = [
        [
            format_value(drawable_number(row.get("step"))),
            _EVENTS.get(str(row.get("kind")), values.value_text(row.get("kind"))),
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
