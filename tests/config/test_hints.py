"""The texts of config/hints.yaml and the calls that fill them in belong together."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from string import Formatter

from sftkit.errors import texts

ROOT = Path(__file__).parents[2]


def test_every_text_of_a_problem_is_used_with_the_values_that_it_names() -> None:
    used: dict[str, set[str | None]] = {}
    for path in [*(ROOT / "src" / "sftkit").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            if not isinstance(call.func, ast.Name) or call.func.id not in ("hint", "config_error"):
                continue
            if not isinstance(call.args[0], ast.Constant):
                assert path.name == "errors.py", f"{path}:{call.lineno}"  # config_error itself
                continue
            used.setdefault(call.args[0].value, set()).update(word.arg for word in call.keywords)
    problems = texts("config/hints.yaml")["problems"]
    assert used.keys() == problems.keys()
    for name, text in problems.items():
        named = {re.split(r"[.\[]", word)[0] for _, word, _, _ in Formatter().parse(text) if word}
        # None: **words, whose names only the call itself knows
        assert used[name] - {None} <= named, name
        assert None in used[name] or named <= used[name], name
