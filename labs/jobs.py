"""The job runner of all labs: processes with a log, a time limit and a complete cleanup. It runs a bench plan one run
after the other; with --ahead, each run starts during the previous one. No torch in this file.

python -m labs.jobs JOB.json HOLD      a run that imports what it needs, and waits until it is released
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

import psutil  # comes with accelerate
import yaml

from labs.bench.plan import Job, Processes, accelerate_config, read_job, save_job, slug
from sftkit.config.terminal import print_text
from sftkit.launch.launch import Launch, command, cpu_cores
from sftkit.runtime.script import script
from sftkit.runtime.signals import exit_on_signals

_ABOVE_LABS = Path(__file__).resolve().parents[1]
SHUTDOWN_SECONDS = 5
"Seconds that the launcher waits for the other ranks after one has failed: they have nothing to save."
FIRST_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)
_KILLED = re.compile(r"Root Cause \(first observed failure\):.*?rank +: (\d+).*?exitcode +: -(\d+)", re.DOTALL)


def bench_command(
    processes: Processes, worker: str | None, job_file: Path, hold: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a run and its environment variables.

    The Accelerate config of a launched run is written next to its job file, with the run's changes to the topology.

    Args:
        worker: script that trains; None: sftkit.
        hold: lock that sftkit's processes wait for after their imports; None: they begin at once.
    """
    if worker is not None:
        words = [worker, str(job_file)]
    elif hold is None:
        words = ["-m", "labs.bench.worker", str(job_file)]
    else:
        words = ["-m", "labs.jobs", str(job_file), str(hold)]
    if processes.topology is None:
        return [sys.executable, *words], {}
    config = accelerate_config(processes.topology) | {"num_processes": processes.count}
    if processes.count > 1:
        config["main_process_port"] = 0  # a free port
    if processes.parallelism is not None:
        named = {f"parallelism_config_{key}": size for key, size in processes.sizes.items()}
        config["parallelism_config"] = config.get("parallelism_config", {}) | named
    path = job_file.with_name("accelerate.yaml")
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    launch = Launch(path, processes.count, summary="")
    # Variables that the user has set stay unchanged.
    environment = {
        # Ranks share the cores: if each had a thread for every core, they would wait for one another.
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // processes.count)),  # accelerate launch would set 1
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        **({"ACCELERATE_USE_CPU": "true"} if config.get("use_cpu") else {}),
    }
    kept = {key: value for key, value in environment.items() if key not in os.environ}
    return command(launch, words[0], words[1:]), kept


def own_caches(folder: Path) -> dict[str, str]:
    """Return the environment variables that give a run its own empty compiler caches, so that its first compile is a
    real one.
    """
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "XDG_CACHE_HOME": str(folder),
    }


@dataclass(frozen=True)
class Logged:
    """A running command with its output in a file."""

    process: subprocess.Popen[bytes]
    log: Path


def start_logged(words: list[str], log: Path, environment: dict[str, str]) -> Logged:
    """Start a command with its output in `log`. The caller must end it with `finish_logged` or `kill_tree`."""
    # Workers import labs, which is not installed as a module, from any working directory.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(_ABOVE_LABS), os.environ.get("PYTHONPATH"))))}
    with log.open("w") as file:
        env = os.environ | path | environment
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env)
    return Logged(process, log)


def finish_logged(command: Logged, timeout_seconds: int) -> str | None:
    """Wait for a command. Return how it ended and its last line; None: it succeeded.

    Its processes have ended when this returns: they are killed if the time is up or this process is interrupted.
    """
    try:
        with exit_on_signals():
            code = command.process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_seconds} s"
    finally:
        kill_tree(command.process)
    if code == 0:
        return None
    said = [text for text in command.log.read_text(errors="replace").splitlines() if text.strip()]
    return f"ended with code {code}" + (f": {said[-1].strip()}" if said else "")


