"""A script: run main with errors as messages, name what takes long, and find out who ended a process that was killed.

Torch is imported only when main asks for it, and nothing before a Ctrl-C has a handler.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import NoReturn

from sftkit.config.terminal import print_text


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 row, 2,000 rows.

    Args:
        noun: one whose plural has an s.
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_of(names: Sequence[object], most: int = 3, between: str = ", ") -> str:
    """Return the first names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(map(str, names[:most])) + more


@contextmanager
def working(text: str) -> Iterator[None]:
    """Name what takes a while, once for the whole run, as a line of stderr: stdout may be an answer or a table that
    goes to a file."""
    if os.environ.get("RANK", "0") == "0":
        print_text(text, error=True)
    yield


_BY_SIGNAL = {
    signal.SIGSEGV: "a crash in compiled code, of a library or a kernel",
    signal.SIGABRT: "a library gave up: its message stands above",
    signal.SIGBUS: "a file or shared memory that it had mapped had no room: see df -h of /dev/shm and of the data",
    signal.SIGILL: "an instruction that this processor does not have",
    signal.SIGFPE: "a division by zero in compiled code",
}


def likely_cause(number: int) -> str:
    """Return what has likely sent a signal that nobody here has sent.

    Args:
        number: of the signal.
    """
    if number != signal.SIGKILL:
        return _BY_SIGNAL.get(signal.Signals(number), "sent by somebody, or by the system that runs this")
    return "likely the kernel's OOM killer (dmesg then names the process), or a queue or container at its limit"


SPINS = "1000"
"""How often a waiting thread of GNU's OpenMP, which torch's Linux builds have, checks for work before it sleeps: tens
of microseconds, where its default of 300,000 times takes milliseconds. Where cores are free that costs nothing; where
they are not, waiting threads would take them from the one that they wait for."""


def script(main: Callable[[], int | None]) -> None:
    """Run a script's main: errors become messages, and the process group is closed. Errors inside a run are reported
    by its Runtime.

    A signal ends the process at once, with what it has started, until a run saves before it stops, and whenever a
    script has nothing to save: an exception in the middle of an import would end as something else, and as a traceback.

    The group is closed only here, when main's own objects are gone: a DDP model that outlives its process group can
    deadlock in its destructor, which waits for a gloo thread that waits for the interpreter lock
    (pytorch/pytorch#56297).

    Args:
        main: returns the exit code; None: 0.
    """
    # Before anything is imported: torch alone takes seconds, in which a Ctrl-C would end as a traceback.
    signal.signal(signal.SIGINT, lambda number, _frame: _end(number, os._exit))
    # Ranks that share the cores of a machine are not slowed down by each other's waiting threads: see SPINS. Whoever
    # has set the policy has chosen how threads wait. OpenMP reads the variable once, when it is loaded with torch.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from sftkit.rundir.status import report
    from sftkit.runtime.signals import Listener, end_process, ignore_signals

    listener = Listener(lambda number: _end(number, end_process))
    listener.take_signals()
    try:
        code = main()
        listener.close()
        ignore_signals()  # all is written: a signal that comes late does not make a failure of a finished run
    except KeyboardInterrupt:  # of a library that has taken the signal
        code = 130
    except Exception as error:
        # An error that a signal has overtaken is not reported, nor does it decide the exit code.
        listener.catch_up()
        code = report(error)
        group = joined_process_group()
        if group is not None and group.get_world_size() > 1:
            end_process(code)  # closing the group would wait for ranks that wait for this one
    finally:
        if (group := joined_process_group()) is not None:
            group.destroy_process_group()
    if code:
        sys.exit(code)


ENDING = threading.RLock()
"Held by the thread that ends this process for a signal, and by who replaces it by another program."


def _end(number: int, exit: Callable[[int], NoReturn]) -> NoReturn:
    ENDING.acquire()
    try:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"\n{signal.Signals(number).name}: ended\n".encode())
    finally:
        exit(128 + number)


def joined_process_group() -> ModuleType | None:
    """Return torch.distributed where main has loaded it and joined a process group; else None."""
    loaded = sys.modules.get("torch.distributed")
    return loaded if loaded is not None and loaded.is_available() and loaded.is_initialized() else None
