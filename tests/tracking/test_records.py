"""What a dashboard is told of a run's files, and by what it is found there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_run import make_run

from sftkit.tracking.dashboard.remote import identity, preflight_of, proof_of

SETTINGS = {
    "resolved": {
        "stage": "sft", "model_type": "qwen3", "parameters": 596e6, "sources": ["chats"], "documents": 1000, "tokens": 52345,
        "layout": "packed", "row_length": 2048, "attention": "fa4", "optimizer": "adamw", "topology": "ddp",
    },
    "environment": {"device": "NVIDIA H200", "world_size": 4, "git": "abc"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_settings_of_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_RUN_GROUP", "WANDB_TAGS", "WANDB_NOTES"):
        monkeypatch.delenv(name, raising=False)


def test_the_chain_is_the_folder_above_and_the_stage_is_the_job_type(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_TAGS", "mine,packed")
    found = identity(Path("runs/default/sft"), SETTINGS)
    assert (found["name"], found["group"], found["job_type"]) == ("default-sft", "default", "sft")
    assert found["tags"] == ("mine", "packed", "NVIDIA H200", "ddp", "fa4")
    assert found["notes"] == (
        "qwen3 with 596.0 M parameters on chats (1,000 documents, 52,345 tokens), packed rows of up to 2,048 tokens, "
        "fa4 attention, adamw, 4 x NVIDIA H200, commit abc"
    )


def test_a_run_of_no_chain_has_no_group_and_variables_of_wandb_come_first(monkeypatch) -> None:
    assert identity(Path("runs/mine"), {})["group"] is None
    assert identity(Path("mine"), {})["group"] is None
    monkeypatch.setenv("WANDB_RUN_GROUP", "sweep")
    monkeypatch.setenv("WANDB_NOTES", "a look")
    found = identity(Path("runs/mine"), SETTINGS)
    assert (found["group"], found["notes"]) == ("sweep", "a look")


def test_checks_that_failed_come_first_and_are_counted(tmp_path: Path) -> None:
    found = proof_of(make_run(tmp_path / "a" / "sft", steps=100))
    (table,) = found.tables
    assert [row[:2] for row in table.rows[:2]] == [["Mask coverage", "FAIL"], ["Shapes", "PASS"]]
    assert found.summary == {"proof/passed": 5, "proof/failed": 1, "proof/not_checked": 1}


def test_preflight_has_sources_layouts_findings_and_what_stands_for_the_run(tmp_path: Path) -> None:
    found = preflight_of(make_run(tmp_path / "a" / "sft", steps=100))
    tables = {table.name: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for table in found.tables}
    assert [row["name"] for row in tables["preflight/sources"]] == ["smoltalk2", "tasks"]
    assert tables["preflight/findings"][0]["reason"] == "empty answer"
    assert tables["preflight/layouts"][0]["own"] is True
    assert found.summary["preflight/tokens"] == 21_233_011 + 1_233_011
    assert found.summary["preflight/padding_pct"] == 1.9
    assert found.summary["preflight/warnings_count"] == len(tables.get("preflight/warnings", []))


def test_a_run_without_the_files_or_with_broken_ones_tells_nothing(tmp_path: Path) -> None:
    for text in (None, "{", "[1]", json.dumps({"rows": []})):
        if text is not None:
            for name in ("proof.json", "preflight.json"):
                (tmp_path / name).write_text(text)
        assert proof_of(tmp_path).tables == []
        assert preflight_of(tmp_path).tables == []
