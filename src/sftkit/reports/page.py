"""Sections of the page on training: proof, curves and samples.

Section of the page on evaluations: the newest values with intervals, each task over the steps, validation.

Builds report.html: one file, no script, nothing from the network.

Writes what a run's files say: report.html, report.json, and a model card beside the exported model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import quote

from sftkit.config.commands import invocation
from sftkit.config.terminal import print_text, visible
from sftkit.reports import details
from sftkit.reports.card import licence, model_card
from sftkit.reports.charts import Series, ValueAxis, interval_chart
from sftkit.reports.collect import EVALUATION_COLUMNS, gather_report, is_part, run_of, standing
from sftkit.reports.compare import speed_words
from sftkit.reports.components import (
    badge,
    check_table,
    facts,
    figure,
    folded,
    headline_tiles,
    html_table,
    section,
    value_text,
)
from sftkit.reports.details import experts
from sftkit.reports.style import CSS
from sftkit.reports.values import (
    NONE,
    Html,
    Report,
    Rows,
    applies,
    checkpoint,
    drawable_number,
    duration,
    el,
    format_interval,
    format_value,
    join,
    mapping,
    moment,
    on_cpu,
    parameters,
    passed,
)
from sftkit.rundir.files import replace_shared
from sftkit.rundir.names import CARD, REPORT, REPORT_DATA

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


_MAX_CHARTS = 12


def evaluations_section(report: Report) -> Html:
    """Return the section: the newest evaluation with intervals, each task over the steps, validation by source."""
    newest = standing(report)
    tasks = [row["task"] for row in newest]
    # A task with several metrics has a row for each, told apart by the metric.
    several = [
        f"{row['task']} {row['metric']}" if tasks.count(row["task"]) > 1 else _task(row["task"]) for row in newest
    ]
    named = [row | {"name": name} for name, row in zip(several, newest, strict=True)]
    label = "Newest value of each task with its interval and the chance level"
    sizes = [interval_chart(named, label, width) for width in (760.0, 400.0)]
    overview = join(el("div", sizes[0], class_="wide"), el("div", sizes[1], class_="narrow")) if sizes[0] else None
    validation = _validation(report)
    if not newest:
        lead = None if validation else "No evaluation was made."
        return section("evaluations", "Evaluations", validation, lead=lead)
    caption = el("figcaption", "Newest values", el("span", "line: 95 % interval; tick: chance level", class_="soft"))
    charts = _over_steps(report)
    forest = el("figure", caption, overview, class_="forest") if overview else None
    over_steps = el("div", charts, class_="charts") if charts else None
    tables = _evaluation_table(report), _how_evaluated(newest), validation
    return section("evaluations", "Evaluations", forest, over_steps, *tables)


def _how_evaluated(newest: Rows) -> Html | None:
    """Return settings and further metrics of the tasks, folded away."""
    cells = [
        [row["task"], part, ", ".join(f"{key} {value_text(value)}" for key, value in row[part].items())]
        for row in newest
        for part in ("settings", "metrics")
        if row[part]
    ]
    return folded("Settings and all metrics", html_table(["task", "", "what"], cells, text=(1, 2))) if cells else None


def _evaluation_table(report: Report) -> Html:
    """Return a table of the newest values, with the first value of a task that moved and the other run's."""
    # Reversed, so that of several evaluations of a task the first one stays.
    first = {(row["task"], row["metric"]): row for row in reversed(report["evaluations"])}
    newest = standing(report)
    other = report["against"] and others_at(newest, report["against"])
    moved = any(first.get((row["task"], row["metric"]), row)["step"] != row["step"] for row in newest)
    head = EVALUATION_COLUMNS + ["first"] * moved + ["other run"] * bool(other)
    cells = []
    for row in newest:
        task, metric = key = row["task"], row["metric"]
        step = f"{format_value(row['step'])}, final" if row.get("final") else row["step"]
        cell = [_task(task), metric, _share(row["value"]), format_interval(row) or NONE]
        cell += [row["chance"], row["examples"], step]
        cell += [_share(first.get(key, {}).get("value"))] if moved else []
        cell += [other[key]] if other else []
        cells.append(cell)
    return html_table(head, cells, text=(1,))


