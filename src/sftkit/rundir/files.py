"""Write files that are whole or absent, and verify later that they are still the same. No torch.

A file is written under another name, flushed and renamed. A torn JSON object or line counts as absent, and a resumed
run drops the lines that it will write again. A checkpoint is verified by its manifest, a cache by a record next to it,
and a run by a record of its inputs.

The hashes of a checkpoint's files are kept in the cache directory with the facts of the file system about each file,
so a file is read for its hash once. A resume trusts none of them.

The record of a run's inputs has only files of this machine; those of a hub are named by the recipe. Data, tokenizer
and template, which a start compares with its checkpoint, are kept apart from the weights, which a resumed run does not
load.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from sftkit.config.schema import Config, DataConfig, ModelConfig
from sftkit.errors import ConfigError, hint
from sftkit.rundir import names

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, NotADirectoryError)
"""Errors of reading a text that is no JSON, or JSON of another form; RecursionError if it is nested thousands deep."""


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that readers see the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    # Flushed before the rename, and the directory after it: else a power failure could leave the new name on
    # an empty file.
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def replace_shared(path: Path, content: str | bytes) -> None:
    """Write a file that several processes may write at a time: each writes under a name of its own, then renames."""
    temporary = own_name(path)
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(temporary)  # else a power failure could leave an empty file where a whole one was
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_all_or_nothing(path: Path, text: str) -> None:
    """Append all of a text to a file or, where the disk has no room for it, nothing.

    Raises:
        OSError: nothing was appended.
    """
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        left = text.encode()
        try:
            while left:  # a disk that fills takes a part, and fails at the next try
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def read_text(path: Path) -> str:
    """Return the text of a file; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; empty where there is none that can be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, *UNREADABLE):
        return {}
    return value if isinstance(value, dict) else {}


def clean(value: Any) -> Any:
    """Return the value as strict JSON: NaN and infinities, which JSON does not have, become null."""
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def own_name(path: Path) -> Path:
    """Return a path next to `path` that no other process uses. A file created there has the mode that the umask gives;
    files of tempfile are closed to all other users, and stay so when they are renamed."""
    return path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")


def archive(folder: Path) -> Path:
    """Rename a folder to the first free NAME.old-1, NAME.old-2, ..., and return that path. Nothing is overwritten."""
    # The caller holds the lock of the directory, so no other process takes a number in between.
    number = 1
    while (aside := folder.with_name(f"{folder.name}{names.ARCHIVED}{number}")).exists():
        number += 1
    os.rename(folder, aside)
    flush(aside.parent)  # before the name is given away: else a power failure could leave the new folder alone
    return aside


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, so that a power failure does not take them with what is
    written in them."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def flush_folder(folder: Path) -> None:
    """Wait until a folder, with all files and folders in it, is on the disk; its own name is in the folder above."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MetricsLine = dict[str, Any]
"A line of metrics.jsonl: names of metrics and their values."


def drop_rows_after(path: Path, step: int) -> None:
    """Drop the rows after a step, which a run that resumes from a checkpoint of that step will write again."""
    if not path.exists():
        return
    text = "".join(line + "\n" for line, row in _rows(path) if float(row["step"]) <= step)
    if text.encode() != path.read_bytes():  # a full disk would have no room for the same again
        replace_text(path, text)


def drop_evals_after(folder: Path, step: int) -> None:
    """Drop the details of evaluations after a step, as their rows are; evals/final too if its model is dropped."""
    for path in folder.glob("*"):
        # The folder `final` has no step in its name; its results name the checkpoint that they are of.
        final = read_results(path / names.RESULTS) if path.name == Path(names.FINAL).name else []
        models = [str(result.get("settings", {}).get("model")) for result in final[:1]] or [path.name]
        found = names.step_of(models[0].rpartition("/")[2])
        if found is not None and found > step:
            shutil.rmtree(path, ignore_errors=True)


def has_row(path: Path, step: int) -> bool:
    """Return whether a file of rows has one of this step."""
    return path.exists() and any(float(row["step"]) == step for _, row in _rows(path))


def _rows(path: Path) -> Iterator[tuple[str, MetricsLine]]:
    """Yield the lines of a file of rows and their rows, without those that a kill, a power failure or a full disk has
    cut short. A line separator inside a text, which `splitlines` would split at, ends none."""
    for line in path.read_text(errors="replace").split("\n"):  # a line cut inside a character is no JSON either
        with suppress(*UNREADABLE):
            row = json.loads(line)
            if math.isfinite(float(row["step"])):
                yield line, row


def read_metric_rows(path: Path) -> list[MetricsLine]:
    """Return the whole rows of a file; none if it cannot be read."""
    with suppress(OSError):
        return [row for _, row in _rows(path)]
    return []


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return what an evaluation wrote of its tasks; nothing where it had none."""
    with suppress(OSError, *UNREADABLE):
        return json.loads(path.read_text())
    return []


