"""Exchanges once a step: its first micro-batch gathers the weights for all, its last one reduces the gradients of all.

gather_once: the first forward half also returns whole weights. Later halves are a second graph without gathers, which
takes these weights as inputs. So the computation of the first micro-batch still hides the gathers. The peak of memory
is at the loss, where the head and the weights that the backward half reads exist anyway; only these are shared.

reduce_once: the backward half of any micro-batch but the last returns no gradient of these weights. Instead it returns
the tensors that its reductions would read, added to the sums so far. The half of the last micro-batch takes the sums as
inputs. So a step reduces once, whatever its number of micro-batches, and holds whole gradients between them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sftkit.errors import hint
from sftkit.graph import compat, graphs

WeightKey = tuple[str, tuple[int, ...], str]
"A whole weight: the parameter's name, shape and dtype."


class SharedWeights:
    """The whole weights of a step, of all shapes that its micro-batches have."""

    def __init__(self) -> None:
        self._whole: dict[WeightKey, Tensor] = {}
        self._left = 0

    @contextmanager
    def sharing(self, micro_batches: int) -> Iterator[None]:
        """Let n forward passes share whole weights within the context, in which weights must not change. Outside, each
        pass gathers its own."""
        self._left = micro_batches
        try:
            yield
        finally:
            self._left = 0
            self._whole.clear()

    def half_of(self, keys: Sequence[WeightKey], first: compat.Boxed, later: compat.Boxed) -> compat.Boxed:
        """Return a forward half that runs the later graph if all of its weights are known.

        Args:
            first: gathers, and returns the whole weights behind its outputs. later: takes them behind its inputs.
        """

        def run(args: list[Any]) -> list[Any]:
            self._left -= 1
            if all(key in self._whole for key in keys):
                args.extend(self._whole[key] for key in keys)
                # The backward half still has them, and frees them one by one: the update finds none.
                if self._left <= 0:
                    self._whole.clear()
                return list(later(args))
            found = list(first(args))
            outputs = found[: len(found) - len(keys)]
            self._whole.update(zip(keys, found[len(outputs) :], strict=True))
            if self._left <= 0:
                self._whole.clear()
            return outputs

        return compat.as_boxed(run)


class Fork(NamedTuple):
    """What `fork` makes of a forward half."""

    keys: list[WeightKey]
    later: GraphModule
    whole: list[Node]
    "waits of the first graph, which are its last outputs"
    aliases: set[str]
    "names of nodes that may share memory with a whole weight"


def fork(graph: GraphModule) -> Fork | None:
    """Let a forward half return whole weights, in place, and make another of it that is given them; None: it gathers
    none that could be shared."""
    tied = _gather_tied_weights_once(graph)
    of_weights = graphs.gathered_from(graph)
    found = list(_shared(graph, of_weights, tied))
    if not found:
        return None
    keys = [key for key, _ in found]
    whole = [wait for _, wait in found]
    later_graph, copies = graphs.copy_of(graph)
    given = graphs.added_inputs(later_graph, [wait.meta["val"] for wait in whole], "whole")
    for wait, value in zip(whole, given, strict=True):
        value.meta = dict(wait.meta)
        copies[wait].replace_all_uses_with(value)
    graphs.erase_unread(later_graph, [copies[node] for node in of_weights])
    later_graph.lint()
    of_first = graph.graph.output_node()
    of_first.args = ((*of_first.args[0], *whole),)  # type: ignore[misc]
    graph.recompile()
    return Fork(keys, GraphModule(graph, later_graph), whole, {node.name for node in of_weights})


def _gather_tied_weights_once(graph: GraphModule) -> set[WeightKey]:
    """Let all that reads a weight take the first of its gathers, and return the weights that had several."""
    first: dict[WeightKey, Node] = {}
    tied: set[WeightKey] = set()
    of_weights = graphs.gathered_from(graph)
    for _, key, wait in _gathers(of_weights):
        if first.setdefault(key, wait) is not wait:
            wait.replace_all_uses_with(first[key])
            tied.add(key)
    graphs.erase_unread(graph.graph, of_weights)
    return tied


def _shared(graph: GraphModule, of_weights: Sequence[Node], tied: set[WeightKey]) -> Iterator[tuple[WeightKey, Node]]:
    """Yield those whole weights, each with its wait, that are there when the loss is computed: what the backward half
    reads, the head, and a tied table."""
    outputs = set(graph.graph.output_node().all_input_nodes)
    forms = set(of_weights)
    for gather, key, wait in _gathers(of_weights):
        # Forms of a whole weight: itself, casts and views.
        same = graphs.reached([wait], lambda node: forms.intersection(node.users))
        if graphs.bucket_of(gather) == graphs.HEAD or key in tied or same & outputs:
            yield key, wait


def _gathers(of_weights: Sequence[Node]) -> Iterator[tuple[Node, WeightKey, Node]]:
    """Yield the all-gathers among nodes of weights, each with the whole weight that it gives and the wait for it."""
    for node in of_weights:
        for wait in graphs.waits_for(node) if graphs.collective(node) == "all-gather" else ():
            value = wait.meta["val"]
            yield node, (str(graphs.weight_of(node)), tuple(value.shape), str(value.dtype)), wait


def compile_both(
    forked: Fork, examples: Sequence[Any], compile_one: Callable[[str, Sequence[Any]], compat.Boxed]
) -> tuple[compat.Boxed, compat.Boxed]:
    """Compile the first and the later forward half.

    Args:
        examples: of the inputs that both have.
        compile_one: takes the half's name and the examples of its inputs.

    Raises:
        RuntimeError: the compiler gives what both return, or whole weights, other strides in one than in the other.
    """
    first, first_strides = compat.with_strides(lambda: compile_one("forward", examples))
    given = [wait.meta["val"] for wait in forked.whole]
    later, later_strides = compat.with_strides(lambda: compile_one("later-forward", [*examples, *given]))
    # The backward half is compiled once, for the strides of the first.
    if first_strides and first_strides != [*later_strides, *(value.stride() for value in given)]:
        raise RuntimeError(hint("strides of gather_once"))
    compat.report_strides(later_strides)
    return first, later


GradientKey = tuple[str, tuple[int, ...], str]
"The input of the reductions of a weight's gradient: the weight's name, shape and dtype."


class BackwardFork(NamedTuple):
    """What `fork_backward` makes of a backward half, which itself becomes that of the last micro-batch of a step."""

    first: GraphModule
    "of the first micro-batch: its last outputs are the inputs of the reductions"
    middle: GraphModule | None
    "of those between: takes the sums so far behind its inputs; None: steps have two micro-batches"
    sums: dict[GradientKey, Tensor]
    "examples of the sums, contiguous, which the last one takes behind its inputs"
    left_out: dict[int, Tensor]
    "examples of the gradients that only the last one gives, by their places among the outputs"
    weights: set[str]
    "first names of the weights that these are gradients of"


class WholeGradients:
    """The sums of a step's whole gradients."""

    def __init__(self, *, several: bool) -> None:
        """Begin without any.

        Args:
            several: a step may have micro-batches between its first and its last.
        """
        self.several = several
        self._sums: dict[GradientKey, Tensor] = {}
        self._left = 0

    @contextmanager
    def summing(self, micro_batches: int) -> Iterator[None]:
        """Let n pairs of a forward and a backward pass be a step within the context. Outside, each pair reduces its own
        gradients."""
        self._left = micro_batches
        try:
            yield
        finally:
            self._left = 0
            self._sums.clear()

    @property
    def reduces(self) -> bool:
        """Return whether the backward pass to come reduces gradients."""
        return self._left <= 1

    def half_of(
        self, fork: BackwardFork, first: compat.Boxed, middle: compat.Boxed | None, last: compat.Boxed
    ) -> compat.Boxed:
        """Return a backward half that runs the graph of its place in the step. It raises RuntimeError if another half
        of the same step summed other gradients, or the step has more micro-batches than there are graphs for."""
        # The examples are fake tensors: shape, dtype and device are kept, to make zeros of.
        sums = {key: (example.shape, example.dtype, example.device) for key, example in fork.sums.items()}
        left_out = {at: (example.shape, example.dtype, example.device) for at, example in fork.left_out.items()}
        nothing: dict[Any, Tensor] = {}

        def run(args: list[Any]) -> list[Any]:
            reduces = self.reduces
            begun = bool(self._sums)
            self._left -= 1
            if begun and self._sums.keys() != sums.keys():
                raise RuntimeError("reduce_once: the micro-batches of a step sum other gradients")
            # Out of the table before they go in: the half frees each as soon as it has added to it.
            if begun:
                args.extend([self._sums.pop(key) for key in sums])
            if reduces:
                if not begun:
                    args.extend([torch.zeros(shape, dtype=t, device=on) for shape, t, on in sums.values()])
                return list(last(args))
            half = middle if begun else first
            if half is None:
                raise RuntimeError("reduce_once: a step has more micro-batches than its graphs were captured for")
            found = list(half(args))
            # Inductor chooses the strides of its outputs; the other halves read them as a reduction does.
            self._sums.update(zip(sums, (each.contiguous() for each in found[-len(sums) :]), strict=True))
            del found[-len(sums) :]
            # Autograd wants a tensor: one number that is read everywhere. Nobody sums it, as Graph keeps it from the
            # parameter.
            for at, (shape, dtype, device) in left_out.items():
                if (dtype, device) not in nothing:
                    nothing[dtype, device] = torch.zeros((), dtype=dtype, device=device)
                found[at] = nothing[dtype, device].expand(shape)
            return found

        return compat.as_boxed(run)


