"""The names of torch that its makers may change without notice and that the graph engine needs: no other file of this
room imports one. A name that this torch does not have is an error that says so. An argument that it does not have is
left out.
"""

import importlib
import inspect
import logging
import math
import operator
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from sftkit.errors import ConfigError, config_error
from sftkit.ops import flex
from sftkit.runtime.start import replaced

TESTED = ("2.11", "2.13", "2.15")
"Versions of torch that the engine was run on."
Boxed = Callable[[list[Any]], Any]
"A function of one list, which it empties, so that each value is freed after its last use."
Compiler = Callable[[GraphModule, Sequence[Any]], Boxed]


def private(module: str, name: str) -> Any:
    """Return an object of torch by its module and its name there, which may have dots.

    Raises:
        ConfigError: this torch does not have it.
    """
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise missing_name_error(f"{module}.{name}") from error


def missing_name_error(name: str) -> ConfigError:
    """Return the error of a name that this torch does not have."""
    return config_error(
        "torch without a part of the graph engine", version=torch.__version__, name=name, known=", ".join(TESTED)
    )


def accepted(fn: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those of the options that the function has in this version of torch."""
    parameters = inspect.signature(fn).parameters
    return {name: value for name, value in options.items() if name in parameters}


def export_joint(stack: ExitStack, module: torch.nn.Module, inputs: Sequence[Tensor], *, for_inductor: bool) -> Any:
    """Trace the module's forward pass and the backward pass of its outputs as one functional graph, with fake tensors.

    Args:
        stack: holds what must stay in force until `compile_joint`.
        for_inductor: operators are decomposed into those that Inductor knows.

    Returns:
        torch's JointWithDescriptors: `graph_module`; `params_spec` and `buffers_spec`, names in the order of its first
        inputs.
    """
    # Documented (pytorch/pytorch#159006), but in no public module. The compilers come with the second call,
    # compile_joint: pytorch/pytorch#164584.
    export = private("torch._functorch.aot_autograd", "aot_export_joint_with_descriptors")
    # Without a public way: torch.compile hands this table over by itself, and Inductor stands on no other
    # (pytorch/pytorch#107103).
    table = private("torch._inductor.decomposition", "select_decomp_table")() if for_inductor else None
    return export(stack, module, tuple(inputs), decompositions=table)


def compile_joint(
    joint: Any, partition: Callable[..., Any], forward: Compiler, backward: Compiler
) -> Callable[..., Any]:
    """Split a joint graph and compile both halves.

    Returns:
        a function of parameters, buffers and inputs, flat and in the order of the specs, that autograd knows.
    """
    compile_ = private("torch._functorch.aot_autograd", "aot_compile_joint_with_descriptors")
    return compile_(joint, partition_fn=partition, fw_compiler=forward, bw_compiler=backward)


def flex_operator(call: flex.Call) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's output, [B, H, T, Dv], and its log-sum-exp, [B, H, T], by the operator behind torch's
    function, which would start Dynamo. The boundaries of documents are inputs of the operator, so that a graph has none
    of them in it."""
    # No public names: torch's own function compiles this operator by itself where Dynamo does not trace, with options
    # that it fills in and a score function that it puts in the place of none (pytorch/pytorch#167224).
    attend = private("torch._higher_order_ops.flex_attention", "flex_attention")
    options = private("torch.nn.attention.flex_attention", "_apply_kernel_options")
    inputs = (call.query, call.key, call.value)
    score = call.capped or private("torch.nn.attention.flex_attention", "_identity")
    # True: the log-sum-exp is returned too, for the backward pass.
    known = options(*inputs, True, None)  # noqa: FBT003 - private, so by place
    # Its last entry is the mask function, replaced by one that reads the boundaries it is given: a closure over a
    # tensor would be a constant of the graph.
    mask = (*call.block_mask.as_tuple()[:-1], call.visible)
    out, lse, *_ = attend(*inputs, score, mask, call.scale, known, (), call.boundaries)
    return out, lse * math.log(2.0)  # the operator's logarithm is to base 2


def annotated(values: dict[str, Any]) -> AbstractContextManager[None]:
    """Annotate nodes that are traced within the context, and those of their gradients."""
    # pytorch/pytorch#163673; that nodes of the backward pass get the annotations of the forward pass:
    # pytorch/pytorch#164174.
    return private("torch.fx.traceback", "annotate")(values)


def annotation(node: Node, name: str) -> Any:
    """Return a value that a node is annotated with, which torch copies with the node; None: it has none
    of this name."""
    return node.meta.get("custom", {}).get(name)


def annotate(node: Node, name: str, value: Any) -> None:
    """Annotate a node with one more value."""
    node.meta["custom"] = {**node.meta.get("custom", {}), name: value}


def recompute(node: Node) -> None:
    """Tell the split of a joint graph that the backward pass computes again what a node of the forward pass gives."""
    # A key of the split (pytorch/pytorch#129295), which activation checkpointing under torch.compile writes; there is
    # no function for it.
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def operator_of(node: Node) -> Any:
    """Return the operator of torch that a node calls, an OpOverload; None: the node calls none."""
    # Private: the class of torch.ops.aten.mm.default and its `_schema` (pytorch/pytorch#67254) have no public name.
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def schema_name(node: Node) -> str:
    """Return namespace::name of the operator that a node calls; empty: the node calls none."""
    target = operator_of(node)
    return "" if target is None else str(target._schema.name)


def is_flex(node: Node) -> bool:
    """Return whether a node is FlexAttention or its gradient."""
    module = "torch._higher_order_ops.flex_attention"
    return node.target in (private(module, "flex_attention"), private(module, "flex_attention_backward"))


def parameter_of(node: Node) -> str | None:
    """Return the name of the parameter that an input of a captured graph is, or is the local shard of; None
    of any other."""
    # By the text of its description (pytorch/pytorch#158624): a shard of a DTensor has this one wrapped in others, of
    # private classes, and torch's own functions that read them (pytorch/pytorch#159005) refuse those.
    match = re.search(r"ParamAOTInput\(target='([^']+)'\)", repr(node.meta.get("desc")))
    return match.group(1) if match else None


def gradients_of(graph: GraphModule) -> dict[str, Node]:
    """Return the nodes of a captured graph that are gradients of parameters, or their local shards, by
    the parameter's name."""
    # As above: a gradient that is a DTensor is several outputs, its shard and its mesh, each with
    # a wrapped description.
    (output,) = graph.graph.find_nodes(op="output")
    found: dict[str, Node] = {}
    for node, description in zip(output.args[0], output.meta["desc"], strict=True):
        named = re.search(r"GradAOTOutput\(grad_of=ParamAOTInput\(target='([^']+)'\)", repr(description))
        if named and isinstance(node, Node) and node.op != "placeholder":  # not the mesh of a DTensor
            found[named.group(1)] = node
    return found


def all_gather(shard: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Join the shards of a group's ranks along a dimension: an operator of a graph, without gradient."""
    ranks = group.size()
    shards = _collective("all_gather_into_tensor", shard, group, ranks).unflatten(0, (ranks, -1))
    return shards.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's shard, along a dimension, of the sum over a group's ranks: an operator of a
    graph, without gradient."""
    ranks = group.size()
    shards = tensor.unflatten(dim, (ranks, -1)).movedim(dim, 0)
    return _collective("reduce_scatter_tensor", shards.flatten(0, 1), group, "sum", ranks)


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over a group's ranks: an operator of a graph, without gradient."""
    return _collective("all_reduce", tensor, group, "sum")


def _collective(name: str, tensor: Tensor, group: ProcessGroup, *options: Any) -> Tensor:
    started = _functional(name)(tensor.contiguous(), *options, group.group_name)
    return _functional("wait_tensor")(started)


def _functional(name: str) -> Any:
    """Return a collective as an operator of graphs.

    Raises:
        ConfigError: this torch does not have it.
    """
    # The operators, not the functions over them: those wrap results in a tensor that waits by itself, and were renamed
    # (pytorch/pytorch#186125), while the operators keep their names.
    return private("torch", f"ops._c10d_functional.{name}")


def kept_for_backward(graph: GraphModule) -> list[Node]:
    """Return the inputs of a backward half that the forward half computed: no weight, no tensor of a
    batch, no gradient."""
    inputs = graph.graph.find_nodes(op="placeholder")
    # By AOTAutograd's names of the inputs of a joint graph, as Inductor knows them too (pytorch/pytorch#177365): all
    # others are saved activations.
    return [node for node in inputs if not str(node.target).startswith(("primals", "tangents"))]


def in_place(graph: GraphModule, half: str) -> list[bool]:
    """Return for each input of a half whether it is at the same place in every step: a weight, a buffer, or a saved
    activation."""
    # Weights stay where they are from the warm-up on: they are sharded and loaded before it, and updated in place.
    kept = set(kept_for_backward(graph)) if half == "backward" else set()
    inputs = graph.graph.find_nodes(op="placeholder")
    named = re.compile(r"(Param|Buffer)AOTInput\(")
    return [node in kept or named.search(repr(node.meta.get("desc"))) is not None for node in inputs]


def overlap_collectives(
    graph: GraphModule, estimate: Callable[[Node, int | None], float | None], *, for_inductor: bool
) -> None:
    """Merge and move the collectives of a graph, in place, so that compute hides them.

    Args:
        estimate: milliseconds of a node, for a collective of a number of bytes if one is given; None: torch's own
            estimate.
        for_inductor: the order is written into the graph as dependencies: Inductor reorders nodes without them.
    """
    # Private (pytorch/pytorch#163215): torch.compile runs it by a setting of Inductor, on the graphs of Dynamo alone.
    schedule = private("torch._inductor.fx_passes.overlap_scheduling", "schedule_overlap_bucketing")
    # torch 2.11 has no such option. Its scheduler keeps the time of a matrix product or of attention on disk, under
    # operator, sizes, strides and dtype (fx_passes/overlap_scheduling.py benchmark_node_with_cache_key), in a folder by
    # the GPU's name (codecache.py LocalCache): asked before `estimate`, and without the device in the key, so on a
    # machine with a GPU that has also trained on its CPU one of them gets the other's time. Ranks still take the same,
    # their median. No version keeps times of collectives here.
    options = accepted(schedule, compute_estimator="analytical")
    with _quiet(), _without_gpu():
        options |= {"insert_overlap_deps": for_inductor, "custom_runtime_estimation": estimate}
        schedule(graph, collective_bucketing=True, **options)


def coalesced(target: Any) -> Any:
    """Return the operator that runs a collective on a list of tensors in a single call."""
    return _functional(f"{target.overloadpacket.__name__}_coalesced").default


def keep_order(graph: GraphModule, after: dict[Node, list[Node]]) -> None:
    """Write the order of nodes into a graph, in place: Inductor reorders nodes without a dependency."""
    # pytorch/pytorch#164568.
    write = private("torch._inductor.fx_passes.control_dependencies", "preserve_node_ordering")
    write(graph.graph, after)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's schedulers from printing on every rank: the warm-up prints the result."""
    names = ("torch._inductor.fx_passes", "torch._inductor.fx_passes.fsdp", "torch._inductor.utils")
    for name in names:
        importlib.import_module(name)  # which would set its level
    with ExitStack() as stack:
        for logger in map(logging.getLogger, names):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Keep the schedulers from asking for a GPU's bandwidth or speed where there is none, and they fail: they ask even
    where other estimates are given (pytorch/pytorch#182883)."""
    scheduling = "torch._inductor.fx_passes.overlap_scheduling"
    # Any number will do: on a CPU products and collectives are estimated in passes/order.py.
    stand_ins: dict[tuple[str, str], Callable[..., float]] = {
        ("torch.utils._runtime_estimation", "get_gpu_dram_gbps"): lambda: 10.0,  # torch 2.13
        (scheduling, "get_gpu_dram_gbps"): lambda: 10.0,
        (scheduling, "estimate_runtime_analytical"): lambda node: 0.0,  # torch 2.11
    }
    with ExitStack() as stack:
        for (module, name), value in stand_ins.items() if not torch.cuda.is_available() else ():
            where = sys.modules.get(module)
            if where is not None and hasattr(where, name):
                stack.enter_context(replaced(where, name, value))
        yield


def partition(*, for_inductor: bool, saves_memory: bool) -> Callable[..., Any]:
    """Return the split of a joint graph: what eager execution would keep for the backward pass, or the least that
    torch's activation memory budget asks for.

    Args:
        for_inductor: operators that are cheap when fused are computed again.
        saves_memory: the budget is asked.
    """
    # Private: the splits behind torch.compile, of which Inductor takes the second, and what it does to a joint graph
    # before (pytorch/pytorch#181834).
    default = private("torch._functorch.partitioners", "default_partition")
    least = private("torch._functorch.partitioners", "min_cut_rematerialization_partition")
    simplify = private("torch._inductor.fx_passes.joint_graph", "joint_graph_passes")
    if not for_inductor and not saves_memory:
        return default

    def split(graph: GraphModule, inputs: Any, **options: Any) -> Any:
        if for_inductor:
            # As Inductor does before its own split: a value that is simplified away later would be kept for nothing.
            simplify(graph)
        return least(graph, inputs, **options, compiler="inductor")

    return split


def by_inductor(graph: GraphModule, examples: Sequence[Any], *, is_backward: bool) -> Boxed:
    """Return the graph compiled by Inductor."""
    # Private: torch.compile would trace, differentiate and split again; the inner step takes a half as it is.
    # torchtitan does the same (pytorch/torchtitan#2150).
    compile_inner = private("torch._inductor.compile_fx", "compile_fx_inner")
    _let_dependencies_be_traced()
    return compile_inner(graph, list(examples), is_backward=is_backward)


def _let_dependencies_be_traced() -> None:
    """Give the operator that writes an order into a graph the rule of autograd that torch has from 2.13 on. Inductor
    runs a graph on fake tensors before it compiles it, and without the rule 2.11 ends there, whether or not gradients
    are wanted (pytorch/pytorch#165786, fixed by #168894)."""
    dependencies = private("torch._inductor.fx_passes.control_dependencies", "control_deps")
    key = private("torch._C", "DispatchKey.Autograd")
    if not dependencies.has_kernel_for_dispatch_key(key):
        dependencies.py_impl(key)(lambda after, subgraph, *args, **kwargs: subgraph(*args, **kwargs))


def compiled_region(graph: GraphModule, examples: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a part of a graph compiled by Inductor: a function of its inputs, whose strides are those of the examples.

    Args:
        examples: fake tensors of the current trace.
    """
    _let_dependencies_be_traced()
    # Private (pytorch/pytorch#150670); public compilation would start from Python. Shapes are those of the current
    # trace (pytorch/pytorch#151788): the examples are its fake tensors, which another trace rejects.
    standalone = private("torch._inductor", "standalone_compile")
    compiled = standalone(graph, list(examples), dynamic_shapes="from_tracing_context", aot=True)

    def region(*inputs: Tensor) -> tuple[Tensor, ...]:  # a graph calls functions alone
        return compiled(*inputs)

    return region


def boxed(graph: GraphModule) -> Boxed:
    """Return the graph as generated Python that frees each value after its last use, its inputs too."""
    # Private (pytorch/pytorch#164573), and without a public way: plain generated code holds its inputs until it returns
    # (pytorch/pytorch#83137), so all that the forward half keeps would stay for the whole backward half.
    graph.graph.set_codegen(private("torch.fx.graph", "_BoxedCodeGen")())
    graph.recompile()

    return as_boxed(lambda args: graph(args))


def as_boxed(run: Boxed) -> Boxed:
    """Mark a function as one of AOTAutograd's calling convention: it empties the list of its arguments."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def with_strides(compile_one: Callable[[], Boxed]) -> tuple[Boxed, list[Any]]:
    """Compile a half and return it with the strides that Inductor chose for its outputs; an empty list if another
    compiler made it. AOTAutograd does not learn of them: see report_strides."""
    # Private (pytorch/pytorch#105010): Inductor reports strides in this way, and of one graph only.
    with private("torch._guards", "TracingContext").report_output_strides() as strides:
        return compile_one(), strides


def report_strides(strides: Sequence[Any]) -> None:
    """Report to AOTAutograd the strides of the outputs of the half that is being compiled."""
    reported = private("torch._guards", "TracingContext").get().output_strides
    if reported is not None:
        reported.extend(strides)


@contextmanager
def kept_from_reuse(graph: GraphModule, names: Container[str]) -> Iterator[None]:
    """Keep Inductor from writing over these inputs of a backward half, which it otherwise does with all that the
    forward half made for it."""
    # Private (pytorch/pytorch#130580): AOTAutograd lists the inputs which it believes nobody else reads. The list is
    # not in the key of compiled code that Inductor keeps on disk, so the key gets a word of ours.
    tag = f"{torch.compiler.config.cache_key_tag} sftkit: inputs are read again"
    metadata = private("torch._guards", "TracingContext").get().fw_metadata
    inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    left = [at for at in metadata.bw_donated_idxs or () if inputs[at] not in names]
    with replaced(metadata, "bw_donated_idxs", left), replaced(torch.compiler.config, "cache_key_tag", tag):
        yield
