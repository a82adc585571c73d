"""Write the tables of this folder's README out of results/*.json, each of a kind of machine: one GPU, and two.

python benchmarks/lab_gpt2/tables.py

Runs of two calls, whose hosts may differ, are not divided.
"""

from pathlib import Path

from labs.bench.kept import kept_results, not_measured
from labs.bench.report import (
    format_number,
    machine_lines,
    markdown_table,
    reference_row,
    same_call,
    write_page,
)

HERE = Path(__file__).parent
TABLES = {"One GPU": ("1 GPU",), "Two GPUs": ("DDP 2", "FSDP2 2", "TP 2")}
COLUMNS = ("", "step, ms (fastest to slowest)", "tokens/s", "peak GiB", "first step, s", "last loss", "against eager")
REFUSED = {"TP 2": "refused: no tensor-parallel plan for gpt2, whose query, key and value are one matrix (`c_attn`)"}
"What the launch refuses on every machine: it has no line in a table."


def cells(row: dict, known: list[dict]) -> list[str]:
    """Return the cells of a run; `known` are the rows of its kind of machine."""
    name, eager = row["name"], f"{layout(row['name'])} eager"
    if row["error"]:
        return [name, f"failed: {' '.join(row['error'].split())[:200]}", *[""] * (len(COLUMNS) - 2)]
    step, speed = row["step_seconds"], row["tok_per_sec"]["median"]
    return [
        name,
        f"{1e3 * step['median']:.1f} ({1e3 * step['min']:.1f} to {1e3 * step['max']:.1f})",
        f"{speed:,.0f}",
        format_number(row["peak_memory_gib"], "{:.1f}"),
        f"{row['first_step_seconds']:.1f}",
        f"{list(row['losses'].values())[-1]:.4f}",
        "1" if name == eager else times(row, reference_row(eager, row, known)),
    ]


def times(row: dict, eager: dict | None) -> str:
    """Return tokens/s over those of the eager run, if both are of one call."""
    if eager is None:
        return "not measured"
    if not same_call(row, eager):
        return "another call"
    return f"{row['tok_per_sec']['median'] / eager['tok_per_sec']['median']:.2f}"


def layout(name: str) -> str:
    """Return the layout of a run: its name without how it is run."""
    return name.rpartition(" ")[0]


def tables(folder: Path) -> str:
    """Both tables of each kind of machine as Markdown, and what was measured on none."""
    kept, parts = kept_results(folder), []
    for results in kept.values():
        known = [*results["runs"], *results.get("replaced", ())]
        rows = [row for row in results["runs"] if not (row["error"] and layout(row["name"]) in REFUSED)]
        parts += [machine_lines(results["machine"])]
        for title, layouts in TABLES.items():
            lines = [cells(row, known) for row in rows if layout(row["name"]) in layouts]
            parts += [f"**{title}**\n\n{markdown_table(COLUMNS, lines)}"] if lines else []
    missing = not_measured(folder, kept.values())
    others = [name for name in missing if layout(name) not in REFUSED]
    parts += [f"Not measured: {', '.join(others)}."] if others else []
    parts += [f"{name}: {why}." for name, why in REFUSED.items() if name in map(layout, missing)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Rebuild the tables of README.md."""
    write_page(HERE / "README.md", f"\n{tables(HERE)}\n")


if __name__ == "__main__":
    main()
