"""The wandb workspace, to the JSON that would be sent."""

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
from sftkit.tracking.names import METRICS, RUN_VALUES, TABLES

pytest.importorskip("wandb_workspaces")
from sftkit.tracking.dashboard import panels


def sections_of() -> dict[str, dict[str, Any]]:
    spec = panels.spec(panels.workspace("me", "p"))
    assert spec["section"]["settings"]["shouldAutoGeneratePanels"]  # of all other metrics
    assert json.loads(json.dumps(spec)) == spec
    return {section["name"]: section for section in spec["section"]["panelBankConfig"]["sections"]}


def test_the_workspace_opens_with_speed_loss_and_evaluation_and_then_the_proof() -> None:
    sections = sections_of()
    assert list(sections)[:4] == ["Speed", "Loss", "Evaluation", "Proof"]
    assert [section["isOpen"] for section in sections.values()] == [True] * 4 + [False] * (len(sections) - 4)
    assert sections["Speed"]["panels"][0]["config"]["metrics"] == ["perf/tok_per_sec"]


def test_the_proof_is_one_row_of_numbers_with_what_each_should_be() -> None:
    proof = sections_of()["Proof"]
    assert {panel["viewType"] for panel in proof["panels"]} == {"Scalar Chart"}
    assert (proof["flowConfig"]["columnsPerPage"], proof["flowConfig"]["rowsPerPage"]) == (len(proof["panels"]), 1)
    assert all("0 is right" in panel["config"]["chartTitle"] for panel in proof["panels"])
    metrics = [panel["config"]["metrics"] for panel in proof["panels"]]
    assert metrics[:2] == [["summary_metrics.proof/failed"], ["summary_metrics.compile/recompiles.max"]]


def test_no_panel_and_no_column_has_an_undocumented_name() -> None:
    documented = {metric.name for metric in METRICS} | set(TABLES) | set(RUN_VALUES)
    shown = set(panels._COLUMNS)
    for panel in (panel for section in panels.LAYOUT.values() for panel in section):
        shown |= {*panel.get("plot", ()), *(panel[kind] for kind in ("number", "table") if kind in panel)}
    assert sorted(shown - documented) == []


def test_a_pattern_draws_the_names_that_it_stands_for_and_intervals_apart_from_values() -> None:
    curves = {
        p["config"]["metricRegex"] for s in sections_of().values() for p in s["panels"] if "metricRegex" in p["config"]
    }
    for name in ("eval/mmlu/acc_norm", "eval/mmlu/low", "eval/mmlu/high"):
        assert len([pattern for pattern in curves if re.search(pattern, name)]) == 1, name


def test_losses_are_drawn_over_tokens_flops_and_seconds_too() -> None:
    plots = [panel["config"] for panel in sections_of()["Loss"]["panels"]]
    axes = [plot["xAxis"] for plot in plots if plot["metrics"] == ["train/loss", "val/loss"]]
    assert axes == ["step", "train/tokens", "train/flops", "train/seconds"]


def test_without_a_key_nothing_is_sent_and_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    with pytest.raises(ConfigError, match=r"no wandb key .* `\S*wandb login`.*--dry-run"):
        panels.save_view(panels.workspace("me", "p"))


def test_the_script_prints_what_would_be_sent_without_a_key_or_a_network(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("there is no network here")

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    command = ["make_dashboard.py", "--entity", "me", "--project", "p"]
    monkeypatch.setattr(sys, "argv", [*command, "--dry-run"])
    runpy.run_path(str(ROOT / "scripts" / "make_dashboard.py"), run_name="__main__")
    printed = json.loads(capsys.readouterr().out)
    assert printed["section"]["panelBankConfig"]["sections"]


def test_without_the_package_the_script_says_what_to_install_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)  # import fails
    monkeypatch.delitem(sys.modules, "sftkit.tracking.dashboard.panels")
    monkeypatch.delattr("sftkit.tracking.dashboard.panels")
    monkeypatch.setattr(sys, "argv", ["make_dashboard.py", "--entity", "me"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / "make_dashboard.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "pip install 'sftkit[dashboard]'" in capsys.readouterr().err
