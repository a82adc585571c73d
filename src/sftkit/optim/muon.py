"""Muon on the matrices of the decoder blocks and AdamW on all other parameters, in one optimizer."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftkit.config.schema import OptimConfig
from sftkit.ops.tensors import as_sharded, local, local_part, signed32, stochastic_round
from sftkit.optim.adamw import AdamW, Numbered, first_element, no_updates, random_bits, small_table
from sftkit.optim.protocol import Group, Groups, State

MOMENTUM = 0.95
BATCH_ELEMENTS = 2**24
"""Number of matrix elements updated together. At its peak, an update of bf16 matrices holds 8.5 fp32 tensors of this
size, 544 MiB.
"""


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return approximately U V^T of each matrix's singular value decomposition, bf16 [B, R, C].

    It uses five quintic Newton-Schulz steps in bf16 (K. Jordan 2024).

    Singular values end between 0.5 and 1.5, which is good enough here. The arithmetic is that of torch.optim.Muon
    (pytorch/pytorch#160213), whose functional form is private and has changed between releases.

    Args:
        matrices: tensor [B, R, C]. One launch computes a step for all of them: small matrices one by one would wait
            for the host.
    """
    a, b, c = (3.4445, -4.7750, 2.0315)
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.bfloat16().mT if tall else matrices.bfloat16()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _batches(matrices: list[Numbered]) -> Iterator[list[Numbered]]:
    """Yield matrices of one shape, dtype, sharding and group together, up to BATCH_ELEMENTS or a single
    larger matrix.

    Batches use whole shapes, not those of shards, which may differ between ranks: all ranks must gather in one order.
    """
    alike: dict[tuple[object, ...], list[Numbered]] = {}
    for one in matrices:
        param = one.param
        sharding = (param.device_mesh, param.placements) if isinstance(param, DTensor) else ()
        alike.setdefault((param.shape, param.dtype, id(one.group), *sharding), []).append(one)
    for members in alike.values():
        size = max(1, BATCH_ELEMENTS // members[0].param.numel())
        yield from (members[i : i + size] for i in range(0, len(members), size))


class Muon(AdamW):
    """Muon for groups with `block_matrices`, this package's AdamW for the others.

    States of a matrix: `momentum_buffer` (fp32, flat), `step` as in AdamW, and for a bf16 matrix `master` (fp32, flat).
    """

    label = "Muon"

    def _zero_states(self, param: Tensor, group: Group) -> State:
        if not group["block_matrices"]:
            return super()._zero_states(param, group)
        return {"step": no_updates(param), "momentum_buffer": torch.zeros(local(param).numel(), device=param.device)}

    def _update(self, numbered: list[Numbered], clip: Tensor, corrected: Tensor) -> None:
        """Update matrices of blocks in batches, and each run of other parameters by AdamW."""
        for in_blocks, same in itertools.groupby(range(len(numbered)), lambda i: numbered[i].group["block_matrices"]):
            members = list(same)
            run = slice(members[0], members[-1] + 1)  # indexing by a list would copy and sync with the host
            if not in_blocks:
                super()._update(numbered[run], clip, corrected[run])
        for batch in _batches([one for one in numbered if one.group["block_matrices"]]):
            self._update_matrices(batch, clip)

    def _update_matrices(self, batch: list[Numbered], clip: Tensor) -> None:
        """Update matrices of one shape in place: Nesterov momentum, orthogonalized and scaled.

        The scale gives the update the root mean square of AdamW's (0.2 sqrt(max(rows, columns)), arXiv 2502.16982),
        so that one learning rate suits both.

        The update needs the whole matrix, so a sharded one is gathered and each rank computes the whole update.
        """
        params = [one.param for one in batch]
        group = batch[0].group
        states = [self.state[param] for param in params]
        shards = [local(param).detach() for param in params]
        updates = self._updates(params, clip)
        usable = ~clip.isnan()
        weights = [state.get("master", shard).view(shard.shape) for state, shard in zip(states, shards, strict=True)]
        weight = torch.stack(weights)
        new = weight * (1 - group["lr"] * group["weight_decay"])
        new.add_(updates, alpha=-group["lr"] * 0.2 * max(params[0].shape) ** 0.5)
        torch.where(usable, new, weight, out=new)
        # Private: one launch for all copies. torch's optimizers use this operator; there is no
        # public one (pytorch/pytorch#193607).
        torch._foreach_copy_(weights, list(new))
        if "master" in states[0]:
            keys = [self._key(one) for one in batch]
            numbers = [[first_element(one.param), key, key >> 32] for one, key in zip(batch, keys, strict=True)]
            table = small_table([[signed32(number) for number in row] for row in numbers], torch.int32, new.device)
            noise, *_ = random_bits(new[0].flatten(), *table.unsqueeze(1).unbind(2))
            rounded = stochastic_round(new, noise.view(new.shape))
            torch._foreach_copy_(shards, list(torch.where(usable, rounded, torch.stack(shards))))

    def _updates(self, params: list[torch.nn.Parameter], clip: Tensor) -> Tensor:
        """Update the momentum of matrices of one shape and return this rank's shards of their directions, bf16
        [B, R, C].

        Computed even if the step is skipped, which only the device knows: the result is then not stored.
        """
        buffers = [self.state[param]["momentum_buffer"].view(local(param).shape) for param in params]
        grads = torch.stack([local(param.grad) for param in params if param.grad is not None]).float() * clip
        before = torch.stack(buffers)
        momentum = before.lerp(grads, 1 - MOMENTUM)
        whole = grads.lerp_(momentum, MOMENTUM)
        torch._foreach_copy_(buffers, list(torch.where(~clip.isnan(), momentum, before, out=momentum)))  # also private
        del before, momentum  # memory for the following steps
        if isinstance(params[0], DTensor):
            sharded = [as_sharded(shard.bfloat16(), param) for shard, param in zip(grads, params, strict=True)]
            whole = torch.stack([matrix.full_tensor() for matrix in sharded])  # type: ignore[attr-defined]
        orthogonal = orthogonalized(whole)
        return torch.stack([local_part(matrix, param) for matrix, param in zip(orthogonal, params, strict=True)])


def build(groups: Groups, optim: OptimConfig, *, seed: int) -> Muon:
    """Build the optimizer of optim.name=muon."""
    return Muon(groups, optim, seed=seed)
