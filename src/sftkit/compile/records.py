"""What went wrong with compiled code on all ranks: guards may fail on one of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sftkit.compile.watch import CompileWatch
from sftkit.runtime.start import Runtime


@dataclass(frozen=True)
class Records:
    """What went wrong on one rank, or on several: then counts are added up, and texts of other
    ranks than 0 name their rank."""

    recompiles: int = 0
    fallbacks: int = 0
    "calls of compiled code that ran uncompiled"
    in_evaluation: int = 0
    "compiles during evaluations"
    recompile_kinds: tuple[str, ...] = ()
    fallback_kinds: tuple[str, ...] = ()
    graph_break_reasons: tuple[str, ...] = ()
    late_cuda_graphs: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    "what HookWatch found"


def records_of(watch: CompileWatch, hooks: Sequence[str] = ()) -> Records:
    """Return the records of this rank, so far."""
    recompiles, breaks = int(watch.counts()["compile/recompiles"]), watch.graph_break_reasons()
    texts = watch.recompile_kinds(), watch.fallback_kinds(), breaks, watch.late_cuda_graphs(), hooks
    return Records(recompiles, watch.fallbacks, watch.in_evaluation, *map(tuple, texts))


class RecordsOfRanks:
    """Keeps the records of each rank as last exchanged; texts are exchanged only when one has something new."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._ranks = [Records()] * rt.world_size

    def exchanged(self, own: Records) -> Records:
        """Return the records of all ranks; every rank must call it.

        It exchanges one flag, and the records only where those of a rank have changed.
        """
        if self._rt.any_rank(own != self._ranks[self._rt.rank]):
            self._ranks = self._rt.gathered(own)
        return together(self._ranks)

    def known(self, own: Records) -> Records:
        """Return this rank's records as they are now, and those of the others as last exchanged.

        For training that ends with an error, when ranks do not wait for each other.
        """
        return together([own if rank == self._rt.rank else told for rank, told in enumerate(self._ranks)])


def together(ranks: Sequence[Records]) -> Records:
    """Return the records of all ranks as one."""

    def united(values: Sequence[Any]) -> Any:
        if isinstance(values[0], int):
            return sum(values)
        found: dict[str, str] = {}
        for rank, texts in enumerate(values):
            for text in texts:
                found.setdefault(text, f"rank {rank}: {text}" if rank else text)
        return tuple(found.values())

    return Records(*(united([getattr(own, field.name) for own in ranks]) for field in fields(Records)))
