"""Write report.html, report.json, and a model card next to the exported model.

The page's sections on checks, curves and evaluations are made here, that on data in `details`, the others in the
template. The page is one file without a script, and loads nothing from the network.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

from sftkit.config.commands import invocation
from sftkit.config.terminal import print_text, visible
from sftkit.reports import collect, details, values
from sftkit.reports.card import licence, model_card
from sftkit.rundir.files import replace_shared
from sftkit.rundir.names import CARD, PROOF, REPORT, REPORT_DATA

_TOKENS = {"": "useful", "target_": "targets"}
CURVES = (
    ("Learning rate", "", {"train/lr": "learning rate"}, True),
    ("Gradient norm", "before clipping", {"train/grad_norm": "gradient norm"}, False),
    ("Speed", "tokens/s per {rank}", {f"perf/{key}tok_per_sec_per_gpu": name for key, name in _TOKENS.items()}, True),
    ("MFU", "0 to 1, of the bf16 peak", {"perf/mfu": "MFU"}, True),
    ("Step time", "seconds", {"perf/step_seconds": "mean"}, True),
    ("Memory", "GiB per {rank}", {"mem/peak_gib": "peak", "mem/reserved_gib": "reserved"}, True),
    ("Waiting for data", "% of the time", {"perf/data_wait_pct": "waiting"}, True),
    ("Padding", "% of positions", {"data/padding_pct": "padding"}, True),
    ("Token accuracy", "0 to 1", {"train/token_accuracy": "accuracy"}, False),
    ("Entropy", "nats per target", {"train/entropy": "entropy"}, False),
    ("Auxiliary loss of routers", "experts per token at best", {"train/aux_loss": "auxiliary loss"}, False),
    ("Load of experts", "even shares", {f"train/expert_load_{which}": which for which in ("max", "min")}, True),
)
"(title, unit, {metric: label}, whether the axis begins at 0); {rank}: GPU or process"
_LOSS = {"train/loss": "training", "val/loss": "validation"}
_MAX_SOURCES = 6
_FIRST_CHARTS = 3
"Charts below that of the loss that are open."


def proof(report: values.Report) -> values.Html:
    """Return the section on the run's checks of itself: a line, which opens to what each found and expected."""
    rows: values.Rows = report["proof"]
    words = values.check_words(rows)
    if not rows:
        return values.section("proof", "Checks", lead=words)
    failed = values.check_counts(rows)[1]
    badge = values.badge("FAIL" if failed else "PASS", not failed)
    title = "Logits of fixed tokens, to compare with when the checkpoint is loaded"
    logits = values.facts(details.leaves(report["logits"]), title)
    order = {False: 0, None: 1, True: 2}  # what failed is not looked for
    rows = sorted(rows, key=lambda row: order[values.passed(row) if values.applies(row) else True]) if failed else rows
    return values.section(
        "proof",
        "Checks",
        values.folded(values.join(badge, " ", words), values.check_table(rows), logits, opened=bool(failed)),
    )


def curves(report: values.Report) -> values.Html:
    """Return the section on curves: loss first, then everything else that was logged; for two runs, both."""
    loss = values.figure("Loss", "nats per target token", _series(report, _LOSS), wide=True)
    # Memory of a CPU run is a process's resident set; two runs share their charts, so one word has to fit both.
    runs = [report["run"], *([report["against"]["run"]] if report["against"] else [])]
    rank = "process" if any(values.on_cpu(run["device"]) for run in runs) else "GPU"
    found = [
        values.figure(title, unit.format(rank=rank), _series(report, metrics), zero=zero)
        for title, unit, metrics, zero in CURVES
    ]
    for title, unit, kind, metric in (
        ("Loss by source", "nats per target of training", "train", "loss"),
        ("Bits per byte", "validation", "val", "bpb"),
    ):
        each = sorted(name for name in report["curves"] if re.fullmatch(f"{kind}/.+/{metric}", name))
        names = {f"{kind}/{metric}": "all"}
        if len(each) > 1 and not report["against"]:  # for two runs there would be too many lines to tell apart
            names |= {one: one[len(kind) + 1 : -len(metric) - 1] for one in each[: _MAX_SOURCES - 1]}
        if len(names) > 1 or kind == "val":  # else the first chart has it
            found.append(values.figure(title, unit, _series(report, names)))
    shown = [chart for chart in found if chart is not None]
    if loss is None and not shown:
        return values.section("curves", "Curves", lead="No line was logged.")
    parts = [values.el("div", loss, class_="charts first")] if loss is not None else []
    parts += [table] if (table := _adapters(report)) is not None else []
    # Every logged name with its last, lowest and highest value, folded away.
    rows = []
    for name, curve in sorted(report["curves"].items()):
        known = [value for _, value in curve if value is not None]
        rows.append([name, report["last"].get(name), min(known, default=None), max(known, default=None)])
    every = values.folded(f"All {len(rows)} metrics", values.html_table(["name", "last", "lowest", "highest"], rows))
    # Samples come next: what is looked at less often stands behind a click.
    more = values.el("div", shown[_FIRST_CHARTS:], class_="charts")
    rest = [values.folded(f"{len(shown) - _FIRST_CHARTS} more charts", more)] if len(shown) > _FIRST_CHARTS else []
    return values.section(
        "curves", "Curves", *parts, values.el("div", shown[:_FIRST_CHARTS], class_="charts"), *rest, every
    )


