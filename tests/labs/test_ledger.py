"""The ledger: what passed is kept line by line, and a later validation is held to it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from made_validation import RECIPE, result_of, trio

from labs.validate.run import judged
from labs.validate.verdicts import (
    CRITERION,
    check_portable,
    html,
    markdown_page,
    open_ledger,
    read_ledger,
    record_validation,
    start_of,
)
from sftkit.errors import ConfigError

HERE = {
    "device": "NVIDIA H200",
    "git": "0123456789ab",
    "packages": {"torch": "2.13.0", "transformers": "5.17.0", "accelerate": "1.15.0", "datasets": "5.2.0"},
    "platform": "Linux",
}


def result(
    started: str = "2026-11-21 10:00:00",
    environment: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    error: str | None = None,
    **compiled: Any,
) -> dict[str, Any]:
    """A validation before it is judged; `compiled`: what is other in the compiled run."""
    good = trio()
    where = good.compiled.environment | HERE | (environment or {})
    found = result_of(replace(good, compiled=replace(good.compiled, environment=where, **compiled)), error)
    found["started"] = started
    found["plan"] = found["plan"] | (plan or {})
    return found


def verdict(result: dict[str, Any], ledger: Path) -> dict[str, Any]:
    """The row of the ledger."""
    return next(
        v for v in judged(result, open_ledger(ledger, records=False))["verdicts"] if v["criterion"] == CRITERION
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A ledger with one validation of `result()`."""
    path = tmp_path / "ledger.jsonl"
    assert record_validation(judged(result()), path) == f"recorded: 1 in {path}"
    return path


LATER = "2026-11-22 10:00:00"


def test_an_entry_says_what_was_run_where_and_what_came_out(ledger: Path) -> None:
    ((number, entry),) = read_ledger(ledger)
    assert number == 1
    assert entry == {
        "date": "2026-11-21 10:00:00",
        "commit": "0123456789ab",
        "dirty": False,
        "hardware": "NVIDIA H200",
        "versions": {"torch": "2.13.0", "transformers": "5.17.0", "accelerate": "1.15.0"},
        "recipe": RECIPE,
        "script": "scripts/base_train.py",
        "overrides": [],
        "start": None,
        "layout": "packed",
        "processes": 1,
        "steps": 30,
        "seed": 7,
        "kind": "compiled",
        "tokens_per_second": {"eager": 122.5, "compiled": 172.5},
        "ratio": 172.5 / 122.5,
        "last_loss": 4.0 * (1 + 1e-4),
        "val": {"val/loss": 4.0 * (1 + 1e-4)},
        "tasks": {"piqa": {"metric": "acc", "value": 0.5, "low": 0.4, "high": 0.6}},
    }


def test_uncommitted_changes_and_an_unknown_commit_are_told_apart(ledger: Path) -> None:
    record_validation(judged(result(LATER, {"git": "0123456789ab-dirty"})), ledger)
    record_validation(judged(result("2026-11-23 10:00:00", {"git": None})), ledger)
    found = [(entry["commit"], entry["dirty"]) for _, entry in read_ledger(ledger)]
    assert found == [("0123456789ab", False), ("0123456789ab", True), (None, None)]


def test_a_later_validation_that_evaluates_the_same_passes_and_names_what_it_was_held_to(ledger: Path) -> None:
    row = verdict(result(LATER), ledger)
    assert row["ok"] is True
    assert row["found"].startswith("line 1, 2026-11-21 10:00:00, commit 0123456789ab: val/loss 4.0004 against 4.0004")
    assert "piqa (acc) 0.5000 against 0.5000" in row["found"]


@pytest.mark.parametrize(
    ("evals", "tasks", "words"),
    [
        # Two seeds are 0.04 apart, which is more than 0.5 % of 4.0004.
        ({"val/loss": 4.0396}, {}, None),
        ({"val/loss": 4.0412}, {}, "val/loss 4.0412 against 4.0004, allowed 3.9604 to 4.0404"),
        ({"val/loss": 3.9}, {}, "val/loss 3.9000"),
        ({}, {"value": 0.59}, None),
        ({}, {"value": 0.39}, "piqa (acc) 0.3900 against 0.5000, allowed 0.4000 to 0.6000"),
        ({}, {"metric": "acc_norm"}, "piqa (acc) is missing"),
        ({"val/loss": None}, {}, "val/loss is missing"),
    ],
)
def test_losses_are_held_to_the_seeds_and_tasks_to_the_interval(
    ledger: Path, evals: dict[str, Any], tasks: dict[str, Any], words: str | None
) -> None:
    run = trio().compiled
    row = verdict(result(LATER, evals=run.evals | evals, results=[run.results[0] | tasks]), ledger)
    assert row["ok"] is (words is None)
    assert words is None or words in row["found"]


