"""The small parts that sections are made of: badges, tables, figures, lists of facts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sftkit.reports.charts import PLAIN_AXIS, WIDE, Series, ValueAxis, is_log, line_chart, line_class
from sftkit.reports.values import NONE, Html, Rows, applies, drawable_number, el, format_value, join, passed
from sftkit.rundir.names import DOES_NOT_APPLY

_ICONS = {True: "M2 6.5 5 9.5 10.5 3", False: "M2.5 2.5 9.5 9.5M9.5 2.5 2.5 9.5", None: "M2.5 6H9.5"}
_WORDS = {True: "PASS", False: "FAIL", None: "not checked"}
_MAX_VALUES = 12
_KINDS = {True: "badge pass", False: "badge fail", None: "badge"}


def badge(text: str | None = None, *, ok: bool | None) -> Html:
    """Return a word with an icon: colour alone says nothing."""
    icon = el("svg", el("path", d=_ICONS[ok]), viewBox="0 0 12 12", aria_hidden="true")
    return el("span", icon, text or _WORDS[ok], class_=_KINDS[ok])


def section(name: str, title: str, *parts: Any, lead: str | None = None) -> Html:
    """Return a part of the page with a heading; the navigation links to `name`."""
    head = join(el("h2", title, id=f"{name}-title"), el("p", lead, class_="soft") if lead else None)
    return el("section", head, *parts, id=name, aria_labelledby=f"{name}-title")


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], caption: str | None = None, text: Sequence[int] = (), **css: str
) -> Html:
    """Return a table: the first cell of a row is its header, numbers are right-aligned, columns in `text` never are.

    Args:
        css: further attributes of the table, such as class_.
    """
    left = {0, *text}

    def cell(index: int, value: Any) -> Html:
        if index == 0:
            return el("th", value, scope="row", class_="any")
        # A cell of markup is a badge or code: it is read from the left, as text is.
        if index in left or isinstance(value, Html):
            return el("td", value if isinstance(value, Html) else value_text(value), class_="any")
        return el("td", value_text(value), class_="num")

    titles = [el("th", title, scope="col", class_=None if i in left else "num") for i, title in enumerate(head)]
    body = [el("tr", [cell(i, value) for i, value in enumerate(row)]) for row in rows]
    parts = el("caption", caption) if caption else None, el("thead", el("tr", titles)) if head else None
    return scroll(el("table", parts, el("tbody", body), **css))


def check_table(checks: Rows, titles: tuple[str, str, str] = ("Check", "Found", "Expected")) -> Html:
    """Return a table of what passed and what did not; on a narrow screen a row is a block with labels.

    Args:
        checks: {"name", "found", "expected", "how", "ok"}, values of any kind. `how` stands below the name.
        titles: of the columns behind the badges.
    """
    # Roles are written out, because on a narrow screen the style makes blocks of rows and cells, and browsers then no
    # longer tell screen readers that they are a table's.
    head = [el("th", title, scope="col", role="columnheader") for title in ("", *titles)]
    body = [_check_row(check, titles) for check in checks]
    parts = el("thead", el("tr", head, role="row"), role="rowgroup"), el("tbody", body, role="rowgroup")
    return scroll(el("table", parts, class_="proof", role="table"))


def _check_row(check: dict[str, Any], titles: tuple[str, str, str]) -> Html:
    """Return the row of a check."""
    how = el("span", value_text(check["how"]), class_="how") if check.get("how") else None
    return el(
        "tr",
        el("td", badge(None if applies(check) else DOES_NOT_APPLY, ok=passed(check)), class_="state", role="cell"),
        el("th", value_text(check.get("name")), how, scope="row", class_="name any", role="rowheader"),
        # The style shows data-label before the cell on a narrow screen, where the head of the table is hidden.
        el("td", el("span", value_text(check.get("found"))), class_="any", data_label=titles[1], role="cell"),
        el("td", el("span", value_text(check.get("expected"))), class_="any", data_label=titles[2], role="cell"),
        role="row",
    )


def headline_tiles(tiles: Iterable[tuple[str, str, str]]) -> Html:
    """Return the tiles under a title, of (what it is, value, how it was found)."""
    found = (
        [el("dt", name), el("dd", value, class_="value"), el("dd", how, class_="how")] for name, value, how in tiles
    )
    return el("dl", [el("div", parts) for parts in found], class_="headline")


def scroll(content: Html) -> Html:
    """Return something wide in a box that scrolls, instead of widening the page."""
    return el("div", content, class_="scroll")


def folded(title: str, *parts: Any) -> Html:
    """Return parts that a click on the title shows."""
    return el("details", el("summary", title), *parts)


def facts(values: dict[str, Any], caption: str | None = None) -> Html | None:
    """Return names and values in two columns; values may be of any kind."""
    rows = [[name, value_text(value)] for name, value in values.items()]
    return html_table((), rows, caption, text=(1,), class_="facts-table") if rows else None


def value_text(value: Any) -> str:
    """Return any value of a setting or a fact as text."""
    if value is None:
        return NONE
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return f"{len(value)} values" if len(value) > _MAX_VALUES else ", ".join(map(format_value, value)) or NONE
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return format_value(value)


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
    label = f"{title}{f' in {unit}' if unit else ''} over steps: " + "; ".join(map(_last, shown))
    drawing = line_chart(shown, label, axis)
    # Drawn twice, and the style shows one: a single wide drawing would shrink its text on a narrow screen.
    if wide:
        wider = line_chart(shown, label, axis, WIDE)
        drawing = join(el("div", wider, class_="wide"), el("div", drawing, class_="narrow"))
    words = ", ".join(word for word in (unit, "logarithmic" if axis.log else "") if word)
    caption = el("figcaption", title, el("span", words, class_="soft") if words else None, _legend(shown, axis.level))
    return el("figure", caption, drawing)


def _last(one: Series) -> str:
    """Return the label of a line with its last value."""
    return f"{one.label}, last {format_value(next((v for _, v in reversed(one.points) if v is not None), None))}"


def _legend(series: Sequence[Series], level: float | None) -> Html | None:
    """Return what each line is; an empty legend where there is but one."""
    # Empty, it keeps its height, so that charts side by side begin at the same one.
    if len(series) < 2 and level is None:
        return el("div", class_="legend", aria_hidden="true")
    lines = [_key(one.label, el("polyline", points="1,4 25,4"), line_class(one, series)) for one in series]
    if level is not None:
        lines.append(_key(f"chance {format_value(level)}", el("line", x1=1, y1=4, x2=25, y2=4, class_="level")))
    return el("div", lines, class_="legend")


def _key(label: str, line: Html, kind: str | None = None) -> Html:
    """Return a line of a chart beside what it is."""
    return el("span", el("svg", line, viewBox="0 0 26 8", aria_hidden="true", class_=kind), label)


def columns(rows: Rows, names: dict[str, str]) -> tuple[list[str], list[list[Any]]]:
    """Return (titles, cells) of the columns that any row has."""
    present = [key for key in names if any(row.get(key) is not None for row in rows)]
    return [names[key] for key in present], [[row.get(key) for key in present] for row in rows]


def plain_numbers(values: Any) -> list[float]:
    """Return the numbers of a list, none if any item is no number."""
    # All or nothing: numbers with gaps would no longer go with the edges or layers beside them.
    found = [drawable_number(value) for value in values] if isinstance(values, list) else []
    return [value for value in found if value is not None] if None not in found else []
