"""The runs that a validation compares: eager and compiled, each layout, one process and several. No torch
in this file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from sftkit.config.commands import typed
from sftkit.config.schema import Config, DataConfig, EvalConfig, OptimConfig, TrainConfig
from sftkit.config.tables import DEFAULT, OPTIMIZERS
from sftkit.errors import ConfigError
from sftkit.experiments.bench.processes import own_caches
from sftkit.launch.launch import CONFIGS, USABLE, Hardware, Launch, Needs, choose, command
from sftkit.models.files import Replica
from sftkit.runtime.launcher import signal_env

_LAYOUTS = ("packed", "bucketed", "fixed", "dynamic")
ONLY_WITH = {"data.row_length": "packed", "data.num_buckets": "bucketed", "data.bucket_lengths": "bucketed"}
ONLY_WITH |= {"data.pad_multiple": "dynamic"}
"Settings that only go with one layout."
AS_ADAMW = tuple(spec.name for spec in OPTIMIZERS.values() if spec.name == DEFAULT or spec.saves_memory)
"Optimizers whose update is AdamW's."
REFERENCE = [
    *("train.engine=reference", "train.precision=fp32", "train.memory=speed", f"optim.name={DEFAULT}"),
    "attention.backend=auto",
]
"Settings of the reference run: each document alone, plain fp32."
_SWITCHED_OFF = [
    *("train.epochs=null", "train.resume=null", "log.wandb=off", "log.tracker=none", "compile.cache=null"),
    *("compile.debug=[]", "checkpoint.every=null", "checkpoint.best=null"),
    *("eval.every=null", "eval.at_start=false"),
]
"What a recipe may have that no run of a validation does."
_NO_PIPELINE = ["train.pipeline_stages=null", "train.pipeline_schedule=1f1b", "train.pipeline_layers=null"]
"What a recipe with stages needs to be a reference."
_NO_GRAPH = ["graph.passes=[]", "graph.dump=false"]
"What a recipe with passes needs to be eager."


@dataclass(frozen=True)
class ValidationPlan:
    """What a validation is asked to compare."""

    recipe: str
    script: str
    layouts: tuple[str, ...]
    processes: tuple[int, ...]
    "ascending; GPUs, or CPU processes on a machine without"
    steps: int
    warm_up: int
    "steps left out of every speed and of the loss trajectory"
    window: int
    "steps between logged lines"
    overrides: tuple[str, ...]
    timeout_seconds: int
    reference: bool = True
    "whether the reference engine runs where it can; else losses are held to the eager run"


@dataclass(frozen=True)
class ValidationRun:
    """One training run."""

    layout: str
    processes: int
    kind: str
    "eager | eager, other seed | compiled | reference"
    folder: Path
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """Return its name for people: `packed, 1 process, eager`."""
        return f"{self.layout}, {self.processes} process{'es' * (self.processes > 1)}, {self.kind}"


def check_plan(
    plan: ValidationPlan, hardware: Hardware, train: TrainConfig, data: DataConfig, eval: EvalConfig
) -> None:
    """Refuse a plan that cannot be judged.

    Raises:
        ConfigError: all problems, one a line.
    """
    problems = []
    # Windows and warm-up begin and end at the same steps, so that no window is half warm-up; three make a median.
    if plan.window < 1 or plan.warm_up < 5 or plan.warm_up % plan.window or plan.steps % plan.window:
        problems.append("--warm-up must be 5 or more, and --warm-up and --steps multiples of --window")
    if plan.steps < plan.warm_up + 3 * plan.window:
        problems.append(f"--steps: {plan.steps} leaves fewer than three windows after {plan.warm_up} steps of warm-up")
    unknown = [layout for layout in plan.layouts if layout not in _LAYOUTS]
    problems += [f'--layouts: "{layout}" is not one of {", ".join(_LAYOUTS)}' for layout in unknown]
    rows = train.global_batch_size
    for count in plan.processes:
        # Processes on a CPU may be more than its cores: they are slow then, but not wrong.
        if hardware.gpus and count > hardware.gpus:
            problems.append(f"--processes: {count}, but {hardware.gpus} GPUs are visible here")
        elif rows % max(count, 1) or count < 1:
            problems.append(f"--processes: {count} do not divide train.global_batch_size, {rows}")
    if train.fp8:
        problems.append("train.fp8: the eager baseline cannot train in float8: add train.fp8=null")
    # Evaluations are compared too, so a recipe without any leaves a part of the validation empty.
    if not data.val and not eval.tasks:
        problems.append(f"{plan.recipe}: has nothing to evaluate: set data.val or eval.tasks")
    if not Path(plan.script).is_file():
        problems.append(f"--script: {plan.script}: no such file")
    if problems:
        raise ConfigError("\n".join(problems))


def cases(plan: ValidationPlan, cfg: Config, hardware: Hardware, needs: Needs, out: Path) -> list[ValidationRun]:
    """Return for each layout and number of processes an eager and a compiled run; with the fewest also a second eager
    seed, and the reference engine where it has the recipe's optimizer."""
    made = []
    reference = ["reference"] if plan.reference and has_reference(cfg.optim, hardware, needs.replica) else []
    for layout, count in product(plan.layouts, plan.processes):
        # How far two seeds differ is the measure for all others, and needs to be known once: it does not depend on the
        # number of processes. Nor does the reference, which is slow.
        fewest = count == plan.processes[0]
        kinds = ["eager", "eager, other seed", "compiled", *reference] if fewest else ["eager", "compiled"]
        for kind in kinds:
            # Without needs no sharded start is chosen: the reference engine keeps the model whole.
            launch = launch_of(count, cfg.train, hardware, Needs() if kind == "reference" else needs)
            slug = f"{layout}-{count}-{kind.replace(', ', '-').replace(' ', '-')}"
            folder = out / "runs" / slug
            words = command(launch, plan.script, [plan.recipe, *_settings_of(plan, cfg, layout, kind, folder)])
            environment = environment_of(count, out.resolve() / "caches" / slug, launch)
            made.append(ValidationRun(layout, count, kind, folder, tuple(words), environment))
    return made


