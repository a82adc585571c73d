"""The project's wandb workspace and a report that compares two runs, as code. Nothing here asks a server; `save` does."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from sftkit.errors import ConfigError
from sftkit.tracking.names import GROUPS, METRICS, Metric, regex
from sftkit.tracking.remote import first_line

try:
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces
except ImportError as error:
    raise ConfigError("make_dashboard.py needs wandb-workspaces: pip install 'sftkit[dashboard]'") from error

TITLES = {
    "compile": "Proof: compiler",
    "shape": "Proof: shapes",
    "health": "Proof: health",
    "train": "Training",
    "val": "Validation",
    "eval": "Evaluation",
    "perf": "Speed",
    "mem": "Memory",
    "data": "Data",
    "ckpt": "Checkpoints",
}
MUST_BE_ZERO = (
    "compile/recompiles",
    "compile/fallbacks",
    "compile/graph_breaks",
    "shape/undeclared",
    "health/nonfinite_steps",
    "mem/ooms",
)
"Shown as one number for each run, above the curves."
DRAWN = {
    # All but low and high: wandb's regular expressions cannot look ahead, and no metric begins with l or h.
    "eval/<task>/<metric>": ("eval/<task>/<metric> (0 to 1)", "^eval/[^/]+/[^lh/][^/]*$"),
    "eval/<task>/low": ("eval/<task>/low and high: 95 % intervals", "^eval/[^/]+/(low|high)$"),
}
"Panels of several names: title and which names."
ELSEWHERE = ("eval/<task>/high", "eval/families/acc")
"Names that are in one of those."
TABLES = ("samples", "eval/results")
NAME = re.compile(r"[\w .:-]{1,128}")


def workspace(entity: str, project: str) -> workspaces.Workspace:
    """The view of all runs of a project: first what must be zero, then what is learned, then what it costs."""
    sections = [
        workspaces.Section(name=TITLES[group], panels=panels(group), is_open=i < 5) for i, group in enumerate(GROUPS)
    ]
    tables: list[Any] = [
        reports.WeavePanelSummaryTable(table_name=name, layout=reports.Layout(w=24, h=12)) for name in TABLES
    ]
    sections.append(workspaces.Section(name="Samples and results", panels=tables, is_open=True))
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="sftkit",
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="step", smoothing_weight=0),
    )


def comparison(entity: str, project: str, runs: Sequence[str]) -> reports.Report:
    """A report of some runs of a project, named by id or name: what differs in their recipes, then every curve.

    Raises:
        ConfigError: a name that no run can have.
    """
    for run in runs:
        if not NAME.fullmatch(run):
            raise ConfigError(f"--report {run!r}: not the id or name of a wandb run (letters, digits, space and ._:-)")
    either = workspaces.Or(workspaces.Metric("ID").isin(list(runs)), workspaces.Metric("Name").isin(list(runs)))

    def grid(found: list[Any]) -> reports.PanelGrid:
        return reports.PanelGrid(runsets=[reports.Runset(name="the runs", filters=either)], panels=found)

    comparer = reports.RunComparer(diff_only="split", layout=reports.Layout(w=24, h=12))
    blocks: list[Any] = [
        reports.P("Names, units and formulas: docs/metrics.md of sftkit."),
        reports.H1("What differs"),
        grid([comparer]),
    ]
    for group in GROUPS:
        blocks += [reports.H1(TITLES[group]), grid(panels(group))]
    blocks += [reports.H1("Samples and results")]
    blocks += [
        grid([reports.WeavePanelSummaryTable(table_name=name, layout=reports.Layout(w=24, h=12))]) for name in TABLES
    ]
    title = f"sftkit: {' and '.join(runs)}"
    return reports.Report(entity=entity, project=project, title=title[:128], width="fluid", blocks=blocks)


def panels(group: str) -> list[Any]:
    """A number for each name of the group that must stay zero, and a line plot over `step` for every name."""
    found = [metric for metric in METRICS if metric.group == group]
    numbers = [
        reports.ScalarChart(title=metric.name, metric=reports.SummaryMetric(summary_key(metric)))
        for metric in found
        if metric.name in MUST_BE_ZERO
    ]
    return [*numbers, *(plot(metric) for metric in found if metric.name not in ELSEWHERE)]


def plot(metric: Metric) -> reports.LinePlot:
    """The curve of a name, or of all names that a pattern stands for."""
    title = f"{metric.name} ({metric.unit})" if metric.unit != "-" else metric.name
    if not metric.is_pattern:
        return reports.LinePlot(title=title, x="step", title_x="step", y=[metric.name])
    title, names = DRAWN.get(metric.name, (title, f"^{regex(metric)}$"))
    return reports.LinePlot(title=title, x="step", title_x="step", metric_regex=names)


def summary_key(metric: Metric) -> str:
    """Where wandb keeps the value that stands for the run."""
    return metric.name if metric.summary == "last" else f"{metric.name}.{metric.summary}"


def spec(view: workspaces.Workspace | reports.Report) -> dict[str, Any]:
    """What `save` would send, as JSON."""
    return json.loads(view._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def save(view: workspaces.Workspace | reports.Report) -> str:
    """Create it on the server; its address.

    Raises:
        ConfigError: there is no key on this machine, or the server refuses.
    """
    import wandb

    if not (os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False, verify=False)):
        raise ConfigError(
            "there is no wandb key on this machine: run `wandb login`, or look at the spec with --dry-run"
        )
    try:
        view.save()
    except Exception as error:
        where = f"{view.entity}/{view.project}"
        raise ConfigError(f"wandb does not take the dashboard of {where}: {first_line(error)}") from error
    return view.url
