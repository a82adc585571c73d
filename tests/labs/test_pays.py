"""What compiling costs in time: worked by hand."""

from __future__ import annotations

import pytest

from labs.validate.judge import pays, pays_from


def test_savings_and_break_even_are_those_worked_by_hand() -> None:
    found = pays(0.5, 0.25, 10.0)
    assert (found.saved_seconds_per_1000_steps, found.steps, found.minutes) == (240.0, 40, 40 * 0.5 / 60)
    assert found.words == (
        "1,000 steps take 4 min 00 s less with 10 s of compiling; compiling pays from 40 steps on (20 s): "
        "0.25 against 0.5 s a step"
    )


def test_a_short_run_takes_longer_though_a_long_one_pays() -> None:
    found = pays(0.011, 0.010, 60.0)
    assert found.saved_seconds_per_1000_steps == pytest.approx(-59.0)
    assert found.words.startswith(
        "1,000 steps take 59 s longer with 1 min 00 s of compiling; compiling pays from 60,000"
    )


@pytest.mark.parametrize("compiled", [0.5, 0.6])
def test_a_compiled_step_that_is_no_shorter_never_pays(compiled: float) -> None:
    found = pays(0.5, compiled, 10.0)
    assert (found.steps, found.minutes) == (None, None)
    assert "compiling never pays" in found.words


@pytest.mark.parametrize("seconds", [(0.5, 0.25, 10.0), (0.3, 0.2, 0.7), (1.0, 0.7, 0.3), (2.0, 1.9, 1e-9)])
def test_at_the_break_even_compiled_has_caught_up_and_a_step_before_it_has_not(
    seconds: tuple[float, float, float],
) -> None:
    eager, compiled, spent = seconds
    steps = pays_from(*seconds)
    assert steps is not None
    assert spent + steps * compiled <= steps * eager + 1e-9
    assert steps == 1 or spent + (steps - 1) * compiled > (steps - 1) * eager
