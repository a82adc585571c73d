"""Kinds of files and places of a source: compressed files, tables, archives, patterns, joined splits, URLs, the hub."""

from __future__ import annotations

import bz2
import fcntl
import gzip
import io
import json
import lzma
import os
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from test_source_files import read

from sftkit.config.schema import DataConfig, SourceConfig, source_label
from sftkit.data.reading import origin, readers, remote
from sftkit.data.reading.origin import find_here, find_source
from sftkit.errors import ConfigError, DataError
from sftkit.runtime import hub

LINES = b'{"text": "a"}\n{"text": "b"}\n'


def texts(path: Path | str, **settings: object) -> list[str]:
    return [row["text"] for row in read(path, **settings)]


def said(path: Path | str, **settings: object) -> str:
    return find_source(SourceConfig(path=str(path), **settings)).said


def fill(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}))
    return root


# ---- compressed files ------------------------------------------------------------------------------------------------


COMPRESSORS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pyarrow.Codec("zstd").compress(content, asbytes=True),
}


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_a_compressed_file_is_read_whole_or_rejected(tmp_path: Path, kind: str) -> None:
    whole = COMPRESSORS[kind](LINES)
    path = tmp_path / f"x.jsonl.{kind}"
    path.write_bytes(whole + whole)  # a second frame: tools that compress in parallel write several
    assert texts(path) == ["a", "b", "a", "b"]
    assert texts(tmp_path) == ["a", "b", "a", "b"]
    assert source_label(SourceConfig(path=str(path))) == "x"
    path.write_bytes(whole[:-6])
    with pytest.raises(DataError, match=rf"x\.jsonl\.{kind}: cannot be read as \.jsonl"):
        read(path)
    (tmp_path / "x.csv").write_bytes(whole)
    with pytest.raises(DataError, match=rf"x\.csv: compressed by \w+: name it \.{kind}"):
        read(tmp_path / "x.csv")


# ---- Arrow and save_to_disk ------------------------------------------------------------------------------------------


def table(*names: str) -> pyarrow.Table:
    kinds = pyarrow.schema(
        {"text": pyarrow.string(), "meta": pyarrow.struct({"a": pyarrow.int64(), "b": pyarrow.int64()})}
    )
    return pyarrow.table({"text": list(names), "meta": [{"a": 1}] * len(names)}, schema=kinds)


def write_stream(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table().schema) as writer:
        writer.write_table(table(*names), max_chunksize=1)