def others_at(rows: Rows, report: Report) -> dict[tuple[str, str], str]:
    """Return (task, metric) -> the other run's value at the step of each row; where it has none there,
    its newest with the step."""
    every = [*report["evaluations"], *report["final"]]
    found = {}
    for row in rows:
        key = row["task"], row["metric"]
        its = [each for each in every if (each["task"], each["metric"]) == key]
        # At equal steps if there are any: two models are compared after as much training.
        equal = [each for each in its if each["step"] == row["step"]]
        newest = (equal or its or [{"value": None, "step": None}])[-1]
        text = _share(newest["value"])
        found[key] = text if equal or not its else f"{text} at step {format_value(newest['step'])}"
    return found


def _task(name: str) -> str:
    """Return the name of a task; the mean over tasks in words."""
    return "centred mean" if name == "centred_mean" else name


def _share(value: float | None) -> str:
    """Return a share with as many decimals in every row, so that a column can be read downwards."""
    return NONE if value is None else f"{value:.4f}"


def _over_steps(report: Report) -> list[Html]:
    """Return a chart for each task that was evaluated at several steps."""
    charts = []
    for task, metric in dict.fromkeys((row["task"], row["metric"]) for row in report["evaluations"]):
        rows = [row for row in report["evaluations"] if (row["task"], row["metric"]) == (task, metric)]
        # A single point is in the table already, and parts of a task would be as many charts as it has families.
        if len(rows) < 2 or is_part(rows[-1]):
            continue
        chance = next((row["chance"] for row in reversed(rows) if row["chance"] is not None), None)
        series = [_eval_series(rows, report["run"]["name"] if report["against"] else metric, other=False)]
        if report["against"]:
            its = [row for row in report["against"]["evaluations"] if (row["task"], row["metric"]) == (task, metric)]
            series.append(_eval_series(its, report["against"]["run"]["name"], other=True))
        charts.append(figure(_task(task), metric, series, ValueAxis(level=chance)))
    return [chart for chart in charts if chart is not None][:_MAX_CHARTS]


def _eval_series(rows: Rows, label: str, *, other: bool) -> Series:
    """Return the line of a task over the steps; intervals for this run only."""
    # Intervals of two lines would lie on each other.
    bars = [(row["step"], row["low"], row["high"]) for row in rows if format_interval(row)]
    return Series(label, [(row["step"], row["value"]) for row in rows], 0, other, () if other else bars)


def _validation(report: Report) -> Html | None:
    """Return the last loss and bits per byte of every validation source."""
    last = report["last"]
    # Names of sources stand between two slashes; val/loss and val/bpb are over all of them.
    sources = sorted({name.split("/")[1] for name in last if name.startswith("val/") and name.count("/") == 2})
    rows = [[name, last.get(f"val/{name}/loss"), last.get(f"val/{name}/bpb")] for name in sources]
    if "val/loss" in last or "val/bpb" in last:
        rows.append(["all", last.get("val/loss"), last.get("val/bpb")])
    table = html_table(["source", "nats per target", "bits per byte"], rows, "Validation, last evaluation")
    return el("div", table, class_="slim") if rows else None


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
SECTIONS = (
    ("proof", "Proof", proof),
    ("curves", "Curves", curves),
    ("evaluations", "Evaluations", evaluations_section),
    ("samples", "Samples", samples),
    ("data", "Data", details.data),
    ("compile", "Compiler", details.compiler),
    ("events", "Events", details.events),
    ("settings", "Settings", details.settings_section),
    ("environment", "Environment", details.environment_section),
)
_GOOD = {"finished": True, "failed": False, "killed": False}


def render_report(report: dict[str, Any]) -> str:
    """Return the whole page, from what `gather_report` returns."""
    # Sections and navigation come from one table, so that no link leads nowhere.
    main = el("main", [build(report) for _, _, build in SECTIONS])
    words = "Made from the files of the run directory; report.json beside this page has the same content as data."
    body = join(_header(report), main, el("footer", words))
    return html_document(f"{report['run']['name']} · training report", body)


