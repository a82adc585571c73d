"""Find the checkpoint that a start resumes from before anything depends on it, and check what may differ between the
two runs.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.data.batches.order import Cursor
from sftkit.data.batches.pack import Layout, PlanSegment, SourcePlan
from sftkit.data.tokens.sources import tokenizer_fingerprint
from sftkit.data.types import Examples
from sftkit.errors import CheckpointError, ConfigError, config_error, hint
from sftkit.models.trained import adapters_of
from sftkit.models.vocabulary import padding_rows
from sftkit.rundir.files import UNREADABLE, verify
from sftkit.rundir.names import RECIPE, TRAINING_STATE, step_dirs
from sftkit.runtime.start import Runtime

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumeCheckpoint:
    """The checkpoint that train.resume refers to."""

    setting: str | None
    folder: Path | None = None
    "step directory in which every file verifies; None: a new start"
    state: dict[str, Any] = field(default_factory=lambda: {"step": 0})
    "state given to `save`, and the step"
    segments: Sequence[PlanSegment] = ()
    "segments of its steps in order: how their global batches were made"
    cursors: Sequence[Cursor] = ()
    "from where the order of documents is planned on"
    skipped_checkpoints: Sequence[str] = ()
    "why newer checkpoints were skipped"


NO_CHECKPOINT = ResumeCheckpoint(None)


def find_checkpoint(run_dir: Path, setting: str | None, rt: Runtime) -> ResumeCheckpoint:
    """Return the checkpoint that `setting` refers to, the same on all ranks; every rank calls it.

    Args:
        setting: null starts a new run; "auto" chooses the newest directory whose manifest verifies;
            otherwise a directory.

    Raises:
        ConfigError: the named checkpoint does not verify, or none of the existing ones does.
        CheckpointError: the disk cannot be read.
    """
    return rt.from_main(lambda: _find(run_dir, setting))


def _find(run_dir: Path, setting: str | None) -> ResumeCheckpoint:
    try:
        skipped: list[str] = []
        folder = None if setting is None else _named(setting) if setting != "auto" else _newest(run_dir, skipped)
        if folder is None:
            return ResumeCheckpoint(setting)
        return ResumeCheckpoint(setting, folder, *_read_state(folder), skipped)
    # An unreadable disk is not an empty one: a new start would archive the run that is there.
    except OSError as error:
        place = run_dir if setting == "auto" else setting
        raise CheckpointError(hint("unreadable checkpoints", setting=setting, place=place, error=error)) from None


def _problem(folder: Path) -> str | None:
    """Return the reason why a step directory cannot be resumed; None if its files verify and its state can be read."""
    if (problem := verify(folder)) is not None:
        return problem
    try:
        _read_state(folder)
    except (*UNREADABLE, yaml.YAMLError) as error:  # matching hashes show that nothing was damaged, not who wrote it
        return f"{folder / TRAINING_STATE}: not the state of a run ({type(error).__name__}: {str(error)[:100]})"
    return None


def _read_state(folder: Path) -> tuple[dict[str, Any], Sequence[PlanSegment], Sequence[Cursor]]:
    """Return the state of a checkpoint, the segments of the steps before it, and the cursors of their order."""
    state = json.loads((folder / TRAINING_STATE).read_text())
    if not isinstance(state["step"], int):
        raise TypeError("step is not a whole number")
    # The key is the name of segments in files. A segment that began at this step has made no batch yet, so this start
    # makes its own.
    kept = [PlanSegment(**segment) for segment in state.get("stretches", ())]
    kept = [one._replace(sources=tuple(SourcePlan(*source) for source in one.sources)) for one in kept]
    every = state.get("order", ())
    cursors = [Cursor(first, epoch, rows, tuple(n), tuple(tokens)) for first, epoch, rows, n, tokens in every]
    return state, [segment for segment in kept if segment.after_step < state["step"]], cursors


def _named(setting: str) -> Path:
    if problem := _problem(Path(setting)):
        raise ConfigError(f"train.resume={setting}: {problem}")
    return Path(setting)


def _newest(run_dir: Path, skipped: list[str]) -> Path | None:
    for folder in reversed(step_dirs(run_dir)):
        problem = _problem(folder)
        if problem is None:
            return folder
        log.warning("checkpoint skipped: %s", problem)
        # Recorded even if an older one verifies: the run explains why it does not resume from its newest checkpoint.
        skipped.append(f"checkpoint skipped: {problem}")
    # Checkpoints exist but none verifies: a person must decide what to give up.
    if skipped:
        lines = "\n  ".join(skipped)
        raise config_error("no whole checkpoint", run_dir=run_dir, lines=lines)
    return None


NOT_THE_MODEL = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")
"Fields of a transformers config that differ between places and versions, or that the run sets itself."
_ROWS = ("kind", "row_lengths", "max_length", "docs_per_row", "pad_multiple")
_SAMPLE = 2**14
"Documents of a source whose tokens are compared."
_MIDDLE = 256
"Number of values compared of each encoder input, from its middle."


def run_identity(
    orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Examples, layout: Layout
) -> dict[str, Any]:
    """Return the identity that optimizer states and data position belong to, at any number of ranks: model,
    tokenizer, template, data, rows.
    """
    # Includes the defaults, which the short form omits: they are part of the model and change between versions.
    model = json.loads(orig_model.config.to_json_string(use_diff=False))
    if padding_rows(orig_model):  # optimizer states have those rows too
        model["padding_rows"] = padding_rows(orig_model)
    adapters = adapters_of(orig_model)
    return {
        **({} if adapters is None else {"adapter": adapters.identity()}),
        "model": {key: value for key, value in model.items() if key not in NOT_THE_MODEL},
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": _digest(str(tokenizer.chat_template).encode()),
        "sources": _sources(examples),
        "data": _encoder_sources(examples),
        "rows": {name: getattr(layout, name) for name in _ROWS},
    }


def _encoder_sources(examples: Examples) -> dict[str, str]:
    """Return digests of an encoder's inputs; empty without an encoder, as in checkpoints of versions without
    encoders. One digest covers the texts, or the pictures' file names without their folders, which may move; the
    other covers the middle of each input, because a file may be replaced under its name.
    """
    from sftkit.models.encoders import PIXELS

    pictures = examples.encoder_inputs is not None and PIXELS in examples.encoder_inputs.arrays
    names = [os.path.basename(name) for name in examples.encoder_sources] if pictures else examples.encoder_sources
    digests = {"given": _digest("\0".join(names).encode())} if names else {}
    if examples.encoder_inputs is not None:
        rows = [array.reshape(len(array), -1) for _, array in sorted(examples.encoder_inputs.arrays.items())]
        # The middle, because pictures and sounds begin and end alike, with borders and silence.
        starts = [max(0, (row.shape[1] - _MIDDLE) // 2) for row in rows]
        middles = [row[:, start : start + _MIDDLE] for row, start in zip(rows, starts, strict=True)]
        digests["encoded"] = _digest(*(np.ascontiguousarray(middle).tobytes() for middle in middles))
    return digests


def _sources(examples: Examples, sizes: Mapping[str, int] | None = None) -> dict[str, dict[str, Any]]:
    """Return for each source the number of its documents, and a digest of the lengths and targets of all, and of the
    tokens of up to _SAMPLE evenly spread ones. `sizes`: the number of documents of each source; None: all."""
    names = examples.source_names
    # Documents are numbered source after source.
    starts = np.searchsorted(examples.source, np.arange(len(names) + 1, dtype=examples.source.dtype)).tolist()
    lengths = examples.lengths
    targets = examples.num_targets
    found = {}
    for name, start, end in zip(names, starts, [*starts[1:-1], len(examples)], strict=False):
        if sizes is not None:
            end = min(end, start + sizes.get(name, 0))
        own = slice(start, end)
        chosen = (examples[i] for i in range(start, end, max(1, -(-(end - start) // _SAMPLE))))
        tokens = (array for one in chosen for array in (one.ids, one.is_target))
        arrays = (np.asarray(lengths[own], np.int64), np.asarray(targets[own], np.int64), *tokens)
        digest = _digest(*(np.ascontiguousarray(array).tobytes() for array in arrays))
        found[name] = {"documents": end - start, "digest": digest}
    return found


def source_differences(
    there: Mapping[str, dict[str, Any]], examples: Examples, *, trees: bool = False
) -> tuple[list[str], list[str]]:
    """Compare documents with those of a checkpoint, source by source.

    Args:
        there: what `run_identity` said of the sources then.
        trees: plans take trees of documents, so none that was planned may get another one.

    Returns:
        (lines about documents and sources that were added, lines about sources that are no continuation)
    """
    here = _sources(examples, {name: known["documents"] for name, known in there.items()})
    sizes = dict(zip(examples.source_names, np.bincount(examples.source, minlength=len(here)).tolist(), strict=True))
    starts = dict(zip(examples.source_names, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    grown = [f"source {name} is new" for name in here if name not in there]
    gone = []
    for name, known in there.items():
        count = known["documents"]
        why = "" if here.get(name) == known else "others are in their places"
        if name not in here:
            why = hint("no such source")
        elif sizes[name] < count:
            why = f"it has {sizes[name]:,}"
        elif sizes[name] > count:
            grown.append(f"source {name} has {sizes[name] - count:,} documents more than the checkpoint knows")
            added = starts[name] + count
            columns = examples.columns if trees else None
            # Texts, such as files that begin with the same licence, form no trees.
            if columns and columns.turns[added] and columns.head[added] == columns.head[added - 1]:
                gone.append(hint("source whose last tree goes on", name=name))
        if why:
            gone.append(hint("source that does not go on", name=name, documents=count, why=why))
    return grown, gone


def identity_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference of two identities, without those of sources, which may grow."""
    from sftkit.rundir.changes import difference_lines, key_differences

    sides = ({key: value for key, value in side.items() if key != "sources"} for side in (there, here))
    return difference_lines(key_differences(*sides))


