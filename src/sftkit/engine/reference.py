"""The reference engine: each document alone through the plain model, whole logits, torch's own loss and AdamW.

It has nothing of what makes our step fast: no packing, no masks, no chunked loss, no compiler, no kernels, no shards.
So the tests of exactness and `make validate` compare the other engines with it. It is slow: a pass for each document.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from sftkit.compile.contract import random_state_kept
from sftkit.config.schema import LossConfig, OptimConfig
from sftkit.config.tables import DEFAULT
from sftkit.data.batches.collate import Batch
from sftkit.data.batches.loader import StepBatches
from sftkit.engine.checks import compiled_check, loss_check, weights_check
from sftkit.engine.engine import EngineReport, Setup, Training, WarmUp
from sftkit.engine.gradient_check import short_rows
from sftkit.engine.plain import PlainModel, Start, documents_of, plain_sums, rows_of_batch
from sftkit.engine.step import RankSums, exchange, worst_case_batch
from sftkit.errors import ConfigError
from sftkit.models.routing import routing_of
from sftkit.objectives.objective import LOSS, ModelWithLoss, Totals
from sftkit.ops.attention import plain_attention
from sftkit.optim.adamw import FusedAdamW
from sftkit.optim.build import parameter_groups
from sftkit.optim.protocol import clip_coefficient, multiply_gradients, parameters_of, set_learning_rate
from sftkit.runtime.start import Runtime
from sftkit.tracking.health import Spikes
from sftkit.tracking.names import Check, StepOutcome


class Reference:
    """The engine without optimizations. See engine.Engine."""

    def __init__(self, optim: OptimConfig, loss: LossConfig, training: Training, rt: Runtime) -> None:
        """Build the engine for a model in fp32 or fp64, whole on every rank.

        Raises:
            ConfigError: the weights are bf16 or sharded, or another optimizer than AdamW is asked for.
        """
        orig_model = training.orig_model
        if orig_model.dtype not in (torch.float32, torch.float64) or rt.topology.sharded:
            raise ConfigError(
                "train.engine=reference computes in fp32 with a whole model on every process: set "
                "train.precision=fp32, and start it with accelerate_configs/ddp.yaml, single_gpu.yaml or cpu.yaml"
            )
        if optim.name not in ("auto", DEFAULT):
            raise ConfigError(f"train.engine=reference supports only AdamW: set optim.name={DEFAULT}, not {optim.name}")
        rt.print("engine reference: each document alone, eager, torch's own loss and AdamW")
        routing = routing_of(orig_model, loss.router_aux_loss_coef)
        self.model = ModelWithLoss(orig_model, "reference", training.objective, routing).to(rt.device)
        self._max_norm, self._rt, self._layout = optim.max_grad_norm, rt, training.layout
        self._start = Start.of(training.source, training.checkpoint)
        optim = replace(optim, name=DEFAULT)  # the only one that auto may choose here
        groups = parameter_groups(orig_model, optim)
        self.optimizer = PlainAdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=False, foreach=False)
        # Private: transformers has a public setter (huggingface/transformers#38974), but no public getter.
        attention = str(orig_model.config._attn_implementation)
        # Weights and two moments.
        size = sum(3.0 * p.numel() * p.element_size() for p in orig_model.parameters())
        self.setup = Setup(attention, "documents alone", DEFAULT, "none", size)

    def warm_up(self, print_line: Callable[[str], None]) -> WarmUp:
        """Run one forward and backward pass of the largest batch, to see that it fits."""
        started, orig_model = time.perf_counter(), self.model.orig_model
        orig_model.train()
        batch = worst_case_batch(self._rt, orig_model, self._layout, *self._layout.shapes[-1])
        with random_state_kept():
            self._forward_backward(batch, self.model.objective.count(batch))
        self.optimizer.zero_grad(set_to_none=True)
        print_line(f"{self._layout.kind} rows, one document at a time; eager")
        plain = PlainModel(self.model, self._rt.device, self._start, self._rt)
        never = compiled_check(None, None, orig_model.dtype)
        checks = [weights_check(plain), self._loss_check(plain), never]
        return WarmUp(compiled=False, seconds=time.perf_counter() - started, checks=checks)

    @torch.no_grad()
    def _loss_check(self, plain: PlainModel) -> Check:
        """Compare the loss of a few collated documents with the plain model's from their own ids and masks."""
        name = self.model.objective.monitored
        ours, theirs, targets = 0.0, 0.0, 0
        with random_state_kept():
            plain.orig_model.eval()
            self.model.orig_model.eval()
            for one in short_rows(self.model.orig_model, self._layout, self._rt, alone=False):
                with plain_attention(self.model.orig_model), plain_attention(plain.orig_model):
                    for sums in plain_sums(self.model, rows_of_batch(self.model, one.own)):
                        ours += float(sums.measured[name])
                    for sums in plain_sums(plain, documents_of(one.examples, one.rows, self._rt.device)):
                        theirs += float(sums.measured[name])
                targets += int(self.model.objective.divisors(one.examples).sum())
            self.model.orig_model.train()
        return loss_check(ours / targets, theirs / targets, targets, self.model.orig_model.dtype)

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context that refuses nothing."""
        return nullcontext()

    def step(
        self, batches: StepBatches, learning_rate: float, *, stop: bool = False, spikes: Spikes | None = None
    ) -> StepOutcome:
        """Sum the gradients of the mean over the global batch, document by document; exchange them once; update."""
        totals, losses = self._nothing(), []
        for batch in batches.micro_batches:
            found = self._forward_backward(batch, batches.divisor)
            totals.add_(found)
            losses.append(found[LOSS])
        squared = torch.zeros((), dtype=torch.float64, device=self._rt.device)
        # Each rank has divided its loss by the global divisor already, so gradients add up, where DDP
        # would average them.
        for parameter in parameters_of(self.optimizer.param_groups):
            if self._rt.world_size > 1:  # a rank whose rows are all padding has no gradient, but the others wait for it
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(parameter.grad)
            if parameter.grad is not None:
                squared = squared + parameter.grad.double().square().sum()
        # Every rank has the whole gradients by now, so each gives its share of the norm.
        sums = RankSums(squared / self._rt.world_size, totals, batches.divisor)
        grad_norm, flags = exchange(sums, self._rt, stop=stop, spikes=spikes)
        self.optimizer.update(learning_rate, clip_coefficient(grad_norm, flags.skipped == 0, self._max_norm))
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(totals, grad_norm, flags, torch.stack(losses))

    def _nothing(self) -> Totals:
        """Return totals of 0."""
        return Totals.zeros(self.model.objective.measured, self._rt.device, self.model.orig_model.dtype)

    def _forward_backward(self, batch: Batch, divisor: int) -> Totals:
        """Add the gradients of a micro-batch's loss / divisor and return its sums."""
        totals, orig_model = self._nothing(), self.model.orig_model
        with plain_attention(orig_model):  # once for all documents: it walks through all modules
            for sums in plain_sums(self.model, rows_of_batch(self.model, batch)):
                (sums.loss / max(divisor, 1)).backward()
                totals.add_(Totals.of(sums))
        return totals

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def report(self, error: BaseException | None = None) -> EngineReport:
        """Report that nothing is compiled."""
        never = Check("The step is compiled", None, "reference engine", "-", "train.engine=reference never compiles")
        # The same metrics as the other engines', so that lines of a run have the same columns.
        counted = ("graphs", "recompiles", "fallbacks", "graph_breaks", "cuda_graphs")
        return EngineReport({f"compile/{name}": 0 for name in counted}, [], [never])

    def close(self) -> None:
        """Do nothing: nothing was changed."""


class PlainAdamW(FusedAdamW):
    """torch.optim.AdamW, one tensor and one operator after the other, as an optim.protocol.Optimizer."""

    def update(self, learning_rate: float, coefficient: Tensor) -> None:
        """Make one update, or none for a coefficient of nan, which the host reads."""
        # A host sync, which the other engines avoid: only torch's fused AdamW takes a flag on the device, found_inf.
        if bool(coefficient.isnan()):
            return
        set_learning_rate(self.param_groups, learning_rate)
        multiply_gradients(parameters_of(self.param_groups), coefficient)
        self.step()
