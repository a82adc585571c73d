"""What an engine cannot do on the processes of a launch, or with the model of a run: rules that need no torch.

A launch asks them before anything is loaded (preflight.launched), as far as the model's config is there to be read; the
engines ask them again of the model itself. Each function yields problems whose text names the setting by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sftkit.config.pipeline_split import stages_fit
from sftkit.config.rule import Problem
from sftkit.config.topology import Topology

PIPELINE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"Architectures whose decoder is an embedding, layers that are alike, and a norm."


def stages_of_schedule(schedule: str, layers: Sequence[int] | None, pipeline_size: int) -> int:
    """Return the number of stages on so many ranks.

    Args:
        layers: train.pipeline_layers. Interleaved stages may be more than two a rank where it lists them.
    """
    if schedule != "interleaved":
        return pipeline_size
    return len(layers) if layers else 2 * pipeline_size


def split_problems(
    schedule: str, layers: Sequence[int] | None, pipeline_size: int, model_type: str, num_layers: int | None
) -> Iterator[Problem]:
    """Yield why a pipeline of so many ranks cannot have this model's layers in its stages; at most one problem.

    Args:
        schedule, layers: train.pipeline_schedule and train.pipeline_layers.
        num_layers: of the model; None: unknown.
    """
    if model_type not in PIPELINE_MODEL_TYPES:
        yield (
            "train.engine",
            f"train.engine=pipeline: {model_type} cannot be split into stages here, "
            f"{', '.join(PIPELINE_MODEL_TYPES)} can: take train.engine=blocks with accelerate_configs/fsdp2.yaml",
        )
        return
    stages = stages_of_schedule(schedule, layers, pipeline_size)
    if num_layers is not None and stages > num_layers:
        most = num_layers * pipeline_size // stages
        fewer = [f"set train.pipeline_stages to {most} or less"] if most > 1 else []
        if pipeline_size <= num_layers:
            fewer.append("take train.pipeline_schedule=1f1b, which has one for each process")
        yield (
            "train.engine",
            f"train.engine=pipeline: {stages} stages for the {num_layers} layers of the model: "
            f"{', or '.join(fewer) or 'take train.engine=blocks'}",
        )
        return
    if layers is None:
        return
    if not stages_fit(len(layers), schedule, pipeline_size) or num_layers not in (None, sum(layers)):
        several = f"{pipeline_size}"
        if schedule == "interleaved":
            several = f"{2 * pipeline_size} (or another multiple of {pipeline_size})"
        known = "" if num_layers is None else f"{num_layers} "
        yield (
            "train.pipeline_layers",
            f"train.pipeline_layers={list(layers)}: must be {several} numbers that add up to the {known}layers of the "
            "model, or null, which measures them",
        )


def graph_mesh_problems(topology: Topology) -> Iterator[Problem]:
    """Yield why the graph engine has no sharding for the processes of a launch."""
    # Gradients are exchanged by the operators that gather shards; whole replicas have none of those, and the hooks by
    # which DDP exchanges its own do not run inside a captured graph.
    if topology.world_size > 1 and not topology.sharded:
        shards = "cpu_fsdp2.yaml" if topology.on_cpu else "fsdp2.yaml or hsdp.yaml"
        yield (
            "train.engine",
            f"train.engine=graph shards weights over its {topology.world_size} processes, and {topology.describe()} "
            f"keeps them whole: start it with accelerate_configs/{shards}",
        )
    # Ranks that share a row would have to exchange keys and values within attention: not built for this engine.
    if topology.context > 1:
        yield (
            "train.engine",
            f"train.engine=graph has no context parallelism yet ({topology.describe()}): set cp_size to 1, or "
            "train.engine=blocks",
        )


def no_experts(model_type: str) -> Iterator[Problem]:
    """Yield what is wrong with graph.token_dispatcher=alltoall for an architecture without experts."""
    yield (
        "graph.token_dispatcher",
        f"graph.token_dispatcher=alltoall sends tokens to experts, and {model_type} has none here: leave it out",
    )


def unshared_experts(topology: Topology) -> Iterator[Problem]:
    """Yield why graph.token_dispatcher=alltoall has nothing to do on the processes of a launch."""
    if topology.tensor == 1:
        file = "cpu_tp.yaml" if topology.on_cpu else "tp.yaml"
        yield (
            "graph.token_dispatcher",
            "graph.token_dispatcher=alltoall exchanges tokens between processes that share experts out, and here "
            f"each has all ({topology.describe()}): start it with accelerate_configs/{file} and a "
            "parallelism_config_tp_size above 1, or leave it out",
        )


def passes_off_gpu(passes: Sequence[str], attention: str, device: str) -> Iterator[Problem]:
    """Yield which passes a device that is no GPU cannot run.

    Args:
        passes: names of graph.passes.
        attention: the backend that the recipe names.
        device: its type, such as cpu.
    """
    if "cuda_graphs" in passes:
        yield (
            "graph.passes",
            f"graph.passes: cuda_graphs needs a GPU, and this process computes on {device}: leave it out here",
        )
    if "full_inductor" in passes and attention == "flex":
        yield (
            "graph.passes",
            f"graph.passes: full_inductor has no backward pass of FlexAttention on {device}: set "
            "attention.backend=reference, or take regional_inductor, which leaves it as it is",
        )
