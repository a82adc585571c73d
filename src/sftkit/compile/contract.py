"""torch.compile for the train step: in place, for declared shapes only, and hooks that the step does not run.

Compiled code runs the hooks that it was compiled with, and no others. Torch guards a module's `forward`, so replacing
it is a recompile like any other; its hooks are not guarded (torch._dynamo.config.skip_nnmodule_hook_guards, since
pytorch/pytorch#98371), and a hook that is added later is left out without a message (pytorch/pytorch#117758).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import callback as dynamo_callback
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from sftkit.compile.modules import compile_arguments, has_cuda_graphs
from sftkit.compile.watch import RECOMPILE_REFUSED, describe_guards, module_in
from sftkit.config.schema import CompileConfig
from sftkit.errors import ConfigError, RecompileError
from sftkit.models.structure import called, decoder_blocks, embedding_module
from sftkit.runtime.hardware import uses_cuda_graphs

# Private: torch.compiler has no callback before a compile. These were made for finding jobs that hang while compiling:
# pytorch/pytorch#120764, with what triggered the compile since pytorch/pytorch#153596.


log = logging.getLogger(__name__)


def small_modules(orig_model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules of encoder and decoder with parameters, besides blocks and embeddings: mostly the final norm.

    Torch's own modules are left out: they are one operator, and Dynamo does not trace them on their own. So is an
    encoder's pooler, which computes nothing here: see models.encoder_decoder.
    """
    blocks = set(decoder_blocks(orig_model))
    return [
        child
        for part in called(orig_model)
        for child in part.children()
        if next(child.parameters(), None) is not None
        and not isinstance(child, torch.nn.Embedding)
        and child is not getattr(part, "pooler", None)
        and not type(child).__module__.startswith("torch.nn")
        and not blocks & set(child.modules())
    ]


def compile_model(
    orig_model: PreTrainedModel, compile: CompileConfig, *, dynamic_layout: bool = False, sharded: bool = False
) -> int:
    """Compile in place and lazily, before any wrapping or sharding: module types and parameter names stay as they are.

    Graphs are built at the first call of each shape, in `warm_up`, inside `compiler_switches`. The loss stays outside.

    Args:
        dynamic_layout: row lengths vary freely, so all sizes are symbolic.
        sharded: no process has all weights at once, so the scope is block, whatever compile.scope says.

    Returns:
        how many modules are compiled.

    Raises:
        ConfigError: scope block for a model whose blocks transformers does not name.
    """
    if not compile.enabled:
        return 0
    if compile.scope == "model" and not sharded:
        parts = [part for part in called(orig_model) if next(part.children(), None) is not None]
    else:
        if compile.scope == "model":
            log.info("compile.scope: block, because no process has all weights at once")
        blocks = decoder_blocks(orig_model)
        if not blocks:
            raise ConfigError(
                f"compile.scope: {type(orig_model).__name__} names no decoder block (_no_split_modules); set "
                "compile.scope=model or compile.enabled=false"
            )
        parts = blocks + small_modules(orig_model)
    inputs_with_gradient(orig_model, parts)
    # All but the last part that a step calls belong to the encoder: itself and its projection.
    encoding = {module for part in called(orig_model)[:-1] for module in part.modules()}
    # Inputs of an encoder have one shape, whatever the row length.
    static = replace(compile, dynamic=False) if dynamic_layout else compile
    for module in parts:
        own = compile_arguments(static) if module in encoding else None
        module.compile(**(own or compile_arguments(compile, dynamic_layout=dynamic_layout)))
    return len(parts)


def inputs_with_gradient(orig_model: PreTrainedModel, compiled: Sequence[torch.nn.Module]) -> None:
    """Let a frozen embedding's output ask for a gradient, so that the first block is compiled like the others: Dynamo
    guards on whether an input has one, and would build a graph for that block alone.

    It costs next to nothing, as a trained block has a gradient at its first norm anyway. Nothing changes if the first
    block is frozen too: no backward pass goes through frozen first blocks, and the first trained one has its own graph.

    Args:
        compiled: modules that are a graph each; of a graph that holds the embedding nothing is asked.
    """
    embedding, blocks = embedding_module(orig_model), decoder_blocks(orig_model)
    inside = any(embedding in module.modules() for module in compiled)
    if inside or not blocks or any(p.requires_grad for p in embedding.parameters()):
        return
    if any(p.requires_grad for p in blocks[0].parameters()):
        embedding.register_forward_hook(lambda _, __, output: output.requires_grad_(torch.is_grad_enabled()))


