"""The project's wandb workspace as code.

What people look for first is a table here; all other names get a section for each prefix. A run gets the panels that it
has values for. Only `save_view` asks a server.
"""

import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sftkit.config.commands import install, program_path
from sftkit.errors import ConfigError
from sftkit.reports.collect import check_run
from sftkit.rundir import names as files
from sftkit.rundir.files import read_metric_rows
from sftkit.rundir.names import METRICS_FILE
from sftkit.tracking.dashboard.remote import first_line, preflight_of, proof_of
from sftkit.tracking.names import METRICS, RUN_VALUES, TABLES, regex, summary_of

_DRAWN = {
    # All but low and high: wandb's regular expressions cannot look ahead, and no metric begins with l or h.
    "eval/<task>/<metric>": "^eval/[^/]+/[^lh/][^/]*$",
    "eval/<task>/low": "^eval/[^/]+/(low|high)$",
}
"Patterns that are drawn by another expression than their own."


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


def _plot(*names: str, title: str, x: str = "step") -> Panel:
    return Panel("plot", names, title, x)


def _panel(name: str, threshold: str = "") -> Panel:
    """Return the panel of one name of METRICS, RUN_VALUES or TABLES. `threshold`: what its value should be."""
    if name in TABLES:
        return Panel("table", (name,))
    if threshold or name in RUN_VALUES:
        return Panel("number", (name,), f"{name}{': ' if threshold else ''}{threshold}")
    unit = next(metric.unit for metric in METRICS if metric.name == name)
    return Panel("plot", (name,), name if unit == "-" else f"{name} ({unit})")


_MUST_BE_ZERO = (
    *("proof/failed", "compile/recompiles", "compile/graph_breaks", "shape/undeclared"),
    *("health/nonfinite_steps", "health/skipped_steps", "mem/ooms"),
)
_LOSSES = ("train/loss", "val/loss")
_FIRST = (
    Section(
        "Speed",
        [
            _panel("perf/tok_per_sec"),
            _panel("perf/step_seconds"),
            _panel("perf/mfu"),
            _panel("perf/data_wait_pct"),
        ],
        is_open=True,
    ),
    Section(
        "Loss",
        [
            _plot(*_LOSSES, title="training and validation loss (nats per target)"),
            _plot(*_LOSSES, title="loss over tokens", x="train/tokens"),
            _plot(*_LOSSES, title="loss over FLOPs", x="train/flops"),
            _plot(*_LOSSES, title="loss over seconds in steps", x="train/seconds"),
            _panel("adapters"),
            _panel("train/loss/<adapter>"),
            _panel("val/<source>/loss"),
            _panel("val/bpb"),
            _panel("train/grad_norm"),
        ],
        is_open=True,
    ),
    Section(
        "Evaluation",
        [
            _plot("eval/centred_mean", "eval/families/acc", title="means over tasks"),
            _panel("eval/<task>/<metric>"),
            _plot("eval/<task>/low", title="eval/<task>/low and high: 95 % intervals"),
            *map(_panel, ("eval/results", "samples")),
        ],
        is_open=True,
    ),
    Section("Proof", [_panel(name, "0 is right") for name in _MUST_BE_ZERO], is_open=True, one_row=True),
    Section("Checks that the run made of itself", [_panel("proof")]),
    Section(
        "Compiled against eager: make validate",
        [_panel("validate/speedup", "1.3 or more"), _panel("validate/failed", "0 is right")],
    ),
)
_ELSEWHERE = {"eval/<task>/high", "run/state", "run/signal", "run/error"}
"Drawn with eval/<task>/low, or columns of the table of runs."


def _sections() -> list[Section]:
    """Return _FIRST, then a section for each prefix with the names that are not in it."""
    shown = {name for section in _FIRST for panel in section.panels for name in panel.names} | _ELSEWHERE
    others: dict[str, list[Panel]] = {}
    for name in (*(metric.name for metric in METRICS), *RUN_VALUES, *TABLES):
        if name not in shown:
            others.setdefault(name.partition("/")[0], []).append(_panel(name))
    return [*_FIRST, *(Section(prefix, panels) for prefix, panels in others.items())]


PANEL_SECTIONS = _sections()


def panel_sections(logged: Collection[str] | None) -> list[Section]:
    """Return the sections for runs that have logged these names, without empty panels and sections.

    Args:
        logged: names of a run; None: not known, then all.
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
    if logged is None or name in logged or name == "step":
        return True
    return is_pattern(name) and any(map(re.compile(expression(name)).search, logged))


def is_pattern(name: str) -> bool:
    """Return whether a name of METRICS stands for several."""
    return "<" in name


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


def logged_by(run_dir: Path) -> set[str]:
    """Return the names that a run has on a dashboard, from its own files: what is in a row and not null,
    tables, values of the run.

    Raises:
        ConfigError: the directory holds no run.
    """
    check_run(run_dir)
    found = {"run/state"}
    for name in (METRICS_FILE, files.EVALS):
        found |= {key for row in read_metric_rows(run_dir / name) for key, value in row.items() if value is not None}
    for record in (proof_of(run_dir), preflight_of(run_dir)):
        found |= {table.name for table in record.tables} | record.summary.keys()
    found |= {"samples"} if read_metric_rows(run_dir / files.SAMPLES) else set()
    evaluated = any(run_dir.glob(f"{files.EVALUATIONS}/{files.STEP_DIRS}/{files.RESULTS}"))
    return found | ({"eval/results"} if evaluated else set())


def spec(view: workspaces.Workspace) -> dict[str, Any]:
    """Return the JSON that `save_view` would send."""
    # Private: the library has no public way to see a spec without sending it.
    return json.loads(view._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def save_view(view: workspaces.Workspace) -> str:
    """Create the workspace on the server and return its address.

    Raises:
        ConfigError: there is no key on this machine, or the server rejects it.
    """
    import wandb

    # Without a key wandb may ask for one at the terminal, and wait.
    if not (os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False, verify=False)):
        log_in = f"run `{program_path('wandb')} login`, or look at the spec with --dry-run"
        raise ConfigError(f"there is no wandb key on this machine: {log_in}")
    try:
        view.save()
    # wandb_workspaces passes on errors of wandb, of GraphQL and of requests.
    except Exception as error:
        where = f"{view.entity}/{view.project}"
        raise ConfigError(f"wandb does not take the dashboard of {where}: {first_line(error)}") from error
    return view.url
