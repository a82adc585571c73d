"""Start the runs of a plan, each when the one before it has ended; with --ahead their processes already while it is
at work. No torch in this file."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from labs.bench.ahead import Hold
from labs.bench.jobs import Job, save_job
from labs.bench.plan import slug
from labs.bench.processes import Logged, bench_command, kill_tree, own_caches, start_logged


@dataclass
class Started:
    """A run whose processes are there."""

    job: Job
    command: Logged
    since: float
    "time.perf_counter() when it began: when it was started, or let go"
    hold: Hold | None
    "what its processes have waited for; None: it was not started ahead"

    def let_go(self) -> None:
        """Let processes go on that wait."""
        if self.hold is not None:
            self.since = time.perf_counter()
            self.hold.release()


class Runs:
    """The runs of a plan, in order: whoever iterates over them has one at work, and ends it before asking for the next.
    What is left of them when the context ends is killed.

    With `ahead` the processes of the next one are there too, and wait. Those of the first are from the beginning of the
    context on, and wait while something else is done.
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
        """Start a run in new processes with empty caches of its own."""
        since, path = time.perf_counter(), save_job(job)
        cache = self._caches / slug(job.name)
        cache.mkdir()
        words, needed = bench_command(job.processes, job.worker, path, hold.path if hold else None)
        # A process may end without having written a row: then one that is here would pass for its own.
        (job.folder / "row.json").unlink(missing_ok=True)
        command = start_logged(words, job.folder / "log.txt", {**own_caches(cache), **needed, **job.environment})
        self._at_end.callback(kill_tree, command.process)
        return Started(job, command, since, hold)


def can_wait(job: Job) -> bool:
    """Return whether the job's processes can be started ahead. A worker of the plan's own knows of no wait, and
    train.max_minutes counts from the start of the process."""
    return job.worker is None and job.config.train.max_minutes is None
