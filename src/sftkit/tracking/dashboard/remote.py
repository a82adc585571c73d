"""The dashboard of a run, wandb or trackio: the name, group, tags and notes by which the run is found there, and a
thread that feeds it, so that a dashboard that is stuck delays nothing.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from sftkit.config.commands import install
from sftkit.config.schema import LogConfig
from sftkit.errors import ConfigError
from sftkit.tracking.dashboard.services import Dashboard, Ending, RunFile, Trackio, Wandb

TAG_CHARACTERS = 64
"wandb takes no longer ones."

ALL_RUNS = "runs"
"The folder of all runs: what lies in it directly is in no chain."


@dataclass(frozen=True)
class Identity:
    """Identity of a run on wandb and trackio, set when it starts."""

    name: str
    group: str | None
    "of the chain: its stages have it in common"
    job_type: str | None
    "the stage"
    tags: tuple[str, ...]
    notes: str
    settings: Mapping[str, Any]
    "the recipe by its sections, with `resolved` and `environment`: train/assemble.py"


def identity(run_dir: Path, settings: Mapping[str, Any]) -> Identity:
    """Return the identity of the run in a directory; wandb's own variables for group, tags and notes come first."""
    resolved = settings.get("resolved", {})
    environment = settings.get("environment", {})
    found = (environment.get("device"), *(resolved.get(name) for name in ("topology", "attention", "layout")))
    folder = run_dir.parent.name
    own = os.environ.get("WANDB_TAGS", "").split(",")
    tags = dict.fromkeys(str(tag)[:TAG_CHARACTERS] for tag in (*own, *found) if tag)
    return Identity(
        name=run_name(run_dir),
        group=os.environ.get("WANDB_RUN_GROUP") or (folder if folder not in ("", ALL_RUNS) else None),
        job_type=resolved.get("stage"),
        tags=tuple(tags),
        notes=os.environ.get("WANDB_NOTES") or sentence(resolved, environment),
        settings=settings,
    )


def run_name(run_dir: Path) -> str:
    """Return what a run is called on a dashboard: the last two folders of its directory."""
    return "-".join(run_dir.parts[-2:])


