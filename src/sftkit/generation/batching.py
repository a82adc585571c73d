"""Which rows a model reads together, and which rank computes them: decided from the rows alone, so that results are the
same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from accelerate.utils import gather_object

from sftkit.runtime.start import Runtime

MAX_POSITIONS = 32_768
"The most positions that a batch reads at once, padding included."
MIN_SHARED = 16
"Tokens that rows must have in common before their keys and values are computed once."

T = TypeVar("T")
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Batching:
    """How rows are read together, and by whom."""

    batch_size: int = 64
    "the most rows of a batch; fewer where memory asks for it"
    rt: Runtime | None = None
    "whose ranks share the batches and all get the results; None: this process reads all"


ALONE = Batching()


class RowSize(NamedTuple):
    """What a row takes of a batch."""

    length: int
    "tokens after its prefix"
    prefix: Prefix = ()
    targets: int = 0
    "positions that have logits"
    new_tokens: int = 0
    "what is written after it, at most"


class BatchLimits(NamedTuple):
    """The most that a batch holds; None: no limit."""

    rows: int
    positions: int | None = None
    "read at once, padding included; a row that exceeds them is alone"
    targets: int | None = None
    "those of all rows; a row that exceeds them is alone"
    cached: int | None = None
    "whose keys and values are kept: prefix, padded rows and what is written"


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


def shared_prefixes(rows: Sequence[np.ndarray], max_shared: Sequence[int], groups: Sequence[str]) -> list[Prefix]:
    """Return, for each row, the tokens that all rows of its group begin with; empty if they are fewer than MIN_SHARED
    or the row is alone in its group.

    Args:
        rows: int [T_i] each.
        max_shared: how many tokens of each row may be shared: those before what the model is asked for.
        groups: their names; "" is no group.
    """
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    shared: dict[str, Prefix] = {}
    for group, indices in members.items():
        first = rows[indices[0]]
        length = min(max_shared[i] for i in indices) if group and len(indices) > 1 else 0
        for i in indices[1:] if length else ():
            length = _common(first[:length], rows[i][:length])
        shared[group] = tuple(first[:length].tolist()) if length >= MIN_SHARED else ()
    return [shared[group] for group in groups]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading tokens two rows of one length or less share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def plan(sizes: Sequence[RowSize], limits: BatchLimits) -> list[PromptBatch]:
    """Return rows in batches: rows with the same prefix together, the longest first, so that padding is small and a
    batch that does not fit in memory fails early."""
    order: dict[Prefix, int] = {}
    for size in sizes:
        order.setdefault(size.prefix, len(order))
    queue = sorted(range(len(sizes)), key=lambda i: (order[sizes[i].prefix], -sizes[i].length, i))
    batches: list[PromptBatch] = []
    rows: list[int] = []
    for i in queue:
        too_many = not _fit([sizes[j] for j in (*rows, i)], limits)
        if rows and (too_many or sizes[rows[0]].prefix != sizes[i].prefix):
            batches.append(PromptBatch(tuple(rows), sizes[rows[0]].prefix))
            rows = []
        rows.append(i)
    return [*batches, PromptBatch(tuple(rows), sizes[rows[0]].prefix)] if rows else batches


def _fit(rows: Sequence[RowSize], limits: BatchLimits) -> bool:
    """Return whether these rows, the longest first, may be one batch."""
    return (
        len(rows) <= limits.rows
        and (limits.positions is None or len(rows) * rows[0].length <= limits.positions)
        and (limits.targets is None or sum(row.targets for row in rows) <= limits.targets)
        and (limits.cached is None or _cached(rows) <= limits.cached)
    )


def _cached(rows: Sequence[RowSize]) -> int:
    """Return the positions in the cache of these rows (the longest first), prefix and padding
    included; 0 if nothing is cached."""
    prefix, new = len(rows[0].prefix), max(row.new_tokens for row in rows)
    return len(rows) * (prefix + rows[0].length + new) if prefix or new else 0


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
        round_batches = batches[start : start + count]
        new = any(batch.prefix and batch.prefix != had for batch, had in zip(round_batches, before, strict=False))
        before = [batch.prefix for batch in round_batches]
        yield Turn(round_batches[index] if index < len(round_batches) else None, new)


def gathered(results: dict[int, T], rt: Runtime | None) -> list[T]:
    """Return the results of all ranks, in the order of the rows, on every rank."""
    if rt is not None and rt.world_size > 1:
        results = dict(gather_object(list(results.items())))
    return [value for _, value in sorted(results.items())]
