"""Render explain.html: one file, no script, nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.explain.kernels import KERNEL_KINDS
from sftkit.reports.components import badge, folded, html_table, section
from sftkit.reports.page import html_document
from sftkit.reports.values import Html, el, format_value, join
from sftkit.runtime.script import counted

WIDTH, LEFT, RIGHT, PITCH, THICK = 960.0, 240.0, 160.0, 34.0, 20.0
PICTURE_CSS = """
.bars svg { display: block; width: 100%; min-width: 640px; }
svg .part { fill: var(--c); }
svg .rest { fill: var(--line); }
svg .span { stroke: var(--text); stroke-width: 1.6; }
.s6 { --c: var(--line); }
th.any, td.any, code { overflow-wrap: anywhere; }
th.any { min-width: 11em; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; background: var(--c); }
"""


@dataclass(frozen=True)
class Bar:
    """A row of the picture."""

    name: str
    parts: Sequence[tuple[str, float, int]]
    "(label, value, style 0 to 6), from left to right"
    text: str
    "text next to its end"
    span: tuple[float, float] | None = None
    "position of the line across it: the claim"


def bars(rows: Sequence[Bar], label: str, styles: Sequence[tuple[str, int]] = ()) -> Html:
    """Return a figure; each part shows its label under the pointer.

    Args:
        label: text for a screen reader.
        styles: (name, style) of the legend.
    """
    ends = [sum(value for _, value, _ in row.parts) for row in rows] + [row.span[1] for row in rows if row.span]
    scale = (WIDTH - LEFT - RIGHT) / max([*ends, 1e-9])
    height = PITCH * len(rows) + 8
    drawing = el(
        "svg",
        [_row(row, index, scale) for index, row in enumerate(rows)],
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=label,
    )
    legend = [el("span", el("i", class_=f"key s{style}"), name) for name, style in styles]
    return el(
        "figure",
        el("figcaption", label),
        el("div", legend, class_="legend") if legend else None,
        el("div", drawing, class_="scroll bars"),
    )


def _row(row: Bar, index: int, scale: float) -> Html:
    top = 4 + index * PITCH
    middle = top + PITCH / 2
    parts: list[Any] = [el("text", row.name, x=LEFT - 10, y=middle + 4, text_anchor="end")]
    at = LEFT
    for name, value, style in row.parts:
        title = el("title", f"{row.name}, {name}: {format_value(value)}")
        box = {"x": round(at, 1), "y": top + (PITCH - THICK) / 2, "width": round(value * scale, 1), "height": THICK}
        parts.append(el("rect", title, class_=f"part s{style}", **box))
        at += value * scale
    end = at
    if row.span:
        low, high = (round(LEFT + value * scale, 1) for value in row.span)
        end = max(end, high)
        for x1, x2, reach in ((low, high, 0), (low, low, 8), (high, high, 8)):
            parts.append(el("line", x1=x1, x2=x2, y1=middle - reach, y2=middle + reach, class_="span"))
    parts.append(el("text", row.text, x=round(end + 8, 1), y=middle + 4))
    return el("g", parts)


_STYLED = "matrix products", "elementwise", "reductions", "attention", "communication", "copies and lookups", "idle"
STYLES = {kind: style for style, kind in enumerate(_STYLED)}

_BUSY = (
    "The machine did other work meanwhile: some calls took much longer than the quickest, so these times say little."
)
_CONFIRMED = {True: "the whole is without fault when it is left out", False: "something else is at fault too"}


def render_page(result: dict[str, Any]) -> str:
    """Return the whole page, from explain.json."""
    title = f"{result['name']} · what the compiler makes of it"
    facts = [el("li", el("b", result["device"])), el("li", f"torch {result['torch']}")]
    facts += [el("li", "shapes ", el("b", ", ".join(result["shapes"])))] if result.get("shapes") else []
    name = el("div", el("h1", result["name"]), class_="title")
    header = el("header", el("div", name, el("ul", facts, class_="facts"), el("p", result.get("beside"))))
    parts: list[Html] = []
    if "breaks" in result:
        parts.append(_breaks(result["breaks"]))
    if "bisect" in result:
        parts.append(_bisected(result["bisect"]))
    if "kernels" in result:
        parts += [time(result["kernels"]), stages(result["kernels"])]
    if "labs" in result:
        parts += _labs(result["labs"])
    return html_document(title, join(header, el("main", parts)), PICTURE_CSS)


def _breaks(breaks: dict[str, Any]) -> Html:
    rows = [
        [
            el("span", el("code", f"{row['file']}:{row['line']}"), el("br"), el("code", row["code"])),
            el("span", row["reason"], "; the rest of the function runs as Python" if row["given_up"] else None),
            row["remedy"],
            " ".join(row["dynamo_says"]),
            ", ".join(row["seen_by"]),
        ]
        for row in breaks["rows"]
    ]
    seen = [[one["name"], one["said"], one["adds"]] for one in breaks["instruments"]]
    seen_heads = ["instrument", "what it said", "what it adds, and what it leaves out"]
    verdict = badge("one graph" if not rows else f"{len(rows)} place{'s' * (len(rows) > 1)}", ok=not rows)
    return section(
        "breaks",
        "Graph breaks",
        el("p", verdict),
        html_table(["where", "why", "remedy", "Dynamo says", "seen by"], rows, text=(1, 2, 3, 4)) if rows else None,
        html_table(seen_heads, seen, "Three instruments", text=(1, 2)),
        el("h3", "Compiled again") if breaks["recompiles"] else None,
        [el("p", el("code", text)) for text in breaks["recompiles"]],
        lead="The whole module, called with one shape, with other values of it, and with another shape.",
    )


def _bisected(rows: list[dict[str, Any]]) -> Html:
    cells = []
    for row in rows:
        if row["module"] is None:
            cells.append([row["title"], badge("none", ok=True), "", "", ""])
            continue
        told = (("and", row["others"]), ("not asked, as they look like it:", row["alike"]))
        others = [el("span", el("br"), f"{words} {', '.join(names)}") for words, names in told if names]
        found = el("span", el("code", row["where"]), el("br"), row["said"], others)
        script = row["printed"]
        if row["script"]:
            script = f"{Path(row['script']).name}: {'shows it' if row['shows'] else 'does not show it by itself'}"
        cells.append(
            [row["title"], badge(row["module"], ok=False), found, _CONFIRMED.get(row["confirmed"], ""), script]
        )
    trees = [_tree(row) for row in rows if row["module"]]
    return section(
        "bisect",
        "The smallest module at fault",
        html_table(["a module that", "which", "what was found", "confirmed", "script"], cells, text=(1, 2, 3, 4)),
        trees,
        lead="Searched from the top down: if the whole has the fault, each of its parts is tested, compiled alone.",
    )


def _tree(row: dict[str, Any]) -> list[Html]:
    """Return the list of tested modules and the script, both folded."""
    asked = [[step["module"], step["found"] or "nothing"] for step in row["steps"]]
    title = f"{row['title']}: {counted(len(asked), 'module')} asked"
    parts = [folded(title, html_table(["module, compiled alone", "found"], asked, text=(1,)))]
    if row["text"]:
        parts.append(folded(f"{row['title']}: the script", el("pre", row["text"])))
    return parts


def time(result: dict[str, Any]) -> Html:
    """Return the section on the split of a step's time."""
    # The same step both ways, as bars of milliseconds by kind of work.
    eager, compiled = (result["profiles"][way] for way in ("eager", "compiled"))
    counts, rows = result["counts"], []
    for way, profile in (("eager", eager), ("compiled", compiled)):
        milliseconds = 1e3 * profile["seconds"]
        parts = [(kind, milliseconds * share, STYLES[kind]) for kind, share in profile["shares"].items()]
        rows.append(Bar(way, parts, f"{milliseconds:.2f} ms"))
    # Kinds that occur in neither way would be empty rows and entries of the legend.
    used = [kind for kind in KERNEL_KINDS if kind in eager["shares"] or kind in compiled["shares"]]
    shares = [[kind, *(f"{way['shares'].get(kind, 0.0):.1%}" for way in (eager, compiled))] for kind in used]
    heads = ["kernel or operator", "kind", "launches a step", "ms a step"]
    longest = [[one["name"][:90], one["kind"], one["launches"], one["ms"]] for one in compiled["top"]]
    # From Python to the device: operators dispatched in eager, those of them that compute, and launches of each way.
    calls = (
        ("operators dispatched in eager", "operators", counts["dispatches"], 1),
        ("of them, views left out", "operators", counts["dispatches"] - counts["views"], 1),
        ("launches in eager", "launches", counts["eager_launches"], 2),
        ("launches compiled", "launches", counts["launches"], 0),
    )
    funnel = [Bar(name, [(what, count, style)], format_value(count)) for name, what, count, style in calls]
    ratio = eager["seconds"] / compiled["seconds"]
    return section(
        "time",
        "Where a step's time goes",
        el("p", f"Compiled it is {ratio:.2f} times as fast; compiling took {counts['seconds']:.1f} s."),
        el("p", _BUSY, class_="warning") if result["busy"] else None,
        bars(
            rows,
            "A forward and backward pass in milliseconds, by kind of work",
            [(kind, STYLES[kind]) for kind in used],
        ),
        bars(funnel, "From Python to the device: how many calls a step takes"),
        html_table(["kind", "eager", "compiled"], shares, "Share of a step"),
        html_table(heads, longest, "Compiled: what takes most", text=(1,)),
        lead="Seconds of the quickest of some steps without a profiler, shares from one. On a CPU, idle is the time "
        "between operators: Python, dispatcher, guards.",
    )


