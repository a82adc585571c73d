"""explain.html: one file, no script, nothing from the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sftkit.experiments.explain.kinds import KERNEL_KINDS
from sftkit.experiments.explain.picture import PICTURE_CSS, Bar, bars
from sftkit.reports.components import badge, html_table, section
from sftkit.reports.markup import Html, el, join
from sftkit.reports.numbers import format_value
from sftkit.reports.page import html_document
from sftkit.runtime.words import counted

STYLES = {
    kind: style
    for style, kind in enumerate(("matrix products", "elementwise", "reductions", "attention", "communication"))
}
STYLES |= {"copies and lookups": 5, "idle": 6}

_BUSY = (
    "The machine did other work meanwhile: some calls took much longer than the quickest, so these times say little."
)


def render_page(result: dict[str, Any]) -> str:
    """Return the whole page, from explain.json."""
    title = f"{result['name']} · what the compiler makes of it"
    facts = [el("li", el("b", result["device"])), el("li", f"torch {result['torch']}")]
    facts += [el("li", "shapes ", el("b", ", ".join(result["shapes"])))] if result.get("shapes") else []
    beside = el("p", result["beside"]) if result.get("beside") else el("p")
    header = el(
        "header",
        el("div", el("div", el("h1", result["name"]), class_="title"), el("ul", facts, class_="facts"), beside),
    )
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
    verdict = badge("one graph" if not rows else f"{len(rows)} place{'s' * (len(rows) > 1)}", ok=not rows)
    return section(
        "breaks",
        "Graph breaks",
        el("p", verdict),
        html_table(["where", "why", "remedy", "Dynamo says", "seen by"], rows, text=(1, 2, 3, 4)) if rows else None,
        html_table(
            ["instrument", "what it said", "what it adds, and what it leaves out"],
            seen,
            "Three instruments",
            text=(1, 2),
        ),
        el("h3", "Compiled again") if breaks["recompiles"] else None,
        [el("p", el("code", text)) for text in breaks["recompiles"]],
        lead="The whole module, called with one shape, with other values of it, and with another shape.",
    )


def _bisected(rows: list[dict[str, Any]]) -> Html:
    cells = []
    for row in rows:
        there = row["module"] is not None
        confirmed = {
            True: "the whole is without fault when it is left out",
            False: "something else is at fault too",
            None: "",
        }
        script = (
            f"{Path(row['script']).name}: {'shows it' if row['shows'] else 'does not show it by itself'}"
            if row["script"]
            else row["printed"]
        )
        cells.append(
            [
                row["title"],
                badge("none" if not there else row["module"], ok=not there),
                el("span", el("code", row["where"]), el("br"), row["said"], _others(row)) if there else "",
                confirmed[row["confirmed"]] if there else "",
                script if there else "",
            ]
        )
    trees = [_tree(row) for row in rows if row["module"]]
    return section(
        "bisect",
        "The smallest module at fault",
        html_table(["a module that", "which", "what was found", "confirmed", "script"], cells, text=(1, 2, 3, 4)),
        trees,
        lead="From the top down: a module's parts are asked, each compiled by itself, where the whole of it has the fault.",
    )


def _others(row: dict[str, Any]) -> list[Html]:
    """Return which others are at fault, and which were not asked because they look like one that is."""
    told = (("and", row["others"]), ("not asked, as they look like it:", row["alike"]))
    return [el("span", el("br"), f"{words} {', '.join(names)}") for words, names in told if names]


def _tree(row: dict[str, Any]) -> list[Html]:
    """Return what was asked, and the script, both folded."""
    asked = [[step["module"], step["found"] or "nothing"] for step in row["steps"]]
    title = f"{row['title']}: {counted(len(asked), 'module')} asked"
    parts = [el("details", el("summary", title), html_table(["module, compiled by itself", "found"], asked, text=(1,)))]
    if row["text"]:
        parts.append(el("details", el("summary", f"{row['title']}: the script"), el("pre", row["text"])))
    return parts


def time(result: dict[str, Any]) -> Html:
    """Return the section on where a step's time goes."""
    # The same step both ways, as bars of milliseconds by kind of work.
    profiles, counts = result["profiles"], result["counts"]
    rows = [
        Bar(
            way,
            [
                (kind, 1e3 * profiles[way]["seconds"] * share, STYLES[kind])
                for kind, share in profiles[way]["shares"].items()
            ],
            f"{1e3 * profiles[way]['seconds']:.2f} ms",
        )
        for way in ("eager", "compiled")
    ]
    used = [kind for kind in KERNEL_KINDS if any(kind in profiles[way]["shares"] for way in profiles)]
    shares = [
        [kind, *(f"{profiles[way]['shares'].get(kind, 0.0):.1%}" for way in ("eager", "compiled"))] for kind in used
    ]
    longest = [[one["name"][:90], one["kind"], one["launches"], one["ms"]] for one in profiles["compiled"]["top"]]
    # From Python to the device: what eager dispatches, what of it computes, what each way launches.
    funnel = [
        Bar(
            "operators dispatched in eager",
            [("operators", counts["dispatches"], 1)],
            format_value(counts["dispatches"]),
        ),
        Bar(
            "of them, views left out",
            [("operators", counts["dispatches"] - counts["views"], 1)],
            format_value(counts["dispatches"] - counts["views"]),
        ),
        Bar("launches in eager", [("launches", counts["eager_launches"], 2)], format_value(counts["eager_launches"])),
        Bar("launches compiled", [("launches", counts["launches"], 0)], format_value(counts["launches"])),
    ]
    ratio = profiles["eager"]["seconds"] / profiles["compiled"]["seconds"]
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
        html_table(
            ["kernel or operator", "kind", "launches a step", "ms a step"],
            longest,
            "Compiled: what takes most",
            text=(1,),
        ),
        lead="Seconds of the quickest of some steps without a profiler, shares from one. On a CPU, idle is the time between operators: Python, dispatcher, guards.",
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
    return section(
        "stages",
        "Three stages",
        html_table(heads, rows, text=(1,)),
        html_table(
            ["kernel", "graph", "kind", "launches", "from these operators, and nodes of the graph"],
            kernels,
            "Kernels",
            text=(1, 2, 4),
        ),
        el("h3", "Performance hints") if result["hints"] else None,
        [el("p", el("code", hint)) for hint in result["hints"] if hint.strip()],
        lead=f"Dynamo captures, AOTAutograd makes ATen operators, Inductor fuses them. "
        f"{counted(result['counts']['graphs'], 'graph')}, {counted(result['counts']['breaks'], 'break')}.",
    )


