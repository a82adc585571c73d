"""Find where and why a graph breaks, by three instruments that each see something the others miss; also a list of
code that breaks graphs, each case with a remedy.
"""

from __future__ import annotations

import linecache
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # private: explain has no public name (pytorch/pytorch#102053)
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException  # raised by fullgraph=True; it has no public name
from torch.nn import functional as F

from labs.explain.compiler_logs import artifact_of, torch_logs_to
from labs.explain.run import refuse_torch_logs
from labs.explain.subject import Subject
from sftkit.runtime.script import counted

TORCH_LOGS = ("graph_breaks", "recompiles", "perf_hints")
GIVEN_UP = "Failed to handle graph break gracefully"
_LAST_PLACE = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_WRAPPER = re.compile(r"^(?:Encountered graph break when attempting to trace|Failed to handle graph break)[^\n]*\n\s*")
_PARTS = re.compile(r"^ *(Explanation|Hint): (.*?)(?=^ *(?:Hint|Developer debug context): |\n\n|\Z)", re.M | re.S)
_EMPTY_HINT = (
    "Please report",
    "File an issue",
    "This graph break is fundamental",
    "This graph break may have been caused by an earlier",
    "It may be possible to write Dynamo tracing rules",
)
"Beginnings of hints that do not help."
DATA_DEPENDENT = "Data-dependent branching"


@dataclass(frozen=True)
class Break:
    """A place where the graph ends."""

    file: str
    line: int
    kind: str
    "first line of Dynamo's message"
    explanation: str = ""
    hints: tuple[str, ...] = ()
    given_up: bool = False
    "whether the rest of the function is left to Python, not only this line"

    @property
    def code(self) -> str:
        """Return the line of the source."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def location(self) -> tuple[str, int]:
        """Return (file, line)."""
        return self.file, self.line


class TorchLogHandler(logging.Handler):
    """A handler that keeps the records of TORCH_LOGS, by the name of the log."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: dict[str, list[str]] = {name: [] for name in TORCH_LOGS}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record of one of TORCH_LOGS."""
        if (name := artifact_of(record)) in self.messages:
            self.messages[name].append(record.getMessage())

    def for_terminal(self, record: logging.LogRecord) -> bool:
        """Return whether the terminal should show the record as usual."""
        return artifact_of(record) not in self.messages

    def breaks(self) -> list[Break]:
        """Return the graph breaks without duplicates: the log repeats a break in every recompiled graph."""
        found: dict[tuple[str, int, str], Break] = {}
        for one in map(read_message, self.messages["graph_breaks"]):
            found.setdefault((*one.location, one.kind), one)
        return list(found.values())

    def recompiles(self) -> list[str]:
        """Return `forward (FILE:LINE): the guards that failed`, one for each recompiled graph."""
        return [recompile_of(text) for text in self.messages["recompiles"]]


@contextmanager
def listening() -> Iterator[TorchLogHandler]:
    """Keep the logs within the context, starting without compiled code, and forget the compiled code afterwards:
    Dynamo caches code by Python function, which modules share, and does not trace it again.

    Raises:
        ConfigError: TORCH_LOGS is set, which overrides the settings here.
    """
    refuse_torch_logs()
    # dynamo at ERROR: otherwise its own warnings would appear on the terminal as well.
    heard = TorchLogHandler()
    wanted = {"dynamo": logging.ERROR, **dict.fromkeys(TORCH_LOGS, True)}
    with torch_logs_to(heard, heard.for_terminal, **wanted), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo also warns of some breaks
        torch.compiler.reset()
        yield heard
        # Again afterwards: the next question would find code compiled for this one.
        torch.compiler.reset()


def read_message(text: str, file: str = "?", line: int = 0) -> Break:
    """Parse a message of Dynamo from a log, an exception or a reason of `torch._dynamo.explain`.

    Args:
        file, line: the place, if the message does not contain it.
    """
    # The place is in the log's own header, otherwise in the user's part of the stack, whose last line is
    # the innermost.
    first = re.match(r"Graph break(?: \([^)]*\))? in user code at (.*):(\d+)\n(?:Graph Break Reason: )?", text)
    if first:
        file, line, text = first[1], int(first[2]), text[first.end() :]
        text = text.partition("\nUser code traceback:")[0]
    body, _, user = text.partition("\nfrom user code:")
    if user and (places := _LAST_PLACE.findall(user)):
        file, line = places[-1][0], int(places[-1][1])
    # A nested break is wrapped in additional lines: the innermost has the reason.
    given_up = GIVEN_UP in body
    while wrapper := _WRAPPER.match(body.lstrip()):
        body = body.lstrip()[wrapper.end() :]
    body = body.strip()
    kind = body.partition("\n")[0].strip() or "unknown"
    if kind.startswith("generic_jump"):
        kind = DATA_DEPENDENT
    # Explanation and hints each extend to the next heading, an empty line or the end.
    said: dict[str, list[str]] = {"Explanation": [], "Hint": []}
    for heading, words in _PARTS.findall(body):
        said[heading].append(" ".join(words.split()))
    hints = tuple(hint for hint in said["Hint"] if not hint.startswith(_EMPTY_HINT))
    return Break(file, line, kind, next(iter(said["Explanation"]), ""), hints, given_up)


