"""Detect losses and gradient norms that are not finite, spikes (values far above those of earlier steps, found on the
device before the update), and uneven loads of experts.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from sftkit.config.schema import NumericsConfig
from sftkit.data.batches.loader import Batches, StepBatches
from sftkit.data.types import listed
from sftkit.errors import NonFiniteError, SpikeError, hint
from sftkit.objectives.objective import Objective
from sftkit.rundir.files import replace_text
from sftkit.rundir.names import EXPERTS, skipped_documents_file
from sftkit.runtime.start import Runtime
from sftkit.tracking import meter, names
from sftkit.tracking.tracker import Tracker

if TYPE_CHECKING:
    from sftkit.models.routing import Routing

_WINDOW = 128
"Number of earlier steps that a step is compared with."
ENOUGH = 32
"With fewer earlier steps than this there are no spikes."
SIGMAS = 6.0
"A spike is more than this many standard deviations above the mean."
LEAST = 0.01
"A standard deviation counts as at least this share of the mean."
JUDGED = ("loss", "gradient norm")


class Spike(NamedTuple):
    """A value far above earlier ones."""

    name: str
    value: float
    mean: float
    deviation: float

    def __str__(self) -> str:
        before = f"the mean before it, {self.mean:.4g} (sd {self.deviation:.2g})"
        return f"{self.name} {self.value:.4g} is far above {before}"


class Spikes:
    """The values of the last 128 steps that were not skipped, and the rule that compares the next step with them.

    All ranks compare the same numbers in the same order, so they decide alike, to the bit. The values of a skipped
    step are not kept: if the loss stays high, steps are skipped until numerics.max_skips ends the run.
    """

    def __init__(self, on_spike: Literal["warn", "skip", "error"], monitored: str, device: torch.device) -> None:
        """Begin without a history.

        Args:
            monitored: name of the objective's sum whose mean is compared.
        """
        self.monitored = monitored
        self._leaves_out = on_spike != "warn"
        self._history = torch.full((_WINDOW, len(JUDGED)), math.nan, dtype=torch.float64, device=device)

    @torch.no_grad()
    def judge(self, loss: torch.Tensor, norm: torch.Tensor, finite: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare a step with the history, and add it unless it is skipped. No host sync.

        Args:
            loss: 0-d, per target, of all ranks. norm: 0-d. finite: bool 0-d; false: the step is skipped in any case.

        Returns:
            (fp32 [2, 4]: for each of JUDGED its value, the mean and the standard deviation before it, and 1 for a
            spike; bool 0-d: whether the step is skipped)
        """
        # NaN marks an empty place of the history, so the count of known ones needs no number on the host.
        values = torch.stack([loss.double(), norm.double()])
        known = ~self._history.isnan()
        count = known.sum(0)
        divisor = count.clamp(min=1)
        mean = torch.where(known, self._history, 0.0).sum(0) / divisor
        variance = torch.where(known, self._history - mean, 0.0).square().sum(0) / divisor
        # After a long plateau the standard deviation is tiny, and any step would be many of them away.
        deviation = torch.maximum(variance.sqrt(), LEAST * mean.abs())
        # A NaN compares as False: it would be no spike, enter the history and spoil every later mean.
        usable = finite & values.isfinite().all()
        spikes = usable & (count >= ENOUGH) & (values > mean + SIGMAS * deviation)
        skipped = ~finite | spikes.any() if self._leaves_out else ~finite
        # Shifted, not written in a ring: the place would be a number on the host that differs after a skipped step.
        later = torch.cat([self._history[1:], values[None]])
        self._history.copy_(torch.where(usable & ~skipped, later, self._history))
        return torch.stack([values, mean, deviation, spikes.double()], dim=1).float(), skipped

    def history(self) -> meter.RunCounts:
        """Return the history, for a checkpoint. Waits for the device."""
        taken = self._history[~self._history.isnan().any(1)].tolist()
        return {"losses": [loss for loss, _ in taken], "norms": [norm for _, norm in taken]}

    def restore(self, history: meter.RunCounts) -> None:
        """Resume from a checkpoint, before the first step. Earlier versions kept two histories, of unequal lengths."""
        count = min(len(history["losses"]), len(history["norms"]))
        if count:
            taken = torch.tensor([history["losses"][-count:], history["norms"][-count:]], dtype=torch.float64)
            self._history[-count:] = taken.T.to(self._history.device)


def spikes_in(verdict: torch.Tensor) -> list[Spike]:
    """Return the spikes of a step from the verdict of `judge`: fp32 [2, 4], on the host."""
    rows = zip(JUDGED, verdict.tolist(), strict=True)
    return [Spike(name, value, mean, deviation) for name, (value, mean, deviation, is_spike) in rows if is_spike]


