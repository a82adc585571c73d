"""Recipe files as trees of values with their origins: YAML 1.2 scalars within the limits of a recipe,
`extends`, overrides of the command line, output. No torch."""

from __future__ import annotations

import difflib
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from sftkit.config.commands import ROOT, expanded, shipped, shipped_recipes
from sftkit.errors import ConfigError

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
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def children(self) -> Iterable[tuple[str | int, Node]]:
        """Return (key or index, node) of what is directly below."""
        if isinstance(self.value, dict):
            return self.value.items()
        return enumerate(self.value) if isinstance(self.value, list) else ()

    def find(self, keys: KeyPath) -> Node | None:
        """Return the node at `keys`; None if it is not there."""
        way = self._way(keys)
        return way[-1] if len(way) == len(keys) + 1 else None

    def nearest(self, keys: KeyPath) -> Node:
        """Return the node at `keys`, or the last one on the way there."""
        return self._way(keys)[-1]

    def _way(self, keys: KeyPath) -> list[Node]:
        """Return the nodes from this one to the one at `keys`, as far as there are any."""
        nodes = [self]
        for key in keys:
            inside = nodes[-1].value
            child = inside.get(key) if isinstance(inside, dict) and isinstance(key, str) else None
            if isinstance(inside, list) and isinstance(key, int) and key < len(inside):
                child = inside[key]
            if child is None:
                break
            nodes.append(child)
        return nodes


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
MAX_LEVELS = 32
MAX_CHARACTERS = 10_000
"The most characters of one value."
MAX_KEY_CHARACTERS = 200
"The most characters of a key."
MAX_FILES = 16
"The most files that extend one another."


class RecipeLoader(yaml.SafeLoader):
    """Only YAML 1.2's plain scalars: 2e-5 is a float; no, on, 12:30 and 2024-01-01 are text. No aliases, of which a few
    lines could make any number of values."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node; reject an alias."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call] # of PyYAML, whose types lack it
            problem = "an alias (*name) is not allowed: write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class RecipeDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else; lists of plain values are one line."""


