"""Numbers that must not pass unnoticed: losses and gradient norms that are not finite, and spikes."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from sftkit.config.schema import NumericsConfig
from sftkit.data.collate import Batch
from sftkit.data.loader import Batches, StepBatches
from sftkit.errors import NonFiniteError
from sftkit.objectives.objective import Objective
from sftkit.runtime.rundir import nonfinite_file
from sftkit.runtime.start import Runtime
from sftkit.runtime.status import RunStatus
from sftkit.tracking.outcome import Flags, StepOutcome
from sftkit.tracking.tracker import Tracker
from sftkit.tracking.window import Window, by_rank, own_values

WINDOW = 128
"steps that a spike is measured against"
ENOUGH = 32
"steps before which nothing is called a spike"
SIGMAS = 6.0
SHOWN = 5
"Documents named in a message; the file has all."


@dataclass(frozen=True)
class RankLoss:
    """What a rank tells the others of its loss in a step that is not finite."""

    loss: float
    "per target"
    micro_batches: list[int]
    "whose loss is not finite, from 1"
    of: int
    "micro-batches of a step"
    documents: list[str]
    "in those"


@dataclass(frozen=True)
class Known:
    """What the host has learned of a step, the same on every rank."""

    step: int
    stop: bool
    "a rank wishes to stop"
    finite: bool
    step_batches: StepBatches
    "without its micro-batches"
    own_divisor: int
    "of this rank's batches"
    outcome: StepOutcome


class LateFlags:
    """The flags of steps, read without making the host wait: on a GPU two steps later, when they have long arrived."""

    def __init__(self, device: torch.device, late: int, count: Callable[[Batch], int]) -> None:
        """`late`: steps that pass before the flags of one are read. `count`: see Objective.count."""
        self._count = count
        self._cuda, self._late = device.type == "cuda", late
        self._waiting: deque[tuple[Known, torch.Tensor, torch.cuda.Event | None]] = deque()
        # Taken once: pinning memory makes the device wait.
        self._host = [torch.empty(2, pin_memory=self._cuda) for _ in range(late + 1)]

    def push(self, step: int, step_batches: StepBatches, outcome: StepOutcome) -> None:
        """A step that has been launched; `known` must be asked after each."""
        host = self._host[step % len(self._host)].copy_(outcome.flags.vector, non_blocking=True)
        arrived = None
        if self._cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        own = sum(map(self._count, step_batches.micro_batches))
        known = Known(step, False, True, replace(step_batches, micro_batches=[]), own, outcome)
        self._waiting.append((known, host, arrived))

    def known(self, wait: bool) -> list[Known]:
        """Steps whose flags can be read by now, oldest first; `wait`: all."""
        found = []
        while len(self._waiting) > (0 if wait else self._late):
            launched, host, arrived = self._waiting.popleft()
            if arrived is not None:
                arrived.synchronize()
            flags = Flags(host)
            found.append(replace(launched, stop=bool(flags.stop > 0), finite=bool(flags.nonfinite == 0)))
        return found


class Spikes:
    """Losses and gradient norms far above those of the steps before: kept on the device, judged when a line is logged."""

    def __init__(self, rt: Runtime, log_every: int, watched: str) -> None:
        """`watched`: the sum of the objective whose mean is judged."""
        self._rt, self._watched = rt, watched
        self._sums = torch.zeros(log_every, device=rt.device)  # this rank's
        self._grad_norms = torch.zeros(log_every, device=rt.device)
        self._steps: list[tuple[int, int]] = []  # (step, divisor)
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def add(self, step: int, divisor: int, outcome: StepOutcome) -> None:
        """One step; no host sync."""
        number = len(self._steps)
        self._sums[number].copy_(outcome.sums[self._watched])
        self._grad_norms[number].copy_(outcome.grad_norm)
        self._steps.append((step, divisor))

    def read(self) -> list[str]:
        """A line for each spike since the last call; every rank must call it."""
        count = len(self._steps)
        sums = self._rt.sum(self._sums[:count]).tolist()
        norms = self._grad_norms[:count].tolist()
        lines = []
        for (step, divisor), total, norm in zip(self._steps, sums, norms, strict=True):
            for name, value, history in (
                ("loss", total / max(divisor, 1), self._losses),
                ("gradient norm", norm, self._norms),
            ):
                if not math.isfinite(value):
                    continue
                if is_spike(value, history):
                    lines.append(
                        f"step {step}: {name} {value:.4g} is far above {statistics.fmean(history):.4g}, its mean so far"
                    )
                history.append(value)
        self._steps.clear()
        return lines

    def window(self) -> Window:
        """The steps not judged yet and those before; every rank must call it. Waits for the device."""
        count = len(self._steps)
        return {
            "steps": self._steps,
            "by_rank": by_rank(self._rt, self._sums[:count]),
            "grad_norms": by_rank(self._rt, self._grad_norms[:count])[0],
            "losses": list(self._losses),
            "norms": list(self._norms),
        }

    def go_on(self, window: Window, same_ranks: bool) -> None:
        """Go on from a checkpoint, before the first step. `same_ranks`: see window.own_values."""
        self._steps = [(step, divisor) for step, divisor in window["steps"]]
        self._losses.extend(window["losses"])
        self._norms.extend(window["norms"])
        norms = torch.tensor([math.nan if norm is None else norm for norm in window["grad_norms"]])
        device = self._sums.device  # with room for a whole window more: log.every may be another now
        self._sums = torch.cat([own_values(self._rt, window["by_rank"], same_ranks).to(self._sums), self._sums])
        self._grad_norms = torch.cat([norms.to(device), self._grad_norms])


def is_spike(value: float, history: deque[float]) -> bool:
    """More than 6 standard deviations above the mean of the last 128 steps; a deviation counts as 1 % of the mean at least."""
    if len(history) < ENOUGH:
        return False
    mean = statistics.fmean(history)
    return value > mean + SIGMAS * max(statistics.pstdev(history), 0.01 * abs(mean))


COUNTS = ("nonfinite", "in_a_row", "in_window")
"Steps that were not finite, the same on every rank."


class Health:
    """Counts what went wrong, and ends training where the recipe says so."""

    def __init__(
        self,
        numerics: NumericsConfig,
        rt: Runtime,
        status: RunStatus,
        batches: Batches,
        tracker: Tracker,
        log_every: int,
        objective: Objective,
    ) -> None:
        self._watched = objective.watched
        self._numerics, self._rt, self._status, self._batches = numerics, rt, status, batches
        self._tracker = tracker
        self._flags = LateFlags(rt.device, 2 if rt.device.type == "cuda" else 0, objective.count)
        self._spikes = Spikes(rt, log_every, objective.watched)
        self._nonfinite = self._in_a_row = self._in_window = 0

    def add(self, step: int, step_batches: StepBatches, outcome: StepOutcome) -> None:
        """One step that has been launched; `settle` must be called after each."""
        self._flags.push(step, step_batches, outcome)
        self._spikes.add(step, step_batches.divisor, outcome)

    def settle(self, wait: bool) -> tuple[bool, int]:
        """Judge the steps whose flags are known; `wait`: all of them, before a line is logged or a checkpoint written.

        Returns:
            (whether a rank wishes to stop, divisors of the steps that were left out)

        Raises:
            NonFiniteError: on every rank; the weights have been left as they were before that step.
        """
        steps = self._flags.known(wait)
        stop, left_out = any(known.stop for known in steps), 0
        if stop:  # this step is the last one: it is logged and saved
            steps += self._flags.known(wait=True)
        for known in steps:
            self._in_a_row = 0 if known.finite else self._in_a_row + 1
            if known.finite:
                continue
            self._nonfinite += 1
            self._in_window += 1
            left_out += known.step_batches.divisor
            self._write_documents(known)
            found = self._of_all_ranks(known)
            if self._numerics.on_nonfinite == "error" or self._in_a_row > self._numerics.max_skips:
                raise self._error(known, found)
            text = f"step {known.step}: {cause(found, float(known.outcome.grad_norm))}; left out"
            self._tracker.event("nonfinite", known.step, text)
        return stop, left_out

    def read(self) -> tuple[dict[str, float | None], list[str]]:
        """(metrics, a line for each spike since the last call); every rank must call it."""
        lines = self._spikes.read()
        values: dict[str, float | None] = {
            "health/spikes": len(lines),
            "health/skipped_steps": self._in_window,
            "health/nonfinite_steps": self._nonfinite,
        }
        self._in_window = 0
        return values, lines

    def window(self) -> Window:
        """The counts so far and what was not judged yet; every rank must call it. Waits for the device."""
        counts = {name: getattr(self, f"_{name}") for name in COUNTS}
        return {**counts, "spikes": self._spikes.window()}

    def go_on(self, window: Window, same_ranks: bool) -> None:
        """Go on from a checkpoint, before the first step. `same_ranks`: see window.own_values."""
        for name in COUNTS:
            setattr(self, f"_{name}", window[name])
        self._spikes.go_on(window["spikes"], same_ranks)

    def _write_documents(self, known: Known) -> None:
        """This rank's documents of a step that is not finite, as a file."""
        found = {
            "step": known.step,
            "epoch": known.step_batches.epoch,
            "loss": float(known.outcome.sums[self._watched]) / max(known.own_divisor, 1),
            "grad_norm": float(known.outcome.grad_norm),
            "documents": documents_of(self._batches, known.step_batches, broken_micro_batches(known.outcome)),
        }
        file = nonfinite_file(self._status.run_dir, known.step, self._rt.rank)
        with suppress(OSError):  # on a full disk the error itself is what must be told
            file.write_text(json.dumps(found, indent=1))

    def _of_all_ranks(self, known: Known) -> list[RankLoss]:
        """What each rank knows of its loss in a step that is not finite; every rank must call it."""
        broken = broken_micro_batches(known.outcome)
        documents = documents_of(self._batches, known.step_batches, broken)
        own = RankLoss(
            loss=float(known.outcome.sums[self._watched]) / max(known.own_divisor, 1),
            micro_batches=[number + 1 for number in broken],
            of=len(known.outcome.losses),
            documents=[f"{one['source']} #{one['index']}" for one in documents if not one["loss_is_finite"]],
        )
        found = [own] * self._rt.world_size
        if self._rt.world_size > 1:
            torch.distributed.all_gather_object(found, own)
        return found

    def _error(self, known: Known, found: list[RankLoss]) -> NonFiniteError:
        """With the loss of every rank."""
        norm = float(known.outcome.grad_norm)
        broken = [rank for rank, one in enumerate(found) if one.micro_batches]
        values = ", ".join(f"rank {rank}: {one.loss:.4g}" for rank, one in enumerate(found))
        skips = f" after {self._in_a_row - 1} steps that were left out" * (self._in_a_row > 1)
        error = NonFiniteError(
            f"step {known.step}: {cause(found, norm)}{skips} (loss per target: {values}; gradient norm {norm:.4g}). The update "
            f"was left out. The documents of that step are in {nonfinite_file(self._status.run_dir, known.step, None)}. "
            "Look at them, lower optim.lr, resume from the last checkpoint with train.resume=auto, or leave such steps out "
            "with numerics.on_nonfinite=skip"
        )
        self._status.failed(error, symptom=bool(broken) and self._rt.rank not in broken)
        return error


