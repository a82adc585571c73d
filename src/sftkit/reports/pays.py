"""The time that compiling costs, and how long a run must be for it to pay. Functions of seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sftkit.reports.numbers import duration, format_value

LITTLE = 1.3
"""An example where compiling pays a little: an eager step takes so many times a compiled one;
the other example is twice."""


@dataclass(frozen=True)
class Pays:
    """The savings of a compiled run over the same run without the compiler."""

    eager_step_seconds: float
    compiled_step_seconds: float
    compile_seconds: float
    saved_seconds_per_1000_steps: float
    "compile already subtracted; below 0: compiled steps take longer in all"
    steps: int | None
    "number of steps from which on compiling pays; None: never"
    minutes: float | None
    "duration of a run of `steps` steps, which is the same either way"

    @property
    def words(self) -> str:
        """Return the result in words."""
        saved = self.saved_seconds_per_1000_steps
        total = f"1,000 steps take {duration(abs(saved))} {'less' if saved >= 0 else 'longer'}"
        total += f" with {duration(self.compile_seconds)} of compiling"
        each = f"{format_value(self.compiled_step_seconds)} against {format_value(self.eager_step_seconds)} s a step"
        if self.steps is None or self.minutes is None:
            return f"{total}; compiling never pays: {each}"
        return f"{total}; compiling pays from {self.steps:,} steps on ({duration(60 * self.minutes)}): {each}"


def pays(eager_step_seconds: float, compiled_step_seconds: float, compile_seconds: float) -> Pays:
    """Return what compiling saves over 1,000 steps, and how long a run must be to pay for it."""
    saved = 1000 * (eager_step_seconds - compiled_step_seconds) - compile_seconds
    steps = pays_from(eager_step_seconds, compiled_step_seconds, compile_seconds)
    minutes = None if steps is None else steps * eager_step_seconds / 60
    return Pays(eager_step_seconds, compiled_step_seconds, compile_seconds, saved, steps, minutes)


def pays_from(eager_step_seconds: float, compiled_step_seconds: float, compile_seconds: float) -> int | None:
    """Return the fewest steps (1 or more) that take no longer compiled, compile included, than eager; None: never."""
    gain = eager_step_seconds - compiled_step_seconds
    steps = compile_seconds / gain if gain > 0 else math.inf
    # Rounded first, so that 100.0000001 is 100 steps and not 101.
    return max(1, math.ceil(round(steps, 6))) if math.isfinite(steps) else None


def own_words(
    compile_seconds: float | None, step_seconds: Sequence[float], cache_hits: float, *, resumed: bool
) -> str | None:
    """Return what a compiled run can say without an eager one beside it: its compile in steps of its own, and when it
    pays for two possible speeds of an eager step. None where seconds are not known.

    Args:
        compile_seconds: time in the compiler, of the newest start.
        step_seconds: mean of each logged window; the first, with its one-time costs, does not
            count if there are others.
        cache_hits: graphs that came from caches.
        resumed: whether the newest start was a resume.
    """
    step = median(step_seconds[1:] or step_seconds) if step_seconds else 0.0
    if compile_seconds is None or compile_seconds <= 0 or step <= 0:
        return None
    twice, little = (pays_from(times * step, step, compile_seconds) for times in (2.0, LITTLE))
    if twice is None or little is None:
        return None
    when = " when the run was resumed" if resumed else ""
    cached = f" with {format_value(cache_hits)} hits in caches" if cache_hits > 0 else ""
    return (
        f"Compiling took {format_value(compile_seconds)} s{when}{cached}, as long as {twice:,} of its steps of "
        f"{format_value(step)} s: it pays after {twice:,} steps where an eager step takes twice as long, after "
        f"{little:,} where it takes {LITTLE} times as long (validate_compile.py measures that)."
    )
