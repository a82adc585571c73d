"""The package stays light to read: how much of its code is imports, and how much a training script loads when it starts."""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"

IMPORT_SHARE = 0.095
MODULES = 130
CODE_LINES = 14_910
PACKAGE_CODE_LINES = 36_500
"""32,050 before recurrent layers, attention sinks, quantized starts, chunks of positions, text models in larger models,
export to Megatron, smaller stores, faster tokenizing, isolation over the borders of chunks, a kernel of convolutions."""
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in (SRC / "sftkit").rglob("*.py"):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@cache
def imported(path: Path, *, inside_functions: bool) -> set[str]:
    """Modules and names that a file imports when it is loaded, or also later."""
    names: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            if isinstance(node, ast.FunctionDef | ast.Lambda) and not inside_functions:
                continue
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            todo.append(node)
    return names


def loaded_by(script: Path) -> set[str]:
    """Modules of the package that a script loads when it starts.

    What the package imports inside a function is what only some runs need, and is not counted.
    """
    seen: set[str] = set()
    todo = {*imported(script, inside_functions=True)}
    while todo:
        parts = todo.pop().split(".")
        for k in range(1, len(parts) + 1):
            module = ".".join(parts[:k])
            if module in modules() and module not in seen:
                seen.add(module)
                todo |= imported(modules()[module], inside_functions=False)
    return seen


def test_imports_are_a_small_part_of_the_code() -> None:
    lines = sum(
        node.end_lineno - node.lineno + 1
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom) and node.end_lineno is not None
    )
    total = sum(map(code_lines, modules().values()))
    assert lines <= IMPORT_SHARE * total, f"{lines} of {total} code lines are imports"


def test_a_training_script_loads_what_every_run_needs_and_no_more() -> None:
    for stage in ("base_train", "mid_train", "chat_sft"):
        loaded = loaded_by(ROOT / "scripts" / f"{stage}.py")
        lines = sum(code_lines(modules()[module]) for module in loaded)
        assert len(loaded) <= MODULES, f"{stage}.py loads {len(loaded)} modules"
        assert lines <= CODE_LINES, f"{stage}.py loads {lines} code lines"


def test_the_package_has_no_more_code_than_a_reader_can_walk_through() -> None:
    assert sum(map(code_lines, modules().values())) <= PACKAGE_CODE_LINES
