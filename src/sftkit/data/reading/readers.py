"""Local files to raw rows: JSON lines, JSON, Parquet, CSV and text, also gzipped, alone or in folders."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import IO, cast

from sftkit.config.schema import SourceConfig
from sftkit.data.reading.arrow import without_fill
from sftkit.data.reading.slices import base_split
from sftkit.errors import ConfigError, DataError

RawRow = tuple[str, object]
"Where it is, and the row: an object, bytes of JSON that nobody has parsed yet (a broken line is one bad row), or the \
DataError that is to be raised for it."
LONGEST_RECORD = 32 * 2**20
"The most bytes of a line, or of a file that is one text: anything longer is no record, and could use up the memory."
LONGEST_JSON = 4 * 2**30
"The most bytes of a file that is one JSON list, which is read as a whole."

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
"Suffixes by which a folder of pictures alone is known."
IGNORED = ("readme", "license", "dataset_info", "dataset_infos", "config", "state", "sftkit")
"First part of the names of files that are about the data, not data."
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    "test": "test",
}


def suffix_of(path: Path) -> str | None:
    """Return the kind of a file: .jsonl for a.jsonl and a.jsonl.gz; None if it is not a known one."""
    name = path.name.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def looks_local(path: str) -> bool:
    """Return whether a path cannot be a hub id, so that a missing one is a misspelling."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or suffix_of(Path(path)) is not None


def files_of(source: SourceConfig, root: Path) -> list[Path]:
    """Return the files that hold the requested split.

    In a folder, file and folder names tell splits apart: train, validation (valid, val, dev) and test. Files that name
    no split belong to train. `subset` keeps the files with that name in their path, as in a downloaded hub dataset.
    """
    split = base_split(source.split)
    if root.is_file():
        if suffix_of(root) is None:
            raise ConfigError(f"data source {source.path}: not one of {', '.join(SUFFIXES)} (also .gz)")
        if split not in ("train", _split_of(Path(root.name))):
            raise ConfigError(
                f'data source {source.path}: no split "{split}" in a single file; use train or a slice of it'
            )
        return [root]
    # Sorted: the order of documents must not depend on the file system.
    files = [path for path in sorted(root.rglob("*")) if _is_data(path, root)]
    if source.subset is not None:
        files = [path for path in files if _has_part(path.relative_to(root), source.subset)]
    if not files:
        of = f' with subset "{source.subset}"' if source.subset else ""
        pictures = any(path.suffix.lower() in PICTURE_SUFFIXES for path in root.rglob("*"))
        hint = (
            "; pictures need rows that name them, such as a captions.jsonl beside them: docs/captioning.md" * pictures
        )
        raise DataError(f"{root}: no file{of} of the kinds {', '.join(SUFFIXES)} (also .gz) in this folder{hint}")
    splits = {path: _split_of(path.relative_to(root)) for path in files}
    chosen = [path for path in files if splits[path] == SPLIT_WORDS.get(split, split)]
    if not chosen:
        raise ConfigError(
            f'data source {source.path}: no split "{split}" among {", ".join(sorted(set(splits.values())))}'
        )
    return chosen


class DuplicateKey(ValueError):
    """JSON with an object that has a key twice: readers would silently take the last one."""


