"""Turn a model with its loss, compiled in place, into what a step calls: replicas (DDP), shards (FSDP2) or stages.

Weights are sharded with torch's FSDP2: compiled blocks one by one, then embedding and head. Every weight is gathered
before it is used. Its gradient is summed over the ranks in fp32, and each rank keeps its shard. The model keeps its
class and its parameter names; parameters are DTensors from then on.
"""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from sftkit.config.schema import ModelConfig, TrainConfig
from sftkit.config.topology import Sharding, Topology
from sftkit.errors import config_error
from sftkit.models import structure, weights
from sftkit.objectives.objective import ModelWithLoss
from sftkit.parallel.tensor import add_up_partial_gradients, shard_matrices
from sftkit.runtime.start import Runtime, replaced


class Meshes(NamedTuple):
    """The process groups of a sharded run."""

    blocks: DeviceMesh
    "over these FSDP shards the weights of blocks: [shards] or [replicas, shards]; context ranks count as shards"
    rest: DeviceMesh
    "the same for embedding, final norm and head, where tensor-parallel ranks, which compute other positions, count too"
    tensor: DeviceMesh | None = None
    context: DeviceMesh | None = None


def make_meshes(topology: Topology, device_type: str) -> Meshes:
    """Make the process groups of a topology; every rank calls it."""
    t = topology
    mesh = partial(init_device_mesh, device_type)
    names = ("replicas", "shards")
    if t.tensor > 1:
        # Ranks of a tensor group are neighbours: they exchange in each layer, so they belong into one machine.
        whole = mesh((t.replicas, t.shards, t.tensor), mesh_dim_names=(*names, "tensor"))
        rest = mesh((t.replicas, t.shards * t.tensor), mesh_dim_names=names)
        return Meshes(without_one_replica(whole, t), without_one_replica(rest, t), whole["tensor"])
    # Context ranks hold other positions of the same rows, and all weights: to FSDP they are further shards.
    blocks = without_one_replica(mesh((t.replicas, t.shards * t.context), mesh_dim_names=names), t)
    rows = (t.replicas * t.shards, t.context)
    context = mesh(rows, mesh_dim_names=("rows", "context"))["context"] if t.context > 1 else None
    return Meshes(blocks, blocks, None, context)


def without_one_replica(mesh: DeviceMesh, topology: Topology) -> DeviceMesh:
    """Return the dimensions of a mesh that weights are sharded and replicated over: [shards] or [replicas, shards]."""
    return mesh["shards"] if topology.replicas == 1 else mesh["replicas", "shards"]


def shard(model: torch.nn.Module, meshes: Meshes, sharding: Sharding, precision: str) -> None:
    """Shard the weights of `model.orig_model` in place, after the blocks are compiled (lazily) and before the
    optimizer is built.

    Args:
        model: a ModelWithLoss. Its `sums`, `hidden_states` and `sums_of_selected` become methods that gather what they
            need, as the forward pass of orig_model does from now on.
        precision: of the weights; gradients are summed in fp32.

    Raises:
        ConfigError: the model's blocks are not named, or tensor parallelism does not know its layers.
    """
    orig_model = model.orig_model
    assert isinstance(orig_model, PreTrainedModel)
    blocks = structure.decoder_blocks(orig_model)
    if not blocks:
        raise config_error("no decoder block to shard", cls=type(orig_model).__name__)
    # Tensor parallelism first: FSDP then shards each rank's part of a matrix, on the other dimension of the mesh.
    if meshes.tensor is not None:
        shard_matrices(orig_model, blocks, meshes.tensor)
    policy = policy_of(precision)
    keep = sharding.keep_weights
    # On one shard of one replica there is nothing to gather or to exchange, and FSDP's hooks would cost the host as
    # much as the block itself: tensor parallelism alone leaves blocks as they are.
    whole = meshes.blocks.size() == 1
    for block in () if whole else blocks:
        fully_shard(block, mesh=meshes.blocks, mp_policy=policy, reshard_after_forward=not keep)
    # If embedding and head are one weight, it belongs to the root, which keeps it for both.
    embedding, projection = structure.embedding_module(orig_model), structure.output_projection(orig_model)
    alone = [] if projection.weight is embedding.weight else [embedding, projection]
    # Neither is read in the backward pass (pytorch/pytorch#137922): the loss has its gradients by then. If weights are
    # kept, the setting changes nothing (pytorch/pytorch#144800).
    for module in alone:
        sharded = fully_shard(module, mesh=meshes.rest, mp_policy=policy, reshard_after_forward=not keep)
        sharded.set_unshard_in_backward(False)
    # The root last, with what is left: the final norm, and a tied embedding. Kept after the forward pass, as the
    # backward pass begins with it.
    of_blocks = {p for block in blocks for p in block.parameters()} if whole else None
    fully_shard(orig_model, mesh=meshes.rest, mp_policy=policy, reshard_after_forward=False, ignored_params=of_blocks)
    add_up_gradients(orig_model)
    # On the model, for set_gradient_sync, which is given nothing else.
    orig_model._sharding = sharding  # type: ignore[assignment]
    # FSDP gathers at `forward` alone, and the train step calls other methods (pytorch/pytorch#125394). The head is
    # gathered for the loss, which reads its weight without calling it.
    _gather_in(orig_model, model, "sums")
    _gather_in(orig_model, model, "hidden_states")
    if structure.output_projection(orig_model) in alone:
        _gather_in(structure.output_projection(orig_model), model, "sums_of_selected")
    # By itself FSDP learns the order of the backward pass alone: in the forward pass the host would have to run ahead
    # of the GPU for the next gather to start early.
    for before, after in itertools.pairwise(() if whole else blocks):
        before.set_modules_to_forward_prefetch([after])  # type: ignore[operator]


