"""Passes that choose what of a graph is gathered again in the backward pass, and the regions that Inductor compiles.

Passes over a half compile regions;
the other operators are called one by one, in their order. A region is a run of operators of one decoder block.
Collectives, kernels of this project and random numbers end it, so the overlap that an earlier pass chose stays. Equal
blocks are compiled once.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sftkit.graph import compat, graphs


def reshard_after_forward(graph: GraphModule) -> None:
    """Mark what leads from a weight's shard to the whole weight, so that the backward pass gathers it again."""
    for node in graphs.gathered_from(graph):
        compat.recompute(node)


NodeRun = list[Node]


def regional_inductor(graph: GraphModule, *, for_inductor: bool) -> None:
    """Compile what Inductor can fuse, block by block, in place; FlexAttention, too, but on a CPU, which has no kernel
    of its backward pass."""

    def computes(node: Node) -> bool:
        return not _is_view(node) and node.target is not operator.getitem

    # Something to fuse, or FlexAttention.
    runs = _runs(graph, _fusible)
    _compile(graph, [run for run in runs if sum(map(computes, run)) > 1 or any(map(compat.is_flex, run))])


def full_inductor(graph: GraphModule, examples: Sequence[Any], half: str) -> compat.Boxed:
    """Compile a whole half by Inductor."""
    return compat.by_inductor(graph, examples, is_backward=half.endswith("backward"))


def flex_attention(graph: GraphModule) -> bool:
    """Compile the calls of FlexAttention alone, in place, where there are some on a GPU: call by call they would
    keep all scores.

    Returns:
        whether there were.
    """
    if not any(_flex_on_gpu(node) for node in graph.graph.nodes):
        return False
    _compile(graph, _runs(graph, _flex_on_gpu))
    return True


def _fusible(node: Node) -> bool:
    """Return whether a node may be part of a region."""
    node = graphs.source_of(node)
    if compat.is_flex(node):
        return _flex_on_gpu(node)
    target = compat.operator_of(node)
    if target is None or target.namespace not in ("aten", "prims"):
        return False
    # Inductor's random numbers are others than those of eager operators, and in-place writes could be moved past
    # what reads them.
    value = node.meta.get("val")
    tensors = all(isinstance(v, Tensor) for v in (value if isinstance(value, (tuple, list)) else (value,)))
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not (random or target._schema.is_mutable) and tensors


def _flex_on_gpu(node: Node) -> bool:
    node = graphs.source_of(node)
    return compat.is_flex(node) and node.args[0].meta["val"].device.type == "cuda"  # type: ignore[union-attr]


def _is_view(node: Node) -> bool:
    target = compat.operator_of(node)
    return target is not None and bool(target.is_view)


def _runs(graph: GraphModule, takes: Callable[[Node], bool]) -> list[NodeRun]:
    """Return the longest runs of such nodes that are of one block, or of none; sums of gradients belong to what
    is before them."""
    for node in [n for n in graph.graph.nodes if n.target is operator.getitem]:
        node.args[0].append(node)  # next to its tuple, so that no tuple leaves a region
    # A run ends at the border of a block: blocks that are alike then have regions that are alike, which
    # are compiled once.
    runs: list[NodeRun] = [[]]
    for node in graph.graph.nodes:
        if node.op == "get_attr":  # the functions inside of FlexAttention, which go with it
            continue
        own = graphs.block_of(node)
        before = runs[-1] and graphs.block_of(runs[-1][0])
        joins = own == before or (own is None and node.target is torch.ops.aten.add.Tensor)
        if runs[-1] and not (takes(node) and joins):
            runs.append([])
        if takes(node):
            runs[-1].append(node)
    return [run for run in runs if run]


def _compile(graph: GraphModule, runs: Sequence[NodeRun]) -> None:
    """Put a call of compiled code in the place of each run."""
    # By code and by strides: Inductor writes both into the kernel.
    known: dict[Any, Callable[..., Any]] = {}
    for run in runs:
        outputs = _outputs(run)
        code, inputs = _extract(graph, run, outputs)
        examples = [node.meta["val"] for node in inputs]
        key = (_text(code), tuple((v.shape, v.stride(), v.dtype, v.device) for v in examples))
        if key not in known:
            known[key] = compat.compiled_region(code, examples)
        _replace(graph.graph, run, inputs, outputs, known[key])
    graph.graph.lint()
    graph.recompile()


def _outputs(run: NodeRun) -> NodeRun:
    """Return the outputs of a region. Views of a run that others read stay in the graph: a call of a view is cheaper
    than an output."""
    inside = set(run)
    left: set[Node] = set()

    def read_outside(node: Node) -> bool:
        return any(user not in inside or user in left for user in node.users)

    # Backwards: a view also stays in the graph if only views that stay read it.
    for node in reversed(run):
        if _is_view(node) and read_outside(node):
            left.add(node)
    return [node for node in run if node not in left and read_outside(node)]


def _extract(graph: GraphModule, run: NodeRun, outputs: NodeRun) -> tuple[GraphModule, NodeRun]:
    """Return a copy of some nodes as a graph of its own, whose names say nothing of where they were; and its inputs."""
    # From the outputs back, so that nothing is computed in the region only for a view that stays outside.
    needed = dict.fromkeys(outputs)
    inside = set(run)
    for node in reversed(run):
        if node in needed:
            needed |= dict.fromkeys(node.all_input_nodes)
    read = dict.fromkeys(source for node in run if node in needed for source in node.all_input_nodes)
    inputs = [node for node in read if node not in inside and node.op != "get_attr"]
    # Inputs are numbered, not named after their nodes: two blocks then give the same text, by which
    # _compile knows them.
    extracted = Graph()
    copies: dict[Node, Node] = {}
    functions: dict[str, Any] = {}
    for number, node in enumerate(inputs):
        copies[node] = extracted.placeholder(f"input_{number}")
        copies[node].meta["val"] = node.meta["val"]
    for node in (node for node in needed if node.op == "get_attr"):
        name = f"function_{len(functions)}"
        functions[name] = getattr(graph, str(node.target))
        copies[node] = extracted.get_attr(name)
    for node in (node for node in run if node in needed):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = extracted.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copies[node].meta["val"] = node.meta.get("val")
    extracted.output(tuple(copies[node] for node in outputs))
    return GraphModule(functions, extracted), inputs


def _text(region: GraphModule) -> str:
    """Return the code of a graph and of the functions inside."""
    return "\n".join(module.code for module in region.modules() if isinstance(module, GraphModule))


def _replace(graph: Graph, run: NodeRun, inputs: NodeRun, outputs: NodeRun, call: Callable[..., Any]) -> None:
    """Call the compiled code where a run is; views that stay, as others read them, come behind it."""
    with graph.inserting_after(run[-1]):
        last = called = graph.call_function(call, tuple(inputs))
    for number, node in enumerate(outputs):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (called, number))
        last.meta.update(node.meta)
        node.replace_all_uses_with(last)
    # Views that others read move behind the region. Nodes without readers are erased, the last first, since a node with
    # readers cannot be erased.
    for node in reversed(run):
        if node.users:
            last.append(node)
        else:
            graph.erase_node(node)
    # The functions inside of FlexAttention: the region has taken them along.
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
