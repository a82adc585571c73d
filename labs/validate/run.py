"""Run the cases one after the other, judge them, write the page. No torch in this process."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labs.bench.processes import first_failure, run_logged
from labs.validate.cases import ValidationPlan, ValidationRun, cases, check_plan, typed_command
from labs.validate.judge import Verdict, in_time, judge, scaling, trios
from labs.validate.ledger import Ledger, as_in_ledger, check_portable, key_words, start_of
from labs.validate.measure import Measured, format_spread, measure
from labs.validate.page import html, markdown_page
from sftkit.config.load import read_config
from sftkit.config.terminal import print_text
from sftkit.errors import ConfigError
from sftkit.launch.hardware import find_hardware
from sftkit.launch.launch import needs_of
from sftkit.rundir.files import read_object

LOGITS_TIMEOUT_SECONDS = 600


def run_validation(plan: ValidationPlan, out: Path, ledger: Ledger | None = None) -> dict[str, Any]:
    """Run all cases in processes of their own and judge them, also by what the ledger has; write out/validation.json,
    .md and .html.

    Returns:
        what validation.json holds.

    Raises:
        ConfigError: what is wrong with the recipe or the plan, before anything is run.
    """
    cfg, hardware = read_config(plan.recipe, plan.overrides, world_size=1), find_hardware()
    check_plan(plan, hardware, cfg.train, cfg.data, cfg.eval)
    if ledger and ledger.records:
        check_portable(key_words(asdict(plan)))
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} is not empty: name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    every = cases(plan, cfg, hardware, needs_of(cfg, hardware), out)
    print_text(
        f"{len(every)} runs of {plan.steps} steps; the first {plan.warm_up} are warm-up and count in no speed and no "
        "loss"
    )
    result: dict[str, Any] = {
        "plan": asdict(plan),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "start": start_of(cfg.model.path),
        "runs": [],
    }
    for number, case in enumerate(every, 1):
        result["runs"].append(run_case(case, plan))
        (out / "validation.json").write_text(json.dumps(result, indent=1))
        print_text(f"[{number}/{len(every)}] {run_line(result['runs'][-1], plan.warm_up)}")
    # Compiled code of every run is gigabytes, and of no use to a later one: each begins with empty caches.
    shutil.rmtree(out / "caches", ignore_errors=True)
    return _write(judged(result, ledger), out)


def judge_again(path: Path, ledger: Ledger | None) -> dict[str, Any]:
    """Judge the runs of an earlier validation.json by today's criteria, and write the pages beside it anew.

    Raises:
        ConfigError: the file is not there, or holds no finished runs.
    """
    result = read_object(path)
    if not result.get("runs") or not result.get("plan"):
        raise ConfigError(f"--judge: {path} is no validation.json with runs")
    return _write(judged(result, ledger), path.parent)


def judged(result: dict[str, Any], ledger: Ledger | None = None) -> dict[str, Any]:
    """Return the result with its verdicts."""
    found: list[Verdict] = []
    times = []  # what each tokens/s ratio means in time, as data; none of runs that failed
    for of_layout in trios(result):
        for trio in of_layout:
            found += [*judge(trio), *([as_in_ledger(trio, result, ledger)] if ledger else [])]
            if time := in_time(trio):
                times.append({"layout": trio.layout, "processes": trio.processes, **asdict(time)})
        found += scaling(of_layout)
    return {
        **result,
        "verdicts": [asdict(verdict) for verdict in found],
        "times": times,
        "passed": all(verdict.ok is not False for verdict in found),
        "environment": next(filter(None, (run["measured"]["environment"] for run in result["runs"])), {}),
    }


def _write(result: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write the result as JSON, Markdown and a page."""
    (out / "validation.json").write_text(json.dumps(result, indent=1))
    (out / "validation.md").write_text(markdown_page(result))
    (out / "validation.html").write_text(html(result))
    return result


def run_case(case: ValidationRun, plan: ValidationPlan) -> dict[str, Any]:
    """Run one training, and of a compiled one also the check of its checkpoint."""
    case.folder.parent.mkdir(parents=True, exist_ok=True)
    log = case.folder.with_suffix(".log")
    ended = run_logged(list(case.command), log, dict(case.environment), plan.timeout_seconds)
    # Of several ranks the launcher's own last line says little: the first failing rank does.
    if ended and ended.startswith("ended"):
        ended = first_failure(log, None) if case.processes > 1 else ended
    measured = measure(case.folder, ended)
    return {
        "name": case.name,
        "layout": case.layout,
        "processes": case.processes,
        "kind": case.kind,
        "command": typed_command(case.command, case.environment),
        "measured": asdict(measured),
        "logits": logits_row(case) if case.kind == "compiled" and not measured.error else {},
    }


def logits_row(case: ValidationRun) -> dict[str, Any]:
    """Return what loading the case's checkpoint with plain transformers in another process gives."""
    out = case.folder.with_name(case.folder.name + "-logits.json")
    words = [sys.executable, "-m", "labs.validate.logits", str(case.folder), str(out)]
    ended = run_logged(words, out.with_suffix(".log"), {}, LOGITS_TIMEOUT_SECONDS)
    return read_object(out) or {"ok": False, "found": ended or "nothing was written"}


def run_line(run: dict[str, Any], warm_up: int) -> str:
    """Return a run as a line for the console."""
    measured = Measured(**run["measured"])
    if measured.error:
        return f"{run['name']}: FAILED: {measured.error}"
    speeds, loss = measured.speeds(warm_up), measured.last("train/loss")
    shown_loss = "-" if loss is None else f"{loss:.4f}"
    return (
        f"{run['name']}: {format_spread(speeds, ',.0f')} tok/s, loss {shown_loss}, "
        f"{measured.largest('mem/peak_gib'):.2f} GiB"
    )
