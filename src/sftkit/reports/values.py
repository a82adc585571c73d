"""Shared by all parts of a report: values as people read them, readers of a run's files, markup, and charts.

Files may be missing, cut short by a kill, or written by another version. Numbers get four significant digits, with
thousands set apart, and times hours and minutes. Functions that return markup escape text that is not markup already,
so text from data can never become markup. Charts are inline SVG, lines over steps or a histogram, with the colours of
the page's style.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sftkit.errors import ConfigError
from sftkit.models.files import UNCHANGED, frozen_in_files, num_elements
from sftkit.rundir.files import clean, read_object
from sftkit.rundir.names import ADAPTER_CONFIG, ADAPTER_FOLDERS, DOES_NOT_APPLY, STEP_DIRS, latest_checkpoint

Rows = list[dict[str, Any]]
Report = dict[str, Any]
"The content of a run's files by section, as reports.collect gathers it."
_LARGEST_NUMBER = 1e100
"Numbers from here on are not drawn: an axis with them would overflow. NaN is not below it either."


def drawable_number(value: Any) -> float | None:
    """Return a number that can be drawn, None for everything else; true and false are not numbers."""
    # bool is a kind of int in Python, so true and false would pass as 1 and 0.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST_NUMBER else None


def dicts(value: Any) -> Rows:
    """Return the dictionaries of a list; empty for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    """Return a dictionary as it is; empty for anything else."""
    return value if isinstance(value, dict) else {}


def passed(check: dict[str, Any]) -> bool | None:
    """Return whether a check of proof.json passed; None: it was not made."""
    return check["ok"] if isinstance(check.get("ok"), bool) else None


def applies(check: dict[str, Any]) -> bool:
    """Return whether a check of proof.json has anything to check in its run."""
    return passed(check) is not None or not str(check.get("found")).startswith(DOES_NOT_APPLY)


def check_counts(checks: Rows) -> tuple[int, list[str], int]:
    """Return of the checks of proof.json: how many passed, the names of those that failed, how many were not made."""
    states = [(passed(check), value_text(check.get("name"))) for check in checks if applies(check)]
    return (
        sum(state is True for state, _ in states),
        [name for state, name in states if state is False],
        sum(state is None for state, _ in states),
    )


def check_words(checks: Rows) -> str:
    """Return the checks of proof.json in a line."""
    if not checks:
        return "none made: the run ended before, or has no proof.json"
    good, failed, unmade = check_counts(checks)
    if failed:
        return f"{len(failed)} failed: {', '.join(failed)}; {good} passed, {unmade} not made"
    return f"{good} passed, 0 failed, {unmade} not made"


