"""Write the tables of this folder's README and their figures out of results/*.json, each of a kind of machine.

python benchmarks/lab_layouts/tables.py
"""

import math
from html import escape
from itertools import product
from pathlib import Path

from labs.bench.kept import kept_results, not_measured
from labs.bench.report import (
    ahead_line,
    format_number,
    machine_lines,
    markdown_table,
    middle,
    reference_row,
    same_call,
    write_page,
)

HERE = Path(__file__).parent
LAYOUTS = ("dynamic", "aligned", "fixed", "bucketed", "packed")
WAYS = {"eager": "#9aa5b1", "compiled": "#2f6db5", "max-autotune": "#7b4fa3"}
"Way of running a layout -> its colour in the figure."
COMPARED = ("eager", "compiled")
COLUMNS = (
    *("layout", "GPUs", "eager, useful tok/s", "compiled", "times eager", "padding"),
    *("first step eager, s", "compiled, s", "compiling pays from step"),
)
WIDTH, LEFT, PITCH, THICK = 760, 150, 22, 16


def measured(made: dict) -> dict[str, dict]:
    """Return the rows of results that were measured, by name; of an eager run the row of the call that its compiled run is of."""
    known = [row for row in (*made["runs"], *made.get("replaced", ())) if not row["error"]]
    rows = {row["name"]: row for row in made["runs"] if not row["error"]}
    for layout, gpus in product(LAYOUTS, (1, 2)):
        eager, compiled = (f"{layout} {gpus} {way}" for way in COMPARED)
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
    """Return the cells of a layout that was measured, eager or compiled."""
    eager, compiled = (rows.get(f"{layout} {gpus} {way}") for way in COMPARED)
    speeds = [row and middle(row["tok_per_sec"]) for row in (eager, compiled)]
    firsts = [row and row["first_step_seconds"] for row in (eager, compiled)]
    return [
        *(layout, str(gpus), *(format_number(speed, "{:,.0f}") for speed in speeds)),
        f"{speeds[1] / speeds[0]:.2f}" if eager and compiled and same_call(eager, compiled) else "-",
        format_number(middle((eager or compiled)["padding_pct"]), "{:.1f} %"),
        *(format_number(seconds, "{:.1f}") for seconds in firsts),
        pays_from(eager, compiled) if eager and compiled else "-",
    ]


def table(rows: dict[str, dict]) -> str:
    """Return the layouts that were measured as Markdown."""
    places = product((1, 2), LAYOUTS)
    found = [(layout, gpus) for gpus, layout in places if rows.keys() & {f"{layout} {gpus} {way}" for way in COMPARED}]
    return markdown_table(COLUMNS, [cells(*place, rows) for place in found])


def figure(rows: dict[str, dict], device: str) -> str:
    """Return an SVG of useful tokens/s on a device: for each layout a bar for each way in which it was measured."""
    speeds = {name: middle(row["tok_per_sec"]) for name, row in rows.items()}
    scale = (WIDTH - LEFT - 110) / max(speeds.values(), default=1.0)
    parts, top = [], 34
    for gpus, layout in product((1, 2), LAYOUTS):
        found = {way: speed for way in WAYS if (speed := speeds.get(f"{layout} {gpus} {way}"))}
        if found:
            top += 8
            parts.append(_text(LEFT - 10, top + 13, f"{layout}, {gpus} GPU{'s' * (gpus > 1)}", "end"))
        for way, speed in found.items():
            length = round(speed * scale, 1)
            parts.append(f'<rect x="{LEFT}" y="{top}" width="{length}" height="{THICK}" fill="{WAYS[way]}"/>')
            parts.append(_text(LEFT + length + 6, top + 13, f"{speed:,.0f}"))
            top += PITCH
    for index, (way, colour) in enumerate(WAYS.items()):
        parts.append(f'<rect x="{LEFT + 120 * index}" y="10" width="14" height="14" fill="{colour}"/>')
        parts.append(_text(LEFT + 120 * index + 20, 22, way))
    parts.append(_text(WIDTH - 10, 22, device, "end"))
    title = f"Useful tokens/s of each layout of chat data, eager and compiled: {device}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 10}" width="{WIDTH}" role="img" '
        f'font-family="sans-serif" font-size="13"><title>{escape(title)}</title>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def tables(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the README's tables, each below its figure, and the figures by file name: one of each kind of machine, since
    bars of two would be read as a comparison; and what was measured on none."""
    kept, parts, figures = kept_results(folder), [], {}
    for file, results in kept.items():
        rows, machine = measured(results), results["machine"]
        name = "tokens.svg" if file.name == "results.json" else f"tokens-{file.stem}.svg"
        figures[name] = figure(rows, machine["device"])
        shown = f"![useful tokens/s of each layout, eager and compiled, {machine['device']}]({name})"
        parts += [machine_lines(machine), ahead_line(list(rows.values())), shown, table(rows)]
    missing = not_measured(folder, kept.values())
    parts += [f"Not measured: {', '.join(missing)}."] if missing else []
    return "\n\n".join(part for part in parts if part) + "\n", figures


def main() -> None:
    """Rebuild the tables of README.md and the figures."""
    text, figures = tables(HERE)
    write_page(HERE / "README.md", f"\n{text}\n")
    for name, figure in figures.items():
        (HERE / name).write_text(figure)


if __name__ == "__main__":
    main()