def test_an_arrow_stream_and_an_arrow_file_are_read_as_tables(tmp_path: Path) -> None:
    write_stream(tmp_path / "stream.arrow", "a", "b")
    with pyarrow.ipc.new_file(str(tmp_path / "file.arrow"), table().schema) as writer:
        writer.write_table(table("a", "b"), max_chunksize=1)
    for path in (tmp_path / "stream.arrow", tmp_path / "file.arrow"):
        assert read(path) == [{"text": "a", "meta": {"a": 1}}, {"text": "b", "meta": {"a": 1}}]
        content = path.read_bytes()
        # Also at the border of a batch, where a reader of Arrow sees the end of the stream.
        for end in (len(content) - 8, len(content) // 2, 3):
            path.write_bytes(content[:end])
            with pytest.raises(DataError, match=r"\.arrow: "):
                read(path)


def test_a_column_that_arrow_keeps_as_json_is_an_object_with_its_nulls(tmp_path: Path) -> None:
    kind = pyarrow.json_()
    made = [pyarrow.array([text], pyarrow.string()).cast(kind) for text in ('{"a": null}', '["x"]')]
    one = pyarrow.Table.from_arrays(made, names=["tools", "tags"])
    pyarrow.parquet.write_table(one, tmp_path / "x.parquet")
    with pyarrow.ipc.new_file(str(tmp_path / "x.arrow"), one.schema) as writer:
        writer.write_table(one)
    expected = [{"tools": {"a": None}, "tags": ["x"]}]
    assert read(tmp_path / "x.arrow") == expected
    assert read(tmp_path / "x.parquet") == expected


def save(folder: Path, *files: str, **state: object) -> None:
    """A folder as save_to_disk writes it: state.json names the files."""
    for i, name in enumerate(files):
        write_stream(folder / name, f"{folder.name}{i}")
    (folder / "dataset_info.json").write_text("{}")
    named = [{"filename": name} for name in files]
    (folder / "state.json").write_text(json.dumps({"_data_files": named, "_split": None, **state}))


def test_a_saved_dataset_is_the_files_that_its_state_names(tmp_path: Path) -> None:
    save(tmp_path / "x", "data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    write_stream(tmp_path / "x" / "cache-1234.arrow", "a leftover of map")
    assert texts(tmp_path / "x") == ["x0", "x1"]
    assert said(tmp_path / "x") == "train: 2 files; left out: cache-1234.arrow, dataset_info.json, state.json"
    (tmp_path / "x" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"state\.json names data-00001-of-00002\.arrow, not there"):
        read(tmp_path / "x")
    save(tmp_path / "old", "data.arrow", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match="a selection of rows of another file: write it again"):
        read(tmp_path / "old")


def test_the_splits_of_a_saved_dict_are_its_folders_by_their_exact_names(tmp_path: Path) -> None:
    for split in ("train_sft", "train_gen", "test"):
        save(tmp_path / split, "data-00000-of-00001.arrow")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train_sft", "train_gen", "test"]}')
    assert texts(tmp_path, split="train_sft") == ["train_sft0"]
    assert texts(tmp_path, split="test+train_gen") == ["test0", "train_gen0"]
    with pytest.raises(ConfigError, match='no split "train" among test, train_gen, train_sft'):
        read(tmp_path)


def test_datasets_reads_back_what_it_saved_as_we_do(tmp_path: Path) -> None:
    import datasets

    rows = [{"messages": [{"role": "user", "content": "q"}], "meta": {"a": i}} for i in range(3)]
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_list(rows)
    datasets.DatasetDict(train=whole, test=whole.select([2])).save_to_disk(
        str(tmp_path), num_shards={"train": 2, "test": 1}
    )
    assert read(tmp_path) == rows
    assert read(tmp_path, split="test") == rows[2:]


def test_the_split_of_a_file_in_the_cache_of_datasets_ends_its_name() -> None:
    assert origin.split_of(Path("gsm8k-test.arrow")) == "test"
    assert origin.split_of(Path("gsm8k-train-00000-of-00002.arrow")) == "train"


# ---- WebDataset ------------------------------------------------------------------------------------------------------


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
def test_members_of_an_archive_with_one_name_are_a_row(tmp_path: Path, name: str) -> None:
    members = {
        "a/0.json": b'{"messages": [1]}',
        "a/1.TXT": "\ufeffhé".encode(),
        "a/1.json": b'{"id": 3}',
        "a/2.json": b'{"text": "x"}',
        "a/2.txt": b"y",
        "a/3.json": b"[]",
        "a/4.txt": b"\xff",
        "a/5.txt": b"a picture",
        "a/5.jpg": b"",
        "a/6.seg.npy": b"",
        "a/7.json": b"{",
    }
    write_tar(tmp_path / name, members)
    assert read(tmp_path / name) == [
        {"messages": [1]},
        {"text": "hé", "id": 3},
        "two columns of one name",
        "row is not an object",
        "not UTF-8",
        {"text": "a picture", "image": "a/5.jpg"},
        {"seg.npy": "a/6.seg.npy"},
        "not JSON",
    ]
    first = next(find_source(SourceConfig(path=str(tmp_path / name))).rows())
    assert first[0] == f"{tmp_path / name}:a/0"
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: 512 * 3 + 100] if name == "x.tar" else content[:-20])
    with pytest.raises(DataError, match=r"x\.tar.*: cannot be read as \.tar"):
        read(tmp_path / name)


