"""Stores of real sources: files that change, what the cache keeps, and exports."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.store import keeping
from sftkit.data.tokens import sources, text
from sftkit.data.tokens.sources import RowTokenizer, load_sources
from sftkit.data.types import Examples
from sftkit.errors import DataError

Load = Callable[..., Examples]


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    return path


@pytest.fixture
def load(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Load:
    """load(path, setting=...): its documents; every token is learned."""

    def run(path: Path, **settings: Any) -> Examples:
        source = SourceConfig(path=str(path), **settings)
        data = DataConfig(train=(source,), cache_dir=str(tmp_path / "cache"))
        return load_sources([source], data, RowTokenizer(text.tokenize, tokenizer, 64))

    return run


# ---- files that change -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "train+train[:1]"])
def test_a_file_that_changes_while_it_is_tokenized_is_rejected_by_its_name(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    path = write_texts(tmp_path / "x.jsonl", ["One day.", "Another."])
    real = RowTokenizer.many

    def many(self: RowTokenizer, rows: Any) -> Any:
        with path.open("a") as file:
            file.write(json.dumps({"text": "More."}) + "\n")
        return real(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(RowTokenizer, "many", many)
        with pytest.raises(DataError, match=r"x\.jsonl: it changed while it was tokenized.* Start again"):
            load(path, split=split)
    assert not list(tmp_path.glob("cache/stores/*/*.ids.bin"))
    assert len(load(path, split=split)) == 3 + (split != "train")


def test_a_file_that_is_touched_while_it_is_tokenized_is_read_for_its_content(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_texts(tmp_path / "x.jsonl", ["One day.", "Another."])
    real = RowTokenizer.many
    monkeypatch.setattr(RowTokenizer, "many", lambda self, rows: (os.utime(path, (1, 1)), real(self, rows))[1])
    assert len(load(path)) == 2


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_all_that_the_cache_keeps_is_listed_and_pruned_by_last_use_but_copies_that_are_read(
    tmp_path: Path, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    load(write_texts(tmp_path / "x.jsonl", ["One day."]))
    for name in ("images-1/pictures.npy", "chosen-1.json", "borders/1.npy", "remote/1/x.jsonl", "hashes/1.json"):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(b"0" * 1000)
    (cache / "chat_history").write_text("hello")  # a user's own
    assert keeping.print_kept(cache, verify=True)
    out = capsys.readouterr().out
    for kind in keeping.KINDS.values():
        assert f"1 {kind}" in out
    used = {"hashes/1.json": 9, "chosen-1.json": 8, "remote/1/x.jsonl": 7, "borders/1.npy": 6, "images-1": 5}
    for name, at in used.items():
        os.utime(cache / name, (2e9 + at, 2e9 + at))
    os.utime(cache / "remote" / "1", (1, 1))
    assert [one.path.name for one in keeping.kept_in(cache)][:5] == [
        *["1.json", "chosen-1.json", "1"],
        "1.npy",
        "images-1",
    ]
    while sources.IN_USE:  # as the end of a process does
        os.close(sources.IN_USE.popitem()[1])
    keeping.remove_least_used(cache, "4k")
    assert [one.path.name for one in keeping.kept_in(cache)] == ["1.json", "chosen-1.json", "1", "1.npy"]
    with (cache / "remote" / "1" / "x.jsonl").open("rb") as read:
        fcntl.flock(read, fcntl.LOCK_SH)
        assert keeping.remove_least_used(cache, "0") == 3000
    assert [one.path.name for one in keeping.kept_in(cache)] == ["1"]
    assert keeping.remove_least_used(cache, "0") == 1000
    assert (cache / "chat_history").exists()
