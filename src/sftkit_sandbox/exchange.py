"""Messages between tests and program, and the program's side of the exchange.

The tests and the program run in two processes. Messages hold plain data: text that is rebuilt as values, never code
of the other side. `serve` runs in the program's process, where the program may change anything. That process holds no
test, no expected value and no descriptor of the verdict: it can only send what its functions return or raise.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import json
import operator
import sys
import types
from collections.abc import Callable, Iterable
from itertools import zip_longest
from os import read, write
from typing import Any

MAX_BYTES = 64 * 2**20
"Maximum bytes of a received message: the other side may be a program that tries to fill the memory."


class Channel:
    """Two ends of pipes: one to write to, one to read from."""

    def __init__(self, to: int, of: int) -> None:
        self.to = to
        self.of = of

    def send(self, message: bytes) -> None:
        """Write a message. BrokenPipeError: the other side is gone."""
        rest = memoryview(len(message).to_bytes(8, "big") + message)
        while rest:
            rest = rest[write(self.to, rest) :]

    def receive(self) -> bytes:
        """Read the next message. EOFError: there is none; ValueError: it is longer than MAX_BYTES."""
        size = int.from_bytes(read_exactly(self.of, 8), "big")
        if size > MAX_BYTES:
            raise ValueError(f"{size} bytes, more than {MAX_BYTES}")
        return read_exactly(self.of, size)


def read_exactly(of: int, size: int) -> bytes:
    """Read `size` bytes of a descriptor; EOFError if it has fewer."""
    parts = bytearray()
    while len(parts) < size:
        part = read(of, min(size - len(parts), 2**20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


# ---- plain data ------------------------------------------------------------------------------------------------------

IMMUTABLE: dict[str, tuple[type, Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    "tuple": (tuple, tuple.__iter__, lambda *parts: parts),
    "frozenset": (frozenset, frozenset.__iter__, lambda *parts: frozenset(parts)),
    "bytes": (bytes, lambda value: (bytes.hex(value),), bytes.fromhex),
    "complex": (complex, lambda value: (value.real, value.imag), complex),
    "range": (range, lambda value: (value.start, value.stop, value.step), range),
}
"Name -> type, function to its parts, function from its parts."

MUTABLE: dict[str, tuple[type, Callable[[Any], Iterable[Any]], Callable[[Any, list[Any]], None]]] = {
    "list": (list, list.__iter__, lambda it, parts: list.__setitem__(it, slice(None), parts)),
    "dict": (dict, dict.items, lambda it, parts: (dict.clear(it), dict.update(it, parts))[1]),
    "set": (set, set.__iter__, lambda it, parts: (set.clear(it), set.update(it, parts))[1]),
    "bytearray": (
        bytearray,
        bytearray.__iter__,
        lambda it, parts: bytearray.__setitem__(it, slice(None), bytes(parts)),
    ),
}
"Name -> type, function to its parts, function that replaces its parts."

NUMBERS = {
    "Decimal": ("decimal", lambda value: (str(value),)),
    "Fraction": ("fractions", lambda value: (value.numerator, value.denominator)),
}
"Name -> module, loaded on demand, and function to its parts. Both types compare with int and float."

PLAIN_INTEGERS = 2**53
"Larger integers are sent in base 16: Python reads only 4,300 decimal digits."


class RequestAndReply:
    """One request and its answer. Containers have numbers, so that both sides share the same ones, even if they are
    referenced twice, form a cycle, or are changed in place by the program. A value that is not data stays in its
    process and is sent as the number of an object.
    """

    def __init__(self, number_of: Callable[[object], int], object_of: Callable[[int], object]) -> None:
        self.number_of = number_of
        self.object_of = object_of
        self.containers: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.received: list[Any] = []

    def pack(self, *values: object) -> bytes:
        """Encode the values, with every container that is new or has changed."""
        encoded = [self.encode(value) for value in values]
        # Encoding a container may find others, which are appended to the list during the loop.
        filled = [self._contents(container) for container in self.containers]  # grows while it is read
        # None: the other side has a container with the same contents
        changed = [None if repr(now) == repr(had) else now for now, had in zip_longest(filled, self.received)]
        return json.dumps({"values": encoded, "containers": changed}).encode()

    def unpack(self, data: bytes) -> list[Any]:
        """Return the values from the other side's `pack`; a malformed message raises ValueError, TypeError or
        another Exception.
        """
        message = json.loads(data)
        self.received = message["containers"]
        # First create all containers empty, so that one may hold another, or itself.
        for contents in self.received[len(self.containers) :]:
            self._add(MUTABLE[contents[0]][0]())
        for container, contents in zip(self.containers, self.received, strict=False):
            if contents is not None:
                fill = MUTABLE[contents[0]][2]
                fill(container, [self.decode(part) for part in contents[1]])
        return [self.decode(value) for value in message["values"]]

    def encode(self, value: Any) -> Any:
        """Return a value in JSON form: constants, numbers and texts unchanged, anything else as a name and parts.
        Additions of a subclass are lost.
        """
        if value is None or isinstance(value, bool):
            return value
        # Uses the type's own method: a subclass may define an __int__ with another result.
        if isinstance(value, int):
            number = int.__int__(value)
            return number if abs(number) < PLAIN_INTEGERS else ["int", hex(number)]
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        for name, (kind, parts, _) in IMMUTABLE.items():
            if isinstance(value, kind):
                return [name, *map(self.encode, parts(value))]
        # Registered before its parts are encoded, which ends the recursion of a list that contains itself.
        if isinstance(value, tuple(kind for kind, _, _ in MUTABLE.values())):
            return ["container", self.numbers[id(value)] if id(value) in self.numbers else self._add(value)]
        for name, (module, parts) in NUMBERS.items():
            # A program that never imported decimal has no Decimal; importing it here would slow every request.
            if module in sys.modules and isinstance(value, getattr(sys.modules[module], name)):
                return [name, *map(self.encode, parts(value))]
        return ["object", self.number_of(value)]

    def decode(self, encoded: Any) -> Any:
        """Return the value of an `encode` result."""
        if not isinstance(encoded, list):
            return encoded
        name, *parts = encoded
        if name == "container":
            return self.containers[parts[0]]
        if name == "object":
            return self.object_of(parts[0])
        if name == "int":
            return int(parts[0], 16)
        if name in NUMBERS:
            return getattr(__import__(NUMBERS[name][0]), name)(*map(self.decode, parts))
        return IMMUTABLE[name][2](*map(self.decode, parts))

    def _add(self, container: object) -> int:
        """Give a container the next number."""
        self.numbers[id(container)] = len(self.containers)
        self.containers.append(container)
        return len(self.containers) - 1

    def _contents(self, container: object) -> list[Any]:
        """Return a container as its name and its encoded parts."""
        name, parts = next((name, parts) for name, (kind, parts, _) in MUTABLE.items() if isinstance(container, kind))
        return [name, [self.encode(part) for part in parts(container)]]


# ---- the program's end -----------------------------------------------------------------------------------------------

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
"""Operations that the tests may request on an object. Comparison is not among them: it is done in the
grader's process.
"""


def serve(channel: Channel) -> None:
    """Answer requests, the first of which runs the program. EOFError: the other side is gone."""
    # python -S omits these, and programs use them
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "")
    module = types.ModuleType("solution")
    # dataclasses looks the module of a class up here
    sys.modules["solution"] = module
    # Functions, classes and other objects that are not plain data; kept, so that no other object gets the id of one.
    objects: dict[int, object] = {}

    def execute_program(source: str) -> None:
        exec(compile(source, "program", "exec"), module.__dict__)

    def value_of(name: str) -> object:
        if name not in module.__dict__:
            raise NameError(f"name {name!r} is not defined")
        return module.__dict__[name]

    def number_of(value: object) -> int:
        objects[id(value)] = value
        return id(value)

    operations = OPERATIONS | {"run": execute_program, "name": value_of}
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
    """Return (class of an error, its nearest built-in base class, its text)."""
    # __str__ of an error is the program's code, and may raise as well.
    kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        text = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)
    except BaseException:
        text = ""
    return type(error).__name__, next(kinds), text
