"""Stores of real sources: files that change, what the cache keeps, and exports."""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from sftkit.config.commands import ROOT
from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.batches.loader import load_examples
from sftkit.data.store import foreign, keeping
from sftkit.data.store.shards import RowSpan, Store
from sftkit.data.store.writing import TokenizedRows, write_shard
from sftkit.data.tokens import chat, sources, text
from sftkit.data.tokens.sources import RowTokenizer, load_sources
from sftkit.data.tokens.template import with_arguments
from sftkit.data.types import Examples, TokenizedExample
from sftkit.errors import ConfigError, DataError

Load = Callable[..., Examples]
CHATML = Path(chat.__file__).parent / "chatml.jinja"


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
    for kind in keeping.KEPT.values():
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


# ---- exports ---------------------------------------------------------------------------------------------------------


def export(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Run the command in this process."""
    monkeypatch.setattr(sys, "argv", ["data_stores.py", "export", "megatron", *words])
    assert runpy.run_path(str(ROOT / "scripts" / "data_stores.py"))["main"]() == 0


def test_what_is_exported_for_megatron_is_read_back_as_the_same_documents(
    tmp_path: Path,
    load: Load,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = write_texts(tmp_path / "texts.jsonl", ["One day.", "Nothing is learned in vain, ä € 😀.", "x" * 500])
    other = write_texts(tmp_path / "other.jsonl", ["Another."])
    settings = [f"model.tokenizer={tmp_path / 'tokenizer'}", "model.train_tokenizer=null"]
    settings += [f"data.train=[{{path: '{texts}', max_rows: 3}}, {{path: '{other}'}}]", "data.val=[]"]
    settings += [f"data.cache_dir={tmp_path / 'cache'}", "data.max_length=64"]
    out = tmp_path / "out"
    export(monkeypatch, str(ROOT / "recipes" / "smoke" / "base.yaml"), *settings, "--out", str(out))
    assert f"{out / 'texts'}: 3 documents, " in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "other.bin",
        "other.idx",
        "texts.bin",
        "texts.idx",
        "tokenizer",
    ]
    for path in (texts, other):
        theirs = load(out / f"{path.stem}.bin", tokenizer_of=str(out / "tokenizer"))
        ours = load(path)
        assert [theirs[i].ids.tolist() for i in range(len(theirs))] == [ours[i].ids.tolist() for i in range(len(ours))]
        assert theirs.num_bytes.tolist() == ours.num_bytes.tolist()
    with pytest.raises(ConfigError, match=r"texts\.bin is there already"):
        export(monkeypatch, str(ROOT / "recipes" / "smoke" / "base.yaml"), *settings, "--out", str(out))
    settings[2] = f"data.train=[{{path: '{texts}', where: {{min_tokens: 2}}}}]"
    with pytest.raises(ConfigError, match="val_fraction, where or sample of texts: set in this recipe"):
        export(
            monkeypatch,
            *(str(ROOT / "recipes" / "smoke" / "base.yaml"), *settings, "data.val_fraction=0.5", "--out", str(out)),
        )


def test_an_export_of_masked_documents_or_one_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    part = TokenizedRows(where=["a:1"])
    ids = np.arange(5)
    part.add(TokenizedExample(ids, ids > 0), (0, 0, 0, 0, (0,) * 5))
    part.add(TokenizedExample(ids, ids > 2, size=5), (1, 0, 0, 0, (0,) * 5))
    shard = write_shard(Store(tmp_path, 100), RowSpan(0, 4), iter([part.packed("<u2")]), "a", on_disk=False)
    with pytest.raises(ConfigError, match=r"x: document of row 2 has tokens that are not learned, and Megatron's"):
        foreign.write_megatron(tmp_path / "x", [shard], 100)
    assert not list(tmp_path.iterdir())


# ---- templates with a date -------------------------------------------------------------------------------------------


DATED = (
    "{%- if date_string is not defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}{{ date_string }}"
)


@pytest.mark.parametrize("template", ["dated", "fixed", "set", "without"])
def test_a_store_is_of_a_day_only_if_the_template_writes_the_day(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    template: str,
) -> None:
    chatml = CHATML.read_text()
    tokenizer.chat_template = {
        "dated": DATED + chatml,
        "fixed": with_arguments(DATED + chatml, {"date_string": "26 Jul 2024"}),
        "set": with_arguments(with_arguments(DATED + chatml, {"strftime_now": "1"}), {"strftime_now": "26 Jul 2024"}),
        "without": chatml,
    }[template]
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=str(tmp_path / "x.jsonl"))
    data = DataConfig(train=(source,), cache_dir=str(tmp_path / "cache"))
    for day in (date(2024, 1, 1), date(2024, 1, 2), date(2024, 1, 2)):
        monkeypatch.setattr(sources, "date", SimpleNamespace(today=lambda day=day: day))
        examples, _ = load_examples(data, RowTokenizer(chat.tokenize, tokenizer, 512, "truncate", chat.ANSWERS))
        begins = tokenizer.decode(examples[0].ids).startswith("26 Jul 2024")
        assert begins == (template in ("fixed", "set"))
    stores = 2 if template == "dated" else 1
    assert len(list((tmp_path / "cache" / "stores").iterdir())) == stores
    said = 'model.chat_template_args={strftime_now: "26 Jul 2024"}'
    assert (said in caplog.text) == (template == "dated")
    assert not RowTokenizer(text.tokenize, tokenizer, 512).writes_day, "a text has no template"
