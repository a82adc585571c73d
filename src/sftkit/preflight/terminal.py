"""The output of `scripts/inspect_data.py`, on the terminal and as an HTML page: the preflight analysis, and samples
with their masks.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.config.tables import STAGE_SCRIPTS
from sftkit.config.terminal import has_colours, print_text, styled, visible
from sftkit.data.reading.columns import finding_text
from sftkit.data.tokens.template import special_tokens_of
from sftkit.data.types import Examples, Finding
from sftkit.preflight import analysis as preflight
from sftkit.preflight.hours import hours_text, span_text
from sftkit.reports import details
from sftkit.reports.values import NONE, el, headline_tiles, html_document, join, macros, section
from sftkit.runtime.script import counted

# ---- samples ---------------------------------------------------------------------------------------------------------


_SIDE = 40
"Letters of either end that are shown of what an encoder reads."


@dataclass(frozen=True)
class Preview:
    """One document as it is learned."""

    source: str
    document: int
    tokens: int
    "positions of rows that it takes, as tokens are counted everywhere: the last token shown is only ever a target"
    targets: int
    spans: Sequence[tuple[str, bool, bool]]
    "(text, whether it is a target, whether it is special) of neighbouring tokens"
    encoder_source: str = ""
    "what an encoder reads for it: the file of a picture, or a text, both ends of a long one"


def previews(examples: Examples, tokenizer: PreTrainedTokenizerBase, num_samples: int) -> list[Preview]:
    """Return `num_samples` documents spread over the data, or all of them if there are fewer."""
    special = np.asarray(tokenizer.convert_tokens_to_ids(special_tokens_of(tokenizer)))
    found = []
    for document in np.linspace(0, len(examples) - 1, num=min(num_samples, len(examples)), dtype=int).tolist():
        example = examples[document]
        is_special = np.isin(example.ids, special)
        spans = []
        # Two flags in one number, so a run of tokens ends at a change of either.
        for start, end in runs(2 * example.is_target.astype(int) + is_special):
            text = visible(str(tokenizer.decode(example.ids[start:end].tolist())))
            spans.append((text, bool(example.is_target[start]), bool(is_special[start])))
        name = examples.source_names[examples.source[document]]
        read = " ".join(examples.encoder_sources[document].split()) if examples.encoder_sources else ""
        read = f"{read[:_SIDE]}...{read[-_SIDE:]}" if len(read) > 2 * _SIDE else read
        tokens = int(examples.lengths[document])
        found.append(Preview(name, document, tokens, int(example.is_target.sum()), spans, read))
    return found


def runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return [start, end) of each run of equal values.

    Args:
        values: [n], not empty.
    """
    return list(pairwise([0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]))


def preview_title(preview: Preview) -> str:
    """Return the source of a document and its length."""
    size = f"{counted(preview.tokens, 'token')}, {counted(preview.targets, 'target')}"
    encoder_source = f", of {preview.encoder_source}" if preview.encoder_source else ""
    return f"{preview.source}, document {preview.document:,}{encoder_source}: {size}"


def preview_text(preview: Preview, *, colours: bool) -> str:
    """Return a document with targets green and underlined, context dim, special tokens reversed; without colours
    targets are in brackets."""
    title = f"\n--- {preview_title(preview)}"
    parts = [styled(title, "1") if colours else title, "\n"]
    inside = False
    for words, target, special in preview.spans:
        if colours:
            parts.append(styled(words, ("4;32" if target else "2") + ";7" * special))
            continue
        if target != inside:
            parts.append("[[" if target else "]]")
            inside = target
        parts.append(f"<{words}>" if special else words)
    return "".join(parts) + "]]" * inside


# ---- the terminal ----------------------------------------------------------------------------------------------------


def print_preflight(analysis: dict[str, Any], samples: Sequence[Preview]) -> None:
    """Print all of a preflight on the terminal. Without colours (NO_COLOR, or no terminal) brackets replace them."""
    colours = has_colours(sys.stdout)
    hours = hours_text(analysis["time"].get("hours"), "--gpu H100")
    shown = {"hours": hours, "memory": memory_text(analysis), "disk": disk_text(analysis)}
    costs = [f"{name:<10}{text}" for name, text in shown.items()]
    if analysis["adapter"]:  # a run prints it when the model is loaded
        costs.insert(0, f"{'adapter':<10}{analysis['adapter']}")
    # Why rows of a source were left out, or are odd, and which columns are not used; a run logs these itself.
    rows = []
    for source in (*analysis["sources"], *analysis["validation"]):
        rows += [f"{'rows':<10}{source['name']}: {finding_text(Finding(**one))}" for one in source["findings"]]
    for line in (*preflight.lines(analysis), *costs, *rows):
        print_text(line)
    for warning in analysis["warnings"]:
        print_text(f"warning: {warning}", level="warning")
    print_text(f"\n{layout_table(analysis)}")
    if samples:
        legend = [styled("targets", "4;32"), styled("context", "2"), styled("special", "7")]
        print_text(f"\n{' '.join(legend)}" if colours else "\n[[targets]] <<|special|>>", is_styled=colours)
    for sample in samples:
        print_text(preview_text(sample, colours=colours), is_styled=colours)