def stages(result: dict[str, Any]) -> Html:
    """Return the section on graphs, ATen operators and kernels."""
    rows, kernels = [], []
    for graph in result["graphs"]:
        made = graph["kernels"] or []
        library = sum(kernel["launches"] for kernel in made if kernel["kind"] == "library")
        own = len([kernel for kernel in made if kernel["kind"] != "library"])
        name = f"{graph['id']} {graph['pass']}"
        rows.append([name, graph["function"], graph["captured_ops"], graph["aten_ops"], own, library, graph["seconds"]])
        for one in made:
            origin = ", ".join(operator.removeprefix("aten.") for operator in one["aten"])
            nodes = el("span", el("br"), ", ".join(one["nodes"]), class_="soft small") if one["nodes"] else None
            kernels.append([el("code", one["name"]), name, one["kind"], one["launches"], el("span", origin, nodes)])
    heads = ["graph", "function", "operators captured", "ATen operators", "fused kernels", "library calls", "seconds"]
    made_heads = ["kernel", "graph", "kind", "launches", "from these operators, and nodes of the graph"]
    return section(
        "stages",
        "Three stages",
        html_table(heads, rows, text=(1,)),
        html_table(made_heads, kernels, "Kernels", text=(1, 2, 4)),
        el("h3", "Performance hints") if result["hints"] else None,
        [el("p", el("code", hint)) for hint in result["hints"] if hint.strip()],
        lead=f"Dynamo captures, AOTAutograd makes ATen operators, Inductor fuses them. "
        f"{counted(result['counts']['graphs'], 'graph')}, {counted(result['counts']['breaks'], 'break')}.",
    )


