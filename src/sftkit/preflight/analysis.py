"""Estimate before a run what it will learn and cost: preflight.json, a few lines, and warnings in words.

Training writes it on the main rank. scripts/inspect_data.py shows all of it without a GPU and without weights. The
costs are the positions of each layout, steps, memory and disk.
"""

import hashlib
import io
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, init_empty_weights
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from sftkit.config.schema import (
    AdapterConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    DataConfig,
    ModelConfig,
    NamedAdapter,
    OptimConfig,
    TrainConfig,
    source_label,
)
from sftkit.config.topology import Topology
from sftkit.data.batches import loader, order
from sftkit.data.batches.epoch import GlobalBatch, check_row_shard, num_positions, plan_epoch, row_shard
from sftkit.data.batches.loader import Batches
from sftkit.data.batches.many import ManyBatches
from sftkit.data.batches.pack import PAD_MULTIPLE, Layout, make_layout
from sftkit.data.batches.tree import Trees, trees_of
from sftkit.data.reading import columns
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import SHOWN, Examples
from sftkit.errors import ConfigError, hint
from sftkit.memory.estimate import GIB
from sftkit.memory.plan import MemoryPlan, checkpoint_bytes, fits, make_plan
from sftkit.memory.plan import log as plan_log
from sftkit.memory.remedies import fitting_advice
from sftkit.models.adapter_files import adapter_words
from sftkit.models.files import adapter_at
from sftkit.models.load import load_model
from sftkit.models.structure import count_parameters
from sftkit.models.tokenizer import load_tokenizer, new_tokenizer
from sftkit.models.towers import bytes_outside
from sftkit.models.trained import freeze
from sftkit.preflight import data as facts
from sftkit.reports.card import licence
from sftkit.reports.collect import hub_datasets, run_of
from sftkit.reports.values import mapping
from sftkit.rundir.files import read_object, replace_text
from sftkit.rundir.names import CARD, PREFLIGHT, resolve
from sftkit.runtime.hub import cached_file
from sftkit.runtime.script import counted
from sftkit.runtime.start import Runtime, replaced, resolve_precision

SAMPLE = 20_000
"Documents on which layouts other than the run's own are planned; their positions are scaled up."
# ---- layouts ---------------------------------------------------------------------------------------------------------


def layout_facts(
    data: DataConfig,
    train: TrainConfig,
    layout: Layout,
    epoch: Sequence[GlobalBatch],
    lengths: np.ndarray,
    epoch_steps: int | None = None,
    trees: Trees | None = None,
) -> list[dict[str, Any]]:
    """Return shapes, padding, steps and positions of an epoch in each layout.

    Args:
        layout: the run's own, planned as `epoch`: the first, or its first block.
        epoch_steps: steps of a whole epoch; None: those of `epoch`.
        lengths: int [D], positions of the training documents.
        trees: of the documents; None: rows of trees are not shown.
    """
    found: list[dict[str, Any]] = []
    # The layout of trees is that of other lengths.
    of_trees = [] if trees is None else [("tree", trees.lengths)]
    for kind, sizes in [*of_trees, *((kind, lengths) for kind in ("packed", "bucketed", "fixed", "dynamic"))]:
        own = kind == layout.kind
        # Other layouts are planned on a sample, whose positions are scaled up by its share of all tokens.
        sample = sizes if own else _sample(sizes)
        one = layout if own else _other_layout(data, train, layout, kind, sample)
        plan = epoch if own else plan_epoch(sample, one, seed=0, epoch=0)
        # Several adapters may share documents, so that an epoch has them several times.
        scale = float(sizes.sum()) / (planned_tokens(epoch, sizes) if own else float(sample.sum()))
        count = num_positions(plan, one) * scale
        row = {
            "layout": kind,
            "own": own,
            "shapes": shapes_text(one),
            "padding_pct": 100.0 * (1.0 - float(sizes.sum()) / count),
            "steps": (epoch_steps or len(plan)) if one is layout else round(len(plan) * scale),
            "positions": round(count),
        }
        found.append(row)
    return found


