"""The stages of a pipeline: how layers are split over them, and the part of a model that a rank keeps.

The split is such that a step, head and loss included, takes least. The transformers model stays as it is, with all its
modules and names: each rank keeps the weights of its stages, and a parameter on the meta device is another rank's.
Embedding and first layers are the first stage; the last layers, the final norm and the head the last one. A weight that
is embedding and head at once is on both, and the gradients of the two are added up.
"""

import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from sftkit.config.rules import split_problems, stages_of_schedule
from sftkit.config.schema import TrainConfig
from sftkit.config.topology import Topology, balanced
from sftkit.data.batches.collate import Batch
from sftkit.errors import ConfigError
from sftkit.models import structure
from sftkit.models.kind import decoded
from sftkit.models.structure import Stages, decoder_blocks, embedding_module, output_projection
from sftkit.objectives.objective import ModelWithLoss, Totals
from sftkit.parallel.wrap import add_up_gradients, policy_of


def layers_of_stages(orig_model: PreTrainedModel, train: TrainConfig, pipeline_size: int) -> tuple[int, ...]:
    """Return the layers of each stage: train.pipeline_layers, or by the work of a token that is learned.

    Args:
        pipeline_size: ranks that the rows pass through.

    Raises:
        ConfigError: a model that has no stages, or layers that are not the model's.
    """
    num_layers = len(decoder_blocks(orig_model))
    schedule = train.pipeline_schedule
    configured = train.pipeline_layers
    model_type = orig_model.config.get_text_config().model_type
    # A launch has asked the same where the model's config was there to be read (preflight.launched).
    for _, text in split_problems(schedule, configured, pipeline_size, model_type, num_layers):
        raise ConfigError(text)
    if len(structure.attention_windows(orig_model) or ()) != 1:
        raise ConfigError(
            "train.engine=pipeline: some layers of this model have a sliding window and some have none; transformers "
            "finds out which by a layer's index, which differs in a stage: take train.engine=blocks"
        )
    if configured is not None:
        return configured
    parameters = structure.count_parameters(orig_model)
    stages = stages_of_schedule(schedule, configured, pipeline_size)
    return balanced(num_layers, parameters.body / num_layers, parameters.head, stages)


def split_layers(
    orig_model: PreTrainedModel, layers: tuple[int, ...], topology: Topology, device: torch.device
) -> Stages:
    """Leave this rank the weights of its stages, on the device; every rank calls it.

    Weights on the meta device get memory, except those that will be sharded; weights of other stages lose theirs.
    """
    mesh = init_device_mesh(device.type, (topology.stages, topology.stage_ranks), mesh_dim_names=("stages", "alike"))
    # The first and the last rank of a pipeline. new_group is a collective of the whole world: every rank makes every
    # group, in the same order, and keeps its own.
    groups = {(ranks[0], ranks[-1]): dist.new_group([ranks[0], ranks[-1]]) for ranks in mesh.mesh.T.tolist()}
    ends = next((group for ranks, group in groups.items() if dist.get_rank() in ranks), None)
    stages = Stages(layers, mesh, _holders(orig_model, layers, topology.stages), ends)
    orig_model._stages = stages  # type: ignore[assignment]
    names = {id(p): name for name, p in orig_model.named_parameters()}
    made: dict[int, torch.nn.Parameter] = {}
    for module in orig_model.modules():
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, buffer.to(device))
        for name, p in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            # One parameter for both names of a tied weight. Sharded, what has no memory gets it shard by shard.
            if id(p) not in made:
                made[id(p)] = _placed(p, device, held=stages.holds(names[id(p)]), later=topology.sharded)
            setattr(module, name, made[id(p)])
    return stages


def _placed(p: torch.nn.Parameter, device: torch.device, *, held: bool, later: bool) -> torch.nn.Parameter:
    if not held:
        # Whether it is trained is known here too: the optimizer counts the parameters of all stages.
        return torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    if later and p.is_meta:
        return p
    value = torch.empty_like(p, device=device) if p.is_meta else p.data.to(device)
    return torch.nn.Parameter(value, requires_grad=p.requires_grad)


