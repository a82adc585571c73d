"""Recipe files as trees of values that remember where they came from: YAML 1.2 scalars, `extends`, overrides, output."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Keys = tuple[str | int, ...]
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Node:
    """A value of a recipe and the file (or the command line) that it was written in."""

    value: Any
    "dict[str, Node], list[Node] or a scalar."
    place: str

    def plain(self) -> Any:
        """The value without places: what json.dumps takes."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def child(self, key: str | int) -> Node | None:
        """The node at a key of a mapping or an index of a list, if it is there."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and isinstance(key, int) and key < len(self.value):
            return self.value[key]
        return None

    def nearest(self, keys: Keys) -> Node:
        """The node at `keys`, or the last one on the way there."""
        node = self
        for key in keys:
            child = node.child(key)
            if child is None:
                break
            node = child
        return node


def dotted(keys: Sequence[str | int]) -> str:
    return ".".join(str(key) for key in keys)


class RecipeLoader(yaml.SafeLoader):
    """Only YAML 1.2's plain scalars: 2e-5 is a float; no, on, 12:30 and 2024-01-01 are text."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own attribute)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def parse(text: str, place: str, problems: list[str]) -> Node:
    """A tree from YAML text. What is wrong with the text is appended to `problems`."""
    try:
        root = yaml.compose(text, Loader=RecipeLoader)
    except yaml.YAMLError as error:
        # Not str(error): it quotes the line, and the line may hold a secret.
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None and not place.startswith(COMMAND_LINE) else ""
        problems.append(f"{place}: {line}not valid YAML: {getattr(error, 'problem', None) or 'unreadable characters'}")
        return Node({}, place)
    return Node(None, place) if root is None else _convert(root, place, (), problems, ())


def _convert(node: yaml.Node, place: str, keys: Keys, problems: list[str], parents: tuple[int, ...]) -> Node:
    if id(node) in parents:
        problems.append(f"{place}: {dotted(keys)}: an alias that contains itself")
        return Node(None, place)
    parents = (*parents, id(node))
    if isinstance(node, yaml.MappingNode):
        return Node(_mapping(node, place, keys, problems, parents), place)
    if isinstance(node, yaml.SequenceNode):
        items = [_convert(item, place, (*keys, i), problems, parents) for i, item in enumerate(node.value)]
        return Node(items, place)
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind not in ("null", "bool", "int", "float", "str"):
        problems.append(f"{place}: {dotted(keys)}: the YAML tag {node.tag!r} is not allowed: plain values only")
        return Node(None, place)
    try:
        return Node(_scalar(kind, node.value), place)
    except ValueError:
        problems.append(f"{place}: {dotted(keys)}: not a valid {kind}")
        return Node(None, place)


def _mapping(node: yaml.MappingNode, place: str, keys: Keys, problems: list[str], parents: tuple[int, ...]) -> dict:
    lines: dict[str, int] = {}
    values: dict[str, Node] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(f"{place}: {dotted(keys)}: line {line}: a key must be a word")
            continue
        key = key_node.value
        if key in lines:
            where = f"lines {lines[key]} and {line}" if line != lines[key] else f"line {line}"
            problems.append(f"{place}: {dotted((*keys, key))}: given twice, in {where}")
        lines[key] = line
        values[key] = _convert(value_node, place, (*keys, key), problems, parents)
    return values


def _scalar(kind: str, text: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text)
    if kind == "float":
        number = float(text)
        return number if math.isfinite(number) else text  # 1e999 is no number that a setting can take
    return text


def merge(base: Node, top: Node) -> Node:
    """`top` over `base`: mappings key by key, anything else replaced."""
    if not (isinstance(base.value, dict) and isinstance(top.value, dict)):
        return top
    merged = dict(base.value)
    for key, node in top.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, top.place)


def read_tree(path: Path, problems: list[str], chain: tuple[Path, ...] = ()) -> Node:
    """The tree of a recipe file over the files that it `extends`."""
    place = str(path)
    text = _read_text(path, problems, chain[-1] if chain else None)
    tree = Node({}, place) if text is None else parse(text, place, problems)
    if tree.value is None:
        tree = Node({}, place)
    if not isinstance(tree.value, dict):
        problems.append(f"{place}: a recipe is a mapping of sections (run, model, data, ...)")
        return Node({}, place)
    if "extends" not in tree.value:
        return tree
    base = tree.value.pop("extends").value
    if not isinstance(base, str):
        problems.append(f"{place}: extends: must be the path of one recipe, relative to this file")
        return tree
    base_path = Path(os.path.normpath(path.parent / base))
    chain = (*chain, path)
    if base_path.resolve() in [p.resolve() for p in chain]:
        cycle = " -> ".join(str(p) for p in (*chain, base_path))
        problems.append(f"{place}: extends: goes round in a circle: {cycle}")
        return tree
    return merge(read_tree(base_path, problems, chain), tree)


