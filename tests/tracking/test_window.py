"""What a meter takes over from the open window of a checkpoint: counts of shapes, waiting times, tokens of sources."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers import cpu_runtime, make_examples, make_layout_of, tiny_llama

from sftkit.config.schema import LossConfig
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.objectives.next_token import NextToken
from sftkit.objectives.objective import LOSS, Totals
from sftkit.runtime.start import Runtime
from sftkit.tracking.meter import WINDOW, Meter, resume_window
from sftkit.tracking.names import NUM_FLAGS, Flags, StepOutcome
from sftkit.verify.rows import shapes_check

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29] * 4
OUTCOME = StepOutcome(
    Totals((LOSS, *NextToken.measured), torch.ones(4)), torch.tensor(1.0), Flags(torch.zeros(NUM_FLAGS)), torch.ones(2)
)


def meter_of(sources: Iterable[str] = ("test",), micro: int = 2) -> tuple[Meter, Batches]:
    examples = make_examples(LENGTHS)
    names = tuple(sources)
    of_source = (examples.source + [i % len(names) for i in range(len(examples))]).astype(examples.source.dtype)
    examples = replace(examples, source_names=names, source=of_source)
    batches = Batches(StepDataset(examples, make_layout_of("packed", examples.lengths, micro=micro)), seed=0)
    return Meter(tiny_llama(), NextToken(LossConfig()), batches, cpu_runtime()), batches


def saved(meter: Meter, batches: Batches) -> dict[str, Any]:
    """The window after a step, as it comes back from a checkpoint."""
    meter.add(next(iter(batches.steps(0, 1))), OUTCOME)
    return json.loads(json.dumps(meter.window()))


def resume(meter: Meter, window: dict[str, Any], health: Any = None) -> str | None:
    """On the same ranks."""
    rt = cpu_runtime()
    resumed = {"step": 1, "world_size": 1, "topology": rt.topology.describe(), WINDOW: {"meter": window, "health": {}}}
    return resume_window(resumed, meter, health or SimpleNamespace(restore_window=lambda *_: None), rt, 4)


def test_a_resume_does_not_forget_shapes_that_were_not_declared() -> None:
    meter, batches = meter_of()
    other = make_layout_of("packed", batches.examples.lengths, row_length=64)
    meter.shapes.add(next(iter(Batches(StepDataset(batches.examples, other), seed=0).steps(0, 1))))
    window = saved(meter, batches)
    back, _ = meter_of()
    assert back.restore_window(window, same_ranks=True)
    assert back.shapes.seen == meter.shapes.seen
    assert back.read()["shape/undeclared"] == other.accumulation
    assert shapes_check(back.shapes, batches.layout).ok is False


def test_shapes_that_an_earlier_start_declared_stay_declared_where_the_micro_batch_is_another_now() -> None:
    window = saved(*meter_of(micro=4))
    back, batches = meter_of()
    assert back.restore_window(window, same_ranks=True)
    back.add(next(iter(batches.steps(0, 1))), OUTCOME)
    found = shapes_check(back.shapes, batches.layout)
    assert found.ok is True
    assert found.found == "2 x 32: 4, 4 x 32: 2; 0 undeclared"


@pytest.mark.parametrize(("same_ranks", "percent"), [(True, 10.0), (False, 20.0)])
def test_on_another_number_of_ranks_the_wait_is_that_of_the_rank_that_waited_most(
    same_ranks: bool, percent: float
) -> None:
    window = saved(*meter_of())
    (own,) = window["by_rank"]
    waits = [10.0, *[20.0] * 7]
    window |= {"seconds": 100.0, "by_rank": [[*own[:-1], waited] for waited in waits]}
    back, _ = meter_of()
    assert back.restore_window(window, same_ranks=same_ranks)
    assert back.read()["perf/data_wait_pct"] == pytest.approx(percent, rel=0.01)


def test_shares_of_the_same_sources_go_on_and_nothing_is_said() -> None:
    window = saved(*meter_of(["a", "b"]))
    back, _ = meter_of(["a", "b"])
    assert resume(back, window) is None
    shares = back.read()
    tokens = dict(zip("ab", window["source_tokens"], strict=True))
    assert shares["data/share/a"] == tokens["a"] / sum(tokens.values())
    assert 0 < shares["data/share/a"] < 1


@pytest.mark.parametrize("before", [["all"], ["a", "b", "c"], ["b", "a"], None])
def test_tokens_of_sources_that_were_joined_split_or_renamed_are_not_taken_over_and_a_line_says_so(
    before: list[str] | None,
) -> None:
    window = saved(*meter_of(before or ["a", "b"]))
    if before is None:  # of a version that kept no names
        window.pop("sources")
    back, batches = meter_of(["a", "b"])
    line = resume(back, window)
    assert line is not None
    assert line.startswith("data/share: the first logged line has the steps from 2 on, not those from 1 on")
    step_batches = next(iter(batches.steps(0, 1)))
    back.add(step_batches, OUTCOME)
    shares = back.read()
    of_a, of_b = step_batches.source_tokens
    assert shares["data/share/a"] == of_a / (of_a + of_b)


def test_a_run_with_one_source_says_nothing_of_others_before() -> None:
    back, _ = meter_of(["joined"])
    assert resume(back, saved(*meter_of(["a", "b"]))) is None


def test_where_other_sums_are_measured_now_the_history_of_spikes_is_taken_over_all_the_same() -> None:
    window, taken = saved(*meter_of()), []
    window["sums"].append("entropy")
    line = resume(meter_of()[0], window, SimpleNamespace(restore_window=lambda *given: taken.append(given)))
    assert "other sums are measured now" in (line or "")
    assert taken == [({},)]


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
