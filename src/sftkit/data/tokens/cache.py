"""Tokenized data on disk: flat .npy files, memory-mapped, complete or not there at all."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.data.types import Examples, Finding
from sftkit.rundir.files import own_name

FORMAT = 3
DECIDING = (
    *("types", "demo/builtin", "demo/documents", "demo/split", "demo/pictures"),
    *("reading/arrow", "reading/bad_rows", "reading/conversation", "reading/findings", "reading/hub", "reading/origin"),
    *("reading/readers", "reading/rows", "reading/sharegpt", "reading/slices"),
    *("tokens/answer_matcher", "tokens/answers", "tokens/chat", "tokens/encode", "tokens/learned", "tokens/reasoning"),
    *("tokens/context", "tokens/rendering"),
    *("tokens/sources", "tokens/spans", "tokens/stages", "tokens/template", "tokens/text"),
)
"Modules whose change makes tokenized data, or what is told of its rows, stale."
ARRAYS = {"ids": np.int32, "is_target": np.bool_, "offsets": np.int64, "num_bytes": np.int64, "source": np.int16}

log = logging.getLogger(__name__)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of what decides tokens: vocabulary and merges, special tokens, chat template."""
    parts = [
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        json.dumps(tokenizer.chat_template, sort_keys=True),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def data_key(description: Mapping[str, object]) -> str:
    """Return the sha256 of everything that the tokenized data depends on, the code that decides tokens included."""
    # Of the source itself, comments included: it is cheaper to tokenize once more than to learn from stale tokens.
    code = hashlib.sha256(b"".join((Path(__file__).parents[1] / f"{name}.py").read_bytes() for name in DECIDING))
    whole = {"format": FORMAT, "code": code.hexdigest(), **description}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def load_cached_examples(folder: Path) -> Examples | None:
    """Load the examples in `folder`; None if there are none, and with a warning if they are damaged."""
    if not folder.exists():
        return None
    try:
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
        _write(temporary, examples)
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


def _replace(temporary: Path, folder: Path) -> None:
    """Rename to the final name, unless another process was faster."""
    try:
        os.rename(temporary, folder)
    except OSError:
        # Not a race but an error of the disk.
        if not folder.exists():
            raise
        # Another process was faster, or the old one is damaged: keep the one that loads.
        if load_cached_examples(folder) is None:
            damaged = own_name(folder)
            os.rename(folder, damaged)
            os.rename(temporary, folder)
            shutil.rmtree(damaged, ignore_errors=True)


def _check(examples: Examples) -> None:
    """Raise ValueError if dtypes or lengths of the arrays do not fit together."""
    documents, tokens = len(examples), int(examples.offsets[-1])
    sizes = {"ids": tokens, "is_target": tokens, "offsets": documents + 1, "num_bytes": documents, "source": documents}
    for name, dtype in ARRAYS.items():
        array = getattr(examples, name)
        if array.dtype != dtype or array.shape != (sizes[name],):
            raise ValueError(f"{name} is {array.dtype}{array.shape}, {sizes[name]} expected")
