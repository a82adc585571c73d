"""Rules between settings, without torch: each rule yields (key, what is wrong).

Rules about what an engine cannot do on the processes of a launch, or with a model, are asked before anything is loaded
(preflight.launched), as far as the model's config is there to be read, and again by the engines of the model itself.
The text of their problems names the setting by itself.
"""

import difflib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sftkit.config.commands import install, unusable
from sftkit.config.schema import LARGEST_TOGETHER, SourceConfig, source_label, where_counts
from sftkit.config.tables import CHAT_TEMPLATES, CODE, DEFAULT, EVAL_TASKS, OPTIMIZERS, TASKS, problems
from sftkit.config.topology import Topology, stages_fit
from sftkit.errors import did_you_mean, hint

Problem = tuple[str, str]
"Key, and what is wrong with it."
Get = Callable[[str], Any]
"""Value of a dotted key, default included: Any, for the rule knows the type of what it asks for. Raises Unusable for a
key that already has a problem."""
Rule = Callable[[Get], Iterator[Problem]]


@dataclass(frozen=True)
class OfLaunch:
    """A rule that also asks how the processes of the launch share the work."""

    find: Callable[[Get, Topology], Iterator[Problem]]


class Unusable(Exception):
    """The rule asks for a value that was already reported: skip the rule. Its text is the key that has the problem."""


def _compiled_only(get: Get) -> Iterator[Problem]:
    if get("compile.enabled"):
        return
    useless = {
        "train.fp8": "uncompiled, the scaling costs more than float8 saves",
        "compile.cache": "there is no compiled code to keep",
    }
    yield from ((key, f"only goes with compile.enabled true: {why}") for key, why in useless.items() if get(key))


def _inductor_only(get: Get) -> Iterator[Problem]:
    backend = get("compile.backend")
    # The graph engine ignores them: see _graph.
    if backend == "inductor" or get("train.engine") == "graph":
        return
    wrong = f"only goes with compile.backend inductor, not {backend}"
    if (mode := get("compile.mode")) is not None:
        yield "compile.mode", f"{mode} {wrong}: set compile.backend=inductor"
    if get("compile.options") is not None:
        yield "compile.options", wrong


def _options(get: Get) -> Iterator[Problem]:
    for name, value in (get("compile.options") or {}).items():
        if name == "_micro_pipeline_tp":
            yield "compile.options", f"{name}: was removed: gradients of weights hide as much (docs/distributed.md)"
        if not isinstance(value, bool | int | float | str):
            yield "compile.options", f"{name}: must be true, false, a number or text, not {json.dumps(value)}"


def _engine(get: Get) -> Iterator[Problem]:
    if get("train.engine") != "reference":
        return
    if get("train.precision") != "fp32":
        yield "train.engine", "reference computes in fp32: set train.precision=fp32"
    # Rejected, not ignored: other runs are judged by this one, and a setting without effect would be believed.
    unused: dict[str, str | None] = {"compile.cache": None, "train.fp8": None}
    unused |= {"train.memory": "speed", "attention.backend": "auto"}
    for key, default in unused.items():
        if (get(key) or None) != default:
            yield key, "has no effect with train.engine reference, which is plain: leave it out"
    if get("optim.name") not in ("auto", DEFAULT):
        yield "train.engine", f"reference has torch's AdamW only: set optim.name={DEFAULT}, not {get('optim.name')}"


def _freeze(get: Get) -> Iterator[Problem]:
    if get("train.freeze") and (engine := get("train.engine")) in ("pipeline", "graph"):
        wrong = f"does not go with train.engine {engine}, which trains all parameters"
        yield "train.freeze", f"{wrong}: set it to [], or train.engine=blocks"


