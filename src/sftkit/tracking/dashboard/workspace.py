"""The project's wandb workspace as code. Only `save_view` asks a server."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sftkit.config.commands import install, program_path
from sftkit.errors import ConfigError
from sftkit.reports.collect import check_run
from sftkit.rundir.names import EVALS, EVALUATIONS, METRICS_FILE, RESULTS, SAMPLES, STEP_DIRS, VALIDATION, is_archived
from sftkit.tracking.dashboard import panels
from sftkit.tracking.dashboard.panels import LinePlot, Number, Panel, Section, Shown
from sftkit.tracking.dashboard.records import preflight_of, proof_of
from sftkit.tracking.dashboard.remote import first_line
from sftkit.tracking.names import RUN_VALUES, TABLES
from sftkit.tracking.rows import read_metric_rows

try:
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces
except ImportError as error:
    raise ConfigError(f"make_dashboard.py needs wandb-workspaces: {install('sftkit[dashboard]')}") from error

_COLUMNS = (
    *("run/state", "train/loss", "val/loss", "val/bpb", "eval/centred_mean", "perf/tok_per_sec", "perf/step_seconds"),
    *("perf/mfu", "mem/peak_gib", "proof/failed", "compile/recompiles"),
)
"Columns of the table of runs, beside name and state."


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
            layout_settings=layout(section),
        )
        for section in panels.panel_sections(logged)
    ]
    columns = [f"summary:{panels.value_of_run(name)}" for name in _COLUMNS if panels.has(name, logged)]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="sftkit",
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="step", smoothing_weight=0),
        runset_settings=workspaces.RunsetSettings(pinned_columns=["run:displayName", "run:state", *columns]),
    )


def layout(section: Section) -> workspaces.SectionLayoutSettings:
    """Return how many panels of a section stand side by side and one above the other."""
    columns, rows = (len(section.panels), 1) if section.one_row else (3, 2)
    return workspaces.SectionLayoutSettings(columns=columns, rows=rows)


def panel_of(panel: Panel) -> Any:
    """Return a panel as wandb draws it."""
    match panel:
        case Number((name,), title):
            return reports.ScalarChart(title=title, metric=reports.SummaryMetric(panels.value_of_run(name)))
        case Shown((name,)):
            return reports.WeavePanelSummaryTable(table_name=name, layout=reports.Layout(w=24, h=12))
        # A pattern goes as a regular expression, so that names which appear later (a new source) are drawn too.
        case LinePlot((name,), title, x) if panels.is_pattern(name):
            return reports.LinePlot(title=title, x=x, title_x=x, metric_regex=panels.expression(name))
        case LinePlot(names, title, x):
            return reports.LinePlot(title=title, x=x, title_x=x, y=list(names))


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
    validated = any(Path("runs/validate").glob(f"*/{VALIDATION}"))
    return logged_by(run_dir) | {name for name in (*RUN_VALUES, *TABLES) if validated and name.startswith("validate/")}


def newest_on_wandb(root: Path) -> Path | None:
    """Return the run directory with the newest wandb run in it: those of a validation, which are many, have none."""
    # By wandb's own folders, not by metrics.jsonl: the panels are for runs that it has.
    found = [path for path in root.glob("**/wandb/*run-*") if (path.parents[1] / METRICS_FILE).is_file()]
    kept = [path for path in found if not is_archived(path)]
    return max(kept, key=lambda path: path.stat().st_mtime).parents[1] if kept else None


def logged_by(run_dir: Path) -> set[str]:
    """Return the names that a run has on a dashboard, from its own files: what is in a row and not null,
    tables, values of the run."""
    found = {"run/state"}
    for name in (METRICS_FILE, EVALS):
        found |= {key for row in read_metric_rows(run_dir / name) for key, value in row.items() if value is not None}
    for record in (proof_of(run_dir), preflight_of(run_dir)):
        found |= {table.name for table in record.tables} | record.summary.keys()
    found |= {"samples"} if read_metric_rows(run_dir / SAMPLES) else set()
    return found | ({"eval/results"} if any(run_dir.glob(f"{EVALUATIONS}/{STEP_DIRS}/{RESULTS}")) else set())


def spec(view: workspaces.Workspace | reports.Report) -> dict[str, Any]:
    """Return what `save_view` would send, as JSON."""
    # Private: the library has no public way to see a spec without sending it.
    return json.loads(view._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def save_view(view: workspaces.Workspace | reports.Report) -> str:
    """Create the workspace or report on the server and return its address.

    Raises:
        ConfigError: there is no key on this machine, or the server refuses.
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
    """Refuse to go on where there is no wandb key on this machine.

    Raises:
        ConfigError: there is none.
    """
    import wandb

    if not (os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False, verify=False)):
        raise ConfigError(
            f"there is no wandb key on this machine: run `{program_path('wandb')} login`, or look at the spec with "
            "--dry-run"
        )
