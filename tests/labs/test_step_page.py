"""The tables of benchmarks/h200_step about levers are those of their raw files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks/h200_step"
FUSED = "0.6B fused"
RUNS = [
    ("levers_joined", "off", "joined"),
    ("levers_fused", "0.6B", FUSED),
    ("levers_fused", "0.6B again", f"{FUSED} again"),
    ("levers_fused", "1.7B", "1.7B fused"),
    ("levers_fused_tuned", "0.6B", FUSED),
    ("levers_fused_tuned", "0.6B again", f"{FUSED} again"),
    ("levers_joined", "off", "combo"),
    ("levers_joined", "off", "no mix"),
    ("levers_rotary", "before", "rotary and norm"),
    ("products_step", "0.6B apart", "0.6B cublas"),
]
"File, run without and run with what each line of the table is about."


def raw(name: str) -> Any:
    return json.loads((FOLDER / f"results/{name}.json").read_text())


def table_below(heading: str, number: int = 0) -> list[list[str]]:
    """The cells of a table of the page below a heading, without its head."""
    page = (FOLDER / "README.md").read_text().partition(f"\n### {heading}")[2]
    table = re.findall(r"(?:^\|.*\|\n)+", page, re.M)[number]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_milliseconds_of_the_losss_kernels_are_those_measured() -> None:
    found = raw("loss_kernels")["milliseconds"]
    names = [
        ("cross entropy, plain, blocks of 4096, 16 warps", "cross entropy, plain, blocks of 8192, 32 warps"),
        ("scaling, torch.mul", "scaling, kernel"),
    ]
    shown = [cells[1:] for cells in table_below("The loss's kernels")]
    assert shown == [[f"{found[name]:.2f}" for name in pair] for pair in names]


def test_what_did_not_pay_has_the_speeds_of_its_runs() -> None:
    for (file, without, having), (_, name, *shown) in zip(RUNS, table_below("What did not pay"), strict=True):
        rows = {row["name"]: row for row in raw(file)["runs"]}
        assert file == {"tuned": "levers_fused_tuned", "products_step": name}.get(name, f"levers_{name}")
        assert shown == [f"{rows[run]['tok_per_sec']['median']:,.0f}" for run in (without, having)]
        losses = [dict(rows[run]["losses"]) for run in (without, having)]
        assert max(abs(losses[0][step] - losses[1][step]) for step in losses[0]) < 2e-4


def test_the_milliseconds_of_joined_products_are_those_measured() -> None:
    blocks = {"0.6B": 28, "1.7B": 28, "4B": 36, "8B": 36}
    sizes = raw("products")["sizes"]
    assert table_below("What did not pay", 1) == [
        [size, *(f"{row['ms'] * blocks[size]:.1f}" for row in sizes[size]["operators"])] for size in blocks
    ]
