"""YAML text to trees of values that know where they came from: YAML 1.2 scalars, within the limits of a recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

KeyPath = tuple[str | int, ...]
COMMAND_LINE = "command line"
Scalar = bool | int | float | str | None
Plain: TypeAlias = "dict[str, Plain] | list[Plain] | Scalar"
"A value as JSON has it."


@dataclass
class Node:
    """A value of a recipe and the file (or the command line) that it was written in."""

    value: dict[str, Node] | list[Node] | Scalar
    origin: str

    def plain(self) -> Plain:
        """Return the value without places, as json.dumps takes it."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def child(self, key: str | int) -> Node | None:
        """Return the node at a key of a mapping or an index of a list; None if it is not there."""
        if isinstance(self.value, dict):
            return self.value.get(key) if isinstance(key, str) else None
        if isinstance(self.value, list) and isinstance(key, int) and key < len(self.value):
            return self.value[key]
        return None

    def find(self, keys: KeyPath) -> Node | None:
        """Return the node at `keys`; None if it is not there."""
        node: Node | None = self
        for key in keys:
            node = None if node is None else node.child(key)
        return node

    def nearest(self, keys: KeyPath) -> Node:
        """Return the node at `keys`, or the last one on the way there."""
        node = self
        for key in keys:
            child = node.child(key)
            if child is None:
                break
            node = child
        return node


def dotted(keys: Sequence[str | int]) -> str:
    """Join keys as a person writes them; a line break in a key is written out, as it would
    begin a new line of a report."""
    return ".".join(str(key) for key in keys).replace("\n", "\\n")


def keys_of(key: str) -> KeyPath:
    """Split a dotted key; its numbers are places in lists."""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf of nested mappings."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flattened(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


MAX_RECIPE_BYTES = 64 * 1024
"The most bytes of a recipe file with those that it extends; also of the words of the command line."
MAX_VALUES = 5_000
"The most values of a file, of a word, and of the recipe that they make; an alias counts as all that it stands for."
MAX_LEVELS = 32
MAX_CHARACTERS = 10_000
"The most characters of one value."
MAX_KEY_CHARACTERS = 200
"The most characters of a key."
MAX_FILES = 16
"The most files that extend one another."


class _TooMuch(Exception):
    """More than a recipe may hold; the message says of what."""


def check_size(values: int, levels: int) -> None:
    """Raise _TooMuch for more values or levels than a recipe may hold."""
    if values > 2 * MAX_VALUES:  # keys are values too while they are read
        raise _TooMuch(f"more than {MAX_VALUES:,} values, aliases written out")
    if levels > MAX_LEVELS:
        raise _TooMuch(f"nested more than {MAX_LEVELS} levels deep")


class RecipeLoader(yaml.SafeLoader):
    """Only YAML 1.2's plain scalars: 2e-5 is a float; no, on, 12:30 and 2024-01-01 are text. And only so many."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._composed = self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node, within the limits on values and levels. An alias counts as one here; `_Conversion` counts
        what it stands for."""
        # While PyYAML composes, not after: a text of some KiB can stand for more nodes than memory holds.
        self._composed += 1
        self._level += 1
        check_size(self._composed, self._level)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def parse(text: str, origin: str, problems: list[str], name: str = "") -> Node:
    """Parse YAML text to a tree. What is wrong with the text is appended to `problems`, as of the setting `name` where
    it is the value of one."""
    place = f"{origin}: {name}" if name else origin
    try:
        root = yaml.compose(text, Loader=RecipeLoader)
        return Node(None, origin) if root is None else _Conversion(origin, place, problems).convert(root, (), ())
    except yaml.YAMLError as error:
        # Not str(error): it quotes the line, and the line may hold a secret.
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None and not name else ""
        problems.append(f"{place}: {line}not valid YAML: {getattr(error, 'problem', None) or 'unreadable characters'}")
    except _TooMuch as error:
        problems.append(f"{place}: {error}")
    return Node({}, origin)


class _Conversion:
    """YAML nodes to Nodes of one place, within the limits of a recipe."""

    def __init__(self, origin: str, place: str, problems: list[str]) -> None:
        self.origin, self.place, self.problems, self.values = origin, place, problems, 0

    def convert(self, node: yaml.Node, keys: KeyPath, parents: tuple[int, ...]) -> Node:
        """Convert a node that stands at `keys`; `parents`: ids of the nodes around it, which
        show a circle of aliases."""
        self.values += 2
        check_size(self.values, len(keys))
        if id(node) in parents:
            return self._problem(keys, "an alias that contains itself")
        # The way down, not all nodes seen: the same alias twice is no circle.
        parents = (*parents, id(node))
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node, keys, parents), self.origin)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.convert(item, (*keys, i), parents) for i, item in enumerate(node.value)], self.origin)
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in ("null", "bool", "int", "float", "str"):
            tag = repr(node.tag[:MAX_KEY_CHARACTERS])
            return self._problem(keys, f"the YAML tag {tag} is not allowed: plain values only")
        if len(node.value) > MAX_CHARACTERS:
            return self._problem(keys, f"{len(node.value):,} characters, and a value has {MAX_CHARACTERS:,} at most")
        try:
            return Node(_scalar(kind, node.value), self.origin)
        except ValueError:
            return self._problem(keys, _INVALID[kind])

    def _problem(self, keys: KeyPath, text: str) -> Node:
        self.problems.append(": ".join(filter(None, (self.place, dotted(keys), text))))
        return Node(None, self.origin)

    def _mapping(self, node: yaml.MappingNode, keys: KeyPath, parents: tuple[int, ...]) -> dict[str, Node]:
        lines: dict[str, int] = {}
        values: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or len(key_node.value) > MAX_KEY_CHARACTERS:
                self._problem(keys, f"line {line}: a key must be a word of {MAX_KEY_CHARACTERS} characters at most")
                continue
            key = key_node.value
            if key in lines:
                where = f"lines {lines[key]} and {line}" if line != lines[key] else f"line {line}"
                self._problem((*keys, key), f"given twice, in {where}")
            lines[key] = line
            values[key] = self.convert(value_node, (*keys, key), parents)
        return values


_INVALID = {
    "int": "not a whole number of at most 64 bits",
    "float": "not a valid number",
    "str": "half of a character, which no text can hold",
}


def _scalar(kind: str, text: str) -> Scalar:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        # The digits are counted first: Python refuses to read more than 4,300 of them, with an error of its own.
        if len(text.lstrip("+-0")) > 19 or not -(2**63) <= int(text) < 2**63:
            raise ValueError
        return int(text)
    if kind == "float":
        number = float(text)
        return number if math.isfinite(number) else text  # 1e999 is no number that a setting can take
    return text.encode("utf-16", "surrogatepass").decode("utf-16")  # "\ud83d\ude00", as JSON writes a character
