"""Find the checkpoint that a start resumes from before anything depends on it, and check what may differ between the
two runs.
"""

import difflib
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.keys import key_table
from sftkit.config.yaml import RecipeLoader, flattened
from sftkit.data.batches.order import Cursor
from sftkit.data.batches.pack import Layout, PlanSegment, SourcePlan
from sftkit.data.tokens.sources import tokenizer_fingerprint
from sftkit.data.types import Examples
from sftkit.errors import CheckpointError, ConfigError, config_error
from sftkit.models.trained import adapters_of
from sftkit.models.vocabulary import padding_rows
from sftkit.rundir.files import UNREADABLE, verify
from sftkit.rundir.names import TRAINING_STATE, step_dirs
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
        raise CheckpointError(
            f"train.resume={setting}: {run_dir if setting == 'auto' else setting} cannot be read ({error}), so the "
            "checkpoints in it are unknown. Nothing was changed: start again when the disk can be read, or name "
            "another step directory"
        ) from None


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
        raise ConfigError(
            f"train.resume=auto: no checkpoint in {run_dir} verifies:\n  {lines}\nName a complete one "
            "(train.resume=PATH), or start a new run with train.resume=null: this one is then renamed, not overwritten"
        )
    return None


_NO_KEY = object()
"Placeholder for the value of a key that only one side has."
_FIXED = (
    *("train.global_batch_size", "run.seed", "loss.z_loss", "loss.label_smoothing", "loss.dft"),
    *("loss.router_aux_loss_coef", "model.path", "model.revision", "train.freeze", "train.neftune_alpha"),
    *("adapters", "adapter.base", "adapter.lr_ratio_b", "adapter.dropout"),
)
"Keys that a resumed run keeps, besides optim.*: with another value it would be another run."
OPTIM_FREE = ("optim.name", "optim.implementation", "optim.static_gradients")
"""Keys of optim that are not compared: the states show whether optim.name fits; the others only choose how it
is computed.
"""
LENGTH = ("train.max_steps", "train.epochs", "data.tokens")
_OF_ORDER = re.compile(r"(data\.train)\.\d+\.(?:weight|max_epochs|repeat|order)|(data\.stages|data\.shuffle)")
"Keys that decide which documents come next; group: the key that allows the change."
CHANGED = {
    **dict.fromkeys(
        ("data.train", "data.stages", "data.shuffle"),
        "documents that are planned and not taken come first, the others as the recipe now says",
    ),
    "train.global_batch_size": "the remaining documents of this epoch make batches of that size, and the learning "
    "rate follows the schedule for the new number of steps",
    "run.seed": "the remaining documents of this epoch come in another order",
    **dict.fromkeys(
        ("model.path", "model.revision"),
        "its weights are not loaded: the checkpoint's are, except the frozen ones under an adapter",
    ),
    "train.freeze": "newly trained weights start without optimizer states, those of frozen ones are dropped",
    **dict.fromkeys(LENGTH, "from here on the learning rate follows the schedule of that length"),
}
"Effects of changing a key, if they are not obvious."

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


def check_sources(resume: ResumeCheckpoint, examples: Examples, allowed: Sequence[str]) -> None:
    """Reject documents that are no continuation of those of the checkpoint, source by source. `allowed`:
    train.resume_changes; data.train allows more documents, and more sources.

    Raises:
        ConfigError: names the sources.
    """
    there = (resume.state.get("identity") or {}).get("sources")
    if there is None:
        return
    here = _sources(examples, {name: known["documents"] for name, known in there.items()})
    sizes = dict(zip(examples.source_names, np.bincount(examples.source, minlength=len(here)).tolist(), strict=True))
    more = [f"source {name} is new" for name in here if name not in there]
    for name, known in there.items():
        count = known["documents"]
        why = "" if here.get(name) == known else "others are in their places"
        if name not in here:
            why = "no source has that name: keep it, with weight 0 if nothing more is to be learned from it"
        elif sizes[name] < count:
            why = f"it has {sizes[name]:,}"
        if why:
            raise config_error("source that does not go on", name=name, documents=count, why=why)
        if sizes[name] > count:
            more.append(f"source {name} has {sizes[name] - count:,} documents more than the checkpoint knows")
    if more and "data.train" not in allowed:
        words = {"changes": "; ".join(more), "allowed": ",".join([*allowed, "data.train"])}
        raise config_error("sources that grew", step=resume.state["step"], **words)


