"""Where the rows of a source are: a builtin, local files, a hub dataset. Finding them, and looking at the first,
takes no torch."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sftkit.config.paths import similar_paths
from sftkit.config.schema import SourceConfig
from sftkit.data.reading import folders, hub, readers
from sftkit.data.reading.arrow import without_fill
from sftkit.data.reading.readers import RawRow
from sftkit.data.reading.slices import base_split, sliced, sliced_beginning
from sftkit.errors import ConfigError

# Any: what each module makes has a type of its own.
BUILTINS: dict[str, tuple[str, Callable[[Any], dict[str, object]]]] = {
    "docs": ("documents", lambda text: {"text": text}),
    "tasks": ("builtin", lambda task: {"messages": task.messages}),
    "pictures": ("pictures", dict),
}
"Builtin -> the module of data/demo that makes it, and how one becomes a row."
DEMO = Path(__file__).parents[1] / "demo"
STAND_IN = "a text"
"Stands for the first row of builtin:docs, which cannot be made without reading all of Python's library."


@dataclass(frozen=True)
class Origin:
    """A source that exists: how to read its rows, and what identifies its content."""

    rows: Callable[[], Iterator[RawRow]]
    identity: Callable[[], object]
    "what identifies its content; files are read for it"
    beginning: Callable[[], Iterator[RawRow]] = lambda: iter(())
    "its first rows, as far as they are found without reading all; none: that is not known"
    num_bytes: int | None = None
    "of its files; None: it has none here"
    said: str = ""
    "of a folder: which files are of which split, and which are left out"


def find_source(source: SourceConfig) -> Origin:
    """Find a source and the rows of it that are asked for, or raise a ConfigError that says where it was looked for.
    Reads no rows."""
    found = find_here(source) or _on_hub(source)
    return replace(found, rows=lambda: islice(found.rows(), source.max_rows))


def _on_hub(source: SourceConfig) -> Origin:
    """Find a source on the hub, or in the cache of it."""
    dataset = hub.load_from_hub(source)
    if isinstance(dataset, Path):
        return _local(source, dataset)
    label = f"{source.path}[{source.split}]"
    types = dict(dataset.features or {})
    # Private, but shown in the documentation: what datasets itself names its caches by
    # (https://huggingface.co/docs/datasets/about_cache).
    return Origin(
        lambda: ((f"{label}:{i}", without_fill(row, types)) for i, row in enumerate(dataset)),
        lambda: dataset._fingerprint,
    )


def find_here(source: SourceConfig) -> Origin | None:
    """Find a source without the hub; None if a hub dataset may be meant."""
    if source.path.startswith("builtin:"):
        return _builtin(source)
    path = Path(source.path)
    if path.exists():
        return _local(source, path)
    if readers.looks_local(source.path):
        hint = similar_paths(source.path)
        raise ConfigError(f"data source {source.path}: no such file or folder (looked in {Path.cwd()}){hint}")
    return None


def _builtin(source: SourceConfig) -> Origin:
    """Find a builtin source."""
    name, split = source.path.removeprefix("builtin:"), base_split(source.split)
    if name not in BUILTINS:
        raise ConfigError(f"data source {source.path}: not one of {', '.join(f'builtin:{b}' for b in BUILTINS)}")
    if split not in ("train", "heldout"):
        raise ConfigError(f'data source {source.path}: split "{split}" is not one of train, heldout')
    module, as_row = BUILTINS[name]
    made = getattr(importlib.import_module(f"sftkit.data.demo.{module}"), name)

    def raw_rows() -> Iterator[RawRow]:
        return ((f"{source.path}[{split}]:{i}", as_row(item)) for i, item in enumerate(made(split)))

    beginning = (lambda: iter([(source.path, {"text": STAND_IN})])) if name == "docs" else raw_rows
    return Origin(partial(sliced, raw_rows, source), _identity_of_builtins, beginning)


def _identity_of_builtins() -> list[str]:
    # The docs are Python's own library; the rest is made by these modules.
    made_by = b"".join(path.read_bytes() for path in sorted(DEMO.glob("*.py")))
    return [sys.version, hashlib.sha256(made_by).hexdigest()]


def _local(source: SourceConfig, path: Path) -> Origin:
    """Find a source in a file or folder."""
    files, said = folders.files_of(source, path)

    def raw_rows(*, beginning: bool = False) -> Iterator[RawRow]:
        return (row for file in files for row in readers.rows_of(file, beginning=beginning))

    first = partial(sliced_beginning, partial(raw_rows, beginning=True), source)
    return Origin(
        partial(sliced, raw_rows, source),
        partial(folders.content_identity, files),
        first,
        num_bytes=sum(file.stat().st_size for file in files),
        said=said,
    )