# ---- patterns, lists, joined splits ----------------------------------------------------------------------------------


def test_a_pattern_is_the_files_that_match_and_their_names_give_the_splits(tmp_path: Path) -> None:
    fill(tmp_path / "web", "b.jsonl", "a.jsonl", "test.jsonl", "sub/c.jsonl", "notes.md")
    assert texts(f"{tmp_path}/web/*") == ["a.jsonl", "b.jsonl"]
    assert said(f"{tmp_path}/web/*") == "train: 2 files, test: 1 (test.jsonl); left out: notes.md, sub"
    assert texts(f"{tmp_path}/**/*.jsonl", split="test") == ["test.jsonl"]
    assert texts(f"{tmp_path}/w?b/sub/*") == ["sub/c.jsonl"]
    assert source_label(SourceConfig(path=f"{tmp_path}/web/*.jsonl.zst")) == "web"
    with pytest.raises(ConfigError, match=r"nothing in .*/web matches \*\.csv"):
        read(f"{tmp_path}/web/*.csv")
    with pytest.raises(ConfigError, match="wildcards are in path or in files, not in both"):
        read(f"{tmp_path}/web/*", files=("a.jsonl",))


def test_files_that_are_named_are_of_the_requested_split(tmp_path: Path) -> None:
    fill(tmp_path, "b.jsonl", "a.jsonl", "test.jsonl", "_c.jsonl", "d[1].jsonl")
    assert texts(tmp_path, files=("test.jsonl", "a.jsonl")) == ["a.jsonl", "test.jsonl"]
    assert texts(tmp_path, files=("_c.jsonl", "d[1].jsonl")) == ["_c.jsonl", "d[1].jsonl"]
    assert texts(tmp_path, files=("*.jsonl",)) == ["a.jsonl", "b.jsonl", "d[1].jsonl"]
    for name in ("c.jsonl", "../a.jsonl", "/etc/passwd"):
        with pytest.raises(ConfigError, match=f"matches {name}"):
            read(tmp_path, files=("a.jsonl", name))
    with pytest.raises(ConfigError, match="files are of a folder or dataset, and this is a file"):
        read(tmp_path / "a.jsonl", files=("a.jsonl",))


