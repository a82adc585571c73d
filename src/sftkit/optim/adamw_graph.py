"""AdamW with one graph for the update of all parameters: optim.implementation compiled and foreach_map.

The formula, the states and the random bits are those of adamw.py. That file updates all parameters with a handwritten
kernel. Here Inductor generates the kernels, with foreach_map one for many parameters (horizontal fusion), and CUDA
graphs can replay the call. The price is a graph that grows with the model, and guards on every tensor in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

# Private: from pytorch/pytorch#142098, without a public name as of torch 2.15.
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
    """A callable that applies an operator to the first elements of some lists, then to the second ones, and so on."""

    def __call__(self, operator: Callable[..., Tensor], *lists: Tensors) -> Sequence[Tensor]:
        """Return the results, in order."""


def one_by_one(operator: Callable[..., Tensor], *lists: Tensors) -> list[Tensor]:
    """Apply the operator to each parameter in a loop that the graph unrolls, and return the results."""
    return [operator(*values) for values in zip(*lists, strict=True)]


EACH: dict[str, Each] = {"compiled": one_by_one, "foreach_map": cast(Each, foreach_map)}  # torch has no types here


# Pointwise functions of flat tensors, as foreach_map requires; a clip of nan changes nothing.


def _exp_avg(old: Tensor, grad: Tensor, clip: Tensor, rate1: Tensor) -> Tensor:
    return torch.where(clip.isnan(), old, old + (grad.float() * clip - old) * rate1)


def _exp_avg_sq(old: Tensor, grad: Tensor, clip: Tensor, rate2: Tensor) -> Tensor:
    clipped = grad.float() * clip
    return torch.where(clip.isnan(), old, old + (clipped * clipped - old) * rate2)


# foreach_map passes each list of tensors to the operator as a separate argument.
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
    """Update P parameters in place, like adamw.update_eagerly for a parameter with exact states.

    Args:
        each: callable that applies an operator to all parameters.
        parameters: flat tensors: weights in fp32 (masters first, then parameters without one); the bf16 parameters of
            the masters; gradients, exp_avg and exp_avg_sq in the order of the weights.
        clip: fp32 0-d; nan: nothing changes.
        scalars: fp32 [P, 4], from adamw.numbers_of. corrected: fp64 [P, 2], from adamw.corrections.
        keys: int32 [P, 2], keys of the random bits.
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
    """Return the elements of a column, each 0-d and a copy, because foreach_map does not accept two views of
    one tensor.
    """
    return [number.clone() for number in column.unbind()]


def _copy(stored: Tensors, new: Tensors) -> None:
    """Write the new tensors into the stored ones."""
    for old, value in zip(stored, new, strict=True):
        old.copy_(value)


class GraphAdamW(AdamW):
    """AdamW with the states, masters and random bits of its base class, which updates its parameters by one graph."""

    # Any, here and in `build`: torch.compile's arguments have many types.
    def __init__(self, groups: Groups, optim: OptimConfig, seed: int, graph: Mapping[str, Any]) -> None:
        """Set up lazy compilation. `graph`: arguments of torch.compile."""
        super().__init__(groups, optim, seed=seed)
        self._compiled = True
        each = EACH[optim.implementation]

        def update(parameters: Sequence[Tensors], *tables: Tensor) -> None:
            update_all(each, parameters, *tables)

        self._graph = torch.compile(update, **{**graph, "fullgraph": True, "dynamic": False})
        self._keeps_gradients = optim.static_gradients
        self._gradients: dict[torch.nn.Parameter, Tensor] = {}
        "Memory for the flat gradients if optim.static_gradients keeps it."

    def _numbered(self) -> list[Numbered]:
        """Return the parameters that have a gradient, those with a master weight first."""
        return sorted(super()._numbered(), key=lambda one: not self._has_master(one.param))

    def _update(self, numbered: list[Numbered], clip: Tensor, corrected: Tensor) -> None:
        """Update these parameters by the graph, or without it if another parameter has no gradient."""
        # The graph is compiled for exactly these parameters: with one missing it would be compiled again
        # during training.
        whole = all(p.grad is not None for p in parameters_of(self.param_groups))
        run = self._graph if self._compiled and whole else partial(update_all, one_by_one)
        shards = [self._shard(one) for one in numbered]
        stored = [[getattr(shard, name) for shard in shards] for name in ("weight", "exp_avg", "exp_avg_sq")]
        rounded = [shard.rounded for shard in shards if shard.rounded is not None]
        # Private: from pytorch/pytorch#107154, without a public name. CUDA graphs then write to these tensors in
        # place instead of to copies.
        for tensor in (*rounded, *(tensor for kind in stored for tensor in kind)):
            torch._dynamo.mark_static_address(tensor)
        keys = [(signed32(shard.key), signed32(shard.key >> 32)) for shard in shards]
        device = corrected.device
        scalars = small_table([shard.scalars for shard in shards], torch.float32, device)
        grads = [self._gradient(one.param) for one in numbered]
        parameters = [stored[0], rounded, grads, *stored[1:]]
        run(parameters, clip, scalars, corrected, small_table(keys, torch.int32, device))

    def _gradient(self, param: torch.nn.Parameter) -> Tensor:
        """Return the flat gradient, in its reserved memory if any; a gradient elsewhere is copied there."""
        assert param.grad is not None
        grad = flat(param.grad)
        if not self._keeps_gradients:
            return grad
        if param not in self._gradients:
            self._gradients[param] = grad.clone()
        kept = self._gradients[param]
        if kept.data_ptr() != grad.data_ptr():
            kept.copy_(grad)
        # Private, as above. CUDA graphs then read the gradient in place without a copy; torch's own optimizers do not
        # mark gradients, because that keeps their memory allocated (pytorch/pytorch#107504).
        torch._dynamo.mark_static_address(kept)
        return kept

    # The flag may be positional: the signature is torch's.
    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch gives it by its place
        """Drop the gradients, or zero those with reserved memory, for the next step to add to.

        A reserved gradient that the next step does not add to stays 0, and its parameter decays.
        """
        if not self._gradients:
            super().zero_grad(set_to_none=set_to_none)
            return
        torch._foreach_zero_(list(self._gradients.values()))  # private: one launch for all, see adamw.py
        for param, kept in self._gradients.items():
            param.grad = kept.view(param.shape)

    @torch.no_grad()
    def warm_up(self, *, compiled: bool) -> None:
        """Compile the update of these parameters after creating their states; the update is skipped, so
        nothing changes.
        """
        self._compiled = compiled
        if not compiled:
            return
        # A coefficient of nan skips the update.
        nan = torch.full((), torch.nan, device=next(iter(parameters_of(self.param_groups))).device)
        before = {p: p.grad for p in parameters_of(self.param_groups)}
        for param in before:
            param.grad = torch.zeros_like(param)
        for _ in range(WARM_UP_CALLS):
            self._update_all(nan)
        for param, grad in before.items():
            param.grad = grad


def build(groups: Groups, optim: OptimConfig, *, seed: int, graph: Mapping[str, Any]) -> GraphAdamW:
    """Build the optimizer for any optim.implementation except auto.

    Raises:
        ConfigError: the weights are sharded.
    """
    if any(isinstance(p, DTensor) for p in parameters_of(groups)):
        raise ConfigError(
            f"optim.implementation={optim.implementation} updates whole weights: set optim.implementation=auto with "
            "sharded ones, or use accelerate_configs/ddp.yaml"
        )
    return GraphAdamW(groups, optim, seed, graph)
