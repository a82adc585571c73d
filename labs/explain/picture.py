"""Bars as inline SVG: stacked ones for where time goes, plain ones for counts and ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sftkit.reports.markup import Html, el
from sftkit.reports.numbers import format_value

WIDTH, LEFT, RIGHT, PITCH, THICK = 960.0, 240.0, 160.0, 34.0, 20.0
PICTURE_CSS = """
.bars svg { display: block; width: 100%; min-width: 640px; }
svg .part { fill: var(--c); }
svg .rest { fill: var(--line); }
svg .span { stroke: var(--text); stroke-width: 1.6; }
.s6 { --c: var(--line); }
th.any, td.any, code { overflow-wrap: anywhere; }
th.any { min-width: 11em; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; background: var(--c); }
"""


@dataclass(frozen=True)
class Bar:
    """A row of the picture."""

    name: str
    parts: Sequence[tuple[str, float, int]]
    "(what it is, value, style 0 to 6), from left to right"
    text: str
    "beside its end"
    span: tuple[float, float] | None = None
    "marked across it: what was claimed"


def bars(rows: Sequence[Bar], label: str, styles: Sequence[tuple[str, int]] = ()) -> Html:
    """Return a figure; each part says what it is when pointed at.

    Args:
        label: what a screen reader says.
        styles: (name, style) of the legend.
    """
    ends = [sum(value for _, value, _ in row.parts) for row in rows] + [row.span[1] for row in rows if row.span]
    scale = (WIDTH - LEFT - RIGHT) / max([*ends, 1e-9])
    height = PITCH * len(rows) + 8
    drawing = el(
        "svg",
        [_row(row, index, scale) for index, row in enumerate(rows)],
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=label,
    )
    legend = [el("span", el("i", class_=f"key s{style}"), name) for name, style in styles]
    return el(
        "figure",
        el("figcaption", label),
        el("div", legend, class_="legend") if legend else None,
        el("div", drawing, class_="scroll bars"),
    )


def _row(row: Bar, index: int, scale: float) -> Html:
    top = 4 + index * PITCH
    middle = top + PITCH / 2
    parts: list[Any] = [el("text", row.name, x=LEFT - 10, y=middle + 4, text_anchor="end")]
    at = LEFT
    for name, value, style in row.parts:
        title = el("title", f"{row.name}, {name}: {format_value(value)}")
        box = {"x": round(at, 1), "y": top + (PITCH - THICK) / 2, "width": round(value * scale, 1), "height": THICK}
        parts.append(el("rect", title, class_=f"part s{style}", **box))
        at += value * scale
    end = at
    if row.span:
        low, high = (round(LEFT + value * scale, 1) for value in row.span)
        end = max(end, high)
        for x1, x2, reach in ((low, high, 0), (low, low, 8), (high, high, 8)):
            parts.append(el("line", x1=x1, x2=x2, y1=middle - reach, y2=middle + reach, class_="span"))
    parts.append(el("text", row.text, x=round(end + 8, 1), y=middle + 4))
    return el("g", parts)
