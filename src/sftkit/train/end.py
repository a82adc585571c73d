"""The end of training: run_status.json, summary.json, the report, proof.json, and the last lines on the console."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sftkit.config.terminal import print_text
from sftkit.data.batches.loader import Batches
from sftkit.engine.engine import Engine
from sftkit.errors import RunDirError
from sftkit.rundir.files import replace_text
from sftkit.rundir.names import PROOF, SUMMARY, adapter_dir
from sftkit.rundir.status import RunStatus, resume_command
from sftkit.runtime.start import Runtime
from sftkit.tracking.meter import Meter
from sftkit.tracking.names import Check

log = logging.getLogger(__name__)


@dataclass
class Trained:
    """The result of the loop; its newest values until it ends."""

    step: int
    total_steps: int
    tokens: int = 0
    train_seconds: float | None = 0.0
    """seconds spent in steps over all starts of the run, like step and tokens, without evaluation, checkpoints and
    warm-up; None: unknown, because a version without this count began the run
    """
    start_train_seconds: float = 0.0
    "the same seconds for this start alone"
    warm_up_seconds: float = 0.0
    "for this start"
    compiled: bool = False
    compile_mode: str = ""
    "mode of torch.compile, and why"
    stopped: bool = False
    "whether it ended early, by a signal or train.max_minutes"
    metrics: dict[str, float | None] = field(default_factory=dict)
    "the last logged line"
    evals: dict[str, float | None] = field(default_factory=dict)
    "the last evaluation"
    samples: list[dict[str, Any]] = field(default_factory=list)
    "the last sample answers"
    evals_at_start: dict[str, float | None] = field(default_factory=dict)
    "the evaluation before the first step, empty without eval.at_start"
    checkpoint: str = ""
    "the newest step directory; empty if no step was done"


def write_end(status: RunStatus, rt: Runtime, *, stopped: bool) -> None:
    """Record the end of training in run_status.json; every rank calls it.

    Args:
        stopped: whether it ended before its last step; the signal, which perhaps only one rank received, is then
            recorded too.
    """
    number = rt.signal_of_any_rank() if stopped else None
    if rt.is_main:
        status.write_end(number, stopped=stopped)


def _seconds(trained: Trained) -> str:
    """Format the time in steps; for a resumed run, add that of this start."""
    own, whole = f"{trained.start_train_seconds:.0f} s", trained.train_seconds
    if whole is None:
        return f"{own} of this start"
    return own if whole <= trained.start_train_seconds + 0.5 else f"{whole:.0f} s, {own} of them in this start"


def write_run_page(run_dir: Path, print_line: Callable[[str], None] = print_text) -> None:
    """Write the report of a finished run; reports are imported here because only the end of a run needs them."""
    from sftkit.reports.page import try_report

    try_report(run_dir, print_line)


def write_summary(run_dir: Path, trained: Trained, rt: Runtime) -> None:
    """Write summary.json and the report, and print the last lines."""
    if not rt.is_main:
        return
    file = run_dir / SUMMARY
    # An earlier start of the run finished it with its last evaluation.
    if not trained.metrics and not trained.stopped and file.exists() and not json.loads(file.read_text())["stopped"]:
        rt.print(f"\nalready finished at step {trained.step}; {file} is unchanged")
        return
    from sftkit.reports.collect import newest_adapter_rows  # only the end of a run needs it

    several = newest_adapter_rows(run_dir)
    content = {**asdict(trained), **({"adapters": several} if several else {})}
    try:
        replace_text(file, json.dumps(content, indent=1, ensure_ascii=False))
    except OSError as error:  # the checkpoint exists, so the run has not failed
        rt.print(f"{file} cannot be written: {error}")
    speed = trained.metrics.get("perf/tok_per_sec")
    how = "stopped at" if trained.stopped else "finished"
    rt.print(
        f"\n{how} step {trained.step} of {trained.total_steps}: {trained.tokens:,} tokens\n"
        f"training time: {_seconds(trained)}; speed of the last line: {speed or 0:,.0f} tok/s"
    )
    where = f"{trained.checkpoint} (for sftkit also {run_dir})" if trained.checkpoint else "none: no step was done"
    rt.print(f"checkpoint: {where}")
    if trained.checkpoint and several and (loss := several[0]["validation loss"]) is not None:
        folder = adapter_dir(Path(trained.checkpoint), several[0]["adapter"])
        rt.print(f"best adapter: {folder} (validation loss {loss:.4f}), for sftkit chat, eval and export")
    if trained.stopped:
        rt.print(f"resume with: {resume_command(sys.argv)}")
    write_run_page(run_dir, rt.print)


def reported(checks: list[Check], rt: Runtime) -> list[Check]:
    """Return the checks unchanged, after a warning about each failure: a failed check does not end a run."""
    for check in checks:
        if check.ok is False:
            text = f"check failed: {check.name}: {check.found} (expected: {check.expected})"
            rt.print(text, "warning")
    return checks


def write_proof(run_dir: Path, checks: Sequence[Check], logits: Mapping[str, Any] | None = None) -> None:
    """Write proof.json on the main rank. A full disk loses the file, not the run."""
    text = json.dumps({"rows": [asdict(check) for check in checks], "logits": logits}, indent=1, ensure_ascii=False)
    try:
        replace_text(run_dir / PROOF, text)
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / PROOF, error)


@contextmanager
def write_proof_on_error(
    status: RunStatus, rt: Runtime, checks: Sequence[Check], at_end: Callable[[BaseException], list[Check]]
) -> Iterator[None]:
    """Write a proof.json with the error if training ends with one."""
    try:
        yield
    except BaseException as error:
        if rt.is_main and not isinstance(error, RunDirError):
            write_proof(status.run_dir, [*checks, *at_end(error)])
        raise


def closing_checks(meter: Meter, batches: Batches, engine: Engine, error: BaseException | None) -> list[Check]:
    """Return the final checks at the end of training; `error`: the exception that ended it early."""
    from sftkit.verify.proof import divisor_check, report_checks, shapes_check

    return [
        shapes_check(meter.shapes, batches.layout),
        divisor_check(meter.seen_targets, meter.planned_targets),
        *report_checks(engine.report(error), error),
    ]
