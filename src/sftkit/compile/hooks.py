"""Hooks of modules that come or go after the warm-up: compiled code runs those that it was compiled with, and no others.

Torch guards a module's `forward`, so replacing it is a recompile like any other; its hooks are not guarded
(torch._dynamo.config.skip_nnmodule_hook_guards), and one that is added later is left out without a word.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from sftkit.models.structure import decoder, head

KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
"Where torch.nn.Module keeps its hooks, by a number that no two hooks of a process share."
EVERY_MODULE = "every module"
"In place of a name: hooks that torch.nn.modules.module registers for all modules."
ROOT = "the model itself"
COMPILED = "which the compiled code does not notice"
UNCALLED = "and the train step does not call this module"
ADVICE = "add or remove hooks before the engine is built, or train with compile.enabled=false"


class Hook(NamedTuple):
    """One hook of a module."""

    module: str
    kind: str
    number: int


class HookWatch:
    """Remembers the hooks of a model when its step has been compiled, and finds what has changed since."""

    def __init__(self, orig_model: PreTrainedModel) -> None:
        self._model, self._hooks = orig_model, _hooks(orig_model)

    def unheeded(self) -> list[str]:
        """A line for each change of hooks that the train step does not follow, with what to do. One look at each module."""
        now = _hooks(self._model)
        if now == self._hooks:
            return []
        why = _not_followed(self._model)
        lines = {
            f"{hook.module}: {hook.kind} {'added' if hook in now else 'removed'} after the warm-up, {why[hook.module]}: {ADVICE}"
            for hook in now ^ self._hooks
            if hook.module in why
        }
        return sorted(lines)


def _hooks(orig_model: PreTrainedModel) -> frozenset[Hook]:
    own = (
        Hook(name or ROOT, kind, number)
        for name, module in orig_model.named_modules()
        for field, kind in KINDS.items()
        for number in getattr(module, field)
    )
    of_all = (
        Hook(EVERY_MODULE, kind, number)
        for field, kind in KINDS.items()
        for number in getattr(torch_module, f"_global{field}")
    )
    return frozenset((*own, *of_all))


def _not_followed(orig_model: PreTrainedModel) -> dict[str, str]:
    """Name of a module -> why its hooks are not followed; hooks run of those that are called uncompiled."""
    compiled = [module for module in orig_model.modules() if module._compiled_call_impl is not None]
    inside = {child for module in compiled for child in module.modules() if child is not module}
    uncalled = {orig_model, head(orig_model)} - set(decoder(orig_model).modules())
    found = {EVERY_MODULE: COMPILED} if inside else {}
    for name, module in orig_model.named_modules():
        if module in inside:
            found[name] = COMPILED
        elif module in uncalled:
            found[name or ROOT] = UNCALLED
    return found
