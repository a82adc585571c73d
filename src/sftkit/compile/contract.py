"""torch.compile for the train step: in place, for declared shapes only, with the settings that a run changes.

The settings of dynamo, functorch and inductor are put back when the run ends; runtime/start.py has those that hold for
the whole process.

Compiled code runs the hooks that it was compiled with, and no others. Torch guards a module's `forward`, so replacing
it is a recompile like any other; its hooks are not guarded (torch._dynamo.config.skip_nnmodule_hook_guards, since
pytorch/pytorch#98371), and a hook that is added later is left out without a message (pytorch/pytorch#117758).

`collectives_hidden` hides exchanges inside a compiled block of a tensor-parallel model. Ranks exchange activations four
times a pass of a block, and what follows needs what has arrived. Only gradients of weights are needed by nobody until
the optimizer: in the backward pass they are put where the block would wait. On two H100 at 8B, on rank 0 9 % of a step
are exchanges that nothing hides, 11 % before that (benchmarks/h200_patterns).
"""

import difflib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, get_origin

import torch
import torch._dynamo
import torch._dynamo.exc
import torch._functorch.config
import torch._inductor.config
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import utils as dynamo_utils
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch._inductor.ir import ExternKernelOut
from torch._inductor.utils import contains_collective, contains_wait
from torch.fx.experimental import _config as symbolic_shapes
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from sftkit.compile.watch import RECOMPILE_REFUSED, describe_guards, module_in
from sftkit.config.schema import CompileConfig, has_cuda_graphs
from sftkit.data.batches.pack import Layout
from sftkit.errors import ConfigError, RecompileError, config_error, hint
from sftkit.models.structure import Work, called, decoder_blocks, embedding_module, train_flops
from sftkit.models.trained import adapters_of
from sftkit.runtime import hardware, start


def check_options(compile: CompileConfig) -> None:
    """Reject options that the installed torch does not have.

    Raises:
        ConfigError: a name that torch._inductor.config lacks, with the nearest one, or a value of another type.
    """
    # Private, but its names are those of torch.compile(options=...), as its documentation says.
    config: Any = torch._inductor.config
    known = config.get_config_copy() if compile.options else {}
    for name, value in (compile.options or {}).items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or [key for key in known if key.endswith(f".{name}")]
            hint = f'Did you mean "{near[0]}"?' if near else "torch._inductor.list_options() has them all"
            where = f"in torch {torch.__version__}"
            raise ConfigError(f'compile.options: "{name}" is no option of Inductor {where}. {hint}')
        wanted = config.get_type(name)
        if get_origin(wanted) is None and not isinstance(value, wanted):  # as torch.compile asks
            got = type(value).__name__
            raise ConfigError(f"compile.options: {name} must be of type {wanted.__name__}, not {got} ({value})")


def compile_arguments(compile: CompileConfig, *, dynamic_layout: bool = False) -> dict[str, Any]:
    """Return the arguments of torch.compile.

    It takes a mode or options, not both: with options the mode's are among them.

    Args:
        dynamic_layout: row lengths vary freely, so all sizes are symbolic.
    """
    dynamic = dynamic_layout or compile.dynamic
    found: dict[str, Any] = {"backend": compile.backend, "fullgraph": compile.fullgraph, "dynamic": dynamic}
    if compile.options:
        # A function of a private module that torch.compile's documentation names: it returns a mode's options.
        of_mode = torch._inductor.list_mode_options(compile.mode, dynamic) if compile.mode else {}
        return {**found, "options": {**of_mode, **compile.options}}
    return found if compile.mode is None else {**found, "mode": compile.mode}


SHORT_BLOCK = 3e12
"""FLOPs of a block with adapters below which launches take longer than kernels: at 0.6B with 16,384 positions, 1e12, an
H100 computes for 4.8 ms and its host launches for 5.4 ms and more."""


