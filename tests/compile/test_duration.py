"""How long the compiler will take is said only where it was measured before, by a warm-up of the same key."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._dynamo.utils import counters

from sftkit.compile.duration import note, under_way
from sftkit.config.schema import CompileConfig


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(counters["inductor"], "fxgraph_cache_miss", 0)
    return tmp_path


def test_the_seconds_are_those_of_the_last_warm_up_of_the_same_key() -> None:
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks"
    counters["inductor"]["fxgraph_cache_miss"] = 3
    note("a" * 64, 41.26)
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks: 41 s the last time, then without compiled code"
    assert under_way(CompileConfig(scope="model"), "b" * 64) == "compiling the model"
    counters["inductor"]["fxgraph_cache_miss"] = 0
    note("a" * 64, 12.3)
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks: 12 s the last time"
    assert under_way(CompileConfig(enabled=False), "a" * 64) == "trying the worst-case batches"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seconds": "long", "compiled_anew": true}'])
def test_a_record_that_cannot_be_read_gives_no_number(folder: Path, text: str) -> None:
    note("a" * 64, 12.3)
    (record,) = (folder / "sftkit").iterdir()
    record.write_text(text)
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks"


def test_a_disk_that_takes_no_record_stops_nothing(folder: Path) -> None:
    (folder / "sftkit").write_text("a file")
    note("a" * 64, 12.3)
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks"
