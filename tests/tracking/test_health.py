"""Steps that are not finite and spikes: found, counted, named, and in no mean."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import cpu_runtime, make_examples, make_layout_of, tiny_llama, tiny_qwen3_with_windows

from sftkit.config.schema import LogConfig, LossConfig, NumericsConfig, OptimConfig
from sftkit.data.batches.loader import Batches, StepBatches, StepDataset
from sftkit.engine.step import TrainStep, exchange
from sftkit.errors import NonFiniteError
from sftkit.models.structure import Work, train_flops
from sftkit.objectives.objective import LOSS, ModelWithLoss, NextToken, Totals
from sftkit.optim.protocol import build_optimizer, squared_norm
from sftkit.parallel.wrap import replicate
from sftkit.rundir.status import RunStatus
from sftkit.tracking.health import DelayedFlags, Health
from sftkit.tracking.meter import Meter
from sftkit.tracking.names import NUM_FLAGS, Flags, StepOutcome
from sftkit.tracking.tracker import Tracker

NAN = float("nan")
NAMES = (LOSS, *NextToken.measured)


OBJECTIVE = NextToken(LossConfig())


def outcome(nll: float = 10.0, norm: float = 1.0, stop: int = 0, losses: torch.Tensor | None = None) -> StepOutcome:
    broken = torch.tensor(float(nll != nll or norm != norm))
    flags = Flags.of(torch.tensor(float(stop)), broken, broken > 0)
    losses = torch.tensor([1.0, 1.0, 1.0, nll - 3.0]) if losses is None else losses
    return StepOutcome(Totals(NAMES, torch.full((4,), nll)), torch.tensor(norm), flags, losses)


def some_batches() -> Batches:
    examples = make_examples([30, 4, 25, 8, 31, 3, 17, 29] * 4)
    return Batches(StepDataset(examples, make_layout_of("packed", examples.lengths)), seed=0)


def health_of(folder: Path, numerics: NumericsConfig) -> tuple[Health, StepBatches]:
    batches = some_batches()
    rt = cpu_runtime()
    tracker = Tracker(folder, LogConfig(every=8, wandb="off"), rt, {}).open()
    rt.status = RunStatus(folder, 0, 1)
    health = Health(numerics, rt, batches, OBJECTIVE, tracker)
    return health, next(iter(batches.steps(0, 1)))


def test_a_step_that_is_not_finite_is_an_error_that_names_the_step_and_keeps_its_documents(tmp_path: Path) -> None:
    health, step_batches = health_of(tmp_path, NumericsConfig())
    (tmp_path / "nonfinite-step-000002-rank003.json").write_text("of an earlier start with more ranks")
    health.add(1, step_batches, outcome())
    assert health.read_flags(wait=False) == (False, [])
    health.add(2, step_batches, outcome(nll=NAN))
    with pytest.raises(NonFiniteError, match=r"step 2: the loss of rank 0 is not finite.*on_nonfinite=skip"):
        health.read_flags(wait=False)
    (file,) = tmp_path.glob("nonfinite-step-000002-rank*.json")
    dump = json.loads(file.read_text())
    assert [document["index"] for document in dump["documents"]] == list(step_batches.documents)
    expected = some_batches().examples[dump["documents"][0]["index"]].ids.tolist()
    assert dump["documents"][0]["ids"] == expected


def test_a_gradient_norm_that_is_not_finite_is_told_from_a_loss_that_is_not(tmp_path: Path) -> None:
    health, step_batches = health_of(tmp_path, NumericsConfig())
    health.add(1, step_batches, outcome(norm=float("inf") - float("inf")))
    words = r"step 1: every loss is finite, but the gradient norm is not: a gradient is NaN"
    with pytest.raises(NonFiniteError, match=words):
        health.read_flags(wait=False)
    dump = json.loads((tmp_path / "nonfinite-step-000001-rank000.json").read_text())
    assert all(document["loss_is_finite"] for document in dump["documents"])


def test_the_documents_of_the_micro_batch_whose_loss_is_not_finite_are_named_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    health, step_batches = health_of(tmp_path, NumericsConfig())
    numbers = step_batches.documents_per_micro_batch
    assert len(numbers) == 4
    assert sum(numbers) == len(step_batches.documents)
    health.add(1, step_batches, outcome(nll=NAN, losses=torch.tensor([1.0, 2.0, float("inf"), 3.0])))
    guilty = list(step_batches.documents[sum(numbers[:2]) : sum(numbers[:3])])
    named = ", ".join(f"test #{i}" for i in guilty[:5])
    with pytest.raises(
        NonFiniteError, match=f"loss of rank 0 is not finite .rank 0, micro-batch 3 of 4, with documents {named}"
    ):
        health.read_flags(wait=False)
    dump = json.loads((tmp_path / "nonfinite-step-000001-rank000.json").read_text())
    assert [d["index"] for d in dump["documents"] if not d["loss_is_finite"]] == guilty
    assert {d["micro_batch"] for d in dump["documents"] if not d["loss_is_finite"]} == {3}


def test_a_step_whose_losses_are_finite_says_what_is_not_and_acquits_no_document(tmp_path: Path) -> None:
    health, step_batches = health_of(tmp_path, NumericsConfig(on_nonfinite="skip", max_skips=5))
    finite = torch.tensor([1.0, 2.0, 1.0, 2.0])
    for step, (nll, norm, losses) in enumerate(
        [(1.0, NAN, finite), (1.0, float("inf"), finite), (float("inf"), 1.0, finite), (NAN, NAN, None)], start=1
    ):
        one = outcome(nll=nll, norm=norm, losses=losses)
        health.add(step, step_batches, one._replace(flags=Flags.of(*torch.tensor([0.0, 1.0, 1.0]))))
    health.read_flags(wait=True)
    told = [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert "every loss is finite, but the gradient norm is not: a gradient is NaN" in told[0]
    assert "a document whose gradient explodes" in told[0]
    assert "a gradient is infinite, or all are finite and the sum of their squares is beyond fp32" in told[1]
    assert (
        "every loss is finite, and so is the gradient norm, but the sum of a rank's micro-batches is beyond" in told[2]
    )
    assert "micro-batch 4 of 4" in told[3]
    assert not any("innocent" in text for text in told)


@pytest.mark.parametrize(("gradient", "norm"), [(NAN, NAN), (float("inf"), float("inf")), (3e38, float("inf"))])
def test_a_norm_is_nan_only_if_a_gradient_is_and_infinite_also_where_all_are_finite(
    gradient: float, norm: float
) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), gradient)
    totals = Totals.zeros(NextToken.measured, weight.device)
    found, _ = exchange(squared_norm([weight], 1), totals, 1, cpu_runtime(), stop=False)
    torch.testing.assert_close(float(found), norm, equal_nan=True)


def test_a_step_tells_the_loss_of_each_of_its_micro_batches() -> None:
    rt, orig_model = cpu_runtime(), tiny_llama()
    model = ModelWithLoss(orig_model, "reference", OBJECTIVE)
    optimizer = build_optimizer(orig_model, OptimConfig(name="adamw"))
    (step_batches,) = some_batches().steps(0, 1)
    with torch.no_grad():
        expected = torch.stack([model(batch).loss for batch in step_batches.micro_batches])
    found = TrainStep(model, optimizer, OBJECTIVE, rt, max_grad_norm=1.0).step(step_batches, 1e-2).losses
    assert torch.equal(found, expected)


def test_a_loss_that_is_not_finite_changes_nothing_even_if_its_gradient_is_finite(monkeypatch) -> None:
    rt, orig_model = cpu_runtime(), tiny_llama()
    objective = NextToken(LossConfig())
    model = replicate(ModelWithLoss(orig_model, "reference", objective), rt)
    optimizer = build_optimizer(orig_model, OptimConfig(name="adamw"))
    steps = some_batches().steps(0, 2)
    assert TrainStep(model, optimizer, objective, rt, max_grad_norm=1.0).step(next(steps), 1e-2).flags.vector[
        :3
    ].tolist() == [
        0,
        0,
        0,
    ]
    before = {name: value.clone() for name, value in orig_model.state_dict().items()}
    forward = ModelWithLoss.forward

    def shifted(self, *args, **kwargs):
        sums = forward(self, *args, **kwargs)
        return sums._replace(loss=sums.loss + NAN)

    monkeypatch.setattr(ModelWithLoss, "forward", shifted)
    left_out = TrainStep(model, optimizer, objective, rt, max_grad_norm=1.0).step(next(steps), 1e-2)
    assert left_out.grad_norm.isfinite()
    assert left_out.flags.vector[:3].tolist() == [0, 1, 1]
    assert all(torch.equal(value, before[name]) for name, value in orig_model.state_dict().items())


def test_only_so_many_steps_in_a_row_are_left_out(tmp_path: Path) -> None:
    health, step_batches = health_of(tmp_path, NumericsConfig(on_nonfinite="skip", max_skips=2))
    for step, nll in enumerate([NAN, NAN, 1.0, NAN, NAN], start=1):
        health.add(step, step_batches, outcome(nll=nll))
        stop, skipped = health.read_flags(wait=False)
        assert (stop, [one.documents for one in skipped]) == (False, [] if nll == 1.0 else [step_batches.documents])
    assert health.read() == {"health/spikes": 0, "health/skipped_steps": 4, "health/nonfinite_steps": 4}
    written = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("nonfinite-step-*-rank000.json"))]
    assert [found["step"] for found in written] == [1, 2, 4, 5]
    assert all(found["documents"] for found in written)
    health.add(6, step_batches, outcome(nll=NAN))
    with pytest.raises(NonFiniteError, match="after 2 skipped steps"):
        health.read_flags(wait=False)


def test_a_wish_to_stop_on_any_rank_is_heard_once_its_flags_are_known(tmp_path: Path) -> None:
    health, step_batches = health_of(tmp_path, NumericsConfig())
    health.add(1, step_batches, outcome(stop=1))
    assert health.read_flags(wait=False) == (True, [])


def test_flags_that_come_late_are_read_in_order_and_all_of_them_on_demand() -> None:
    flags = DelayedFlags(torch.device("cpu"), delay=2, objective=OBJECTIVE)
    step_batches = next(iter(some_batches().steps(0, 1)))
    seen = []
    for step in range(1, 6):
        flags.push(step, step_batches, outcome(nll=NAN if step == 4 else 1.0))
        seen += [(known.step, known.finite) for known in flags.read(wait=False)]
    assert seen == [(1, True), (2, True), (3, True)]
    assert [(known.step, known.finite) for known in flags.read(wait=True)] == [(4, False), (5, True)]


@pytest.mark.gpu
def test_flags_are_read_two_steps_late_without_a_host_sync() -> None:
    device = torch.device("cuda")
    flags = DelayedFlags(device, delay=2, objective=OBJECTIVE)
    step_batches = next(iter(some_batches().steps(0, 1)))
    values = torch.zeros(5, NUM_FLAGS, device=device)
    values[2, 1] = 1.0
    done = StepOutcome(
        Totals.zeros(NextToken.measured, device), torch.zeros((), device=device), Flags(values[0]), torch.zeros(1)
    )
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    seen = []
    try:
        for step, value in enumerate(values, start=1):
            flags.push(step, step_batches, done._replace(flags=Flags(value)))
            seen += [(known.step, known.finite) for known in flags.read(wait=False)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == [(1, True), (2, True), (3, False)]


def test_a_step_that_was_left_out_is_in_no_mean() -> None:
    meter = Meter(tiny_llama(), NextToken(LossConfig()), some_batches(), cpu_runtime())
    step_batches = next(iter(some_batches().steps(0, 1)))
    targets = step_batches.num_targets
    meter.add(step_batches, outcome(nll=2.0 * targets))
    meter.add(step_batches, outcome(nll=NAN))
    meter.add_skipped([step_batches])
    meter.add(step_batches, outcome(nll=4.0 * targets))
    assert meter.read()["train/loss"] == pytest.approx(3.0)
    meter.add(step_batches, outcome(nll=NAN, norm=NAN))
    meter.add_skipped([step_batches])
    values = meter.read()
    assert (values["train/loss"], values["train/grad_norm"]) == (None, None)


def test_model_flops_count_what_the_windows_of_packed_documents_let_through() -> None:
    """Against masks of each document and layer, counted one by one."""
    model, batches = tiny_qwen3_with_windows(), some_batches()
    meter = Meter(model, OBJECTIVE, batches, cpu_runtime())
    meter._peak = 1e9
    steps = list(batches.steps(0, 2))
    pairs = 0
    for step_batches in steps:
        meter.add(step_batches, outcome())
        documents = [batches.examples.lengths[i] for i in step_batches.documents]  # one rank has them all
        for length, window in itertools.product(documents, (1000, 1000, 5, 5)):
            i, j = np.indices((length, length))
            pairs += int(((j <= i) & (i - j < window)).sum())
    values = meter.read()
    tokens, targets = (sum(getattr(step, name) for step in steps) for name in ("num_tokens", "num_targets"))
    flops = values["perf/mfu"] * 1e9 * tokens / values["perf/tok_per_sec"]
    assert flops == pytest.approx(train_flops(model, Work(tokens, targets, 0)) + 12 * 4 * 8 * pairs, rel=1e-9)


def test_mfu_is_a_share_of_the_peak_of_all_gpus(monkeypatch) -> None:
    monkeypatch.setattr("sftkit.tracking.meter.peak_flops", lambda device: 1e9)
    monkeypatch.setattr("sftkit.runtime.start.Runtime.sum", lambda self, values: values)
    (step_batches,) = some_batches().steps(0, 1)
    rt = replace(cpu_runtime(), precision="bf16")
    measured = {}
    for gpus in (1, 4):
        monkeypatch.setattr("sftkit.runtime.start.Runtime.world_size", gpus)
        meter = Meter(tiny_llama(), OBJECTIVE, some_batches(), rt)
        meter.add(step_batches, outcome())
        values = meter.read()
        measured[gpus] = values["perf/mfu"] / values["perf/tok_per_sec"]
    assert measured[1] == pytest.approx(4 * measured[4], rel=1e-9)


def test_the_mfu_of_a_model_with_layers_of_a_kind_that_is_not_counted_is_unknown(monkeypatch) -> None:
    monkeypatch.setattr("sftkit.tracking.meter.peak_flops", lambda device: 1e9)
    rt, (step_batches,) = replace(cpu_runtime(), precision="bf16"), some_batches().steps(0, 1)
    for kinds, known in ((["full_attention"] * 2, True), (["full_attention", "linear_attention"], False)):
        model = tiny_llama()
        model.config.layer_types = kinds
        meter = Meter(model, OBJECTIVE, some_batches(), rt)
        meter.add(step_batches, outcome())
        assert (meter.read()["perf/mfu"] is not None) is known
