"""Lines for a terminal that say what was found."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from sftkit.runtime.words import counted


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """Yield the whole result, line by line."""
    yield f"{result['name']} on {result['device']}, torch {result['torch']}"
    if result.get("beside"):
        yield result["beside"]
    if "breaks" in result:
        yield from _breaks(result["breaks"])
    for row in result.get("bisect", []):
        yield from _bisected(row)
    if "kernels" in result:
        yield from _kernels(result["kernels"])
    if "labs" in result:
        yield from _labs(result["labs"])


def wrapped(line: str, width: int) -> Iterator[str]:
    """Yield a line in so many columns, what follows the first indented; words, so paths and commands too, stay
    whole."""
    indent = " " * (len(line) - len(line.lstrip(" ")) + 4)
    parts = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    yield from parts or [""]


def _breaks(breaks: dict[str, Any]) -> Iterator[str]:
    yield f"\ngraph breaks: {len(breaks['rows'])}"
    for row in breaks["rows"]:
        yield f"  {row['file']}:{row['line']}: {row['code']}"
        yield f"    why     {row['reason']}" + ("; the rest of the function runs as Python" if row["given_up"] else "")
        yield f"    remedy  {row['remedy']}"
        yield f"    seen by {', '.join(row['seen_by'])}"
    for one in breaks["instruments"]:
        yield f"  {one['name']}: {one['said']}"
    for text in breaks["recompiles"]:
        yield f"  compiled again: {text}"


def _bisected(row: dict[str, Any]) -> Iterator[str]:
    if row["module"] is None:
        yield f"\nwhich module {row['title']}? none"
        return
    yield f"\nwhich module {row['title']}? {row['module']}, {row['where']}"
    yield f"  {row['said']}"
    for step in row["steps"]:
        yield f"    {'fault' if step['found'] else '  ok '}  {step['module']}"
    if row["others"]:
        yield f"  and {', '.join(row['others'])}"
    if row["alike"]:
        yield f"  not asked, as they look like it: {', '.join(row['alike'])}"
    if row["confirmed"] is not None:
        without = "without fault" if row["confirmed"] else "still at fault: something else is too"
        yield f"  the whole with these left out of the graph: {without}"
    if row["script"]:
        yield f"  {'shows it' if row['shows'] else 'does not show it by itself'}: python {row['script']}"
    else:
        yield f"  {row['printed']}"


def _kernels(result: dict[str, Any]) -> Iterator[str]:
    counts = result["counts"]
    yield (
        f"\na training step: {counts['dispatches']:,} operators dispatched in eager ({counts['views']:,} of them "
        f"views), {counts['launches']:,} launches compiled; {counted(counts['graphs'], 'graph')}, "
        f"{counted(counts['breaks'], 'break')}"
    )
    if result["busy"]:
        yield "  the machine did other work meanwhile: these times say little"
    for way in ("eager", "compiled"):
        profile = result["profiles"][way]
        # Below half a percent a share would read 0 %.
        shares = (f"{kind} {share:.0%}" for kind, share in profile["shares"].items() if share >= 0.005)
        yield f"  {way:8}  {1e3 * profile['seconds']:8.2f} ms  {', '.join(shares)}"
    for graph in result["graphs"]:
        kernels = graph["kernels"] or []
        known = graph["aten_ops"] is not None
        operators = counted(graph["aten_ops"], "ATen operator") if known else "ATen operators not known"
        yield (
            f"  graph {graph['id']} {graph['pass']}: {graph['function']}, {operators}, "
            f"{counted(len(kernels), 'kernel')}"
        )


def _labs(labs: dict[str, Any]) -> Iterator[str]:
    softmax = labs["softmax"]
    yield f"\nlinear + softmax: {', '.join(k['name'] for k in softmax['kernels'])}"
    yield "\na linear layer, as the dispatcher sees it:"
    for call in labs["dispatch"]:
        yield f"  {'  ' * call['depth']}{call['name']}"
    yield "\nwhat breaks graphs (breaks before and after the remedy)"
    for row in labs["breaks"]:
        yield f"  {row['broken']} -> {row['mended']}  {row['name']}: {row['remedy']}"
    yield "\na loss function chosen in forward"
    for row in labs["loss"]:
        numbers = (counted(row[f"{noun}s"], noun) for noun in ("graph", "break", "recompile"))
        yield f"  {row['name']}: {', '.join(numbers)}"
    yield f"\nwhen does compiling help? {labs['pays']['machine']}"
    if any(row["busy"] for row in labs["pays"]["rows"]):
        yield "  the machine did other work meanwhile: these times say little"
    for row in labs["pays"]["rows"]:
        yield f"  {row['name']:34}  {row['speedup']:5.2f}x  (claimed {row['claim']})"
