"""Datasets of the Hugging Face hub, and a quick and clear failure without network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from sftkit.config.paths import similar_paths
from sftkit.config.schema import SourceConfig
from sftkit.data.reading.folders import configuration, configurations
from sftkit.errors import ConfigError
from sftkit.runtime.hub import hub_answers, not_found, unavailable_reason, unreachable


# Any: datasets has no types.
def load_from_hub(source: SourceConfig) -> Any:
    """Load a datasets.Dataset; without network, the Path of a downloaded snapshot if only that is there."""
    import datasets

    # A switch of the whole process, which stays: lines of our own say what takes long.
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
    """Refuse a source that is no local path if neither hub nor cache has a dataset of its name. Loads nothing.

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
    """Turn the hub client and datasets offline inside the block. They read the switch once, at import, into
    these two module variables."""
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
