"""Estimate on paper, before anything is started, whether the layout that a start takes has room for a recipe, and which
layout has. No torch.

Memory is the estimate of the memory plan (memory.estimate). labs/patterns/speed.py estimates speed, too.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sftkit.config.rules import split_problems, stages_of_schedule
from sftkit.config.schema import Config, LossConfig
from sftkit.config.tables import DEFAULT, FALLBACK, OPTIMIZERS
from sftkit.config.topology import Topology, balanced
from sftkit.data.batches.pack import Layout, largest_divisor
from sftkit.errors import ConfigError
from sftkit.memory.estimate import BUDGETS, GIB, SHARDINGS, USABLE, EstimateInputs, Shape, estimate
from sftkit.models.files import ModelSize, fields_of, of_fields, size_of
from sftkit.rundir.names import resolve, trained_length

SHARDABLE = ("llama", "mistral", "qwen2", "qwen3")
"Architectures whose matrices and layers can be spread over GPUs by parallel.tensor and parallel.pipeline."
Way = tuple[EstimateInputs, str]
"A layout for a model on some GPUs, and its train.memory."


def config_of(t: Topology, per_machine: int) -> str:
    """Return the accelerate config of a topology, and the settings that go with it.

    Args:
        per_machine: GPUs of a machine.
    """
    copies = f", dp_replicate_size {t.replicas}"
    if t.stages > 1:
        rest = "fsdp2.yaml" if t.shards > 1 else "pp.yaml"
        return f"{rest}, train.engine=pipeline, train.pipeline_stages={t.stages}"
    if not t.sharded:
        return "ddp.yaml" if t.world_size > 1 else "single_gpu.yaml"
    if t.ranks_per_row > 1:
        name, size = ("tp", t.tensor) if t.tensor > 1 else ("cp", t.context)
        return f"{name}.yaml, {name}_size {size}{copies * (t.replicas > 1)}"
    if t.world_size > per_machine:
        return f"multi_node.yaml{copies}"
    return "fsdp2.yaml" if t.replicas == 1 else f"hsdp.yaml{copies}"


def topologies(gpus: int, per_machine: int, shape: Shape) -> Iterator[Topology]:
    """Yield the topologies that could be taken, the simplest first: replicas; shards within machines, with copies over
    them; shards over wider groups; rows or matrices split within a machine; layers over machines."""
    own = min(per_machine, gpus)
    yield Topology(replicas=gpus)
    # Groups of a whole machine or of several: a group of a part of one would leave fast connections unused.
    widths = [own * 2**i for i in range(20) if own * 2**i <= gpus and gpus % (own * 2**i) == 0]
    for width in widths:
        yield Topology(shards=width, replicas=gpus // width, sharded=True)
    for kind, parts in itertools.product(("context", "tensor"), (2, 4, 8)):
        # Tensor ranks divide the key heads; context ranks divide rows, which any number may.
        divides = shape.key // shape.head_dim % parts == 0 or kind == "context"
        for width in widths if parts <= own and divides else ():
            whole = Topology(shards=width // parts, replicas=gpus // width, sharded=True)
            yield replace(whole, tensor=parts) if kind == "tensor" else replace(whole, context=parts)
    for stages in (2, 4, 8, 16):
        if gpus % stages == 0 and stages <= shape.blocks and gpus >= stages:
            yield Topology(stages=stages, replicas=gpus // stages)
            yield Topology(stages=stages, shards=gpus // stages, sharded=True)


def work_of(shape: Shape) -> tuple[float, float]:
    """Return the parameters that a token passes in a layer and in the head."""
    return (shape.parameters - shape.ends) / shape.blocks, shape.vocab * shape.hidden


def setups(shape: Shape, of: Iterable[Topology], rows: int, row_length: int, micro: Sequence[int]) -> Iterator[Way]:
    """Yield what could be run: the simplest first, and of one topology the fastest.

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
        # The parameters that a token passes decide, as in parallel.pipeline.
        layers = balanced(shape.blocks, *work_of(shape), topology.stages) if topology.stages > 1 else ()
        shardings = SHARDINGS if topology.sharded and topology.stages == 1 else SHARDINGS[:1]
        # Each number of rows once: limits that lead to the same divisor are one layout.
        held = dict.fromkeys(largest_divisor(share, limit) for limit in micro)
        for (memory, budget), in_micro, sharding in itertools.product(BUDGETS.items(), held, shardings):
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


def is_within(setup: EstimateInputs, memory_bytes: int) -> bool:
    """Return whether a layout has room on GPUs of this memory."""
    return estimate(setup).total <= USABLE * memory_bytes


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
        nf4=known.nf4 if known else 0,
    )


