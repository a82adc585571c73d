"""Plain data between the tests and a program: text that is rebuilt as values, and never code of the other side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

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
"Name -> module, loaded when it is needed, and function to its parts. Both compare with int and float."

PLAIN_INTEGERS = 2**53
"Larger ones travel in base 16: Python reads only 4,300 decimal digits."


class RequestAndReply:
    """One request and its answer. Containers have numbers, so that both sides have the same ones: shared, in a circle,
    or changed in place by the program. What is not data stays in its process and is sent as the number of an object."""

    def __init__(self, number_of: Callable[[object], int], object_of: Callable[[int], object]) -> None:
        self.number_of, self.object_of = number_of, object_of
        self.containers: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.received: list[Any] = []

    def pack(self, *values: object) -> bytes:
        """Encode the values, with every container that is new or has changed."""
        encoded = [self.encode(value) for value in values]
        # Encoding a container may meet others, which join the list that is being read.
        filled = [self._contents(container) for container in self.containers]  # grows while it is read
        # None: the other side has a container with the same contents
        changed = [None if repr(now) == repr(had) else now for now, had in zip_longest(filled, self.received)]
        return json.dumps({"values": encoded, "containers": changed}).encode()

    def unpack(self, data: bytes) -> list[Any]:
        """Return the values of the other side's `pack`; ValueError, TypeError or another Exception if it is not one."""
        message = json.loads(data)
        self.received = message["containers"]
        # All empty ones first, so that a container may hold another one, or itself.
        for contents in self.received[len(self.containers) :]:
            self._add(MUTABLE[contents[0]][0]())
        for container, contents in zip(self.containers, self.received, strict=False):
            if contents is not None:
                fill = MUTABLE[contents[0]][2]
                fill(container, [self.decode(part) for part in contents[1]])
        return [self.decode(value) for value in message["values"]]

    def encode(self, value: Any) -> Any:
        """Return a value as JSON has it: constants, numbers and texts as they are, anything else as a name and parts.
        Subclasses lose what they add."""
        if value is None or isinstance(value, bool):
            return value
        # By the type's own method: a subclass may have an __int__ that says something else.
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
        # Registered before its parts are encoded: that ends the recursion of a list that holds itself.
        if isinstance(value, tuple(kind for kind, _, _ in MUTABLE.values())):
            return ["container", self.numbers[id(value)] if id(value) in self.numbers else self._add(value)]
        for name, (module, parts) in NUMBERS.items():
            # A program that never imported decimal can have no Decimal; importing it here would cost every request.
            if module in sys.modules and isinstance(value, getattr(sys.modules[module], name)):
                return [name, *map(self.encode, parts(value))]
        return ["object", self.number_of(value)]

    def decode(self, encoded: Any) -> Any:
        """Return the value of what `encode` made."""
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
