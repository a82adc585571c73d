"""The project's wandb workspace as code: workspace.yaml as the panels of a view. Only `save_view` asks a server."""

import json
import os
from typing import Any

from sftkit.config.commands import install, program_path
from sftkit.errors import ConfigError, texts
from sftkit.rundir.status import first_line
from sftkit.tracking.names import find_metric, summary_of

try:
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces
except ImportError as error:
    raise ConfigError(f"make_dashboard.py needs wandb-workspaces: {install('sftkit[dashboard]')}") from error

LAYOUT: Any = texts("tracking/dashboard/workspace.yaml")
"Title of each section -> its panels."
OPEN = ("Speed", "Loss", "Evaluation", "Proof")
_COLUMNS = (
    *("run/state", "train/loss", "val/loss", "val/bpb", "eval/centred_mean", "perf/tok_per_sec", "perf/step_seconds"),
    *("perf/mfu", "mem/peak_gib", "proof/failed", "compile/recompiles"),
)
"Columns of the table of runs, after name and state."


def workspace(entity: str, project: str) -> workspaces.Workspace:
    """Return the view of all runs of a project: speed, loss and evaluation, then what must be zero, then the rest."""
    sections = []
    for title, panels in LAYOUT.items():
        # What must be zero is one row of numbers.
        columns, rows = (len(panels), 1) if title == "Proof" else (3, 2)
        layout = workspaces.SectionLayoutSettings(columns=columns, rows=rows)
        shown = [panel_of(panel) for panel in panels]
        sections.append(workspaces.Section(name=title, panels=shown, is_open=title in OPEN, layout_settings=layout))
    pinned = ["run:displayName", "run:state", *(f"summary:{value_of_run(name)}" for name in _COLUMNS)]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="sftkit",
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="step", smoothing_weight=0),
        runset_settings=workspaces.RunsetSettings(pinned_columns=pinned),
        auto_generate_panels=True,
    )


def value_of_run(name: str) -> str:
    """Return where wandb's summary has the value of a name that stands for the run."""
    summary = summary_of(name)
    return name if summary == "last" else f"{name}.{summary}"


def panel_of(panel: dict[str, Any]) -> Any:
    """Return a panel of workspace.yaml as wandb draws it."""
    if name := panel.get("number"):
        value = reports.SummaryMetric(value_of_run(name))
        return reports.ScalarChart(title=f"{name}: {panel['should']}", metric=value)
    if name := panel.get("table"):
        return reports.WeavePanelSummaryTable(table_name=name, layout=reports.Layout(w=24, h=12))
    x = panel.get("x", "step")
    # A regular expression also draws names that appear later, such as those of a new task.
    if "pattern" in panel:
        return reports.LinePlot(title=panel["title"], x=x, title_x=x, metric_regex=panel["pattern"])
    name = panel["plot"][0]
    metric = find_metric(name)
    unit = f" ({metric.unit})" if metric is not None and metric.unit != "-" else ""
    return reports.LinePlot(title=panel.get("title", f"{name}{unit}"), x=x, title_x=x, y=panel["plot"])


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
