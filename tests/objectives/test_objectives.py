"""Objectives: sums by name, the divisor they are divided by, and that nothing but the objective decides either."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import cpu_runtime, make_batch, make_examples, of_two_sources, tiny_llama, tiny_recipe, token_nll
from torch import Tensor

from sftkit.config.schema import (
    CompileConfig,
    LossConfig,
    OptimConfig,
    TrainConfig,
)
from sftkit.data.batches.collate import Batch
from sftkit.data.types import Examples
from sftkit.engine.engine import Training
from sftkit.models.kind import CausalLM
from sftkit.objectives.objective import ModelWithLoss, NextToken, Sums, Totals
from sftkit.ops.linear_cross_entropy import Head
from sftkit.tracking.meter import Meter
from sftkit.train.assemble import lay_out, make_engine
from sftkit.train.parts import EncodedDocuments
from sftkit.verify.proof import verified_warm_up

EVERYTHING = LossConfig(z_loss=1e-3, label_smoothing=0.1, token_metrics=True)


@pytest.mark.parametrize("loss", [LossConfig(), EVERYTHING, LossConfig(dft=True)], ids=["plain", "everything", "dft"])
def test_chunked_sums_and_those_of_whole_logits_are_the_same_by_name(loss: LossConfig) -> None:
    model, objective = tiny_llama().eval(), NextToken(loss)
    batch = make_batch(make_examples([9, 14, 6]), ((0, 1), (2,)), 32)
    with torch.no_grad():
        hidden = CausalLM().hidden_states(model, batch, "reference")
        chunked = objective.sums(objective.select(hidden, batch), batch, CausalLM().head(model))
        logits = hidden.flatten(0, 1) @ model.lm_head.weight.t()
        whole = objective.sums_of_logits(logits, batch.targets.flatten())
    assert tuple(chunked.measured) == tuple(whole.measured) == objective.measured
    assert float(chunked.loss) == pytest.approx(float(whole.loss), rel=1e-5)
    for name, value in chunked.measured.items():
        assert float(value) == pytest.approx(float(whole.measured[name]), rel=1e-5), name
    # The value that is minimised is logged next to the negative log-likelihood where they differ.
    assert ("train/objective" in objective.metrics(dict.fromkeys(("loss", *objective.measured), 1.0))) == (
        loss != LossConfig()
    )


def test_sums_of_sources_are_those_of_their_tokens_and_change_no_bit_of_loss_and_gradients() -> None:
    examples = of_two_sources(make_examples([9, 14, 6, 11]))
    batch = make_batch(examples, ((0, 1), (2, 3)), 32)

    def run(num_sources: int) -> tuple[Sums, list[Tensor]]:
        model = ModelWithLoss(tiny_llama(), "reference", NextToken(LossConfig(chunk_tokens=64), num_sources))
        sums = model(batch)
        sums.loss.backward()
        return sums, [p.grad for p in model.parameters() if p.grad is not None]

    (with_sources, gradients), (without, plain) = run(2), run(0)
    assert torch.equal(with_sources.loss, without.loss)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, plain, strict=True))
    assert with_sources.measured.keys() - without.measured.keys() == {"nll/0", "nll/1"}
    each, seldom = token_nll(tiny_llama(), batch), (batch.doc_ids == 0) & (torch.arange(2)[:, None] == 0)
    seldom |= (batch.doc_ids == 1) & (torch.arange(2)[:, None] == 1)  # documents 0 and 3
    for name, own in (("nll/1", seldom), ("nll/0", ~seldom)):
        assert float(with_sources.measured[name]) == pytest.approx(float(each[own].sum().detach()), rel=1e-5)


def test_what_batches_count_adds_up_to_what_the_plan_counts() -> None:
    objective, examples = NextToken(LossConfig()), make_examples([9, 14, 6, 20])
    batches = [make_batch(examples, rows, 32) for rows in (((0, 1),), ((2,), (3,)))]
    assert sum(map(objective.count, batches)) == objective.divisors(examples).sum() == examples.num_targets.sum()


def test_totals_add_up_by_name_and_refuse_others() -> None:
    total = Totals.zeros(("nll",), torch.device("cpu"))
    assert total.means_of(total.vector.tolist(), 0) == {"loss": None, "nll": None}
    for value in (1.0, 2.5):
        total.add_(Totals.of(Sums(torch.tensor(value, requires_grad=True), {"nll": torch.tensor(2 * value)})))
    assert (float(total["loss"]), float(total["nll"])) == (3.5, 7.0)
    assert total.means_of(total.vector.tolist(), 7) == {"loss": 0.5, "nll": 1.0}
    assert not total.vector.requires_grad
    with pytest.raises(AssertionError, match="other"):
        total.add_(Totals.of(Sums(torch.tensor(1.0), {"other": torch.tensor(1.0)})))


class PerDocument:
    """Each document weighs the same, however many targets it has: the mean over documents of their summed nll."""

    measured = ("nll", "documents")
    monitored = "nll"

    def __init__(self) -> None:
        self._next_token = NextToken(LossConfig())

    def select(self, hidden: Tensor, batch: Batch) -> Tensor:
        return self._next_token.select(hidden, batch)

    def sums(self, selected: Tensor, batch: Batch, head: Head) -> Sums:
        found = self._next_token.sums(selected, batch, head)
        return Sums(found.loss, {"nll": found.measured["nll"], "documents": torch.tensor(float(self.count(batch)))})

    def sums_of_logits(self, logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Sums:
        found = self._next_token.sums_of_logits(logits, targets, weights)
        return Sums(found.loss, {"nll": found.measured["nll"], "documents": torch.tensor(1.0)})

    def count(self, batch: Batch) -> int:
        return sum(len(row[row >= 0].unique()) for row in batch.doc_ids)

    def divisors(self, examples: Examples) -> np.ndarray:
        return np.ones(len(examples), dtype=np.int64)

    def metrics(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        return {"train/loss": means["nll"], "train/documents": means["documents"]}


@pytest.mark.parametrize("engine", ["blocks", "reference"])
def test_another_objective_needs_no_change_elsewhere_and_its_own_divisor_divides(tmp_path: Path, engine: str) -> None:
    cfg = tiny_recipe(
        tmp_path,
        optim=OptimConfig(name="adamw", max_grad_norm=None),
        train=TrainConfig(max_steps=1, global_batch_size=4, micro_batch_size=2, engine=engine, precision="fp32"),  # type: ignore[arg-type]
        compile=CompileConfig(enabled=False),
    )
    rt, objective, orig_model = cpu_runtime(), PerDocument(), tiny_llama()
    batches = lay_out(cfg, rt, EncodedDocuments(make_examples([30, 4, 25, 8, 16, 9]), 32), objective)
    built = make_engine(cfg, rt, tmp_path, Training(orig_model, objective, batches.layout))
    verified_warm_up(built, rt, lambda _: None)
    meter = Meter(orig_model, objective, batches, rt)
    (step,) = batches.steps(0, 1)
    assert step.divisor == len(step.documents) < step.num_targets
    outcome = built.step(step, 0.0)
    built.close()
    meter.add(step, outcome)
    values = meter.read()
    assert values["train/documents"] == 1.0
    assert values["train/loss"] == pytest.approx(float(outcome.sums["nll"]) / step.divisor)
    assert meter.seen_targets == meter.planned_targets == step.divisor
    plain = ModelWithLoss(tiny_llama(), "reference", NextToken(LossConfig()))
    sum((plain(batch).loss for batch in step.micro_batches), torch.zeros(())).backward()  # type: ignore[union-attr]
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert float(outcome.grad_norm) == pytest.approx(float(norm) / step.divisor, rel=1e-4)
