"""Write the tables and pictures of pages from the raw files that they name: labs/compile_lab.md,
labs/patterns/README.md, docs/parallelism.md, docs/adapters.md and the READMEs of benchmarks/.

python -m labs.pages [PAGE ...]      without a page all of them, and the pictures

A table is between <!-- table NAME --> and <!-- end -->. A bench table uses one file, that of one kind of machine:
runs of two calls, whose hosts may differ, are never divided. Runs that no machine has measured are named below the
last table.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from labs.fits import FITS
from labs.patterns import paper
from labs.patterns.run import Table, bubbles, exchanges, holds, machine_line, timeline_pictures
from labs.tables import (
    ResultRow,
    Results,
    ahead_line,
    calls_line,
    clock_line,
    failed,
    failures,
    format_number,
    kept_results,
    loss_differences,
    loss_table,
    machine_lines,
    markdown_table,
    middle,
    not_measured,
    reference_row,
    run_names,
    same_call,
    speed_table,
    steps_per_sec,
)
from sftkit.config.terminal import print_text, visible
from sftkit.runtime.script import script

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
Sections = Callable[[Path, Results], Iterable[str]]
"(file, results of a kind of machine) -> its part of a page."
TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(*names: str) -> None:
    """Rebuild the named pages and the pictures; without names, all pages."""
    write({name: make for name, make in PAGES.items() if name in names or not names}, [] if names else PICTURES)


def write(pages: Mapping[str, Callable[[str], str]], pictures: Iterable[Callable[[], dict[Path, str]]] = ()) -> None:
    """Rebuild the tables of pages, and pictures."""
    for name, make in pages.items():
        (ROOT / name).write_text(rebuilt((ROOT / name).read_text(), make))
        print_text(f"tables: {ROOT / name}")
    for file, text in (item for make in pictures for item in make().items()):
        file.write_text(text)
        print_text(f"picture: {file}")


def rebuilt(page: str, make: Callable[[str], str]) -> str:
    """Return the page with each of its tables rebuilt from the raw files.

    Args:
        make: name of a table -> the table as Markdown.
    """
    return TABLE.sub(lambda match: f"{match[1]}\n{make(match[2]).strip()}\n\n{match[3]}", page)


def of_machines(
    lab: Path,
    sections: Callable[[Path, Results], Iterable[str]],
    say: Callable[[list[str]], Iterable[str]] | None = None,
) -> str:
    """Return the section of each kind of machine that a lab was measured on, below a line about the machine.

    Args:
        say: function that describes the plan's runs without a success on any machine; None: their names.
    """
    kept = kept_results(lab)
    parts = [p for file, results in kept.items() for p in (machine_lines(results["machine"]), *sections(file, results))]
    parts += (say or unmeasured)(not_measured(lab, kept.values()))
    return "\n\n".join(part for part in parts if part)


def unmeasured(names: list[str]) -> list[str]:
    """Return a line that names the runs that no machine has measured; empty without such runs."""
    return [f"Not measured: {', '.join(names)}."] if names else []


def known_rows(results: Results) -> list[ResultRow]:
    """Return the rows of a kind of machine, including those that newer rows replaced."""
    return [*results["runs"], *results.get("replaced", ())]


# ---- labs/compile_lab.md: speeds and losses of every lab ----

REFUSED = {
    "lab_gpt2": {
        "TP 2": "refused: no tensor-parallel plan for gpt2, whose query, key and value are one matrix (`c_attn`)"
    }
}
"Lab -> the run that the launch rejects on every machine, and the reason: it has no line in a table."


def lab_tables(lab: Path) -> str:
    """Return machine, speeds and losses of a lab for each kind of machine, and the runs that no
    machine has measured.
    """
    folder = f"../benchmarks/{lab.name}"
    kept = kept_results(lab)
    if not kept:
        return f"Not measured yet: none of the {len(run_names(lab))} runs of [the plan]({folder}/plan.yaml)."

    def sections(_: Path, results: Results) -> list[str]:
        rows, replaced = results["runs"], results.get("replaced", ())
        parts = [calls_line(rows), ahead_line(rows), speed_table(rows, replaced)]
        return [*parts, clock_line(rows, results["machine"]), loss_table(rows, replaced)]

    def say(missing: list[str]) -> list[str]:
        refused = REFUSED.get(lab.name, {})
        others = [name for name in missing if _layout(name) not in refused]
        broken = [row for results in kept.values() for row in results["runs"] if row["name"] in others]
        parts = unmeasured([name for name in others if name not in {row["name"] for row in broken}])
        raw = ", ".join(f"[{file.name}]({folder}/results/{file.name})" for file in kept)
        reasons = [f"{name}: {why}." for name, why in refused.items()]
        return [*parts, failures(broken), *reasons, f"Raw: {raw}; [plan]({folder}/plan.yaml)."]

    return of_machines(lab, sections, say)


def _layout(name: str) -> str:
    """Return the layout of a run: its name without the way of running it."""
    return name.rpartition(" ")[0]


# ---- benchmarks/lab_gpt2 ----

GPT2_LAYOUTS = {"One GPU": ("1 GPU",), "Two GPUs": ("DDP 2", "FSDP2 2", "TP 2")}
GPT2_COLUMNS = (
    *("", "step, ms (fastest to slowest)", "tokens/s", "peak GiB", "first step, s", "last loss", "against eager"),
)


def gpt2_tables(lab: Path) -> str:
    """Return the tables of one GPU and of two for each kind of machine, and the runs that no machine has measured."""
    refused = REFUSED["lab_gpt2"]

    def sections(_: Path, results: Results) -> Iterator[str]:
        known = known_rows(results)
        rows = [row for row in results["runs"] if not (row["error"] and _layout(row["name"]) in refused)]
        for title, layouts in GPT2_LAYOUTS.items():
            lines = [_gpt2_cells(row, known) for row in rows if _layout(row["name"]) in layouts]
            yield f"**{title}**\n\n{markdown_table(GPT2_COLUMNS, lines)}" if lines else ""

    def say(missing: list[str]) -> list[str]:
        others = unmeasured([name for name in missing if _layout(name) not in refused])
        return others + [f"{name}: {why}." for name, why in refused.items() if name in map(_layout, missing)]

    return of_machines(lab, sections, say)


def _gpt2_cells(row: ResultRow, known: list[ResultRow]) -> list[str]:
    name, eager = row["name"], f"{_layout(row['name'])} eager"
    if row["error"]:
        return [name, failed(row), *[""] * (len(GPT2_COLUMNS) - 2)]
    step = row["step_seconds"]
    return [
        name,
        f"{1e3 * step['median']:.1f} ({1e3 * step['min']:.1f} to {1e3 * step['max']:.1f})",
        f"{row['tok_per_sec']['median']:,.0f}",
        format_number(row["peak_memory_gib"], "{:.1f}"),
        f"{row['first_step_seconds']:.1f}",
        f"{list(row['losses'].values())[-1]:.4f}",
        "1" if name == eager else times(row, reference_row(eager, row, known), "tok_per_sec"),
    ]


def times(row: ResultRow, base: ResultRow | None, key: str) -> str:
    """Return a run's speed relative to another run's, if both are of one call."""
    if base is None:
        return "not measured"
    return f"{row[key]['median'] / base[key]['median']:.2f}" if same_call(row, base) else "another call"


# ---- benchmarks/lab_layouts ----

LAYOUTS = ("dynamic", "aligned", "fixed", "bucketed", "packed")
WAYS = {"eager": "#9aa5b1", "compiled": "#2f6db5", "max-autotune": "#7b4fa3"}
"Way of running a layout -> its colour in the figure."
COMPARED = ("eager", "compiled")
LAYOUT_COLUMNS = (
    *("layout", "GPUs", "eager, useful tok/s", "compiled", "times eager", "padding"),
    *("first step eager, s", "compiled, s", "compiling pays from step"),
)


def layout_tables(lab: Path) -> str:
    """Return the table of each kind of machine below its figure: bars of two kinds in one figure would be read
    as a comparison.
    """

    def sections(file: Path, results: Results) -> list[str]:
        rows, device = measured_layouts(results), results["machine"]["device"]
        shown = f"![useful tokens/s of each layout, eager and compiled, {device}]({_figure_name(file)})"
        return [ahead_line(list(rows.values())), shown, layout_table(rows)]

    return of_machines(lab, sections)


def _figure_name(file: Path) -> str:
    return "tokens.svg" if file.name == "results.json" else f"tokens-{file.stem}.svg"


def layout_figures(lab: Path) -> dict[Path, str]:
    """Return the figure of each kind of machine, by file."""
    kept = kept_results(lab).items()
    return {lab / _figure_name(f): figure(measured_layouts(made), made["machine"]["device"]) for f, made in kept}


def measured_layouts(results: Results) -> dict[str, ResultRow]:
    """Return the measured rows by name; an eager run uses the row from the call of its compiled run."""
    known = [row for row in known_rows(results) if not row["error"]]
    rows = {row["name"]: row for row in results["runs"] if not row["error"]}
    for layout, gpus in product(LAYOUTS, (1, 2)):
        eager, compiled = (f"{layout} {gpus} {way}" for way in COMPARED)
        if eager in rows and compiled in rows and (same := reference_row(eager, rows[compiled], known)):
            rows[eager] = same
    return rows


def layout_table(rows: dict[str, ResultRow]) -> str:
    """Return the layouts that were measured, eager or compiled, as Markdown."""
    lines = []
    for gpus, layout in product((1, 2), LAYOUTS):
        eager, compiled = (rows.get(f"{layout} {gpus} {way}") for way in COMPARED)
        either = eager or compiled
        if either is None:
            continue
        both = (eager, compiled)
        ratio = times(compiled, eager, "tok_per_sec") if eager and compiled and same_call(eager, compiled) else "-"
        lines.append([
            *(layout, str(gpus)),
            *(format_number(middle(row["tok_per_sec"]) if row else None, "{:,.0f}") for row in both),
            ratio,
            format_number(middle(either["padding_pct"]), "{:.1f} %"),
            *(format_number(row["first_step_seconds"] if row else None, "{:.1f}") for row in both),
            pays_from(eager, compiled) if eager and compiled else "-",
        ])  # fmt: skip
    return markdown_table(LAYOUT_COLUMNS, lines)


def pays_from(eager: ResultRow, compiled: ResultRow) -> str:
    """Return the first step at whose end the compiled run is not behind; a dash if it does not catch up, or if the
    two are of different calls and so perhaps of different hosts.
    """
    won = eager["step_seconds"]["median"] - compiled["step_seconds"]["median"]
    if won <= 0 or not same_call(eager, compiled):
        return "-"
    behind = max(compiled["first_step_seconds"] - eager["first_step_seconds"], 0.0)
    return f"{1 + math.ceil(behind / won):,}"


def figure(rows: dict[str, ResultRow], device: str) -> str:
    """Return an SVG of useful tokens/s on a device: for each layout, a bar for each way in which it was measured."""
    width, left, pitch, thick = 760, 150, 22, 16
    speeds = {name: float(row["tok_per_sec"]["median"]) for name, row in rows.items()}
    scale = (width - left - 110) / max(speeds.values(), default=1.0)
    parts, top = [], 34

    def text(x: float, y: float, words: str, anchor: str = "start") -> None:
        parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    for gpus, layout in product((1, 2), LAYOUTS):
        found = {way: speed for way in WAYS if (speed := speeds.get(f"{layout} {gpus} {way}"))}
        if found:
            top += 8
            text(left - 10, top + 13, f"{layout}, {gpus} GPU{'s' * (gpus > 1)}", "end")
        for way, speed in found.items():
            length = round(speed * scale, 1)
            parts.append(f'<rect x="{left}" y="{top}" width="{length}" height="{thick}" fill="{WAYS[way]}"/>')
            text(left + length + 6, top + 13, f"{speed:,.0f}")
            top += pitch
    for index, (way, colour) in enumerate(WAYS.items()):
        parts.append(f'<rect x="{left + 120 * index}" y="10" width="14" height="14" fill="{colour}"/>')
        text(left + 120 * index + 20, 22, way)
    text(width - 10, 22, device, "end")
    title = f"Useful tokens/s of each layout of chat data, eager and compiled: {device}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 10}" width="{width}" role="img" '
        f'font-family="sans-serif" font-size="13"><title>{escape(title)}</title>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


# ---- benchmarks/lab_captioning, next to published results ----

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
REMOVED = {
    *("static optimizer compiled", "static gradient addresses", "static foreach_map"),
    *("dynamic marked full graph", "dynamic marked full graph saved code", "dynamic marked blocks"),
    *("dynamic marked", "dynamic marked max-autotune", "parts apart", "parts apart encoder max-autotune"),
}
"Runs whose setting is gone: results have them, the plan does not."
WARM_UPS = {
    "cold": ("dynamic marked full graph", "196"),
    "saved code": ("dynamic marked full graph saved code", "56"),
    "regional": ("dynamic marked blocks", "80"),
}
"The run, and the published seconds of 20 iterations, including compilation."
CAPTION_COLUMNS = (
    *("run", "published: steps/s, A100, torch 2.7", "steps/s", "captions/s", "useful tok/s", "first 20 steps, s"),
    *("recompiles", "graph breaks", "peak GiB", "reserved GiB", "loss: most that it differs from its eager run"),
    f"captions/s of {BASELINE}",
)


def caption_tables(lab: Path) -> str:
    """Return rows, and seconds of the warm-up, for each kind of machine, and the runs that no machine has measured."""

    def sections(_: Path, results: Results) -> list[str]:
        rows, known = results["runs"], known_rows(results)
        seconds = {row["name"]: f"{row['first_steps_seconds']:.0f}" for row in rows if not row["error"]}
        lines = [[what, run, published, seconds[run]] for what, (run, published) in WARM_UPS.items() if run in seconds]
        warm_ups = markdown_table(("warm-up", "run", "published, s", "measured, s"), lines) if lines else ""
        table = markdown_table(CAPTION_COLUMNS, [_caption_cells(row, known) for row in rows])
        return [calls_line(rows), table, warm_ups]

    def say(missing: list[str]) -> list[str]:
        # The table lists failed runs with the reason.
        broken = {row["name"] for results in kept_results(lab).values() for row in results["runs"] if row["error"]}
        names = [name for name in missing if name not in broken]
        return unmeasured([f"{n} (published: {PUBLISHED[n]})" if n in PUBLISHED else n for n in names])

    return of_machines(lab, sections, say)


def _caption_cells(row: ResultRow, known: list[ResultRow]) -> list[str]:
    begin = [row["name"], PUBLISHED.get(row["name"], "-")]
    if row["error"]:
        return [*begin, failed(row), *[""] * (len(CAPTION_COLUMNS) - 3)]
    reference = reference_row(row["same_loss_as"], row, known)
    gaps = loss_differences(row, reference) if reference else {}
    unknown = "-" if row["same_loss_as"] is None else "not measured"
    ratio = times(row, reference_row(BASELINE, row, known), "documents_per_sec")
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
        f"{max(gaps.values()):.1e} in {len(gaps)} losses" if gaps else unknown,
        f"{ratio} x" if ratio[0].isdigit() else ratio,
    ]


# ---- benchmarks/h200_decode, which labs/decode.py measures ----

DECODE_TITLES = {"answers": "Answers, Qwen3 0.6B", "captions": "Captions, ViT-base and GPT-2 small"}
DECODE_COLUMNS = (
    *("rows", "way", "new tokens/s", "times eager", "first token, ms", "step, ms", "recording, ms", "warm-up, s"),
    *("recording pays from (steps)", "warm-up pays from (tokens)", "same texts in bf16"),
)


def decode_tables(results: dict[str, Any]) -> str:
    """Return speeds of each task, and whether its texts equal those of eager steps, as Markdown."""
    env, runs = results["environment"], results["runs"]
    parts = [f"{env['device']}, torch {env['packages']['torch']}, {results['new_tokens']} new tokens for each row."]
    for name, title in DECODE_TITLES.items():
        rows = [_decode_cells(run) for run in runs if run["task"] == name and not run["exact"]]
        parts.append(f"**{title}**\n\n" + markdown_table(DECODE_COLUMNS, rows))
    sizes = f"fp32, {results['exact_layers']} layers, {results['exact_tokens']} tokens"
    exact = []
    for run in (run for run in runs if run["exact"]):
        same = "" if run["error"] else f"{run['same_texts']:.0%} of {run['rows']}, {run['different_texts']} different"
        exact.append([DECODE_TITLES[run["task"]], run["way"], same or failed(run)])
    table = markdown_table(("model", "way", "same texts"), exact)
    return "\n\n".join([*parts, f"**The same texts as eager steps: {sizes}**\n\n{table}"])


def _decode_cells(run: dict[str, Any]) -> list[str]:
    first = [str(run["rows"]), run["way"]]
    if run["error"]:
        return [*first, failed(run), *[""] * (len(DECODE_COLUMNS) - 3)]
    recorded = "pays_from_steps" in run
    # None: nothing is saved, so no number of steps or tokens pays off.
    won = (run[f"pays_from_{what}"] for what in ("steps", "tokens")) if recorded else ()
    return [
        *first,
        f"{run['tok_per_sec']:,.0f}",
        f"{run['times_eager']:.2f}" if "times_eager" in run else "",
        *(f"{1e3 * run[name]:.1f}" for name in ("first_token_seconds", "step_seconds")),
        f"{1e3 * run['recording_seconds']:.1f}" if recorded else "",
        f"{run['warm_up_seconds']:.1f}",
        *(["never" if number is None else f"{math.ceil(number):,}" for number in won] or ["", ""]),
        f"{run['same_texts']:.0%}",
    ]


# ---- benchmarks/h200_patterns: what one of two GPUs does in a stretch of a step ----

STRETCHES = (
    (
        "0.6b-x2-tp",
        "0.6B, tensor parallel, one row a micro-batch: behind blocks that were queued the GPU waits for its host",
        40.0,
    ),
    (
        "0.6b-x4-tp",
        "0.6B, two shards x tensor parallel: in the last backward pass ranks wait for each other's process",
        40.0,
    ),
    ("0.6b-x2-cp-2-rows", "0.6B, context parallel, two rows a micro-batch: one exchange in a layer", 40.0),
    ("8b-x2-tp", "16 blocks of 8B, tensor parallel: the GPU computes, but for its exchanges", 40.0),
    ("1.7b-x2-1f1b", "1.7B, 1f1b: what is sent has arrived when it is needed, or nothing can run", 100.0),
    ("1.7b-x2-interleaved", "1.7B, interleaved: a receive waits beside what is computed", 100.0),
)
"Run, title, and milliseconds from the beginning of its excerpt."
WIDTH, LEFT, LANE, GAP = 960.0, 110.0, 22.0, 6.0
COLOURS = {"computing": "#4477aa", "communicating": "#ee6677"}


def timelines(folder: Path) -> str:
    """Return an SVG of STRETCHES, computing above and communicating below, from each run's events
    kept by labs.explain.kernels.
    """
    files = [json.loads((folder / "results" / f"{card}_traces.json").read_text()) for card in ("h100", "h200")]
    runs = {name: ranks for file in files for name, ranks in file["runs"].items()}
    parts, top = [], 26.0
    for run, title, milliseconds in STRETCHES:
        scale = (WIDTH - LEFT) / milliseconds
        parts.append(f'<text x="0" y="{top:g}" font-weight="bold">{title}, {milliseconds:g} ms</text>')
        lanes = {lane: top + 10 + number * (LANE + GAP) for number, lane in enumerate(COLOURS)}
        for lane, y in lanes.items():
            parts.append(f'<text x="0" y="{y + 15:g}">{lane}</text>')
            parts.append(f'<rect x="{LEFT:g}" y="{y:g}" width="{WIDTH - LEFT:g}" height="{LANE:g}" fill="#eeeeee"/>')
        for lane, begin, end in _spans(runs[run][0]["excerpt"], milliseconds):
            x, width = LEFT + begin * scale, max((end - begin) * scale, 0.3)
            box = f'x="{x:.1f}" y="{lanes[lane]:g}" width="{width:.1f}" height="{LANE:g}"'
            parts.append(f'<rect {box} fill="{COLOURS[lane]}"/>')
        top += 10 + 2 * (LANE + GAP) + 34
    style = 'font-family="sans-serif" font-size="13"'
    size = f'viewBox="0 0 {WIDTH:g} {top - 20:g}" width="{WIDTH:g}" height="{top - 20:g}"'
    label = "timelines of one GPU: computing and communicating"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} role="img" aria-label="{label}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def _spans(kernels: list[list[Any]], milliseconds: float) -> Iterator[tuple[str, float, float]]:
    """Yield (lane, start, end) in milliseconds, joining adjacent kernels of a lane."""
    open_spans: dict[str, list[float]] = {}
    for start, length, _, name in kernels:
        lane = "communicating" if name.startswith("nccl") else "computing"
        begin, end = start / 1e3, min((start + length) / 1e3, milliseconds)
        if begin >= milliseconds:
            break
        before = open_spans.get(lane)
        if before is not None and begin - before[1] < milliseconds / WIDTH:  # less than a pixel
            before[1] = max(before[1], end)
            continue
        if before is not None:
            yield lane, before[0], before[1]
        open_spans[lane] = [begin, end]
    yield from ((lane, begin, end) for lane, (begin, end) in open_spans.items())


# ---- all of them ----


@cache
def _raw(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((BENCHMARKS / name).read_text())
    return raw


PATTERNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "machine": machine_line,
    "holds": lambda results: markdown_table(*holds(results)),
    "exchanges": lambda results: markdown_table(*exchanges(results)),
    "bubbles": lambda results: markdown_table(*bubbles(results)),
    "pictures": lambda results: f"```\n{timeline_pictures(results)}\n```",
    "families": lambda _: markdown_table(*paper.families()),
    "beside": lambda _: markdown_table(*paper.beside_measured(BENCHMARKS)),
    "per_pattern": lambda _: markdown_table(*paper.per_pattern()),
    "slow_links": lambda _: markdown_table(*paper.slow_links()),
    "published": lambda _: markdown_table(*paper.published()),
}
"Tables of labs/patterns/README.md: results of `make patterns`, then estimates and runs on GPUs."
PAPER: dict[str, Callable[[], Table]] = {"chosen": paper.chosen}
"Tables of docs/parallelism.md: calculations."
LOADER_COLUMNS = (
    *("batches cross as", "rows in a step", "data workers a rank", "building, CPU s per M tokens"),
    *("as fast as they come, M tokens/s", "paced, M tokens/s", "data wait, %"),
)


def loader_table(results: dict[str, Any]) -> str:
    """Return how fast data workers build steps, as Markdown. `results`: way to pass batches on -> measurements."""
    rows = [
        [
            *(way, str(row["rows"]), str(row["workers"]), f"{row['build_seconds']:.3f}"),
            *(f"{row[part]['tokens_per_second'] / 1e6:.2f}" for part in ("free", "paced")),
            f"{row['paced']['wait_pct']:.1f}",
        ]
        for way, found in results.items()
        for row in found["rows"]
    ]
    (first, *_) = results.values()
    asked = f"{first['asked_tokens_per_second'] / 1e6:g} M tokens/s asked"
    machine = f"{first['ranks']} ranks on {first['cores']} cores, {first['gpu'] or 'no GPU'}, torch {first['torch']}"
    return f"{machine}; {asked}.\n\n{markdown_table(LOADER_COLUMNS, rows)}"


PAGES: dict[str, Callable[[str], str]] = {
    "labs/compile_lab.md": lambda name: lab_tables(BENCHMARKS / name),
    "labs/patterns/README.md": lambda name: PATTERNS[name](_raw("patterns/results/results.json")),
    "docs/parallelism.md": lambda name: markdown_table(*PAPER[name]()),
    "docs/adapters.md": lambda name: markdown_table(*FITS[name]()),
    "benchmarks/h200_adapters/README.md": lambda name: markdown_table(*FITS[name]()),
    "benchmarks/lab_gpt2/README.md": lambda _: gpt2_tables(BENCHMARKS / "lab_gpt2"),
    "benchmarks/lab_layouts/README.md": lambda _: layout_tables(BENCHMARKS / "lab_layouts"),
    "benchmarks/lab_captioning/README.md": lambda _: caption_tables(BENCHMARKS / "lab_captioning"),
    "benchmarks/loader/README.md": lambda name: loader_table(_raw(f"loader/results/{name}.json")),
    "benchmarks/h200_decode/README.md": lambda _: decode_tables(_raw("h200_decode/results/decode.json")),
}
"Page -> function that makes one of its tables, by the table's name."


def _step_page() -> dict[Path, str]:
    from labs.explain.page import render_page  # it loads torch

    name = "h200_explain/qwen3_0_6b"
    return {BENCHMARKS / f"{name}.html": visible(render_page(_raw(f"{name}.json")))}


def _layout_figures() -> dict[Path, str]:
    return layout_figures(BENCHMARKS / "lab_layouts")


def _timelines() -> dict[Path, str]:
    return {BENCHMARKS / "h200_patterns/timeline.svg": timelines(BENCHMARKS / "h200_patterns")}


PICTURES = (_layout_figures, _timelines, _step_page)


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
