"""The protocol of optimizers, and the other parts of an optimizer step.

These are the norm of all gradients with the factor that clips them, without a host sync; the learning rate as a pure
function of the step; and optimizer states under the names and in the shapes of their parameters, which checkpoints
store at any sharding.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.config.schema import OptimConfig
from sftkit.ops.tensors import as_sharded, local

Group = dict[str, Any]
"""A parameter group as torch types and stores it: params, weight_decay, lr, and an optimizer's own keys. Any, because
a TypedDict would not fit torch's optimizers, whose `param_groups` has this type.
"""
Groups = list[Group]
State = dict[str, Tensor]
"The states of a parameter by name."


@runtime_checkable
class Optimizer(Protocol):
    """Parameters, their states, and the update of both."""

    param_groups: Groups
    state: defaultdict[Tensor, State]
    """States of each parameter by name, including `step`, a 0-d tensor: the number of its updates without skipped
    ones. Empty before the first update.
    """

    @property
    def kind(self) -> str:
        """Return a name for the kind of states: a checkpoint resumes only its own kind."""

    def warm_up(self, *, compiled: bool) -> None:
        """Compile and load the code of an update; parameters, states and random numbers do not change.

        Missing states may be created, as the first update would.

        Args:
            compiled: whether the run compiles. If not, an optimizer that supports both updates eagerly from now on.
        """

    def update(self, learning_rate: float, coefficient: Tensor) -> None:
        """Set the learning rate of every group, multiply gradients by the coefficient, update parameters
        with a gradient.

        Gradients are undefined afterwards: the product may be computed inside the update.

        Args:
            coefficient: fp32 0-d on the device; nan skips the update, so weights, states and their update counts do
                not change. Only a group's `attempts`, if it has them, counts it.
        """

    def new_state(self, param: Tensor, group: Group) -> State:
        """Return the states of a parameter as they are before its first update."""

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zeros."""

    # Any, as in torch: its state dict holds groups and states, and no type of torch covers both.
    def state_dict(self) -> dict[str, Any]:
        """Return groups and states, as torch.optim.Optimizer does."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` bit for bit."""


class Build(Protocol):
    """The function that an OptimizerSpec names."""

    def __call__(self, groups: Groups, optim: OptimConfig, *, seed: int) -> Optimizer:
        """Build the optimizer.

        Args:
            groups: parameter groups from build.parameter_groups.
            seed: seed of stochastic rounding, the same on every rank.
        """


def optimizer_kind(label: str, groups: Groups) -> str:
    """Return `kind`: the label, which is stored in checkpoints and never changes, and the dtypes of the parameters."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters_of(groups)}
    return f"{label} {'+'.join(sorted(dtypes))}"


def parameters_of(groups: Groups) -> Iterable[torch.nn.Parameter]:
    """Return all parameters of the groups."""
    return (p for group in groups for p in group["params"])


def set_learning_rate(groups: Groups, learning_rate: float) -> None:
    """Set the learning rate of every group: this one, times the group's `lr_scale` if it has one."""
    for group in groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


SUM_CHUNK = 1 << 16
"Number of elements whose squares are added up at once on a CPU: their fp64 copy stays in the cache."


@torch.no_grad()
def squared_norm(parameters: Iterable[Tensor], world_size: int, copies: Mapping[int, int] | None = None) -> Tensor:
    """Return this rank's share of the squared L2 norm of all gradients: the shares of all ranks add up to it.

    A gradient that n ranks hold, such as a replica's or an unsharded weight's, counts 1/n on each.

    Args:
        copies: id of a parameter -> number of ranks that hold it; None, or a missing id: all ranks.

    Returns:
        0-d on the device, no host sync: fp32 on a GPU, which sums in trees; fp64 on a CPU, which sums one by one.
    """
    by_copies: dict[int, list[Tensor]] = {}
    device = torch.device("cpu")
    for p in parameters:
        device = p.device
        if p.grad is not None:
            number = (copies or {}).get(id(p), world_size)
            if isinstance(p, DTensor):
                # Not is_shard(): it is false for the strided shards that FSDP makes of tensor-parallel ones.
                sharding = [i for i, place in enumerate(p.placements) if not place.is_replicate()]
                number //= math.prod(p.device_mesh.size(i) for i in sharding)
            by_copies.setdefault(number, []).append(local(p.grad))
    if not by_copies:  # in the dtype of ranks that have gradients, because the shares are added up
        return torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    return torch.stack([_sum_of_squares(grads) / copies for copies, grads in by_copies.items()]).sum()


