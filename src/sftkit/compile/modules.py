"""Which modules are compiled and how: compile.modules, compile.options, and the settings of torch that a run changes.

The settings of dynamo, functorch and inductor are put back when the run ends; runtime/start.py has those that hold for
the whole process.

The rest of the file hides exchanges inside a compiled block of a tensor-parallel model. Ranks exchange activations four
times a pass of a block, and what follows needs what has arrived. Only gradients of weights are needed by nobody until
the optimizer: in the backward pass they are put where the block would wait. On two H100 at 8B, on rank 0 9 % of a step
are exchanges that nothing hides, 11 % before that (benchmarks/h200_patterns).

Asynchronously, compile.options: {_micro_pipeline_tp: true}, Inductor merges an all-gather with the matrix products
behind it, and a product with the reduce-scatter behind it, and sends one part while it computes another
(https://discuss.pytorch.org/t/209487). Parts go through symmetric memory; multicast is not needed. All exchanges of a
forward pass are merged, and the first of a backward pass; the others stay behind gradients of weights.
"""

from __future__ import annotations

import difflib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, get_origin

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo import utils as dynamo_utils
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.ir import ExternKernelOut
from torch._inductor.utils import contains_collective, contains_wait
from torch.distributed import ProcessGroup
from torch.fx import Graph
from torch.fx.experimental import _config as symbolic_shapes
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from sftkit.config.schema import CompileConfig, CompileModuleConfig
from sftkit.errors import ConfigError
from sftkit.models.structure import decoder, decoder_blocks, output_projection
from sftkit.runtime.script import first_of

LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
"Containers that are never called themselves: their items are compiled one by one."
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
CUDA_GRAPHS = "triton.cudagraphs"
"The option that these modes turn on."
ROW_DIMENSIONS = {1: (0,), 2: (1,), 3: (1,), 4: (2, 3)}
"""Number of a tensor's dimensions -> those that follow the row length: boundaries [D], ids [B, T], states
[B, T, H], masks [B, 1, T, T]."""


def named_parts(
    orig_model: PreTrainedModel, compile: CompileConfig, *, sharded: bool = False
) -> dict[str, tuple[torch.nn.Module, CompileConfig]]:
    """Return the modules that compile.modules names, each with its settings, by path and in the model's order.

    Args:
        sharded: weights will be gathered block by block, so no module that holds a block is compiled as one.

    Raises:
        ConfigError: a path that the model does not have, that a step never calls or that lies inside another one; it
            lists the paths that there are.
    """
    parts: dict[str, tuple[torch.nn.Module, CompileConfig]] = {}
    inner = decoder(orig_model)
    paths = {module: name for name, module in orig_model.named_modules()}
    # Short paths first, so that a longer one to the same module replaces them.
    for path, own in sorted((compile.modules or {}).items(), key=lambda item: item[0].count(".")):
        for place, module in _at(orig_model, path):
            # A step calls the decoder alone, also of a module that holds it with its head, as GPT-2 behind a ViT.
            if isinstance(module, PreTrainedModel) and inner in module.modules():
                place, module = paths[inner], inner
            parts[place] = module, with_own(compile, own)
    _check_parts(orig_model, {path: module for path, (module, _) in parts.items()}, sharded=sharded)
    order = list(paths)
    return dict(sorted(parts.items(), key=lambda part: order.index(part[1][0])))


def with_own(compile: CompileConfig, own: CompileModuleConfig) -> CompileConfig:
    """Return the settings of one module: its own over those of compile."""
    return replace(compile, modules=None, **{key: value for key, value in vars(own).items() if value is not None})