def _neftune(get: Get, topology: Topology) -> Iterator[Problem]:
    if get("train.neftune_alpha") is None:
        return
    if (engine := get("train.engine")) != "blocks":
        yield "train.neftune_alpha", f"does not go with train.engine {engine}: set it to null, or take blocks"
    elif get("compile.enabled") and get("compile.scope") == "model":
        yield "train.neftune_alpha", "does not go with compile.scope model, whose graph has the embedding: take block"
    if topology.tensor > 1 or topology.context > 1:
        why = f"{topology.describe()}, whose ranks share documents"
        yield "train.neftune_alpha", f"does not go with {why}: start with fsdp2.yaml, or set it to null"
    if get("adapters") is not None:
        yield "train.neftune_alpha", "does not go with adapters: they would not be trained as if alone. Set it to null"


def _adapter(get: Get, topology: Topology) -> Iterator[Problem]:
    if get("adapter") is None:
        return
    engine = get("train.engine")
    if engine in ("pipeline", "graph"):
        yield "adapter", f"does not go with train.engine {engine}, which trains all parameters: set train.engine=blocks"
    elif topology.tensor > 1:
        yield "adapter", f"does not go with tensor parallelism ({topology.describe()}): start with fsdp2.yaml instead"
    if get("adapter.base") == "nf4" and topology.sharded:
        yield "adapter.base", hint("nf4 in shards", topology=topology.describe())
    if get("optim.name") not in ("auto", DEFAULT):
        yield "optim.name", hint("optimizer of an adapter", name=get("optim.name"), default=DEFAULT)
    if get("train.fp8") is not None:
        yield "train.fp8", "does not go with adapter: float8 layers would get none. Set it to null"
    if get("train.freeze"):
        yield "train.freeze", "does not go with adapter, which freezes the whole model: leave it out"
    if get("adapter.method") == "dora" and get("adapter.dropout"):
        yield "adapter.dropout", "does not go with adapter.method dora: set it to 0"
    if not get("adapter.targets"):
        yield "adapter.targets", "is empty: name layers, or leave it out for all-linear"


_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"A name that is a folder on any disk, and a part of a metric's name."


def _trees(get: Get, topology: Topology) -> Iterator[Problem]:
    if get("data.layout") != "tree":
        return
    key, other = "data.layout", "take packed"
    if (engine := get("train.engine")) in ("pipeline", "graph"):
        yield key, f"tree does not go with train.engine {engine}, which has rows of whole documents: {other}, or blocks"
    if topology.context > 1 or topology.tensor > 1:
        why = f"{topology.describe()}, whose ranks share rows"
        yield key, f"tree does not go with {why}: start with fsdp2.yaml, or {other}"
    if (backend := get("attention.backend")) not in ("auto", "flex", "reference"):
        yield "attention.backend", f"{backend} sees no trees: set auto, flex or reference, or data.layout=packed"
    if get("train.neftune_alpha") is not None:
        why = "whose noise depends on the length of one document"
        yield key, f"tree does not go with train.neftune_alpha, {why}: set that to null, or {other}"


def _adapters(get: Get, topology: Topology) -> Iterator[Problem]:
    entries = get("adapters")
    if entries is None:
        return
    if get("adapter") is None:
        yield "adapters", "needs adapter, which has what they share: add adapter: {} for the defaults"
        return
    if not entries:
        yield "adapters", "is empty: name at least one, or leave it out for a single adapter"
    names = [entry["name"] for entry in entries]
    for i, name in enumerate(names):
        if not _FOLDER.fullmatch(name):
            what = "is no name of a folder: take up to 64 letters, digits, dots, - and _, a letter or digit first"
            yield f"adapters.{i}.name", f'"{name}" {what}'
        # Without case, as some disks compare the names of folders.
        elif (first := [one.lower() for one in names].index(name.lower())) != i:
            yield f"adapters.{i}.name", f'"{name}" is already the name of adapters.{first}: set another name'
    ranks = [entry.get("rank") or get("adapter.rank") for entry in entries]
    if sum(ranks) > LARGEST_TOGETHER:
        why = "each pass copies the factors of all adapters, which above that costs more than the frozen weights"
        yield "adapters", f"their ranks add up to {sum(ranks)}, and at most {LARGEST_TOGETHER} go together: {why}"
    if topology.world_size > 1:
        yield "adapters", f"go with one process only yet, not with {topology.describe()}: start without a launcher"
    wanted = {
        "adapter.method": ("lora", "trains lora only yet"),
        "adapter.dropout": (0.0, "has no dropout yet: adapters would not be trained as if alone"),
        "train.engine": ("blocks", "goes with train.engine blocks only"),
    }
    for key, (value, why) in wanted.items():
        if get(key) != value:
            yield key, f"{get(key)} does not go with adapters, which {why}: set {value}"
    if get("adapter.base") not in (None, "bf16"):
        yield "adapter.base", f"{get('adapter.base')} does not go with adapters yet: set bf16, or train one adapter"
    if (layout := get("data.layout")) not in ("packed", "fixed"):
        why = "whose steps have one row length: set packed"
        yield "data.layout", f"{layout} does not go with adapters, {why}"
    fixed = {"train.global_batch_size", "run.seed", "data.train"} & {*get("train.resume_changes")}
    if fixed:
        yield "train.resume_changes", f"{min(fixed)} cannot change with adapters: start a new run"


