"""What a start says before it: whether the layout that it takes has room for a recipe on paper, and which one has. No
torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sftkit.config.launch_rules import split_problems, stages_of_schedule
from sftkit.config.optimizers import DEFAULT, OPTIMIZERS
from sftkit.config.pipeline_split import split_on_paper
from sftkit.config.schema import Config, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.batches.pack import largest_divisor
from sftkit.errors import ConfigError
from sftkit.launch.layouts import (
    SHARDABLE,
    Machines,
    OnPaper,
    best_fitting,
    choice,
    divides,
    setups,
    shape_of_fields,
    ways,
    work_of,
)
from sftkit.memory.estimate import GIB, Shape
from sftkit.models.size import fields_of, size_of
from sftkit.rundir.names import resolve, trained_length


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
    size, rows = size_of(cfg.model), cfg.train.global_batch_size
    shape = shape_of_fields(fields, size and size.parameters)
    if shape is None or not divides(topology, rows, row_length):
        return None
    # Which is refused when the model is there.
    if cfg.optim.name != "auto" and OPTIMIZERS[cfg.optim.name].unshardable and topology.partial:
        return None
    machines = Machines(topology.world_size, max(1, topology.world_size // num_machines), memory_bytes)
    own = setups(shape, [topology], rows, row_length, [cfg.train.micro_batch_size])
    if topology.stages > 1:
        schedule, configured = cfg.train.pipeline_schedule, cfg.train.pipeline_layers
        # A start is refused for what is wrong with its stages (preflight.launched).
        if any(split_problems(schedule, configured, topology.stages, fields["model_type"], shape.blocks)):
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
    """Return the positions of a row, where the recipe or the run that it starts from says; None: unknown."""
    if length := cfg.data.row_length or cfg.data.max_length:
        return length
    if cfg.model.path is None or not Path(cfg.model.path).is_dir():
        return None
    # A folder without a model, or with a damaged state, is refused where it is read to train.
    with suppress(ConfigError, OSError, ValueError):
        return trained_length(Path(resolve(cfg.model.path)))
    return None


def has_room(cfg: Config, topology: Topology, memory_bytes: int | None) -> bool | None:
    """Return whether a layout of one machine has room for the rows of a recipe, with whatever train.memory and
    optimizer; None: sizes are unknown, or there is one process."""
    asked = _asked(cfg, topology, memory_bytes)
    return None if asked is None else bool(asked.with_its_settings or asked.fitting)


def advice(cfg: Config, topology: Topology, memory_bytes: int | None, taken: str, num_machines: int = 1) -> str | None:
    """Return a line about the memory of the layout that is taken, and which layout of as many GPUs fits where that
    does not; None: sizes are unknown, or there is one process.

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
    rows, positions = cfg.train.global_batch_size, f"rows of {asked.row_length:,} positions"
    micro = largest_divisor(rows // topology.row_ranks, cfg.train.micro_batch_size)
    fewer = range(cfg.train.micro_batch_size, 0, -1)  # as they are, if possible
    found = ways(asked.shape, asked.machines, rows, asked.row_length, fewer)
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
        # With fewer micro-batches than stages 1f1b is refused (config.engine_rules).
        if fits := next((way for way in fitting if way.setup.layout.accumulation >= topology.stages), None):
            fewer = f", train.micro_batch_size={size}" * (size < cfg.train.micro_batch_size)
            return f"train.pipeline_schedule=1f1b {_takes(fits)}{fewer}"
    return None


def layers_on_paper(shape: Shape, train: TrainConfig, pipeline_size: int) -> tuple[int, ...]:
    """Return the layers of each stage: the recipe's, else as parallel.balance has them, with as many stages
    as the schedule needs."""
    if train.pipeline_layers:
        return train.pipeline_layers
    stages = stages_of_schedule(train.pipeline_schedule, None, pipeline_size)
    return split_on_paper(shape.blocks, *work_of(shape), stages, train.pipeline_schedule)


def _takes(way: OnPaper) -> str:
    settings = f"train.memory={way.memory}, optim.name={way.setup.optimizer}"
    return (
        f"takes {way.estimate.total / GIB:.0f} of {way.machines.memory_bytes / GIB:.0f} GiB on each GPU with {settings}"
    )
