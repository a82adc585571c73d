"""benchmarks/lab_layouts: a table and a figure that are made of raw results alone."""

from __future__ import annotations

import runpy
from typing import Any
from xml.etree import ElementTree

from helpers import ROOT

from sftkit.experiments.bench.jobs import read_jobs

FOLDER = ROOT / "benchmarks" / "lab_layouts"
TOOL = runpy.run_path(str(FOLDER / "tables.py"))


def test_table_and_figure_are_those_that_the_command_makes() -> None:
    rows = TOOL["results"](FOLDER)
    assert f"<!-- tables -->\n\n{TOOL['table'](rows)}\n\n<!-- end of tables -->" in (FOLDER / "README.md").read_text()
    assert (FOLDER / "tokens.svg").read_text() == TOOL["figure"](rows)


def test_every_run_of_the_plan_has_a_place() -> None:
    plan = {job.name for job in read_jobs(FOLDER / "plan.yaml", FOLDER / "unused")}
    places = {f"{layout} {gpus} {way}" for layout in TOOL["LAYOUTS"] for gpus in (1, 2) for way in TOOL["WAYS"]}
    assert plan <= places


def row(tokens: float, step: float, first: float, call: str = "one") -> dict[str, Any]:
    return {
        "call": call, "tok_per_sec": {"median": tokens}, "step_seconds": {"median": step}, "padding_pct": {"median": 61.4},
        "first_step_seconds": first,
    }  # fmt: skip


def test_what_compiling_is_worth_and_from_which_step_it_pays() -> None:
    rows = {"dynamic 1 eager": row(1000.0, 0.5, 5.0), "dynamic 1 compiled": row(2000.0, 0.25, 30.0)}
    rows |= {"fixed 1 eager": row(1000.0, 0.5, 5.0), "fixed 1 compiled": row(900.0, 0.6, 9.0)}
    rows |= {"packed 1 eager": row(4000.0, 0.5, 5.0), "packed 1 compiled": row(8000.0, 0.25, 9.0, call="another")}
    rows |= {"packed 1 max-autotune": row(8000.0, 0.25, 9.0)}
    made = TOOL["table"](rows)
    # 25 s more in the first step, 0.25 s less in each of the 100 after it
    assert "| dynamic | 1 | 1,000 | 2,000 | 2.00 | 61.4 % | 5.0 | 30.0 | 101 |" in made
    assert "| fixed | 1 | 1,000 | 900 | 0.90 | 61.4 % | 5.0 | 9.0 | - |" in made
    assert "| packed | 1 | 4,000 | 8,000 | - | 61.4 % | 5.0 | 9.0 | - |" in made
    assert "| bucketed | 2 | not measured |" in made
    drawn = ElementTree.fromstring(TOOL["figure"](rows))
    said = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert (said.count("8,000"), said.count("not measured")) == (2, 7)