def loads(content: bytes | str) -> object:
    """Parse JSON. Raises ValueError, also for half of a surrogate pair, which JSON can write but no text can hold, and
    DuplicateKey for an object that has a key twice."""
    # Decoded as json.loads does it.
    text = content if isinstance(content, str) else content.decode(json.detect_encoding(content), "surrogatepass")
    text = text.rstrip("\r\n")  # a row has the end of its line, and an error there would be one of line 2
    value: object = _STRICT.decode(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parsed(raw: RawRow) -> object:
    """Parse a raw row.

    Raises:
        DataError: it is not JSON, or stands for a row that could not be read.
    """
    where, value = raw
    if isinstance(value, DataError):
        raise value
    return parse_json(value, where) if isinstance(value, bytes) else value


def parse_json(content: bytes | str, where: str) -> object:
    """Parse the JSON of a record or of one of its cells.

    Raises:
        DataError: it is not JSON.
    """
    try:
        return loads(content)
    except (ValueError, RecursionError) as error:
        raise json_error(where, error) from error


def json_error(where: str, error: Exception) -> DataError:
    """Return the DataError for what `loads` raised, or for nesting that is too deep for it."""
    if isinstance(error, DuplicateKey):
        return DataError(f"{where}: {error}. Keep the one that is meant", reason="duplicate JSON key")
    return DataError(f"{where}: not JSON: {error}", reason="not JSON")


def wrong_kind(what: str, value: object, expected: str, *, reason: str) -> DataError:
    """Return the DataError for a value of a record that is not of the expected kind."""
    names = {"NoneType": "null", "str": "text", "dict": "an object", "list": "a list", "bool": "a truth value"}
    other = "a number" if isinstance(value, int | float) else type(value).__name__
    return DataError(f"{what} is {names.get(type(value).__name__, other)}, expected {expected}", reason=reason)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; raises DuplicateKey if it has a key twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        key = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise DuplicateKey(f"an object has the key {json.dumps(key)} twice")
    return made


_STRICT = json.JSONDecoder(object_pairs_hook=_object)  # made once: json.loads would make one for every line


def no_rows(source: SourceConfig) -> DataError:
    """Return the DataError of a source that has no rows, or none in the requested part."""
    return DataError(f"data source {source.path} (split {source.split}): empty, it has no rows")


def rows_of(path: Path, *, beginning: bool = False) -> Iterator[RawRow]:
    """Yield all rows of one file. A file that breaks off or is not what its name says is a DataError.

    Args:
        beginning: of one large JSON value take only the rows that its first LONGEST_RECORD bytes hold.
    """
    kind = suffix_of(path)
    read = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet, ".csv": _csv, ".txt": _text}[kind or ".txt"]
    try:
        yield from _json_beginning(path) if beginning and kind == ".json" else read(path)
    except (OSError, EOFError, zlib.error, csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as {kind}: {error}") from error


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else open(path, "rb")


def _json_lines(path: Path) -> Iterator[RawRow]:
    """Yield the lines of a file as bytes; a line that is too long is one bad row."""
    with _open(path) as file:
        for number in count(1):
            line = file.readline(LONGEST_RECORD + 1)
            # The rest of such a line is passed over in parts, never held as a whole.
            if len(line) > LONGEST_RECORD:
                yield f"{path}:{number}", _too_long(f"{path}:{number}")
                while line and not line.endswith(b"\n"):
                    line = file.readline(2**20)
            elif line.strip():
                yield f"{path}:{number}", line
            if not line:
                return


def _too_long(where: str) -> DataError:
    return DataError(
        f"{where}: more than {LONGEST_RECORD // 2**20} MiB: cut it into several records",
        reason="record too long to read",
    )


def _json(path: Path) -> Iterator[RawRow]:
    """Yield the objects of a list, or of {"data": [...]}. Files of JSON lines often have this suffix too."""
    with _open(path) as file:
        content = file.read(LONGEST_JSON + 1)
    if len(content) > LONGEST_JSON:
        raise DataError(f"{path}: more than {LONGEST_JSON // 2**30} GiB in one JSON value: write JSON lines (.jsonl)")
    if not content.strip():
        return
    try:
        value = loads(content)
    except ValueError as error:
        # JSON lines under this suffix, or a list of which single rows are refused: both are taken row by row, so that a
        # bad row is one row. Anything else is an error of the file.
        start = content.lstrip()[:1]
        if start == b"{" and not _is_json(content):
            yield from _json_lines(path)
        elif start == b"[" and _is_json(content):
            yield from ((f"{path}[{i}]", row) for i, row in enumerate(_elements(content)))
        else:
            raise json_error(str(path), error) from error
        return
    if isinstance(value, dict):
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    if not isinstance(value, list):
        raise DataError(f"{path}: a {type(value).__name__} instead of a list of objects")
    yield from ((f"{path}[{i}]", row) for i, row in enumerate(value))


def _json_beginning(path: Path) -> Iterator[RawRow]:
    """Yield the first rows of a JSON file without reading all of a large one."""
    with _open(path) as file:
        head = file.read(LONGEST_RECORD + 1)
    if len(head) <= LONGEST_RECORD:
        yield from _json(path)
    # Cut behind the last object that may be whole; what is not ends the list.
    elif head.lstrip()[:1] == b"[" and json.detect_encoding(head) == "utf-8":
        yield from ((f"{path}[{i}]", row) for i, row in enumerate(_elements(head[: head.rfind(b"}") + 1])))


def _is_json(content: bytes) -> bool:
    """Return whether the content is JSON by the grammar alone, without what `loads` forbids beyond it."""
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def _elements(content: bytes) -> Iterator[bytes]:
    """Yield the elements of a JSON list as bytes, so that one which `loads` refuses is one bad row; of a list that
    breaks off, those that are complete."""
    # One element at a time, by the grammar alone: `loads` judges each of them later, as a row.
    text = content.decode(json.detect_encoding(content))
    after_gap, decoder, end = re.compile(r"[^\s,]"), json.JSONDecoder(), text.index("[") + 1
    while (first := after_gap.search(text, end)) and first[0] != "]":
        try:
            _, end = decoder.raw_decode(text, first.start())
        except ValueError:
            return
        yield text[first.start() : end].encode()


def _parquet(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
        rows = (without_fill(row) for batch in batches for row in batch.to_pylist())
        yield from ((f"{path}[{i}]", row) for i, row in enumerate(rows))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: cannot be read as .parquet: {error}") from error


def _csv(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a CSV file with a header line."""
    with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        # global in csv, whose own limit is 128 KiB a field
        csv.field_size_limit(LONGEST_RECORD)
        reader = csv.DictReader(iter(lambda: _csv_line(text), ""))
        for row in reader:
            yield f"{path}:{reader.line_num}", {key: value for key, value in row.items() if key is not None}


def _csv_line(text: IO[str]) -> str:
    line = text.readline(LONGEST_RECORD + 1)
    if len(line) > LONGEST_RECORD:
        raise csv.Error(f"a line of more than {LONGEST_RECORD // 2**20} MiB")
    return line


def _text(path: Path) -> Iterator[RawRow]:
    """Yield a text file as one document."""
    with _open(path) as file:
        content = file.read(LONGEST_RECORD + 1)
    if len(content) > LONGEST_RECORD:
        yield str(path), _too_long(str(path))
    elif content.strip():
        yield str(path), {"text": content.decode("utf-8-sig")}


def _is_data(path: Path, root: Path) -> bool:
    """Return whether a file of a folder holds data: of a known kind, not hidden, not about the data."""
    parts = path.relative_to(root).parts
    hidden = any(part.startswith((".", "_")) for part in parts)
    about = re.split(r"[.-]", path.name.lower())[0] in IGNORED
    return path.is_file() and suffix_of(path) is not None and not hidden and not about


def _split_of(relative: Path) -> str:
    """Return the split that the innermost part of a path names; train if none does."""
    words = (word for part in reversed(relative.parts) for word in re.split(r"[^a-z]+", part.lower()))
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "train")


def _has_part(relative: Path, subset: str) -> bool:
    """Return whether a part of a path is the name of a subset, or begins with it."""
    return any(part == subset or part.startswith((f"{subset}-", f"{subset}.")) for part in relative.parts)
