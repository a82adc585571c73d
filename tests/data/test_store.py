"""A store: shards are whole or absent, the same whoever makes them, and a run sees the documents that its rule makes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_states import Recording, State, files_of, unrecovered

from sftkit.config.schema import SourceConfig
from sftkit.data.reading.columns import add
from sftkit.data.reading.readers import RawRow
from sftkit.data.store import making, shards, writing
from sftkit.data.store.making import Peers, shards_of
from sftkit.data.store.shards import LINES_FILE, STAMPS, RowSpan, Shard, Store
from sftkit.data.store.writing import TokenizedRows, write_shard
from sftkit.data.types import TokenizedExample
from sftkit.errors import ConfigError

SOURCE = SourceConfig(path="some/rows.jsonl")
ROWS = 10
Tokenize = Callable[..., Iterator[TokenizedRows]]


def rows(number: int = ROWS) -> Iterator[RawRow]:
    return ((f"{SOURCE.path}:{i + 1}", i) for i in range(number))


def tokenize(chunks: Iterable[tuple[int, list[RawRow]]], calls: list[int] | None = None) -> Iterator[TokenizedRows]:
    """Made-up documents: none of every fifth row, two of the row before."""
    for first, chunk in chunks:
        part = TokenizedRows()
        for number, (where, _) in enumerate(chunk, start=first):
            if calls is not None:
                calls.append(number)
            part.where.append(where)
            part.counts["answers"] += 2
            add(part.tally, "read", f"kind {number % 2}", f"{where}: as it is")
            for again in range((1, 1, 1, 2, 0)[number % 5]):
                ids = np.arange(2 + 3 * number + again, dtype=np.int32)
                is_target = ids % 2 == 1
                one = TokenizedExample(ids, is_target, len(ids), f"{number}.png", size=len(ids) + 1, answers=((1, 2),))
                part.add(one, (number, 0, 7, 8, (0, 0, 1, 1, 0)))
                part.odd.append((number, "odd"))
        yield part.packed("<u2")


def ahead(chunks: Iterable[tuple[int, list[RawRow]]], calls: list[int] | None = None) -> Iterator[TokenizedRows]:
    """The same by processes: four chunks are read before the first part is there."""
    waiting: deque[TokenizedRows] = deque()
    for part in tokenize(chunks, calls):
        waiting.append(part)
        if len(waiting) > 4:
            yield waiting.popleft()
    yield from waiting


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "CHUNK_ROWS", 2)
    monkeypatch.setattr(making, "POLL_SECONDS", 0.01)


def made(folder: Path, span: tuple[int, int | None] = (0, None), number: int = ROWS, **settings: Any) -> list[Shard]:
    """The shards of 4 rows each, in order."""
    how = {"tokenize": tokenize, "per_shard": 4, **settings}
    found = list(shards_of(Store(folder, 1000), SOURCE, partial(rows, number), span, **how))
    return sorted(found, key=lambda shard: shard.span)


def content(folder: Path) -> dict[str, bytes]:
    """The files of a store but its stamps, which are of this disk, and locks and drafts of a process that is gone."""
    return {n: raw for n, raw in files_of(folder).items() if n != STAMPS and not n.endswith((".lock", ".tmp"))}


def documents(found: list[Shard]) -> list[list[int]]:
    return [
        shard.tokens(int(start), int(doc["length"]))[0].tolist()
        for shard in found
        for start, doc in zip(np.cumsum(shard.docs["length"]) - shard.docs["length"], shard.docs, strict=True)
    ]


def answers_of(shard: Shard) -> list[list[int]]:
    """The answers of all documents of a shard."""
    places = zip(shard.docs, shard.starts.tolist(), strict=True)
    return [answer for place in places for answer in shard.answers_of(*place).tolist()]


def test_a_store_holds_what_was_tokenized(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert [(*shard.span, shard.line["rows"]) for shard in found] == [(0, 4, 4), (4, 8, 4), (8, 12, 2)]
    numbers = [i for i in range(ROWS) for _ in range((1, 1, 1, 2, 0)[i % 5])]
    assert np.concatenate([shard.docs["row"] for shard in found]).tolist() == numbers
    assert [len(one) for one in documents(found)] == [
        2 + 3 * i + (i % 5 == 3 and i == j) for i, j in zip(numbers, [None, *numbers], strict=False)
    ]
    ids, is_target = found[1].tokens(0, int(found[1].docs["length"][0]))
    assert is_target.tolist() == (ids % 2 == 1).tolist()
    assert answers_of(found[0]) == [[1, 2]] * 5
    assert found[0].line["odd"] == ["odd"]
    assert (found[0].docs["odd"] & 1).all()
    assert [found[2].where(i, "elsewhere") for i in (8, 9)] == ["elsewhere:9", "elsewhere:10"]
    assert sum(shard.line["counts"]["answers"] for shard in found) == 2 * ROWS


def test_no_column_is_made_of_a_negative_number_and_an_unsigned_array_which_newer_numpy_rejects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(tmp_path)
    real = np.where

    def strict(condition: Any, *both: Any) -> Any:
        kinds = {np.asarray(one).dtype.kind for one in both if not isinstance(one, int)}
        assert "u" not in kinds or all(one >= 0 for one in both if isinstance(one, int))
        return real(condition, *both)

    monkeypatch.setattr(shards.np, "where", strict)
    assert all((shard.docs["told"] >= -1).all() for shard in found)


def test_a_start_parses_the_manifest_once_whatever_the_number_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    parsed: list[bytes] = []
    monkeypatch.setattr(shards, "is_whole", lambda line: parsed.append(line) or True)
    assert len(made(tmp_path)) == 3
    assert len(parsed) == 3


def test_without_a_mask_every_token_but_the_first_is_a_target(tmp_path: Path) -> None:
    ids = np.arange(5)
    part = TokenizedRows(where=["a:1"])
    for _ in range(2):
        part.add(TokenizedExample(ids, ids > 0, 4), (0, 0, 0, 0, (0,) * 5))
    shard = write_shard(Store(tmp_path, 2**16 + 1), RowSpan(0, 4), iter([part.packed("<u4")]), "a", on_disk=True)
    assert not list(tmp_path.glob("*.mask.bin"))
    assert shard.tokens(5, 5)[1].tolist() == [False, True, True, True, True]
    assert (tmp_path / f"{shard.span}.ids.bin").stat().st_size == 4 * 10, "uint32 for more than 65,536 entries"


@pytest.mark.parametrize("how", [tokenize, ahead])
@pytest.mark.parametrize("number", [0, 3, 4, 8])
def test_a_source_of_any_number_of_rows_is_read_once(tmp_path: Path, number: int, how: Tokenize) -> None:
    calls: list[int] = []
    found = made(tmp_path, number=number, tokenize=partial(how, calls=calls))
    assert (calls, sum(shard.line["rows"] for shard in found)) == (list(range(number)), number)
    assert [shard.span.first for shard in found] == list(range(0, number + 1, 4))
    again = made(tmp_path, number=number, tokenize=partial(how, calls=calls))
    assert (len(calls), [shard.line for shard in again]) == (number, [shard.line for shard in found])


def test_slices_share_shards_and_make_only_the_rows_at_their_borders(tmp_path: Path) -> None:
    calls: list[int] = []
    for span, new in (((3, 9), [3, 4, 5, 6, 7, 8]), ((3, 9), []), ((0, None), [0, 1, 2, 3, 8, 9]), ((20, 30), [])):
        calls.clear()
        found = made(tmp_path, span, tokenize=partial(tokenize, calls=calls))
        assert calls == new, span
    assert found == []
    whole = documents(made(tmp_path / "other"))
    assert documents(made(tmp_path, (3, 9))) == whole[3:10]


def conversations(mean: int, number: int) -> TokenizedRows:
    """Conversations of one to three answers, which are half of their tokens, some with an answer that has a gap."""
    rng = np.random.default_rng(0)
    part = TokenizedRows(where=[f"{SOURCE.path}:{i + 1}" for i in range(number)])
    for i in range(number):
        answers = 1 + i % 3
        borders = np.cumsum(rng.integers(1, max(mean // answers, 3), 2 * answers))
        is_target = np.zeros(borders[-1], bool)
        for begin, end in borders.reshape(-1, 2):
            is_target[begin:end] = True
        if i % 100 == 99:
            is_target[borders[0] + 1 : borders[0] + 3] = False
        ids = rng.integers(0, 2**16, len(is_target)).astype(np.int32)
        places = tuple((int(begin), int(end)) for begin, end in borders.reshape(-1, 2))
        one = TokenizedExample(ids, is_target, 4 * int(is_target.sum()), size=len(ids) + 1, answers=places)
        numbers = rng.integers(0, 2**63, 2, dtype=np.uint64).tolist()
        part.add(one, (i, 0, *numbers, (i % 2, answers, answers, 0, 0)))
    return part.packed("<u2")


@pytest.mark.parametrize(("mean", "most"), [(192, 2.25), (500, 2.2)])
def test_a_token_takes_little_more_than_its_two_bytes_and_all_of_its_document_is_read_back(
    tmp_path: Path, mean: int, most: float
) -> None:
    part = conversations(mean, 2000)
    tokens = len(part.ids[0])
    assert mean * 0.95 < tokens / 2000 < mean * 1.05
    shard = write_shard(Store(tmp_path, 2**16), RowSpan(0, 2048), iter([part]), SOURCE.path, on_disk=True)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) / tokens <= most
    expected = np.array(part.docs, shard.docs.dtype)
    for name in shard.docs.dtype.names:
        if name not in ("head", "told"):
            assert shard.docs[name].tolist() == expected[name].tolist(), name
    assert (shard.docs["head"] >> np.uint64(32)).tolist() == (expected["head"] >> np.uint64(32)).tolist()
    assert [tuple(answer) for answer in answers_of(shard)] == part.answers
    assert 0 < (shard.docs["told"] >= 0).sum() < 50, "the runs of targets say most answers"


def test_columns_take_what_the_largest_value_needs(tmp_path: Path) -> None:
    part = TokenizedRows(where=["a:1"])
    ids = np.arange(2**17) % 7
    part.add(TokenizedExample(ids, ids > 0, 2**31, size=2**18), (2**31, 3, 2**64 - 1, 2**64 - 1, (2**16 - 1,) * 5))
    shard = write_shard(Store(tmp_path, 1000), RowSpan(5, 9), iter([part.packed("<u2")]), "a", on_disk=True)
    doc = shard.docs[0]
    assert [int(doc[name]) for name in ("length", "size", "bytes", "row")] == [2**17, 2**18, 2**31, 2**31]
    assert (int(doc["odd"]), int(doc["content"]), doc["roles"].tolist()) == (3, 2**64 - 1, [2**16 - 1] * 5)


def seen(found: list[Shard]) -> dict[str, Any]:
    """All that a run reads of shards."""
    counts: Counter[str] = Counter()
    tally: dict[Any, Any] = {}
    for shard in found:
        counts.update({**shard.line["counts"], "rows": shard.line["rows"]})
        for one in shard.tally("here").values():
            add(tally, one.kind, one.reason, one.first, one.rows)
    columns = [doc.tolist()[:-1] for shard in found for doc in shard.docs]
    answers = [one for shard in found for one in answers_of(shard)]
    tokens = [shard.tokens(int(start), 2) for shard in found for start in shard.starts]
    ids = [[one.tolist() for one in both] for both in tokens]
    given = [name for shard in found for name in shard.given]
    return {"counts": counts, "tally": tally, "docs": str(columns), "answers": answers, "ids": ids, "given": given}


def test_a_slice_is_read_from_shards_that_are_there_and_only_rows_at_its_borders_are_tokenized(tmp_path: Path) -> None:
    made(tmp_path / "whole")
    for span, new in {
        (0, 2): [],
        (0, 3): [2],
        (1, 7): [1, 6],
        (2, 8): [],
        (5, 6): [5],
        (2, 30): [],
        (8, 11): [],
        (9, 11): [9],
        (10, 11): [],
        (4, 9): [8],
    }.items():
        folder = tmp_path / str(span)
        shutil.copytree(tmp_path / "whole", folder)
        calls: list[int] = []
        found = made(folder, span, tokenize=partial(tokenize, calls=calls))
        assert calls == new, span
        calls.clear()
        again = made(folder, span, tokenize=partial(tokenize, calls=calls))
        assert (calls, [shard.line for shard in again]) == ([], [shard.line for shard in found])
        assert seen(found) == seen(made(tmp_path / f"fresh {span}", span)), span
        assert not (tmp_path / f"fresh {span}" / f"{RowSpan(0, 4)}.ids.bin").exists(), "only its own rows are made"


def test_slices_that_grow_take_what_smaller_ones_left_and_no_row_is_lost_or_there_twice(tmp_path: Path) -> None:
    for span, new in (
        ((0, 2), [0, 1]),
        ((0, 3), [2]),
        ((0, 3), []),
        ((1, 7), [1, 3, 4, 5, 6]),
        ((4, 7), []),
        ((0, None), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ((1, 7), []),
    ):
        calls: list[int] = []
        found = made(tmp_path / "grows", span, tokenize=partial(tokenize, calls=calls))
        assert calls == new, span
        assert seen(found) == seen(made(tmp_path / f"fresh {span}", span)), span
    whole = content(tmp_path / "fresh (0, None)")
    grown = content(tmp_path / "grows")
    assert all(raw == grown[name] for name, raw in whole.items() if name != LINES_FILE)


def test_a_damaged_shard_serves_no_slice(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / f"{RowSpan(0, 4)}.ids.bin").write_bytes(b"other")
    calls: list[int] = []
    made(tmp_path, (0, 2), tokenize=partial(tokenize, calls=calls))
    assert calls == [0, 1]


def test_rows_of_the_next_shards_are_read_before_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    read: list[int] = []
    real = writing.write_shard
    monkeypatch.setattr(writing, "write_shard", lambda *args, **how: (real(*args, **how), read.append(len(calls)))[0])
    made(tmp_path / "ahead", tokenize=partial(ahead, calls=calls))
    assert (read, calls) == ([10, 10, 10], list(range(ROWS)))
    assert not list(tmp_path.glob("ahead/*.lock"))
    made(tmp_path / "alone")
    assert content(tmp_path / "ahead") == content(tmp_path / "alone")
    # Shards that are there, or that others make, are passed over; what was lost is read once more.
    for path in (tmp_path / "ahead").glob("*08.ids.bin"):
        path.unlink()
    calls.clear()
    made(tmp_path / "ahead", tokenize=partial(ahead, calls=calls))
    assert calls == [4, 5, 6, 7]
    with writing.claim(Store(tmp_path / "two", 1000), RowSpan(4, 8)):
        others = shards_of(Store(tmp_path / "two", 1000), SOURCE, rows, (0, None), ahead, per_shard=4)
        assert [next(others).span.first for _ in range(2)] == [0, 8]
    assert next(others).span.first == 4
    assert sorted(content(tmp_path / "two")) == sorted(content(tmp_path / "alone"))


# ---- faults ----------------------------------------------------------------------------------------------------------


def check_recovery(whole: dict[str, bytes], folder: Path, state: State) -> None:
    """What is listed is whole, and the next start makes the rest: the same bytes."""
    state.write(folder)
    store = Store(folder / "store", 1000)
    for line in store.lines().values():
        assert store.damage(line, again=True) is None, "a shard that is listed is damaged"
    assert len(documents(made(folder / "store"))) == 10
    assert content(folder / "store") == whole


@pytest.mark.parametrize("limit", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_after_a_power_failure_at_any_moment_the_rest_is_made_and_all_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with monkeypatch.context() as patch, Recording(disk) as recording:
        patch.setattr(writing, "process_start", lambda _: 0.0)  # its locks are those of a process that is gone
        made(disk / "store")
    assert unrecovered(recording, partial(check_recovery, content(disk / "store")), limit) == []


def test_a_store_that_is_not_flushed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with monkeypatch.context() as patch, Recording(disk) as recording:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(writing, "process_start", lambda _: 0.0)
        made(disk / "store")
    assert unrecovered(recording, partial(check_recovery, content(disk / "store")), 8, enough=1)


class Killed(BaseException):
    """Stands for a signal that no handler sees."""


@pytest.mark.parametrize(("call", "how"), [("fsync", tokenize), ("replace", ahead)])
def test_a_process_that_ends_at_any_call_leaves_what_the_next_one_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, how: Tokenize
) -> None:
    made(tmp_path / "whole")
    real = getattr(os, call)
    for end in range(0, 100, 3):
        count = iter(range(1000))

        def ends(*args: Any, end: int = end, count: Iterator[int] = count) -> Any:
            if next(count) == end:
                raise Killed
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, ends)
            try:
                made(tmp_path / str(end), tokenize=how)
                break
            except Killed:
                pass
        made(tmp_path / str(end))
        assert content(tmp_path / str(end)) == content(tmp_path / "whole"), end
    assert end > 10


def test_a_torn_line_of_the_manifest_counts_as_absent_and_is_cut_off(tmp_path: Path) -> None:
    made(tmp_path)
    whole = content(tmp_path)
    manifest = tmp_path / LINES_FILE
    manifest.write_bytes(manifest.read_bytes()[:-20])
    assert len(Store(tmp_path, 1000).lines()) == 2
    made(tmp_path)
    assert content(tmp_path) == whole


@pytest.mark.parametrize("ending", ["ids.bin", "mask.bin", "docs.npy", "kinds.npy", "answers.npy"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damage_is_named_and_the_shard_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: str, damage: str
) -> None:
    made(tmp_path)
    whole = content(tmp_path)
    path = tmp_path / f"{RowSpan(4, 8)}.{ending}"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(raw if damage == "flipped" else raw[:-3])
    calls: list[int] = []
    made(tmp_path, tokenize=partial(tokenize, calls=calls))
    assert (calls, content(tmp_path)) == ([4, 5, 6, 7], whole)
    assert caplog.text.count("damaged cache") == 1
    assert path.name in caplog.text


def test_files_are_hashed_again_only_where_a_stamp_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    hashed: list[str] = []
    real = shards.sha256_of
    monkeypatch.setattr(shards, "sha256_of", lambda paths: hashed.extend(path.name for path in paths) or real(paths))
    made(tmp_path)
    assert hashed == []
    touched = tmp_path / f"{RowSpan(4, 8)}.ids.bin"
    os.utime(touched)
    for _ in range(2):
        made(tmp_path)
    assert hashed == [touched.name]


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("how", [tokenize, ahead])
def test_on_a_full_disk_tokens_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Tokenize
) -> None:
    expected = documents(made(tmp_path / "whole"))
    monkeypatch.setattr(os, "fsync", full)
    assert documents(made(tmp_path / "full", tokenize=how)) == expected
    assert "cannot write the cache ([Errno 28] No space left on device), every start will tokenize" in caplog.text
    assert not [path for path in (tmp_path / "full").iterdir() if path.name.endswith((".tmp", ".bin", ".npy"))]
    (tmp_path / "file").touch()
    assert documents(made(tmp_path / "file" / "store")) == expected


def test_a_full_disk_on_which_others_wait_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"No space left on device\. The other processes .* set data\.cache_dir"):
        made(tmp_path / "store", peers=Peers(alone=False))


# ---- several processes -----------------------------------------------------------------------------------------------


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_two_makers_make_different_shards_and_both_have_all(tmp_path: Path) -> None:
    calls: list[int] = []
    both = tmp_path / "both"
    store = Store(both, 1000)
    found: list[Shard] = []
    with writing.claim(store, RowSpan(0, 4)) as own:
        assert own
        other = in_background(lambda: found.extend(made(both, tokenize=partial(tokenize, calls=calls))))
        while len(store.lines()) < 2:
            other.join(0.01)
        assert calls == [4, 5, 6, 7, 8, 9]
        first = list(tokenize([(0, list(rows())[:2]), (2, list(rows())[2:4])]))
        write_shard(store, RowSpan(0, 4), iter(first), SOURCE.path, on_disk=True)
    other.join(10)
    assert len(calls) == 6
    assert documents(found) == documents(made(tmp_path / "alone"))
    # The lines are in the order in which the shards were made.
    one, other_files = content(tmp_path / "alone"), content(both)
    assert one.keys() == other_files.keys()
    assert all(raw == other_files[name] for name, raw in one.items() if name != LINES_FILE)
    assert sorted(other_files[LINES_FILE].splitlines()) == sorted(one[LINES_FILE].splitlines())


@pytest.mark.parametrize("holder", ["gone", "another machine, silent", "torn"])
def test_the_lock_of_a_process_that_is_gone_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    store = Store(tmp_path, 1000)
    with writing.claim(store, RowSpan(4, 8)):
        lock = next(tmp_path.glob("*.lock"))
        about = json.loads(lock.read_text())
        with writing.claim(store, RowSpan(4, 8)) as again:
            assert not again
    if holder == "gone":
        about["after_boot"] -= 1000.0  # another process with the same number
    if holder == "another machine, silent":
        about["machine"] = "another boot"
    lock.write_text("{" if holder == "torn" else json.dumps(about))
    if holder == "another machine, silent":
        assert writing.is_claimed(store, RowSpan(4, 8))
        os.utime(lock, (1, 1))
    assert documents(made(tmp_path)) == documents(made(tmp_path / "other"))
    assert not list(tmp_path.glob("*.lock"))


def take_over(folder: Path, judged: Any, taken: Any, done: Any) -> None:
    """Claim a shard whose holder is gone, at the moment when the other process has seen that, too."""
    real = writing.is_claimed

    def is_claimed(store: Store, span: RowSpan) -> bool:
        found = real(store, span)
        with suppress(threading.BrokenBarrierError):
            judged.wait(1.0)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "is_claimed", is_claimed)
        with writing.claim(Store(folder, 1000), RowSpan(0, 4)) as own:
            taken.put(own)
            done.wait(10.0)


def test_of_two_processes_that_find_a_lock_of_one_that_is_gone_one_takes_it_over(tmp_path: Path) -> None:
    lock = tmp_path / f"{RowSpan(0, 4)}.lock"
    with writing.claim(Store(tmp_path, 1000), RowSpan(0, 4)):
        about = json.loads(lock.read_text())
    lock.write_text(json.dumps({**about, "after_boot": about["after_boot"] - 1000.0}))
    forks = multiprocessing.get_context("fork")
    judged, done, taken = forks.Barrier(2), forks.Event(), forks.Queue()
    both = [forks.Process(target=take_over, args=(tmp_path, judged, taken, done)) for _ in range(2)]
    for process in both:
        process.start()
    assert sorted(taken.get(timeout=20) for _ in both) == [False, True]
    done.set()
    for process in both:
        process.join(20)
        assert process.exitcode == 0
    assert not lock.exists()


def test_a_process_that_waits_reads_what_the_other_makes_and_raises_its_error(tmp_path: Path) -> None:
    looked = iter([False] * 3)
    found: list[Shard] = []
    waits = in_background(lambda: found.extend(made(tmp_path, tokenize=None, peers=Peers(makes=False, alone=False))))
    waits.join(0.1)
    assert waits.is_alive()
    made(tmp_path)
    waits.join(10)
    assert len(found) == 3

    def look() -> bool:
        if next(looked, True):
            raise ConfigError("the other has failed")
        return False

    with pytest.raises(ConfigError, match="the other has failed"):
        made(tmp_path / "empty", tokenize=None, peers=Peers(makes=False, alone=False, look=look))


def test_a_process_that_cannot_see_the_cache_of_the_one_that_is_done_makes_its_own(tmp_path: Path) -> None:
    assert len(made(tmp_path, peers=Peers(makes=False, alone=False, look=lambda: True))) == 3
