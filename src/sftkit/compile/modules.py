"""Compiler settings: the arguments of torch.compile, compile.options, and the settings of torch that a run changes.

The settings of dynamo, functorch and inductor are put back when the run ends; runtime/start.py has those that hold for
the whole process.

The rest of the file hides exchanges inside a compiled block of a tensor-parallel model. Ranks exchange activations four
times a pass of a block, and what follows needs what has arrived. Only gradients of weights are needed by nobody until
the optimizer: in the backward pass they are put where the block would wait. On two H100 at 8B, on rank 0 9 % of a step
are exchanges that nothing hides, 11 % before that (benchmarks/h200_patterns).
"""

import difflib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, get_origin

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo import utils as dynamo_utils
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch._inductor.ir import ExternKernelOut
from torch._inductor.utils import contains_collective, contains_wait
from torch.fx.experimental import _config as symbolic_shapes
from transformers import PreTrainedModel

from sftkit.config.schema import CompileConfig
from sftkit.data.batches.pack import Layout
from sftkit.errors import ConfigError
from sftkit.models.structure import Work, decoder_blocks, train_flops
from sftkit.models.trained import adapters_of
from sftkit.runtime.start import Runtime

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
CUDA_GRAPHS = "triton.cudagraphs"
"The option that these modes turn on."


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
        # Of a private module, but torch.compile's documentation names it, and reads a mode's options with it.
        of_mode = torch._inductor.list_mode_options(compile.mode, dynamic) if compile.mode else {}
        return {**found, "options": {**of_mode, **compile.options}}
    return found if compile.mode is None else {**found, "mode": compile.mode}


def has_cuda_graphs(compile: CompileConfig) -> bool:
    """Return whether any graph will be recorded as a CUDA graph and replayed."""
    by_option: bool = (compile.options or {}).get(CUDA_GRAPHS, compile.mode in CUDA_GRAPH_MODES)
    return compile.backend == "cudagraphs" or by_option


SHORT_BLOCK = 3e12
"""FLOPs of a block with adapters below which launches take longer than kernels: at 0.6B with 16,384 positions, 1e12, an
H100 computes for 4.8 ms and its host launches for 5.4 ms and more."""


def replays_blocks(compile: CompileConfig, orig_model: PreTrainedModel, layout: Layout, rt: Runtime) -> bool:
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


def recording_advice(compile: CompileConfig, *, dynamic_layout: bool) -> str | None:
    """Return a warning where every row length would have CUDA graphs of its own; None: none is due."""
    if not (dynamic_layout and has_cuda_graphs(compile)):
        return None
    return (
        "warning: data.layout=dynamic with CUDA graphs (compile.mode) records new graphs for each row length during "
        "training: steps may be slower than eager ones. Take compile.mode=default or max-autotune-no-cudagraphs, or "
        "a layout of fixed shapes"
    )


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
