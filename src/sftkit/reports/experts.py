"""Draws the load of experts, a row for each layer: which get more than an even share of the
tokens, and which next to none."""

from __future__ import annotations

from typing import Any

from sftkit.reports.components import plain_numbers
from sftkit.reports.files import drawable_number, mapping
from sftkit.reports.markup import Html, el
from sftkit.reports.numbers import format_value

LEFT, WIDTH, MAX_CELL_HEIGHT = 30.0, 960.0, 20.0
_MAX_TITLES = 2000
FULL = 2.0
"Load, in even shares, from which on a cell is as dark as it gets."


def load_of(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of expert_load.json, {"step", "load"}, with the loads in even shares [L, E];
    empty if it is not usable."""
    rows = content.get("load")
    numbers = [plain_numbers(row) for row in rows] if isinstance(rows, list) else []
    if not numbers or not all(numbers) or len({len(row) for row in numbers}) > 1:
        return {}
    return {"step": drawable_number(content.get("step")), "load": rows}


def experts(report: dict[str, Any]) -> Html | None:
    """Draw the loads; None for a run without experts."""
    if not (found := mapping(report.get("experts"))):
        return None
    # Sizes: as wide as the page, cells no higher than they need to be.
    rows: list[list[float]] = found["load"]
    count = len(rows[0])
    across = (WIDTH - LEFT) / count
    down = min(MAX_CELL_HEIGHT, max(across, 8.0))
    height = len(rows) * down + 22
    # The cells, which say their value when pointed at, unless they are too many.
    told = count * len(rows) <= _MAX_TITLES
    cells = [
        el(
            "rect",
            el("title", f"layer {layer + 1} of those with experts, expert {expert}: {format_value(load)}")
            if told
            else None,
            x=round(LEFT + expert * across, 1),
            y=round(layer * down, 1),
            width=round(across, 1),
            height=round(down, 1),
            class_="load",
            fill_opacity=round(min(load / FULL, 1.0), 2),
        )
        for layer, row in enumerate(rows)
        for expert, load in enumerate(row)
    ]
    # The words around them.
    ends = f"most {format_value(max(map(max, rows)))}, least {format_value(min(map(min, rows)))}"
    label = f"Load of {count} experts in {len(rows)} layers: {ends} of an even share"
    words = (
        f"as of step {format_value(found['step'])}; a row for each layer that has some, half dark at an even "
        f"share; {ends}"
    )
    caption = el("figcaption", "Load of the experts", el("span", words, class_="soft"))
    names = [
        el("text", layer, x=LEFT - 6, y=down * (layer - 0.5) + 4, class_="tick", text_anchor="end")
        for layer in sorted({1, len(rows)})
    ]
    names.append(el("text", f"experts 0 to {count - 1}", x=LEFT, y=height - 4, class_="axis"))
    drawing = el("svg", cells, names, viewBox=f"0 0 {WIDTH:g} {height:g}", role="img", aria_label=label)
    return el("figure", caption, drawing)