def _at(orig_model: PreTrainedModel, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the path and module at a path, or those of the items of a list there."""
    module: torch.nn.Module = orig_model
    there: list[str] = []
    for name in path.split("."):
        children = dict(module.named_children())
        if name not in children:
            near = difflib.get_close_matches(name, children, n=1)
            where = f"in {'.'.join(there)}" if there else f"in {type(orig_model).__name__}"
            raise ConfigError(
                f'compile.modules: "{path}": there is no {name or "empty name"} {where}, which has '
                f"{first_of(list(children), 12) or 'no modules'}." + (f' Did you mean "{near[0]}"?' if near else "")
            )
        module = children[name]
        there.append(name)
    if isinstance(module, LISTS):
        yield from ((f"{path}.{name}", child) for name, child in module.named_children())
    else:
        yield path, module


def _check_parts(orig_model: PreTrainedModel, parts: dict[str, torch.nn.Module], *, sharded: bool) -> None:
    """Reject a path that lies inside another one, and modules that a step does not call or that cannot be a graph of
    their own."""
    for path in parts:
        outer = next((other for other in parts if path.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(
                f'compile.modules: "{path}" lies in "{outer}", which is one graph with all that it holds: name only '
                "one of them"
            )
    blocks = set(decoder_blocks(orig_model))
    for path, module in parts.items():
        inside = set(module.modules())
        if output_projection(orig_model) in inside:
            reason = "is not called in a step, where the loss reads the weight of the head in a kernel of its own"
        elif type(module).__module__.startswith("torch.nn"):
            reason = f"is a {type(module).__name__} of torch, which Dynamo does not trace on its own"
        elif sharded and inside & blocks - {module}:
            reason = "holds blocks whose sharded weights are gathered between graphs"
        else:
            continue
        others = first_of(_good_paths(orig_model), 12)
        raise ConfigError(f'compile.modules: "{path}" {reason}: name other modules, such as {others}')


def _good_paths(orig_model: PreTrainedModel) -> list[str]:
    """Return the paths of the children of the decoder that are worth naming."""
    inside = decoder(orig_model)
    prefix = next(name for name, module in orig_model.named_modules() if module is inside)
    return [
        f"{prefix}.{name}".lstrip(".")
        for name, child in inside.named_children()
        if next(child.parameters(), None) is not None
        and (isinstance(child, LISTS) or not type(child).__module__.startswith("torch.nn"))
    ]


# ---- inductor's options ----


def check_options(compile: CompileConfig) -> None:
    """Reject options that the installed torch does not have.

    Raises:
        ConfigError: a name that torch._inductor.config lacks, with the nearest one, or a value of another type.
    """
    named = {"compile.options": compile.options}
    named |= {f"compile.modules: {path}: options": own.options for path, own in (compile.modules or {}).items()}
    given = [(place, name, value) for place, options in named.items() for name, value in (options or {}).items()]
    # Private, but its names are those of torch.compile(options=...), as its documentation says.
    config: Any = torch._inductor.config
    known = config.get_config_copy() if given else {}
    for place, name, value in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or [key for key in known if key.endswith(f".{name}")]
            hint = f'Did you mean "{near[0]}"?' if near else "torch._inductor.list_options() has them all"
            raise ConfigError(f'{place}: "{name}" is no option of Inductor in torch {torch.__version__}. {hint}')
        wanted = config.get_type(name)
        if get_origin(wanted) is None and not isinstance(value, wanted):  # as torch.compile asks
            raise ConfigError(
                f"{place}: {name} must be of type {wanted.__name__}, not {type(value).__name__} ({value})"
            )


def compile_arguments(compile: CompileConfig, *, dynamic_layout: bool = False) -> dict[str, Any]:
    """Return the arguments of torch.compile.

    It takes a mode or options, not both: with options the mode's are among them.

    Args:
        dynamic_layout: row lengths vary freely, so all sizes are symbolic, unless the row length alone is marked.
    """
    dynamic = None if compile.dynamic == "marked" else True if dynamic_layout else compile.dynamic
    found: dict[str, Any] = {"backend": compile.backend, "fullgraph": compile.fullgraph, "dynamic": dynamic}
    if compile.options:
        # Of a private module, but torch.compile's documentation names it, and reads a mode's options with it.
        of_mode = torch._inductor.list_mode_options(compile.mode, dynamic) if compile.mode else {}
        return {**found, "options": {**of_mode, **compile.options}}
    return found if compile.mode is None else {**found, "mode": compile.mode}


def has_cuda_graphs(compile: CompileConfig) -> bool:
    """Return whether any graph will be recorded as a CUDA graph and replayed."""
    own = [with_own(compile, module) for module in (compile.modules or {}).values()] or [compile]
    return any(c.backend == "cudagraphs" or (c.options or {}).get(CUDA_GRAPHS, c.mode in CUDA_GRAPH_MODES) for c in own)


def recording_advice(compile: CompileConfig, *, dynamic_layout: bool) -> str | None:
    """Return a warning where every row length would have CUDA graphs of its own; None: none is due."""
    if not (dynamic_layout and has_cuda_graphs(compile)):
        return None
    return (
        "warning: data.layout=dynamic with CUDA graphs (compile.mode) records new graphs for each row length during "
        "training: steps may be slower than eager ones. Take compile.mode=default or max-autotune-no-cudagraphs, or "
        "a layout of fixed shapes"
    )


def check_marked(compile: CompileConfig, backend: str) -> None:
    """Refuse a marked row length where attention has sizes of its own that follow from it.

    Raises:
        ConfigError: attention by blocks of positions.
    """
    if backend == "flex" and compile.dynamic == "marked":
        raise ConfigError(
            "compile.dynamic: marked does not go with attention.backend flex, whose masks are blocks of 128 positions: "
            "set compile.dynamic=false, which lets layout dynamic make all sizes symbolic, or "
            "attention.backend=varlen or sdpa"
        )


def compile_part(module: torch.nn.Module, compile: CompileConfig, *, dynamic_layout: bool = False) -> None:
    """Compile in place, lazily. With compile.dynamic=marked the row length of every given tensor is marked."""
    module.compile(**compile_arguments(compile, dynamic_layout=dynamic_layout))
    if compile.dynamic == "marked":
        assert module._compiled_call_impl is not None
        # Private: the compiled call (pytorch/pytorch#97565). Dynamo cannot trace a mark (pytorch/pytorch#167269), so it
        # is set around that call; a hook would be inside it.
        module._compiled_call_impl = _marking(module._compiled_call_impl)


def _marking(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with the row dimensions of its tensors marked as dynamic before it."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        # Private: torch 2.13 has no public pytree (pytorch/pytorch#65761). tree_leaves finds the tensors inside named
        # tuples and lists, too.
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                for dimension in ROW_DIMENSIONS.get(leaf.ndim, ()):
                    if leaf.shape[dimension] > 1:  # torch specialises on sizes 0 and 1
                        # Documented, but torch.compiler has no name for it. Unmarked, a row length is compiled as a
                        # constant and again with a symbol at the second length: a recompile that the contract forbids.
                        torch._dynamo.mark_dynamic(leaf, dimension)
        return call(*args, **kwargs)

    return marked


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


OPTION = "_micro_pipeline_tp"
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
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


# ---- asynchronously ----


def mergeable_products(compile: CompileConfig) -> AbstractContextManager[object] | None:
    """Return a context within which Inductor finds what it can merge; None: the recipe does not ask for it."""
    if not (compile.enabled and (compile.options or {}).get(OPTION)):
        return None
    # Private, as is the option: a pass of one's own over Inductor's graphs has no public place (pytorch/pytorch#153532
    # proposes one).
    return torch._inductor.config.patch(post_grad_custom_pre_pass=_OneView())


def use_symmetric_memory(group: ProcessGroup) -> None:
    """Let a group exchange through symmetric memory; every rank calls it. Where this was not called, Inductor merges
    nothing and says nothing."""
    # Private: torch 2.11 to 2.13 warn that nobody needs it any more, and Inductor still asks whether it was called
    # (pytorch/pytorch#193027).
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*enable_symm_mem_for_group", category=FutureWarning)
        enable_symm_mem_for_group(group.group_name)


class _OneView(CustomGraphPass):
    """Makes one view of a chain of them, and none where it changes nothing. Between a collective and a matrix product
    Inductor looks for one view at most, and gathered rows have two: back to [1, T, H], and to the matrix."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.target not in _VIEWS:
                continue
            while node.args[0].target in _VIEWS:
                node.replace_input_with(node.args[0], node.args[0].args[0])
            if node.meta["val"].shape == node.args[0].meta["val"].shape:
                node.replace_all_uses_with(node.args[0])
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Return the part of the key of cached code; without it nothing is cached (pytorch/pytorch#137298)."""
        return get_hash_for_files((__file__,))
