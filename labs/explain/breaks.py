"""Where and why a graph breaks, by three instruments, each of which sees what another leaves out."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # private: explain has no public name (pytorch/pytorch#102053)
from torch._dynamo.exc import TorchDynamoException  # what fullgraph=True raises; it has no public name

from labs.explain.cases import remedy_of
from labs.explain.subject import Subject
from labs.explain.torch_logs import Break, listening, read_message
from sftkit.runtime.words import counted

ADDS = {
    "explain": "graphs, operators and guards of one call at once; no break where no operator stands before it, no "
    "remedy",
    "fullgraph": "the first break as an error, with Dynamo's explanation and hints; later ones are unseen, and "
    "numbers and shapes that depend on values (.item(), x[mask]) pass, because fullgraph captures them as symbols",
    "TORCH_LOGS": "every break as it happens, functions that Dynamo gives up, and recompiles of later calls; "
    "perf_hints come from Inductor and stand with the kernels (--kernels)",
}
"Instrument -> what it adds to the others, and what it leaves out."
NONE_KNOWN = "none is known: move the line out of forward"
FOLLOWS = (
    "none of its own: it may follow from the break above it, which leaves code to be traced part by part; mend "
    "that first"
)


Seen = tuple[str, list[Break]]
"What an instrument says, in a line, and the breaks that it sees."


def breaks_of(subject: Subject) -> dict[str, Any]:
    """Compile the whole module and call it, once for each instrument; no code is generated (backend eager).

    Returns:
        instruments: what each said, and what it adds to the others.
        rows: one for each place: file, line, code, reason, explanation, remedy, dynamo_says, given_up, seen_by.
        recompiles: of the first call (code that several modules share, once for each), of one with other values of the
            same shapes, and of one with another shape: `other values: forward (FILE:LINE): the guards that failed`.
    """
    with listening():  # what they log is heard below
        seen = {"explain": _explain_breaks(subject), "fullgraph": _first_error(subject)}
    calls = [("the first call", subject.call), ("other values", subject.again)]
    calls += [("another shape", subject.other)] if subject.other else []
    again: list[str] = []
    with listening() as heard, subject.around():
        compiled = torch.compile(subject.module, backend="eager")
        for name, call in calls:
            compiled(*call.args, **call.kwargs)
            again += [f"{name}: {text}" for text in heard.recompiles()]
            heard.messages["recompiles"].clear()
    found = heard.breaks()
    said = f"breaks: {len(found)}, recompiles: {len(again)}, in {counted(len(calls), 'call')}"
    seen["TORCH_LOGS"] = said, found
    by_place: dict[tuple[str, int], list[tuple[str, Break]]] = {}
    for instrument, (_, breaks) in seen.items():
        for one in breaks:
            by_place.setdefault(one.location, []).append((instrument, one))
    return {
        "instruments": [{"name": name, "said": said, "adds": ADDS[name]} for name, (said, _) in seen.items()],
        "rows": [_row(found, first=not index) for index, found in enumerate(by_place.values())],
        "recompiles": again,
    }


def _explain_breaks(subject: Subject) -> Seen:
    """Ask torch._dynamo.explain, which resets Dynamo before and after."""
    with subject.around():
        output = torch._dynamo.explain(subject.module)(*subject.call.args, **subject.call.kwargs)
    # The last frame is the user's line; a reason without a stack, or of the end of a graph, is no break.
    places = [(one.reason, one.user_stack[-1]) for one in output.break_reasons if one.user_stack and one.graph_break]
    breaks = [read_message(reason, place.filename, place.lineno or 0) for reason, place in places]
    sizes = " + ".join(str(len(ops)) for ops in output.ops_per_graph or []) or "0"
    guards = counted(len(output.out_guards or []), "guard")
    return f"{counted(output.graph_count, 'graph')} of {sizes} operators, {guards}", breaks


def _first_error(subject: Subject) -> Seen:
    """Ask fullgraph=True, which raises at the first break."""
    torch.compiler.reset()
    try:
        with subject.around():
            compiled = torch.compile(subject.module, backend="eager", fullgraph=True)
            compiled(*subject.call.args, **subject.call.kwargs)
    except TorchDynamoException as error:
        found = read_message(str(error))
        return f"raises at the first break: {found.kind}", [found]
    finally:
        torch.compiler.reset()
    return "passes: the whole module is one graph", []


def _row(breaks: list[tuple[str, Break]], *, first: bool) -> dict[str, Any]:
    """Return what the instruments say of one place: that of the most words, the others' kinds beside it."""
    # The kind and the remedy come from one message, so that they go together.
    best = max((one for _, one in breaks), key=lambda one: len(one.explanation) + sum(map(len, one.hints)))
    return {
        "file": best.file,
        "line": best.line,
        "code": best.code,
        "reason": best.kind,
        "explanation": best.explanation,
        "remedy": remedy_of(best) or (NONE_KNOWN if first else FOLLOWS),
        "dynamo_says": list(best.hints),
        "given_up": any(one.given_up for _, one in breaks),
        "seen_by": list(dict.fromkeys(instrument for instrument, _ in breaks)),
    }