def _pipeline(get: Get) -> Iterator[Problem]:
    if get("train.engine") != "pipeline":
        wrong = f"only goes with train.engine pipeline, not {get('train.engine')}"
        for name, default in (("stages", None), ("schedule", "1f1b"), ("layers", None)):
            if get(f"train.pipeline_{name}") != default:
                yield f"train.pipeline_{name}", f"{wrong}: leave it out, or set train.engine=pipeline"
        return
    if get("data.layout") in ("bucketed", "dynamic"):
        yield "train.engine", hint("rows of several lengths in a pipeline", layout=get("data.layout"))
    if get("train.fp8") is not None:
        problem = "does not go with train.engine pipeline: its scales are not exchanged between stages; set it to null"
        yield "train.fp8", problem
    if get("compile.backend") == "cudagraphs" or get("compile.mode") in ("reduce-overhead", "max-autotune"):
        yield "train.engine", hint("CUDA graphs in a pipeline")


def enough_micro_batches(get: Get, topology: Topology) -> Iterator[Problem]:
    """Yield a problem if a pipeline gets too few micro-batches. Processes with rows of their own, or groups of them,
    compute a step in the fewest micro-batches of one size."""
    stages = topology.stages
    rows = get("train.global_batch_size") // topology.row_ranks
    schedule = get("train.pipeline_schedule")
    if get("train.engine") != "pipeline" or schedule == "gpipe" or not rows:
        return
    micro_batch_size = get("train.micro_batch_size")
    count = _micro_batches(rows, micro_batch_size)
    made = f"{micro_batch_size} makes {count} micro-batch{'es' * (count != 1)} of a step"
    # torch's interleaved schedule takes micro-batches in rounds of one size.
    if schedule == "interleaved" and count % max(1, count // stages):
        yield "train.micro_batch_size", hint("uneven rounds", made=made, stages=stages, most=2 * stages - 1)
    elif schedule != "interleaved" and count < stages:
        smaller = f"{rows // stages} or less, or " if rows >= stages else ""
        yield "train.micro_batch_size", hint("too few micro-batches", made=made, stages=stages, smaller=smaller)


def _micro_batches(rows: int, micro_batch_size: int) -> int:
    """Return in how many micro-batches a process, or a group of them, computes its rows of a step, as data.pack divides
    them: by the largest size that divides the rows, up to micro_batch_size."""
    return min(rows // size for size in range(1, min(micro_batch_size, rows) + 1) if rows % size == 0)


def _graph(get: Get) -> Iterator[Problem]:
    passes = get("graph.passes")
    yield from (("graph.passes", problem) for problem in problems(passes))
    # How to undo a key of graph that a recipe may have inherited.
    resets = {key: f"set {key}={off}" for key, off in (("graph.passes", "[]"), ("graph.dump", "false")) if get(key)}
    if get("train.engine") != "graph":
        for key, advice in resets.items():
            yield key, f"only goes with train.engine graph, not {get('train.engine')}: {advice}, or train.engine=graph"
        return
    if get("data.layout") == "dynamic":
        yield "train.engine", "graph captures fixed shapes: set data.layout=packed, bucketed or fixed"
    if get("train.fp8") is not None:
        yield "train.fp8", f"{get('train.fp8')} does not go with train.engine graph yet: set it to null"
    for key, advice in resets.items() if not get("compile.enabled") else ():
        yield key, f"only goes with compile.enabled true, without which no graph is captured: {advice}"
    for key in ("compile.mode", "compile.options", "compile.cache"):
        if get(key):
            yield key, "has no effect with train.engine graph, where graph.passes say what is compiled: leave it out"


PIPELINE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"Architectures whose decoder is an embedding, layers that are alike, and a norm."
TENSOR_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"Architectures whose blocks have the layers that parallel/tensor.py shards, and no other."
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"Numbers of a model's config that tensor-parallel ranks must divide."


def stages_of_schedule(schedule: str, layers: Sequence[int] | None, pipeline_size: int) -> int:
    """Return the number of stages on `pipeline_size` ranks.

    Args:
        layers: train.pipeline_layers. Interleaved stages may be more than two a rank where it lists them.
    """
    return pipeline_size if schedule != "interleaved" else len(layers or ()) or 2 * pipeline_size


def split_problems(
    schedule: str, layers: Sequence[int] | None, pipeline_size: int, model_type: str, num_layers: int | None
) -> Iterator[Problem]:
    """Yield why a pipeline of `pipeline_size` ranks cannot have this model's layers in its stages; at most one problem.

    Args:
        schedule, layers: train.pipeline_schedule and train.pipeline_layers.
        num_layers: of the model; None: unknown.
    """
    if model_type not in PIPELINE_MODEL_TYPES:
        known = ", ".join(PIPELINE_MODEL_TYPES)
        yield "train.engine", hint("model without stages", model_type=model_type, known=known)
        return
    stages = stages_of_schedule(schedule, layers, pipeline_size)
    if num_layers is not None and stages > num_layers:
        most = num_layers * pipeline_size // stages
        fewer = [f"set train.pipeline_stages to {most} or less"] if most > 1 else []
        if pipeline_size <= num_layers:
            fewer.append("take train.pipeline_schedule=1f1b, which has one for each process")
        cure = ", or ".join(fewer) or "take train.engine=blocks"
        yield "train.engine", hint("more stages than layers", stages=stages, layers=num_layers, cure=cure)
        return
    if layers is None:
        return
    if not stages_fit(len(layers), schedule, pipeline_size) or num_layers not in (None, sum(layers)):
        several = f"{2 * pipeline_size} (or another multiple of {pipeline_size})"
        several = several if schedule == "interleaved" else f"{pipeline_size}"
        known = "" if num_layers is None else f"{num_layers} "
        given = list(layers)
        yield "train.pipeline_layers", hint("layers of stages", given=given, several=several, known=known)


def graph_mesh_problems(topology: Topology) -> Iterator[Problem]:
    """Yield why the graph engine has no sharding for the processes of a launch."""
    # Gradients are exchanged by the operators that gather shards; whole replicas have none of those, and the hooks by
    # which DDP exchanges its own do not run inside a captured graph.
    if topology.world_size > 1 and not topology.sharded:
        shards = "cpu_fsdp2.yaml" if topology.on_cpu else "fsdp2.yaml or hsdp.yaml"
        words = {"size": topology.world_size, "topology": topology.describe(), "shards": shards}
        yield "train.engine", hint("graph without shards", **words)
    # Ranks that share a row would have to exchange keys and values within attention: not built for this engine.
    if topology.context > 1:
        yield "train.engine", hint("graph with context parallelism", topology=topology.describe())


def passes_off_gpu(passes: Sequence[str], attention: str, device: str) -> Iterator[Problem]:
    """Yield which passes a device that is no GPU cannot run.

    Args:
        passes: names of graph.passes.
        attention: the backend that the recipe names.
        device: its type, such as cpu.
    """
    if "cuda_graphs" in passes:
        problem = f"graph.passes: cuda_graphs needs a GPU, and this process computes on {device}: leave it out here"
        yield "graph.passes", problem
    if "full_inductor" in passes and attention == "flex":
        yield "graph.passes", hint("full_inductor with flex", device=device)


BUILTIN_SOURCES = ("builtin:docs", "builtin:tasks", "builtin:pictures")
STEP_PATH = re.compile(r"/|\\|^step-")
"A text that looks like the path of a step directory."


def cross_check(get: Get, topology: Topology, more: Sequence[Rule | OfLaunch]) -> Iterator[Problem]:
    """Yield all problems between settings, those with the topology of a launch, and those that further rules find."""
    launched = _batch_divides, enough_micro_batches, _neftune, _trees, _adapter, _adapters
    for rule in (*_RULES, *map(OfLaunch, launched), *more):
        with suppress(Unusable):
            yield from rule.find(get, topology) if isinstance(rule, OfLaunch) else rule(get)


def run_can_be_written(get: Get) -> Iterator[Problem]:
    """Yield why no run can be written to run.dir, or to a dashboard, for a script that makes a run."""
    if problem := unusable(get("run.dir")):
        yield "run.dir", problem
    if "tensorboard" in get("log.tracker") and find_spec("tensorboard") is None:
        yield "log.tracker", f"the package tensorboard is missing: {install('sftkit[tensorboard]')}"


def _run_dir(get: Get) -> Iterator[Problem]:
    run_dir = get("run.dir")
    path = get("model.path")
    # A new run renames the folder that it finds at run.dir: that must never be the current one, or one around it.
    if not run_dir.strip() or Path(os.path.realpath(".")).is_relative_to(os.path.realpath(run_dir)):
        yield "run.dir", f'"{run_dir}" names no folder of its own: runs/NAME, say'
    elif path is not None and Path(os.path.normpath(path)).is_relative_to(os.path.normpath(run_dir)):
        yield "run.dir", f"the model comes from it ({path}), and a new run would rename it: take another folder"


def _model(get: Get) -> Iterator[Problem]:
    path = get("model.path")
    scratch = get("model.scratch")
    if (path is None) == (scratch is None):
        both = "are both given" if path is not None else "are both missing"
        yield "model.path", f"model.path and model.scratch {both}: set exactly one of them"
    tokenizer = get("model.tokenizer")
    train_tokenizer = get("model.train_tokenizer")
    if scratch is not None and "model_type" not in scratch:
        yield "model.scratch", "needs model_type, the name of a transformers architecture such as llama"
    if scratch is not None and tokenizer is None and train_tokenizer is None:
        yield "model.scratch", "needs a tokenizer: set model.tokenizer or model.train_tokenizer"
    if train_tokenizer is not None and tokenizer is not None:
        yield "model.train_tokenizer", "and model.tokenizer are both given: keep one of them"
    if train_tokenizer is not None and scratch is None:
        yield "model.train_tokenizer", "only goes with model.scratch: a checkpoint has its tokenizer"
    for key, default in (("model.revision", None), ("model.trust_remote_code", False), ("model.rope_scaling", None)):
        if path is None and get(key) != default:
            yield key, "only goes with model.path"


ROPE_SETTINGS = {
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"Type of model.rope_scaling -> its keys besides those of all types."


def _rope_scaling(get: Get) -> Iterator[Problem]:
    if (given := get("model.rope_scaling")) is None:
        return
    kind = get("model.rope_scaling.rope_type")
    for name in dict.fromkeys(name for names in ROPE_SETTINGS.values() for name in names):
        if given.get(name) is not None and name not in ROPE_SETTINGS.get(kind, ()):
            others = " and ".join(other for other, names in ROPE_SETTINGS.items() if name in names)
            yield f"model.rope_scaling.{name}", f"only goes with rope_type {others}, not {kind}: leave it out"
    low, high = (given.get(name) for name in ("low_freq_factor", "high_freq_factor"))
    if kind == "llama3" and (low is None or high is None or low >= high):
        why = "needs low_freq_factor and a larger high_freq_factor, such as 1 and 4 (Llama 3.1)"
        yield "model.rope_scaling", f"rope_type llama3 {why}"
    if get("adapter") is not None:
        why = "whose files name a base model, and servers would load that without it: train the model itself, or first "
        yield "model.rope_scaling", f"does not go with adapter, {why}write it into the config.json of the base"


def _chat_template(get: Get) -> Iterator[Problem]:
    template = get("model.chat_template")
    if template is None or template in CHAT_TEMPLATES or re.search(r"[./\\]", template) or Path(template).exists():
        return
    meant = f'; did you mean "{near[0]}"?' if (near := difflib.get_close_matches(template, CHAT_TEMPLATES, n=1)) else ""
    yield "model.chat_template", f'"{template}" is neither {", ".join(CHAT_TEMPLATES)} nor a Jinja file{meant}'


def _checkpoints(get: Get) -> Iterator[Problem]:
    if get("checkpoint.best") is not None and (get("checkpoint.every") is None or get("eval.every") is None):
        yield "checkpoint.best", "needs checkpoint.every and eval.every: only a step with both can be the best"


def _sources(get: Get) -> Iterator[Problem]:
    of_adapters = [f"adapters.{i}.data" for i in range(len(get("adapters") or ()))]
    for part in ("data.train", "data.val", "model.train_tokenizer.sources", *of_adapters):
        try:
            sources = [SourceConfig(**row) for row in get(part) or ()]
        except Unusable:
            continue
        if (part == "data.train" or (part in of_adapters and get(part) is not None)) and not sources:
            yield part, "is empty: give at least one source"
        first_with: dict[str, int] = {}
        for i, source in enumerate(sources):
            label = source_label(source)
            if (first := first_with.setdefault(label, i)) != i:
                yield f"{part}.{i}.name", f'"{label}" is already the name of {part}.{first}: set another name'
            for name, limit in where_counts(source).items():
                if type(limit) is not int or limit < 1:
                    yield f"{part}.{i}.where.{name}", f"is {limit!r}, not a whole number above 0"
            if source.path.startswith("builtin:"):
                if source.path not in BUILTIN_SOURCES:
                    yield f"{part}.{i}.path", f'"{source.path}" is not one of {", ".join(BUILTIN_SOURCES)}'
                if source.split not in ("train", "heldout"):
                    yield f"{part}.{i}.split", f'"{source.split}" is not one of train, heldout, the splits of a builtin'


PACKS = ("packed", "tree")
"Layouts whose rows hold several documents."


def _mixture(get: Get) -> Iterator[Problem]:
    rows = [SourceConfig(**row) for row in get("data.train")]
    labels = [source_label(row) for row in rows]
    weighted = [row.weight is not None for row in rows]
    for i, row in enumerate(rows):
        key = f"data.train.{i}"
        if any(weighted) and row.weight is None:
            yield f"{key}.weight", f"is missing, and {labels[weighted.index(True)]} has one: give each source a weight"
        if row.weight is not None and row.repeat != 1:
            yield f"{key}.repeat", hint("repeat with weights", repeat=row.repeat)
        if row.max_epochs is not None and row.weight is None:
            yield f"{key}.max_epochs", "only goes with weights: train.epochs and repeat say how often it is passed"
        if row.order == "given" and row.weight is None and len(rows) > 1:
            yield f"{key}.order", "given goes with a single source, or with a weight for each"
    for part in ("data.val", *(f"adapters.{i}.data" for i in range(len(get("adapters") or ())))):
        for i, row in enumerate(SourceConfig(**source) for source in get(part) or ()):
            for name in ("weight", "max_epochs", "order", "repeat"):
                value = getattr(row, name)
                if value % 1 if name == "repeat" else value not in (None, "shuffled"):
                    whole = " if it is no whole number" if name == "repeat" else ""
                    yield f"{part}.{i}.{name}", f"{value} only goes with data.train{whole}"
    stages = get("data.stages") or ()
    if get("data.tokens") is not None:
        if get("train.max_steps") is not None:
            yield "data.tokens", "and train.max_steps are both given: set one of them to null"
        if get("data.layout") not in PACKS:
            yield "data.tokens", f"only goes with layout packed or tree, not {get('data.layout')}: set train.max_steps"
    if not any(weighted):
        if stages:
            yield "data.stages", "only go with weights: give each source of data.train a weight"
        return
    if not any(row.weight for row in rows):
        yield "data.train.0.weight", "is 0 like all others: give a source more"
    if get("adapters") is not None:
        yield "data.train.0.weight", "does not go with adapters, whose sources have no weights yet"
    if get("data.layout") == "bucketed":
        yield "data.train.0.weight", "does not go with layout bucketed, which sorts documents by length: take packed"
    if get("train.epochs") is not None:
        yield "train.epochs", hint("epochs with weights")
    elif stages and get("data.tokens") is get("train.max_steps") is None:
        yield "data.stages", "need the length of the run: set data.tokens or train.max_steps"
    before = 0.0
    for i, stage in enumerate(stages):
        if stage["at"] <= before:
            yield f"data.stages.{i}.at", f"{stage['at']} is not after the stage before, at {before}"
        before = stage["at"]
        for name in stage["weights"]:
            if name not in labels:
                listed = f"{', '.join(labels)}.{did_you_mean(name, labels)}"
                yield f"data.stages.{i}.weights", f'"{name}" is not one of {listed}'
        if not any(stage["weights"].values()):
            yield f"data.stages.{i}.weights", "are all 0: give a source more"


def _chosen(get: Get) -> Iterator[Problem]:
    given = get("data.decontaminate")
    for task in [given] if isinstance(given, str) else given:
        if task not in (known := ("all", *TASKS)):
            yield "data.decontaminate", f'"{task}" is not one of {", ".join(known)}.{did_you_mean(task, known)}'
    max_length = get("data.max_length")
    for part in ("data.train", "data.val"):
        for i, row in enumerate(get(part)):
            most = (row.get("where") or {}).get("max_tokens")
            if max_length is not None and isinstance(most, int) and most > max_length:
                why = f"{most:,} leaves nothing out: data.max_length {max_length:,} cuts what is longer before"
                yield f"{part}.{i}.where.max_tokens", f"{why}. data.too_long=drop leaves out longer conversations"
    if get("data.val_fraction") is not None:
        train, val = ([source_label(SourceConfig(**row)) for row in get(f"data.{part}")] for part in ("train", "val"))
        for label in {*train} & {*val}:
            why = "is also a source of data.train, of which data.val_fraction holds out a share under this name"
            yield f"data.val.{val.index(label)}.name", f'"{label}" {why}: set another name'
    if get("data.dedup") == "near" and find_spec("rensa") is None:
        yield "data.dedup", f"near needs the package rensa: {install('sftkit[dedup]')}"


def _buckets(get: Get) -> Iterator[Problem]:
    key = "data.bucket_lengths"
    layout = get("data.layout")
    lengths = get(key)
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
    row_length = get("data.row_length")
    layout = get("data.layout")
    max_length = get("data.max_length")
    if row_length is None:
        return
    if layout not in PACKS:
        yield "data.row_length", f"only goes with layout packed or tree, not {layout}, whose rows hold one document"
    elif max_length is not None and row_length < max_length:
        yield "data.row_length", hint("row that holds no document", row_length=row_length, max_length=max_length)


def _dynamic(get: Get) -> Iterator[Problem]:
    max_length = get("data.max_length")
    multiple = get("data.pad_multiple")
    only = "only goes with layout dynamic"
    if (layout := get("data.layout")) != "dynamic":
        if multiple is not None:
            yield "data.pad_multiple", f"{only}, not {layout}"
        return
    multiple = multiple or 8
    if max_length is not None and max_length % multiple:
        yield "data.max_length", f"{max_length} is not a multiple of data.pad_multiple, {multiple}"
    if get("compile.dynamic") is True:
        yield "compile.dynamic", "true does not go with layout dynamic, which makes the row length symbolic by itself"


def _attention(get: Get) -> Iterator[Problem]:
    if get("attention.backend") == "sdpa" and get("data.layout") == "packed":
        yield "attention.backend", hint("sdpa in packed rows")


def _precision(get: Get) -> Iterator[Problem]:
    if get("train.precision") != "fp32":
        return
    optimizer = OPTIMIZERS.get(get("optim.name"))  # None: auto
    if optimizer is not None and optimizer.rounds_weights:
        yield "optim.name", f"{optimizer.name} rounds weights to bf16 and does not go with train.precision fp32"
    if get("train.fp8") is not None:
        yield "train.fp8", f"{get('train.fp8')} does not go with train.precision fp32: set bf16"


def _loss(get: Get) -> Iterator[Problem]:
    if get("loss.dft") and get("loss.label_smoothing"):
        why = "which learns other tokens too: set that to 0, or dft to false"
        yield "loss.dft", f"does not go with loss.label_smoothing, {why}"


def _optim(get: Get) -> Iterator[Problem]:
    if any(beta >= 1 for beta in get("optim.betas")):
        yield "optim.betas", f"{get('optim.betas')} must both be less than 1"
    if get("optim.schedule") == "wsd":
        warmup = get("optim.warmup_ratio")
        decay = get("optim.decay_ratio")
        if warmup + decay > 1:
            yield "optim.warmup_ratio", f"{warmup} and optim.decay_ratio {decay} add up to more than 1"


def _duration(get: Get) -> Iterator[Problem]:
    if get("train.max_steps") is get("train.epochs") is get("data.tokens") is None:
        yield "train.max_steps", "train.max_steps and train.epochs are both missing: set one, or both, or data.tokens"


def _resume(get: Get) -> Iterator[Problem]:
    resume = get("train.resume")
    if resume is not None and resume != "auto" and not STEP_PATH.search(resume):
        yield "train.resume", f'"{resume}" is neither auto, null nor the path of a step directory'


def _eval(get: Get) -> Iterator[Problem]:
    held_out = get("data.val") or get("data.val_fraction")
    if get("eval.every") is not None and not get("eval.tasks") and not held_out:
        yield "eval.every", "has nothing to evaluate: set data.val, data.val_fraction or eval.tasks"
    code = get("eval.allow_code_execution")
    yield from eval_problems(get("eval.tasks"), get("eval.backend"), allow_code_execution=code)


def eval_problems(tasks: Sequence[str], backend: str, *, allow_code_execution: bool) -> Iterator[Problem]:
    """Yield what is wrong with the names of evaluation tasks. Those of lm_eval are checked when it is loaded."""
    for task in dict.fromkeys(tasks):
        if tasks.count(task) > 1:
            yield "eval.tasks", f'"{task}" is named twice'
        if backend != "lm_eval" and task not in EVAL_TASKS:
            meant = did_you_mean(task, EVAL_TASKS) or " For others set eval.backend to lm_eval"
            yield "eval.tasks", f'"{task}" is not one of {", ".join(EVAL_TASKS)}.{meant}'
    code = [task for task in tasks if task in CODE]
    if code and backend == "lm_eval":
        problem = f"{code[0]} runs code that the model writes, which lm_eval does without a sandbox: use backend sftkit"
        yield "eval.tasks", problem
    elif code and not allow_code_execution:
        yield "eval.allow_code_execution", hint("tasks that run code", task=code[0])


def _names(get: Get) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,80}", get("log.project")):
        yield "log.project", "must be 1 to 80 letters, digits, dots, dashes or underscores"


def _batch_divides(get: Get, topology: Topology) -> Iterator[Problem]:
    batch = get("train.global_batch_size")
    world_size = topology.row_ranks
    if batch % world_size:
        below = batch // world_size * world_size
        works = f"{below} or {below + world_size}" if below else f"{world_size}"
        yield "train.global_batch_size", f"{batch} cannot be shared equally by {world_size} processes: use {works}"


_RULES = (
    *(_model, _rope_scaling, _run_dir, _chat_template, _checkpoints),
    *(_sources, _chosen, _mixture, _buckets, _row_length, _dynamic, _attention, _precision),
    *(_engine, _freeze, _pipeline, _graph, _compiled_only, _inductor_only, _options),
    *(_loss, _optim, _duration, _resume, _eval, _names),
)
