"""From a plan to what the process of each run is told: a recipe that is checked as every recipe is. No torch
in this file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from labs.bench.plan import (
    SYNTHETIC,
    BenchPlan,
    DataPlan,
    RunPlan,
    Steps,
    between_runs,
    expanded_runs,
    not_runs,
    read_lengths,
    read_plan,
    slug,
)
from labs.bench.processes import Processes
from sftkit.config.load import read_config
from sftkit.config.schema import Config, settings
from sftkit.config.yaml_text import COMMAND_LINE
from sftkit.config.yaml_tree import render_yaml
from sftkit.errors import ConfigError

_OWN = {
    "run.dir": "the bench names a folder for each run",
    "train.max_steps": "it comes from steps.total",
    "log.every": "it comes from steps.window",
    "model.scratch": "it comes from models",
    "data.train": "the documents are those of the plan's data",
}
"Settings that the bench fills in, and where from."


@settings
class Job:
    """One run, resolved: all that its process is told."""

    name: str
    model_name: str
    model: dict[str, Any]
    config: Config
    data: DataPlan
    steps: Steps
    changes: dict[str, Any]
    baseline: str | None
    same_loss_as: str | None
    environment: dict[str, str]
    warm_from: str | None
    worker: str | None
    options: dict[str, Any]
    timeout_seconds: int
    processes: Processes

    @property
    def folder(self) -> Path:
        """Return where its job.json, log.txt, metrics.jsonl and row.json lie."""
        return Path(self.config.run.dir)


def save_job(job: Job) -> Path:
    """Write job.json into the job's folder, which is made, and return its path."""
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / "job.json"
    path.write_bytes(TypeAdapter(Job).dump_json(job, indent=1))
    return path


def read_job(path: Path) -> Job:
    """Return what `save_job` wrote."""
    return TypeAdapter(Job).validate_json(path.read_bytes())


def read_jobs(path: Path, out: Path, only: list[str] | None = None) -> list[Job]:
    """Return the runs of a plan: ablations expanded, settings checked as those of a recipe are; results go under `out`.

    Args:
        only: names of the runs to return; None: all.

    Raises:
        ConfigError: every problem of the plan, one a line, with file and key.
    """
    # Problems between the parts of the plan first: a run of a plan that contradicts itself would be refused for reasons
    # that follow from that.
    plan = read_plan(path)
    if plan.data.lengths is not None:  # a path that holds anywhere
        lengths = str((path.parent / plan.data.lengths).absolute())
        plan = replace(plan, data=replace(plan.data, lengths=lengths))
    runs = expanded_runs(plan)
    problems = [f"{path}: {problem}" for problem in between_runs(plan, runs)]
    problems += [f"--only: {text}" for text in not_runs(only or [], [run.name for run in runs])]
    jobs = []
    for run in runs if not problems else ():
        if only is None or run.name in only:
            try:
                jobs.append(_job(plan, run, path, out))
            except ConfigError as error:
                problems += str(error).splitlines()
    chosen = [None, *(job.name for job in jobs)]
    problems += [f"--only: {job.name} needs {job.warm_from} too" for job in jobs if job.warm_from not in chosen]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return jobs


def _cap(data: DataPlan) -> int:
    """Return the positions of the longest document."""
    if data.documents is not None:
        return data.documents.cap
    if data.stage is not None:
        return data.stage.max_length
    assert data.lengths is not None
    return max(read_lengths(Path(data.lengths)).positions)


def _job(plan: BenchPlan, run: RunPlan, path: Path, out: Path) -> Job:
    """Resolve a run of the plan.

    Raises:
        ConfigError: its worker or its settings are wrong.
    """
    steps = run.steps or plan.steps
    worker = None if run.worker is None else path.parent / run.worker
    if worker is not None and not worker.is_file():
        raise ConfigError(f"{path}: run {run.name}: worker: no such file: {worker}")
    return Job(
        name=run.name,
        model_name=run.model,
        model=plan.models[run.model],
        config=_config(plan, run, steps, path, out),
        data=plan.data,
        steps=steps,
        changes=run.set,
        baseline=run.baseline,
        same_loss_as=run.same_loss_as,
        environment=run.environment,
        warm_from=run.warm_from,
        worker=None if worker is None else str(worker),
        options=run.options,
        timeout_seconds=plan.timeout_seconds,
        processes=run.started,
    )


def _config(plan: BenchPlan, run: RunPlan, steps: Steps, path: Path, out: Path) -> Config:
    """Return the recipe of a run: the plan's defaults, `set` over them, and what the bench fills in.

    Raises:
        ConfigError: with the places in the plan, not in the recipe that is made of it.
    """
    flat = dict(_leaves(plan.defaults)) | run.set
    own = [f"{path}: run {run.name}: {key}: is not set here, {reason}" for key, reason in _OWN.items() if key in flat]
    if own:
        raise ConfigError("\n".join(own))
    # A row of another layout holds one document: data.row_length would be refused there.
    packed = flat.get("data.layout", "packed") == "packed"
    filled = {
        "data.max_length": _cap(plan.data),
        **({"data.row_length": plan.data.row_length} if packed else {}),
        "log.wandb": "off",
        "log.every": steps.window,
        "train.max_steps": steps.total,
        "run.dir": str(out / slug(run.name)),
    }
    sections: dict[str, Any] = _sources(plan.data)
    sections["model"]["scratch"] = plan.models[run.model]
    for key, value in {**filled, **dict(_leaves(plan.defaults))}.items():
        tree, (*parents, last) = sections, key.split(".")
        for parent in parents:
            tree = tree.setdefault(parent, {})
        tree[last] = value
    # Read as a file, so that it is checked as every recipe is; problems are told where the plan has them.
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(render_yaml(sections))
        try:
            changes = [f"{key}={json.dumps(value)}" for key, value in run.set.items()]
            return read_config(recipe, changes, run.started.row_topology)
        except ConfigError as error:
            text = str(error).replace(f"{COMMAND_LINE}: ", f"{path}: run {run.name}: set.")
            raise ConfigError(text.replace(f"{recipe}: ", f"{path}: defaults.")) from None


def _sources(data: DataPlan) -> dict[str, Any]:
    """Return the sections of a recipe that say what is learned from, and with which tokenizer."""
    if data.stage is None:
        return {"model": {"tokenizer": SYNTHETIC}, "data": {"train": [{"path": SYNTHETIC}]}}
    plain = TypeAdapter(type(data.stage)).dump_python(data.stage, mode="json", exclude_defaults=True)
    return {"model": {"train_tokenizer": plain["train_tokenizer"]}, "data": {"train": plain["train"]}}


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested settings."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
