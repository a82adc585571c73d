"""Reads the evaluations of a run from its files: values of tasks by step, and sample answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sftkit.reports.files import Rows, dicts, drawable_number, mapping, read_json
from sftkit.rundir.names import EVALUATIONS, FINAL, RESULTS, STEP_DIRS, step_name, step_of

EvaluationTable = dict[tuple[float, str, str], dict[str, Any]]
"""(step, task, metric) -> an evaluation."""
_MAX_EVALUATIONS, _MAX_SAMPLES, _MAX_TEXT = 20, 10, 4000
_BOUNDS = ("low", "high", "chance")
_MEANS = ("centred_mean", "families")
EVALUATION_COLUMNS = ["task", "metric", "value", "95 % interval", "chance", "examples", "step"]


def evaluations(run_dir: Path, rows: Rows, notes: list[str]) -> Rows:
    """Return every evaluation of every task, by step: from evals/step-*/results.json, and
    evals.jsonl for what is not there."""
    table: EvaluationTable = {}
    told: set[tuple[float, str, str]] = set()
    for path in sorted((run_dir / EVALUATIONS).glob(f"{STEP_DIRS}/{RESULTS}")):
        of_step = step_of(path.parent.name)
        for row in dicts(read_json(path, notes)) if of_step is not None else []:
            told |= _keep_task(table, float(of_step or 0), row)
    # evals.jsonl has less of a value (no interval of parts, no examples), so it only fills what results.json lacks.
    for row in rows:
        step = drawable_number(row.get("step"))
        for name, value in row.items():
            prefix, _, rest = name.partition("/")
            task, _, metric = rest.partition("/")
            if prefix != "eval" or metric in _BOUNDS or not task or step is None or drawable_number(value) is None:
                continue
            if (step, task, metric) in told or (not metric and any(known[:2] == (step, task) for known in table)):
                continue
            # low and high stand beside a task, not beside a metric: with several metrics nobody could say
            # whose they are.
            alone = sum(key.startswith(f"eval/{task}/") and key.split("/")[2] not in _BOUNDS for key in row) < 2
            bounds = {key: row.get(f"eval/{task}/{key}") for key in _BOUNDS} if alone else {}
            _keep(table, step, {"task": task, "metric": metric or "mean", "value": value} | bounds)
    return [table[key] for key in sorted(table)]


def final_evaluation(run_dir: Path, last_step: float, notes: list[str]) -> Rows:
    """Return what scripts/evaluate.py has found of the run's last checkpoint; nothing, with a note, if
    it was of an earlier one."""
    table: EvaluationTable = {}
    for row in dicts(read_json(run_dir / FINAL / RESULTS, notes, optional=True)):
        model = str(mapping(row.get("settings")).get("model") or step_name(round(last_step)))
        if step_of(Path(model).name) == last_step:
            _keep_task(table, last_step, row)
        else:
            notes.append(f"{FINAL}: {row.get('task')} is of {model}, not of step {last_step:.0f}, and is left out")
    return [row | {"final": True} for _, row in sorted(table.items())]


def _keep_task(evaluations: EvaluationTable, step: float, row: dict[str, Any]) -> set[tuple[float, str, str]]:
    """Keep a task and its parts.

    Returns what evals.jsonl has of it too: (step, task or part, metric) of all its metrics.
    """
    task, metric = str(row.get("task", "?")), str(row.get("metric", "?"))
    # The task itself counts more than a part of another one that has its name.
    evaluations.pop((step, task, metric), None)
    _keep(evaluations, step, row)
    metrics = {name.partition("/")[::2]: value for name, value in mapping(row.get("metrics")).items()}
    for (kind, part), value in metrics.items():
        if part and kind == metric:
            _keep(evaluations, step, {"task": part, "metric": kind, "value": value})
    return {(step, part or task, kind) for kind, part in metrics}


def _keep(evaluations: EvaluationTable, step: float, row: dict[str, Any]) -> None:
    """Add an evaluation, unless there is one of this step, task and metric."""
    task, metric = str(row.get("task", "?")), str(row.get("metric", "?"))
    numbers = {key: drawable_number(row.get(key)) for key in ("value", "stderr", "low", "high", "chance", "examples")}
    others = {"settings": mapping(row.get("settings")), "metrics": mapping(row.get("metrics"))}
    made = {"step": int(step), "task": task, "metric": metric} | numbers | others
    evaluations.setdefault((step, task, metric), made)


def latest_evaluations(evaluation_rows: Rows) -> Rows:
    """Return the newest evaluation of each task and metric: means first, then tasks, then
    what is only a part of one."""
    newest = {(row["task"], row["metric"]): row for row in evaluation_rows}
    return [newest[key] for key in sorted(newest, key=lambda key: (is_part(newest[key]), key[0] not in _MEANS, key))]


def standing(report: dict[str, Any]) -> Rows:
    """Return what stands for the model: its final evaluation, and for other tasks the newest one."""
    return latest_evaluations([*report["evaluations"], *report["final"]])


def is_part(row: dict[str, Any]) -> bool:
    """Return whether an evaluation is a part of another, such as one family: it has no interval and no chance."""
    return row["low"] is None and row["chance"] is None and row["task"] not in _MEANS


def newest_samples(rows: Rows) -> Rows:
    """Return [{"step", "samples": [...]}], newest first: the last evaluations, the first samples of
    each, texts cut to a length."""
    by_step: dict[float, Rows] = {}
    keys = ("prompt", "reference", "answer", "stop")
    for row in rows:
        step = drawable_number(row.get("step"))
        if step is not None:
            texts = {key: str(row[key])[:_MAX_TEXT] for key in keys if row.get(key)}
            by_step.setdefault(step, []).append(texts)
    steps = sorted(by_step, reverse=True)[:_MAX_EVALUATIONS]
    return [{"step": int(step), "samples": by_step[step][:_MAX_SAMPLES]} for step in steps]
