"""The page of model families is what a run says of them today."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from labs import families
from labs.families import RESULTS, ROOT, model_types, outcomes, table
from labs.pages import rebuilt

SAMPLE = ("llama", "granite", "gemma3", "olmoe", "gpt2", "falcon", "stablelm", "roberta", "bloom", "mamba")
"Scaled logits, a text model beside a vision tower, experts, learned positions; then a rejected one for each reason."
RECORDED: dict[str, Any] = {row["model_type"]: row for row in json.loads(RESULTS.read_text())["rows"]}
as_recorded = pytest.mark.skipif(
    transformers.__version__ != json.loads(RESULTS.read_text())["transformers"], reason="recorded with another version"
)


def said(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("model_type", "accepted", "class", "reason")}


@as_recorded
def test_a_sample_of_families_is_accepted_or_rejected_as_the_page_says() -> None:
    assert [said(row) for row in outcomes(SAMPLE)] == [said(RECORDED[name]) for name in SAMPLE]
    assert {RECORDED[name]["accepted"] for name in SAMPLE} == {True, False}


@pytest.mark.slow
@as_recorded
def test_every_family_is_accepted_or_rejected_as_the_page_says() -> None:
    assert [said(row) for row in outcomes(model_types())] == [said(row) for row in RECORDED.values()]


def test_the_page_has_every_model_type_once_and_no_crash_as_a_reason() -> None:
    page = (ROOT / "docs/families.md").read_text()
    assert rebuilt(page, table) == page
    if transformers.__version__ == json.loads(RESULTS.read_text())["transformers"]:
        assert [*RECORDED] == model_types()
    for name, row in RECORDED.items():
        assert page.count(f"`{name}`") == 1
        assert row["accepted"] == (row["reason"] is None)
        assert "Error" not in (row["reason"] or ""), name


def test_a_family_that_computes_something_else_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sftkit.models.kind.structure.logit_scale", lambda _: 1.0)
    row = families.outcome("cohere", {})
    assert not row["accepted"]
    assert "logits" in row["reason"]
