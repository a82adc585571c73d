"""A run as a context: what it changes in the process is put back, and how it fails is told once, with its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import preloaded
import pytest
from helpers import cpu_runtime

from sftkit.errors import ConfigError, DataError, Stopped
from sftkit.runtime import start
from sftkit.runtime.launcher import check_group, check_launcher, check_variables
from sftkit.runtime.open import claim_run_dir, open_run
from sftkit.runtime.signals import SIGNALS, Stopping


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


def wakeup_fd() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "signals"]


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def wait_for(ready: Any) -> None:
    deadline = time.monotonic() + 10
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ready()


def test_after_a_run_the_signals_of_the_process_go_where_they_went_before(tmp_path: Path) -> None:
    before: tuple[Any, ...] = (handlers(), wakeup_fd(), threads(), open_files())
    with cpu_runtime() as rt:
        open_run(str(tmp_path / "run"), None, "run: {}\n", rt)
        assert wakeup_fd() != before[1]
        rt.stopping.save_first()
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(rt.stopping.stop_requested)
        assert rt.signal_of_any_rank() == signal.SIGUSR1
    assert (handlers(), wakeup_fd(), threads(), open_files()) == before


def test_a_handler_that_was_there_gets_its_signals_again(tmp_path: Path) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: got.append(number))
    try:
        stopping = Stopping()
        stopping.save_first()
        stopping.save_first()  # its own handlers are not taken for those of before
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(stopping.stop_requested)
        assert got == []
        stopping.close()
        stopping.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: got == [signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_of_a_process_that_was_forked_off_are_not_ours() -> None:
    stopping = Stopping()
    stopping.save_first()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.2)
        os._exit(0)
    os.waitpid(child, 0)
    assert not stopping.stop_requested()
    stopping.close()


def test_two_runs_of_a_process_do_not_share_a_status(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        with cpu_runtime() as rt:
            assert rt.status is None
            folder = open_run(str(tmp_path / name), None, "run: {}\n", rt)
            assert rt.status is not None
            assert rt.status is rt.open_status(folder)
            rt.status.at(3, name)
            found.append(rt.status)
    assert [(status.run_dir.parent.name, status.phase) for status in found] == [("one", "one"), ("two", "two")]


def test_asking_for_a_stop_is_progress_of_this_run_alone(tmp_path: Path) -> None:
    here, other = cpu_runtime(), cpu_runtime()
    for rt, name in ((here, "here"), (other, "other")):
        rt.open_status(tmp_path / name).since = 0.0
    here.check_stop()
    assert here.status is not None
    assert other.status is not None
    assert here.status.since > 0.0
    assert other.status.since == 0.0
    here.stopping.signal = signal.SIGTERM
    with pytest.raises(Stopped):
        here.check_stop()
    cpu_runtime().check_stop()


def test_what_was_registered_is_put_back_last_first_also_after_an_error() -> None:
    said: list[str] = []
    for error, expected in ((None, None), (ValueError("cheese"), SystemExit), (KeyboardInterrupt(), KeyboardInterrupt)):
        said.clear()
        with nullcontext() if expected is None else pytest.raises(expected), cpu_runtime() as rt:
            rt.at_end.callback(said.append, "first")
            rt.at_end.callback(said.append, "second")
            if error is not None:
                raise error
        assert said == ["second", "first"]


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no"), 2), (DataError("no"), 2), (ValueError("no"), 1)])
def test_how_a_run_failed_is_written_down_printed_and_shown(tmp_path, capsys, error: Exception, code: int) -> None:
    pages: list[Path] = []

    def run() -> NoReturn:
        with cpu_runtime() as rt:
            rt.page = pages.append
            open_run(str(tmp_path / "run"), None, "run: {}\n", rt)
            claim_run_dir(rt)
            assert rt.status is not None
            rt.status.at(7, "step")
            raise error

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == code
    found = json.loads((tmp_path / "run" / "run_status.json").read_text())
    assert (found["status"], found["step"], found["first_failing_rank"]) == ("failed", 7, 0)
    assert json.loads((tmp_path / "run" / "rank-errors" / "rank000.json").read_text())["step"] == 7
    assert "error: " in capsys.readouterr().err
    assert pages == [tmp_path / "run"]


def test_one_of_several_ranks_ends_its_process_at_once_while_it_still_listens(tmp_path, monkeypatch) -> None:
    ended: list[int] = []

    def end(code: int) -> NoReturn:
        assert wakeup_fd() >= 0
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(start, "end_process", end)
    monkeypatch.setattr(start.Runtime, "world_size", property(lambda _: 2))

    def run() -> NoReturn:
        with cpu_runtime() as rt:
            rt.open_status(tmp_path)
            rt.stopping.save_first()
            raise ValueError("cheese")

    with pytest.raises(SystemExit):
        run()
    assert ended == [1]


def test_processes_that_a_launcher_started_and_that_form_no_group_are_refused_with_the_cause(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": preloaded.PYTHONPATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("ACCELERATE_USE_CPU", None)  # as for a GPU run whose driver is broken
    done = preloaded.run(["tests/workers/faults_worker.py", str(tmp_path / "run"), "none"], 2, env)
    assert done.returncode != 0
    assert done.stderr.count("WORLD_SIZE=2, but this process has found no others") == 2
    assert "no GPU can be used" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1"}, "but MASTER_ADDR is not set"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "srun has started 2 processes (SLURM_STEP_NUM_TASKS)"),
    ],
)
def test_a_process_that_cannot_find_the_others_is_refused_before_it_looks_for_them(tmp_path, variables, told) -> None:
    env = {**os.environ, "PYTHONPATH": preloaded.PYTHONPATH, "ACCELERATE_USE_CPU": "true", **variables}
    done = preloaded.run(["tests/workers/faults_worker.py", str(tmp_path / "run"), "none"], env=env)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_variables_of_launchers_are_taken_as_they_are() -> None:
    found = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    batch_script = {"SLURM_NTASKS": "2"}  # one process, whatever the job may use
    for environ in ({}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "2", **found}, mpi, batch_script):
        check_variables(environ)
    check_variables({"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "4", **found})


def test_a_launcher_that_starts_one_process_of_several_is_told() -> None:
    assert "this one trains alone" in (check_launcher({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}) or "")
    assert check_launcher({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1"}) is None
    assert check_launcher({}) is None


def test_the_size_of_the_group_is_that_of_the_launcher() -> None:
    check_group({}, 1, lambda: "no driver")
    check_group({"WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 2, lambda: "no driver")
    with pytest.raises(ConfigError, match=r"OMPI_COMM_WORLD_SIZE=4, but this process is in a group of 2"):
        check_group({"OMPI_COMM_WORLD_SIZE": "4", "LOCAL_RANK": "0"}, 2, lambda: None)
    with pytest.raises(ConfigError, match="LOCAL_RANK is not set"):
        check_group({"WORLD_SIZE": "2"}, 1, lambda: "no driver")


SCRIPT = """
import sys
from sftkit.errors import ConfigError
from sftkit.runtime.script import script

