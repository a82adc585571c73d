"""Read a recipe file and `key=value` words into a Config, with every problem in one report. No torch, so it is fast."""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from sftkit.config import keys as key_names
from sftkit.config import yaml
from sftkit.config.commands import expanded, running, shipped
from sftkit.config.rules import OfLaunch, Rule, Unusable, cross_check, run_can_be_written
from sftkit.config.schema import Config, TrainConfig, num_stages
from sftkit.config.terminal import Level, print_text, secret_in
from sftkit.config.topology import Topology, check_numbers, read_topology
from sftkit.config.yaml import COMMAND_LINE, KeyPath, Node, dotted, keys_of
from sftkit.errors import ConfigError, hint

MAX_PROBLEMS = 30
"The most problems that a report lists."


def load_config(description: str | None, more: Sequence[Rule | OfLaunch] = ()) -> Config:
    """Return the Config that this script's command line asks for, after checking that its run directory can be made.
    Prints all problems, those of the rules in `more` included, and exits with code 2 if there are any."""
    return read_command_line(description, [run_can_be_written, *more])


def read_command_line(
    description: str | None, more: Sequence[Rule | OfLaunch], topology: Callable[[TrainConfig], Topology] | None = None
) -> Config:
    """Return the Config of the command line, for a script that makes no run directory. `topology`: of the launch;
    None: as the environment says."""
    words = sys.argv[1:]
    if "--help" in words or "-h" in words:
        print_text(key_names.help_text(description or "", running()))
        sys.exit(0)
    settings = [word for word in words if word != "--print-config"]
    if "--print-config" in words:  # of a run that may be another machine's
        more = [rule for rule in more if not isinstance(rule, OfLaunch)]
    if not settings or "=" in settings[0] or settings[0].startswith("-"):
        fail(f"usage: {running()} {key_names.USAGE}\nThe first word must be a recipe file.")
    try:
        cfg, tree = _resolve(settings[0], settings[1:], topology, more)
    except ConfigError as error:
        fail(f"\nerror: {error}")
    for note in kept_settings(tree):
        _print(note)
    if "--print-config" in words:
        # Next to each value its origin: a file, the command line or the default.
        print_text(to_yaml(cfg, lambda keys: node.origin if (node := tree.find(keys)) else "default"), end="")
        sys.exit(0)
    return cfg


def read_config(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    world_size: int | Callable[[TrainConfig], Topology] | None = None,
    more: Sequence[Rule | OfLaunch] = (),
) -> Config:
    """Read a recipe with overrides, checked for `world_size` processes (None: the environment's WORLD_SIZE, else 1).

    Args:
        world_size: processes with rows of their own, or the topology of a launch, of which the recipe may decide a part
            (stages of a pipeline).

    Raises:
        ConfigError: all problems together, those that further rules find too.
    """
    if not isinstance(world_size, int):
        return _resolve(recipe, overrides, world_size, more)[0]
    return _resolve(recipe, overrides, lambda train: Topology(num_stages(train) or 1, world_size), more)[0]


def to_yaml(cfg: Config, comment: Callable[[KeyPath], str] | None = None) -> str:
    """Render the whole Config as YAML that read_config reads back to an equal Config, with a comment on each line."""
    return yaml.render_yaml(json.loads(json.dumps(dataclasses.asdict(cfg))), comment)  # tuples become lists


def fail(message: str) -> NoReturn:
    """Exit with code 2, printing the message once per machine."""
    _print(message, "error")
    sys.exit(2)


def _print(message: str, level: Level | None = None) -> None:
    if os.environ.get("LOCAL_RANK", "0").strip() == "0" or not os.environ["LOCAL_RANK"].strip().isdigit():
        print_text(message, error=True, level=level)


