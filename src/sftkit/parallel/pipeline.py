"""A model whose stages are on several ranks: its whole forward pass, and micro-batches in the order of a schedule.

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

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.config.schema import ModelConfig
from sftkit.data.batches.collate import Batch
from sftkit.models import structure
from sftkit.models.structure import Stages, stages_of
from sftkit.models.weights import fill_with_memory, load_model_weights
from sftkit.objectives.objective import LOSS, ModelWithLoss, Totals
from sftkit.ops.tensors import local
from sftkit.parallel.stages import StageModule, shard_stage, split_layers
from sftkit.parallel.wrap import without_one_replica
from sftkit.runtime.start import Runtime, replaced_in_each

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
    stages = stages_of(orig_model)
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
        width = embedding.weight.shape[1]  # type: ignore[union-attr,index]
        yield embedding, lambda ids: torch.zeros(*ids.shape, width, dtype=embedding.weight.dtype, device=ids.device)
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


def _logits(head: Forward | None, width: int, stages: Stages, hidden: Tensor) -> Tensor:
    """Return the logits of the last stage, [..., V], on all ranks."""
    logits = hidden.new_empty(*hidden.shape[:-1], width) if head is None else head(hidden).contiguous()
    dist.broadcast(logits, src=stages.last_rank, group=stages.group)
    return logits


class _Links:
    """The tensors in flight between the ranks of a pipeline."""

    def __init__(self, stages: Stages) -> None:
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

    def __init__(self, model: ModelWithLoss, placement: Stages, stages: list[StageModule], schedule: str) -> None:
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
    model: ModelWithLoss, source: ModelConfig | None, layers: tuple[int, ...], schedule: str, rt: Runtime
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
                fill_with_memory(stage, rt.device)
        # Sharding has made new parameters, so that embedding and head are two again.
        orig_model.tie_weights()
    if empty:
        load_model_weights(orig_model, source)
    rt.print(f"{rt.topology.describe()}: schedule {schedule}, layers {' + '.join(map(str, layers))}")
    return Pipelined(model, placement, stages, schedule)
