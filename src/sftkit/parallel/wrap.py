"""A model with its loss, compiled in place, becomes what the train step calls: replicas (DDP) or pieces (FSDP2)."""

from __future__ import annotations

import torch

from sftkit.config.schema import ModelConfig
from sftkit.models.weights import load_model_weights, make_room
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.ops.gather_rows import use_context_group
from sftkit.parallel.fsdp import Sharding, make_meshes, shard
from sftkit.runtime.start import Runtime


def distribute(model: ModelWithLoss, source: ModelConfig | None, sharding: Sharding, rt: Runtime) -> torch.nn.Module:
    """Weights on the device, shared out as the launcher asks; every rank calls it.

    Args:
        source: where the weights of an empty model come from (model.load_model).

    Returns:
        what the train step calls; `model.orig_model` stays the same object.
    """
    if not rt.topology.sharded:
        return rt.prepare(model)
    empty = any(p.is_meta for p in model.parameters())
    meshes = make_meshes(rt.topology, rt.device.type)
    shard(model, meshes, sharding, rt.precision)
    if meshes.context is not None:
        use_context_group(meshes.context.get_group())
    make_room(model.orig_model, rt.device)
    if empty:
        assert source is not None
        load_model_weights(model.orig_model, source)
    rt.say(f"{rt.topology.describe()}: {sharding.describe()}")
    return model