def broken_micro_batches(outcome: StepOutcome) -> list[int]:
    """The micro-batches of this rank whose loss is not finite, from 0. Waits for the device."""
    return [number for number, loss in enumerate(outcome.losses.tolist()) if not math.isfinite(loss)]


def cause(found: list[RankLoss], norm: float) -> str:
    """What is not finite in a step: which losses, with their documents; or only the sum of a rank's losses, or the norm.

    Args:
        norm: of all gradients. It is NaN only if a gradient is, as squares are added up; an infinite one tells no more.
    """
    broken = [rank for rank, one in enumerate(found) if one.micro_batches]
    if not broken:
        if math.isfinite(norm):
            return "every loss is finite, and so is the gradient norm, but the sum of a rank's micro-batches is beyond fp32"
        which = "a gradient is infinite, or all are finite and the sum of their squares is beyond fp32"
        which = "a gradient is NaN" if math.isnan(norm) else which
        return (
            f"every loss is finite, but the gradient norm is not: {which}. The backward pass or its precision may be at "
            "fault, or a document whose gradient explodes"
        )
    places = [
        f"rank {rank}, micro-batch {', '.join(map(str, found[rank].micro_batches))} of {found[rank].of}, with "
        f"{listed(found[rank].documents)}"
        for rank in broken
    ]
    names = f"rank{'s' * (len(broken) > 1)} {', '.join(map(str, broken))}"
    return f"the loss of {names} is not finite ({'; '.join(places)})"


def listed(documents: list[str]) -> str:
    """The first few documents, and how many more there are."""
    if not documents:
        return "padding only"
    more = f" and {len(documents) - SHOWN} more" if len(documents) > SHOWN else ""
    return f"documents {', '.join(documents[:SHOWN])}{more}"


def documents_of(batches: Batches, step_batches: StepBatches, broken: list[int]) -> list[dict[str, object]]:
    """This rank's documents of a step: index, source, micro-batch from 1, whether the loss of that is finite, token ids.

    Args:
        broken: micro-batches whose loss is not finite, from 0.
    """
    examples = batches.examples
    numbers = [number for number, count in enumerate(step_batches.documents_in) for _ in range(count)]
    return [
        {
            "index": i,
            "source": examples.source_names[int(examples.source[i])],
            "micro_batch": number + 1,
            "loss_is_finite": number not in broken,
            "ids": examples[i].ids.tolist(),
        }
        for i, number in zip(step_batches.documents, numbers, strict=True)
    ]
