"""A power failure at any moment leaves a directory in which a run can start, whole files, and a cache that is right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from crash_states import (
    RECIPE,
    FileSystem,
    Recording,
    State,
    after_reboot,
    files_of,
    save_small,
    started,
    states,
    unrecovered,
)
from helpers import cpu_runtime

from sftkit.checkpoint.resume import find_checkpoint
from sftkit.compile import cache as compile_cache
from sftkit.config.schema import DataConfig, ModelConfig, TokenizerTraining
from sftkit.data.reading import folders
from sftkit.errors import ConfigError
from sftkit.models import tokenizer as tokenizers
from sftkit.rundir import attempt, files
from sftkit.rundir.files import (
    append_all_or_nothing,
    drop_rows_after,
    flush,
    read_metric_rows,
    replace_shared,
    replace_text,
)
from sftkit.rundir.lock import take_lock
from sftkit.rundir.names import ATTEMPT, CONFIG, LOCK, METRICS_FILE, TOKENIZER, step_dir
from sftkit.rundir.status import read_status

BOTH: tuple[FileSystem, FileSystem] = ("journal", "weak")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


# ---- the model of the disk -------------------------------------------------------------------------------------------


def left(disk: Path, file_system: FileSystem, do: Callable[[], object]) -> list[dict[str, bytes | None]]:
    """What a crash may leave of what is done in a folder."""
    with Recording(disk) as recording:
        do()
    return [state.files for state in states(recording, file_system, limit=100)]


def test_a_rename_without_a_flush_may_leave_any_part_of_the_file(disk: Path) -> None:
    (disk / "a").write_text("old!")

    def rename() -> None:
        (disk / ".a").write_text("new!")
        (disk / ".a").replace(disk / "a")

    journal = left(disk, "journal", rename)
    assert {content for state in journal if (content := state["a"])} == {b"old!", b"n", b"ne", b"new", b"new!"}
    assert {"a": b""} in journal
    assert {"a": b"old!", ".a": b"ne"} in journal


def test_only_a_weak_file_system_loses_one_name_of_two_and_has_zeros(disk: Path) -> None:
    def make() -> None:
        (disk / "a").mkdir()
        (disk / "b").mkdir()
        (disk / "b" / "c").write_text("text")

    journal = left(disk, "journal", make)
    assert {tuple(state) for state in journal} == {(), ("a",), ("a", "b"), ("a", "b", "b/c")}
    assert not [state for state in journal if b"\0" in (state.get("b/c") or b"")]
    for path in sorted(disk.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    weak = left(disk, "weak", make)
    assert {tuple(state) for state in weak} == {(), ("a",), ("b",), ("a", "b"), ("b", "b/c"), ("a", "b", "b/c")}
    assert {"b": None, "b/c": b"te\0\0"} in weak


def test_what_is_flushed_is_there_and_what_was_promised_is_known(disk: Path) -> None:
    with Recording(disk) as recording:
        (disk / "a").write_text("1")
        flush(disk / "a")
        recording.promise("content")
        flush(disk)
        recording.promise("name")
    for file_system, without in (("journal", []), ("weak", [()])):
        found = [(tuple(state.files), state.promised) for state in states(recording, file_system, 100)]
        assert (("a",), ("content", "name")) in found
        assert [names for names, promised in found if "content" in promised and names != ("a",)] == without
        assert not [names for names, promised in found if "name" in promised and names != ("a",)]


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [replace_text, replace_shared])
@pytest.mark.parametrize("file_system", BOTH)
def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one(disk: Path, file_system, write) -> None:
    (disk / "a").write_text('{"step": 1}')
    for state in left(disk, file_system, lambda: write(disk / "a", '{"step": 22}')):
        assert state["a"] in (b'{"step": 1}', b'{"step": 22}')


@pytest.mark.parametrize("write", ["replace_text", "replace_shared"])
def test_a_file_that_is_replaced_and_not_flushed_is_found(disk: Path, monkeypatch: pytest.MonkeyPatch, write) -> None:
    (disk / "a").write_text('{"step": 1}')
    with monkeypatch.context() as patch:
        patch.setattr(files, "flush", lambda _: None)
        found = left(disk, "journal", lambda: getattr(files, write)(disk / "a", '{"step": 22}'))
    assert {"a": b""} in found


@pytest.mark.parametrize("file_system", BOTH)
def test_lines_that_were_appended_are_read_up_to_a_torn_one(disk: Path, tmp_path: Path, file_system) -> None:
    rows = [json.dumps({"step": step, "text": "Straße 你好"}, ensure_ascii=False) + "\n" for step in range(1, 5)]
    (disk / "rows").write_text(rows[0])

    def append() -> None:
        append_all_or_nothing(disk / "rows", rows[1])
        flush(disk / "rows")
        for row in rows[2:]:
            append_all_or_nothing(disk / "rows", row)

    found, torn = left(disk, file_system, append), 0
    for number, state in enumerate(found):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(state["rows"] or b"")
        steps = [row["step"] for row in read_metric_rows(path)]
        assert steps in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 4])
        torn += not (state["rows"] or b"").endswith(b"\n")
        drop_rows_after(path, 10)
        append_all_or_nothing(path, rows[0])
        assert [row["step"] for row in read_metric_rows(path)] == [*steps, 1]
        assert path.read_text().count("\n") == len(steps) + 1
    assert torn > 3


# ---- token caches, tokenizers, compiled code -------------------------------------------------------------------------

ARRAY = np.arange(300)


def arrays_in(folder: Path) -> np.ndarray | None:
    return folders.load(folder, ["array"], lambda arrays: arrays["array"], instead="")


def save_array(folder: Path) -> None:
    def write(temporary: Path) -> None:
        np.save(temporary / "array.npy", ARRAY)
        (temporary / "meta.json").write_text("{}")

    folders.save(folder, write, lambda: arrays_in(folder) is not None, instead="")


def recorded_entry(disk: Path) -> Recording:
    """An entry that is made, with a damaged one in its way, and another one."""
    (disk / "cache" / "key").mkdir(parents=True)
    (disk / "cache" / "key" / "meta.json").write_text("damaged")
    with Recording(disk) as recording:
        save_array(disk / "cache" / "key")
        save_array(disk / "cache" / "other")
    return recording


def content_of(entry: Path) -> dict[str, bytes]:
    """The files of an entry without its hashes, which name inodes and times."""
    return {name: content for name, content in files_of(entry).items() if name != folders.HASHED}


def check_entry(whole: dict[str, bytes], folder: Path, state: State) -> None:
    """An entry is right or not there, and can be made again."""
    state.write(folder)
    for name in ("key", "other"):
        entry = folder / "cache" / name
        assert not entry.is_dir() or content_of(entry) in ({}, {"meta.json": b"damaged"}, whole), f"{name}: other bytes"
        save_array(entry)
        assert np.array_equal(arrays_in(entry), ARRAY), name  # type: ignore[arg-type]  # None is another


@pytest.mark.parametrize("limit", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_folder_of_arrays_is_right_or_absent(disk: Path, limit: int) -> None:
    recording = recorded_entry(disk)
    assert unrecovered(recording, partial(check_entry, content_of(disk / "cache" / "other")), limit) == []


def test_a_folder_of_arrays_that_is_not_flushed_is_found(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(folders, "flush_folder", lambda _: None)
        recording = recorded_entry(disk)
    assert unrecovered(recording, partial(check_entry, content_of(disk / "cache" / "other")), 8, enough=1)


def test_a_trained_tokenizer_is_whole_or_absent(disk: Path, monkeypatch: pytest.MonkeyPatch, tokenizer) -> None:
    """The next start trains it again where it is absent; one that is torn would end every start."""
    monkeypatch.setattr(tokenizers, "new_tokenizer", lambda *_: tokenizer)
    model = ModelConfig(train_tokenizer=TokenizerTraining(vocab_size=300))
    with Recording(disk) as recording, closing(cpu_runtime()) as rt:
        tokenizers.base_tokenizer(model, DataConfig(train=()), disk, rt)
    whole = files_of(disk / TOKENIZER)

    def check(folder: Path, state: State) -> None:
        state.write(folder)
        assert files_of(folder / TOKENIZER) in ({}, whole)

    assert unrecovered(recording, check, limit=50) == []


def test_saved_code_and_kernels_are_whole_or_absent(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel has no hash: FlashAttention-4 would load a torn one at every start."""
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(disk / "fa4"))
    saved = disk / "code.compiled"
    saved.write_bytes(b"old code")

    def save() -> None:
        compile_cache._write(str(saved), b"new and longer code")
        compile_cache.write_kernels({"1/2/a.o": b"kernel"})

    for file_system in BOTH:
        saved.write_bytes(b"old code")
        shutil.rmtree(disk / "fa4", ignore_errors=True)
        for state in left(disk, file_system, save):
            assert state["code.compiled"] in (b"old code", b"new and longer code")
            assert state.get("fa4/1/2/a.o", b"kernel") == b"kernel"


