"""The names of a run directory: one module spells them, everybody else imports them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import sftkit.rundir.names as rundir
from sftkit.errors import ConfigError
from sftkit.rundir.files import archive, replace_shared, replace_text

ROOT = Path(__file__).parents[2]
HOME = ROOT / "src" / "sftkit" / "rundir" / "names.py"
WORDS = {rundir.ADAPTER_FOLDERS, rundir.EVALUATIONS, rundir.EVENT_FILES, rundir.TOKENIZER, "final", "optimizer"}
"Names of folders that are also words: sections of a recipe, keys of metrics, a tracker."
OTHERS = {
    "src/sftkit/config/rules.py": {"/|\\\\|^step-"},  # config stands above runtime; what train.resume may look like
    "labs/bench/run.py": {"results.json", "/results.json"},  # of a bench, not of a run
    "labs/cold_start.py": {"results.json"},
    "labs/families.py": {"results.json"},
    "labs/tables.py": {"results.json"},
    "labs/pages.py": {
        *("results.json", "patterns/results/results.json", "labs/patterns/README.md"),
        *(
            f"benchmarks/{name}/README.md"
            for name in ("lab_gpt2", "lab_layouts", "lab_captioning", "loader", "h200_decode", "h200_adapters")
        ),
    },
    "src/sftkit/runtime/hardware.py": {"labs/patterns/README.md"},  # a page of the docs
    "labs/bench/plan.py": {"recipe.yaml"},  # a temporary file
    "src/sftkit/data/reading/origin.py": {"README.md", "state.json"},  # of a dataset, not of a run
    "src/sftkit/data/store/writing.py": {".lock"},  # of a shard of tokenized data
    "labs/validate/run.py": {"validation.json"},  # of a comparison of runs
}
"Files that have a name of the same spelling for something else."


def names() -> set[str]:
    """What rundir calls files and folders; of paths the last part."""
    values = (value for key, value in vars(rundir).items() if key.isupper() and not key.startswith("_"))
    return {value.rpartition("/")[2] for value in values if isinstance(value, str)} - WORDS - {rundir.STEP_DIRS}


def spelled(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of string constants that end in a name, docstrings and messages, which have spaces, aside."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    ends = re.compile(rf"(?:^|[^\w])(?:{'|'.join(map(re.escape, sorted(names())))})$|step-\*?$|step-[*(\\/]")
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in documentation else None
        if isinstance(text, str) and not re.search(r"\s", text) and ends.search(text):
            yield node.lineno, text


def test_the_names_of_a_run_directory_are_known() -> None:
    assert {"config.yaml", "metrics.jsonl", "run_status.json", "LATEST", "training_state", "state.json"} <= names()


@pytest.mark.parametrize("room", ["src", "scripts", "labs"])
def test_no_other_module_spells_the_name_of_a_file_of_a_run_directory(room: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in (ROOT / room).rglob("*.py")
        if path != HOME
        for line, text in spelled(path)
        if text not in OTHERS.get(str(path.relative_to(ROOT)), ())
    }
    assert not found, "import the name from sftkit.rundir.names"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("run_dir / 'metrics.jsonl'", True),
        ("f'{run_dir}/evals/final/results.json'", True),
        ("run_dir / f'step-{step:06d}'", True),
        ("run_dir.glob('step-*/results.json')", True),
        ("run_dir / '.heartbeat'", True),
        ("def f():\n    'Write metrics.jsonl'\n    return f'{run_dir} has no metrics.jsonl'", False),
        ("metrics['compile/graphs']", False),
    ],
)
def test_what_spells_a_name_is_found_in_code_and_not_in_what_people_read(tmp_path, code: str, is_found: bool) -> None:
    (tmp_path / "x.py").write_text(code)
    assert bool(list(spelled(tmp_path / "x.py"))) == is_found


def test_every_name_says_what_the_file_holds() -> None:
    body = ast.parse(HOME.read_text()).body
    for name, after in pairwise(body):
        if isinstance(name, ast.Assign) and isinstance(name.targets[0], ast.Name) and name.targets[0].id.isupper():
            public = not name.targets[0].id.startswith("_")
            assert not public or (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)), name.targets[
                0
            ].id


def test_step_directories_are_found_in_order_and_strange_names_are_none(tmp_path: Path) -> None:
    for name in ("step-000010", "step-1000000", "step-000002", "step-2", ".step-000003.ab12.tmp", "step-000004.old-1"):
        (tmp_path / name).mkdir()
    found = rundir.step_dirs(tmp_path)
    assert [folder.name for folder in found] == ["step-000002", "step-000010", "step-1000000"]
    assert [rundir.step_number(folder) for folder in found] == [2, 10, 1_000_000]
    assert rundir.step_dir(tmp_path, 2) == found[0]
    assert [rundir.step_of(name) for name in ("step-000012", "step-7", "step-x", "final", "xstep-1")] == [
        12,
        7,
        *[None] * 3,
    ]
    unfinished = {path.name for pattern in rundir.UNFINISHED for path in tmp_path.glob(pattern)}
    assert unfinished == {rundir.being_written(tmp_path / "step-000003", "ab12").name}


def test_an_archived_directory_keeps_its_name_and_is_known_as_one(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    assert archive(tmp_path / "sft").name == "sft.old-1"
    assert rundir.is_archived(tmp_path / "sft.old-1" / rundir.METRICS_FILE)
    assert not rundir.is_archived(tmp_path / "sft" / rundir.METRICS_FILE)


@pytest.mark.parametrize("write", [replace_text, replace_shared])
def test_a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path: Path, write) -> None:
    for text in ("one", "zwölf"):
        write(tmp_path / "file.json", text)
    assert (tmp_path / "file.json").read_text(encoding="utf-8") == "zwölf"
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]


def test_a_run_that_is_not_there_names_the_setting_that_makes_it_and_no_other_recipe() -> None:
    with pytest.raises(ConfigError) as error:
        rundir.resolve("runs/nothing/here")
    assert str(error.value) == (
        "runs/nothing/here: no such folder. A run has not been made there yet: train the recipe whose run.dir is "
        "runs/nothing/here first, or name another model (in a recipe: model.path)"
    )
    with pytest.raises(ConfigError, match=r"^\./no/model: no such folder$"):
        rundir.resolve("./no/model")
