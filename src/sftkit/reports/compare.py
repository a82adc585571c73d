"""Compare two runs: losses at steps that both have, or why they cannot be compared; speeds; peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any

from sftkit.reports.values import dicts, format_value, mapping

Curves = Mapping[str, list[list[float | None]]]
"Name -> [[step, value or null], ...], of every logged step."
TOKENS_APART = 0.01
"Tokens at the same step that differ by a smaller share differ only by the packing of rows."
LOSSES = (("training loss", "train/loss", "logged"), ("validation loss", "val/loss", "evaluated"))

SPEEDS = (
    ("tokens/s", "perf/tok_per_sec", "useful tokens of all processes, median without the first line"),
    ("s/step", "perf/step_seconds", "median without the first line"),
    ("MFU", "perf/mfu", "0 to 1, median without the first line"),
)


_TARGETS = ("targets", "thinking", "split_turns", "too_long", "max_length")
"Keys of the recipe's data section that decide which tokens are targets."


def incomparable(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return why the losses of two runs are not of the same thing, by metric; an empty list: nothing is known against
    it.

    Losses are nats per target without z-loss and label smoothing, so no setting of the loss is a reason.

    Args:
        mine, other: as collect.read_run returns them.
    """
    ours, its = mapping(mine["config"].get("data")), mapping(other["config"].get("data"))
    # The script says what a run learns; it stands in the command that resumes the run.
    commands = [str(run["status"].get("resume") or "").split() for run in (mine, other)]
    scripts = [next((w.rpartition("/")[2] for w in words if w.endswith(".py")), None) for words in commands]
    both = []
    data = {"train/loss": "training", "val/loss": "validation"}
    # Another tokenizer makes other targets of the same text; bits per byte could be compared.
    for name, words in (("tokenizer", "another tokenizer"), ("chat_template", "another chat template")):
        if mine["identity"].get(name, 0) != other["identity"].get(name, 0) and mine["identity"] and other["identity"]:
            both.append(words)
    if all(scripts) and scripts[0] != scripts[1]:
        both.append(f"other targets ({scripts[0]} here, {scripts[1]} there)")
    for name in _TARGETS:
        default = "assistant" if name == "targets" else None
        if (ours.get(name) or default) != (its.get(name) or default):
            both.append(f"other targets (data.{name})")
    reasons = {metric: list(both) for metric in data}
    for metric, kind in data.items():
        section, part = ("train", "sources") if kind == "training" else ("val", "validation")
        counts = [
            [(row.get("name"), row.get("documents")) for row in dicts(run["preflight"].get(part))]
            for run in (mine, other)
        ]
        if ours.get(section) != its.get(section) or (all(counts) and counts[0] != counts[1]):
            reasons[metric].append(f"other {kind} data")
    return reasons


def compare_curves(
    mine: Curves,
    other: Curves,
    machines: Sequence[str | None] = (None, None),
    reasons: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return {"rows": [{"name", "step", "value", "other", "change", "how"}], "speed_up": a number or null, "notes":
    [...]}.

    Args:
        machines: what each run ran on, by which speeds are told apart.
        reasons: what `incomparable` returned: such losses are shown without a change.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, metric, done in LOSSES:
        a, b = known(mine, metric), known(other, metric)
        if not a or not b:
            if a or b:
                notes.append(f"{name}: not compared, no step was {done} {'there' if a else 'here'}")
            continue
        # The last step that both have, not the last of each: a longer run would look better for its length.
        step = max(a.keys() & b.keys(), default=None)
        if step is None:
            notes.append(f"{name}: not compared, no step was {done} by both (here {_steps(a)}; there {_steps(b)})")
            continue
        row = _row(name, step, a[step], b[step], f"nats per target, the last step that both have {done}")
        if why := reasons.get(metric):
            row |= {"change": None, "how": f"not comparable: {', '.join(why)}"}
        rows.append(row)
        last = max(a), max(b)
        if last != (step, step):
            ends = " and ".join(map(format_value, last))
            notes.append(f"{name}: at step {format_value(step)}; the runs go on to step {ends}")
        notes += [text] if (text := _apart(mine, other, step)) and text not in notes else []
    for name, metric, how in SPEEDS:
        rows += _both(name, steady(mine, metric), steady(other, metric), how)
    peaks = [max(known(curves, "mem/peak_gib").values(), default=None) for curves in (mine, other)]
    rows += _both("peak memory", peaks[0], peaks[1], "GiB, the most of any line")
    # Speeds are of all ranks. Speeds of two machines are divided too: a note names the machines.
    speeds = [steady(curves, "perf/tok_per_sec") for curves in (mine, other)]
    here, there = (machine or "unknown" for machine in machines)
    if speeds[0] and speeds[1] and here != there:
        notes.append(f"speeds are of different machines: {here} here, {there} there")
    return {"rows": rows, "speed_up": speeds[0] / speeds[1] if speeds[0] and speeds[1] else None, "notes": notes}


def steady(curves: Curves, metric: str) -> float | None:
    """Return the median over the logged lines without the first, which holds one-time costs;
    of a single line that one."""
    values = list(known(curves, metric).values())
    return median(values[1:] or values) if values else None


def speed_words(comparison: Mapping[str, Any], mine: str, other: str) -> str:
    """Return the speed-up in words, or that a speed is not known."""
    found = comparison["speed_up"]
    if found is None:
        return f"No speed-up: {mine} or {other} has logged no tokens/s."
    return f"{mine} makes {found:.2f} times the tokens/s of {other}."


def known(curves: Curves, metric: str) -> dict[float, float]:
    """Return the points of a curve that have a value, step -> value."""
    return {step: value for step, value in curves.get(metric, []) if step is not None and value is not None}


def _steps(curve: Mapping[float, float]) -> str:
    """Return the first three steps as text."""
    first = ", ".join(f"{step:.0f}" for step in sorted(curve)[:3])
    return f"{first}{', ...' if len(curve) > 3 else ''}"


def _apart(mine: Curves, other: Curves, step: float) -> str | None:
    """Return a note if the same step means other numbers of tokens in the two runs."""
    a, b = known(mine, "train/tokens").get(step), known(other, "train/tokens").get(step)
    if not a or not b or abs(a / b - 1) < TOKENS_APART:
        return None
    return (
        f"equal steps are not equal tokens: {format_value(a)} here and {format_value(b)} there at step "
        f"{format_value(step)}"
    )


def _both(name: str, value: float | None, other: float | None, how: str) -> list[dict[str, Any]]:
    """Return the row of a number that belongs to no step; none if a run lacks it."""
    return [] if value is None or other is None else [_row(name, None, value, other, how)]


def _row(name: str, step: float | None, value: float, other: float, how: str) -> dict[str, Any]:
    """Return a row of the comparison."""
    change = value / other - 1 if other else None
    return {"name": name, "step": step, "value": value, "other": other, "change": change, "how": how}
