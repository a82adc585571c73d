"""Gradients of a step are summed whole, and its last micro-batch reduces the sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from sftkit.graph import compat
from sftkit.graph.passes import once
from sftkit.graph.passes.once import BackwardFork, WholeGradients

WEIGHT, NORM = ("weight", (1,), "fp32"), ("norm", (1,), "fp32")


class Half:
    """A backward half of weights whose gradients are numbers, and reducing doubles them."""

    def __init__(self, sums: WholeGradients, *keys: Any) -> None:
        self.ran: list[str] = []
        keys = keys or (WEIGHT,)
        examples = {key: torch.empty(1) for key in keys}
        gradients = dict(enumerate(examples.values(), start=1))
        self.fork = BackwardFork(GraphModule({}, Graph()), None, examples, gradients, {name for name, *_ in keys})
        self._run = sums.half_of(self.fork, self.first, self.middle, self.last)

    def first(self, args: list[Any]) -> list[Any]:
        """One gradient that no rank shares, and none of the weights; then what is to be reduced."""
        self.ran.append("first")
        return [torch.zeros(1), *[None] * len(args), *args]

    def middle(self, args: list[Any]) -> list[Any]:
        self.ran.append("middle")
        whole, sums = args[: len(args) // 2], args[len(args) // 2 :]
        return [torch.zeros(1), *[None] * len(whole), *(a + b for a, b in zip(whole, sums, strict=True))]

    def last(self, args: list[Any]) -> list[Any]:
        self.ran.append("last")
        whole, sums = args[: len(args) // 2], args[len(args) // 2 :]
        return [torch.zeros(1), *(2 * (a + b) for a, b in zip(whole, sums, strict=True))]

    def __call__(self, *whole: float) -> list[float]:
        _, *gradients = self._run([torch.tensor([each]) for each in whole])
        assert [each.shape for each in gradients] == [(1,)] * len(whole)
        return [float(each) for each in gradients]


def test_the_last_micro_batch_reduces_the_sum_of_all() -> None:
    sums = WholeGradients(several=True)
    half = Half(sums)
    for _ in range(2):  # a step each
        with sums.summing(3):
            assert [half(1.0), half(2.0)] == [[0.0], [0.0]]
            assert half(4.0) == [14.0]
        assert not sums._sums
    assert half.ran == ["first", "middle", "last"] * 2


def test_the_pass_to_come_says_whether_it_reduces() -> None:
    sums = WholeGradients(several=False)
    half, found = Half(sums), [sums.reduces]
    with sums.summing(2):
        for _ in range(2):
            found.append(sums.reduces)
            half(1.0)
    assert found == [True, False, True]


def test_outside_of_a_step_every_pass_reduces_its_own() -> None:
    sums = WholeGradients(several=False)
    half = Half(sums)
    assert [half(1.0), half(3.0)] == [[2.0], [6.0]]
    with sums.summing(2):
        half(1.0)
    assert half(3.0) == [6.0], "a step that ended early leaves nothing"
    assert half.ran == ["last", "last", "first", "last"]


def test_a_half_is_the_only_one_that_holds_the_sums_which_it_is_given() -> None:
    """So that it frees each when it has added to it."""
    sums = WholeGradients(several=True)
    half, seen = Half(sums), []
    middle = half.middle

    def looking(args: list[Any]) -> list[Any]:
        seen.append(dict(sums._sums))
        return middle(args)

    half._run = sums.half_of(half.fork, half.first, looking, half.last)
    with sums.summing(3):
        half(1.0)
        assert list(sums._sums) == [WEIGHT]
        half(1.0)
    assert seen == [{}]


def test_halves_of_a_step_that_sum_other_gradients_are_refused() -> None:
    sums = WholeGradients(several=False)
    one, both = Half(sums, WEIGHT), Half(sums, WEIGHT, NORM)
    with sums.summing(2):
        both(1.0, 2.0)
        with pytest.raises(RuntimeError, match="sum other gradients"):
            one(1.0)
    with sums.summing(2):
        one(1.0)
        assert one(1.0) == [4.0]


def test_more_micro_batches_than_there_are_graphs_for_are_refused() -> None:
    sums = WholeGradients(several=False)
    half = Half(sums)
    half._run = sums.half_of(half.fork, half.first, None, half.last)
    with sums.summing(3):
        half(1.0)
        with pytest.raises(RuntimeError, match="more micro-batches than its graphs were captured for"):
            half(1.0)


OPS = torch.ops._c10d_functional
SUM, TAKEN = OPS.reduce_scatter_tensor.default, torch.ops.aten.add.Tensor


def half_of(*outputs: str) -> GraphModule:
    """A backward half by what becomes of the bf16 gradients: `reduced`, `added` to one that is not, `negated`."""
    graph, found = Graph(), []
    given = [graph.placeholder(f"tangents_{number}") for number in range(len(outputs) + 1)]

    def call(operator: Any, *args: Any, gives: torch.dtype = torch.bfloat16, size: int = 2, **kwargs: Any) -> Node:
        node = graph.call_function(operator, args, kwargs)
        node.meta["val"] = torch.empty(size, dtype=gives)
        return node

    def cast(node: Node, dtype: torch.dtype, size: int) -> Node:
        return call(torch.ops.aten._to_copy.default, node, dtype=dtype, gives=dtype, size=size)

    for number, what in enumerate(outputs):
        given[number].meta["val"] = torch.empty(4, dtype=torch.bfloat16)
        gradient = given[number]
        if what == "rounded":
            gradient = cast(cast(gradient, torch.float64, 4), torch.bfloat16, 4)
        whole = cast(gradient, torch.float32, 4)
        whole = call(torch.ops.aten.view.default, whole, [4], gives=torch.float32, size=4)  # as a DTensor makes
        reduced = call(SUM, whole, "sum", 2, "0", gives=torch.float32)
        compat.annotate(reduced, "sftkit_weight", f"weight {number}")
        last = cast(call(OPS.wait_tensor.default, reduced, gives=torch.float32), torch.bfloat16, 2)
        if what == "added":
            last = call(TAKEN, last, given[-1])
        elif what == "negated":
            last = call(torch.ops.aten.neg.default, last)
        found.append(last)
    graph.output(tuple(found))
    return GraphModule({}, graph)


def calls(graph: GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_a_half_without_reductions_hands_out_what_they_would_read() -> None:
    fork = once.fork_backward(half_of("reduced"), several=True)
    assert fork is not None
    assert fork.middle is not None
    gradient, sums = torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16(), torch.tensor([2.0**-20] * 4)
    nothing, whole = fork.first(gradient, None)
    assert nothing is None
    assert whole.dtype == torch.float32
    assert whole.tolist() == gradient.tolist()
    nothing, added = fork.middle(gradient, None, sums)
    assert nothing is None
    assert added.tolist() == (whole + sums).tolist() != whole.tolist(), "in fp32"


def test_the_last_adds_to_the_sum_before_it_reduces_and_casts_without_a_copy() -> None:
    last = half_of("reduced")
    cast, view, *others = calls(last)
    fork = once.fork_backward(last, several=False)
    assert fork is not None
    assert fork.middle is None
    assert calls(last) == [TAKEN, *others]
    assert others[-1] is cast, "the other one"
    assert view not in others
    (given,) = (node for node in last.graph.nodes if node.name == "whole_gradient_0")
    (added,) = last.graph.find_nodes(op="call_function", target=TAKEN)
    assert added.args[0] is given
    assert [list(user.args[:1]) for user in added.users] == [[added]], "which is what is reduced"


def test_a_cast_that_rounds_stays_before_the_addition() -> None:
    last = half_of("rounded")
    fork = once.fork_backward(last, several=True)
    assert fork is not None
    assert fork.middle is not None
    for half in (last, fork.middle):
        (added,) = half.graph.find_nodes(op="call_function", target=TAKEN)
        source: Any = added.args[1]
        assert source.meta["val"].dtype == torch.bfloat16
        assert source.all_input_nodes[0].meta["val"].dtype == torch.float64


def test_a_gradient_that_is_more_than_reductions_is_reduced_every_time() -> None:
    fork = once.fork_backward(half_of("reduced", "added"), several=False)
    assert fork is not None
    assert (fork.weights, list(fork.left_out)) == ({"weight 0"}, [0])
    assert calls(fork.first).count(SUM) == 1


def test_reductions_that_it_does_not_know_are_told_and_not_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"no reduced gradient is one that it knows: leave it out of graph\.passes"):
        once.fork_backward(half_of("negated"), several=False)


def test_a_half_that_reduces_nothing_stays_one() -> None:
    graph = Graph()
    graph.output((graph.placeholder("tangents_0"),))
    assert once.fork_backward(GraphModule({}, graph), several=True) is None
