"""The first update against torch's optimizers, the gradient norm, and that a fault in either turns their rows red."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import cpu_runtime, make_examples, make_layout_of, tiny_llama, tiny_recipe

from sftkit.config.schema import (
    AdapterConfig,
    AttentionConfig,
    CompileConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.engine import step as engine_step
from sftkit.engine.engine import Training
from sftkit.models.adapters import Adapters, add_adapters
from sftkit.objectives.objective import NextToken
from sftkit.optim import adamw, muon, protocol
from sftkit.tracking.names import Check
from sftkit.train.assemble import make_engine
from sftkit.verify.update import FirstUpdate, _norm_check

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4
UPDATE, NORM = "First update is that of torch's optimizer", "Gradient norm is that of all ranks"
RATE = 1e-3


def rows(
    folder: Path,
    name: str = "adamw",
    precision: torch.dtype = torch.float32,
    before: int = 0,
    clip: float = 0.3,
    engine_name: str = "blocks",
    adapted: bool = False,
) -> dict[str, Check]:
    """The rows of an update of a tiny model, after some that are not watched."""
    optim = OptimConfig(name=name, lr=RATE, weight_decay=0.1, max_grad_norm=clip)  # type: ignore[arg-type]
    cfg = tiny_recipe(
        folder,
        optim=optim,
        train=TrainConfig(max_steps=20, engine=engine_name),  # type: ignore[arg-type]
        attention=AttentionConfig(backend="reference"),
        compile=CompileConfig(enabled=False),
    )
    examples = make_examples(LENGTHS, target_share=0.4)
    layout, rt = make_layout_of("packed", examples.lengths), cpu_runtime()
    model = tiny_llama().to(precision)
    if adapted:  # with trained rows of tokens
        tokens = {"model.embed_tokens": (3, 5), "lm_head": (3, 5)}
        add_adapters(model, Adapters(AdapterConfig(rank=2), 0, ModelConfig(path="x"), "", tokens=tokens, known=32))
    training = Training(model, NextToken(LossConfig()), layout)
    engine = make_engine(cfg, rt, folder, training)
    try:
        steps = Batches(StepDataset(examples, layout), seed=0).steps(0, before + 1)
        for _ in range(before):
            engine.step(next(steps), RATE)
        update = FirstUpdate(engine, optim, rt)
        with update.watching():
            outcome = engine.step(next(steps), RATE)
        assert "update" not in vars(engine.optimizer)
        return {check.name: check for check in update.checks(float(outcome.grad_norm), RATE)}
    finally:
        engine.close()


@pytest.mark.parametrize("before", [0, 2], ids=["first", "resumed"])
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("adamw", torch.float32),
        ("adamw", torch.bfloat16),
        ("adamw_sr", torch.bfloat16),
        ("muon", torch.float32),
        ("muon", torch.bfloat16),
    ],
)
def test_a_right_update_is_that_of_torch_whatever_the_optimizer_stores(
    tmp_path: Path, name: str, precision: torch.dtype, before: int
) -> None:
    found = rows(tmp_path, name, precision, before)
    assert found[UPDATE].ok is True, found[UPDATE]
    assert found[NORM].ok is True, found[NORM]
    assert ("rounded updates are" in found[UPDATE].found) is (precision == torch.bfloat16)


@pytest.mark.parametrize("engine", ["graph", "reference"])
def test_the_update_of_any_engine_is_watched(tmp_path: Path, engine: str) -> None:
    found = rows(tmp_path, engine_name=engine)
    assert found[UPDATE].ok is found[NORM].ok is True, found


def test_a_right_8_bit_update_is_that_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    found = rows(tmp_path, "adamw8bit", torch.bfloat16)
    assert found[UPDATE].ok is True, found[UPDATE]


def test_an_update_of_adapters_and_rows_of_tokens_is_that_of_torch(tmp_path: Path) -> None:
    check = rows(tmp_path, adapted=True)[UPDATE]
    assert check.ok, check.found


def scaled_formula(right: Any) -> Any:
    def wrong(old: Any, grad: torch.Tensor, scalars: Any, corrected: torch.Tensor) -> Any:
        weight, *moments = right(old, grad, scalars, corrected)
        return (old[0] + 1.1 * (weight - old[0]), *moments)

    return wrong


def squared_clip(right: Any) -> Any:
    return lambda *args: right(*args) ** 2


def decay_on_norms(right: Any) -> Any:
    def wrong(model: Any, optim: OptimConfig) -> Any:
        return [{**group, "weight_decay": optim.weight_decay} for group in right(model, optim)]

    return wrong


def one_forgotten(right: Any) -> Any:
    def wrong(model: Any, optim: OptimConfig) -> Any:
        groups = right(model, optim)
        groups[-1] |= {"params": groups[-1]["params"][:-1], "numbers": groups[-1]["numbers"][:-1]}
        return groups

    return wrong


def scaled_step(right: Any) -> Any:
    """torch's fused AdamW at another learning rate than the groups say."""

    def wrong(self: Any, *args: Any) -> Any:
        for group in self.param_groups:
            group["lr"] *= 1.1
        return right(self, *args)

    return wrong


