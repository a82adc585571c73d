"""What a run says of itself, from its files alone: report.html, report.json, and a model card beside the exported model."""

from __future__ import annotations

import json
from pathlib import Path

from sftkit.report.card import model_card
from sftkit.report.collect import gather, newest_run
from sftkit.report.files import checkpoint, replace
from sftkit.report.page import render

__all__ = ["gather", "newest_run", "write_report"]


def write_report(run_dir: Path, against: Path | None = None, out: Path | None = None) -> Path:
    """Write report.html and report.json, and README.md into the step directory that LATEST names. Returns the page's path.

    Args:
        against: a second run, whose curves, settings and results are shown beside those of this one.
        out: the HTML file to write instead, the JSON file beside it; the run directory is then left as it is.

    Raises:
        ConfigError: `run_dir` or `against` is no run.
        OSError: a file cannot be written.
    """
    report = gather(run_dir, against)
    target = out or run_dir / "report.html"
    texts = {target.with_suffix(".json"): json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"}
    texts[target] = render(report)
    folder = checkpoint(run_dir)
    if out is None and folder is not None:
        texts[folder / "README.md"] = model_card(report)
    for path, text in texts.items():
        replace(path, text)
    return target
