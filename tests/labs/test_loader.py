"""The lab that measures a node's data workers."""

from __future__ import annotations

import pytest

from labs.loader import build_seconds, made_up, measured


def test_ranks_that_meet_after_each_step_take_the_tokens_that_gpus_would() -> None:
    examples = made_up(1_000)
    rate = 200_000.0
    found = measured(examples, 2, rows=2, workers=0, busy=0.5, steps=4, rate=rate)
    assert found["tokens_per_second"] < rate, "paced: no rank runs ahead"
    assert found["tokens_per_second"] == pytest.approx(rate, rel=0.6)
    assert 0 < found["wait_pct"] < 100
    assert 0 < build_seconds(examples, 2, 2, steps=4) < 60
