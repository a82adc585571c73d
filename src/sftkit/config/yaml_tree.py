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
    # Beside the recipe first: a copy of recipes/ that somebody changed must not extend the shipped one.
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
            problems.append(recipes.in_folder(path))
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
        meant = recipes.similar_recipes(path)
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
    if word.startswith("-"):
        problems.append(f'{COMMAND_LINE}: {word}: no such option. Settings have no dashes: "{name.lstrip("-")}=..."')
        return
    if len(name) > MAX_KEY_CHARACTERS:
        too_long = f"a key of {len(name):,} characters, {MAX_KEY_CHARACTERS} at most"
        problems.append(f"{COMMAND_LINE}: {name[:20]}...: {too_long}")
        return
    if not equals or not name:
        problems.append(f"{COMMAND_LINE}: {word}: is not key=value")
        return
    # A value with a problem is not set: it would be reported once more as wrong.
    before = len(problems)
    value = parse(text, COMMAND_LINE, problems, name)
    if len(problems) == before:
        _set(tree, value, name, problems)


def _set(tree: Node, value: Node, name: str, problems: list[str]) -> None:
    """Set a value at a dotted key."""
    # Mappings on the way are made, items of lists are not: an index past the end is more likely a mistake.
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
        # Plain only if both versions of YAML read it as this text; `no`, `1e3` and `12:30` are quoted.
        same_in_1_2 = _PLAIN.fullmatch(scalar) and parse(scalar, "", []).value == scalar
        if same_in_1_2 and isinstance(yaml.safe_load(scalar), str):  # and in YAML 1.1
            return scalar
        return yaml.safe_dump(scalar, default_style='"', width=math.inf, allow_unicode=True).strip()
    return yaml.safe_dump(scalar).removesuffix("...\n").strip()
