"""The plan of mutations fits the tree: each changes one line that is there, and names tests that are there."""

from __future__ import annotations

import ast
import runpy
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTATIONS = runpy.run_path(str(ROOT / "benchmarks/mutations/plan.py"))["MUTATIONS"]


def test_a_mutation_changes_one_text_of_its_file_and_leaves_it_python() -> None:
    for mutation in MUTATIONS:
        text = (ROOT / "src/sftkit" / mutation.file).read_text()
        assert text.count(mutation.old) == 1, f"{mutation.what}: {mutation.old!r} in {mutation.file}"
        ast.parse(text.replace(mutation.old, mutation.new))


def test_a_mutation_names_tests_that_are_there_and_has_a_name_of_its_own() -> None:
    missing = {name for m in MUTATIONS for name in m.tests.split() if not (ROOT / "tests" / name).exists()}
    assert not missing
    assert Counter(m.what for m in MUTATIONS).most_common(1)[0][1] == 1


def test_the_plan_has_sixty_mutations_of_most_rooms() -> None:
    rooms = {path.name for path in (ROOT / "src/sftkit").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert len(MUTATIONS) >= 60
    assert len({m.room for m in MUTATIONS} & rooms) >= len(rooms) - 2
