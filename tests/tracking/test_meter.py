"""What a meter takes over from a checkpoint, and what it cannot count."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import Accelerator
from helpers import cpu_runtime, make_examples, make_layout_of, of_two_sources, tiny_llama

from sftkit.config.schema import LossConfig
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.objectives.objective import LOSS, NextToken, Totals
from sftkit.runtime.start import Runtime
from sftkit.tracking.meter import RUN_COUNTS, Meter
from sftkit.tracking.names import NUM_FLAGS, Flags, StepOutcome
from sftkit.verify.proof import shapes_check

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29] * 4
OUTCOME = StepOutcome(
    Totals((LOSS, *NextToken.measured), torch.ones(4)), torch.tensor(1.0), Flags(torch.zeros(NUM_FLAGS)), torch.ones(2)
)


def meter_of(micro: int = 2) -> tuple[Meter, Batches]:
    examples = make_examples(LENGTHS)
    batches = Batches(StepDataset(examples, make_layout_of("packed", examples.lengths, micro=micro)), seed=0)
    return Meter(tiny_llama(), NextToken(LossConfig()), batches, cpu_runtime()), batches


def resumed(meter: Meter) -> Meter:
    """A new meter that continues from what a checkpoint of `meter` has."""
    back, _ = meter_of()
    back.resume({"step": 1, "tokens": 9, RUN_COUNTS: json.loads(json.dumps({"meter": meter.counts()}))})
    return back


def test_a_resume_does_not_forget_shapes_that_were_not_declared() -> None:
    meter, batches = meter_of()
    other = make_layout_of("packed", batches.examples.lengths, row_length=64)
    meter.shapes.add(next(iter(Batches(StepDataset(batches.examples, other), seed=0).steps(0, 1))))
    back = resumed(meter)
    assert back.shapes.seen == meter.shapes.seen
    assert back.read()["shape/undeclared"] == other.accumulation
    assert shapes_check(back.shapes, batches.layout).ok is False


def test_shapes_that_an_earlier_start_declared_stay_declared_where_the_micro_batch_is_another_now() -> None:
    meter, batches = meter_of(micro=4)
    meter.add(next(iter(batches.steps(0, 1))), OUTCOME)
    back = resumed(meter)
    _, batches = meter_of()
    back.add(next(iter(batches.steps(0, 1))), OUTCOME)
    found = shapes_check(back.shapes, batches.layout)
    assert found.ok is True
    assert found.found == "2 x 32: 4, 4 x 32: 2; 0 undeclared"


def test_losses_of_sources_weighted_by_their_targets_are_the_loss_and_no_skipped_step_is_in_them() -> None:
    examples = of_two_sources(make_examples(LENGTHS))
    batches = Batches(StepDataset(examples, make_layout_of("packed", examples.lengths)), seed=0)
    objective = NextToken(LossConfig(), num_sources=2)
    meter = Meter(tiny_llama(), objective, batches, cpu_runtime())
    sums = {"loss": 9.0, "nll": 7.0, "correct": 0.0, "entropy": 0.0, "nll/0": 5.0, "nll/1": 2.0}
    assert tuple(sums) == (LOSS, *objective.measured)
    kept, skipped = list(batches.steps(0, 2))
    nothing = torch.full((len(sums),), torch.nan)
    for step, vector, number in ((kept, torch.tensor(list(sums.values())), 0.0), (skipped, nothing, 1.0)):
        flags = Flags.of(torch.zeros(()), torch.tensor(number), torch.tensor(number))
        meter.add(step, StepOutcome(Totals(tuple(sums), vector), torch.ones(()), flags, torch.ones(2)))
    meter.add_skipped([skipped])
    values = meter.read()
    own, targets = examples.source[list(kept.documents)], examples.num_targets[list(kept.documents)]
    of_each = [int(targets[own == source].sum()) for source in (0, 1)]
    assert [values["train/often/loss"], values["train/seldom/loss"]] == pytest.approx([5 / of_each[0], 2 / of_each[1]])
    shares = [values["data/target_share/often"], values["data/target_share/seldom"]]
    assert shares == pytest.approx([n / sum(of_each) for n in of_each])
    weighted = values["train/often/loss"] * shares[0] + values["train/seldom/loss"] * shares[1]
    assert values["train/loss"] == pytest.approx(weighted)
    assert meter.read()["train/often/loss"] is None, "a window without a step"


def test_one_source_has_no_loss_of_its_own() -> None:
    meter, batches = meter_of()
    meter.add(next(iter(batches.steps(0, 1))), OUTCOME)
    assert [name for name in meter.read() if name.endswith("/loss")] == ["train/loss"]


def test_a_checkpoint_of_a_version_without_counts_resumes_with_its_progress() -> None:
    meter, _ = meter_of()
    meter.resume({"step": 3, "tokens": 70})
    assert meter.progress.tokens == 70
    assert not meter.shapes.seen


def test_a_model_whose_work_cannot_be_counted_has_no_mfu_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sftkit.tracking.meter.peak_flops", lambda device: 1e12)
    model, (_, batches) = tiny_llama(), meter_of()
    rt = Runtime(Accelerator(cpu=True), "bf16")
    for kinds, counted in ((["full_attention"] * 2, True), (["chunked_attention", "full_attention"], False)):
        model.config.layer_types = kinds
        meter = Meter(model, NextToken(LossConfig()), batches, rt)
        meter.add(next(iter(batches.steps(0, 1))), OUTCOME)
        assert (meter.read()["perf/mfu"] is not None) == counted
        assert ("no MFU: the model has layers whose FLOPs" in capsys.readouterr().out) == (not counted)
