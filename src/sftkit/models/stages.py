"""Which rank of a pipeline holds which parameters of a model; on the others they are on the meta
device (parallel/stages.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Stages:
    """The stages of a pipeline and what each holds, the same on every rank, and this rank's place."""

    layers: tuple[int, ...]
    "of each stage, how many; the last stage has the final norm and the head too"
    mesh: DeviceMesh
    "[places in the pipeline, ranks with the same layers]: stage s is at place s modulo their number"
    holders: dict[str, tuple[int, ...]]
    "name of each parameter -> the places that hold it, the one that answers for it first"
    whole: bool = False
    "inside `whole_weights`"

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group of ranks through which this rank's rows pass."""
        return self.mesh.get_group("stages")

    @property
    def place(self) -> int:
        """Return this rank's place in the pipeline."""
        return self.mesh.get_local_rank("stages")

    @property
    def alike(self) -> tuple[int, int]:
        """Return (this rank's index among those with the same layers, how many they are)."""
        return self.mesh.get_local_rank("alike"), self.mesh.size(1)

    @property
    def own(self) -> range:
        """Return the stages that this rank holds."""
        return range(self.place, len(self.layers), self.mesh.size(0))

    def holds(self, name: str) -> bool:
        """Return whether this rank holds the parameter of this name."""
        return self.place in self.holders[name]

    def writer(self, name: str) -> int:
        """Return the global rank that writes a parameter into checkpoints."""
        return int(self.mesh.mesh[self.holders[name][0]][0])

    def elsewhere(self, state: str) -> bool:
        """Return whether an optimizer state (optim.state.named_states) belongs to a parameter that
        this rank does not hold."""
        return any(self.place not in places and _is_of(state, name) for name, places in self.holders.items())

    def written_here(self, state: str) -> bool:
        """Return whether ranks with the layers of this one write an optimizer state into checkpoints."""
        return any(self.place == places[0] and _is_of(state, name) for name, places in self.holders.items())


def stages_of(orig_model: torch.nn.Module) -> Stages | None:
    """Return the stages that parallel/stages.py has given the model; None: it is in no pipeline."""
    found = getattr(orig_model, "_stages", None)
    assert found is None or isinstance(found, Stages)
    return found


def _is_of(state: str, parameter: str) -> bool:
    """Return whether a state is of the parameter: `exp_avg.<parameter>` or `exp_avg.<parameter>.codes`."""
    return f".{parameter}." in f"{state}."