# ---- claims ----------------------------------------------------------------------------------------------------------


def earlier_run(run_dir: Path) -> dict[str, bytes]:
    """A run of two steps. Returns the files of its last checkpoint."""
    with started(run_dir):
        (run_dir / TOKENIZER).mkdir()
        (run_dir / TOKENIZER / "tokenizer.json").write_text("{}")
        append_all_or_nothing(run_dir / METRICS_FILE, '{"step": 1}\n{"step": 2}\n')
        for step in (1, 2):
            save_small(run_dir, step)
    return files_of(step_dir(run_dir, 2))


def claimed(disk: Path, resume: str | None) -> Recording:
    """A start takes its place in a directory, and saves a step after those that it resumes."""
    with Recording(disk) as recording, started(disk / "runs" / "a", resume) as rt:
        recording.promise(0)
        step = 3 if rt.resumes else 1
        append_all_or_nothing(disk / "runs" / "a" / METRICS_FILE, f'{{"step": {step}}}\n')
        save_small(disk / "runs" / "a", step)
        recording.promise(step)
    return recording


def check_claim(earlier: dict[str, bytes] | None, again: str | None, folder: Path, state: State) -> None:
    """A start finds what was promised, is alone, and can take its place and save.

    Args:
        earlier: files of the last checkpoint of the earlier run, which is nowhere deleted.
        again: train.resume of this start.
    """
    state.write(folder)
    after_reboot(folder)
    run_dir = folder / "runs" / "a"
    whole = [path for path in folder.glob("runs/a*/step-*") if earlier is not None and files_of(path) == earlier]
    assert whole or earlier is None, "the earlier run's checkpoint is gone"
    was_there = run_dir.exists()
    assert not state.promised or (run_dir / CONFIG).read_text() == RECIPE
    assert not state.promised or read_status(run_dir)["status"] == "running"
    with started(run_dir, again) as rt:
        with pytest.raises(ConfigError, match="a run is at work there"):
            take_lock(run_dir)
        step = find_checkpoint(run_dir, "auto", rt).state["step"]
        if again == "auto":
            assert step >= max(state.promised, default=0), f"resumes step {step} after {state.promised}"
            assert was_there or earlier is None or step == 2, "a directory without a run, and the earlier one aside"
        else:
            assert step == 0
        save_small(run_dir, 7)
        assert find_checkpoint(run_dir, "auto", rt).state["step"] == 7
    assert not list(folder.glob("runs/*/.attempt")), "a start's folder is left"


