"""Every key of a recipe, dotted, with its type, default and meaning from schema.py: for --help, and for messages about
a wrong value or an unknown key, with the key that was probably meant. Names of other trainers are understood too."""

import dataclasses
import difflib
import functools
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import ErrorDetails

from sftkit.config.commands import typed
from sftkit.config.schema import Config
from sftkit.config.yaml import KeyPath, Plain, dotted, keys_of
from sftkit.errors import did_you_mean, texts

JsonSchema = dict[str, Any]
"A JSON schema, as pydantic types it: Any, for its keys have values of many types."
USAGE = "RECIPE.yaml [key.sub=value ...] [--print-config] [--help]"


@functools.cache
def adapter() -> TypeAdapter[Config]:
    """Return pydantic's validator of Config; it takes a moment to build, so it is built once."""
    return TypeAdapter(Config)


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting as help shows it."""

    kind: str
    doc: str
    required: bool
    default: Plain
    is_path: bool
    "Its text is a path, or may be one."


@functools.cache
def key_table() -> dict[str, Key]:
    """Return every dotted key in the order of schema.py. N stands for the index of a list item."""
    return dict(_rows("Config", ""))


@functools.cache
def section_classes() -> dict[str, str]:
    """Return section name -> name of its class."""
    names = {section: str(name).removesuffix(" | None") for section, name in Config.__annotations__.items()}
    return {section: name.removeprefix("tuple[").removesuffix(", ...]") for section, name in names.items()}


@functools.cache
def _classes() -> dict[str, JsonSchema]:
    """Return class -> its schema, whose descriptions are the docstring and the strings under the fields."""
    schema = adapter().json_schema(ref_template="{model}")
    return {**schema["$defs"], "Config": schema}


def _rows(name: str, prefix: str) -> Iterator[tuple[str, Key]]:
    schema = _classes()[name]
    for field, prop in schema["properties"].items():
        parts = (prop, *prop.get("anyOf", ()))
        # A section may be a list or null; other such lists are of sources, whose keys are those of data.train.
        target = next(filter(None, map(_target, parts)), None) if not prefix else _target(prop)
        key = prefix + field
        if prefix:
            required = field in schema.get("required", ())
            is_path = any(part.get("format") == "path" for part in parts)
            yield key, Key(_kind(prop), prop["description"], required, prop.get("default"), is_path)
        if target:
            listed = any(part.get("type") == "array" for part in parts)
            yield from _rows(target, f"{key}.N." if listed else f"{key}.")


def _target(prop: JsonSchema) -> str | None:
    """Return the class that a property, its items or values, or its non-null alternative refers to."""
    parts = (prop, prop.get("items", {}), *prop.get("anyOf", ()), *prop.get("allOf", ()))
    for part in parts:
        if isinstance(part, dict) and "$ref" in part:
            return str(part["$ref"])
    return None


def _kind(prop: JsonSchema) -> str:
    if "anyOf" in prop:
        return " | ".join(_kind(part) for part in prop["anyOf"])
    if "enum" in prop or "const" in prop:
        return " | ".join(json.dumps(value).strip('"') for value in prop.get("enum") or [prop["const"]])
    # pydantic writes `gt` as exclusiveMinimum; only fractions show an upper bound, others have LARGEST.
    low = next((f" {sign} {prop[b]:g}" for b, sign in (("exclusiveMinimum", ">"), ("minimum", ">=")) if b in prop), "")
    if "minimum" in prop and "maximum" in prop and prop["type"] == "number":
        return f"number {prop['minimum']:g} to {prop['maximum']:g}"
    if prop.get("type") == "array":
        items = prop.get("items") if isinstance(prop.get("items"), dict) else (prop.get("prefixItems") or [{}])[0]
        return f"list of ({_kind(items or {})})"
    kind: str = prop.get("type", "object")
    words = {"integer": "int", "boolean": "true | false", "string": "text", "object": "mapping"}
    return words.get(kind, kind) + low


def row_of(keys: KeyPath) -> str:
    """Return the key of `key_table` for a place in a recipe."""
    return ".".join("N" if isinstance(key, int) else key for key in keys)


def shorten(value: object) -> str:
    """Format a value for a message, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def help_text(description: str, command: str) -> str:
    """Return the text of --help: every key with type, default and meaning, in 100 columns."""
    lines = [f"usage: {command} {USAGE}", "", typed(description.strip()), ""]
    lines += ["Values are YAML: optim.lr=2e-5 data.bucket_lengths=[128,256] train.epochs=null data.val.0.repeat=2"]
    for section, cls in section_classes().items():
        lines += ["", f"{section}: {_classes()[cls]['description']}"]
        for key, row in key_table().items():
            if key.split(".")[0] != section:
                continue
            default = "required" if row.required else f"default {shorten(row.default).strip(chr(34))}"
            head = f"  {key}  {row.kind}"
            room = 100 - len(default) - 3
            # Key, kind and default on one line where they fit in 100 columns; else the default has the next line.
            if len(head) <= room:
                lines += [f"{head:<{room}}  {default}"]
            else:
                lines += [*([head] if len(head) <= 100 else [f"  {key}", f"      {row.kind}"]), f"{default:>99}"]
            lines += textwrap.wrap(row.doc, 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def hints() -> dict[str, dict[str, str]]:
    """Return the tables of hints.yaml."""
    return texts("config/hints.yaml")


def own_names(name: str) -> tuple[str, ...]:
    """Return the keys that another trainer's name means, or that a section and a key joined by _ mean (`log_every`)."""
    for ours, theirs in hints()["other_names"].items():
        if name in theirs.split():
            return tuple(ours.split(", "))
    head, _, tail = name.partition("_")
    joined = f"{hints()['sections'].get(head, head)}.{tail}"
    return (joined,) if joined in key_table() else ()


def ending_in(name: str, *, in_adapters: bool = False) -> list[str]:
    """Return the keys that are this name, or whose last part is."""
    found = [key for key in key_table() if name in (key, key.rpartition(".")[2])]
    # Entries of `adapters` have the names of settings that all runs have.
    return found if in_adapters else [key for key in found if not key.startswith("adapters.")] or found


def instead_of(table: str, name: str) -> str | None:
    """Return what hints.yaml says to do instead of a name, such as a setting that sftkit has not."""
    return next((text for text, names in hints()[table].items() if name in names.split()), None)


def explain_error(error: ErrorDetails, keys: KeyPath) -> tuple[str, list[KeyPath]]:
    """Return what is wrong in words, and the keys that were probably meant."""
    kind = error["type"]
    context = error.get("ctx", {})
    got = shorten(error.get("input"))
    key = key_table().get(row_of(keys))
    if kind == "unexpected_keyword_argument":
        return _unknown(keys)
    if kind in ("missing", "missing_argument"):
        return (f"is required: {key.doc}" if key and not isinstance(keys[-1], int) else "has too few values"), []
    if instead := hints()["removed"].get(f"{row_of(keys)}={error['input']}"):
        return f"{got} was removed: {instead}", []
    null = bool(key and key.kind.endswith("| null"))
    if kind == "literal_error":
        allowed = [text or word.lower() for text, word in re.findall(r"'([^']*)'|(True|False)", context["expected"])]
        hint = did_you_mean(str(error["input"]), allowed)
        if row_of(keys[:-1]).endswith(".roles") and keys[-1] in allowed:
            hint = f" The name in your rows comes first: {{{error['input']}: {keys[-1]}}}"
        return f"{got} is not one of {', '.join(allowed + ['null'] * null)}.{hint}", []
    wanted = hints()["wanted"].get(kind)
    if wanted is None:
        return f"{error['msg']}, got {got}", []
    if kind.startswith(("greater", "less")):
        return f"must be {wanted} {next(iter(context.values()))}, not {got}", []
    return f"must be {wanted}{' or null' * null}, not {got}{_in_brackets(error, keys)}", []


def _in_brackets(error: ErrorDetails, keys: KeyPath) -> str:
    """Return how to write a single value, or several with commas, as the list that is wanted; empty where it is none,
    or its items are mappings; of an adapter, as what others switch on."""
    key = key_table().get(row_of(keys))
    value = error["input"]
    if keys == ("adapter",):
        method = f"{{method: {value}}}" if value in ("lora", "dora") else "{}"
        return f': write adapter: {method} in a recipe, "adapter={method}" on the command line'
    if row_of(keys) in ("data.train.N", "data.val.N") and isinstance(value, str):
        return f": write {{path: {value}}}"
    if keys == ("train", "resume") and value is True:
        return ": auto resumes from the newest checkpoint"
    if keys in (("data", "train"), ("data", "val")) and isinstance(value, str):
        return f": write [{{path: {value}}}]"
    if row_of(keys) in ("data.train.N.path", "data.val.N.path") and isinstance(value, list):
        return ": write an entry {path: ...} for each, or path: FOLDER with files: [...]"
    if error["type"] != "tuple_type" or key is None or "mapping" in key.kind or isinstance(value, dict) or not value:
        return ""
    listed = f"[{value}]"
    return f': write {keys[-1]}: {listed} in a recipe, "{dotted(keys)}={listed}" on the command line'


def explain_dashes(word: str) -> tuple[str, list[KeyPath]]:
    """Return what to write instead of `--name=value`, and the keys that were probably meant."""
    name, _, value = word.partition("=")
    keys = keys_of(name.lstrip("-").replace("-", "_"))
    known = row_of(keys) in key_table() or row_of(keys) in section_classes()
    text, meant = ("", [keys]) if known else _unknown(keys)
    if not meant:
        return f"{name}: no such option. Settings have no dashes, and without them it {text}", meant
    settings = " or ".join(f'"{dotted(key)}={value or "..."}"' for key in meant)
    remark = hints()["takes"].get(dotted(meant[0]))
    return f"{name}: no such option. Settings have no dashes: {settings}{f' ({remark})' if remark else ''}", meant


def _unknown(keys: KeyPath) -> tuple[str, list[KeyPath]]:
    """Return the message about an unknown key, and the keys that were probably meant."""
    name = str(keys[-1])
    parent = row_of(keys[:-1])
    prefix = f"{parent}." if parent else ""
    inside = [key.removeprefix(prefix) for key in key_table() if key.startswith(prefix)]
    level = [key for key in inside if "." not in key] or list(section_classes())
    elsewhere = ending_in(name, in_adapters=parent.startswith("adapters"))
    if row_of(keys) in key_table() or name in key_table():
        return f"a dotted key works on the command line only: nest it here as {name.replace('.', ': {')}: ...", []
    if instead := hints()["removed"].get(row_of(keys)):
        return f"was removed: {instead}", []
    # Of the items of lists only sources have settings of other trainers.
    of_source = parent.endswith(("data.train.N", "data.val.N", ".data.N", ".sources.N"))
    names = hints()["of_sources"].items() if of_source else ()
    others: Sequence[str] = [f"{prefix}{key}" for key, theirs in names if name in theirs.split()]
    if (len(keys) <= 2 or of_source) and not others:
        in_source = instead_of("no_key", f"data.train.N.{name}") if of_source else None
        if name not in section_classes() and (instead := in_source or instead_of("no_key", name)):
            return f"is no setting of sftkit: {instead}", []
        others = own_names(name) if len(keys) <= 2 else ()
    # Candidates, best first: the key that other trainers' name means, the same name elsewhere, a similar name here, a
    # similar name anywhere.
    siblings = [prefix + near for near in difflib.get_close_matches(name, level, n=1)]
    section = [name] if name in section_classes() else []
    near_names = difflib.get_close_matches(name, {key.rpartition(".")[2] for key in key_table()}, n=1, cutoff=0.75)
    distant = [key for key in key_table() if key.rpartition(".")[2] in near_names]
    meant = [_indexed(key, keys) for key in others or elsewhere or siblings or section or distant]
    if meant:
        quoted = " or ".join(f'"{key}"' for key in meant)
        remark = hints()["takes"].get(others[0]) if len(others) == 1 else None
        takes = f" ({remark})" if remark else ""
        return f"is not a known key. Did you mean {quoted}{takes}?", [keys_of(key) for key in meant]
    return f"is not a known key. Known here: {', '.join(level)}", []


def _indexed(key: str, keys: KeyPath) -> str:
    """Return a key of the table with its N filled in: from `keys` where both are in the same list, else as 0."""
    parts = key.split(".")
    same = [len(keys) > i and row_of(keys[: i + 1]).split(".") == parts[: i + 1] for i in range(len(parts))]
    return ".".join(str(keys[i]) if same[i] else "0" if part == "N" else part for i, part in enumerate(parts))
