"""Which rank of a pipeline holds which parameters of a model; on the others they are on the meta
device (parallel/stages.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Stages:
    """The stages of a pipeline and what each holds, the same on every rank, and this rank's number in it."""

    layers: tuple[int, ...]
    "of each stage, how many; the last stage has the final norm and the head too"
    mesh: DeviceMesh
    "[pipeline ranks, ranks with the same layers]: stage s is on pipeline rank s modulo their number"
    holders: dict[str, tuple[int, ...]]
    "name of each parameter -> the pipeline ranks that hold it, the one that answers for it first"
    ends: dist.ProcessGroup | None
    "the first and the last rank of this rank's pipeline; None in one between them"
    entered: bool = False
    "inside parallel.stagewise"

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group of ranks through which this rank's rows pass."""
        return self.mesh.get_group("stages")

    @property
    def pipeline_rank(self) -> int:
        """Return this rank's number in the pipeline."""
        return self.mesh.get_local_rank("stages")

    @property
    def last(self) -> bool:
        """Return whether this rank has the last stage: final norm, head and loss."""
        return self.pipeline_rank == self.mesh.size(0) - 1

    @property
    def last_rank(self) -> int:
        """Return the rank of the world that has this rank's rows in the last stage."""
        return dist.get_global_rank(self.group, self.mesh.size(0) - 1)

    @property
    def replica(self) -> tuple[int, int]:
        """Return (this rank's index among those with the same layers, how many they are)."""
        return self.mesh.get_local_rank("alike"), self.mesh.size(1)

    @property
    def own(self) -> range:
        """Return the stages that this rank holds."""
        return range(self.pipeline_rank, len(self.layers), self.mesh.size(0))

    def holds(self, name: str) -> bool:
        """Return whether this rank holds the parameter of this name."""
        return self.pipeline_rank in self.holders[name]

    def writer(self, name: str) -> int:
        """Return the global rank that writes a parameter into checkpoints."""
        return int(self.mesh.mesh[self.holders[name][0]][0])

    def elsewhere(self, state: str) -> bool:
        """Return whether an optimizer state (optim.state.named_states) belongs to a parameter that
        this rank does not hold."""
        return any(self.pipeline_rank not in places and _is_of(state, name) for name, places in self.holders.items())

    def written_here(self, state: str) -> bool:
        """Return whether ranks with the layers of this one write an optimizer state into checkpoints."""
        return any(self.pipeline_rank == places[0] and _is_of(state, name) for name, places in self.holders.items())


def stages_of(orig_model: torch.nn.Module) -> Stages | None:
    """Return the stages that parallel/stages.py has given the model; None: it is in no pipeline."""
    return getattr(orig_model, "_stages", None)


def from_last(orig_model: torch.nn.Module, value: Tensor) -> Tensor:
    """Return what the last stage of a pipeline has computed, on all its ranks, without gradient; every one of them
    calls it. Of another model what is given.

    Args:
        value: of the same shape and dtype on each.
    """
    stages = stages_of(orig_model)
    if stages is None:
        return value
    value = value.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(value, src=stages.last_rank, group=stages.group)
    return value


def _is_of(state: str, parameter: str) -> bool:
    """Return whether a state is of the parameter: `exp_avg.<parameter>` or `exp_avg.<parameter>.codes`."""
    return f".{parameter}." in f"{state}."