def _pays(pays: dict[str, Any]) -> Html:
    """Return the section on when compiling helps, next to the claims."""
    compared, cells = [], []
    for row in pays["rows"]:
        ratio = f"{row['speedup']:.2f}"
        parts = [("times as fast", row["speedup"], 0)]
        compared.append(Bar(row["name"], parts, f"{ratio}x, {row['verdict']}", (row["low"], row["high"])))
        before = [row[key] for key in ("name", "claim", "eager_ms", "compiled_ms")]
        cells.append([*before, ratio, row["first_seconds"], row["pays_after"]])
    heads = ["code", "claimed", "eager (ms)", "compiled (ms)", "times as fast", "first call (s)", "pays after calls"]
    return section(
        "pays",
        "When does compiling help?",
        bars(compared, "Times as fast as eager; the line across each bar is the claim"),
        el("p", _BUSY, class_="warning") if any(row["busy"] for row in pays["rows"]) else None,
        html_table(heads, cells),
        lead=f"Measured on {pays['machine']}, {pays['backend']}. Other machines and sizes give other ratios.",
    )


def _labs(labs: dict[str, Any]) -> list[Html]:
    kernels = [
        [el("code", k["name"]), k["kind"], k["launches"], ", ".join(k["aten"])] for k in labs["softmax"]["kernels"]
    ]
    keys = "keys with a kernel for it, in the order in which they are asked; autocast only if it is on"
    calls = [[el("code", "· " * c["depth"] + c["name"]), ", ".join(c["keys"]) or "-"] for c in labs["dispatch"]]
    broken = [[r["name"], r["broken"], r["mended"], r["remedy"], "; ".join(r["reasons"])] for r in labs["breaks"]]
    losses = [[r["name"], r["graphs"], r["breaks"], r["recompiles"]] for r in labs["loss"]]
    return [
        _pays(labs["pays"]),
        section(
            "softmax",
            "One softmax kernel",
            html_table(["kernel", "kind", "launches", "from"], kernels, text=(1, 3)),
            lead="A linear layer and a softmax: the product is a call of a library; maximum, exponentials, sum and "
            "quotient are one kernel.",
        ),
        section(
            "dispatch",
            "What a linear layer calls",
            html_table(["operator", keys], calls, text=(1,)),
            lead="Each indented line is a call that the one above makes through the dispatcher again.",
        ),
        section(
            "causes",
            "What breaks graphs",
            html_table(["code", "breaks", "with the remedy", "remedy", "Dynamo calls it"], broken, text=(3, 4)),
        ),
        section(
            "loss",
            "A loss function chosen in forward",
            html_table(["chosen", "graphs", "breaks", "recompiles"], losses),
            lead="Two calls, of which the second takes the other loss.",
        ),
    ]