def _holders(orig_model: PreTrainedModel, layers: tuple[int, ...], pipeline_size: int) -> dict[str, tuple[int, ...]]:
    # Interleaved stages go round the ranks in turn.
    of_layer = [stage % pipeline_size for stage, count in enumerate(layers) for _ in range(count)]
    last = pipeline_size - 1
    at: dict[int, tuple[int, ...]] = {}
    for rank, block in zip(of_layer, decoder_blocks(orig_model), strict=True):
        at |= {id(p): (rank,) for p in block.parameters()}
    tied = {id(p) for p in output_projection(orig_model).parameters()}
    for p in embedding_module(orig_model).parameters():
        at[id(p)] = (0, last) if id(p) in tied else (0,)
    return {name: at.get(id(p), (last,)) for name, p in orig_model.named_parameters()}


class StageModule(torch.nn.Module):
    """Consecutive layers of a model. A schedule calls it with one micro-batch after the other.

    Between stages only hidden states travel; what else a micro-batch has, each stage takes from its own copy of it.
    """

    def __init__(self, model: ModelWithLoss, layers: tuple[int, ...], number: int) -> None:
        """Take this stage's slice of the model. `layers`: of every stage. `number`: of this one."""
        super().__init__()
        orig_model = model.orig_model
        self.number = number
        self.is_first = number == 0
        self.is_last = number == len(layers) - 1
        self.decoder = _decoder_slice(
            structure.decoder(orig_model), sum(layers[:number]), layers[number], last=self.is_last
        )
        self.head = output_projection(orig_model) if self.is_last else None
        tied = self.head is not None and self.head.weight is embedding_module(orig_model).weight
        self.tied = embedding_module(orig_model) if tied and not self.is_first else None
        "the embedding, if it shares the head's weight, so that sharding finds it"
        self._of = (model,)  # in a tuple, so that the layers of other stages are none of this module's
        self._batches: list[Batch] = []
        self._scale = 1.0
        self.totals: list[Totals] = []
        "of each micro-batch, in the last stage"

    def blocks(self) -> Iterator[torch.nn.Module]:
        """Return its layers."""
        return iter(self.decoder.layers)  # type: ignore[arg-type]

    def begin(self, batches: list[Batch], scale: float) -> None:
        """Take the micro-batches of a step; the loss is multiplied by `scale`."""
        # From the end, as pop() is from there; schedules run forward passes in the order of micro-batches.
        self._batches = batches[::-1]
        self._scale = scale
        self.totals = []

    def forward(self, received: Tensor) -> Tensor:
        """Compute the next micro-batch: hidden states [B, T, H], in the last stage the loss [1].

        Args:
            received: hidden states of the stage before; the first stage is given nothing that it reads.
        """
        (model,) = self._of
        batch = self._batches.pop()
        inputs = dict(batch.inputs)
        if not self.is_first:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = received
        hidden = decoded(self.decoder, inputs, batch, model.backend)
        if not self.is_last:
            # Received tensors are contiguous, and both sides must agree (pytorch/pytorch#114982); torch 2.11 checks it.
            return hidden.contiguous()
        sums = model.sums_of_selected(model.objective.select(hidden, batch), batch)
        self.totals.append(Totals.of(sums))
        return torch.stack([sums.loss * self._scale])


def _decoder_slice(full: torch.nn.Module, start: int, num_layers: int, *, last: bool) -> torch.nn.Module:
    """Return a decoder with some of the layers of another one: the same modules, in the same forward pass
    of its class."""
    # Private: copy.copy shares all tables of a module (pytorch/pytorch#128272), but the full decoder must keep that of
    # its children, `_modules`. A ModuleList of some layers alone would need a forward pass of its own for each
    # architecture.
    part = copy.copy(full)
    part._modules = dict(full._modules)
    part.layers = full.layers[start : start + num_layers]  # type: ignore[index]
    if start:
        del part._modules[next(name for name, child in full.named_children() if isinstance(child, torch.nn.Embedding))]
    if not last:
        part.norm = torch.nn.Identity()
    return part


def shard_stage(stage: StageModule, mesh: DeviceMesh, precision: str) -> None:
    """Shard the weights of a stage over the ranks with the same layers (FSDP2): gathered once a step, gradients
    exchanged once, summed in fp32, as torch's schedules do it.

    Args:
        mesh: [shards] or [replicas, shards].
        precision: of the weights.
    """
    policy = policy_of(precision)
    # Nothing is freed between passes: a schedule mixes forward and backward passes of many micro-batches, each of which
    # would gather again.
    for block in stage.blocks():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    add_up_gradients(stage)