def to_nearest(right: Any) -> Any:
    return lambda value, noise: value.to(torch.bfloat16)


def other_norm(right: Any) -> Any:
    return lambda *args: 2.0 * right(*args)


def less_momentum(right: Any) -> Any:
    return 0.9


def too_long(right: Any) -> Any:
    return lambda matrices: 1.1 * right(matrices)


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any], str, torch.dtype, str]] = {
    "an update 1.1 times as large": (adamw, "adamw", scaled_formula, "adamw", torch.bfloat16, UPDATE),
    "the same, rounded stochastically": (adamw, "adamw", scaled_formula, "adamw_sr", torch.bfloat16, UPDATE),
    "another learning rate in a fused step": (torch.optim.AdamW, "step", scaled_step, "adamw", torch.float32, UPDATE),
    "a squared clip": (engine_step, "clip_coefficient", squared_clip, "adamw", torch.float32, UPDATE),
    "decay on norms": (protocol, "parameter_groups", decay_on_norms, "adamw", torch.float32, UPDATE),
    "a parameter in no group": (protocol, "parameter_groups", one_forgotten, "adamw", torch.float32, UPDATE),
    "masters rounded to nearest": (adamw, "stochastic_round", to_nearest, "adamw", torch.bfloat16, UPDATE),
    "a norm of other gradients": (engine_step, "squared_norm", other_norm, "adamw", torch.float32, NORM),
    "less momentum": (muon, "MOMENTUM", less_momentum, "muon", torch.float32, UPDATE),
    "matrices 1.1 times as long": (muon, "orthogonalized", too_long, "muon", torch.float32, UPDATE),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_update_turns_its_row_red(tmp_path: Path, monkeypatch, fault: str) -> None:
    owner, attribute, wrong, name, precision, row = FAULTS[fault]
    right = getattr(owner, attribute)
    if attribute == "step":  # of the fused optimizer, but not of the one that it is compared with
        owner = adamw.FusedAdamW
    monkeypatch.setattr(owner, attribute, wrong(right))
    check = rows(tmp_path, name, precision)[row]
    assert check.ok is False, check


def test_coefficients_of_bias_correction_that_are_off_are_found_in_a_resumed_update(
    tmp_path: Path, monkeypatch
) -> None:
    right = adamw.corrections
    monkeypatch.setattr(adamw, "corrections", lambda counts, lr, betas: right(counts + 1, lr, betas))
    assert rows(tmp_path, "adamw", torch.bfloat16, before=2)[UPDATE].ok is False


def test_a_first_step_that_is_skipped_proves_nothing(tmp_path: Path, monkeypatch) -> None:
    right = engine_step.clip_coefficient
    monkeypatch.setattr(engine_step, "clip_coefficient", lambda *args: right(*args) * torch.nan)
    check = rows(tmp_path)[UPDATE]
    assert check.ok is None
    assert "skipped" in check.found


@pytest.mark.parametrize(("other", "same"), [(16.0, True), (16.1, False), (None, True)])
def test_ranks_that_hold_a_parameter_together_must_have_the_same_gradient_of_it(
    other: float | None, same: bool
) -> None:
    whole, half = ("norm.weight", ((0, 4),)), ("up.weight", ((4, 4),))
    found = {} if other is None else {whole: other, half: 9.0}
    update = object.__new__(FirstUpdate)
    update._squares = {whole: torch.tensor(16.0), ("up.weight", ((0, 4),)): torch.tensor(0.0)}
    update._rt = SimpleNamespace(gathered=lambda own: [own, found])
    norm, disagreeing = update._norm()
    assert norm == (4.0 if other is None else 5.0), "each part once"
    check = _norm_check(norm, norm, disagreeing)
    assert (check.ok, "norm.weight" in check.found) == (same, not same)
