"""A model whose stages are on several ranks: the split of its layers, its whole forward pass, and micro-batches in the
order of a schedule.

The split is such that a step, head and loss included, takes least. The transformers model stays as it is, with all its
modules and names: each rank keeps the weights of its stages, and a parameter on the meta device is another rank's.
Embedding and first layers are the first stage; the last layers, the final norm and the head the last one. A weight that
is embedding and head at once is on both, and the gradients of the two are added up.

`stagewise` is for evaluation, generation and checks. All ranks of a pipeline call orig_model with the same inputs, as
if each had all of it. Each computes its own layers and passes the others by; hidden states go from stage to stage,
logits from the last stage to all. No weight leaves its stage. Gradients do not pass through. Between passes nothing
waits: the first stage is at the next rows while later ones are at these.

`Pipelined` is for training. Torch's stages and schedules (torch.distributed.pipelining) send hidden states and their
gradients, and order the passes. Batches, loss and gradients are not left to them: a stage takes each micro-batch whole,
the loss is a sum over the divisor of the global batch, bf16 gradients add up in fp32, and what several ranks hold is
exchanged once, at the end.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.config import rules, schema
from sftkit.config.topology import Topology, balanced
from sftkit.data.batches.collate import Batch
from sftkit.errors import ConfigError, config_error
from sftkit.models import kind, structure, weights
from sftkit.objectives.objective import LOSS, ModelWithLoss, Totals
from sftkit.ops.tensors import local
from sftkit.parallel.wrap import add_up_gradients, policy_of, without_one_replica
from sftkit.runtime.start import Runtime, replaced_in_each


def layers_of_stages(orig_model: PreTrainedModel, train: schema.TrainConfig, pipeline_size: int) -> tuple[int, ...]:
    """Return the layers of each stage: train.pipeline_layers, or by the work of a token that is learned.

    Args:
        pipeline_size: ranks that the rows pass through.

    Raises:
        ConfigError: a model that has no stages, or layers that are not the model's.
    """
    num_layers = len(structure.decoder_blocks(orig_model))
    schedule = train.pipeline_schedule
    configured = train.pipeline_layers
    model_type = orig_model.config.get_text_config().model_type
    # A launch has asked the same where the model's config was there to be read (preflight.launched).
    for _, text in rules.split_problems(schedule, configured, pipeline_size, model_type, num_layers):
        raise ConfigError(text)
    if len(structure.attention_windows(orig_model) or ()) != 1:
        raise config_error("windows in a pipeline")
    if configured is not None:
        return configured
    parameters = structure.count_parameters(orig_model)
    stages = rules.stages_of_schedule(schedule, configured, pipeline_size)
    return balanced(num_layers, parameters.body / num_layers, parameters.head, stages)


def split_layers(
    orig_model: PreTrainedModel, layers: tuple[int, ...], topology: Topology, device: torch.device
) -> structure.Stages:
    """Leave this rank the weights of its stages, on the device; every rank calls it.

    Weights on the meta device get memory, except those that will be sharded; weights of other stages lose theirs.
    """
    mesh = init_device_mesh(device.type, (topology.stages, topology.stage_ranks), mesh_dim_names=("stages", "alike"))
    # The first and the last rank of a pipeline. new_group is a collective of the whole world: every rank makes every
    # group, in the same order, and keeps its own.
    groups = {(ranks[0], ranks[-1]): dist.new_group([ranks[0], ranks[-1]]) for ranks in mesh.mesh.T.tolist()}
    ends = next((group for ranks, group in groups.items() if dist.get_rank() in ranks), None)
    stages = structure.Stages(layers, mesh, _holders(orig_model, layers, topology.stages), ends)
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
    for rank, block in zip(of_layer, structure.decoder_blocks(orig_model), strict=True):
        at |= {id(p): (rank,) for p in block.parameters()}
    tied = {id(p) for p in structure.output_projection(orig_model).parameters()}
    for p in structure.embedding_module(orig_model).parameters():
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
        self.head = structure.output_projection(orig_model) if self.is_last else None
        tied = self.head is not None and self.head.weight is structure.embedding_module(orig_model).weight
        self.tied = structure.embedding_module(orig_model) if tied and not self.is_first else None
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
        hidden = kind.decoded(self.decoder, inputs, batch, model.backend)
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
    # its children, `_modules`. A ModuleList of some layers would need a separate forward pass for each
    # architecture.
    part = copy.copy(full)
    part._modules = dict(full._modules)
    part.layers = full.layers[start : start + num_layers]  # type: ignore[index]
    if start:
        if hasattr(part, "embedding_multiplier"):  # Granite's decoder scales whatever it takes for embeddings
            part.embedding_multiplier = 1.0  # type: ignore[assignment]
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


IN_FLIGHT = 2
"Maximum number of hidden states that were sent and not received yet: how far a stage may run ahead."

Forward = Callable[..., Tensor]


@contextmanager
def stagewise(orig_model: torch.nn.Module) -> Iterator[None]:
    """Make orig_model of a pipeline callable as one that is whole, within the context: eagerly, by all ranks of the
    pipeline together and with the same inputs. Weights of a sharded stage are gathered once, over the ranks that share
    it. A model that is no pipeline's stays as it is, and so does one that is in such a context already.

    Hidden states of the decoder are the last stage's alone: `models.structure.from_last`. Logits are the same on all.
    """
    stages = structure.stages_of(orig_model)
    if stages is None or stages.entered:
        yield
        return
    assert isinstance(orig_model, PreTrainedModel)
    stages.entered = True
    links = _Links(stages)
    try:
        with _own_weights(orig_model), replaced_in_each("forward", dict(_forwards(orig_model, links))), torch.no_grad():
            yield
        links.finish()  # not after an error, which another rank may not have
    finally:
        stages.entered = False


@contextmanager
def _own_weights(orig_model: PreTrainedModel) -> Iterator[None]:
    """Make parameters of this rank's stages whole within the context, where FSDP gathers none; those of others are NaN
    without memory, so that the model is on its device and nobody reads them unseen."""
    device = next(p.device for p in orig_model.parameters() if not p.is_meta)
    # In the order of the model, since full_tensor() is a collective of the ranks that share a stage.
    full = {id(p): _full_parameter(p, device) for p in orig_model.parameters()}
    # Private: `_parameters` is replaced directly, since setting the attribute would call register_parameter and its
    # global hooks. FSDPModule has no public way to call a module without the hooks that gather its weights; the handles
    # of these hooks are FSDP's own, so their tables are taken away and put back (torch 2.13). No issue is known.
    parameters = {
        module: {name: p if p is None else full[id(p)] for name, p in module._parameters.items()}
        for module in orig_model.modules()
    }
    sharded = [module for module in parameters if isinstance(module, FSDPModule)]
    pre_hooks, hooks = ({module: OrderedDict[int, Any]() for module in sharded} for _ in range(2))
    with (
        replaced_in_each("_parameters", parameters),
        replaced_in_each("_forward_pre_hooks", pre_hooks),
        replaced_in_each("_forward_hooks", hooks),
    ):
        yield


def _full_parameter(p: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    if p.is_meta:
        # One NaN seen at every place: the shape is there, memory is not, and a result that depends on it shows.
        nothing = torch.full((), torch.nan, dtype=p.dtype, device=device).expand(p.shape)
        return torch.nn.Parameter(nothing, requires_grad=False)
    if isinstance(p, DTensor):
        return torch.nn.Parameter(p.full_tensor().detach(), requires_grad=p.requires_grad)
    return p


def _forwards(orig_model: PreTrainedModel, links: _Links) -> Iterator[tuple[torch.nn.Module, Forward]]:
    """Yield each module whose forward pass is another one here than its own, and that forward pass."""
    stages = links.stages
    embedding = structure.embedding_module(orig_model)
    projection = structure.output_projection(orig_model)
    norm = structure.decoder(orig_model).norm
    assert isinstance(norm, torch.nn.Module)
    as_it_is: Forward = lambda hidden: hidden  # noqa: E731
    if stages.pipeline_rank > 0:  # stands in for the embedding's output, [B, T, H]
        weight = embedding.get_parameter("weight")
        yield embedding, lambda ids: torch.zeros(*ids.shape, weight.shape[1], dtype=weight.dtype, device=ids.device)
    blocks = iter(enumerate(structure.decoder_blocks(orig_model)))
    for stage, count in enumerate(stages.layers):
        for first in (True, *(False,) * (count - 1)):
            number, block = next(blocks)
            own = block.forward if stage in stages.own else partial(_passed_by, number)
            if first and stage > 0:
                yield block, partial(_received, links, stage, own)
            elif stage not in stages.own:
                yield block, own
    if not stages.last:
        yield norm, as_it_is
    # The head is the last that is called.
    yield projection, partial(_logits, projection.forward if stages.last else None, projection.out_features, stages)


def _passed_by(number: int, hidden: Tensor, *_: Any, **arguments: Any) -> Tensor:
    """Stand in for a layer of another rank. In a cache it has the length, from which positions and masks are made, but
    no keys and values."""
    cache = arguments.get("past_key_values")
    if cache is not None:
        # [B, 0 heads, T, 0]: transformers reads the length from dimension 2.
        nothing = hidden.new_empty(hidden.shape[0], 0, hidden.shape[1], 0)
        cache.update(nothing, nothing, number)
    return hidden


def _received(links: _Links, stage: int, forward: Forward, hidden: Tensor, *more: Any, **arguments: Any) -> Tensor:
    """Call the first layer of a stage with the hidden states that come from the stage before."""
    return forward(links.moved(hidden, *links.ends(stage)), *more, **arguments)


def _logits(head: Forward | None, width: int, stages: structure.Stages, hidden: Tensor) -> Tensor:
    """Return the logits of the last stage, [..., V], on all ranks."""
    logits = hidden.new_empty(*hidden.shape[:-1], width) if head is None else head(hidden).contiguous()
    dist.broadcast(logits, src=stages.last_rank, group=stages.group)
    return logits


class _Links:
    """The tensors in flight between the ranks of a pipeline."""

    def __init__(self, stages: structure.Stages) -> None:
        self.stages = stages
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def ends(self, stage: int) -> tuple[int, int]:
        """Return the pipeline ranks of the stage before this one, and of this one."""
        pipeline_size = self.stages.mesh.size(0)
        return (stage - 1) % pipeline_size, stage % pipeline_size

    def moved(self, value: Tensor, sender: int, receiver: int) -> Tensor:
        """Return the sender's tensor on the receiver, on other ranks the given one, of its shape and dtype. Nothing is
        waited for where it is sent, unless IN_FLIGHT earlier ones are still on their way."""
        if self.stages.pipeline_rank == sender:
            # Sent tensors are held until they have arrived; without a limit a first stage would run ahead and keep
            # all of them.
            self.finish(IN_FLIGHT - 1)
            sent = value.contiguous()
            self._in_flight.append((self._work(dist.isend, sent, receiver), sent))
        if self.stages.pipeline_rank == receiver:
            value = torch.empty_like(value, memory_format=torch.contiguous_format)
            self._work(dist.irecv, value, sender).wait()
        return value

    def finish(self, but: int = 0) -> None:
        """Wait for all tensors on their way but the newest `but`."""
        while len(self._in_flight) > but:
            self._in_flight.popleft()[0].wait()

    def _work(self, way: Callable[..., Any], value: Tensor, peer: int) -> dist.Work:
        """Send or receive as torch's schedules do: NCCL then takes the group's communicator, and makes none
        for the pair."""
        # pytorch/pytorch#160342: a single isend makes a communicator for each pair of ranks, with buffers of its own.
        group = self.stages.group
        (work,) = dist.batch_isend_irecv([dist.P2POp(way, value, dist.get_global_rank(group, peer), group)])
        return work


SCHEDULES: Any = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}
FEW = 3
"Micro-batches from which bf16 gradients add up in fp32: a sum of two is rounded once either way."


class Pipelined(torch.nn.Module):
    """Replaces the model in a train step: the stages of this rank, and the exchange with the other ranks."""

    def __init__(
        self, model: ModelWithLoss, placement: structure.Stages, stages: list[StageModule], schedule: str
    ) -> None:
        """Keep the stages. `stages`: of this rank, already sharded if the run shards weights."""
        super().__init__()
        self.model = model
        self.placement = placement
        self.stages = stages
        self.exchanges = True
        "whether gradients are added up over ranks that hold the same layers"
        self.schedule = schedule
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._sums: dict[torch.nn.Parameter, Tensor] = {}
        self._sums_up = False
        # A schedule runs many backward passes in one call, so only a hook sees the gradient of a single one. FSDP adds
        # its own gradients up, in fp32.
        for p in self.held():
            if p.requires_grad and p.dtype != torch.float32 and not isinstance(p, DTensor):
                p.register_post_accumulate_grad_hook(self._take)

    def held(self) -> Iterator[torch.nn.Parameter]:
        """Return the parameters that this rank has."""
        return (p for p in self.model.orig_model.parameters() if not p.is_meta)

    def copies(self) -> dict[int, int]:
        """Return id of each parameter that this rank has -> ranks that have the same shard, where it is no DTensor."""
        replicas = self.placement.mesh.size(1)
        named = self.model.orig_model.named_parameters()
        return {id(p): replicas * len(self.placement.holders[name]) for name, p in named}

    def gradients(self, micro_batches: Sequence[Batch], divisor: int, totals: Totals) -> Tensor:
        """Leave the gradients of all micro-batches over the divisor in the parameters, exchanged, and add the sums of
        each to `totals`, in the last stage. No host sync.

        Returns:
            the minimised sum of each micro-batch, 1-d, on the device; zeros but in the last stage
        """
        batches = list(micro_batches)
        count = len(batches)
        schedule = self._schedule_of(batches[0], count)
        for stage in self.stages:
            stage.begin(batches, 1.0 / max(divisor, 1))
        self._sums_up = count >= FEW
        # One number for each micro-batch, which torch splits: a stage takes its batch by itself, so neither input nor
        # target is read.
        given = [torch.zeros(count)] if self.stages[0].is_first else []
        target = torch.zeros(count) if self.stages[-1].is_last else None
        try:
            schedule.step(*given, target=target)
        # torch wraps what a stage raises in an error about shapes; callers look for the error itself, such as that of a
        # GPU that ran out of memory.
        except RuntimeError as error:
            raise error.__cause__ or error from None
        self._exchange()
        found = self.stages[-1].totals
        for each in found:
            totals.add_(each)
        return torch.stack([each[LOSS] for each in found]) if found else totals.vector.new_zeros(count)

    def _schedule_of(self, batch: Batch, num_micro_batches: int) -> Any:
        """Return torch's schedule for n micro-batches of this shape; it has the memory for what arrives."""
        key = (*batch.shape, num_micro_batches)
        if key not in self._schedules:
            stages = [self._torch_stage(stage, batch) for stage in self.stages]
            what = stages if self.schedule == "interleaved" else stages[0]
            # Gradients stay sums: the divisor is that of the global batch (StageModule.begin).
            made = SCHEDULES[self.schedule](what, num_micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)
            self._schedules[key] = made
        return self._schedules[key]

    def _torch_stage(self, stage: StageModule, batch: Batch) -> PipelineStage:
        weight = structure.embedding_of(self.model.orig_model)
        device = next(self.held()).device
        # Shapes are said beforehand: torch would infer them by a pass through all stages in turn, with exchanges of its
        # own (pytorch/pytorch#136912).
        options: Any = {"device": device, "requires_grad": True}
        hidden = torch.empty(*batch.shape, weight.shape[1], dtype=weight.dtype, **options)
        loss = torch.empty(1, dtype=torch.promote_types(weight.dtype, torch.float32), **options)
        given: Any = {"input_args": torch.empty(1) if stage.is_first else hidden}
        given["output_args"] = loss if stage.is_last else hidden
        return PipelineStage(
            stage, stage.number, len(self.placement.layers), device, **given, group=self.placement.group
        )

    def _take(self, p: torch.nn.Parameter) -> None:
        """Move the gradient of a micro-batch into the fp32 sum."""
        if not self._sums_up:
            return
        assert p.grad is not None
        if p in self._sums:
            self._sums[p].add_(p.grad)
        else:
            self._sums[p] = p.grad.float()
        p.grad = None

    @torch.no_grad()
    def _exchange(self) -> None:
        """Add up what several ranks hold: the tied weight over both ends, all over ranks with the same layers."""
        self._sums_up = False
        # In the order of names, which all ranks share: these are collectives. First between the ends, then between
        # copies, so that the tied weight is summed over all that have it.
        for name, p in self.model.orig_model.named_parameters():
            if p.is_meta or not p.requires_grad:
                continue
            total = self._sums.pop(p, p.grad)
            assert total is not None, f"{name} has no gradient"
            if len(self.placement.holders[name]) > 1:
                dist.all_reduce(local(total), group=self.placement.ends)
            if self.exchanges and self.placement.mesh.size(1) > 1 and not isinstance(p, DTensor):
                dist.all_reduce(total, group=self.placement.mesh.get_group("alike"))
            p.grad = total.to(p.dtype)


