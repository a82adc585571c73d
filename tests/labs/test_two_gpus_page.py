"""The table and the picture of benchmarks/h200_patterns are those of its raw files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/h200_patterns"
RUNS = {
    "1.7B, one GPU": "1.7b-x1",
    "ddp": "1.7b-x2-ddp",
    "fsdp2": "1.7b-x2-fsdp2",
    "1f1b": "1.7b-x2-1f1b",
    "interleaved": "1.7b-x2-interleaved",
    "gpipe +": "1.7b-x2-gpipe kept",
    "gpipe, most activations recomputed *": "1.7b-x2-gpipe",
    "8B, one GPU": "whole-8b-x1",
    "8B, ddp": "whole-8b-x2-ddp",
    "8B, fsdp2": "whole-8b-x2-fsdp2",
    "8B, 1f1b": "whole-8b-x2-1f1b",
    "8B, interleaved +": "whole-8b-x2-interleaved",
    "8B, tp +": "whole-8b-x2-tp",
    "16 blocks, fsdp2 *": "8b-x2-fsdp2",
    "16 blocks, ddp *": "8b-x2-ddp",
    "16 blocks, 1f1b *": "8b-x2-1f1b",
}


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((FOLDER / "results" / name).read_text())["runs"]}


def tables_below(heading: str) -> list[list[list[str]]]:
    """The cells of the tables of the page below a heading, without their heads."""
    page = (FOLDER / "README.md").read_text().partition(heading)[2]
    parts = [part.splitlines()[2:] for part in re.findall(r"(?:^\|.*\|\n)+", page, re.M)]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in lines] for lines in parts]


def test_the_table_of_pipelines_is_that_of_its_raw_files() -> None:
    small, large, starred = map(rows_of, ("h200_pipeline_1.7b.json", "h200_pipeline_8b.json", "h200_pipeline.json"))
    later = {**rows_of("h200_gpipe.json"), **rows_of("h200_tensor_8b.json")}
    shown = tables_below("## Pipelines and tensor parallelism")[0]
    assert [cells[0] for cells in shown] == list(RUNS)
    for text, layers, speed, share, waits, _, peak, loss in shown:
        marked = {"*": starred, "+": later}.get(text[-1])
        found = marked or (large if text.startswith("8B") else small)
        row = found[RUNS[text]]
        base = found.get(row["baseline"] or "")
        tokens = row["tok_per_sec_per_gpu"]["median"]
        assert int(speed.replace(",", "")) == round(tokens), text
        assert layers == " + ".join(map(str, row["pipeline_layers"] or ())), text
        assert float(peak) == pytest.approx(row["peak_memory_gib"], abs=0.051), text
        if base:
            expected = 100 * tokens / base["tok_per_sec_per_gpu"]["median"]
            assert float(share.removesuffix(" %")) == pytest.approx(expected, abs=0.051), text
            theirs = base["losses"]
            largest = max(abs(value - theirs[step]) for step, value in row["losses"].items())
            assert float(loss) == pytest.approx(largest, rel=0.08), text
        if waits:
            assert float(waits.removesuffix(" †").removesuffix(" %")) == pytest.approx(
                row["pipeline_bubble_pct"], abs=0.051
            ), text


def test_the_table_of_layouts_is_that_of_its_raw_files() -> None:
    small, four, large = map(rows_of, ("h200_layouts_0.6b.json", "h200_layouts_x4.json", "h100_tensor_8b.json"))
    runs = ["0.6b-x1", "0.6b-x2-tp", "0.6b-x2-tp 2 rows", "0.6b-x2-cp", "0.6b-x2-cp 2 rows", "0.6b-x4-tp"]
    runs += ["8b-x1", "8b-x2-tp", "8b-x2-tp asynchronous"]
    shown = tables_below("# What two GPUs wait for")[0]
    assert len(shown) == len(runs)
    for (_, gpus, speed, share, peak, loss), name in zip(shown, runs, strict=True):
        rows = large if name.startswith("8b") else four if "x4" in name else small
        row, base = rows[name], rows.get(rows[name]["baseline"] or "")
        tokens = row["tok_per_sec_per_gpu"]["median"]
        assert (int(gpus), int(speed.replace(",", ""))) == (row["world_size"], round(tokens)), name
        assert float(peak) == pytest.approx(row["peak_memory_gib"], abs=0.051), name
        if base:
            expected = 100 * tokens / base["tok_per_sec_per_gpu"]["median"]
            assert float(share.removesuffix(" %")) == pytest.approx(expected, abs=0.051), name
            largest = max(abs(value - base["losses"][step]) for step, value in row["losses"].items())
            assert float(loss) == pytest.approx(largest, rel=0.02), name


def test_the_table_of_traced_pipelines_is_that_of_its_raw_files() -> None:
    rows = rows_of("h200_pipeline_traced.json")
    traces = json.loads((FOLDER / "results/h200_traces.json").read_text())["runs"]
    shown = tables_below("**What traces of the pipelines show**")[0]
    assert [cells[0] for cells in shown] == ["1f1b", "interleaved", "gpipe"]
    for schedule, layers, *cells in shown:
        row, ranks = rows[f"1.7b-x2-{schedule}"], [rank["device"] for rank in traces[f"1.7b-x2-{schedule}"]]
        assert layers == " + ".join(map(str, row["pipeline_layers"]))
        shares = [[100 * rank[name] for rank in ranks] for name in ("computing", "exposed", "idle")]
        expected = [*shares, [sum(shares[1]) / 2], [row["pipeline_bubble_pct"]]]
        for text, values in zip(cells, expected, strict=True):
            assert [float(each) for each in text.removesuffix(" %").split(",")] == pytest.approx(values, abs=0.051)
