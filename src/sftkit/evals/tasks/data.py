"""Rows of evaluation tasks, from a local folder or the hub; and the shots drawn from them."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftkit.config.schema import SourceConfig
from sftkit.data.reading.conversation import Message
from sftkit.data.reading.readers import SUFFIXES, parsed, rows_of, suffix_of
from sftkit.errors import ConfigError, DataError, hint
from sftkit.runtime.script import first_of


@dataclass(frozen=True)
class DatasetSplit:
    """One split of one data set: the names of its files in a folder, and its place on the hub."""

    files: tuple[str, ...]
    "names without suffix, best first: gsm8k_test is found as gsm8k_test.jsonl.gz, gsm8k_test.parquet, ..."
    hub: str
    subset: str | None = None
    split: str = "test"


class CheckedRow(dict[str, Any]):
    """A row that raises a DataError with its place if a column is missing or has another type."""

    def __init__(self, values: dict[str, Any], origin: str, index: int) -> None:
        super().__init__(values)
        self.origin = origin
        "file, or hub id with subset and split"
        self.index = index
        "from 0 in its split"

    @property
    def where(self) -> str:
        """Return where the row is, for messages."""
        return f"{self.origin}: row {self.index}"

    def __missing__(self, column: str) -> Any:
        raise DataError(f'{self.where}: no column "{column}"; it has {", ".join(map(str, self))}')

    def text(self, column: str) -> str:
        """Return the text in a column."""
        if not isinstance(value := self[column], str):
            raise DataError(f'{self.where}: column "{column}": {value!r} is not a text')
        return value

    def texts(self, column: str) -> list[str]:
        """Return the list of texts in a column, at least one."""
        value = self[column]
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise DataError(f'{self.where}: column "{column}": {value!r} is not a list of texts')
        return value

    def number(self, column: str, below: int) -> int:
        """Return the whole number in a column, 0 <= number < `below`; "2" and false count as numbers, as data sets
        write them."""
        value = self[column]
        number = int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else -1
        if not 0 <= number < below:
            raise DataError(f'{self.where}: column "{column}": {value!r} is not a number from 0 to {below - 1}')
        return number


Read = Callable[[DatasetSplit], list[CheckedRow]]
"The argument of a task's `build` that reads all rows of a split, at least one."


def read_split(split: DatasetSplit, folder: str | None) -> list[CheckedRow]:
    """Return all rows of a split, at least one, from files of `folder`, or from the hub if it is None."""
    if folder is None:
        values = _from_hub(split)
        origin = _hub_name(split)
    else:
        files = _files(split, Path(folder))
        values = [parsed(raw) for file in files for raw in rows_of(file)]
        origin = first_of(files, 1)
    if not values or not all(isinstance(value, dict) for value in values):
        raise DataError(f"{origin}: it has no rows, or one that has no columns")
    return [CheckedRow(value, origin, index) for index, value in enumerate(values)]


def _files(split: DatasetSplit, folder: Path) -> list[Path]:
    """Return the file of the best name that is there, or all parts of it: NAME-00000-of-00002.parquet, ..."""
    if not folder.is_dir():
        raise DataError(f"eval.data {folder}: no such folder (looked in {Path.cwd()})")
    present = sorted(path for path in folder.iterdir() if path.is_file() and suffix_of(path) is not None)
    for name in split.files:
        # The exact name, a sample named by its number of rows, or the parts that the hub's own files come in.
        stems = [(path, path.name.partition(".")[0]) for path in present]
        parts = [path for path, stem in stems if re.fullmatch(rf"{name}-\d+-of-\d+", stem)]
        files = [path for path, stem in stems if stem == name]
        files = files or [path for path, stem in stems if re.fullmatch(rf"{name}_\d+", stem)]
        if len(files) > 1 or (parts and files):
            raise DataError(f"{folder}: which one is it? {_listed([*files, *parts])}: leave one there")
        if files or parts:
            return files or parts
    looked_for = " or ".join(f"{name}{{{','.join(SUFFIXES)}}}" for name in split.files)
    words = {"files": looked_for, "there": _listed(present), "hub": _hub_name(split)}
    raise DataError(hint("no rows of a task", folder=folder, split=split, **words))


def _listed(paths: list[Path]) -> str:
    return first_of([path.name for path in paths], 30) or "nothing"


def _from_hub(split: DatasetSplit) -> list[Any]:
    from sftkit.data.reading.origin import find_source

    source = SourceConfig(path=split.hub, subset=split.subset, split=split.split)
    try:
        raw_rows = list(find_source(source).part())
    except (ConfigError, DataError) as error:
        reason, _, _ = str(error).partition(". On a connected machine")  # what follows is about sources of training
        words = {"rows": _hub_name(split), "files": " or ".join(split.files)}
        raise type(error)(hint("no rows on the hub", reason=reason, **words)) from error
    return [parsed(raw) for raw in raw_rows]


def _hub_name(split: DatasetSplit) -> str:
    return f"{split.hub} ({f'subset {split.subset}, ' if split.subset else ''}split {split.split}) of the hub"


# ---- shots, and settings of a task -----------------------------------------------------------------------------------

SHOTS_SEED = 1234
"lm-evaluation-harness's fewshot_random_seed."
DRAWN = {"completion": "random, seed 1234, anew for each example", "chat": "the first ones"}
"How shots are drawn; in a chat the same for all examples, so that the turns before them are computed once."


def settings_of(
    rows: Sequence[CheckedRow],
    format: str,
    max_examples: int | None,
    shots: int = 0,
    pool: Sequence[CheckedRow] = (),
    drawn: str = "",
) -> dict[str, Any]:
    """Return what it takes to ask the same questions again; `drawn`: how the shots are taken from the pool."""
    selection = "all rows" if max_examples is None else f"the first {max_examples}"
    about = {"format": format, "shots": shots, "data": rows[0].origin, "rows": len(rows), "selection": selection}
    return about | ({"shots_from": pool[0].origin, "shots_drawn": drawn} if shots else {})


def shot_rows(name: str, split: DatasetSplit, read: Read, shots: int, spare: int = 0) -> list[CheckedRow]:
    """Return the rows that shots are taken from, none if there are no shots; a ConfigError if they are too few."""
    pool = read(split) if shots else []
    if shots and (usable := len(pool) - spare) < shots:
        raise ConfigError(f"eval.shots: {shots}: {pool[0].origin} has rows for {usable} shots of {name} only")
    return pool


def drawn_shots(
    pool: Sequence[CheckedRow], rows: Sequence[CheckedRow], shots: int, format: str, *, one_more: bool = False
) -> Iterator[Sequence[CheckedRow]]:
    """Yield the shots of each row: in a chat the first ones, else drawn by one random generator, exactly as
    lm-evaluation-harness draws them."""
    # One generator for the whole task: the shots of an example depend on how many were drawn before it.
    rng = random.Random(SHOTS_SEED)
    for row in rows:
        if not shots or format == "chat":
            yield pool[:shots]
        elif not one_more:
            yield rng.sample(pool, shots)
        else:
            # Both draws as lm-evaluation-harness makes them, so that the generator stays in the same state.
            drawn = [shot for shot in rng.sample(pool, shots + 1) if shot != row][:shots]
            yield drawn if len(drawn) == shots else rng.sample([shot for shot in pool if shot != row], shots)


def conversation(shots: Sequence[tuple[str, str]], question: str) -> tuple[Message, ...]:
    """Return a user's question after turns of (question, answer)."""
    texts = [text for shot in shots for text in shot] + [question]
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))