def _sample(lengths: np.ndarray) -> np.ndarray:
    if len(lengths) <= SAMPLE:
        return lengths
    rng = np.random.default_rng(0)
    # A permutation of large data would be an array of its size.
    large = len(lengths) > order.BLOCK
    chosen = rng.choice(len(lengths), SAMPLE, replace=False) if large else rng.permutation(len(lengths))[:SAMPLE]
    return lengths[chosen]


def planned_tokens(epoch: Sequence[GlobalBatch], lengths: np.ndarray) -> int:
    """Return the document positions of an epoch. `lengths`: int [D] of the documents."""
    return sum(int(lengths[batch.documents].sum()) for batch in epoch)


def _other_layout(data: DataConfig, train: TrainConfig, own: Layout, kind: str, lengths: np.ndarray) -> Layout:
    """Return another layout for the same data and processes; settings that only go with one layout hold for it."""
    # A multiple that fits the run's own layout may not divide max_length in another, which would be rejected.
    asked = data.pad_multiple or PAD_MULTIPLE
    multiple = asked if own.max_length % asked == 0 else 1
    data = replace(data, layout=kind, pad_multiple=multiple)  # type: ignore[arg-type]
    micro = min(own.micro_batch_size, train.global_batch_size)
    train = replace(train, micro_batch_size=micro)  # as lowered for this run, which was logged once
    return make_layout(data, train, lengths, own.max_length, own.world_size, encoded=own.encoded)


def shapes_text(layout: Layout) -> str:
    """Return the shapes that a micro-batch may have, rows x positions."""
    if layout.dynamic:
        step = f", multiples of {layout.pad_multiple}" if layout.pad_multiple > 1 else ""
        return f"{layout.micro_batch_size}x({layout.padded(1)} to {layout.max_length}{step})"
    return ", ".join(f"{rows}x{length}" for rows, length in layout.shapes)


# ---- memory and disk -------------------------------------------------------------------------------------------------


def memory_facts(
    plan: MemoryPlan | None, layout: Layout, data: DataConfig, compile: CompileConfig, optim: OptimConfig
) -> dict[str, Any] | None:
    """Return the estimated peak of a step on one GPU in GiB, by part; None if the model's sizes are unknown."""
    if plan is None or plan.estimate is None or plan.setup is None:
        return None
    return {
        "topology": plan.setup.topology.describe(),
        "processes": plan.setup.topology.world_size,
        "optimizer": plan.optim.name,
        "estimated_gib": plan.estimate.total / GIB,
        "gpu_gib": None if plan.total_bytes is None else plan.total_bytes / GIB,
        "fits": None if plan.total_bytes is None else fits(plan.estimate, plan.total_bytes),
        "parts_gib": {name: size / GIB for name, size in asdict(plan.estimate).items()},
        "advice": None
        if fits(plan.estimate, plan.total_bytes)
        else fitting_advice(replace(plan.setup, layout=layout), plan.total_bytes, data, compile, optim),
    }


