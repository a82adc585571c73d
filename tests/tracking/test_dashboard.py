"""The wandb workspace and the comparison report, to the JSON that would be sent."""

from __future__ import annotations

import json
import re
import runpy
import socket
import sys
from typing import Any

import pytest
from helpers import ROOT

from sftkit.errors import ConfigError
from sftkit.tracking.names import METRICS

pytest.importorskip("wandb_workspaces")
from sftkit.tracking import workspace as dashboard

SAMPLES = {
    "source": "no_robots", "task": "mmlu", "metric": "acc_norm", "rows": "8", "length": "2048", "phase": "inductor"
}  # fmt: skip


def plots(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [panel["config"] for panel in found if panel["viewType"] == "Run History Line Plot"]


def shows(plot: dict[str, Any], name: str) -> bool:
    return name in plot.get("metrics", []) or bool(re.search(plot.get("metricRegex", "^$"), name))


def test_the_workspace_has_a_curve_over_step_for_every_documented_name() -> None:
    spec = dashboard.spec(dashboard.workspace("me", "p"))
    assert json.loads(json.dumps(spec)) == spec
    sections = {section["name"]: section for section in spec["section"]["panelBankConfig"]["sections"]}
    for metric in METRICS:
        name = re.sub(r"<(\w+)>", lambda word: SAMPLES[word[1]], metric.name)
        section = sections[dashboard.TITLES[metric.group]]
        found = [plot for plot in plots(section["panels"]) if shows(plot, name)]
        assert len(found) == 1, name
        assert found[0]["xAxis"] == "step"
        assert metric.unit in found[0]["chartTitle"] or metric.unit == "-" or name.endswith(("/low", "/high"))


def test_the_workspace_shows_first_what_must_be_zero_as_numbers() -> None:
    spec = dashboard.spec(dashboard.workspace("me", "p"))
    sections = spec["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections][:4] == [
        "Proof: compiler", "Proof: shapes", "Proof: health", "Training",
    ]  # fmt: skip
    assert sections[-1]["name"] == "Samples and results"
    assert len(sections[-1]["panels"]) == 2
    assert all(section["isOpen"] for section in sections[:3])
    first = sections[0]["panels"][0]
    assert first["viewType"] == "Scalar Chart"
    assert first["config"]["metrics"] == ["summary_metrics.compile/recompiles.max"]
    numbers = {p["config"]["chartTitle"] for s in sections for p in s["panels"] if p["viewType"] == "Scalar Chart"}
    assert numbers == set(dashboard.MUST_BE_ZERO)


def test_a_report_compares_two_runs_by_name_or_id_and_begins_with_what_differs() -> None:
    spec = dashboard.spec(dashboard.comparison("me", "p", ["default-sft", "k5abz1gd"]))
    grids = [block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid"]
    (comparer,) = grids[0]["panelBankSectionConfig"]["panels"]
    assert comparer["viewType"] == "Run Comparer"
    for grid in grids:
        (runs,) = grid["runSets"]
        filters = runs["filters"]["filters"]
        assert {(f["key"]["name"], tuple(f["value"])) for f in filters} == {
            ("name", ("default-sft", "k5abz1gd")),
            ("displayName", ("default-sft", "k5abz1gd")),
        }
        assert filters[1]["connector"] == "OR"
        places = [tuple(p["layout"][k] for k in "xy") for p in grid["panelBankSectionConfig"]["panels"]]
        assert len(set(places)) == len(places)
    curves = [plot for grid in grids for plot in plots(grid["panelBankSectionConfig"]["panels"])]
    assert any(shows(plot, "train/loss") for plot in curves)


def test_a_name_that_no_run_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="--report"):
        dashboard.comparison("me", "p", ["a", "b'] or Name in ['c"])


def test_without_a_key_nothing_is_sent_and_the_way_out_is_told(monkeypatch) -> None:
    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    with pytest.raises(ConfigError, match=r"no wandb key .*wandb login`.*--dry-run"):
        dashboard.save(dashboard.workspace("me", "p"))


def test_the_script_prints_what_would_be_sent_without_a_key_or_a_network(monkeypatch, capsys) -> None:
    def refuse(*_: object) -> None:
        raise OSError("there is no network here")

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    command = ["make_dashboard.py", "--entity", "me", "--project", "p", "--report", "a", "b", "--dry-run"]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(ROOT / "scripts" / "make_dashboard.py"), run_name="__main__")
    printed = json.loads(capsys.readouterr().out)
    assert printed["workspace"]["section"]["panelBankConfig"]["sections"]
    assert printed["report"]["blocks"]


def test_without_the_package_the_script_says_what_to_install_and_exits_with_2(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)  # import fails
    monkeypatch.delitem(sys.modules, "sftkit.tracking.workspace")
    monkeypatch.delattr("sftkit.tracking.workspace")
    monkeypatch.setattr(sys, "argv", ["make_dashboard.py", "--entity", "me"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / "make_dashboard.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "pip install 'sftkit[dashboard]'" in capsys.readouterr().err
