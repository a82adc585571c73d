"""Files and folders that a strict reader would reject are errors or bad rows; what a folder leaves out is listed."""

from __future__ import annotations

import gzip
import json
import os
import stat
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sftkit.config.schema import SourceConfig
from sftkit.data.reading import origin as folders
from sftkit.data.reading import origin as hub
from sftkit.data.reading import readers, rows
from sftkit.data.reading.origin import find_source
from sftkit.errors import ConfigError, DataError
from sftkit.models.tokenizer import read_template

ROW = b'{"text": "x"}\n'


def read(path: Path | str, **settings: object) -> list[object]:
    """The rows of a source; of a bad one its reason."""
    found = []
    for raw in find_source(SourceConfig(path=str(path), **settings)).part():
        try:
            found.append(readers.parsed(raw))
        except DataError as error:
            found.append(error.reason)
    return found


def texts(path: Path, **settings: object) -> list[str]:
    return [row["text"] for row in read(path, **settings)]


def said(path: Path, **settings: object) -> str:
    return find_source(SourceConfig(path=str(path), **settings)).said


def fill(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(json.dumps({"text": name}).encode() if readers.suffix_of(path) else b"x")
    return root


# ---- CSV and TSV -----------------------------------------------------------------------------------------------------

GOOD = {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ("1,2", GOOD),
        ('"1","2"\r', GOOD),
        ('"1, ""one""\r\n\n and more",2', {"a": '1, "one"\r\n\n and more', "b": "2"}),
        ('"",2', {"a": "", "b": "2"}),
        ("Well, I think so, yes", "wrong number of cells"),
        ("1", "wrong number of cells"),
        ("1,2,", "wrong number of cells"),
        ('1, "2"', "malformed cells"),
        ('1,"2" inches', "malformed cells"),
        ('1,2" and 3"', {"a": "1", "b": '2" and 3"'}),
        ("1\r,2", "malformed cells"),
        ("\ufeffa,b", "repeated header"),
        (b"1,\xe9t\xe9", "not UTF-8"),
    ],
)
def test_a_csv_record_that_a_strict_reader_rejects_is_one_bad_row(
    tmp_path: Path, record: str | bytes, expected: object
) -> None:
    content = record if isinstance(record, bytes) else record.encode()
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbfa,b\n1,2\n\n" + content + b"\n1,2\n")
    assert read(tmp_path / "x.csv") == [GOOD, expected, GOOD]
    if b"," in content and b'"' not in content and b"\n" not in content:
        (tmp_path / "x.tsv.gz").write_bytes(gzip.compress(b"a\tb\n" + content.replace(b",", b"\t")))
        assert read(tmp_path / "x.tsv.gz") == [expected]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('a,b\n1,"2\n3,4\n5,6\n', r":2: unexpected end of data\. Write a cell"),
        ('a,b\n1,"2\n3,4"5\n5,6\n', r":2: ',' expected after '\"'\. Write a cell"),
        ("a,b,a\n1,2,3\n", r":1: the header must name each column once, .* not 'a'$"),
        ("a,,b\n1,2,3\n", r":1: the header must name each column once, .* not ''$"),
        ("a,b,\n1,2,\n", r":1: the header must name each column once, .* not ''$"),
        ("a, b\n1,2\n", r":1: the header must name each column once, .* not ' b'$"),
    ],
)
def test_a_csv_file_of_which_the_rows_are_not_certain_is_an_error(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(DataError, match=rf"x\.csv{reason}"):
        read(tmp_path / "x.csv")


def test_row_numbers_that_pandas_has_written_are_a_column_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(",a,b\n0,1,2\n")
    assert read(tmp_path / "x.csv") == [{"Unnamed: 0": "0", **GOOD}]


def test_a_record_across_lines_is_named_by_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('a,b\n"1\n\n",2\n1\n')
    origin = find_source(SourceConfig(path=str(tmp_path / "x.csv")))
    assert [where.rpartition(":")[2] for where, _ in origin.part()] == ["2", "5"]


# ---- encodings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl", "x.ndjson", "x.json", "x.txt", "x.jsonl.gz"])
def test_a_text_in_another_encoding_is_an_error_that_names_it(tmp_path: Path, encoding: str, name: str) -> None:
    content = ('{"text": "a long enough text"}\n' * 3).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=rf"x\.\S+: UTF-{encoding[4:6]}, but texts are read as UTF-8. .*iconv"):
        read(tmp_path / name)


@pytest.mark.parametrize(("name", "content"), [("x.txt", b"caf\xe9"), ("x.json", b'[{"text": "caf\xe9"}]')])
def test_a_file_that_is_not_utf8_is_an_error_that_says_so(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"not UTF-8: byte 0xe9.*iconv"):
        read(tmp_path / name)


