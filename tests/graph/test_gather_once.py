"""Micro-batches of a step share whole weights, and nothing else does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import symbolic_trace

from sftkit.graph import compat
from sftkit.graph.passes.once import SharedWeights

WEIGHT, NORM = ("weight", (1,), "fp32"), ("norm", (1,), "fp32")


class Half:
    """A forward half of one weight: shards are numbers, and gathering doubles them."""

    def __init__(self, weights: SharedWeights, *keys: Any) -> None:
        self.ran: list[str] = []
        self._run = weights.half_of(keys or (WEIGHT,), self.first, self.later)

    def first(self, args: list[Any]) -> list[Any]:
        self.ran.append("first")
        whole = [2 * shard for shard in args]
        return [sum(whole), *whole]

    def later(self, args: list[Any]) -> list[Any]:
        self.ran.append("later")
        shards, whole = args[: len(args) // 2], args[len(args) // 2 :]
        assert len(shards) == len(whole)
        return [sum(whole)]

    def __call__(self, *shards: float) -> float:
        (loss,) = self._run([torch.tensor(shard) for shard in shards])
        return float(loss)


def test_the_first_micro_batch_of_a_step_gathers_and_the_others_take() -> None:
    weights = SharedWeights()
    half = Half(weights)
    for weight in (3.0, 5.0):  # a step each
        with weights.sharing(3):
            assert [half(weight) for _ in range(3)] == [2 * weight] * 3
    assert half.ran == ["first", "later", "later"] * 2


def test_outside_of_a_step_every_pass_gathers_its_own() -> None:
    weights = SharedWeights()
    half = Half(weights)
    assert [half(3.0), half(5.0)] == [6.0, 10.0]
    with weights.sharing(2):
        half(3.0)
    assert half(5.0) == 10.0, "a step that had fewer passes than it said leaves nothing"
    assert half.ran == ["first"] * 4


def test_after_the_last_micro_batch_no_weight_is_held() -> None:
    """So the update has their memory, and the backward half frees them one by one."""
    weights = SharedWeights()
    half = Half(weights)
    with weights.sharing(2):
        half(3.0)
        assert list(weights._whole) == [WEIGHT]
        half(3.0)
        assert not weights._whole
    with weights.sharing(2):
        half(3.0)
    assert not weights._whole, "of a step that ended early"


def test_shapes_share_weights_and_one_that_reads_more_gathers() -> None:
    weights = SharedWeights()
    one, both = Half(weights), Half(weights, WEIGHT, NORM)
    with weights.sharing(4):
        assert (one(3.0), both(3.0, 1.0), one(3.0), both(3.0, 1.0)) == (6.0, 8.0, 6.0, 8.0)
    assert one.ran == ["first", "later"]
    assert both.ran == ["first", "later"]


def test_inductor_may_write_over_what_one_backward_pass_has_and_not_over_shared_weights() -> None:
    graph = symbolic_trace(lambda tokens, whole, hidden: tokens + whole + hidden)
    context = TracingContext(FakeTensorMode())
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=[1, 2])  # type: ignore[assignment]
    with tracing(context):
        with compat.kept_from_reuse(graph, {"whole"}):
            assert context.fw_metadata.bw_donated_idxs == [2]
            assert "read again" in torch.compiler.config.cache_key_tag, "code that may write over it is not taken"
        assert context.fw_metadata.bw_donated_idxs == [1, 2]
        assert torch.compiler.config.cache_key_tag == ""