log = logging.getLogger(__name__)


class ExpertLoad:
    """Reads the choices of a model's routers; of a model without experts it reads nothing."""

    def __init__(self, routing: Routing | None, rt: Runtime) -> None:
        """Forget the choices of the warm-up. `routing`: None: the model has no experts."""
        self._routing = routing
        self._rt = rt
        if routing is not None:
            routing.take_load()

    def read(self, step: int, run_dir: Path) -> dict[str, float | None]:
        """Return train/expert_load_max and train/expert_load_min of the window; every rank must call it.

        Waits for the device.

        They are the largest and the smallest load of any expert of any layer, 1 being an even share. All
        loads are written to EXPERTS.
        """
        if self._routing is None:
            return {}
        # These are this rank's own rows. The sum over ranks is a collective, so it comes before any `if` on the rank.
        found = self._routing.take_load()
        assert found is not None, "a line is logged after a step"
        counts = self._rt.sum(found.double())  # [L, E]; every position has the same number of experts
        load = counts * counts.shape[1] / counts.sum(1, keepdim=True).clamp(min=1.0)
        if self._rt.is_main:
            rows = [[round(value, 4) for value in row] for row in load.tolist()]
            try:
                replace_text(run_dir / EXPERTS, json.dumps({"step": step, "load": rows}))
            except OSError as error:  # a full disk costs the file, not the run
                log.warning("%s cannot be written: %s", run_dir / EXPERTS, error)
        return {"train/expert_load_max": float(load.max()), "train/expert_load_min": float(load.min())}


class RankLoss(NamedTuple):
    """The loss of a rank in a skipped step, as it is sent to the other ranks."""

    loss: float
    "nats per target"
    largest: float
    "largest loss per target of a micro-batch; -inf where one is not finite"
    where: str
    """rank, micro-batches (from 1) whose loss is not finite, for a spike the one with the largest loss per target, and
    their documents; empty without any"""


@dataclass(frozen=True)
class StepRecord:
    """A step whose flags the host has read, the same on every rank."""

    step: int
    step_batches: StepBatches
    "without its micro-batches"
    own_divisors: list[int]
    "what each of this rank's micro-batches adds to the divisor"
    outcome: names.StepOutcome
    stop: bool
    "a rank requests a stop"
    finite: bool
    skipped: bool
    spikes: list[Spike]


class DelayedFlags:
    """The flags of steps, read without making the host wait: on a GPU two steps later, when
    they have arrived long ago."""

    def __init__(self, device: torch.device, delay: int, objective: Objective) -> None:
        """Allocate the host's memory.

        `delay`: steps that pass before the flags of one are read.
        """
        self._objective = objective
        self._cuda = device.type == "cuda"
        self._late = delay
        # A buffer may be written again when its flags were read: `read` leaves at most `delay` steps, one buffer each,
        # and the step just pushed has another.
        self._waiting: deque[tuple[partial[StepRecord], torch.Tensor, torch.cuda.Event | None]] = deque()
        # Allocated once: pinning memory makes the device wait.
        self._host = [torch.empty(names.NUM_FLAGS, pin_memory=self._cuda) for _ in range(delay + 1)]

    def push(self, step: int, step_batches: StepBatches, outcome: names.StepOutcome) -> None:
        """Take a step that has been launched; call `read` after each."""
        # The event, not the stream, is what `read` waits for: later steps that are queued already do not delay it.
        host = self._host[step % len(self._host)].copy_(outcome.flags.vector, non_blocking=True)
        arrived = torch.cuda.current_stream().record_event() if self._cuda else None
        # The micro-batches are released here: kept for two more steps they would hold their memory on the device.
        own = [self._objective.count(batch) for batch in step_batches.micro_batches]
        launched = partial(StepRecord, step, replace(step_batches, micro_batches=[]), own, outcome)
        self._waiting.append((launched, host, arrived))

    def read(self, *, wait: bool) -> list[StepRecord]:
        """Return the steps whose flags have arrived, oldest first; `wait`: all steps."""
        records = []
        while len(self._waiting) > (0 if wait else self._late):
            launched, host, arrived = self._waiting.popleft()
            if arrived is not None:
                arrived.synchronize()
            flags = names.Flags(host)
            found = bool(flags.stop > 0), bool(flags.nonfinite == 0), bool(flags.skipped > 0)
            records.append(launched(*found, spikes_in(flags.verdict)))
        return records