def replays_blocks(compile: CompileConfig, orig_model: PreTrainedModel, layout: Layout, rt: start.Runtime) -> bool:
    """Return whether a run without compile.mode takes CUDA graphs: one GPU, adapters, rows of one shape, short blocks.

    Adapters launch three to four times as many kernels as the frozen layers, most of them small. With long blocks the
    host is ahead, and CUDA graphs would only take memory.
    """
    adapters = adapters_of(orig_model)
    fixed = len(layout.shapes) == 1 and not layout.dynamic
    plain = compile.enabled and compile.backend == "inductor" and not compile.options
    if compile.mode is not None or not plain or compile.scope != "block" or adapters is None or not fixed:
        return False
    # Only what was timed and compared on a GPU.
    config = adapters.config
    if config.dropout or config.base != "bf16" or config.method != "lora" or adapters.members or adapters.tokens:
        return False
    ((rows, row_length),) = layout.shapes
    block = train_flops(orig_model, Work(rows * row_length, 0, 0)) / max(len(decoder_blocks(orig_model)), 1)
    return rt.device.type == "cuda" and rt.world_size == 1 and block < SHORT_BLOCK


def choose_mode(
    compile: CompileConfig, orig_model: PreTrainedModel, layout: Layout, rt: start.Runtime, *, routed: bool
) -> tuple[CompileConfig, str]:
    """Return the settings with the mode that the run compiles in, and a text that says which and why; "": none.

    Args:
        routed: the model has routers whose hooks are part of the graphs.
    """
    if not compile.enabled or compile.backend != "inductor":
        return compile, ""
    if not routed and replays_blocks(compile, orig_model, layout, rt):
        why = "(CUDA graphs), as launching the adapters' kernels takes longer than computing them"
        own = replace(compile, mode="reduce-overhead")
        return own, f"reduce-overhead {why}; compile.mode=default launches them"
    graphs = " (CUDA graphs)" if has_cuda_graphs(compile) else ""
    why = "kernels are launched one by one" if compile.mode is None and not graphs else "as the recipe says"
    return compile, f"{compile.mode or 'default'}{graphs}: {why}"


def recording_advice(compile: CompileConfig, *, dynamic_layout: bool) -> str | None:
    """Return a warning if every row length would need separate CUDA graphs; None: no warning."""
    if not (dynamic_layout and has_cuda_graphs(compile)):
        return None
    return hint("recording of each row length")


MAX_RECORDS = 100_000
"Compilation records that are kept: torch keeps 64, but recompiles are counted from all records of a run."
_MARGIN = 8
"Graphs of a function beyond those that a run declares, before torch may give up on it."
_NOT_STRICT = "mix_order_reduction_non_strict_mode"
"An option of Inductor that not every version of torch has: https://github.com/pytorch/pytorch/pull/171941."
_MESH_SIZE = "unsafe_treat_script_objects_as_zero_size"
_THERE = hasattr(torch._inductor.config.triton, _NOT_STRICT)
_ANY_LENGTH = {f"triton.{_NOT_STRICT}": True} if _THERE else {"triton.mix_order_reduction": False}
"""Options for free row lengths. On a GPU Inductor fuses the two reductions of a norm's backward pass from 5 MiB of
elements and 4,096 rows on, and guards on both: rows on the other side would need a second graph. The
non-strict mode drops the guards; in a torch without it the fusion is switched off."""


