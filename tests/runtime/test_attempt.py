"""A start before its first step: an earlier run stays as it was until every check is passed, and nothing is left of a typo."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import preloaded
import pytest
from helpers import ROOT, cpu_runtime

from sftkit.errors import ConfigError, DataError
from sftkit.runtime.lock import read_holder
from sftkit.runtime.open import open_run, take_place
from sftkit.runtime.rundir import CONFIG, LOCK, METRICS, REPORT, STATUS, TOKENIZER

ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT / "tests"), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
}


def earlier_run(folder: Path) -> Path:
    """A run that has trained two steps."""
    for name in ("step-000002/manifest.json", f"{TOKENIZER}/tokenizer.json", "compile/rank000/graphs.txt", "mine.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the first run's {name}")
    for name in (CONFIG, METRICS, REPORT):
        (folder / name).write_text(f"the first run's {name}")
    (folder / STATUS).write_text('{"status": "finished", "step": 2}')
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def started(folder: Path, resume: str | None, then: Callable[[], object] = lambda: None, takes: bool = False) -> None:
    """A start, what it writes before its first step, and how it goes on."""
    with cpu_runtime() as rt:
        place = open_run(str(folder), resume, "run: {second}\n", rt)
        (place / "preflight.json").write_text("{}")
        rt.page = pytest.fail  # type: ignore[assignment]
        if takes:
            take_place(str(folder), resume, rt)
        then()


def fails(error: Exception) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("error", [ConfigError("no"), DataError("no"), ValueError("no"), KeyboardInterrupt()])
def test_a_start_that_ends_before_its_checks_are_passed_leaves_an_earlier_run_as_it_was(
    tmp_path, error, resume
) -> None:
    folder = earlier_run(tmp_path / "sft")
    before = contents(tmp_path)
    for _ in range(2):
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            started(folder, resume, fails(error))
        assert contents(tmp_path) == before


def test_a_signal_before_the_checks_are_passed_leaves_an_earlier_run_as_it_was(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "sft")
    before = contents(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            started(folder, None, lambda: [os.kill(os.getpid(), signal.SIGTERM), signal.pause()])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    assert contents(tmp_path) == before


def test_a_start_that_was_killed_is_swept_by_the_next(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "sft")
    child = os.fork()
    if child == 0:
        started(folder, None, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (folder / METRICS).read_text() == f"the first run's {METRICS}"
    with pytest.raises(SystemExit):
        started(folder, None, fails(ConfigError("no")))
    assert sorted(path.name for path in folder.glob(".*")) == []


def test_a_new_run_takes_the_place_of_an_earlier_one_which_is_renamed_whole_and_keeps_the_directory_locked(
    tmp_path,
) -> None:
    folder = earlier_run(tmp_path / "sft")
    before = contents(folder)

    def check() -> None:
        assert contents(tmp_path / "sft.old-1") == before
        assert (folder / CONFIG).read_text() == "run: {second}\n"
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == []
        holder = read_holder(folder / LOCK)
        assert holder is not None
        assert holder.pid == os.getpid()
        with pytest.raises(ConfigError, match="a run is at work"):
            open_run(str(folder), "auto", "run: {third}\n", cpu_runtime())

    started(folder, None, check, takes=True)
    assert not (folder / LOCK).exists()


def test_a_run_that_is_resumed_keeps_all_that_the_start_has_not_written_anew(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "sft")
    before = contents(folder)
    started(folder, "auto", takes=True)
    now = contents(folder)
    changed = {name for name in now if now[name] != before.get(name, b"")}
    assert changed == {CONFIG, STATUS, "environment.json", "preflight.json"}
    assert before.keys() <= now.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]


def test_an_earlier_run_gets_its_name_back_from_one_that_fails_before_its_first_step(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "sft")
    before = contents(tmp_path)
    with pytest.raises(SystemExit):
        started(folder, None, fails(RuntimeError("out of memory in the warm-up")), takes=True)
    assert contents(tmp_path) == before


def test_a_refused_start_in_a_new_directory_leaves_none_and_a_failed_one_makes_room_for_the_next(
    tmp_path: Path,
) -> None:
    with pytest.raises(SystemExit):
        started(tmp_path / "sft", None, fails(DataError("a typo")), takes=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit):
        started(tmp_path / "sft", None, fails(RuntimeError("a GPU is gone")), takes=True)
    assert (tmp_path / "sft" / STATUS).exists()  # a requeue script reads it
    (tmp_path / "sft" / TOKENIZER).mkdir()
    started(tmp_path / "sft", None, takes=True)
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]
    assert not (tmp_path / "sft" / TOKENIZER).exists()


def test_a_script_with_a_typo_in_a_path_leaves_an_earlier_run_as_it_was(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "sft")
    before = contents(tmp_path)
    words = ["scripts/chat_sft.py", "recipes/smoke/sft.yaml", f"run.dir={folder}", f"model.path={tmp_path}/modle"]
    done = preloaded.run(words, env=ENV)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "report:" not in done.stdout
    assert "modle: no such folder" in done.stderr
    assert contents(tmp_path) == before


def test_ranks_whose_resume_is_refused_leave_an_earlier_run_as_it_was(tmp_path: Path, tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    folder = earlier_run(tmp_path / "run")
    before = contents(folder)
    env = {**ENV, "FAULT_TOKENIZER": str(tmp_path / "tokenizer" / "tokenizer.json")}
    done = preloaded.run(["tests/faults_worker.py", str(folder), "none", "train.resume=auto"], 2, env)
    assert done.returncode == 1
    assert "no checkpoint in" in done.stderr, done.stderr[-3000:]
    assert contents(folder) == before
    assert list(tmp_path.glob("run.old-*")) == []
