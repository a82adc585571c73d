"""Find where the rows of a source are: a builtin, local files, files at a URL, or a dataset of the Hugging Face hub. No
torch.

Names decide which of a folder's files hold the requested split. A downloaded hub dataset with configurations in its
README.md is read by datasets, as on the hub. Slices of a split are written as in datasets: train[:1000], train[10%:],
and so are joined splits: train+test. Without network the hub's cache is used, or the error is quick and clear.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar

from sftkit.config.commands import WILDCARD, similar_paths
from sftkit.config.schema import DataConfig, SourceConfig, where_columns
from sftkit.data.reading import columns, readers
from sftkit.errors import ConfigError, DataError, config_error, did_you_mean, hint
from sftkit.rundir.files import kept_sha256_of, sha256_of
from sftkit.runtime.hub import commit_of, hub_answers, not_found, unavailable_reason, unreachable
from sftkit.runtime.script import counted, first_of

T = TypeVar("T")
AnyPath = TypeVar("AnyPath", bound=PurePath)
FARTHEST = 10_000
"The most rows before a slice that are skipped to look at its beginning."


def base_split(spec: str) -> str:
    """Return a split without its slice: train of train[:1000]."""
    return spec.split("[", 1)[0].strip()


def slice_of(source: SourceConfig, rows: Callable[[], Iterator[object]]) -> tuple[int, int | None]:
    """Return (the first row, one past the last or None) that a slice such as train[:1000], train[10%:] or train[-100:]
    means."""
    start, stop = _bounds(source)
    total = sum(1 for _ in rows()) if _is_relative(start) or _is_relative(stop) else 0
    return _index(start, total) if start else 0, _index(stop, total) if stop else None


def sliced_beginning(rows: Callable[[], Iterator[T]], source: SourceConfig) -> Iterator[T]:
    """Return the rows of a slice from its first one on, perhaps with some after it; none if finding the first takes
    long."""
    start, stop = _bounds(source)
    start = "0" if start is None or start == "0%" else start
    if _is_relative(start) or int(start) > FARTHEST:
        return iter(())
    return islice(rows(), int(start), None if stop is None or _is_relative(stop) else int(stop))


def _bounds(source: SourceConfig) -> tuple[str | None, str | None]:
    """Return the bounds of a slice: the texts before and after its colon."""
    spec = source.split.strip()
    if spec == base_split(spec):
        return None, None
    match = re.fullmatch(r"[^\[\]]+\[(-?\d+%?)?:(-?\d+%?)?\]", spec)
    if match is None:
        raise ConfigError(f"data source {source.path}: split {spec!r}; expected train, train[:1000] or train[10%:90%]")
    for bound in match.groups():
        if bound and bound.endswith("%") and abs(int(bound[:-1])) > 100:
            raise ConfigError(f"data source {source.path}: {bound} in split {source.split!r} is more than 100%")
    return match[1], match[2]


def _is_relative(bound: str | None) -> bool:
    """Return whether a bound of a slice depends on how many rows there are."""
    return bound is not None and (bound.startswith("-") or bound.endswith("%"))


def _index(bound: str, total: int) -> int:
    """Return a bound of a slice as a row number."""
    rows = round(int(bound[:-1]) * total / 100) if bound.endswith("%") else int(bound)
    return max(0, rows + total) if bound.startswith("-") else rows


ABOUT = {
    *("readme.txt", "license.txt", "licence.txt", "notice.txt", "dataset_info.json", "dataset_infos.json"),
    *("dataset_dict.json", "config.json", "state.json"),
}
"Whole names of files that are about the data, not data."
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"Word that begins a name -> its split: the words of datasets."
LIBRARIES = {
    r"shard\.\d+\.mds": ("shards of MosaicML's streaming (MDS)", "streaming", "local='DIR', batch_size=1"),
    r"chunk-\d+-\d+\.(.+\.)?bin$": ("chunks of litdata", "litdata", "'DIR'"),
}
"Names of files that only a library of their own reads -> what they are, its module, what its dataset takes."
NAMES_SHOWN = 5
"Names of files in a message."
REHASHED_BYTES = 2**26
"The most bytes of a source whose files are read for their sha256 at each start."


def files_of(source: SourceConfig, root: AnyPath, present: Sequence[AnyPath]) -> tuple[list[AnyPath], str]:
    """Return the files that hold the requested split, and in words which splits a folder has and what is left out.

    Names give the splits (`split_of`), and `subset` keeps the files with that name in their path. A file that
    `source.files` names without a wildcard is of the requested split.

    Args:
        root: the folder that the names are relative to.
        present: all of its files, or those that match `source.files`.

    Raises:
        ConfigError, DataError: there are none, or some cannot be read.
    """
    split = base_split(source.split)
    for pattern, (what, module, arguments) in LIBRARIES.items():
        if any(re.match(pattern, path.name) for path in present):
            raise config_error("files of a library", path=source.path, what=what, module=module, arguments=arguments)
    relative = {path: path.relative_to(root) for path in present}
    named = {root / name for name in source.files or () if not WILDCARD.search(name)}
    folders = {path.parent for path in present}
    saved: dict[PurePath, set[str] | None] = {one: _saved_files(one) for one in folders if isinstance(one, Path)}
    files = [
        path
        for path in present
        if _is_data(source, path, relative[path], named=path in named)
        and ((names := saved.get(path.parent)) is None or path.name in names)
    ]
    if source.subset is not None:
        starts = (f"{source.subset}-", f"{source.subset}.")
        files = [
            path for path in files if any(p == source.subset or p.startswith(starts) for p in relative[path].parts)
        ]
    if not files:
        of = f' with subset "{source.subset}"' if source.subset else ""
        advice = ""
        if {path.suffix.lower() for path in present} & {*readers.PICTURE_SUFFIXES}:
            advice = "; pictures need rows that name them, such as a captions.jsonl next to them: docs/captioning.md"
        raise DataError(f"{root}: no file{of} of the kinds {_kinds(source)} in this folder{advice}")
    # The folders of a DatasetDict have the exact names of its splits.
    is_dict = root / "dataset_dict.json" in relative
    wanted = split if is_dict else SPLITS.get(split, split)
    splits = {path: relative[path].parts[0] if is_dict else split_of(relative[path]) for path in files}
    splits |= dict.fromkeys(named & splits.keys(), wanted)
    chosen = [path for path in files if splits[path] == wanted] or [
        path
        for path in files
        # A split of another name is that of a folder, or of a file without its suffixes.
        if split not in SPLITS and split in (*relative[path].parts[:-1], path.name.partition(".")[0])
    ]
    if not chosen:
        problem = f'data source {source.path}: no split "{split}" among {", ".join(sorted(set(splits.values())))}'
        raise ConfigError(problem)
    left_out = [path for path in present if path not in splits and not _is_silent(path, relative[path])]
    said = [_splits_text(splits, chosen, root), *_doubts(chosen, root)]
    if left_out:
        # Files that could be data come first: a README is expected there.
        left_out.sort(key=lambda path: (path.name.lower() in ABOUT or path.suffix.lower() in ("", ".md"), path))
        said.append(f"left out: {_names(left_out, root)}")
    return chosen, "; ".join(said)


def _check_alone(source: SourceConfig, path: PurePath) -> None:
    """Reject a source of one file if it holds no rows, or neither the split train nor the requested one by its name."""
    split = base_split(source.split)
    if only := "files are" if source.files else "subset is" if source.subset is not None else "":
        raise ConfigError(f"data source {source.path}: {only} of a folder or dataset, and this is a file: leave it out")
    if source.tokenizer_of is not None and not _is_of_kind(source, path):
        problem = f"tokenizer_of is for files of tokens ({_kinds(source)}): leave it out, model.tokenizer reads rows"
        raise ConfigError(f"data source {source.path}: {problem}")
    if not _is_of_kind(source, path):
        raise config_error("no file of this kind", path=source.path, kinds=_kinds(source))
    if split not in ("train", split_of(PurePath(path.name))):
        problem = f'data source {source.path}: no split "{split}" in a single file; use train or a slice of it'
        raise ConfigError(problem)


def _saved_files(folder: Path) -> set[str] | None:
    """Return the names of the files of a dataset that `save_to_disk` wrote into a folder, whose other files are
    leftovers; None: it wrote nothing there.

    Raises:
        DataError: some of them are not there, or the dataset is an old one with rows in another order.
    """
    try:
        state = readers.loads((folder / "state.json").read_bytes())
        assert isinstance(state, dict)
        names = {one["filename"] for one in state["_data_files"]}
    except (OSError, ValueError, LookupError, TypeError, AssertionError):
        return None
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise DataError(f"{folder}: state.json names {first_of(missing)}, not there. Was all of the dataset copied?")
    if state.get("_indices_data_files"):
        raise DataError(f"{folder}: a selection of rows of another file: write it again, with a recent save_to_disk")
    return names


def split_of(relative: PurePath) -> str:
    """Return the split that a path names; train if it names none."""
    return _named_split(relative) or "train"


def _named_split(relative: PurePath) -> str | None:
    """Return the split that the innermost part of a path names.

    A part names a split if it begins with one of its words (train.jsonl, test/, dev-2.csv), never by a word inside it.
    Shards are named as datasets names them, by the whole split (train_sft-00000-of-00002), or by their dataset and
    split (c4-train.00000-of-01024).
    """
    for part in reversed(relative.parts):
        name = part.lower()
        if shard := _SHARD.match(name):
            stem = shard["split"]
            found = SPLITS.get(stem)
            if found is None and re.fullmatch(r"\w+", stem):
                found = stem if stem.split("_")[0] in SPLITS else None
            elif found is None:
                found = SPLITS.get(stem.rpartition("-")[2])
            if found:
                return found
        if (array := _ARRAY.fullmatch(name)) and array[1] in SPLITS:
            return SPLITS[array[1]]
        word = _WORD.match(name)
        if word and word[0] in SPLITS:
            return SPLITS[word[0]]
    return None


_SHARD = re.compile(r"(?P<split>.+?)[-.](?P<index>\d{5})-of-(?P<total>\d{5})")
_WORD = re.compile(r"[a-z]+")
_ARRAY = re.compile(r".*[-_]([a-z]+)(?:[-_]?\d+)?\.(?:arrow|bin|npy|ds)")  # gsm8k-test.arrow, fineweb_val_000000.bin


def _walk(root: Path) -> Iterator[Path]:
    """Yield all files below a folder, and links to folders, which are not followed.

    Raises:
        DataError: a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=fail):
        yield from (Path(folder, name) for name in names)
        yield from (path for path in (Path(folder, name) for name in folders) if path.is_symlink())