def test_joined_splits_are_read_one_after_the_other_each_with_its_slice(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(LINES)
    (tmp_path / "test.jsonl").write_bytes(LINES.replace(b"a", b"c").replace(b"b", b"d"))
    assert len(read(tmp_path, split="train+test")) == 4
    assert texts(tmp_path, split="test[:1]+train[50%:]") == ["c", "b"]
    assert texts(tmp_path, split="train+test", max_rows=3) == ["a", "b", "c"]
    both, one = (find_source(SourceConfig(path=str(tmp_path), split=s)) for s in ("train+test", "train"))
    assert both.identity() != one.identity()
    assert next(both.beginning())[0].endswith("train.jsonl:1")
    assert both.num_bytes == 2 * len(LINES)
    with pytest.raises(ConfigError, match='no split "dev" among test, train'):
        read(tmp_path, split="train+dev")
    assert read("builtin:tasks", split="train[:1]+heldout[:1]")[1] == read("builtin:tasks", split="heldout[:1]")[0]


# ---- URLs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    for i in range(6):
        fs.pipe(f"/bucket/train-{i:05d}-of-00006.jsonl", json.dumps({"text": str(i) * 1000}).encode())
    fs.pipe("/bucket/test.csv", b"text\nt\n")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def remote_texts(folder: Path, local_gb: float = 1.0, **settings: object) -> Iterator[str]:
    source = SourceConfig(**{"path": "memory://bucket", **settings})
    data = DataConfig(train=(source,), cache_dir=str(folder), local_gb=local_gb)
    return (readers.parsed(raw)["text"] for raw in find_source(source, data).part())


def test_files_at_a_url_are_chosen_as_those_of_a_folder(bucket: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    assert [text[0] for text in remote_texts(tmp_path)] == list("012345")
    assert list(remote_texts(tmp_path, path="memory://bucket/test.csv")) == ["t"]
    assert list(remote_texts(tmp_path, split="test")) == ["t"]
    assert list(remote_texts(tmp_path, files=("test.csv",))) == ["t"]
    assert len(list(remote_texts(tmp_path, path="memory://bucket/*0000[1-3]*", split="train+train[:1]"))) == 4
    assert said("memory://bucket", split="test").startswith("test: 1 file, train: 6 (train-00000-of-00006.jsonl, ")
    assert source_label(SourceConfig(path="https://host/a/web.jsonl.zst?download=true")) == "web"


def test_copies_are_fetched_two_ahead_and_what_stays_has_a_limit(
    bucket: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    get = type(bucket).get_file
    monkeypatch.setattr(
        type(bucket), "get_file", lambda self, path, *a, **k: fetched.append(path) or get(self, path, *a, **k)
    )

    def kept() -> int:
        total = 0
        for path in (tmp_path / remote.FOLDER).rglob("*.jsonl"):
            with suppress(FileNotFoundError):  # one that is removed at this moment, for the next
                total += path.stat().st_size
        return total

    rows = remote_texts(tmp_path, local_gb=3.5e-6)
    seen = [next(rows)[0]]
    for text in rows:
        seen.append(text[0])
        assert kept() <= 3500
        assert len(fetched) <= len(seen) + remote.FILES_AHEAD
    assert seen == list("012345")
    assert len(fetched) == 6
    assert len(list(remote_texts(tmp_path, local_gb=1e-9))) == 6  # a file may be larger than the limit
    assert kept() <= 1100
    fetched.clear()
    rows = remote_texts(tmp_path)
    next(rows)
    rows.close()
    assert len(fetched) <= 1 + remote.FILES_AHEAD  # what nobody reads is not fetched
    assert len(list(remote_texts(tmp_path))) == 6
    fetched.clear()
    assert len(list(remote_texts(tmp_path))) == 6
    assert fetched == []


def test_a_download_that_nobody_waits_for_any_more_is_stopped(
    bucket: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = type(bucket).get_file
    ended = []

    def slow(self: object, path: str, target: str, callback: fsspec.callbacks.Callback) -> None:
        for _ in range(300 * ("00001" in path)):
            callback.relative_update(1)
            time.sleep(0.01)
        ended.append(path)
        get(self, path, target)

    monkeypatch.setattr(type(bucket), "get_file", slow)
    rows = remote_texts(tmp_path)
    next(rows)
    rows.close()
    assert not [path for path in ended if "00001" in path]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_copy_that_another_process_reads_is_not_removed(bucket: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    mine = remote_texts(tmp_path, local_gb=1e-9)
    first = next(mine)
    (copy,) = (tmp_path / remote.FOLDER).rglob("train-00000*")
    others = list(remote_texts(tmp_path, local_gb=1e-9))
    assert copy.exists()
    assert [first, *mine] == others


def test_copies_that_are_read_together_stay_or_go_together_and_count_together(tmp_path: Path) -> None:
    def fetch(group: str, **files: int) -> Path:
        for name, size in files.items():
            (tmp_path / group).mkdir(exist_ok=True)
            (tmp_path / group / name).write_bytes(bytes(size))
        return tmp_path / group

    old, read, new = (fetch("1", idx=10, tokens=1000), fetch("2", idx=10, tokens=1000), fetch("3", text=500))
    for age, group in enumerate((new, read, old)):
        for path in group.iterdir():
            os.utime(path, (1e9 - age, 1e9 - age))
    with (read / "idx").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        remote._make_room(tmp_path, 1600)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["idx", "text", "tokens"]
    assert not old.exists()


def test_what_identifies_a_file_at_a_url_needs_no_download(
    bucket: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(bucket), "get_file", lambda *_, **__: pytest.fail("fetched"))
    source = SourceConfig(path="memory://bucket")
    before = find_source(source).identity()
    assert before == find_source(source).identity()
    bucket.pipe("/bucket/train-00003-of-00006.jsonl", json.dumps({"text": "9" * 1000}).encode())
    assert find_source(source).identity() != before


@pytest.mark.parametrize(
    ("info", "identity"),
    [
        ({"ETag": '"abc"', "Last-Modified": "today"}, (3, '"abc"')),
        ({"blob_id": "of the pointer", "lfs": {"sha256": "of the content", "size": 3}}, (3, "of the content")),
        # A time is no digest: two files may have the same.
        ({"LastModified": "today"}, ("/bucket/test.csv", 3, "today")),
    ],
)
def test_a_file_at_a_url_is_known_by_its_digest_wherever_it_is(
    bucket: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, info: dict[str, object], identity: object
) -> None:
    monkeypatch.setattr(type(bucket), "info", lambda *_: {"type": "file", "size": 3, **info})
    assert list(find_source(SourceConfig(path="memory://bucket/test.csv")).identity()) == [identity]


def test_a_download_that_breaks_off_is_tried_again_and_then_an_error(
    bucket: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    get = type(bucket).get_file

    def broken(self: object, path: str, target: str, **kwargs: object) -> None:
        calls.append(path)
        get(self, path, target, **kwargs)
        if len(calls) <= bad:
            os.truncate(target, 5)

    monkeypatch.setattr(type(bucket), "get_file", broken)
    monkeypatch.setattr(remote.threading.Event, "wait", lambda self, *_: self.is_set())
    bad = 2
    assert list(remote_texts(tmp_path, path="memory://bucket/test.csv")) == ["t"]
    assert len(calls) == 3
    bad = 99
    with pytest.raises(
        DataError, match=r"memory:///?bucket/train-0.*: cannot be fetched: it breaks off: 5 of 1,012 bytes"
    ):
        list(remote_texts(tmp_path))
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob("train*"))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("memory://nowhere", r"memory://nowhere: no such file or folder: "),
        ("memory://bucket/*.parquet", r"bucket/\*\.parquet: no files are there"),
        ("foo://bucket/x.jsonl", r"foo://bucket/x\.jsonl: cannot be read: Protocol not known: foo"),
        ("http://127.0.0.1:9/x.jsonl", r"http://127\.0\.0\.1:9/x\.jsonl: cannot be read: .*connect"),
        ("hf://datasets/org/name/x.jsonl", r"hf://datasets/org/name/x\.jsonl: (HF_HUB_OFFLINE|\S+ cannot be reached)"),
    ],
)
def test_a_url_that_cannot_be_read_is_an_error_before_anything_else(
    bucket: fsspec.AbstractFileSystem, path: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "hub_answers", lambda: False)
    with pytest.raises(ConfigError, match=told):
        find_here(SourceConfig(path=path))


class Web(BaseHTTPRequestHandler):
    """Files of a web server and of a dataset of the hub, and what goes wrong with them."""

    protocol_version = "HTTP/1.1"
    files: ClassVar = {f"train-{i:05d}-of-00002.jsonl": f'{{"text": "{i}"}}\n'.encode() * 50 for i in (0, 1)}
    status: ClassVar[dict[str, int]] = {}
    broken: ClassVar = 0
    commit = "0" * 40

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path in self.status:
            self.answer(b"", self.status[path])
        elif path == "/web/":
            self.answer("".join(f'<a href="/web/{name}">{name}</a>' for name in self.files).encode())
        elif path == "/api/agent-harnesses":
            self.answer(b"{}")
        elif path.endswith("/tree/main"):
            self.answer(json.dumps([{"type": "directory", "path": "data", "oid": "1" * 40}]).encode())
        elif path.startswith("/api/datasets/org/name/tree/"):
            self.answer(
                json.dumps(
                    [
                        {"type": "file", "path": f"data/{n}", "size": len(c), "oid": "1" * 40}
                        for n, c in self.files.items()
                    ]
                ).encode()
            )
        elif path.startswith("/api/datasets/org/name"):
            self.answer(
                json.dumps(
                    {"id": "org/name", "sha": self.commit, "siblings": [], "private": False, "tags": []}
                ).encode()
            )
        elif name in self.files:
            self.answer(self.files[name], digest=f'"{len(self.files[name])}"')
        else:
            self.answer(b"{}", 404)

    def answer(self, body: bytes, status: int = 200, digest: str | None = None) -> None:
        asked = (self.headers.get("Range") or "").removeprefix("bytes=").split("-")
        length = len(body)
        if digest and len(asked) == 2:
            body = body[int(asked[0]) : int(asked[1] or length) + 1]
        self.send_response(206 if digest and len(asked) == 2 else status)
        if digest:
            self.send_header("ETag", digest)
            self.send_header("Accept-Ranges", "bytes")
        if len(asked) == 2:
            self.send_header("Content-Range", f"bytes {asked[0]}-{int(asked[0]) + len(body) - 1}/{length}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if digest and Web.broken:
            Web.broken -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Web, "status", {})
    monkeypatch.setattr(Web, "broken", 0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_files_of_a_web_server_are_read_as_those_of_a_folder(web: str, tmp_path: Path) -> None:
    first = f"{web}/web/train-00000-of-00002.jsonl"
    for path in (first, f"{first}?download=true"):
        assert list(remote_texts(tmp_path, path=path)) == ["0"] * 50
    for path, files in ((f"{web}/web/", ()), (f"{web}/web/*.jsonl", ()), (f"{web}/web", tuple(Web.files))):
        source = SourceConfig(path=path, files=files or None)
        assert list(remote_texts(tmp_path, path=path, files=files or None)) == ["0"] * 50 + ["1"] * 50
        # A page of links says nothing of the files: each is asked for what identifies it.
        assert find_source(source).identity() == [(700, '"700"')] * 2
    assert {file.name for file in tmp_path.rglob("*.jsonl")} <= {*Web.files}


def test_a_connection_that_breaks_is_tried_again_and_what_a_server_says_is_told(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.threading.Event, "wait", lambda self, *_: self.is_set())
    first = f"{web}/web/train-00000-of-00002.jsonl"
    Web.broken = 2
    assert list(remote_texts(tmp_path / "a", path=first)) == ["0"] * 50
    Web.broken = 99
    with pytest.raises(
        DataError, match=r"train-00000-of-00002\.jsonl: cannot be fetched: .*\. Start again when it can be read"
    ):
        list(remote_texts(tmp_path / "b", path=first))
    assert not [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
    for status, words in (
        (404, "no such file or folder: 404"),
        (403, "not allowed: 403"),
        (503, "cannot be read: 503"),
    ):
        Web.status["/web/train-00000-of-00002.jsonl"] = status
        with pytest.raises(ConfigError, match=rf"train-00000-of-00002\.jsonl: {words}"):
            find_here(SourceConfig(path=first))
    with pytest.raises(
        ConfigError, match=r"A page with links to files ends with / or has a wildcard: \S+/org/name/\*\.jsonl"
    ):
        find_here(SourceConfig(path=f"{web}/api/datasets/org/name"))


def test_files_of_the_hub_are_read_by_its_own_file_system(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "hub_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", web)
    template = f"{web}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    fsspec.get_filesystem_class("hf").clear_instance_cache()
    assert list(remote_texts(tmp_path, path="hf://datasets/org/name/data")) == ["0"] * 50 + ["1"] * 50
    Web.broken = 1
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert (
        list(remote_texts(tmp_path / "b", path="hf://datasets/org/name@main/data/*.jsonl")) == ["0"] * 50 + ["1"] * 50
    )
    Web.status["/api/datasets/org/other"] = 401
    with pytest.raises(
        ConfigError, match=r"hf://datasets/org/other/x\.jsonl: (no such file or folder|not allowed): .*org/other"
    ):
        find_here(SourceConfig(path="hf://datasets/org/other/x.jsonl"))
    fsspec.get_filesystem_class("hf").clear_instance_cache()


def test_a_protocol_without_its_library_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"reads s3:// is not installed \(Install s3fs to access S3\)\. Install it"):
        find_here(SourceConfig(path="s3://bucket/x.jsonl"))


# ---- revisions of hub datasets ---------------------------------------------------------------------------------------


def test_a_revision_is_resolved_to_a_commit_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Loaded(list):
        features = None
        _fingerprint = "x"

    def load(source: SourceConfig) -> Loaded:
        loaded.append(source.revision)
        return Loaded([{"text": "a"}])

    monkeypatch.setattr(origin, "hub_answers", lambda: True)
    monkeypatch.setattr(origin, "commit_of", lambda name, kind, revision: {None: "c0", "v1": "c1"}[revision])
    monkeypatch.setattr(origin, "load_from_hub", load)
    assert said("org/name") == "commit c0"
    assert said("org/name", revision="v1") == "commit c1"
    assert texts("org/name", revision="v1", split="train+test") == ["a", "a"]
    assert loaded == ["c0", "c1", "c1", "c1"]


def test_files_of_a_hub_dataset_are_those_of_its_commit(
    bucket: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "hub_answers", lambda: True)
    monkeypatch.setattr(origin, "commit_of", lambda *_: "c0")
    listed = []
    monkeypatch.setattr(
        origin,
        "_remote",
        lambda source, data: (listed.append(source), origin.Origin(lambda: iter(()), list, said="x"))[1],
    )
    assert said("org/name", files=("a/*.parquet",)) == "commit c0; x"
    assert (listed[0].path, listed[0].files) == ("hf://datasets/org/name@c0", ("a/*.parquet",))


def test_without_network_a_revision_is_that_of_a_downloaded_snapshot_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder = fill(tmp_path / "snapshots" / "c1", "train.jsonl", "test.jsonl")

    def download(name: str, *, revision: str | None, **_: object) -> str:
        if revision not in (None, "v1", "c1"):
            raise FileNotFoundError
        return str(folder)

    monkeypatch.setattr(origin, "hub_answers", lambda: False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert texts("org/name", revision="v1") == ["train.jsonl"]
    assert said("org/name", revision="v1").startswith("commit c1; train: 1 file")
    assert texts("org/name", files=("test.jsonl",)) == ["test.jsonl"]
    with pytest.raises(ConfigError, match="revision v2 is not in the cache"):
        read("org/name", revision="v2")


def test_a_revision_of_what_is_no_hub_dataset_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, "a.jsonl")
    for path in (str(tmp_path), "builtin:docs", "memory://bucket", f"{tmp_path}/*.jsonl"):
        with pytest.raises(ConfigError, match="revision is of datasets of the hub, which this is not"):
            find_here(SourceConfig(path=path, revision="main"))


def test_the_commit_of_a_revision_is_what_the_hub_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def repo_info(self, name: str, *, repo_type: str, revision: str | None, timeout: float) -> object:
            if revision == "gone":
                raise ValueError
            return type("Info", (), {"sha": f"{name} {repo_type} {revision}"})

    monkeypatch.setattr(hub.hub, "HfApi", Api)
    assert hub.commit_of("org/name", "dataset", "v1") == "org/name dataset v1"
    assert hub.commit_of("org/name", "dataset", "gone") is None
