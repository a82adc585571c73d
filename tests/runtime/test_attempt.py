"""A start before its first step: an earlier run stays as it was until one is done, and nothing is left of a typo."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import preloaded
import pytest
from helpers import ROOT, cpu_runtime
from launched import LaunchedRun, Launcher, launching

from sftkit.errors import ConfigError, DataError
from sftkit.runtime.lock import read_holder
from sftkit.runtime.open import open_run, take_place
from sftkit.runtime.rundir import (
    ATTEMPT,
    COMPILE,
    CONFIG,
    EVALUATIONS,
    LOCK,
    METRICS,
    REPORT,
    RESULTS,
    STATUS,
    TOKENIZER,
    evaluation_dir,
    step_dir,
    step_dirs,
)
from sftkit.runtime.start import Runtime

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
            kill_before(killed_before)
        if takes:
            take_place(rt)
        then()


def kill_before(operation: int) -> None:
    """Kill this process before so many renames and deletions more."""
    left = iter(range(operation))
    for module, name in ((os, "rename"), (os, "replace"), (os, "unlink"), (shutil, "rmtree")):
        original = getattr(module, name)

        def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, counted)


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
        rt.at_end.callback(lambda: (rt.place(folder) / COMPILE).mkdir(parents=True))

    for _ in range(2):
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            started(folder, resume, fails(error), first=writes_at_end)
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
    evaluations = [evaluation_dir(folder, step) / RESULTS for step in (1, 2)]
    for file in evaluations:
        file.parent.mkdir(parents=True)
        file.write_text("of before")
    before = contents(folder)

    def evaluate(rt: Runtime) -> None:
        file = evaluation_dir(rt.place(folder), 2) / RESULTS
        file.parent.mkdir(parents=True)
        file.write_text("anew")
        assert contents(folder).items() >= before.items()

    started(folder, "auto", takes=True, first=evaluate)
    now = contents(folder)
    changed = {name for name in now if now[name] != before.get(name, b"")}
    assert changed == {CONFIG, STATUS, "environment.json", "preflight.json", str(evaluations[1].relative_to(folder))}
    assert before.keys() <= now.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]


def test_a_refused_start_in_a_new_directory_leaves_none_and_a_failed_one_makes_room_for_the_next(
    tmp_path: Path,
) -> None:
    with pytest.raises(SystemExit):
        started(tmp_path / "sft", None, fails(DataError("a typo")))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit):
        started(tmp_path / "sft", None, fails(RuntimeError("a GPU is gone")))
    assert (tmp_path / "sft" / STATUS).exists()  # a requeue script reads it
    (tmp_path / "sft" / TOKENIZER).mkdir()
    evaluation_dir(tmp_path / "sft", 0).mkdir(parents=True)
    started(tmp_path / "sft", None, takes=True)
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]
    assert not {TOKENIZER, EVALUATIONS} & {path.name for path in (tmp_path / "sft").iterdir()}


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


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_start_that_is_killed_while_it_takes_its_place_leaves_an_earlier_run_whole(tmp_path: Path, resume) -> None:
    for operation in count():
        folder = earlier_run(tmp_path / str(operation) / "sft")
        before = contents(folder)
        child = os.fork()
        if child == 0:
            started(folder, resume, lambda: os._exit(0), takes=True, killed_before=operation)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        sweep(folder)
        if resume:
            kept = {name: content for name, content in before.items() if name not in WRITTEN}
            assert kept.items() <= contents(folder).items(), operation
        else:
            places = [folder, folder.with_name("sft.old-1")]
            assert [without(place, LOCK) for place in places if place.exists()] == [before], operation
        assert {path.name for path in folder.parent.iterdir()} <= {"sft", "sft.old-1"}
    assert operation >= 2
