"""What a run sees of its sources' shards: the documents, which cutting.py has cut to data.max_length, with counts and
findings. A view is a folder of the cache that is complete or absent.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sftkit.config.schema import SourceConfig
from sftkit.data.reading import folders
from sftkit.data.reading.conversation import ROLES
from sftkit.data.store.making import POLL_SECONDS, Peers
from sftkit.data.store.shards import Shard
from sftkit.data.types import DocumentColumns, Examples, Finding
from sftkit.errors import ConfigError, fault, hint

COUNTS = ("rows", "documents", "truncated", "dropped_too_long", "dropped_no_target", "dropped_where", "skipped_bad")
ROLE_COUNTS = {role: f"messages_{role}" for role in ROLES}
"Role -> name of the count of its messages, in conversations that are learned from."
VIEW_COLUMNS: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("lengths", "num_targets", "num_bytes", "source", "shard"), np.dtype(np.int32)),
    "start": np.dtype(np.int64),
}
"Arrays of a view: the columns of Examples, and of each document its shard and first token."
CHOSEN_BY: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("row", "turns"), np.dtype(np.int32)),
    **dict.fromkeys(("content", "head"), np.dtype(np.uint64)),
}
"Arrays of DocumentColumns, which a view has if its shards would take a pass over their tokens for them."
NARROW_COLUMNS = ("source", "shard", "start")
"Columns that nothing computes with, so they may have the smallest type that holds them."
VIEW_FORMAT = 1
"The version of the files of a view, next to that of a store."
CountBytes = Callable[[np.ndarray, np.ndarray], int]
"Takes ids and is_target; returns the UTF-8 bytes of the targets."


class Limits(NamedTuple):
    """How documents are cut."""

    max_length: int
    too_long: str
    "data.too_long, or skip: what is an error elsewhere counts as a bad row that is left out"


class StoredSource(NamedTuple):
    """A source of a run with its shards, in order."""

    config: SourceConfig
    shards: list[Shard]


@dataclass(frozen=True)
class ShardTokens:
    """Tokens in shards, with the whole length and the answers of each document. Documents are asked for in order."""

    shards: Sequence[Shard]
    shard: np.ndarray
    start: np.ndarray
    lengths: np.ndarray

    def gather(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, is_target) of documents, one after the other."""
        if not len(documents):
            return np.zeros(0, np.int32), np.zeros(0, bool)
        places = zip(*(column[documents].tolist() for column in (self.shard, self.start, self.lengths)), strict=True)
        found = [self.shards[shard].tokens(start, length + 1) for shard, start, length in places]
        ids, is_target = map(np.concatenate, zip(*found, strict=True))
        return ids, is_target

    def answers(self, documents: np.ndarray) -> Iterator[list[tuple[int, int]]]:
        """Yield the first token and one past the last of each answer of documents, also where they are cut off."""
        for shard, entries, starts in self._stored(documents):
            for doc, start in zip(shard.docs[entries], starts.tolist(), strict=True):
                yield [(first, past) for first, past in shard.answers_of(doc, start).tolist()]

    def learned_answers(self, documents: np.ndarray) -> int:
        """Return how many answers are learned whole in documents."""
        kept = self.lengths[documents].astype(np.int64) + 1
        total = first = 0
        for shard, entries, starts in self._stored(documents):
            docs = shard.docs[entries]
            own = kept[first : first + len(docs)]
            is_cut = docs["length"] > own
            total += int(docs["answers"][~is_cut].sum())
            for i in np.flatnonzero(is_cut & (docs["answers"] > 0)).tolist():
                total += int((shard.answers_of(docs[i], int(starts[i]))[:, 1] <= own[i]).sum())
            first += len(docs)
        return total

    def sizes(self, documents: np.ndarray) -> np.ndarray:
        """Return the tokens of documents before anything was cut off, of a text in pieces those of the whole text."""
        found = [shard.sizes[entries] for shard, entries, _ in self._stored(documents)]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def columns(self) -> list[np.ndarray]:
        """Return row, turns, content and head of all documents (types.DocumentColumns), from their shards."""
        parts: list[tuple[np.ndarray, ...]] = [(np.zeros(0, np.int32),) * 2 + (np.zeros(0, np.uint64),) * 2]
        for shard, entries, _ in self._stored(np.arange(len(self.lengths))):
            docs = shard.docs[entries]
            numbers = docs["row"].astype(np.int32), docs["roles"].sum(1).astype(np.int32)
            parts.append((*numbers, docs["content"], docs["head"]))
        return [np.concatenate(one) for one in zip(*parts, strict=True)]

    def _stored(self, documents: np.ndarray) -> Iterator[tuple[Shard, np.ndarray, np.ndarray]]:
        """Yield (shard, numbers of its entries of some documents, their first tokens), in order."""
        borders = np.flatnonzero(np.diff(self.shard[documents])) + 1
        for here in np.split(documents, borders) if len(documents) else ():
            shard = self.shards[self.shard[here[0]]]
            starts = shard.starts
            entries = np.searchsorted(starts, self.start[here], side="right") - 1
            yield shard, entries, starts[entries]


