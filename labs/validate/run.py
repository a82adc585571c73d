"""Train a recipe eagerly and compiled, in each layout, on one process and several, and have the runs judged. No torch
in this process.

python -m labs.validate.run RUN OUT.json      the logits of a finished run's checkpoint, by plain transformers
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from labs.jobs import first_failure, own_caches, run_logged
from labs.validate.judge import Measured, Verdict, format_spread, in_time, judge, measure, scaling, trios
from labs.validate.verdicts import Ledger, as_in_ledger, check_portable, html, key_words, markdown_page, start_of
from sftkit.config.commands import Parser, path, path_or_id, shipped, typed
from sftkit.config.load import read_config
from sftkit.config.schema import Config, DataConfig, EvalConfig, OptimConfig, TrainConfig
from sftkit.config.tables import DEFAULT, OPTIMIZERS
from sftkit.config.terminal import print_text
from sftkit.errors import ConfigError
from sftkit.launch.launch import CONFIGS, USABLE, Hardware, Launch, Needs, choose, command, find_hardware, needs_of
from sftkit.models.files import Replica
from sftkit.rundir.files import read_object
from sftkit.rundir.names import PROOF, latest_checkpoint
from sftkit.runtime.launcher import signal_env

_LAYOUTS = ("packed", "bucketed", "fixed", "dynamic")
ONLY_WITH = {"data.row_length": "packed", "data.num_buckets": "bucketed", "data.bucket_lengths": "bucketed"}
ONLY_WITH |= {"data.pad_multiple": "dynamic"}
"Settings that only go with one layout."
AS_ADAMW = tuple(spec.name for spec in OPTIMIZERS.values() if spec.name == DEFAULT or spec.saves_memory)
"Optimizers with AdamW's update."
REFERENCE = [
    *("train.engine=reference", "train.precision=fp32", "train.memory=speed", f"optim.name={DEFAULT}"),
    "attention.backend=auto",
]
"Settings of the reference run: each document alone, plain fp32."
_SWITCHED_OFF = [
    *("train.epochs=null", "train.resume=null", "log.wandb=off", "compile.cache=null"),
    *("checkpoint.every=null", "checkpoint.best=null"),
    *("eval.every=null", "eval.at_start=false"),
]
"Settings that a recipe may have and no run of a validation keeps."
_NO_PIPELINE = ["train.pipeline_stages=null", "train.pipeline_schedule=1f1b", "train.pipeline_layers=null"]
"Settings that turn a recipe with stages into a reference."
_NO_GRAPH = ["graph.passes=[]", "graph.dump=false"]
"Settings that turn a recipe with passes into an eager one."


@dataclass(frozen=True)
class ValidationPlan:
    """The comparisons that a validation makes."""

    recipe: str
    script: str
    layouts: tuple[str, ...]
    processes: tuple[int, ...]
    "ascending; GPUs, or CPU processes on a machine without GPUs"
    steps: int
    warm_up: int
    "steps excluded from every speed and from the loss trajectory"
    window: int
    "steps between logged lines"
    overrides: tuple[str, ...]
    timeout_seconds: int
    reference: bool = True
    "whether the reference engine runs if possible; otherwise the eager run is the reference for losses"


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
        """Return its display name: `packed, 1 process, eager`."""
        return f"{self.layout}, {self.processes} process{'es' * (self.processes > 1)}, {self.kind}"


def check_plan(
    plan: ValidationPlan, hardware: Hardware, train: TrainConfig, data: DataConfig, eval: EvalConfig
) -> None:
    """Reject a plan that cannot be judged.

    Raises:
        ConfigError: all problems, one a line.
    """
    problems = []
    # Windows and warm-up share their boundaries, so that no window is half warm-up; a median needs three windows.
    if plan.window < 1 or plan.warm_up < 5 or plan.warm_up % plan.window or plan.steps % plan.window:
        problems.append("--warm-up must be 5 or more, and --warm-up and --steps multiples of --window")
    if plan.steps < plan.warm_up + 3 * plan.window:
        problems.append(f"--steps: {plan.steps} leaves fewer than three windows after {plan.warm_up} steps of warm-up")
    unknown = [layout for layout in plan.layouts if layout not in _LAYOUTS]
    problems += [f'--layouts: "{layout}" is not one of {", ".join(_LAYOUTS)}' for layout in unknown]
    rows = train.global_batch_size
    for count in plan.processes:
        # There may be more processes than CPU cores: they are slow then, but correct.
        if hardware.gpus and count > hardware.gpus:
            problems.append(f"--processes: {count}, but {hardware.gpus} GPUs are visible here")
        elif rows % max(count, 1) or count < 1:
            problems.append(f"--processes: {count} do not divide train.global_batch_size, {rows}")
    if train.fp8:
        problems.append("train.fp8: the eager baseline cannot train in float8: add train.fp8=null")
    # Evaluations are compared too, so a recipe without any would leave a part of the validation empty.
    if not data.val and not data.val_fraction and not eval.tasks:
        problems.append(f"{plan.recipe}: has nothing to evaluate: set data.val or eval.tasks")
    if not Path(plan.script).is_file():
        problems.append(f"--script: {plan.script}: no such file")
    if problems:
        raise ConfigError("\n".join(problems))


def cases(plan: ValidationPlan, cfg: Config, hardware: Hardware, needs: Needs, out: Path) -> list[ValidationRun]:
    """Return an eager and a compiled run for each layout and number of processes; with the fewest also a second eager
    seed, and the reference engine if it supports the recipe's optimizer.
    """
    made = []
    reference = ["reference"] if plan.reference and has_reference(cfg.optim, hardware, needs.replica) else []
    for layout, count in product(plan.layouts, plan.processes):
        # The difference of two seeds is the yardstick for all others, and is measured once: it does not depend on the
        # number of processes. The same holds for the slow reference.
        fewest = count == plan.processes[0]
        kinds = ["eager", "eager, other seed", "compiled", *reference] if fewest else ["eager", "compiled"]
        for kind in kinds:
            # Chosen without the memory requirements that would select a sharded start: the reference engine keeps the
            # model whole.
            launch = launch_of(count, cfg.train, hardware, Needs() if kind == "reference" else needs)
            slug = f"{layout}-{count}-{kind.replace(', ', '-').replace(' ', '-')}"
            folder = out / "runs" / slug
            words = command(launch, plan.script, [plan.recipe, *_settings_of(plan, cfg, layout, kind, folder)])
            environment = environment_of(count, out.resolve() / "caches" / slug, launch)
            made.append(ValidationRun(layout, count, kind, folder, tuple(words), environment))
    return made


def has_reference(optim: OptimConfig, hardware: Hardware, replica: Replica | None) -> bool:
    """Return whether the reference engine has the recipe's optimizer, possibly with other storage, and whether a GPU
    has room for its fp32 weights, gradients and moments.
    """
    known = optim.name == "auto" or optim.name in AS_ADAMW
    needed = replica.parameters * OPTIMIZERS[DEFAULT].training_width("fp32") if replica else 0
    return known and (hardware.gpu_memory_bytes is None or needed <= USABLE * hardware.gpu_memory_bytes)


def launch_of(processes: int, train: TrainConfig, hardware: Hardware, needs: Needs) -> Launch:
    """Return how this many processes are started here: as `make` does on a machine with as many GPUs."""
    if hardware.gpus or processes == 1:
        return choose(replace(hardware, gpus=processes if hardware.gpus else 0), train.global_batch_size, {}, needs)
    # Processes share the cores; by default each would start a thread for all of them.
    threads = {"OMP_NUM_THREADS": str(max(1, hardware.cpu_cores // processes)), "ACCELERATE_USE_CPU": "true"}
    return Launch(CONFIGS / "cpu_ddp.yaml", processes, "", threads)


def environment_of(processes: int, caches: Path, launch: Launch) -> dict[str, str]:
    """Return the environment variables of a run: its own compiler caches, the user's cache of the hub, and the first
    of the visible GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(processes)]
    # own_caches moves XDG_CACHE_HOME, which contains the hub's cache: without HF_HOME each run would download
    # the model.
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return {
        **own_caches(caches),
        "HF_HOME": os.environ.get("HF_HOME", str(cache / "huggingface")),
        "CUDA_VISIBLE_DEVICES": ",".join(devices[:processes]),
        **launch.env,
        **signal_env(os.environ),
    }


