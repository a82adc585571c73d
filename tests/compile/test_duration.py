"""How long the compiler will take is said only where it was measured before, by a warm-up of the same key."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._dynamo.utils import counters

from sftkit.compile.watch import note, under_way
from sftkit.config.schema import CompileConfig


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for found in ("miss", "hit"):
        monkeypatch.setitem(counters["inductor"], f"fxgraph_cache_{found}", 0)
    return tmp_path


def ended(seconds: float, *, misses: int = 0, hits: int = 0) -> None:
    counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"] = misses, hits
    note("a" * 64, seconds)


def test_the_seconds_are_those_of_the_last_warm_up_of_the_same_key() -> None:
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks"
    ended(41.26, misses=3)
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks: 41 s when last compiled anew"
    assert under_way(CompileConfig(scope="model"), "b" * 64) == "compiling the model"
    assert under_way(CompileConfig(enabled=False), "a" * 64) == "trying the worst-case batches"


def test_a_start_with_cached_code_does_not_stand_for_one_that_compiles() -> None:
    ended(2.4, hits=3)
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks: 2 s with saved compiled code"
    ended(41.26, misses=3)
    both = "compiling blocks: 41 s when last compiled anew, {} s with saved compiled code"
    assert under_way(CompileConfig(), "a" * 64) == both.format(2)
    ended(12.3, hits=3)
    assert under_way(CompileConfig(), "a" * 64) == both.format(12)


def test_a_start_that_compiled_a_few_of_its_graphs_stands_for_neither() -> None:
    ended(5.0, misses=1, hits=9)
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks"


def test_without_any_cache_each_start_compiles() -> None:
    ended(7.0)
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks: 7 s when last compiled anew"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"anew": "long"}', '{"anew": null}', '{"seconds": 2.0}'])
def test_a_record_that_cannot_be_read_gives_no_number(folder: Path, text: str) -> None:
    note("a" * 64, 12.3)
    (record,) = (folder / "sftkit").iterdir()
    record.write_text(text)
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks"


def test_a_disk_that_takes_no_record_stops_nothing(folder: Path) -> None:
    (folder / "sftkit").write_text("a file")
    note("a" * 64, 12.3)
    assert under_way(CompileConfig(), "a" * 64) == "compiling blocks"
