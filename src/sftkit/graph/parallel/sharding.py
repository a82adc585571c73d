"""SimpleFSDP (arXiv 2411.00284): weights are DTensors, and a module that reads one of its own gathers it by
`redistribute`.

There are no hooks and no state: the gather is an operator among others and its gradient a reduce-scatter, so both can
be traced into a graph. Without a graph the model computes the same. Names of classes and parameters stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

from sftkit.models.structure import output_projection
from sftkit.objectives.objective import ModelWithLoss
from sftkit.runtime.start import replaced_in_each

_REDUCE_DTYPE = "_sftkit_reduce_dtype"
"Attribute of a module that is sharded: the dtype of the sum of gradients over the ranks; None: their own."
_READS = "_sftkit_reads"
"Attribute of a module while its own parameters are read: then they come gathered."


class ShardingSpec(NamedTuple):
    """How a weight lies over the ranks."""

    mesh: DeviceMesh
    placements: Sequence[Placement]
    """the last, a shard, is gathered where the weight is read; of the others replicas are copies, and shards stay
    sharded"""


class _Read(torch.autograd.Function):
    """A weight as a plain tensor: whole but for what stays sharded (`gathers`), or this rank's shard. Its gradient is
    summed over the ranks that read it.

    Gradients are scattered first, so that only shards are summed over copies; `redistribute` alone sums whole ones.
    """

    @staticmethod
    def forward(ctx: Any, param: DTensor, reduce_dtype: torch.dtype | None, gathers: bool) -> Tensor:  # noqa: FBT001
        ctx.mesh = param.device_mesh
        ctx.placements = param.placements
        ctx.dtype = param.dtype
        ctx.reduce_dtype = reduce_dtype
        # A rank's own shard may have fewer rows than others', so the whole shape does not follow from it.
        ctx.whole = {} if gathers else {"shape": param.shape, "stride": param.stride()}
        return (param.redistribute(placements=[*param.placements[:-1], Replicate()]) if gathers else param).to_local()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        *copies, shards = [Partial() if place.is_replicate() else place for place in ctx.placements]
        own = shards if ctx.whole else Partial()
        # Without copies nothing is summed, and a cast there and back would take memory for nothing.
        if ctx.reduce_dtype is not None and any(part.is_partial() for part in (*copies, own)):
            gradient = gradient.to(ctx.reduce_dtype)
        summed = DTensor.from_local(gradient, ctx.mesh, [*copies, own], run_check=False, **ctx.whole)
        summed = summed.redistribute(placements=[*copies, shards]).redistribute(placements=ctx.placements)
        return summed.to(ctx.dtype), None, None


def shard_for_graph(
    model: ModelWithLoss, spec_of: Callable[[torch.nn.Module, str], ShardingSpec], precision: str
) -> None:
    """Shard every weight of the model, in place.

    Args:
        spec_of: of a module and the name of one of its own parameters how that lies over the ranks.
        precision: of the weights; bf16 gradients are summed over the ranks in fp32.
    """
    sharded: dict[int, torch.nn.Parameter] = {}  # tied weights stay one
    for module in model.orig_model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, param in own.items():
            if id(param) not in sharded:
                # No rank sends: each has the same values, or none yet (meta), so that shards are cut
                # without an exchange.
                distributed = distribute_tensor(param.data, *spec_of(module, name), src_data_rank=None)
                sharded[id(param)] = torch.nn.Parameter(distributed, requires_grad=param.requires_grad)
            module.register_parameter(name, sharded[id(param)])
        if own:
            module.__class__ = _gathering(type(module), tuple(own))  # type: ignore[arg-type]  # torch hashes modules
            module.__dict__[_REDUCE_DTYPE] = torch.float32 if precision == "bf16" else None
    # The head's weight is gathered for the loss, which reads it without calling the head. Around the method of this one
    # object, not of its class: another model in the process may be whole.
    inner: Callable[..., Any] = model.sums_of_selected

    def sums_of_selected(*args: Any) -> Any:
        with reading(output_projection(model.orig_model)):
            return inner(*args)

    model.sums_of_selected = sums_of_selected  # type: ignore[method-assign,assignment]


def reading(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Give out the module's own parameters gathered, within the context; outside they are this rank's DTensors."""
    return replaced_in_each(_READS, {module: True})


@cache
def _gathering(cls: type[torch.nn.Module], names: tuple[str, ...]) -> type[torch.nn.Module]:
    """Return a class of the same name whose forward pass reads these parameters gathered."""

    @wraps(cls.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with reading(self):
            return cls.forward(self, *args, **kwargs)

    # Properties of a subclass, since a module's __getattr__ is asked only for names that its class does not have. No
    # parametrization of torch.nn.utils: that renames parameters, and with them the files of a checkpoint.
    members = {name: property(partial(_read, name)) for name in names}
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__, **members})


def own_shard(module: torch.nn.Module, name: str) -> Tensor:
    """Return this rank's shard of a module's own parameter: a plain tensor."""
    # Private, as in _read.
    return _Read.apply(module._parameters[name], module.__dict__[_REDUCE_DTYPE], False)  # noqa: FBT003


def _read(name: str, module: torch.nn.Module) -> Tensor | None:
    # Private, and without a public way: the name is a property of the class by now, so getattr and get_parameter would
    # come back to this function. torchtitan does the same (pytorch/torchtitan#1273).
    param = module._parameters[name]
    if module.__dict__.get(_READS) and isinstance(param, DTensor):
        return _Read.apply(param, module.__dict__[_REDUCE_DTYPE], True)  # noqa: FBT003
    return param