def _settings_of(plan: ValidationPlan, cfg: Config, layout: str, kind: str, folder: Path) -> list[str]:
    """Return the settings that a case changes in the recipe, after the user's own changes."""
    compiled, graph = kind == "compiled", cfg.train.engine == "graph"
    words = [*plan.overrides]
    # The recipe may hold settings of its own layout that another layout rejects; within its own layout they stay.
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
        words += REFERENCE
        words += _NO_PIPELINE * (cfg.train.engine == "pipeline")
    # A recompile is a finding of the validation and must not end it.
    return words + ["compile.on_recompile=warn"] * compiled


def typed_command(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the command as a person would type it: `accelerate launch` for our own start of it."""
    # The first words are our own start of accelerate, by the path of this Python.
    start = words.index("--config_file")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    prefix = f"CUDA_VISIBLE_DEVICES={visible} " if visible else ""
    parts = [word.replace(f"{CONFIGS.parent}/", "") for word in words[start:]]
    return typed(prefix + " ".join([".venv/bin/accelerate launch", *parts]))


def parse(description: str | None) -> Namespace:
    """Parse the command line. Print errors and exit with code 2 if there are any."""
    parser = Parser(description)
    parser.add_argument("recipe", nargs="?", type=path_or_id, help="YAML of the stage that is trained")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run")
    parser.add_argument("--script", default="scripts/chat_sft.py", help="the stage (scripts/chat_sft.py)")
    parser.add_argument("--layouts", nargs="+", help="packed, bucketed, fixed, dynamic; default: the recipe's own")
    parser.add_argument(
        "--processes", nargs="+", type=int, default=[1], help="GPUs (or CPU processes) of the runs; default: 1"
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run (100)")
    parser.add_argument("--warm-up", type=int, default=10, help="first steps that count in no speed and no loss (10)")
    parser.add_argument("--window", type=int, default=5, help="steps between logged lines (5)")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds that one run may take (3600)")
    parser.add_argument(
        "--no-reference", action="store_true", help="leave the slow reference run out: losses are held to the eager run"
    )
    parser.add_argument("--judge", type=path, metavar="VALIDATION.json", help="train nothing: judge these earlier runs")
    parser.add_argument(
        "--ledger", type=path, metavar="FILE", help="earlier results (benchmarks/ledger.jsonl if there)"
    )
    parser.add_argument("--record", action="store_true", help="append the result to the ledger if everything passes")
    parser.add_argument("--out", type=path, help="a new folder (runs/validate/RECIPE-TIME)")
    args = parser.parse_intermixed_args()
    if (args.recipe is None) == (args.judge is None):
        parser.error("name a recipe, or earlier runs with --judge")
    return args


def validation_plan(args: Namespace) -> ValidationPlan:
    """Return the plan that the flags request.

    Raises:
        ConfigError: the recipe, or a setting after it, is invalid.
    """
    cfg = read_config(args.recipe, args.overrides, world_size=1)
    return ValidationPlan(
        recipe=args.recipe,
        script=shipped(args.script),
        layouts=tuple(dict.fromkeys(args.layouts or [cfg.data.layout])),
        processes=tuple(sorted(set(args.processes))),
        steps=args.steps,
        warm_up=args.warm_up,
        window=args.window,
        overrides=tuple(args.overrides),
        timeout_seconds=args.timeout,
        reference=not args.no_reference,
    )


def results_dir(args: Namespace) -> Path:
    """Return the folder of the results: --out, or a new folder named after recipe and time."""
    name = "-".join(Path(args.recipe).with_suffix("").parts[-2:])
    return args.out or Path("runs/validate") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


LOGITS_TIMEOUT_SECONDS = 600


def run_validation(plan: ValidationPlan, out: Path, ledger: Ledger | None = None) -> dict[str, Any]:
    """Run all cases in separate processes and judge them, also against the ledger; write out/validation.json,
    .md and .html.

    Returns:
        contents of validation.json.

    Raises:
        ConfigError: the recipe or the plan is invalid; raised before any run.
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
    # The compiled code of a run takes gigabytes and is useless to later runs: each begins with empty caches.
    shutil.rmtree(out / "caches", ignore_errors=True)
    return _write(judged(result, ledger), out)


def judge_again(path: Path, ledger: Ledger | None) -> dict[str, Any]:
    """Judge the runs of an earlier validation.json by today's criteria, and rewrite the pages next to it.

    Raises:
        ConfigError: the file is missing, or holds no finished runs.
    """
    result = read_object(path)
    if not result.get("runs") or not result.get("plan"):
        raise ConfigError(f"--judge: {path} is not a validation.json with runs")
    return _write(judged(result, ledger), path.parent)


def judged(result: dict[str, Any], ledger: Ledger | None = None) -> dict[str, Any]:
    """Return the result with its verdicts."""
    found: list[Verdict] = []
    times = []  # each tokens/s ratio in time, as data; none for failed runs
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
    """Run one training; for a compiled one, also check its checkpoint."""
    case.folder.parent.mkdir(parents=True, exist_ok=True)
    log = case.folder.with_suffix(".log")
    ended = run_logged(list(case.command), log, dict(case.environment), plan.timeout_seconds)
    # With several ranks the launcher's own last line is not informative: report the first failing rank.
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
    """Return the result of loading the case's checkpoint with plain transformers in another process."""
    out = case.folder.with_name(case.folder.name + "-logits.json")
    words = [sys.executable, "-m", "labs.validate.run", str(case.folder), str(out)]
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


def check_logits(run: Path, out: Path) -> None:
    """Write the row on whether the checkpoint's logits equal those that the run recorded.

    Raises:
        FileNotFoundError: the run has no checkpoint.
    """
    from sftkit.verify.round_trip import verify_checkpoint

    folder, recorded = latest_checkpoint(run), json.loads((run / PROOF).read_text())["logits"]
    if folder is None:
        raise FileNotFoundError(f"{run} has no LATEST: no checkpoint was written")
    out.write_text(json.dumps(asdict(verify_checkpoint(folder, recorded)), indent=1))


if __name__ == "__main__":
    check_logits(Path(sys.argv[1]), Path(sys.argv[2]))