def main():
    if "torch" in sys.argv:
        from sftkit.runtime.start import Runtime
    if "group" in sys.argv:
        import atexit, torch
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        atexit.register(lambda: print("joined" if torch.distributed.is_initialized() else "left"))
    print("torch" if "torch" in sys.modules else "no torch")
    raise {"config": ConfigError("x: no"), "own": ValueError("y"), "interrupt": KeyboardInterrupt()}[sys.argv[1]]

script(main)
"""


LATE = """
import atexit, os, signal, sys
from sftkit.runtime.script import script

def late():
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)

def main():
    from helpers import cpu_runtime
    atexit.register(late)
    with cpu_runtime() as rt:
        rt.stopping.save_first()

script(main)
"""


OVERTAKEN = """
import os, signal
from sftkit.errors import ConfigError
from sftkit.runtime.script import script

def main():
    os.kill(os.getpid(), signal.SIGINT)
    raise ConfigError("x: no")

script(main)
"""


def test_an_error_that_a_signal_has_overtaken_is_neither_told_nor_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", OVERTAKEN], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "\nSIGINT: ended\n")


def test_a_signal_after_a_run_has_ended_does_not_make_a_failure_of_it() -> None:
    env = {**os.environ, "PYTHONPATH": preloaded.PYTHONPATH}
    done = preloaded.run(["-c", LATE], env=env)
    assert (done.returncode, done.stdout.strip()) == (0, "still here"), done.stderr


@pytest.mark.parametrize(
    ("words", "code", "out", "error"),
    [
        (["config"], 2, "no torch", "error: x: no"),
        (["own"], 1, "no torch", "error: ValueError: y"),
        (["interrupt"], 130, "no torch", ""),
        (["config", "torch"], 2, "torch", "error: x: no"),
        (["own", "group"], 1, "torch\nleft", "error: ValueError: y"),
    ],
)
def test_a_script_tells_what_goes_wrong_outside_a_run_and_closes_the_group_it_has_joined(words, code, out, error):
    if words[1:]:  # with torch, which is there already
        done = preloaded.run(["-c", SCRIPT, *words])
    else:
        done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (code, out), done.stderr
    assert error in done.stderr
    assert ("Traceback" in done.stderr) == (words[0] == "own")
