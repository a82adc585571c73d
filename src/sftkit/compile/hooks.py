"""Hooks that the train step does not run: those of modules that it never calls, and those that
compiled code does not know.

Compiled code runs the hooks that it was compiled with, and no others. Torch guards a module's `forward`, so replacing
it is a recompile like any other; its hooks are not guarded (torch._dynamo.config.skip_nnmodule_hook_guards, since
pytorch/pytorch#98371), and one that is added later is left out without a word (pytorch/pytorch#117758).
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
"""Attributes in which torch.nn.Module keeps its hooks, by a number that no two hooks of a process share. They are
private: no public function lists a module's hooks (pytorch/pytorch#2847 asks for one)."""
EVERY_MODULE = "every module"
"In place of a module's name, for hooks that torch.nn.modules.module registers for all modules."
_ROOT = "the model itself"
COMPILED = (
    "which the compiled code does not notice: add or remove hooks before the engine is built, or train with "
    "compile.enabled=false"
)
UNCALLED = (
    "does not run in a step, which never calls this module: it calls the decoder and reads the head's weight; hook the "
    "final norm or a block"
)
OF_LIBRARIES = ("torch.distributed.", "accelerate.", "sftkit.")
"""Packages whose own hooks on such modules are no fault: FSDP's hooks on head and model are for
other passes than a step."""


class Hook(NamedTuple):
    """One hook of a module."""

    module: str
    kind: str
    number: int


class HookWatch:
    """Remembers a model's hooks when its step has been compiled, and finds those that the step does not respect."""

    def __init__(self, orig_model: PreTrainedModel, *, captured: bool = False) -> None:
        """Remember the hooks of the model. `captured`: the whole step is one graph, not single modules of it."""
        self._model, self._hooks, self._captured = orig_model, _hooks(orig_model), captured

    def unheeded(self) -> list[str]:
        """Return a line, with what to do, for each kind of hook that the step does not run, or still
        runs though it is removed.

        Looks at each module once.
        """
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
        """Return the names of the modules whose hooks are part of compiled code; a compiled module's
        own hooks run around it."""
        if self._captured:
            inside = {module for part in called(self._model) for module in part.modules()}
        else:
            # Private: what Module.compile sets (pytorch/pytorch#97565); no public attribute says whether a module is
            # compiled.
            compiled = [module for module in self._model.modules() if module._compiled_call_impl is not None]
            inside = {child for module in compiled for child in module.modules() if child is not module}
        found = {name for name, module in self._model.named_modules() if module in inside}
        return found | {EVERY_MODULE} if inside else found


def _of_library(hook: Any) -> bool:
    """Return whether a hook is one that parallelism has put there."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(OF_LIBRARIES)


def _hooks(orig_model: PreTrainedModel) -> frozenset[Hook]:
    """Return all hooks of the model, and those that torch runs for every module."""
    owners: list[tuple[str, Any]] = [(name or _ROOT, vars(module)) for name, module in orig_model.named_modules()]
    # Private: torch keeps the hooks of every module in globals of its module, and lists them nowhere.
    everywhere = {field: getattr(torch_module, f"_global{field}") for field in _KINDS}
    return frozenset(
        Hook(name, kind, number)
        for name, hooks in [*owners, (EVERY_MODULE, everywhere)]
        for field, kind in _KINDS.items()
        for number in hooks[field]
    )
