"""Who may import whom: the layers of docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "sftkit"
FORBIDDEN = {
    "config.py": ("torch", "transformers", "accelerate", "sftkit"),
    "recipe.py": ("torch", "transformers", "accelerate"),
    "launch.py": ("torch", "transformers"),
    "model_size.py": ("torch", "transformers", "accelerate"),
    "topology.py": ("torch", "transformers", "accelerate"),
    "chain.py": ("torch", "transformers", "accelerate"),
    "train.py": ("wandb", "sftkit.evals", "sftkit.data.sources"),
    "report": ("torch", "transformers", "accelerate", "wandb"),
    "validate/run.py": ("torch", "transformers", "accelerate"),
    "step.py": ("sftkit.train", "sftkit.evals", "sftkit.tracker"),
    "data": ("accelerate", "wandb", "sftkit.model", "sftkit.runtime", "sftkit.train", "sftkit.evals"),
}


def imported(path: Path, top_level: bool = False) -> set[str]:
    """Modules imported anywhere in a file, or only at its top level; relative names resolved."""
    tree = ast.parse(path.read_text())
    package = ["sftkit", *path.relative_to(SRC).parts[:-1]] if path.is_relative_to(SRC) else []
    names = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("part", FORBIDDEN)
def test_dependencies_point_one_way(part: str) -> None:
    files = [SRC / part] if part.endswith(".py") else sorted((SRC / part).glob("*.py"))
    assert files
    for file in files:
        bad = [n for n in imported(file) for f in FORBIDDEN[part] if n == f or n.startswith(f + ".")]
        assert not bad, f"{file.name} imports {bad}"


def test_scripts_never_import_each_other() -> None:
    names = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    for path in (ROOT / "scripts").glob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & names


def test_wandb_is_never_imported_at_the_top_of_a_module() -> None:
    for path in SRC.rglob("*.py"):
        assert "wandb" not in imported(path, top_level=True), path