def fork_backward(graph: GraphModule, *, several: bool) -> BackwardFork | None:
    """Make of a backward half that of the last micro-batch of a step, in place, and others of it for those before;
    None: it reduces no gradient of a weight.

    Args:
        several: a step may have micro-batches between its first and its last.

    Raises:
        RuntimeError: it reduces some, and none can wait.
    """
    reductions = dict(_reductions(graph))
    if not reductions:
        # A graph that this does not know would go on reducing in every micro-batch, and nobody would see why.
        if any(graphs.weight_of(node) and _reduces(node) for node in graph.graph.nodes):
            raise RuntimeError("reduce_once: no reduced gradient is one that it knows: leave it out of graph.passes")
        return None
    outputs = graph.graph.output_node().args[0]
    left_out = {at: node.meta["val"] for at, node in enumerate(outputs) if node in reductions}  # type: ignore[arg-type]
    read: dict[GradientKey, list[Node]] = {}
    of_gradients = {node for nodes in reductions.values() for node in nodes}
    for node in [node for node in graph.graph.nodes if node in of_gradients]:
        value = node.all_input_nodes[0].meta["val"]
        read.setdefault((str(graphs.weight_of(node)), tuple(value.shape), str(value.dtype)), []).append(node)
    sums = {key: nodes[0].all_input_nodes[0].meta["val"] for key, nodes in read.items()}
    first = _without_reductions(graph, list(left_out), read, {})
    middle = _without_reductions(graph, list(left_out), read, sums) if several else None
    for given, nodes in zip(
        graphs.added_inputs(graph.graph, list(sums.values()), "whole_gradient"), read.values(), strict=True
    ):
        whole = nodes[0].all_input_nodes[0]
        nodes[0].replace_input_with(whole, _added(graph.graph, given, whole))
        graphs.erase_unread(graph.graph, [whole])
    graph.graph.lint()
    graph.recompile()
    return BackwardFork(first, middle, sums, left_out, {name for name, *_ in read})