def read_json(path: Path, notes: list[str], *, optional: bool = False) -> Any:
    """Return a file's JSON, null where it cannot be read; `notes` then says why, unless the file is `optional` and
    missing."""
    try:
        return clean(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        if not optional:
            notes.append(f"{path.name} is not there")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({type(error).__name__}); it may be cut short")
    return None


def read_rows(path: Path, notes: list[str], *, optional: bool = False) -> Rows:
    """Return the JSON objects of a file of lines; lines that are none (a kill cuts the last one) are counted in
    `notes`."""
    try:
        # Not splitlines: a line separator such as U+2028 inside a text ends no row.
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        if not optional:
            notes.append(f"{path.name} is not there")
        return []
    rows: Rows = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                rows.append(clean(row))
    if lost := sum(bool(line.strip()) for line in lines) - len(rows):
        notes.append(f"{path.name}: {lost} lines cannot be read and are left out")
    return rows


def checkpoint(run_dir: Path) -> Path | None:
    """Return the step directory that LATEST names; None without one. The name may not lead out of the run."""
    with suppress(OSError, ValueError):
        folder = latest_checkpoint(run_dir)
        if folder and folder.parent == run_dir and fnmatchcase(folder.name, STEP_DIRS) and folder.is_dir():
            return folder
    return None


def stored_parameters(folder: Path) -> int | None:
    """Return the parameters in the safetensors files of a folder, from their headers; None if there are none or one is
    damaged."""
    with suppress(ConfigError, OSError):
        files = (*folder.glob("*.safetensors"), *folder.glob(f"{ADAPTER_FOLDERS}/*/*.safetensors"))
        return sum(map(num_elements, files)) or None
    return None


def trained_parameters(folder: Path, settings: Mapping[str, Any]) -> int | None:
    """Return the parameters of a step directory that train.freeze and the text model left to train; None: all were, or
    it is unknown."""
    freeze = mapping(settings.get("train")).get("freeze")
    total = stored_parameters(folder)
    beside = unchanged_parameters(folder)
    with suppress(ConfigError, OSError, TypeError):
        if total and (freeze or beside):
            return total - beside - (sum(frozen_in_files(folder, freeze).values()) if freeze else 0)
    return None


def unchanged_parameters(folder: Path) -> int:
    """Return the parameters beside the text model of a step directory; 0: there are none, or they are damaged."""
    with suppress(ConfigError):
        return num_elements(folder / UNCHANGED) if (folder / UNCHANGED).is_file() else 0
    return 0


def base_parameters(folder: Path) -> int | None:
    """Return the parameters of the model under the adapter in a step directory; None: none, or it is not here."""
    base = mapping(read_object(folder / ADAPTER_CONFIG)).get("base_model_name_or_path")
    return stored_parameters(Path(str(base))) if base else None


def on_cpu(device: Any) -> bool:
    """Return whether environment.json names no GPU."""
    return str(device or "").startswith("CPU")


NONE = "–"


def format_value(value: Any, unit: str = "") -> str:
    """Return a number with four significant digits and its unit; a dash if there is none. Texts stay as they are."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    found = drawable_number(value)
    if found is None:
        return NONE
    if abs(found) >= 1000:
        text = f"{found:,.0f}" if abs(found) < 1e15 else f"{found:.3g}"
    else:
        text = plain(f"{found:.4g}")
    return f"{text} {unit}".rstrip()


def format_interval(row: Mapping[str, Any]) -> str | None:
    """Return `0.401 to 0.461`, the interval of an evaluation; None if an end of it is not known."""
    if row.get("low") is None or row.get("high") is None:
        return None
    return f"{row['low']:.3f} to {row['high']:.3f}"


def plain(text: str) -> str:
    """Return 2e-05 as 2e-5."""
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def parameters(num_parameters: Any) -> str:
    """Return 494,032,768 as `494 M`."""
    found = drawable_number(num_parameters)
    if found is None:
        return NONE
    size, suffix = next(((size, s) for size, s in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if found >= size), (1.0, ""))
    return f"{found / size:.3g} {suffix}".rstrip()


def duration(seconds: Any) -> str:
    """Return 7384 seconds as `2 h 03 min`."""
    found = drawable_number(seconds)
    if found is None or found < 0:
        return NONE
    if found < 60:
        return f"{found:.1f} s" if found < 10 else f"{found:.0f} s"
    minutes = round(found / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{int(found) // 60} min {int(found) % 60:02d} s"


def moment(unix_seconds: Any) -> str:
    """Return a Unix time as date and time in UTC."""
    found = drawable_number(unix_seconds)
    if found is None or not 0 < found < 1e11:
        return NONE
    return datetime.fromtimestamp(found, UTC).strftime("%Y-%m-%d %H:%M UTC")


def ticks(low: float, high: float, num_ticks: int = 4) -> list[float]:
    """Return round numbers (1, 2, 2.5 or 5 times a power of ten) in [low, high], about `num_ticks` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    # A round step that is up to a quarter too small: some more ticks are better than half as many.
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.75)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers in [low, high] for a logarithmic axis: powers of ten, with multiples of those if they are
    few."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [f * 10.0**e for e in exponents for f in factors if low * 0.999 <= f * 10.0**e <= high * 1.001]
        # Three are enough to show a scale; more than six would touch.
        if len(found) >= 3:
            return found[:: -(-len(found) // 6)]
    return found if len(found) >= 2 else ticks(low, high)


def axis_texts(values: Sequence[float]) -> list[str]:
    """Return labels of ticks, all with the same suffix (k, M, G) and as many decimals as they need to differ."""
    largest = max((abs(value) for value in values), default=0.0)
    if 0 < largest < 1e-3:
        return [plain(f"{value:.3g}") for value in values]
    sizes = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0.0, 1.0, ""))
    size, suffix = next((size, suffix) for least, size, suffix in sizes if largest >= least)
    return [plain(f"{value / size:.6g}") + (suffix if value else "") for value in values]


Html = Markup
"Markup made by `el` or a template, which leave it as it is; every other text is escaped there."


def el(name: str, /, *children: Any, **attributes: Any) -> Html:
    """Return an element. Children are markup, text, numbers, lists of those, or None; attributes that are None are left
    out.

    `class_` is the attribute class, `aria_label` aria-label and so on.
    """
    # Names of attributes come from this package alone; values may come from data, and are escaped.
    found = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opening = " ".join([name, *(f'{key}="{escape(str(value))}"' for key, value in found.items())])
    return Html(f"<{opening}>" if name == "br" else f"<{opening}>{join(*children)}</{name}>")


