"""A wandb report that compares two runs: the speed-up as a number, losses at equal steps, what differs, every curve."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftkit.errors import ConfigError
from sftkit.reports.collect import curves_of, machine_name, read_run
from sftkit.reports.compare import Curves, compare_curves, speed_words
from sftkit.reports.numbers import format_value
from sftkit.rundir.files import read_object
from sftkit.rundir.names import TRAINING_STATE, latest_checkpoint
from sftkit.tracking.dashboard import panels
from sftkit.tracking.dashboard.identity import run_name
from sftkit.tracking.dashboard.remote import first_line
from sftkit.tracking.dashboard.workspace import check_key, panel_of, reports, workspaces

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
        name, folder = run_name(run_dir), latest_checkpoint(run_dir)
        found = read_object(folder / TRAINING_STATE).get("tracker") if folder else None
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
    blocks: list[Any] = [*_numbers(*runs), reports.H1("What differs"), grid([comparer])]
    for section in panels.panel_sections(logged):
        blocks += [reports.H1(section.title), grid([panel_of(panel) for panel in section.panels])]
    blocks.append(reports.P("Names, units and formulas: docs/metrics.md of sftkit."))
    title = f"sftkit: {' and '.join(run.name for run in runs)}"
    return reports.Report(entity=entity, project=project, title=title[:128], width="fluid", blocks=blocks)


def _numbers(first: Compared, second: Compared) -> list[Any]:
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
