"""Batches of rows that a model reads together, and the rank that computes each: decided from the rows alone, so that
results are the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from sftkit.generation.kv_cache import SharedPrefix, max_cached_positions
from sftkit.runtime.start import Runtime

MAX_POSITIONS = 32_768
"The most positions that a batch reads at once, padding included."
MIN_SHARED = 16
"Tokens that rows must have in common before their keys and values are computed once."

K = TypeVar("K", int, tuple[int, int])
T = TypeVar("T")
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Batching:
    """Settings: how rows are batched, and by which ranks."""

    batch_size: int = 64
    "the most rows of a batch; fewer where memory asks for it"
    rt: Runtime | None = None
    "whose ranks share the batches and all get the results; None: this process reads all"


ALONE = Batching()


class PromptRow(NamedTuple):
    """The input of a row, and what the model computes for it."""

    ids: np.ndarray
    "int [T]"
    group: str
    'rows of a group begin alike; "": of none'
    targets: int = 1
    "positions at its end that have logits"
    new_tokens: int = 0
    "what is written after it, at most"


class BatchLimits(NamedTuple):
    """The most that a batch holds; None: no limit."""

    rows: int
    positions: int
    "read at once, padding included; a row that exceeds them is alone"
    cached: int | None
    "whose keys and values are kept: prefix, padded rows and what is written"
    targets: int | None
    "those of all rows; a row that exceeds them is alone"


class PromptBatch(NamedTuple):
    """Rows that go through the model together."""

    rows: tuple[int, ...]
    "their indices, the longest first"
    prefix: Prefix
    "tokens that all of them begin with, computed once for all batches that have the same"


def _shared_prefixes(rows: Sequence[PromptRow]) -> list[Prefix]:
    """Return, for each row, the tokens that all rows of its group begin with, before what is asked of the model; empty
    if they are fewer than MIN_SHARED or the row is alone in its group."""
    members: dict[str, list[PromptRow]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    shared: dict[str, Prefix] = {}
    for group, (first, *others) in members.items():
        # A prefix ends before what is asked: those positions must be read row by row, for their logits.
        length = min(len(row.ids) - row.targets for row in members[group]) if group and others else 0
        for row in others if length else ():
            length = int(np.logical_and.accumulate(first.ids[:length] == row.ids[:length]).sum())
        shared[group] = tuple(first.ids[:length].tolist()) if length >= MIN_SHARED else ()
    return [shared[row.group] for row in rows]


def plan(rows: Sequence[PromptRow], limits: BatchLimits) -> list[PromptBatch]:
    """Return rows in batches: rows with the same prefix together, the longest first, so that padding is small and a
    batch that does not fit in memory fails early."""
    prefixes = _shared_prefixes(rows)
    # Rows of a prefix follow each other, so that its keys and values are computed once and then dropped.
    order = {prefix: number for number, prefix in enumerate(dict.fromkeys(prefixes))}
    batches: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: (order[prefixes[i]], -len(rows[i].ids), i)):
        same_prefix = batches and prefixes[batches[-1][0]] == prefixes[i]
        if same_prefix and _fit([rows[j] for j in (*batches[-1], i)], len(prefixes[i]), limits):
            batches[-1].append(i)
        else:
            batches.append([i])
    return [PromptBatch(tuple(indices), prefixes[indices[0]]) for indices in batches]


def _fit(rows: Sequence[PromptRow], prefix: int, limits: BatchLimits) -> bool:
    """Return whether these rows, the longest first, whose first `prefix` tokens are shared, may be one batch."""
    length, new_tokens = len(rows[0].ids), max(row.new_tokens for row in rows)
    cached = len(rows) * (length + new_tokens) if prefix or new_tokens else 0
    return (
        len(rows) <= limits.rows
        and len(rows) * (length - prefix) <= limits.positions
        and (limits.targets is None or sum(row.targets for row in rows) <= limits.targets)
        and (limits.cached is None or cached <= limits.cached)
    )


def turns(
    orig_model: PreTrainedModel, rows: Sequence[PromptRow], batching: Batching, max_targets: int | None = None
) -> Iterator[tuple[PromptBatch | None, SharedPrefix]]:
    """Yield this rank's batches of the rows, each with its prefix, computed; None: fewer batches are left than ranks.
    They are assigned to the ranks in turn, the same ones to the tensor-parallel ranks of a group and to those of
    a pipeline. All ranks have equally many turns and check for a requested stop before each, which may raise Stopped.
    Without a runtime: all batches. To be called inside plain_forward.

    Args:
        max_targets: of a batch; None: no limit.
    """
    limits = BatchLimits(batching.batch_size, MAX_POSITIONS, max_cached_positions(orig_model), max_targets)
    batches, prefix, rt = plan(rows, limits), SharedPrefix(orig_model), batching.rt
    index, count = 0, 1
    if rt is not None:
        # Ranks that compute the same rows together count as one.
        count = rt.world_size // (rt.topology.tensor * rt.topology.stages)
        index = rt.rank // rt.topology.tensor % count
    before: list[Prefix] = [()] * count
    for start in range(0, len(batches), count):
        if rt is not None:
            rt.check_stop()
        round_batches = batches[start : start + count]
        # A new prefix on one rank means a forward pass, and so one on every rank.
        new = any(batch.prefix and batch.prefix != had for batch, had in zip(round_batches, before, strict=False))
        before = [batch.prefix for batch in round_batches]
        batch = round_batches[index] if index < len(round_batches) else None
        # Sharded weights are gathered by all ranks together: while one computes a prefix, others run empty passes.
        prefix.move_to(batch.prefix if batch else (), in_step=new and rt is not None and rt.topology.sharded)
        yield batch, prefix


def gathered(results: dict[K, T], rt: Runtime | None) -> list[T]:
    """Return the results of all ranks, in the order of their keys, on every rank."""
    if rt is not None and rt.world_size > 1:
        results = dict(gather_object(list(results.items())))
    return [value for _, value in sorted(results.items())]