def _adapters(report: values.Report) -> values.Html | None:
    """Return the newest values of several adapters side by side; None: the run has not several."""
    columns, rows = collect.adapter_table(report["adapters"])
    return values.html_table(columns, rows, "Adapters, newest values") if rows else None


def _series(report: values.Report, names: dict[str, str]) -> list[values.Series]:
    """Return the lines of these metrics, for each run."""
    found = []
    for run in (report, report["against"]) if report["against"] else (report,):
        of_run = f", {run['run']['name']}" if report["against"] else ""
        # A style for each metric, the same number in both runs: line_class then draws the other run's dashed.
        for style, (name, label) in enumerate(names.items()):
            curve = run["curves"].get(name, [])
            found.append(values.Series(f"{label}{of_run}", curve, style, other=run is not report))
    return found


_MAX_CHARTS = 12


def evaluations_section(report: values.Report) -> values.Html:
    """Return the section: the newest evaluation with intervals, each task over the steps, validation by source."""
    # The final evaluation describes the model, and for other tasks the newest one.
    newest = collect.latest_evaluations([*report["evaluations"], *report["final"]])
    validation = _validation(report)
    if not newest:
        lead = None if validation else "No evaluation was made."
        return values.section("evaluations", "Evaluations", validation, lead=lead)
    parts = [_evaluation_table(report, newest)]
    parts += [values.el("div", charts, class_="charts")] if (charts := _over_steps(report)) else []
    cells = [
        [row["task"], part, ", ".join(f"{key} {values.value_text(value)}" for key, value in row[part].items())]
        for row in newest
        for part in ("settings", "metrics")
        if row[part]
    ]
    if cells:
        parts.append(
            values.folded("Settings and all metrics", values.html_table(["task", "", "what"], cells, text=(1, 2)))
        )
    return values.section("evaluations", "Evaluations", *parts, validation)


def _evaluation_table(report: values.Report, newest: values.Rows) -> values.Html:
    """Return a table of the newest values, with the first value of a task that moved and the other run's."""
    # Reversed, so that of several evaluations of a task the first one stays.
    first = {(row["task"], row["metric"]): row for row in reversed(report["evaluations"])}
    other = report["against"]
    moved = any(first.get((row["task"], row["metric"]), row)["step"] != row["step"] for row in newest)
    cells = []
    for row in newest:
        step = f"{values.format_value(row['step'])}, final" if row.get("final") else row["step"]
        cell = [_task(row["task"]), row["metric"], _share(row["value"]), values.format_interval(row) or values.NONE]
        cell += [row["chance"], row["examples"], step]
        cell += [_share(first.get((row["task"], row["metric"]), {}).get("value"))] if moved else []
        cell += [_others_at(row, other)] if other else []
        cells.append(cell)
    head = collect.EVALUATION_COLUMNS + ["first"] * moved + ["other run"] * bool(other)
    return values.html_table(head, cells, text=(1,))


_QUESTION = ("format", "shots", "split", "data", "backend", "max_examples", "max_new_tokens")
"Settings of an evaluation without which its value is another question's."


def _others_at(row: dict[str, Any], other: values.Report) -> str:
    """Return the other run's value at the step of an evaluation; if it has none there, its newest with the step."""
    every = [*other["evaluations"], *other["final"]]
    its = [each for each in every if (each["task"], each["metric"]) == (row["task"], row["metric"])]
    # At equal steps if there are any: two models are compared after as much training.
    equal = [each for each in its if each["step"] == row["step"]]
    newest = (equal or its or [{"value": None, "step": None, "settings": {}}])[-1]
    text = _share(newest["value"])
    apart = [] if equal or not its else [f"at step {values.format_value(newest['step'])}"]
    # Only a task as a whole has settings.
    pairs = [(name, row["settings"].get(name), newest["settings"].get(name)) for name in _QUESTION]
    apart += [
        f"{name.replace('_', ' ')} {values.value_text(b)}, here {values.value_text(a)}"
        for name, a, b in pairs
        if a != b and row["settings"] and newest["settings"]
    ]
    return " ".join([text, "; ".join(apart)]).rstrip()


