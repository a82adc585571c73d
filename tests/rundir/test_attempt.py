"""A start before its first step: an earlier run stays as it was until one is done, and nothing is left of a typo."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn

import preloaded
import pytest
from forked import in_fork, kill_before
from helpers import cpu_runtime
from launched import LaunchedRun, Launcher, launching, small_file_system

from sftkit.errors import ConfigError, DataError
from sftkit.rundir.lock import read_holder
from sftkit.rundir.names import (
    ATTEMPT,
    CONFIG,
    LOCK,
    METRICS_FILE,
    REPORT,
    RESULTS,
    STATUS,
    TOKENIZER,
    TRACE,
    evaluation_dir,
    step_dir,
    step_dirs,
)
from sftkit.rundir.status import RunStatus, read_status
from sftkit.runtime.open import claim_run_dir, open_run
from sftkit.runtime.start import Runtime
from sftkit.runtime.watchdog import open_heartbeat

ENV = {
    **os.environ,
    "PYTHONPATH": preloaded.PYTHONPATH,
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
}


def earlier_run(folder: Path) -> Path:
    """A run that has trained two steps."""
    for name in ("step-000002/manifest.json", f"{TOKENIZER}/tokenizer.json", "trace/rank000.json", "mine.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the first run's {name}")
    for name in (CONFIG, METRICS_FILE, REPORT):
        (folder / name).write_text(f"the first run's {name}")
    (folder / STATUS).write_text('{"status": "finished", "step": 2}')
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def started(
    folder: Path,
    resume: str | None,
    then: Callable[[], object] = lambda: None,
    takes: bool = False,
    killed_before: int | None = None,
    first: Callable[[Runtime], object] = lambda _: None,
) -> None:
    """A start, what it writes before its first step, and how it goes on.

    Args:
        first: what it does before its first step.
        takes: it has done a step.
        killed_before: which rename or deletion, from 0, of those with which it takes its place.
    """
    with cpu_runtime() as rt:
        place = open_run(str(folder), resume, "run: {second}\n", rt)
        (place / "preflight.json").write_text("{}")
        rt.page = pytest.fail  # type: ignore[assignment]
        first(rt)
        if killed_before is not None:
            kill_before(killed_before, (os, "rename"), (os, "replace"), (os, "unlink"), (shutil, "rmtree"))
        if takes:
            claim_run_dir(rt)
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

    def writes_at_end(rt: Runtime) -> None:
        rt.at_end.callback(lambda: (rt.output_dir(folder) / TRACE).mkdir(parents=True))

    for _ in range(2):
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            started(folder, resume, fails(error), first=writes_at_end)
        assert contents(tmp_path) == before


def test_a_signal_before_the_checks_are_passed_leaves_an_earlier_run_as_it_was(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "sft")
    before = contents(tmp_path)
    waits = partial(started, folder, None, lambda: [os.kill(os.getpid(), signal.SIGTERM), signal.pause()])
    assert in_fork(waits) == 128 + signal.SIGTERM
    assert contents(tmp_path) == before


def test_a_start_that_was_killed_is_swept_by_the_next(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path / "sft")
    killed = partial(started, folder, None, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert in_fork(killed) == -signal.SIGKILL
    assert (folder / METRICS_FILE).read_text() == f"the first run's {METRICS_FILE}"
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
    evaluations = [evaluation_dir(folder, step) / RESULTS for step in (1, 2)]
    for file in evaluations:
        file.parent.mkdir(parents=True)
        file.write_text("of before")
    before = contents(folder)

    def evaluate(rt: Runtime) -> None:
        file = evaluation_dir(rt.output_dir(folder), 2) / RESULTS
        file.parent.mkdir(parents=True)
        file.write_text("anew")
        assert contents(folder).items() >= before.items()

    started(folder, "auto", takes=True, first=evaluate)
    now = contents(folder)
    changed = {name for name in now if now[name] != before.get(name, b"")}
    assert changed == {CONFIG, STATUS, "environment.json", "preflight.json", str(evaluations[1].relative_to(folder))}
    assert before.keys() <= now.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]


def test_what_ranks_of_an_earlier_start_have_written_of_themselves_is_neither_read_nor_left(tmp_path: Path) -> None:
    """Errors and places of four ranks, as a start that failed leaves them."""
    folder = earlier_run(tmp_path / "sft")
    for rank in range(4):
        earlier = RunStatus(folder, rank, 4, start_id="the first", step=2, phase="step")
        earlier.failed(RuntimeError("out of memory, last week"))
        os.close(open_heartbeat(earlier))
    with cpu_runtime() as rt:
        open_run(str(folder), "auto", "run: {}\n", rt)
        claim_run_dir(rt)
        assert not list(folder.glob("rank-errors/*")) + list(folder.glob(".heartbeat/*"))
        assert rt.status is not None
        earlier.run_dir, earlier.failure = folder, None  # a rank that the kernel lets go on late
        earlier.failed(RuntimeError("still out of memory"))
        for name, text in (("rank002", json.dumps(asdict(earlier.failure))), ("rank003", '{"rank": 3, "st')):
            (folder / "rank-errors").mkdir(exist_ok=True)
            (folder / "rank-errors" / f"{name}.json").write_text(text)  # as written a moment before the claim
        assert rt.status.failures() == []
        earlier.end("failed", error="late")
        assert read_status(folder)["status"] == "running"
        rt.status.step = 3
        rt.status.failed(ValueError("cheese"))
        first = rt.status.write_failed()
    assert str(first) == read_status(folder)["error"] == "rank 0 failed at step 3 (start): ValueError: cheese"


@pytest.mark.parametrize("error", [DataError("a typo"), RuntimeError("a GPU is gone"), KeyboardInterrupt()])
def test_a_start_in_a_new_directory_that_comes_to_no_step_leaves_none(tmp_path: Path, error: Exception) -> None:
    def writes(rt: Runtime) -> None:
        (rt.output_dir(tmp_path / "sft") / TOKENIZER).mkdir()
        evaluation_dir(rt.output_dir(tmp_path / "sft"), 0).mkdir(parents=True)

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        started(tmp_path / "sft", None, fails(error), first=writes)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "made by somebody").mkdir()
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        started(tmp_path / "made by somebody", None, fails(error), first=writes)
    assert [path.name for path in tmp_path.rglob("*")] == ["made by somebody"]


# ---- directories with files of other people ------------------------------------------------------------------------------


def project(folder: Path, *names: str) -> Path:
    """A folder that somebody works in."""
    for name in (*names, "notes.txt", "src/train.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"my {name}")
    return folder


THEIRS = {
    "config.yaml": "config.yaml",
    "tokenizer/vocab.json": "tokenizer",
    "trace/log.txt": "trace",
    "evals/step-mine/x": "step-mine",
    "samples.jsonl": "samples.jsonl",
    "report.html": "report.html",
}
"File of theirs -> as which it is named."


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize(("name", "named"), THEIRS.items())
def test_a_folder_whose_files_a_run_would_write_over_is_refused_and_loses_none(
    tmp_path: Path, capsys, name: str, named: str, resume: str | None
) -> None:
    folder = project(tmp_path / "mine", name)
    before = contents(folder)
    with pytest.raises(SystemExit) as ended:
        started(folder, resume)
    assert ended.value.code == 2
    assert f"run.dir={folder} holds {named}, which this run would write over" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_script_that_is_refused_takes_no_file_of_the_folder_it_was_given(tmp_path: Path) -> None:
    folder = project(tmp_path / "mine", *THEIRS, "environment.json")
    before = contents(folder)
    words = ["tests/workers/faults_worker.py", str(folder), "none"]
    done = preloaded.run(words, env=ENV)
    assert done.returncode == 2, done.stderr[-3000:]
    assert f"run.dir={folder} holds config.yaml, environment.json, report.html, samples.jsonl, step-mine" in done.stderr
    assert "Take another folder, or move them away" in done.stderr
    assert contents(folder) == before


def test_a_run_beside_other_files_leaves_them_alone_and_so_does_one_that_fails(tmp_path: Path) -> None:
    folder = project(tmp_path / "mine")
    before = contents(folder)
    with pytest.raises(SystemExit):
        started(folder, None, fails(ValueError("no")))
    assert contents(folder) == before
    started(folder, None, takes=True)
    after = contents(folder)
    assert before.items() <= after.items()
    assert {METRICS_FILE, CONFIG, STATUS} <= after.keys()


def test_files_that_come_while_a_start_is_on_its_way_are_not_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    with pytest.raises(SystemExit) as ended:
        started(folder, None, takes=True, first=lambda _: project(folder, CONFIG))
    assert ended.value.code == 2
    assert contents(folder).keys() == {CONFIG, "notes.txt", "src", "src/train.py"}
    assert (folder / CONFIG).read_text() == f"my {CONFIG}"


def test_a_folder_that_no_run_has_written_is_set_aside_whole_although_a_file_has_the_name_of_one(
    tmp_path: Path,
) -> None:
    folder = project(tmp_path / "mine", METRICS_FILE, CONFIG)
    before = contents(folder)
    started(folder, "auto", takes=True)
    assert contents(tmp_path / "mine.old-1") == before


# ---- links and mount points ----------------------------------------------------------------------------------------------


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", "4m") as disk:
        yield disk


def test_behind_a_link_a_run_stays_on_the_disk_that_was_chosen(tmp_path: Path, other_disk: Path) -> None:
    before = contents(earlier_run(other_disk / "b"))
    (tmp_path / "link").symlink_to(other_disk / "b")
    with pytest.raises(SystemExit):
        started(tmp_path / "link", None, fails(ConfigError("no")))
    assert contents(other_disk / "b") == before
    started(tmp_path / "link", None, takes=True)
    assert (tmp_path / "link").readlink() == other_disk / "b"
    assert (tmp_path / "link" / CONFIG).read_text() == "run: {second}\n"
    assert contents(other_disk / "b.old-1") == before
    started(tmp_path / "link", "auto", takes=True)
    assert {path.name for path in other_disk.iterdir()} == {"b", "b.old-1"}


def test_a_mount_point_with_an_earlier_run_is_refused_before_anything_is_done(
    tmp_path, capsys, other_disk: Path
) -> None:
    started(other_disk, None, takes=True)  # an empty one is as any other
    before = contents(other_disk)
    with pytest.raises(SystemExit) as ended:
        started(other_disk, None)
    assert ended.value.code == 2
    assert (
        f"run.dir={other_disk} holds an earlier run, which a new one renames, and a mount point cannot be renamed"
        in (told := capsys.readouterr().err)
    )
    assert f"run.dir={other_disk}/NAME" in told
    assert contents(other_disk) == before
    started(other_disk, "auto", takes=True)


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
    done = preloaded.run(["tests/workers/faults_worker.py", str(folder), "none", "train.resume=auto"], 2, env)
    assert done.returncode == 1
    assert "no checkpoint in" in done.stderr, done.stderr[-3000:]
    assert contents(folder) == before
    assert list(tmp_path.glob("run.old-*")) == []


# ---- real runs, beside one that has trained two steps ------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_bpe: str) -> Iterator[Path]:
    """The directory of a run that has finished two steps."""
    with launching(tmp_path_factory.mktemp("trained"), small_bpe) as start:
        run = start("none", "train.max_steps=2", processes=1, forked=True)
        assert run.end() == 0, run.output[-3000:]
        yield run.dir


@pytest.fixture
def start(tmp_path: Path, trained: Path, small_bpe: str) -> Iterator[Launcher]:
    """Starts runs beside a copy of it."""
    with launching(tmp_path, small_bpe) as launcher:
        shutil.copytree(trained, tmp_path / "run")
        yield launcher


TO_NINE = ("train.max_steps=9", "eval.at_start=true", "eval.every=2")
ONE = {"processes": 1, "forked": True}


def without(folder: Path, *names: str) -> dict[str, bytes | None]:
    """The contents of a folder but for these at its top."""
    return {name: content for name, content in contents(folder).items() if Path(name).parts[0] not in names}


def sweep(folder: Path) -> None:
    """As the next start does, here one that is refused."""
    with pytest.raises(SystemExit):
        started(folder, None, fails(ConfigError("no")))


def killed(run: LaunchedRun) -> None:
    os.kill(run.rank(0), signal.SIGKILL)
    run.end()


WRITTEN = {CONFIG, STATUS, "environment.json", "preflight.json", "proof.json"}
"What a start writes before its first step, in these tests."
BEFORE_STEP_1 = [
    ("warming up", "null"),
    ("evaluating", "auto"),
    pytest.param("warming up", "auto", marks=pytest.mark.slow),
    pytest.param("evaluating", "null", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("moment", "resume"), BEFORE_STEP_1)
def test_a_start_that_is_killed_before_it_has_done_a_step_leaves_an_earlier_run_as_it_was(
    start: Launcher, moment: str, resume: str
) -> None:
    run = start(moment, *TO_NINE, f"train.resume={resume}", **ONE)
    before = contents(run.dir)
    run.until_marked(f"{moment}0")
    killed(run)
    assert without(run.dir, ATTEMPT, LOCK) == before
    assert list(run.dir.parent.glob("run.old-*")) == []
    sweep(run.dir)
    assert contents(run.dir) == before


@pytest.mark.parametrize(("moment", "resume"), BEFORE_STEP_1)
def test_a_signal_before_a_step_is_done_ends_the_start_at_once_and_leaves_an_earlier_run_as_it_was(
    start: Launcher, moment: str, resume: str
) -> None:
    run = start(moment, *TO_NINE, f"train.resume={resume}", **ONE)
    before = contents(run.dir)
    run.until_marked(f"{moment}0")
    os.kill(run.rank(0), signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM
    assert contents(run.dir) == before
    assert list(run.dir.parent.glob("run.old-*")) == []


@pytest.mark.parametrize("resume", ["null", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_start_that_is_killed_when_it_has_done_a_step_has_taken_the_place_of_an_earlier_run(
    start: Launcher, resume: str
) -> None:
    earlier = contents(start.folder / "run")
    run = start("slow", "train.max_steps=1000", "log.every=100", f"train.resume={resume}", **ONE)
    run.until(lambda: b"max_steps: 1000" in (run.dir / CONFIG).read_bytes())
    killed(run)
    aside = run.dir.with_name("run.old-1")
    if resume == "null":
        assert without(aside, LOCK) == earlier
        assert not step_dir(run.dir, 2).exists()
    else:
        assert not aside.exists()
        left = contents(run.dir)
        assert {name for name, content in earlier.items() if left[name] != content} <= WRITTEN
    again = start("none", "train.max_steps=3", "train.resume=auto", **ONE)
    assert again.end() == 0, again.output[-3000:]
    assert again.steps() == [1, 2, 3]
    assert without(aside, LOCK) == earlier or resume == "auto"


def test_a_checkpoint_of_another_directory_begins_a_new_run_and_an_earlier_one_there_is_set_aside_whole(
    start: Launcher, trained: Path
) -> None:
    """Rows and checkpoints of two runs are not mixed, and none is pruned."""
    earlier, source = contents(start.folder / "run"), contents(trained)
    run = start("none", "train.max_steps=6", "checkpoint.every=2", f"train.resume={trained}/step-000002", **ONE)
    assert run.end() == 0, run.output[-3000:]
    assert run.steps() == [3, 4, 5, 6]
    assert [folder.name for folder in step_dirs(run.dir)] == ["step-000004", "step-000006"]
    assert contents(run.dir.with_name("run.old-1")) == earlier
    assert contents(trained) == source


def test_a_checkpoint_of_the_directory_itself_goes_on_with_its_run_whatever_its_name_is(
    start: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "same").symlink_to(tmp_path / "run")
    named = f"train.resume={tmp_path}/same/step-000002"
    run = start("none", "train.max_steps=3", named, **ONE)
    assert run.end() == 0, run.output[-3000:]
    assert run.steps() == [1, 2, 3]
    assert list(tmp_path.glob("run.old-*")) == []


def test_a_warm_up_that_hangs_is_ended_and_leaves_an_earlier_run_as_it_was(start: Launcher) -> None:
    run = start("warming up", *TO_NINE, "run.start_timeout_seconds=1", **ONE)
    before = contents(run.dir)
    assert run.end() == 1
    assert "rank 0 hangs at step 0 in phase warm-up" in run.output
    assert contents(run.dir) == before


def test_a_time_limit_that_is_over_before_a_step_is_done_is_refused_and_leaves_an_earlier_run_as_it_was(
    start: Launcher,
) -> None:
    run = start("none", *TO_NINE, "train.max_minutes=0.001", **ONE)
    before = contents(run.dir)
    assert run.end() == 2
    assert "train.max_minutes=0.001: the time was up before the first step" in run.output
    assert contents(run.dir) == before


@pytest.mark.slow
def test_ranks_of_which_one_is_killed_in_the_warm_up_leave_an_earlier_run_as_it_was(start: Launcher) -> None:
    run = start("warming up", *TO_NINE)
    before = contents(run.dir)
    run.until_marked("warming up0", "warming up1")
    os.kill(run.rank(1), signal.SIGKILL)
    assert run.end() != 0
    assert contents(run.dir) == before


@pytest.mark.slow
def test_a_start_that_fails_in_the_warm_up_and_is_started_again_by_its_launcher_does_not_resume_the_earlier_run(
    start: Launcher, tmp_path: Path
) -> None:
    earlier = contents(start.folder / "run")
    variables = {"FAULT_ONCE": str(tmp_path / "struck"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    restarts = ("--standalone", "--max-restarts", "1", "--monitor-interval", "1")
    run = start("fails in the warm-up", "train.max_steps=3", torchrun=restarts, **variables)
    assert run.end(timeout=300) == 0, run.output[-3000:]
    assert run.steps() == [1, 2, 3]
    assert not step_dir(run.dir, 2).exists()
    assert contents(run.dir.with_name("run.old-1")) == earlier


# ---- killed at each operation with which a start takes its place --------------------------------------------------------


def test_a_start_that_is_killed_while_it_takes_its_place_in_a_new_directory_is_a_run_for_the_next(
    tmp_path: Path,
) -> None:
    for operation in count():
        folder = project(tmp_path / str(operation) / "sft")
        theirs = contents(folder)
        if in_fork(partial(started, folder, None, lambda: os._exit(0), takes=True, killed_before=operation)) == 0:
            break
        started(folder, None, takes=True)
        whole = contents(folder.parent)
        assert {name.partition("/")[2]: content for name, content in whole.items()}.items() >= theirs.items(), operation
        assert (folder / CONFIG).read_text() == "run: {second}\n"
    assert operation >= 3


@pytest.mark.slow
@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_start_that_is_killed_while_it_takes_its_place_leaves_an_earlier_run_whole(tmp_path: Path, resume) -> None:
    for operation in count():
        folder = earlier_run(tmp_path / str(operation) / "sft")
        before = contents(folder)
        if in_fork(partial(started, folder, resume, lambda: os._exit(0), takes=True, killed_before=operation)) == 0:
            break
        sweep(folder)
        if resume:
            kept = {name: content for name, content in before.items() if name not in WRITTEN}
            assert kept.items() <= contents(folder).items(), operation
        else:
            places = [folder, folder.with_name("sft.old-1")]
            assert before in [without(place, LOCK) for place in places if place.exists()], operation
        assert {path.name for path in folder.parent.iterdir()} <= {"sft", "sft.old-1"}
    assert operation >= 2
