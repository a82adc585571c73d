"""Charts as inline SVG: lines over steps, a histogram. Colours come from the page's style."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sftkit.reports.values import Html, axis_texts, el, format_value, join, log_ticks, macros, ticks

Point = tuple[float, float | None]
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 10.0, 34.0
"Margins of a chart, in the units of its view box."
_MAX_TITLES = 60
"Maximum number of points of a line, apart from its last, that show their value when pointed at."
_FEW = 20
"Maximum number of points of a line that are all drawn."
_LOG_RATIO = 20.0
"An axis is logarithmic if the largest value is more than this many times the smallest."


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    label: str
    points: Sequence[Point]
    "(step, value); None breaks the line"
    style: int = 0
    "colour and dashes, 0 to 5"
    other: bool = False
    "whether it belongs to the run that this one is compared with"
    intervals: Sequence[tuple[float, float, float]] = ()
    "(step, low, high)"


@dataclass(frozen=True)
class ValueAxis:
    """How the axis of values is drawn."""

    log: bool = False
    "logarithmic"
    zero: bool = False
    "begins at 0"
    level: float | None = None
    "value of a dashed line across, such as chance"


PLAIN_AXIS = ValueAxis()
NARROW, WIDE = (400.0, 220.0), (960.0, 270.0)
"Width and height of a chart."


@dataclass(frozen=True)
class Axis:
    """Maps values low to high to positions start to end in the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        low, high, at = map(math.log if self.log else float, (self.low, self.high, value))
        return round(self.start + (self.end - self.start) * (at - low) / (high - low), 1)

    def ticks(self, num_ticks: int) -> list[float]:
        """Return round values on the axis, about `num_ticks` of them."""
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, num_ticks)


def line_chart(
    series: Sequence[Series], label: str, axis: ValueAxis = PLAIN_AXIS, size: tuple[float, float] = NARROW
) -> Html:
    """Draw lines over steps.

    Args:
        series: each has a value.
        label: text for screen readers.
        size: width and height.
    """
    level, (width, height) = axis.level, size
    shown = sorted(series, key=lambda one: one.other)  # dashed on top of solid ones: both are visible if they agree
    steps = [step for one in shown for step, value in one.points if value is not None]
    values = [value for one in shown for _, value in one.points if value is not None]
    values += [bound for one in shown for _, low, high in one.intervals for bound in (low, high)]
    # Everything that is drawn decides the range, also ends of intervals and the level.
    values += [0.0] if axis.zero and not axis.log else []
    values += [level] if level is not None else []
    # Steps begin at 0 if the first step is near it, so lines start with training; those of a resumed run do not.
    first = 0.0 if 0 < min(steps) <= max(steps) / 4 else min(steps)
    x = Axis(*_range(first, max(steps), 0.0), LEFT, width - RIGHT)
    ends = _range(min(values), max(values), 0.06, zero=axis.zero, log=axis.log)
    y = Axis(*ends, height - BOTTOM, TOP, axis.log)
    across = _line(LEFT, y(level), width - RIGHT, y(level), "level") if level is not None else None
    step = el("text", "step", x=width - RIGHT, y=height - 4, class_="axis", text_anchor="end")
    lines = [_series(one, x, y, line_class(one, shown)) for one in shown]
    return _drawing(width, height, label, _grid(x, y, width, height), step, across, lines)


def _range(low: float, high: float, room: float, *, zero: bool = False, log: bool = False) -> tuple[float, float]:
    """Return the ends of an axis: the values and some room around them, never empty."""
    if log:
        return low / 1.08, high * 1.08
    if high == low == 0:
        return 0.0, 1.0
    # A constant gets some room, 5 % of itself either way: an axis without length has no scale.
    if high == low:
        spread = abs(high) * 0.05
        low, high = low - spread, high + spread
    margin = (high - low) * room
    return (low if zero and low == 0 else low - margin), high + margin


def _grid(x: Axis, y: Axis, width: float, height: float) -> Html:
    """Draw horizontal lines with their values, and steps below; labels at the ends stay inside."""
    columns = x.ticks(5 if width < 500 else 9)
    parts = _levels(y, width)
    for value, text in zip(columns, axis_texts(columns), strict=True):
        if value == int(value):  # there is no half step
            parts.append(_line(x(value), height - BOTTOM, x(value), height - BOTTOM + 4, "base"))
            parts.append(el("text", text, x=x(value), y=height - BOTTOM + 16, class_="tick", text_anchor="middle"))
    parts.append(_line(LEFT, height - BOTTOM, width - RIGHT, height - BOTTOM, "base"))
    return join(parts)


def _levels(y: Axis, width: float) -> list[Html]:
    """Draw horizontal lines with their values."""
    parts = []
    values = y.ticks(4)
    for value, text in zip(values, axis_texts(values), strict=True):
        parts.append(_line(LEFT, y(value), width - RIGHT, y(value), "grid"))
        parts.append(el("text", text, x=LEFT - 6, y=y(value) + 4, class_="tick", text_anchor="end"))
    return parts


def line_class(one: Series, series: Sequence[Series]) -> str:
    """Return the class of a line. Of two runs this one's lines are solid; the other's are dashed, in other hues."""
    if one.other:
        return f"other o{one.style % 2}"
    return f"s{one.style % 6}" + (" solid" if any(each.other for each in series) else "")


