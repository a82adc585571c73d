"""Compare the bits of weights and optimizer states that several ranks hold: a difference ends the run. And those of
frozen weights with what they were when training began."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.errors import ReplicaError, hint
from sftkit.models.trained import logical_elements
from sftkit.ops.nf4 import SCALES
from sftkit.ops.tensors import local
from sftkit.optim.protocol import Optimizer, named_states
from sftkit.runtime.script import first_of
from sftkit.runtime.start import Runtime
from sftkit.tracking.names import Check

CHECKSUM_COLUMNS = 1 << 16
"Number of int64 words that a tensor is folded to before weighting: 512 KiB, the only temporary memory."
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SEED = 20010911


class Replicas:
    """Compare the checksums of all ranks.

    Under DDP all ranks hold everything; with HSDP the ranks at the same place of each replica hold the same shards;
    tensor-parallel ranks share norms, see `holders`. If weights are sharded without replicas, only the buffers that
    checkpoints keep are compared.
    """

    def __init__(self, orig_model: PreTrainedModel, optimizer: Optimizer, rt: Runtime, every: int | None) -> None:
        """Choose the compared tensors. `every`: number of steps between comparisons; None: no comparisons."""
        self._orig_model, self._optimizer, self._rt = orig_model, optimizer, rt
        self._every = every if rt.world_size > 1 else None
        self._frozen_compared = False

    def check(self, step: int, *, is_kept: bool) -> None:
        """Compare if a comparison is due; every rank must call it. A comparison waits for the device.

        Args:
            is_kept: whether this step is saved or evaluated.

        Raises:
            ReplicaError: on every rank, names the differing ranks and the first differing tensor.
        """
        if self._every is None or not (is_kept or step % self._every == 0):
            return
        # Pipeline stages hold different tensors, so all names are collected first: every rank then takes part
        # in each column.
        tensors = self._shared()
        self._frozen_compared = True
        names = self._rt.united(list(tensors))
        exchanged = zip(names, self._exchange([tensors.get(name) for name in names]), strict=True)
        differing = [(name, ranks) for name, sums in exchanged for ranks in parted(sums)]
        if differing:
            raise self._error(step, differing, len(tensors))

    def _shared(self) -> dict[str, torch.Tensor]:
        """Return the tensors whose shard another rank also holds, by name.

        Names are the same on every rank, except between pipeline stages: a rank has all names of its own stage.
        """
        parameters = self._orig_model.named_parameters()
        # No update reaches frozen weights, and FrozenWeights watches them: once is enough.
        held = {n: p for n, p in parameters if not p.is_meta and (p.requires_grad or not self._frozen_compared)}
        named = {**held, **kept_buffers(self._orig_model)}
        named |= named_states(self._optimizer, self._orig_model)
        return {name: tensor for name, tensor in named.items() if len(holders(tensor, self._rt.world_size)) > 1}

    @torch.no_grad()
    def _exchange(self, tensors: Sequence[torch.Tensor | None]) -> list[list[tuple[int, int]]]:
        """Return for each tensor every rank's value: (the first rank that holds the same shard, checksum).

        A tensor that is None belongs to another stage: it counts as a shard that no other rank holds.
        """
        device, ranks = self._rt.device, self._rt.world_size
        if not tensors:
            return []
        # A table with a row for each rank, which fills its own row: the sum over ranks is then an all_gather.
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        sums = [nothing if tensor is None else checksum(tensor).to(device) for tensor in tensors]
        first = [-1 - self._rt.rank if tensor is None else min(holders(tensor, ranks)) for tensor in tensors]
        table = torch.zeros(ranks, 2, len(sums), dtype=torch.int64, device=device)
        table[self._rt.rank, 0] = torch.tensor(first, device=device)
        table[self._rt.rank, 1] = torch.stack(sums)
        return [[(shard, found) for shard, found in rows] for rows in self._rt.sum(table).permute(2, 0, 1).tolist()]

    def _error(self, step: int, differing: list[tuple[str, list[list[int]]]], of: int) -> ReplicaError:
        """Build the error that names the ranks and the first tensor, and write it to the rank's status."""
        # The majority counts as right. The suspect is one of the other ranks, so only those record a cause of their
        # own; with two equal groups there is no suspect.
        name, groups = differing[0]
        *odd, majority = groups
        unsure = len(odd[-1]) == len(majority)  # no rank is in the minority
        suspect = "" if unsure else f"The odd one out is {_named(odd[0])}. "
        words = {"groups": " and ".join(map(_named, groups)), "name": name, "differing": len(differing), "of": of}
        error = ReplicaError(hint("replicas that differ", step=step, suspect=suspect, **words))
        if self._rt.status is not None:
            self._rt.status.failed(error, symptom=self._rt.rank in majority and not unsure)
        return error