def begin_step() -> None:
    """Tell torch, before each forward pass of training, that CUDA graphs may reuse the memory of the pass before.

    Gradients that must outlive that pass are copied: see engine.step.GradientSum.
    """
    if uses_cuda_graphs():
        torch.compiler.cudagraph_mark_step_begin()


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run the plain Python of compiled modules within the context: any shape, no compile; compiled code stays valid."""
    with torch.compiler.set_stance("force_eager"):
        yield


def random_state_kept() -> AbstractContextManager[None]:
    """Return a context after which the random state, on the CPU and every GPU, is as before."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else [])


@contextmanager
def step_contract(on_recompile: str, breaks: Sequence[str] = ()) -> Iterator[None]:
    """Forbid or report compilation in a step, within the context: the warm-up has compiled all declared shapes.

    Args:
        on_recompile: "error": the step that needs a new graph ends training; "warn": it is compiled, and
            `CompileWatch.recompile_kinds` says why.
        breaks: what `CompileWatch.graph_break_reasons` found in the warm-up: an error if on_recompile is "error".

    Raises:
        RecompileError: with the guards that failed, or the graph breaks.
    """
    if breaks and on_recompile == "error":
        raise RecompileError(
            "the compiled model has graph breaks, so it is compiled in parts and slower than it could be:\n  "
            + "\n  ".join(breaks)
            + "\nFix the model's code, or train with the breaks: compile.on_recompile=warn"
        )
    for reason in breaks:
        log.warning("graph break: %s", reason)
    stance = torch.compiler.set_stance("fail_on_recompile" if on_recompile == "error" else "default")
    # The stance `fail_on_recompile` is asked where a frame begins, so it does not stop a backward graph that is built
    # late. A callback does, since it comes before those, too.
    if on_recompile == "error":
        dynamo_callback.on_compile_start(_reject_backward)
    try:
        with stance:
            yield
    # torch raises a plain RuntimeError for a rejection (torch/_dynamo/eval_frame.py): only its text identifies it.
    except RuntimeError as error:
        if RECOMPILE_REFUSED not in str(error):
            raise
        raise _recompile_error(describe_guards(str(error), module_in(error.__traceback__))) from error
    finally:
        # torch._dynamo.reset forgets all callbacks, and code within the context may have called it.
        if _reject_backward in dynamo_callback.callback_handler.start_callbacks:
            dynamo_callback.callback_handler.remove_start_callback(_reject_backward)


def _reject_backward(args: dynamo_callback.CallbackArgs) -> None:
    """Raise when a backward graph is about to be built: that happens at its first run, where no stance is asked."""
    if args.callback_trigger is dynamo_callback.CallbackTrigger.LAZY_BACKWARD:
        raise _recompile_error(f"the backward pass of graph {args.compile_id} was never run in the warm-up")


def _recompile_error(reason: str) -> RecompileError:
    """Build the error for a graph that the warm-up did not compile."""
    return RecompileError(
        f"a training step needs a graph that the warm-up did not compile: {reason}\n"
        "The warm-up covers the shapes of data.layout (packed and fixed: one; bucketed: one per bucket; dynamic: any "
        "row length). If this step is as it should be, train on with compile.on_recompile=warn (compile it and count)"
    )


def undo_compile(model: torch.nn.Module) -> None:
    """Return a model to eager for good."""
    for module in model.modules():
        # Private: what Module.compile sets (pytorch/pytorch#97565), which has no inverse (torch 2.13).
        module._compiled_call_impl = None
    # Dynamo keeps graphs by code object, not by module: without a reset other models of this class would still find
    # them.
    torch.compiler.reset()


