"""The services that show a run while it trains, wandb and trackio, behind the few things that both can do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from sftkit.config.commands import program_path
from sftkit.tracking import names as metric_names
from sftkit.tracking.dashboard.ending import Ending
from sftkit.tracking.dashboard.records import LoggedTable

ALERT_SECONDS = 600.0
"Least time between two alerts of a kind; events.jsonl has all."
KILLED = 255
"""The exit code that wandb's own hooks give a run that Ctrl-C has ended (sdk/lib/exit_hooks.py), and
that it shows as killed."""
SUMMARIES = {"last": None, "min": "min", "max": "max", "mean": "none"}
"How wandb sums a metric up. Its own mean would include the first window, so we set the mean ourselves."
Values = Mapping[str, float | None]


class Dashboard(Protocol):
    """A service that shows a run. Its methods are called on one thread and may raise, or never return."""

    name: str
    run_id: str

    def row(self, step: int, values: Values) -> None:
        """Add the values of a step."""

    def table(self, step: int, table: LoggedTable) -> None:
        """Add a table of a step."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set values that stand for the whole run, beside those that follow from its rows."""

    def alert(self, title: str, step: int, text: str, level: str) -> None:
        """Tell a person of an event. `level`: INFO, WARN or ERROR."""

    def finish(self, ending: Ending) -> None:
        """Send what is left, with how the run has ended."""

    def abandon(self) -> None:
        """Give up a service that does not finish, so that the process can end."""

    def where(self, *, complete: bool) -> str | None:
        """Return what the person must do to see the run, if anything."""


class Wandb:
    """A wandb run. Rows carry their step as a value: wandb's own step never goes back, and would drop them."""

    name = "wandb"

    def __init__(self, run: Any, mode: str) -> None:
        self._run, self._mode = run, mode
        self.run_id = str(run.id)
        self.folder = Path(run.dir).parent
        self._defined: set[str] = set()
        self._means = Means()
        # Found while it is alive and well: later, when it is to be killed, wandb may no longer answer.
        # Found by name, as others do (wandb/wandb#4929): wandb has no public handle of the process that it starts.
        self._service = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
        # wandb's own step only grows and drops rows below it, as after a resume from an
        # earlier checkpoint (wandb/wandb#4482).
        run.define_metric("*", step_metric="step")

    def row(self, step: int, values: Values) -> None:
        """Log the values that there are, with the means of the run so far."""
        found = {name: value for name, value in values.items() if value is not None}
        for name in [name for name in found if name not in self._defined]:
            self._run.define_metric(name, step_metric="step", summary=SUMMARIES[metric_names.summary_of(name)])
            self._defined.add(name)
        self._run.log({"step": step, **found})
        if means := self._means.add(found):
            self._run.summary.update({name: {"mean": value} for name, value in means.items()})

    def table(self, step: int, table: LoggedTable) -> None:
        """Log a table."""
        # Imported late, as it is slow to import.
        import wandb

        self._run.log({"step": step, table.name: wandb.Table(columns=list(table.columns), data=table.rows)})

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set values that stand for the whole run."""
        self._run.summary.update(dict(values))

    def alert(self, title: str, step: int, text: str, level: str) -> None:
        """Send an alert, at most one of a title in ALERT_SECONDS."""
        self._run.alert(title, f"step {step}: {text}", level, wait_duration=ALERT_SECONDS)

    def finish(self, ending: Ending) -> None:
        """Send the summary and the exit code that says how the run has ended."""
        self._run.summary.update(ending.summary)
        # Before finish, which tells wandb how the run ended.
        if ending.state == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=KILLED if ending.state == "stopped" else ending.exit_code)

    def abandon(self) -> None:
        """Kill wandb's own process: when Python ends, wandb would wait for it, for ever if it is stuck."""
        # wandb.finish can wait for ever although all was sent (wandb/wandb#4929); what is on disk can be synced later.
        for process in self._service:
            with suppress(psutil.Error):
                process.kill()

    def where(self, *, complete: bool) -> str | None:
        """Return how to upload a run that was kept on disk; None: it is online and complete."""
        if complete and self._mode == "online":
            return None
        return f"the run is kept on disk; to upload it:\n  {program_path('wandb')} sync {self.folder}"


class Means:
    """Means over the logged lines of a start.

    The first line is left out where there are others: its window holds one-time costs (allocator,
    first launches of kernels).
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}
        "name -> (lines in the mean, mean)"

    def add(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the means so far of the names that have one, after a row more."""
        found = {}
        for name in values:
            if metric_names.summary_of(name) != "mean":
                continue
            # Counts start at -1: the first line stands in as the mean until the second one takes its place.
            count, mean = self._seen.get(name, (-1, 0.0))
            mean = values[name] if count < 1 else mean + (values[name] - mean) / (count + 1)
            self._seen[name] = count + 1, mean
            found[name] = mean
        return found


class Trackio:
    """A trackio run in the SQLite file of this machine. It has no summary: the newest row stands for a run."""

    name = "trackio"

    def __init__(self, run: Any, project: str) -> None:
        self._run, self._project = run, project
        self.run_id = str(run.name)
        self._alerted: dict[str, float] = {}

    def row(self, step: int, values: Values) -> None:
        """Log the values that there are."""
        self._run.log({name: value for name, value in values.items() if value is not None}, step=step)

    def table(self, step: int, table: LoggedTable) -> None:
        """Log a table."""
        import trackio

        self._run.log({table.name: trackio.Table(columns=list(table.columns), data=table.rows)}, step=step)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Do nothing: trackio has no such values."""

    def alert(self, title: str, step: int, text: str, level: str) -> None:
        """Send an alert, at most one of a title in ALERT_SECONDS."""
        from trackio import AlertLevel

        # trackio has no least time between alerts, so it is kept here.
        now = time.monotonic()
        if now - self._alerted.get(title, -ALERT_SECONDS) >= ALERT_SECONDS:
            self._alerted[title] = now
            self._run.alert(title, text, AlertLevel[level], step=step)

    def finish(self, ending: Ending) -> None:
        """Send what is left."""
        self._run.finish()

    def abandon(self) -> None:
        """Do nothing: its threads are daemons, so nothing keeps the process alive."""

    def where(self, *, complete: bool) -> str | None:
        """Return the command that shows the run."""
        return f"see the run with `{program_path('trackio')} show --project {self._project}`"
