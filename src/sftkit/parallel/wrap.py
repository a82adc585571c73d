"""Turn a model with its loss, compiled in place, into what a train step calls: replicas (DDP), shards
(FSDP2) or stages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from sftkit.config.schema import ModelConfig, TrainConfig
from sftkit.models.structure import stages_of
from sftkit.models.weights import materialize_weights
from sftkit.objectives.objective import ModelWithLoss
from sftkit.parallel.fsdp import Sharding, make_meshes, set_gradient_sync, shard
from sftkit.parallel.tensor import add_up_partial_gradients
from sftkit.runtime.start import Runtime, replaced


def distribute(
    model: ModelWithLoss, source: ModelConfig | None, sharding: Sharding, rt: Runtime, train: TrainConfig | None = None
) -> torch.nn.Module:
    """Put the weights on the device, sharded as the launcher asks; every rank calls it.

    Args:
        source: where the weights of an empty model come from (models.load).
        train: of a pipeline: its layers and schedule; None: the defaults.

    Returns:
        what the train step calls; `model.orig_model` stays the same object.
    """
    if rt.topology.stages > 1:
        from sftkit.parallel.pipeline import into_stages
        from sftkit.parallel.stages import layers_of_stages

        train = train or TrainConfig()
        layers = layers_of_stages(model.orig_model, train, rt.topology.stages)
        return into_stages(model, source, layers, train.pipeline_schedule, rt)
    if not rt.topology.sharded:
        return replicate(model, rt)
    meshes = make_meshes(rt.topology, rt.device.type)
    shard(model, meshes, sharding, rt.precision)
    if meshes.context is not None:
        model.context_group = str(meshes.context.get_group().group_name)  # a name is what compiled code may hold
    materialize_weights(model.orig_model, source, rt.device)
    rt.print(f"{rt.topology.describe()}: {sharding.describe()}")
    return model


def replicate(model: torch.nn.Module, rt: Runtime) -> torch.nn.Module:
    """Return the model on the device, wrapped by DDP where there are several processes; it keeps
    its identity inside."""
    # torch 2.13 deprecates broadcast_buffers for forward_sync_buffers (pytorch/pytorch#178054); 2.11 and Accelerate
    # know only this name.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers")
        return rt.accelerator.prepare(model)


def gradient_sync(model: torch.nn.Module, rt: Runtime, *, sync: bool) -> AbstractContextManager[object]:
    """Return a context for a micro-batch, with `sync` for the last one of a step: replicas exchange gradients only in
    that one, shards as their plan says, tensor-parallel ranks those of norms when it ends. For a pipeline it is a
    context for all micro-batches: `sync` says whether they are exchanged at all."""
    if rt.topology.stages > 1:
        return replaced(model, "exchanges", sync)
    if rt.topology.sharded:
        set_gradient_sync(model, last=sync)
        return _adding_up(model) if sync and rt.topology.tensor > 1 else nullcontext()
    # Without no_sync DDP would reduce in each micro-batch, and the gradients of earlier ones again.
    return nullcontext() if sync else rt.accelerator.no_sync(model)


@contextmanager
def _adding_up(model: torch.nn.Module) -> Iterator[None]:
    """Add up, after the context, what tensor-parallel ranks have of the gradients of weights that all of them hold."""
    yield
    add_up_partial_gradients(model)


def gradient_scale(rt: Runtime) -> float:
    """Return the factor of the loss that makes gradients sums over ranks: DDP averages them, shards and stages
    add them up."""
    return 1.0 if rt.topology.partial else float(rt.world_size)


def as_whole(orig_model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context within which the model of a pipeline can be called as one that is whole: see
    parallel.pipeline.stagewise. Any other model stays as it is."""
    if stages_of(orig_model) is None:
        return nullcontext()
    from sftkit.parallel.pipeline import stagewise

    return stagewise(orig_model)
