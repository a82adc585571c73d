"""metrics.jsonl is the record; the console and wandb mirror it. Rank 0 only, and never an error into training."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sftkit.config import LogConfig
from sftkit.runtime import Runtime

log = logging.getLogger(__name__)
FINISH_SECONDS = 30.0


def wandb_mode(setting: str | None) -> str:
    """online, offline or off: the setting, or online where wandb finds a key, offline where not, off without wandb."""
    if setting is not None:
        return setting
    try:
        import wandb
    except ImportError:
        return "off"
    mode = os.environ.get("WANDB_MODE")
    if mode in ("online", "offline"):
        return mode
    if mode in ("disabled", "dryrun"):
        return "off" if mode == "disabled" else "offline"
    try:
        has_key = bool(os.environ.get("WANDB_API_KEY")) or wandb.login(prompt=False, verify=False)
    except Exception as error:
        log.warning("wandb does not log in (%s): offline", first_line(error))
        has_key = False
    return "online" if has_key else "offline"


class Tracker:
    """Writes one line per logged step: file, console, wandb."""

    def __init__(
        self,
        run_dir: Path,
        logging_config: LogConfig,
        rt: Runtime,
        config: dict[str, Any],
        first_step: int = 0,
        run_id: str | None = None,
    ) -> None:
        """`first_step`, `run_id`: of the checkpoint that is resumed: rows after it go, the wandb run is continued."""
        self._rt, self._run_dir = rt, run_dir
        self.run_id = run_id
        "of the wandb run, None without one; on the main rank"
        self._mode = wandb_mode(logging_config.wandb) if rt.is_main else "off"
        self._wandb: Any = None
        self._wandb_dir = run_dir / "wandb"
        self._lost = False  # a call has failed: the record on the server ends there
        self._progress: Progress | None = None
        self._task: Any = None
        if not rt.is_main:
            return
        for name in ("metrics.jsonl", "evals.jsonl", "samples.jsonl"):
            drop_rows_after(run_dir / name, first_step)
        if self._mode != "off":
            self._start_wandb(logging_config.project, config)

    def _start_wandb(self, project: str, config: dict[str, Any]) -> None:
        name = "-".join(self._run_dir.parts[-2:])
        for mode in dict.fromkeys((self._mode, "offline")):
            try:
                import wandb

                settings = wandb.Settings(init_timeout=20, console="off", silent=True)
                init = {"mode": mode, "dir": str(self._run_dir), "name": name, "settings": settings}
                init |= {"id": self.run_id, "resume": "allow"} if self.run_id else {}
                self._rt.accelerator.trackers.clear()  # one that did not start would be started again
                self._rt.accelerator.init_trackers(project, config, {"wandb": init})
                self._wandb = self._rt.accelerator.get_tracker("wandb", unwrap=True)
                self._wandb.define_metric("*", step_metric="step")
                self._wandb_dir, self.run_id = Path(self._wandb.dir).parent, str(self._wandb.id)
                self._mode = mode
                return
            except Exception as error:
                log.warning("wandb %s does not start (%s); metrics.jsonl is kept all the same", mode, first_line(error))
        self._mode = "off"

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._wandb is not None:
            finished = self._finish_wandb(exit_code=0 if kind is None else 1)
            if not finished or self._mode == "offline":
                self._rt.say(f"wandb: the run is kept on disk; upload it with `wandb sync {self._wandb_dir}`")

    def _finish_wandb(self, exit_code: int) -> bool:
        """Whether wandb has ended in time. A server that is down must not hold the process: it is given 30 seconds."""
        problems: list[str] = ["no answer in time"]

        def finish() -> None:
            try:
                self._wandb.finish(exit_code=exit_code)
                problems.clear()
            except Exception as failure:
                problems[:] = [first_line(failure)]

        thread = threading.Thread(target=finish, name="wandb finish", daemon=True)
        thread.start()
        thread.join(FINISH_SECONDS)
        if problems:
            log.warning("wandb does not finish: %s", problems[0])
        return not problems and not self._lost

    def start_progress(self, step: int, total_steps: int) -> None:
        """A live bar with ETA on a terminal; plain lines need nothing."""
        console = Console()
        if not (self._rt.is_main and console.is_terminal):
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._progress.start()
        self._task = self._progress.add_task("training", total=total_steps, completed=step)

    def advance(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """A line for the person watching, above the progress bar where there is one."""
        if self._progress is not None:
            with suppress(OSError, ValueError):  # a terminal that is gone
                self._progress.console.print(text, markup=False, highlight=False)
        else:
            self._rt.say(text)

    def log_metrics(self, step: int, total_steps: int, values: dict[str, float | None]) -> None:
        """One training line."""
        self._append("metrics.jsonl", step, values)
        self.say(train_line(step, total_steps, values))

    def log_evals(self, step: int, values: dict[str, float | None], samples: list[dict[str, Any]]) -> None:
        """One evaluation: metrics, and prompts with answers."""
        if values:
            self._append("evals.jsonl", step, values)
            parts = (
                f"{k.removeprefix('val/').removeprefix('eval/')} {v:.3f}" for k, v in values.items() if v is not None
            )
            self.say(f"  evaluation at step {step}: {'  '.join(parts)}")
        if samples and self._rt.is_main:
            self._write("samples.jsonl", [{"step": step, **sample} for sample in samples])

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Append lines; a full disk costs them, not the run, whose checkpoint may still find room."""
        try:
            with (self._run_dir / name).open("a") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except OSError as error:
            log.warning("%s: %d lines are lost (%s)", self._run_dir / name, len(rows), first_line(error))

    def _append(self, name: str, step: int, values: dict[str, float | None]) -> None:
        if not self._rt.is_main:
            return
        self._write(name, [{"step": step, "time": round(time.time(), 3), **values}])
        if self._wandb is None or self._lost:
            return
        try:
            self._wandb.log({"step": step, **{k: v for k, v in values.items() if v is not None}})
        except Exception as error:
            if not self._lost:
                log.warning("wandb does not take a row (%s); metrics.jsonl is kept all the same", first_line(error))
            self._lost = True


