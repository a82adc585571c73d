"""The summary at the end of the chain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sftkit.errors import ConfigError
from sftkit.launch.chain import read_stages, summary, was_stopped
from sftkit.rundir.names import FINAL, RESULTS


def trained_runs(folder: Path, before: float, low: float) -> dict[str, Path]:
    """What three stages and the evaluation after them have left."""
    runs = {stage: folder / stage for stage in ("base", "mid", "sft")}
    for run_dir in runs.values():
        (run_dir / "step-000002").mkdir(parents=True)
        (run_dir / "step-000002/config.json").write_text("{}")
        values = {
            "step": 2, "tokens": 3000, "train_seconds": 4.0, "warm_up_seconds": 5.0, "samples": [], "evals": {},
            "metrics": {"train/loss": 4.5, "compile/graphs": 3.0, "compile/recompiles": 0.0},
            "evals_at_start": {"eval/families/acc": before}, "checkpoint": str(run_dir / "step-000002"),
        }  # fmt: skip
        (run_dir / "summary.json").write_text(json.dumps(values))
        rows = [{"name": "a", "ok": True}, {"name": "b", "ok": True}, {"name": "c", "ok": None}]
        (run_dir / "proof.json").write_text(json.dumps({"rows": rows}))
    rows = [{"name": "a", "ok": False}]
    (runs["mid"] / "proof.json").write_text(json.dumps({"rows": rows}))
    results = {"examples": 48, "value": low + 0.05, "low": low, "high": low + 0.1, "metrics": {}}
    (runs["sft"] / FINAL).mkdir(parents=True)
    (runs["sft"] / FINAL / RESULTS).write_text(json.dumps([results]))
    return runs


def test_the_summary_counts_the_checks_of_each_stage_and_names_the_report(tmp_path: Path) -> None:
    text = summary(trained_runs(tmp_path, before=0.1, low=0.7), 60.0)
    (line,) = [line.split() for line in text.splitlines() if "checks passed / failed" in line]
    assert line[4:] == ["2", "/", "0", "0", "/", "1", "2", "/", "0"]
    (line,) = [line.split() for line in text.splitlines() if "checks not made" in line]
    assert line[3:] == ["1", "0", "1"]
    assert f"{tmp_path}/sft/report.html\n" in text
    others = [line for line in text.splitlines() if str(tmp_path) not in line]
    assert max(map(len, others)) < 80, "a terminal of 80 columns breaks no line but long paths"
    assert "recipes/default" not in text


def test_a_chain_whose_stages_would_replace_one_another_is_refused() -> None:
    message = r"^run\.dir=runs/mine: each stage of a chain has a directory of its own: .*recipes/smoke/mid\.yaml"
    with pytest.raises(ConfigError, match=message):
        read_stages(Path("recipes/smoke"), ["run.dir=runs/mine"])


def test_a_recipe_in_the_place_of_a_folder_is_told_with_its_folder() -> None:
    with pytest.raises(ConfigError, match=r"^recipes/smoke/base\.yaml: a recipe, .*: name recipes/smoke$"):
        read_stages(Path("recipes/smoke/base.yaml"), [])


def test_a_misspelt_folder_is_told_with_the_one_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match=f"no such folder. Did you mean {tmp_path}/mine\\? The chain takes one with"):
        read_stages(tmp_path / "mne", [])


@pytest.mark.parametrize(("before", "low", "told"), [(0.1, 0.05, True), (0.1, 0.7, False), (0.8, 0.7, True)])
def test_a_model_that_learned_nothing_is_not_told_as_one_that_did(
    before: float, low: float, told: bool, tmp_path: Path
) -> None:
    text = summary(trained_runs(tmp_path, before, low), 60.0)
    assert ("no more than before SFT" in text) == told
    assert ("scripts/run_chain.py recipes/default" in text) == told
    assert max(len(line) for line in text.splitlines() if "/" not in line) < 80


def test_a_stage_that_a_signal_has_ended_was_stopped_with_a_status_of_this_start_and_without_one(
    tmp_path: Path,
) -> None:
    assert was_stopped(tmp_path, earlier=None, code=143)  # before its first step, when nothing is written
    assert not was_stopped(tmp_path, earlier=None, code=1)
    (tmp_path / "run_status.json").write_text(json.dumps({"status": "preempted", "start_id": "second"}))
    assert was_stopped(tmp_path, earlier="first", code=1)
    assert not was_stopped(tmp_path, earlier="second", code=1), "an earlier start was stopped, not this one"


def test_the_readme_shows_every_line_of_the_table_as_it_is_printed(tmp_path: Path) -> None:
    text = summary(trained_runs(tmp_path, before=0.1, low=0.7), 60.0)
    table = text.partition("\n  held-out accuracy, mean")[0].splitlines()[2:]
    printed = [line[2:30].strip() for line in table if line]
    shown = (Path(__file__).parents[2] / "README.md").read_text().partition("ends with this summary")[2].split("```")[1]
    assert [line[2:30].strip() for line in shown.partition("\n\n")[0].splitlines()[2:]] == printed
