"""No rank waits for ever: a thread per rank ends the process when it hangs or when another rank has failed."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sftkit.config.schema import RunConfig
from sftkit.config.terminal import say
from sftkit.runtime.rundir import HEARTBEATS, error_file, error_files, heartbeat_file
from sftkit.runtime.signals import Stopping, end_process
from sftkit.runtime.status import RunStatus

_BEAT_SECONDS = 10.0
_GRACE_SECONDS = 5.0
_STOP_SECONDS = 30.0
_IN_LOOP = ("data", "step")


@contextmanager
def watched(status: RunStatus, run: RunConfig, stopping: Stopping) -> Iterator[None]:
    """Inside, a hang or another rank's failure ends the process, and an error is written down for the other ranks."""
    dog = Watchdog(status, run, stopping)
    dog.start()
    try:
        yield
    except BaseException as error:
        status.failed(error)
        raise
    finally:
        dog.stop()


class Watchdog:
    """Looks once a second at what the main thread last noted in `status`."""

    def __init__(self, status: RunStatus, run: RunConfig, stopping: Stopping) -> None:
        self._status, self._run, self._stopping = status, run, stopping
        self._first_step = status.step + 1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._beats = status.run_dir / HEARTBEATS
        self._last_beat = 0.0
        self._others_failed_at: float | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def limit(self) -> float:
        """Seconds that the present phase may take."""
        status = self._status
        if status.phase not in _IN_LOOP or status.step <= self._first_step:
            return self._run.start_timeout_seconds
        if self._stopping.signal is not None:  # the launcher may end us because another rank is dead
            return min(self._run.step_timeout_seconds, max(_STOP_SECONDS, 3 * status.longest_step_seconds))
        return self._run.step_timeout_seconds

    def _watch(self) -> None:
        while not self._stopped.wait(1.0):
            idle = time.monotonic() - self._status.since
            try:
                if self._status.world_size > 1:
                    self._beat()
                    self._look_at_others()
            except OSError:  # a shared disk that stumbles is no reason to end training
                pass
            if idle > self.limit():
                self._bite(idle)

    def _beat(self, now: bool = False) -> None:
        period = min(_BEAT_SECONDS, self._run.step_timeout_seconds / 3)
        if now or time.monotonic() - self._last_beat > period:
            self._beats.mkdir(parents=True, exist_ok=True)
            status = self._status
            text = json.dumps({"step": status.step, "phase": status.phase})
            heartbeat_file(self._beats, status.rank).write_text(text)
            self._last_beat = time.monotonic()

    def _look_at_others(self) -> None:
        """Another rank's error or death: this one has some seconds to notice by itself, in a collective that fails. NCCL's
        do not fail: they wait, and the launcher kills who waits for 30 s."""
        own = error_file(self._status.run_dir, self._status.rank)
        told = any(path != own for path in error_files(self._status.run_dir))
        gone = self._status.gone() if self._stopping.signal is not None and not told else []
        if not (told or gone):
            return
        self._others_failed_at = self._others_failed_at or time.monotonic()
        if time.monotonic() - self._others_failed_at > _GRACE_SECONDS and not self._stopped.is_set():
            if gone:
                self._status.failed(f"rank {', '.join(map(str, gone))} has ended", symptom=True)
            first = self._status.write_failed()
            say(f"\nrank {self._status.rank} ends: {first}", error=True)
            end_process(1)

    def _bite(self, idle: float) -> None:
        status = self._status
        stack = main_stack()
        text = f"rank {status.rank} hangs at step {status.step} in phase {status.phase}, last progress {idle:.0f} s ago"
        behind: list[int] = []
        if status.world_size > 1:
            with suppress(OSError):
                self._beat(now=True)
            time.sleep(2.0)  # the others, whose time is up as well, say where they are
            behind, where = compare(self._beats, status.world_size)
            text += f"; {where}"
        if self._stopped.is_set():
            return
        status.failed(f"{text}\n{stack}")
        culprit = behind[0] if behind else status.rank
        with suppress(OSError):
            status.write("failed", first_failing_rank=culprit, error=text)
        limit = "run.step_timeout_seconds" if status.phase in _IN_LOOP else "run.start_timeout_seconds"
        say(f"\nerror: {text} ({limit} is {self.limit():.0f})\n{stack}", error=True)
        end_process(1)


def compare(beats: Path, world_size: int) -> tuple[list[int], str]:
    """(ranks that are behind the others, none if all are at the same place; where every rank is, in words)."""
    places: dict[tuple[int, int, str], list[int]] = {}
    for rank in range(world_size):
        try:
            beat = json.loads(heartbeat_file(beats, rank).read_text())
        except (OSError, ValueError):
            beat = {"step": 0, "phase": "start"}
        phase = beat["phase"]
        order = _IN_LOOP.index(phase) if phase in _IN_LOOP else len(_IN_LOOP)
        places.setdefault((beat["step"], order, phase), []).append(rank)
    words = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} at step {step} (in {phase})"
        for (step, _, phase), ranks in sorted(places.items())
    ]
    behind = places[min(places)] if len(places) > 1 else []
    return behind, "; ".join(words)


def main_stack() -> str:
    """Where the main thread is, as Python sees it, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
