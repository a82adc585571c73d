"""Documents out of Python's standard library: real English and Python for base training.

Help topics, docstrings and short functions; files are parsed, never imported.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cache
from itertools import tee
from pathlib import Path

from sftkit.data.demo.split import Split, is_heldout_split, stable_hash

SKIPPED_FOLDERS = re.compile(
    r"tests?|idle_test|idlelib|(site|dist)-packages|lib2to3|turtledemo|ensurepip|encodings|pydoc_data|_pyrepl|config-.*"
)


LONGEST_WHOLE_FUNCTION = 30
"Lines; of a longer function only the signature and docstring are taken."


SHORTEST_DOCUMENT = 120
"Characters."


def docs(split: Split) -> Iterator[str]:
    """Yield documents of English and Python in a fixed order, without duplicates; every 50th (by hash) is held out."""
    heldout = is_heldout_split(split)
    return (text for text in copy(_all_docs()) if (stable_hash(text) % 50 == 0) == heldout)


@cache
def _all_docs() -> Iterator[str]:
    """Return an iterator over both splits. It is never advanced itself, so each copy begins at the first document; what
    one copy has read is kept for the others."""
    return tee(_read_docs(), 1)[0]


def _read_docs() -> Iterator[str]:
    """Yield every text once."""
    seen: set[str] = set()
    for text in _every_text():
        if text not in seen:
            seen.add(text)
            yield text


def _every_text() -> Iterator[str]:
    yield from (text.strip() for _, text in sorted(_help_topics().items()))
    # Sorted, as the order of a folder's files depends on the file system.
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not any(map(SKIPPED_FOLDERS.fullmatch, path.relative_to(root).parts)):
            yield from _documents_of_file(path)


def _help_topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return {}
    return topics


def _documents_of_file(path: Path) -> Iterator[str]:
    """Yield the module's docstring, then one document per documented top-level class or function."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            module = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    lines = source.split("\n")  # as ast counts them; splitlines would also split at form feeds
    chunks = [(ast.get_docstring(module) or "",), *(_chunks(node, lines) for node in module.body)]
    for text in map("\n\n".join, chunks):
        if len(text) >= SHORTEST_DOCUMENT:
            yield textwrap.dedent(text).strip()


def _chunks(node: ast.AST, lines: list[str]) -> Sequence[str]:
    """Return the source of a documented function, or of a class's head and its documented methods;
    nothing for anything else."""
    if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return ()
    own, is_class = [], isinstance(node, ast.ClassDef)
    if ast.get_docstring(node, clean=False) is not None:
        last_line = node.end_lineno or node.lineno
        if is_class or last_line - node.lineno >= LONGEST_WHOLE_FUNCTION:
            last_line = node.body[0].end_lineno or node.lineno
        own = ["\n".join(lines[node.lineno - 1 : last_line])]
    return own + [chunk for child in node.body if is_class for chunk in _chunks(child, lines)]
