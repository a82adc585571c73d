"""Run a chat template on a conversation within limits of time, length and memory.

A template is a program from elsewhere. Jinja's sandbox isolates it from the machine, but lets it run for ever: the
sandbox limits each `range`, but not two nested ranges.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from threading import Lock, Thread, get_ident
from typing import Any, TypeVar

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template

from sftkit.errors import ConfigError, hint

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
    """Return what a function that renders returns; it is ended, in any thread, if it takes too long or too much memory.

    Raises:
        ConfigError: it was ended.
    """
    thread = get_ident()
    run = _Run()
    # The watch sets `exceeded`, then looks whether the rendering is still in _running. Here it is taken out first, then
    # `exceeded` is read: so one of the two notices the other, without a lock for the many that are short.
    try:
        _running[thread] = run
        if not _watching:
            _start_watch()
        try:
            return work(*args, **options)
        finally:
            _running.pop(thread, None)
            if run.exceeded:
                _take_back(thread)
    # The exception may come at any instruction, within the lines above too.
    except _Ended:
        _running.pop(thread, None)
        _take_back(thread)
        problem = f"the chat template does not end: {run.exceeded}. Take another template: model.chat_template"
        raise ConfigError(problem) from None


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
        raise ConfigError(hint("endless chat template", most=MAX_RENDERED))


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


# ---- the watch -------------------------------------------------------------------------------------------------------


class _Ended(BaseException):
    """Raised in the thread of a rendering that exceeds a limit; no template can catch it."""


class _Run:
    """A rendering that is going on. The watch fills it in, so a short rendering costs next to nothing."""

    started: float | None = None
    "processor time of its thread when the watch saw it first"
    memory = 0
    "bytes of the process then"
    exceeded = ""
    "which limit it exceeds; empty: none"


_running: dict[int, _Run] = {}
"Thread -> its rendering."
_watching = False
"Whether the watch checks _running every quarter of a second. It ends when nothing is rendered."
_lock = Lock()


def _start_watch() -> None:
    """Start the watch, a thread that ends renderings in others: a signal would reach the main thread only."""
    global _watching
    _watching = True
    Thread(target=_watch, name="chat template limits", daemon=True).start()


def _watch() -> None:
    global _watching
    while True:
        time.sleep(_POLL_SECONDS)
        for thread, run in list(_running.items()):
            _check(thread, run)
        if not _running:
            _watching = False
            if not _running:
                return
            _watching = True  # a rendering that began just now relied on this watch


def _check(thread: int, run: _Run) -> None:
    """End a rendering that exceeds a limit."""
    with suppress(OSError):  # the thread is gone
        # Processor time: a machine that sleeps or is overloaded ends no rendering. macOS has none of a thread.
        clock = getattr(time, "pthread_getcpuclockid", None)
        now = time.clock_gettime(clock(thread)) if clock else time.monotonic()
        if run.started is None:
            run.started = now
            run.memory = _memory()
        elif now - run.started > MAX_SECONDS:
            run.exceeded = f"after {MAX_SECONDS:g} seconds its text of one conversation is not complete"
        elif _memory() - run.memory > MAX_MEMORY:
            run.exceeded = f"its text of one conversation takes more than {MAX_MEMORY / 2**30:g} GiB of memory"
    with _lock:
        if run.exceeded and _running.get(thread) is run:
            _raise_in(thread, _Ended)


def _take_back(thread: int) -> None:
    """Take back an exception that has not been raised yet, once the watch has decided."""
    with _lock:
        _raise_in(thread, None)


def _raise_in(thread: int, exception: type[BaseException] | None) -> None:
    """Raise an exception in another thread at its next instruction; None: take back one that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception and ctypes.py_object(exception))


def _memory() -> int:
    """Return the bytes of memory of this process; 0 if the system does not report them."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _after_fork() -> None:
    """Forget the renderings of other threads, and the watch, which a forked process does not have."""
    global _lock, _watching
    _lock = Lock()
    _watching = False
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