@pytest.mark.parametrize(
    "change",
    [
        {"environment": {"device": "NVIDIA A100"}},
        {"plan": {"recipe": "recipes/smoke/mid.yaml"}},
        {"plan": {"script": "scripts/mid_train.py"}},
        {"plan": {"overrides": ("optim.lr=1e-3",)}},
        {"plan": {"steps": 35}},
    ],
)
def test_without_an_entry_of_its_own_kind_a_validation_is_not_checked_and_says_so(
    ledger: Path, change: dict[str, Any]
) -> None:
    found = judged(result(LATER, **change), open_ledger(ledger, records=False))
    row = next(v for v in found["verdicts"] if v["criterion"] == CRITERION)
    assert row["ok"] is None
    assert "has no other validation with the same recipe, script" in row["found"]
    assert found["passed"] is True
    assert "PASS: 13 of 13 criteria passed, 1 not checked" in markdown_page(found)
    assert f"| not checked | {CRITERION} |" in markdown_page(found)
    assert "</svg>not checked</span>" in html(found)


def test_a_base_that_was_trained_again_is_another_start(ledger: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    assert start_of(str(base)) is None, "no checkpoint of a run"
    starts = []
    for content in ("one", "one", "two"):
        (base / "manifest.json").write_text(content)
        starts.append(start_of(str(base)))
    assert starts[0] == starts[1] != starts[2]
    found = result(LATER) | {"start": starts[0]}
    assert verdict(found, ledger)["ok"] is None
    record_validation(judged(found), ledger)
    later = {"started": "2026-11-23 10:00:00"}
    assert verdict(found | later, ledger)["ok"] is True
    assert verdict(found | later | {"start": starts[2]}, ledger)["ok"] is None
    assert start_of(None) is None


def test_runs_are_not_compared_with_themselves_nor_recorded_twice(ledger: Path) -> None:
    assert verdict(result(), ledger)["ok"] is None
    assert record_validation(judged(result()), ledger) == f"--record: {ledger} has these runs already"
    assert len(read_ledger(ledger)) == 1


def test_the_newest_entry_counts_wherever_it_stands_in_the_file(ledger: Path) -> None:
    ((_, entry),) = read_ledger(ledger)
    newest = entry | {"date": "2026-11-21 12:00:00", "val": {"val/loss": 3.0}}
    oldest = entry | {"date": "2026-11-20 12:00:00", "val": {"val/loss": 4.0}}
    ledger.write_text("".join(json.dumps(each) + "\n" for each in (entry, newest, oldest)))
    row = verdict(result(LATER), ledger)
    assert row["ok"] is False
    assert row["found"].startswith("line 2, 2026-11-21 12:00:00")


def test_the_order_of_settings_makes_no_other_key_and_the_last_of_two_counts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    record_validation(judged(result(plan={"overrides": ("optim.lr=1", "a.b=2", "optim.lr=3")})), path)
    assert read_ledger(path)[0][1]["overrides"] == ["a.b=2", "optim.lr=3"]
    assert verdict(result(LATER, plan={"overrides": ("optim.lr=3", "a.b=2")}), path)["ok"] is True


def test_runs_of_several_commits_are_not_recorded(ledger: Path) -> None:
    found, before = result(LATER), ledger.read_text()
    found["runs"][0]["measured"]["environment"] = HERE | {"git": "ba9876543210", "world_size": 1}
    with pytest.raises(ConfigError, match="several commits, ba9876543210, 0123456789ab"):
        record_validation(judged(found), ledger)
    assert ledger.read_text() == before


def test_any_cpu_is_one_hardware(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    record_validation(judged(result(environment={"device": "CPU (2 cores)"})), path)
    assert read_ledger(path)[0][1]["hardware"] == "cpu"
    assert verdict(result(LATER, {"device": "CPU (64 cores)"}), path)["ok"] is True


def test_a_run_that_failed_fails_the_row_too(ledger: Path) -> None:
    row = verdict(result(LATER, error="out of memory"), ledger)
    assert (row["ok"], row["found"]) == (False, "not measured: a run failed")


def test_what_failed_is_not_recorded(ledger: Path) -> None:
    before = ledger.read_text()
    said = record_validation(judged(result(LATER, summary={"compiled": True, "warm_up_seconds": 61.0})), ledger)
    assert "nothing was recorded" in said
    assert "first compile (packed, 1)" in said
    worse = judged(
        result(LATER, results=[trio().compiled.results[0] | {"value": 0.3}]), open_ledger(ledger, records=True)
    )
    assert CRITERION in record_validation(worse, ledger)
    assert ledger.read_text() == before


def test_appending_leaves_every_line_as_it_was_also_one_without_an_end(ledger: Path) -> None:
    before = ledger.read_text().rstrip("\n")
    ledger.write_text(before)
    record_validation(judged(result(LATER)), ledger)
    assert ledger.read_text().startswith(before + "\n{")
    assert [number for number, _ in read_ledger(ledger)] == [1, 2]
    assert [path.name for path in ledger.parent.iterdir()] == [ledger.name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entry: "{", "not JSON"),
        (lambda entry: "[1]", "not a JSON object"),
        (lambda entry: json.dumps({k: v for k, v in entry.items() if k != "steps"}), "it lacks steps"),
        (lambda entry: json.dumps(entry | {"speed": 1}), "unknown: speed"),
        (lambda entry: json.dumps(entry | {"steps": "30"}), 'steps must be int, not "30"'),
        (lambda entry: json.dumps(entry | {"processes": True}), "processes must be int, not true"),
        (lambda entry: json.dumps(entry | {"commit": 5}), "commit must be str or null, not 5"),
        (lambda entry: json.dumps(entry | {"val": {"val/loss": None}}), "val.val/loss must be a number, not null"),
        (lambda entry: json.dumps(entry | {"ratio": float("nan")}), "ratio must be a number, not NaN"),
        (lambda entry: json.dumps(entry | {"tasks": {"piqa": 0.5}}), "tasks.piqa must hold metric, value, low, high"),
        (lambda entry: json.dumps(entry | {"tokens_per_second": {"eager": 1}}), "tokens_per_second.compiled must be"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_line(ledger: Path, change: Any, words: str) -> None:
    ((_, entry),) = read_ledger(ledger)
    ledger.write_text(ledger.read_text() + "\n" + change(entry) + "\n")
    with pytest.raises(ConfigError) as caught:
        open_ledger(ledger, records=True)
    assert str(caught.value).startswith(f"{ledger}:3: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "word",
    [
        "model.path=/data/qwen",
        "model.path=~/qwen",
        "model.path=../qwen",
        "data.train=[{path: /data/a.jsonl}]",
        'data.train=["/data/a.jsonl"]',
        "/home/me/sft.yaml",
        "model.path=file:///data/qwen",
        "eval.data=hf_" + "a" * 34,
    ],
)
def test_paths_of_a_machine_and_secrets_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--record: "):
        check_portable([word])


def test_paths_in_the_repository_and_of_the_hub_are_kept() -> None:
    words = ["model.path=Qwen/Qwen3-0.6B", "data.train=[{path: data/a.jsonl}]", "compile.cache=s3://bucket/x"]
    check_portable([RECIPE, *words, "optim.lr=1e-3", "model.path=./runs/x"])


def test_nothing_of_a_refused_validation_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(ConfigError, match="a path of this machine"):
        record_validation(judged(result(plan={"overrides": ("model.path=/data/qwen",)})), path)
    assert not path.exists()


def test_a_recipe_named_by_its_whole_path_is_kept_as_seen_from_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "ledger.jsonl"
    record_validation(judged(result(plan={"recipe": str(ROOT / RECIPE), "script": "./scripts/base_train.py"})), path)
    entry = read_ledger(path)[0][1]
    assert (entry["recipe"], entry["script"]) == (RECIPE, "scripts/base_train.py")


def test_a_ledger_that_is_named_must_be_there_unless_it_is_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_ledger(None, records=False) is None
    with pytest.raises(ConfigError, match="--record makes it"):
        open_ledger(Path("ledger.jsonl"), records=False)
    with pytest.raises(ConfigError, match="benchmarks/: no such folder"):
        open_ledger(None, records=True)
    made = open_ledger(Path("ledger.jsonl"), records=True)
    assert made is not None
    assert made.entries == []


@pytest.mark.slow
def test_the_command_records_what_passes_and_holds_the_next_to_it(tmp_path: Path) -> None:
    path, ledger = tmp_path / "validation.json", tmp_path / "ledger.jsonl"

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "scripts/validate_compile.py", "--judge", str(path), "--ledger", str(ledger), *words]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)

    path.write_text(json.dumps(result()))
    first = command("--record")
    assert first.returncode == 0, first.stderr
    *_, recorded, verdict = first.stdout.splitlines()
    assert (recorded, verdict) == (f"recorded: 1 in {ledger}", "PASS: 13 of 13 criteria passed, 1 not checked")
    path.write_text(json.dumps(result(LATER, results=[trio().compiled.results[0] | {"value": 0.39}])))
    ledger.write_text(ledger.read_text().replace('"low": 0.4', '"low": 0.3'))
    worse = command("--record")
    assert worse.returncode == 1
    assert "nothing was recorded" in worse.stdout
    ledger.write_text("{\n")
    broken = command()
    assert (broken.returncode, f"error: {ledger}:1: not JSON" in broken.stderr) == (2, True)


def test_the_ledger_of_the_repository_can_be_read() -> None:
    entries = read_ledger(ROOT / "benchmarks/ledger.jsonl")
    assert entries
    for _, entry in entries:
        check_portable([entry["recipe"], entry["script"], *entry["overrides"]])
        assert (ROOT / entry["recipe"]).is_file()
