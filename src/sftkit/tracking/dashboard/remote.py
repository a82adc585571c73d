"""The dashboards of a run, wandb and TensorBoard: rows, tables and numbers of proof.json and preflight.json, and how
the run ended.

A separate thread feeds each dashboard, so a service that is stuck delays nothing.
"""

import html
import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sftkit.config.commands import program_path
from sftkit.config.schema import LogConfig
from sftkit.config.terminal import secret_in
from sftkit.errors import ConfigError, DataError
from sftkit.rundir.files import read_object
from sftkit.rundir.names import DOES_NOT_APPLY, EVENT_FILES, PREFLIGHT, PROOF, STATUS
from sftkit.rundir.status import RunStatus, describe_error, first_line, read_status
from sftkit.tracking import names as metric_names

TIMED_OUT = 124
"Exit code of a run that train.max_minutes has ended, as timeout(1) gives it."


@dataclass(frozen=True)
class Ending:
    """The end of training, with its last checkpoint or with an error."""

    state: str
    "finished, stopped (Ctrl-C), preempted (another signal, or the time limit) or failed, as in run_status.json"
    exit_code: int
    "0 for a finished run alone: training that was stopped is not at its end, although its process ends with 0"
    summary: dict[str, Any]
    "run/*, for the table of runs"


def begun(*, resumed: bool) -> dict[str, Any]:
    """Return the values of a run that trains, which stay if it is killed. A resumed run loses its earlier end."""
    return {"run/state": "running", **({"run/signal": "", "run/error": ""} if resumed else {})}


def ending_of(run_dir: Path, status: RunStatus | None, error: BaseException | None) -> Ending:
    """Return how a run ends.

    Args:
        run_dir: with the run_status.json that training has written, if no error ended it.
        status: of this process; None: there is none.
    """
    if error is not None:
        # A rank whose error follows from another's would hide the cause: wandb shows one text.
        causes = [failure for failure in status.failures() if not failure.symptom] if status else []
        text = str(causes[0]) if causes else describe_error(error)
        # The text leaves this machine, and may quote a URL or a setting with a key in it.
        if kind := secret_in(text):
            text = f"{type(error).__name__}: its text holds what looks like {kind}, and is in {STATUS} alone"
        code = 2 if isinstance(error, ConfigError | DataError) else 1
        return Ending("failed", code, {"run/state": "failed", "run/error": text})
    found = read_status(run_dir)
    state = str(found.get("status", "finished"))
    name = found.get("signal")
    summary = {"run/state": state, **({"run/signal": name} if name else {})}
    # As a shell has it: 128 + signal. The process itself ends with 0, since it has saved.
    if state not in ("stopped", "preempted"):
        return Ending(state, 0, summary)
    return Ending(state, 128 + signal.Signals[name] if name else TIMED_OUT, summary)


TABLE_CHARACTERS = 2000
"Maximum length of a text in a table or an alert on a dashboard; the files have all of it."
VERDICTS = {True: "PASS", False: "FAIL", None: "not checked"}
PROOF_COLUMNS = ("check", "verdict", "found", "expected", "how")


