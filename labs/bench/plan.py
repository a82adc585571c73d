"""A bench plan: data, models and settings as in a recipe, and the runs that differ from them. No torch in this file."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from labs.bench.processes import Parallelism, Processes, wrong_processes
from sftkit.config.schema import NonNegative, Positive, SourceConfig, TokenizerTraining, settings
from sftkit.config.stages import STAGE_SCRIPTS
from sftkit.config.validation_errors import explain_error
from sftkit.config.yaml_text import KeyPath, dotted
from sftkit.config.yaml_tree import read_tree
from sftkit.errors import ConfigError

SYNTHETIC = "synthetic"
"Stands in recipes where the plan's own data and vocabulary take the place of sources and tokenizer."
if TYPE_CHECKING:
    Stage = str
else:  # a type checker knows no Literal of a table's keys
    Stage = Literal[tuple(STAGE_SCRIPTS)]


@settings
class LognormalLengths:
    """Lengths in row positions: lognormal with this median and mean, rounded, at most `cap` and at least 4."""

    count: Positive
    median: Positive
    mean: Positive
    cap: Annotated[int, Field(ge=8)]


@settings
class StageData:
    """What a stage's script learns from, read and tokenized as it does: the settings are those of a recipe."""

    name: Stage
    "base, mid, sft or caption"
    train: tuple[SourceConfig, ...]
    train_tokenizer: TokenizerTraining
    max_length: Annotated[int, Field(ge=8)]


@settings
class DataPlan:
    """What the runs of a plan learn from. One of the three is given: `documents` or `lengths`, sizes of synthetic
    chats, the same documents for every run of the same seed and vocabulary; or `stage`, what a stage's script reads."""

    row_length: Positive
    "data.row_length of packed runs"
    documents: LognormalLengths | None = None
    lengths: str | None = None
    "a JSON file beside the plan: `positions` and `targets` of real documents, in the order in which they are taken"
    stage: StageData | None = None
    "what models with an encoder need: a made-up text says nothing of a picture"
    seed: NonNegative = 0
    target_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """share of each document's positions that are trained, at its end, as an answer is; 1: all tokens; not with
    `lengths`"""
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
    topology: str | None = None
    "name of a file of accelerate_configs, without .yaml; null: one process, without a launcher"
    processes: Positive = 1
    parallelism: Parallelism | None = None
    "sizes of the mesh; null: those of the topology's file"
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

    @property
    def started(self) -> Processes:
        """Return how its processes are started."""
        return Processes(count=self.processes, topology=self.topology, parallelism=self.parallelism)


@settings
class Ablations:
    """Runs that each change a little of one run, `of`: they have its steps, the name `of: label`, and it
    as their baseline."""

    of: str
    each: dict[str, dict[str, Any]]


@settings
class BenchPlan:
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