def _represent_list(dumper: RecipeDumper, data: list[Plain]) -> yaml.Node:
    flow = not any(isinstance(item, dict | list) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


RecipeDumper.add_representer(list, _represent_list)
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    for _of in (RecipeLoader, RecipeDumper):
        _of.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def parse(text: str, origin: str, problems: list[str], name: str = "") -> Node:
    """Parse YAML text to a tree, and append to `problems` what is wrong with the text.

    Args:
        name: the setting whose value the text is; empty: it is a file.
    """
    place = f"{origin}: {name}" if name else origin

    def problem(keys: KeyPath, text: str) -> Node:
        problems.append(": ".join(filter(None, (place, dotted(keys), text))))
        return Node(None, origin)

    def convert(node: yaml.Node, keys: KeyPath) -> Node:
        if len(keys) > MAX_LEVELS:
            raise RecursionError
        if isinstance(node, yaml.MappingNode):
            return Node(mapping(node, keys), origin)
        if isinstance(node, yaml.SequenceNode):
            return Node([convert(item, (*keys, i)) for i, item in enumerate(node.value)], origin)
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in ("null", "bool", "int", "float", "str"):
            tag = repr(node.tag[:MAX_KEY_CHARACTERS])
            return problem(keys, f"the YAML tag {tag} is not allowed: plain values only")
        if len(node.value) > MAX_CHARACTERS:
            return problem(keys, f"{len(node.value):,} characters, and a value has {MAX_CHARACTERS:,} at most")
        try:
            return Node(_scalar(kind, node.value), origin)
        except ValueError:
            return problem(keys, _INVALID[kind])

    def mapping(node: yaml.MappingNode, keys: KeyPath) -> dict[str, Node]:
        lines: dict[str, int] = {}
        values: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or len(key_node.value) > MAX_KEY_CHARACTERS:
                problem(keys, f"line {line}: a key must be a word of {MAX_KEY_CHARACTERS} characters at most")
                continue
            key = key_node.value
            if key in lines:
                where = f"lines {lines[key]} and {line}" if line != lines[key] else f"line {line}"
                problem((*keys, key), f"given twice, in {where}")
            lines[key] = line
            values[key] = convert(value_node, (*keys, key))
        return values

    try:
        root = yaml.compose(text, Loader=RecipeLoader)
        return Node(None, origin) if root is None else convert(root, ())
    except yaml.YAMLError as error:
        # Not str(error): it quotes the line, and the line may hold a secret.
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None and not name else ""
        problems.append(f"{place}: {line}not valid YAML: {getattr(error, 'problem', None) or 'unreadable characters'}")
    except RecursionError:  # of PyYAML, too
        problems.append(f"{place}: nested more than {MAX_LEVELS} levels deep")
    return Node({}, origin)


_INVALID = {
    "int": "not a whole number of at most 64 bits",
    "float": "not a valid number",
    "str": "half of a character, which no text can hold",
}


def _scalar(kind: str, text: str) -> Scalar:
    if kind in ("null", "bool"):
        return None if kind == "null" else text.lower() == "true"
    if kind == "int":
        # The digits are counted first: Python rejects more than 4,300 of them with an error of its own.
        if len(text.lstrip("+-0")) > 19 or not -(2**63) <= int(text) < 2**63:
            raise ValueError
        return int(text)
    if kind == "float":
        number = float(text)
        return number if math.isfinite(number) else text  # 1e999 is no number that a setting can take
    return text.encode("utf-16", "surrogatepass").decode("utf-16")  # "\ud83d\ude00", as JSON writes a character


_MAX_NAMES = 8
"The most recipes that a message lists."


def in_folder(folder: Path) -> str:
    """Return what is wrong with a folder in the place of a recipe."""
    found = sorted(folder.glob("*.yaml")) or sorted(folder.glob("*/*.yaml"))
    if not found:
        return f"{_shown(folder)}: a folder without recipes in it; name a recipe, a .yaml file"
    more = f" and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
    listed = ", ".join(map(_shown, found[:_MAX_NAMES]))
    return f"{_shown(folder)}: a folder; name one of the recipes in it: {listed}{more}"


def similar_recipes(path: Path) -> str:
    """Return a sentence that names recipes like a missing path; empty if none is like it."""
    if path.parent.is_dir():
        there = {recipe.name: recipe for recipe in path.parent.glob("*.yaml")}
        found = difflib.get_close_matches(path.name, there, n=1, cutoff=0.75)
    else:
        known = *path.parent.parent.glob("*/*.yaml"), *map(Path, shipped_recipes())
        there = {f"{recipe.parent.name}/{recipe.name}": recipe for recipe in known}
        found = difflib.get_close_matches(f"{path.parent.name}/{path.name}", there, n=1, cutoff=0.75)
    return f'. Did you mean "{there[found[0]]}"?' if found else ""


def _shown(path: Path) -> str:
    """Return a path as it is typed; a file that came with sftkit is recipes/x/sft.yaml wherever it lies."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def merge(base: Node, top: Node) -> Node:
    """Merge `top` over `base`: mappings key by key, anything else is replaced."""
    if not (isinstance(base.value, dict) and isinstance(top.value, dict)):
        return top
    merged = dict(base.value)
    for key, node in top.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, top.origin)


def read_tree(path: Path, problems: list[str], chain: tuple[Path, ...] = (), room: int = MAX_RECIPE_BYTES) -> Node:
    """Read a recipe file merged over the files that it `extends`, which may have `room` bytes together. Problems are
    appended to `problems`."""
    origin = str(path)
    text = _read_text(path, problems, chain[-1] if chain else None, room)
    tree = parse(text, origin, problems)
    if tree.value is None:
        tree.value = {}
    if not isinstance(tree.value, dict):
        problems.append(f"{origin}: a recipe is a mapping of sections (run, model, data, ...)")
        return Node({}, origin)
    if "extends" not in tree.value:
        return tree
    chain = (*chain, path)
    try:
        base_path = _extended(chain, tree.value.pop("extends").value)
    except ConfigError as error:
        problems.append(f"{origin}: extends: {error}")
        return tree
    return merge(read_tree(base_path, problems, chain, room - len(text.encode())), tree)


def _extended(chain: tuple[Path, ...], base: object) -> Path:
    """Return the path of the file that the last of these recipes extends: relative to the recipe if it exists, else
    recipes/... of the current folder or of those that came with sftkit, as on the command line.

    Raises:
        ConfigError: it is no path, or one that must not follow the others.
    """
    if not isinstance(base, str):
        raise ConfigError("must be the path of one recipe, relative to this file")
    # Next to the recipe first: a copy of recipes/ that somebody changed must not extend the shipped one.
    found = shipped(expanded(base))
    path = Path(os.path.normpath(chain[-1].parent / expanded(base)))
    if not os.path.exists(path) and os.path.isfile(found):
        path = Path(found)
    if len(chain) > MAX_FILES:
        raise ConfigError(f"more than {MAX_FILES} files that extend one another")
    if os.path.realpath(path) in map(os.path.realpath, chain):
        raise ConfigError(f"files extend one another in a circle: {' -> '.join(map(str, (*chain, path)))}")
    return path


def _read_text(path: Path, problems: list[str], extended_by: Path | None, room: int) -> str:
    """Return the text of a recipe, empty where there is none that can be read."""
    try:
        if path.is_dir():
            problems.append(in_folder(path))
        elif not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait, reading a device would not end
            problems.append(f"{path}: not a regular file, which a recipe must be")
        else:
            with open(path, "rb") as file:
                content = file.read(room + 1)
            if len(content) <= room:
                return content.decode("utf-8-sig")
            together = " together with the files that extend it" if extended_by else ""
            problems.append(f"{path}: more than {MAX_RECIPE_BYTES // 1024} KiB{together}, which no recipe has")
    except FileNotFoundError:
        where = f"{extended_by}: extends: no such file: {path}" if extended_by else f"{path}: no such file"
        meant = similar_recipes(path)
        problems.append(where + meant)
        if "recipes" in path.parts and not meant:
            folders = sorted({str(Path(recipe).parent) for recipe in shipped_recipes()})
            problems.append(f"recipes that came with sftkit are in {', '.join(folders)}")
    except UnicodeDecodeError:
        problems.append(f"{path}: not UTF-8 text")
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
    return ""


def apply_override(tree: Node, word: str, problems: list[str]) -> None:
    """Set one `key.sub=value` of the command line in the tree; the value is YAML."""
    name, equals, text = word.partition("=")
    before = len(problems)
    if len(name) > MAX_KEY_CHARACTERS:
        most = f"a key of {len(name):,} characters, {MAX_KEY_CHARACTERS} at most"
        problems.append(f"{COMMAND_LINE}: {name[:20]}...: {most}")
    elif not equals or not name:
        problems.append(f"{COMMAND_LINE}: {word}: is not key=value")
    else:
        value = parse(text, COMMAND_LINE, problems, name)
        # A value with a problem is not set: it would be reported once more as wrong.
        if len(problems) == before:
            _set(tree, value, name, problems)


def _set(tree: Node, value: Node, name: str, problems: list[str]) -> None:
    """Set a value at a dotted key."""
    # Missing mappings are made, items of lists are not: an index past the end is more likely a mistake.
    node = tree
    keys = keys_of(name)
    for i, part in enumerate(keys):
        inside: Any = node.value
        if isinstance(inside, dict):
            part = str(part)
            if part not in inside or inside[part].value is None:
                inside[part] = Node({}, COMMAND_LINE)
        elif not isinstance(inside, list) or not isinstance(part, int) or part >= len(inside):
            what = "a plain value and has no keys"
            if isinstance(inside, list):
                what = f"a list of {len(inside)}: index it with 0 to {len(inside) - 1}" if inside else "an empty list"
            problems.append(f"{COMMAND_LINE}: {name}: {dotted(keys[:i])} is {what}")
            return
        if i == len(keys) - 1:
            inside[part] = value
        node = inside[part]


def render_yaml(value: dict[str, Plain], comment: Callable[[KeyPath], str] | None = None) -> str:
    """Render YAML text, one line per leaf, each with its comment. It reads the same under YAML 1.1 and 1.2."""
    text = yaml.dump(value, Dumper=RecipeDumper, sort_keys=False, width=math.inf, allow_unicode=True)
    if comment is None:
        return text
    lines = text.split("\n")
    root = yaml.compose(text, Loader=RecipeLoader)
    leaves = dict(_leaves(root, ())) if root else {}
    width = min(72, max((len(lines[i]) for i in leaves), default=0))
    for i, keys in leaves.items():
        note = comment(keys)
        lines[i] = f"{lines[i]:<{width}}  # {note}" if note else lines[i]
    return "\n".join(lines)


def _leaves(node: yaml.Node, keys: KeyPath) -> Iterator[tuple[int, KeyPath]]:
    """Yield (number of the last line, keys) of every value that starts on its own line."""
    if isinstance(node, yaml.MappingNode) and node.value:
        for key, value in node.value:
            yield from _leaves(value, (*keys, key.value))
    elif isinstance(node, yaml.SequenceNode) and not node.flow_style:
        for i, value in enumerate(node.value):
            yield from _leaves(value, (*keys, i))
    else:
        yield node.end_mark.line, keys