def _asked(cfg: Config, topology: Topology, memory_bytes: int | None) -> tuple[Shape, int, bool, Way | None] | None:
    """Return what fits of a layout; None: sizes are unknown, or there is one process.

    Returns:
        (the sizes of the model; positions of a row; whether its matrices and layers can be spread; the layout that it
        is started in, if it fits: with the train.memory and the optimizer of the recipe if these fit, else with those
        that leave it most speed)
    """
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
    every = list(setups(shape, [topology], rows, row_length, [cfg.train.micro_batch_size]))
    if topology.stages > 1:
        schedule = cfg.train.pipeline_schedule
        # A start is rejected for what is wrong with its stages (preflight.inputs).
        of_model = fields["model_type"], shape.blocks
        if any(split_problems(schedule, cfg.train.pipeline_layers, topology.stages, *of_model)):
            return None
        stages = stages_of_schedule(schedule, None, topology.stages)
        layers = cfg.train.pipeline_layers or balanced(shape.blocks, *work_of(shape), stages)
        every = [(replace(setup, stage_layers=layers, schedule=schedule), memory) for setup, memory in every]
    if cfg.train.precision == "fp32":  # the other optimizer is one of bf16 weights
        every = [(replace(setup, precision="fp32", optimizer=DEFAULT), memory) for setup, memory in every]
    named = [(setup, memory) for setup, memory in every if memory == cfg.train.memory]
    if cfg.optim.name != "auto":
        named = [(replace(setup, optimizer=cfg.optim.name), memory) for setup, memory in named]
    way = next((each for each in (*named, *every) if is_within(each[0], memory_bytes)), None)
    return shape, row_length, fields["model_type"] in SHARDABLE, way


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
    return None if asked is None else asked[-1] is not None


def advice(cfg: Config, topology: Topology, memory_bytes: int | None, taken: str, num_machines: int = 1) -> str | None:
    """Return a line about the memory of the layout that is taken, and which layout of as many GPUs fits if that does
    not; None: sizes are unknown, or there is one process.

    Args:
        topology: of the run.
        memory_bytes: of a GPU; None: unknown.
        taken: the accelerate config.
        num_machines: over which the GPUs are spread equally.
    """
    asked = _asked(cfg, topology, memory_bytes)
    if asked is None:
        return None
    assert memory_bytes is not None
    shape, row_length, shardable, way = asked
    if way is not None:
        setup, memory = way
        own = memory == cfg.train.memory and cfg.optim.name in ("auto", setup.optimizer)
        not_own = f"; it does not fit with train.memory={cfg.train.memory}, optim.name={cfg.optim.name}"
        return f"on paper: {taken} {_takes(way, memory_bytes)}{'' if own else not_own}"
    rows = cfg.train.global_batch_size
    positions = f"rows of {row_length:,} positions"
    micro = largest_divisor(rows // topology.row_ranks, cfg.train.micro_batch_size)
    per_machine = max(1, topology.world_size // num_machines)
    every = topologies(topology.world_size, per_machine, shape)
    # Rows of a micro-batch as they are, if possible.
    found = setups(shape, every, rows, row_length, range(cfg.train.micro_batch_size, 0, -1))

    def may_run(setup: EstimateInputs) -> bool:
        """Return whether a layout may be named in place of that of the recipe."""
        t = setup.topology
        # A pipeline of 1f1b has as many micro-batches in flight as stages, and trains all parameters.
        pipeline = setup.layout.accumulation >= t.stages and not cfg.train.freeze
        if shape.nf4 and t.partial:  # its matrices are not sharded
            return False
        return (t.stages == 1 or pipeline) and (shardable or t.ranks_per_row * t.stages == 1)

    # Recomputing costs more than what most layouts send: the simplest of those that recompute least.
    fitting = (way for way in found if may_run(way[0]) and is_within(way[0], memory_bytes))
    best = min(fitting, key=lambda way: -way[0].budget, default=None)
    instead = "nor does another layout; take shorter rows or more GPUs"
    if best is not None:
        less = best[0].layout.micro_batch_size
        instead = f"{config_of(best[0].topology, per_machine)} {_takes(best, memory_bytes)}"
        instead += f", train.micro_batch_size={less}" * (less < micro)
        instead += ", train.precision=bf16" * (cfg.train.precision == "fp32")
    batch = f"{micro} {positions} in a micro-batch" if micro > 1 else positions
    gpipe = topology.stages > 1 and cfg.train.pipeline_schedule == "gpipe"
    named = " and train.pipeline_schedule=gpipe, which keeps more activations than 1f1b" * gpipe
    return f"on paper: {batch} do not fit with {taken}{named}; {instead} (docs/parallelism.md)"


def _takes(way: Way, memory_bytes: int) -> str:
    setup, memory = way
    gib = f"{estimate(setup).total / GIB:.0f} of {memory_bytes / GIB:.0f} GiB"
    return f"takes {gib} on each GPU with train.memory={memory}, optim.name={setup.optimizer}"
