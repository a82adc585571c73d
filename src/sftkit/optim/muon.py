"""Muon on the matrices of the decoder blocks, AdamW on everything else, in one optimizer."""

from __future__ import annotations

import itertools

import torch
from torch.distributed.tensor import DTensor

from sftkit.config.schema import OptimConfig
from sftkit.ops.dtensor import as_sharded, local, local_part
from sftkit.ops.rounding import stochastic_round
from sftkit.optim.adamw import AdamW, Numbered, first_element, flat, no_updates
from sftkit.optim.formula import RandomBits
from sftkit.optim.protocol import Group, Groups, State

MOMENTUM = 0.95


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return nearly U V^T of the singular value decomposition.

    It takes five quintic Newton-Schulz steps in bf16 (K. Jordan 2024).

    Singular values end between 0.5 and 1.5, which serves as well here. The arithmetic is that of torch.optim.Muon,
    whose functional form is private and has changed between releases.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16().T if tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _full_matrix(shard: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the whole matrix, gathered in bf16 if the parameter is sharded."""
    if not isinstance(param, DTensor):
        return shard
    sharded = as_sharded(shard.bfloat16(), param)
    assert isinstance(sharded, DTensor)
    return sharded.full_tensor()


class Muon(AdamW):
    """Muon for groups with `block_matrices`, this package's AdamW for the others.

    States of a matrix: `momentum_buffer` (fp32, flat), `step` as in AdamW, and for a bf16 matrix `master` (fp32, flat).
    """

    label = "Muon"

    def _zero_states(self, param: torch.Tensor, group: Group) -> State:
        if not group["block_matrices"]:
            return super()._zero_states(param, group)
        return {"step": no_updates(param), "momentum_buffer": torch.zeros(local(param).numel(), device=param.device)}

    def _update(self, numbered: list[Numbered], clip: torch.Tensor, corrected: torch.Tensor) -> None:
        """Update each run of parameters of one kind: matrices of blocks one by one, the others as AdamW."""
        for in_blocks, same in itertools.groupby(range(len(numbered)), lambda i: numbered[i].group["block_matrices"]):
            members = list(same)
            run = slice(members[0], members[-1] + 1)  # indexing by a list would copy and sync with the host
            if not in_blocks:
                super()._update(numbered[run], clip, corrected[run])
                continue
            for one in numbered[run]:
                self._update_matrix(one, clip)

    def _update_matrix(self, one: Numbered, clip: torch.Tensor) -> None:
        """Update one matrix of a block in place: Nesterov momentum, orthogonalized and scaled.

        The scale gives the update the root mean square of AdamW's (0.2 sqrt(max(rows, columns)), arXiv 2502.16982), so
        that one learning rate serves both.

        The update needs the whole matrix, so a sharded one is gathered, and each rank computes all of it.
        """
        param, lr, state = one.param, one.group["lr"], self.state[one.param]
        assert param.grad is not None
        shard, grad, usable = local(param), local(param.grad).float() * clip, ~clip.isnan()
        weight = state.get("master", flat(param)).view(shard.shape)
        momentum_buffer = state["momentum_buffer"].view(shard.shape)
        momentum = momentum_buffer.lerp(grad, 1 - MOMENTUM)
        update = local_part(orthogonalized(_full_matrix(grad.lerp(momentum, MOMENTUM), param)), param)
        decayed = weight * (1 - lr * one.group["weight_decay"])
        new = decayed.add_(update, alpha=-lr * 0.2 * max(param.shape) ** 0.5)
        # Computed even if the step is left out, of which only the device knows: then nothing of it is stored.
        torch.where(usable, momentum, momentum_buffer, out=momentum_buffer)
        torch.where(usable, new, weight, out=weight)
        if "master" in state:
            noise = RandomBits.of(first_element(param), self._key(one)).noise(state["master"])[0]
            rounded = stochastic_round(state["master"], noise).view(shard.shape)
            shard.copy_(torch.where(usable, rounded, shard))


def build(groups: Groups, optim: OptimConfig, *, seed: int) -> Muon:
    """Build the optimizer of optim.name=muon."""
    return Muon(groups, optim, seed=seed)
