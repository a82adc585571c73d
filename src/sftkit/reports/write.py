"""Writes what a run's files say: report.html, report.json, and a model card beside the exported model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from sftkit.config.commands import invocation
from sftkit.config.terminal import print_text, visible
from sftkit.reports.card import licence, model_card
from sftkit.reports.collect import gather_report, run_of
from sftkit.reports.files import checkpoint
from sftkit.reports.page import render_report
from sftkit.rundir.files import replace_shared
from sftkit.rundir.names import CARD, REPORT, REPORT_DATA


def write_report(run_dir: Path, against: Path | None = None, out: Path | None = None) -> Path:
    """Write report.html and report.json, and README.md into the step directory that LATEST names.

    Returns the page's path.

    Args:
        against: a second run, whose curves, settings and results are shown beside those of this one.
        out: the HTML file to write instead, the JSON file beside it; the run directory is then left as it is.

    Raises:
        ConfigError: `run_dir` or `against` is no run.
        OSError: a file cannot be written.
    """
    report = gather_report(run_dir, against)
    target = out or run_dir / REPORT
    data = run_dir / REPORT_DATA if out is None else out.with_suffix(".json")
    content = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # Everything is built before anything is written: an error leaves the earlier report whole.
    texts = {data: content, target: visible(render_report(report))}
    if out is None and (folder := checkpoint(run_dir)) is not None:
        card = folder / CARD
        texts[card] = visible(model_card(report, licence(card)))
    for path, text in texts.items():
        replace_shared(path, text)
    return target


def try_report(run_dir: Path, print_line: Callable[[str], None] = print_text, max_seconds: float = 20.0) -> None:
    """Write the report where it must neither fail nor delay what goes on; `print_line` gets where it
    is, or why there is none."""

    def work() -> None:
        try:
            said.append(f"report: {write_report(run_dir)}")
        except Exception as error:  # a report must not fail a run
            said.append(f"no report: {type(error).__name__}: {error}")

    # A daemon: what takes too long, such as a slow file system, does not keep the process from ending either.
    said: list[str] = []
    thread = Thread(target=work, daemon=True, name="report")
    thread.start()
    thread.join(max_seconds)
    by_hand = invocation("scripts/report.py", str(run_dir))
    print_line(said[0] if said else f"no report: it takes more than {max_seconds:.0f} s; {by_hand}")


def report_of_folder(folder: Path, print_line: Callable[[str], None]) -> None:
    """Write again the report of the run that a folder with results lies in; do nothing where it lies in none."""
    if (run_dir := run_of(folder)) is not None:
        try_report(run_dir, print_line)
