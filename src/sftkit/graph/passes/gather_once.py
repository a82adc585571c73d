"""Weights gathered by the first micro-batch of a step and taken by the others, in place of a gather in each.

The first forward half also returns the whole weights. Later ones are a second graph, without the gathers, which is
given them. So the gathers stay behind the compute of the first micro-batch. At the peak of memory whole weights are
there anyway, since they are kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sftkit.graph import compat
from sftkit.graph.graphs import collective, gathered_from, waits_for

Key = tuple[str, int]
"A parameter by its name, and the how many-th of its gathers in a graph."


class Gathered:
    """The whole weights of a step, of all shapes that its micro-batches have."""

    def __init__(self) -> None:
        self._whole: dict[Key, Tensor] = {}
        self._left = 0

    @contextmanager
    def step(self, micro_batches: int) -> Iterator[None]:
        """Let so many forward passes share whole weights, within which weights do not change. Outside each one
        gathers its own."""
        self._left = micro_batches
        try:
            yield
        finally:
            self._left = 0
            self._whole.clear()

    def shared(self, keys: Sequence[Key], first: compat.Boxed, later: compat.Boxed) -> compat.Boxed:
        """Return a forward half that runs the later graph if all of its weights are here.

        Args:
            first: gathers, and returns the whole weights behind its outputs. later: takes them behind its inputs.
        """

        def run(args: list[Any]) -> list[Any]:
            self._left -= 1
            if all(key in self._whole for key in keys):
                args.extend(self._whole[key] for key in keys)
                self._forget_after_the_last()
                return list(later(args))
            found = list(first(args))
            outputs = found[: len(found) - len(keys)]
            self._whole.update(zip(keys, found[len(outputs) :], strict=True))
            self._forget_after_the_last()
            return outputs

        return compat.as_boxed(run)

    def _forget_after_the_last(self) -> None:
        # The backward half still has them, and frees them one by one: the update finds none.
        if self._left <= 0:
            self._whole.clear()


class Parted(NamedTuple):
    """What `part` makes of a forward half."""

    keys: list[Key]
    later: GraphModule
    whole: list[Node]
    "of the first half: the waits, which are its last outputs"
    kept: set[str]
    "names of nodes that share memory with a whole weight"


def part(graph: GraphModule) -> Parted | None:
    """Let a forward half return its whole weights, in place, and make another of it that is given them; None: it
    gathers none."""
    of_weights = gathered_from(graph)
    found = [(key, wait) for node, key in _keys(of_weights) for wait in waits_for(node)]
    if not found:
        return None
    whole, copies = [wait for _, wait in found], dict[Node, Node]()
    alone = Graph()
    output = alone.output(alone.graph_copy(graph.graph, copies))
    output.meta = dict(graph.graph.output_node().meta)
    last = list(alone.find_nodes(op="placeholder"))[-1]
    for number, wait in enumerate(whole):
        with alone.inserting_after(last):
            last = alone.placeholder(f"whole_{number}")
        last.meta = dict(wait.meta)
        copies[wait].replace_all_uses_with(last)
    # Not by eliminate_dead_code: torch keeps each wait, as one that nobody reads may be there for its effect.
    for node in reversed(of_weights):
        if not copies[node].users:
            alone.erase_node(copies[node])
    alone.lint()
    last_outputs = graph.graph.output_node()
    last_outputs.args = ((*last_outputs.args[0], *whole),)  # type: ignore[misc]
    graph.recompile()
    keys = [key for key, _ in found]
    return Parted(keys, GraphModule(graph, alone), whole, {node.name for node in of_weights})


def _keys(of_weights: Sequence[Node]) -> Iterator[tuple[Node, Key]]:
    """Yield the all-gathers among nodes of weights, and which parameter's they are."""
    known: dict[str, int] = {}
    for node in of_weights:
        if collective(node) != "all-gather":
            continue
        shard = node
        while shard.op != "placeholder":
            shard = shard.all_input_nodes[0]
        name = str(compat.parameter_of(shard))
        known[name] = known.get(name, -1) + 1
        yield node, (name, known[name])


def compile_both(
    parted: Parted, examples: Sequence[Any], compile_one: Callable[[str, Sequence[Any]], compat.Boxed]
) -> tuple[compat.Boxed, compat.Boxed]:
    """Compile the first and the later half.

    Args:
        examples: of the inputs that both have.
        compile_one: takes the half's name and the examples of its inputs.

    Raises:
        RuntimeError: the compiler lays out what they keep for the backward half in different ways.
    """
    first, strides = compat.with_strides(lambda: compile_one("forward", examples))
    given = [wait.meta["val"] for wait in parted.whole]
    later, others = compat.with_strides(lambda: compile_one("later-forward", [*examples, *given]))
    # The backward half is compiled once, for the strides of the first.
    own = strides[: len(strides) - len(parted.keys)]
    if others != own:
        raise RuntimeError(
            "gather_once: Inductor lays out what the first micro-batch of a step keeps in other ways than the others: "
            "leave the pass out of graph.passes"
        )
    compat.report_strides(own)
    return first, later
