"""Recipe files as trees of values: `extends`, overrides of the command line, output."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml

from sftkit.config import recipes
from sftkit.config.commands import shipped, shipped_recipes
from sftkit.config.paths import expanded
from sftkit.config.yaml_text import (
    COMMAND_LINE,
    MAX_FILES,
    MAX_KEY_CHARACTERS,
    MAX_RECIPE_BYTES,
    KeyPath,
    Node,
    Plain,
    dotted,
    keys_of,
    parse,
)
from sftkit.errors import ConfigError


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
    tree = Node({}, origin) if text is None else parse(text, origin, problems)
    if tree.value is None:
        tree = Node({}, origin)
    if not isinstance(tree.value, dict):
        problems.append(f"{origin}: a recipe is a mapping of sections (run, model, data, ...)")
        return Node({}, origin)
    if "extends" not in tree.value:
        return tree
    base = tree.value.pop("extends").value
    if not isinstance(base, str):
        problems.append(f"{origin}: extends: must be the path of one recipe, relative to this file")
        return tree
    try:
        base_path = _extended(path, expanded(base))
    except ConfigError as error:
        problems.append(f"{origin}: extends: {error}")
        return tree
    chain = (*chain, path)
    if len(chain) > MAX_FILES:
        problems.append(f"{origin}: extends: more than {MAX_FILES} files that extend one another")
        return tree
    if os.path.realpath(base_path) in map(os.path.realpath, chain):
        cycle = " -> ".join(str(p) for p in (*chain, base_path))
        problems.append(f"{origin}: extends: goes round in a circle: {cycle}")
        return tree
    return merge(read_tree(base_path, problems, chain, room - len((text or "").encode())), tree)


def _extended(path: Path, base: str) -> Path:
    """Return the path of the file that a recipe extends: relative to the recipe if it exists, else recipes/... of the
    current folder or of those that came with sftkit, as on the command line."""
    beside = Path(os.path.normpath(path.parent / base))
    found = shipped(base)
    return beside if os.path.exists(beside) or not os.path.isfile(found) else Path(found)


def _read_text(path: Path, problems: list[str], extended_by: Path | None, room: int) -> str | None:
    try:
        if path.is_dir():
            problems.append(recipes.in_folder(path))
            return None
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait, reading a device would not end
            problems.append(f"{path}: not a regular file, which a recipe must be")
            return None
        with open(path, "rb") as file:
            content = file.read(room + 1)
        if len(content) > room:
            together = " together with the files that extend it" if extended_by else ""
            problems.append(f"{path}: more than {MAX_RECIPE_BYTES // 1024} KiB{together}, which no recipe has")
            return None
        return content.decode()
    except FileNotFoundError:
        where = f"{path}: no such file" if extended_by is None else f"{extended_by}: extends: no such file: {path}"
        meant = recipes.similar_recipes(path)
        problems.append(where + meant)
        if "recipes" in path.parts and not meant:
            folders = sorted({str(Path(recipe).parent) for recipe in shipped_recipes()})
            problems.append(f"recipes that came with sftkit are in {', '.join(folders)}")
    except UnicodeDecodeError:
        problems.append(f"{path}: not UTF-8 text")
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
    return None


def apply_override(tree: Node, word: str, problems: list[str]) -> None:
    """Set one `key.sub=value` of the command line in the tree; the value is YAML."""
    name, equals, text = word.partition("=")
    if word.startswith("-"):
        problems.append(f'{COMMAND_LINE}: {word}: no such option. Settings have no dashes: "{name.lstrip("-")}=..."')
        return
    if len(name) > MAX_KEY_CHARACTERS:
        problems.append(
            f"{COMMAND_LINE}: {name[:20]}...: a key of {len(name):,} characters, {MAX_KEY_CHARACTERS} at most"
        )
        return
    if not equals or not name:
        problems.append(f"{COMMAND_LINE}: {word}: is not key=value")
        return
    before = len(problems)
    value = parse(text, f"{COMMAND_LINE}: {name}", problems)
    if len(problems) > before:
        return
    _set(tree, _moved(value), name, problems)


def _moved(node: Node) -> Node:
    """Return the same value, marked as written on the command line."""
    if isinstance(node.value, dict):
        return Node({key: _moved(value) for key, value in node.value.items()}, COMMAND_LINE)
    if isinstance(node.value, list):
        return Node([_moved(value) for value in node.value], COMMAND_LINE)
    return Node(node.value, COMMAND_LINE)


def _set(tree: Node, value: Node, name: str, problems: list[str]) -> None:
    """Set a value at a dotted key."""
    node, keys = tree, keys_of(name)
    for i, part in enumerate(keys):
        inside, last = node.value, i == len(keys) - 1
        if isinstance(inside, dict):
            key = str(part)
            if last:
                inside[key] = value
            elif key not in inside or inside[key].value is None:
                inside[key] = Node({}, COMMAND_LINE)
            node = inside[key]
        elif isinstance(inside, list):
            if not isinstance(part, int) or part >= len(inside):
                many = f"a list of {len(inside)}: index it with 0 to {len(inside) - 1}" if inside else "an empty list"
                problems.append(f"{COMMAND_LINE}: {name}: {dotted(keys[:i])} is {many}")
                return
            if last:
                inside[part] = value
            node = inside[part]
        else:
            problems.append(f"{COMMAND_LINE}: {name}: {dotted(keys[:i])} is a plain value and has no keys")
            return


def render_yaml(value: dict[str, Plain], comment: Callable[[KeyPath], str] = lambda keys: "") -> str:
    """Render YAML text, one line per leaf, each with its comment. It reads the same under YAML 1.1 and 1.2."""
    lines = list(_lines(value, (), ""))
    width = min(72, max((len(text) for text, keys in lines if keys), default=0))
    notes = [(text, comment(keys) if keys else "") for text, keys in lines]
    return "".join((f"{text:<{width}}  # {note}" if note else text) + "\n" for text, note in notes)


def _lines(value: dict[str, Plain] | list[Plain], keys: KeyPath, indent: str) -> Iterator[tuple[str, KeyPath]]:
    """Yield (line, keys of its leaf), with () as keys of a line that only opens a block."""
    entries: Iterable[tuple[str | int, Plain]] = value.items() if isinstance(value, dict) else enumerate(value)
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


def _is_short(item: dict[str, Plain] | list[Plain]) -> bool:
    return not item or (isinstance(item, list) and not any(isinstance(entry, (dict, list)) for entry in item))


def _flow(item: Plain) -> str:
    if isinstance(item, list):
        return "[" + ", ".join(_text(entry) for entry in item) + "]"
    return "{}" if item == {} else _text(item)


_PLAIN = re.compile(r"[A-Za-z_./][\w./@+-]*(?::[\w./@+-]+)*", re.ASCII)


def _text(scalar: object) -> str:
    if isinstance(scalar, str):
        same_in_1_2 = _PLAIN.fullmatch(scalar) and parse(scalar, "", []).value == scalar
        if same_in_1_2 and isinstance(yaml.safe_load(scalar), str):  # and in YAML 1.1
            return scalar
        return yaml.safe_dump(scalar, default_style='"', width=math.inf, allow_unicode=True).strip()
    return yaml.safe_dump(scalar).removesuffix("...\n").strip()