@pytest.mark.slow
@pytest.mark.parametrize("limit", [4, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("again", ["auto", None])
@pytest.mark.parametrize("kind", ["in a new directory", "that replaces a run", "that resumes"])
def test_after_a_power_failure_in_a_claim_a_run_can_start(disk: Path, kind: str, again: str | None, limit: int) -> None:
    earlier = None if kind == "in a new directory" else earlier_run(disk / "runs" / "a")
    recording = claimed(disk, "auto" if kind == "that resumes" else None)
    assert unrecovered(recording, partial(check_claim, earlier, again), limit) == []


def test_a_power_failure_while_a_run_gets_its_name_back_is_recovered(disk: Path) -> None:
    """The start after a power failure between the two renames of a claim loses power too."""
    earlier = earlier_run(disk / "runs" / "a")
    (between,) = (
        state
        for state in states(claimed(disk, None), "journal", limit=1)
        if "runs/a" not in state.files and f"runs/a.old-1/{ATTEMPT}/{LOCK}" in state.files
    )
    again = disk.with_name("again")
    between.write(again)
    after_reboot(again)
    recording = claimed(again, "auto")
    assert unrecovered(recording, partial(check_claim, earlier, "auto"), 6) == []


@pytest.mark.parametrize("fault", ["the mark", "the renames"])
def test_a_flush_that_is_left_out_of_a_claim_is_found(disk: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    earlier = None if fault == "the mark" else earlier_run(disk / "runs" / "a")
    with monkeypatch.context() as patch:
        for module in [attempt, files] if fault == "the renames" else [attempt]:
            patch.setattr(module, "flush", lambda path: path.name == "runs" or fault == "the mark" or flush(path))
        recording = claimed(disk, None)
    assert unrecovered(recording, partial(check_claim, earlier, "auto"), 30, ["weak"], enough=1)