def _read_text(path: Path, problems: list[str], extended_by: Path | None) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        where = f"{path}: no such file" if extended_by is None else f"{extended_by}: extends: no such file: {path}"
        siblings = {other.stem: other for other in sorted(path.parent.glob("*.yaml"))}
        near = difflib.get_close_matches(path.stem, siblings, n=1)
        problems.append(where + (f'. Did you mean "{siblings[near[0]]}"?' if near else ""))
    except UnicodeDecodeError:
        problems.append(f"{path}: not UTF-8 text")
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
    return None


def apply_override(tree: Node, word: str, problems: list[str]) -> None:
    """Set one `key.sub=value` from the command line in the tree; the value is YAML."""
    name, equals, text = word.partition("=")
    if word.startswith("-"):
        problems.append(f'{COMMAND_LINE}: {word}: no such option. Settings have no dashes: "{name.lstrip("-")}=..."')
        return
    if not equals or not name:
        problems.append(f"{COMMAND_LINE}: {word}: is not key=value")
        return
    before = len(problems)
    value = parse(text, f"{COMMAND_LINE}: {name}", problems)
    if len(problems) > before:
        return
    keys: list[str | int] = [int(part) if part.isdecimal() else part for part in name.split(".")]
    _set(tree, keys, _moved(value), name, problems)


def _moved(node: Node) -> Node:
    if isinstance(node.value, dict):
        return Node({key: _moved(value) for key, value in node.value.items()}, COMMAND_LINE)
    if isinstance(node.value, list):
        return Node([_moved(value) for value in node.value], COMMAND_LINE)
    return Node(node.value, COMMAND_LINE)


def _set(tree: Node, keys: list[str | int], value: Node, name: str, problems: list[str]) -> None:
    node = tree
    for i, part in enumerate(keys):
        inside: Any = node.value
        kind = type(inside)
        key = str(part) if kind is dict else part
        if kind is list and node.child(key) is None:
            many = f"a list of {len(inside)}: index it with 0 to {len(inside) - 1}" if inside else "an empty list"
            problems.append(f"{COMMAND_LINE}: {name}: {dotted(keys[:i])} is {many}")
            return
        if kind not in (list, dict):
            problems.append(f"{COMMAND_LINE}: {name}: {dotted(keys[:i])} is a plain value and has no keys")
            return
        if i == len(keys) - 1:
            inside[key] = value
        elif kind is dict and (key not in inside or inside[key].value is None):
            inside[key] = Node({}, COMMAND_LINE)
        node = inside[key]


def render(value: dict[str, Any], comment: Callable[[Keys], str] = lambda keys: "") -> str:
    """YAML text, one line per leaf, each with its comment. Reads the same under YAML 1.1 and 1.2."""
    lines = list(_lines(value, (), ""))
    width = min(72, max((len(text) for text, keys in lines if keys), default=0))
    notes = [(text, comment(keys) if keys else "") for text, keys in lines]
    return "".join((f"{text:<{width}}  # {note}" if note else text) + "\n" for text, note in notes)


def _lines(value: Any, keys: Keys, indent: str):
    """(line, keys of the leaf or () for a line that only opens a block)."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in entries:
        here = (*keys, key)
        lead = f"{indent}{_text(key)}:" if isinstance(value, dict) else f"{indent}-"
        if isinstance(item, (dict, list)) and not _is_short(item):
            inner = list(_lines(item, here, indent + "  "))
            if isinstance(value, dict):
                yield lead, ()
            else:  # the first key of a list item stands beside its dash
                inner[0] = (lead + inner[0][0][len(lead) :], inner[0][1])
            yield from inner
        else:
            yield f"{lead} {_flow(item)}", here


def _is_short(item: dict | list) -> bool:
    return not item or (isinstance(item, list) and not any(isinstance(entry, (dict, list)) for entry in item))


def _flow(item: Any) -> str:
    if isinstance(item, list):
        return "[" + ", ".join(_text(entry) for entry in item) + "]"
    return "{}" if item == {} else _text(item)


_PLAIN = re.compile(r"[A-Za-z_./][\w./@+-]*(?::[\w./@+-]+)*", re.ASCII)


def _text(scalar: Any) -> str:
    if isinstance(scalar, str):
        same_in_1_2 = _PLAIN.fullmatch(scalar) and parse(scalar, "", []).value == scalar
        if same_in_1_2 and isinstance(yaml.safe_load(scalar), str):  # and in YAML 1.1
            return scalar
        return yaml.safe_dump(scalar, default_style='"', width=math.inf, allow_unicode=True).strip()
    return yaml.safe_dump(scalar).removesuffix("...\n").strip()
