"""A model on its device, or cut over the processes: its weights read, each rank its own pieces."""

from __future__ import annotations

from transformers import PreTrainedModel

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError
from sftkit.graph.sharding import shard
from sftkit.models.weights import load_model_weights, make_room
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.parallel.fsdp import make_meshes
from sftkit.runtime.progress import working
from sftkit.runtime.start import Runtime


def check_possible(rt: Runtime, orig_model: PreTrainedModel) -> None:
    """Refuse processes that the engine has no sharding for, and models that it was not made for.

    Raises:
        ConfigError: replicas of whole models, tensor or context parallelism, a model with an encoder.
    """
    if orig_model.config.is_encoder_decoder:
        raise ConfigError(
            f"train.engine=graph trains decoders alone, and {orig_model.config.model_type} has an encoder: set "
            "train.engine=blocks"
        )
    topology = rt.topology
    if rt.world_size > 1 and not topology.sharded:
        raise ConfigError(
            f"train.engine=graph shards weights over its {rt.world_size} processes, and {topology.describe()} keeps them "
            "whole: start it with accelerate_configs/fsdp2.yaml or hsdp.yaml"
        )
    if topology.parts > 1:
        raise ConfigError(
            f"train.engine=graph has no tensor or context parallelism yet ({topology.describe()}): set tp_size and cp_size "
            "to 1, or train.engine=blocks"
        )


def place(model: ModelWithLoss, source: ModelConfig | None, rt: Runtime) -> None:
    """Weights on the device, sharded where the launcher asks for it; every rank calls it.

    Args:
        source: where the weights of an empty model come from (models.load).
    """
    if not rt.topology.sharded:
        model.to(rt.device)
        return
    empty = any(p.is_meta for p in model.parameters())
    shard(model, make_meshes(rt.topology, rt.device.type).blocks, rt.precision)
    make_room(model.orig_model, rt.device)
    if empty:
        assert source is not None
        with working(f"reading the weights of {source.path}"):
            load_model_weights(model.orig_model, source)
    rt.say(f"{rt.topology.describe()}: weights gathered inside the graph, gradients exchanged after each micro-batch")
