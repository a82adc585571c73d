"""Find where the rows of a source are: a builtin, local files, or a dataset of the Hugging Face hub. No torch.

Without network the hub's cache is used, or the error is quick and clear.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sftkit.config.commands import similar_paths
from sftkit.config.schema import SourceConfig
from sftkit.data.demo import builtin
from sftkit.data.reading import folders, readers
from sftkit.data.reading.folders import base_split, configuration, configurations, sliced, sliced_beginning
from sftkit.data.reading.readers import RawRow, without_fill
from sftkit.errors import ConfigError
from sftkit.runtime.hub import hub_answers, not_found, unavailable_reason, unreachable


# Any: datasets has no types.
def load_from_hub(source: SourceConfig) -> Any:
    """Load a datasets.Dataset; without network, the Path of a downloaded snapshot if only that is there."""
    import datasets

    # A switch of the whole process, which stays: our own lines report what takes long.
    datasets.disable_progress_bars()
    connected = hub_answers()
    if not connected:
        _check_configuration(source)  # datasets itself would take the one that its cache has
    try:
        with nullcontext() if connected else offline():
            return datasets.load_dataset(source.path, source.subset, split=source.split)
    except Exception as error:  # anything that datasets, pyarrow or the hub client may raise
        if not connected:
            return _snapshot(source)
        reason = str(error).strip() or type(error).__name__
        raise ConfigError(
            f"data source {source.path} (subset {source.subset or 'none'}, split {source.split}): {reason}. "
            f"Neither a local file or folder of that name exists{similar_paths(source.path)}"
        ) from error


def check_dataset(source: SourceConfig) -> None:
    """Reject a source that is no local path if neither hub nor cache has a dataset of its name. Loads nothing.

    Raises:
        ConfigError: where it was looked for, and what to do.
    """
    if reason := unavailable_reason(source.path, "dataset"):
        raise _missing(source, reason)
    if not hub_answers():
        _check_configuration(source)


def _check_configuration(source: SourceConfig) -> None:
    """Raise a ConfigError if a downloaded snapshot has configurations, and the source names none of them."""
    if (folder := _cached_snapshot(source.path)) and (configured := configurations(folder)):
        configuration(source, configured)


def _snapshot(source: SourceConfig) -> Path:
    """Return the folder of a downloaded snapshot."""
    from huggingface_hub import constants

    if (folder := _cached_snapshot(source.path)) is None:
        raise _missing(source, f"it is not in the cache ({constants.HF_HOME}) and {unreachable()}")
    return folder


def _cached_snapshot(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except Exception:  # anything that the client raises for a name that it does not know
        return None


def _missing(source: SourceConfig, reason: str) -> ConfigError:
    """Return the error for a dataset that is neither on the hub nor here, with what to do."""
    download = (
        f"On a connected machine run `hf download --repo-type dataset {source.path} --local-dir FOLDER`, copy FOLDER "
        "here and name it in the place of this path; or copy that machine's HF_HOME cache"
    )
    requested = f" (subset {source.subset or 'none'}, split {source.split})"
    return ConfigError(f"data source {source.path}{requested}: {not_found(source.path, 'dataset', reason, download)}")


@contextmanager
def offline() -> Iterator[None]:
    """Turn the hub client and datasets offline inside the block. They read the switch once, at import, into these
    two module variables."""
    import datasets.config
    from huggingface_hub import constants

    # No public way: the environment variable is read at import (huggingface/huggingface_hub#3990), long before it is
    # known whether the hub answers.
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


# Any: what each function of data/demo/builtin.py yields has a type of its own.
BUILTINS: dict[str, Callable[[Any], dict[str, object]]] = {
    "docs": lambda text: {"text": text},
    "tasks": lambda task: {"messages": task.messages},
    "pictures": dict,
}
"Builtin, a function of data/demo/builtin.py -> how one of its items becomes a row."
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
    """Find a source and the rows of it that are asked for, or raise a ConfigError that lists the places where it
    was looked for. Reads no rows."""
    found = find_here(source) or _on_hub(source)
    return replace(found, rows=lambda: islice(found.rows(), source.max_rows))


def _on_hub(source: SourceConfig) -> Origin:
    """Find a source on the hub, or in the cache of it."""
    dataset = load_from_hub(source)
    if isinstance(dataset, Path):
        return _local(source, dataset)
    label = f"{source.path}[{source.split}]"
    types = dict(dataset.features or {})

    def raw_rows() -> Iterator[RawRow]:
        return ((f"{label}:{i}", without_fill(row, types)) for i, row in enumerate(dataset))

    # Private, but shown in the documentation: what datasets itself names its caches by
    # (https://huggingface.co/docs/datasets/about_cache).
    return Origin(raw_rows, lambda: dataset._fingerprint)


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
    name = source.path.removeprefix("builtin:")
    split = base_split(source.split)
    if name not in BUILTINS:
        raise ConfigError(f"data source {source.path}: not one of {', '.join(f'builtin:{b}' for b in BUILTINS)}")
    if split not in ("train", "heldout"):
        raise ConfigError(f'data source {source.path}: split "{split}" is not one of train, heldout')
    as_row = BUILTINS[name]
    made = getattr(builtin, name)

    def raw_rows() -> Iterator[RawRow]:
        return ((f"{source.path}[{split}]:{i}", as_row(item)) for i, item in enumerate(made(split)))

    beginning = (lambda: iter([(source.path, {"text": STAND_IN})])) if name == "docs" else raw_rows
    # The docs are Python's own library; the rest is made by these modules.
    made_by = b"".join(path.read_bytes() for path in sorted(DEMO.glob("*.py")))
    identity = [sys.version, hashlib.sha256(made_by).hexdigest()]
    return Origin(partial(sliced, raw_rows, source), lambda: identity, beginning)


def _local(source: SourceConfig, path: Path) -> Origin:
    """Find a source in a file or folder."""
    files, said = folders.files_of(source, path)

    def raw_rows(*, beginning: bool = False) -> Iterator[RawRow]:
        return (row for file in files for row in readers.rows_of(file, beginning=beginning))

    rows = partial(sliced, raw_rows, source)
    first = partial(sliced_beginning, partial(raw_rows, beginning=True), source)
    num_bytes = sum(file.stat().st_size for file in files)
    return Origin(rows, partial(folders.content_identity, files), first, num_bytes, said)