def check_fit(
    resume: ResumeCheckpoint,
    recipe: str,
    allowed: Sequence[str],
    identity: Mapping[str, Any],
    *,
    examples: Examples | None = None,
    optimizer: str | None = None,
) -> list[str]:
    """Reject a checkpoint of another run, with all differences at once; return lines about changes that are allowed.

    Args:
        recipe: this run's, resolved. allowed: train.resume_changes; data.train allows more documents and sources.
        identity: this run's, of run_identity. examples: its documents; None: not compared again.
        optimizer: its kind of states; None: not known yet.

    Raises:
        ConfigError: a line for each difference that is not allowed.
    """
    if resume.folder is None:
        return []
    from sftkit.rundir.changes import compare_recipes, rejection  # most starts resume nothing

    settings, lines = compare_recipes((resume.folder / RECIPE).read_text(), recipe, allowed)
    there = resume.state.get("identity") or {}
    fixed: list[str] = []
    grown: list[str] = []
    if optimizer not in (None, resume.state["optimizer"]):
        fixed.append(hint("another optimizer", there=resume.state["optimizer"], here=optimizer))
    if there:
        fixed += identity_differences(there, identity)
    if "sources" in there and examples is not None:
        grown, gone = source_differences(there["sources"], examples, trees=identity["rows"]["kind"] == "tree")
        grown = [] if "data.train" in allowed else grown
        fixed += gone
    prefix = f"train.resume={resume.setting}: {resume.folder}"
    if error := rejection(prefix, settings, allowed, grown=grown, fixed=fixed):
        raise error
    return lines


def _digest(*parts: bytes) -> str:
    # 64 bits detect a mix-up; the digest is not a signature.
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