def html_document(title: str, body: Html, more_style: str = "") -> str:
    """Return a page that loads nothing and runs nothing."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        # Text of data is escaped (markup.py). Should some of it still get through, the policy lets nothing run or load.
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", title),
        el("style", Html(CSS + more_style)),
    )
    return f"<!doctype html>\n{el('html', head, el('body', body), lang='en')}\n"


def _header(report: dict[str, Any]) -> Html:
    """Return the head of the page: name, status, facts, headline, comparison, navigation."""
    status = report["status"]
    word = status.get("status") if isinstance(status.get("status"), str) else "status not known"
    facts = [el("li", el("b", value), f" {name}") for name, value in _facts(report) if value]
    error = el("div", value_text(status["error"]), class_="error", role="alert") if status.get("error") else None
    links = [el("a", title, href=f"#{name}") for name, title, _ in SECTIONS]
    parts = [
        el("div", el("h1", report["run"]["name"]), badge(word, ok=_GOOD.get(word)), class_="title"),
        el("ul", facts, class_="facts"),
        error,
        headline_tiles((row["name"], row["text"], row["how"]) for row in report["headline"]),
        _comparison(report),
        el("nav", links, aria_label="Sections"),
    ]
    return el("header", el("div", parts))


def _facts(report: dict[str, Any]) -> list[tuple[str, str | Html | None]]:
    """Return (what it is, value) for the line under the title."""
    run, status, summary = report["run"], report["status"], report["summary"]
    size = f"({parameters(run['parameters'])} parameters)" if run["parameters"] else ""
    device = f"{run['world_size']} × {run['device']}" if (run["world_size"] or 1) > 1 else run["device"]
    steps = drawable_number(status.get("step"))
    total = drawable_number(status.get("total_steps"))
    numbers = (
        ("tokens", summary.get("tokens"), format_value),
        ("in steps", summary.get("train_seconds"), duration),
        ("warm-up", summary.get("warm_up_seconds"), duration),
        ("", status.get("time"), moment),
    )
    return [
        (size, _origin(run)),
        ("", value_text(device) if device else None),
        (f"of {format_value(total)} steps" if total else "steps", format_value(steps) if steps is not None else None),
        *((name, words(value)) for name, value, words in numbers if drawable_number(value)),
    ]


def _origin(run: dict[str, Any]) -> str | Html | None:
    """Return what was trained: the run that it started from, with its report, or the name of a model."""
    if run["parent_report"] is None:
        return value_text(run["model"]) if run["model"] else None
    return el("span", "from ", el("a", value_text(run["model"]), href=quote(run["parent_report"])))


def _comparison(report: dict[str, Any]) -> Html | None:
    """Return both runs at equal steps, how much faster this one is, and what cannot be compared."""
    if not report["against"]:
        return None
    names = [report["run"]["name"], report["against"]["run"]["name"]]
    found = report["against"]["comparison"]
    rows = []
    for row in found["rows"]:
        change = None if row["change"] is None else f"{100 * row['change']:+.1f} %"
        rows.append([row["name"], row["step"], row["value"], row["other"], change, row["how"]])
    table = html_table(["", "step", *names, "change", ""], rows, f"Compared with {names[1]}", text=(5,))
    return el("div", table, [el("p", note, class_="soft") for note in (speed_words(found, *names), *found["notes"])])


def write_report(run_dir: Path, against: Path | None = None, out: Path | None = None) -> Path:
    """Write report.html and report.json, and README.md into the step directory that LATEST names.

    Returns the page's path.

    Args:
        against: a second run, whose curves, settings and results are shown beside those of this one.
        out: the HTML file to write instead, the JSON file beside it; the run directory is then left as it is.

    Raises:
        ConfigError: `run_dir` or `against` is no run.
        OSError: a file cannot be written.
    """
    report = gather_report(run_dir, against)
    target = out or run_dir / REPORT
    data = run_dir / REPORT_DATA if out is None else out.with_suffix(".json")
    content = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # Everything is built before anything is written: an error leaves the earlier report whole.
    texts = {data: content, target: visible(render_report(report))}
    if out is None and (folder := checkpoint(run_dir)) is not None:
        card = folder / CARD
        texts[card] = visible(model_card(report, licence(card)))
    for path, text in texts.items():
        replace_shared(path, text)
    return target


def try_report(run_dir: Path, print_line: Callable[[str], None] = print_text, max_seconds: float = 20.0) -> None:
    """Write the report where it must neither fail nor delay what goes on; `print_line` gets where it
    is, or why there is none."""

    def work() -> None:
        try:
            said.append(f"report: {write_report(run_dir)}")
        except Exception as error:  # a report must not fail a run
            said.append(f"no report: {type(error).__name__}: {error}")

    # A daemon: what takes too long, such as a slow file system, does not keep the process from ending either.
    said: list[str] = []
    thread = Thread(target=work, daemon=True, name="report")
    thread.start()
    thread.join(max_seconds)
    by_hand = invocation("scripts/report.py", str(run_dir))
    print_line(said[0] if said else f"no report: it takes more than {max_seconds:.0f} s; {by_hand}")


def report_of_folder(folder: Path, print_line: Callable[[str], None]) -> None:
    """Write again the report of the run that a folder with results lies in; do nothing where it lies in none."""
    if (run_dir := run_of(folder)) is not None:
        try_report(run_dir, print_line)