def into_stages(
    model: ModelWithLoss, source: schema.ModelConfig | None, layers: tuple[int, ...], schedule: str, rt: Runtime
) -> Pipelined:
    """Split the model, in place, into stages, each on its rank; every rank calls it.

    Args:
        source: where the weights of an empty model come from (models.load).
        layers: of each stage (stages.layers_of_stages).
    """
    orig_model = model.orig_model
    empty = any(p.is_meta for p in orig_model.parameters())
    placement = split_layers(orig_model, layers, rt.topology, rt.device)
    stages = [StageModule(model, layers, number) for number in placement.own]
    # Weights are read last, when each rank knows which shards of which layers are its own.
    if rt.topology.sharded:
        sizes = (rt.topology.stages, rt.topology.replicas, rt.topology.shards)
        whole = init_device_mesh(rt.device.type, sizes, mesh_dim_names=("stages", "replicas", "shards"))
        mesh = without_one_replica(whole, rt.topology)
        for stage in stages:
            shard_stage(stage, mesh, rt.precision)
            if empty:
                weights.fill_with_memory(stage, rt.device)
        # Sharding has made new parameters, so that embedding and head are two again.
        orig_model.tie_weights()
    if empty:
        weights.load_model_weights(orig_model, source)
    rt.print(f"{rt.topology.describe()}: schedule {schedule}, layers {' + '.join(map(str, layers))}")
    return Pipelined(model, placement, stages, schedule)