def make_examples(
    sources: Sequence[StoredSource], limits: Limits | None, count_bytes: CountBytes, folder: Path, peers: Peers
) -> Examples:
    """Return the documents of the sources, source after source, from the view in a folder if it is there.

    Args:
        limits: None: the documents were cut when they were tokenized.

    Raises:
        DataError: a source has no document. ConfigError: the disk is full, and other processes wait for the view.
    """
    shards = list(chain.from_iterable(source.shards for source in sources))
    found = load_view(folder, shards, "making it again" if peers.makes else "")
    while found is None and not peers.makes:
        done = peers.look()
        if (found := load_view(folder, shards, "")) is None and done:
            break
        time.sleep(POLL_SECONDS)
    if found is not None:
        return found
    from sftkit.data.store import cutting  # most starts find the view

    documents = partial(cutting.cut_documents, sources, limits, count_bytes)
    write = partial(cutting.write, documents, _kept_columns(shards))
    instead = "every start will tokenize"
    folders.save(folder, write, lambda: load_view(folder, shards, "") is not None, instead=instead)
    if (found := load_view(folder, shards, "")) is not None:
        return found
    if not peers.alone:
        raise ConfigError(hint("full data cache", folder=str(folder), error="no view could be written"))
    about: dict[str, Any] = {}
    parts = list(documents(about))
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in _kept_columns(shards)}
    return _examples(arrays, about, shards, "")


def _kept_columns(shards: Sequence[Shard]) -> dict[str, np.dtype[Any]]:
    return VIEW_COLUMNS | (CHOSEN_BY if any(shard.slow_docs for shard in shards) else {})


def load_view(folder: Path, shards: Sequence[Shard], instead: str) -> Examples | None:
    """Return the examples of a view, as folders.load."""

    kept = _kept_columns(shards)

    def build(arrays: dict[str, Any]) -> Examples:
        about = json.loads((folder / "about.json").read_text())
        for name, dtype in kept.items():
            is_narrow = name in NARROW_COLUMNS and arrays[name].dtype.kind == "u"
            if (arrays[name].dtype != dtype and not is_narrow) or arrays[name].shape != arrays["lengths"].shape:
                raise ValueError(f"{name} is {arrays[name].dtype}{arrays[name].shape}")
        return _examples(arrays, about, shards, folder.name)

    return folders.load(folder, kept, build, instead=instead)


def _examples(
    arrays: Mapping[str, np.ndarray], about: Mapping[str, Any], shards: Sequence[Shard], key: str
) -> Examples:
    own: dict[str, Any] = {name: arrays[name] for name in ("lengths", "num_targets", "num_bytes", "source")}
    tokens = ShardTokens(shards, arrays["shard"], arrays["start"], arrays["lengths"])
    return Examples(
        tokens,
        **own,
        source_names=tuple(about["source_names"]),
        counts=about["counts"],
        findings={name: tuple(Finding(**one) for one in found) for name, found in about["findings"].items()},
        encoder_sources=about["encoder_sources"],
        columns=DocumentColumns(partial(itemgetter(*CHOSEN_BY), arrays) if "row" in arrays else tokens.columns),
        key=key,
    )


def check_lengths(shard: Shard, source: SourceConfig, limits: Limits) -> None:
    """Reject the first document that is longer than data.max_length."""
    docs = shard.docs
    long = np.flatnonzero(docs["size"] > limits.max_length + 1)
    if len(long):
        first = docs[long[0]]
        raise fault(shard.where(int(first["row"]), source.path), "too long", size=excess_text(first["size"], limits))


def excess_text(tokens: int, limits: Limits) -> str:
    """Return how many tokens a document has, and how many data.max_length holds."""
    return f"{tokens} tokens, but data.max_length {limits.max_length} holds {limits.max_length + 1}"
