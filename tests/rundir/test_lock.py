"""One live run in a directory: a second start is refused by name, and nothing of a process that is gone is in the way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from forked import in_fork
from helpers import cpu_runtime

from sftkit.errors import ConfigError, RunDirError
from sftkit.rundir.lock import Holder, at_work, pid_scope, process_start, read_holder, take_lock
from sftkit.rundir.names import LOCK
from sftkit.runtime.open import open_run

ME = Holder(*pid_scope(), os.getpid(), process_start(os.getpid()), time.time())


def holding(do: Callable[[], object]) -> int:
    """The id of a fork that has done it and then lives on."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            do()
            os.write(writes, b"!")
            time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(reads, 1) == b"!"
    os.close(reads)
    os.close(writes)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def record(run_dir: Path, holder: Holder) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / LOCK).write_text(json.dumps(asdict(holder)))


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_second_start_in_the_directory_of_a_live_run_is_refused_by_name_and_touches_nothing(tmp_path, resume) -> None:
    folder = tmp_path / "sft"
    child = holding(lambda: open_run(str(folder), resume, "run: {}\n", cpu_runtime()))
    (folder / ".step-000002.abcd.tmp").mkdir()
    before = contents(tmp_path)
    try:
        with pytest.raises(ConfigError, match=rf"process {child} on .*, since \d{{4}}-.*another run.dir"):
            open_run(str(folder), resume, "run: {}\n", cpu_runtime())
    finally:
        end(child)
    assert contents(tmp_path) == before


def test_a_killed_run_leaves_no_lock_to_remove_and_its_data_workers_hold_none(tmp_path: Path) -> None:
    workers: list[int] = []
    reads, writes = os.pipe()

    def with_worker() -> None:
        take_lock(tmp_path)
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
        os.write(writes, f"{worker}\n".encode())

    child = holding(with_worker)
    workers.append(int(os.read(reads, 32)))
    try:
        assert in_fork(lambda: take_lock(tmp_path)) == 3
        end(child)
        assert psutil.pid_exists(workers[0])
        assert in_fork(lambda: take_lock(tmp_path)) == 0
    finally:
        os.kill(workers[0], signal.SIGKILL)
        os.close(reads)
        os.close(writes)


def test_the_lock_of_a_run_ends_with_it_and_of_several_starts_one_gets_it(tmp_path: Path) -> None:
    with cpu_runtime() as rt:
        folder = open_run(str(tmp_path / "run"), None, "run: {}\n", rt).parent
        holder = read_holder(folder / LOCK)
        assert holder is not None
        assert (holder.host, holder.pid) == (ME.host, os.getpid())
        assert in_fork(lambda: take_lock(folder)) == 3
    assert not (folder / LOCK).exists()
    assert in_fork(lambda: take_lock(folder)) == 0
    children = []
    go = time.time() + 0.3
    for _ in range(6):
        child = os.fork()
        if child == 0:
            time.sleep(max(go - time.time(), 0))
            code = 3
            try:
                take_lock(folder)
                code = 0
                time.sleep(1)
            except ConfigError:
                pass
            finally:
                os._exit(code)
        children.append(child)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert codes == [0, 3, 3, 3, 3, 3]


def test_a_process_that_ends_at_once_releases_its_lock(tmp_path: Path) -> None:
    from sftkit.runtime.signals import end_process

    def run() -> None:
        take_lock(tmp_path)
        end_process(0)

    assert in_fork(run) == 0
    assert not (tmp_path / LOCK).exists()


def test_a_file_system_without_flock_is_rejected_with_what_to_do_and_nothing_stays_open(tmp_path, monkeypatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = psutil.Process().num_fds()
    with pytest.raises(ConfigError, match=r"no file locks \(flock: No locks available\).*another disk"):
        take_lock(tmp_path / "run")
    assert psutil.Process().num_fds() == before


def test_a_recorded_holder_lives_while_its_process_does_and_not_when_a_later_one_has_its_id(tmp_path: Path) -> None:
    assert at_work(tmp_path) is False
    record(tmp_path, ME)
    assert at_work(tmp_path) is True
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    for dead in (replace(ME, pid=child), replace(ME, after_boot=ME.after_boot - 100)):
        record(tmp_path, dead)
        assert at_work(tmp_path) is False
    record(tmp_path, replace(ME, processes="pid:[1]"))
    assert at_work(tmp_path) is None


def renamed(folder: Path) -> str:
    folder.rename(folder.with_name("moved"))
    return f"its folder is now {folder.with_name('moved')}"


def renamed_and_made_again(folder: Path) -> str:
    words = renamed(folder)
    assert in_fork(lambda: take_lock(folder)) == 0
    return words


def deleted(folder: Path) -> str:
    shutil.rmtree(folder)
    return "its folder was deleted"


def lock_removed(folder: Path) -> str:
    (folder / LOCK).unlink()
    return f"{folder}/.lock was removed"


def lock_renamed(folder: Path) -> str:
    (folder / LOCK).rename(folder / "old")
    return f"its lock is now {folder / 'old'}"


def lock_replaced(folder: Path) -> str:
    (folder / LOCK).unlink()
    assert in_fork(lambda: take_lock(folder)) == 0
    return f"{folder}/.lock was removed, and process "


def a_file_in_its_place(folder: Path) -> str:
    renamed(folder)
    folder.write_text("")
    return "its folder is now"


@pytest.mark.parametrize(
    "loss", [renamed, renamed_and_made_again, deleted, lock_removed, lock_renamed, lock_replaced, a_file_in_its_place]
)
def test_a_run_learns_that_its_directory_is_no_longer_its_own_and_where_it_went(tmp_path: Path, loss) -> None:
    folder = tmp_path / "run"
    held = take_lock(folder)
    held.check(folder)
    words = loss(folder)
    with pytest.raises(RunDirError, match=re.escape(f"run.dir={folder} is no longer this run's")) as caught:
        held.check(folder)
    assert f"so the run has ended: {words}" in str(caught.value)
    assert ("give the folder its name back" in str(caught.value)) == words.startswith("its folder is now")
    assert ("start it again" in str(caught.value)) == (loss is deleted), "there is nothing to resume"
    held.release()


def test_a_link_that_leads_elsewhere_now_is_no_longer_the_runs_directory(tmp_path: Path) -> None:
    link = tmp_path / "link"
    (tmp_path / "disk").mkdir()
    link.symlink_to(tmp_path / "disk")
    held = take_lock(tmp_path / "disk")
    held.check(link)
    link.unlink()
    (tmp_path / "other").mkdir()
    link.symlink_to(tmp_path / "other")
    with pytest.raises(RunDirError, match=f"its folder is now {tmp_path}/disk"):
        held.check(link)
    held.release()


@pytest.mark.parametrize("local", [True, False])
def test_the_record_of_another_machine_is_believed_unless_the_disk_is_this_machines_own(
    tmp_path, monkeypatch, local
) -> None:
    kind = "ext4" if local else "nfs4"
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    record(tmp_path / "run", replace(ME, host="node17", machine="another boot"))
    if local:
        take_lock(tmp_path / "run").release()
        return
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on node17.*remove .*run/\.lock"):
        take_lock(tmp_path / "run")
    record(tmp_path / "run", replace(ME, machine="the boot before", since=psutil.boot_time() - 1000))
    take_lock(tmp_path / "run").release()