def _task(name: str) -> str:
    """Return the name of a task; the mean over tasks in words."""
    return "centred mean" if name == "centred_mean" else name


def _share(value: float | None) -> str:
    """Return a share with as many decimals in every row, so that a column can be read downwards."""
    return values.NONE if value is None else f"{value:.4f}"


def _over_steps(report: values.Report) -> list[values.Html]:
    """Return a chart for each task that was evaluated at several steps."""
    charts = []
    for task, metric in dict.fromkeys((row["task"], row["metric"]) for row in report["evaluations"]):
        series = []
        for run in (report, report["against"]) if report["against"] else (report,):
            rows = [row for row in run["evaluations"] if (row["task"], row["metric"]) == (task, metric)]
            if run is report:
                own = rows
            label = run["run"]["name"] if report["against"] else metric
            # Intervals of two lines would lie on each other: only this run's are drawn.
            known = [row for row in rows if run is report and values.format_interval(row)]
            bars = [(row["step"], row["low"], row["high"]) for row in known]
            points = [(row["step"], row["value"]) for row in rows]
            series.append(values.Series(label, points, other=run is not report, intervals=bars))
        # A single point is in the table already, and parts of a task would be as many charts as it has families.
        if len(own) < 2 or collect.is_part(own[-1]):
            continue
        chance = next((row["chance"] for row in reversed(own) if row["chance"] is not None), None)
        charts.append(values.figure(_task(task), metric, series, level=chance))
    return [chart for chart in charts if chart is not None][:_MAX_CHARTS]


def _validation(report: values.Report) -> values.Html | None:
    """Return the last loss and bits per byte of every validation source."""
    last = report["last"]
    # Names of sources stand between two slashes; val/loss and val/bpb are over all of them.
    sources = sorted({name.split("/")[1] for name in last if name.startswith("val/") and name.count("/") == 2})
    rows = [[name, last.get(f"val/{name}/loss"), last.get(f"val/{name}/bpb")] for name in sources]
    if "val/loss" in last or "val/bpb" in last:
        rows.append(["all", last.get("val/loss"), last.get("val/bpb")])
    table = values.html_table(["source", "nats per target", "bits per byte"], rows, "Validation, last evaluation")
    return values.el("div", table, class_="slim") if rows else None


SECTIONS = {
    "curves": "Curves",
    "samples": "Samples",
    "evaluations": "Evaluations",
    "proof": "Checks",
    "data": "Data",
    "compile": "Compiler",
    "events": "Events",
    "settings": "Settings",
    "environment": "Environment",
}


def render_report(report: values.Report) -> str:
    """Return the whole page, from what `gather_report` returns."""
    # A CPU has no peak that is known: its tile would be empty.
    shown = [row for row in report["headline"] if row["name"] != "MFU" or row["value"] is not None]
    tiles = [(row["name"], row["text"], row["how"]) for row in shown]
    good, failed, unmade = values.check_counts(report["proof"])
    if report["proof"]:
        text = f"{good} of {good + len(failed) + unmade}"
        how = f"passed, {len(failed)} failed, {unmade} not made"
        tiles.append(("checks", values.el("span", text, class_="bad") if failed else text, how))
    header = values.macros.report_header(report, _facts(report), tiles, *_comparison(report), SECTIONS, failed)
    steps: values.Rows = report["samples"]
    samples_lead = None if steps else "No samples were written."
    machine = dict(report["environment"])
    packages = machine.pop("packages", None)
    parts = (
        curves(report),
        values.section("samples", "Samples", values.macros.samples(steps), lead=samples_lead),
        evaluations_section(report),
        proof(report),
        details.data(report),
        values.macros.compiler(report["last"], report["events"], report["summary"].get("compile_mode")),
        values.macros.events(report["events"]),
        values.macros.settings(report["config_changed"], report["against"]),
        values.macros.environment(
            details.leaves(machine), values.mapping(packages), report["command"], report["notes"]
        ),
    )
    words = "Made from the files of the run directory; report.json beside this page has the same content as data."
    body = values.join(header, values.el("main", parts), values.el("footer", words))
    return values.html_document(f"{report['run']['name']} · training report", body)


