"""The steps since the last logged line, kept in checkpoints: a resumed run logs the lines that it would have logged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from sftkit.runtime.start import Runtime
from sftkit.tracking.progress import progress_of

if TYPE_CHECKING:
    from sftkit.tracking.health import Health
    from sftkit.tracking.meter import Meter

WINDOW = "window"
"Name of the open window in the state of a checkpoint."
Window = dict[str, Any]
"JSON values, the same on every rank."


def by_rank(rt: Runtime, own: torch.Tensor) -> list[list[float | None]]:
    """Return the values of every rank, one list each, None for what is not finite; every rank must call it.

    Args:
        own: [n], this rank's, on its device; exact as fp64.
    """
    # A sum of rows that are zero elsewhere gathers them exactly: x + 0 rounds nothing.
    table = torch.zeros(rt.world_size, len(own), dtype=torch.float64, device=own.device)
    table[rt.rank] = own
    return [[value if math.isfinite(value) else None for value in row] for row in rt.sum(table).tolist()]


def own_values(rt: Runtime, rows: list[list[float | None]], *, same_ranks: bool) -> torch.Tensor:
    """Return this rank's part of what `by_rank` returned, so that the parts add up to the same: fp64 [n], on the CPU.

    Args:
        same_ranks: each takes what it had, so that sums go on bit for bit; else the main rank takes the sums over
            ranks, which make sense only for what adds up.
    """
    table = torch.tensor([[math.nan if value is None else value for value in row] for row in rows], dtype=torch.float64)
    if same_ranks:
        return table[rt.rank]
    # The sums over ranks stay right with any number of ranks if one has all and the others none.
    return table.sum(0) if rt.is_main else torch.zeros_like(table[0])


def is_open(resumed: Mapping[str, Any]) -> bool:
    """Return whether a stop asked for the line at the step of this checkpoint: then the next line has its steps too."""
    return bool(resumed.get(WINDOW, {}).get("meter", {}).get("steps"))


def resume_window(resumed: Mapping[str, Any], meter: Meter, health: Health, rt: Runtime, log_every: int) -> str | None:
    """Take over the counts and the open window of the checkpoint that is resumed.

    Args:
        resumed: what Checkpoints.resume returned.

    Returns:
        a line to print where the first logged line has fewer steps than it would have had.
    """
    # Progress by itself, as versions before open windows kept nothing else.
    step, window = resumed["step"], resumed.get(WINDOW)
    meter.resume(progress_of(resumed))
    since = step // log_every * log_every
    shorter = f"the first logged line has the steps from {step + 1} on, not those from {since + 1} on"
    if window is None:
        return f"{shorter}: the checkpoint is of a version that kept no open window" if step > since else None
    # The number alone is not enough: the same ranks in another mesh share other rows.
    same_ranks = (resumed["world_size"], resumed["topology"]) == (rt.world_size, rt.topology.describe())
    # Counts of steps do not depend on the ranks, so they are restored in any case; sums of the meter may not be.
    health.restore_window(window["health"])
    if not meter.restore_window(window["meter"], same_ranks=same_ranks):
        return f"{shorter}: other sums are measured now (loss.token_metrics)" if is_open(resumed) else None
    if is_open(resumed) and len(meter.sources) > 1 and window["meter"].get("sources") != meter.sources:
        return f"data/share: {shorter}: the sources have other names now"
    return None
