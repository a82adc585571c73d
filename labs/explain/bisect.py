"""The smallest module that breaks, that is compiled again, or that differs from eager: found from the top down,
confirmed from the bottom up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree  # private (pytorch/pytorch#65761); torch.compile walks arguments so

from labs.explain.numerics import difference
from labs.explain.subject import ModuleCall, Subject
from labs.explain.torch_logs import TorchLogHandler, listening
from sftkit.compile.switches import compiler_switches
from sftkit.config.schema import CompileConfig

DISABLED = "torch.compiler.disable"
"In the reason of a break that leaving a module out of the graph makes."


@dataclass(frozen=True)
class ProbedModule:
    """A module of the subject, and what it was called with in an eager pass of each of the subject's calls."""

    path: str
    "as in get_submodule; empty: the whole"
    module: torch.nn.Module
    call: ModuleCall
    again: ModuleCall
    other: ModuleCall | None

    @property
    def name(self) -> str:
        """Return its path and class: `layers.0.mlp (GatedMLP)`."""
        return f"{self.path or 'the whole'} ({type(self.module).__name__})"

    @property
    def where(self) -> str:
        """Return where its forward is: FILE:LINE."""
        code = inspect.unwrap(type(self.module).forward).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"


@dataclass(frozen=True)
class BisectQuestion:
    """What is asked of each module."""

    name: str
    title: str
    ask: Callable[[ProbedModule, str], str | None]
    """(module, backend) -> what was found when it was compiled by itself and called; None: nothing"""


@dataclass(frozen=True)
class BisectAnswer:
    """The answer to a question."""

    question: str
    guilty: tuple[ProbedModule, ...]
    "the smallest modules, the one with the fewest parts first; (): nothing was found"
    message: str
    "what was found in the first"
    steps: tuple[tuple[str, str | None], ...]
    "(module, what was found in it alone), in order"
    confirmed: bool | None
    """whether the whole is without fault when these modules alone are left out of the graph; None: there is no whole
    without them"""


def _breaks(probed: ProbedModule, backend: str) -> str | None:
    """Return the first graph break of one call; None: there is none."""
    heard = _compiled(probed, probed.call, None, backend, dynamic=False)
    found = [one for one in heard.breaks() if DISABLED not in one.kind]
    return f"{found[0].kind} at {found[0].file}:{found[0].line}: {found[0].code}" if found else None


def recompiles_on_values(probed: ProbedModule, backend: str) -> str | None:
    """Return the guard that fails when shapes are the same and values differ; None: none does."""
    return next(iter(_compiled(probed, probed.call, probed.again, backend, dynamic=False).recompiles()), None)


def recompiles_on_shapes(probed: ProbedModule, backend: str) -> str | None:
    """Return the guard that fails at another shape, although sizes are symbols from the start; None: none does."""
    if probed.other is None:
        return None
    return next(iter(_compiled(probed, probed.call, probed.other, backend, dynamic=True).recompiles()), None)


def differs(probed: ProbedModule, backend: str) -> str | None:
    """Return the output or gradient that is farther from eager than its dtype explains; None: none is."""
    with listening():
        found = difference(probed.module, probed.call, torch.compile(probed.module, backend=backend, dynamic=False))
    return str(found) if found.beyond else None


QUESTIONS = (
    BisectQuestion("breaks", "breaks the graph", _breaks),
    BisectQuestion("values", "is compiled again for other values", recompiles_on_values),
    BisectQuestion("shapes", "is compiled again for another shape, with dynamic=True", recompiles_on_shapes),
    BisectQuestion("differs", "differs from eager", differs),
)


