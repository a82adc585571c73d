"""CUDA graphs of the halves: what is copied where, with a stand-in for the recording; on a GPU, the same bits as without."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_worker import config, made
from helpers import cpu_runtime, make_batch, make_examples, tiny_llama
from torch import Tensor
from torch._inductor import config as inductor_config

from labs.bench import worker
from sftkit.config.schema import Config, LossConfig
from sftkit.data.batches.collate import Batch
from sftkit.errors import ConfigError
from sftkit.graph import capture, compat
from sftkit.graph.capture import CapturedModel, Recorder, Replayed
from sftkit.graph.engine import check_device
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.runtime import start as runtime
from sftkit.train import assemble

EXAMPLES = make_examples([30, 4, 25, 8, 31, 3, 17, 29])
ROWS: list[tuple[tuple[int, ...], ...]] = [((0,), (1, 2)), ((3, 5, 6), (7,))]


def again(work: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
    """A recording of a CPU: the work again, into the memory of its first results."""
    outputs = work()

    def replay() -> None:
        for mine, new in zip(outputs, work(), strict=True):
            if mine is not None:  # an input without a gradient
                mine.copy_(new)

    return replay, outputs


class RecorderOfCpu:
    """In the place of Recorder."""

    def __init__(self) -> None:
        self.closed = False

    def __call__(self, work: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        return again(work)

    def close(self) -> None:
        self.closed = True


def test_a_replay_reads_where_it_was_recorded_and_hands_out_copies() -> None:
    seen: list[tuple[int, ...]] = []

    def half(args: list[Tensor]) -> list[Tensor]:
        seen.append(tuple(arg.data_ptr() for arg in args))
        weight, batch = args
        args.clear()
        return [(weight * batch).sum(), weight * batch]

    weight, batches = torch.tensor([1.0, 2.0]), [torch.tensor([1.0, float(i)]) for i in range(4)]
    run, handed_out = Replayed(half, [True, False], 1, again), []
    kept: Tensor | None = None
    for batch in batches:
        given = [weight, batch]
        total, kept = run(given)
        assert given == [], "inputs are let go"
        handed_out.append(total)
    assert [float(total) for total in handed_out] == [1.0, 3.0, 5.0, 7.0], "copies: a replay does not change them"
    assert kept is not None
    assert kept.tolist() == [1.0, 6.0]
    assert kept is run._outputs[1], "what is kept for the backward half stays where it is"
    assert {places[0] for places in seen} == {weight.data_ptr()}
    assert batches[1].data_ptr() not in {places[1] for places in seen[1:]}, "a batch is copied, not held"
    with torch.no_grad():
        weight.mul_(2)  # an optimizer's step
    assert float(run([weight, batches[3]])[0]) == 14.0


def batch_of(rows: tuple[tuple[int, ...], ...], device: str) -> Batch:
    batch = make_batch(EXAMPLES, rows, 32)
    cu_seqlens = torch.full((9,), batch.targets.numel(), dtype=torch.int32)
    cu_seqlens[: len(batch.cu_seqlens)] = batch.cu_seqlens
    return Batch(**{**vars(batch), "cu_seqlens": cu_seqlens}).to(torch.device(device))


def trained(passes: tuple[str, ...], device: str, attention: str = "reference") -> list[Tensor]:
    """Losses and gradients of micro-batches whose documents differ, gradients summed over two."""
    model = ModelWithLoss(tiny_llama(layers=1, head_dim=16).to(device), attention, NextToken(LossConfig()))
    captured = CapturedModel(model, passes)
    captured.capture(batch_of(ROWS[0], device))
    found = []
    for _ in range(3):
        for rows in ROWS:
            loss = captured(batch_of(rows, device)).loss
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=1e-3)
        model.zero_grad(set_to_none=True)
    captured.forget()
    return found


def same_bits(passes: tuple[str, ...], device: str, attention: str = "reference") -> None:
    plain, replayed = (trained(p, device, attention) for p in (passes, (*passes, "cuda_graphs")))
    assert all(torch.equal(a, b) for a, b in zip(replayed, plain, strict=True))


@pytest.mark.slow
def test_a_model_whose_halves_are_replayed_trains_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[bool]] = {}
    in_place = compat.in_place
    recorder = RecorderOfCpu()
    monkeypatch.setattr(capture, "Recorder", lambda: recorder)
    monkeypatch.setattr(compat, "in_place", lambda graph, half: found.setdefault(half, in_place(graph, half)))
    same_bits((), "cpu")
    assert recorder.closed, "the recorded graphs go, though what replays them lives on in reference cycles"
    model = tiny_llama(layers=1, head_dim=16)
    state = len([*model.parameters(), *model.buffers()])
    assert sum(found["forward"]) == state, "weights are read where they are"
    assert len(found["forward"]) > state
    assert sum(found["backward"]) > state, "and so is what the forward half keeps"


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["reference", "flex"])
@pytest.mark.parametrize("passes", [(), ("regional_inductor",), ("full_inductor",)])
def test_cuda_graphs_train_to_the_same_bits(passes: tuple[str, ...], attention: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # Inductor's gradient of an embedding adds as it comes
    try:
        # Inductor chooses kernels, and even in its deterministic mode the blocks of pointwise ones, by timing, which other
        # tests on the GPU disturb; a rotary embedding in other blocks rounds differently.
        with inductor_config.patch({"deterministic": True, "triton.autotune_pointwise": False}):
            same_bits(passes, "cuda", attention)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_a_closed_recorder_has_destroyed_its_graphs_whoever_still_holds_them() -> None:
    recorder, count = Recorder(), torch.zeros((), device="cuda")
    replay, _ = recorder(lambda: [count.add_(1)])
    replay()
    assert count.item() == 1, "recording alone runs nothing"
    recorder.close()
    with pytest.raises(RuntimeError):
        replay()


def test_what_a_cpu_cannot_run_is_refused_before_a_model_is_loaded() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"graph\.passes: cuda_graphs needs a GPU.*computes on cpu: leave it out"):
        check_device(("cuda_graphs",), "auto", cpu)
    with pytest.raises(
        ConfigError, match=r"full_inductor has no backward pass of FlexAttention on cpu.*regional_inductor"
    ):
        check_device(("full_inductor",), "flex", cpu)
    check_device(("cuda_graphs", "full_inductor"), "flex", torch.device("cuda"))


class JoinedError(Exception):
    """In the place of joining a process group."""


def by_script(cfg: Config) -> None:
    with assemble.start_run(cfg, "sft"):
        pass


def by_bench(cfg: Config) -> None:
    worker.joined(SimpleNamespace(config=cfg))  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [by_script, by_bench])
def test_nccl_is_kept_from_registering_the_buffers_of_graphs_but_not_against_the_user(
    start: Callable[[Config], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the process group is made."""

    def joins(*_: Any) -> None:
        raise JoinedError(os.environ.get("NCCL_GRAPH_REGISTER"))

    monkeypatch.setattr(runtime, "start", joins)

    def found(*passes: str, before: str | None = None) -> str | None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", before or "")
        if before is None:
            monkeypatch.delenv("NCCL_GRAPH_REGISTER")
        with pytest.raises(JoinedError) as error:
            start(config("graph", passes))
        return error.value.args[0]

    assert found("block_bucketing") is None
    assert found("block_bucketing", "cuda_graphs") == "0"
    assert found("block_bucketing", "cuda_graphs", before="1") == "1"


def test_an_engine_that_nobody_has_checked_the_device_of_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"graph\.passes: cuda_graphs needs a GPU"):
        made(cpu_runtime(), "llama", config("graph", ["cuda_graphs"]))