def _facts(report: values.Report) -> list[tuple[str, str | values.Html | None]]:
    """Return (what it is, value) for the line under the title."""
    run, status, summary = report["run"], report["status"], report["summary"]
    model: str | values.Html | None = values.value_text(run["model"]) if run["model"] else None
    if run["parent_report"] is not None:
        model = values.el("span", "from ", values.el("a", model, href=quote(run["parent_report"])))
    size = f"({values.parameters(run['parameters'])} parameters)" if run["parameters"] else ""
    if run["trained_parameters"]:
        trained = values.parameters(run["trained_parameters"])
        size = f"(trains {trained} of {values.parameters(run['parameters'])} parameters)"
    if run["adapter"] and run["parameters"]:
        whole = run["adapter_base_parameters"]
        share = f", {run['parameters'] / (run['parameters'] + whole):.2%} of the model's" if whole else ""
        size = f"({run['adapter_settings'] or 'an adapter'}: {values.parameters(run['parameters'])} parameters{share})"
    if run["adapters"]:
        trained = f", {values.parameters(run['parameters'])} parameters" if run["parameters"] else ""
        size = f"({len(run['adapters'])} adapters{trained}: {', '.join(run['adapters'])})"
    device = f"{run['world_size']} × {run['device']}" if (run["world_size"] or 1) > 1 else run["device"]
    steps = values.drawable_number(status.get("step"))
    total = values.drawable_number(status.get("total_steps"))
    numbers = (
        ("tokens", summary.get("tokens"), values.format_value),
        ("in steps", summary.get("train_seconds"), values.duration),
        ("warm-up", summary.get("warm_up_seconds"), values.duration),
        ("", status.get("time"), values.moment),
    )
    return [
        (size, model),
        ("", values.value_text(device) if device else None),
        (
            f"of {values.format_value(total)} steps" if total else "steps",
            values.format_value(steps) if steps is not None else None,
        ),
        *((name, words(value)) for name, value, words in numbers if values.drawable_number(value)),
    ]


def _comparison(report: values.Report) -> tuple[list[list[Any]], list[str]]:
    """Return (rows, notes): both runs at equal steps, how much faster this one is, and what cannot be compared."""
    if not report["against"]:
        return [], []
    found = report["against"]["comparison"]
    rows = []
    for row in found["rows"]:
        change = None if row["change"] is None else f"{100 * row['change']:+.1f} %"
        rows.append([row["name"], row["step"], row["value"], row["other"], change, row["how"]])
    speed = collect.speed_words(found, report["run"]["name"], report["against"]["run"]["name"])
    return rows, [speed, *found["notes"]]


def write_report(run_dir: Path, against: Path | None = None, out: Path | None = None) -> Path:
    """Write report.html and report.json, and README.md into the step directory that LATEST names.

    Returns the page's path.

    Args:
        against: a second run, whose curves, settings and results are shown next to those of this one.
        out: the HTML file to write instead, the JSON file next to it; the run directory is then left as it is.

    Raises:
        ConfigError: `run_dir` or `against` is no run.
        OSError: a file cannot be written.
    """
    report = collect.gather_report(run_dir, against)
    target = out or run_dir / REPORT
    data = run_dir / REPORT_DATA if out is None else out.with_suffix(".json")
    content = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # Everything is built before anything is written: an error leaves the earlier report whole.
    texts = {data: content, target: visible(render_report(report))}
    if out is None and (folder := values.checkpoint(run_dir)) is not None:
        card = folder / CARD
        texts[card] = visible(model_card(report, licence(card)))
    for path, text in texts.items():
        replace_shared(path, text)
    return target


def checks_of(run_dir: Path) -> str:
    """Return the checks that a run made of itself in a line."""
    return values.check_words(values.dicts(values.mapping(values.read_json(run_dir / PROOF, [])).get("rows")))


def try_report(run_dir: Path, print_line: Callable[[str], None] = print_text, max_seconds: float = 20.0) -> None:
    """Write the report where it must neither fail nor delay the run; `print_line` gets where it is, or why there is
    none."""

    def work() -> None:
        try:
            page = write_report(run_dir)
            said.append(f"checks: {checks_of(run_dir)}\nreport: {page}")
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
    """Write again the report of the run that a folder with results lies in; do nothing if it lies in none."""
    if (run_dir := collect.run_of(folder)) is not None:
        try_report(run_dir, print_line)
