"""Read local files to raw rows: JSON lines, JSON, Parquet, Arrow, CSV, TSV, text and WebDataset archives, also
compressed.

Each row has a name (file:line) for messages. A row that cannot be read is one bad row where the next row can still be
found. The nulls that Arrow adds to rows of tables are removed.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, groupby
from pathlib import Path, PurePath
from typing import IO, Any, cast

from sftkit.config.schema import SourceConfig
from sftkit.errors import DataError, fault
from sftkit.runtime.script import counted


def without_fill(value: object, feature: object = None) -> object:
    """Return a row of a table without the nulls of its structs.

    A column of objects has one set of keys for all rows, so `{"x": 1}` next to `{"y": 2}` is read as `{"x": 1, "y":
    None}`. Nulls of the source look the same and are removed too. Elements of lists stay, and so do values that
    `datasets` and Arrow keep as JSON, where a null is one that somebody wrote.

    Args:
        feature: the type of the value in `datasets`, or in Arrow as `_feature`; None: any but JSON.
    """
    if type(feature).__name__ == "Json":
        return value
    if type(feature).__name__ == "JsonType":
        return loads(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        types = feature if isinstance(feature, dict) else {}
        return {key: without_fill(item, types.get(key)) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        return [without_fill(item, inner) for item in value]
    return value


RawRow = tuple[str, object] | tuple[str, object, SourceConfig]
"""(place of the row, the row): an object, bytes of JSON that nobody has parsed yet (a broken line is one bad row), or
the DataError to raise for it; and its source, if settings of that say how the row is parsed."""
LONGEST_RECORD = 32 * 2**20
"The most bytes of a line, or of a file that is one text: anything longer is no record, and could use up the memory."
LONGEST_JSON = 4 * 2**30
"The most bytes of a file that is one JSON list, which is read as a whole."

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".txt", ".tar")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
"Suffixes by which a folder of pictures alone is known."
TOKEN_SUFFIXES = (".bin", ".npy", ".ds")
"Suffixes of tokens that other programs wrote, see store/foreign.py."
OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark begins it
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"First bytes of a text -> the encoding that they mark, which is not read."

OTHER_CONTENTS = {
    b"version https://git-lfs": "a Git LFS pointer, not the data. Fetch it: git lfs pull",
    b"\x1f\x8b": "compressed by gzip: name it .gz",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: name it .zst",
    b"\xfd7zXZ": "compressed by xz: name it .xz",
    b"BZh91AY": "compressed by bzip2: name it .bz2",
    b"PAR1": "Parquet: name it .parquet",
    b"ARROW1": "an Arrow file: name it .arrow",
    b"%PDF-": "a PDF: take its text",
}
"First bytes of a file -> what it is in spite of its name, and what to do."


def _zstd(path: Path) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


# Any: each of them returns a type of its own.
COMPRESSED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}
"Suffix after that of the kind -> the function that opens such a file for what was compressed."
KINDS_OF_FILES = f"{', '.join(SUFFIXES)} (also {', '.join(COMPRESSED)})"


def suffix_of(path: PurePath) -> str | None:
    """Return the kind of a file: .jsonl for a.jsonl and a.jsonl.gz; None if it is not a known one."""
    name = path.name.lower()
    name = name.removesuffix(next(filter(name.endswith, COMPRESSED), ""))
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def looks_local(path: str) -> bool:
    """Return whether a path cannot be a hub id, so that a missing one is a misspelling."""
    is_file = suffix_of(Path(path)) is not None or path.endswith(TOKEN_SUFFIXES)
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or is_file


class DuplicateKey(ValueError):
    """JSON with an object that has a key twice: readers would silently take the last one."""


def loads(content: bytes | str) -> object:
    """Parse JSON. Raises ValueError, also for half of a surrogate pair, which JSON can write but no text can hold, and
    DuplicateKey for an object that has a key twice."""
    # Decoded as json.loads does it, but no text holds half of a surrogate pair.
    text = content if isinstance(content, str) else content.decode(json.detect_encoding(content))
    text = text.rstrip("\r\n")  # a row has the end of its line, and an error there would be one of line 2
    value: object = _STRICT.decode(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parsed(raw: RawRow) -> object:
    """Parse a raw row.

    Raises:
        DataError: it is not JSON, or the error of a row that could not be read.
    """
    where, value = raw[:2]
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
        text = (content if isinstance(content, str) else content.decode(errors="replace")).strip()
        advice = ""
        if re.match(r"[\[{]\s*(?:[\[{]\s*)?'", text):
            advice = ". This is how Python shows a value: write it with json.dumps"
        elif isinstance(content, bytes) and text[:1] in ("[", "{") and text[-1] not in "]}":
            advice = ". A line holds a whole value: if the whole file is one, name it .json"
        raise json_error(where, error, advice) from error


def json_error(where: str, error: Exception, advice: str = "") -> DataError:
    """Return the DataError for what `loads` raised, or for nesting that is too deep for it. advice: what to do."""
    if isinstance(error, DuplicateKey):
        return DataError(f"{where}: {error}. Keep the one that is meant", reason="duplicate JSON key")
    if isinstance(error, UnicodeDecodeError):
        return not_utf8(where, error)
    return DataError(f"{where}: not JSON: {error}{advice}", reason="not JSON")


def not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    """Return the DataError for bytes that are not UTF-8, with what to do."""
    return fault(where, "not UTF-8", byte=error.object[error.start], cause=error.reason)


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
        beginning: read only the rows in the first LONGEST_RECORD bytes of a large JSON value.
    """
    kind = suffix_of(path)
    readers: dict[str | None, Callable[[Path], Iterator[RawRow]]] = {
        ".json": partial(_json, beginning=beginning),
        ".parquet": _parquet,
        ".arrow": _arrow,
        ".tar": _tar,
        **dict.fromkeys((".csv", ".tsv"), _delimited),
        **dict.fromkeys((".jsonl", ".ndjson"), _json_lines),
    }
    try:
        yield from readers.get(kind, _text)(path)
    except DataError:
        raise
    except Exception as error:  # a file of foreign origin can make its readers raise anything
        reason = str(error).strip() or type(error).__name__
        raise DataError(f"{path}: cannot be read as {kind}: {reason}") from error


