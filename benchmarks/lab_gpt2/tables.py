"""Write the two tables of this folder's README out of the raw results: one GPU, and two.

python benchmarks/lab_gpt2/tables.py

Every results/*.json here is the results.json of a bench of plan.yaml; of a run that stands in several the newest counts, and
runs of two calls, whose hosts may differ, are not divided. A cell without a result says so.
"""

import json
from pathlib import Path

from sftkit.experiments.bench.report import format_number, markdown_table, same_call, write_page

HERE = Path(__file__).parent
TABLES = {"One GPU": ("1 GPU",), "Two GPUs": ("DDP 2", "FSDP2 2", "TP 2")}
COLUMNS = ("", "step, ms (fastest to slowest)", "tokens/s", "peak GiB", "first step, s", "last loss", "against eager")
UNKNOWN = "not measured yet"
REFUSED = {"TP 2": "refused: no tensor-parallel plan for gpt2, whose query, key and value are one matrix"}
"What the launch refuses, as its row would say."


def results(folder: Path) -> dict[str, dict]:
    """Return the newest row of each run."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    files = sorted(found, key=lambda result: result["started"])
    return {row["name"]: {"call": result["started"], **row} for result in files for row in result["runs"]}


def cells(layout: str, how: str, rows: dict[str, dict]) -> list[str]:
    """Return the cells of a layout that is run in this way."""
    name, width = f"{layout} {how}", len(COLUMNS) - 1
    row = rows.get(name)
    if layout in REFUSED and (row is None or row["error"]):
        return [name, REFUSED[layout], *[""] * (width - 1)]
    if row is None:
        return [name, *[UNKNOWN] * width]
    if row["error"]:
        return [name, f"failed: {' '.join(row['error'].split())[:200]}", *[""] * (width - 1)]
    step, speed, eager = row["step_seconds"], row["tok_per_sec"]["median"], rows.get(f"{layout} eager")
    times = "1" if how == "eager" else UNKNOWN
    if how != "eager" and eager is not None and not eager["error"]:
        times = f"{speed / eager['tok_per_sec']['median']:.2f}" if same_call(row, eager) else "another call"
    return [
        name,
        f"{1e3 * step['median']:.1f} ({1e3 * step['min']:.1f} to {1e3 * step['max']:.1f})",
        f"{speed:,.0f}",
        format_number(row["peak_memory_gib"], "{:.1f}"),
        f"{row['first_step_seconds']:.1f}",
        f"{list(row['losses'].values())[-1]:.4f}",
        times,
    ]


def tables(rows: dict[str, dict]) -> str:
    """Both tables as Markdown."""
    parts = []
    for title, layouts in TABLES.items():
        lines = [cells(layout, how, rows) for layout in layouts for how in ("eager", "compiled")]
        parts.append(f"**{title}**\n\n{markdown_table(COLUMNS, lines)}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Rebuild the tables of README.md."""
    write_page(HERE / "README.md", f"\n{tables(results(HERE / 'results'))}\n")


if __name__ == "__main__":
    main()
