"""benchmarks/lab_layouts: a table and a figure that are made of raw results alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from helpers import ROOT
from made_results import H100, H200, made_results

from labs import pages
from labs.bench.plan import read_jobs
from labs.tables import keep

FOLDER = ROOT / "benchmarks" / "lab_layouts"


def test_every_run_of_the_plan_has_a_place() -> None:
    plan = {job.name for job in read_jobs(FOLDER / "plan.yaml", FOLDER / "unused")}
    places = {f"{layout} {gpus} {way}" for layout in pages.LAYOUTS for gpus in (1, 2) for way in pages.WAYS}
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
    made = pages.layout_table(rows)
    # 25 s more in the first step, 0.25 s less in each of the 100 after it
    assert "| dynamic | 1 | 1,000 | 2,000 | 2.00 | 61.4 % | 5.0 | 30.0 | 101 |" in made
    assert "| fixed | 1 | 1,000 | 900 | 0.90 | 61.4 % | 5.0 | 9.0 | - |" in made
    assert "| packed | 1 | 4,000 | 8,000 | - | 61.4 % | 5.0 | 9.0 | - |" in made
    assert "bucketed" not in made
    said = texts(pages.figure(rows, "a <device>"))
    assert (said.count("8,000"), said[-1], "bucketed, 1 GPU" in said) == (2, "a <device>", False)


def texts(figure: str) -> list[str | None]:
    return [each.text for each in ElementTree.fromstring(figure).iter("{http://www.w3.org/2000/svg}text")]


def test_a_machine_has_a_table_and_a_figure_of_its_own(tmp_path: Path) -> None:
    lab = tmp_path / "lab_layouts"
    lab.mkdir()
    for name in ("plan.yaml", "lengths.json", "../h200_step"):
        (lab / name).symlink_to(FOLDER / name)
    one, two = (
        {"error": None, "name": name, **row(speed, 0.5, 5.0)}
        for name, speed in (("packed 1 eager", 4000.0), ("packed 2 compiled", 7000.0))
    )
    keep(lab, made_results(one))
    keep(lab, made_results(two, device=H100, gpus=2))
    made, figures = pages.layout_tables(lab), pages.layout_figures(lab)
    first, second = made.split(f"Machine: 2 x {H100}")
    assert f"Machine: {H200}" in first
    assert "(tokens.svg)\n\n| layout |" in first
    assert "| packed | 1 | 4,000 | - | - | 61.4 % | 5.0 | - | - |" in first
    assert "(tokens-nvidia-h100-80gb-hbm3.svg)\n\n| layout |" in second
    assert "| packed | 2 | - | 7,000 | - | 61.4 % | - | 5.0 | - |" in second
    assert (first + second).count("| packed |") == 2
    missing = second.splitlines()[-1].removeprefix("Not measured: ").removesuffix(".").split(", ")
    plan = [job.name for job in read_jobs(lab / "plan.yaml", lab / "unused")]
    assert missing == [name for name in plan if name not in ("packed 1 eager", "packed 2 compiled")]
    numbers = {
        file.name: [text for text in texts(figure) if text in ("4,000", "7,000", H200, H100)]
        for file, figure in figures.items()
    }
    assert numbers == {"tokens.svg": ["4,000", H200], "tokens-nvidia-h100-80gb-hbm3.svg": ["7,000", H100]}
