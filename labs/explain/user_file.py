"""What `sftkit explain FILE.py:FUNCTION` looks at: the module and the arguments that a user's function returns."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree  # private (pytorch/pytorch#65761); torch.compile walks arguments so

from labs.explain.flags import file_of
from labs.explain.subject import ModuleCall, Subject
from sftkit.errors import ConfigError


def of_file(words: str, device: torch.device) -> Subject:
    """Return what a function in a file returns: (module, args) or (module, args, args of another shape).

    Args:
        words: FILE.py:FUNCTION; the function takes no arguments.

    Raises:
        ConfigError: no such function, it fails or returns something else, or its module does not run uncompiled.
    """
    path, (file, _, name) = file_of(words), words.rpartition(":")
    with _failures_of(words, "importing the file"):
        # Under the file's own name, so that a `__main__` part does not run.
        loaded = runpy.run_path(str(path), run_name=path.stem)
    make = loaded.get(name)
    if not callable(make):
        own = [key for key, value in loaded.items() if getattr(value, "__module__", None) == path.stem]
        own = [key for key in own if callable(loaded[key]) and not isinstance(loaded[key], type)]
        raise ConfigError(f"{words}: {file} has no function {name}; it has: {', '.join(own) or 'none'}")
    with _failures_of(words, "calling the function"):
        made = make()
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module)):
        raise ConfigError(f"{words}: must return (module, args) or (module, args, args of another shape)")
    if not all(isinstance(args, tuple | list) for args in made[1:]):
        raise ConfigError(f"{words}: args must be a tuple, even of one tensor: return module, (tensor,)")
    module = made[0].to(device)
    there = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tuple(map(tuple, made[1:])))
    call, *more = (ModuleCall(args, shape=_shapes(args)) for args in there)
    # What does not run in eager would otherwise end as an error of the compiler.
    for each in (call, *more):
        doing = "calling the module uncompiled with its args"
        with _failures_of(words, doing), torch.random.fork_rng(), torch.no_grad():
            module(*each.args)
    # The whole file goes into the reproduction, as text in a string, and is executed there.
    text = path.read_text(encoding="utf-8").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    source = (
        f'import types\n\nSOURCE = """\\\n{text}"""\n'
        f"loaded = types.ModuleType({path.stem!r})\n"
        f"exec(compile(SOURCE, {path.name!r}, 'exec'), loaded.__dict__)\n"
        f"module = loaded.{name}()[0].to({str(device)!r})\n"
    )
    return Subject(words, module, call, _other_values(call), more[0] if more else None, source)


@contextmanager
def _failures_of(words: str, doing: str) -> Iterator[None]:
    """Report an exception of the user's code as theirs, with its last line in their file."""
    try:
        yield
    except Exception as error:
        file = str(file_of(words))
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        at = f", at {file}:{lines[-1]}" if lines else ""
        raise ConfigError(f"{words}: {doing} fails{at}: {type(error).__name__}: {error}") from error


def _shapes(args: Any) -> str:
    found = [tensor for tensor in pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor)]
    return ", ".join(" x ".join(map(str, tensor.shape)) for tensor in found)


def _other_values(call: ModuleCall) -> ModuleCall:
    """Return a call of the same shapes: floats reversed along the first axis and scaled, whole numbers as they are."""

    # Whole numbers may be indices, for which not every value is allowed.
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(0) * 0.9 if tensor.is_floating_point() and tensor.dim() else tensor

    return replace(call, args=pytree.tree_map_only(torch.Tensor, changed, call.args))
