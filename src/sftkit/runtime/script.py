"""Run a script's main: what went wrong as a message, the process group closed at the end. No torch before main asks for it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import ModuleType

from sftkit.runtime.signals import SIGNALS, end_process
from sftkit.runtime.status import report


def script(main: Callable[[], None]) -> None:
    """Run a script's main: errors as messages, process group closed. What goes wrong in a run is told by its Runtime.

    Closed only here, when main's own objects are gone: a DDP model that outlives its process group can deadlock in its
    destructor, which waits for a gloo thread that waits for the interpreter lock.
    """
    try:
        main()
        for number in SIGNALS:  # all is written: a signal that comes late does not make a failure of a finished run
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = report(error)
        group = process_group()
        if group is not None and group.get_world_size() > 1:
            end_process(code)  # closing the group would wait for ranks that wait for this one
        sys.exit(code)
    finally:
        if (group := process_group()) is not None:
            group.destroy_process_group()


def process_group() -> ModuleType | None:
    """Return torch.distributed where main has loaded it and joined a process group."""
    loaded = sys.modules.get("torch.distributed")
    return loaded if loaded is not None and loaded.is_available() and loaded.is_initialized() else None