def policy_of(precision: str) -> MixedPrecisionPolicy:
    """Return the policy for weights of this precision: gradients are summed in fp32."""
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if precision == "bf16" else None, cast_forward_inputs=False)


def add_up_gradients(model: torch.nn.Module) -> None:
    """Let the exchange of a sharded model add gradients up, undivided."""
    # FSDP divides by the ranks, and our loss has been divided by the targets of all. The second call, since a factor of
    # 1 is a premultiplied sum to NCCL, which has had bugs (pytorch/pytorch#155915).
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _gather_in(owner: torch.nn.Module, model: torch.nn.Module, name: str) -> None:
    """Make model.name a forward method of `owner` for FSDP: its weights are gathered before and freed after."""
    # torch looks for the method on the module whose weights it gathers; callers keep the wrapper's name for it.
    setattr(owner, name, getattr(model, name))
    register_fsdp_forward_method(owner, name)
    setattr(model, name, getattr(owner, name))


def fsdp_modules(orig_model: torch.nn.Module) -> Iterator[FSDPModule]:
    """Return the modules that gather weights of their own."""
    return (module for module in orig_model.modules() if isinstance(module, FSDPModule))


def set_gradient_sync(model: torch.nn.Module, *, last: bool) -> None:
    """Set what a sharded model does in the next micro-batch: exchange gradients and free weights, or keep them. A model
    whose weights are not FSDP2's stays as it is: it gathers and exchanges as its graph does.

    Args:
        last: it is the last micro-batch of its step.
    """
    orig_model = getattr(model, "orig_model", None)
    if not isinstance(orig_model, FSDPModule):
        return
    sharding = getattr(orig_model, "_sharding", None)
    assert isinstance(sharding, Sharding)
    # Whole gradients add up in memory until the last micro-batch, or shards of them after each: a trade of memory for
    # communication, which the memory plan decides.
    orig_model.set_requires_gradient_sync(last or not sharding.keep_gradients)
    orig_model.set_reshard_after_backward(last or not sharding.keep_weights)


def reshard(orig_model: torch.nn.Module) -> None:
    """Free the gathered weights that forward passes without a backward pass leave; nothing for a model
    that is whole."""
    for module in fsdp_modules(orig_model):
        module.reshard()


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
        from sftkit.parallel.pipeline import into_stages, layers_of_stages

        train = train or TrainConfig()
        layers = layers_of_stages(model.orig_model, train, rt.topology.stages)
        return into_stages(model, source, layers, train.pipeline_schedule, rt)
    if not rt.topology.sharded:
        if any(p.is_meta for p in model.orig_model.parameters()):
            weights.materialize_weights(model.orig_model, source, rt.device)
        return replicate(model, rt)
    meshes = make_meshes(rt.topology, rt.device.type)
    shard(model, meshes, sharding, rt.precision)
    if meshes.context is not None:
        model.context_group = str(meshes.context.get_group().group_name)  # a name is what compiled code may hold
    weights.materialize_weights(model.orig_model, source, rt.device)
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
    if structure.stages_of(orig_model) is None:
        return nullcontext()
    from sftkit.parallel.pipeline import stagewise

    return stagewise(orig_model)