class FrozenWeights:
    """Compares frozen weights with what they were before the first step. Every rank has one and calls the same methods,
    each for what it holds."""

    def __init__(self, orig_model: PreTrainedModel, rt: Runtime) -> None:
        """Remember a checksum of each."""
        parameters = orig_model.named_parameters()
        self._frozen: dict[str, torch.Tensor] = {n: p for n, p in parameters if not p.requires_grad and not p.is_meta}
        self._weights, self._size = len(self._frozen), sum(logical_elements(p) for p in self._frozen.values())
        buffers = orig_model.named_buffers()
        self._frozen |= {name: buffer for name, buffer in buffers if name.rpartition(".")[2] in SCALES}
        self._rt, self._before = rt, self._checksums()
        self._changed: dict[str, int] = {}

    def _checksums(self) -> list[int]:
        sums = [checksum(p) for p in self._frozen.values()]
        return torch.stack(sums).tolist() if sums else []

    def compare(self, step: int) -> None:
        """Note what differs after a step. Waits for the device."""
        for name, before, now in zip(self._frozen, self._before, self._checksums(), strict=True):
            if before != now:
                self._changed.setdefault(name, step)

    def check(self, step: int) -> list[Check]:
        """Return the row of proof.json after the last step; none if all parameters are trained."""
        self.compare(step)
        changed: dict[str, int] = {}
        for of_rank in self._rt.gathered(self._changed):
            changed |= of_rank
        if not self._frozen:
            return []
        found = f"{self._weights} weights with {self._size:,} parameters"
        if changed:
            found = first_of([f"{name} (seen at step {at})" for name, at in changed.items()])
        how = "a checksum of all bits of each, before the first step, at each checkpoint and at the end, on every rank"
        return [Check("Frozen weights unchanged", not changed, found, "the same bits", how)]


def kept_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that checkpoints keep, by name.

    Other buffers depend on a rank's data, as some rotary frequencies do.
    """
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in kept}


def holders(tensor: torch.Tensor, world_size: int) -> list[int]:
    """Return the ranks that must hold the same bits of a tensor, this rank included.

    Tensor-parallel ranks each add up the gradients of their copies in a group of their own. Two addends have one sum;
    with more, the sum depends on the order within the group, so those copies may differ.
    """
    if not isinstance(tensor, DTensor):
        return list(range(world_size))
    mesh = tensor.device_mesh
    coordinate, names = mesh.get_coordinate(), mesh.mesh_dim_names or ()
    assert coordinate is not None
    addends = mesh.size() // mesh.size(names.index("tensor")) if "tensor" in names else 1
    # Along these dimensions of the mesh ranks hold copies; along the others only ranks at this place are holders.
    alike = [
        place.is_replicate() and not (name == "tensor" and addends > 2)
        for place, name in zip(tensor.placements, names or [""] * mesh.ndim, strict=True)
    ]
    index = tuple(slice(None) if same else at for same, at in zip(alike, coordinate, strict=True))
    return mesh.mesh[index].flatten().tolist()


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum over the bits of this rank's shard: int64 0-d on its device. No host sync.

    It adds integers modulo 2^64, so it is exact in any order. Elements whose positions differ by a multiple of
    CHECKSUM_COLUMNS are added up, and the sums are weighted by odd numbers: a change of one element always changes
    the checksum, changes of several can only cancel within a column or with probability 2^-63.
    """
    flat = local(tensor).detach().reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    # Fold to one row of columns before weighting, so that no temporary is as large as the tensor in int64.
    whole = len(words) // CHECKSUM_COLUMNS * CHECKSUM_COLUMNS
    sums = rest = words[whole:].to(torch.int64)
    if whole:
        sums = words[:whole].view(-1, CHECKSUM_COLUMNS).sum(0, dtype=torch.int64)
        sums[: len(rest)] += rest
    return (sums * weights(flat.device)[: len(sums)]).sum()


@cache
def weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers, the same on every rank: int64 [CHECKSUM_COLUMNS]."""
    generator = torch.Generator().manual_seed(_SEED)
    # Made on the CPU, whose generator gives the same numbers on every machine. Odd, so that no change is multiplied
    # to 0.
    made = torch.randint(-(2**63), 2**63 - 1, (CHECKSUM_COLUMNS,), generator=generator, dtype=torch.int64)
    return (made | 1).to(device)


def parted(sums: list[tuple[int, int]]) -> list[list[list[int]]]:
    """Return, for each shard whose holders differ, the holders grouped by their checksum, the smallest group first.

    Args:
        sums: for each rank, (the first rank that holds the same shard, checksum).
    """
    shards: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (shard, found) in enumerate(sums):
        shards[shard][found].append(rank)
    return [sorted(groups.values(), key=len) for groups in shards.values() if len(groups) > 1]


def _named(ranks: list[int]) -> str:
    """Return `rank 3` or `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
