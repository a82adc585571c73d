"""The preflight as one HTML file: no network, no script, everything from the data escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sftkit.config.terminal import visible
from sftkit.preflight import analysis as preflight
from sftkit.preflight.terminal import Preview, TextSpan, disk_text, layout_notes, memory_text, preview_title
from sftkit.reports import details
from sftkit.reports.components import headline_tiles, section
from sftkit.reports.markup import Html, el, join
from sftkit.reports.numbers import NONE
from sftkit.reports.page import html_document

_CSS = """
.headline { grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); margin-bottom: 16px; }
.doc { margin: 14px 0; }
.doc pre { margin-top: 6px; max-height: 28rem; overflow: auto; color: var(--soft); }
.t { color: var(--good); background: var(--good-back); text-decoration: underline; }
.s { border: 1px solid currentColor; border-radius: 4px; padding: 0 3px; }
@media print { .doc pre { max-height: none; } }
"""


def page(title: str, analysis: dict[str, Any], samples: Sequence[Preview]) -> str:
    """Return a whole HTML document.

    Args:
        analysis: what preflight.analysis.analyse returned.
    """
    name = el("div", el("h1", title), class_="title")
    header = el("header", el("div", name, details.warnings_section(analysis), headline_tiles(_tiles(analysis))))
    notes = (
        f"Layouts: {layout_notes(analysis)}",
        f"Memory: {memory_text(analysis)}",
        f"Disk: {disk_text(analysis)}",
        f"Time: {preflight.time_text(analysis['time'])}",
    )
    small = [el("p", note, class_="soft small") for note in notes]
    parts = [section("data", "Data", details.data_tables(analysis), small)]
    if samples:
        legend = (el("span", "learned", class_="t"), " · context · ", el("span", "special token", class_="s"))
        parts.append(section("samples", "Samples", el("p", legend, class_="soft"), list(map(_sample, samples))))
    # Of the whole page: names of files and texts of data may hold control characters.
    return visible(html_document(title, join(header, el("main", parts)), _CSS))


def _tiles(analysis: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what a person looks at first: what it is, its value, and what belongs to it."""
    own, time = preflight.own_layout(analysis), analysis["time"]
    yield "documents", f"{sum(source['documents'] for source in analysis['sources']):,}", ""
    yield "tokens", f"{sum(source['tokens'] for source in analysis['sources']):,}", ""
    yield "targets", _percent(analysis["target_pct"]), "of tokens"
    yield "end of turn", _percent(analysis["end_of_turn_pct"]), "of answers learn it"
    yield "padding", _percent(own["padding_pct"]), own["layout"]
    yield "step" if time["steps"] == 1 else "steps", f"{time['steps']:,}", f"{time['epochs']:.2f} epochs"
    if analysis["memory"]:
        yield "memory", preflight.size_text(analysis["memory"]["estimated_gib"]), "of a step"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f} %"


def _sample(preview: Preview) -> Html:
    """Return a document with what is learned and what is special marked."""
    return el("div", el("b", preview_title(preview)), el("pre", list(map(_span, preview.spans))), class_="doc")


def _span(span: TextSpan) -> str | Html:
    names = [name for name, on in (("t", span.target), ("s", span.special)) if on]
    return el("span", span.text, class_=" ".join(names)) if names else span.text
