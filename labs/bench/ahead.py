"""A run of a plan whose processes are started while the run before it is at work: they import what they need, touch no
device, and wait until they are let go.

python -m labs.bench.ahead JOB.json HOLD
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Thread

from labs.bench.jobs import Job, read_job
from sftkit.config.terminal import print_text
from sftkit.runtime.script import script

LOWEST = 19
"The niceness of a thread that gets a core when nobody else wants it."
_GO = "go"


class Hold:
    """A file that this process keeps locked as long as others are to wait.

    The kernel ends the lock with the process, however that ends, so nobody waits for a bench that is gone; and a wait
    for a lock takes no time of the run that is measured meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Let those who wait go on."""
        self._file.write(_GO)
        self.close()

    def close(self) -> None:
        """End the wait: those who were not let go end. Does nothing the second time."""
        self._file.close()


def wait_for(hold: Path) -> bool:
    """Wait until the bench lets this process go on. Return whether it did; False: it has ended."""
    try:
        with hold.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return file.read() == _GO
    except FileNotFoundError:  # deleted with the other temporary files of the bench
        return False


@contextmanager
def in_background() -> Iterator[None]:
    """Give way to every other process inside the context, where the priority can be taken back after it.

    The CPUs that the process may use stay as they are, though fewer of them would disturb a run that is timed even
    less. Libraries count them when they are loaded, and keep the count: GNU's OpenMP, whose count
    torch.get_num_threads() returns, OpenBLAS, Inductor (compile_threads). They would have fewer threads than without
    --ahead, for good.
    """
    if not can_go_back():
        yield
        return
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    try:
        yield
    finally:
        # Threads of libraries, such as OpenBLAS's, which were started meanwhile, have the priority of who started them.
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread.name), before)


def can_go_back() -> bool:
    """Return whether this process may raise its priority after it has lowered it, which takes CAP_SYS_NICE or a limit
    of the user's (RLIMIT_NICE)."""
    if sys.platform != "linux":  # elsewhere a priority is the whole process's, so that trying it may lose it
        return False
    raised = False

    def attempt() -> None:
        nonlocal raised
        before = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)
            raised = True

    # On Linux 0 is the calling thread: where it cannot go back, only this one is lost.
    thread = Thread(target=attempt)
    thread.start()
    thread.join()
    return raised


def modules_of(job: Job) -> list[str]:
    """Return what a job's process imports before it begins: the worker, and the compiler, which torch loads late.

    Not flash_attn.cute, which may ask the device when it is imported. torchao, which transformers imports where it is
    installed, only asks whether there is one; that makes no context on it.
    """
    compiled = job.config.compile.enabled and job.config.compile.backend == "inductor"
    return ["labs.bench.worker", *["torch._inductor.compile_fx"] * compiled]


def _run(job: Job, hold: Path) -> int | None:
    """Run the job once this process is let go. Return the exit code; None: 0."""
    if not wait_for(hold):
        print_text("not begun: the bench that started this process has ended")
        return 1
    worker = import_module("labs.bench.worker")
    worker.run_job(job, worker.train_job)
    return None


if __name__ == "__main__":
    _job = read_job(Path(sys.argv[1]))
    with in_background():
        for _name in modules_of(_job):
            import_module(_name)
    # Only now, as in worker.py: what `script` sets for torch's import would make this run another than one without
    # --ahead.
    script(lambda: _run(_job, Path(sys.argv[2])))