def _sum_of_squares(grads: list[Tensor]) -> Tensor:
    """Return the sum of all squares, 0-d: fp32 on a GPU, fp64 on a CPU."""
    if grads[0].device.type != "cpu":
        # Private: one launch for many tensors. The public get_total_norm (pytorch/pytorch#139662) calls it too, but
        # in the dtype of the gradients.
        return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()
    # In fp32, torch's sum on a CPU loses 6e-4 of a norm over 2^24 elements, 5e-3 over 2^26.
    chunks = (chunk for grad in grads for chunk in grad.reshape(-1).split(SUM_CHUNK))
    return torch.stack([torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]).square().sum()


def clip_coefficient(norm: Tensor, usable: Tensor, max_norm: float | None) -> Tensor:
    """Return the factor that brings gradients to `max_norm`: min(1, max_norm / (norm + 1e-6)); nan if not usable.

    Args:
        norm: fp32 0-d, norm of the gradients. usable: bool 0-d, whether an update is allowed.
        max_norm: largest norm; None: gradients are not clipped.
    """
    factor = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(usable, factor, torch.nan)


@torch.no_grad()
def multiply_gradients(parameters: Iterable[torch.nn.Parameter], coefficient: Tensor) -> None:
    """Multiply gradients in place, for optimizers that cannot do it inside their update; nan leaves them unchanged."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        # Private: a few kernels for all gradients. The public clip_grads_with_norm_ (pytorch/pytorch#139662) takes a
        # norm, not a factor.
        torch._foreach_mul_(grads, coefficient.nan_to_num(1.0))


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Return the learning rate of optimizer step 1..total_steps."""
    warmup = math.ceil(share(optim.warmup_ratio, total_steps))
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.schedule == "constant":
        return optim.lr
    decay = max(round(share(optim.decay_ratio, total_steps)), 1) if optim.schedule == "wsd" else total_steps - warmup
    # Counted up to the previous step, so that the first step of a decay has the full rate and the last is not
    # lost at 0.
    progress = min(max((step - 1 - (total_steps - decay)) / decay, 0.0), 1.0)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1.0 - progress
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * remaining)


def share(ratio: float, total_steps: int) -> Fraction:
    """Return the exact product with the decimal number in the recipe: in floats, 0.07 of 100 steps is more than 7."""
    return Fraction(str(ratio)) * total_steps


STEP = "step"
ATTEMPTS = "attempts"


def named_states(optimizer: Optimizer, orig_model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the optimizer's states by the names of their parameters. No host sync.

    `exp_avg.<parameter>` is a tensor of the parameter's shape, a view of the live state; for a sharded parameter, a
    DTensor with this rank's shard. `step.<parameter>` is its number of updates, int64 0-d, a copy.

    Missing states are first created as zeros, so that a checkpoint can be loaded into them.
    """
    found: dict[str, Tensor] = {}
    for name, param, group in _named(optimizer, orig_model):
        state = optimizer.state[param]
        if not state:
            state.update(optimizer.new_state(param, group))
        found[f"{STEP}.{name}"] = state[STEP].to(torch.int64)
        for key, value in state.items():
            # torchao's states are 8-bit codes and a scale per block of the shard.
            own: Any = local(value)
            if key != STEP and not hasattr(own, "codes"):
                found[f"{key}.{name}"] = _shaped(own, param)
            elif key != STEP:
                found[f"{key}.{name}.codes"] = _shaped(own.codes, param)
                found[f"{key}.{name}.scale"] = own.scale
    return found


def states_loaded(optimizer: Optimizer, orig_model: PreTrainedModel, tensors: dict[str, Tensor], steps: int) -> None:
    """Restore the numbers of updates after a checkpoint was loaded into the tensors of `named_states`.

    Args:
        steps: number of steps of the run so far, including skipped ones: each requested an update.
    """
    for name, param, _ in _named(optimizer, orig_model):
        optimizer.state[param][STEP].copy_(tensors[f"{STEP}.{name}"])
    for group in optimizer.param_groups:
        if ATTEMPTS in group:
            group[ATTEMPTS] = steps


def _named(optimizer: Optimizer, orig_model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter, Group]]:
    """Return name, parameter and group of every updated parameter."""
    names = {id(p): name for name, p in orig_model.named_parameters()}
    return [(names[id(p)], p, group) for group in optimizer.param_groups for p in group["params"]]


def _shaped(value: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Return a state in the parameter's shape and sharding."""
    return as_sharded(value.view(local(param).shape), param)
