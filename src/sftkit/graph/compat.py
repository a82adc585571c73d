"""Every name of torch that its makers may change without notice, and that the graph engine stands on: nothing else in this room
imports one. A name that this torch does not have is an error that says so; arguments that it does not have are left out.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from sftkit.errors import ConfigError

TESTED = ("2.11", "2.13")
"Versions of torch that the engine was run on."
Boxed = Callable[[list[Any]], Any]
"A function of one list, which it empties, so that what is in it is freed as soon as it is used."
Compiler = Callable[[GraphModule, Sequence[Any]], Boxed]


def private(module: str, name: str) -> Any:
    """Return an object of torch by its place.

    Raises:
        ConfigError: this torch does not have it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"train.engine=graph: torch {torch.__version__} has no {module}.{name}, which it stands on; it was run on torch "
            f"{' and '.join(TESTED)}: install one of them, or set train.engine=blocks"
        ) from error


def accepted(fn: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those of the options that the function has in this version of torch."""
    parameters = inspect.signature(fn).parameters
    return {name: value for name, value in options.items() if name in parameters}


def export_joint(stack: ExitStack, module: torch.nn.Module, inputs: Sequence[Tensor]) -> Any:
    """Trace the module's forward pass and the backward pass of its outputs as one functional graph, with fake tensors.

    Args:
        stack: holds what must stay in force until `compile_joint`.

    Returns:
        torch's JointWithDescriptors: `graph_module`; `params_spec` and `buffers_spec`, names in the order of its first inputs.
    """
    export = private("torch._functorch.aot_autograd", "aot_export_joint_with_descriptors")
    return export(stack, module, tuple(inputs))


def compile_joint(
    joint: Any, partition: Callable[..., Any], forward: Compiler, backward: Compiler
) -> Callable[..., Any]:
    """Split a joint graph and compile both halves.

    Returns:
        a function of parameters, buffers and inputs, flat and in the order of the specs, that autograd knows.
    """
    compile_ = private("torch._functorch.aot_autograd", "aot_compile_joint_with_descriptors")
    return compile_(joint, partition_fn=partition, fw_compiler=forward, bw_compiler=backward)  # type: ignore[no-any-return]


def default_partition() -> Callable[..., Any]:
    """Return the split that keeps for the backward pass what eager execution would."""
    return private("torch._functorch.partitioners", "default_partition")  # type: ignore[no-any-return]


def boxed(graph: GraphModule) -> Boxed:
    """Return the graph as generated Python that frees each value after its last use, its inputs too."""
    graph.graph.set_codegen(private("torch.fx.graph", "_BoxedCodeGen")())
    graph.recompile()

    def run(args: list[Any]) -> Any:
        return graph(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of this calling convention
    return run
