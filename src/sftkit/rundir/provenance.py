"""The files that a run was made from, with size and time or hash: written down when it begins, compared when it is
resumed. No torch.

Only files of this machine count; those of a hub are named by the recipe. Data, tokenizer and template, which a start
itself compares with its checkpoint, are kept apart from the weights, which a resumed run does not load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sftkit.config.schema import Config, DataConfig, ModelConfig
from sftkit.rundir.files import read_object, replace_text
from sftkit.rundir.manifest import hash_of
from sftkit.rundir.names import MADE_FROM, MANIFEST, latest_checkpoint

WEIGHTS = ("*.safetensors", "*.bin")
"Files of a model folder that transformers reads weights from."
_TEXTS = ("*.json", "*.jinja", "*.model", "*.txt")
"Files of a model or tokenizer folder that say what it is."

Stamps = dict[str, list[int] | str | None]
"File -> size in bytes and time of the content in ns of a large one, sha256 of a small one; None: cannot be read."


class Provenance(NamedTuple):
    """Files that a run was made from."""

    inputs: Stamps
    "data, tokenizer, template and what the model's folder says of the model"
    weights: Stamps
    "that it began with"


def current_provenance(model: ModelConfig, data: DataConfig) -> Provenance:
    """Return size and time, or hash, of the files that a recipe names, as they are now."""
    training, parent = model.train_tokenizer, _folder(model.path)
    sources = (*data.train, *data.val, *((training and training.sources) or ()))
    # By size and time, as data may be large; small files below by hash, which a copy keeps.
    inputs: Stamps = {str(path): _stamp(path) for source in sources for path in _files(Path(source.path))}
    for key, folder in (("model.path", parent), ("model.tokenizer", _folder(model.tokenizer))):
        # Not by the folder's name: a later step of a run may say the same of the model.
        inputs |= {f"{key}: {path.name}": hash_of(path) for path in _matching(folder, _TEXTS) if path.name != MANIFEST}
    if model.chat_template is not None and Path(model.chat_template).is_file():
        inputs["model.chat_template"] = hash_of(Path(model.chat_template))
    return Provenance(inputs, {str(path): _stamp(path) for path in _matching(parent, WEIGHTS)})


def write_provenance(folder: Path, cfg: Config, *, resumes: bool) -> str | None:
    """Write down what a start is made from. A resumed run keeps the record of the weights that it began with.

    Args:
        folder: where this start writes, in run.dir.

    Returns:
        a warning if those weights have changed; None: they have not.
    """
    began = now = current_provenance(cfg.model, cfg.data)
    # A resumed run does not load these weights again: what it began with stays written down, also if the files are
    # others by now.
    if resumes and "model.path" not in cfg.train.resume_changes and (before := read_provenance(Path(cfg.run.dir))):
        began = now._replace(weights=before.weights)
    replace_text(folder / MADE_FROM, json.dumps(began._asdict(), indent=1))
    return weights_changed(cfg.model, began, now)


def read_provenance(run_dir: Path) -> Provenance | None:
    """Return what the run of a directory was made from; None: it has not written it down."""
    found = read_object(run_dir / MADE_FROM)
    return Provenance(**found) if set(found) == set(Provenance._fields) else None


def weights_changed(model: ModelConfig, began: Provenance, now: Provenance) -> str | None:
    """Return a warning that names weights that are no longer those that a run began with; None: all are the same."""
    there, here = began.weights, now.weights
    changed = sorted(path for path in there.keys() | here.keys() if there.get(path) != here.get(path))
    if not changed:
        return None
    others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return (
        f"model.path={model.path}: its weights have changed since this run began ({changed[0]}{others}), and the run "
        "goes on without them. Start without train.resume to train from the new ones, or keep the run as it is, and "
        "this line away, with train.resume_changes=[model.path]"
    )


def _folder(path: str | None) -> Path | None:
    """Return the folder of a model or tokenizer, of a run that of its newest checkpoint; None: a hub's, or none."""
    if path is None or not Path(path).is_dir():
        return None
    folder = Path(path)
    return folder if (folder / "config.json").is_file() else latest_checkpoint(folder) or folder


def _matching(folder: Path | None, patterns: Iterable[str]) -> list[Path]:
    return [] if folder is None else sorted(path for pattern in patterns for path in folder.glob(pattern))


def _files(path: Path) -> list[Path]:
    return sorted(found for found in (path, *path.rglob("*")) if found.is_file())


def _stamp(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]