def _digest(*parts: bytes) -> str:
    # 64 bits detect a mix-up; the digest is not a signature.
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _shortened(value: Any) -> str:
    """Format a value for a message, leaving out the middle of a long one."""
    if value is _NO_KEY:
        return "(none)"
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}"


def _differences(there: Any, here: Any) -> dict[str, tuple[Any, Any]]:
    """Map the dotted key of every leaf that differs to (value in the checkpoint, value in this run)."""
    old, new = dict(flattened(there)), dict(flattened(json.loads(json.dumps(here))))
    pairs = {key: (old.get(key, _NO_KEY), new.get(key, _NO_KEY)) for key in {**old, **new}}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def check_identity(there: Any, here: Any, prefix: str) -> None:
    """Reject a checkpoint of another model, tokenizer, template or rows. Sources are compared by check_sources, because
    they may grow.

    Raises:
        ConfigError: has a line for each key that differs.
    """
    sides = ({key: value for key, value in (side or {}).items() if key != "sources"} for side in (there, here))
    different = _differences(*sides)
    if there and different:
        raise ConfigError(
            f"{prefix}: the checkpoint belongs to another model, tokenizer or data:\n{_lines(different)}\nResume "
            "with the original ones, or start a new run from its weights with model.path"
        )


def check_recipe(there: str, here: str, allowed: Sequence[str], prefix: str) -> list[str]:
    """Compare the resolved recipes of the checkpoint and of this run.

    Args:
        there, here: resolved recipes as YAML. allowed: dotted keys that may differ although a resumed run normally
            keeps them (train.resume_changes).

    Returns:
        lines about the changes.

    Raises:
        ConfigError: a key that a resumed run keeps differs and is not allowed to; or `allowed` has a key that no
            recipe has.
    """
    for key in allowed:
        if key not in key_table():
            close = difflib.get_close_matches(key, key_table(), n=1)
            meant = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"train.resume_changes: {key} is not a key of a recipe.{meant}")
    old, new = (_settings(text) for text in (there, here))
    # A key that only one side has came or went with a version of sftkit: the recipe did not change.
    changed = {key: (old[key], new[key]) for key in old.keys() & new.keys() if old[key] != new[key]}
    optim = {key for key in changed if key.startswith("optim.") and key not in OPTIM_FREE}
    kept = {key: values for key, values in sorted(changed.items()) if key in optim or _is_kept(key)}
    refused = {key: values for key, values in kept.items() if _allowing(key) not in allowed}
    if refused:
        names = dict.fromkeys([*allowed, *map(_allowing, refused)])
        raise ConfigError(
            f"{prefix}: the recipe differs from that of the checkpoint:\n{_lines(refused)}\n"
            + "".join(f"  ({key}: {CHANGED[_allowing(key)]})\n" for key in refused if _allowing(key) in CHANGED)
            + f"Set them back, or allow the change with train.resume_changes=[{','.join(names)}]"
        )
    # The length may change without permission, but it is reported because the learning rate follows it.
    kept |= {key: changed[key] for key in LENGTH if key in changed}
    return [
        f"{key} is now {_shortened(b)} (was {_shortened(a)})"
        + (f": {CHANGED[by]}" if (by := _allowing(key)) in CHANGED else "")
        for key, (a, b) in kept.items()
    ]


def _is_kept(key: str) -> bool:
    return key in _FIXED or _OF_ORDER.fullmatch(key) is not None


def _allowing(key: str) -> str:
    """Return the key of train.resume_changes that allows another value of a key."""
    match = _OF_ORDER.fullmatch(key)
    return key if match is None else match[1] or match[2]


def _settings(text: str) -> dict[str, Any]:
    """Return dotted key -> value of a resolved recipe. The keys of optim.lr_scale are patterns, so it is one value."""
    recipe = yaml.load(text, Loader=RecipeLoader) or {}
    if scales := (recipe.get("optim") or {}).get("lr_scale"):
        recipe["optim"]["lr_scale"] = [[*pair] for pair in scales.items()]
    if (stages := (recipe.get("data") or {}).get("stages")) is not None:
        recipe["data"]["stages"] = json.dumps(stages)
    return dict(flattened(recipe))


def _lines(different: Mapping[str, tuple[Any, Any]]) -> str:
    return "\n".join(
        f"  {key}: {_shortened(a)} in the checkpoint, {_shortened(b)} in this run" for key, (a, b) in different.items()
    )
