"""The grader's process: run the tests, which call the program through a pipe, and report the result.

The grader is in the sandbox too, but it never executes model-written code. Values from the program are plain data,
rebuilt here, or a `Remote`, so comparisons use Python's own types and never an `__eq__` of the program.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from sftkit_sandbox.exchange import Channel, RequestAndReply, read_exactly

STARTED = b"S"
NONCE_BYTES = 32
MAX_REASON_BYTES = 300
"Maximum bytes of an error's text that are reported."


def _asks(operation: str) -> Any:
    """Return a method that performs this operation on the object in the program's process, by `Program.ask`."""
    return lambda self, *values: self._program.ask(operation, self, *values)


class Remote:
    """A function, class or object in the process of the program."""

    __slots__ = ("__weakref__", "_number", "_program")
    _number: int
    _program: Program

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the object in its process."""
        return self._program.ask("call", self, args, kwargs)

    __getattr__ = _asks("get")
    __setattr__ = _asks("set")
    __getitem__ = _asks("item")
    __iter__ = _asks("iter")
    __next__ = _asks("next")
    __len__ = _asks("len")
    __bool__ = _asks("bool")
    __str__ = _asks("str")


class Program:
    """The process of the program, as the tests see it."""

    def __init__(self, channel: Channel, end: Callable[[str], NoReturn]) -> None:
        self.channel = channel
        self.end = end
        self.remotes: dict[int, Remote] = {}

    def ask(self, operation: str, *values: object) -> Any:
        """Return the answer of the program's process; an exception of its code is raised here as a built-in
        error class.

        If the process is gone or its answer is not data, grading ends: no `except` of a test may handle that as
        an error.
        """
        # A new exchange for each request: container numbers from an earlier one would let the program name lists that
        # it no longer has.
        exchange = RequestAndReply(self._number_of, self._object_of)
        request = exchange.pack(operation, *values)
        try:
            self.channel.send(request)
            answer = self.channel.receive()
        except (EOFError, OSError):
            # until it has ended, or the time is over; pause() would keep sleeping if the signal came just before it
            while True:
                time.sleep(0.01)
        except (ValueError, MemoryError) as error:
            self.end(f"its answer is too long: {error}")
        try:
            # The program's message is parsed here, so any exception is the program's fault and not a test's.
            done, value = exchange.unpack(answer)
            raised = None if done is True else rebuilt(*value)
        except Exception as problem:
            self.end(f"its answer is not data: {type(problem).__name__}")
        if raised is not None:
            raise raised
        return value

    def _number_of(self, value: object) -> int:
        """Return the number of a Remote; reject any other value that is not data."""
        if not isinstance(value, Remote):
            raise TypeError(f"the tests give the program a {type(value).__name__}, which cannot be sent to its process")
        return value._number

    def _object_of(self, number: int) -> Remote:
        """Return the Remote of a number, always the same one."""
        if type(number) is not int:
            raise TypeError("no number")
        return self.remotes.setdefault(number, Remote(self, number))


def rebuilt(name: str, base: str, text: str) -> BaseException:
    """Return an error of the program as the built-in class of that name, or as a subclass of it with the
    program's name.
    """
    # Looked up among the built-in classes: the program chooses among real exceptions and cannot provide a class of
    # its own.
    kind = getattr(builtins, base)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise TypeError(base)
    try:
        return (kind if name == base else type(name, (kind,), {}))(text)
    except TypeError:  # UnicodeDecodeError and similar classes need more than a text
        return type(name, (Exception,), {})(text)


def program_exit_code(status: int) -> int:
    """Return a shell's exit code: 128 + signal for a process ended by a signal."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def grade(pid: int, channel: Channel, feed: int, verdict: int) -> NoReturn:
    """Run the program and its tests. The nonce is read only after them, so it proves that they passed."""

    def end(reason: str) -> NoReturn:
        """Write the verdict and end at once: os._exit, because no test or finally clause may run any more."""
        os.write(verdict, reason.encode("utf-8", "replace")[:MAX_REASON_BYTES])
        os._exit(0)

    def on_sigchld(*_: object) -> None:
        """End when the program's process has ended."""
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            os._exit(program_exit_code(status))

    # If a program ends early, the tests would wait for its answer. The handler applies to the whole process, which
    # does nothing else.
    signal.signal(signal.SIGCHLD, on_sigchld)
    # Only the length and the job are read: the nonce after them stays unread until the tests are done.
    job = json.loads(read_exactly(feed, int(read_exactly(feed, 12))))
    os.write(verdict, STARTED)
    try:
        _run(job, Program(channel, end))
    except BaseException as error:
        end(f"{type(error).__name__}: {error}")
    # the program may end now: its tests have passed
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.write(verdict, read_exactly(feed, NONCE_BYTES))
    os._exit(0)


def _run(job: dict[str, Any], program: Program) -> None:
    """Execute the preamble, the program in its process, and the tests; an exception of any of them is raised."""
    # The preamble comes first, so that the program's own definitions replace equal names.
    names: dict[str, Any] = {"__name__": "tests"}
    exec(compile(job["preamble"], "given", "exec"), names)
    program.ask("run", job["program"])
    names |= {name: program.ask("name", name) for name in job["names"]}
    exec(compile(job["tests"], "tests", "exec"), names)
