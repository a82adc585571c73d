"""The tables of benchmarks/graph_engine/README.md say what the raw files say that they name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "benchmarks/graph_engine/README.md").read_text()
RESULTS = ROOT / "benchmarks/graph_engine/results"
Key = tuple[str, ...]
"Of a row: model, mesh, attention, passes."


def recorded(name: str) -> dict[Key, dict[str, Any]]:
    """The rows of a raw file by what they ran."""
    rows = json.loads((RESULTS / name).read_text())["runs"]
    return {_ran(row): row for row in rows}


def _ran(row: dict[str, Any]) -> Key:
    settings = row["set"]
    passes = [] if settings.get("compile.enabled", True) else ["eager"]
    if settings.get("train.engine") == "blocks":
        passes.append("blocks")
    passes += settings.get("graph.passes", [])
    if settings.get("graph.token_dispatcher"):
        passes.append(settings["graph.token_dispatcher"])
    passes += [f"{name}={value}" for name, value in row.get("environment", {}).items()]
    return row["model"].partition("-")[0], row["topology"], row["attention"]["backend"], *passes


def table(heading: str) -> list[list[str]]:
    """The cells of the first table behind a text, an empty one that of the row above."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows: list[list[str]] = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.append([rows[-1][0] if not cells[0] else cells[0], *cells[1:]])
    return rows


def named(text: str, before: Key) -> Key:
    """The passes that a cell names; `the same`: and those of the row above."""
    names = re.findall(r"`(\w+)`", text)
    if text.startswith("the same"):
        return *before, *names
    if text in ("none", "eager"):
        return () if text == "none" else ("eager",)
    return tuple(dict.fromkeys(["reshard_after_forward", *names]))


@pytest.mark.parametrize(
    ("file", "heading", "rows"),
    [
        # All but the two that others are compared with.
        ("h200_debug.json", "**The other configurations at debug size**", 27),
        ("h200_debug_flex_block.json", "Configuration 6 in a later call", 2),
    ],
)
def test_the_tables_of_the_debug_size_are_those_of_their_raw_files(file: str, heading: str, rows: int) -> None:
    found, passes = recorded(file), tuple[str, ...]()
    eager = {key: row for key, row in found.items() if key[-1] == "eager"}
    shown = table(heading)
    assert len(shown) == rows
    for where, text, speed, first, difference in shown:
        passes = named(text, passes)
        model, mesh = where.split()[0].partition("-")[0].strip(",").lower(), "tp" if "parallel" in where else "fsdp2"
        row = found[model, mesh, "flex" if "Flex" in where else "varlen", *passes]
        tokens = row["tok_per_sec"]["median"] / eager[model, mesh, "varlen", "eager"]["tok_per_sec"]["median"]
        assert float(speed.removesuffix(" x")) == pytest.approx(tokens, abs=0.0051), row["name"]
        assert float(first) == pytest.approx(row["first_step_seconds"], abs=0.51), row["name"]
        losses = eager[model, "fsdp2", "varlen", "eager"]["losses"]
        largest = max(abs(row["losses"][step] - loss) for step, loss in losses.items())
        assert float(difference.split(",")[0]) == pytest.approx(largest, abs=0.051 * 10 ** int(difference[4:6])), text
        if "the same losses" in difference:
            assert row["losses"] == found[model, mesh, "flex", *passes[:-1]]["losses"]


@pytest.mark.parametrize(
    ("file", "heading"),
    [
        ("h200_8b_presets.json", "## Every set of passes at 8B"),
        ("h200_8b_presets_flex.json", "With FlexAttention:"),
        ("h100_8b.json", "## On two H100"),
        ("h200_8b_kept.json", "## Weights kept, on two H200"),
        ("h200_8b_eager.json", "## Weights kept without full Inductor, on two H200"),
    ],
)
def test_the_tables_of_an_8b_are_those_of_their_raw_files(file: str, heading: str) -> None:
    found = {key: row for key, row in recorded(file).items() if row["name"].startswith("8b")}
    passes = tuple[str, ...]()
    best = found["llama", "fsdp2", "varlen", "blocks"]
    shown = table(heading)
    assert len(shown) == len(found)
    flex = heading.startswith("With FlexAttention")
    for text, tokens, mfu, peak, first, loss in (cells[-6:] for cells in shown):
        passes = of_8b(text, passes)
        with_flex = (flex or "FlexAttention" in text) and "varlen" not in text
        row = found["llama", "fsdp2", "flex" if with_flex else "varlen", *passes]
        assert int(tokens.split()[0].replace(",", "")) == round(row["tok_per_sec_per_gpu"]["median"])
        if ratio := re.search(r"\((.*) x\)", tokens):
            expected = row["tok_per_sec"]["median"] / best["tok_per_sec"]["median"]
            assert float(ratio.group(1)) == pytest.approx(expected, abs=0.0051)
        assert float(mfu.removesuffix(" %")) == pytest.approx(100 * row["mfu"]["median"], abs=0.051)
        assert float(peak) == pytest.approx(row["peak_memory_gib"], abs=0.051)
        assert float(first) == pytest.approx(row["first_step_seconds"], abs=0.51)
        assert float(loss) == pytest.approx(row["losses"]["14"], abs=0.000051)