def train_line(step: int, total_steps: int, values: dict[str, float | None]) -> str:
    """The aligned console line."""
    mfu = values.get("perf/mfu")
    width = len(str(total_steps))
    parts = [
        f"step {step:>{width}}/{total_steps}",
        f"loss {number(values['train/loss'], '7.4f')}",
        f"grad {number(values['train/grad_norm'], '7.3f')}",
        f"lr {values['train/lr']:.2e}",
        f"{values['perf/tok_per_sec']:>9,.0f} tok/s",
        f"mfu {100 * mfu:4.1f}%" if mfu is not None else "mfu    -",
        f"{values['perf/step_seconds']:7.3f} s/step",
        f"wait {values['perf/data_wait_pct']:4.1f}%",
        f"pad {values['data/padding_pct']:4.1f}%",
        f"mem {values['perf/peak_memory_gib']:5.1f} GiB",
        f"graphs {values['compile/graphs']:.0f}+{values['compile/recompiles']:.0f}",
    ]
    return "  ".join(parts)


def number(value: float | None, form: str) -> str:
    """The number, or a dash of the same width where there is none."""
    return format(value, form) if value is not None else "-".rjust(int(form.partition(".")[0]))


def drop_rows_after(path: Path, step: int) -> None:
    """A resumed run writes the rows after its checkpoint again; those of the lost stretch go."""
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines() if row_step(line) <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept))
    os.replace(temporary, path)


def has_row(path: Path, step: int) -> bool:
    """Whether a file of rows has one of this step."""
    return path.exists() and any(row_step(line) == step for line in path.read_text().splitlines())


def row_step(line: str) -> float:
    """The step of a row; infinite for one that a kill cut short."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return math.inf


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
