"""The sections and panels of the wandb workspace, and which of them a run has. workspace.py
builds the panels themselves."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from sftkit.tracking.names import METRICS, RUN_VALUES, TABLES, regex, summary_of

_DRAWN = {
    # All but low and high: wandb's regular expressions cannot look ahead, and no metric begins with l or h.
    "eval/<task>/<metric>": "^eval/[^/]+/[^lh/][^/]*$",
    "eval/<task>/low": "^eval/[^/]+/(low|high)$",
}
"Patterns that are drawn by another expression than their own."
RARE = (
    *("train/objective", "train/token_accuracy", "train/entropy", "train/aux_loss"),
    *("train/expert_load_max", "train/expert_load_min", "val/<source>/loss", "val/<source>/bpb"),
    *("data/share/<source>", "preflight/findings", "preflight/warnings"),
    *(name for name in (*RUN_VALUES, *TABLES) if name.startswith("validate/")),
)
"Names that a run has only with certain settings, several sources or odd data: shown where a run is known to have them."


class LinePlot(NamedTuple):
    """A line plot of names, or of all that one pattern stands for."""

    names: tuple[str, ...]
    title: str
    x: str = "step"


class Number(NamedTuple):
    """The value that stands for the run."""

    names: tuple[str]
    title: str
    "with the threshold, where there is one"


class Shown(NamedTuple):
    """A table, the newest of each run."""

    names: tuple[str]


Panel = LinePlot | Number | Shown


@dataclass(frozen=True)
class Section:
    """Panels under a title."""

    title: str
    panels: tuple[Panel, ...]
    is_open: bool = False
    one_row: bool = False
    "all panels side by side; else three columns"


def curve(name: str, title: str | None = None) -> LinePlot:
    """Return a line plot of a name of names.METRICS over `step`, with its unit."""
    metric = next(metric for metric in METRICS if metric.name == name)
    return LinePlot((name,), title or (f"{name} ({metric.unit})" if metric.unit != "-" else name))


def over(x: str, title: str) -> LinePlot:
    """Return a line plot of both losses over something else than steps."""
    return LinePlot(("train/loss", "val/loss"), f"loss over {title}", x)


def _number(name: str, threshold: str | None = None) -> Number:
    """Return a panel of a value of a run, with what it should be."""
    return Number((name,), f"{name}: {threshold}" if threshold else name)


def _section(title: str, *panels: Panel, is_open: bool = False, one_row: bool = False) -> Section:
    """Return a section with these panels."""
    return Section(title, panels, is_open, one_row)


_MUST_BE_ZERO = (
    *("proof/failed", "compile/recompiles", "compile/fallbacks", "compile/graph_breaks", "shape/undeclared"),
    *("health/nonfinite_steps", "health/skipped_steps", "mem/ooms"),
)
PANEL_SECTIONS = (
    _section(
        "Speed",
        curve("perf/tok_per_sec"),
        LinePlot(
            ("perf/step_seconds", "perf/step_p50_seconds", "perf/step_p95_seconds"), "step: mean, median, p95 (s)"
        ),
        curve("perf/mfu"),
        curve("perf/data_wait_pct"),
        is_open=True,
    ),
    _section(
        "Loss",
        LinePlot(("train/loss", "val/loss"), "training and validation loss (nats per target)"),
        over("train/tokens", "tokens"),
        over("train/flops", "FLOPs"),
        over("train/seconds", "seconds in steps"),
        curve("val/bpb"),
        curve("train/grad_norm"),
        is_open=True,
    ),
    _section(
        "Evaluation",
        LinePlot(("eval/centred_mean", "eval/families/acc"), "means over tasks"),
        curve("eval/<task>/<metric>"),
        curve("eval/<task>/low", "eval/<task>/low and high: 95 % intervals"),
        Shown(("eval/results",)),
        Shown(("samples",)),
        is_open=True,
    ),
    _section("Proof", *(_number(name, "0 is right") for name in _MUST_BE_ZERO), is_open=True, one_row=True),
    _section(
        "Compiled against eager: make validate",
        _number("validate/speedup", "1.3 or more"),
        _number("validate/failed", "0 is right"),
        _number("validate/passed"),
        _number("validate/not_checked"),
        Shown(("validate/verdicts",)),
        Shown(("validate/speed",)),
    ),
    _section(
        "Checks that the run made of itself", Shown(("proof",)), _number("proof/passed"), _number("proof/not_checked")
    ),
    _section(
        "Training",
        *(curve(f"train/{name}") for name in ("lr", "epoch", "objective", "token_accuracy", "entropy")),
        *(curve(f"train/{name}") for name in ("aux_loss", "expert_load_max", "expert_load_min")),
        *(_number(f"train/{name}") for name in ("tokens", "flops", "seconds")),
        _number("health/spikes"),
    ),
    _section("Validation by source", curve("val/<source>/loss"), curve("val/<source>/bpb")),
    _section(
        "Speed in detail",
        *(curve(f"perf/{name}") for name in ("tok_per_sec_per_gpu", "target_tok_per_sec")),
        *(curve(f"perf/{name}") for name in ("target_tok_per_sec_per_gpu", "encoded_per_sec", "host_syncs")),
        curve("health/rank_skew_pct"),
        _number("perf/pipeline_bubble_pct"),
    ),
    _section("Memory", *(curve(f"mem/{name}") for name in ("peak_gib", "reserved_gib", "alloc_retries"))),
    _section(
        "Compiler",
        *(_number(f"compile/{name}") for name in ("graphs", "cuda_graphs", "cache_hits", "seconds")),
        curve("compile/seconds/<phase>"),
    ),
    _section("Shapes", curve("shape/<rows>x<length>"), curve("shape/id")),
    _section(
        "Data",
        *(curve(f"data/{name}") for name in ("padding_pct", "target_pct", "encoded", "share/<source>")),
        *(_number(f"data/{name}") for name in ("dropped_rows", "truncated_rows", "unused_columns")),
        _number("preflight/warnings_count", "0 is right"),
        *(_number(f"preflight/{name}") for name in ("documents", "tokens", "target_pct", "padding_pct")),
        *(_number(f"preflight/{name}") for name in ("duplicate_pct", "epochs", "estimated_gib")),
        *(Shown((f"preflight/{name}",)) for name in ("sources", "layouts", "findings", "warnings")),
    ),
    _section("Checkpoints", *(_number(f"ckpt/{name}") for name in ("block_seconds", "write_seconds", "bytes"))),
)


def panel_sections(logged: Collection[str] | None) -> list[Section]:
    """Return what there is to see of runs that have logged these names; empty panels and sections are left out.

    Args:
        logged: names of a run; None: not known, then those of every run on a GPU.
    """
    sections = (
        replace(section, panels=tuple(shown for panel in section.panels if (shown := _panel_of(panel, logged))))
        for section in PANEL_SECTIONS
    )
    return [section for section in sections if section.panels]


def _panel_of(panel: Panel, logged: Collection[str] | None) -> Panel | None:
    """Return the panel with those of its names that there are; None without any."""
    names = tuple(name for name in panel.names if has(name, logged))
    # An axis that was never logged would leave the plot empty although its curves exist.
    if not names or (isinstance(panel, LinePlot) and not has(panel.x, logged)):
        return None
    return panel._replace(names=names)  # type: ignore[arg-type]


def has(name: str, logged: Collection[str] | None) -> bool:
    """Return whether a name, or one that a pattern stands for, is among those of a run."""
    if logged is None:
        return name not in RARE
    if name in logged or name == "step":
        return True
    return is_pattern(name) and any(map(re.compile(expression(name)).search, logged))


def is_pattern(name: str) -> bool:
    """Return whether a name of METRICS stands for several."""
    return "<" in name


@cache
def expression(name: str) -> str:
    """Return the regular expression of the names that a pattern stands for, as wandb takes it."""
    return _DRAWN.get(name) or f"^{regex(name)}$"


def value_of_run(name: str) -> str:
    """Return where wandb's summary has the value of a name that stands for the run."""
    summary = "last" if name in RUN_VALUES else summary_of(name)
    return name if summary == "last" else f"{name}.{summary}"
