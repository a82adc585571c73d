"""Micro-batches through the stages of a model, in the order of a schedule of torch.distributed.pipelining.

Torch's stages and schedules send hidden states and their gradients, and order the passes. Batches, loss and gradients
are not left to them: a stage takes each micro-batch whole, the loss is a sum over the divisor of the global batch, bf16
gradients add up in fp32, and what several ranks hold is exchanged once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from sftkit.config.pipeline_split import StageTimes
from sftkit.config.schema import ModelConfig
from sftkit.data.batches.collate import Batch
from sftkit.models.structure import embedding_of
from sftkit.models.weights import fill_with_memory, load_model_weights
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.sums import LOSS, Totals
from sftkit.ops.dtensor import local
from sftkit.parallel.fsdp import without_one_replica
from sftkit.parallel.stages import StageModule, Stages, shard_stage, split_layers
from sftkit.runtime.start import Runtime

SCHEDULES: dict[str, Callable[..., Any]] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
}
TIMES = 3
"Passes of which the fastest is what a stage takes."
FEW = 3
"Micro-batches from which bf16 gradients add up in fp32: a sum of two is rounded once either way."


class Pipelined(torch.nn.Module):
    """Replaces the model in a train step: the stages of this rank, and the exchange with the other ranks."""

    def __init__(self, model: ModelWithLoss, placement: Stages, stages: list[StageModule], schedule: str) -> None:
        """Keep the stages. `stages`: of this rank, already sharded if the run shards weights."""
        super().__init__()
        self.model, self.placement, self.stages = model, placement, stages
        self.exchanges = True
        "whether gradients are added up over ranks that hold the same layers"
        self.schedule = schedule
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._sums: dict[torch.nn.Parameter, Tensor] = {}
        self._sums_up = False
        # By a hook, as a schedule runs many backward passes in one call: nobody else sees the gradient of a single one.
        # FSDP adds its own up, in fp32.
        for p in self.held():
            if p.requires_grad and p.dtype != torch.float32 and not isinstance(p, DTensor):
                p.register_post_accumulate_grad_hook(self._take)

    def held(self) -> Iterator[torch.nn.Parameter]:
        """Return the parameters that this rank has."""
        return (p for p in self.model.orig_model.parameters() if not p.is_meta)

    def copies(self) -> dict[int, int]:
        """Return id of each parameter that this rank has -> ranks that have the same shard, where it is no DTensor."""
        replicas, holders = self.placement.mesh.size(1), self.placement.holders
        return {id(p): replicas * len(holders[name]) for name, p in self.model.orig_model.named_parameters()}

    def gradients(self, micro_batches: Sequence[Batch], divisor: int, totals: Totals) -> Tensor:
        """Leave the gradients of all micro-batches over the divisor in the parameters, exchanged, and add the sums of
        each to `totals`, in the last stage. No host sync.

        Returns:
            the minimised sum of each micro-batch, 1-d, on the device; zeros but in the last stage
        """
        batches, count = list(micro_batches), len(micro_batches)
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

    def times(self, batch: Batch, divisor: int) -> list[StageTimes]:
        """Return what each stage of the pipeline takes for a micro-batch without the others (`stage_times`), on every
        rank; every rank calls it. Gradients are dropped."""
        # A sum over ranks, each with zeros for the stages of others.
        found = torch.zeros(len(self.placement.layers), 2, dtype=torch.float64, device=next(self.held()).device)
        for stage in self.stages:
            found[stage.number] = found.new_tensor(astuple(stage_times(stage, self.model, batch, divisor)))
        dist.all_reduce(found, group=self.placement.group)
        return [StageTimes(forward, backward) for forward, backward in found.tolist()]

    def _schedule_of(self, batch: Batch, num_micro_batches: int) -> Any:
        """Return torch's schedule for so many micro-batches of this shape; it has the memory for what arrives."""
        key = (*batch.shape, num_micro_batches)
        if key not in self._schedules:
            stages = [self._torch_stage(stage, batch) for stage in self.stages]
            what = stages if self.schedule == "interleaved" else stages[0]
            # Gradients stay sums: the divisor is that of the global batch (StageModule.begin).
            made = SCHEDULES[self.schedule](what, num_micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)
            self._schedules[key] = made
        return self._schedules[key]

    def _torch_stage(self, stage: StageModule, batch: Batch) -> PipelineStage:
        weight, device = embedding_of(self.model.orig_model), next(self.held()).device
        # Shapes are said beforehand: torch would infer them by a pass through all stages in turn, with exchanges of its
        # own (pytorch/pytorch#136912).
        hidden = torch.empty(*batch.shape, weight.shape[1], dtype=weight.dtype, device=device, requires_grad=True)
        loss = torch.empty(1, dtype=torch.promote_types(weight.dtype, torch.float32), device=device, requires_grad=True)
        return PipelineStage(
            stage,
            stage.number,
            len(self.placement.layers),
            device,
            input_args=torch.empty(1) if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
            group=self.placement.group,
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


def stage_times(stage: StageModule, model: ModelWithLoss, batch: Batch, divisor: int) -> StageTimes:
    """Return what a stage takes for a micro-batch, the best of a few times. Gradients are dropped."""
    weight, device, infinity = embedding_of(model.orig_model), batch.targets.device, float("inf")
    # Random states in place of those of the stage before, whose values no time depends on. The first stage does
    # not read them.
    given = torch.randn(*batch.shape, weight.shape[1], dtype=weight.dtype, device=device)
    forward = both = infinity
    # The two together without a wait between them, in which the host could not go ahead of its GPU.
    for halfway in [True, False] * TIMES:
        stage.begin([batch], 1.0 / max(divisor, 1))
        _wait_for(device)
        started = time.perf_counter()
        out = stage(given.detach().requires_grad_())
        if halfway:
            _wait_for(device)
            forward = min(forward, time.perf_counter() - started)
        out.backward(torch.ones_like(out))
        _wait_for(device)
        both = min(both, infinity if halfway else time.perf_counter() - started)
        model.zero_grad(set_to_none=True)
    return StageTimes(min(forward, both), max(both - forward, 0.0))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def into_stages(
    model: ModelWithLoss, source: ModelConfig | None, layers: tuple[int, ...], schedule: str, rt: Runtime
) -> Pipelined:
    """Split the model, in place, into stages, each on its rank; every rank calls it.

    Args:
        source: where the weights of an empty model come from (models.load).
        layers: of each stage (balance.layers_of_stages).
    """
    orig_model = model.orig_model
    empty = any(p.is_meta for p in orig_model.parameters())
    placement = split_layers(orig_model, layers, rt.topology, rt.device)
    stages = [StageModule(model, layers, number) for number in placement.own]
    # Weights are read last, when each rank knows which shards of which layers are its own.
    if rt.topology.sharded:
        t, names = rt.topology, ("stages", "replicas", "shards")
        whole = init_device_mesh(rt.device.type, (t.stages, t.replicas, t.shards), mesh_dim_names=names)
        mesh = without_one_replica(whole, t)
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
