"""Check that a recipe's inputs exist: data with columns that its stage learns from, the model, the run before. No
torch.

Launcher, chain and scripts read a recipe with these rules, so that whatever is missing stands in one report with
whatever is wrong in the recipe. They look at first records and file names; what shows only when it is loaded is found
by the run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from sftkit.config.chat_templates import CHAT_TEMPLATES
from sftkit.config.paths import similar_paths
from sftkit.config.rule import Get, Problem, Rule, Unusable
from sftkit.config.rules import STEP_PATH
from sftkit.config.schema import SourceConfig
from sftkit.config.stages import STAGE_SCRIPTS
from sftkit.data.reading import conversation, hub, readers, rows
from sftkit.data.reading.bad_rows import BadRows, until_broken
from sftkit.data.reading.origin import find_here
from sftkit.data.types import Row
from sftkit.errors import ConfigError, DataError
from sftkit.models.files import check_model_files, check_unquantized, json_object
from sftkit.preflight import evaluated
from sftkit.rundir.manifest import read_manifest
from sftkit.rundir.names import latest_checkpoint, resolve, trained_length, unresolved_reason
from sftkit.rundir.provenance import WEIGHTS
from sftkit.runtime.hub import find_model

FIRST_ROWS = 100
"Rows at the beginning of a source that are looked at."
SMALL_BYTES = 2 * 2**20
"Of files that are read to the end where no first row is found."


def _readable(row: Row) -> list[conversation.Message] | None:
    """Return the messages of a conversation, of whatever they may be; None: a text."""
    return None if row.messages is None else conversation.validated(row, ())


def _learnable(row: Row) -> None:
    if (messages := _readable(row)) is not None:
        conversation.require_answer(messages, row.where)


def _conversation(row: Row) -> None:
    rows.require_conversation(row)
    _learnable(row)


REQUIRED: dict[str | None, Callable[[Row], object]] = {
    "base": rows.require_text,
    "mid": _learnable,
    "sft": _conversation,
    "caption": rows.require_source_and_texts,
    None: _readable,
}
"Stage -> what refuses a row that it cannot learn from."


def input_rules(stage: str | None, made: Collection[str] | None = ()) -> list[Rule]:
    """Return rules for all that a run of a stage starts from.

    Args:
        stage: None: of a script that is none of ours, which may learn from any row.
        made: run directories that there will be by then, of earlier stages of a chain; None: which they are is not
            known.
    """
    first = [] if made is None else [partial(_model, made=made), partial(_max_length, made=made)]
    last = _resume, _eval_data, partial(evaluated.best, stage=stage)
    return [*first, partial(_tokenizer, stage=stage), _chat_template, *data_rules(stage), *last]


def data_rules(stage: str | None) -> list[Rule]:
    """Return rules for the sources that a stage reads."""
    learned = [partial(_sources, part=part, require=REQUIRED[stage]) for part in ("data.train", "data.val")]
    return [*learned, partial(_sources, part="model.train_tokenizer.sources", require=None)]


def _as_problem(key: str, check: Callable[..., str | None], *args: Any) -> Iterator[Problem]:
    """Yield what a check returns, or raises, as the problem of a key."""
    try:
        problem = check(*args)
    except (ConfigError, DataError) as error:
        problem = str(error).removeprefix("data source ")
    except OSError as error:
        problem = f"{error.filename}: cannot be read: {error.strerror}"
    if problem:
        yield key, problem


# ---- data ------------------------------------------------------------------------------------------------------------


def _sources(get: Get, part: str, require: Callable[[Row], object] | None) -> Iterator[Problem]:
    """Yield the problems of the sources in one part of the data settings.

    Args:
        part: the key of their list.
        require: refuses a row that is not learned from; None: of any row the text is read.
    """
    skips = get("data.on_bad_row") == "skip"
    # One by one, as another source of the list may be one that cannot be read.
    for i in itertools.count():
        try:
            values = get(f"{part}.{i}")
        except Unusable as gone:
            # The whole list cannot be read; else only this source, which has its own problem, is skipped.
            if f"{part}.".startswith(f"{gone}."):
                return
            continue
        if values is None:
            return
        yield from _as_problem(f"{part}.{i}.path", partial(_check_source, skips=skips), SourceConfig(**values), require)


def _check_source(source: SourceConfig, require: Callable[[Row], object] | None, *, skips: bool) -> None:
    """Find a source and look at its first rows. Rows that the run would skip are refused where they are all that there
    is, or where the columns of all of the first are wrong in the same way.

    Raises:
        DataError: the source has no rows, or none that can be learned from.
    """
    origin = find_here(source)
    if origin is None:
        hub.check_dataset(source)
        return
    first, bad, seen = None, BadRows(), 0
    for raw in until_broken(itertools.islice(origin.beginning(), source.max_rows), bad):
        seen += 1
        try:
            row = rows.parse(raw)
            if require is not None:
                require(row)
        except DataError as error:
            first = first or error
            bad.add(raw[0], error)
        # Where a bad row ends the run others are looked for, unless none can be used for their columns.
        if (seen == FIRST_ROWS and (skips or not bad or _alike(bad, seen))) or (not skips and bad.enough(raw[0])):
            break
    # Of small files, whose beginning has no row, the whole part that is asked for is read.
    small = origin.num_bytes is not None and origin.num_bytes <= SMALL_BYTES
    if not seen and small and next(origin.rows(), None) is None:
        raise readers.no_rows(source)
    if first is None:
        return
    if not skips and not _alike(bad, seen):
        # Rows before the first bad one could be used, so leaving bad rows out is an option.
        raise bad.error(advice=bad.rows < seen and not rows.WRONG_COLUMNS & {*bad.reasons})
    # All have the same wrong columns, or the source has fewer rows than were asked for and all are bad.
    if not skips or bad.rows == seen < FIRST_ROWS:
        raise first
    if _alike(bad, seen):
        raise DataError(f"{first}. All of the first {seen} rows are like this, so on_bad_row=skip does not skip them")


def _alike(bad: BadRows, seen: int) -> bool:
    """Return whether all rows that were looked at have the same wrong columns."""
    return bad.rows == seen and len(bad.reasons) == 1 and bad.reasons[0] in rows.WRONG_COLUMNS


# ---- models ----------------------------------------------------------------------------------------------------------


def _model(get: Get, made: Collection[str]) -> Iterator[Problem]:
    path = get("model.path")
    if path is not None and not _is_made(path, made):
        yield from _as_problem("model.path", _check_model, path, get("model.revision"))


def _check_model(path: str, revision: str | None) -> str | None:
    folder = Path(find_model(path, revision))
    if not folder.is_dir():
        if isinstance(cached := try_to_load_from_cache(path, "config.json", revision=revision or "main"), str):
            check_unquantized(json_object(Path(cached)), f"{path}: config.json")
        return None
    if not any(origin for pattern in WEIGHTS for origin in folder.glob(pattern)):
        return f"{folder}: there are no weights in it ({', '.join(WEIGHTS)}): copy or download the model again"
    check_model_files(folder)
    return None


def _max_length(get: Get, made: Collection[str]) -> Iterator[Problem]:
    path = get("model.path")
    if get("data.max_length") is not None or (path is None and get("model.scratch") is None):
        return
    if path is None or not _is_made(path, made):
        yield from _as_problem("data.max_length", _check_length, path)


def _check_length(path: str | None) -> str | None:
    try:
        length = None if path is None else trained_length(Path(resolve(path)))
    except (ConfigError, ValueError):  # that the model is not there, or damaged, is told without this
        return None
    return unresolved_reason(path) if length is None else None


def _is_made(path: str, made: Collection[str]) -> bool:
    return any(Path(path).absolute() == Path(run_dir).absolute() for run_dir in made)


def _tokenizer(get: Get, stage: str | None) -> Iterator[Problem]:
    path = get("model.tokenizer")
    if path is not None:
        yield from _as_problem("model.tokenizer", _check_tokenizer, path)
    elif stage in ("mid", "sft") and get("model.train_tokenizer") is not None and get("model.scratch") is not None:
        yield (
            "model.train_tokenizer",
            f"{STAGE_SCRIPTS[stage]} trains no tokenizer: set model.tokenizer, or make model and tokenizer with "
            "base_train.py and set model.path to its run",
        )


def _check_tokenizer(path: str) -> None:
    if not (Path(path) / "tokenizer_config.json").is_file():
        find_model(path)


def _chat_template(get: Get) -> Iterator[Problem]:
    path = get("model.chat_template")
    if path is None or path in CHAT_TEMPLATES or not re.search(r"[./\\]", path):  # a name that is none has its own rule
        return
    yield from _as_problem("model.chat_template", _missing, path, "file", Path.is_file)


# ---- runs and evaluation ---------------------------------------------------------------------------------------------


def _resume(get: Get) -> Iterator[Problem]:
    path = get("train.resume")
    if path not in (None, "auto") and STEP_PATH.search(path):  # other words have a rule of their own
        yield from _as_problem("train.resume", _check_checkpoint, path)


def _check_checkpoint(path: str) -> str | None:
    folder = Path(path)
    if not folder.is_dir():
        return _missing(path, "folder", Path.is_dir)
    problem = read_manifest(folder)
    if not isinstance(problem, str):
        return None
    if (newest := latest_checkpoint(folder)) is not None:
        return f"{path}: a run, whose newest checkpoint is {newest}: name that"
    return f"{problem}, so nothing can be resumed from it{similar_paths(path)}"


def _eval_data(get: Get) -> Iterator[Problem]:
    path = get("eval.data")
    if path is not None and set(get("eval.tasks")) - {"families"}:
        yield from _as_problem("eval.data", _missing, path, "folder", Path.is_dir)


def _missing(path: str, kind: str, there: Callable[[Path], bool]) -> str | None:
    return None if there(Path(path)) else f"{path}: no such {kind} (looked in {Path.cwd()}){similar_paths(path)}"
