"""The settings of dynamo, functorch and inductor that a run changes: set here, and put back when it ends.

What holds for the whole process is in runtime/vectors.py and runtime/ptxas.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo import utils as dynamo_utils
from torch.fx.experimental import _config as symbolic_shapes

from sftkit.config.schema import FROM_COMPILER, CompileConfig

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
            # A DTensor's mesh is an input of a graph too, and holds no tensor. torch 2.13 refuses to guess the size of
            # what is none, where it chooses what is recomputed; 2.11 does not ask. No issue is known.
            if hasattr(torch._functorch.config, _MESH_SIZE):
                stack.enter_context(torch._functorch.config.patch({_MESH_SIZE: True}))
            # A graph from a cache is logged in part: without hints, without what Inductor knew of it when it wrote
            # code, and before pytorch/pytorch#176683 without AOTAutograd's graphs. So what compile.debug asks for is
            # compiled here, as torch does it for traces of its own (pytorch/pytorch#185621).
            if FROM_COMPILER & set(compile.debug):
                stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
                stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
            # Duck shapes give equal sizes one symbol: a warm-up whose number of rows happens to equal its row length
            # would give a graph for square batches only. pytorch/pytorch#186373 is about doing without by default.
            stack.enter_context(symbolic_shapes.patch(use_duck_shape=not dynamic_layout))  # type: ignore[attr-defined]
            if dynamic_layout:
                stack.enter_context(torch._inductor.config.patch(_ANY_LENGTH))
        yield
