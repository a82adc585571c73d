"""Rules between settings. Each rule yields (key, what is wrong)."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from sftkit.config.chat_templates import CHAT_TEMPLATES
from sftkit.config.compile_rules import COMPILE_RULES
from sftkit.config.engine_rules import ENGINE_RULES, enough_micro_batches
from sftkit.config.eval_tasks import CODE, EVAL_TASKS
from sftkit.config.optimizers import OPTIMIZERS
from sftkit.config.paths import unusable
from sftkit.config.rule import Get, OfLaunch, Problem, Rule, Unusable
from sftkit.config.schema import SourceConfig, source_label
from sftkit.config.topology import Topology

BUILTIN_SOURCES = ("builtin:docs", "builtin:tasks", "builtin:pictures")
STEP_PATH = re.compile(r"/|\\|^step-")
"What looks like the path of a step directory."


def cross_check(get: Get, topology: Topology, more: Sequence[Rule | OfLaunch]) -> Iterator[Problem]:
    """Yield all problems between settings, those with the topology of a launch, and those that further rules find."""
    for rule in (*_RULES, OfLaunch(_batch_divides), OfLaunch(enough_micro_batches), *more):
        with suppress(Unusable):
            yield from rule.find(get, topology) if isinstance(rule, OfLaunch) else rule(get)


def run_dir_can_be_made(get: Get) -> Iterator[Problem]:
    """Yield why no run can be written to run.dir, for a script that makes a run."""
    if problem := unusable(get("run.dir")):
        yield "run.dir", problem


def _one_origin(get: Get) -> Iterator[Problem]:
    path, scratch = get("model.path"), get("model.scratch")
    if (path is None) == (scratch is None):
        both = "are both given" if path is not None else "are both missing"
        yield "model.path", f"model.path and model.scratch {both}: set exactly one of them"


def _run_dir(get: Get) -> Iterator[Problem]:
    run_dir, path = get("run.dir"), get("model.path")
    # A new run renames the folder that it finds at run.dir: that must never be the current one, or one around it.
    if not run_dir.strip() or Path(os.path.realpath(".")).is_relative_to(os.path.realpath(run_dir)):
        yield "run.dir", f'"{run_dir}" names no folder of its own: runs/NAME, say'
    elif path is not None and Path(os.path.normpath(path)).is_relative_to(os.path.normpath(run_dir)):
        yield "run.dir", f"the model comes from it ({path}), and a new run would rename it: take another folder"


def _scratch(get: Get) -> Iterator[Problem]:
    if get("model.scratch") is None:
        return
    if "model_type" not in get("model.scratch"):
        yield "model.scratch", "needs model_type, the name of a transformers architecture such as llama"
    if get("model.tokenizer") is None and get("model.train_tokenizer") is None:
        yield "model.scratch", "needs a tokenizer: set model.tokenizer or model.train_tokenizer"


def _train_tokenizer(get: Get) -> Iterator[Problem]:
    if get("model.train_tokenizer") is None:
        return
    if get("model.tokenizer") is not None:
        yield "model.train_tokenizer", "and model.tokenizer are both given: keep one of them"
    if get("model.scratch") is None:
        yield "model.train_tokenizer", "only goes with model.scratch: a checkpoint has its tokenizer"


def _only_with_path(get: Get) -> Iterator[Problem]:
    for key, default in (("model.revision", None), ("model.trust_remote_code", False)):
        if get("model.path") is None and get(key) != default:
            yield key, "only goes with model.path"


def _chat_template(get: Get) -> Iterator[Problem]:
    template = get("model.chat_template")
    if template is None or template in CHAT_TEMPLATES or re.search(r"[./\\]", template) or Path(template).exists():
        return
    hint = f'; did you mean "{near[0]}"?' if (near := difflib.get_close_matches(template, CHAT_TEMPLATES, n=1)) else ""
    yield "model.chat_template", f'"{template}" is neither {", ".join(CHAT_TEMPLATES)} nor a Jinja file{hint}'


def _checkpoints(get: Get) -> Iterator[Problem]:
    saves, evaluates, pins = get("checkpoint.every"), get("eval.every"), get("checkpoint.pin_every")
    if pins is not None and (saves is None or pins % saves):
        problem = f"{pins} is not a multiple of checkpoint.every, {saves}: no such checkpoint is written"
        yield "checkpoint.pin_every", problem
    if get("checkpoint.best") is not None and (saves is None or evaluates is None):
        yield "checkpoint.best", "needs checkpoint.every and eval.every: only a step with both can be the best"


def _sources(get: Get) -> Iterator[Problem]:
    for part in ("data.train", "data.val", "model.train_tokenizer.sources"):
        try:
            sources = [SourceConfig(**row) for row in get(part) or ()]
        except Unusable:
            continue
        if part == "data.train" and not sources:
            yield part, "is empty: give at least one source"
        first_with: dict[str, int] = {}
        for i, source in enumerate(sources):
            label = source_label(source)
            if (first := first_with.setdefault(label, i)) != i:
                yield f"{part}.{i}.name", f'"{label}" is already the name of {part}.{first}: set another name'
            if source.path.startswith("builtin:"):
                if source.path not in BUILTIN_SOURCES:
                    yield f"{part}.{i}.path", f'"{source.path}" is not one of {", ".join(BUILTIN_SOURCES)}'
                if source.split not in ("train", "heldout"):
                    yield f"{part}.{i}.split", f'"{source.split}" is not one of train, heldout, the splits of a builtin'


def _buckets(get: Get) -> Iterator[Problem]:
    key, layout, lengths = "data.bucket_lengths", get("data.layout"), get("data.bucket_lengths")
    other_layout = f"only goes with layout bucketed, not {layout}" if layout != "bucketed" else None
    if get("data.num_buckets") is not None and (other_layout or lengths is not None):
        yield "data.num_buckets", other_layout or f"and {key} are both given"
    if lengths is None:
        return
    if other_layout:
        yield key, other_layout
    if not lengths:
        yield key, "is empty: null lets data.num_buckets lengths be chosen from the data"
        return
    # Rows take the first bucket that holds them.
    if any(a >= b for a, b in itertools.pairwise(lengths)):
        yield key, f"{lengths} is not ascending without repeats"
    max_length = get("data.max_length")
    if max_length is not None and max(lengths) != max_length:
        yield key, f"ends with {max(lengths)}, but data.max_length is {max_length}: they must be equal"


def _row_length(get: Get) -> Iterator[Problem]:
    row_length, layout, max_length = get("data.row_length"), get("data.layout"), get("data.max_length")
    if row_length is None:
        return
    if layout != "packed":
        yield "data.row_length", f"only goes with layout packed, not {layout}, whose rows hold one document"
    elif max_length is not None and row_length < max_length:
        yield (
            "data.row_length",
            f"{row_length} cannot hold a document of data.max_length, {max_length}: raise it or lower data.max_length",
        )


def _dynamic(get: Get) -> Iterator[Problem]:
    max_length, multiple, only = get("data.max_length"), get("data.pad_multiple"), "only goes with layout dynamic"
    if (layout := get("data.layout")) != "dynamic":
        if multiple is not None:
            yield "data.pad_multiple", f"{only}, not {layout}"
        if get("compile.dynamic") == "marked":
            yield "compile.dynamic", f"marked {only}, not {layout}, whose rows have fixed lengths"
        return
    multiple = multiple or 8
    if max_length is not None and max_length % multiple:
        yield "data.max_length", f"{max_length} is not a multiple of data.pad_multiple, {multiple}"
    if get("compile.dynamic") is True:
        yield "compile.dynamic", "true does not go with layout dynamic, which makes the row length symbolic by itself"


def _attention(get: Get) -> Iterator[Problem]:
    if get("attention.backend") == "sdpa" and get("data.layout") == "packed":
        yield (
            "attention.backend",
            "sdpa keeps no documents apart, and packed rows hold several documents: take another backend, or layout "
            "bucketed, fixed or dynamic",
        )


def _precision(get: Get) -> Iterator[Problem]:
    if get("train.precision") != "fp32":
        return
    optimizer = OPTIMIZERS.get(get("optim.name"))  # None: auto
    if optimizer is not None and optimizer.rounds_weights:
        yield "optim.name", f"{optimizer.name} rounds weights to bf16 and does not go with train.precision fp32"
    if get("train.fp8") is not None:
        yield "train.fp8", f"{get('train.fp8')} does not go with train.precision fp32: set bf16"


def _schedule(get: Get) -> Iterator[Problem]:
    if get("optim.schedule") == "wsd":
        warmup, decay = get("optim.warmup_ratio"), get("optim.decay_ratio")
        if warmup + decay > 1:
            yield "optim.warmup_ratio", f"{warmup} and optim.decay_ratio {decay} add up to more than 1"


def _betas(get: Get) -> Iterator[Problem]:
    if any(beta >= 1 for beta in get("optim.betas")):
        yield "optim.betas", f"{get('optim.betas')} must both be less than 1"


def _duration(get: Get) -> Iterator[Problem]:
    if get("train.max_steps") is None and get("train.epochs") is None:
        yield "train.max_steps", "train.max_steps and train.epochs are both missing: set one, or both"


def _resume(get: Get) -> Iterator[Problem]:
    resume = get("train.resume")
    if resume is not None and resume != "auto" and not STEP_PATH.search(resume):
        yield "train.resume", f'"{resume}" is neither auto, null nor the path of a step directory'


def _eval(get: Get) -> Iterator[Problem]:
    if get("eval.every") is not None and not get("eval.tasks") and not get("data.val"):
        yield "eval.every", "has nothing to evaluate: set data.val or eval.tasks"
    tasks, backend = get("eval.tasks"), get("eval.backend")
    yield from eval_problems(tasks, backend, allow_code_execution=get("eval.allow_code_execution"))


def eval_problems(tasks: Sequence[str], backend: str, *, allow_code_execution: bool) -> Iterator[Problem]:
    """Yield what is wrong with the names of evaluation tasks. Those of lm_eval are checked when it is loaded."""
    for task in dict.fromkeys(tasks):
        if tasks.count(task) > 1:
            yield "eval.tasks", f'"{task}" is named twice'
        if backend != "lm_eval" and task not in EVAL_TASKS:
            near = difflib.get_close_matches(task, EVAL_TASKS, n=1)
            hint = f' Did you mean "{near[0]}"?' if near else " For others set eval.backend to lm_eval"
            yield "eval.tasks", f'"{task}" is not one of {", ".join(EVAL_TASKS)}.{hint}'
    code = [task for task in tasks if task in CODE]
    if code and backend == "lm_eval":
        yield (
            "eval.tasks",
            f"{code[0]} runs code that the model writes, which lm_eval does without a sandbox: use backend sftkit",
        )
    elif code and not allow_code_execution:
        yield (
            "eval.allow_code_execution",
            f"false does not go with {code[0]}, which runs programs that the model writes; true runs each in a "
            "process of its own without network, in an empty folder, with limits on time, memory and processes "
            "(docs/evaluation.md)",
        )


def _names(get: Get) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,80}", get("log.project")):
        yield "log.project", "must be 1 to 80 letters, digits, dots, dashes or underscores"
    group = get("log.group")
    if group is not None and not 1 <= len(group) <= 128:
        yield "log.group", f"{len(group)} characters: wandb takes 1 to 128; null takes the folder above run.dir"
    for tag in get("log.tags"):
        if not 1 <= len(tag) <= 64:
            yield "log.tags", f'"{tag[:20]}" has {len(tag)} characters: wandb takes 1 to 64'


def _batch_divides(get: Get, topology: Topology) -> Iterator[Problem]:
    batch, world_size = get("train.global_batch_size"), topology.row_ranks
    if batch % world_size:
        below = batch // world_size * world_size
        works = f"{below} or {below + world_size}" if below else f"{world_size}"
        yield "train.global_batch_size", f"{batch} cannot be shared equally by {world_size} processes: use {works}"


_RULES = (
    *(_one_origin, _run_dir, _scratch, _train_tokenizer, _only_with_path, _chat_template, _checkpoints),
    *(_sources, _buckets, _row_length, _dynamic, _attention, _precision),
    *(*ENGINE_RULES, *COMPILE_RULES),
    *(_schedule, _betas, _duration, _resume, _eval, _names),
)
