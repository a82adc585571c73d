"""What a run sees of a store: the documents, counts and findings that its rule makes at data.max_length."""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading import columns as findings
from sftkit.data.reading import rows
from sftkit.data.store import cutting, keeping, making
from sftkit.data.store.view import ROLE_COUNTS
from sftkit.data.tokens import chat, processes, sources, text
from sftkit.data.tokens.batch import RowBatches
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import Examples, Row, Tokenized, TokenizedExample
from sftkit.errors import ConfigError, DataError
from sftkit.preflight.data import source_facts


def turn(role: str, words: int, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": " ".join(f"{role[0]}{i}" for i in range(words)), **more}


def some_rows(seed: int) -> list[Any]:
    """Conversations of all lengths, with reasoning, tools, marks and faults, and texts."""
    rng = np.random.default_rng(seed)
    found: list[Any] = []
    for _ in range(40):
        turns = [turn("system", int(rng.integers(1, 8)))] * int(rng.integers(2))
        for _ in range(int(rng.integers(1, 5))):
            thought = {"reasoning_content": "hm " * int(rng.integers(1, 9))} if rng.random() < 0.4 else {}
            mark = {"train": False} if rng.random() < 0.2 else {}
            turns += [
                turn("user", int(rng.integers(1, 30))),
                turn("assistant", int(rng.integers(1, 40)), **thought, **mark),
            ]
        found.append({"messages": turns, **({"quality": 1} if rng.random() < 0.3 else {})})
        found.append({"text": "word " * int(rng.integers(0, 90)) + "<image>" * int(rng.integers(2))})
    return [*found[:30], {"messages": []}, *found[30:]]


def write(path: Path, items: list[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def expected(path: Path, tokenize: RowTokenizer) -> tuple[list[TokenizedExample], Counter[str], findings.Tally]:
    """What the rule makes of the rows of a file, row by row."""
    documents: list[TokenizedExample] = []
    counts: Counter[str] = Counter()
    tally: findings.Tally = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        counts["rows"] += 1
        try:
            row = rows.parse((f"{path}:{number}", json.loads(line)))
            found = tokenize(row)
        except DataError as error:
            counts["skipped_bad"] += 1
            findings.add(tally, "skipped", error.reason, str(error))
            continue
        for name in (*row.unused, *found.unused):
            findings.add(tally, "unused", name, row.where)
        counts.update(found.counts)
        if found.note:
            counts[found.note] += 1
        if found.note in findings.DROPPED:
            findings.add(tally, "dropped", findings.DROPPED[found.note], row.where)
        if found.examples:
            counts.update(ROLE_COUNTS[message["role"]] for message in row.messages or ())
            for reason, where in found.odd.items():
                findings.add(tally, "accepted", reason, where)
        documents += found.examples
    counts["documents"] = len(documents)
    return documents, counts, tally


def check(examples: Examples, path: Path, tokenize: RowTokenizer) -> None:
    documents, counts, tally = expected(path, tokenize)
    assert len(examples) == len(documents)
    for i, document in enumerate(documents):
        assert examples[i].ids.tolist() == document.ids.tolist(), i
        assert examples[i].is_target.tolist() == document.is_target.tolist(), i
        assert examples[i].num_bytes == document.num_bytes, i
    assert examples.lengths.tolist() == [len(document.ids) - 1 for document in documents]
    assert examples.num_targets.tolist() == [int(document.is_target.sum()) for document in documents]
    assert {name: count for name, count in examples.counts["a"].items() if count} == {
        k: n for k, n in counts.items() if n
    }
    found = sorted((one.kind, one.reason, one.rows) for one in examples.findings["a"] if one.kind != "read")
    assert found == sorted((one.kind, one.reason, one.rows) for one in tally.values())


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "CHUNK_ROWS", 8)
    monkeypatch.setattr(making, "SHARD_CHARACTERS", 2**12)


LAST = chat.Learning("last_turn", split_turns=False)


@pytest.mark.parametrize(
    ("template", "learning"),
    [
        ("qwen3", chat.ANSWERS),
        pytest.param("qwen3", chat.EVERYTHING, marks=pytest.mark.slow),
        pytest.param("qwen3", LAST, marks=pytest.mark.slow),
        pytest.param("smollm3", chat.ANSWERS, marks=pytest.mark.slow),
        ("smollm3", chat.EVERYTHING),
        pytest.param("llama3", LAST, marks=pytest.mark.slow),
    ],
)
def test_documents_counts_and_findings_are_those_of_the_rule(
    tmp_path: Path, make_tokenizer: Any, template: str, learning: chat.Learning
) -> None:
    path = write(tmp_path / "a.jsonl", some_rows(len(template)))
    tokenizer = make_tokenizer(template)
    calls = 0
    for max_length, too_long in ((20, "truncate"), (60, "truncate"), (60, "drop"), (150, "truncate"), (5000, "error")):
        tokenize = RowTokenizer(text.tokenize_any, tokenizer, max_length, too_long, learning)
        data = DataConfig(train=(), on_bad_row="skip", too_long=too_long, cache_dir=str(tmp_path / "cache"))  # type: ignore[arg-type]
        check(sources.load_sources([SourceConfig(path=str(path))], data, tokenize), path, tokenize)
        calls += 1
    assert len(list((tmp_path / "cache" / "stores").iterdir())) == 1
    assert len(list((tmp_path / "cache" / "stores").glob("*/*.ids.bin"))) > 2
    assert len(list((tmp_path / "cache" / "views").iterdir())) == calls


@pytest.fixture
def load(tmp_path: Path, tokenizer: Any) -> Any:
    """load(source, ..., max_length=20): what a run of these sources sees, and which rows were tokenized for it."""

    def run(
        *given: SourceConfig | Path,
        max_length: int = 20,
        too_long: str = "truncate",
        rule: Any = text.tokenize_any,
        **settings: Any,
    ) -> Examples:
        chosen = [one if isinstance(one, SourceConfig) else SourceConfig(path=str(one)) for one in given]
        data = DataConfig(train=(), **{"cache_dir": str(tmp_path / "cache"), **settings})
        tokenize = RowTokenizer(rule, tokenizer, max_length, None if rule is text.tokenize else too_long)
        return sources.load_sources(chosen, data, tokenize)

    return run


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the rows that are tokenized."""
    found: list[int] = []
    real = processes.tokenize_chunk

    def counted(*args: Any) -> Any:
        found.extend(range(args[-1][0], args[-1][0] + len(args[-1][1])))
        return real(*args)

    monkeypatch.setattr(processes, "tokenize_chunk", counted)
    return found


TEXTS = [{"text": f"row {i} " * (5 + i)} for i in range(12)]


def test_what_selects_or_cuts_documents_tokenizes_nothing_again(
    tmp_path: Path, load: Any, tokenized: list[int]
) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    other = write(tmp_path / "b.jsonl", TEXTS[:2])
    source = SourceConfig(path=str(path))
    load(path)
    assert len(tokenized) == 12
    del tokenized[:]
    load(path, max_length=50)
    load(path, too_long="drop")
    load(path, on_bad_row="skip")
    load(replace(source, name="b", repeat=2))
    assert tokenized == []
    assert len(load(path, other)) == len(load(path)) + len(load(other))
    assert tokenized == [0, 1]
    moved = tmp_path / "elsewhere.jsonl"
    path.rename(moved)
    os.utime(moved, (1, 1))
    load(moved)
    assert tokenized == [0, 1]


def test_what_changes_tokens_is_tokenized_again(
    tmp_path: Path, load: Any, tokenized: list[int], monkeypatch: Any
) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    load(path)
    for number in range(2, 5):
        if number == 2:
            write(path, [*TEXTS[:11], {"text": "another"}])
        load(path, rule=text.tokenize if number > 2 else text.tokenize_any)
        if number == 3:
            monkeypatch.setattr(sources, "MASK_VERSION", sources.MASK_VERSION + 1)
        assert len(tokenized) == 12 * number


def test_a_source_with_a_row_that_differs_in_a_batch_is_tokenized_row_by_row(
    tmp_path: Path, load: Any, tokenized: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    expected = load(path, cache_dir=str(tmp_path / "right"))
    del tokenized[:]

    def wrong(batch: RowBatches, rows: Sequence[Row]) -> list[Any]:
        batch.different = rows[0].where
        return [Tokenized([]) for _ in rows]

    monkeypatch.setattr(RowBatches, "many", wrong)
    for _ in range(2):  # the second start knows that it was so
        found = load(path)
        documents = np.arange(len(expected))
        assert len(found) == len(expected)
        assert all(map(np.array_equal, found.gather(documents), expected.gather(documents)))
    assert tokenized == [*range(8), *range(12)], "a chunk together, then all by themselves, and never again"


def test_a_part_of_a_pass_counts_as_a_part(tmp_path: Path, load: Any) -> None:
    source = SourceConfig(path=str(write(tmp_path / "a.jsonl", TEXTS)))
    (once,) = source_facts(load(source))
    (found,) = source_facts(load(replace(source, repeat=2.5)))
    for name in ("rows", "documents", "tokens", "targets"):
        assert abs(found[name] - 2.5 * once[name]) <= 0.5 < once[name], name


def test_places_are_those_of_the_source_as_it_is_now(tmp_path: Path, load: Any, tokenized: list[int]) -> None:
    write(tmp_path / "a.jsonl", [*TEXTS, {"text": 5}])
    with pytest.raises(DataError) as first:
        load(tmp_path / "a.jsonl")
    load(tmp_path / "a.jsonl", on_bad_row="skip")
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    made = len(tokenized)
    with pytest.raises(DataError) as again:
        load(tmp_path / "b.jsonl")
    assert str(again.value) == str(first.value).replace("a.jsonl", "b.jsonl")
    assert (again.value.reason, made) == (first.value.reason, len(tokenized))
    finding = load(tmp_path / "b.jsonl", on_bad_row="skip").findings["b"][0]
    assert finding.first.startswith(f"{tmp_path}/b.jsonl:13: ")


def test_the_first_document_that_is_too_long_is_named(tmp_path: Path, load: Any) -> None:
    rows_ = [{"messages": [turn("user", 2), turn("assistant", n)]} for n in (3, 4, 60, 70)]
    path = write(tmp_path / "a.jsonl", rows_)
    with pytest.raises(DataError, match=rf"^{path}:3: \d+ tokens, but data\.max_length 40 holds 41"):
        load(path, max_length=40, too_long="error")
    skipped = load(path, max_length=40, too_long="error", on_bad_row="skip")
    assert skipped.counts["a"]["skipped_bad"] == skipped.findings["a"][0].rows == 2
    assert (skipped.counts["a"]["answers"], skipped.counts["a"]["answers_learned"]) == (2, 2)


def test_another_version_of_a_library_tokenizes_some_rows_to_compare(
    tmp_path: Path, load: Any, tokenized: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(sources, "COMPARED_ROWS", 3)
    first = load(path)
    del tokenized[:]
    monkeypatch.setattr(sources, "version", lambda _: "9")
    for _ in range(2):
        assert load(path).lengths.tolist() == first.lengths.tolist()
    assert tokenized == [0, 1, 2], "compared once"
    real = text._ids
    monkeypatch.setattr(text, "_ids", lambda *args, **settings: real(*args, **settings)[::-1])
    monkeypatch.setattr(RowBatches, "many", lambda batch, rows: [batch.by_itself(row) for row in rows])
    monkeypatch.setattr(sources, "version", lambda _: "10")
    for _ in range(2):
        assert load(path)[0].ids.tolist() != first[0].ids.tolist()
    assert len([n for n in tokenized if n > 2]) == 9, "a store of its own"
    monkeypatch.setattr(sources, "version", lambda _: "9")
    assert load(path)[0].ids.tolist() == first[0].ids.tolist()


@pytest.mark.parametrize("name", ["start.npy", "lengths.npy", "about.json"])
def test_a_damaged_view_is_named_and_made_again(tmp_path: Path, load: Any, caplog: Any, name: str) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    made = load(path)
    first = made.gather(range(len(made)))[0].tolist()
    (folder,) = (tmp_path / "cache" / "views").iterdir()
    raw = bytearray((folder / name).read_bytes())
    raw[-3] ^= 1
    (folder / name).write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        again = load(path)
    assert again.gather(range(len(again)))[0].tolist() == first
    assert caplog.text.count(f"{name} is not what was written") == 1
    caplog.clear()
    load(path)
    assert not caplog.records


def test_a_text_longer_than_a_piece_is_one_document(tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    whole = load(path, max_length=33)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(sources, "WHOLE", 7)
    pieces = load(path, max_length=33)
    assert pieces.lengths.tolist() == whole.lengths.tolist()
    assert all(
        np.array_equal(*pair)
        for pair in zip(pieces.gather(range(len(pieces))), whole.gather(range(len(whole))), strict=True)
    )


def thousand_zeros(row: Any, tokenizer: Any, max_length: int, **_: Any) -> Any:
    ids = np.zeros(1000, np.int32)
    return text.Tokenized([TokenizedExample(ids, np.arange(1000) > 300, 2000, size=1001, answers=((300, 1000),))])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(chat, "tokenize", thousand_zeros)
    monkeypatch.setattr(making, "SHARD_CHARACTERS", 2**22)
    peaks = []
    for rows_ in (4_000, 24_000):
        path = write(tmp_path / f"{rows_}.jsonl", [{"text": "x" * 1000}] * rows_)
        data = DataConfig(train=(), cache_dir=str(tmp_path / "cache"))
        tracemalloc.start()
        examples = sources.load_sources(
            [SourceConfig(path=str(path))], data, RowTokenizer(thousand_zeros, tokenizer, 800, "truncate")
        )
        examples.num_targets.sum()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert int(examples.lengths.sum()) == 800 * rows_
    assert peaks[1] - peaks[0] < 40e6, peaks


@pytest.mark.slow
def test_a_process_that_tokenizes_imports_neither_torch_nor_datasets(tokenizer: Any) -> None:
    work = partial(processes.tokenize_chunk, RowTokenizer(text.tokenize, tokenizer, 20), "error", "<u2")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["sftkit.data.tokens.preloaded"])
    with ProcessPoolExecutor(1, forks, initializer=processes._start_worker, initargs=(pickle.dumps(work),)) as executor:
        assert executor.submit(processes._work, (0, [("a:1", {"text": "Some text"})])).result().docs
        assert executor.submit(eval, "{'torch', 'datasets'} & {*__import__('sys').modules}").result() == set()


def test_few_rows_are_tokenized_without_other_processes(
    tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "available_processes", lambda: 2)
    monkeypatch.setattr(
        processes, "_in_processes", lambda executor, number, chunks: (pytest.fail("started") for _ in chunks)
    )
    path = write(tmp_path / "a.jsonl", TEXTS)
    assert load(path).counts["a"]["rows"] == 12
    monkeypatch.setattr(processes, "FEW_ROWS", 8)
    write(path, TEXTS[1:])
    with pytest.raises(pytest.fail.Exception, match="started"):
        load(path)


def test_ranks_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(100))
    found = []
    for ranks in ("1", "8", "200"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found.append(processes.available_processes())
    assert found == [32, 12, 1]


def release() -> None:
    """Let go of all stores, as the end of a process does."""
    while sources.IN_USE:
        os.close(sources.IN_USE.popitem()[1])


def test_a_store_that_a_process_reads_is_not_pruned(tmp_path: Path, load: Any, capsys: Any) -> None:
    examples = load(write(tmp_path / "a.jsonl", TEXTS))
    assert keeping.remove_least_used(tmp_path / "cache", "0") > 0  # the view
    [store] = keeping.kept_in(tmp_path / "cache")
    assert f"in use {store.path}" in capsys.readouterr().out
    assert [len(examples[i].ids) for i in range(len(examples))] == (examples.lengths + 1).tolist()
    release()
    keeping.remove_least_used(tmp_path / "cache", "0")
    assert not list(keeping.kept_in(tmp_path / "cache"))


def test_a_start_waits_for_a_store_that_is_being_pruned_and_makes_it_again(
    tmp_path: Path, load: Any, capsys: Any
) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    cache = tmp_path / "cache"
    before = load(path)
    release()
    [store] = (cache / "stores").iterdir()
    pruning = os.open(store, os.O_RDONLY)
    fcntl.flock(pruning, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as thread:
        started = thread.submit(load, path)
        with pytest.raises(TimeoutError):
            started.result(0.3)
        os.rename(store, tmp_path / "gone")
        os.close(pruning)
        examples = started.result(30)
    keeping.remove_least_used(cache, "0")
    assert f"in use {store}" in capsys.readouterr().out
    assert [one.ids.tolist() for one in map(examples.__getitem__, range(len(examples)))] == [
        one.ids.tolist() for one in map(before.__getitem__, range(len(before)))
    ]


def test_what_is_pruned_is_gone_at_once_and_another_process_may_prune_too(
    tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    load(write(tmp_path / "a.jsonl", TEXTS))
    release()
    kept = list(keeping.kept_in(cache))
    there: list[bool] = []
    remove = keeping.shutil.rmtree
    folders = [one.path for one in kept if one.path.is_dir()]
    monkeypatch.setattr(
        keeping.shutil, "rmtree", lambda path: there.append(folders[len(there)].exists()) or remove(path)
    )
    assert keeping.remove_least_used(cache, "0") == sum(one.num_bytes for one in kept)
    assert there == [False] * len(folders)
    monkeypatch.setattr(keeping, "kept_in", lambda cache: iter(kept))
    assert keeping.remove_least_used(cache, "0") == 0


def test_a_view_keeps_20_bytes_a_document_and_all_columns_are_those_of_wide_ones(
    tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", some_rows(i)) for i, name in enumerate("ab")]
    settings = {"max_length": 60, "on_bad_row": "skip"}
    narrow = load(*paths, cache_dir=str(tmp_path / "narrow"), **settings)
    monkeypatch.setattr(cutting, "NARROW_COLUMNS", ())
    wide = load(*paths, cache_dir=str(tmp_path / "wide"), **settings)
    names = ("lengths", "num_targets", "num_bytes", "source")
    sizes = []
    for one in (narrow, wide):
        arrays = [*(getattr(one, name) for name in names), one.tokens.shard, one.tokens.start]
        sizes.append(sum(array.itemsize for array in arrays))
    assert sizes[0] <= 18, sizes
    assert sizes[1] == 28
    for name in names:
        assert np.array_equal(getattr(narrow, name), getattr(wide, name)), name
    every = np.arange(len(narrow))
    assert all(map(np.array_equal, narrow.gather(every), wide.gather(every)))
    docs = np.concatenate([shard.docs for shard in narrow.tokens.shards])
    entry = np.searchsorted(np.unique(docs["content"]), narrow.columns.content)
    assert np.array_equal(np.unique(docs["content"])[entry], narrow.columns.content)
    assert all(map(np.array_equal, narrow.take(every[::3]).columns, (column[::3] for column in wide.columns)))


def test_what_is_kept_is_listed_verified_and_pruned_by_last_use(tmp_path: Path, load: Any, capsys: Any) -> None:
    cache = tmp_path / "cache"
    for name, at in (("old", 1e9), ("new", 2e9)):
        load(write(tmp_path / f"{name}.jsonl", [*TEXTS, {"text": name}]))
        for folder in (*cache.glob("stores/*"), *cache.glob("views/*")):
            for path in (*folder.iterdir(), folder):
                if path.stat().st_mtime not in (1e9, 2e9):
                    os.utime(path, (at, at))
    kept = list(keeping.kept_in(cache))
    assert [Path(one.source).stem for one in kept if one.source] == ["new", "old"]
    assert keeping.print_kept(cache, verify=True)
    out = capsys.readouterr().out
    assert "13 documents" in out
    assert "2 stores, 2 views in" in out
    assert "the files of all stores have their sha256" in out
    ids = next(kept[-1].path.parents[1].glob("stores/*/*.ids.bin"))
    ids.write_bytes(ids.read_bytes()[:-1] + b"?")
    assert not keeping.print_kept(cache, verify=True)
    assert f"{ids.name} is not what was written" in capsys.readouterr().err
    release()
    keeping.remove_least_used(cache, f"{sum(one.num_bytes for one in kept[:2]) + 1}B")
    assert {one.path for one in keeping.kept_in(cache)} == {one.path for one in kept[:2]}
    keeping.remove_least_used(cache, "0G")
    assert not list(keeping.kept_in(cache))
    with pytest.raises(ConfigError, match="such as 200G"):
        keeping.remove_least_used(cache, "much")
    with pytest.raises(ConfigError, match="--keep-size 200: a number with its unit"):  # of bytes: it would remove all
        keeping.remove_least_used(cache, "200")
