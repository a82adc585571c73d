"""Forks of a test's process: their exit codes, and ways to end them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sftkit.errors import ConfigError


def in_fork(do: Callable[[], object]) -> int:
    """Exit code of a fork that calls this function: 0, 3 if it is rejected, or minus the number of the signal that
    ends it.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            do()
            code = 0
        except ConfigError:
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_before(left: int, *operations: tuple[ModuleType, str]) -> None:
    """Kill this process before the first of these operations that follows this many of them."""
    numbers = iter(range(left))
    for module, name in operations:
        original = getattr(module, name)

        def counted(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            if next(numbers, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, counted)
