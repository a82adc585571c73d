"""Who may import whom: the rooms of docs/engineering/architecture.md, one way and without a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "sftkit"
LABS = ROOT / "labs"

ROOMS = {
    "config": (),
    "rundir": ("config",),
    "runtime": ("config", "rundir"),
    "data": ("config", "rundir", "runtime"),
    "ops": ("config", "rundir", "runtime", "data"),
    "models": ("config", "rundir", "runtime", "data", "ops"),
    "objectives": ("config", "data", "ops", "models"),
    "optim": ("config", "runtime", "ops", "models"),
    "reports": ("config", "rundir", "models"),
    "tracking": ("config", "rundir", "runtime", "data", "models", "objectives", "reports"),
    "parallel": ("config", "runtime", "data", "ops", "models", "objectives"),
    "compile": ("config", "rundir", "runtime", "data", "ops", "models"),
    "checkpoint": ("config", "rundir", "runtime", "data", "models", "optim"),
    "memory": ("config", "runtime", "data", "ops", "models", "optim", "parallel"),
    "generation": ("config", "rundir", "runtime", "data", "ops", "models", "parallel"),
    "engine": (
        *("config", "runtime", "data", "ops", "models", "objectives", "optim", "tracking", "parallel"),
        *("compile", "memory"),
    ),
    "graph": (
        *("config", "rundir", "runtime", "data", "ops", "models", "objectives", "optim"),
        *("parallel", "compile", "memory", "engine"),
    ),
    "evals": (*("config", "rundir", "runtime", "data", "ops", "models", "objectives", "parallel", "generation"),),
    "verify": (
        *("config", "rundir", "runtime", "data", "ops", "models", "objectives", "optim", "tracking", "parallel"),
        *("compile", "engine", "evals"),
    ),
    "preflight": ("config", "rundir", "runtime", "data", "models", "reports", "memory", "evals"),
    "train": (
        *("config", "rundir", "runtime", "data", "models", "objectives", "optim", "tracking"),
        *("compile", "checkpoint", "memory", "engine", "graph", "evals", "verify", "preflight", "reports"),
    ),
    "launch": ("config", "rundir", "runtime", "data", "models", "memory", "preflight"),
    "export": ("config", "rundir", "runtime", "models", "checkpoint", "reports"),
}
"Room -> the rooms that it may import, each of which stands above it; `errors` is everybody's."

WHOLE_RECIPE = {
    *("config", "rundir", "preflight", "train", "launch"),
    *("compile/cache.py", "engine/blocks.py", "graph/engine.py", "memory/plan.py"),
}
"Rooms, and files of others, whose functions may take a whole Config: rule 8 of docs/engineering/architecture.md."

SHARED_NAMES = {
    "log": "the logger of a module",
    "main": "what a command starts",
    "T": "a type variable",
    "question_texts": "questions and answers that data.decontaminate compares, of each file of tasks",
    "build": "what a file of an optimizer or a task makes",
    "parse": "flags, YAML, rows: the module says of what",
    "tokenize": "of conversations and of texts, one of which a stage binds",
    **dict.fromkeys(("STOP", "MAX_NEW_TOKENS"), "what tasks say of themselves"),
    "BLOCK": "elements that a Triton kernel processes at a time, named as its argument is",
}
"Public name that several modules own -> why (docs/engineering/glossary.md, Names told apart)."

TORCH_FREE = (
    *(
        "config",
        "launch",
        "reports",
        "models/files.py",
        "models/adapter_files.py",
        "models/trained.py",
        "generation/repl.py",
        "preflight/inputs.py",
        "export/push.py",
        "evals/flags.py",
    ),
    *("evals/tasks", "memory/estimate.py", "data/types.py", "data/demo", "data/reading"),
    *("data/hygiene.py", "runtime/hub.py"),
    *("rundir/names.py", "rundir/files.py", "rundir/lock.py", "rundir/status.py", "rundir/changes.py"),
    *("runtime/launcher.py", "runtime/script.py", "runtime/signals.py"),
)
"Rooms and modules that are read before, or without, torch."
TORCH_FREE_LABS = ("jobs.py", "tables.py", "bench/run.py", "validate", "explain/run.py", "patterns/run.py")
"""Modules of the labs that are."""


@cache
def imported(path: Path, top_level: bool = False) -> set[str]:
    """Modules imported anywhere in a file, TYPE_CHECKING and functions included, or only at its top level."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def rooms_of(path: Path) -> set[str]:
    """Rooms that a file imports from."""
    names = (name.split(".") for name in imported(path))
    return {name[1] for name in names if name[0] == "sftkit" and len(name) > 1} - {"errors", "__version__"}


def test_the_package_holds_rooms_only() -> None:
    loose = {path.name for path in SRC.iterdir() if path.name != "__pycache__"} - ROOMS.keys()
    assert loose == {"__init__.py", "__main__.py", "errors.py", "py.typed"}


def test_the_table_has_no_circle() -> None:
    above: set[str] = set()
    for room, allowed in ROOMS.items():
        assert set(allowed) <= above, f"{room} stands above {set(allowed) - above}"
        above.add(room)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room: str) -> None:
    found = {path: rooms_of(path) for path in sorted((SRC / room).rglob("*.py"))}
    assert found
    for path, rooms in found.items():
        bad = rooms - {room, *ROOMS[room]}
        assert not bad, f"{path.relative_to(SRC)} imports {sorted(bad)}"
    unused = set(ROOMS[room]) - set().union(*found.values())
    assert not unused, f"{room} no longer imports {sorted(unused)}: take them out of the table"