class Health:
    """Counts steps that are not finite or spike, and ends training if the recipe says so."""

    def __init__(
        self, numerics: NumericsConfig, rt: Runtime, batches: Batches, objective: Objective, tracker: Tracker
    ) -> None:
        """Begin to count.

        Args:
            rt: has the run's status, in which the error that ends the run is recorded.
            tracker: gets the problems as events.
        """
        assert rt.status is not None
        self._status = rt.status
        self._monitored = objective.monitored
        self._numerics = numerics
        self._rt = rt
        self._batches = batches
        self._tracker = tracker
        self._flags = DelayedFlags(rt.device, 2 if rt.device.type == "cuda" else 0, objective)
        self.spikes = Spikes(numerics.on_spike, objective.monitored, rt.device)
        "the engine calls it for each step, before the update"
        self._nonfinite = self._in_a_row = self._in_window = self._spiked = 0

    def add(self, step: int, step_batches: StepBatches, outcome: names.StepOutcome) -> None:
        """Take a step that has been launched; call `read_flags` after each."""
        self._flags.push(step, step_batches, outcome)

    def read_flags(self, *, wait: bool) -> tuple[bool, list[StepBatches]]:
        """Check the steps whose flags have arrived; `wait`: all steps, before a line is logged or a checkpoint written.

        Returns:
            (whether a rank requests a stop, the batches of the skipped steps)

        Raises:
            NumericsError: on every rank; the weights are as they were before that step.
        """
        steps = self._flags.read(wait=wait)
        stop = any(known.stop for known in steps)
        if stop:  # this step is the last one, which is logged and saved
            steps += self._flags.read(wait=True)
        # Every rank has read the same flags, so all take the same branch below: what is gathered there needs all ranks.
        for known in steps:
            self._in_a_row = self._in_a_row + 1 if known.skipped else 0
            self._in_window += known.skipped
            if not known.finite:
                self._nonfinite += 1
                self._report_skipped(known, "nonfinite", self._numerics.on_nonfinite)
            elif known.spikes:
                self._spiked += 1
                if known.skipped:
                    self._report_skipped(known, "spike", self._numerics.on_spike)
                else:
                    self._tracker.event("spike", known.step, f"step {known.step}: {'; '.join(map(str, known.spikes))}")
        return stop, [known.step_batches for known in steps if known.skipped]

    def _report_skipped(self, known: StepRecord, kind: Literal["nonfinite", "spike"], then: str) -> None:
        """Report a skipped step; end training if the recipe says so or too many were skipped. The error, which the
        run's status has too, lists the loss of every rank."""
        # The file first: if gathering fails because a rank is gone, it is the only trace of the documents.
        self._write_documents(known, kind)
        losses_of_ranks = self._of_all_ranks(known)
        norm = float(known.outcome.grad_norm)
        reason = spike_cause(losses_of_ranks, known.spikes) if known.finite else cause(losses_of_ranks, norm)
        # max_skips bounds what a recipe with "skip" may lose: a run whose every step is left out would train nothing.
        if then != "error" and self._in_a_row <= self._numerics.max_skips:
            self._tracker.event(kind, known.step, f"step {known.step}: {reason}; update skipped")
            return
        values = ", ".join(f"rank {rank}: {one.loss:.4g}" for rank, one in enumerate(losses_of_ranks))
        skips = f" after {self._in_a_row - 1} skipped steps" if self._in_a_row > 1 else ""
        file = skipped_documents_file(self._status.run_dir, kind, known.step, None)
        found = {"step": known.step, "reason": reason, "skips": skips, "values": values, "norm": norm}
        text = hint("numbers that end a run", **found, file=file, kind=kind)
        # The cause is with the ranks whose loss is not finite. The others only see its effect, and say so in their
        # status, so that the launcher reports the right one.
        nonfinite = [rank for rank, one in enumerate(losses_of_ranks) if one.where]
        error = SpikeError(text) if known.finite else NonFiniteError(text)
        self._status.failed(error, symptom=not known.finite and bool(nonfinite) and self._rt.rank not in nonfinite)
        raise error

    def read(self) -> dict[str, float | None]:
        """Return the window's counts; every rank must call it."""
        counts = {"spikes": self._spiked, "skipped_steps": self._in_window, "nonfinite_steps": self._nonfinite}
        self._in_window = self._spiked = 0
        return {f"health/{name}": count for name, count in counts.items()}

    def counts(self) -> meter.RunCounts:
        """Return the counts so far and the history of spikes, for a checkpoint. Waits for the device."""
        return {"nonfinite": self._nonfinite, "in_a_row": self._in_a_row, "spikes": self.spikes.history()}

    def restore(self, counts: meter.RunCounts) -> None:
        """Resume from a checkpoint, before the first step."""
        self._nonfinite = counts.get("nonfinite", 0)  # checkpoints of earlier versions have fewer counts
        self._in_a_row = counts.get("in_a_row", 0)
        self.spikes.restore(counts["spikes"])

    def _write_documents(self, known: StepRecord, kind: Literal["nonfinite", "spike"]) -> None:
        """Write this rank's documents of a skipped step to a file."""
        examples = self._batches.examples
        nonfinite = nonfinite_micro_batches(known.outcome)
        content = {
            "step": known.step,
            "epoch": known.step_batches.epoch,
            "loss": self._own_loss(known),
            "losses": losses_of(known),
            "grad_norm": float(known.outcome.grad_norm),
            "documents": [
                {
                    "index": i,
                    "source": examples.source_names[int(examples.source[i])],
                    "micro_batch": number + 1,
                    "loss_is_finite": number not in nonfinite,
                    "ids": examples[i].ids.tolist(),
                }
                for i, number in micro_batches_of(known.step_batches)
            ],
        }
        folder = self._status.run_dir
        of_ranks = [skipped_documents_file(folder, kind, known.step, rank) for rank in range(self._rt.world_size)]
        with suppress(OSError):  # a full disk must not hide the error that this is about
            of_ranks[self._rt.rank].write_text(json.dumps(content, indent=1))
            if self._rt.is_main:  # an earlier start, of more ranks, may have skipped this step too
                for path in {*folder.glob(skipped_documents_file(folder, kind, known.step, None).name)} - {*of_ranks}:
                    path.unlink()

    def _of_all_ranks(self, known: StepRecord) -> list[RankLoss]:
        """Return what each rank knows of its loss in a skipped step; every rank must call it."""
        losses = losses_of(known)
        # A spike is finite everywhere: the micro-batch with the largest loss is the likeliest cause.
        named = [losses.index(max(losses))] if known.finite else nonfinite_micro_batches(known.outcome)
        documents = [
            self._batches.examples.name(i) for i, number in micro_batches_of(known.step_batches) if number in named
        ]
        numbers = ", ".join(str(number + 1) for number in named)
        where = f"rank {self._rt.rank}, micro-batch {numbers} of {len(losses)}, with {listed(documents)}"
        largest = max(losses) if known.finite else -math.inf
        return self._rt.gathered(RankLoss(self._own_loss(known), largest, where if named else ""))

    def _own_loss(self, known: StepRecord) -> float:
        """Return this rank's loss per target in a step. Waits for the device."""
        return float(known.outcome.sums[self._monitored]) / max(sum(known.own_divisors), 1)


