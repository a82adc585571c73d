"""Whatever happens to a process or a disk, what is published is whole, LATEST never goes back, and training goes on."""

from __future__ import annotations

import io
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import preloaded
import pytest
import torch
from checkpoint_worker import Run
from forked import kill_before
from helpers import cpu_runtime
from launched import fill, small_file_system

from sftkit.checkpoint import save as checkpoint_writer
from sftkit.checkpoint.save import SaveEnd, entries, read_best, write_manifest
from sftkit.checkpoint.states import SafeReader
from sftkit.config.schema import CheckpointConfig
from sftkit.errors import CheckpointError, ConfigError
from sftkit.rundir.files import verify
from sftkit.rundir.names import LATEST, OPTIMIZER, PINNED, step_dirs, step_number

ROOT = Path(__file__).parents[2]


def kill_in_saves(run_dir: Path, tokenizer_dir: Path, kills: int) -> None:
    """Run by a process that imports once and forks: each child resumes and saves without end, until it is killed, at any
    moment after so many saves have begun. A save waits for the one before it, so all of these but the last are published.
    """
    from transformers import AutoTokenizer

    rng = random.Random(0)
    latest = 0
    for _ in range(kills):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            run = Run(run_dir, AutoTokenizer.from_pretrained(tokenizer_dir), cpu_runtime())
            first = run.checkpoints.resume("auto")["step"]
            assert first >= latest, f"resumed {first}, and {latest} had been published"
            for step in range(first, first + 10_000):
                run.steps(step, step + 1, every=1)
                os.write(writes, b".")
        os.close(writes)
        begun = rng.randint(1, 4)
        for _ in range(begun):
            assert os.read(reads, 1) == b"."
        time.sleep(rng.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
        for folder in step_dirs(run_dir):
            assert verify(folder) is None
        published = published_step(run_dir)
        assert published >= latest + begun - 1, f"{begun} saves began after {latest}, and {published} is published"
        latest = published


def kill_at_each_operation(run_dir: Path, tokenizer_dir: Path) -> None:
    """Run by a process that imports once and forks: child n is killed before the nth flush, rename or deletion of a save."""
    from transformers import AutoTokenizer

    latest = published = died = 0
    while True:
        child = os.fork()
        if child == 0:
            run = Run(run_dir, AutoTokenizer.from_pretrained(tokenizer_dir), cpu_runtime())
            step = run.checkpoints.resume("auto")["step"]
            assert step >= latest
            kill_before(died + 1, (os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree"))
            run.steps(step, step + 1, every=1, wait=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert all(verify(folder) is None for folder in step_dirs(run_dir))
        assert published_step(run_dir) >= latest
        latest, published = published_step(run_dir), len(step_dirs(run_dir))
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            break
        died += 1
    assert died > 20, died
    assert published == 2


def published_step(run_dir: Path) -> int:
    """The step of the newest whole checkpoint; 0: none is published."""
    if not (run_dir / LATEST).exists():
        return 0
    name = (run_dir / LATEST).read_text().strip()
    assert (run_dir / name).is_dir()
    return step_number(run_dir / name)


def forking(function: str, *args: str) -> None:
    """Call a function of this file in a process that has imported everything and has no threads, so that it may fork."""
    env = {"PYTHONPATH": preloaded.PYTHONPATH, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = preloaded.run([__file__, function, *args], env={**os.environ, **env}, timeout=400)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_a_process_killed_in_saves_leaves_whole_checkpoints_and_a_latest_that_never_goes_back(
    tmp_path: Path, tokenizer
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    forking("kill_in_saves", str(tmp_path / "run"), str(tmp_path / "tokenizer"), "30")


@pytest.mark.slow
def test_a_process_killed_before_any_flush_rename_or_deletion_leaves_the_same(tmp_path: Path, tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    forking("kill_at_each_operation", str(tmp_path / "run"), str(tmp_path / "tokenizer"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", "4m") as disk:
        yield disk


@pytest.mark.parametrize("check", ["sees it before", "sees nothing"])
def test_on_a_full_disk_training_goes_on_old_checkpoints_stay_and_only_a_final_save_fails(
    small_disk: Path, tokenizer, monkeypatch, check: str
) -> None:
    run = Run(small_disk / "run", tokenizer, cpu_runtime())
    run.steps(0, 1, every=1, wait=True)
    filler = fill(small_disk, leave=100_000)
    if check == "sees nothing":  # as when another process fills the disk in the middle of a save
        monkeypatch.setattr(checkpoint_writer, "free_bytes", lambda folder: 10**12)
    assert run.checkpoints.ended_saves() == [SaveEnd(1, None)]
    run.steps(1, 2, every=2)
    run.checkpoints.finish()
    ((step, failure),) = run.checkpoints.ended_saves()
    assert step == 2
    assert ("0.1 MB free" in str(failure)) == (check == "sees it before")
    assert ("No space left" in str(failure)) == (check == "sees nothing")
    assert [folder.name for folder in step_dirs(small_disk / "run")] == ["step-000001"]
    assert not list((small_disk / "run").glob(".step*"))
    with pytest.raises(CheckpointError, match="step-000003 could not be written"):
        run.steps(2, 3, every=3, wait=True)
    filler.unlink()
    run.steps(3, 4, every=4, wait=True)
    assert [folder.name for folder in step_dirs(small_disk / "run")] == ["step-000001", "step-000004"]
    assert all(verify(folder) is None for folder in step_dirs(small_disk / "run"))


def test_on_a_disk_that_is_full_before_the_first_save_training_goes_on_too(small_disk: Path, tokenizer) -> None:
    run = Run(small_disk / "run", tokenizer, cpu_runtime())
    filler = fill(small_disk, leave=4096)
    run.steps(0, 1, every=1)
    run.checkpoints.finish()
    ((_, failure),) = run.checkpoints.ended_saves()
    assert f"cannot be written to {small_disk / 'run'}" in str(failure)
    assert "No space left" in str(failure)
    with pytest.raises(CheckpointError, match="step-000002 could not be written: the tokenizer's files"):
        run.steps(1, 2, every=2, wait=True)
    assert not list((small_disk / "run").glob(".step*"))
    filler.unlink()
    run.steps(2, 3, every=3, wait=True)
    assert verify(small_disk / "run/step-000003") is None


def test_a_save_needs_no_room_for_temporary_files(small_disk: Path, tmp_path: Path, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    fill(small_disk, leave=0)
    run = Run(tmp_path / "run", tokenizer, cpu_runtime())
    run.steps(0, 1, every=1, wait=True)
    assert verify(tmp_path / "run/step-000001") is None


def test_a_run_whose_checkpoints_the_disk_cannot_hold_is_refused_with_both_numbers(small_disk: Path, tokenizer) -> None:
    run = Run(small_disk / "run", tokenizer, cpu_runtime(), config=CheckpointConfig(every=1, keep=2))
    run.checkpoints.check_space(1e6)
    with pytest.raises(ConfigError, match=r"4\.2 MB free.*need 6\.0 MB \(2\.0 MB each, at most 3 at a time\)"):
        run.checkpoints.check_space(2e6)
    Run(small_disk / "run", tokenizer, cpu_runtime()).checkpoints.check_space(2e6)  # the final one only


def test_what_training_does_after_save_returned_is_not_in_the_checkpoint(
    tmp_path: Path, tokenizer, monkeypatch
) -> None:
    run = Run(tmp_path, tokenizer, cpu_runtime())
    run.steps(0, 1)
    writes, trained = checkpoint_writer.Writer._write, threading.Event()
    monkeypatch.setattr(checkpoint_writer.Writer, "_write", lambda self, s: (trained.wait(100), writes(self, s)))
    weights = {name: value.clone() for name, value in run.orig_model.state_dict().items()}
    expected = torch.get_rng_state()
    state = {"open": [1, 2]}
    run.checkpoints.save(1, state)
    torch.rand(3)
    state["open"].append(3)
    run.steps(1, 4)
    assert not trained.is_set(), "the save returned before anything was written"
    trained.set()
    run.checkpoints.finish()
    again = Run(tmp_path, tokenizer, cpu_runtime())
    resumed = again.checkpoints.resume("auto")
    assert (resumed["step"], resumed["open"]) == (1, [1, 2])
    assert torch.equal(torch.get_rng_state(), expected)
    assert all(torch.equal(value, again.orig_model.state_dict()[name]) for name, value in weights.items())
    assert again.steps(1, 4) == Run.steps(resumed_now(tmp_path, tokenizer), 1, 4)
    assert set(run.checkpoints.last_save) == {"block_seconds", "write_seconds", "bytes"}


def resumed_now(run_dir: Path, tokenizer) -> Run:
    run = Run(run_dir, tokenizer, cpu_runtime())
    run.checkpoints.resume("auto")
    return run


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "missing", "no manifest"])
@pytest.mark.parametrize("name", ["model.safetensors", f"{OPTIMIZER}/__0_0.distcp"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_the_file(
    tmp_path: Path, tokenizer, caplog, damage: str, name: str
) -> None:
    run = Run(tmp_path, tokenizer, cpu_runtime())
    run.steps(0, 2, every=1)
    run.checkpoints.finish()
    path = tmp_path / "step-000002" / (name if damage != "no manifest" else "manifest.json")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content if damage == "flipped bit" else content[:-3])
    if damage == "missing":
        path.unlink()
    with caplog.at_level(logging.WARNING, logger="sftkit"):
        assert resumed_step(tmp_path, tokenizer, "auto") == 1
    assert path.name in caplog.text
    assert (tmp_path / LATEST).read_text() == "step-000001\n"
    with pytest.raises(ConfigError, match=path.name):
        resumed_step(tmp_path, tokenizer, str(tmp_path / "step-000002.old-1"))


def resumed_step(run_dir: Path, tokenizer, setting: str) -> int:
    checkpoints = Run(run_dir, tokenizer, cpu_runtime()).checkpoints
    step = checkpoints.resume(setting)["step"]
    checkpoints.archive_later_steps(step)
    return step


def test_the_best_and_pinned_checkpoints_are_kept_beside_the_newest(tmp_path: Path, tokenizer) -> None:
    config = CheckpointConfig(every=1, best="val/loss")
    run = Run(tmp_path, tokenizer, cpu_runtime(), config=config)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: float("nan"), 6: 1.5, 7: 1.2, 8: 4.0, 9: 3.0}
    for step, loss in losses.items():
        run.steps(step - 1, step, every=1)
        run.checkpoints.evaluated(step, {"val/loss": loss, "other": -1.0})
        if step == 3:
            run.checkpoints.finish()
            (tmp_path / "step-000003" / PINNED).touch()
    run.checkpoints.finish()
    numbers = [step_number(folder) for folder in step_dirs(tmp_path)]
    assert numbers == [2, 3, 8, 9]
    assert read_best(tmp_path) == ("step-000002", "val/loss", 1.0)
    assert (tmp_path / "BEST").read_text().splitlines()[0] == "step-000002"
    later = Run(tmp_path, tokenizer, cpu_runtime(), config=config)
    later.checkpoints.resume("auto")
    later.steps(9, 10, every=1)
    later.checkpoints.evaluated(10, {"val/loss": 1.1})
    assert read_best(tmp_path).folder == "step-000002"
    later.steps(10, 11, every=1, wait=True)
    later.checkpoints.evaluated(11, {"val/loss": 0.9})
    assert read_best(tmp_path) == ("step-000011", "val/loss", 0.9)
    resumed_step(tmp_path, tokenizer, str(tmp_path / "step-000010"))  # the best one is past it now
    assert read_best(tmp_path) is None


def test_accuracies_are_better_when_higher(tmp_path: Path, tokenizer) -> None:
    run = Run(tmp_path, tokenizer, cpu_runtime(), config=CheckpointConfig(every=1, best="eval/acc"))
    for step, value in enumerate((0.2, 0.5, 0.3), start=1):
        run.steps(step - 1, step, every=1, wait=True)
        run.checkpoints.evaluated(step, {"eval/acc": value})
    assert read_best(tmp_path) == ("step-000002", "eval/acc", 0.5)


class Bomb:
    """Unpickled plainly, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.system, (f"touch {self.path}",)


def rewrite_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    write_manifest(folder, 1, entries(folder, [p for p in folder.rglob("*") if p.is_file()]))


@pytest.mark.parametrize(
    "name", [f"{OPTIMIZER}/.metadata", f"{OPTIMIZER}/__0_0.distcp", "training_state/rng-rank000.pt"]
)
def test_a_pickle_in_a_checkpoint_is_refused_by_name_and_runs_nothing(tmp_path: Path, tokenizer, name: str) -> None:
    Run(tmp_path / "run", tokenizer, cpu_runtime()).steps(0, 1, every=1, wait=True)
    folder = tmp_path / "run" / "step-000001"
    if name.endswith(".metadata"):
        (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    else:
        torch.save({"python": Bomb(tmp_path / "ran")}, folder / name)
    rewrite_manifest(folder)
    with pytest.raises(
        ConfigError, match=r"posix\.system" if "distcp" not in name else "resume from another checkpoint"
    ):
        resumed_step(tmp_path / "run", tokenizer, "auto")
    assert not (tmp_path / "ran").exists()


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("name", ["manifest.json", "training_state/state.json"])
@pytest.mark.parametrize("text", [nested(100_000), '{"step": "two", "files": 7}'])
def test_a_checkpoint_whose_json_has_another_form_is_skipped_for_the_one_before(
    tmp_path: Path, tokenizer, name: str, text: str
) -> None:
    Run(tmp_path / "run", tokenizer, cpu_runtime()).steps(0, 2, every=1, wait=True)
    folder = tmp_path / "run" / "step-000002"
    (folder / name).write_text(text)
    if name != "manifest.json":
        rewrite_manifest(folder)
    with pytest.raises(ConfigError, match=name):
        resumed_step(tmp_path / "run", tokenizer, str(folder))
    assert resumed_step(tmp_path / "run", tokenizer, "auto") == 1


def evil_bytes(kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "another form":
        torch.save({"python": [1, 2], "torch": "no tensor"}, buffer)
    if kind == "half a file":
        torch.save({"python": list(range(10_000))}, buffer)
        return buffer.getvalue()[:-500]
    if kind == "a known class with other fields":
        return pickle.dumps(torch.distributed.checkpoint.metadata.Metadata(state_dict_metadata=7, storage_data={}))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name",
    [f"{OPTIMIZER}/.metadata", f"{OPTIMIZER}/__0_0.distcp", "training_state/rng-rank000.pt"],
)
@pytest.mark.parametrize("kind", ["another form", "half a file", "a known class with other fields"])
def test_whatever_a_binary_file_of_a_checkpoint_holds_it_is_refused_in_words(
    tmp_path: Path, tokenizer, name: str, kind: str
) -> None:
    Run(tmp_path / "run", tokenizer, cpu_runtime()).steps(0, 1, every=1, wait=True)
    folder = tmp_path / "run" / "step-000001"
    (folder / name).write_bytes(evil_bytes(kind))
    rewrite_manifest(folder)
    with pytest.raises(ConfigError, match="resume from another checkpoint"):
        resumed_step(tmp_path / "run", tokenizer, "auto")


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, tokenizer) -> None:
    Run(tmp_path / "run", tokenizer, cpu_runtime()).steps(0, 1, every=1, wait=True)
    folder = tmp_path / "run" / "step-000001"
    index = folder / OPTIMIZER / ".metadata"
    metadata = SafeReader(folder / OPTIMIZER).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../../../outside"
    index.write_bytes(pickle.dumps(metadata))
    rewrite_manifest(folder)
    with pytest.raises(ConfigError, match="leads out of the folder"):
        resumed_step(tmp_path / "run", tokenizer, "auto")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "link"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path, tokenizer, name: str) -> None:
    Run(tmp_path / "run", tokenizer, cpu_runtime()).steps(0, 1, every=1, wait=True)
    folder = tmp_path / "run" / "step-000001"
    (tmp_path / "run" / "outside").write_text("x")
    (folder / "link").symlink_to(tmp_path / "run" / "outside")
    content = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(content.replace('"config.json"', f'"{name}"'))
    with pytest.raises(ConfigError, match=r"leads out of the folder|symbolic link"):
        resumed_step(tmp_path / "run", tokenizer, str(folder))


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(Path, sys.argv[2:4]), *map(int, sys.argv[4:]))
