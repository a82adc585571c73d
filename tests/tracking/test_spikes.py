"""Losses and gradient norms far above those before: judged on the device before the update, by a history that resumes."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from helpers import cpu_runtime, make_examples, make_layout_of, tiny_llama

from sftkit.config.schema import LogConfig, LossConfig, NumericsConfig, OptimConfig
from sftkit.config.tables import OPTIMIZERS
from sftkit.data.batches.loader import Batches, StepBatches, StepDataset
from sftkit.engine.step import TrainStep
from sftkit.errors import SpikeError
from sftkit.objectives.objective import LOSS, ModelWithLoss, NextToken, Totals
from sftkit.optim.protocol import build_optimizer
from sftkit.rundir.status import RunStatus
from sftkit.tracking.health import Health, Spikes, spikes_in
from sftkit.tracking.names import Flags, StepOutcome
from sftkit.tracking.tracker import Tracker

NAN = float("nan")
CPU = torch.device("cpu")
OBJECTIVE = NextToken(LossConfig())
QUIET = [1.0, 1.1, 0.9, 1.0]


def judged(spikes: Spikes, steps: Iterable[tuple[float, float]]) -> list[tuple[list[str], bool]]:
    """(names of what is a spike, whether the step is left out) of each (loss, norm)."""
    found = []
    for loss, norm in steps:
        values = torch.tensor([loss, norm])
        verdict, left_out = spikes.judge(values[0], values[1], values.isfinite().all())
        found.append(([spike.name for spike in spikes_in(verdict)], bool(left_out)))
    return found


def plainly(steps: Iterable[tuple[float, float]], leaves_out: bool) -> list[tuple[list[str], bool]]:
    """The same rule, written down on the host."""
    taken: list[tuple[float, float]] = []
    found = []
    for values in steps:
        names = []
        finite = all(map(math.isfinite, values))
        for name, value, history in zip(
            ("loss", "gradient norm"), values, zip(*taken[-128:], strict=True), strict=False
        ):
            mean = statistics.fmean(history)
            deviation = max(statistics.pstdev(history), 0.01 * abs(mean))
            if finite and len(history) >= 32 and value > mean + 6.0 * deviation:
                names.append(name)
        left_out = not finite or bool(names and leaves_out)
        found.append((names, left_out))
        if not left_out:
            taken.append(values)
    return found


def some_steps(count: int = 400) -> list[tuple[float, float]]:
    """Noise that goes down, with spikes, steps that are not finite and a stretch that is high."""
    rng = random.Random(0)
    steps = []
    for step in range(count):
        loss, norm = (
            float(torch.tensor(rng.gauss(2.0, 0.1) + 20.0 / (step + 5))),
            float(torch.tensor(abs(rng.gauss(1, 0.2)))),
        )
        loss = NAN if step % 97 == 40 else loss * 5 if step % 61 == 50 or 300 <= step < 306 else loss
        norm = math.inf if step == 123 else norm * 9 if step % 53 == 45 else norm
        steps.append((loss, norm))
    return steps


@pytest.mark.parametrize("on_spike", ["warn", "skip", "error"])
def test_the_device_decides_as_the_rule_written_down_on_the_host(on_spike) -> None:
    expected = plainly(some_steps(), on_spike != "warn")
    assert judged(Spikes(on_spike, "nll", CPU), some_steps()) == expected
    kinds = {tuple(names) for names, _ in expected}
    assert kinds >= {(), ("loss",), ("gradient norm",)}


def test_a_spike_needs_32_steps_before_and_more_than_noise_on_a_flat_history() -> None:
    quiet = [(loss, 1.0) for loss in QUIET * 8]
    for history, loss, is_spike in (
        (quiet, 2.0, True),
        (quiet, 1.3, False),
        (quiet[:31], 2.0, False),
        ([(1.0, 1.0)] * 32, 1.05, False),
        ([(1.0, 1.0)] * 32, 1.07, True),
    ):
        found = judged(Spikes("warn", "nll", CPU), [*history, (loss, 1.0)])
        assert found[-1] == (["loss"] * is_spike, False)


def test_after_a_resume_the_same_steps_are_left_out_to_the_bit() -> None:
    steps = some_steps(250)
    for cut in (20, 150):
        whole, first = Spikes("skip", "nll", CPU), Spikes("skip", "nll", CPU)
        judged(whole, steps[:cut])
        judged(first, steps[:cut])
        back = Spikes("skip", "nll", CPU)
        back.restore(json.loads(json.dumps(first.history())))
        assert judged(back, steps[cut:]) == judged(whole, steps[cut:])
        assert back.history() == whole.history()
        torch.testing.assert_close(back._history, whole._history, rtol=0, atol=0, equal_nan=True)


def test_the_history_of_a_version_that_judged_when_it_logged_is_taken_over() -> None:
    history = {
        "losses": [5.0, *QUIET * 8],
        "norms": QUIET * 8,
        "steps": [[33, 10]],
        "by_rank": [[20.0]],
        "grad_norms": [1],
    }
    back = Spikes("skip", "nll", CPU)
    back.restore(history)
    assert back.history() == {"losses": QUIET * 8, "norms": QUIET * 8}
    assert judged(back, [(2.0, 1.0)]) == [(["loss"], True)]


def primed(on_spike, loss: float = 1e-3, norm: float = 1e-3) -> Spikes:
    """With a history of small values."""
    spikes = Spikes(on_spike, "nll", CPU)
    judged(spikes, [(loss, norm)] * 40)
    return spikes


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if spec.extra is None])
def test_a_spike_that_is_left_out_changes_no_weight_no_state_and_no_count(name: str) -> None:
    rt, orig_model = cpu_runtime(), tiny_llama()
    if OPTIMIZERS[name].rounds_weights:
        orig_model.to(torch.bfloat16)
    model = ModelWithLoss(orig_model, "reference", OBJECTIVE)
    optimizer = build_optimizer(orig_model, OptimConfig(name=name))  # type: ignore[arg-type]
    steps = some_batches().steps(0, 3)
    TrainStep(model, optimizer, OBJECTIVE, rt, max_grad_norm=1.0).step(next(steps), 1e-2)

    def everything() -> dict[str, torch.Tensor]:
        states = {
            f"{i}.{key}": value
            for i, state in enumerate(optimizer.state.values())
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        return {key: value.clone() for key, value in (dict(orig_model.state_dict()) | states).items()}

    before, step_batches = everything(), next(steps)
    spikes = primed("skip")
    history = spikes.history()
    outcome = TrainStep(model, optimizer, OBJECTIVE, rt, max_grad_norm=1.0).step(step_batches, 1e-2, spikes=spikes)
    assert outcome.flags.vector[:3].tolist() == [0, 0, 1]
    assert [spike.name for spike in spikes_in(outcome.flags.verdict)] == ["loss", "gradient norm"]
    after = everything()
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    assert spikes.history() == history
    outcome = TrainStep(model, optimizer, OBJECTIVE, rt, max_grad_norm=1.0).step(
        step_batches, 1e-2, spikes=primed("warn")
    )
    assert outcome.flags.skipped == 0
    assert not all(torch.equal(value, before[key]) for key, value in everything().items())


def some_batches() -> Batches:
    examples = make_examples([30, 4, 25, 8, 31, 3, 17, 29] * 4)
    return Batches(StepDataset(examples, make_layout_of("packed", examples.lengths)), seed=0)


class Told:
    """A Health that is told of steps, and what it did with them."""

    def __init__(self, folder: Path, numerics: NumericsConfig) -> None:
        batches, rt = some_batches(), cpu_runtime()
        self.folder = folder
        tracker = Tracker(folder, LogConfig(wandb="off"), rt, {}).open()
        rt.status = RunStatus(folder, 0, 1)
        self.health = Health(numerics, rt, batches, OBJECTIVE, tracker)
        self.step_batches: StepBatches = next(iter(batches.steps(0, 1)))
        self.step = 0

    def add(self, loss: float, norm: float = 1.0, losses: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)) -> tuple[bool, int]:
        """A step of this loss per target; `losses`: of its micro-batches."""
        self.step += 1
        values = torch.tensor([loss, norm])
        verdict, left_out = self.health.spikes.judge(values[0], values[1], values.isfinite().all())
        flags = Flags.of(torch.tensor(0.0), (~values.isfinite().all()).float(), left_out, verdict)
        counts = torch.tensor([float(OBJECTIVE.count(batch)) for batch in self.step_batches.micro_batches])
        sums = Totals((LOSS, *NextToken.measured), torch.full((4,), loss * self.step_batches.divisor))
        self.health.add(
            self.step, self.step_batches, StepOutcome(sums, values[1], flags, counts * torch.tensor(losses))
        )
        stop, skipped = self.health.read_flags(wait=False)
        return stop, sum(one.divisor for one in skipped)

    def events(self) -> list[str]:
        file = self.folder / "events.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        assert {row["kind"] for row in rows} <= {"spike"}
        return [row["text"] for row in rows]


def test_a_spike_is_told_with_its_step_its_mean_and_the_deviation_and_counted(tmp_path: Path) -> None:
    told = Told(tmp_path, NumericsConfig())
    for loss in QUIET * 9:
        assert told.add(loss) == (False, 0)
    assert told.add(50.0, norm=9.0) == (False, 0)
    assert told.events() == [
        "step 37: loss 50 is far above the mean before it, 1 (sd 0.071); gradient norm 9 is far above the mean before it, 1 "
        "(sd 0.01)"
    ]
    assert told.health.read() == {"health/spikes": 1, "health/skipped_steps": 0, "health/nonfinite_steps": 0}
    assert told.health.read()["health/spikes"] == 0
    assert not list(tmp_path.glob("spike-*"))


def test_a_spike_can_end_the_run_with_the_documents_of_the_micro_batch_that_lost_most(tmp_path: Path) -> None:
    told = Told(tmp_path, NumericsConfig(on_spike="error"))
    for loss in QUIET * 8:
        told.add(loss)
    numbers = told.step_batches.documents_per_micro_batch
    guilty = list(told.step_batches.documents[sum(numbers[:2]) : sum(numbers[:3])])
    with pytest.raises(SpikeError) as error:
        told.add(2.0, losses=(1.0, 1.0, 5.0, 1.0))
    text = str(error.value)
    assert text.startswith("step 33: loss 2 is far above the mean before it, 1 (sd 0.071)")
    named = ", ".join(f"test #{i}" for i in guilty[:5])
    assert f"the largest loss per target, 5, is that of rank 0, micro-batch 3 of 4, with documents {named}" in text
    assert "numerics.on_spike=skip" in text
    found = json.loads((tmp_path / "spike-step-000033-rank000.json").read_text())
    assert found["losses"] == [1.0, 1.0, 5.0, 1.0]
    assert [document["index"] for document in found["documents"]] == list(told.step_batches.documents)
    assert [document["index"] for document in found["documents"] if document["micro_batch"] == 3] == guilty


def test_spikes_that_are_left_out_count_with_steps_that_are_not_finite_and_only_so_many_in_a_row(
    tmp_path: Path,
) -> None:
    told = Told(tmp_path, NumericsConfig(on_spike="skip", on_nonfinite="skip", max_skips=2))
    for loss in QUIET * 8:
        told.add(loss)
    divisor = told.step_batches.divisor
    assert told.add(2.0) == (False, divisor)
    assert told.add(1.0) == (False, 0)
    assert told.add(3.0) == (False, divisor), "what was left out has not widened the history"
    (first, second) = told.events()
    assert first.startswith("step 33: loss 2 is far above the mean before it, 1 (sd 0.071)")
    assert first.endswith("; update skipped")
    assert second.startswith("step 35: loss 3")
    assert told.add(1.0) == (False, 0)
    assert told.health.read() == {"health/spikes": 2, "health/skipped_steps": 2, "health/nonfinite_steps": 0}
    told.add(2.0)
    assert told.health.read()["health/spikes"] == 1  # the line before the checkpoint
    back = Told(tmp_path / "back", NumericsConfig(on_spike="skip", on_nonfinite="skip", max_skips=2))
    back.health.restore(json.loads(json.dumps(told.health.counts())))
    for one in (told, back):
        one.step = 37
        assert one.add(2.0) == (False, divisor)
        with pytest.raises(SpikeError, match=r"step 39: loss 2 .* after 2 skipped steps"):
            one.add(2.0)
        assert one.health.read()["health/spikes"] == 2


@pytest.mark.gpu
def test_a_spike_is_judged_without_a_host_sync() -> None:
    device = torch.device("cuda")
    spikes = Spikes("skip", "nll", device)
    steps = torch.tensor([[1.0, 1.0]] * 40 + [[3.0, 1.0]], device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    spikes.judge(steps[0, 0], steps[0, 1], finite)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [spikes.judge(loss, norm, finite) for loss, norm in steps[1:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [bool(left_out) for _, left_out in found] == [False] * 39 + [True]
