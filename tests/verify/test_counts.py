"""Learning rates, FLOPs, and counts of the first logged line, each against a way of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_llama, tiny_qwen3_with_windows
from looped import proof_rows, run
from made_models import MODELS, tiny_gemma2
from torch.utils.flop_counter import FlopCounterMode

from sftkit.config.schema import CompileConfig, LossConfig, OptimConfig
from sftkit.models.trained import freeze
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.optim import protocol
from sftkit.tracking import meter
from sftkit.verify import counts
from sftkit.verify.counts import flops_check, plain_rates, rates_check

COUNTS = "Logged counts are those of the documents"
EAGER = CompileConfig(enabled=False)


@pytest.mark.parametrize("kind", ["wsd", "cosine", "linear", "constant"])
@pytest.mark.parametrize("total", [1, 7, 100, 12_345])
@pytest.mark.parametrize("ratios", [(0.03, 0.2, 0.0), (0.07, 0.5, 0.1), (0.0, 0.0, 0.0), (1.0, 1.0, 0.5)])
def test_right_learning_rates_are_those_of_the_formula(kind: Any, total: int, ratios: tuple[float, ...]) -> None:
    warm_up, decay, last = ratios
    optim = OptimConfig(schedule=kind, warmup_ratio=warm_up, decay_ratio=decay, min_lr_ratio=last)
    check = rates_check(total, optim)
    assert check.ok is True, check


def test_a_long_schedule_is_compared_at_a_limited_number_of_steps() -> None:
    check = rates_check(3_000_000, OptimConfig(schedule="wsd"))
    assert check.ok is True
    assert int(check.found.split()[0].replace(",", "")) < 2100


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("cosine", lambda step, total, right: right(min(step + 1, total), total)),
        ("wsd", lambda step, total, right: right(step, total) * (1.01 if step == total else 1.0)),
        ("linear", lambda step, total, right: right(step, total) * (1.1 if step > total // 2 else 1.0)),
        ("constant", lambda step, total, right: float("nan") if step == 1 else right(step, total)),
    ],
)
def test_a_wrong_learning_rate_anywhere_in_the_run_turns_its_row_red(monkeypatch, kind: Any, wrong: Any) -> None:
    optim = OptimConfig(schedule=kind)
    right = protocol.learning_rate
    monkeypatch.setattr(
        counts, "learning_rate", lambda step, total, optim: wrong(step, total, lambda s, t: right(s, t, optim))
    )
    assert rates_check(1000, optim).ok is False


def test_the_last_steps_of_a_schedule_have_the_rates_that_the_docs_say() -> None:
    optim = OptimConfig(lr=1.0, schedule="linear", warmup_ratio=0.2, min_lr_ratio=0.0)
    assert plain_rates(np.arange(1, 11), 10, optim) == pytest.approx(
        [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    )


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3_with_windows, tiny_gemma2, MODELS["qwen3"]])
def test_flops_are_those_that_torch_counts_and_a_wrong_number_of_them_is_found(make: Any, monkeypatch) -> None:
    model = ModelWithLoss(make(), "reference", NextToken(LossConfig()))
    check = flops_check(model)
    assert check.ok is True, check
    right = counts.train_flops
    monkeypatch.setattr(counts, "train_flops", lambda *args: 4 / 3 * right(*args))
    assert flops_check(model).ok is False
    monkeypatch.setattr(counts, "train_flops", lambda model, work: right(model, replace(work, targets=work.tokens)))
    assert flops_check(model).ok is False, "a head that counts for every token"


@pytest.mark.parametrize("patterns", [(), ("*embed*",), ("model.layers.0.*", "*embed*")], ids=["all", "alike", "one"])
def test_flops_of_alike_blocks_are_those_of_all_counted(patterns: tuple[str, ...]) -> None:
    orig_model = tiny_llama(layers=5)
    freeze(orig_model, patterns)
    check = flops_check(ModelWithLoss(orig_model, "reference", NextToken(LossConfig())))
    assert check.ok is True, check
    orig_model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        embedded = orig_model.get_input_embeddings()(torch.zeros(1, counts.FLOPS_POSITIONS, dtype=torch.long))
        whole = orig_model(inputs_embeds=embedded.detach().requires_grad_(), logits_to_keep=1, use_cache=False)
        if patterns:
            whole.logits.sum().backward()
    expected = counter.get_total_flops()
    if patterns == ("model.layers.0.*", "*embed*"):
        # No backward pass goes through frozen first blocks, but here it does, by their input.
        assert float(check.found.split()[2]) < expected
    else:
        assert float(check.found.split()[2]) == pytest.approx(expected, rel=1e-3)


def test_a_run_proves_its_first_update_its_norm_its_rates_and_its_counts(tmp_path: Path) -> None:
    run(tmp_path / "run", compile=EAGER, evaluates=False, steps=7)
    rows = proof_rows(tmp_path / "run")
    for name in (
        *(COUNTS, "First update is that of torch's optimizer", "Gradient norm is that of all ranks"),
        *("Learning rates follow the schedule", "FLOPs are those that torch counts"),
    ):
        assert rows[name]["ok"] is True, rows[name]
    assert rows[COUNTS]["found"].endswith("in 5 steps")


def over_positions(right: Any) -> Any:
    """Shares and rates over positions, padding included."""

    def read(self: Any) -> Any:
        self._tokens = self._positions
        return right(self)

    return read


def targets_twice(right: Any) -> Any:
    def read(self: Any) -> Any:
        self._targets *= 2
        return right(self)

    return read


def loss_over_tokens(right: Any) -> Any:
    def read(self: Any) -> Any:
        self._divisor = self._tokens
        return right(self)

    return read


def whole_squares(right: Any) -> Any:
    """(query, key) pairs that no causal mask allows."""

    def read(self: Any) -> Any:
        self._pairs *= 2
        return right(self)

    return read


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (whole_squares, "train/flops"),
        (over_positions, "data/target_pct"),
        (targets_twice, "perf/target_tok_per_sec"),
        (loss_over_tokens, "train/loss"),
    ],
)
def test_a_wrong_count_in_the_first_line_turns_its_row_red_and_is_printed(
    tmp_path: Path, monkeypatch, capsys, wrong: Any, named: str
) -> None:
    monkeypatch.setattr(meter.Meter, "read", wrong(meter.Meter.read))
    run(tmp_path / "run", compile=EAGER, evaluates=False, steps=5)
    row = proof_rows(tmp_path / "run")[COUNTS]
    assert row["ok"] is False
    assert named in row["found"]
    assert f"check failed: {COUNTS}" in capsys.readouterr().out


def test_of_a_start_within_a_window_the_second_line_is_compared(tmp_path: Path) -> None:
    run(tmp_path / "run", compile=EAGER, evaluates=False, from_step=3, steps=12)
    row = proof_rows(tmp_path / "run")[COUNTS]
    assert row["ok"] is True, row
    assert row["found"].endswith("in 1 steps")
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [
        5,
        6,  # before the checkpoint
        10,
        12,
    ]
