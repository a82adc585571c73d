"""Which rows a model reads together, and which rank computes them: decided from the rows alone, so that results are the
same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from accelerate.utils import gather_object

from sftkit.runtime.start import Runtime

MOST_POSITIONS = 32_768
"The most positions that a batch reads at once, padding included."
MIN_SHARED = 16
"Tokens that rows must have in common before their keys and values are computed once."

T = TypeVar("T")
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class PromptBatch:
    """Rows that go through the model together."""

    rows: tuple[int, ...]
    "their indices, the longest first"
    prefix: Prefix = ()
    "tokens that all of them begin with, computed once for all batches that have the same"


class Turn(NamedTuple):
    """One round of batches over the ranks: what this rank computes in it."""

    batch: PromptBatch | None
    "None: fewer batches are left than ranks"
    new_prefix: bool
    "some rank computes a new prefix in this round"


def shared_prefixes(rows: Sequence[np.ndarray], most: Sequence[int], groups: Sequence[str]) -> list[Prefix]:
    """Return, for each row, the tokens that all rows of its group begin with; empty if they are fewer than MIN_SHARED
    or the row is alone in its group.

    Args:
        rows: int [T_i] each.
        most: how many tokens of each row may be shared, so that what is asked of the model lies after them.
        groups: their names; "" is no group.
    """
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    shared: dict[str, Prefix] = {}
    for group, indices in members.items():
        first = rows[indices[0]]
        length = min(most[i] for i in indices) if group and len(indices) > 1 else 0
        for i in indices[1:] if length else ():
            length = _common(first[:length], rows[i][:length])
        shared[group] = tuple(first[:length].tolist()) if length >= MIN_SHARED else ()
    return [shared[group] for group in groups]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading tokens two rows of one length or less share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def plan(
    lengths: Sequence[int],
    prefixes: Sequence[Prefix],
    batch_size: int,
    *,
    targets: Sequence[int] | None = None,
    new_tokens: Sequence[int] | None = None,
    most_positions: int | None = None,
    most_targets: int | None = None,
    most_cached: int | None = None,
) -> list[PromptBatch]:
    """Return rows in batches: rows with the same prefix together, the longest first, so that padding is small and a
    batch that does not fit in memory fails early.

    Args:
        lengths: tokens of each row after its prefix. targets: positions of each row that have logits.
        new_tokens: what is written after each row, at most.
        most_positions, most_targets: limits of what a batch reads at once, padding included; a row that exceeds them is
            alone.
        most_cached: limit of the positions whose keys and values are kept: prefix, padded rows and what is written.
    """
    order: dict[Prefix, int] = {}
    for prefix in prefixes:
        order.setdefault(prefix, len(order))
    queue = sorted(range(len(lengths)), key=lambda i: (order[prefixes[i]], -lengths[i], i))
    batches: list[PromptBatch] = []
    rows: list[int] = []
    for i in queue:
        together = [*rows, i]
        too_many = (
            len(together) > batch_size
            or (most_positions is not None and len(together) * lengths[together[0]] > most_positions)
            or (targets is not None and most_targets is not None and sum(targets[j] for j in together) > most_targets)
            or (most_cached is not None and _cached(together, lengths, prefixes, new_tokens) > most_cached)
        )
        if rows and (too_many or prefixes[rows[0]] != prefixes[i]):
            batches.append(PromptBatch(tuple(rows), prefixes[rows[0]]))
            rows = []
        rows.append(i)
    return [*batches, PromptBatch(tuple(rows), prefixes[rows[0]])] if rows else batches


def _cached(
    rows: Sequence[int], lengths: Sequence[int], prefixes: Sequence[Prefix], new_tokens: Sequence[int] | None
) -> int:
    """Return the positions in the cache of these rows (the longest first), prefix and padding
    included; 0 if nothing is cached."""
    prefix = len(prefixes[rows[0]])
    new = max(new_tokens[i] for i in rows) if new_tokens is not None else 0
    return len(rows) * (prefix + lengths[rows[0]] + new) if prefix or new else 0


def turns(batches: Sequence[PromptBatch], rt: Runtime | None) -> Iterator[Turn]:
    """Yield this rank's batches: they are assigned to the ranks in turn, the same ones to the tensor-parallel ranks of
    a group and to those of a pipeline. All ranks have equally many turns and check for a requested stop before each,
    which may raise Stopped. Without a runtime: all batches."""
    index, count = 0, 1
    if rt is not None:
        count = rt.world_size // (rt.topology.tensor * rt.topology.stages)
        index = rt.rank // rt.topology.tensor % count
    before: list[Prefix] = [()] * count
    for start in range(0, len(batches), count):
        if rt is not None:
            rt.check_stop()
        dealt = batches[start : start + count]
        new = any(batch.prefix and batch.prefix != had for batch, had in zip(dealt, before, strict=False))
        before = [batch.prefix for batch in dealt]
        yield Turn(dealt[index] if index < len(dealt) else None, new)


def gathered(found: dict[int, T], rt: Runtime | None) -> list[T]:
    """Return the results of all ranks, in the order of the rows, on every rank."""
    if rt is not None and rt.world_size > 1:
        found = dict(gather_object(list(found.items())))
    return [value for _, value in sorted(found.items())]