@contextmanager
def _open(path: Path, *, text: bool = True) -> Iterator[IO[bytes]]:
    """Open a file for its bytes, decompressed.

    Raises:
        DataError: a text in an encoding that is not read.
    """
    with COMPRESSED.get(path.suffix.lower(), partial(open, mode="rb"))(path) as file:
        head = file.peek(64)[:64]
        _check_content(head, path)
        if not text:
            yield file
            return
        found = next((name for mark, name in OTHER_MARKS.items() if head.startswith(mark)), None)
        # Without a mark: every second byte of a text in mostly Latin letters is zero.
        if found is None and max(head[0::2].count(0), head[1::2].count(0)) > len(head) / 4 > 1:
            found = "UTF-16"
        if found is not None:
            problem = f"{path}: {found}, but texts are read as UTF-8. Convert it: iconv -f {found} -t UTF-8 {path.name}"
            raise DataError(problem, reason="not UTF-8")
        yield file


def _check_content(head: bytes, path: Path) -> None:
    """Raise a DataError for a file that is something other than its name says."""
    if found := next((what for magic, what in OTHER_CONTENTS.items() if head.startswith(magic)), None):
        raise DataError(f"{path}: {found}")


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
    problem = f"{where}: more than {LONGEST_RECORD // 2**20} MiB: cut it into several records"
    return DataError(problem, reason="record too long to read")


