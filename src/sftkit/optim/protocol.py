"""The protocol of optimizers: the rest of the package uses one without knowing which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch

from sftkit.config.schema import OptimConfig

Group = dict[str, Any]
"""A parameter group as torch types and stores it: params, weight_decay, lr, and what else an optimizer keeps for each
group. Any, for a TypedDict would fit no optimizer of torch, whose `param_groups` has this type."""
Groups = list[Group]
State = dict[str, torch.Tensor]
"The states of a parameter by name."


@runtime_checkable
class Optimizer(Protocol):
    """Parameters, their states, and the update of both."""

    param_groups: Groups
    state: defaultdict[torch.Tensor, State]
    """States of each parameter by name; among them `step`, a 0-d tensor, the number of its updates without skipped
    ones. Empty before the first update."""

    @property
    def kind(self) -> str:
        """Return a name for the kind of states, for messages and checkpoints: a checkpoint resumes only
        its own kind."""

    def warm_up(self, *, compiled: bool) -> None:
        """Compile and load all that an update will run; parameters, states and random numbers do not change.

        States that do not exist yet may be made, as the first update makes them.

        Args:
            compiled: whether the run compiles. If not, an optimizer that can do both updates eagerly from here on.
        """

    def update(self, learning_rate: float, coefficient: torch.Tensor) -> None:
        """Set the learning rate of every group, multiply gradients by the coefficient, update parameters
        with a gradient.

        Gradients are undefined afterwards: the product may be taken inside the update.

        Args:
            coefficient: fp32 0-d on the device; nan: the update is skipped: weights, states and their update counts do
                not change. Only a group's `attempts`, where there is one, counts it.
        """

    def new_state(self, param: torch.Tensor, group: Group) -> State:
        """Return the states of a parameter as they are before its first update."""

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zeros."""

    # Any, as torch has it: its state dict holds groups beside states, and no type of it has both.
    def state_dict(self) -> dict[str, Any]:
        """Return groups and states, as torch.optim.Optimizer does."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, bit for bit."""


class Build(Protocol):
    """The function that an OptimizerSpec names."""

    def __call__(self, groups: Groups, optim: OptimConfig, *, seed: int) -> Optimizer:
        """Build the optimizer.

        Args:
            groups: as build.parameter_groups makes them.
            seed: of stochastic rounding; the same on every rank.
        """


def optimizer_kind(label: str, groups: Groups) -> str:
    """Return `kind`: the label, which is in checkpoints and never changes, and the dtypes of the parameters."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters_of(groups)}
    return f"{label} {'+'.join(sorted(dtypes))}"


def parameters_of(groups: Groups) -> Iterable[torch.nn.Parameter]:
    """Return all parameters of the groups."""
    return (p for group in groups for p in group["params"])


def set_learning_rate(groups: Groups, learning_rate: float) -> None:
    """Set the learning rate of every group."""
    for group in groups:
        group["lr"] = learning_rate
