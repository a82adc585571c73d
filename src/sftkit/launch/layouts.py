"""Compare on paper the layouts of a model on some GPUs before anything is started: memory, traffic and speed of each;
and say whether the layout that a start takes has room for a recipe, and which layout has. No torch.

Memory is the estimate of the memory plan (memory.estimate), traffic the formulas that are held against counted bytes
(memory.traffic). Speed is that of one GPU, less the exchanges that nothing hides and the wait of a pipeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sftkit.config.rules import split_problems, stages_of_schedule
from sftkit.config.schema import Config, LossConfig, TrainConfig
from sftkit.config.tables import DEFAULT, FALLBACK, OPTIMIZERS
from sftkit.config.topology import Topology, balanced, bubble, times_of_stages
from sftkit.data.batches.pack import Layout, largest_divisor
from sftkit.errors import ConfigError
from sftkit.memory.estimate import BUDGETS, GIB, SHARDINGS, USABLE, Estimate, EstimateInputs, Shape, estimate, traffic
from sftkit.models.files import ModelSize, fields_of, of_fields, size_of
from sftkit.rundir.names import resolve, trained_length

SHARDABLE = ("llama", "mistral", "qwen2", "qwen3")
"Architectures whose matrices and layers can be spread over GPUs by parallel.tensor and parallel.stages."
DATASHEET = 989e12
"bf16 operations per second of an H100 or H200."
NEARLY = 0.97
"A simpler layout is taken before one that is faster by less than this."


@dataclass(frozen=True)
class Machines:
    """GPUs, and how fast they compute and send. The defaults are those of H200s, eight in a machine, with 400 Gb/s of
    network each."""

    gpus: int
    per_machine: int = 8
    memory_bytes: int = 140 * GIB
    flops: float = 0.5 * DATASHEET
    "that one GPU reaches of a model, per second: half of the datasheet's bf16 rate"
    inside: float = 360e9
    "bytes per second that a GPU sends in a collective within its machine"
    between: float = 40e9
    "the same between machines"


@dataclass(frozen=True)
class OnPaper:
    """A layout for a model on some GPUs."""

    setup: EstimateInputs
    machines: Machines
    memory: str
    "train.memory"
    estimate: Estimate
    share: float
    "of one GPU's speed, per GPU, 0-1"
    hidden: float
    "seconds of exchanges that take place while a GPU computes, over those of all exchanges; 1.0 if there are none"
    sent: float
    "bytes that a GPU sends in a step"

    @property
    def config(self) -> str:
        """Return the accelerate config, and the settings that go with it."""
        t = self.setup.topology
        copies = f", dp_replicate_size {t.replicas}"
        if t.stages > 1:
            rest = "fsdp2.yaml" if t.shards > 1 else "pp.yaml"
            return f"{rest}, train.engine=pipeline, train.pipeline_stages={t.stages}"
        if not t.sharded:
            return "ddp.yaml" if t.world_size > 1 else "single_gpu.yaml"
        if t.ranks_per_row > 1:
            name, size = ("tp", t.tensor) if t.tensor > 1 else ("cp", t.context)
            return f"{name}.yaml, {name}_size {size}{copies * (t.replicas > 1)}"
        if self.machines.gpus > self.machines.per_machine:
            return f"multi_node.yaml{copies}"
        return "fsdp2.yaml" if t.replicas == 1 else f"hsdp.yaml{copies}"


def topologies(machines: Machines, shape: Shape) -> Iterator[Topology]:
    """Yield the topologies that could be taken, the simplest first: replicas; shards within machines, with copies over
    them; shards over wider groups; rows or matrices split within a machine; layers over machines."""
    gpus = machines.gpus
    own = min(machines.per_machine, gpus)
    yield Topology(replicas=gpus)
    # Groups of a whole machine or of several: a group of a part of one would leave fast connections unused.
    widths = [own * 2**i for i in range(20) if own * 2**i <= gpus and gpus % (own * 2**i) == 0]
    for width in widths:
        yield Topology(shards=width, replicas=gpus // width, sharded=True)
    for kind, parts in itertools.product(("tensor", "context"), (2, 4, 8)):
        # Tensor ranks divide the key heads; context ranks divide rows, which any number may.
        divides = shape.key // shape.head_dim % parts == 0 or kind == "context"
        for width in widths if parts <= own and divides else ():
            whole = Topology(shards=width // parts, replicas=gpus // width, sharded=True)
            yield replace(whole, tensor=parts) if kind == "tensor" else replace(whole, context=parts)
    for stages in (2, 4, 8, 16):
        if gpus % stages == 0 and stages <= shape.blocks and gpus >= stages:
            yield Topology(stages=stages, replicas=gpus // stages)
            yield Topology(stages=stages, shards=gpus // stages, sharded=True)


def on_paper(setup: EstimateInputs, memory: str, machines: Machines) -> OnPaper:
    """Return memory, traffic and speed of one layout.

    Args:
        memory: train.memory.
    """
    shape = setup.shape
    t = setup.topology
    count = setup.layout.accumulation
    tokens = max(rows * length for rows, length in setup.layout.shapes)
    # Computed again in the backward pass is what the memory budget does not keep: at most one forward pass more, a
    # third of the work.
    again = 1.0 + (BUDGETS["speed"] - setup.budget) / BUDGETS["speed"] / 3
    work = 6.0 * shape.parameters * tokens / machines.flops / t.ranks_per_row / t.stages  # seconds of a micro-batch
    spared = work / 3 * shape.frozen / shape.parameters  # a frozen parameter has no gradient of its own
    passes = {"forward": work / 3, "backward": work * (again - 1 / 3) - spared}
    alone, hidden = _exchanging(setup, machines, passes)
    waits = 0.0
    filled = 1.0
    if t.stages > 1:
        # A pipeline fills and drains once a step: its processes wait, the head counted, and its exchanges take longer.
        waits = bubble(times_of_stages(setup.stage_layers, *work_of(shape)), count, t.stages)
        # Several stages of each rank fill in that fraction of the time (Megatron-LM, arXiv 2104.04473).
        filled += (t.stages - 1) * t.stages / len(setup.stage_layers) / count
    step = count * sum(passes.values()) / (1.0 - waits) + filled * alone
    share = hidden / (hidden + alone) if hidden + alone else 1.0
    sent = sum(each.sent for each in traffic(setup))
    return OnPaper(setup, machines, memory, estimate(setup), count * (work - spared) / step, share, sent)


def work_of(shape: Shape) -> tuple[float, float]:
    """Return the parameters that a token passes in a layer and in the head."""
    return (shape.parameters - shape.ends) / shape.blocks, shape.vocab * shape.hidden


def _exchanging(setup: EstimateInputs, machines: Machines, passes: Mapping[str, float]) -> tuple[float, float]:
    """Return the seconds of the exchanges of a step for which a GPU waits, and of those that take place while it
    computes.

    Weights are gathered behind forward passes; where they are gathered again for each pass, half of that is behind
    backward passes. Gradients are exchanged behind backward passes: of every micro-batch, or of one where that is done
    once a step.

    Args:
        passes: seconds of the forward and of the backward pass of a micro-batch.
    """
    # What covers an exchange is used up: passes are filled in turn with the seconds of exchanges, and what does not fit
    # is waited for.
    t = setup.topology
    room = dict(passes)
    # A group is as wide as the ranks from its first to its last: wider than a machine, it sends over the network. Ranks
    # of a copy are neighbours, tensor and context ranks are nearest, stages farthest.
    copy = t.shards * t.ranks_per_row
    widths = {"tensor": t.tensor, "context": t.context, "shards": copy, "ends": copy, "replicas": t.stage_ranks}
    alone = hidden = 0.0
    for each in traffic(setup):
        within = widths.get(each.among, t.world_size) <= machines.per_machine
        seconds = each.sent / (machines.inside if within else machines.between)
        gathers = each.kind == "all_gather"
        # Within a layer, or between stages, the next operation needs the result: nothing hides it.
        if each.among in ("tensor", "context", "stages"):
            alone += seconds
            continue
        once = setup.sharding.keep_weights if gathers else setup.sharding.keep_gradients
        times = 1 if once or not t.sharded or t.stages > 1 else setup.layout.accumulation
        shares = {"forward": 1.0} if gathers else {"backward": 1.0}
        if gathers and times > 1 and each.among == "shards":
            shares = {"forward": 0.5, "backward": 0.5}
        for which, share in shares.items():
            covered = min(share * seconds, room[which] * times)
            room[which] -= covered / times
            hidden += covered
            alone += share * seconds - covered
    return alone, hidden


def setups(
    shape: Shape, of: Iterable[Topology], rows: int, row_length: int, micro: Sequence[int]
) -> Iterator[tuple[EstimateInputs, str]]:
    """Yield what could be run, with its train.memory: the simplest and fastest first.

    Args:
        of: topologies; those that cannot share the rows equally are left out.
        rows: of a step, over all GPUs.
        row_length: positions of a row.
        micro: the most rows of a micro-batch, those that may be chosen.
    """
    for topology in of:
        if not divides(topology, rows, row_length):
            continue
        share = rows // topology.row_ranks
        # The parameters that a token passes decide, as in parallel.stages for 1f1b.
        layers = balanced(shape.blocks, *work_of(shape), topology.stages) if topology.stages > 1 else ()
        shardings = SHARDINGS if topology.sharded and topology.stages == 1 else SHARDINGS[:1]
        # Each number of rows once: limits that lead to the same divisor are one layout.
        held = dict.fromkeys(largest_divisor(share, limit) for limit in micro)
        for in_micro, (memory, budget), sharding in itertools.product(held, BUDGETS.items(), shardings):
            layout = Layout("packed", (row_length,), rows, in_micro, topology.row_ranks, row_length, row_length)
            for optimizer in (DEFAULT, FALLBACK) if memory != "low" else (FALLBACK,):
                setup = EstimateInputs(
                    *(shape, layout, optimizer, "bf16", LossConfig.chunk_tokens, budget),
                    compiled=True,
                    checkpointing=False,
                    topology=topology,
                    sharding=sharding,
                    stage_layers=layers,
                )
                yield setup, memory


def divides(topology: Topology, rows: int, row_length: int) -> bool:
    """Return whether the ranks can share the rows of a step equally."""
    # Context ranks take two pieces of a row each, one from either end, so that a causal mask leaves all the same work.
    parts = topology.tensor * (2 * topology.context if topology.context > 1 else 1)
    return rows % topology.row_ranks == row_length % parts == 0


def ways(shape: Shape, machines: Machines, rows: int, row_length: int, micro: Sequence[int] = (1,)) -> list[OnPaper]:
    """Return each topology that fits, the simplest first, with the settings that leave it most speed. The arguments are
    those of `setups`."""
    found = setups(shape, topologies(machines, shape), rows, row_length, micro)
    # A pipeline of this schedule, 1f1b, has as many micro-batches in flight as stages (config.engine_rules).
    return best_fitting((each for each in found if each[0].layout.accumulation >= each[0].topology.stages), machines)


def best_fitting(found: Iterable[tuple[EstimateInputs, str]], machines: Machines) -> list[OnPaper]:
    """Return, for each topology that fits, its fastest setup."""
    best: dict[Topology, OnPaper] = {}
    for setup, memory in found:
        fitting = on_paper(setup, memory, machines)
        t = setup.topology
        fits = fitting.estimate.total <= USABLE * machines.memory_bytes
        if fits and (t not in best or fitting.share > best[t].share):
            best[t] = fitting
    return list(best.values())


def choice(fitting: list[OnPaper]) -> OnPaper | None:
    """Return the simplest that is about as fast as the fastest; None: nothing fits."""
    highest = max((each.share for each in fitting), default=0.0)
    return next((each for each in fitting if each.share >= NEARLY * highest), None)


def shape_of_fields(fields: Mapping[str, Any], known: ModelSize | None = None) -> Shape | None:
    """Return the sizes of a model by the fields of its transformers config; None: they do not name all, or it is
    another architecture.

    Args:
        known: size of the whole model, if its files give exact numbers.
    """
    if (size := of_fields(fields)) is None:
        return None
    hidden = fields["hidden_size"]
    heads = fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or hidden // heads
    return Shape(
        parameters=known.parameters if known else size.parameters,
        ends=size.ends,
        matrices=size.parameters - size.ends,
        blocks=fields["num_hidden_layers"],
        hidden=hidden,
        query=heads * head_dim,
        key=(fields.get("num_key_value_heads") or heads) * head_dim,
        inner=fields["intermediate_size"],
        head_dim=head_dim,
        vocab=fields["vocab_size"],
        frozen=known.frozen if known else 0,
        frozen_ends=known.frozen_ends if known else 0,
        frozen_matrices=known.frozen - known.frozen_ends if known else 0,
    )


class _Asked(NamedTuple):
    """A recipe on some GPUs: what fits of the layout that it is started in."""

    shape: Shape
    machines: Machines
    row_length: int
    shardable: bool
    "whether its matrices and layers can be spread"
    with_its_settings: list[OnPaper]
    "with the train.memory and the optimizer of the recipe"
    fitting: list[OnPaper]
    "with whatever train.memory and optimizer leave it most speed"


def _asked(cfg: Config, topology: Topology, memory_bytes: int | None, num_machines: int = 1) -> _Asked | None:
    """Return what fits of a layout; None: sizes are unknown, or there is one process."""
    fields = fields_of(cfg.model)
    if fields is None or memory_bytes is None or topology.world_size == 1 or (row_length := _row_length(cfg)) is None:
        return None
    rows = cfg.train.global_batch_size
    shape = shape_of_fields(fields, size_of(cfg.model, cfg.train.freeze, cfg.adapter))
    if shape is None or not divides(topology, rows, row_length):
        return None
    # This is rejected when the model is loaded.
    if cfg.optim.name != "auto" and OPTIMIZERS[cfg.optim.name].unshardable and topology.partial:
        return None
    machines = Machines(topology.world_size, max(1, topology.world_size // num_machines), memory_bytes)
    own = setups(shape, [topology], rows, row_length, [cfg.train.micro_batch_size])
    if topology.stages > 1:
        schedule = cfg.train.pipeline_schedule
        # A start is rejected for what is wrong with its stages (preflight.inputs).
        of_model = fields["model_type"], shape.blocks
        if any(split_problems(schedule, cfg.train.pipeline_layers, topology.stages, *of_model)):
            return None
        layers = layers_on_paper(shape, cfg.train, topology.stages)
        own = ((replace(setup, stage_layers=layers, schedule=schedule), memory) for setup, memory in own)
    every = list(own)
    if cfg.train.precision == "fp32":  # the other optimizer is one of bf16 weights
        every = [(replace(setup, precision="fp32", optimizer=DEFAULT), memory) for setup, memory in every]
    named = [(setup, memory) for setup, memory in every if memory == cfg.train.memory]
    if cfg.optim.name != "auto":
        named = [(replace(setup, optimizer=cfg.optim.name), memory) for setup, memory in named]
    fitting = [best_fitting(each, machines) for each in (named, every)]
    return _Asked(shape, machines, row_length, fields["model_type"] in SHARDABLE, *fitting)


def _row_length(cfg: Config) -> int | None:
    """Return the positions of a row by the recipe, or by the run that it starts from; None: unknown."""
    if length := cfg.data.row_length or cfg.data.max_length:
        return length
    if cfg.model.path is None or not Path(cfg.model.path).is_dir():
        return None
    # A folder without a model, or with a damaged state, is rejected when it is read to train.
    with suppress(ConfigError, OSError, ValueError):
        return trained_length(Path(resolve(cfg.model.path)))
    return None


def has_room(cfg: Config, topology: Topology, memory_bytes: int | None) -> bool | None:
    """Return whether a layout of one machine has room for the rows of a recipe, with whatever train.memory and
    optimizer; None: sizes are unknown, or there is one process."""
    asked = _asked(cfg, topology, memory_bytes)
    return None if asked is None else bool(asked.with_its_settings or asked.fitting)


def advice(cfg: Config, topology: Topology, memory_bytes: int | None, taken: str, num_machines: int = 1) -> str | None:
    """Return a line about the memory of the layout that is taken, and which layout of as many GPUs fits if that does
    not; None: sizes are unknown, or there is one process.

    Args:
        topology: of the run.
        memory_bytes: of a GPU; None: unknown.
        taken: the accelerate config.
        num_machines: over which the GPUs are spread equally.
    """
    asked = _asked(cfg, topology, memory_bytes, num_machines)
    if asked is None:
        return None
    if asked.with_its_settings:
        return f"on paper: {taken} {_takes(asked.with_its_settings[0])}"
    if asked.fitting:
        own = f"train.memory={cfg.train.memory}, optim.name={cfg.optim.name}"
        return f"on paper: {taken} {_takes(asked.fitting[0])}; it does not fit with {own}"
    rows = cfg.train.global_batch_size
    positions = f"rows of {asked.row_length:,} positions"
    micro = largest_divisor(rows // topology.row_ranks, cfg.train.micro_batch_size)
    fewer = range(cfg.train.micro_batch_size, 0, -1)  # as they are, if possible
    found = ways(asked.shape, asked.machines, rows, asked.row_length, fewer)
    if cfg.train.freeze:  # pipelines train all parameters
        found = [each for each in found if each.setup.topology.stages == 1]
    if not asked.shardable:  # layouts that spread them are no advice
        found = [each for each in found if each.setup.topology.ranks_per_row * each.setup.topology.stages == 1]
    instead = "nor does another layout; take shorter rows or more GPUs"
    if schedule := _with_fewer_micro_batches(cfg, topology, memory_bytes, num_machines):
        instead = schedule
    elif best := choice(found):
        less = best.setup.layout.micro_batch_size
        instead = f"{best.config} {_takes(best)}" + f", train.micro_batch_size={less}" * (less < micro)
        instead += ", train.precision=bf16" * (cfg.train.precision == "fp32")
    batch = f"{micro} {positions} in a micro-batch" if micro > 1 else positions
    gpipe = " and train.pipeline_schedule=gpipe" * (topology.stages > 1 and cfg.train.pipeline_schedule == "gpipe")
    return f"on paper: {batch} do not fit with {taken}{gpipe}; {instead} (docs/parallelism.md)"


def _with_fewer_micro_batches(
    cfg: Config, topology: Topology, memory_bytes: int | None, num_machines: int
) -> str | None:
    """Return what a pipeline of gpipe, which keeps the activations of all micro-batches, takes with 1f1b; None: it does
    not fit either, or is another layout."""
    if topology.stages == 1 or cfg.train.pipeline_schedule != "gpipe":
        return None
    for size in range(cfg.train.micro_batch_size, 0, -1):
        other = replace(cfg, train=replace(cfg.train, pipeline_schedule="1f1b", micro_batch_size=size))
        asked = _asked(other, topology, memory_bytes, num_machines)
        fitting = [*asked.with_its_settings, *asked.fitting] if asked else []
        # 1f1b is rejected with fewer micro-batches than stages (config/rules.py).
        if fits := next((way for way in fitting if way.setup.layout.accumulation >= topology.stages), None):
            fewer = f", train.micro_batch_size={size}" * (size < cfg.train.micro_batch_size)
            return f"train.pipeline_schedule=1f1b {_takes(fits)}{fewer}"
    return None


def layers_on_paper(shape: Shape, train: TrainConfig, pipeline_size: int) -> tuple[int, ...]:
    """Return the layers of each stage: the recipe's, else as parallel.balance has them, with as many stages as the
    schedule needs."""
    if train.pipeline_layers:
        return train.pipeline_layers
    stages = stages_of_schedule(train.pipeline_schedule, None, pipeline_size)
    return balanced(shape.blocks, *work_of(shape), stages)


def _takes(way: OnPaper) -> str:
    settings = f"train.memory={way.memory}, optim.name={way.setup.optimizer}"
    return (
        f"takes {way.estimate.total / GIB:.0f} of {way.machines.memory_bytes / GIB:.0f} GiB on each GPU with {settings}"
    )
