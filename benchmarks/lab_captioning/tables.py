"""Write the tables of this folder's README out of results/*.json, each of a kind of machine, beside what was published.

python benchmarks/lab_captioning/tables.py
"""

from pathlib import Path

from labs.bench.kept import kept_results, not_measured
from labs.bench.report import (
    calls_line,
    format_number,
    loss_differences,
    machine_lines,
    markdown_table,
    middle,
    reference_row,
    same_call,
    steps_per_sec,
    write_page,
)

HERE = Path(__file__).parent
BASELINE = "dynamic eager"
PUBLISHED = {
    "static eager": "3.1 (derived)",
    "static full graph": "5.17",
    "static optimizer compiled": "5.54",
    "static gradient addresses": "5.32",
    "static foreach_map": "5.28",
    "static DDP 2": "4.59 per GPU",
    "dynamic eager": "4.73",
    "dynamic marked full graph": "7.78",
    "dynamic marked blocks": "7.61",
    "dynamic marked max-autotune": "8.13",
    "dynamic all sizes": "7.77",
    "dynamic all sizes max-autotune-no-cudagraphs": "7.89",
    "eight static graphs": "7.77",
    "eight static graphs max-autotune": "8.04",
    "parts apart": "7.93",
    "parts apart encoder max-autotune": "8.04",
}
"Steps per second on one A100 with torch 2.7, batches of 64 captions."
WARM_UPS = {
    "cold": ("dynamic marked full graph", "196"),
    "saved code": ("dynamic marked full graph saved code", "56"),
    "regional": ("dynamic marked blocks", "80"),
}
"The run, and the published seconds of 20 iterations, compiling among them."
COLUMNS = (
    *("run", "published: steps/s, A100, torch 2.7", "steps/s", "captions/s", "useful tok/s", "first 20 steps, s"),
    *("recompiles", "graph breaks", "peak GiB", "reserved GiB", "loss: most that it differs from its eager run"),
    f"captions/s of {BASELINE}",
)
UNKNOWN = "not measured"


def cells(row: dict, known: list[dict]) -> list[str]:
    """Return the cells of a run in the table of speeds; `known` are the rows of its kind of machine."""
    begin = [row["name"], PUBLISHED.get(row["name"], "-")]
    if row["error"]:
        return [*begin, f"failed: {' '.join(row['error'].split())[:200]}", *[""] * (len(COLUMNS) - 3)]
    reference = reference_row(row["same_loss_as"], row, known)
    gaps = loss_differences(row, reference) if reference else {}
    return [
        *begin,
        format_number(steps_per_sec(row), "{:.2f}"),
        format_number(middle(row["documents_per_sec"]), "{:,.0f}"),
        format_number(middle(row["tok_per_sec"]), "{:,.0f}"),
        format_number(row["first_steps_seconds"], "{:.0f}"),
        format_number(row["compile"]["recompiles"], "{:.0f}"),
        format_number(row["compile"]["graph_breaks"], "{:.0f}"),
        format_number(row["peak_memory_gib"], "{:.1f}"),
        format_number(row["reserved_memory_gib"], "{:.1f}"),
        f"{max(gaps.values()):.1e} in {len(gaps)} losses" if gaps else "-" if row["same_loss_as"] is None else UNKNOWN,
        ratio(row, reference_row(BASELINE, row, known)),
    ]


def ratio(row: dict, base: dict | None) -> str:
    """Return captions/s over those of the baseline, if both are of one call."""
    if base is None:
        return UNKNOWN
    if not same_call(row, base):
        return "another call"
    return f"{middle(row['documents_per_sec']) / middle(base['documents_per_sec']):.2f} x"


def tables(folder: Path) -> str:
    """Machine, rows, and seconds of the warm-up of each kind of machine as Markdown, and what was measured on none."""
    kept, parts = kept_results(folder), []
    for results in kept.values():
        rows = results["runs"]
        known = [*rows, *results.get("replaced", ())]
        parts += [machine_lines(results["machine"]), calls_line(rows)]
        parts += [markdown_table(COLUMNS, [cells(row, known) for row in rows])]
        seconds = {row["name"]: f"{row['first_steps_seconds']:.0f}" for row in rows if not row["error"]}
        lines = [[what, run, published, seconds[run]] for what, (run, published) in WARM_UPS.items() if run in seconds]
        parts += [markdown_table(("warm-up", "run", "published, s", "measured, s"), lines)] if lines else []
    # What failed stands in the table, with why.
    failed = {row["name"] for results in kept.values() for row in results["runs"] if row["error"]}
    missing = [name for name in not_measured(folder, kept.values()) if name not in failed]
    missing = [f"{name} (published: {PUBLISHED[name]})" if name in PUBLISHED else name for name in missing]
    parts += [f"Not measured: {', '.join(missing)}."] if missing else []
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    """Rebuild the tables of README.md."""
    write_page(HERE / "README.md", f"\n{tables(HERE)}\n")


if __name__ == "__main__":
    main()
