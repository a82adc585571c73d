"""Signals and the time limit, which end training early: one rank requests a stop, all ranks stop at the same step."""

import faulthandler
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import psutil

from sftkit.config.terminal import leave_lost_terminal, print_text
from sftkit.rundir.lock import process_age, release_all

SIGNALS = (
    *(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
    *(signal.SIGHUP, signal.SIGQUIT, signal.SIGINT),
)
"""Signals that request a stop; queues announce a preemption or a limit by each of the first four. Of several that came,
the first in this order is the one that is written down."""
_END = b"\0"
_MARK = b"\xff"
"No signal has these numbers."


def ignore_signals(numbers: Iterable[int] = SIGNALS) -> None:
    """Ignore signals: in a worker, whose main process decides when to stop, and where another one
    must change nothing."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def heeded(environ: Mapping[str, str] = os.environ) -> tuple[signal.Signals, ...]:
    """Return those of SIGNALS that this process heeds. Under nohup, which has SIGHUP ignored, a terminal may be closed;
    but a SIGHUP that torch's launcher passes on is heeded."""
    # The variable lists the signals that torch's elastic launcher passes on to its ranks; it kills ranks that do not
    # end.
    passed_on = "SIGHUP" in environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and not passed_on
    return tuple(number for number in SIGNALS if not (ignored and number == signal.SIGHUP))


class Deadline:
    """Tell, for train.max_minutes, whether another step and the final checkpoint still fit before the limit."""

    def __init__(self, max_minutes: float, started: float | None = None, save_seconds: float | None = None) -> None:
        """Set the time limit.

        Args:
            max_minutes: from `started` on.
            started: on time.monotonic(), which no change of the clock moves; None: when this process was started.
            save_seconds: what a checkpoint of this run took before; None: unknown.
        """
        self._end = (time.monotonic() - process_age() if started is None else started) + 60.0 * max_minutes
        self._step_seconds: deque[float] = deque([0.0], maxlen=64)
        self._save_seconds = min(6.0 * max_minutes, 120.0) if save_seconds is None else save_seconds

    def add_step(self, seconds: float, last_save: Mapping[str, float]) -> None:
        """Note how many seconds a step took, and the newest checkpoint (Checkpoints.last_save)."""
        self._step_seconds.append(seconds)
        self._save_seconds = save_seconds(last_save) or self._save_seconds

    def due(self, now: float | None = None) -> bool:
        """Return whether to stop now. Three steps are counted, as all ranks hear of a stop two steps after it was
        requested. Before the first checkpoint a tenth of the limit is kept for it, 120 s at most.

        Args:
            now: on time.monotonic(); None: the present time.
        """
        # The slowest of the last 64: one of the next may wait for data, or for another rank, as long as that one did.
        needed = 1.1 * (3 * max(self._step_seconds) + self._save_seconds)
        return (time.monotonic() if now is None else now) + needed >= self._end


def save_seconds(last_save: Mapping[str, float]) -> float | None:
    """Return the seconds that a checkpoint takes, by Checkpoints.last_save; None: there is none yet."""
    return last_save.get("block_seconds", 0.0) + last_save["write_seconds"] if "write_seconds" in last_save else None


class Stopping:
    """The request of this rank to end training.

    Signals are read by a thread, so that they count while the main thread waits in a collective operation.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        "the first that came"
        self.deadline: Deadline | None = None
        "of the main rank, in the loop"
        self.lost = False
        "whether the run directory is no longer this run's; known to the main rank"
        self._since = 0.0
        self._at_once: Callable[[int], None] | None = None
        self._listener: Listener | None = None

    def stop_requested(self) -> bool:
        """Return whether this rank requests a stop."""
        return self.signal is not None or self.lost or (self.deadline is not None and self.deadline.due())

    def add_step(self, seconds: float, last_save: Mapping[str, float]) -> None:
        """Tell the time limit, if there is one, how long a step took; see Deadline.add_step."""
        if self.deadline is not None:
            self.deadline.add_step(seconds, last_save)

    def end_at_once(self, end: Callable[[int], None]) -> None:
        """Have a signal end the process until `save_first`: there is nothing to save, and compilers that it
        interrupts would fail.

        Args:
            end: is given the signal's number; where it returns, there is something to save by now.
        """
        self._at_once = end
        self._listen()

    def save_first(self) -> None:
        """Have a signal request a stop that saves, from here on; a second Ctrl-C ends the process."""
        self._at_once = None
        self._listen()

    def close(self) -> None:
        """Restore the handlers that were there before. Of several that listen, the last one closes first."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _listen(self) -> None:
        self._listener = self._listener or Listener(self._on_signal)
        self._listener.take_signals()

    def _on_signal(self, number: int) -> None:
        """Handle a signal, in the thread that reads them."""
        now = time.monotonic()
        # The terminal is gone: a print to it would be the next error.
        if number == signal.SIGHUP:
            leave_lost_terminal()
        # Asked of a process that seems to hang: the answer comes at once, whatever its main thread waits for.
        if number == signal.SIGQUIT:
            with suppress(OSError, ValueError):
                faulthandler.dump_traceback()
        if self._at_once is not None:
            self._at_once(number)
        if self.signal is None:
            self.signal = number
            self._since = now
            name = signal.Signals(number).name
            if int(os.environ.get("RANK", "0")) == 0:
                print_text(f"\n{name}: saving and stopping after this step (Ctrl-C again to exit at once)")
        # Launchers pass on the Ctrl-C that the terminal has already sent: only a later one is a second one.
        elif number == signal.SIGINT and now - self._since > 1.0:
            end_process(130)


class Listener:
    """The thread that reads the signals of this process, for as long as they go to `receiver`."""

    def __init__(self, receiver: Callable[[int], None]) -> None:
        self._receiver = receiver
        self._handlers_before: dict[int, Any] = {}
        self._caught_up = threading.Event()
        self._reading, self._writing = os.pipe()
        # Python demands it: its handler in C must not wait for a full pipe.
        os.set_blocking(self._writing, False)
        # Python writes a signal's number to this pipe at once; a handler would wait for the main
        # thread's next bytecode.
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()
        ours = weakref.ref(self)  # what is registered there stays for good
        os.register_at_fork(after_in_child=lambda: _leave_to_parent(ours()))

    def take_signals(self) -> None:
        """Have signals come here; to be called again after somebody else may have taken them."""
        # A handler that does nothing: by default the signal would end the process before the thread reads it, and of
        # one that is ignored Python writes nothing.
        for number in heeded():
            self._handlers_before.setdefault(number, signal.signal(number, lambda _number, _frame: None))

    def catch_up(self) -> None:
        """Wait until every signal that has come is received: who ends the process at a signal does so before this
        returns. In the main thread, once."""
        os.write(self._writing, _MARK)
        self._caught_up.wait(timeout=30.0)

    def close(self) -> None:
        """Put handlers and wake-up descriptor back, end the thread. In the main thread."""
        # Handlers first: a signal that comes in between finds the one before us, not a pipe without a reader.
        for number, handler in self._handlers_before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._writing, _END)  # closing it would not do: data workers, which are forks, have it too
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)
        self._writing = -1

    def _read(self) -> None:
        while True:
            numbers = os.read(self._reading, 64)
            for number in numbers:
                if number in SIGNALS:
                    self._receiver(number)
            if _MARK in numbers:
                self._caught_up.set()
            if _END in numbers:
                return