def sentence(resolved: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Return model, data and machine in a sentence; empty where they are not known."""
    if not resolved:
        return ""
    where = f"{environment.get('world_size', 1)} x {environment.get('device', 'unknown device')}"
    return (
        f"{resolved['model_type']} with {resolved['parameters'] / 1e6:,.1f} M parameters on "
        f"{', '.join(resolved['sources'])} ({resolved['documents']:,} documents, {resolved['tokens']:,} tokens), "
        f"{resolved['layout']} rows of up to {resolved['row_length']:,} tokens, {resolved['attention']} attention, "
        f"{resolved['optimizer']}, {where}, commit {environment.get('git') or 'unknown'}"
    )


log = logging.getLogger(__name__)
FINISH_SECONDS = 30.0
"Time that a dashboard has at the end, for all that waits in the queue."
QUEUE_ROWS = 1000
"Length of the queue."
DashboardCall = Callable[[Dashboard], None]
"Sends something, on the thread of the dashboard."


def dashboard_name(config: LogConfig) -> str | None:
    """Return "wandb", "trackio" or None: what log.tracker and log.wandb ask for.

    Raises:
        ConfigError: a dashboard is asked for by name and its package is not installed.
    """
    if config.tracker == "none" or (config.tracker != "trackio" and config.wandb == "off"):
        return None
    if find_spec(config.tracker or "wandb"):
        return config.tracker or "wandb"
    if config.tracker is None:
        return None
    raise ConfigError(
        f"log.tracker={config.tracker}: the package {config.tracker} is not installed here; "
        f"{install('sftkit[trackio]' if config.tracker == 'trackio' else 'wandb')}, or set log.tracker=none "
        "(metrics.jsonl and report.html need no package)"
    )


def wandb_mode(setting: str | None) -> str:
    """Return "online", "offline" or "off": the setting, or online where wandb finds a key and offline where not."""
    if setting is not None:
        return setting
    # wandb's own variable, which people set to keep it offline or away.
    modes = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}
    if mode := modes.get(os.environ.get("WANDB_MODE", "")):
        return mode
    try:
        import wandb

        if os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False, verify=False):
            return "online"
    except Exception as error:
        log.warning("wandb does not log in (%s): offline", first_line(error))
    return "offline"


def open_dashboard(
    config: LogConfig, run_dir: Path, run_id: str | None, about: Identity, accelerator: Accelerator
) -> Dashboard | None:
    """Start the dashboard of this run, through Accelerate; None without one, or, with a warning, where none starts.

    Args:
        run_id: of the run that is continued; None for a new one.
    """
    name = dashboard_name(config)
    if name is None:
        return None
    # Offline is tried if online fails, so that a network that is down costs no record.
    modes = ["local"] if name == "trackio" else list(dict.fromkeys((wandb_mode(config.wandb), "offline")))
    if modes[0] == "off":
        return None
    start = _start_trackio if name == "trackio" else _start_wandb
    for mode in modes:
        try:
            return start(config.project, run_dir, run_id, about, accelerator, mode)
        except Exception as error:
            log.warning("%s %s does not start (%s); metrics.jsonl is still written", name, mode, first_line(error))
    return None


def _start_wandb(
    project: str, run_dir: Path, run_id: str | None, about: Identity, accelerator: Accelerator, mode: str
) -> Dashboard:
    """Start wandb through Accelerate."""
    import wandb

    # 20 s for a start, where wandb itself waits 90; its capture of stdout is off, as it would replace the stream that
    # the live bar draws on.
    quiet = wandb.Settings(init_timeout=20, console="off", silent=True)
    init: dict[str, Any] = {"mode": mode, "dir": str(run_dir), "name": about.name, "settings": quiet}
    init |= {"group": about.group, "job_type": about.job_type, "tags": about.tags, "notes": about.notes}
    # "allow" continues the run, or makes it again if it was deleted on the server; "must" would fail then.
    init |= {"id": run_id, "resume": "allow"} if run_id else {}
    accelerator.trackers.clear()  # one that failed to start before would be started again
    accelerator.init_trackers(project, dict(about.settings), {"wandb": init})
    return Wandb(accelerator.get_tracker("wandb", unwrap=True), mode)


def _start_trackio(
    project: str, _: Path, run_id: str | None, about: Identity, accelerator: Accelerator, _mode: str
) -> Dashboard:
    """Start trackio through Accelerate."""
    init: dict[str, Any] = {"name": about.name, "group": about.group, "config": dict(about.settings)}
    # "never" keeps a new run from being appended to an earlier one of the same name; no widget, and no threads that
    # log the hardware.
    init |= {"resume": "allow" if run_id else "never", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    with redirect_stdout(io.StringIO()):  # it prints nine lines at its start
        accelerator.trackers.clear()
        accelerator.init_trackers(project, {}, {"trackio": init})
        return Trackio(accelerator.get_tracker("trackio", unwrap=True), project)


class DashboardWriter:
    """Sends what is logged to a dashboard on a thread of its own; what does not fit its
    queue is dropped and counted."""

    def __init__(self, dashboard: Dashboard) -> None:
        """Start the thread."""
        self.dashboard = dashboard
        self.dropped = 0
        "rows, tables and alerts that the dashboard did not get"
        # Holds until the thread says otherwise: a thread that is stuck can report nothing.
        self._problem: str | None = "no answer in time"
        self._ending: Ending | None = None
        self._calls: queue.Queue[DashboardCall | None] = queue.Queue(QUEUE_ROWS)
        # A daemon: a service that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"{dashboard.name} remote logger", daemon=True)
        self._thread.start()

    def record(self, step: int, read: Callable[[], RunFile]) -> None:
        """Send a file of the run directory, read when its turn comes: its tables, and its values for the whole run."""

        def send(dashboard: Dashboard) -> None:
            found = read()
            for table in found.tables:
                dashboard.table(step, table)
            if found.summary:
                dashboard.summary(found.summary)

        self.put(send)

    def put(self, call: DashboardCall) -> None:
        """Put a call into the queue, or count it as lost if the queue is full."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._lose(f"has not answered for {QUEUE_ROWS} rows")

    def _lose(self, reason: str) -> None:
        """Count a call that did not get there; warn of the first."""
        if self.dropped == 0:
            log.warning("%s %s; metrics.jsonl is still written", self.dashboard.name, reason)
        self.dropped += 1

    def _work(self) -> None:
        """Make the calls until the end comes, then finish the run."""
        while (call := self._calls.get()) is not None:
            try:
                call(self.dashboard)
            except Exception as error:
                self._lose(f"does not take a row ({first_line(error)})")
        # The queue orders them: whoever puts None has set the ending before.
        assert self._ending is not None, "set before the end is put into the queue"
        try:
            self.dashboard.finish(self._ending)
            self._problem = None
        except Exception as error:
            self._problem = first_line(error)

    def finish(self, ending: Ending) -> str | None:
        """End the run, within 30 seconds whatever the dashboard does; return what the person should be told."""
        self._ending = ending
        # One deadline for both waits below: for room in the queue, and for the thread.
        end = time.monotonic() + FINISH_SECONDS
        with suppress(queue.Full):  # it has been stuck for long, and will not take an end either
            self._calls.put(None, timeout=FINISH_SECONDS)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._problem is not None:
            self.dropped += self._calls.qsize()  # the end in the queue counts for the row that the thread is stuck with
            log.warning("%s does not finish: %s", self.dashboard.name, self._problem)
            self.dashboard.abandon()
        lost = f"{self.dropped} rows were not sent; metrics.jsonl has all" if self.dropped else None
        said = [lost, self.dashboard.where(complete=self._problem is None and not self.dropped)]
        return "; ".join(part for part in said if part) or None


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line; its type if it says nothing."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
