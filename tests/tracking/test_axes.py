"""Tokens, FLOPs and seconds since the first step, over all starts of a run."""

from __future__ import annotations

from dataclasses import asdict

from helpers import tiny_llama

from sftkit.models.structure import Work, train_flops
from sftkit.tracking.names import PROGRESS, Progress, progress_of


def test_progress_adds_up_over_windows_and_through_a_checkpoint() -> None:
    model = tiny_llama()
    done = Progress().plus(100, 40, 900, 2.0).plus(50, 20, 400, 1.0)
    resumed = progress_of({"step": 7, "tokens": 150, PROGRESS: asdict(done)})
    assert resumed == done
    assert resumed.axes(model, counts_attention=True) == {
        "train/tokens": 150, "train/flops": train_flops(model, Work(150, 60, 1300)), "train/seconds": 3.0
    }  # fmt: skip


def test_what_an_earlier_checkpoint_did_not_count_is_unknown_and_not_zero() -> None:
    resumed = progress_of({"step": 7, "tokens": 150}).plus(50, 20, 400, 1.0)
    axes = resumed.axes(tiny_llama(), counts_attention=True)
    assert axes == {"train/tokens": 200, "train/flops": None, "train/seconds": None}
    assert progress_of({"step": 0}) == Progress()


def test_flops_are_unknown_of_a_model_whose_layers_are_not_counted() -> None:
    assert Progress(tokens=10).axes(tiny_llama(), counts_attention=False)["train/flops"] is None
