"""What the HTML pages share: the macros of page.html.jinja as functions, and figures of charts with their legends.

A macro returns markup, takes markup or text of any origin, and escapes the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sftkit.reports.charts import PLAIN_AXIS, WIDE, Series, ValueAxis, is_log, line_chart, line_class
from sftkit.reports.values import NONE, Html, Rows, applies, drawable_number, el, format_value, join, passed

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_MAX_VALUES = 12


def value_text(value: Any) -> str:
    """Return any value of a setting or a fact as text."""
    if value is None:
        return NONE
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return f"{len(value)} values" if len(value) > _MAX_VALUES else ", ".join(map(format_value, value)) or NONE
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return format_value(value)


templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: str(name).endswith(".html.jinja"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
templates.filters |= {"text": value_text, "flat": join}
templates.globals |= {"applies": applies, "passed": passed, "POLICY": POLICY}
macros: Any = templates.get_template("page.html.jinja").module
badge, section, html_table, check_table = macros.badge, macros.section, macros.html_table, macros.check_table
headline_tiles, folded, facts = macros.headline_tiles, macros.folded, macros.facts


def html_document(title: str, body: Html, more_style: str = "") -> str:
    """Return a page that loads nothing and runs nothing."""
    return str(macros.html_document(title, body, more_style))


def setting(value: Any) -> Html:
    """Return a setting as it is written in a recipe."""
    return el("code", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def figure(
    title: str, unit: str, series: Sequence[Series], axis: ValueAxis = PLAIN_AXIS, *, wide: bool = False
) -> Html | None:
    """Return a chart with its title, unit and legend; a logarithmic axis where values span much and it need not
    begin at 0.

    None without a value.
    """
    if not (shown := [one for one in series if any(value is not None for _, value in one.points)]):
        return None
    # An axis that begins at 0 cannot be logarithmic.
    axis = replace(axis, log=not axis.zero and is_log(shown))
    last = [next(value for _, value in reversed(one.points) if value is not None) for one in shown]
    lasts = [f"{one.label}, last {format_value(value)}" for one, value in zip(shown, last, strict=True)]
    label = f"{title}{f' in {unit}' if unit else ''} over steps: {'; '.join(lasts)}"
    drawing = line_chart(shown, label, axis)
    if wide:
        drawing = macros.both_widths(line_chart(shown, label, axis, WIDE), drawing)
    words = ", ".join(word for word in (unit, "logarithmic" if axis.log else "") if word)
    keys: list[tuple[str, Html, str | None]]
    keys = [(one.label, el("polyline", points="1,4 25,4"), line_class(one, shown)) for one in shown]
    if axis.level is not None:
        keys.append((f"chance {format_value(axis.level)}", el("line", x1=1, y1=4, x2=25, y2=4, class_="level"), None))
    return macros.framed(drawing, title, words, macros.legend(keys))


def columns(rows: Rows, names: dict[str, str]) -> tuple[list[str], list[list[Any]]]:
    """Return (titles, cells) of the columns that any row has."""
    present = [key for key in names if any(row.get(key) is not None for row in rows)]
    return [names[key] for key in present], [[row.get(key) for key in present] for row in rows]


def plain_numbers(values: Any) -> list[float]:
    """Return the numbers of a list, none if any item is no number."""
    # All or nothing: numbers with gaps would no longer match their edges or layers.
    found = [drawable_number(value) for value in values] if isinstance(values, list) else []
    return [value for value in found if value is not None] if None not in found else []
