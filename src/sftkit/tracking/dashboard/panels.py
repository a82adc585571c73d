"""The project's wandb workspace as code, and a wandb report that compares two runs: the speed-up as a number, losses at
equal steps, what differs, every curve.

Sections and panels are a table here; a run gets those that it has values for. Only `save_view` asks a server.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sftkit.config.commands import install, program_path
from sftkit.errors import ConfigError
from sftkit.reports.collect import check_run, curves_of, machine_name, read_run
from sftkit.reports.compare import Curves, compare_curves, speed_words
from sftkit.reports.values import format_value
from sftkit.rundir import names as files
from sftkit.rundir.files import read_metric_rows, read_object
from sftkit.rundir.names import METRICS_FILE, is_archived, latest_checkpoint
from sftkit.tracking.dashboard.remote import first_line, preflight_of, proof_of, run_name
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


class Panel(NamedTuple):
    """A panel of names, or of all that one pattern stands for."""

    kind: Literal["plot", "number", "table"]
    "line plot; the value that stands for the run; the newest table of each run"
    names: tuple[str, ...]
    title: str = ""
    x: str = "step"


class Section(NamedTuple):
    """Panels under a title."""

    title: str
    panels: Sequence[Panel]
    is_open: bool = False
    one_row: bool = False
    "all panels side by side; else three columns"


def _plot(*names: str, title: str, x: str = "step") -> list[Panel]:
    return [Panel("plot", names, title, x)]


def _curves(prefix: str, *names: str) -> list[Panel]:
    """Return a line plot of each name of METRICS, with its unit."""
    units = {metric.name: f" ({metric.unit})" if metric.unit != "-" else "" for metric in METRICS}
    return [Panel("plot", (name,), f"{name}{units[name]}") for name in (f"{prefix}/{word}" for word in names)]


def _numbers(prefix: str, *names: str, threshold: str = "") -> list[Panel]:
    """Return a panel of each value of a run. `threshold`: what it should be."""
    wanted = f": {threshold}" if threshold else ""
    return [Panel("number", (name,), f"{name}{wanted}") for name in (f"{prefix}/{word}" for word in names)]


def _tables(*names: str) -> list[Panel]:
    return [Panel("table", (name,)) for name in names]


def _section(title: str, *panels: list[Panel], is_open: bool = False, one_row: bool = False) -> Section:
    return Section(title, [panel for some in panels for panel in some], is_open, one_row)


_MUST_BE_ZERO = {
    "proof": ("failed",),
    "compile": ("recompiles", "graph_breaks"),
    "shape": ("undeclared",),
    "health": ("nonfinite_steps", "skipped_steps"),
    "mem": ("ooms",),
}
_LOSSES = ("train/loss", "val/loss")
_STEPS = ("perf/step_seconds", "perf/step_p50_seconds", "perf/step_p95_seconds")
_ZERO = "0 is right"
PANEL_SECTIONS = (
    _section(
        "Speed",
        _curves("perf", "tok_per_sec"),
        _plot(*_STEPS, title="step: mean, median, p95 (s)"),
        _curves("perf", "mfu", "data_wait_pct"),
        is_open=True,
    ),
    _section(
        "Loss",
        _plot(*_LOSSES, title="training and validation loss (nats per target)"),
        _plot(*_LOSSES, title="loss over tokens", x="train/tokens"),
        _plot(*_LOSSES, title="loss over FLOPs", x="train/flops"),
        _plot(*_LOSSES, title="loss over seconds in steps", x="train/seconds"),
        _curves("val", "bpb"),
        _curves("train", "grad_norm"),
        is_open=True,
    ),
    _section(
        "Evaluation",
        _plot("eval/centred_mean", "eval/families/acc", title="means over tasks"),
        _curves("eval", "<task>/<metric>"),
        _plot("eval/<task>/low", title="eval/<task>/low and high: 95 % intervals"),
        _tables("eval/results", "samples"),
        is_open=True,
    ),
    _section(
        "Proof",
        *(_numbers(room, *names, threshold=_ZERO) for room, names in _MUST_BE_ZERO.items()),
        is_open=True,
        one_row=True,
    ),
    _section(
        "Compiled against eager: make validate",
        _numbers("validate", "speedup", threshold="1.3 or more"),
        _numbers("validate", "failed", threshold=_ZERO),
        _numbers("validate", "passed", "not_checked"),
        _tables("validate/verdicts", "validate/speed"),
    ),
    _section("Checks that the run made of itself", _tables("proof"), _numbers("proof", "passed", "not_checked")),
    _section(
        "Training",
        _curves("train", "lr", "epoch", "objective", "token_accuracy", "entropy"),
        _curves("train", "aux_loss", "expert_load_max", "expert_load_min"),
        _numbers("train", "tokens", "flops", "seconds"),
        _numbers("health", "spikes"),
    ),
    _section("Validation by source", _curves("val", "<source>/loss", "<source>/bpb")),
    _section(
        "Speed in detail",
        _curves("perf", "tok_per_sec_per_gpu", "target_tok_per_sec", "target_tok_per_sec_per_gpu"),
        _curves("perf", "encoded_per_sec", "host_syncs"),
        _curves("health", "rank_skew_pct"),
    ),
    _section("Memory", _curves("mem", "peak_gib", "reserved_gib", "alloc_retries")),
    _section(
        "Compiler",
        _numbers("compile", "graphs", "cuda_graphs", "cache_hits", "seconds"),
        _curves("compile", "seconds/<phase>"),
    ),
    _section("Shapes", _curves("shape", "<rows>x<length>", "id")),
    _section(
        "Data",
        _curves("data", "padding_pct", "target_pct", "encoded", "share/<source>"),
        _numbers("data", "dropped_rows", "truncated_rows", "unused_columns"),
        _numbers("preflight", "warnings_count", threshold=_ZERO),
        _numbers("preflight", "documents", "tokens", "target_pct", "padding_pct"),
        _numbers("preflight", "duplicate_pct", "epochs", "estimated_gib"),
        _tables("preflight/sources", "preflight/layouts", "preflight/findings", "preflight/warnings"),
    ),
    _section("Checkpoints", _numbers("ckpt", "block_seconds", "write_seconds", "bytes")),
)


def panel_sections(logged: Collection[str] | None) -> list[Section]:
    """Return the sections for runs that have logged these names, without empty panels and sections.

    Args:
        logged: names of a run; None: not known, then those of every run on a GPU.
    """
    sections = []
    for section in PANEL_SECTIONS:
        named = [panel._replace(names=tuple(n for n in panel.names if has(n, logged))) for panel in section.panels]
        # An axis that was never logged would leave the plot empty although its curves exist.
        if shown := [panel for panel in named if panel.names and has(panel.x, logged)]:
            sections.append(section._replace(panels=shown))
    return sections


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


try:
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces
except ImportError as error:
    raise ConfigError(f"make_dashboard.py needs wandb-workspaces: {install('sftkit[dashboard]')}") from error

_COLUMNS = (
    *("run/state", "train/loss", "val/loss", "val/bpb", "eval/centred_mean", "perf/tok_per_sec", "perf/step_seconds"),
    *("perf/mfu", "mem/peak_gib", "proof/failed", "compile/recompiles"),
)
"Columns of the table of runs, after name and state."


def workspace(entity: str, project: str, logged: Collection[str] | None = None) -> workspaces.Workspace:
    """Return the view of all runs of a project: speed, loss and evaluation, then what must be zero, then the rest.

    Args:
        logged: names that a run of the project has, so that no panel is empty; see panels.panel_sections.
    """
    sections = [
        workspaces.Section(
            name=section.title,
            panels=[panel_of(panel) for panel in section.panels],
            is_open=section.is_open,
            layout_settings=workspaces.SectionLayoutSettings(
                columns=len(section.panels) if section.one_row else 3, rows=1 if section.one_row else 2
            ),
        )
        for section in panel_sections(logged)
    ]
    columns = [f"summary:{value_of_run(name)}" for name in _COLUMNS if has(name, logged)]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="sftkit",
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="step", smoothing_weight=0),
        runset_settings=workspaces.RunsetSettings(pinned_columns=["run:displayName", "run:state", *columns]),
    )


def panel_of(panel: Panel) -> Any:
    """Return a panel as wandb draws it."""
    kind, names, title, x = panel
    if kind == "number":
        return reports.ScalarChart(title=title, metric=reports.SummaryMetric(value_of_run(names[0])))
    if kind == "table":
        return reports.WeavePanelSummaryTable(table_name=names[0], layout=reports.Layout(w=24, h=12))
    # A pattern goes as a regular expression, so that names which appear later (a new source) are drawn too.
    drawn: dict[str, Any] = {"metric_regex": expression(names[0])} if is_pattern(names[0]) else {"y": list(names)}
    return reports.LinePlot(title=title, x=x, title_x=x, **drawn)


def names_of(run_dir: Path | None) -> set[str] | None:
    """Return the names that a run has on a dashboard, with those of a validation where runs/validate has one.

    Args:
        run_dir: None: the newest under runs/ that is on wandb; what is returned is None where there is none either.

    Raises:
        ConfigError: the directory that was named holds no run.
    """
    run_dir = run_dir or newest_on_wandb(Path("runs"))
    if run_dir is None:
        return None
    check_run(run_dir)
    validated = any(Path("runs/validate").glob(f"*/{files.VALIDATION}"))
    return logged_by(run_dir) | {name for name in (*RUN_VALUES, *TABLES) if validated and name.startswith("validate/")}


def newest_on_wandb(root: Path) -> Path | None:
    """Return the run directory with the newest wandb run in it: those of a validation, which are many, have none."""
    # wandb's own folders decide, not metrics.jsonl: the panels are for runs that wandb has.
    found = [path for path in root.glob("**/wandb/*run-*") if (path.parents[1] / METRICS_FILE).is_file()]
    kept = [path for path in found if not is_archived(path)]
    return max(kept, key=lambda path: path.stat().st_mtime).parents[1] if kept else None


def logged_by(run_dir: Path) -> set[str]:
    """Return the names that a run has on a dashboard, from its own files: what is in a row and not null,
    tables, values of the run."""
    found = {"run/state"}
    for name in (METRICS_FILE, files.EVALS):
        found |= {key for row in read_metric_rows(run_dir / name) for key, value in row.items() if value is not None}
    for record in (proof_of(run_dir), preflight_of(run_dir)):
        found |= {table.name for table in record.tables} | record.summary.keys()
    found |= {"samples"} if read_metric_rows(run_dir / files.SAMPLES) else set()
    evaluated = any(run_dir.glob(f"{files.EVALUATIONS}/{files.STEP_DIRS}/{files.RESULTS}"))
    return found | ({"eval/results"} if evaluated else set())


def spec(view: workspaces.Workspace | reports.Report) -> dict[str, Any]:
    """Return the JSON that `save_view` would send."""
    # Private: the library has no public way to see a spec without sending it.
    return json.loads(view._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def save_view(view: workspaces.Workspace | reports.Report) -> str:
    """Create the workspace or report on the server and return its address.

    Raises:
        ConfigError: there is no key on this machine, or the server rejects it.
    """
    # Without a key wandb may ask for one at the terminal, and wait.
    check_key()
    try:
        view.save()
    # wandb_workspaces passes on errors of wandb, of GraphQL and of requests.
    except Exception as error:
        where = f"{view.entity}/{view.project}"
        raise ConfigError(f"wandb does not take the dashboard of {where}: {first_line(error)}") from error
    return view.url


def check_key() -> None:
    """Raise an error if there is no wandb key on this machine.

    Raises:
        ConfigError: there is none.
    """
    import wandb

    if not (os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False, verify=False)):
        raise ConfigError(
            f"there is no wandb key on this machine: run `{program_path('wandb')} login`, or look at the spec with "
            "--dry-run"
        )


_NAME = re.compile(r"[\w .:-]{1,128}")


@dataclass(frozen=True)
class Compared:
    """One of the two runs."""

    name: str
    "as the page calls it"
    ids: tuple[str, ...]
    "names or ids by which wandb finds it"
    curves: Curves | None = None
    "None: not known here"
    machine: str | None = None


def find_run(run: str, entity: str, project: str, *, offline: bool) -> Compared:
    """Return a run from its directory, or by its id or name from wandb; offline without its curves then.

    Raises:
        ConfigError: no run can have that name, or there is none; no key on this machine, or no answer.
    """
    if (run_dir := Path(run)).is_dir():
        # Its newest checkpoint has its id on wandb; its name there is made of the last two folders.
        report, curves = read_run(run_dir)
        name = run_name(run_dir)
        folder = latest_checkpoint(run_dir)
        found = read_object(folder / files.TRAINING_STATE).get("tracker") if folder else None
        return Compared(name, (str(found),) if found else (name,), curves, machine_name(report["environment"]))
    if not _NAME.fullmatch(run):
        raise ConfigError(
            f"--report {run!r}: neither a run directory nor the id or name of a wandb run (letters, digits, space "
            "and ._:-)"
        )
    return Compared(run, (run,)) if offline else _from_wandb(run, entity, project)


def _from_wandb(run: str, entity: str, project: str) -> Compared:
    """Return a run of wandb by its id or name."""
    import wandb

    check_key()
    # wandb's filters call the id `name` and what a person sees `display_name`.
    either = {"$or": [{"name": run}, {"display_name": run}]}
    try:
        found = next(iter(wandb.Api().runs(f"{entity}/{project}", filters=either)), None)
        rows = [] if found is None else list(found.scan_history())
    # wandb raises its own, requests' and plain ValueErrors; all mean that there is no answer.
    except Exception as error:
        raise ConfigError(f"wandb does not give {entity}/{project}/{run}: {first_line(error)}") from error
    if found is None:
        raise ConfigError(f"--report {run}: {entity}/{project} has no run of that name or id")
    return Compared(run, (found.id,), curves_of(rows), machine_name(found.config.get("environment") or {}))


def comparison(
    entity: str, project: str, runs: tuple[Compared, Compared], logged: Collection[str] | None = None
) -> reports.Report:
    """Return a report of two runs of a project; `logged`: names that they have, None: not known."""
    ids = [one for run in runs for one in run.ids]
    # A run directory may know an id, a typed word may be either, so both fields are asked.
    either = workspaces.Or(workspaces.Metric("ID").isin(ids), workspaces.Metric("Name").isin(ids))

    def grid(shown: list[Any]) -> reports.PanelGrid:
        return reports.PanelGrid(runsets=[reports.Runset(name="the runs", filters=either)], panels=shown)

    comparer = reports.RunComparer(diff_only="split", layout=reports.Layout(w=24, h=12))
    blocks: list[Any] = [*_speed_up(*runs), reports.H1("What differs"), grid([comparer])]
    for section in panel_sections(logged):
        blocks += [reports.H1(section.title), grid([panel_of(panel) for panel in section.panels])]
    blocks.append(reports.P("Names, units and formulas: docs/metrics.md of sftkit."))
    title = f"sftkit: {' and '.join(run.name for run in runs)}"
    return reports.Report(entity=entity, project=project, title=title[:128], width="fluid", blocks=blocks)


def _speed_up(first: Compared, second: Compared) -> list[Any]:
    """Return the blocks at the top: how many times as fast, then both runs at equal steps, or
    why they are not compared."""
    if first.curves is None or second.curves is None:
        words = "The speed-up and losses at equal steps are not here: name run directories, or leave out --dry-run."
        return [reports.H1("Speed-up: not known"), reports.P(words)]
    found = compare_curves(first.curves, second.curves, (first.machine, second.machine))
    speed_up = found["speed_up"]
    rows = [[r["name"], *(format_value(r[key]) for key in ("step", "value", "other"))] for r in found["rows"]]
    lines = [["", "step", first.name, second.name], ["---", *["---:"] * 3], *rows]
    return [
        reports.H1(f"Speed-up: {'not known' if speed_up is None else format(speed_up, '.2f')}"),
        reports.P(speed_words(found, first.name, second.name)),
        reports.MarkdownBlock("\n".join(f"| {' | '.join(line)} |" for line in lines)),
        *(reports.P(note) for note in found["notes"]),
    ]
