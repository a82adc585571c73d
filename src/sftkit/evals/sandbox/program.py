"""The program's process: runs what a model wrote, then does what the tests ask of it, one request at a time.

All that is here may be changed by the program. It holds no test, no expected value and no descriptor of the verdict:
what it can say is what its functions return or raise.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import operator
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from sftkit.evals.sandbox.channel import Channel
from sftkit.evals.sandbox.values import RequestAndReply

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
}
"What the tests may ask of an object. Comparing is not among them: it is done in the judge's process."


def serve(channel: Channel) -> None:
    """Answer requests, the first of which is to run the program. EOFError: nobody asks any more."""
    # python -S leaves these out, and programs use them
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "")
    module = types.ModuleType("solution")
    # dataclasses look the module of a class up here
    sys.modules["solution"] = module
    operations = OPERATIONS | {"run": partial(execute_program, module), "name": partial(name_of, module)}
    # functions, classes and other objects that are no plain data; kept, so that no other gets the id of one
    objects: dict[int, object] = {}

    def number_of(value: object) -> int:
        objects[id(value)] = value
        return id(value)

    while True:
        exchange = RequestAndReply(number_of, objects.__getitem__)
        operation, *values = exchange.unpack(channel.receive())
        try:
            answer = exchange.pack(True, operations[operation](*values))  # noqa: FBT003 - a value that is sent
        # exit() and KeyboardInterrupt too: the tests may expect them, and this process must answer.
        except BaseException as error:
            exchange = RequestAndReply(number_of, objects.__getitem__)
            answer = exchange.pack(False, described(error))  # noqa: FBT003 - a value that is sent
        channel.send(answer)


def described(error: BaseException) -> tuple[str, str, str]:
    """Return (class of an error, the nearest of its base classes that is Python's own, its text)."""
    # __str__ of an error is the program's code, and may raise as well.
    kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        text = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)
    except BaseException:
        text = ""
    return type(error).__name__, next(kinds), text


def execute_program(module: types.ModuleType, source: str) -> None:
    """Execute the program in its module."""
    exec(compile(source, "program", "exec"), module.__dict__)


def name_of(module: types.ModuleType, name: str) -> object:
    """Return what the program's module has under a name."""
    if name not in module.__dict__:
        raise NameError(f"name {name!r} is not defined")
    return module.__dict__[name]