def kept_settings(tree: Node) -> list[str]:
    """Return a note for each source whose path comes from the command line while other settings of the source come from
    the recipe, where they may have been meant for the other path."""
    notes = []
    for keys, node in _walk(tree, ()):
        if keys[-1] != "path" or node.origin != COMMAND_LINE or not _is_item(keys):
            continue
        item = dotted(keys[:-1])
        source = tree.nearest(keys[:-1]).value
        assert isinstance(source, dict)
        kept = {name: own for name, own in source.items() if own.origin != COMMAND_LINE}
        if kept:
            settings = " and ".join(
                f"{name}: {key_names.shorten(own.plain())} of {own.origin}" for name, own in kept.items()
            )
            words = " ".join(f"{item}.{name}=..." for name in kept)
            notes.append(f"note: {item}.path is from the {COMMAND_LINE} and keeps {settings}; to change that: {words}")
    return notes


# ---- validation ----


def _resolve(
    recipe: str | Path,
    overrides: Sequence[str],
    topology: Callable[[TrainConfig], Topology] | None,
    more: Sequence[Rule | OfLaunch],
) -> tuple[Config, Node]:
    problems: list[str] = []
    # Limits first, on raw text: whatever comes later may be slow in its length.
    words: list[str] = []
    for word in overrides:
        # `--name value` is one setting.
        if words and words[-1].startswith("-") and "=" not in words[-1] + word and not word.startswith("-"):
            word = f"{words.pop()}={word}"
        words.append(word)
    if len(words) > len(words := [word for word in words if len(word) <= yaml.MAX_CHARACTERS]):
        long = f"a word of more than {yaml.MAX_CHARACTERS:,} characters"
        problems.append(f"{COMMAND_LINE}: {long}: put it into the recipe")
    if sum(map(len, words)) > yaml.MAX_RECIPE_BYTES:
        most = yaml.MAX_RECIPE_BYTES // 1024
        raise ConfigError(f"{COMMAND_LINE}: more than {most} KiB of words: put them into the recipe")
    _reject_secrets((word.partition("=")[0], word.partition("=")[2], COMMAND_LINE) for word in words)
    recipe = shipped(expanded(str(recipe)))
    tree = yaml.read_tree(Path(recipe), problems)
    if not tree.value and problems:
        raise _report(problems)  # no file: the settings that it lacks are no news
    dropped: set[KeyPath] = set()
    for word in words:
        if not word.startswith("-") or len(word.partition("=")[0]) > yaml.MAX_KEY_CHARACTERS:
            yaml.apply_override(tree, word, problems)
            continue
        text, meant = key_names.explain_dashes(word)
        problems.append(f"{COMMAND_LINE}: {text}")
        dropped.update(meant)
    _reject_secrets((dotted(keys), node.value, node.origin) for keys, node in _walk(tree, ()))
    # After the overrides, whose paths may begin with ~ too.
    _expand(tree, problems)
    assert isinstance(tree.value, dict)
    for section, kind in Config.__annotations__.items():
        # A section that is absent or empty gets its defaults, unless null is one of its values.
        if not str(kind).endswith(" | None") and (section not in tree.value or tree.value[section].value is None):
            tree.value[section] = Node({}, str(recipe))
    # Rules between settings run although values are wrong, so that one start shows all problems; those that ask for a
    # wrong value are skipped (Unusable).
    cfg = _validate(tree, str(recipe), dropped, problems)
    train = TrainConfig() if cfg is None else cfg.train
    stages = num_stages(train)
    try:
        if topology is None:
            check_numbers(os.environ)
            processes = read_topology(os.environ, int(os.environ.get("WORLD_SIZE", "1")), stages)
        else:
            processes = topology(train)
    except ConfigError as error:
        problems.append(str(error))
        processes = Topology(stages=stages or 1)
    for key, text in cross_check(functools.partial(_get, tree, dropped), processes, more):
        origin = tree.nearest(keys_of(key)).origin
        problems.append(f"{origin}: {key}: {text}" if not text.startswith(key) else f"{origin}: {text}")
    if problems or cfg is None:
        raise _report(problems)
    return cfg, tree


