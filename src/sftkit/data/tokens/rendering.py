"""Run a chat template on a conversation within limits of time, length and memory.

A template is a program from elsewhere. Jinja's sandbox isolates it from the machine, but lets it run for ever: the
sandbox limits each `range`, but not two nested ranges.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, TypeVar

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template

from sftkit.errors import ConfigError, config_error

MAX_SECONDS = 10.0
"Seconds of processor time that a rendering may take; the longest records that are read take about one."
MAX_RENDERED = 2**27
"Characters of a rendered conversation: four times the longest record that is read."
MAX_MEMORY = 4 * 2**30
"Bytes by which the process may grow during a rendering that takes longer than a poll."
MAX_OPERATION = 2**24
"Characters or elements of a repeated text or list, and bits of a product or power."
_POLL_SECONDS = 0.25
_BLOCKS = 4096
"Blocks of output between two looks at their length."

Span = tuple[int, int]
"Character positions [start, end) in the rendered text."
T = TypeVar("T")


def render(source: str, variables: dict[str, Any], *, where: str, marks: bool = False) -> tuple[str, list[Span]]:
    """Return the text that a template makes of its variables and, with `marks`, the spans inside {% generation %}.

    Args:
        where: the conversation, for messages.

    Raises:
        TemplateError: the template rejects them, or cannot work with them.
        ConfigError: it exceeds a limit.
    """
    try:
        return limited(_marked if marks else _joined, source, variables)
    except TemplateError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except MemoryError:
        raise TemplateError("it takes more memory than there is") from None
    except Exception as error:  # whatever a template does with what it did not expect
        raise TemplateError(f"{type(error).__name__}: {error}") from error


def limited(work: Callable[..., T], *args: object, **options: object) -> T:
    """Return what a function that renders returns; it is ended if it takes too long or too much memory. Only the main
    thread has this limit: signals, which end it, reach no other.

    Raises:
        ConfigError: it was ended.
    """
    global _run
    if current_thread() is not main_thread():
        return work(*args, **options)
    if signal.getsignal(signal.SIGVTALRM) is not _check:
        signal.signal(signal.SIGVTALRM, _check)
    try:
        _run = _Run()
        signal.setitimer(signal.ITIMER_VIRTUAL, _POLL_SECONDS, _POLL_SECONDS)
        try:
            return work(*args, **options)
        finally:
            _run = None
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _Ended as ended:  # raised at any instruction, within the lines above too
        _run = None
        problem = f"the chat template does not end: {ended}. Take another template: model.chat_template"
        raise ConfigError(problem) from None


class _Ended(BaseException):
    """Raised in a rendering that exceeds a limit; no template can catch it."""


class _Run:
    """The rendering that is going on."""

    def __init__(self) -> None:
        """Note when it began."""
        self.started = time.thread_time()
        self.memory: int | None = None
        "bytes of the process when it was first looked at, so that a short rendering costs next to nothing"


_run: _Run | None = None
"None: nothing is rendered in the main thread."


def _check(_signal: int, _frame: object) -> None:
    """End a rendering that exceeds a limit."""
    if _run is None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return
    # Time of this thread: neither other threads nor an overloaded machine end a rendering.
    now = time.thread_time()
    memory = _memory()
    _run.memory = memory if _run.memory is None else _run.memory
    exceeded = ""
    if now - _run.started > MAX_SECONDS:
        exceeded = f"after {MAX_SECONDS:g} seconds its text of one conversation is not complete"
    elif memory - _run.memory > MAX_MEMORY:
        exceeded = f"its text of one conversation takes more than {MAX_MEMORY / 2**30:g} GiB of memory"
    if exceeded:
        # Once more after as long again: an exception in a finalizer is lost.
        _run.started = now
        _run.memory = memory
        raise _Ended(exceeded)


def _joined(source: str, variables: dict[str, Any]) -> tuple[str, list[Span]]:
    """Return the text and no spans. Many blocks are counted at a time: a look at each would take a tenth of the
    time of rendering."""
    compiled = _compiled(source)
    blocks = compiled.root_render_func(compiled.new_context(variables))  # render() without the join at its end
    found = list[str]()
    length = 0
    while chunk := list(islice(blocks, _BLOCKS)):
        length += sum(map(len, chunk))
        _check_length(length)
        found += chunk
    return "".join(found), []


def _check_length(length: int) -> None:
    if length > MAX_RENDERED:
        raise config_error("endless chat template", most=MAX_RENDERED)


def _marked(source: str, variables: dict[str, Any]) -> tuple[str, list[Span]]:
    """Return text and marked spans, as transformers does with return_assistant_tokens_mask. That joins all of the text
    so far for every answer, which takes minutes for a conversation of thousands. Here the tracker is given an empty
    list of blocks, and spans are moved to where the text ends."""
    compiled = _compiled(source)
    blocks = list[str]()
    length = 0
    spans = _Spans()
    # The tracker is private, as is the environment: both came with huggingface/transformers#30650.
    environment: Any = compiled.environment
    with environment.activate_tracker([], spans):
        for block in compiled.generate(variables):
            blocks.append(block)
            length += len(block)
            _check_length(length)
            spans.length = length
    return "".join(blocks), spans


class _Spans(list[Span]):
    """Spans of a text, noted from where it ends so far."""

    length = 0

    def append(self, span: Span) -> None:
        """Add a span, moved to where the text ends so far."""
        super().append((self.length + span[0], self.length + span[1]))


# ---- compiling -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    """Compile a template in transformers' own environment, in which * and ** are limited: a power of large
    numbers is one instruction that ends in hours, and no signal ends it. Jinja computes constants here, so this
    is a rendering too."""
    # Private, but the only way to its filters and marks. The environment is that of the empty template.
    environment: Any = _compile_jinja_template("").environment
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.call_binop = _binary
    compiled: Template = environment.from_string(source)
    return compiled


@lru_cache(maxsize=64)
def variables_of(source: str) -> frozenset[str]:
    """Return the names that a template takes from outside: its arguments, but no fields of messages.

    Raises:
        TemplateError: it cannot be parsed.
    """
    environment: Any = _compile_jinja_template("").environment
    return frozenset(find_undeclared_variables(environment.parse(source)))


def _binary(_context: object, operator: str, left: Any, right: Any) -> object:
    """Compute a product or a power whose result is not too large."""
    size = 0.0
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), 1)
        size = bits * float(abs(right)) if operator == "**" else bits + right.bit_length()
    elif operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(one, str | bytes | list | tuple) and isinstance(times, int):
                size = len(one) * float(max(times, 0))
    if size > MAX_OPERATION:
        raise SecurityError(f"an operation {operator} with a result of more than {MAX_OPERATION:,} elements or bits")
    return left**right if operator == "**" else left * right


def _memory() -> int:
    """Return the bytes of memory of this process; 0 if the system does not report them."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