def join(*children: Any) -> Html:
    """Return several children as one element of markup."""
    flat = (join(*child) if isinstance(child, list | tuple) else child for child in children if child is not None)
    return Html().join(flat)


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


_WORDS = {"gib": "GiB", "pct": "%", "gpu": "GPU", "mfu": "MFU"}


def label(key: str) -> str:
    """Return a key of a file as words, with the units that it may end in: peak_gib as "peak GiB"."""
    return " ".join(_WORDS.get(word, word) for word in key.replace("_", " ").split())


def setting(value: Any) -> Html:
    """Return a setting as it is written in a recipe."""
    return el("code", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: str(name).endswith(".html.jinja"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
templates.filters |= {"text": value_text, "flat": join, "label": label, "setting": setting, "moment": moment}
templates.globals |= {"applies": applies, "passed": passed, "POLICY": POLICY}
macros: Any = templates.get_template("page.html.jinja").module
badge, section, html_table, check_table = macros.badge, macros.section, macros.html_table, macros.check_table
headline_tiles, folded, facts = macros.headline_tiles, macros.folded, macros.facts


def html_document(title: str, body: Html, more_style: str = "") -> str:
    """Return a page that loads nothing and runs nothing."""
    return str(macros.html_document(title, body, more_style))


_TITLES = {"name": "source", "tok_per_sec": "tokens/s"}


def columns(rows: Rows, keys: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
    """Return (titles, cells) of the columns that any row has."""
    present = [key for key in keys if any(row.get(key) is not None for row in rows)]
    return [_TITLES.get(key) or label(key) for key in present], [[row.get(key) for key in present] for row in rows]


def plain_numbers(values: Any) -> list[float]:
    """Return the numbers of a list, none if any item is no number."""
    # All or nothing: numbers with gaps would no longer match their edges or layers.
    found = [drawable_number(value) for value in values] if isinstance(values, list) else []
    return [value for value in found if value is not None] if None not in found else []


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
    series: Sequence[Series],
    label: str,
    *,
    log: bool = False,
    zero: bool = False,
    level: float | None = None,
    size: tuple[float, float] = NARROW,
) -> Html:
    """Draw lines over steps.

    Args:
        series: each has a value.
        label: text for screen readers.
        log, zero: whether the axis of values is logarithmic, and begins at 0.
        level: value of a dashed line across, such as chance.
        size: width and height.
    """
    width, height = size
    shown = sorted(series, key=lambda one: one.other)  # dashed on top of solid ones: both are visible if they agree
    steps = [step for one in shown for step, value in one.points if value is not None]
    values = [value for one in shown for _, value in one.points if value is not None]
    values += [bound for one in shown for _, low, high in one.intervals for bound in (low, high)]
    # Everything that is drawn decides the range, also ends of intervals and the level.
    values += [0.0] if zero and not log else []
    values += [level] if level is not None else []
    # Steps begin at 0 if the first step is near it, so lines start with training; those of a resumed run do not.
    first = 0.0 if 0 < min(steps) <= max(steps) / 4 else min(steps)
    x = Axis(*_range(first, max(steps), 0.0), LEFT, width - RIGHT)
    ends = _range(min(values), max(values), 0.06, zero=zero, log=log)
    y = Axis(*ends, height - BOTTOM, TOP, log)
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
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    zero: bool = False,
    level: float | None = None,
    wide: bool = False,
) -> Html | None:
    """Return a chart with its title, unit and legend; a logarithmic axis if values span much and it need not begin at
    0.

    None without a value. `zero`, `level`: see line_chart.
    """
    if not (shown := [one for one in series if any(value is not None for _, value in one.points)]):
        return None
    # Logarithmic if values span much; an axis that begins at 0 cannot be logarithmic.
    known = [value for one in shown for _, value in one.points if value is not None]
    log = not zero and min(known) > 0 and max(known) / min(known) > _LOG_RATIO
    last = [next(value for _, value in reversed(one.points) if value is not None) for one in shown]
    lasts = [f"{one.label}, last {format_value(value)}" for one, value in zip(shown, last, strict=True)]
    label = f"{title}{f' in {unit}' if unit else ''} over steps: {'; '.join(lasts)}"
    drawing = line_chart(shown, label, log=log, zero=zero, level=level, size=WIDE if wide else NARROW)
    words = ", ".join(word for word in (unit, "logarithmic" if log else "") if word)
    keys: list[tuple[str, Html, str | None]]
    keys = [(one.label, el("polyline", points="1,4 25,4"), line_class(one, shown)) for one in shown]
    if level is not None:
        keys.append((f"chance {format_value(level)}", el("line", x1=1, y1=4, x2=25, y2=4, class_="level"), None))
    return macros.framed(drawing, title, words, macros.legend(keys))