@contextmanager
def compiler_switches(
    compile: CompileConfig, activation_memory_budget: float = 1.0, graphs: int = 0, *, dynamic_layout: bool = False
) -> Iterator[None]:
    """Set the compiler as the run's step needs it, within the context: from before the warm-up to after the last step.

    Args:
        activation_memory_budget: share of each graph's activations that is kept for its backward pass, 0 to 1. What is
            recomputed is chosen by FLOPs; a custom operator counts with its formula (torch.utils.flop_counter).
        dynamic_layout: row lengths vary freely.
        graphs: how many the run declares: compiled modules times shapes.
    """
    # Private: the limit of these records (pytorch/pytorch#115788) has a setter, but no getter.
    records = dynamo_utils._compilation_metrics.maxlen or dynamo_utils.DEFAULT_COMPILATION_METRICS_LIMIT
    with ExitStack() as stack:
        stack.callback(dynamo_utils.set_compilation_metrics_limit, records)
        dynamo_utils.set_compilation_metrics_limit(MAX_RECORDS)
        if compile.enabled:
            # Blocks overlap with DDP's exchange already, and DDP's own splitting would break their graphs up:
            # pytorch/pytorch#108966.
            stack.enter_context(torch._dynamo.config.patch(optimize_ddp=False))
            # Beyond this many graphs torch runs a function eagerly without an error (pytorch/pytorch#136655), so none
            # may come near it.
            limits = {"recompile_limit": _MARGIN + graphs, "accumulated_recompile_limit": max(256, _MARGIN + graphs)}
            stack.enter_context(torch._dynamo.config.patch(limits))
            # What each graph recomputes instead of keeping it (pytorch/pytorch#126320), chosen by FLOPs and not by
            # measured times.
            stack.enter_context(torch._functorch.config.patch(activation_memory_budget=activation_memory_budget))
            stack.enter_context(torch._functorch.config.patch(activation_memory_budget_runtime_estimator="flops"))
            # A DTensor's mesh is an input of a graph too, and holds no tensor. torch 2.13 does not guess the size of
            # what is none, where it chooses what is recomputed; 2.11 does not ask. No issue is known.
            if hasattr(torch._functorch.config, _MESH_SIZE):
                stack.enter_context(torch._functorch.config.patch({_MESH_SIZE: True}))
            # Duck shapes give equal sizes one symbol: a warm-up whose number of rows happens to equal its row length
            # would give a graph for square batches only. pytorch/pytorch#186373 is about doing without by default.
            stack.enter_context(symbolic_shapes.patch(use_duck_shape=not dynamic_layout))  # type: ignore[attr-defined]
            if dynamic_layout:
                stack.enter_context(torch._inductor.config.patch(_ANY_LENGTH))
        yield


SchedulerNode = Any
"A node of Inductor's scheduler: a kernel, a product, the start of an exchange, or the wait for one."


@contextmanager
def collectives_hidden() -> Iterator[None]:
    """Order what Inductor compiles within the context by `behind_products`."""
    # Private, but meant for passes of one's own (pytorch/pytorch#150074); Inductor's hide the last exchange of a block
    # at most (torch 2.11 and 2.13), as they know no order but that of dependencies and measured times, which differ by
    # rank.
    passes = {"reorder_for_compute_comm_overlap_passes": [_BehindProducts()]}
    here = {"reorder_for_compute_comm_overlap": True, **passes}
    with torch._inductor.config.patch(here):
        yield


class _BehindProducts:
    """A pass whose code is in the key of cached code; a plain function has no place for it."""

    def __init__(self) -> None:
        self.code = get_hash_for_files((__file__,))

    def __call__(self, nodes: list[SchedulerNode]) -> list[SchedulerNode]:
        return behind_products(nodes)


def behind_products(nodes: list[SchedulerNode]) -> list[SchedulerNode]:
    """Return the nodes of a graph in another order: what no exchange depends on is put off until there is one to wait
    for, a matrix product at each wait and the rest at the last.

    The order follows from the graph alone, so it is the same on every rank.
    """
    makers = {name: i for i, node in enumerate(nodes) for name in node.get_buffer_names()}
    reads = [{makers.get(each.name, i) for each in node.unmet_dependencies} for i, node in enumerate(nodes)]
    needs = [found - {i} for i, found in enumerate(reads)]  # indices of the nodes that must come before each
    put_off = dict.fromkeys(sorted(_free(nodes, needs)))
    order: dict[int, None] = {}
    waits = [i for i, node in enumerate(nodes) if contains_wait(node)]
    for i in range(len(nodes)):
        if i in put_off:
            continue
        if i in waits:
            # In their own order, so that each finds what it needs; what needs this exchange stays put off.
            for other in [other for other in put_off if other not in order]:
                if needs[other] <= order.keys():
                    order[other] = None
                    if i != waits[-1] and _is_product(nodes[other]):
                        break
        order[i] = None
    return [nodes[i] for i in (*order, *(i for i in put_off if i not in order))]


