"""Datasets of the Hugging Face hub, and a quick and clear failure without network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sftkit.config.schema import SourceConfig
from sftkit.data.readers import closest
from sftkit.errors import ConfigError
from sftkit.runtime.hub import hub_answers


def load(source: SourceConfig) -> Any:
    """A datasets.Dataset, or the Path of a downloaded snapshot when there is no network and only that is there."""
    import datasets

    datasets.disable_progress_bars()
    if hub_answers():
        return _load_dataset(source)
    try:
        with offline():
            return datasets.load_dataset(source.path, source.subset, split=source.split)
    except Exception:
        return _snapshot(source)


def _load_dataset(source: SourceConfig) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source.path, source.subset, split=source.split)
    except Exception as error:  # anything that datasets, pyarrow or the hub client may raise
        reason = str(error).strip() or type(error).__name__
        raise ConfigError(
            f"data source {source.path} (subset {source.subset or 'none'}, split {source.split}): {reason}. "
            f"Neither a local file or folder of that name exists{_suggestion(source.path)}"
        ) from error


def _snapshot(source: SourceConfig) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(source.path, repo_type="dataset", local_files_only=True))
    except Exception as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ConfigError(
            f"data source {source.path}: no local file or folder of that name{_suggestion(source.path)}, and as a hub "
            f"dataset (subset {source.subset or 'none'}, split {source.split}) it is not in the cache "
            f"({constants.HF_HOME}) and {why}. On a connected machine run "
            f"`hf download --repo-type dataset {source.path} --local-dir FOLDER`, copy FOLDER here and set the "
            "source's path (data.train.0.path=FOLDER for the first one) to it; or copy that machine's HF_HOME cache"
        ) from error


def _suggestion(path: str) -> str:
    names = closest(path)
    return f" (did you mean {' or '.join(names)}?)" if names else ""


@contextmanager
def offline() -> Iterator[None]:
    """Inside, nothing asks the hub. The hub client and datasets read their offline switch from these two places, once, at import."""
    import datasets.config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