def losses_of(known: StepRecord) -> list[float]:
    """Return the minimised loss per target of each micro-batch of this rank. Waits for the device."""
    pairs = zip(known.outcome.losses.tolist(), known.own_divisors, strict=True)
    return [loss / max(divisor, 1) for loss, divisor in pairs]


def nonfinite_micro_batches(outcome: names.StepOutcome) -> list[int]:
    """Return the micro-batches of this rank, from 0, whose loss is not finite. Waits for the device."""
    return [number for number, loss in enumerate(outcome.losses.tolist()) if not math.isfinite(loss)]


def cause(losses_of_ranks: list[RankLoss], norm: float) -> str:
    """Return what is not finite in a step: losses, with their documents; or only the sum of a
    rank's losses, or the norm.

    Args:
        norm: of all gradients. It adds up squares, so it is NaN only if a gradient is; an infinite norm says no more.
    """
    nonfinite = [rank for rank, one in enumerate(losses_of_ranks) if one.where]
    if not nonfinite:
        if math.isfinite(norm):
            known = "every loss is finite, and so is the gradient norm"
            return f"{known}, but the sum of a rank's micro-batches is beyond fp32"
        infinite = "a gradient is infinite, or all are finite and the sum of their squares is beyond fp32"
        which = "a gradient is NaN" if math.isnan(norm) else infinite
        return hint("gradient norm alone", which=which)
    places = "; ".join(losses_of_ranks[rank].where for rank in nonfinite)
    ranks = "ranks" if len(nonfinite) > 1 else "rank"
    return f"the loss of {ranks} {', '.join(map(str, nonfinite))} is not finite ({places})"


def spike_cause(losses_of_ranks: list[RankLoss], spikes: list[Spike]) -> str:
    """Return what is far above the steps before, and which micro-batch of all ranks has the largest loss per
    target, with its documents."""
    worst = max(losses_of_ranks, key=lambda one: one.largest)
    where = f"the largest loss per target, {worst.largest:.4g}, is that of {worst.where}"
    return f"{'; '.join(map(str, spikes))}; {where}"


def micro_batches_of(step_batches: StepBatches) -> list[tuple[int, int]]:
    """Return (document, micro-batch from 0) for each of this rank's documents of a step."""
    numbers = [number for number, count in enumerate(step_batches.documents_per_micro_batch) for _ in range(count)]
    return list(zip(step_batches.documents, numbers, strict=True))