def _json(path: Path, *, beginning: bool = False) -> Iterator[RawRow]:
    """Yield the objects of a list, or of {"data": [...]}. Files of JSON lines often have this suffix too."""
    most = LONGEST_RECORD if beginning else LONGEST_JSON
    with _open(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        if beginning:
            return  # it would have to be read as a whole
        raise DataError(f"{path}: more than {most // 2**30} GiB in one JSON value: write JSON lines (.jsonl)")
    if not content.strip():
        return
    try:
        value = loads(content)
    except ValueError as error:
        if content.lstrip()[:1] != b"{" or isinstance(error, DuplicateKey):
            raise json_error(str(path), error) from error
        yield from _json_lines(path)
        return
    if isinstance(value, dict):
        lists = [key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
        if isinstance(value.get("data"), list) and {*lists} - {"data"}:
            names = ", ".join({"data": 0} | dict.fromkeys(lists))
            raise DataError(f"{path}: lists under {names}: keep one, or write JSON lines (.jsonl)")
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    if not isinstance(value, list):
        raise DataError(f"{path}: a {type(value).__name__} instead of a list of objects")
    yield from ((f"{path}[{i}]", row) for i, row in enumerate(value))


# ---- tables and archives ---------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a Parquet file."""
    import pyarrow.parquet

    with path.open("rb") as opened:
        _check_content(opened.read(64).removeprefix(b"PAR1"), path)
    file = pyarrow.parquet.ParquetFile(path)
    return _table_rows(path, file.schema_arrow, file.iter_batches(batch_size=1024))


def _arrow(path: Path) -> Iterator[RawRow]:
    """Yield the rows of an Arrow file, or of a stream, which `datasets` writes."""
    import pyarrow.ipc

    with path.open("rb") as opened:
        head = opened.read(64)
        _check_content(head.removeprefix(b"ARROW1"), path)
        is_file = head.startswith(b"ARROW1")
        opened.seek(-min(8, len(head)), io.SEEK_END)
        # A reader takes a stream that breaks off between two batches for a whole one.
        if not is_file and opened.read() != b"\xff\xff\xff\xff\0\0\0\0":
            raise DataError(f"{path}: an Arrow stream without its end mark: it breaks off. Copy or write it again")
    with pyarrow.memory_map(str(path)) as mapped:
        if is_file:
            file = pyarrow.ipc.open_file(mapped)
            yield from _table_rows(path, file.schema, map(file.get_batch, range(file.num_record_batches)))
        else:
            stream = pyarrow.ipc.open_stream(mapped)
            yield from _table_rows(path, stream.schema, stream)


# Any: pyarrow has no types.
def _table_rows(path: Path, schema: Any, batches: Iterable[Any]) -> Iterator[RawRow]:
    """Yield the rows of a table."""
    if twice := [name for name, times in Counter(schema.names).items() if times > 1]:
        raise DataError(f"{path}: several columns are named {', '.join(twice)}")
    types = {field.name: _feature(field.type) for field in schema}
    parts = (batch.slice(first, 1024) for batch in batches for first in range(0, batch.num_rows, 1024))
    rows = (without_fill(row, types) for part in parts for row in part.to_pylist())
    yield from ((f"{path}[{i}]", row) for i, row in enumerate(rows))


def _feature(kind: Any) -> object:
    """Return an Arrow type in the form of the features of `datasets`: an object of types, a list of one, or itself."""
    import pyarrow

    if pyarrow.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    return [_feature(kind.value_type)] if hasattr(kind, "value_type") else kind


def _tar(path: Path) -> Iterator[RawRow]:
    """Yield the samples of a WebDataset archive: neighbours whose names are the same up to the first dot.

    The columns of a .json member and the text of a .txt member are a row. Other members are columns that hold their
    names, a picture the column image.
    """
    with _open(path, text=False) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        members = (member for member in archive if member.isfile())
        for name, sample in groupby(members, key=lambda member: _sample_name(member.name)[0]):
            where = f"{path}:{name}"
            row: dict[str, object] = {}
            bad: DataError | None = None
            for member in sample:
                kind = _sample_name(member.name)[1]
                suffix = f".{kind.rpartition('.')[2]}"
                if kind not in ("json", "txt"):
                    row["image" if suffix in PICTURE_SUFFIXES else kind or "member"] = member.name
                    continue
                content = cast(IO[bytes], archive.extractfile(member)).read(LONGEST_RECORD + 1)
                try:
                    if len(content) > LONGEST_RECORD:
                        raise _too_long(where)
                    value = parse_json(content, where) if kind == "json" else {"text": content.decode("utf-8-sig")}
                    if not isinstance(value, dict):
                        raise wrong_kind(f"{where}.json", value, "an object", reason="row is not an object")
                    if two := [key for key in row.keys() & value.keys() if row[key] != value[key]]:
                        problem = f"{where}: two members have a column {two[0]}, and they differ: keep one"
                        raise DataError(problem, reason="two columns of one name")
                    row |= value
                except UnicodeDecodeError as error:
                    bad = not_utf8(where, error)
                except DataError as error:
                    bad = error
            yield where, bad or row


def _sample_name(name: str) -> tuple[str, str]:
    """Return the name of the sample that a member belongs to, and the rest of the member's name, its kind."""
    folder, slash, last = name.rpartition("/")
    stem, _, kind = last.partition(".")
    return f"{folder}{slash}{stem}", kind.lower()


# ---- CSV and TSV -----------------------------------------------------------------------------------------------------


def _delimited(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a CSV or TSV file with a header line, as Python's csv reads them strictly.

    A record that it rejects is a bad row if it is one line: else it is not certain where the next one begins.
    """
    delimiter = "\t" if suffix_of(path) == ".tsv" else ","
    csv.field_size_limit(LONGEST_RECORD)
    with _open(path) as file:
        records = csv.reader(_lines(file, path), delimiter=delimiter, strict=True)
        header: list[str] = []
        while True:
            before = records.line_num
            where = f"{path}:{before + 1}"
            try:
                cells = next(records)
                "".join(cells).encode(errors="surrogateescape").decode()
                if any(cell[:1].isspace() and cell.lstrip()[:1] == '"' for cell in cells):
                    raise csv.Error("a quotation mark after a space")
            except StopIteration:
                return
            except (csv.Error, UnicodeDecodeError) as error:
                bad = not_utf8(where, error) if isinstance(error, UnicodeDecodeError) else None
                bad = bad or fault(where, "malformed cells", error=error)
                if not header or records.line_num > before + 1:
                    raise bad from error
                yield where, bad
                continue
            if cells and not header:
                header = _header(where, cells)
            elif cells == header:
                yield where, DataError(f"{where}: the header again: remove it", reason="repeated header")
            elif cells and len(cells) != len(header):
                found = counted(len(cells), "cell")
                mark = "a tab" if delimiter == "\t" else "a comma"
                yield where, fault(where, "wrong number of cells", cells=found, expected=len(header), mark=mark)
            elif cells:
                yield where, dict(zip(header, cells, strict=True))


def _lines(file: IO[bytes], path: Path) -> Iterator[str]:
    """Yield the lines of CSV. A byte that is not UTF-8 becomes a character which marks it, for the row to be bad."""
    for number in count(1):
        line = file.readline(LONGEST_RECORD + 1)
        if len(line) > LONGEST_RECORD:
            raise _too_long(f"{path}:{number}")
        if not line:
            return
        # The mark is also in a file that was appended to another.
        yield line.removeprefix(codecs.BOM_UTF8).decode(errors="surrogateescape")


def _header(where: str, names: list[str]) -> list[str]:
    """Return the names of the columns.

    Raises:
        DataError: they do not name each column once.
    """
    if names[0] == "" and len(names) > 1:
        names[0] = "Unnamed: 0"  # the row numbers that pandas writes, named as pandas and datasets read them
    wrong = [name for name in names if name != name.strip() or not name or names.count(name) > 1]
    if wrong:
        listed = ", ".join(map(repr, dict.fromkeys(wrong)))
        raise DataError(f"{where}: the header must name each column once, without spaces around it, not {listed}")
    return names


# ---- texts -----------------------------------------------------------------------------------------------------------


def _text(path: Path) -> Iterator[RawRow]:
    """Yield a text file as one document."""
    with _open(path) as file:
        content = file.read(LONGEST_RECORD + 1)
    if len(content) > LONGEST_RECORD:
        yield str(path), _too_long(str(path))
    elif b"\0" in content:
        raise DataError(f"{path}: a NUL byte, which no text has")
    elif content.strip():
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise not_utf8(str(path), error) from error
        yield str(path), {"text": text}