def _free(nodes: list[SchedulerNode], needs: list[set[int]]) -> set[int]:
    """Return the indices of the nodes that no exchange depends on, exchanges aside."""
    readers: dict[int, set[int]] = defaultdict(set)
    for i, read in enumerate(needs):
        for maker in read:
            readers[maker].add(i)
    free: set[int] = set()
    # From the end: a reader comes after its inputs.
    for i in reversed(range(len(nodes))):
        exchange = contains_collective(nodes[i]) or contains_wait(nodes[i])
        if not exchange and readers[i] <= free:
            free.add(i)
    return free


def _is_product(node: SchedulerNode) -> bool:
    """Return whether a node is a matrix product: a template, or one that torch computes into memory of Inductor's. Of
    other calls of torch some compute nothing: they name one of several results."""
    return bool(node.is_template() or isinstance(node.node, ExternKernelOut))


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
            raise config_error("no decoder block to compile", cls=type(orig_model).__name__)
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
    if hardware.uses_cuda_graphs():
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
        raise RecompileError(hint("graph breaks", breaks="\n  ".join(breaks)))
    for reason in breaks:
        log.warning("graph break: %s", reason)
    stance = torch.compiler.set_stance("fail_on_recompile" if on_recompile == "error" else "default")
    # The stance `fail_on_recompile` is asked where a frame begins, so it does not stop a backward graph that is built
    # late. A callback does, since it comes before those, too. Private: torch.compiler has none; these were made for
    # finding jobs that hang while compiling (pytorch/pytorch#120764, with what triggered the compile since #153596).
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
    return RecompileError(hint("no graph of the warm-up", reason=reason))


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
    # With CUDA graphs the first pass of a shape compiles, the second warms up, the third records.
    passes = 3 if has_cuda_graphs(compile) else 1
    error: Exception | None = None
    try:
        if sharded:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            torch.compile(lambda x: x + 1, backend=compile.backend)(torch.zeros(2, device=device))
        else:
            run(shapes, passes)
    # Private: the errors of Dynamo and of what compiles for it have no public base class (torch 2.11 to 2.13).
    except torch._dynamo.exc.TorchDynamoException as caught:
        error = caught
    if not any_rank(error is not None):
        if sharded:
            run(shapes, passes)
        return True
    reason = " ".join(str(error or "it failed on another rank").split())[:300]
    if compile.on_failure == "error":
        raise ConfigError(f"compile.on_failure=error and the model cannot be compiled here: {reason}") from error
    # Private: what Module.compile sets (pytorch/pytorch#97565), which has no inverse (torch 2.13). Dynamo keeps graphs
    # by code object, not by module: without a reset other models of this class would still find them.
    for module in model.modules():
        module._compiled_call_impl = None
    torch.compiler.reset()
    model.zero_grad(set_to_none=True)
    run(shapes[-1:])  # which raises an error that eager execution has too
    log.warning(hint("eager for want of a compiler", reason=reason))
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
            hint("hook of compiled code", module=hook[0], kind=hook[1], change="added" if hook in now else "removed")
            for hook in now ^ self._hooks
            if hook[0] in inside
        }
        runs = {module for part in called(self._model) for module in part.modules()}
        uncalled = {
            hint("hook that no step runs", module=name or _ROOT, kind=kind)
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
