"""Run the cases one after the other, judge them, write the page. No torch in this process."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sftkit.bench.processes import first_failure, run_logged
from sftkit.errors import ConfigError
from sftkit.launch import find_hardware
from sftkit.model_size import replica_of
from sftkit.recipe import read_config
from sftkit.validate.cases import Case, Plan, cases, check_plan, shown
from sftkit.validate.judge import Trio, Verdict, judge, scaling
from sftkit.validate.measure import Measured, measure, read, spread
from sftkit.validate.page import html, markdown

LOGITS_TIMEOUT_SECONDS = 600


def validate(plan: Plan, out: Path) -> dict[str, Any]:
    """All runs, in processes of their own; out/validation.json, .md and .html are whole after each layout.

    Raises:
        ConfigError: what is wrong with the recipe or the plan, before anything is run.
    """
    cfg, hardware = read_config(plan.recipe, plan.overrides, world_size=1), find_hardware()
    check_plan(plan, cfg, hardware)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} is not empty: name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    every = cases(plan, cfg, hardware, replica_of(cfg), out)
    print(
        f"{len(every)} runs of {plan.steps} steps; the first {plan.warm_up} are warm-up and count in no speed and no loss",
        flush=True,
    )
    result: dict[str, Any] = {
        "plan": asdict(plan),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "runs": [],
        "verdicts": [],
    }
    measured: dict[str, Measured] = {}
    for number, case in enumerate(every, 1):
        measured[case.name] = run_case(case, plan)
        result["runs"].append(run_row(case, measured[case.name], plan))
        print(f"[{number}/{len(every)}] {run_line(result['runs'][-1])}", flush=True)
    result["verdicts"] = [asdict(verdict) for verdict in verdicts(plan, every, measured)]
    result["environment"] = next((found.environment for found in measured.values() if found.environment), {})
    result["passed"] = all(verdict["ok"] for verdict in result["verdicts"])
    for name, text in (
        ("validation.json", json.dumps(result, indent=1)),
        ("validation.md", markdown(result)),
        ("validation.html", html(result)),
    ):
        (out / name).write_text(text)
    shutil.rmtree(out / "caches", ignore_errors=True)
    return result


def run_case(case: Case, plan: Plan) -> Measured:
    """One training run; of a compiled one also the check of its checkpoint."""
    case.folder.parent.mkdir(parents=True, exist_ok=True)
    log = case.folder.with_suffix(".log")
    ended = run_logged(list(case.command), log, dict(case.environment), plan.timeout_seconds)
    if ended and ended.startswith("ended"):
        ended = first_failure(log, None) if case.processes > 1 else ended
    return measure(case.folder, ended)


def logits_row(case: Case) -> dict[str, Any]:
    """What loading the case's checkpoint with plain transformers in another process gives."""
    out = case.folder.with_name(case.folder.name + "-logits.json")
    words = [sys.executable, "-m", "sftkit.validate.logits", str(case.folder), str(out)]
    ended = run_logged(words, out.with_suffix(".log"), {}, LOGITS_TIMEOUT_SECONDS)
    return read(out) or {"ok": False, "found": ended or "nothing was written"}


def verdicts(plan: Plan, every: Sequence[Case], measured: dict[str, Measured]) -> list[Verdict]:
    """Every criterion of every layout and number of processes."""
    found: list[Verdict] = []
    for layout in plan.layouts:
        of_layout = {(case.processes, case.kind): case for case in every if case.layout == layout}
        other_seed = measured[of_layout[plan.processes[0], "eager, other seed"].name]
        trios = []
        for count in plan.processes:
            eager, compiled = (of_layout[count, kind] for kind in ("eager", "compiled"))
            runs = measured[eager.name], measured[compiled.name], other_seed
            logits = {} if runs[1].error else logits_row(compiled)
            trios.append(Trio(layout, count, *runs, logits, plan.warm_up))
            found += judge(trios[-1])
        found += scaling(trios)
    return found


def run_row(case: Case, run: Measured, plan: Plan) -> dict[str, Any]:
    """A run in the result: its command, speeds, losses and memory."""
    return {
        "name": case.name,
        "layout": case.layout,
        "processes": case.processes,
        "kind": case.kind,
        "command": shown(case.command, case.environment),
        "error": run.error,
        "tok_per_sec": run.speeds(plan.warm_up),
        "step_p50_seconds": [line.get("perf/step_p50_seconds") for line in run.timed(plan.warm_up)],
        "mfu": [line.get("perf/mfu") for line in run.timed(plan.warm_up)],
        "losses": {str(line["step"]): line["train/loss"] for line in run.lines},
        "peak_gib": run.most("mem/peak_gib"),
        "padding_pct": run.last("data/padding_pct"),
        "warm_up_seconds": run.summary.get("warm_up_seconds"),
        "compile_seconds": run.last("compile/seconds"),
        "graphs": run.last("compile/graphs"),
        "recompiles": run.last("compile/recompiles"),
        "host_syncs": run.last("perf/host_syncs"),
        "evals": run.evals,
        "results": [{k: v for k, v in result.items() if k != "settings"} for result in run.results],
        "proof": run.proof.get("rows", []),
    }


def run_line(row: dict[str, Any]) -> str:
    """A run on the console."""
    if row["error"]:
        return f"{row['name']}: FAILED: {row['error']}"
    last = list(row["losses"].values())[-1] if row["losses"] else float("nan")
    return f"{row['name']}: {spread(row['tok_per_sec'], ',.0f')} tok/s, loss {last:.4f}, {row['peak_gib']:.2f} GiB"