HASHES = "hashes"
"Folder in the cache directory with a file of hashes for each folder that was verified."
BASE = "base"
"Key of a manifest: the digest of the weights that the adapter in the step directory belongs to."
SETTLED_SECONDS = 2.0
"""Age from which the hash of a file is kept: a later change within one tick of the file system's clock would not be
seen."""

Stamp = tuple[int, ...]
"""Facts of the file system about a file: device, inode, size, times of its content and of its entry in ns."""


class Entry(NamedTuple):
    """A file as a manifest describes it."""

    size: int
    sha256: str


def sha256_of(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of each file, in hex, in the given order."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path) -> str | None:
    """Return what is wrong with a step directory; None: every file is there with the size and hash of the manifest.

    Raises:
        OSError: a file that is there cannot be read, so nothing is known of it.
    """
    files = read_manifest(folder)
    if isinstance(files, str):
        return files
    if names.TRAINING_STATE not in files:
        return f"{folder}: {names.MANIFEST} lists no {names.TRAINING_STATE}"
    return _damage(folder, files, sha256_of)


def check_loadable(path: str) -> None:
    """Reject a step directory whose files are not those that its run wrote, before anything in it is loaded. A hub
    name and a folder of another origin are not looked at. Of several processes that ask at a time one reads the files;
    the others wait.

    Optimizer and random states are left out: only a resume loads them, and that verifies all.

    Raises:
        ConfigError: the file, what was expected and found, and what to do.
    """
    folder = Path(path)
    own = (folder / names.RECIPE).is_file() or (folder / names.STATE).is_dir()
    if not (own and (folder / names.MANIFEST).is_file()):
        return
    try:
        problem = _problem_of_loaded(folder)
    except OSError as error:
        problem = f"{folder} cannot be read: {error}"
    if problem is not None:
        others = [step for step in names.step_dirs(folder.parent) if step.name != folder.name]
        other = f"take another checkpoint, such as {others[-1]}, or " if others else ""
        what_to_do = hint("damaged checkpoint", other=other, manifest=folder / names.MANIFEST)
        raise ConfigError(f"{problem}. {what_to_do}")


def _problem_of_loaded(folder: Path) -> str | None:
    files = read_manifest(folder)
    if isinstance(files, str):
        return files
    # The folder may be deleted: the model loads without it.
    state = {names.TRAINING_STATE} if (folder / names.STATE).is_dir() else set()
    files = {name: entry for name, entry in files.items() if not name.startswith(f"{names.STATE}/") or name in state}
    return _damage(folder, files, partial(_hashes, folder))


def read_manifest(folder: Path) -> dict[str, Entry] | str:
    """Return name -> entry of every file that a manifest lists, or a text that says what is wrong with it."""
    try:
        files = json.loads((folder / names.MANIFEST).read_text())["files"]
        return {str(name): Entry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (FileNotFoundError, *UNREADABLE) as error:
        return f"{folder}: no readable {names.MANIFEST} ({type(error).__name__})"


def read_base_digest(folder: Path) -> str | None:
    """Return the digest of the weights under the adapter in a step directory (BASE); None: it says nothing of them."""
    found = read_object(folder / names.MANIFEST).get(BASE)
    return str(found["sha256"]) if isinstance(found, dict) and found.get("sha256") else None


def digest_of_files(folder: Path, paths: Sequence[Path]) -> str:
    """Return a sha256 that stands for the bytes of some files of a folder, in hex. Files that were read before and have
    not changed since are not read again."""
    lines = [f"{path.name} {value}" for path, value in zip(paths, _hashes(folder, paths), strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest(folder: Path) -> str | None:
    """Return the sha256 of a step directory's manifest, which identifies the bytes of all its files;
    None without one."""
    return hash_of(folder / names.MANIFEST)


def hash_of(path: Path) -> str | None:
    """Return the sha256 of a file, in hex; None: it cannot be read."""
    with suppress(OSError):
        return _sha256(path)
    return None


def _damage(folder: Path, files: Mapping[str, Entry], hashes: Callable[[Sequence[Path]], list[str]]) -> str | None:
    """Return what is wrong with the files of a folder, whose content is read last; None: nothing."""
    for name, entry in files.items():
        if problem := _misplaced(folder, name):
            return problem
        path = folder / name
        if not path.is_file():
            return f"{path}: missing, and {names.MANIFEST} lists it"
        if (size := path.stat().st_size) != entry.size:
            return f"{path}: not {entry.size} bytes, as {names.MANIFEST} says, but {size}"
    paths = [folder / name for name in files]
    for path, entry, found in zip(paths, files.values(), hashes(paths), strict=True):
        if found != entry.sha256:
            return f"{path}: content does not match its sha256: {found}, and {names.MANIFEST} says {entry.sha256}"
    return None


def _misplaced(folder: Path, name: str) -> str | None:
    """Return why a name in a manifest leads out of its folder; None: it does not. The manifest decides what is read."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        return f"{folder}/{names.MANIFEST}: {name!r} leads out of the folder"
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            return f"{path}: a symbolic link, which a checkpoint never has"
    return None


# ---- hashes that were computed before --------------------------------------------------------------------------------


def kept_sha256_of(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of files, which are kept for the next time."""
    found: dict[Path, str] = {}
    for folder in dict.fromkeys(path.parent for path in paths):
        own = [path for path in paths if path.parent == folder]
        found.update(zip(own, _hashes(folder, own), strict=True))
    return [found[path] for path in paths]


def _hashes(folder: Path, paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of files of a folder, from the cache where a file has not changed since. Those of damaged
    files are kept too."""
    place = folder.resolve()
    kept = Path(DataConfig.cache_dir) / HASHES / f"{hashlib.sha256(str(place).encode()).hexdigest()[:32]}.json"
    with alone(kept.with_suffix(".json.lock")):
        known = _read(kept)
        stamps = {path: _stamp(path) for path in paths}
        unknown = [path for path in paths if stamps[path] not in known]
        began = time.time()
        known.update(zip((stamps[path] for path in unknown), sha256_of(unknown), strict=True))
        if unknown:
            # A file that did not change while it was read, and is old enough for a change to show in its times.
            settled = (began - SETTLED_SECONDS) * 1e9
            unchanged = [one for path, one in stamps.items() if _stamp(path) == one and max(one[-2:]) < settled]
            with suppress(OSError):  # a full disk costs time at the next start
                lines = [[*stamp, known[stamp]] for stamp in unchanged]
                replace_shared(kept, json.dumps({"folder": str(place), "files": lines}))
    return [known[stamps[path]] for path in paths]


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(kept: Path) -> dict[Stamp, str]:
    try:
        return {tuple(map(int, stamp)): str(value) for *stamp, value in json.loads(kept.read_text())["files"]}
    except (OSError, *UNREADABLE):
        return {}


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Keep other processes of this machine out, as far as the file system can lock."""
    with ExitStack() as opened:
        with suppress(OSError):  # a cache that cannot be written: each process reads the files itself
            lock.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(opened.enter_context(lock.open("ab")), fcntl.LOCK_EX)
        yield


# ---- hashes of the files of a cache ----------------------------------------------------------------------------------


def write_hashes(record: Path, paths: Sequence[Path]) -> None:
    """Write the sha256 of files, which are complete and have their final names, with the stamp of each."""
    for path in paths:
        flush(path)  # before its stamp: a power failure must not leave the stamp of a content that is lost
    stamps = [write_stamp(path) for path in paths]
    _write_record(record, paths, sha256_of(paths), stamps)


def compare_hashes(record: Path, paths: Sequence[Path]) -> None:
    """Compare files with their hashes; a file whose stamp is that of an earlier comparison is not read.

    Raises:
        ValueError, LookupError, TypeError, OSError: one has another content than was written, or is not there.
    """
    known = json.loads(record.read_text())
    stamps = [write_stamp(path) for path in paths]
    changed = [path for path, stamp in zip(paths, stamps, strict=True) if known[path.name]["stamp"] != stamp]
    if not changed:
        return
    for path, found in zip(changed, sha256_of(changed), strict=True):
        if found != (expected := known[path.name]["sha256"]):
            raise ValueError(f"{path.name} is not what was written: sha256 {found}, not {expected}")
    with suppress(OSError):  # a cache that only others may write: each start compares
        for path in changed:
            flush(path)
        _write_record(record, paths, [known[path.name]["sha256"] for path in paths], stamps)


def _write_record(record: Path, paths: Sequence[Path], hashes: Sequence[str], stamps: Sequence[list[int]]) -> None:
    found = zip(paths, hashes, stamps, strict=True)
    content = {path.name: {"sha256": value, "stamp": stamp} for path, value, stamp in found}
    replace_shared(record, json.dumps(content, indent=1))


def write_stamp(path: Path) -> list[int]:
    """Return size and times of a file. The time of its entry changes with every write and cannot be set. Device and
    inode are left out: they are others after a mount."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


WEIGHTS = ("*.safetensors", "*.bin")
"Files of a model folder that transformers reads weights from."
_TEXTS = ("*.json", "*.jinja", "*.model", "*.txt")
"Files of a model or tokenizer folder that describe it."

Stamps = dict[str, list[int] | str | None]
"File -> size in bytes and time of the content in ns of a large one, sha256 of a small one; None: cannot be read."


class Provenance(NamedTuple):
    """Files that a run was made from."""

    inputs: Stamps
    "data, tokenizer, template and the files that describe the model"
    weights: Stamps
    "that it began with"


def current_provenance(model: ModelConfig, data: DataConfig) -> Provenance:
    """Return size and time, or hash, of the files that a recipe names, as they are now."""
    training = model.train_tokenizer
    parent = _folder(model.path)
    sources = (*data.train, *data.val, *((training and training.sources) or ()))
    # Data may be large, so size and time identify it; small files below have a hash, which a copy keeps.
    inputs: Stamps = {str(path): content_stamp(path) for source in sources for path in _files(Path(source.path))}
    for key, folder in (("model.path", parent), ("model.tokenizer", _folder(model.tokenizer))):
        # Without the folder's name: a later step of a run may have the same files.
        texts = (path for path in _matching(folder, _TEXTS) if path.name != names.MANIFEST)
        inputs |= {f"{key}: {path.name}": hash_of(path) for path in texts}
    if model.chat_template is not None and Path(model.chat_template).is_file():
        inputs["model.chat_template"] = hash_of(Path(model.chat_template))
    return Provenance(inputs, {str(path): content_stamp(path) for path in _matching(parent, WEIGHTS)})


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
    replace_text(folder / names.MADE_FROM, json.dumps(began._asdict(), indent=1))
    return weights_changed(cfg.model, began, now)


def read_provenance(run_dir: Path) -> Provenance | None:
    """Return what the run of a directory was made from; None: it has not written it down."""
    found = read_object(run_dir / names.MADE_FROM)
    return Provenance(**found) if set(found) == set(Provenance._fields) else None


def weights_changed(model: ModelConfig, began: Provenance, now: Provenance) -> str | None:
    """Return a warning that names weights that are no longer those that a run began with; None: all are the same."""
    there = began.weights
    here = now.weights
    changed = sorted(path for path in there.keys() | here.keys() if there.get(path) != here.get(path))
    if not changed:
        return None
    others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return hint("changed weights", path=model.path, changed=changed[0], others=others)


def _folder(path: str | None) -> Path | None:
    """Return the folder of a model or tokenizer, of a run that of its newest checkpoint; None: a hub's, or none."""
    if path is None or not Path(path).is_dir():
        return None
    folder = Path(path)
    return folder if (folder / "config.json").is_file() else names.latest_checkpoint(folder) or folder


def _matching(folder: Path | None, patterns: Iterable[str]) -> list[Path]:
    return [] if folder is None else sorted(path for pattern in patterns for path in folder.glob(pattern))


def _files(path: Path) -> list[Path]:
    return sorted(found for found in (path, *path.rglob("*")) if found.is_file())


def content_stamp(path: Path) -> list[int] | None:
    """Return size of a file and time of its content in ns; None: it cannot be read."""
    with suppress(OSError):
        found = path.stat()
        return [found.st_size, found.st_mtime_ns]
    return None
