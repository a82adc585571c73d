"""The verdicts on the dashboard of the recipe, as a run of their own: tables, and the speed-up as a number."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sftkit.config.schema import LogConfig
from sftkit.experiments.validate.judge import speedup, trios
from sftkit.experiments.validate.page import criteria_passed, mark

VERDICT_COLUMNS = ("layout", "processes", "criterion", "verdict", "found", "wanted")
SPEED_COLUMNS = (
    *("layout", "processes", "speedup", "eager_step_seconds", "compiled_step_seconds", "compile_seconds"),
    *("saved_seconds_per_1000_steps", "steps"),
)


def send_result(result: Mapping[str, Any], out: Path, config: LogConfig) -> str | None:
    """Send a judged result to the dashboard that the recipe's `log` asks for; never an error. Return what the person
    should be told; None without a dashboard.

    Args:
        out: the folder of the result, which also takes what is kept offline.
    """
    # torch comes with these, and is not needed before all runs are done
    from accelerate import Accelerator

    from sftkit.tracking.dashboard.remote import (
        DashboardWriter,
        Identity,
        dashboard_name,
        open_dashboard,
        own_tags,
        run_name,
    )
    from sftkit.tracking.dashboard.services import Ending, RunFile, record_table

    # Asked first: without a dashboard neither torch's Accelerator nor a thread is needed.
    name = dashboard_name(config)
    if name is None:
        return None
    verdicts = [verdict | {"verdict": mark(ok=verdict["ok"])} for verdict in result["verdicts"]]
    speeds = speeds_of(result)
    failed_first = sorted(verdicts, key=lambda verdict: verdict["ok"] is not False)
    tables = [
        record_table("validate/verdicts", VERDICT_COLUMNS, failed_first),
        record_table("validate/speed", SPEED_COLUMNS, speeds),
    ]
    about = Identity(
        name=run_name(out),
        group=os.environ.get("WANDB_RUN_GROUP"),
        job_type="validate",
        tags=tuple(own_tags()),
        notes=os.environ.get("WANDB_NOTES") or criteria_passed(dict(result)),
        settings={"plan": result["plan"], "environment": result["environment"]},
    )
    dashboard = open_dashboard(config, out, None, about, Accelerator(cpu=True, log_with=name))
    if dashboard is None:
        return None
    remote_logger = DashboardWriter(dashboard)
    remote_logger.record(0, lambda: RunFile([each for each in tables if each.rows], values(verdicts, speeds)))
    said = remote_logger.finish(Ending("finished", 0 if result["passed"] else 1, {"run/state": "finished"}))
    return f"{dashboard.name}: {said}" if said else None


def values(verdicts: list[dict[str, Any]], speeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers that stand for the validation: criteria by verdict, and the speed-up of the first layout on
    the fewest processes."""
    states = [verdict["ok"] for verdict in verdicts]
    counts = {"passed": states.count(True), "failed": states.count(False), "not_checked": states.count(None)}
    found = {f"validate/{name}": count for name, count in counts.items()}
    return found | ({"validate/speedup": speeds[0]["speedup"]} if speeds else {})


def speeds_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the speed-up of each layout and number of processes whose runs finished, with what it means in time."""
    every = {(trio.layout, trio.processes): trio for of_layout in trios(result) for trio in of_layout}
    return [{**time, "speedup": speedup(every[time["layout"], time["processes"]])} for time in result["times"]]
