"""AdamW whose update of all parameters is one graph: optim.implementation compiled and foreach_map.

The formula, the states and the random bits are those of adamw.py. There a kernel written by hand updates
all parameters; here Inductor writes the kernels, with foreach_map one for many parameters (horizontal fusion), and CUDA
graphs may replay the call. The price is a graph that grows with the model, and guards on every tensor in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

# Private: of pytorch/pytorch#142098, without a public name as of torch 2.15.
from torch._higher_order_ops.foreach_map import foreach_map
from torch.distributed.tensor import DTensor

from sftkit.config.schema import OptimConfig
from sftkit.errors import ConfigError
from sftkit.ops.tensors import elements, noise16, signed32, stochastic_round
from sftkit.optim.adamw import AdamW, Numbered, flat, small_table
from sftkit.optim.protocol import Groups, parameters_of

Tensors = Sequence[Tensor]
WARM_UP_CALLS = 3
"With CUDA graphs the first call compiles, the second warms up, the third records."


class Each(Protocol):
    """Something that applies an operator to the first elements of some lists, to the second ones, and so on."""

    def __call__(self, operator: Callable[..., Tensor], *lists: Tensors) -> Sequence[Tensor]:
        """Return the results, in order."""


def one_by_one(operator: Callable[..., Tensor], *lists: Tensors) -> list[Tensor]:
    """Return what the operator makes of each parameter, by a loop that the graph unrolls."""
    return [operator(*values) for values in zip(*lists, strict=True)]


EACH: dict[str, Each] = {"compiled": one_by_one, "foreach_map": cast(Each, foreach_map)}  # torch has no types of it


# Pointwise functions of flat tensors, as foreach_map wants them; a clip of nan leaves everything as it is.


def _exp_avg(old: Tensor, grad: Tensor, clip: Tensor, rate1: Tensor) -> Tensor:
    return torch.where(clip.isnan(), old, old + (grad.float() * clip - old) * rate1)


def _exp_avg_sq(old: Tensor, grad: Tensor, clip: Tensor, rate2: Tensor) -> Tensor:
    clipped = grad.float() * clip
    return torch.where(clip.isnan(), old, old + (clipped * clipped - old) * rate2)


# foreach_map gives an operator each list of tensors as an argument of its own.
def _weight(
    old: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    clip: Tensor,
    decay: Tensor,
    eps: Tensor,
    step_size: Tensor,
    root2: Tensor,
) -> Tensor:
    direction = exp_avg / (exp_avg_sq.sqrt() / root2 + eps)
    return torch.where(clip.isnan(), old, old - (decay * old + step_size * direction))


def _rounded(old: Tensor, weight: Tensor, clip: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    return torch.where(clip.isnan(), old, stochastic_round(weight, noise16(elements(old), key0, key1)[0]))


def update_all(
    each: Each, parameters: Sequence[Tensors], clip: Tensor, scalars: Tensor, corrected: Tensor, keys: Tensor
) -> None:
    """Update P parameters in place, as adamw.update_eagerly updates one whose states are exact.

    Args:
        each: applies an operator to all parameters.
        parameters: flat tensors: weights, fp32, masters before parameters without one; the bf16 parameters of the
            masters; gradients, exp_avg and exp_avg_sq, in the order of the weights.
        clip: fp32 0-d; nan: nothing changes.
        scalars: fp32 [P, 4], of adamw.numbers_of. corrected: fp64 [P, 2], of adamw.corrections.
        keys: int32 [P, 2], of the random bits.
    """
    weights, rounded, grads, exp_avgs, exp_avg_sqs = parameters
    clips = [clip] * len(weights)
    decays, rates1, rates2, epsilons = map(_numbers, scalars.unbind(1))
    step_sizes, roots2 = map(_numbers, corrected.float().unbind(1))
    new_exp_avgs = each(_exp_avg, exp_avgs, grads, clips, rates1)
    new_exp_avg_sqs = each(_exp_avg_sq, exp_avg_sqs, grads, clips, rates2)
    moments = (new_exp_avgs, new_exp_avg_sqs)
    new_weights = each(_weight, weights, *moments, clips, decays, epsilons, step_sizes, roots2)
    if rounded:
        n = len(rounded)
        keys0, keys1 = map(_numbers, keys[:n].unbind(1))
        _copy(rounded, each(_rounded, rounded, new_weights[:n], clips[:n], keys0, keys1))
    for stored, new in ((exp_avgs, new_exp_avgs), (exp_avg_sqs, new_exp_avg_sqs), (weights, new_weights)):
        _copy(stored, new)


def _numbers(column: Tensor) -> list[Tensor]:
    """Return the elements of a column, each 0-d: copies, since foreach_map takes no two views of one tensor."""
    return [number.clone() for number in column.unbind()]


def _copy(stored: Tensors, new: Tensors) -> None:
    """Write the new tensors into the stored ones."""
    for old, value in zip(stored, new, strict=True):
        old.copy_(value)


class GraphAdamW(AdamW):
    """AdamW with the states, masters and random bits of its base class, whose parameters are updated by one graph."""

    # Any, here and in `build`: torch.compile's arguments are of many types.
    def __init__(self, groups: Groups, optim: OptimConfig, seed: int, graph: Mapping[str, Any]) -> None:
        """Compile lazily. `graph`: arguments of torch.compile."""
        super().__init__(groups, optim, seed=seed)
        self._compiled = True
        each = EACH[optim.implementation]

        def update(parameters: Sequence[Tensors], *tables: Tensor) -> None:
            update_all(each, parameters, *tables)

        self._graph = torch.compile(update, **{**graph, "fullgraph": True, "dynamic": False})
        self._keeps_gradients = optim.static_gradients
        self._gradients: dict[torch.nn.Parameter, Tensor] = {}
        "Memory of the gradients, flat, where optim.static_gradients keeps it."

    def _numbered(self) -> list[Numbered]:
        """Return the parameters that have a gradient, those with a master weight first."""
        return sorted(super()._numbered(), key=lambda one: not self._has_master(one.param))

    def _update(self, numbered: list[Numbered], clip: Tensor, corrected: Tensor) -> None:
        """Update these parameters by the graph; if another has no gradient, without it."""
        # The graph is for these very parameters: without one of them it would be compiled again, in the middle of
        # training.
        whole = all(p.grad is not None for p in parameters_of(self.param_groups))
        run = self._graph if self._compiled and whole else partial(update_all, one_by_one)
        shards = [self._shard(one) for one in numbered]
        stored = [[getattr(shard, name) for shard in shards] for name in ("weight", "exp_avg", "exp_avg_sq")]
        rounded = [shard.rounded for shard in shards if shard.rounded is not None]
        # Private: of pytorch/pytorch#107154, without a public name. CUDA graphs then write to these tensors where they
        # lie, instead of to copies.
        for tensor in (*rounded, *(tensor for kind in stored for tensor in kind)):
            torch._dynamo.mark_static_address(tensor)
        keys = [(signed32(shard.key), signed32(shard.key >> 32)) for shard in shards]
        device = corrected.device
        scalars = small_table([shard.scalars for shard in shards], torch.float32, device)
        grads = [self._gradient(one.param) for one in numbered]
        parameters = [stored[0], rounded, grads, *stored[1:]]
        run(parameters, clip, scalars, corrected, small_table(keys, torch.int32, device))

    def _gradient(self, param: torch.nn.Parameter) -> Tensor:
        """Return the gradient, flat, in the memory that is kept for it if any; a gradient that lies
        elsewhere is copied there."""
        assert param.grad is not None
        grad = flat(param.grad)
        if not self._keeps_gradients:
            return grad
        if param not in self._gradients:
            self._gradients[param] = grad.clone()
        kept = self._gradients[param]
        if kept.data_ptr() != grad.data_ptr():
            kept.copy_(grad)
        # Private, as above. CUDA graphs then read the gradient here and do not copy it; torch's own optimizers do not
        # mark gradients, since their memory stays taken (pytorch/pytorch#107504).
        torch._dynamo.mark_static_address(kept)
        return kept

    # The flag may come by its place: the signature is torch's.
    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch gives it by its place
        """Drop the gradients, or set those to 0 whose memory is kept, for the next step to add to.

        A kept gradient that the next step does not add to stays 0, and its parameter decays.
        """
        if not self._gradients:
            super().zero_grad(set_to_none=set_to_none)
            return
        torch._foreach_zero_(list(self._gradients.values()))  # private: one launch for all, see adamw.py
        for param, kept in self._gradients.items():
            param.grad = kept.view(param.shape)

    @torch.no_grad()
    def warm_up(self, *, compiled: bool) -> None:
        """Compile the update of these very parameters, with their states made; it is left out,
        so that nothing changes."""
        self._compiled = compiled
        if not compiled:
            return
        # A coefficient of nan leaves an update out.
        nan = torch.full((), torch.nan, device=next(iter(parameters_of(self.param_groups))).device)
        before = {p: p.grad for p in parameters_of(self.param_groups)}
        for param in before:
            param.grad = torch.zeros_like(param)
        for _ in range(WARM_UP_CALLS):
            self._update_all(nan)
        for param, grad in before.items():
            param.grad = grad


def build(groups: Groups, optim: OptimConfig, *, seed: int, graph: Mapping[str, Any]) -> GraphAdamW:
    """Build the optimizer of optim.implementation other than auto.

    Raises:
        ConfigError: sharded weights.
    """
    if any(isinstance(p, DTensor) for p in parameters_of(groups)):
        raise ConfigError(
            f"optim.implementation={optim.implementation} updates whole weights: set optim.implementation=auto with "
            "sharded ones, or use accelerate_configs/ddp.yaml"
        )
    return GraphAdamW(groups, optim, seed, graph)
