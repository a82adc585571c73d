"""Several adapters in one step: the sums of each, and its own divisor, gradient norm, clipping, learning rate, skip
decision and update. They share only the products with frozen weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sftkit.config.schema import NamedAdapter, NumericsConfig, OptimConfig
from sftkit.data.batches.collate import Batch
from sftkit.data.batches.loader import AdapterStep, StepBatches
from sftkit.data.types import Examples
from sftkit.engine.step import TrainStep, gradients
from sftkit.errors import NonFiniteError, hint
from sftkit.objectives.objective import LOSS, Objective, Sums, Totals
from sftkit.ops.linear_cross_entropy import Head
from sftkit.optim.protocol import clip_coefficient, learning_rate, parameters_of, squared_norm
from sftkit.runtime.start import replaced
from sftkit.tracking import health, tracker
from sftkit.tracking.names import Flags, StepOutcome

TARGETS = "targets"


class SumsOfMembers:
    """An objective with further sums for each adapter: the objective's own, and the number of targets. See
    objective.Objective."""

    def __init__(self, objective: Objective, names: Sequence[str]) -> None:
        """Wrap an objective. `names`: of the adapters."""
        self._objective = objective
        self._names = names
        self.own = (LOSS, *objective.measured)
        "names of the sums that the objective has of all rows"
        of_each = [f"{name}/{k}" for k in range(len(names)) for name in (*self.own, TARGETS)]
        self.measured = (*objective.measured, *of_each)
        self.monitored = objective.monitored
        self.select = objective.select
        self.sums_of_logits = objective.sums_of_logits
        self.count = objective.count

    def divisors(self, examples: Examples) -> np.ndarray:
        """Return the wrapped objective's."""
        return self._objective.divisors(examples)

    def sums(self, selected: Tensor, batch: Batch, head: Head) -> Sums:
        """Return the sums of a batch, computed separately for each share: a NaN stays in its share."""
        zero = selected.new_zeros((), dtype=torch.promote_types(selected.dtype, torch.float32))
        found = dict.fromkeys(self.measured, zero)
        if not batch.adapters:
            sums = self._objective.sums(selected, batch, head)
            return Sums(sums.loss, {**found, **sums.measured})
        sizes = [*batch.targets_of_shares[:-1]]
        sizes.append(len(selected) - sum(sizes))  # the last share gets the filler
        losses = []
        parts = zip(batch.adapters, batch.targets_of_shares, selected.split(sizes), strict=True)
        for (k, targets, own), index in zip(parts, batch.target_index.split(sizes), strict=True):
            sums = self._objective.sums(own, replace(batch, target_index=index), head)
            losses.append(sums.loss)
            of_share = {LOSS: sums.loss.detach(), **sums.measured, TARGETS: torch.full_like(zero, targets)}
            found |= {f"{name}/{k}": value for name, value in of_share.items()}
        return Sums(torch.stack(losses).sum(), found)

    def kept(self, totals: Totals, used: Tensor) -> Totals:
        """Return the totals of a step without those of adapters whose update was skipped.

        Args:
            used: bool [adapters].
        """
        width = len(self.own)
        of_each = totals.vector[width:].view(len(self._names), width + 1)
        of_each = torch.where(used[:, None], of_each, 0.0)
        return Totals(totals.names, torch.cat([of_each[:, :width].sum(0), of_each.flatten()]))

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the wrapped objective's metrics, of all adapters together and of each as train/loss/<adapter>."""
        every = [{name: means[f"{name}/{k}"] or 0.0 for name in (*self.own, TARGETS)} for k in range(len(self._names))]
        values = self._objective.metrics(self._means(every))
        for name, sums in zip(self._names, every, strict=True):
            values |= {f"{key}/{name}": value for key, value in self._objective.metrics(self._means([sums])).items()}
        return values

    def _means(self, sums: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
        targets = sum(one[TARGETS] for one in sums)
        return {name: sum(one[name] for one in sums) / targets if targets else None for name in self.own}


class Member:
    """State that each of several adapters has for itself in a run."""

    def __init__(
        self, number: int, name: str, optim: OptimConfig, numerics: NumericsConfig, monitored: str, device: torch.device
    ) -> None:
        """Begin at step 0. `number`: its place in the recipe. `monitored`: see Objective."""
        self.number = number
        self.name = name
        self.optim = optim
        self._numerics = numerics
        self.spikes = health.Spikes(numerics.on_spike, monitored, device)
        self.rate: float | None = None
        "learning rate of the newest step"
        self.norm: Tensor | None = None
        "fp32 0-d, gradient norm of the newest step"
        self._counts = torch.zeros(4, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        "steps skipped, skipped in a row, with a spike; step since which there are no updates, 0: none"

    @torch.no_grad()
    def judge(self, step: int, loss: Tensor, monitored: Tensor, norm: Tensor) -> Tensor:
        """Return whether the step updates the adapter, bool 0-d. No host sync.

        Args:
            loss: 0-d, the sum that is minimised. monitored: 0-d, per target. norm: fp32 0-d.
        """
        finite = loss.isfinite() & norm.isfinite()
        verdict, skipped = self.spikes.judge(monitored, norm, finite)
        spike = verdict[:, 3].any()
        total, in_a_row, spikes, ended = self._counts
        in_a_row = torch.where(skipped, in_a_row + 1, 0)
        ends = in_a_row > self._numerics.max_skips
        if self._numerics.on_nonfinite == "error":
            ends = ends | ~finite
        if self._numerics.on_spike == "error":
            ends = ends | spike
        was_ended = ended > 0
        now = torch.where(ends & ~was_ended, step, ended)
        self._counts = torch.stack([total + (skipped | was_ended), in_a_row, spikes + spike, now])
        used: Tensor = ~(skipped | was_ended)
        return used

    def read(self) -> tuple[dict[str, float | None], str, bool]:
        """Return metrics, what happened to it or "", and whether it still learns. Waits for the device."""
        total, _, spikes, ended = self._counts.tolist()
        values: dict[str, float | None] = {"health/skipped_steps": total, "health/spikes": spikes}
        if self.norm is not None:
            norm = float(self.norm)
            values |= {"train/lr": self.rate, "train/grad_norm": norm if math.isfinite(norm) else None}
        event = f"adapter {self.name}: {total:.0f} steps skipped so far, not finite or with a spike" if total else ""
        if ended:
            event = hint("adapter without updates", name=self.name, step=ended)
        return {f"{key}/{self.name}": value for key, value in values.items()}, event, not ended

    def counts(self) -> dict[str, Any]:
        """Return its counts and history, for a checkpoint. Waits for the device."""
        return {"counts": self._counts.tolist(), "spikes": self.spikes.history()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Resume from a checkpoint."""
        self._counts.copy_(torch.tensor(kept["counts"]))
        self.spikes.restore(kept["spikes"])


class Members:
    """The adapters of a run in the order of its recipe."""

    def __init__(
        self,
        entries: Sequence[NamedAdapter],
        optim: OptimConfig,
        numerics: NumericsConfig,
        objective: Objective,
        device: torch.device,
    ) -> None:
        """Begin at step 0. `objective`: that of one adapter."""
        self.objective = SumsOfMembers(objective, [entry.name for entry in entries])
        self.each = [
            Member(k, one.name, replace(optim, lr=one.lr or optim.lr), numerics, objective.monitored, device)
            for k, one in enumerate(entries)
        ]

    def read(self) -> tuple[dict[str, float | None], list[tuple[tracker.EventKind, list[str]]]]:
        """Return metrics and events of all. Waits for the device.

        Raises:
            NonFiniteError: none of them learns any more.
        """
        values, events, learn = zip(*(member.read() for member in self.each), strict=True)
        told = [*filter(None, events)]
        if not any(learn):
            raise NonFiniteError("; ".join(told))
        return {name: value for own in values for name, value in own.items()}, [("nonfinite", told)]

    def counts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of each, by name."""
        return {member.name: member.counts() for member in self.each}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Resume from a checkpoint."""
        for member in self.each:
            member.restore(kept[member.name])


@dataclass(frozen=True)
class StepOfMembers(TrainStep):
    """A step that computes the gradients of all adapters together, and updates each as if it were alone."""

    members: Members

    def step(
        self, batches: StepBatches, learning_rate: float, *, stop: bool = False, spikes: health.Spikes | None = None
    ) -> StepOutcome:
        """See engine.Engine.step; learning rates and spikes are those of each adapter."""
        rt = self.rt
        totals = Totals.zeros(self.objective.measured, rt.device)
        every = parameters_of(self.optimizer.param_groups)
        losses = gradients(self.model, every, batches.micro_batches, batches.divisor, totals, rt)
        used, squares = [], []
        for member, own in zip(self.members.each, batches.adapters, strict=True):
            if own is None:  # its data has ended: no update at all
                member.rate = member.norm = None
                used.append(torch.ones((), dtype=torch.bool, device=rt.device))
                continue
            used.append(self._update(member, own, batches.divisor, totals))
            assert member.norm is not None
            squares.append(torch.where(used[-1], member.norm, 0.0).square())
        self.optimizer.zero_grad(set_to_none=True)
        zero = torch.zeros((), device=rt.device)
        flags = Flags.of(torch.full_like(zero, float(stop)), zero, zero)
        assert isinstance(self.objective, SumsOfMembers)
        kept = self.objective.kept(totals, torch.stack(used))
        return StepOutcome(kept, torch.stack(squares).sum().sqrt(), flags, losses)

    def _update(self, member: Member, own: AdapterStep, divisor: int, totals: Totals) -> Tensor:
        """Update an adapter; return whether it was, bool 0-d. `divisor`: by which gradients of all were divided."""
        groups = [group for group in self.optimizer.param_groups if group["member"] == member.number]
        parameters = list(parameters_of(groups))
        grads = [p.grad for p in parameters if p.grad is not None]
        if own.divisor != divisor:
            torch._foreach_mul_(grads, max(divisor, 1) / max(own.divisor, 1))
        member.norm = squared_norm(parameters, 1).sqrt().float()
        monitored = totals[f"{self.objective.monitored}/{member.number}"] / max(own.divisor, 1)
        loss = totals[f"{LOSS}/{member.number}"]
        used = member.judge(own.step, loss, monitored, member.norm)
        member.rate = learning_rate(own.step, own.total_steps, member.optim)
        coefficient = clip_coefficient(member.norm, used, self.max_grad_norm)
        with replaced(self.optimizer, "param_groups", groups):
            self.optimizer.update(member.rate, coefficient)
        return used