def _series(one: Series, x: Axis, y: Axis, kind: str) -> Html:
    """Draw the line, its intervals, and points that show their value when pointed at."""
    places = " ".join("gap" if value is None else f"{x(step)},{y(value)}" for step, value in one.points)
    known = [(step, value) for step, value in one.points if value is not None]
    # Few points are all drawn as dots, and the line between them is faint: two points show no trend. Of many only some
    # answer the pointer, so that a page of thousands of steps stays small; the last, which is asked for most, always
    # does.
    few = len(known) <= _FEW
    stride = -(-len(known) // _MAX_TITLES)
    told = known[::stride] + ([known[-1]] if (len(known) - 1) % stride else [])
    radius, dot = (4, "dot") if few else (5, "dot hidden")
    dots = []
    for step, value in told:
        title = el("title", f"{one.label}, step {format_value(step)}: {format_value(value)}")
        dots.append(el("circle", title, cx=x(step), cy=y(value), r=radius, class_=dot))
    bars = [_line(x(step), y(low), x(step), y(high), "bar") for step, low, high in one.intervals]
    # A line needs two points: a single one between gaps is seen by its dot.
    faint = "faint" if few else None
    lines = [el("polyline", points=part.strip(), class_=faint) for part in places.split("gap") if " " in part.strip()]
    return el("g", bars, lines, dots, class_=kind)


def histogram(
    edges: Sequence[float], counts: Sequence[float], marks: dict[str, float], unit: str, label: str
) -> Html | None:
    """Draw bars between edges (one more than counts), and named values marked across them; None if there is nothing to
    draw."""
    if not counts or len(edges) != len(counts) + 1 or max(counts) <= 0 or list(edges) != sorted(edges):
        return None
    width, height = 440.0, 220.0
    bins = len(counts)
    x = Axis(0.0, float(bins), LEFT, width - RIGHT)  # all bins are equally wide, whatever their edges
    y = Axis(0.0, max(counts) * 1.06, height - BOTTOM, TOP)
    # The grid with its values, then the bars, the marks, and as many labels of edges as have room.
    parts = _levels(y, width)
    gap = 1.0 if bins <= 80 else 0.0
    for index, count in enumerate(counts):
        ends = f"{format_value(edges[index])} to {format_value(edges[index + 1])}"
        title = el("title", f"{ends} {unit}: {format_value(count)}")
        size = max(x(index + 1) - x(index) - gap, 0.5)
        parts.append(el("rect", title, x=x(index), y=y(count), width=size, height=y(0) - y(count), class_="column"))
    for name, value in marks.items():
        at = x(_place(value, edges))
        parts.append(el("g", el("title", f"{name}: {format_value(value)} {unit}"), _line(at, TOP, at, y(0), "mark")))
    # Labels of edges are 7 units a letter wide; as many are left out as it takes for them not to touch.
    texts = axis_texts(list(edges))
    stride = max(1, -(-bins * (max(map(len, texts)) * 7 + 14) // int(width - LEFT - RIGHT)))
    for index in range(0, bins + 1, int(stride)):
        parts.append(el("text", texts[index], x=x(index), y=height - BOTTOM + 16, class_="tick", text_anchor="middle"))
    parts.append(_line(LEFT, y(0), width - RIGHT, y(0), "base"))
    parts.append(el("text", unit, x=width - RIGHT, y=height - 4, class_="axis", text_anchor="end"))
    return _drawing(width, height, label, parts)


def _place(value: float, edges: Sequence[float]) -> float:
    """Return the place of a value among the edges, in bins."""
    index = bisect_left(edges, value, lo=1) - 1
    if index == len(edges) - 1:
        return float(index)
    size = edges[index + 1] - edges[index]
    return index + (max((value - edges[index]) / size, 0.0) if size else 0.0)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    """Draw a line."""
    return el("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def _drawing(width: float, height: float, label: str, *parts: Any) -> Html:
    """Return an SVG image of these parts."""
    return el("svg", *parts, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


def figure(
    title: str, unit: str, series: Sequence[Series], axis: ValueAxis = PLAIN_AXIS, *, wide: bool = False
) -> Html | None:
    """Return a chart with its title, unit and legend; a logarithmic axis if values span much and it need not begin at
    0.

    None without a value.
    """
    if not (shown := [one for one in series if any(value is not None for _, value in one.points)]):
        return None
    # Logarithmic if values span much; an axis that begins at 0 cannot be logarithmic.
    known = [value for one in shown for _, value in one.points if value is not None]
    axis = replace(axis, log=not axis.zero and min(known) > 0 and max(known) / min(known) > _LOG_RATIO)
    last = [next(value for _, value in reversed(one.points) if value is not None) for one in shown]
    lasts = [f"{one.label}, last {format_value(value)}" for one, value in zip(shown, last, strict=True)]
    label = f"{title}{f' in {unit}' if unit else ''} over steps: {'; '.join(lasts)}"
    drawing = line_chart(shown, label, axis, WIDE if wide else NARROW)
    words = ", ".join(word for word in (unit, "logarithmic" if axis.log else "") if word)
    keys: list[tuple[str, Html, str | None]]
    keys = [(one.label, el("polyline", points="1,4 25,4"), line_class(one, shown)) for one in shown]
    if axis.level is not None:
        keys.append((f"chance {format_value(axis.level)}", el("line", x1=1, y1=4, x2=25, y2=4, class_="level"), None))
    return macros.framed(drawing, title, words, macros.legend(keys))