def warm_up(
    model: torch.nn.Module,
    run_shape: Callable[[int, int], None],
    shapes: Sequence[tuple[int, int]],
    compile: CompileConfig,
    any_rank: Callable[[bool], bool],
    *,
    sharded: bool = False,
) -> bool:
    """Build every graph: a forward and backward pass of each declared shape.

    Random state is afterwards as before, and there are no gradients.

    Args:
        run_shape: runs forward and backward on random tokens of the shape; replicas without communication.
        shapes: (rows, row length) of each.
        any_rank: returns whether a flag is set on any rank, so that all fall back together.
        sharded: ranks wait for each other in forward and backward. So a small function first finds out whether all can
            compile, and an error of one rank after that ends the run.

    Returns:
        whether the train step is compiled; False when there is no working compiler and compile.on_failure is warn.
    """

    def run(chosen: Sequence[tuple[int, int]], passes: int = 1) -> None:
        # Each pass starts without gradients, as a step does; CUDA graphs reuse their memory too.
        with random_state_kept():
            for rows, row_length in chosen:
                for _ in range(passes):
                    run_shape(rows, row_length)
                    model.zero_grad(set_to_none=True)

    if not compile.enabled:
        run(shapes[-1:])  # nothing to build, but the largest batch must fit
        return False
    # Sharded ranks meet in the first forward pass already. If one had no compiler there, the others would wait forever.
    error: Exception | None = _compiler_problem(compile) if sharded else None
    if sharded and any_rank(error is not None):
        return _fall_back(model, compile, error)
    try:
        # With CUDA graphs the first pass of a shape compiles, the second warms up, the third records.
        run(shapes, passes=3 if has_cuda_graphs(compile) else 1)
    except torch.OutOfMemoryError:
        raise
    except Exception as caught:
        if sharded:
            raise
        error = caught
    model.zero_grad(set_to_none=True)
    if not any_rank(error is not None):
        return True
    if error is not None:
        # An error that eager execution has too is not the compiler's fault: it is raised from here.
        undo_compile(model)
        run(shapes[-1:])
    return _fall_back(model, compile, error)


def _compiler_problem(compile: CompileConfig) -> Exception | None:
    """Return the error of compiling a function of one operator; None if it runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(lambda x: x + 1, backend=compile.backend)(torch.zeros(2, device=device))
    except Exception as error:
        return error
    return None


def _fall_back(model: torch.nn.Module, compile: CompileConfig, error: Exception | None) -> bool:
    """Train eagerly with a warning, or not at all, as compile.on_failure says; returns False.

    `error`: None where it was another rank's.
    """
    reason = " ".join(str(error or "it failed on another rank").split())[:300]
    if compile.on_failure == "error":
        raise ConfigError(f"compile.on_failure=error and the model cannot be compiled here: {reason}") from error
    log.warning(
        "torch.compile does not work here, training eagerly: %s (compile.enabled=false avoids this warning)", reason
    )
    undo_compile(model)
    return False


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


class HookWatch:
    """Remembers a model's hooks when its step has been compiled, and finds those that the step does not respect."""

    def __init__(self, orig_model: PreTrainedModel, *, captured: bool = False) -> None:
        """Remember the hooks of the model. `captured`: the whole step is one graph, not single modules of it."""
        self._model = orig_model
        self._hooks = _hooks(orig_model)
        self._captured = captured

    def unheeded(self) -> list[str]:
        """Return a line, with what to do, for each kind of hook that the step does not run, or still
        runs though it is removed.

        Looks at each module once.
        """
        now = _hooks(self._model)
        inside = self._inside() if now != self._hooks else set()
        changed = {
            f"{module}: {kind} {'added' if (module, kind, number) in now else 'removed'} after the warm-up, {COMPILED}"
            for module, kind, number in now ^ self._hooks
            if module in inside
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


def _hooks(orig_model: PreTrainedModel) -> set[tuple[str, str, int]]:
    """Return (module, kind, number) of all hooks of the model, and of those that torch runs for every module."""
    owners: list[tuple[str, Any]] = [(name or _ROOT, vars(module)) for name, module in orig_model.named_modules()]
    # Private: torch keeps the hooks of every module in globals of its module, and lists them nowhere.
    everywhere = {field: getattr(torch_module, f"_global{field}") for field in _KINDS}
    return {
        (name, kind, number)
        for name, hooks in [*owners, (EVERY_MODULE, everywhere)]
        for field, kind in _KINDS.items()
        for number in hooks[field]
    }