def recompile_of(text: str) -> str:
    """Parse a record of the log `recompiles`: the function, its place, the guards that failed."""
    function = re.search(r"Recompiling function (\S+) in (.*):(\d+)", text)
    guards = [guard.partition(" # ")[0].strip() for guard in re.findall(r"^\s*- \d+/\d+: (.*)$", text, re.M)]
    where = f"{function[1]} ({function[2]}:{function[3]})" if function else "?"
    return f"{where}: {'; '.join(dict.fromkeys(guards)) or 'unknown guard'}"


Function = Callable[..., Any]


@dataclass(frozen=True)
class GraphBreakCase:
    """Code that breaks the graph."""

    name: str
    kinds: tuple[str, ...]
    "beginnings of Dynamo's reasons"
    breaking: Function
    fixed: Function
    remedy: str


def branch(x: Tensor) -> Tensor:
    """Branch in Python on a tensor's value."""
    if x.sum() > 0:
        return x * 2
    return x


def branchless(x: Tensor) -> Tensor:
    """Compute both sides and choose with torch.where."""
    return torch.where(x.sum() > 0, x * 2, x)


def _item(x: Tensor) -> Tensor:
    return x / x.max().item()


def no_item(x: Tensor) -> Tensor:
    """Divide by a 0-dim tensor."""
    return x / x.max()


def selected(x: Tensor) -> Tensor:
    """Make a tensor whose shape depends on values."""
    return x[x > 0].sum()


def masked(x: Tensor) -> Tensor:
    """Keep the shape, with zeros at the omitted values."""
    return torch.where(x > 0, x, 0.0).sum()


def printed(x: Tensor) -> Tensor:
    """Print between two operators."""
    y = x * 2
    print("", end="")
    return y + 1


def silent(x: Tensor) -> Tensor:
    """Compute the same as `printed`, `_timed`, `marked` and `_written` without side effects."""
    return x * 2 + 1


def _timed(x: Tensor) -> Tensor:
    y = x * 2
    time.sleep(0)
    return y + 1


@torch.compiler.disable
def by_hand(x: Tensor) -> Tensor:
    """Stay out of the graph."""
    return x * 2


def disabled(x: Tensor) -> Tensor:
    """Call a function that stays out of the graph."""
    return by_hand(x + 1) + 1


def enabled(x: Tensor) -> Tensor:
    """Compute the same as `disabled` in one graph."""
    return (x + 1) * 2 + 1


def marked(x: Tensor) -> Tensor:
    """Break the graph by Dynamo's own call."""
    y = x * 2
    # Private (pytorch/torchdynamo#1482): the call that this case is about.
    torch._dynamo.graph_break()
    return y + 1


def _written(x: Tensor) -> Tensor:
    y = x * 2
    with open("/dev/null", "w") as file:
        file.write("a line")
    return y + 1


GRAPH_BREAK_CASES = (
    GraphBreakCase(
        "a branch on a tensor's value",
        ("Data-dependent branching",),
        branch,
        branchless,
        "compute both sides and choose with torch.where, or torch.cond for two large ones",
    ),
    GraphBreakCase(
        ".item(), float(tensor), int(tensor)",
        ("Unsupported Tensor.item()",),
        _item,
        no_item,
        "keep the number a tensor: 0-dim tensors take part in arithmetic; read it after the compiled call",
    ),
    GraphBreakCase(
        "a shape that depends on values: x[mask], nonzero, unique",
        ("Dynamic shape operator", "Dynamic slicing", "Data dependent operator"),
        selected,
        masked,
        "keep the shape: torch.where with the mask instead of x[mask], or choose outside the compiled module",
    ),
    GraphBreakCase(
        "print and other builtins that act on the world: open, input",
        ("Failed to trace builtin operator",),
        printed,
        silent,
        "do it outside the compiled module, and return what is to be printed",
    ),
    GraphBreakCase(
        "a C function that is not torch's: time, files, other libraries",
        ("Attempted to call function marked as skipped", "Unsupported function call"),
        _timed,
        silent,
        "call it outside, or make an operator of it with torch.library.custom_op, which the graph calls as it is",
    ),
    GraphBreakCase(
        "a context manager that Dynamo does not know: an open file",
        ("Unsupported context manager",),
        _written,
        silent,
        "open it around the compiled module, not in it",
    ),
    GraphBreakCase(
        "torch.compiler.disable",
        ("Skip calling `torch.compiler.disable()`d function",),
        disabled,
        enabled,
        "take the decorator away, or make an operator of the function with torch.library.custom_op",
    ),
    GraphBreakCase(
        "torch._dynamo.graph_break()", ("Call to `torch._dynamo.graph_break()`",), marked, silent, "take the call away"
    ),
)