def stage_text(stage: str, *, is_asked: bool) -> str:
    """Return which stage is shown, why, and how to see another."""
    others = " or ".join(name for name in STAGE_SCRIPTS if name != stage)
    origin = f"{stage}, {'as asked' if is_asked else 'run.stage of the recipe'}"
    return f"{'stage':<10}{origin}: shown is what scripts/{STAGE_SCRIPTS[stage]} learns; --stage {others} for another"


def memory_text(analysis: dict[str, Any]) -> str:
    """Return the estimated peak with its larger parts, against the GPU's size if that is known."""
    memory = analysis["memory"]
    if memory is None:
        return "unknown: the sizes of the model are"
    least = memory["estimated_gib"] / 200  # what would not show in the sum is left out
    shown = {name.replace("_", " "): gib for name, gib in memory["parts_gib"].items() if gib >= least > 0}
    parts = ", ".join(f"{name} {preflight.size_text(gib)}" for name, gib in shown.items())
    gpu = memory["gpu_gib"]
    size = f" of {gpu:.1f} GiB" if gpu else " (none is here; --gpu H100 or --gpu-gib 80 compares it with one)"
    total = preflight.size_text(memory["estimated_gib"])
    count = memory["processes"]
    where = "one GPU" if count == 1 else f"each of {count} GPUs ({memory['topology']})"
    return f"about {total} on {where}{size}: {parts}; optimizer {memory['optimizer']}"


def disk_text(analysis: dict[str, Any]) -> str:
    """Return what checkpoints take at most, and what is free."""
    disk = analysis["disk"]
    free = f"{preflight.size_text(disk['free_gib'])} free in {disk['folder']}"
    if disk["checkpoint_gib"] is None:
        return f"{free}; size of a checkpoint unknown"
    number = "one checkpoint" if disk["checkpoints"] == 1 else f"at most {disk['checkpoints']} checkpoints"
    return f"{free}; {number} of {preflight.size_text(disk['checkpoint_gib'])}"


def layout_table(analysis: dict[str, Any]) -> str:
    """Return a table of the numbers of each layout on this data."""
    cells = [("layout", "padding", "steps", "positions", "shapes (rows x positions)")]
    for row in analysis["layouts"]:
        numbers = f"{row['padding_pct']:.1f} %", f"{row['steps']:,}", f"{row['positions']:,}"
        cells.append((f"{row['layout']} *" if row["own"] else row["layout"], *numbers, row["shapes"]))
    first, *others = (max(map(len, column)) for column in list(zip(*cells, strict=True))[:-1])
    lines = ["layouts on this data (one epoch)"]
    for name, *columns, shapes in cells:
        aligned = [number.rjust(width) for number, width in zip(columns, others, strict=True)]
        lines.append("  ".join((name.ljust(first), *aligned, shapes)))
    return "\n".join([*lines, "", "* the recipe's own"])


def page(title: str, analysis: dict[str, Any], samples: Sequence[Preview]) -> str:
    """Return a whole HTML document.

    Args:
        analysis: what preflight.analysis.analyse returned.
    """
    own = preflight.own_layout(analysis)
    time = analysis["time"]
    # The main numbers: name, value, and a remark.
    tiles = [
        ("documents", f"{sum(source['documents'] for source in analysis['sources']):,}", ""),
        ("tokens", f"{sum(source['tokens'] for source in analysis['sources']):,}", ""),
        ("targets", _percent(analysis["target_pct"]), "of tokens"),
        ("end of turn", _percent(analysis["end_of_turn_pct"]), "of answers learn it"),
        ("padding", _percent(own["padding_pct"]), own["layout"]),
        ("step" if time["steps"] == 1 else "steps", f"{time['steps']:,}", f"{time['epochs']:.2f} epochs"),
    ]
    if low := time.get("hours", {}).get("low"):
        high = time["hours"]["high"]
        tiles.append(
            ("time", span_text(low if high is None else high), f"at {'least' if high is None else 'most'}, estimated")
        )
    if analysis["memory"]:
        tiles.append(("memory", preflight.size_text(analysis["memory"]["estimated_gib"]), "of a step"))
    name = el("div", el("h1", title), class_="title")
    header = el("header", el("div", name, details.warnings_section(analysis), headline_tiles(tiles)))
    parts = [section("data", "Data", details.data_tables(analysis))]
    if samples:
        documents = [(preview_title(preview), preview.spans) for preview in samples]
        parts.append(section("samples", "Samples", macros.documents(documents)))
    # The whole page is escaped: names of files and texts of data may hold control characters.
    return visible(html_document(title, join(header, el("main", parts)), macros.documents_style()))


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f} %"