def run_logged(words: list[str], log: Path, environment: dict[str, str], timeout_seconds: int) -> str | None:
    """Run a command with its output in `log`, and return the result of `finish_logged`."""
    return finish_logged(start_logged(words, log, environment), timeout_seconds)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a running process and all its descendants; ranks have process groups of their own."""
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        # Suspended before its children are listed, so that it starts no others; ranks have process groups of their
        # own, so a signal to the launcher's group would miss them.
        root.suspend()  # a launcher that sees a rank die would react
        tree = [*root.children(recursive=True), root]
        for member in tree:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(tree[:-1], timeout=10)
    process.wait()


def first_failure(log: Path, error: str | None) -> str:
    """Return why a launched run failed: the rank that a signal killed, if any, then the first error.

    Args:
        error: error that a rank recorded; None: no rank did, so the first error in the log is used.
    """
    text = log.read_text(errors="replace")
    found = FIRST_ERROR.search(text)
    error = error or (found.group(1).strip() if found else None)
    killed = _KILLED.search(text)
    if killed is None or int(killed.group(2)) == signal.SIGTERM:  # The launcher ends the other ranks with SIGTERM
        return error or "it wrote no row"
    how = f"rank {killed.group(1)} was killed by signal {killed.group(2)}"
    return f"{how}; {error}" if error and "ChildFailedError" not in error else how


LOWEST = 19
"Niceness of a thread that gets a core only if no other thread wants it."
_GO = "go"


class Hold:
    """A file that this process keeps locked while others must wait.

    The kernel releases the lock when the process ends in any way, so no process waits for a bench that is gone.
    Waiting for a lock takes no time from the run being measured.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the waiting processes."""
        self._file.write(_GO)
        self.close()

    def close(self) -> None:
        """End the wait; processes that were not released exit. A second call has no effect."""
        self._file.close()


def wait_for(hold: Path) -> bool:
    """Wait until the bench releases this process and return True; False if the bench has ended."""
    try:
        with hold.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return file.read() == _GO
    except FileNotFoundError:  # deleted with the other temporary files of the bench
        return False


@contextmanager
def in_background() -> Iterator[None]:
    """Give way to every other process within the context, if the priority can be restored after it.

    The CPU affinity stays unchanged, although fewer CPUs would disturb a timed run even less. Libraries count CPUs
    once when they are loaded: GNU's OpenMP, whose count torch.get_num_threads() returns, OpenBLAS, Inductor
    (compile_threads). They would permanently have fewer threads than without --ahead.
    """
    if not can_go_back():
        yield
        return
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    try:
        yield
    finally:
        # Threads that libraries such as OpenBLAS started in the meantime inherited the low priority.
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread.name), before)


def can_go_back() -> bool:
    """Return whether this process may raise its priority after lowering it, which needs CAP_SYS_NICE or a user
    limit (RLIMIT_NICE).
    """
    if sys.platform != "linux":  # on other systems a priority belongs to the whole process, so a test could lose it
        return False
    raised = False

    def attempt() -> None:
        nonlocal raised
        before = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)
            raised = True

    # On Linux 0 is the calling thread: if the priority cannot be raised again, only this thread loses it.
    thread = Thread(target=attempt)
    thread.start()
    thread.join()
    return raised


def modules_of(job: Job) -> list[str]:
    """Return the modules that a job's process imports before it begins: the worker, and the compiler, which torch
    loads late.

    Not flash_attn.cute, which may query the device during import. torchao, which transformers imports if installed,
    only checks whether there is a device, which creates no context on it.
    """
    compiled = job.config.compile.enabled and job.config.compile.backend == "inductor"
    return ["labs.bench.worker", *["torch._inductor.compile_fx"] * compiled]


def _run(job: Job, hold: Path) -> int | None:
    """Run the job once this process is released. Return the exit code; None means 0."""
    if not wait_for(hold):
        print_text("not begun: the bench that started this process has ended")
        return 1
    worker = import_module("labs.bench.worker")
    worker.run_job(job, worker.train_job)
    return None


@dataclass
class Started:
    """A run with started processes."""

    job: Job
    command: Logged
    since: float
    "time.perf_counter() when it began: when it was started or released"
    hold: Hold | None
    "the lock that its processes wait for; None: it was not started ahead"

    def let_go(self) -> None:
        """Release the waiting processes."""
        if self.hold is not None:
            self.since = time.perf_counter()
            self.hold.release()


class Runs:
    """The runs of a plan, in order. The caller iterates over them and ends each run before the next. When the context
    ends, remaining processes are killed.

    With `ahead`, the processes of the next run are already waiting. Those of the first run start with the context,
    and wait while the caller does other work.
    """

    def __init__(self, jobs: Sequence[Job], caches: Path, *, ahead: bool) -> None:
        self._left, self._caches, self._ahead = deque(jobs), caches, ahead
        self._waiting: Started | None = None
        self._at_end = ExitStack()

    def __enter__(self) -> Self:
        self._start_ahead()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._at_end.close()

    def __iter__(self) -> Iterator[Started]:
        while self._left:
            job = self._left.popleft()
            run, self._waiting = self._waiting or self._start(job, None), None
            run.let_go()
            self._start_ahead()
            yield run

    def _start_ahead(self) -> None:
        """Start the next run, if there is one that can wait."""
        if self._ahead and self._left and can_wait(job := self._left[0]):
            hold = Hold(self._caches / f"{slug(job.name)}.hold")
            self._at_end.callback(hold.close)
            self._waiting = self._start(job, hold)

    def _start(self, job: Job, hold: Hold | None) -> Started:
        """Start a run in new processes with its own empty caches."""
        since, path = time.perf_counter(), save_job(job)
        cache = self._caches / slug(job.name)
        cache.mkdir()
        words, needed = bench_command(job.started, job.worker, path, hold.path if hold else None)
        # A process may end without writing a row: then an old row would pass for its own.
        (job.folder / "row.json").unlink(missing_ok=True)
        command = start_logged(words, job.folder / "log.txt", {**own_caches(cache), **needed, **job.environment})
        self._at_end.callback(kill_tree, command.process)
        return Started(job, command, since, hold)


def can_wait(job: Job) -> bool:
    """Return whether the job's processes can be started ahead. A worker from the plan does not know how to wait, and
    train.max_minutes counts from the start of the process.
    """
    return job.worker is None and job.config.train.max_minutes is None


if __name__ == "__main__":
    _job = read_job(Path(sys.argv[1]))
    with in_background():
        for _name in modules_of(_job):
            import_module(_name)
    # Only now, as in worker.py: the settings of `script` for torch's import would make this run different from one
    # without --ahead.
    script(lambda: _run(_job, Path(sys.argv[2])))
