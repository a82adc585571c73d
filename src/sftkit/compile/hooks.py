"""Hooks that the train step does not run: those of modules that it never calls, and those that compiled code does not know.

Compiled code runs the hooks that it was compiled with, and no others. Torch guards a module's `forward`, so replacing it is a
recompile like any other; its hooks are not guarded (torch._dynamo.config.skip_nnmodule_hook_guards), and one that is added
later is left out without a word.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from sftkit.models.structure import called

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
"Where torch.nn.Module keeps its hooks, by a number that no two hooks of a process share."
EVERY_MODULE = "every module"
"In place of a name: hooks that torch.nn.modules.module registers for all modules."
_ROOT = "the model itself"
COMPILED = (
    "which the compiled code does not notice: add or remove hooks before the engine is built, or train with "
    "compile.enabled=false"
)
UNCALLED = (
    "does not run in a step, which never calls this module: it calls the decoder and reads the head's weight; hook the final "
    "norm or a block"
)
OF_LIBRARIES = ("torch.distributed.", "accelerate.", "sftkit.")
"Whose own hooks on such modules are no fault: FSDP's on head and model are for other passes than a step."


class Hook(NamedTuple):
    """One hook of a module."""

    module: str
    kind: str
    number: int


class HookWatch:
    """Remembers the hooks of a model when its step has been compiled, and finds those that the step does not run."""

    def __init__(self, orig_model: PreTrainedModel, captured: bool = False) -> None:
        """`captured`: the whole step is one graph, not single modules of it."""
        self._model, self._hooks, self._captured = orig_model, _hooks(orig_model), captured

    def unheeded(self) -> list[str]:
        """A line for each kind of hook of a module that the train step does not run, and for each that it runs though it
        is gone, with what to do. One look at each module."""
        now = _hooks(self._model)
        inside = self._inside() if now != self._hooks else set()
        changed = {
            f"{hook.module}: {hook.kind} {'added' if hook in now else 'removed'} after the warm-up, {COMPILED}"
            for hook in now ^ self._hooks
            if hook.module in inside
        }
        runs = {module for part in called(self._model) for module in part.modules()}
        uncalled = {
            f"{name or _ROOT}: {kind} {UNCALLED}"
            for name, module in self._model.named_modules()
            for field, kind in _KINDS.items()
            if module not in runs and not all(map(_of_library, getattr(module, field).values()))
        }
        return sorted(changed | uncalled)

    def _inside(self) -> set[str]:
        """Names of the modules whose hooks are part of compiled code."""
        if not self._captured:
            return _compiled(self._model)
        run = {module for part in called(self._model) for module in part.modules()}
        return {name for name, module in self._model.named_modules() if module in run} | {EVERY_MODULE}


def _of_library(hook: Any) -> bool:
    """Whether a hook is one that parallelism has put there."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(OF_LIBRARIES)


def _hooks(orig_model: PreTrainedModel) -> frozenset[Hook]:
    own = (
        Hook(name or _ROOT, kind, number)
        for name, module in orig_model.named_modules()
        for field, kind in _KINDS.items()
        for number in getattr(module, field)
    )
    of_all = (
        Hook(EVERY_MODULE, kind, number)
        for field, kind in _KINDS.items()
        for number in getattr(torch_module, f"_global{field}")
    )
    return frozenset((*own, *of_all))


def _compiled(orig_model: PreTrainedModel) -> set[str]:
    """Names of the modules whose hooks are part of compiled code; those of a module that is called uncompiled run."""
    compiled = [module for module in orig_model.modules() if module._compiled_call_impl is not None]
    inside = {child for module in compiled for child in module.modules() if child is not module}
    found = {name for name, module in orig_model.named_modules() if module in inside}
    return found | {EVERY_MODULE} if inside else found
