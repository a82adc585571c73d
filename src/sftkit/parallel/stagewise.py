"""The forward pass of a whole model, stage by stage, on the ranks that hold them: for evaluation,
generation and checks.

All ranks of a pipeline call orig_model with the same inputs, as if each had all of it. Each computes its own layers and
passes the others by; hidden states go from stage to stage, logits from the last stage to all. No weight leaves its
stage. Autograd sends gradients back the same way. Between passes nothing waits: the first stage is at the next rows
while later ones are at these.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.models.stages import Stages, stages_of
from sftkit.models.structure import decoder, decoder_blocks, embedding_module, output_projection
from sftkit.runtime.replaced import replaced_in_each

IN_FLIGHT = 2
"Maximum number of hidden states that were sent and not received yet: how far a stage may run ahead."

Forward = Callable[..., Tensor]


@contextmanager
def stagewise(orig_model: torch.nn.Module) -> Iterator[None]:
    """Make orig_model of a pipeline callable as one that is whole, within the context: eagerly, by all ranks of the
    pipeline together and with the same inputs. Weights of a sharded stage are gathered once, over the ranks that share
    it. A model that is no pipeline's stays as it is, and so does one that is in such a context already.

    Hidden states of the decoder are the last stage's alone: `models.stages.from_last`. Logits are the same on all.
    """
    stages = stages_of(orig_model)
    if stages is None or stages.entered:
        yield
        return
    assert isinstance(orig_model, PreTrainedModel)
    stages.entered, links = True, _Links(stages)
    try:
        with (
            _own_weights(orig_model),
            replaced_in_each("gradient_checkpointing", _not_repeated(orig_model, stages)),
            replaced_in_each("forward", dict(_forwards(orig_model, links))),
        ):
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


def _not_repeated(orig_model: PreTrainedModel, stages: Stages) -> dict[torch.nn.Module, bool]:
    """Return gradient_checkpointing, which transformers sets and reads on each layer, as False for the first layer
    of each stage but the first: a forward pass that a backward pass repeats would wait for hidden states that
    nobody sends again."""
    blocks = decoder_blocks(orig_model)
    receiving = [blocks[sum(stages.layers[:stage])] for stage in range(1, len(stages.layers))]
    return {layer: False for layer in receiving if "gradient_checkpointing" in vars(layer)}


def _forwards(orig_model: PreTrainedModel, links: _Links) -> Iterator[tuple[torch.nn.Module, Forward]]:
    """Yield each module whose forward pass is another one here than its own, and that forward pass."""
    stages = links.stages
    embedding, projection, norm = embedding_module(orig_model), output_projection(orig_model), decoder(orig_model).norm
    assert isinstance(norm, torch.nn.Module)
    if stages.pipeline_rank > 0:
        yield embedding, partial(_no_hidden_states, embedding)
    blocks = iter(enumerate(decoder_blocks(orig_model)))
    for stage, count in enumerate(stages.layers):
        # The first layer of a stage receives, whoever owns it: ranks that are neither sender nor receiver pass by in
        # the same place of the graph, so that backward passes meet there too.
        for first in (True, *(False,) * (count - 1)):
            number, block = next(blocks)
            own = block.forward if stage in stages.own else partial(_passed_by, number)
            if first and stage > 0:
                yield block, partial(_received, links, stage, own)
            elif stage not in stages.own:
                yield block, own
    if not stages.last:
        yield norm, _as_it_is
    # The head is the last that is called; ranks without it give their hidden states, which only have to
    # have a gradient.
    own_logits = projection.forward if stages.last else _as_it_is
    yield projection, lambda hidden: _Logits.apply(own_logits(hidden), projection.out_features, stages)


def _no_hidden_states(embedding: torch.nn.Module, ids: Tensor) -> Tensor:
    """Stand in for the embedding's output, [B, T, H]; a part of the graph, so that backward passes come by here."""
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    shape = (*ids.shape, weight.shape[1])
    return torch.zeros(shape, dtype=weight.dtype, device=ids.device, requires_grad=torch.is_grad_enabled())


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


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
    return forward(_Passed.apply(links, stage, hidden), *more, **arguments)


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


class _Passed(torch.autograd.Function):
    """Hidden states from the rank of one stage to the rank of the next; on other ranks the input itself."""

    @staticmethod
    def forward(ctx: Any, links: _Links, stage: int, hidden: Tensor) -> Tensor:
        ctx.links, ctx.stage = links, stage
        return links.moved(hidden, *links.ends(stage))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        sender, receiver = ctx.links.ends(ctx.stage)
        # The receiver of the forward pass gives its gradient away: what stood at its input was not used.
        moved = ctx.links.moved(gradients[0], receiver, sender)
        return None, None, torch.zeros_like(moved) if ctx.links.stages.pipeline_rank == receiver else moved


class _Logits(torch.autograd.Function):
    """Logits of the last stage on all ranks; those of the others are no part of what is learned."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, width: int, stages: Stages) -> Tensor:
        """Return the logits on all ranks. `own`: logits [..., V] in the last stage, hidden states [...,
        H] in others."""
        ctx.last, ctx.shape = stages.last, own.shape
        logits = own.contiguous() if stages.last else own.new_empty(*own.shape[:-1], width)
        dist.broadcast(logits, src=stages.last_rank, group=stages.group)
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] if ctx.last else gradients[0].new_zeros(ctx.shape), None, None
