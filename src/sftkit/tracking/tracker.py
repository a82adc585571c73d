"""Write metrics.jsonl, the record of a run, and copy it to the console and the dashboards. Only rank 0 writes, and
nothing that fails here fails training."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from sftkit.config.schema import LogConfig
from sftkit.config.terminal import Level
from sftkit.errors import CheckpointError, NonFiniteError, RecompileError, ReplicaError, SpikeError, hint
from sftkit.rundir.files import append_all_or_nothing, drop_evals_after, drop_rows_after, read_metric_rows, read_results
from sftkit.rundir.names import EVALS, EVALUATIONS, EVENTS, METRICS_FILE, RESULTS, SAMPLES, evaluation_dir
from sftkit.rundir.status import first_line
from sftkit.runtime.start import Runtime

if TYPE_CHECKING:
    from sftkit.tracking.dashboard import remote

log = logging.getLogger(__name__)
CompileEvent = Literal["recompile", "graph_break", "cuda_graph", "hook"]
CheckpointEvent = Literal["checkpoint_failed", "checkpoint_fallback"]
EventKind = Literal[CompileEvent, CheckpointEvent, "nonfinite", "spike", "replicas", "starvation"]
ALERTS: dict[EventKind, tuple[str, str]] = {
    "recompile": ("recompile after the warm-up", "WARN"),
    "graph_break": ("graph break", "WARN"),
    "cuda_graph": ("CUDA graphs recorded after the warm-up", "WARN"),
    "hook": ("hooks that the step does not run", "WARN"),
    "nonfinite": ("loss or gradient norm not finite", "ERROR"),
    "spike": ("spike of loss or gradient norm", "WARN"),
    "replicas": ("ranks hold different weights", "ERROR"),
    "checkpoint_failed": ("checkpoint not written", "ERROR"),
    "checkpoint_fallback": ("resumed from an older checkpoint", "WARN"),
    "starvation": ("training waits for data", "WARN"),
}
"Kind of event -> (title, level) of the alert on the dashboard."
_LEVELS: dict[str, Level] = {"WARN": "warning", "ERROR": "error"}
"Level of an alert -> that of its line on the console."
ENDS: dict[type[BaseException], EventKind] = {
    NonFiniteError: "nonfinite",
    SpikeError: "spike",
    ReplicaError: "replicas",
    RecompileError: "recompile",
    CheckpointError: "checkpoint_failed",
}
"Error that ends training -> its kind of event."
STARVED_PCT = 20.0
STARVED_LINES = 3
"Training is starved of data if it waits for more than STARVED_PCT of the time in this many logged lines in a row."
SAMPLE_COLUMNS = ("step", "prompt", "reference", "answer", "stop")
RESULT_COLUMNS = ("step", "task", "metric", "value", "low", "high", "chance", "examples")
TABLE_ROWS = 1000
"Maximum number of rows in a table on the dashboard, the newest; samples.jsonl has all."
CONSOLE_VALUES = 8
"The console line of an evaluation with more values has the means, and each task's main value."
GAP = "  "


@dataclass(eq=False)
class Tracker:
    """Writes a line per logged step, evaluation and event to file, console and dashboards; nothing before `open`."""

    run_dir: Path
    config: LogConfig
    rt: Runtime
    settings: dict[str, Any]
    "for the dashboards: the recipe, and what was resolved (train/assemble.py)"
    _: KW_ONLY
    step: int = 0
    "that of the checkpoint that is resumed: later rows are dropped; then the newest step"
    run_id: str | None = None
    "id of the run on wandb, on the main rank; None without one. A run with this id is continued"

    def __post_init__(self) -> None:
        """Begin without anything written."""
        self._dashboards: list[remote.DashboardWriter] = []
        self._lines = self._starved_lines = 0
        self._told: set[tuple[EventKind, str]] = set()
        self._unwritten_events: list[dict[str, Any]] = []
        self._is_open = False

    def open(self) -> Tracker:
        """Begin to write, once the run has done a step: before, the files may be those of an earlier run."""
        self._is_open = True
        if not self.rt.is_main:
            return self
        run_dir = self.run_dir
        step = self.step
        # Lines after the checkpoint are of steps that are now trained again. Doing it here, not when the run starts,
        # keeps them if the warm-up fails.
        for name in (METRICS_FILE, EVALS, SAMPLES):
            drop_rows_after(run_dir / name, step)
        drop_evals_after(run_dir / EVALUATIONS, step)
        drop_rows_after(run_dir / EVENTS, sys.maxsize)  # all events stay: only a broken line is dropped
        with suppress(OSError):
            (run_dir / METRICS_FILE).touch()  # the mark of a run that has done a step
        if not self.config.tracker:
            return self
        from sftkit.tracking.dashboard import remote

        state = remote.begun(resumed=self.run_id is not None)
        for dashboard in remote.open_dashboards(self.config, run_dir, step, self.run_id, self.settings):
            if isinstance(dashboard, remote.Wandb):
                self.run_id = dashboard.run_id
            writer = remote.DashboardWriter(dashboard)
            # Before the first row: if this process is killed, "running" stays, which says that no end was reported.
            writer.put(lambda service: service.summary(state))
            writer.record(step, partial(remote.preflight_of, run_dir))
            writer.record(step, partial(remote.proof_of, run_dir))
            self._dashboards.append(writer)
        return self

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # An error that ends training comes through no `event`: here it gets to events.jsonl and becomes an alert.
        for ended_by, event in ENDS.items():
            if self._is_open and isinstance(error, ended_by):
                self.record_event(event, self.step, first_line(error))  # the console has the whole error
        self._write_events()
        for writer in self._dashboards:
            from sftkit.tracking.dashboard import remote

            writer.record(self.step, partial(remote.proof_of, self.run_dir))  # with its final checks
            # Last, as it may wait for half a minute; every file is written by then.
            if said := writer.finish(remote.ending_of(self.run_dir, self.rt.status, error)):
                self.rt.print(f"{writer.dashboard.name}: {said}")

    def advance(self, step: int) -> None:
        """Take a step that has been launched."""
        self.step = step

    def log_metrics(self, step: int, total_steps: int, values: dict[str, float | None]) -> None:
        """Log one line of training; an event too if training has waited for data in this one and the two before."""
        self._append(METRICS_FILE, step, values, {})
        self.rt.print(train_line(step, total_steps, values))
        # One slow window is noise (a checkpoint that fills the disk's cache, say), so several in a row are asked for.
        wait = values["perf/data_wait_pct"] or 0.0
        self._lines += 1
        starved = self._lines > 1 and wait > STARVED_PCT  # the first line of a start has workers that are starting
        self._starved_lines = self._starved_lines + 1 if starved else 0
        if self._starved_lines == STARVED_LINES:
            self.event("starvation", step, hint("waiting for data", wait=wait, most=STARVED_PCT, lines=STARVED_LINES))

    def log_evals(
        self,
        step: int,
        values: dict[str, float | None],
        samples: Sequence[Mapping[str, Any]],
        axes: Mapping[str, float | None] | None = None,
    ) -> None:
        """Log one evaluation.

        Args:
            values: val/* and eval/*, for evals.jsonl. Intervals and chance of tasks are in
                evals/step-NNNNNN/results.json.
            samples: prompt, reference, answer and stop of each sample, for samples.jsonl.
            axes: what the dashboard can draw the values over, next to `step`; metrics.jsonl has them of its own lines.
        """
        if not self.rt.is_main:
            return
        results = read_results(evaluation_dir(self.run_dir, step) / RESULTS)
        if values:
            self._append(EVALS, step, values, axes or {})
            shown = f" {eval_line(values, results)}"
            if self.settings.get("adapters"):
                from sftkit.reports import collect  # here, as training loads no reports when it starts

                rows = collect.newest_adapter_rows(self.run_dir)
                names, cells = collect.adapter_table(rows)
                shown = f"\n{aligned([names, *cells])}" if rows else shown
                self._table(step, "adapters", names, rows)
            self.rt.print(f"  evaluation at step {step}:{shown}")
        if samples:
            self._write(SAMPLES, [{"step": step, **sample} for sample in samples])
            # The whole table is sent each time: a dashboard shows the newest table only.
            newest = read_metric_rows(self.run_dir / SAMPLES)[-TABLE_ROWS:]
            columns = (*SAMPLE_COLUMNS, *(["adapter"] if "adapter" in samples[0] else []))
            self._table(step, "samples", columns, newest)
        if results:
            self._table(step, "eval/results", RESULT_COLUMNS, [{"step": step, **result} for result in results])

    def event(self, kind: EventKind, step: int, text: str) -> None:
        """Report what a person should know at once: console, events.jsonl, an alert (one of a kind in ten minutes)."""
        self.rt.print(f"step {step}: {text}" if not text.startswith("step ") else text, _LEVELS[ALERTS[kind][1]])
        self.record_event(kind, step, text)

    def new_events(self, kind: EventKind, step: int, texts: Sequence[str]) -> None:
        """Report those texts that were not reported yet, each once; `texts`: all so far."""
        for text in texts:
            if (kind, text) not in self._told:
                self._told.add((kind, text))
                self.event(kind, step, text)

    def record_event(self, kind: EventKind, step: int, text: str) -> None:
        """Write an event that the console has already to events.jsonl, and send an alert."""
        if not self.rt.is_main:
            return
        self._unwritten_events.append({"step": step, "time": round(time.time(), 3), "kind": kind, "text": text})
        self._write_events()
        title, level = ALERTS[kind]
        self._send(lambda service: service.alert(title, step, text, level))

    def _send(self, call: remote.DashboardCall) -> None:
        for writer in self._dashboards:
            writer.put(call)

    def _write_events(self) -> None:
        """Write the events; those that a full disk did not take stay in the queue."""
        if self._unwritten_events and self._write(EVENTS, self._unwritten_events, "wait for room"):
            self._unwritten_events = []

    def _write(self, name: str, rows: Sequence[Mapping[str, Any]], otherwise: str = "are lost") -> bool:
        """Append lines, whole or not at all. A full disk costs the lines, not the run, whose checkpoint may find room.
        Nothing is written to a directory that is no longer this run's."""
        if not self.rt.owns(self.run_dir):
            return False
        try:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            append_all_or_nothing(self.run_dir / name, text)
        except OSError as error:
            log.warning("%s: %d lines %s (%s)", self.run_dir / name, len(rows), otherwise, first_line(error))
            return False
        return True

    def _append(self, name: str, step: int, values: dict[str, float | None], axes: Mapping[str, Any]) -> None:
        """Append a line to a file; the dashboards get it with `axes`."""
        if not self.rt.is_main:
            return
        # The disk has room again: events that waited are written now.
        if self._write(name, [{"step": step, "time": round(time.time(), 3), **values}]):
            self._write_events()
        row = {**axes, **values}
        self._send(lambda service: service.row(step, row))

    def _table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """Send a table to the dashboards."""
        if not self._dashboards:
            return
        from sftkit.tracking.dashboard.remote import record_table

        self._send(lambda service: service.table(step, record_table(name, columns, rows)))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts for the console, the first row as its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(f"  {GAP.join(map(str.ljust, row, widths))}".rstrip() for row in rows)


def train_line(step: int, total_steps: int, values: dict[str, float | None]) -> str:
    """Return the aligned console line; of several adapters, whose learning rates differ, a second with their losses."""
    mfu = values.get("perf/mfu")
    of_each = {name.removeprefix("train/loss/"): v for name, v in values.items() if name.startswith("train/loss/")}
    left = timedelta(seconds=round((total_steps - step) * (values["perf/step_seconds"] or 0.0)))
    columns = (
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {_number(values['train/loss'], '7.4f')}",
        f"grad {_number(values['train/grad_norm'], '7.3f')}",
        "" if of_each else f"lr {values['train/lr']:.2e}",
        f"{values['perf/tok_per_sec']:>9,.0f} tok/s",
        f"mfu {100 * mfu:4.1f}%" if mfu is not None else "",  # unknown on hardware whose peak is
        f"{values['perf/step_seconds']:7.3f} s/step",
        f"wait {values['perf/data_wait_pct']:4.1f}%",
        f"pad {values['data/padding_pct']:4.1f}%",
        f"mem {_number(values['mem/peak_gib'], '5.1f')} GiB",
        f"graphs {values['compile/graphs']:.0f}+{values['compile/recompiles']:.0f}",
        f"eta {left}",
    )
    losses = GAP.join(f"{name} {_number(loss, '6.4f')}" for name, loss in of_each.items())
    return GAP.join(filter(None, columns)) + (f"\n  loss of each: {losses}" if losses else "")


def eval_line(values: Mapping[str, float | None], results: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return an evaluation on one line: all values if they are few, else each task's main value
    and the means over several."""
    shown = {name: value for name, value in values.items() if not name.endswith(("/low", "/high"))}
    # A suite has dozens of values (metrics, families, bounds): one line cannot hold them, and evals.jsonl has all.
    if results or len(shown) > CONSOLE_VALUES:
        means = ("val/loss", "val/bpb", *(("eval/centred_mean",) if len(results) != 1 else ()))
        of_adapters = {
            name: value
            for name, value in shown.items()
            if name.count("/") == 2 and name.endswith(("/loss", "/centred_mean"))
        }
        shown = {name: shown[name] for name in means if name in shown} or of_adapters
        tasks = [result["task"] for result in results]
        for task, result in zip(tasks, results, strict=True):
            name = f"eval/{task}/{result['metric']}" if tasks.count(task) > 1 else f"eval/{task}"
            shown[name] = result["value"]
    named = ((name.removeprefix("val/").removeprefix("eval/"), value) for name, value in shown.items())
    return GAP.join(f"{name} {value:.3f}" for name, value in named if value is not None)


def _number(value: float | None, form: str) -> str:
    """Return the number as text, or a dash of the same width where there is none."""
    return format(value, form) if value is not None else "-".rjust(int(form.partition(".")[0]))