def _reductions(graph: GraphModule) -> Iterator[tuple[Node, list[Node]]]:
    """Yield the outputs that are nothing but reduced gradients of weights, each with its reductions."""
    marked = Counter(graphs.weight_of(node) for node in graph.graph.nodes if _reduces(node))
    found = {
        node: nodes
        for node in graph.graph.output_node().all_input_nodes
        if (nodes := _behind(node)) and all(graphs.weight_of(reduction) for reduction in nodes)
    }
    # A weight with a gradient that is not among them has that one summed by autograd, so the others with it.
    seen = Counter(graphs.weight_of(reduction) for nodes in found.values() for reduction in nodes)
    for output, nodes in found.items():
        if all(seen[graphs.weight_of(reduction)] == marked[graphs.weight_of(reduction)] for reduction in nodes):
            yield output, nodes


def _reduces(node: Node) -> bool:
    """Return whether a node is the first sum over ranks of a weight's gradient."""
    kind = graphs.collective(node)
    return kind == "reduce-scatter" or (kind == "all-reduce" and _behind(node.all_input_nodes[0]) is None)


def _behind(node: Node) -> list[Node] | None:
    """Return the reductions that a value is the sum of, or one of; None: it is something else, too."""
    inputs = node.all_input_nodes
    kind = graphs.collective(node)
    if kind == "reduce-scatter":
        return [node]
    if kind == "all-reduce":  # between copies, after a reduce-scatter if the weight is sharded
        return _behind(inputs[0]) or [node]
    if node.target is torch.ops.aten.add.Tensor or (len(inputs) == 1 and graphs.keeps_values(node)):
        parts = [_behind(read) for read in inputs]
        return None if None in parts else [reduction for part in parts for reduction in part or ()]
    return None


