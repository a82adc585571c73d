"""A refused recompile, in words: whose code was not compiled, and which of its guards failed.

torch names the function whose frame it was asked about. Where a model's forward is wrapped, that is the wrapper, which
all classes share (transformers 5.23 wraps that of every block, older versions that of the decoder).
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterator
from types import FunctionType, TracebackType
from typing import Any

import torch


def describe_guards(message: str, owner: object) -> str:
    """Return the place and the failed guards: `LlamaDecoderLayer.forward (FILE:LINE): tensor
    'hidden_states' size mismatch`.

    Args:
        message: of the RuntimeError that torch raises under the stance `fail_on_recompile`.
        owner: the module whose code was refused, if one is known: its own forward is named for any wrapper around it.
    """
    guards = "; ".join(line.strip()[2:] for line in message.splitlines() if line.strip().startswith("- "))
    guards = guards or "never compiled before"
    place = re.search(r"filename: '(.*)', function name: '(.*)', line number: (\d+)", message)
    if not place:
        return f"unknown code: {guards}"
    file, name, line = place.groups()
    # A wrapper of the owner's forward is replaced by the forward itself.
    layers = list(_layers(owner))
    codes = [(layer.__code__.co_filename, layer.__code__.co_name) for layer in layers]
    if (file, name) not in codes:
        return f"{name} ({file}:{line}): {guards}"
    # The guards of a wrapper speak of its args and kwargs: they are given the names that the model's author chose.
    own = layers[-1]
    if codes.index((file, name)) < len(layers) - 1:
        file, line = own.__code__.co_filename, str(own.__code__.co_firstlineno)
        guards = _in_own_words(guards, list(inspect.signature(own).parameters)[1:])
    return f"{own.__qualname__} ({file}:{line}): {guards}"


def module_in(trace: TracebackType | None) -> torch.nn.Module | None:
    """Return the module whose method was called last on the way to an error; None: there was none."""
    selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(trace)]
    return next((one for one in reversed(selves) if isinstance(one, torch.nn.Module)), None)


def _layers(owner: object) -> Iterator[FunctionType]:
    """Yield the functions that a module's forward is made of, the outermost wrapper first, its own last."""
    function: Any = getattr(owner, "forward", None)
    while function is not None:
        plain = getattr(function, "__func__", function)
        if isinstance(plain, FunctionType):
            yield plain
        function = getattr(plain, "__wrapped__", None)


def _in_own_words(guards: str, parameters: list[str]) -> str:
    """Rename a wrapper's args[0] and kwargs['mask'] in guards to the parameters of the function that it wraps."""

    def name(position: re.Match[str]) -> str:
        index = int(position[1])
        return parameters[index] if index < len(parameters) else position[0]

    return re.sub(r"\bargs\[(\d+)\]", name, re.sub(r"\bkwargs\['(\w+)'\]", r"\1", guards))
