"""Keep what torch's own logs say while something runs: graph breaks, recompiles and performance hints, as with
TORCH_LOGS=graph_breaks,recompiles,perf_hints, but not printed; and read a message of Dynamo's."""

from __future__ import annotations

import linecache
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from labs.explain.flags import refuse_torch_logs
from sftkit.compile.debug import artifact_of, torch_logs_to

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
"How hints begin that are no help."
DATA_DEPENDENT = "Data-dependent branching"


@dataclass(frozen=True)
class Break:
    """A place where the graph ends."""

    file: str
    line: int
    kind: str
    "the first line of what Dynamo says"
    explanation: str = ""
    hints: tuple[str, ...] = ()
    given_up: bool = False
    "the rest of the function is left to Python, not only this line"

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
        """Return whether the record goes to the terminal as ever."""
        return artifact_of(record) not in self.messages

    def breaks(self) -> list[Break]:
        """Return the graph breaks, each place and reason once: the log names one again in every graph that is made
        anew."""
        found: dict[tuple[str, int, str], Break] = {}
        for one in map(read_message, self.messages["graph_breaks"]):
            found.setdefault((*one.location, one.kind), one)
        return list(found.values())

    def recompiles(self) -> list[str]:
        """Return `forward (FILE:LINE): the guards that failed`, one for each graph that was compiled again."""
        return [recompile_of(text) for text in self.messages["recompiles"]]


@contextmanager
def listening() -> Iterator[TorchLogHandler]:
    """Keep the logs inside, where nothing is compiled yet, and forget afterwards what was compiled: Dynamo keeps code
    by Python function, which modules share, and does not trace it again.

    Raises:
        ConfigError: TORCH_LOGS is set, which torch lets win.
    """
    refuse_torch_logs()
    # dynamo at ERROR: its own warnings would be on the terminal beside what is kept here.
    heard = TorchLogHandler()
    wanted = {"dynamo": logging.ERROR, **dict.fromkeys(TORCH_LOGS, True)}
    with torch_logs_to(heard, heard.for_terminal, **wanted), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Dynamo, which warns of some breaks too
        torch.compiler.reset()
        yield heard
        # Afterwards too: code that was compiled for a question would be found by the next one.
        torch.compiler.reset()


def read_message(text: str, file: str = "?", line: int = 0) -> Break:
    """Read a message of Dynamo's, from a log, an exception or a reason of `torch._dynamo.explain`.

    Args:
        file, line: the place, where the message does not have it.
    """
    # The place is in the log's own head, else in the user's part of the stack, whose last line is the innermost.
    first = re.match(r"Graph break(?: \([^)]*\))? in user code at (.*):(\d+)\n(?:Graph Break Reason: )?", text)
    if first:
        file, line, text = first[1], int(first[2]), text[first.end() :]
        text = text.partition("\nUser code traceback:")[0]
    body, _, user = text.partition("\nfrom user code:")
    if user and (places := _LAST_PLACE.findall(user)):
        file, line = places[-1][0], int(places[-1][1])
    # A break inside a break is wrapped in lines of its own: the innermost says why.
    given_up = GIVEN_UP in body
    while wrapper := _WRAPPER.match(body.lstrip()):
        body = body.lstrip()[wrapper.end() :]
    body = body.strip()
    kind = body.partition("\n")[0].strip() or "unknown"
    if kind.startswith("generic_jump"):
        kind = DATA_DEPENDENT
    # Explanation and hints each reach to the next heading, an empty line or the end.
    said: dict[str, list[str]] = {"Explanation": [], "Hint": []}
    for heading, words in _PARTS.findall(body):
        said[heading].append(" ".join(words.split()))
    hints = tuple(hint for hint in said["Hint"] if not hint.startswith(_EMPTY_HINT))
    return Break(file, line, kind, next(iter(said["Explanation"]), ""), hints, given_up)


def recompile_of(text: str) -> str:
    """Return what a record of the log `recompiles` says: the function, its place, the guards that failed."""
    function = re.search(r"Recompiling function (\S+) in (.*):(\d+)", text)
    guards = [guard.partition(" # ")[0].strip() for guard in re.findall(r"^\s*- \d+/\d+: (.*)$", text, re.M)]
    where = f"{function[1]} ({function[2]}:{function[3]})" if function else "?"
    return f"{where}: {'; '.join(dict.fromkeys(guards)) or 'unknown guard'}"