def bisect(subject: Subject, question: BisectQuestion, backend: str) -> BisectAnswer:
    """Ask the whole; then its parts, each compiled by itself, down to those whose own parts are without fault; then the
    whole again with those left out of the graph.

    Args:
        backend: of torch.compile.
    """
    with subject.around():
        modules_by_path = called_modules(subject)
        # Answers are kept by path, and by what modules that look alike have in common.
        steps: list[tuple[str, str | None]] = []
        answers: dict[Any, str | None] = {}

        def ask(probed: ProbedModule, *, known: bool = True) -> str | None:
            if probed.path not in answers and not (known and _alike(probed) in answers):
                answers[probed.path] = answers[_alike(probed)] = question.ask(probed, backend)
                steps.append((probed.name, answers[probed.path]))
            return answers.get(probed.path, answers[_alike(probed)])

        def smallest(probed: ProbedModule) -> list[tuple[ProbedModule, str]]:
            """Return the smallest modules inside one that have the fault, each with what was found."""
            children = children_of(probed.path, modules_by_path)
            # Blocks that look alike are asked once, and one by one where none of those has the fault.
            for known in (True, False):
                found = [one for child in children if ask(child, known=known) for one in smallest(child)]
                if found:
                    return found
            return [(probed, ask(probed) or "")]

        whole = modules_by_path[""]
        if ask(whole) is None:
            return BisectAnswer(question.name, (), "", tuple(steps), None)
        guilty = sorted(smallest(whole), key=lambda found: len(list(found[0].module.modules())))
        # The other direction: without them the whole must be without fault.
        modules = tuple(probed for probed, _ in guilty)
        confirmed = None
        if whole not in modules:
            with excluded(modules):
                confirmed = question.ask(whole, backend) is None
        return BisectAnswer(question.name, modules, guilty[0][1], tuple(steps), confirmed)


def called_modules(subject: Subject) -> dict[str, ProbedModule]:
    """Return the modules that an eager pass calls, by path, with what each was given at its first call."""
    first, again = (_inputs(subject.module, call) for call in (subject.call, subject.again))
    other = _inputs(subject.module, subject.other) if subject.other else {}
    return {
        path: ProbedModule(path, subject.module.get_submodule(path), call, again.get(path, call), other.get(path))
        for path, call in first.items()
    }


def _inputs(module: torch.nn.Module, call: ModuleCall) -> dict[str, ModuleCall]:
    """Return path -> arguments of the first call of each module, copied: some are changed in place later."""
    found: dict[str, ModuleCall] = {}

    def keep(path: str, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path not in found:
            # Detached: a leaf of a graph that is gone could not be given a gradient again.
            copied = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
            found[path] = ModuleCall(copied[0], copied[1], call.shape)

    with ExitStack() as stack:
        for path, one in module.named_modules():
            stack.callback(one.register_forward_pre_hook(partial(keep, path), with_kwargs=True).remove)
        with torch.no_grad():
            module(*call.args, **call.kwargs)
    return found


def children_of(path: str, modules_by_path: dict[str, ProbedModule]) -> list[ProbedModule]:
    """Return the nearest modules inside one that were called: a list of modules is none."""
    inside = [name for name in modules_by_path if name != path and (not path or name.startswith(f"{path}."))]
    nearest = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
    return [modules_by_path[name] for name in nearest]


@contextmanager
def excluded(modules: tuple[ProbedModule, ...]) -> Iterator[None]:
    """Run these modules, inside, as plain Python in a graph around them."""
    with ExitStack() as stack:
        for probed in modules:
            probed.module.forward = torch.compiler.disable(probed.module.forward)
            stack.callback(probed.module.__dict__.pop, "forward")
        yield


def _compiled(
    probed: ProbedModule, first: ModuleCall, second: ModuleCall | None, backend: str, *, dynamic: bool
) -> TorchLogHandler:
    """Return what is heard while a module, compiled by itself, is called: of recompiles those of the second call. In
    the first, code that several modules share is compiled once for each of them.

    Args:
        second: None: one call only.
        dynamic: sizes are symbols from the start.
    """
    with compiler_switches(CompileConfig(), dynamic_layout=dynamic), listening() as heard:
        compiled = torch.compile(probed.module, backend=backend, dynamic=dynamic)
        compiled(*first.args, **first.kwargs)
        # What the first call compiles again is its own: modules that share code are compiled once each.
        heard.messages["recompiles"].clear()
        if second is not None:
            compiled(*second.args, **second.kwargs)
    return heard


def _alike(probed: ProbedModule) -> tuple[Any, ...]:
    """Return what modules have in common that run the same code on the same shapes."""
    tensors = pytree.tree_leaves((probed.call.args, probed.call.kwargs))
    shapes = tuple(tuple(tensor.shape) for tensor in tensors if isinstance(tensor, torch.Tensor))
    return type(probed.module), repr(probed.module), shapes
