"""Formats numbers for people: four significant digits, thousands set apart, times in hours and minutes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sftkit.reports.files import drawable_number

NONE = "–"


def format_value(value: Any, unit: str = "") -> str:
    """Return a number with four significant digits and its unit; a dash where there is none. Texts stay as they are."""
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
    """Return `0.401 to 0.461`, the interval of an evaluation; None where an end of it is not known."""
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
    """Return round numbers in [low, high] for a logarithmic axis: powers of ten, with multiples
    of those if they are few."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [f * 10.0**e for e in exponents for f in factors if low * 0.999 <= f * 10.0**e <= high * 1.001]
        # As few as three tell a scale; more than six would touch.
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