@dataclass(frozen=True)
class LoggedTable:
    """Rows of cells, one for each column."""

    name: str
    columns: Sequence[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class RunFile:
    """A file of the run directory."""

    tables: list[LoggedTable] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def proof_of(run_dir: Path) -> RunFile:
    """Return the checks that a run has made of itself, those that failed first, and how many passed."""
    from sftkit.reports.values import applies  # here, as training loads no reports when it starts

    found = read_object(run_dir / PROOF)
    # The sort is stable: within both groups checks keep the order of proof.json.
    checks = sorted(found.get("rows", []), key=lambda check: check.get("ok") is not False)
    if not checks:
        return RunFile()
    results = [check.get("ok") for check in checks if applies(check)]
    verdicts = [VERDICTS[check.get("ok")] if applies(check) else DOES_NOT_APPLY for check in checks]
    rows = [check | {"check": check.get("name"), "verdict": it} for check, it in zip(checks, verdicts, strict=True)]
    names = {"proof/passed": True, "proof/failed": False, "proof/not_checked": None}
    summary = {name: results.count(ok) for name, ok in names.items()}
    return RunFile([record_table("proof", PROOF_COLUMNS, rows)], summary)


def preflight_of(run_dir: Path) -> RunFile:
    """Return the findings about the data before training: sources, layouts, odd rows, warnings."""
    from sftkit.reports import details  # here, as training loads no reports when it starts

    found = read_object(run_dir / PREFLIGHT)
    if not found:
        return RunFile()
    # Both splits are in one table, with a column for the split: wandb joins no tables.
    splits = {"train": found.get("sources", []), "val": found.get("validation", [])}
    sources = [{"split": split, **source} for split, rows in splits.items() for source in rows]
    odd = [source | finding for source in sources for finding in source.get("findings", [])]
    warnings = [{"warning": text} for text in found.get("warnings", [])]
    tables = [
        record_table("preflight/sources", ("split", *details.SOURCES), sources),
        record_table("preflight/layouts", ("own", *details.LAYOUTS), found.get("layouts", [])),
        record_table("preflight/findings", ("split", *details.FINDINGS), odd),
        record_table("preflight/warnings", ("warning",), warnings),
    ]
    # Only this run's layout stands for it; the table has the others for comparison.
    own: Mapping[str, Any] = next((layout for layout in found.get("layouts", []) if layout.get("own")), {})
    values = {
        **{name: sum(source.get(name, 0) for source in splits["train"]) for name in ("documents", "tokens")},
        "target_pct": found.get("target_pct"),
        "duplicate_pct": found.get("duplicate_pct"),
        "padding_pct": own.get("padding_pct"),
        "epochs": (found.get("time") or {}).get("epochs"),
        "estimated_gib": (found.get("memory") or {}).get("estimated_gib"),
        "warnings_count": len(warnings),
    }
    summary = {f"preflight/{name}": value for name, value in values.items() if value is not None}
    return RunFile([each for each in tables if each.rows], summary)


def record_table(name: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> LoggedTable:
    """Return a table of mappings; a cell is empty where one has no such key."""
    return LoggedTable(name, columns, [[shortened(row.get(column)) for column in columns] for row in rows])


def shortened(value: Any) -> Any:
    """Return a text cut to the length of a table cell or an alert; any other value as it is."""
    if isinstance(value, str) and len(value) > TABLE_CHARACTERS:
        return value[: TABLE_CHARACTERS - 1] + "…"
    return value


ALERT_SECONDS = 600.0
"Least time between two alerts of a kind; events.jsonl has all."
KILLED = 255
"""The exit code that wandb's own hooks give a run that Ctrl-C has ended (sdk/lib/exit_hooks.py), and
that it shows as killed."""
SUMMARIES = {"last": None, "min": "min", "max": "max", "mean": "none"}
"How wandb sums a metric up. Its own mean would include the first window, so we set the mean ourselves."
Values = Mapping[str, float | None]


class Wandb:
    """A wandb run. Rows carry their step as a value: wandb's own step never goes back, and would drop them."""

    name = "wandb"

    def __init__(self, run: Any, mode: str) -> None:
        self._run = run
        self._mode = mode
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
        # Slow to import, so imported late.
        import wandb

        self._run.log({"step": step, table.name: wandb.Table(columns=list(table.columns), data=table.rows)})

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set values that stand for the whole run."""
        self._run.summary.update(dict(values))

    def alert(self, title: str, step: int, text: str, level: str) -> None:
        """Send an alert, at most one of a title in ALERT_SECONDS."""
        self._run.alert(title, f"step {step}: {shortened(text)}", level, wait_duration=ALERT_SECONDS)

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


class TensorBoard:
    """TensorBoard's event files in the run directory. Each start writes a file of its own."""

    name = "tensorboard"

    def __init__(self, run_dir: Path, step: int, settings: Mapping[str, Any]) -> None:
        """Begin a file. `step`: that of the checkpoint that is resumed; points of later steps are hidden."""
        # Slow to import, so imported late. Not accelerate's tracker, which cannot hide the steps that are trained
        # again, flushes at every row, and puts settings into a run of their own.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / EVENT_FILES), purge_step=step + 1, flush_secs=10)
        self._step = step
        self._newest: dict[str, int] = {}
        "name -> step of its newest point"
        self._text("settings", f"<pre>{html.escape(json.dumps(settings, indent=1, default=str))}</pre>")

    def _text(self, name: str, text: str) -> None:
        self._writer.add_text(name, text, self._step)

    def row(self, step: int, values: Values) -> None:
        """Write the values that there are. An evaluation repeats some of its step's line, for wandb's axes."""
        self._step = step
        for name, value in values.items():
            if value is not None and self._newest.get(name) != step:
                self._writer.add_scalar(name, value, step)
                self._newest[name] = step

    def table(self, step: int, table: LoggedTable) -> None:
        """Write a table as text, without the rows of earlier steps, which have texts of their own."""
        self._step = step
        rows = [row for row in table.rows if "step" not in table.columns or row[table.columns.index("step")] == step]
        cells = [[html.escape(str(cell)).replace("|", "&#124;").replace("\n", "<br>") for cell in row] for row in rows]
        lines = [table.columns, ["---"] * len(table.columns), *cells]
        self._text(table.name, "\n".join(" | ".join(line) for line in lines))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write values that stand for the whole run as texts."""
        for name, value in values.items():
            self._text(name, html.escape(str(value)))

    def alert(self, title: str, step: int, text: str, level: str) -> None:
        """Write an alert as a text."""
        self._step = step
        self._text(f"alerts/{title}", f"{level}: {html.escape(shortened(text))}")

    def finish(self, ending: Ending) -> None:
        """Write how the run has ended, and close the file."""
        self.summary(ending.summary)
        self._writer.close()

    def abandon(self) -> None:
        """Do nothing: the thread of a writer that is stuck ends with Python."""

    def where(self, *, complete: bool) -> str | None:
        """Return nothing: the files lie in the run directory."""
        return None


Dashboard = Wandb | TensorBoard


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


TAG_CHARACTERS = 64
"wandb takes no longer ones."

ALL_RUNS = "runs"
"The folder of all runs: what lies in it directly is in no chain."


def identity(run_dir: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of wandb.init that identify the run in a directory: name, group (the chain), job_type (the
    stage), tags and notes. wandb's own variables for group, tags and notes come first.

    Args:
        settings: the recipe by its sections, with `resolved` and `environment` (train/assemble.py).
    """
    resolved = settings.get("resolved", {})
    environment = settings.get("environment", {})
    found = (environment.get("device"), *(resolved.get(name) for name in ("topology", "attention", "layout")))
    folder = run_dir.parent.name
    return {
        "name": run_name(run_dir),
        "group": os.environ.get("WANDB_RUN_GROUP") or (folder if folder not in ("", ALL_RUNS) else None),
        "job_type": resolved.get("stage"),
        "tags": tuple(dict.fromkeys(str(tag)[:TAG_CHARACTERS] for tag in (*own_tags(), *found) if tag)),
        "notes": os.environ.get("WANDB_NOTES") or sentence(resolved, environment),
    }


def own_tags() -> list[str]:
    """Return the tags that the user gives in WANDB_TAGS, with commas between them."""
    return [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]


def run_name(run_dir: Path) -> str:
    """Return the name of a run on a dashboard: the last two folders of its directory."""
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
    config: LogConfig, run_dir: Path, run_id: str | None, about: Mapping[str, Any], settings: Mapping[str, Any]
) -> Wandb | None:
    """Start the wandb run; None without one, or, with a warning, where none starts.

    Args:
        run_id: of the run that is continued; None for a new one.
        about: what `identity` returned.
        settings: the run's config on wandb.
    """
    # Offline is tried if online fails, so that a network that is down costs no record.
    modes = dict.fromkeys((wandb_mode(config.wandb), "offline"))
    if "off" in modes:
        return None
    for mode in modes:
        try:
            import wandb

            # 20 s for a start, where wandb itself waits 90; its capture of stdout is off, as it would replace the
            # stream.
            quiet = wandb.Settings(init_timeout=20, console="off", silent=True)
            # "allow" continues the run, or makes it again if it was deleted on the server; "must" would fail then.
            init: dict[str, Any] = {"mode": mode, **about, **({"id": run_id, "resume": "allow"} if run_id else {})}
            run = wandb.init(project=config.project, dir=str(run_dir), settings=quiet, **init)
            run.config.update(dict(settings), allow_val_change=True)
            return Wandb(run, mode)
        except Exception as error:
            log.warning("wandb %s does not start (%s); metrics.jsonl is still written", mode, first_line(error))
    return None


def open_dashboards(
    config: LogConfig, run_dir: Path, step: int, run_id: str | None, settings: Mapping[str, Any]
) -> list[Dashboard]:
    """Start the dashboards of log.tracker, but with a warning those that do not start.

    Args:
        step: of the checkpoint that is resumed; 0 without one.
        run_id, settings: as in `open_dashboard`.
    """
    found: list[Dashboard] = []
    if "wandb" in config.tracker:
        run = open_dashboard(config, run_dir, run_id, identity(run_dir, settings), settings)
        found += [] if run is None else [run]
    if "tensorboard" in config.tracker:
        try:
            found.append(TensorBoard(run_dir, step, settings))
        except Exception as error:
            log.warning("tensorboard does not start (%s); metrics.jsonl is still written", first_line(error))
    return found


class DashboardWriter:
    """Send logged values to a dashboard on a thread of its own. Calls that do not fit its queue are dropped and
    counted."""

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
        # The queue orders them: the ending is set before None is put.
        assert self._ending is not None, "set before the end is put into the queue"
        try:
            self.dashboard.finish(self._ending)
            self._problem = None
        except Exception as error:
            self._problem = first_line(error)

    def finish(self, ending: Ending) -> str | None:
        """End the run, within 30 seconds whatever the dashboard does; return a message for the user, if any."""
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
