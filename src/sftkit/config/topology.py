"""How the processes of a run share the work: the topology, read from the launcher's accelerate config, and the layers
of the stages of a pipeline. No torch in this file."""

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from sftkit.errors import ConfigError, config_error, hint

_PREFIX = "PARALLELISM_CONFIG_"
_SIZES = {"replicas": "DP_REPLICATE_SIZE", "shards": "DP_SHARD_SIZE", "context": "CP_SIZE", "tensor": "TP_SIZE"}


@dataclass(frozen=True)
class Topology:
    """Sizes of the mesh of processes, outermost first: stages x replicas x shards x (context or tensor)."""

    stages: int = 1
    """processes that a copy's layers are spread over, one after the other (pipeline); the same rows pass through all
    of them"""
    replicas: int = 1
    "copies of the weights"
    shards: int = 1
    "processes that a copy is sharded over, each with rows of its own (FSDP2)"
    context: int = 1
    "processes that hold shards of the same rows"
    tensor: int = 1
    "processes that hold shards of the same matrices, and of the same rows outside them"
    sharded: bool = False
    "whether weights are sharded at all; else DDP"
    on_cpu: bool = field(default=False, compare=False)
    "whether the processes are known to compute on the CPU, before torch is loaded by the launcher; no part of the mesh"

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.stages * self.replicas * self.shards * self.context * self.tensor

    @property
    def partial(self) -> bool:
        """Return whether a process holds only a part of the weights."""
        return self.sharded or self.stages > 1

    @property
    def stage_ranks(self) -> int:
        """Return how many processes hold the same layers."""
        return self.world_size // self.stages

    @property
    def row_ranks(self) -> int:
        """Return how many processes, or groups of them, have rows of their own."""
        return self.replicas * self.shards

    @property
    def ranks_per_row(self) -> int:
        """Return how many processes share each row."""
        return self.context * self.tensor

    def describe(self) -> str:
        """Describe it for the console: `fsdp2, 2 replicas x 4 shards`; `pipeline of 2 stages x ddp`."""
        if self.stages > 1:
            rest = replace(self, stages=1).describe() if self.world_size > self.stages else ""
            return f"pipeline of {self.stages} stages{rest and f' x {rest}'}"
        if not self.sharded:
            return "ddp" if self.replicas > 1 else "one process"
        sizes = {"replicas": self.replicas, "shards": self.shards, "context": self.context, "tensor": self.tensor}
        named = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1 or name == "shards")
        return f"fsdp2, {named}"


@dataclass(frozen=True)
class Sharding:
    """Choices between memory and communication, made with the memory plan."""

    keep_weights: bool = True
    "gathered weights stay from the first forward pass of a step to its last backward pass, else of a block at a time"
    keep_gradients: bool = True
    "gradients of earlier micro-batches add up whole, in fp32, and are exchanged once a step; else after each of them"

    def describe(self) -> str:
        """Describe it for the console."""
        weights = "gathered once a step" if self.keep_weights else "gathered for each pass, block by block"
        gradients = "exchanged once a step" if self.keep_gradients else "exchanged after each micro-batch"
        return f"weights {weights}, gradients {gradients}"


_NUMBERS = {
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), (1, 10**6)),
    **dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"), (1, 10**6)),
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK"), (0, 10**6)),
    **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), (0, 10**9)),
    "MASTER_PORT": (1, 65535),
    **dict.fromkeys((_PREFIX + name for name in (*_SIZES.values(), "SP_SIZE")), (-1, 10**6)),
}
"Variables of launchers that are whole numbers -> smallest and largest value."


def check_numbers(environ: Mapping[str, str]) -> None:
    """Check the variables by which a launcher numbers its processes, before anything reads them.

    Raises:
        ConfigError: all that are no numbers, or cannot be those of one group.
    """
    problems = []
    found = {}
    for name, (low, high) in _NUMBERS.items():
        text = environ.get(name)
        if text is None or (text == "" and name.startswith(_PREFIX)):
            continue
        if not re.fullmatch(r"\s*-?\d{1,18}\s*", text, re.ASCII) or not low <= int(text) <= high:
            problems.append(f"{name}={text[:40]!r} is not a whole number from {low} to {high}")
        else:
            found[name] = int(text)
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE")):
        if rank in found and found[rank] > found.get(size, 10**6) - (rank != "LOCAL_WORLD_SIZE"):
            problems.append(f"{rank}={found[rank]} does not fit {size}={found[size]}")
    if problems:
        raise config_error("wrong environment", problems="; ".join(problems))


def take_topology(environ: MutableMapping[str, str], world_size: int, stages: int | None = 1) -> Topology:
    """Read the topology from the launcher's environment variables, and remove those that would
    make Accelerate shard too.

    Args:
        stages: of a pipeline, which is the recipe's; None: as many as there are processes.

    Sharding is done here with torch, not by Accelerate: it would leave FSDP2 out on CPU, reject tensor parallelism, and
    shard after a compile of its own. Without these variables it only starts the process group.

    Raises:
        ConfigError: sizes that do not fit the number of processes, or what is not supported.
    """
    topology = read_topology(environ, world_size, stages)
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        environ.pop(name, None)
    return topology