@pytest.mark.parametrize("content", [b'{"text": "caf\xe9"}', b'{"text": "\xed\xa0\xbd"}'])
def test_a_line_that_is_not_utf8_is_one_bad_row(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(ROW + content + b"\n" + ROW)
    assert read(tmp_path / "x.jsonl") == [{"text": "x"}, "not UTF-8", {"text": "x"}]


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.json", "x.csv", "x.txt"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path, name: str) -> None:
    content = {"x.csv": "text\nx\n", "x.txt": "x"}.get(name, '{"text": "x"}\n')
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert texts(tmp_path / name) == ["x"]


def test_a_chat_template_begins_after_its_byte_order_mark_and_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }}", encoding="utf-8-sig")
    assert read_template(str(path)) == "{{ messages }}"
    path.write_text("{{ messages }}", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*mine\.jinja: not UTF-8"):
        read_template(str(path))


# ---- garbled files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl.gz", "csv.gz"])
def test_a_garbled_file_is_a_data_error_whatever_its_reader_raises(tmp_path: Path, kind: str) -> None:
    path, rows = tmp_path / f"x.{kind}", [{"text": f"row {i}", "n": {"a": [i]}} for i in range(50)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        intact = path.read_bytes()
    else:
        text = "text\n" + "row\n" * 50 if kind == "csv.gz" else json.dumps(rows)
        intact = gzip.compress(text.encode(), mtime=0) if kind.endswith("gz") else text.encode()
    for at in range(0, len(intact), max(1, len(intact) // 60)):
        content = bytearray(intact)
        content[at] ^= 0xFF
        path.write_bytes(content)
        try:
            read(path)
        except DataError as error:
            assert str(error).startswith(str(path))  # noqa: PT017 - it may also be read: not every byte decides


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.txt", LFS_POINTER, "a Git LFS pointer, not the data. Fetch it: git lfs pull"),
        ("x.csv", LFS_POINTER, "a Git LFS pointer"),
        ("x.parquet", LFS_POINTER, "a Git LFS pointer"),
        ("x.jsonl", gzip.compress(ROW, mtime=0), "compressed by gzip: name it .gz"),
        ("x.jsonl.gz", gzip.compress(gzip.compress(ROW, mtime=0), mtime=0), "compressed by gzip"),
        ("x.txt", b"PK\x03\x04" + b"x" * 100, "a zip archive"),
        ("x.json", b"PAR1" + b"x" * 100, "Parquet: name it"),
    ],
)
def test_a_file_that_is_something_else_than_its_name_says_is_an_error(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"x\.\S+: {told}"):
        read(tmp_path / name)


def test_a_name_that_no_file_can_have_is_that_of_no_picture(tmp_path: Path) -> None:
    names = ["x" * 5000, "a\0b", "b/" * 3000]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"image": name, "caption": "c"}) + "\n" for name in names))
    for raw in find_source(SourceConfig(path=str(tmp_path / "x.jsonl"))).rows():
        with pytest.raises(DataError, match="no such picture"):
            rows.parse(raw)


def test_nesting_without_end_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"x\.json: cannot be read as \.json"):
        read(tmp_path / "x.json")


def test_columns_of_the_same_name_are_an_error(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: several columns are named text"):
        read(tmp_path / "x.parquet")


def test_two_lists_of_rows_in_one_json_value_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"data": [{"text": "a"}], "more": [{"text": "b"}], "tags": ["c"]}))
    with pytest.raises(DataError, match=r"x\.json: lists under data, more"):
        read(tmp_path / "x.json")


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_only_whole_names_are_left_out_of_a_folder_and_every_other_file_is_listed(tmp_path: Path) -> None:
    read_ = ["config-help.jsonl", "license_questions.csv", "readme2.txt", "state-of-mind.jsonl", "web_dev.jsonl"]
    about = ["README.md", "LICENSE", "README.txt", "config.json", "dataset_info.json", "dataset_infos.json"]
    kinds = ["b.orc", "c.jsonl.lz4", "_old.jsonl", ".x.jsonl"]
    fill(tmp_path, *read_, *about, *kinds, "0.png", ".gitattributes", ".git/config")
    (tmp_path / "license_questions.csv").write_text("text\nlicense_questions.csv\n")
    (tmp_path / "readme2.txt").write_text("readme2.txt")
    assert texts(tmp_path) == read_
    told = said(tmp_path)
    assert told.startswith("train: 5 files; ")
    assert told.endswith("left out: .x.jsonl, _old.jsonl, b.orc, c.jsonl.lz4, LICENSE and 5 more")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"), ("train-00000-of-00002.jsonl", "train"), ("validation.jsonl", "validation"),
        ("val_1.jsonl", "validation"), ("test/a.jsonl", "test"), ("dev-2.csv", "validation"), ("eval.jsonl", "test"),
        ("test/train.jsonl", "train"), ("web_dev.jsonl", "train"), ("latest.jsonl", "train"), ("devices.jsonl", "train"),
        ("testimony.jsonl", "train"), ("contest_dev_notes.jsonl", "train"), ("part-00001-of-00009.jsonl", "train"),
        ("train_sft-00000-of-00003-1a2b.parquet", "train_sft"), ("test_gen-00000-of-00001.parquet", "test_gen"),
        ("en/c4-validation.00000-of-00008.json.gz", "validation"), ("Test.JSONL", "test"),
    ],
)  # fmt: skip
def test_the_split_of_a_file_is_the_word_that_begins_its_name(name: str, split: str) -> None:
    assert folders.split_of(Path(name)) == split


