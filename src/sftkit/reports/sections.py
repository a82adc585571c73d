"""Sections of the page on training: proof, curves and samples."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from sftkit.reports.charts import Series, ValueAxis
from sftkit.reports.components import check_table, facts, figure, folded, html_table, section, value_text
from sftkit.reports.experts import experts
from sftkit.reports.files import Report, Rows, applies, mapping, on_cpu, passed
from sftkit.reports.markup import Html, el
from sftkit.reports.numbers import format_value

_RATES = {"perf/tok_per_sec_per_gpu": "useful", "perf/target_tok_per_sec_per_gpu": "targets"}
_ROUTERS = {"train/aux_loss": "auxiliary loss"}
_LOADS = {"train/expert_load_max": "most", "train/expert_load_min": "least"}


class CurveChart(NamedTuple):
    """A chart of metrics over the steps."""

    title: str
    unit: str
    "{rank}: GPU or process"
    metrics: dict[str, str]
    "name -> label"
    scale: float = 1
    zero: bool = True
    "whether the axis begins at 0"


CURVES = (
    CurveChart("Learning rate", "", {"train/lr": "learning rate"}),
    CurveChart("Gradient norm", "before clipping", {"train/grad_norm": "gradient norm"}, zero=False),
    CurveChart("Speed", "tokens/s per {rank}", _RATES),
    CurveChart("MFU", "% of the bf16 peak", {"perf/mfu": "MFU"}, scale=100),
    CurveChart("Step time", "seconds", {"perf/step_p50_seconds": "median", "perf/step_p95_seconds": "95th percentile"}),
    CurveChart("Memory", "GiB per {rank}", {"mem/peak_gib": "peak", "mem/reserved_gib": "reserved"}),
    CurveChart("Waiting for data", "% of the time", {"perf/data_wait_pct": "waiting"}),
    CurveChart("Padding", "% of positions", {"data/padding_pct": "padding"}),
    CurveChart("Token accuracy", "0 to 1", {"train/token_accuracy": "accuracy"}, zero=False),
    CurveChart("Entropy", "nats per target", {"train/entropy": "entropy"}, zero=False),
    CurveChart("Auxiliary loss of routers", "experts per token at best", _ROUTERS, zero=False),
    CurveChart("Experts with most and least", "even shares", _LOADS),
)
_LOSS = {"train/loss": "training", "val/loss": "validation"}
_MAX_SOURCES = 6


def proof(report: Report) -> Html:
    """Return the section on each check that the run made of itself, with what was found and what was expected."""
    rows: Rows = report["proof"]
    if not rows:
        lead = "This run has no proof.json: it made no checks of itself, or ended before."
        return section("proof", "Proof", lead=lead)
    # None is a check that was not made, and neither passes nor fails.
    states = [passed(row) for row in rows if applies(row)]
    failed = [value_text(row.get("name")) for row in rows if passed(row) is False]
    words = [f"{states.count(True)} of {len(states)} checks pass"]
    words += [f"{len(failed)} fail: {', '.join(failed)}"] if failed else []
    words += [f"{states.count(None)} not checked"] if None in states else []
    tables = (
        check_table(rows),
        facts(_made_with(report), "Made with"),
        facts(report["logits"], "Logits of fixed tokens, to compare with when the checkpoint is loaded"),
    )
    return section("proof", "Proof", *tables, lead="; ".join(words) + ".")


def _made_with(report: Report) -> dict[str, Any]:
    """Return hardware, commit and the versions that decide numbers and speed."""
    found = report["environment"]
    packages = mapping(found.get("packages"))
    names = ("torch", "transformers", "accelerate", "sftkit")
    versions = ", ".join(f"{name} {packages[name]}" for name in names if packages.get(name))
    hardware = " x ".join(str(found[key]) for key in ("world_size", "device") if found.get(key))
    made = {"hardware": hardware, "commit": found.get("git"), "versions": versions, "Python": found.get("python")}
    return {name: value for name, value in made.items() if value}


def curves(report: Report) -> Html:
    """Return the section on curves: loss first, then everything else that was logged; for two runs, both."""
    loss = figure("Loss", "nats per target token", _series(report, _LOSS), wide=True)
    found = [
        figure(title, unit.format(rank=rank_noun(report)), _series(report, metrics, scale), ValueAxis(zero=zero))
        for title, unit, metrics, scale, zero in CURVES
    ]
    bits = sorted(name for name in report["curves"] if re.fullmatch("val/[^/]*/bpb", name))
    names = {"val/bpb": "all"}
    if len(bits) > 1 and not report["against"]:  # for two runs there would be too many lines to tell apart
        names |= {name: name.split("/")[1] for name in bits[: _MAX_SOURCES - 1]}
    found.append(figure("Bits per byte", "validation", _series(report, names)))
    shown = [chart for chart in found if chart is not None]
    if loss is None and not shown:
        return section("curves", "Curves", lead="No line was logged.")
    first = el("div", loss, class_="charts first") if loss is not None else None
    others = el("div", shown, class_="charts"), experts(report), _all_metrics(report)
    return section("curves", "Curves", first, *others)


def rank_noun(report: Report) -> str:
    """Return what a rank is called, of which speed and memory are shown: "GPU" or "process"."""
    # Memory of a CPU run is a process's resident set; two runs share their charts, so one word has to fit both.
    runs = [report["run"], *([report["against"]["run"]] if report["against"] else [])]
    return "process" if any(on_cpu(run["device"]) for run in runs) else "GPU"


def _series(report: Report, names: dict[str, str], scale: float = 1.0) -> list[Series]:
    """Return the lines of these metrics, for each run; values times `scale`."""
    found = []
    for run in (report, report["against"]) if report["against"] else (report,):
        of_run = f", {run['run']['name']}" if report["against"] else ""
        # A style for each metric, the same number in both runs: line_class then draws the other run's dashed.
        for style, (name, label) in enumerate(names.items()):
            curve = run["curves"].get(name, [])
            points = [(step, value * scale if value is not None else None) for step, value in curve]
            found.append(Series(f"{label}{of_run}", points, style, other=run is not report))
    return found


def _all_metrics(report: Report) -> Html | None:
    """Return every logged name with its last, lowest and highest value, folded away."""
    rows = []
    for name, curve in sorted(report["curves"].items()):
        values = [value for _, value in curve if value is not None]
        rows.append([name, report["last"].get(name), min(values, default=None), max(values, default=None)])
    return folded(f"All {len(rows)} metrics", html_table(["name", "last", "lowest", "highest"], rows)) if rows else None


def samples(report: Report) -> Html:
    """Return the section on samples: prompts with references and answers, the newest evaluation open."""
    steps: Rows = report["samples"]
    if not steps:
        return section("samples", "Samples", lead="No samples were written.")
    folds = []
    for index, entry in enumerate(steps):
        stops = [sample["stop"] for sample in entry["samples"] if sample.get("stop")]
        counts = ", ".join(f"{stops.count(stop)} {stop.replace('_', ' ')}" for stop in dict.fromkeys(stops))
        words = el("span", f" {counts}", class_="soft") if counts else None
        title = el("summary", f"Step {format_value(entry['step'])}", words)
        opened = "open" if index == 0 else None
        folds.append(el("details", title, [_sample(each) for each in entry["samples"]], open=opened))
    return section("samples", "Samples", folds)


def _sample(sample: dict[str, str]) -> Html:
    """Return one sample."""
    parts = []
    for name, kind in (("prompt", None), ("reference", None), ("answer", "answer")):
        text = sample.get(name) or el("span", "empty", class_="soft")
        parts += [el("dt", name), el("dd", text, class_=kind)]
    if sample.get("stop"):
        parts += [el("dt", "stopped by"), el("dd", sample["stop"].replace("_", " "))]
    return el("dl", parts, class_="sample")