def slug(name: str) -> str:
    """Return a run's name as a folder name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "run"


def read_plan(path: Path) -> BenchPlan:
    """Read the plan file over those that it `extends`, as recipes do.

    Raises:
        ConfigError: unknown or missing keys, values of the wrong kind: all of them, with a suggestion.
    """
    problems: list[str] = []
    tree = read_tree(path, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return TypeAdapter(BenchPlan).validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    lines = [f"{tree.nearest(k).origin}: {dotted(k)}: {_wrong(e, k)}" for e in errors if (k := tuple(e["loc"]))]
    raise ConfigError("\n".join(dict.fromkeys(lines)))


def _wrong(error: ErrorDetails, keys: KeyPath) -> str:
    """Return what is wrong, in words."""
    if error["type"] in ("missing", "missing_argument"):
        return "is required"
    if error["type"] == "unexpected_keyword_argument":
        known = [f.name for f in fields(_class_at(keys[:-1]))]
        near = difflib.get_close_matches(str(keys[-1]), known, n=1)
        return "is not a known key. " + (f'Did you mean "{near[0]}"?' if near else f"Known here: {', '.join(known)}")
    return explain_error(error, keys)[0]


def _class_at(keys: KeyPath) -> Any:
    """Return the class whose fields stand at these keys of a plan."""
    inside = {
        "data": DataPlan,
        "documents": LognormalLengths,
        "stage": StageData,
        "train": SourceConfig,
        "train_tokenizer": TokenizerTraining,
        "steps": Steps,
        "runs": RunPlan,
        "parallelism": Parallelism,
        "ablations": Ablations,
    }
    return next((inside[str(key)] for key in reversed(keys) if key in inside), BenchPlan)


def expanded_runs(plan: BenchPlan) -> list[RunPlan]:
    """Return the runs of the plan, then those that its ablations make."""
    ablations = plan.ablations
    base = next((run for run in plan.runs if ablations and run.name == ablations.of), None)
    if ablations is None or base is None:
        return list(plan.runs)
    # An ablation is compared with its base alone; a loss that it changes on purpose is held to none.
    base = replace(base, baseline=base.name, same_loss_as=None, warm_from=None)
    changes = {f"{base.name}: {label}": {**base.set, **change} for label, change in ablations.each.items()}
    return [*plan.runs, *(replace(base, name=name, set=changed) for name, changed in changes.items())]


def between_runs(plan: BenchPlan, runs: list[RunPlan]) -> Iterator[str]:
    """Yield what is wrong between the parts of a plan: names, references, steps, lengths."""
    names = [run.name for run in runs]
    yield from (f'runs: "{name}" is given {n} times' for name, n in Counter(names).items() if n > 1)
    for folder, n in Counter(slug(name) for name in dict.fromkeys(names)).items():
        if n > 1:
            yield f'runs: {n} names would share the folder "{folder}": tell them apart by letters or digits'
    if plan.ablations:
        yield from (f"ablations.of: {text}" for text in not_runs([plan.ablations.of], names))
    documents = plan.data.documents
    if sum(given is not None for given in (documents, plan.data.lengths, plan.data.stage)) != 1:
        yield "data: needs one of documents, lengths and stage"
    elif documents is not None and not documents.median < documents.mean:
        yield "data.documents.mean: must be greater than the median: lognormal lengths are skewed"
    if documents is None and plan.data.target_share != 1.0:
        yield "data.target_share: only goes with documents: lengths and stage say which positions are trained"
    for i, run in enumerate(runs):
        if run.model not in plan.models:
            yield f'runs.{i}.model: "{run.model}" is not one of {", ".join(plan.models)}'
        for key, name in (("baseline", run.baseline), ("same_loss_as", run.same_loss_as)):
            yield from (f"runs.{i}.{key}: {text}" for text in not_runs([name] if name else [], names))
        if run.warm_from is not None and run.warm_from not in names[:i]:
            yield f'runs.{i}.warm_from: "{run.warm_from}" is no earlier run'
        yield from (f"runs.{i}.{text}" for text in wrong_processes(run.started))
        steps = run.steps or plan.steps
        timed = steps.total - steps.warm_up
        if timed <= 0 or timed % steps.window or steps.warm_up % steps.window:
            yield (
                f"runs.{i}.steps: warm_up, and total less warm_up, must be multiples of window, and one window is timed"
            )
    for name, model in plan.models.items():
        if "model_type" not in model:
            yield f"models.{name}: needs model_type, the name of a transformers architecture such as qwen3"


def not_runs(wanted: list[str], names: list[str]) -> Iterator[str]:
    """Yield a problem for each name that no run has."""
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            yield f'"{name}" is no run. ' + (f'Did you mean "{near[0]}"?' if near else f"Runs: {', '.join(names)}")


class Lengths(NamedTuple):
    """Documents by their sizes, in the order in which they are taken."""

    positions: list[int]
    "row positions of each"
    targets: list[int]
    "of these, trained ones, at its end"


def read_lengths(path: Path) -> Lengths:
    """Return what a file that `data.lengths` names holds.

    Raises:
        ConfigError: it is not there, or is no such file.
    """
    try:
        found = json.loads(path.read_text())
        lengths = Lengths(found["positions"], found["targets"])
        pairs = list(zip(*lengths, strict=True))
        if not pairs or not all(type(n) is int and type(t) is int and 0 < t <= n for n, t in pairs):
            raise ValueError("documents have whole numbers of positions, and of targets at least 1 and at most these")
    except FileNotFoundError:
        raise ConfigError(f"data.lengths: no such file: {path}") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"data.lengths: {path}: must be a JSON object with the lists positions and targets: {error}"
        ) from None
    return lengths