def _report(problems: list[str]) -> ConfigError:
    lines = list(dict.fromkeys(problems))
    more = [f"... and {len(lines) - MAX_PROBLEMS:,} more problems"] if len(lines) > MAX_PROBLEMS else []
    return ConfigError("\n".join(lines[:MAX_PROBLEMS] + more))


def _expand(tree: Node, problems: list[str]) -> None:
    """Expand ~ to the home directory in all settings that are paths."""
    for keys, node in _walk(tree, ()):
        row = key_names.row_of(keys).replace("model.train_tokenizer.sources", "data.train")
        key = key_names.key_table().get(row.replace("adapters.N.data", "data.train"))
        if key is not None and key.is_path and isinstance(node.value, str):
            try:
                node.value = expanded(node.value)
            except ConfigError as error:
                problems.append(f"{node.origin}: {dotted(keys)}: {error}")


def _reject_secrets(settings: Iterable[tuple[str, object, str]]) -> None:
    """Reject settings (key, value, origin) that look like secrets, without their value. This comes before all other
    problems, whose messages could quote the value."""
    problems = []
    for key, value, origin in settings:
        own = secret_in(key)
        if kind := own or (secret_in(value, key) if isinstance(value, str) else None):
            problems.append(f"{origin}: {'' if own else f'{key}: '}{hint('secret', kind=kind)}")
    if problems:
        raise _report(problems)


def _walk(node: Node, keys: KeyPath) -> Iterator[tuple[KeyPath, Node]]:
    """Yield (keys, node) of everything below a node, outer ones first."""
    for key, child in node.children():
        yield (*keys, key), child
        yield from _walk(child, (*keys, key))


def _remove(tree: Node, keys: KeyPath) -> KeyPath:
    """Remove a value from the tree, with the whole list if it is an item of one. Returns the keys that were removed."""
    # A list without one of its items would have others at their places, so it goes as a whole.
    for end in range(len(keys), 0, -1):
        parent = tree.nearest(keys[: end - 1]).value
        if isinstance(parent, dict):
            parent.pop(str(keys[end - 1]), None)
            return keys[:end]
    return keys


def _validate(tree: Node, recipe: str, dropped: set[KeyPath], problems: list[str]) -> Config | None:
    """Return the Config, or None with its problems appended. Keys without a usable value are added to `dropped`, so
    that no rule asks for them."""
    try:
        return key_names.adapter().validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    for i, e in enumerate(errors):
        keys = tuple(e["loc"])
        missing = e["type"] in ("missing", "missing_argument")
        if i >= MAX_PROBLEMS:  # only counted: finding the key that was meant takes time
            problems.append(dotted(keys))
            continue
        if missing and any(keys[: len(gone)] == gone for gone in dropped):
            continue  # reported when it was dropped
        origin = recipe if missing and not _is_item(keys) else tree.nearest(keys).origin
        text, meant = key_names.explain_error(e, keys)
        problems.append(f"{origin}: {dotted(keys)}: {text}")
        dropped.update(meant)
    # Backwards: removing an item of a list would shift the places of later items.
    for e in sorted(errors, key=lambda e: str(e["loc"]), reverse=True):
        gone = _remove(tree, tuple(e["loc"]))
        if e["type"] != "unexpected_keyword_argument":
            dropped.add(gone)
    return None


def _is_item(keys: KeyPath) -> bool:
    return any(isinstance(key, int) for key in keys)


def _get(tree: Node, dropped: set[KeyPath], key: str) -> Any:  # as rule.Get
    """Return the value of a dotted key, or its default; raises Unusable for a key that already has a problem."""
    keys = keys_of(key)
    for gone in dropped:
        if keys == gone[: len(keys)] or gone == keys[: len(gone)]:
            raise Unusable(dotted(gone))
    if (node := tree.find(keys)) is not None:
        return node.plain()
    known = key_names.key_table().get(key)
    return None if known is None else known.default  # None: an item that a list does not have