def _without_reductions(
    graph: GraphModule, left_out: Sequence[int], read: dict[GradientKey, list[Node]], given: dict[GradientKey, Tensor]
) -> GraphModule:
    """Return a copy of a half that gives, in place of some outputs, what their reductions read behind all others.

    Args:
        left_out: places of these outputs.
        given: examples of sums to which that is added; empty: there are none yet.
    """
    copied, copies = graphs.copy_of(graph)
    output = copied.output_node()
    earlier = GraphModule(graph, copied)
    before = dict(zip(given, graphs.added_inputs(copied, list(given.values()), "whole_gradient"), strict=True))
    wholes = {key: [copies[node].all_input_nodes[0] for node in nodes] for key, nodes in read.items()}
    sums = []
    for key, (total, *others) in wholes.items():
        summed = _added(copied, before[key], total) if key in before else total
        for whole in others:  # of a tied weight
            summed = _added(copied, summed, whole)
        sums.append(summed)
    outputs: Any = list(output.args[0])  # type: ignore[arg-type]
    replaced = [outputs[at] for at in left_out]
    for at in left_out:
        outputs[at] = None
    output.args = ((*outputs, *sums),)
    graphs.erase_unread(copied, [*replaced, *(whole for each in wholes.values() for whole in each)])
    copied.lint()
    earlier.recompile()
    return earlier


def _added(graph: Graph, given: Node, whole: Node) -> Node:
    """Add a gradient to a sum as soon as it is there, in the sum's dtype."""
    # A gradient that is summed in fp32 was cast for that. The addition casts as it reads, to the same bits, without a
    # copy.
    source = whole
    while _only_widens(source):
        source = source.all_input_nodes[0]
    with graph.inserting_after(whole):
        added = graph.call_function(torch.ops.aten.add.Tensor, (given, source))
    added.meta = dict(whole.meta)
    return added


def _only_widens(node: Node) -> bool:
    """Return whether a node gives the very numbers that it reads, in a wider dtype or as a view of the same shape."""
    name = compat.schema_name(node)
    if name not in graphs.CASTS and name != "aten::view":
        return False
    value = node.meta["val"]
    read = node.all_input_nodes[0].meta["val"]
    # A cast that rounds stays: without it the sum would have other bits than a reduction in each micro-batch reads.
    return value.shape == read.shape and torch.promote_types(read.dtype, value.dtype) == value.dtype
