"""No rank waits forever: a thread per rank ends the process when it hangs or when another rank has failed."""

import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from sftkit.config.schema import RunConfig
from sftkit.config.terminal import print_text
from sftkit.rundir import files, lock, names
from sftkit.rundir.status import RunStatus
from sftkit.runtime import signals, start

_FLUSH_SECONDS = 10.0
_POLL_SECONDS = 1.0
_STOPPED_SECONDS = 5.0
"Gap between two polls after which the thread must have been stopped, or had no processor."
_GRACE_SECONDS = 5.0
_STOP_SECONDS = 30.0
_LOOP_PHASES = ("data", "step")


class Watchdog:
    """End the process, inside, on a hang or another rank's failure, and write an error down for the other ranks. A
    thread checks once a second what the main thread last noted in `status`."""

    def __init__(self, rt: start.Runtime, status: RunStatus, run: RunConfig) -> None:
        self._rt = rt
        self._status = status
        self._run = run
        # It has the limit of a start: what is compiled late, or read for the first time, is part of it.
        self._first_step = status.step + 1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watchdog", daemon=True)
        self._last_flush = 0.0
        self._others_failed_at: float | None = None

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._status.failed(error)
        self._stopped.set()
        self._thread.join()
        # Taken away before it is closed, as the main thread writes to it at each step.
        heartbeat = self._status.heartbeat
        self._status.heartbeat = None
        if heartbeat is not None:
            os.close(heartbeat)

    def limit(self) -> float:
        """Return the seconds that the present phase may take."""
        status = self._status
        # Evaluations, saves and the first step take as long as they take; a step of the loop has one duration.
        if status.phase not in _LOOP_PHASES or status.step <= self._first_step:
            return self._run.start_timeout_seconds
        if self._rt.stopping.signal is not None:  # the launcher may end us because another rank is dead
            return min(self._run.step_timeout_seconds, max(_STOP_SECONDS, 3 * status.longest_step_seconds))
        return self._run.step_timeout_seconds

    def _poll(self) -> None:
        if self._status.world_size > 1:
            with suppress(OSError):  # the directory may not be there yet, or be a disk that stumbles; later again
                self._write_heartbeat()  # at once, for a rank that stops within the first second
        last_poll = time.monotonic()
        while not self._stopped.wait(_POLL_SECONDS):
            now = time.monotonic()
            if now - last_poll > _STOPPED_SECONDS:  # a debugger, Ctrl-Z, a queue that suspends: no hang of this rank
                self._status.progress()
            last_poll = now
            with suppress(OSError):  # a shared disk that stumbles is no reason to end training
                if self._status.world_size > 1:
                    self._write_heartbeat()
                    self._check_other_ranks()
            idle = time.monotonic() - self._status.since
            if idle > self.limit():
                self._report_hang(idle)

    def _write_heartbeat(self, *, flush: bool = False) -> None:
        """Show that this rank lives. Machines that share the disk read it when it is flushed, those that share
        memory at once."""
        if self._status.heartbeat is None:
            self._status.heartbeat = open_heartbeat(self._status)
        self._status.beat()
        if flush or time.monotonic() - self._last_flush > min(_FLUSH_SECONDS, self._run.step_timeout_seconds / 3):
            os.fsync(self._status.heartbeat)
            self._last_flush = time.monotonic()

    def _check_other_ranks(self) -> None:
        """End this rank some seconds after another one has failed or died. Before, it may notice by itself, in a
        collective that fails. NCCL's do not fail: they wait, and the launcher kills who waits for 30 s."""
        # Two signs: a rank that failed has written so; one that was killed could not, but once the launcher ends the
        # others, its process id is gone.
        failed = any(failure.rank != self._status.rank for failure in self._status.failures())
        dead = self._status.gone() if self._rt.stopping.signal is not None and not failed else []
        if not (failed or dead):
            return
        self._others_failed_at = self._others_failed_at or time.monotonic()
        if time.monotonic() - self._others_failed_at > _GRACE_SECONDS and not self._stopped.is_set():
            if dead:
                self._status.failed(f"rank {', '.join(map(str, dead))} has ended", symptom=True)
            print_text(f"\nrank {self._status.rank} ends: {self._status.write_failed()}", error=True, level="error")
            self._end_process()

    def _report_hang(self, idle: float) -> None:
        """Write down that this rank hangs, where it is and who keeps it waiting, and end the process.

        Args:
            idle: seconds since its last progress.
        """
        status = self._status
        # Documented by Python in spite of its underscore, and the only way to another thread's stack.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame))
        text = f"rank {status.rank} hangs at step {status.step} in phase {status.phase}, last progress {idle:.0f} s ago"
        behind: list[int] = []
        if status.world_size > 1:
            with suppress(OSError):
                self._write_heartbeat(flush=True)
            time.sleep(2.0)  # the others, whose time is up as well, write their places
            behind, where = find_blocking_ranks(
                status.run_dir / names.HEARTBEATS, status.world_size, silent_after=idle / 2, start_id=status.start_id
            )
            text += f"; {where}"
        if self._stopped.is_set():
            return
        # A rank that only waits for another one writes so, and its own error counts as a symptom.
        culprit = behind[0] if behind else status.rank
        status.failed(f"{text}\n{stack}", symptom=culprit != status.rank)
        with suppress(OSError):
            status.end("failed", first_failing_rank=culprit, error=text)
        limit = "run.step_timeout_seconds" if status.phase in _LOOP_PHASES else "run.start_timeout_seconds"
        print_text(f"\nerror: {text} ({limit} is {self.limit():.0f})", error=True, level="error")
        print_text(stack, error=True)
        self._end_process()

    def _end_process(self) -> NoReturn:
        self._rt.withdraw()
        signals.end_process(1)