def test_the_table_of_exchanges_once_a_step_is_that_of_its_raw_files() -> None:
    """Pairs of rows, each relative to the one above."""
    once = {
        row["name"]: row
        for name in ("h200_8b_one.json", "h200_8b_reduce_once.json")
        for row in json.loads((RESULTS / name).read_text())["runs"]
    }
    pairs = (
        ("8b fsdp2 eager one", "8b block one"),
        ("8b fsdp2 eager", "8b block reduce once"),
        ("8b fsdp2 eager four", "8b block four"),
        ("8b fsdp2 compiled", "8b block inductor reduce once"),
    )
    shown = table("## Exchanges once a step, on two H200")
    assert len(shown) == 2 * len(pairs)
    for number, (count, text, tokens, mfu, peak, first, loss) in enumerate(shown):
        names = pairs[number // 2]
        row, reference = once[names[number % 2]], once[names[0]]
        if number % 2:
            assert re.findall(r"`(\w+)`", text) == row["set"]["graph.passes"]
            ratio = row["tok_per_sec"]["median"] / reference["tok_per_sec"]["median"]
            assert float(tokens.split("(")[1].removesuffix(" x)")) == pytest.approx(ratio, abs=0.0051)
        assert int(count) == row["set"].get("train.global_batch_size", 4) // 2
        assert int(tokens.split()[0].replace(",", "")) == round(row["tok_per_sec_per_gpu"]["median"])
        assert float(mfu.removesuffix(" %")) == pytest.approx(100 * row["mfu"]["median"], abs=0.051)
        assert float(peak) == pytest.approx(row["peak_memory_gib"], abs=0.051)
        assert float(first) == pytest.approx(row["first_step_seconds"], abs=0.51)
        assert float(loss) == pytest.approx(row["losses"]["14"], abs=0.000051)


def of_8b(text: str, before: Key) -> Key:
    """What a cell of these tables names: an engine or passes, with weights kept or not, and NCCL's environment."""
    if text.startswith("`blocks`"):
        return ("eager", "blocks") if "eager" in text else ("blocks",)
    words, _, environment = text.removeprefix("`graph`, ").partition("`NCCL")
    passes = named(words, before)
    kept = passes[1:] if "weights kept" in words else passes
    return (*kept, f"NCCL{environment.strip('`')}") if environment else kept


def test_the_table_of_four_gpus_is_that_of_its_raw_files() -> None:
    folder, number = ROOT / "benchmarks/h200_multi/results", 0
    named_rows: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {}
    for name in ("graph_1_to_5", "graph_6_7", "graph_8", "graph_9_10"):
        rows = {row["name"]: row for row in json.loads((folder / f"{name}.json").read_text())["runs"]}
        named_rows |= {key.split()[0]: (row, rows) for key, row in rows.items() if key[0].isdigit()}
    for number, (configuration, _, _, first, of_mesh, of_shards) in enumerate(table("## On four H200"), start=1):
        row, rows = named_rows[configuration]
        assert configuration == str(number)
        assert float(first) == pytest.approx(row["first_step_seconds"], abs=0.51)
        for shown, reference in ((of_mesh, row["baseline"]), (of_shards, row["same_loss_as"])):
            theirs = rows[reference]["losses"]
            largest = max(abs(loss - theirs[step]) for step, loss in row["losses"].items())
            assert float(shown) == pytest.approx(largest, abs=0.051 * 10 ** math.floor(math.log10(largest))), row[
                "name"
            ]
    assert number == len(named_rows) == 10
