"""Tokenized data on disk: flat .npy files, memory-mapped, with a hash of each; complete or not there at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.data.tokens.text import text_start
from sftkit.data.types import Examples, Finding
from sftkit.rundir.files import flush_folder, own_name
from sftkit.rundir.manifest import compare_hashes, write_hashes

FORMAT = 4
"Of the files of an entry."
MASK_VERSION = 1
"""Raised whenever the same rows lead to other tokens, targets, counts or findings: entries of another version are not
read. tests/data/test_mask_version.py fails until it is raised."""
HASHED = "hashes.json"
"Name -> sha256 of every other file of an entry, and the stamp that the file had when it was last compared."
WRITING = ".writing"
"In a folder that is not complete yet: locked by the process that writes there, whose host it names."
DEAD_SECONDS = 86_400.0
"Age from which a temporary file or folder counts as dead if nothing else shows it."
ARRAYS = {"ids": np.int32, "is_target": np.bool_, "offsets": np.int64, "num_bytes": np.int64, "source": np.int16}

log = logging.getLogger(__name__)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of what decides tokens: vocabulary and merges, special tokens, chat template."""
    parts = [
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        json.dumps(tokenizer.chat_template, sort_keys=True),
    ]
    if (start := text_start(tokenizer)) is not None:
        parts.append(f"texts begin with {start}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def data_key(description: Mapping[str, object]) -> str:
    """Return the sha256 of everything that the tokenized data depends on."""
    whole = {"format": FORMAT, "mask_version": MASK_VERSION, **description}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def load_cached_examples(folder: Path, *, report: bool = True) -> Examples | None:
    """Load the examples in `folder`; None if there are none, and with a warning if they are damaged. Files whose stamp
    is not known are compared with their hash, once.

    Args:
        report: whether to log the warning.
    """
    if not folder.exists():
        return None
    try:
        compare_hashes(folder / HASHED, _paths(folder))
        # Memory-mapped, so that ranks of a machine share the pages. Nothing pickled: a cache holds no code.
        meta = json.loads((folder / "meta.json").read_text())
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
        findings = {name: tuple(Finding(**one) for one in found) for name, found in meta["findings"].items()}
        names = tuple(meta["source_names"])
        examples = Examples(
            **arrays, source_names=names, counts=meta["counts"], findings=findings, encoder_sources=meta["given"]
        )
        _check(examples)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
        if report:
            log.warning("%s: damaged cache (%s), tokenizing again", folder, error)
        return None
    return examples


def save_cached_examples(folder: Path, examples: Examples) -> Examples:
    """Write under a temporary name, then rename. Returns the memory-mapped copy, or `examples` on a full disk.

    Several processes may do so at once: they write the same bytes, and the first one to rename wins.
    """
    temporary = own_name(folder)
    try:
        temporary.mkdir(parents=True)
        _sweep(folder.parent)
        with (temporary / WRITING).open("w") as mark:
            with suppress(OSError):  # a file system without locks: the age of the folder decides
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mark.write(f"{socket.gethostname()}\n")
            mark.flush()
            _write(temporary, examples)
            (temporary / WRITING).unlink()
            # Else a power failure could leave the name, and zeros for tokens in files of the right length.
            flush_folder(temporary)
            _replace(temporary, folder)
    except OSError as error:
        log.warning("%s: cannot write the cache (%s), every start will tokenize", folder, error)
        return examples
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return load_cached_examples(folder) or examples


def _write(folder: Path, examples: Examples) -> None:
    for name, dtype in ARRAYS.items():
        np.save(folder / f"{name}.npy", np.asarray(getattr(examples, name), dtype=dtype), allow_pickle=False)
    findings = {name: [asdict(one) for one in found] for name, found in examples.findings.items()}
    meta = {"source_names": examples.source_names, "counts": examples.counts, "findings": findings}
    meta["given"] = list(examples.encoder_sources)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    write_hashes(folder / HASHED, _paths(folder))


def _paths(folder: Path) -> list[Path]:
    return [*(folder / f"{name}.npy" for name in ARRAYS), folder / "meta.json"]


def _replace(temporary: Path, folder: Path) -> None:
    """Rename to the final name, unless another process was faster."""
    try:
        os.rename(temporary, folder)
    except OSError:
        # Not a race but an error of the disk.
        if not folder.exists():
            raise
        # Another process was faster, or the old one is damaged: keep the one that loads.
        if load_cached_examples(folder, report=False) is None:
            damaged = own_name(folder)
            os.rename(folder, damaged)
            os.rename(temporary, folder)
            shutil.rmtree(damaged, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove what killed processes left half-written."""
    for path in parent.glob(".*.tmp"):
        with suppress(OSError):  # another process sweeps, too, or it is another user's
            if not _is_dead(path):
                continue
            log.info("%s: left by a process that was killed, removed", path)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_dead(path: Path) -> bool:
    if (mark := path / WRITING).exists():
        with mark.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:
                pass  # a file system without locks
            else:
                # Not every file system shows the locks of other machines.
                if file.read().strip() == socket.gethostname():
                    return True
    newest = max(each.lstat().st_mtime for each in [path, *path.glob("*")])
    return time.time() - newest > DEAD_SECONDS


def _check(examples: Examples) -> None:
    """Raise ValueError if dtypes or lengths of the arrays do not fit together."""
    documents, tokens = len(examples), int(examples.offsets[-1])
    sizes = {"ids": tokens, "is_target": tokens, "offsets": documents + 1, "num_bytes": documents, "source": documents}
    for name, dtype in ARRAYS.items():
        array = getattr(examples, name)
        if array.dtype != dtype or array.shape != (sizes[name],):
            raise ValueError(f"{name} is {array.dtype}{array.shape}, {sizes[name]} expected")
