"""Clock and power of GPUs beside the speeds of a bench."""

from __future__ import annotations

import subprocess

import pytest
import torch

from labs.bench import machine
from labs.bench.machine import ClockSamples
from labs.tables import clock_line

GPU = torch.device("cuda", 0)


def sampled(monkeypatch: pytest.MonkeyPatch, clocks: list[object], device: torch.device = GPU) -> dict[str, object]:
    """What samples of a GPU with these clocks say, until it has no more; an exception is raised."""
    waiting = iter(clocks)
    monkeypatch.setattr(machine, "SECONDS", 0.001)

    def clock_rate(asked: torch.device) -> int:
        assert asked == device
        value = next(waiting)
        if isinstance(value, Exception):
            raise value
        return int(str(value))

    monkeypatch.setattr(torch.cuda, "clock_rate", clock_rate)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda asked: 700_000)
    with ClockSamples(device) as samples:
        samples.start()
        if samples._thread is not None:
            samples._thread.join(10)  # it ends when the clocks do
    return samples.medians()


def test_the_medians_of_the_samples_are_in_mhz_and_watts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled(monkeypatch, [1980, 1400, 1500]) == {"sm_clock_mhz": 1500.0, "power_w": 700.0}


@pytest.mark.parametrize("error", [ModuleNotFoundError("nvidia-ml-py does not seem to be installed"), RuntimeError()])
def test_a_bench_goes_on_without_what_the_driver_does_not_say(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    unknown = {"sm_clock_mhz": None, "power_w": None}
    assert sampled(monkeypatch, [error]) == unknown
    assert sampled(monkeypatch, [], torch.device("cpu")) == unknown


def test_samples_end_with_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: asked.append(device) or 1400)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 1)
    monkeypatch.setattr(machine, "SECONDS", 0.001)
    with ClockSamples(GPU) as samples:
        samples.start()
        while not asked:
            pass
    assert samples._thread is not None
    assert not samples._thread.is_alive()


def test_the_report_has_one_line_with_the_ranks_of_each_run() -> None:
    ranks = [{"sm_clock_mhz": 1395.0, "power_w": 698.4}, {"sm_clock_mhz": 1410.0, "power_w": 698.0}]
    rows = [
        {"name": "two", "error": None, "ranks": ranks},
        {"name": "one", "error": None, "ranks": [{"sm_clock_mhz": 1980.0, "power_w": 410.0}]},
        {"name": "of an earlier version", "error": None, "ranks": [{}]},
        {"name": "failed", "error": "out of memory"},
    ]
    assert clock_line(rows, {"power_limit_w": 700.0}) == (
        "Clock and power of a GPU, medians of the timed steps: two: 1,395 to 1,410 MHz, 698 of 700 W; "
        "one: 1,980 MHz, 410 of 700 W."
    )
    assert clock_line(rows[2:], {}) == ""


@pytest.mark.parametrize(("said", "watts"), [("700.00\n700.00\n", 700.0), ("[N/A]\n", None), ("", None)])
def test_the_power_limit_is_that_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch, said: str, watts: float | None) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=said, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: done)
    assert machine.power_limit() == watts