def _leave_to_parent(listener: Listener | None) -> None:
    """Stop listening in a process that was forked off: a data worker's signals are not ours."""
    if listener is not None and listener._writing >= 0:  # it is not closed
        signal.set_wakeup_fd(-1)


@contextmanager
def torch_passes_on_once(numbers: Iterable[int]) -> Iterator[None]:
    """Have torch's elastic launcher, inside, act on the first signal only. A second one would break off its wait for
    the ranks, and end the ranks, yet a Ctrl-C comes twice: from the terminal and from the process that passes it on.
    When the ranks have ended, this process exits with 128 + the signal's number."""
    from torch.distributed.elastic.multiprocessing import api

    def once(signum: int, frame: object) -> None:
        leave_lost_terminal()
        ignore_signals(numbers)
        raise api.SignalException(f"process {os.getpid()} got signal {signum}", sigval=signal.Signals(signum))

    # Private: the launcher installs this function as the handler of each signal that it takes (pytorch/pytorch#61602),
    # and takes no other. Of the second signal no issue is known (torch 2.11 to 2.13).
    api._terminate_process_handler = once
    try:
        yield
    except api.SignalException as ended:
        sys.exit(128 + ended.sigval)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Have a signal raise SystemExit inside, so that what this process has started can be ended first, and its files
    deleted; outside, runtime/script.py ends it at once."""

    def leave(signum: int, _frame: object) -> NoReturn:
        leave_lost_terminal()
        print_text(f"\n{signal.Signals(signum).name}: ended", error=True)
        sys.exit(128 + signum)

    with handled_by(leave):
        yield


@contextmanager
def handled_by(handler: Callable[[int, object], object]) -> Iterator[None]:
    """Give the signals that are heeded to this handler inside the block."""
    # Without it the thread of runtime/script.py would read the signal too, and end this process and its children.
    listening = signal.set_wakeup_fd(-1)
    before = {number: signal.signal(number, handler) for number in heeded()}
    try:
        yield
    finally:
        signal.set_wakeup_fd(listening)
        for number, earlier in before.items():
            signal.signal(number, earlier)


# Held while a child comes into being, so that `end_process` does not miss it.
_starting = threading.Lock()


@contextmanager
def starting_processes() -> Iterator[None]:
    """Start processes of ours inside: they hear of no Ctrl-C, which a terminal sends to them too, not even while they
    import; and `end_process` sees all of them."""
    with _starting:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # which they inherit
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def end_process(code: int) -> NoReturn:
    """End this process and all that it has started (data workers, tokenizers, compilers). It waits for nothing but
    children that are just being started."""
    # A limit: a start that hangs must not keep the process from ending.
    _starting.acquire(timeout=5.0)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    try:
        release_all()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a log on a full disk, a terminal that is gone
                stream.flush()
    finally:
        # No sys.exit: this may be another thread than the main one, which may wait in a collective for ever.
        os._exit(code)