def _matching(source: SourceConfig, root: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files below a folder that match patterns, in the order of their names.

    Raises:
        ConfigError: nothing matches one of the patterns.
    """
    found: set[Path] = set()
    for pattern in patterns:
        inside = not pattern.startswith("/") and ".." not in pattern.split("/")
        exact = pattern if WILDCARD.search(pattern) else glob.escape(pattern)
        matches = glob.glob(exact, root_dir=root, recursive=True) if inside else []
        if not matches:
            raise ConfigError(f"data source {source.path}: nothing in {root.resolve()} matches {pattern}")
        found |= {root / name for name in matches}
    return sorted(found)


def _is_of_kind(source: SourceConfig, path: PurePath) -> bool:
    """Return whether the name of a file is one of files with rows, or with tokens if the source has these."""
    if source.tokenizer_of is None:
        return readers.suffix_of(path) is not None
    return path.suffix.lower() in readers.TOKEN_SUFFIXES


def _kinds(source: SourceConfig) -> str:
    return readers.KINDS_OF_FILES if source.tokenizer_of is None else ", ".join(readers.TOKEN_SUFFIXES)


def _is_data(source: SourceConfig, path: PurePath, relative: PurePath, *, named: bool) -> bool:
    """Return whether a file of a folder holds data: of a known kind, not hidden, not about the data, or named by the
    recipe.

    Raises:
        DataError: it is a link to a file that is not there.
    """
    hidden = any(part.startswith((".", "_")) for part in relative.parts)
    if not _is_of_kind(source, path) or ((hidden or path.name.lower() in ABOUT) and not named):
        return False
    if isinstance(path, Path) and path.is_symlink() and not path.exists():
        raise DataError(f"{path}: a link to {os.readlink(path)}, which is not there. Was all of the dataset copied?")
    return not isinstance(path, Path) or path.is_file()


def _is_silent(path: PurePath, relative: PurePath) -> bool:
    """Return whether a file that is left out needs no word: a picture, which rows name, or a hidden one of no data."""
    hidden = any(part.startswith(".") for part in relative.parts)
    return path.suffix.lower() in readers.PICTURE_SUFFIXES or (hidden and readers.suffix_of(path) is None)


# ---- in words --------------------------------------------------------------------------------------------------------


def _names(paths: Iterable[PurePath], root: PurePath) -> str:
    return first_of([path.relative_to(root) for path in paths], NAMES_SHOWN)


def _splits_text(splits: Mapping[AnyPath, str], chosen: list[AnyPath], root: PurePath) -> str:
    """Return how many files each split has, the chosen ones first, and the names of the others."""
    own = set(chosen)  # once: folders have thousands of files
    others = {path: split for path, split in splits.items() if path not in own}
    name = splits[chosen[0]]
    words = [f"{name}: {counted(len(chosen), 'file')}"]
    for split in sorted({*others.values()}):
        paths = [path for path, found in others.items() if found == split]
        words.append(f"{split}: {len(paths)} ({_names(paths, root)})")
    return ", ".join(words)


def _doubts(chosen: Sequence[PurePath], root: PurePath) -> Iterator[str]:
    """Yield what may be wrong with the files of a split, which only their owner knows."""
    relative = [path.relative_to(root) for path in chosen]
    # Next to files named train, one of another name may be there by mistake: it would be trained on.
    unnamed = [path for path in relative if _named_split(path) is None]
    if unnamed and any(_named_split(path) == "train" for path in relative):
        yield f"read as train, although its name has no split: {first_of(unnamed, NAMES_SHOWN)}"
    shards: dict[tuple[PurePath, str, str], set[str]] = {}
    for path in relative:
        if shard := _SHARD.match(path.name):
            shards.setdefault((path.parent, shard["split"], shard["total"]), set()).add(shard["index"])
    for (_, name, total), found in shards.items():
        if len(found) < int(total):
            yield f"{len(found)} of the {int(total)} shards of {name} are there"


# ---- identity --------------------------------------------------------------------------------------------------------


def content_identity(files: Sequence[Path]) -> list[list[object]]:
    """Return what identifies the content of files, wherever they are: kind, size and sha256 of each. Those of large
    files are kept, so that a file that has not changed is read for it once.

    Raises:
        DataError: one cannot be read.
    """
    try:
        sizes = [file.stat().st_size for file in files]
        digests = sha256_of(files) if sum(sizes) <= REHASHED_BYTES else kept_sha256_of(files)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return [[readers.suffix_of(file), size, digest] for file, size, digest in zip(files, sizes, digests, strict=True)]


def has_configurations(root: Path) -> bool:
    """Return whether a folder is a downloaded hub dataset whose README.md has configurations, which say in ways of
    datasets' own which files are of which split."""
    readme = root / "README.md"
    front = readme.read_bytes().decode("utf-8-sig", "replace").split("\n---")[0] if readme.is_file() else ""
    return front.startswith("---") and re.search(r"^configs:", front, re.MULTILINE) is not None


def _by_configuration(source: SourceConfig, folder: Path) -> Origin:
    """Find a source in a downloaded hub dataset with configurations; `subset` names one.

    Raises:
        ConfigError: there is no such configuration or split.
    """
    import datasets

    try:
        known = datasets.load_dataset_builder(str(folder), source.subset).config.data_files or {}
    except Exception as error:  # anything that datasets may raise
        reason = " ".join(str(error).partition("Example of usage")[0].split())
        raise config_error("subset of no configuration", path=source.path, reason=reason) from error
    if (split := base_split(source.split)) not in known:
        raise ConfigError(f'data source {source.path}: no split "{split}" among {", ".join(sorted(known))}')
    return _of_datasets(source, cache(lambda: load_from_hub(source, str(folder))))


def _of_datasets(source: SourceConfig, load: Callable[[], Any]) -> Origin:
    """Return the origin of a datasets.Dataset, loaded when it is first asked for."""

    def raw_rows() -> Iterator[readers.RawRow]:
        types = dict(load().features or {})
        place = f"{source.path}[{source.split}]"
        return ((f"{place}:{i}", readers.without_fill(row, types)) for i, row in enumerate(load()))

    # Private, but shown in the documentation: what datasets itself names its caches by
    # (https://huggingface.co/docs/datasets/about_cache).
    said = f"commit {source.revision}" if source.revision else ""
    return Origin(raw_rows, lambda: load()._fingerprint, said=said)


# Any: datasets has no types.
def load_from_hub(source: SourceConfig, path: str | None = None) -> Any:
    """Load a datasets.Dataset; without network, the Path of a downloaded snapshot if only that is there.

    Args:
        path: of a downloaded copy; None: the source's own.
    """
    import datasets

    # A switch of the whole process, which stays: our own lines report what takes long.
    datasets.disable_progress_bars()
    connected = path is not None or hub_answers()
    try:
        with nullcontext() if connected else offline():
            revision = None if path else source.revision
            return datasets.load_dataset(path or source.path, source.subset, split=source.split, revision=revision)
    except Exception as error:  # anything that datasets, pyarrow or the hub client may raise
        if not connected:
            from huggingface_hub import constants

            if (folder := _cached_snapshot(source)) is None:
                place = f"it is not in the cache ({constants.HF_HOME}) and {unreachable()}"
                raise _missing(source, place) from None
            return folder
        reason = str(error).strip() or type(error).__name__
        words = {"path": source.path, "subset": source.subset or "none", "split": source.split, "reason": reason}
        raise config_error("no data source", meant=similar_paths(source.path), **words) from error


def check_dataset(source: SourceConfig) -> None:
    """Reject a source that is no local path if neither hub nor cache has a dataset of its name. Loads nothing.

    Raises:
        ConfigError: where it was looked for, and what to do.
    """
    if reason := unavailable_reason(source.path, "dataset", source.revision):
        raise _missing(source, reason)
    _joined(source, _in_snapshot)


def _in_snapshot(source: SourceConfig) -> Origin | None:
    """Find a source in a downloaded snapshot if the hub does not answer, and its revision, its files or a configuration
    are asked for: datasets would take those that its own cache has."""
    folder = None if hub_answers() else _cached_snapshot(source)
    if folder is None or not (source.revision or source.files or has_configurations(folder)):
        return None
    found = _local(source, folder)
    return replace(found, said="; ".join(filter(None, (f"commit {folder.name}", found.said))))


def _cached_snapshot(source: SourceConfig) -> Path | None:
    from huggingface_hub import snapshot_download

    where: Any = {"revision": source.revision, "repo_type": "dataset", "local_files_only": True}
    try:
        return Path(snapshot_download(source.path, **where))
    except Exception:  # anything that the client raises for a name that it does not know
        return None


def _missing(source: SourceConfig, reason: str) -> ConfigError:
    """Return the error for a dataset that is neither on the hub nor here, with what to do."""
    download = hint("dataset of the hub elsewhere", path=source.path)
    requested = f" (subset {source.subset or 'none'}, split {source.split})"
    return ConfigError(f"data source {source.path}{requested}: {not_found(source.path, 'dataset', reason, download)}")


@contextmanager
def offline() -> Iterator[None]:
    """Turn the hub client and datasets offline inside the block. They read the switch once, at import, into these
    two module variables."""
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


# Any: what each function of data/demo/builtin.py yields has a type of its own.
BUILTINS: dict[str, Callable[[Any], dict[str, object]]] = {
    "docs": lambda text: {"text": text},
    "tasks": lambda task: {"messages": task.messages},
    "pictures": dict,
}
"Builtin, a function of data/demo/builtin.py -> how one of its items becomes a row."
DEMO = Path(__file__).parents[1] / "demo"
STAND_IN = "a text"
"Stands for the first row of builtin:docs, which cannot be made without reading all of Python's library."


@dataclass(frozen=True)
class Origin:
    """A source that exists: how to read its rows, and what identifies its content."""

    rows: Callable[[], Iterator[readers.RawRow]]
    "all rows of its split"
    identity: Callable[[], object]
    "what identifies these rows, wherever they are; files are read for it"
    beginning: Callable[[], Iterator[readers.RawRow]] = lambda: iter(())
    "its first rows, as far as they are found without reading all; none: that is not known"
    num_bytes: int | None = None
    "of its files; None: it has none here"
    said: str = ""
    "of a folder: which files are of which split, and which are left out"
    slice: Callable[[Callable[[], Iterator[readers.RawRow]]], tuple[int, int | None]] = lambda _: (0, None)
    "takes `rows`; returns the first row of the slice that is asked for, and one past the last"
    max_rows: int | None = None
    files: Sequence[Path] = ()
    "here, with its rows or tokens"
    fetch: Callable[[], Sequence[Path]] = lambda: ()
    "copies files of tokens at a URL here, for as long as this process lives, and returns the copies"

    def span(self) -> tuple[int, int | None]:
        """Return the first row that is asked for, and one past the last; None: to the end."""
        first, past = self.slice(self.rows)
        most = None if self.max_rows is None else first + self.max_rows
        return first, past if most is None else most if past is None else min(past, most)

    def part(self) -> Iterator[readers.RawRow]:
        """Yield the rows that are asked for."""
        return islice(self.rows(), *self.span())


def find_source(source: SourceConfig, data: DataConfig | None = None) -> Origin:
    """Find a source and the rows of it that are asked for, or raise a ConfigError that lists the places where it
    was looked for. Reads no rows.

    Args:
        data: says where copies of files at URLs are kept, and how many; None: its defaults.
    """
    found = _joined(source, lambda part: find_here(part, data) or _with_settings(_on_hub(part, data), part))
    assert found is not None
    return replace(found, max_rows=source.max_rows)


def _with_settings(found: Origin, source: SourceConfig) -> Origin:
    """Return an origin with trees as conversations, whose rows come with the source if its settings say how rows are
    parsed.

    Raises:
        ConfigError: a name in `columns` that no row has a meaning for.
    """
    for name, theirs in (source.columns or {}).items():
        if columns.standard_name(name) not in columns.KNOWN:
            meant = did_you_mean(name, columns.KNOWN, ". ")
            if columns.standard_name(theirs) in columns.KNOWN:
                meant += f"{'' if meant else '.'} The accepted name comes first: {{{theirs}: {name}}}"
            problem = f"data source {source.path}: columns.{name} is no column that rows are read by{meant}"
            raise ConfigError(problem)

    def read(rows: Callable[[], Iterator[readers.RawRow]]) -> Iterator[readers.RawRow]:
        raw_rows = rows()
        if source.tree is not None:
            from sftkit.data.reading import rare

            raw_rows = rare.conversations(raw_rows, source.tree)
        if not (source.columns or source.roles or source.system or where_columns(source)):
            return raw_rows
        return ((raw[0], raw[1], source) for raw in raw_rows)

    return replace(found, rows=partial(read, found.rows), beginning=partial(read, found.beginning))


def _joined(source: SourceConfig, find: Callable[[SourceConfig], Origin | None]) -> Origin | None:
    """Find each of the splits that are joined by +, and return their rows one after the other; None: not found."""
    parts = [find(replace(source, split=split)) for split in source.split.split("+")]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len(found) == 1:
        return found[0] if len(parts) == 1 and found else None
    sizes = [part.num_bytes for part in found if part.num_bytes is not None]
    return Origin(
        lambda: chain.from_iterable(part.part() for part in found),
        lambda: [source.split, *(part.identity() for part in found)],
        found[0].beginning,
        sum(sizes) if len(sizes) == len(found) else None,
        "; ".join(dict.fromkeys(part.said for part in found if part.said)),
        files=[] if source.tokenizer_of else list(chain.from_iterable(part.files for part in found)),
    )


def _on_hub(source: SourceConfig, data: DataConfig | None) -> Origin:
    """Find a source on the hub at one commit, or in the cache of it."""
    if found := _in_snapshot(source):
        return found
    if hub_answers():
        source = replace(source, revision=commit_of(source.path, "dataset", source.revision) or source.revision)
        if source.files:
            found = _remote(replace(source, path=f"hf://datasets/{source.path}@{source.revision or 'main'}"), data)
            return replace(found, said=f"commit {source.revision}; {found.said}")
    elif source.revision or source.files:
        raise _missing(source, f"revision {source.revision or 'main'} is not in the cache, and {unreachable()}")
    dataset = load_from_hub(source)
    return _local(source, dataset) if isinstance(dataset, Path) else _of_datasets(source, lambda: dataset)


def find_here(source: SourceConfig, data: DataConfig | None = None) -> Origin | None:
    """Find a source without the hub; None if a hub dataset may be meant."""
    if "+" in source.split:
        return _joined(source, partial(find_here, data=data))
    path = Path(source.path)
    if source.tokenizer_of is not None:
        of_rows = {name: getattr(source, name) for name in ("columns", "roles", "system", "tree")}
        of_rows["where"] = where_columns(source)
        if wrong := [name for name, value in of_rows.items() if value]:
            raise ConfigError(f"data source {source.path}: {wrong[0]} is of rows, and with tokenizer_of it is tokens")
        made_by = str(source.tokenizer_of)
        if readers.looks_local(made_by) and not Path(made_by).exists():
            why = f"no such folder (looked in {Path.cwd()}){similar_paths(made_by)}"
            raise ConfigError(f"data source {source.path}: tokenizer_of: {made_by}: {why}")
        if not path.exists():  # Megatron names both of its files by what they have in common
            path = Path(f"{source.path}.bin")
    is_url = "://" in source.path
    known = source.path.startswith("builtin:") or is_url or path.exists() or WILDCARD.search(source.path)
    if known and source.revision is not None:
        raise ConfigError(f"data source {source.path}: revision is of datasets of the hub, which this is not")
    if source.path.startswith("builtin:"):
        return _with_settings(_builtin(source), source)
    if is_url:
        return _with_settings(_remote(source, data), source)
    if path.exists():
        return _with_settings(_local(source, path), source)
    if WILDCARD.search(source.path):
        return _with_settings(_of_files(source, *files_of(source, *_wildcard(source))), source)
    if readers.looks_local(source.path):
        meant = similar_paths(source.path)
        raise ConfigError(f"data source {source.path}: no such file or folder (looked in {Path.cwd()}){meant}")
    return None


def _wildcard(source: SourceConfig) -> tuple[Path, list[Path]]:
    """Return the folder before the first wildcard of a path, and the files that the path matches."""
    if source.files:
        raise ConfigError(f"data source {source.path}: wildcards are in path or in files, not in both")
    parts = Path(source.path).parts
    first = next(i for i, part in enumerate(parts) if WILDCARD.search(part))
    root = Path(*parts[:first])
    return root, _matching(source, root, ["/".join(parts[first:])])


def _builtin(source: SourceConfig) -> Origin:
    """Find a builtin source."""
    name = source.path.removeprefix("builtin:")
    split = base_split(source.split)
    if name not in BUILTINS:
        raise ConfigError(f"data source {source.path}: not one of {', '.join(f'builtin:{b}' for b in BUILTINS)}")
    if split not in ("train", "heldout"):
        raise ConfigError(f'data source {source.path}: split "{split}" is not one of train, heldout')
    as_row = BUILTINS[name]
    from sftkit.data.demo import builtin

    made = getattr(builtin, name)

    def raw_rows() -> Iterator[readers.RawRow]:
        return ((f"{source.path}[{split}]:{i}", as_row(item)) for i, item in enumerate(made(split)))

    beginning = (lambda: iter([(source.path, {"text": STAND_IN})])) if name == "docs" else raw_rows
    # The docs are Python's own library; the rest is made by these modules.
    made_by = b"".join(path.read_bytes() for path in sorted((*DEMO.glob("*.py"), *DEMO.glob("*.yaml"))))
    identity = [source.path, split, sys.version, hashlib.sha256(made_by).hexdigest()]
    return Origin(raw_rows, lambda: identity, beginning, slice=partial(slice_of, source))


def _local(source: SourceConfig, path: Path) -> Origin:
    """Find a source in a file or folder."""
    if path.is_file():
        _check_alone(source, path)
        return _of_files(source, [path])
    if source.files:
        return _of_files(source, *files_of(source, path, _matching(source, path, source.files)))
    if has_configurations(path):
        return _by_configuration(source, path)
    # Sorted, because the order of documents must not depend on the file system.
    return _of_files(source, *files_of(source, path, sorted(_walk(path))))


def _of_files(source: SourceConfig, files: Sequence[Path], said: str = "") -> Origin:
    """Return the origin of some files."""

    def raw_rows(*, beginning: bool = False) -> Iterator[readers.RawRow]:
        of_rows = files if source.tokenizer_of is None else ()
        return (row for file in of_rows for row in readers.rows_of(file, beginning=beginning))

    first = partial(sliced_beginning, partial(raw_rows, beginning=True), source)
    num_bytes = sum(file.stat().st_size for file in files) if source.tokenizer_of is None else None
    identity = partial(content_identity, files)
    return Origin(raw_rows, identity, first, num_bytes, said, partial(slice_of, source), files=files)


def _remote(source: SourceConfig, data: DataConfig | None) -> Origin:
    """Find a source in files at a URL. What the file system says of them identifies them, so nothing is fetched."""
    from sftkit.data.reading import remote

    root, listed = remote.list_files(source)
    files, said = [root], ""
    if root in listed:
        _check_alone(source, root)
    else:
        files, said = files_of(source, root, sorted(listed))
    chosen = [listed[path] for path in files]
    if source.tokenizer_of is not None:
        groups = [
            [*(listed[p] for p in map(PurePosixPath, remote.beside(str(f))) if p in listed), listed[f]] for f in files
        ]
        fetch = partial(remote.mapped_copies, groups, data)
        return Origin(lambda: iter(()), list, said=said, slice=partial(slice_of, source), fetch=fetch)

    def raw_rows() -> Iterator[readers.RawRow]:
        return (row for copy in remote.local_copies(chosen, data) for row in readers.rows_of(copy))

    how = partial(slice_of, source)
    return Origin(raw_rows, lambda: [one.identity for one in chosen], said=said, slice=how)
