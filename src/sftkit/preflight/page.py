"""The preflight as one HTML file: no network, no script, everything from the data escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from sftkit.config.terminal import visible
from sftkit.preflight import answers
from sftkit.preflight import look as preflight
from sftkit.preflight.terminal import Preview, disk_text, layout_notes, memory_text, preview_title

_STYLE = """
:root { color-scheme: light dark; --fg: #1c2430; --bg: #fbfbfa; --card: #fff; --line: #dfe3e8; --dim: #5d6875;
  --bar: #3b76b8; --target: #0f6b35; --target-bg: #e2f4e8; --warn: #8a4b00; --warn-bg: #fff3df; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e8ee; --bg: #14181d; --card: #1c2229; --line: #343d48;
  --dim: #9aa6b3; --bar: #6aa5e6; --target: #8fdcaa; --target-bg: #173425; --warn: #ffcf8a; --warn-bg: #3a2a10; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; color: var(--fg); background: var(--bg);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: .5rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.3rem, 1fr)); gap: .6rem; }
.card, .doc { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; } .card span, .note { color: var(--dim); }
.note { font-size: .87rem; overflow-wrap: anywhere; }
.warn { color: var(--warn); background: var(--warn-bg); border-radius: .5rem; padding: .5rem .8rem; margin: .5rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--dim); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
td.wrap { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; } tr.own td { font-weight: 600; }
td.bar { width: 55%; min-width: 6rem; } .bar i { display: block; height: .8rem; background: var(--bar); min-width: 1px; }
.doc { margin: .6rem 0; } .doc pre { margin: .4rem 0 0; max-height: 28rem; overflow: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.55 ui-monospace, monospace; color: var(--dim); }
.t { color: var(--target); background: var(--target-bg); text-decoration: underline; }
.s { border: 1px solid currentColor; border-radius: .25rem; padding: 0 .2rem; }
@media print { .doc pre { max-height: none; } body { max-width: none; } }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(title: str, found: dict[str, Any], samples: Sequence[Preview]) -> str:
    """Return a whole HTML document.

    Args:
        found: what preflight.look.look returned.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="warn">{escape(warning)}</p>' for warning in found["warnings"]),
        _cards(found),
        "<h2>Sources</h2>",
        _sources(found),
        _findings(found),
        *(f"<p>{escape(line)}</p>" for source in found["sources"] if (line := answers.text(source))),
        _chat_note(found),
        "<h2>Document lengths (positions)</h2>",
        _lengths(found["lengths"]),
        "<h2>Layouts (one epoch)</h2>",
        _layouts(found["layouts"]),
        f'<p class="note">{escape(layout_notes(found))}</p>',
        "<h2>Memory, disk, time</h2>",
        *(_note(f"{name}: {text}") for name, text in _costs(found)),
    ]
    if samples:
        legend = '<span class="t">learned</span> · context · <span class="s">special token</span>'
        parts += ["<h2>Samples</h2>", f'<p class="note">{legend}</p>', *map(_sample, samples)]
    return visible(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _cards(found: dict[str, Any]) -> str:
    own, time = preflight.own_layout(found), found["time"]
    cards = {
        "documents": f"{sum(source['documents'] for source in found['sources']):,}",
        "tokens": f"{sum(source['tokens'] for source in found['sources']):,}",
        "of tokens are targets": f"{found['target_pct']:.1f} %",
        "learn their end of turn": _percent(found["end_of_turn_pct"]),
        f"padding ({own['layout']})": f"{own['padding_pct']:.1f} %",
        f"{'step' if time['steps'] == 1 else 'steps'}, {time['epochs']:.2f} epochs": f"{time['steps']:,}",
    }
    if found["memory"]:
        cards["memory of a step"] = preflight.size_text(found["memory"]["estimated_gib"])
    shown = (
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in cards.items()
    )
    return f'<div class="cards">{"".join(shown)}</div>'


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} %"


def _sources(found: dict[str, Any]) -> str:
    keys = (
        "rows",
        "documents",
        "tokens",
        "targets",
        "truncated",
        "dropped_too_long",
        "dropped_no_target",
        "skipped_bad",
    )
    heads = ("", "", *(key.replace("_", " ").replace("dropped", "dropped:") for key in keys))
    rows = []
    for use, sources in (("train", found["sources"]), ("val", found["validation"])):
        rows += [[source["name"], use, *(f"{source[key]:,}" for key in keys)] for source in sources]
    return _table(heads, rows)


def _findings(found: dict[str, Any]) -> str:
    """Return a table of why rows were left out, or what is odd in them, with the first example of each."""
    rows = [
        (source["name"], one["kind"], f"{one['rows']:,}", one["reason"], one["first"])
        for source in (*found["sources"], *found["validation"])
        for one in source["findings"]
    ]
    return _table(("", "what", "rows", "because", "the first"), rows, wrap=4) if rows else ""


def _chat_note(found: dict[str, Any]) -> str:
    texts = []
    if found["roles"]:
        roles = ", ".join(f"{count:,} {role}" for role, count in found["roles"].items())
        texts.append(f"Messages of the conversations that are learned from: {roles}.")
    if found["template_sha256"]:
        texts.append(f"Chat template sha256: {found['template_sha256']}.")
    overlap = sum(found["validation_in_train"].values())
    texts.append(f"Exact copies in training: {found['duplicate_pct']:.2f} %; of validation in training: {overlap:,}.")
    return _note(" ".join(texts))


def _lengths(lengths: dict[str, Any]) -> str:
    most = max(lengths["counts"])
    rows = "".join(
        f'<tr><td>{start:,} – {end - 1:,}</td><td>{count:,}</td><td class="bar"><i style="width:{100 * count / most:.1f}%">'
        "</i></td></tr>"
        for (start, end), count in zip(pairwise(lengths["edges"]), lengths["counts"], strict=True)
    )
    figures = ", ".join(f"{name} {lengths[key]:,.0f}" for name, key in FIGURES.items())
    return f'<div class="scroll"><table>{rows}</table></div>{_note(figures)}'


FIGURES = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99", "max": "max"}


def _layouts(layouts: Iterable[dict[str, Any]]) -> str:
    heads = ("layout", "shapes", "padding", "steps", "positions", "x dynamic", "break-even", "tok/s")
    rows = "".join(
        f"<tr{' class=own' if row['own'] else ''}><td>{escape(row['layout'])}{' *' if row['own'] else ''}</td>"
        f'<td class="wrap">{escape(row["shapes"])}</td>'
        + "".join(
            f"<td>{text}</td>"
            for text in (
                f"{row['padding_pct']:.1f} %",
                f"{row['steps']:,}",
                f"{row['positions']:,}",
                f"{row['x_dynamic']:.2f}",
                f"{row['break_even']:.2f}",
                "–" if row["tok_per_sec"] is None else f"{row['tok_per_sec']:,.0f}",
            )
        )
        + "</tr>"
        for row in layouts
    )
    return f'<div class="scroll"><table><tr>{_heads(heads)}</tr>{rows}</table></div>'


def _costs(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [("Memory", memory_text(found)), ("Disk", disk_text(found)), ("Time", preflight.time_text(found["time"]))]


def _sample(preview: Preview) -> str:
    spans = "".join(
        f'<span class="{" ".join(names)}">{escape(piece.text)}</span>' if names else escape(piece.text)
        for piece in preview.pieces
        for names in [[name for name, on in (("t", piece.target), ("s", piece.special)) if on]]
    )
    return f'<div class="doc"><b>{escape(preview_title(preview))}</b><pre>{spans}</pre></div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]], wrap: int | None = None) -> str:
    """Return a table; the column `wrap` holds long text."""

    def cell(column: int, text: str) -> str:
        return f"<td{' class=wrap' if column == wrap else ''}>{escape(text)}</td>"

    body = "".join(f"<tr>{''.join(cell(i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{_heads(heads)}</tr>{body}</table></div>'


def _heads(heads: Iterable[str]) -> str:
    return "".join(f"<th>{escape(head)}</th>" for head in heads)
