"""The section of the page on data."""

from collections.abc import Iterator, Sequence
from typing import Any

from sftkit.reports import values

SOURCES = (
    *("name", "rows", "documents", "tokens", "targets", "truncated", "partly_dropped"),
    *("dropped_too_long", "dropped_no_target", "dropped_where", "skipped_bad", "left_out", "held_out"),
)
FINDINGS = ("name", "kind", "rows", "reason", "first")
LAYOUTS = ("layout", "shapes", "padding_pct", "steps", "positions")
_MARKS = {"p50": "median", "p90": "p90", "p99": "p99"}


def data(report: values.Report) -> values.Html:
    """Return the section on the data: lengths, sources, layouts and masks, as found before training."""
    found: dict[str, Any] = report["preflight"]
    lead = None if found else "This run has no preflight.json: its data was not looked at."
    tables = [*warnings_section(found), *data_tables(found)] if found else []
    counted = {n.removeprefix("data/"): v for n, v in sorted(report["last"].items()) if n.startswith("data/")}
    return values.section(
        "data", "Data", tables, values.facts(leaves(counted), "Counted in training, last line"), lead=lead
    )


def warnings_section(preflight: dict[str, Any]) -> list[values.Html]:
    """Return the warnings of preflight.json."""
    texts = preflight["warnings"] if isinstance(preflight.get("warnings"), list) else []
    return [values.el("p", values.value_text(text), class_="warning") for text in texts]


def data_tables(preflight: dict[str, Any]) -> list[values.Html | None]:
    """Return the rest of preflight.json: lengths, masks, sources, answers, findings, layouts and costs."""
    roles = [f"{values.format_value(count)} {role}" for role, count in values.mapping(preflight.get("roles")).items()]
    masks = {
        "target tokens": _percent(preflight.get("target_pct")),
        "end of turn is the last target": _percent(preflight.get("end_of_turn_pct")),
        "chat template sha256": preflight.get("template_sha256"),
        "messages": ", ".join(roles) or None,
        "duplicate documents": _percent(preflight.get("duplicate_pct")),
    }
    # Files of older versions, and of runs that ended early, lack keys: what is not there is left out, never an error.
    overlap = values.mapping(preflight.get("validation_in_train"))
    masks |= {f"{name}: validation rows in training": count for name, count in overlap.items()}
    masks["evaluation questions"] = values.mapping(preflight.get("contamination")).get("said")
    known = values.facts({name: value for name, value in masks.items() if value is not None}, "Masks and rows")
    validation = values.dicts(preflight.get("validation"))
    held_out = [source | {"name": f"{source.get('name')} (validation)"} for source in validation]
    sources = [*values.dicts(preflight.get("sources")), *held_out]
    answers = [
        values.mapping(source["answers"]) | {"name": source.get("name")} for source in sources if source.get("answers")
    ]
    # Most runs lose answers for one or two reasons of ten: a column of zeros for each other would hide them.
    keys = dict.fromkeys(key for row in answers for key in row)
    counts = [key for key in keys if key != "name" and any(row.get(key) for row in answers)]
    findings = [
        row | {"name": source.get("name")} for source in sources for row in values.dicts(source.get("findings"))
    ]
    layouts = [
        row | {"layout": f"{row.get('layout')}{' (this run)' if row.get('own') else ''}"}
        for row in values.dicts(preflight.get("layouts"))
    ]
    memory, *others = [values.facts(leaves(preflight.get(key)), key.capitalize()) for key in ("memory", "disk", "time")]
    return [
        values.el("div", _lengths(values.mapping(preflight.get("lengths"))), known, class_="two"),
        _table(values.dicts(preflight.get("sources")), SOURCES, "Sources"),
        _table(validation, SOURCES, "Validation sources"),
        _table([one for one in sources if one.get("files")], ("name", "files"), "Files of folders", text=(1,)),
        _table(answers, ["name", *counts], "Answers"),
        _table(findings, FINDINGS, "How rows are read, left out or odd, and columns not used", text=(1, 3, 4)),
        _table(layouts, LAYOUTS, "Layouts"),
        values.el("div", memory, values.el("div", others), class_="two"),
    ]


def _table(rows: values.Rows, names: Sequence[str], caption: str, text: tuple[int, ...] = ()) -> values.Html | None:
    """Return a table of the columns that any row has; None without rows."""
    return values.html_table(*values.columns(rows, names), caption, text) if rows else None


def _percent(value: Any) -> str | None:
    """Return a percentage as text; None for what is no number."""
    return values.format_value(value, "%") if values.drawable_number(value) is not None else None


def leaves(value: Any) -> dict[str, Any]:
    """Return the values of nested mappings, named by the words on the way to them; unknown values are left out."""

    def found(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
        for key, item in values.mapping(value).items():
            words = values.label(f"{name} {key}")
            if isinstance(item, dict):
                yield from found(item, words)
            elif item is not None and item != []:
                yield words, item

    return dict(found(value))


def _lengths(lengths: dict[str, Any]) -> values.Html | None:
    """Draw the lengths of documents, or list them if there is no histogram."""
    marks = {
        name: value for key, name in _MARKS.items() if (value := values.drawable_number(lengths.get(key))) is not None
    }
    edges = values.plain_numbers(lengths.get("edges"))
    counts = values.plain_numbers(lengths.get("counts"))
    drawing = values.histogram(edges, counts, marks, "tokens", "Number of documents by their length in tokens")
    known = {"mean": lengths.get("mean"), **marks, "longest": lengths.get("max")}
    found = {name: value for name, value in known.items() if values.drawable_number(value) is not None}
    words = ", ".join(f"{name} {values.format_value(value)}" for name, value in found.items())
    # Nothing can be drawn without bins, but mean and percentiles are still useful.
    if drawing is None:
        return values.el("p", f"Lengths: {words}") if words else None
    return values.macros.framed(drawing, "Document lengths", words)
