"""Shared by all parts of a report: values as people read them, readers of a run's files, markup, and the macros of
page.html.jinja as functions.

Files may be missing, cut short by a kill, or written by another version. Numbers get four significant digits, with
thousands set apart, and times hours and minutes. Functions that return markup escape text that is not markup already,
so text from data can never become markup.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sftkit.errors import ConfigError
from sftkit.models.files import frozen_in_files, num_elements
from sftkit.rundir.files import clean, read_object
from sftkit.rundir.names import ADAPTER_CONFIG, DOES_NOT_APPLY, STEP_DIRS, latest_checkpoint

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
        return sum(map(num_elements, folder.glob("*.safetensors"))) or None
    return None


def trained_parameters(folder: Path, settings: Mapping[str, Any]) -> int | None:
    """Return the parameters of a step directory that train.freeze left to train; None: all were, or it is unknown."""
    freeze = mapping(settings.get("train")).get("freeze")
    total = stored_parameters(folder)
    with suppress(ConfigError, OSError, TypeError):
        return total - sum(frozen_in_files(folder, freeze).values()) if freeze and total else None
    return None


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


_WORDS = {"gib": "GiB", "pct": "%", "gpu": "GPU", "mfu": "MFU"}
_TITLES = {"name": "source", "tok_per_sec": "tokens/s"}


def label(key: str) -> str:
    """Return a key of a file as words, with the units that it may end in: peak_gib as "peak GiB"."""
    return " ".join(_WORDS.get(word, word) for word in key.replace("_", " ").split())


def columns(rows: Rows, keys: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
    """Return (titles, cells) of the columns that any row has."""
    present = [key for key in keys if any(row.get(key) is not None for row in rows)]
    return [_TITLES.get(key) or label(key) for key in present], [[row.get(key) for key in present] for row in rows]


def plain_numbers(values: Any) -> list[float]:
    """Return the numbers of a list, none if any item is no number."""
    # All or nothing: numbers with gaps would no longer match their edges or layers.
    found = [drawable_number(value) for value in values] if isinstance(values, list) else []
    return [value for value in found if value is not None] if None not in found else []