def test_a_folder_says_which_files_are_of_which_split(tmp_path: Path) -> None:
    fill(tmp_path, "train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl", "test_prep.jsonl", "dev/a.jsonl")
    assert said(tmp_path) == (
        "train: 2 files, test: 1 (test_prep.jsonl), validation: 1 (dev/a.jsonl); 2 of the 3 shards of train are there"
    )
    assert texts(tmp_path, split="test") == ["test_prep.jsonl"]
    assert texts(tmp_path, split="dev[:1]") == ["dev/a.jsonl"]


def test_a_file_without_a_split_in_its_name_is_named_next_to_files_of_train(tmp_path: Path) -> None:
    fill(tmp_path, "train-00000-of-00001.jsonl", "config-help.jsonl", "test.jsonl")
    words = "read as train, although its name has no split: config-help.jsonl"
    assert said(tmp_path) == f"train: 2 files, test: 1 (test.jsonl); {words}"
    assert texts(tmp_path) == ["config-help.jsonl", "train-00000-of-00001.jsonl"]
    (tmp_path / "train-00000-of-00001.jsonl").unlink()
    assert said(tmp_path) == "train: 1 file, test: 1 (test.jsonl)"


def test_a_split_of_another_name_is_that_of_its_shards_or_of_the_whole_name(tmp_path: Path) -> None:
    fill(tmp_path, "train_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl", "heldout.jsonl")
    assert texts(tmp_path, split="train_gen") == ["train_gen-00000-of-00001.jsonl"]
    assert texts(tmp_path, split="heldout") == ["heldout.jsonl"]
    with pytest.raises(ConfigError, match='no split "test" among train, train_gen, train_sft'):
        read(tmp_path, split="test")


def test_a_link_to_nothing_is_an_error_and_a_link_to_a_folder_is_listed(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", "b.jsonl")
    folder = fill(tmp_path / "data", "a.jsonl")
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    assert said(folder) == "train: 1 file; left out: more"
    (folder / "c.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"c\.jsonl: a link to .*gone\.jsonl, which is not there"):
        read(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, "a.jsonl", "closed/b.jsonl")
    (tmp_path / "closed").chmod(0)
    try:
        with pytest.raises(DataError, match="closed: cannot be read: Permission denied"):
            read(tmp_path)
    finally:
        (tmp_path / "closed").chmod(stat.S_IRWXU)


# ---- configurations of a hub dataset ---------------------------------------------------------------------------------

CONFIGS = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/*.jsonl
  - split: test
    path: [held/a.jsonl, held/b.jsonl]
- config_name: other
  data_files: other.jsonl
---
# A dataset
"""


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    fill(tmp_path, "main/a.jsonl", "main/test.jsonl", "held/a.jsonl", "held/b.jsonl", "other.jsonl", "extra.jsonl")
    (tmp_path / "README.md").write_text(CONFIGS)
    return tmp_path


def test_a_downloaded_dataset_is_read_by_the_configurations_of_its_readme(snapshot: Path) -> None:
    assert texts(snapshot, subset="main") == ["main/a.jsonl", "main/test.jsonl"]
    assert texts(snapshot, subset="main", split="test") == ["held/a.jsonl", "held/b.jsonl"]
    assert texts(snapshot, subset="other") == ["other.jsonl"]
    with pytest.raises(ConfigError, match=r"subset must name a configuration of its README\.md: .*'main', 'other'"):
        read(snapshot)
    with pytest.raises(ConfigError, match=r"subset must name .*'third' not found.*'main', 'other'"):
        read(snapshot, subset="third")
    with pytest.raises(ConfigError, match='no split "validation" among test, train'):
        read(snapshot, subset="main", split="validation")
    assert len(texts(snapshot, subset="main", split="test[:1]")) == 1


def test_an_offline_name_obeys_the_configurations_of_its_snapshot(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("took what its cache has"))
    monkeypatch.setattr(hub, "unavailable_reason", lambda *_: None)
    for find in (find_source, hub.check_dataset):  # the second before anything is loaded
        with pytest.raises(ConfigError, match=r"subset must name a configuration of its README\.md: .*'main', 'other'"):
            find(SourceConfig(path="org/name"))


# ---- identity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("at", [0, 5_000, -1])
def test_an_edit_that_keeps_size_and_time_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool, at: int
) -> None:
    monkeypatch.chdir(tmp_path)
    if not small:  # its digest is kept
        monkeypatch.setattr(folders, "REHASHED_BYTES", 0)
    path = tmp_path / "a.txt"
    content = bytearray(b"x" * 10_001)
    path.write_bytes(content)
    before, times = folders.content_identity([path]), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=times)
    assert folders.content_identity([path]) != before
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=times)
    assert folders.content_identity([path]) == before


def test_place_and_time_of_a_file_are_no_part_of_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    before = folders.content_identity([path])
    os.utime(path, (1, 1))
    moved = path.rename(tmp_path / "b.txt")
    assert folders.content_identity([moved]) == before
    assert folders.content_identity([moved.rename(tmp_path / "a.json")]) != before, "it is read otherwise"
