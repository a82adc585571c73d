"""Every key of a recipe, dotted, with its type, default and meaning from schema.py; and --help."""

from __future__ import annotations

import dataclasses
import functools
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from sftkit.config.commands import typed
from sftkit.config.schema import Config
from sftkit.config.yaml_text import KeyPath, Plain

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
    """Return every dotted key in the order of schema.py. N stands for the index of a list item, PATH for a key of a
    mapping of modules."""
    return dict(_rows("Config", ""))


@functools.cache
def section_classes() -> dict[str, str]:
    """Return section name -> name of its class."""
    return {section: str(name) for section, name in Config.__annotations__.items()}


@functools.cache
def _classes() -> dict[str, JsonSchema]:
    """Return class -> its schema, whose descriptions are the docstring and the strings under the fields."""
    schema = adapter().json_schema()
    return {**schema["$defs"], "Config": schema}


def _rows(name: str, prefix: str) -> Iterator[tuple[str, Key]]:
    schema = _classes()[name]
    for field, prop in schema["properties"].items():
        target, parts = _target(prop), (prop, *prop.get("anyOf", ()))
        key = prefix + field
        if prefix:
            required = field in schema.get("required", ())
            is_path = any(part.get("format") == "path" for part in parts)
            yield key, Key(_kind(prop), prop["description"], required, prop.get("default"), is_path)
        if target:
            named = any("additionalProperties" in part for part in parts)
            inner = f"{key}.N." if prop.get("type") == "array" else f"{key}.PATH." if named else f"{key}."
            yield from _rows(target, inner)


def _target(prop: JsonSchema) -> str | None:
    """Return the class that a property, its items or values, or its non-null alternative refers to."""
    parts = (prop, prop.get("items", {}), *prop.get("anyOf", ()), *prop.get("allOf", ()))
    for part in (*parts, *(part.get("additionalProperties") for part in parts if isinstance(part, dict))):
        if isinstance(part, dict) and "$ref" in part:
            reference: str = part["$ref"]
            return reference.rpartition("/")[2]
    return None


def _kind(prop: JsonSchema) -> str:
    if "anyOf" in prop:
        return " | ".join(_kind(part) for part in prop["anyOf"])
    if "enum" in prop or "const" in prop:
        return " | ".join(json.dumps(value).strip('"') for value in prop.get("enum") or [prop["const"]])
    # pydantic writes `gt` as exclusiveMinimum; an upper bound is told of fractions alone, others have LARGEST.
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
    parts: list[str] = []
    for key in keys:
        named = f"{'.'.join(parts)}.PATH"
        parts.append("N" if isinstance(key, int) else "PATH" if named in _mappings() else key)
    return ".".join(parts)


@functools.cache
def _mappings() -> frozenset[str]:
    """Return `key.PATH` of every mapping whose values are settings."""
    return frozenset(key.rpartition(".")[0] for key in key_table() if key.rpartition(".")[0].endswith(".PATH"))


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