class LossByValue(nn.Module):
    """A loss function chosen in Python inside `forward` by a number computed there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss, 0-dim, of x [B, 16] and target [B, 4]."""
        out = self.net(x)
        loss = F.l1_loss if (out - target).abs().max() > 1.0 else F.mse_loss
        return loss(out, target)


class LossByName(LossByValue):
    """A loss function chosen by an attribute: Python evaluates it while the graph is captured, so there is no break,
    but a guard on the name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "mse"

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss, 0-dim, of x [B, 16] and target [B, 4]."""
        out = self.net(x)
        loss = F.l1_loss if self.kind == "l1" else F.mse_loss
        return loss(out, target)


class LossByTensor(LossByValue):
    """Both losses are computed and one is selected: one graph for any value."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss, 0-dim, of x [B, 16] and target [B, 4]."""
        out = self.net(x)
        far = (out - target).abs().max() > 1.0
        return torch.where(far, F.l1_loss(out, target), F.mse_loss(out, target))


def remedy_of(graph_break: Break) -> str:
    """Return the remedy for a break: the one tested here for this kind of break, otherwise Dynamo's
    proposal, if any.
    """
    ours = [case.remedy for case in GRAPH_BREAK_CASES if graph_break.kind.startswith(case.kinds)]
    return ". ".join(ours or (hint.rstrip(".") for hint in graph_break.hints))


ADDS = {
    "explain": "graphs, operators and guards of one call at once; it misses a break with no operator before it, and "
    "gives no remedy",
    "fullgraph": "the first break as an error, with Dynamo's explanation and hints; later ones are unseen, and "
    "numbers and shapes that depend on values (.item(), x[mask]) pass, because fullgraph captures them as symbols",
    "TORCH_LOGS": "every break as it happens, functions that Dynamo gives up, and recompiles of later calls; "
    "perf_hints come from Inductor and are listed with the kernels (--kernels)",
}
"Instrument -> what it adds to the others, and what it misses."
NONE_KNOWN = "none is known: move the line out of forward"
FOLLOWS = (
    "none of its own: it may follow from the break above it, which leaves code to be traced part by part; fix that "
    "first"
)


Seen = tuple[str, list[Break]]
"An instrument's summary line, and the breaks that it finds."


def breaks_of(subject: Subject) -> dict[str, Any]:
    """Compile the whole module and call it once for each instrument; no code is generated (backend eager).

    Returns:
        instruments: summary of each, and what it adds to the others.
        rows: one for each place: file, line, code, reason, explanation, remedy, dynamo_says, given_up, seen_by.
        recompiles: those of the first call (code that several modules share, once for each), of a call with other
            values of the same shapes, and of a call with another shape: `other values: forward (FILE:LINE): the
            guards that failed`.
    """
    with listening():  # their logs are captured below
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
    """Run torch._dynamo.explain, which resets Dynamo before and after."""
    with subject.around():
        output = torch._dynamo.explain(subject.module)(*subject.call.args, **subject.call.kwargs)
    # The last frame is the user's line; a reason without a stack, or at the end of a graph, is not a break.
    places = [(one.reason, one.user_stack[-1]) for one in output.break_reasons if one.user_stack and one.graph_break]
    breaks = [read_message(reason, place.filename, place.lineno or 0) for reason, place in places]
    sizes = " + ".join(str(len(ops)) for ops in output.ops_per_graph or []) or "0"
    guards = counted(len(output.out_guards or []), "guard")
    return f"{counted(output.graph_count, 'graph')} of {sizes} operators, {guards}", breaks


def _first_error(subject: Subject) -> Seen:
    """Run with fullgraph=True, which raises at the first break."""
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
    """Return the row of one place: the longest message, with the other messages' kinds next to it."""
    # Kind and remedy come from one message, so that they match.
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
