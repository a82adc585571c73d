"""Write the table of this folder's README and its figure, tokens.svg, out of results/results.json.

python benchmarks/lab_layouts/tables.py
"""

import json
import math
from html import escape
from itertools import product
from pathlib import Path

from sftkit.experiments.bench.report import format_number, markdown_table, middle, reference_row, same_call, write_page

HERE = Path(__file__).parent
LAYOUTS = ("dynamic", "aligned", "fixed", "bucketed", "packed")
WAYS = {"eager": "#9aa5b1", "compiled": "#2f6db5", "max-autotune": "#7b4fa3"}
"Way of running a layout -> its colour in the figure."
COLUMNS = (
    *("layout", "GPUs", "eager, useful tok/s", "compiled", "times eager", "padding"),
    *("first step eager, s", "compiled, s", "compiling pays from step"),
)
UNKNOWN = "not measured"
WIDTH, LEFT, PITCH, THICK = 760, 150, 22, 16


def results(folder: Path) -> dict[str, dict]:
    """Return the rows that were measured, by name; of an eager run the row of the call that its compiled run is of."""
    file = folder / "results" / "results.json"
    made = json.loads(file.read_text()) if file.exists() else {"runs": []}
    known = [row for row in (*made["runs"], *made.get("replaced", ())) if not row["error"]]
    rows = {row["name"]: row for row in made["runs"] if not row["error"]}
    for layout, gpus in product(LAYOUTS, (1, 2)):
        eager, compiled = (f"{layout} {gpus} {way}" for way in ("eager", "compiled"))
        if eager in rows and compiled in rows:
            rows[eager] = reference_row(eager, rows[compiled], known)
    return rows


def pays_from(eager: dict, compiled: dict) -> str:
    """Return the first step at whose end the compiled run is not behind; a dash where it does not catch up or the two are
    of different calls, and so perhaps of different hosts."""
    won = middle(eager["step_seconds"]) - middle(compiled["step_seconds"])
    if won <= 0 or not same_call(eager, compiled):
        return "-"
    behind = max(compiled["first_step_seconds"] - eager["first_step_seconds"], 0.0)
    return f"{1 + math.ceil(behind / won):,}"


def cells(layout: str, gpus: int, rows: dict[str, dict]) -> list[str]:
    """Return the cells of a layout."""
    eager, compiled = (rows.get(f"{layout} {gpus} {how}") for how in ("eager", "compiled"))
    some = eager or compiled
    if some is None:
        return [layout, str(gpus), UNKNOWN, *[""] * (len(COLUMNS) - 3)]
    speeds = [row and middle(row["tok_per_sec"]) for row in (eager, compiled)]
    firsts = [format_number(row["first_step_seconds"], "{:.1f}") if row else UNKNOWN for row in (eager, compiled)]
    return [
        *(layout, str(gpus), *(f"{speed:,.0f}" if speed else UNKNOWN for speed in speeds)),
        f"{speeds[1] / speeds[0]:.2f}" if eager and compiled and same_call(eager, compiled) else "-",
        format_number(middle(some["padding_pct"]), "{:.1f} %"),
        *firsts,
        pays_from(eager, compiled) if eager and compiled else "-",
    ]


def table(rows: dict[str, dict]) -> str:
    """Return all layouts as Markdown."""
    return markdown_table(COLUMNS, [cells(layout, gpus, rows) for gpus in (1, 2) for layout in LAYOUTS])


def figure(rows: dict[str, dict]) -> str:
    """Return an SVG of useful tokens/s: for each layout a bar for each way in which it was measured, or that it was not."""
    speeds = {name: middle(row["tok_per_sec"]) for name, row in rows.items()}
    scale = (WIDTH - LEFT - 110) / max(speeds.values(), default=1.0)
    parts, top = [], 34
    for gpus, layout in product((1, 2), LAYOUTS):
        top += 8
        parts.append(_text(LEFT - 10, top + 13, f"{layout}, {gpus} GPU{'s' * (gpus > 1)}", "end"))
        found = {way: speeds.get(f"{layout} {gpus} {way}") for way in WAYS}
        if not any(found.values()):
            parts.append(_text(LEFT + 6, top + 13, UNKNOWN))
            top += PITCH
        for way, speed in found.items():
            if speed:
                length = round(speed * scale, 1)
                parts.append(f'<rect x="{LEFT}" y="{top}" width="{length}" height="{THICK}" fill="{WAYS[way]}"/>')
                parts.append(_text(LEFT + length + 6, top + 13, f"{speed:,.0f}"))
                top += PITCH
    for index, (way, colour) in enumerate(WAYS.items()):
        parts.append(f'<rect x="{LEFT + 120 * index}" y="10" width="14" height="14" fill="{colour}"/>')
        parts.append(_text(LEFT + 120 * index + 20, 22, way))
    title = "Useful tokens/s of each layout of chat data, eager and compiled"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 10}" width="{WIDTH}" role="img" '
        f'font-family="sans-serif" font-size="13"><title>{title}</title>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def main() -> None:
    """Rebuild the table of README.md and the figure."""
    rows = results(HERE)
    write_page(HERE / "README.md", f"\n{table(rows)}\n\n")
    (HERE / "tokens.svg").write_text(figure(rows))


if __name__ == "__main__":
    main()
