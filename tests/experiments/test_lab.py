"""The compile lab: its page says what the raw files say."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT

from sftkit.errors import ConfigError

LAB = runpy.run_path(str(ROOT / "benchmarks" / "lab.py"))


def test_every_table_of_the_page_is_made_of_the_raw_file_that_it_names() -> None:
    page = (ROOT / "docs" / "compile_lab.md").read_text()
    assert LAB["rebuilt"](page, ROOT / "benchmarks") == page
    assert {lab for _, lab, _ in LAB["TABLE"].findall(page)} == set(LAB["labs"]())


def test_a_lab_for_a_gpu_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAB["main"].__globals__, "find_hardware", lambda: SimpleNamespace(gpus=0))
    monkeypatch.setattr(sys, "argv", ["lab.py", "lab_layouts", "--only", "dynamic 1 eager"])
    with pytest.raises(ConfigError, match=r"lab_layouts: made for a GPU.* Name lab_cpu or nothing, or take in"):
        LAB["main"]()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--take: .*gone.json: cannot be read as JSON"),
        ('{"machine": {}, "runs": []}', "--take: .*gone.json: no results of this bench.*: it lacks plan, started"),
        ("[]", "it lacks plan, started, machine, runs"),
    ],
)
def test_what_is_not_the_result_of_a_bench_is_not_taken_in(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "gone.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["lab.py", "--take", str(tmp_path / "gone.json")])
    with pytest.raises(ConfigError, match=said):
        LAB["main"]()


def row(name: str, **changes: Any) -> dict[str, Any]:
    measured: dict[str, Any] = {
        "name": name, "error": None, "baseline": None, "same_loss_as": None, "world_size": 1, "losses": {"1": 2.0, "2": 1.5},
        "tok_per_sec": {"median": 1000.0, "min": 990.0, "max": 1010.0}, "target_tok_per_sec": None, "mfu": None,
        "mfu_of_ceiling": None, "peak_memory_gib": 1.0, "reserved_memory_gib": 1.0, "first_step_seconds": 2.0,
        "compile": {"recompiles": 0.0}, "data_wait_pct": None, "padding_pct": None,
    }  # fmt: skip
    return {**measured, **changes}


def speeds(tokens: float) -> dict[str, float]:
    return {"median": tokens, "min": tokens, "max": tokens}


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    plan = {
        "data": {"documents": {"count": 50, "median": 24, "mean": 32, "cap": 64}, "row_length": 128},
        "steps": {"total": 6, "warm_up": 2, "window": 2},
        "models": {"tiny": {"model_type": "qwen3"}},
        "runs": [{"name": name, "model": "tiny"} for name in ("eager", "compiled", "two")],
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    return tmp_path


def test_a_lab_without_results_says_so_and_one_with_some_names_those_that_are_not_measured(lab: Path) -> None:
    tables: Callable[[Path], str] = LAB["tables"]
    assert "Not measured yet: none of the 3 runs" in tables(lab)
    rows = [
        row("eager"),
        row("compiled", baseline="eager", same_loss_as="eager", losses={"1": 2.0, "2": 1.25}),
        row("two", error="out of memory"),
    ]
    (lab / "results").mkdir()
    (lab / "results/results.json").write_text(json.dumps({"machine": {"error": "none"}, "runs": rows}))
    text = tables(lab)
    assert "1.00 x eager" in text
    assert "2.50e-01 (step 2)" in text
    assert "Not measured: two." in text
    assert "| two |" not in text


def results(started: str, *rows: dict[str, Any], **machine: Any) -> dict[str, Any]:
    known = {"device": "H", "versions": {"torch": "2.11"}, "driver": None, "cuda": None, "git": None}
    known |= {"matmul_tflops": None, "datasheet_tflops": None, "copy_tb_per_sec": None}
    return {"started": started, "machine": {**known, **machine}, "runs": [*rows]}


def test_results_of_several_calls_come_together_in_the_order_of_the_plan_the_newest_row_of_each_run(lab: Path) -> None:
    keep: Callable[[Path, dict[str, Any]], None] = LAB["keep"]
    keep(lab, results("2026-01-02", row("two", error="no room"), row("eager"), git="b"))
    keep(lab, results("2026-01-03", row("two"), row("no longer in the plan"), git="c"))
    keep(lab, results("2026-01-01", row("eager", error="an older one"), row("compiled"), git="a"))
    kept = json.loads((lab / "results/results.json").read_text())
    assert [(each["name"], each["error"]) for each in kept["runs"]] == [(n, None) for n in ("eager", "compiled", "two")]
    assert [each["call"] for each in kept["runs"]] == ["2026-01-02", "2026-01-01", "2026-01-03"]
    assert kept["machine"]["git"] == "a, b, c"
    with pytest.raises(
        ConfigError, match=r"versions {'torch': '2\.13'}, but those that are there have {'torch': '2\.11'}"
    ):
        keep(lab, results("2026-01-04", row("two"), versions={"torch": "2.13"}))


def test_rows_of_an_earlier_call_keep_the_baseline_of_their_call_when_a_newer_call_measures_it_again(lab: Path) -> None:
    keep: Callable[[Path, dict[str, Any]], None] = LAB["keep"]
    tables: Callable[[Path], str] = LAB["tables"]
    compared = {"baseline": "eager", "same_loss_as": "eager"}
    slow = {"tok_per_sec": speeds(100.0), "losses": {"1": 3.0}}
    fast = {"tok_per_sec": speeds(200.0), "losses": {"1": 2.0}}
    keep(lab, results("2026-01-01", row("eager", **slow), row("compiled", **slow, **compared)))
    keep(lab, results("2026-01-02", row("eager", **fast), row("two", **fast, **compared)))
    text = tables(lab)
    assert text.count("1.00 x eager") == 2
    assert text.count("| 1 | 0.00e+00 (step 1) |") == 2
    kept = json.loads((lab / "results/results.json").read_text())
    assert [(each["name"], each["call"]) for each in kept["replaced"]] == [("eager", "2026-01-01")]
    keep(lab, results("2026-01-03", row("eager", **slow), row("compiled", error="no room", **compared)))
    kept = json.loads((lab / "results/results.json").read_text())
    assert [each["call"][-2:] for each in kept["runs"]] == ["03", "01", "02"], "no failed row replaces a good one"
    assert [each["call"][-2:] for each in kept["replaced"]] == ["01", "02"]
    keep(lab, results("2026-01-04", row("compiled", **fast, **compared), row("two", **fast, **compared)))
    kept = json.loads((lab / "results/results.json").read_text())
    assert kept["replaced"] == []
    assert tables(lab).count("x eager") == 0