def open_heartbeat(status: RunStatus) -> int:
    """Return the descriptor of this rank's heartbeat, which stays open when the directory is renamed.

    Raises:
        OSError: the disk takes no file.
    """
    beats = status.run_dir / names.HEARTBEATS
    beats.mkdir(exist_ok=True)
    return os.open(names.heartbeat_file(beats, status.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def find_blocking_ranks(beats: Path, world_size: int, silent_after: float, start_id: str = "") -> tuple[list[int], str]:
    """Find who keeps the others waiting.

    Args:
        silent_after: seconds; a rank without a heartbeat for so long is stopped or dead, wherever it was last.
        start_id: RunStatus.start_id; heartbeats of another start are not seen.

    Returns:
        (the ranks that are silent, else those that are behind the others, none if all are at the same place; where
        every rank is, in words)
    """
    # Sorted, the first place is the blocking one: silent ranks before those that respond, then by step and by the order
    # of phases in a step. Phases outside of the loop, such as an evaluation, come after a step.
    places: dict[tuple[bool, int, int, str], list[int]] = {}
    for rank in range(world_size):
        beat = files.read_object(names.heartbeat_file(beats, rank))
        if beat.get("start_id", "") != start_id or "time" not in beat:
            beat = {"step": 0, "phase": "start", "time": 0.0}
        phase = beat["phase"]
        order = _LOOP_PHASES.index(phase) if phase in _LOOP_PHASES else len(_LOOP_PHASES)
        same_clock = beat.get("boot") == lock.boot_id()
        age = time.monotonic() - beat["monotonic"] if same_clock else time.time() - beat["time"]
        responds = age < silent_after
        places.setdefault((responds, beat["step"], order, phase), []).append(rank)
    words = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} at step {step} (in "
        f"{phase}{'' if responds else ', silent'})"
        for (responds, step, _, phase), ranks in sorted(places.items())
    ]
    behind = places[min(places)] if len(places) > 1 else []
    return behind, "; ".join(words)
