"""Optimizer states by the names of their parameters and in their shapes: what checkpoints store, at any sharding."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from sftkit.ops.dtensor import as_sharded, local
from sftkit.optim.protocol import Group, Optimizer

STEP, ATTEMPTS = "step", "attempts"


def named_states(optimizer: Optimizer, orig_model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the optimizer's states by the names of their parameters. No host sync.

    `exp_avg.<parameter>` is a tensor of the parameter's shape, a view of the live state (where the parameter is
    sharded, a DTensor of this rank's shard). `step.<parameter>` is its number of updates, int64 0-d, a copy.

    States that do not exist yet are made first, of zeros, so that a checkpoint can be loaded into them.
    """
    found: dict[str, torch.Tensor] = {}
    for name, param, group in _named(optimizer, orig_model):
        state = optimizer.state[param]
        if not state:
            state.update(optimizer.new_state(param, group))
        found[f"{STEP}.{name}"] = state[STEP].to(torch.int64)
        for key, value in state.items():
            if key != STEP:
                found |= _as_parameter(f"{key}.{name}", value, param)
    return found


def states_loaded(
    optimizer: Optimizer, orig_model: PreTrainedModel, tensors: dict[str, torch.Tensor], steps: int
) -> None:
    """Take over the numbers of updates after a checkpoint was loaded into the tensors of `named_states`.

    Args:
        steps: of the run so far, skipped ones included: an update was asked for in each.
    """
    for name, param, _ in _named(optimizer, orig_model):
        optimizer.state[param][STEP].copy_(tensors[f"{STEP}.{name}"])
    for group in optimizer.param_groups:
        if ATTEMPTS in group:
            group[ATTEMPTS] = steps


def _named(optimizer: Optimizer, orig_model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter, Group]]:
    """Return name, parameter and group of all that the optimizer updates."""
    names = {id(p): name for name, p in orig_model.named_parameters()}
    return [(names[id(p)], p, group) for group in optimizer.param_groups for p in group["params"]]


def _as_parameter(key: str, value: torch.Tensor, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the tensors of one state, by name."""
    value = local(value)
    # torchao's: 8-bit codes and a scale per block of the shard
    codes, scale = getattr(value, "codes", None), getattr(value, "scale", None)
    if codes is not None and scale is not None:
        return {f"{key}.codes": _shaped(codes, param), f"{key}.scale": scale}
    return {key: _shaped(value, param)}


def _shaped(value: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Return a state in the parameter's shape, sharded as that is."""
    return as_sharded(value.view(local(param).shape), param)
