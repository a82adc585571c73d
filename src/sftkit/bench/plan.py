"""A bench plan: data, models and settings as in a recipe, and the runs that differ from them. No torch in this file."""

from __future__ import annotations

import difflib
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from sftkit.config import Config, NonNegative, Positive, settings
from sftkit.errors import ConfigError
from sftkit.recipe import _explain, read_config
from sftkit.recipe_yaml import COMMAND_LINE, Keys, Node, dotted, read_tree, render

SYNTHETIC = "synthetic"
"Stands in recipes where the plan's own data and vocabulary take the place of sources and tokenizer."
OWN = {
    "run.dir": "the bench names a folder for each run",
    "train.max_steps": "it comes from steps.total",
    "log.every": "it comes from steps.window",
    "model.scratch": "it comes from models",
    "data.train": "the documents are synthetic",
}
"Settings that the bench fills in, and where from."


@settings
class Documents:
    """Lengths in row positions: lognormal with this median and mean, rounded, at most `cap` and at least 4."""

    count: Positive
    median: Positive
    mean: Positive
    cap: Annotated[int, Field(ge=8)]


@settings
class DataPlan:
    """Synthetic chats: the same documents for every run of the same seed and vocabulary."""

    documents: Documents
    seed: NonNegative = 0
    row_length: Positive
    "data.row_length of packed runs"
    target_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    "share of each document's positions that are trained, at its end, as an answer is; 1: all tokens"
    zipf: Annotated[float, Field(ge=0.0)] = 1.0
    "tokens are drawn independently, with p(rank r) ~ 1 / r**zipf over the vocabulary: what a model can learn of them"


@settings
class Steps:
    """How long a run is. What is timed is total - warm_up, in windows of so many steps."""

    total: Positive
    warm_up: NonNegative
    window: Positive
    "steps between logged lines, each of which waits for the device once"


@settings
class RunPlan:
    """One row of the table."""

    name: Annotated[str, Field(min_length=1)]
    model: str
    set: dict[str, Any] = field(default_factory=dict)
    "dotted recipe key -> value"
    steps: Steps | None = None
    baseline: str | None = None
    "the run that its tokens/s are divided by"
    same_loss_as: str | None = None
    "the run that its losses are compared with, step by step"
    environment: dict[str, str] = field(default_factory=dict)
    warm_from: str | None = None
    "an earlier run whose compiler caches this one starts with; null: empty ones"
    worker: str | None = None
    "a script beside the plan that trains in the project's place; null: sftkit"
    options: dict[str, Any] = field(default_factory=dict)
    "what that script is told"


@settings
class Ablations:
    """Runs that change a little of one run: `of`'s steps, the name `of: label`, and `of` as the baseline."""

    of: str
    each: dict[str, dict[str, Any]]


@settings
class Plan:
    """A plan file."""

    data: DataPlan
    steps: Steps
    models: dict[str, dict[str, Any]]
    "name -> fields of a transformers config, with model_type"
    defaults: dict[str, Any] = field(default_factory=dict)
    "settings of every run, nested as in a recipe"
    runs: tuple[RunPlan, ...]
    ablations: Ablations | None = None
    timeout_seconds: Positive = 900
    "of one run"


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

    @property
    def folder(self) -> Path:
        """Where its job.json, log.txt, metrics.jsonl and row.json lie."""
        return Path(self.config.run.dir)


def save_job(job: Job) -> Path:
    """Write job.json into the job's folder, which is made."""
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / "job.json"
    path.write_bytes(TypeAdapter(Job).dump_json(job, indent=1))
    return path


def read_job(path: Path) -> Job:
    """What `save_job` wrote."""
    return TypeAdapter(Job).validate_json(path.read_bytes())