def test_the_sandbox_imports_the_standard_library_only_and_only_tasks_that_run_code_import_it() -> None:
    package = SRC.parent / "sftkit_sandbox"
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    for path in package.glob("*.py"):
        roots = {name.split(".")[0] for name in imported(path)}
        assert roots <= {*sys.stdlib_module_names, package.name}, path
    importing = {path for path in SRC.rglob("*.py") if any(name.startswith(package.name) for name in imported(path))}
    assert importing == {SRC / "evals" / "tasks" / "code.py"}


def test_training_without_tasks_loads_no_code_of_tasks() -> None:
    only_some_need = {f"sftkit.evals.{name}" for name in ("tasks", "scoring", "harness")}
    for name in ("suite", "results"):
        found = imported(SRC / "evals" / f"{name}.py", top_level=True)
        assert not {".".join(module.split(".")[:3]) for module in found} & only_some_need, name


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_belongs_in_it(room: str) -> None:
    assert ast.get_docstring(ast.parse((SRC / room / "__init__.py").read_text()))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_a_folder_of_tests(room: str) -> None:
    assert list((ROOT / "tests" / room).glob("test_*.py"))


def test_a_file_of_tests_has_a_name_of_its_own() -> None:
    # pytest imports files outside packages by their names alone: a second one of a name is a collection error.
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py")
    assert [name for name, found in names.items() if found > 1] == []


def owned(path: Path) -> set[str]:
    """Public names that a module defines at its top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_a_public_name_has_one_owner_unless_it_says_the_same_of_each() -> None:
    owners: dict[str, list[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        for name in owned(path):
            owners.setdefault(name, []).append(str(path.relative_to(SRC)))
    several = {name: found for name, found in owners.items() if len(found) > 1}
    assert {name: found for name, found in several.items() if name not in SHARED_NAMES} == {}
    assert SHARED_NAMES.keys() == several.keys(), "names that have one owner again: take them out of the table"


IMPORTS_IN_TURN = """
import importlib, sys

for module in sys.argv[1:]:
    importlib.import_module(module)
    if found := {"torch", "transformers", "accelerate", "datasets", "wandb"} & set(sys.modules):
        sys.exit(f"{module} loads {found}")
"""


def test_what_a_refused_recipe_touches_loads_no_torch() -> None:
    parts = [*((SRC.parent, SRC / part) for part in TORCH_FREE), *((ROOT, LABS / part) for part in TORCH_FREE_LABS)]
    modules = [
        ".".join(path.relative_to(above).with_suffix("").parts)
        for above, part in parts
        for path in ([part] if part.suffix else sorted(part.rglob("*.py")))
        if path.stem != "__main__"
    ]
    assert len(modules) > len(parts)
    done = subprocess.run([sys.executable, "-c", IMPORTS_IN_TURN, *modules], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_data_flows_one_way() -> None:
    parts = ["types", "demo", "reading", "store", "hygiene", "tokens", "batches"]
    assert {path.stem for path in (SRC / "data").iterdir()} - {"__init__", "__pycache__"} == set(parts)
    for index, part in enumerate(parts):
        folder = SRC / "data" / part
        files = sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
        found = {name.split(".")[2] for path in files for name in imported(path) if name.startswith("sftkit.data.")}
        assert found <= set(parts[: index + 1]), part


def test_a_function_takes_the_whole_recipe_only_where_all_of_its_settings_count() -> None:
    taking = set()
    for file in SRC.rglob("*.py"):
        arguments = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.arg)]
        if any(
            arg.annotation and ast.unparse(arg.annotation).split(" |")[0] in ("Config", "schema.Config")
            for arg in arguments
        ):
            path = file.relative_to(SRC)
            taking.add(path.parts[0] if path.parts[0] in WHOLE_RECIPE else path.as_posix())
    assert taking == WHOLE_RECIPE


def test_scripts_never_import_each_other() -> None:
    names = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    for path in (ROOT / "scripts").glob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & names


def test_scripts_are_tables_of_contents() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "scripts").glob("*.py")}
    assert max(lengths.values()) <= 70, lengths


def test_wandb_is_never_imported_at_the_top_of_a_module() -> None:
    for path in [*SRC.rglob("*.py"), *LABS.rglob("*.py")]:
        assert "wandb" not in imported(path, top_level=True), path


def test_only_scripts_and_labs_import_the_loop() -> None:
    assert not [room for room, allowed in ROOMS.items() if "train" in allowed]


def test_nothing_that_trains_imports_the_labs() -> None:
    files = [
        *SRC.rglob("*.py"),
        *(path for path in (ROOT / "scripts").glob("*.py") if path.name != "validate_compile.py"),
    ]
    assert not [path for path in files if any(name.split(".")[0] == "labs" for name in imported(path))]


@pytest.mark.parametrize("room", ["compile", "memory", "parallel", "ops", "engine/step.py", "engine/blocks.py"])
def test_the_loop_does_not_know_how_a_step_is_computed(room: str) -> None:
    module = f"sftkit.{room.removesuffix('.py').replace('/', '.')}"
    assert not [name for name in imported(SRC / "train" / "loop.py") if name.startswith(module)]
