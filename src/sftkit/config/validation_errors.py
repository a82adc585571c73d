"""Messages about a wrong value or key of a recipe, with the key that was probably meant."""

from __future__ import annotations

import difflib
import re

from pydantic_core import ErrorDetails

from sftkit.config.keys import key_table, row_of, section_classes, shorten
from sftkit.config.other_names import own_names, remark
from sftkit.config.yaml_text import KeyPath, dotted, keys_of


def explain_error(error: ErrorDetails, keys: KeyPath) -> tuple[str, list[KeyPath]]:
    """Return what is wrong in words, and the keys that were probably meant."""
    kind, context, got = error["type"], error.get("ctx", {}), shorten(error.get("input"))
    key = key_table().get(row_of(keys))
    if kind == "unexpected_keyword_argument":
        return _unknown(keys)
    if kind in ("missing", "missing_argument"):
        return (f"is required: {key.doc}" if key and not isinstance(keys[-1], int) else "has too few values"), []
    if kind == "literal_error":
        allowed = [text or word.lower() for text, word in re.findall(r"'([^']*)'|(True|False)", context["expected"])]
        near = difflib.get_close_matches(str(error["input"]), allowed, n=1)
        null = ["null"] if key and key.kind.endswith("| null") else []
        return f"{got} is not one of {', '.join(allowed + null)}." + (f' Did you mean "{near[0]}"?' if near else ""), []
    if kind in _WANTED:
        or_null = " or null" * bool(key and key.kind.endswith("| null"))
        return f"must be {_WANTED[kind]}{or_null}, not {got}{_in_brackets(error, keys)}", []
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind]} {next(iter(context.values()))}, not {got}", []
    return f"{error['msg']}, got {got}", []


def _in_brackets(error: ErrorDetails, keys: KeyPath) -> str:
    """Return how to write a single value, or several with commas, as the list that is wanted; empty where it is none,
    or its items are mappings."""
    key, value = key_table().get(row_of(keys)), error["input"]
    if error["type"] != "tuple_type" or key is None or "mapping" in key.kind or isinstance(value, dict) or not value:
        return ""
    listed = f"[{value}]"
    return f': write {keys[-1]}: {listed} in a recipe, "{dotted(keys)}={listed}" on the command line'


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (quote it)",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys",
    "dataclass_type": "a mapping of keys",
}


_BOUNDS = {
    "greater_than": "greater than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}


def _unknown(keys: KeyPath) -> tuple[str, list[KeyPath]]:
    """Return what to say of an unknown key, and the keys that were probably meant."""
    name, parent = str(keys[-1]), row_of(keys[:-1])
    prefix = f"{parent}." if parent else ""
    inside = [key.removeprefix(prefix) for key in key_table() if key.startswith(prefix)]
    level = [key for key in inside if "." not in key] if parent else list(section_classes())
    elsewhere = [key for key in key_table() if key.rpartition(".")[2] == name]
    if row_of(keys) in key_table() or name in key_table():
        return f"a dotted key works on the command line only: nest it here as {name.replace('.', ': {')}: ...", []
    # What was meant, best first: what other trainers call it, the same name elsewhere, a name like it here, a name like
    # it anywhere. An item of a list, or a module, has settings of its own, which no other trainer has.
    others = own_names(name) if len(keys) <= 2 else ()
    siblings = [prefix + near for near in difflib.get_close_matches(name, level, n=1)]
    section = [name] if name in section_classes() else []
    near_names = difflib.get_close_matches(name, {key.rpartition(".")[2] for key in key_table()}, n=1, cutoff=0.75)
    distant = [key for key in key_table() if key.rpartition(".")[2] in near_names]
    meant = [_indexed(key, keys) for key in others or elsewhere or siblings or section or distant]
    if meant:
        quoted = " or ".join(f'"{key}"' for key in meant)
        return f"is not a known key. Did you mean {quoted}{remark(others)}?", [keys_of(key) for key in meant]
    return f"is not a known key. Known here: {', '.join(level)}", []


def _indexed(key: str, keys: KeyPath) -> str:
    """Return a key of the table with its N and PATH filled in: from `keys` where both are in the same list or mapping,
    else as 0 and PATH."""
    parts = key.split(".")
    same = [len(keys) > i and row_of(keys[: i + 1]).split(".") == parts[: i + 1] for i in range(len(parts))]
    instead = {"N": "0", "PATH": "PATH"}
    return ".".join(str(keys[i]) if same[i] else instead.get(part, part) for i, part in enumerate(parts))
