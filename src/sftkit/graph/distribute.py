"""Put a model on its device, or shard it over the processes: its weights read, each rank its own shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError
from sftkit.graph.parallel.experts import is_experts, use_grouped_products
from sftkit.graph.parallel.sharding import shard_for_graph
from sftkit.graph.parallel.tensor import check_tensor_plan, exchange_activations, make_graph_meshes, weight_placement
from sftkit.models.weights import materialize_weights
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.runtime.start import Runtime


def check_possible(rt: Runtime, orig_model: PreTrainedModel, dispatcher: str = "allgather") -> None:
    """Refuse processes that the engine has no sharding for, and models that it was not made for.

    Args:
        dispatcher: graph.token_dispatcher.

    Raises:
        ConfigError: replicas of whole models, context parallelism, a model with an encoder, what tensor parallelism
            does not know or cannot divide, or an exchange of tokens where no experts are shared out.
    """
    # What is asked of the model alone comes first: it is refused alike on one GPU and on many.
    if orig_model.config.is_encoder_decoder:
        raise ConfigError(
            f"train.engine=graph trains decoders alone, and {orig_model.config.model_type} has an encoder: set "
            "train.engine=blocks"
        )
    # Gradients are exchanged by the operators that gather shards; whole replicas have none of those, and the hooks by
    # which DDP exchanges its own do not run inside a captured graph.
    topology = rt.topology
    if rt.world_size > 1 and not topology.sharded:
        raise ConfigError(
            f"train.engine=graph shards weights over its {rt.world_size} processes, and {topology.describe()} keeps "
            "them whole: start it with accelerate_configs/fsdp2.yaml or hsdp.yaml"
        )
    # Ranks that share a row would have to exchange keys and values within attention: not built for this engine.
    if topology.context > 1:
        raise ConfigError(
            f"train.engine=graph has no context parallelism yet ({topology.describe()}): set cp_size to 1, or "
            "train.engine=blocks"
        )
    # Needs the sizes of every matrix, so it comes after what can be refused without them.
    if topology.tensor > 1:
        check_tensor_plan(orig_model, topology.tensor)
    # From here on only the exchange of tokens between ranks that share experts out, which are the tensor-parallel ones.
    if dispatcher != "alltoall":
        return
    if not any(is_experts(module) for module in orig_model.modules()):
        raise ConfigError(
            f"graph.token_dispatcher=alltoall sends tokens to experts, and {orig_model.config.model_type} has none "
            "here: leave it out"
        )
    if topology.tensor == 1:
        raise ConfigError(
            "graph.token_dispatcher=alltoall exchanges tokens between processes that share experts out, and here "
            f"each has all ({topology.describe()}): start it with accelerate_configs/tp.yaml and a "
            "parallelism_config_tp_size above 1, or leave it out"
        )


def check_device(passes: Sequence[str], attention: str, device: torch.device) -> None:
    """Refuse passes that this device cannot run, before a model is loaded.

    Args:
        passes: names of graph.passes. attention: the backend that the recipe names.

    Raises:
        ConfigError: which pass, and what to do.
    """
    # CUDA has all passes and kernels; what follows is about the CPU, on which recipes are tried out.
    if device.type == "cuda":
        return
    if "cuda_graphs" in passes:
        raise ConfigError(
            f"graph.passes: cuda_graphs needs a GPU, and this process computes on {device.type}: leave it out here"
        )
    if "full_inductor" in passes and attention == "flex":
        raise ConfigError(
            f"graph.passes: full_inductor has no backward pass of FlexAttention on {device.type}: set "
            "attention.backend=reference, or take regional_inductor, which leaves it as it is"
        )


def distribute_for_graph(
    model: ModelWithLoss, source: ModelConfig | None, rt: Runtime, dispatcher: str = "allgather"
) -> None:
    """Put weights on the device, sharded where the launcher asks for it, and experts as a graph takes them; every rank
    calls it.

    Args:
        source: where the weights of an empty model come from (models.load).
        dispatcher: graph.token_dispatcher.
    """
    if not rt.topology.sharded:
        use_grouped_products(model.orig_model)
        model.to(rt.device)
        return
    # Modules change their class first for the products of experts, then for activations, last for sharding: the forward
    # pass that gathers weights must be the outermost, as it gives the others theirs.
    meshes = make_graph_meshes(rt.topology, rt.device.type)
    mesh = meshes.tensor_parallel
    use_grouped_products(model.orig_model, None if mesh is None else mesh.get_group("tensor"), dispatcher)
    if mesh is not None:
        exchange_activations(model.orig_model, mesh)
    shard_for_graph(model, weight_placement(model.orig_model, meshes), rt.precision)
    # Weights are read when their places are known, so that each rank reads no more than its own shards.
    materialize_weights(model.orig_model, source, rt.device)
    rt.print(f"{rt.topology.describe()}: weights gathered inside the graph, gradients exchanged after each micro-batch")
