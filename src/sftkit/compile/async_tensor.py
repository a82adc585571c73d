"""Asynchronous tensor parallelism, compile.options: {_micro_pipeline_tp: true}: Inductor merges an all-gather with the
matrix products behind it, and a product with the reduce-scatter behind it, and sends one part while it computes
another (https://discuss.pytorch.org/t/209487). Parts go through symmetric memory; multicast is not needed.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.distributed import ProcessGroup
from torch.fx import Graph

from sftkit.config.schema import CompileConfig

OPTION = "_micro_pipeline_tp"
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def asynchronous(compile: CompileConfig) -> bool:
    """Return whether the recipe asks for it."""
    return compile.enabled and bool((compile.options or {}).get(OPTION))


def mergeable_products(compile: CompileConfig) -> AbstractContextManager[object]:
    """Let Inductor find what it can merge, for what is compiled within the context, if the recipe asks for it."""
    # Private, as is the option: a pass of one's own over Inductor's graphs has no public place.
    here = torch._inductor.config.patch(post_grad_custom_pre_pass=_OneView())
    return here if asynchronous(compile) else nullcontext()


def use_symmetric_memory(group: ProcessGroup) -> None:
    """Let a group exchange through symmetric memory; every rank calls it. Where this was not called, Inductor merges
    nothing and says nothing."""
    # Private: torch 2.11 to 2.13 warn that nobody needs it any more, and Inductor still asks whether it was called.
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
        """Return what is in the key of cached code."""
        return get_hash_for_files((__file__,))
