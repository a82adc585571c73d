"""What stands around the code: workflows, the forms of issues, the version, the changelog."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import sftkit
from sftkit.config.commands import SHIPPED

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
WITH_OPTIONS = ("dropdown", "checkboxes")


def commands(workflow: Path) -> list[str]:
    """What the jobs of a workflow run."""
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_targets_and_files_that_are_there(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    found = commands(workflow)
    assert found
    for command in found:
        assert set(re.findall(r"\bmake ([a-z]+)", command)) <= targets
        assert all((ROOT / file).exists() for file in re.findall(r"\bbash (\S+)", command))


def test_the_tests_that_take_minutes_run_every_night() -> None:
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert yaml.safe_load(text)[True]["schedule"][0]["cron"].split()[2:] == ["*", "*", "*"]  # YAML reads `on` as true
    assert 'make test ARGS="-m slow"' in commands(ROOT / ".github" / "workflows" / "nightly.yml")


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_a_form_of_an_issue_has_what_github_asks_for(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert content["name"]
    assert content["description"]
    ids = [field["id"] for field in content["body"]]
    assert len(set(ids)) == len(ids) > 0
    for field in content["body"]:
        assert field["type"] in ("textarea", "input", *WITH_OPTIONS)
        assert field["attributes"]["label"]
        assert bool(field["attributes"].get("options")) == (field["type"] in WITH_OPTIONS)
        assert set(field) <= {"type", "id", "attributes", "validations"}


def test_the_version_stands_in_one_place_and_the_changelog_has_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    built = subprocess.run([sys.executable, "-m", "hatchling", "version"], cwd=ROOT, capture_output=True, text=True)
    assert built.stdout.strip() == sftkit.__version__
    assert re.search(rf"^## {re.escape(sftkit.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_recipes_and_plans_name_files_of_the_package_that_are_there() -> None:
    """A file that has moved would be missed on the machine that a recipe is for, which no test has."""
    texts = {path: path.read_text() for folder in ("benchmarks", "recipes") for path in (ROOT / folder).rglob("*.yaml")}
    recorded = [path for path in texts if path.parent.name in ("raw", "results")]  # of runs of then
    named = {
        (str(path.relative_to(ROOT)), file)
        for path, text in texts.items()
        if path not in recorded
        for file in re.findall(r"\bsrc/sftkit/[\w/.-]+", text)
    }
    assert any(file.endswith("chatml.jinja") for _, file in named)
    assert {(path, file) for path, file in named if not (ROOT / file).exists()} == set()


def test_the_image_copies_what_the_commands_need_and_runs_a_target() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert all((ROOT / name).exists() for name in copied)
    assert {*SHIPPED, "src", "labs", "pyproject.toml", "constraints.txt", "Makefile"} <= {*copied}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for name in copied if name != "src/sftkit/__init__.py"} == kept
    assert set(re.findall(r"\bmake ([a-z]+)", "\n".join(lines))) | {"sft"} <= targets
    assert 'CMD ["make", "sft"]' in lines


def test_the_notebook_runs_targets_that_are_there() -> None:
    notebook = json.loads((ROOT / "docs" / "first_look.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {word for cell in cells for word in re.findall(r"make ([a-z]+)", cell)}
    assert {"chat", "doctor"} <= called <= targets
    assert "!make {STAGES}" in cells
    assert set(re.findall(r'"([a-z]+)"', cells[0])) == {"smoke", "sft"} <= targets
