"""Put a model on its device, or shard it over the processes: its weights read, each rank its own shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel

from sftkit.config.launch_rules import graph_mesh_problems, no_experts, passes_off_gpu, unshared_experts
from sftkit.config.rule import Problem
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
    topology = rt.topology
    _refuse(graph_mesh_problems(topology))
    # Needs the sizes of every matrix, so it comes after what can be refused without them.
    if topology.tensor > 1:
        check_tensor_plan(orig_model, topology.tensor)
    # From here on only the exchange of tokens between ranks that share experts out, which are the tensor-parallel ones.
    if dispatcher != "alltoall":
        return
    if not any(is_experts(module) for module in orig_model.modules()):
        _refuse(no_experts(orig_model.config.model_type))
    _refuse(unshared_experts(topology))


def check_device(passes: Sequence[str], attention: str, device: torch.device) -> None:
    """Refuse passes that this device cannot run, before a model is loaded.

    Args:
        passes: names of graph.passes. attention: the backend that the recipe names.

    Raises:
        ConfigError: which pass, and what to do.
    """
    if device.type != "cuda":
        _refuse(passes_off_gpu(passes, attention, device.type))


def _refuse(problems: Iterable[Problem]) -> None:
    for _, text in problems:
        raise ConfigError(text)


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
