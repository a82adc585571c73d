"""A bench plan: data, models and settings as in a recipe, the runs that differ from them, and the checked recipe of
each run. No torch in this file.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from sftkit.config.keys import explain_error
from sftkit.config.load import read_config
from sftkit.config.schema import (
    Config,
    NonNegative,
    Positive,
    SourceConfig,
    TokenizerTraining,
    TrainConfig,
    num_stages,
    settings,
)
from sftkit.config.tables import STAGE_SCRIPTS
from sftkit.config.topology import Topology
from sftkit.config.yaml import COMMAND_LINE, KeyPath, dotted, read_tree, render_yaml
from sftkit.errors import ConfigError
from sftkit.launch.launch import CONFIGS


@settings
class Parallelism:
    """Sizes of the mesh of processes, which override those in the topology's file; their product is `processes`."""

    dp_replicate_size: Positive = 1
    dp_shard_size: Positive = 1
    tp_size: Positive = 1
    cp_size: Positive = 1


@settings
class Processes:
    """How the processes of a run are started."""

    count: Positive = 1
    topology: str | None = None
    "name of a file of accelerate_configs; null: one process, without a launcher"
    parallelism: Parallelism | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the mesh: those given here, otherwise the topology's own; {}: neither has any."""
        if self.parallelism is not None:
            return asdict(self.parallelism)
        named = accelerate_config(self.topology).get("parallelism_config", {}) if self.topology else {}
        keys = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
        return {key: named[f"parallelism_config_{key}"] for key in keys if f"parallelism_config_{key}" in named}

    def row_topology(self, train: TrainConfig) -> Topology:
        """Return the topology with the dimensions that share rows (tensor and context parallelism, pipeline stages);
        all other dimensions count as copies.
        """
        stages, sizes = num_stages(train) or self.count, self.sizes
        tensor, context = sizes.get("tp_size", 1), sizes.get("cp_size", 1)
        copies = max(1, self.count // (stages * tensor * context))
        return Topology(stages=stages, replicas=copies, tensor=tensor, context=context)


def accelerate_config(topology: str) -> dict[str, Any]:
    """Return the Accelerate config of a topology from accelerate_configs."""
    return yaml.safe_load((CONFIGS / f"{topology}.yaml").read_text())


def wrong_processes(processes: Processes) -> Iterator[str]:
    """Yield the errors in a run's processes, topology and parallelism, each with its key."""
    topologies = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    if processes.topology is None:
        if processes.count > 1:
            yield f"processes: {processes.count} need a topology: one of {', '.join(topologies)}"
        if processes.parallelism is not None:
            yield "parallelism: needs a topology whose distributed_type is FSDP"
        return
    if processes.topology not in topologies:
        near = difflib.get_close_matches(processes.topology, topologies, n=1)
        hint = f'Did you mean "{near[0]}"?' if near else f"Files there: {', '.join(topologies)}"
        yield f'topology: "{processes.topology}" is not a file of accelerate_configs. {hint}'
        return
    kind = accelerate_config(processes.topology)["distributed_type"]
    if processes.parallelism is not None and kind != "FSDP":
        yield (
            f"parallelism: {processes.topology} has no sizes: name a topology whose distributed_type is FSDP, not "
            f"{kind}"
        )
    elif processes.sizes and math.prod(processes.sizes.values()) != processes.count:
        sizes = " x ".join(f"{key} {size}" for key, size in processes.sizes.items())
        yield f"parallelism: {sizes} is {math.prod(processes.sizes.values())}, but processes is {processes.count}"


SYNTHETIC = "synthetic"
"Placeholder in recipes for sources and tokenizer, which the plan's own data and vocabulary replace."
if TYPE_CHECKING:
    Stage = str
else:  # a type checker cannot use a Literal of a table's keys
    Stage = Literal[tuple(STAGE_SCRIPTS)]


@settings
class LognormalLengths:
    """Lengths in row positions: lognormal with this median and mean, rounded, at most `cap` and at least 4."""

    count: Positive
    median: Positive
    mean: Positive
    cap: Annotated[int, Field(ge=8)]


@settings
class Conversations:
    """Synthetic conversations in which each turn is a separate document, as with chat templates that drop the reasoning
    of earlier turns: a conversation of n turns becomes n documents with common prefixes. All sizes are in tokens."""

    count: Positive
    turns: Positive
    question: Positive
    reasoning: Positive
    "only in the last turn of a document; a target"
    answer: Positive
    "a target in the last turn of a document"

    @property
    def longest(self) -> int:
        """Return the positions of the longest document."""
        return self.turns * (self.question + self.answer) + self.reasoning - 1


@settings
class StageData:
    """The data of a stage's script, read and tokenized in the same way: the settings are those of a recipe."""

    name: Stage
    "base, mid, sft or caption"
    train: tuple[SourceConfig, ...]
    train_tokenizer: TokenizerTraining
    max_length: Annotated[int, Field(ge=8)]


@settings
class DataPlan:
    """The data of a plan's runs. Exactly one of four is given: `documents`, `lengths` or `conversations`, sizes of
    synthetic chats, with the same documents for every run of the same seed and vocabulary; or `stage`, the data of a
    stage's script.
    """

    row_length: Positive
    "data.row_length of packed runs"
    documents: LognormalLengths | None = None
    lengths: str | None = None
    "a JSON file next to the plan: `positions` and `targets` of real documents, in order"
    conversations: dict[str, Conversations] | None = None
    "by name; each run takes those that it names"
    stage: StageData | None = None
    "input for models with an encoder: a made-up text says nothing about a picture"
    seed: NonNegative = 0
    target_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """share of each document's positions that are targets, at its end like an answer; 1: all tokens; not
    with `lengths`
    """
    zipf: Annotated[float, Field(ge=0.0)] = 1.0
    """exponent of the token distribution: tokens are drawn independently, with p(rank r) ~ 1 / r**zipf over the
    vocabulary, which a model can learn
    """


@settings
class Steps:
    """The length of a run. Its last total - warm_up steps are timed, in windows of n steps."""

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
    conversations: str | None = None
    "name in data.conversations"
    steps: Steps | None = None
    topology: str | None = None
    "name of a file of accelerate_configs, without .yaml; null: one process, without a launcher"
    processes: Positive = 1
    parallelism: Parallelism | None = None
    "sizes of the mesh; null: those of the topology's file"
    baseline: str | None = None
    "run whose tokens/s are the denominator of the ratio"
    same_loss_as: str | None = None
    "run whose losses are compared with this run's, step by step"
    environment: dict[str, str] = field(default_factory=dict)
    warm_from: str | None = None
    "earlier run whose compiler caches this run starts with; null: empty caches"
    worker: str | None = None
    "script next to the plan that trains instead of the project; null: sftkit"
    options: dict[str, Any] = field(default_factory=dict)
    "arguments of that script"

    @property
    def started(self) -> Processes:
        """Return how its processes are started."""
        return Processes(count=self.processes, topology=self.topology, parallelism=self.parallelism)


@settings
class Ablations:
    """Runs that each change one run, `of`, a little: they have its steps, the name `of: label`, and `of` as
    their baseline.
    """

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
    "for each run"


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    """Return pydantic's validator of a class; to build one takes longer than to use it."""
    return TypeAdapter(kind)


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
        return _adapter(BenchPlan).validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    lines = [f"{tree.nearest(k).origin}: {dotted(k)}: {_wrong(e, k)}" for e in errors if (k := tuple(e["loc"]))]
    raise ConfigError("\n".join(dict.fromkeys(lines)))


def _wrong(error: ErrorDetails, keys: KeyPath) -> str:
    """Return the errors as text."""
    if error["type"] in ("missing", "missing_argument"):
        return "is required"
    if error["type"] == "unexpected_keyword_argument":
        known = [f.name for f in fields(_class_at(keys[:-1]))]
        near = difflib.get_close_matches(str(keys[-1]), known, n=1)
        return "is not a known key. " + (f'Did you mean "{near[0]}"?' if near else f"Known here: {', '.join(known)}")
    return explain_error(error, keys)[0]


def _class_at(keys: KeyPath) -> Any:
    """Return the class that defines the fields at these keys of a plan."""
    inside = {
        "data": DataPlan,
        "documents": LognormalLengths,
        "conversations": Conversations,
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
    """Return the runs of the plan, then those of its ablations."""
    ablations = plan.ablations
    base = next((run for run in plan.runs if ablations and run.name == ablations.of), None)
    if ablations is None or base is None:
        return list(plan.runs)
    # An ablation is compared only with its base; if it changes the loss on purpose, its loss is not checked.
    base = replace(base, baseline=base.name, same_loss_as=None, warm_from=None)
    changes = {f"{base.name}: {label}": {**base.set, **change} for label, change in ablations.each.items()}
    return [*plan.runs, *(replace(base, name=name, set=changed) for name, changed in changes.items())]


def between_runs(plan: BenchPlan, runs: list[RunPlan]) -> Iterator[str]:
    """Yield the contradictions between the parts of a plan: names, references, steps, lengths."""
    names = [run.name for run in runs]
    yield from (f'runs: "{name}" is given {n} times' for name, n in Counter(names).items() if n > 1)
    for folder, n in Counter(slug(name) for name in dict.fromkeys(names)).items():
        if n > 1:
            yield f'runs: {n} names would share the folder "{folder}": give them different letters or digits'
    if plan.ablations:
        yield from (f"ablations.of: {text}" for text in not_runs([plan.ablations.of], names))
    documents = plan.data.documents
    kinds = (documents, plan.data.lengths, plan.data.conversations, plan.data.stage)
    if sum(given is not None for given in kinds) != 1:
        yield "data: needs one of documents, lengths, conversations and stage"
    elif documents is not None and not documents.median < documents.mean:
        yield "data.documents.mean: must be greater than the median: lognormal lengths are skewed"
    if documents is None and plan.data.target_share != 1.0:
        yield "data.target_share: only goes with documents: lengths and stage say which positions are trained"
    for i, run in enumerate(runs):
        if run.model not in plan.models:
            yield f'runs.{i}.model: "{run.model}" is not one of {", ".join(plan.models)}'
        known = plan.data.conversations or {}
        if (run.conversations is not None or known) and run.conversations not in known:
            yield f'runs.{i}.conversations: "{run.conversations}" is not one of {", ".join(known) or "none"}'
        for key, name in (("baseline", run.baseline), ("same_loss_as", run.same_loss_as)):
            yield from (f"runs.{i}.{key}: {text}" for text in not_runs([name] if name else [], names))
        if run.warm_from is not None and run.warm_from not in names[:i]:
            yield f'runs.{i}.warm_from: "{run.warm_from}" is not an earlier run'
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
            yield f'"{name}" is not a run. ' + (f'Did you mean "{near[0]}"?' if near else f"Runs: {', '.join(names)}")


class Lengths(NamedTuple):
    """Documents by their sizes, in order."""

    positions: list[int]
    "row positions of each document"
    targets: list[int]
    "number of targets at the end of each"


def read_lengths(path: Path) -> Lengths:
    """Read the file of `data.lengths`.

    Raises:
        ConfigError: the file is missing or has another format.
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


_OWN = {
    "run.dir": "the bench names a folder for each run",
    "train.max_steps": "it comes from steps.total",
    "log.every": "it comes from steps.window",
    "model.scratch": "it comes from models",
    "data.train": "the documents are those of the plan's data",
}
"Settings that the bench fills in, and their sources."


@settings
class Job(RunPlan):
    """One resolved run with everything that its process needs."""

    fields: dict[str, Any]
    "fields of the transformers config that `model` names"
    config: Config
    data: DataPlan
    steps: Steps
    timeout_seconds: int

    @property
    def folder(self) -> Path:
        """Return the folder of its job.json, log.txt, metrics.jsonl and row.json."""
        return Path(self.config.run.dir)


def save_job(job: Job) -> Path:
    """Create the job's folder, write job.json into it, and return its path."""
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / "job.json"
    path.write_bytes(_adapter(Job).dump_json(job, indent=1))
    return path


def read_job(path: Path) -> Job:
    """Read the job that `save_job` wrote."""
    return _adapter(Job).validate_json(path.read_bytes())


def read_jobs(path: Path, out: Path, only: list[str] | None = None) -> list[Job]:
    """Return the runs of a plan: ablations expanded, settings checked like those of a recipe, results in folders
    under `out`.

    Args:
        only: names of the runs to return; None: all.

    Raises:
        ConfigError: every problem of the plan, one a line, with file and key.
    """
    # Report contradictions within the plan first: they would reject its runs for reasons that only follow from them.
    plan = read_plan(path)
    if plan.data.lengths is not None:  # a path that does not depend on the working directory
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


def _data_of(plan: BenchPlan, run: RunPlan) -> DataPlan:
    """Return the data of a run, with the conversations that it names alone."""
    if plan.data.conversations is None or run.conversations is None:
        return plan.data
    return replace(plan.data, conversations={run.conversations: plan.data.conversations[run.conversations]})


def _cap(data: DataPlan) -> int:
    """Return the positions of the longest document."""
    if data.conversations is not None:
        return max(one.longest for one in data.conversations.values())
    if data.documents is not None:
        return data.documents.cap
    if data.stage is not None:
        return data.stage.max_length
    assert data.lengths is not None
    return max(read_lengths(Path(data.lengths)).positions)


def _job(plan: BenchPlan, run: RunPlan, path: Path, out: Path) -> Job:
    """Resolve a run of the plan.

    Raises:
        ConfigError: its worker or its settings are invalid.
    """
    steps = run.steps or plan.steps
    worker = None if run.worker is None else path.parent / run.worker
    if worker is not None and not worker.is_file():
        raise ConfigError(f"{path}: run {run.name}: worker: no such file: {worker}")
    own = {
        "fields": plan.models[run.model],
        "config": _config(plan, run, steps, path, out),
        "data": _data_of(plan, run),
        "steps": steps,
        "timeout_seconds": plan.timeout_seconds,
        "worker": None if worker is None else str(worker),
    }
    return Job(**{**vars(run), **own})


def _config(plan: BenchPlan, run: RunPlan, steps: Steps, path: Path, out: Path) -> Config:
    """Return the recipe of a run: the plan's defaults, then `set`, then the settings that the bench fills in.

    Raises:
        ConfigError: names places in the plan, not in the recipe made from it.
    """
    flat = dict(_leaves(plan.defaults)) | run.set
    own = [f"{path}: run {run.name}: {key}: is not set here, {reason}" for key, reason in _OWN.items() if key in flat]
    if own:
        raise ConfigError("\n".join(own))
    # A row of another layout holds one document, so data.row_length would be rejected.
    packed = flat.get("data.layout", "packed") in ("packed", "tree")
    filled = {
        "data.max_length": _cap(_data_of(plan, run)),
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
    # Read it as a file, so that it is checked like every recipe. Errors name the place in the plan.
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
    """Return the sections of a recipe that define the data and the tokenizer."""
    if data.stage is None:
        return {"model": {"tokenizer": SYNTHETIC}, "data": {"train": [{"path": SYNTHETIC}]}}
    kind: Any = type(data.stage)
    plain = _adapter(kind).dump_python(data.stage, mode="json", exclude_defaults=True)
    return {"model": {"train_tokenizer": plain["train_tokenizer"]}, "data": {"train": plain["train"]}}


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested settings."""
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