def disk_facts(
    run_dir: Path, checkpoint: CheckpointConfig, steps: int, orig_model: PreTrainedModel | None, plan: MemoryPlan | None
) -> dict[str, Any]:
    """Return the free space on the run's disk, and the space of its checkpoints when most of them exist, in GiB.

    Args:
        orig_model: on any device, also meta; None: sizes are unknown.
    """
    # The directory need not be there yet: the disk is that of its nearest parent.
    absolute = run_dir.absolute()
    folder = next(each for each in (absolute, *absolute.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    size = None if orig_model is None or plan is None else checkpoint_bytes(orig_model, plan)
    # On disk together: those kept, the best, and the one being written. One save more than by the interval: a run ends
    # with a checkpoint.
    saves = (steps // checkpoint.every if checkpoint.every else 0) + 1
    count = min(checkpoint.keep + 1 + bool(checkpoint.best), saves)
    needed = None if size is None else count * size + (bytes_outside(orig_model) if orig_model is not None else 0)
    return {
        "folder": str(folder),
        "free_gib": free / GIB,
        "checkpoint_gib": None if size is None else size / GIB,
        "checkpoints": count,
        "needed_gib": None if needed is None else needed / GIB,
        "fits": None if needed is None else needed <= free,
    }


def adapter_facts(cfg: Config, batches: Batches, orig_model: PreTrainedModel | None) -> list[dict[str, Any]]:
    """Return settings, size, data and steps of each of several adapters; none for a run without."""
    if not isinstance(batches, ManyBatches):
        return []
    assert cfg.adapter is not None
    own = cfg.adapter, cfg.optim.lr, cfg.run.seed, cfg.data.train
    sizes: list[int | None] = [None] * len(cfg.adapters or ())
    if orig_model is not None:
        from sftkit.models.many_adapters import member_factors

        sizes = [sum(p.numel() for p in member_factors(orig_model, k).values()) for k in range(len(sizes))]
    return [
        {
            "name": one.name,
            "rank": one.rank or own[0].rank,
            "alpha": one.alpha or own[0].alpha,
            "lr": one.lr or own[1],
            "seed": own[2] if one.seed is None else one.seed,
            "data": ", ".join(map(source_label, one.data or own[3])),
            "parameters": size,
            **counts,
        }
        for one, size, counts in zip(cfg.adapters or (), sizes, batches.of_each(), strict=True)
    ]


log = logging.getLogger(__name__)


def tokenizer_of(model: ModelConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the run would load, or train."""
    training = model.train_tokenizer
    if training is None:
        return load_tokenizer(model)
    # The rows of data.train are tokenized next.
    with columns.without_logging() if training.sources is None else nullcontext():
        return new_tokenizer(model, training, data)


def meta_model(
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    precision: str,
    patterns: Sequence[str] = (),
    adapter: AdapterConfig | None = None,
    several: Sequence[NamedAdapter] | None = None,
) -> PreTrainedModel | None:
    """Return the model on the meta device: parameters have sizes and no memory. None, with a line that says why, if it
    is not here.

    Args:
        patterns: train.freeze. several: the adapters of a run with several.

    Raises:
        ConfigError: the model cannot have such adapters.
    """
    try:
        # Parameters alone go without memory: buffers are small. Nobody reads what initialisation would compute.
        with init_empty_weights(include_buffers=False), no_init_weights():
            orig_model = load_model(model, tokenizer, 0, precision, empty=True, rounded=adapter is None)
    except ConfigError as error:
        log.warning("memory and checkpoint sizes stay unknown: %s", error)
        return None
    orig_model.tie_weights()  # inside, each name was given a parameter of its own
    freeze(orig_model, patterns)
    if adapter is not None:
        from sftkit.models.adapters import Adapters, add_adapters
        from sftkit.models.token_rows import tokens_to_train

        tokens, _ = tokens_to_train(orig_model, tokenizer, adapter_at(model))
        adapters = Adapters(adapter, 0, model, digest="", tokens=tokens)
        if several:
            from sftkit.models.many_adapters import members_of

            adapters = members_of(adapters, seed=0, entries=several)
        add_adapters(orig_model, adapters)
    return orig_model


def gpu_precision(train: TrainConfig) -> str:
    """Return what the run will compute in on a GPU: the recipe's precision, bf16 for auto."""
    return "bf16" if train.precision == "auto" else train.precision


def precision_text(train: TrainConfig) -> str:
    """Return what a run on this machine computes in, and what sizes are counted in if that differs."""
    here = resolve_precision(train.precision)
    on_gpu = gpu_precision(train)
    if here == on_gpu:
        return here
    return f"{here} on this machine ({on_gpu} on a GPU, as memory and disk below are counted)"


def memory_plan(
    cfg: Config, orig_model: PreTrainedModel | None, layout: Layout, gpu_gib: float | None, topology: Topology
) -> MemoryPlan | None:
    """Return the plan of a run on GPUs of that size, without touching one; None: the model's sizes are unknown.

    Args:
        gpu_gib: memory of each GPU; None: this machine's, if it has one.
        topology: of the processes that it would run on.

    Raises:
        ConfigError: it cannot run like that: see make_plan, and check_row_shard for rows that ranks share.
    """
    # Needs no model, so it is rejected even if the sizes are unknown.
    check_row_shard(layout, row_shard(topology, rank=0))
    if orig_model is None:
        return None
    total = None if gpu_gib is None else int(gpu_gib * 2**30)
    if total is None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
    # The plan's lines and warnings are in the preflight.
    with replaced(plan_log, "disabled", value=True), redirect_stdout(io.StringIO()):
        # make_plan asks a Runtime; with cpu=True Accelerate leaves GPUs alone.
        rt = Runtime(Accelerator(cpu=True), gpu_precision(cfg.train), topology)
        return make_plan(cfg, orig_model, layout, rt, total_bytes=total)


def data_of(cfg: Config, tokenize: RowTokenizer, row_ranks: int) -> dict[str, Any]:
    """Return what `analyse` asks of the data: the documents, tokenized as the stage's own script does, which then finds
    them in the cache, and their rows. What was found in the rows of sources is not logged: `analyse` shows it."""
    with columns.without_logging():
        from sftkit.evals import tasks  # a run compares only if it is asked to

        compared = tasks.benchmarks(cfg.data, cfg.eval, always=True)
        examples, validation = loader.load_examples(cfg.data, tokenize, benchmarks=compared)
    # Trees are shown whatever the layout is: where it would save much, the recipe should have it.
    trees = None
    if cfg.data.layout == "tree" or not examples.encoded:
        trees = trees_of(examples, cfg.data, cfg.data.row_length or tokenize.max_length)
        if cfg.data.layout != "tree" and len(trees) == len(examples):
            trees = None
    planned = trees if trees is not None and cfg.data.layout == "tree" else examples
    lengths = planned.lengths
    layout = make_layout(cfg.data, cfg.train, lengths, tokenize.max_length, row_ranks, encoded=examples.encoded)
    mixture = order.mixture_of(cfg.data, cfg.train, planned, layout)
    in_order = order.order_of(lengths, layout, order.segments_of((), 0, layout, cfg.run.seed, mixture))
    epoch, epoch_steps = in_order.first_batches()
    steps = in_order.num_steps(cfg.train.epochs, mixture.max_steps)
    data = {"examples": examples, "validation": validation, "layout": layout, "epoch": epoch}
    return {**data, "length": (epoch_steps, steps), "passes": in_order.forecast(steps), "trees": trees}


# Percentages above which a warning is due; targets and ends of turn: below which.
TRUNCATED_PCT = 50.0
DROPPED_PCT = 20.0
TARGET_PCT = 5.0
END_OF_TURN_PCT = 99.0
PADDING_PCT = 50.0
OVERLAP_PCT = 1.0
"Percentage of a validation source's documents; a few texts of boilerplate are the same in any two parts of a corpus."
DUPLICATE_PCT = 5.0


def analyse(  # noqa: PLR0913 - what a page of facts is made of
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    examples: Examples,
    validation: dict[str, Examples],
    layout: Layout,
    epoch: Sequence[GlobalBatch],
    length: tuple[int, int] | None = None,
    passes: Sequence[tuple[float, int | None]] | None = None,
    orig_model: PreTrainedModel | None = None,
    plan: MemoryPlan | None = None,
    adapters: Sequence[Mapping[str, Any]] = (),
    card: str | None = None,
    trees: Trees | None = None,
) -> dict[str, Any]:
    """Return what preflight.json holds: counts, shares in percent, sizes in GiB; null is unknown.

    Args:
        adapters: what adapter_facts returned.
        epoch: the first, of `examples` in `layout`, or its first block.
        length: steps of an epoch and of the run; None: `epoch` is whole, and the recipe says how many there are.
        passes: over each source, and the step after which it has ended, see Order.forecast; None: as many as epochs.
        orig_model: on any device, also meta: only its sizes are read; None: memory and disk are unknown.
        plan: of its memory.
        card: name of the GPU for which the hours are estimated; None: they are not.
        trees: of the documents, which `epoch` has if the layout is one of trees; None: they share nothing.
    """
    # The data is counted, the machine estimated.
    end_of_turn_pct = facts.end_of_turn_pct(examples, tokenizer)
    template = str(tokenizer.chat_template or "") if end_of_turn_pct is not None else None
    known = facts.source_facts(examples, cfg.data.too_long)
    sources = [source | {"licence": source_licence(cfg, source["name"])} for source in known]
    lengths = examples.lengths
    planned_lengths = lengths if trees is None or layout.kind != "tree" else trees.expanded
    for source, of_trees in zip(sources, facts.tree_facts(trees) if trees else (), strict=bool(trees)):
        source["trees"] = of_trees
    tokens, targets = (sum(source[key] for source in sources) for key in ("tokens", "targets"))
    if length is None:
        wanted = cfg.train.epochs * len(epoch) if cfg.train.epochs else None
        length = len(epoch), min(n for n in (wanted, cfg.train.max_steps) if n is not None)
    epoch_steps, steps = length
    layouts = layout_facts(cfg.data, cfg.train, layout, epoch, lengths, epoch_steps, trees)
    epochs = steps / epoch_steps
    tokens_of_run = round(planned_tokens(epoch, planned_lengths) * steps / len(epoch))
    targets_of_run = round(tokens_of_run * targets / tokens)
    time: dict[str, Any] = {"steps": steps, "epochs": epochs, "tokens": tokens_of_run, "targets": targets_of_run}
    if card is not None:
        from sftkit.preflight.hours import hours_facts

        topology = plan.setup.topology if plan and plan.setup else Topology()
        counts = {"tokens": tokens_of_run, "targets": targets_of_run}
        time["hours"] = hours_facts(cfg, orig_model, layout, lengths, **counts, card=card, topology=topology)
    weights = {source_label(source): source.weight for source in cfg.data.train}
    for source, (count, end) in zip(sources, passes or [(epochs, None)] * len(sources), strict=True):
        source |= {"weight": weights.get(source["name"]), "epochs": count, "ends_after_step": end}
    memory = memory_facts(plan, layout, cfg.data, cfg.compile, cfg.optim)
    found: dict[str, Any] = {
        "start": start_facts(cfg.model),
        "sources": sources,
        "validation": [source for one in validation.values() for source in facts.source_facts(one, cfg.data.too_long)],
        "max_length": layout.max_length,
        "lengths": facts.length_facts(lengths),
        "adapter": cfg.adapter
        and adapter_words(asdict(cfg.adapter), len(cfg.adapters or ()))
        + (f": {count_parameters(orig_model).describe()}" if orig_model else ""),
        "adapters": list(adapters),
        "target_pct": 100.0 * targets / tokens,
        "end_of_turn_pct": end_of_turn_pct,
        "template_sha256": hashlib.sha256(template.encode()).hexdigest() if template else None,
        "roles": facts.roles(examples),
        **facts.duplicate_facts(examples, validation, cfg.data.train),
        "contamination": facts.contamination_facts(examples),
        "layouts": layouts,
        "memory": memory,
        "disk": disk_facts(Path(cfg.run.dir), cfg.checkpoint, steps, orig_model, plan),
        "time": time,
    }
    return {**found, "warnings": [*data_warnings(found), *machine_warnings(found)]}


def start_facts(model: ModelConfig) -> dict[str, Any]:
    """Return the model that a run goes back to, through the runs that it continues: hub id or folder, its commit, and
    its licence by the card in the hub's cache or the folder; null is unknown. Empty for a new model."""
    if model.path is None:
        return {}
    path = Path(resolve(model.path))
    if path.is_dir():
        earlier = run_of(path / CARD)
        known = {} if earlier is None else mapping(read_object(earlier / PREFLIGHT).get("start"))
        return known or {"model": model.path, "revision": None, "licence": _licence_in(path / CARD)}
    config = cached_file(model.path, "model", "config.json", model.revision)
    commit = model.revision if config is None else config.parent.name
    card = cached_file(model.path, "model", CARD, model.revision)
    return {"model": model.path, "revision": commit, "licence": _licence_in(card)}


def source_licence(cfg: Config, label: str) -> str | None:
    """Return the licence of a source of the hub by its card in the cache; None: unknown, or no source of the hub."""
    paths = [one.path for one in cfg.data.train if source_label(one) == label]
    ids = hub_datasets({"data": {"train": [{"path": path} for path in paths]}})
    return _licence_in(cached_file(ids[0], "dataset", CARD)) if ids else None


def _licence_in(card: Path | None) -> str | None:
    found = {} if card is None else licence(card)
    return found.get("license_name") or found.get("license")


def record_preflight(
    cfg: Config,
    rt: Runtime,
    run_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
    batches: Batches,
    validation: dict[str, Examples],
    orig_model: PreTrainedModel,
    plan: MemoryPlan | None,
) -> None:
    """Write preflight.json of a run that is about to train, print what was read in a few lines, and warn of data; for
    the main rank.

    Memory and disk are in the file alone; the memory plan and the checkpoints print lines of their own.
    """
    examples = batches.examples
    layout = batches.layout
    # If the batch size was changed on the way, the epoch is one of the present size.
    epoch, epoch_steps = batches.first_epoch()
    steps = batches.num_steps(cfg.train.epochs, cfg.train.max_steps)
    several = isinstance(batches, ManyBatches)
    analysis = analyse(
        cfg,
        tokenizer,
        examples=examples,
        validation=validation,
        layout=layout,
        epoch=epoch,
        length=None if several else (epoch_steps, steps),
        passes=None if several else batches.order.forecast(steps),
        orig_model=orig_model,
        plan=plan,
        adapters=adapter_facts(cfg, batches, orig_model),
        trees=batches.trees,
    )
    try:
        replace_text(run_dir / PREFLIGHT, json.dumps(analysis, indent=1, ensure_ascii=False))
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / PREFLIGHT, error)
    for line in lines(analysis):
        rt.print(line)
    for warning in data_warnings(analysis):
        log.warning("warning: %s", warning)


# ---- in words --------------------------------------------------------------------------------------------------------


def lines(analysis: dict[str, Any]) -> list[str]:
    """Return a table for the console: a line per source, then lengths, roles, layout and time."""
    shown = [f"{'train':<10}{source_text(source)}" for source in analysis["sources"]]
    shown += [f"{'val':<10}{source_text(source)}" for source in analysis["validation"]]
    shown += [f"{'adapter':<10}{adapter_text(one)}" for one in analysis["adapters"]]
    shown += [f"{'answers':<10}{line}" for source in analysis["sources"] if (line := facts.answers_line(source))]
    shown += [f"{'trees':<10}{line}" for source in analysis["sources"] if (line := facts.trees_line(source))]
    lengths = analysis["lengths"]
    shown.append(
        f"{'lengths':<10}mean {lengths['mean']:,.0f}, median {lengths['p50']:,.0f}, p90 {lengths['p90']:,.0f}, p99 "
        f"{lengths['p99']:,.0f}, max {lengths['max']:,} of {analysis['max_length']:,} positions"
    )
    if analysis["roles"]:
        roles = ", ".join(f"{count:,} {role}" for role, count in analysis["roles"].items())
        shown.append(f"{'roles':<10}{roles} messages")
        template = (analysis["template_sha256"] or "none")[:12]
        share = analysis["end_of_turn_pct"]
        end = "none: text only" if share is None else f"{share:.1f} % of conversations"
        shown.append(f"{'chat':<10}template {template}, end of turn learned in {end}")
    if found := analysis["contamination"]:
        shown.append(f"{'questions':<10}{found['said']}")
        shown += [f"{'':<10}{one['where']}: {one['task']} {one['example']}" for one in found["found"][:SHOWN]]
    own = own_layout(analysis)
    padding = f"{own['padding_pct']:.1f} % padding"
    shown.append(f"{'layout':<10}{own['layout']}, {own['shapes']}: {padding}, {counted(own['steps'], 'step')} an epoch")
    time = analysis["time"]
    steps = f"{counted(time['steps'], 'step')}, {time['epochs']:.2f} epochs, {counted(time['tokens'], 'token')}"
    steps += f", {time['targets']:,} of them targets"
    return [*shown, f"{'time':<10}{steps}"]


def source_text(source: dict[str, Any]) -> str:
    """Return what was read of a source, and what became of it; what did not happen is not mentioned."""
    share = 100.0 * source["targets"] / source["tokens"] if source["tokens"] else 0.0
    became = {
        "truncated": "truncated",
        "partly_dropped": "with documents dropped as too long",
        "dropped_too_long": "dropped as too long",
        "dropped_no_target": "dropped without target",
        "dropped_where": "left out by where",
        "skipped_bad": "skipped as bad",
        "left_out": "of its documents left out",
        "held_out": "held out for validation",
    }
    happened = "".join(f", {source[key]:,} {words}" for key, words in became.items() if source.get(key))
    unused = sum(one["kind"] == "unused" for one in source["findings"])
    happened += f", {unused:,} of their columns and keys not used" * bool(unused)
    counts = ", ".join(counted(source[f"{noun}s"], noun) for noun in ("row", "document", "token"))
    passed = ""
    if source.get("weight") is not None:
        ended = f", to step {source['ends_after_step']:,}" if source["ends_after_step"] is not None else ""
        passed = f", weight {source['weight']:g}, {source['epochs']:.2f} epochs{ended}"
    return f"{source['name']}: {counts}, {share:.1f} % targets{passed}{happened}"


def adapter_text(one: Mapping[str, Any]) -> str:
    """Return one of several adapters: its settings, its data and how long it is trained."""
    size = f" ({one['parameters']:,} parameters)" if one["parameters"] else ""
    share = 100.0 * one["targets"] / max(one["tokens"], 1)
    return (
        f"{one['name']}: rank {one['rank']}, alpha {one['alpha']:g}{size}, lr {one['lr']:g}, seed {one['seed']}, "
        f"{counted(one['documents'], 'document')} of {one['data']} with {counted(one['targets'], 'target')} "
        f"({share:.1f} %), {counted(one['steps'], 'step')}"
    )


def size_text(gib: float) -> str:
    """Return a size in the unit that suits it: 12.3 GiB, 41 MiB, 0.3 MiB."""
    if gib >= 10 or gib == 0:
        return f"{gib:,.1f} GiB"
    if gib >= 0.5:
        return f"{gib:.2f} GiB"
    mib = 1024 * gib
    return f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.2g} MiB"


def own_layout(analysis: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of the layout that the recipe sets."""
    return next(row for row in analysis["layouts"] if row["own"])


def data_warnings(analysis: dict[str, Any]) -> list[str]:
    """Return what is wrong with the data or its layout, and what to do about it."""
    warnings = [text for source in analysis["sources"] for text in _source_warnings(source, analysis["max_length"])]
    warnings += [text for source in analysis["sources"] for text in facts.answer_warnings(source)]
    if analysis["target_pct"] < TARGET_PCT:
        warnings.append(hint("few targets", share=analysis["target_pct"]))
    share = analysis["end_of_turn_pct"]
    if share is not None and share < END_OF_TURN_PCT:
        warnings.append(hint("cut answers", share=100 - share, max_length=analysis["max_length"]))
    if analysis["duplicate_pct"] > DUPLICATE_PCT:
        warnings.append(hint("copies of documents", share=analysis["duplicate_pct"]))
    found = analysis["contamination"]
    if found and found["matched"] and not found["left_out"]:
        named = ", ".join(sorted({task.removesuffix(" answers") for task in found["of_tasks"]}))
        warnings.append(hint("evaluation questions", held=counted(found["matched"], "training document"), named=named))
    of_validation = {source["name"]: source["documents"] for source in analysis["validation"]}
    for name, count in analysis["validation_in_train"].items():
        if count > OVERLAP_PCT / 100 * of_validation[name]:
            warnings.append(hint("validation in training", name=name, count=count))
    own = own_layout(analysis)
    if own["padding_pct"] > PADDING_PCT:
        best = min(analysis["layouts"], key=lambda row: row["padding_pct"])
        advice = f"data.layout={best['layout']} pads {best['padding_pct']:.1f} %"
        if best["own"]:
            advice = hint("least padding")
        if own["steps"] == 1:
            advice = "The data does not fill one global batch: lower train.global_batch_size, or use more data"
        share = own["padding_pct"]
        warnings.append(f"{share:.1f} % of the positions are padding in the {own['layout']} layout. {advice}")
    return warnings


def _source_warnings(source: dict[str, Any], max_length: int) -> list[str]:
    # Percentages of rows, as read: a source of bad rows has few documents, or none.
    rows = max(source["rows"], 1)
    found = []
    skipped = ", ".join(f"{one['rows']:,} {one['reason']}" for one in source["findings"] if one["kind"] == "skipped")
    ways = {"truncated": ("truncated", "drop"), "partly_dropped": ("dropped in part", "truncate")}
    for key, (became, other) in ways.items():
        if 100.0 * source.get(key, 0) > TRUNCATED_PCT * rows:
            words = {"name": source["name"], "number": source[key], "rows": counted(source["rows"], "row")}
            found.append(hint("rows that are too long", **words, max_length=max_length, became=became, other=other))
    reasons = {
        "dropped_too_long": f"longer than data.max_length ({max_length}): raise it, or set data.too_long=truncate",
        "dropped_no_target": "without a target: marked by the data, as the answers line says, or cut before the first "
        "one; then raise data.max_length or shorten the prompts",
        "skipped_bad": f"bad ({skipped}): data.on_bad_row=error stops at the first",
    }
    dropped = sum(source[key] for key in reasons)
    if 100.0 * dropped > DROPPED_PCT * rows:
        reasons_text = "; ".join(f"{source[key]:,} {text}" for key, text in reasons.items() if source[key])
        of_all = f"{dropped:,} of {counted(source['rows'], 'row')}"
        found.append(f"source {source['name']}: {of_all} not used. {reasons_text}")
    return found


def machine_warnings(analysis: dict[str, Any]) -> list[str]:
    """Return warnings of a GPU or a disk that is too small."""
    warnings = []
    memory = analysis["memory"]
    disk = analysis["disk"]
    if memory and memory["fits"] is False:
        warnings.append(hint("step above the memory", estimated=size_text(memory["estimated_gib"]), memory=memory))
    if disk["fits"] is False:
        sizes = {name: size_text(disk[f"{name}_gib"]) for name in ("free", "checkpoint", "needed")}
        saves = f"{counted(disk['checkpoints'], 'checkpoint')} of {sizes['checkpoint']}"
        need = "needs" if disk["checkpoints"] == 1 else "need"
        warnings.append(hint("checkpoints above the disk", folder=disk["folder"], saves=saves, need=need, **sizes))
    return warnings
