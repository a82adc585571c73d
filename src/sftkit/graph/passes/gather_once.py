"""The first micro-batch of a step gathers the weights for all of them.

The first forward half also returns whole weights. Later halves are a second graph without gathers, which takes these
weights as inputs. So the computation of the first micro-batch still hides the gathers. The peak of memory is at the
loss, where the head and the weights that the backward half reads exist anyway; only these are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule, Node

from sftkit.graph import compat, graphs
from sftkit.graph.graphs import bucket_of, collective, gathered_from, reached, waits_for, weight_of

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
    of_weights = gathered_from(graph)
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
    of_weights = gathered_from(graph)
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
        same = reached([wait], lambda node: forms.intersection(node.users))
        if bucket_of(gather) == graphs.HEAD or key in tied or same & outputs:
            yield key, wait


def _gathers(of_weights: Sequence[Node]) -> Iterator[tuple[Node, WeightKey, Node]]:
    """Yield the all-gathers among nodes of weights, each with the whole weight that it gives and the wait for it."""
    for node in of_weights:
        for wait in waits_for(node) if collective(node) == "all-gather" else ():
            value = wait.meta["val"]
            yield node, (str(weight_of(node)), tuple(value.shape), str(value.dtype)), wait


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
        raise RuntimeError(
            "gather_once: Inductor gives what the first micro-batch of a step keeps other strides than the others "
            "need: leave the pass out of graph.passes"
        )
    compat.report_strides(later_strides)
    return first, later
