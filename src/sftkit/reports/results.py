"""Section of the page on evaluations: the newest values with intervals, each task over the steps, validation."""

from __future__ import annotations

from sftkit.reports.charts import Series, ValueAxis, interval_chart
from sftkit.reports.components import figure, folded, html_table, section, value_text
from sftkit.reports.evaluated import EVALUATION_COLUMNS, is_part, standing
from sftkit.reports.files import Report, Rows
from sftkit.reports.markup import Html, el, join
from sftkit.reports.numbers import NONE, format_interval, format_value

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