def has_reference(optim: OptimConfig, hardware: Hardware, replica: Replica | None) -> bool:
    """Return whether the reference engine computes what the recipe's optimizer does, which only differs in how it
    stores, and whether a GPU has room for its fp32 weights, gradients and moments."""
    known = optim.name == "auto" or optim.name in AS_ADAMW
    needed = replica.parameters * OPTIMIZERS[DEFAULT].training_width("fp32") if replica else 0
    return known and (hardware.gpu_memory_bytes is None or needed <= USABLE * hardware.gpu_memory_bytes)


def launch_of(processes: int, train: TrainConfig, hardware: Hardware, needs: Needs) -> Launch:
    """Return how so many processes are started here: as `make` does on a machine with so many GPUs."""
    if hardware.gpus or processes == 1:
        return choose(replace(hardware, gpus=processes if hardware.gpus else 0), train.global_batch_size, {}, needs)
    # Processes share the cores, where each would otherwise start a thread for all of them.
    threads = {"OMP_NUM_THREADS": str(max(1, hardware.cpu_cores // processes)), "ACCELERATE_USE_CPU": "true"}
    return Launch(CONFIGS / "cpu_ddp.yaml", processes, "", threads)


def environment_of(processes: int, caches: Path, launch: Launch) -> dict[str, str]:
    """Return the environment variables of a run: compiler caches of its own, but the user's cache of the hub; and the
    first GPUs of those that are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(processes)]
    # own_caches moves XDG_CACHE_HOME, below which the hub's cache is: without HF_HOME each run would
    # download the model.
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return {
        **own_caches(caches),
        "HF_HOME": os.environ.get("HF_HOME", str(cache / "huggingface")),
        "CUDA_VISIBLE_DEVICES": ",".join(devices[:processes]),
        **launch.env,
        **signal_env(os.environ),
    }


def _settings_of(plan: ValidationPlan, cfg: Config, layout: str, kind: str, folder: Path) -> list[str]:
    """Return what a case changes of the recipe, after the user's own changes."""
    compiled, graph = kind == "compiled", cfg.train.engine == "graph"
    words = [*plan.overrides]
    # The recipe may hold settings of its own layout that another one refuses; those of its own layout stay.
    words += [f"{key}=null" for key, owner in ONLY_WITH.items() if layout not in (owner, cfg.data.layout)]
    words += [
        f"data.layout={layout}",
        f"run.dir={folder}",
        f"run.seed={cfg.run.seed + (kind == 'eager, other seed')}",
        f"train.max_steps={plan.steps}",
        f"log.every={plan.window}",
        f"compile.enabled={str(compiled).lower()}",
        *_SWITCHED_OFF,
    ]
    words += _NO_GRAPH * (graph and not compiled)
    if kind == "reference":
        words += [*REFERENCE, *["graph.token_dispatcher=allgather"] * graph]
        words += _NO_PIPELINE * (cfg.train.engine == "pipeline")
    # A recompile is a finding of the validation, not its end.
    return words + ["compile.on_recompile=warn"] * compiled


def typed_command(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the command as a person would type it: `accelerate launch` for our own start of it."""
    # What comes before is our own start of accelerate, by the path of this Python.
    start = words.index("--config_file")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    prefix = f"CUDA_VISIBLE_DEVICES={visible} " if visible else ""
    parts = [word.replace(f"{CONFIGS.parent}/", "") for word in words[start:]]
    return typed(prefix + " ".join([".venv/bin/accelerate launch", *parts]))
