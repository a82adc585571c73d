"""Rows and tokens at s3:// URLs, from a server on this machine. Skipped without the libraries moto[server] and s3fs."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading import readers, remote
from sftkit.data.reading.origin import find_source
from sftkit.data.tokens import text
from sftkit.data.tokens.sources import RowTokenizer, load_sources
from sftkit.errors import ConfigError, DataError

moto = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")
# The server and the library leave connections open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Line:
    """A connection to a server that can be cut: answers of more than `most` bytes end there, `cuts` times."""

    def __init__(self, port: int) -> None:
        """Listen on a port of its own."""
        self.most = 2**60
        self.cuts = 0
        self._to = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.close = self._socket.close
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                threading.Thread(target=self._serve, args=(self._socket.accept()[0],), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._to)) as server:
            asks = threading.Thread(target=self._pass, args=(client, server, False), daemon=True)
            asks.start()
            self._pass(server, client, True)
            asks.join()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        passed = 0
        with suppress(OSError):
            while part := source.recv(2**12):
                passed += len(part)
                if is_answer and passed > self.most and self.cuts > 0:
                    self.cuts -= 1
                    break
                target.sendall(part)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def line() -> Iterator[Line]:
    """A server with an empty bucket `data`."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    line = Line(server.get_host_and_port()[1])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
        for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
            patch.setenv(f"AWS_{name}", value)
        fsspec.filesystem("s3").mkdir("data")
        yield line
    line.close()
    server.stop()


@pytest.fixture
def bucket(line: Line, request: pytest.FixtureRequest) -> str:
    """A folder of three files of rows."""
    folder = f"data/{request.node.name}"
    for i in range(3):
        rows = "".join(json.dumps({"text": f"{i} {k} " + "x" * 5000}) + "\n" for k in range(20))
        fsspec.filesystem("s3").pipe(f"{folder}/train-{i:05d}-of-00003.jsonl", rows.encode())
    return f"s3://{folder}"


def texts(path: str, cache: Path) -> list[str]:
    source = SourceConfig(path=path)
    data = DataConfig(train=(source,), cache_dir=str(cache))
    return [readers.parsed(raw)["text"][:4].strip() for raw in find_source(source, data).rows()]


EXPECTED = [f"{i} {k}" for i in range(3) for k in range(20)]


def test_rows_in_a_bucket_are_read_in_order_and_their_copies_are_found_again(
    bucket: str, tmp_path: Path, line: Line
) -> None:
    assert texts(bucket, tmp_path) == EXPECTED
    assert texts(f"{bucket}/*-0000[12]-*", tmp_path) == EXPECTED[20:]
    found = find_source(SourceConfig(path=bucket))
    assert found.identity() == find_source(SourceConfig(path=bucket)).identity()
    line.cuts, line.most = 1000, 10_000  # no file could be fetched now
    try:
        assert texts(bucket, tmp_path) == EXPECTED
    finally:
        line.cuts = 0
    with pytest.raises(ConfigError, match=r"s3://data/nothing: no such file or folder"):
        find_source(SourceConfig(path="s3://data/nothing"))
    with pytest.raises(ConfigError, match=r"s3://no-such-bucket/x"):
        find_source(SourceConfig(path="s3://no-such-bucket/x"))


def test_a_connection_that_breaks_is_taken_up_again(bucket: str, tmp_path: Path, line: Line) -> None:
    line.cuts, line.most = 2, 30_000
    assert texts(bucket, tmp_path) == EXPECTED
    assert line.cuts == 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_object_that_is_replaced_after_it_was_listed_is_rejected(bucket: str, tmp_path: Path) -> None:
    source = SourceConfig(path=bucket)
    rows = find_source(source, DataConfig(train=(source,), cache_dir=str(tmp_path)))
    fs = fsspec.filesystem("s3")
    last = f"{bucket}/train-00002-of-00003.jsonl"
    before = rows.identity()
    fs.pipe(last, fs.cat(last).replace(b"xx", b"yy"))  # as many bytes
    with pytest.raises(DataError, match=r"train-00002-of-00003\.jsonl: cannot be fetched: it changed since it was"):
        list(rows.rows())
    assert find_source(source).identity() != before
    assert len(texts(bucket, tmp_path)) == 60


def test_tokens_in_a_bucket_are_those_that_were_written(
    bucket: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    eos = tokenizer.eos_token_id
    documents = [[5, 6, 7, eos], [8, 9, eos]]
    ids = np.array([i for one in documents for i in one], "<u2")
    fsspec.filesystem("s3").pipe(f"{bucket}/tokens/a.bin", ids.tobytes())
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings: dict[str, Any] = {"path": f"{bucket}/tokens", "tokenizer_of": str(tmp_path / "tokenizer")}
    source = SourceConfig(**settings)
    data = DataConfig(train=(source,), cache_dir=str(tmp_path / "cache"))
    examples = load_sources([source], data, RowTokenizer(text.tokenize, tokenizer, 64))
    assert [examples[i].ids.tolist() for i in range(2)] == documents
    while remote.MAPPED:  # as the end of a process does
        remote.MAPPED.pop().close()