def _pays(pays: dict[str, Any]) -> Html:
    """Return when compiling helps, beside what is claimed."""
    compared = [
        Bar(
            row["name"],
            [("times as fast", row["speedup"], 0)],
            f"{row['speedup']:.2f}x, {row['verdict']}",
            (row["low"], row["high"]),
        )
        for row in pays["rows"]
    ]
    cells = [
        [
            row["name"],
            row["claim"],
            row["eager_ms"],
            row["compiled_ms"],
            f"{row['speedup']:.2f}",
            row["first_seconds"],
            row["pays_after"],
        ]
        for row in pays["rows"]
    ]
    heads = ["code", "claimed", "eager (ms)", "compiled (ms)", "times as fast", "first call (s)", "pays after calls"]
    return section(
        "pays",
        "When does compiling help?",
        bars(compared, "Times as fast as eager; the line across is what is claimed"),
        el("p", _BUSY, class_="warning") if any(row["busy"] for row in pays["rows"]) else None,
        html_table(heads, cells),
        lead=f"Measured on {pays['machine']}, {pays['backend']}. Other machines and sizes give other ratios.",
    )


def _labs(labs: dict[str, Any]) -> list[Html]:
    kernels = [
        [el("code", k["name"]), k["kind"], k["launches"], ", ".join(k["aten"])] for k in labs["softmax"]["kernels"]
    ]
    calls = [[el("code", "· " * c["depth"] + c["name"]), ", ".join(c["keys"]) or "-"] for c in labs["dispatch"]]
    broken = [[r["name"], r["broken"], r["mended"], r["remedy"], "; ".join(r["reasons"])] for r in labs["breaks"]]
    losses = [[r["name"], r["graphs"], r["breaks"], r["recompiles"]] for r in labs["loss"]]
    return [
        _pays(labs["pays"]),
        section(
            "softmax",
            "One softmax kernel",
            html_table(["kernel", "kind", "launches", "from"], kernels, text=(1, 3)),
            lead="A linear layer and a softmax: the product is a call of a library; maximum, exponentials, sum and quotient are one kernel.",
        ),
        section(
            "dispatch",
            "What a linear layer calls",
            html_table(
                [
                    "operator",
                    "keys with a kernel for it, in the order in which they are asked; autocast only where it is on",
                ],
                calls,
                text=(1,),
            ),
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