def read_topology(environ: Mapping[str, str], world_size: int, stages: int | None = 1) -> Topology:
    """Return the topology as `take_topology` does, and leave the environment as it is.

    Raises:
        ConfigError: as `take_topology`.
    """
    stages = world_size if stages is None else stages
    if world_size % stages:
        processes = f"{world_size} process{'es' * (world_size > 1)}"
        raise config_error("stages that do not divide", stages=stages, processes=processes)
    on_cpu = environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes", "y", "t", "on")  # as Accelerate
    return replace(_of_a_stage(environ, world_size // stages, stages), stages=stages, on_cpu=on_cpu)


def _of_a_stage(environ: Mapping[str, str], world_size: int, stages: int) -> Topology:
    """Return how the processes that hold the same layers share the work. `world_size`: their number."""
    # accelerate launch passes its config file on in these variables
    if environ.get("ACCELERATE_USE_FSDP", "false").lower() not in ("true", "1"):
        return Topology(replicas=world_size)
    # Before any size: these settings have no effect however large the mesh is.
    _reject_ignored(environ)
    if environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() not in ("true", "1"):
        return Topology(shards=world_size, sharded=True)
    sizes = {field: int(environ.get(_PREFIX + name) or 1) for field, name in _SIZES.items()}
    if stages > 1 and sizes["tensor"] * sizes["context"] > 1:  # first: no number of processes would fix it
        raise config_error("mesh in a stage")
    if sizes["shards"] == -1:  # all processes that the other sizes leave
        others = sizes["replicas"] * sizes["context"] * sizes["tensor"]
        sizes["shards"] = max(world_size // others, 1)
    replicas, shards, context, tensor = (sizes[name] for name in ("replicas", "shards", "context", "tensor"))
    topology = Topology(replicas=replicas, shards=shards, context=context, tensor=tensor, sharded=True)
    if topology.world_size != world_size:
        named = " x ".join(f"{_SIZES[field].lower()} {size}" for field, size in sizes.items())
        made = topology.world_size
        raise config_error("sizes of another number", named=named, made=made, started=world_size)
    if topology.context > 1 and topology.tensor > 1:
        raise config_error("context and tensor", context=topology.context, tensor=topology.tensor)
    return topology


def topology_of(config_file: Path, processes: int | None = None, stages: int | None = 1) -> Topology:
    """Return the topology of a launch with this accelerate config.

    Args:
        processes: None: the file's num_processes.
        stages: as of read_topology.

    Raises:
        ConfigError: no accelerate config, or what read_topology raises.
    """
    try:
        config = yaml.safe_load(config_file.read_text())
        sections = [config.get(name) or {} for name in ("fsdp_config", "parallelism_config")]
        # accelerate launch passes the file on in such variables: FSDP_*, PARALLELISM_CONFIG_*.
        environ = {str(key).upper(): str(value) for section in sections for key, value in section.items()}
        number = int(processes or config["num_processes"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise config_error("no accelerate config", file=config_file, error=words) from None
    environ["ACCELERATE_USE_CPU"] = str(bool(config.get("use_cpu")))
    environ["ACCELERATE_USE_FSDP"] = str(config.get("distributed_type") == "FSDP")
    environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = str(bool(sections[1]))
    return read_topology(environ, number, stages)


def machines_of(config_file: Path) -> int:
    """Return the machines of an accelerate config that topology_of can read."""
    return int(yaml.safe_load(config_file.read_text()).get("num_machines") or 1)


def _reject_ignored(environ: Mapping[str, str]) -> None:
    """Reject settings of an accelerate config that would silently have no effect."""
    instead = {
        "FSDP_OFFLOAD_PARAMS": hint("offloading"),
        "FSDP_ACTIVATION_CHECKPOINTING": "set train.memory in the recipe",
    }
    if environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError("fsdp_config: fsdp_version must be 2 (accelerate_configs/fsdp2.yaml)")
    for name, advice in instead.items():
        if environ.get(name, "false").lower() == "true":
            raise ConfigError(f"fsdp_config: {name.lower()}=true is not supported: {advice}")
    if int(environ.get(_PREFIX + "SP_SIZE") or 1) > 1:
        raise ConfigError("parallelism_config: sp_size is not supported: use cp_size for long rows")


HEAD_SHARE = 0.7
"""Time of the head with its loss, over that of layers with as many parameters. All splits of 1f1b and interleaved that
were timed on H200 follow from it, as even as then: Qwen3 1.7B and 8B in two and four stages, half of 8B in two
(benchmarks/h200_patterns, benchmarks/h200_multi)."""


def balanced(num_layers: int, layer: float, head: float, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage of a pipeline, one or more, so that the slowest takes least.

    Args:
        layer, head: parameters that a token passes in a layer, and in the head.
    """
    # Greedy is exact here: layers are alike, so the next one belongs where the stage is still the lightest.
    costs = [layer] * (stages - 1) + [layer + HEAD_SHARE * head]
    layers = [1] * stages
    for _ in range(num_layers - stages):
        lightest = min(range(stages), key=lambda stage: costs[stage])
        costs[lightest] += layer
        layers[lightest] += 1
    return tuple(layers)


def stages_fit(stages: int, schedule: str, pipeline_size: int) -> bool:
    """Return whether a pipeline can have this number of stages: one per rank, interleaved two or more."""
    if schedule != "interleaved":
        return stages == pipeline_size
    return stages % pipeline_size == 0 and stages >= 2 * pipeline_size
