"""Paths of recipes and command lines: what ~ means, what a misspelt one may have meant, whether a run directory can be
made. No torch."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from itertools import islice
from pathlib import Path

from sftkit.config.terminal import visible
from sftkit.errors import ConfigError

MAX_NAME_BYTES = 240
"The most bytes in the name of a run directory. File systems allow 255, and earlier runs are kept as NAME.old-1."
MAX_PATH_BYTES = 3800
"The most bytes in its path. A path may have 4096, and the files of a checkpoint lie some levels below."

WILDCARD = re.compile(r"[*?]")
MAX_MATCHES = 1000
"The most matches of a path with wildcards, or files of a folder, that are looked at for a hint."


def expanded(path: str) -> str:
    """Return a path with ~ as the home directory that it means; anything else, hub ids and URLs too, as it is.

    Raises:
        ConfigError: it begins with ~ and means no home directory, or no file can have such a name.
    """
    if "\0" in path:
        raise ConfigError("a path cannot hold the character \\0")
    found = os.path.expanduser(path)
    if found.startswith("~"):
        name = path.partition("/")[0]
        raise ConfigError(
            f"{name}: no such user on this machine. Write the path in full, or ./{name} for a file of that name"
        )
    return found


def similar_paths(path: str) -> str:
    """Return a sentence that names existing paths like a missing one; empty if none is like it."""
    wanted = Path(path)
    if wanted.exists():
        return ""  # of another kind than was asked for
    if WILDCARD.search(path):
        return _not_expanded(wanted)
    try:
        # The first part that is missing is what was misspelt; what follows it is looked for below each candidate.
        folder = next((parent for parent in wanted.parents if parent.is_dir()), Path("."))
        there = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return ""
    missing, *rest = wanted.parts[len(folder.parts) :] or ("",)
    close = difflib.get_close_matches(_stem(missing), map(_stem, there), n=3, cutoff=0.6)
    near = [folder / name for name in there if _stem(name) in close][:3]
    found = [str(path.joinpath(*rest) if path.joinpath(*rest).exists() else path) for path in near]
    return f". Did you mean {' or '.join(found)}?" if found else ""


def _not_expanded(pattern: Path) -> str:
    """Return a sentence for a path with wildcards: what they match, else what is in the folder."""
    folder = next(above for above in pattern.parents if above.is_dir() and not WILDCARD.search(str(above)))
    try:
        matches = sorted(islice(folder.glob(str(pattern.relative_to(folder))), MAX_MATCHES))
        there = matches or sorted(islice(folder.iterdir(), MAX_MATCHES))
    except (OSError, ValueError):
        matches = there = []
    listed = ", ".join(map(str, there[:3])) + (" and others" if len(there) > 3 else "")
    if matches:
        return f". Wildcards are not expanded: name a folder, such as {folder}, or a file; {listed} would match."
    instead = f"; in {folder} there are {listed}" if there else ""
    return f". Wildcards are not expanded, and nothing would match{instead}."


def _stem(name: str) -> str:
    """Return a name without its suffixes: a common suffix alone does not make two names alike."""
    return name.partition(".")[0] or name


def unusable(run_dir: str) -> str | None:
    """Return why no run can be written to a directory, and what to do; None if one can. Leaves nothing there."""
    # A link is followed, since its target is what is written to; without one `..` is only tidied up.
    path = os.path.realpath(run_dir) if os.path.islink(run_dir) else os.path.abspath(run_dir)
    sizes = [len(os.fsencode(name)) for name in path.split(os.sep)]
    if visible(run_dir) != run_dir or "\n" in run_dir or "\t" in run_dir:
        return f"{run_dir!r} has characters that no terminal shows: take letters, digits, dots and dashes"
    if max(sizes) > MAX_NAME_BYTES or sum(sizes) + len(sizes) > MAX_PATH_BYTES:
        return (
            f"{_short(run_dir)} is too long, with {max(sizes)} bytes in a name and {sum(sizes) + len(sizes)} in the "
            f"path: take {MAX_NAME_BYTES} and {MAX_PATH_BYTES} at most"
        )
    parent = path
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        return f"{parent} is not a folder, so {run_dir} cannot be one: take another name, or move that file away"
    try:
        # Tried, not asked: os.access says nothing of a full disk or a read-only mount, and root may do everything.
        with tempfile.TemporaryFile(dir=parent):
            return None
    except OSError as error:
        return f"{run_dir}: nothing can be written in {parent} ({error.strerror}): name a folder that you may write to"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}"
