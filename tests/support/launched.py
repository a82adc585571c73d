"""Runs of faults_worker.py under a real launcher, and small disks, for the tests of signals and faults."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import preloaded
import psutil
import pytest

from sftkit.checkpoint.save import free_bytes
from sftkit.launch.launch import CONFIGS, Launch, command
from sftkit.rundir.files import verify
from sftkit.rundir.names import LATEST, step_dirs
from sftkit.runtime.launcher import signal_env

ROOT = preloaded.ROOT
WORKER = "tests/workers/faults_worker.py"


class Terminal:
    """A pseudo-terminal with an open reader until it is closed."""

    def __init__(self, columns: int = 80) -> None:
        self.text = ""
        self._reads, self.device = os.openpty()
        termios.tcsetwinsize(self.device, (24, columns))
        self.path = os.ttyname(self.device)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._closed.is_set():
            if select.select([self._reads], [], [], 0.05)[0]:
                with suppress(OSError):  # no process has it open
                    self.text += os.read(self._reads, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        """Hang up, like a closed window or a broken connection."""
        self._closed.set()
        self._thread.join()
        os.close(self.device)
        os.close(self._reads)


def own_terminal() -> None:
    """Make the standard input of a new process, which leads a session, the terminal of that session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class LaunchedRun:
    """A process tree in its own session: a launcher, its ranks and their children; ranks and torch's compilers
    leave it.
    """

    process: subprocess.Popen[str] | preloaded.Process

    def __init__(
        self, dir: Path, words: list[str], forked: int = 0, terminal: Terminal | None = None, **env: str
    ) -> None:
        """Args:
        words: command line of a launcher; with `forked`, of a script whose ranks are forked without a launcher.
        terminal: terminal in whose foreground it runs; None: no terminal.
        """
        self.dir, self.output = dir, ""
        self._seen: set[psutil.Process] = set()
        inherited = {**os.environ, **signal_env({}), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}
        env = {
            **inherited,
            "PYTHONPATH": preloaded.PYTHONPATH,
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            **env,
        }
        if forked:
            self.process = preloaded.Process(words, forked, env, terminal.path if terminal else None)
            return
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        if terminal is not None:
            device = terminal.device
            streams = {"stdin": device, "stdout": device, "stderr": device, "preexec_fn": own_terminal}
        self.process = subprocess.Popen(words, cwd=ROOT, env=env, text=True, start_new_session=True, **streams)

    def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 100
        while not ready():
            assert self.process.poll() is None, self._written(10)[-3000:]
            assert time.monotonic() < deadline, "not ready in time"
            self._look()
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        self.until(lambda: bool(self.steps()) and self.steps()[-1] >= step)

    def until_marked(self, *names: str) -> None:
        """Wait until the worker has touched these files next to the run directory."""
        self.until(lambda: all(Path(f"{self.dir}.{name}").exists() for name in names))

    def steps(self) -> list[int]:
        metrics = self.dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    def rank(self, rank: int) -> int:
        return int(Path(f"{self.dir}.pid{rank}").read_text())

    def weights(self) -> list[dict[str, float]]:
        """Weights of both ranks at the end."""
        return [json.loads(Path(f"{self.dir}.weights{rank}").read_text()) for rank in (0, 1)]

    def end(self, timeout: float = 100) -> int:
        """Wait for the launcher and check that no process of the session is left. Returns its exit code."""
        self.output = self._written(timeout)
        deadline = time.monotonic() + 10
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == [], f"left behind: {left}\n{self.output[-3000:]}"
        return self.process.returncode

    def _written(self, timeout: float) -> str:
        """All its output after it has ended."""
        return "".join(filter(None, self.process.communicate(timeout=timeout)))

    def _look(self) -> None:
        with suppress(psutil.Error):
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))

    def alive(self) -> list[tuple[int, str]]:
        """Id and command line of the session's processes and of all others known to come from the launcher."""
        self._look()
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                mine = os.getsid(process.pid) == self.process.pid or process in self._seen
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process.pid, " ".join(process.cmdline())[:200]))
        return found

    def status(self) -> dict[str, Any]:
        assert (self.dir / "run_status.json").exists(), self.output[-3000:]
        return json.loads((self.dir / "run_status.json").read_text())

    def check_ended(self, status: str, number: str | None) -> dict[str, Any]:
        found = self.status()
        assert (found["status"], found["signal"], found["error"]) == (status, number, None), self.output[-3000:]
        return found

    def check_left_nothing(self, number: str) -> None:
        """Check that the run ended before its first step, reported it, and left no directory."""
        assert f"{number}: ended before the first step" in self.output, self.output[-3000:]
        assert not self.dir.exists()

    def check_stopped(self, status: str, number: str, checkpoints: int = 1) -> int:
        """Check that the run ended on request with complete checkpoints, the newest at its last step. Returns
        the step.
        """
        step = self.check_ended(status, number)["step"]
        folders = step_dirs(self.dir)
        assert len(folders) == checkpoints, folders
        assert (folders[-1].name, (self.dir / LATEST).read_text()) == (f"step-{step:06d}", f"step-{step:06d}\n")
        assert [verify(folder) for folder in folders] == [None] * checkpoints
        assert not list(self.dir.glob(".step-*"))
        summary = json.loads((self.dir / "summary.json").read_text())
        assert (summary["step"], summary["stopped"]) == (step, True)
        return step


class Launcher:
    """Start runs of the worker, with two ranks by default, in subfolders of one folder. A `forked` run has no
    launcher, for tests that do not involve one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[LaunchedRun] = []

    def __call__(
        self, fault: str, *settings: str, name: str = "run", processes: int = 2, forked: bool = False,
        torchrun: tuple[str, ...] = (), accelerate: tuple[str, ...] = (), before: tuple[str, ...] = (),
        terminal: Terminal | None = None, **env: str,
    ) -> LaunchedRun:  # fmt: skip
        worker = [WORKER, str(self.folder / name), fault, *settings]
        env = {"FAULT_TOKENIZER": str(self.folder / "tokenizer.json"), **env}
        if forked:
            return self.watch(LaunchedRun(self.folder / name, worker, processes, terminal, **env))
        if torchrun:
            words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *torchrun, *worker]
        elif accelerate:
            config = str(CONFIGS / "cpu_ddp.yaml")
            words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, *accelerate, *worker]
        else:
            config_file = CONFIGS / ("cpu_ddp.yaml" if processes > 1 else "cpu.yaml")
            words = command(Launch(config_file, processes, ""), worker[0], worker[1:])
        return self.watch(LaunchedRun(self.folder / name, [*before, *words], terminal=terminal, **env))

    def watch(self, run: LaunchedRun) -> LaunchedRun:
        self.runs.append(run)
        return run


@contextmanager
def launching(folder: Path, tokenizer: str) -> Iterator[Launcher]:
    """A Launcher; its remaining processes are killed at the end."""
    (folder / "tokenizer.json").write_text(tokenizer)
    launcher = Launcher(folder)
    try:
        yield launcher
    finally:
        for run in launcher.runs:
            for pid, _ in run.alive():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def small_file_system(disk: Path, size: str) -> Iterator[Path]:
    """A separate file system at `disk`."""
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """A file that leaves this many bytes free."""
    filler = disk / "filler"
    filler.write_bytes(b"\0" * (free_bytes(disk) - leave))
    return filler