def slug(name: str) -> str:
    """A run's name as a folder name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "run"


def read_jobs(path: Path, out: Path, only: list[str] | None = None) -> list[Job]:
    """The runs of a plan, ablations expanded, settings checked as those of a recipe are; results go under `out`.

    Args:
        only: names of the runs wanted; None: all.

    Raises:
        ConfigError: every problem of the plan, one a line, with file and key.
    """
    plan = read_plan(path)
    runs = expanded(plan)
    problems = [f"{path}: {problem}" for problem in between_runs(plan, runs)]
    problems += [f"--only: {text}" for text in _not_runs(only or [], [run.name for run in runs])]
    jobs = []
    for run in runs if not problems else ():
        if only is None or run.name in only:
            try:
                jobs.append(_job(plan, run, path, out))
            except ConfigError as error:
                problems += str(error).splitlines()
    chosen = [job.name for job in jobs]
    problems += [f"--only: {j.name} needs {j.warm_from} too" for j in jobs if j.warm_from not in (None, *chosen)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return jobs


def read_plan(path: Path) -> Plan:
    """The plan file over those that it `extends`, as recipes do.

    Raises:
        ConfigError: unknown or missing keys, values of the wrong kind: all of them, with a suggestion.
    """
    problems: list[str] = []
    tree = read_tree(path, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return TypeAdapter(Plan).validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
    lines = [
        f"{tree.nearest(k).place}: {dotted(k)}: {_wrong(dict(e), k, tree)}" for e in found if (k := tuple(e["loc"]))
    ]
    raise ConfigError("\n".join(dict.fromkeys(lines)))


def _wrong(error: dict[str, Any], keys: Keys, tree: Node) -> str:
    """What is wrong, in words."""
    if error["type"] in ("missing", "missing_argument"):
        return "is required"
    if error["type"] == "unexpected_keyword_argument":
        known = [f.name for f in fields(_class_at(keys[:-1]))]
        near = difflib.get_close_matches(str(keys[-1]), known, n=1)
        return "is not a known key. " + (f'Did you mean "{near[0]}"?' if near else f"Known here: {', '.join(known)}")
    return _explain(error, keys, tree)[0]


def _class_at(keys: Keys) -> Any:
    """The class whose fields stand at these keys of a plan."""
    inside = {"data": DataPlan, "documents": Documents, "steps": Steps, "runs": RunPlan, "ablations": Ablations}
    return next((inside[str(key)] for key in reversed(keys) if key in inside), Plan)


def expanded(plan: Plan) -> list[RunPlan]:
    """The runs of the plan, then those that its ablations make."""
    runs = list(plan.runs)
    base = next((r for r in runs if plan.ablations and r.name == plan.ablations.of), None)
    for label, change in plan.ablations.each.items() if plan.ablations and base else ():
        name, merged = f"{base.name}: {label}", {**base.set, **change}
        options = {"steps": base.steps, "environment": base.environment}
        runs.append(RunPlan(name=name, model=base.model, set=merged, baseline=base.name, **options))
    return runs


def between_runs(plan: Plan, runs: list[RunPlan]) -> Iterator[str]:
    """What is wrong between the parts of a plan: names, references, steps, lengths."""
    names = [run.name for run in runs]
    yield from (f'runs: "{name}" is given {n} times' for name, n in Counter(names).items() if n > 1)
    for folder, n in Counter(slug(name) for name in dict.fromkeys(names)).items():
        if n > 1:
            yield f'runs: {n} names would share the folder "{folder}": tell them apart by letters or digits'
    if plan.ablations:
        yield from (f"ablations.of: {text}" for text in _not_runs([plan.ablations.of], names))
    if not plan.data.documents.median < plan.data.documents.mean:
        yield "data.documents.mean: must be greater than the median: lognormal lengths are skewed"
    for i, run in enumerate(runs):
        if run.model not in plan.models:
            yield f'runs.{i}.model: "{run.model}" is not one of {", ".join(plan.models)}'
        for key, name in (("baseline", run.baseline), ("same_loss_as", run.same_loss_as)):
            yield from (f"runs.{i}.{key}: {text}" for text in _not_runs([name] if name else [], names))
        if run.warm_from is not None and run.warm_from not in names[:i]:
            yield f'runs.{i}.warm_from: "{run.warm_from}" is no earlier run'
        timed = (run.steps or plan.steps).total - (run.steps or plan.steps).warm_up
        if (
            timed <= 0
            or timed % (run.steps or plan.steps).window
            or (run.steps or plan.steps).warm_up % (run.steps or plan.steps).window
        ):
            yield f"runs.{i}.steps: warm_up, and total less warm_up, must be multiples of window, and one window is timed"
    for name, model in plan.models.items():
        if "model_type" not in model:
            yield f"models.{name}: needs model_type, the name of a transformers architecture such as qwen3"


def _not_runs(wanted: list[str], names: list[str]) -> Iterator[str]:
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            yield f'"{name}" is no run. ' + (f'Did you mean "{near[0]}"?' if near else f"Runs: {', '.join(names)}")


def _job(plan: Plan, run: RunPlan, path: Path, out: Path) -> Job:
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
    )


def _config(plan: Plan, run: RunPlan, steps: Steps, path: Path, out: Path) -> Config:
    """The recipe of a run: the plan's defaults, `set` over them, and what the bench fills in."""
    flat = dict(_leaves(plan.defaults)) | run.set
    own = [f"{path}: run {run.name}: {key}: is not set here, {why}" for key, why in OWN.items() if key in flat]
    if own:
        raise ConfigError("\n".join(own))
    packed = flat.get("data.layout", "packed") == "packed"
    filled = {
        "data.max_length": plan.data.documents.cap,
        **({"data.row_length": plan.data.row_length} if packed else {}),
        "log.wandb": "off",
        "log.every": steps.window,
        "train.max_steps": steps.total,
        "run.dir": str(out / slug(run.name)),
    }
    sections: dict[str, Any] = {
        "model": {"scratch": plan.models[run.model], "tokenizer": SYNTHETIC},
        "data": {"train": [{"path": SYNTHETIC}]},
    }
    for key, value in {**filled, **dict(_leaves(plan.defaults))}.items():
        _put(sections, key.split("."), value)
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(render(sections))
        try:
            return read_config(recipe, [f"{key}={json.dumps(value)}" for key, value in run.set.items()], 1)
        except ConfigError as error:
            text = str(error).replace(f"{COMMAND_LINE}: ", f"{path}: run {run.name}: set.")
            raise ConfigError(text.replace(f"{recipe}: ", f"{path}: defaults.")) from None


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested settings."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def sigma(documents: Documents) -> float:
    """The lognormal's sigma: mean = median * exp(sigma**2 / 2)."""
    return math.sqrt(2.0 * math.log(documents.mean / documents.median))
