"""A run is resumed with another micro-batch as if nothing had changed, and with another global batch without losing its place."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cpu_runtime
from resume_worker import LENGTHS, SAVE_EVERY, STEPS, run
from safetensors.torch import load_file

from sftkit.errors import ConfigError
from sftkit.rundir.names import step_dir, step_dirs

MICRO_BATCH_TOLERANCE = 1e-6
"Relative: sums of fp32 in another order, over the nine steps after the resume. Measured: at most 1.5e-7."


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def cut_after(whole: Path, step: int, name: str) -> Path:
    """A copy of a run as if it had been killed after a checkpoint."""
    copy = Path(shutil.copytree(whole, whole.with_name(name)))
    for folder in step_dirs(copy):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    return copy


def start(folder: Path, tokenizer: Any, **settings: Any) -> dict[int, Any]:
    return run(folder, tokenizer, cpu_runtime(), log_every=1, broken_at=None, **settings)


@pytest.mark.parametrize(
    "layout", ["packed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bucketed", "fixed"))]
)
def test_a_smaller_micro_batch_takes_the_same_documents_and_learns_the_same(
    tmp_path: Path, tokenizer, layout: str
) -> None:
    taken = start(tmp_path / "whole", tokenizer, layout=layout, batch=8, micro=8)
    cut = cut_after(tmp_path / "whole", SAVE_EVERY, "cut")
    now = start(cut, tokenizer, resume="auto", layout=layout, batch=8, micro=2)
    assert list(now) == list(range(SAVE_EVERY + 1, STEPS + 1))
    for step, of_step in now.items():
        assert len(of_step.micro_batches) == 4 * len(taken[step].micro_batches)
        assert (of_step.documents, of_step.divisor) == (taken[step].documents, taken[step].divisor)
    assert losses(cut) == pytest.approx(losses(tmp_path / "whole"), rel=MICRO_BATCH_TOLERANCE)
    there, here = (load_file(step_dir(f, STEPS) / "model.safetensors") for f in (tmp_path / "whole", cut))
    for name, weight in there.items():
        torch.testing.assert_close(here[name], weight, rtol=0, atol=MICRO_BATCH_TOLERANCE)


def test_another_global_batch_is_refused_until_it_is_named_and_then_keeps_the_place_in_the_data(
    tmp_path: Path, tokenizer, capsys
) -> None:
    taken = start(tmp_path / "whole", tokenizer, layout="fixed", batch=8)
    cut = cut_after(tmp_path / "whole", SAVE_EVERY, "cut")
    with pytest.raises(ConfigError) as refused:
        start(cut, tokenizer, resume="auto", layout="fixed", batch=4)
    text = str(refused.value)
    assert "  train.global_batch_size: 8 in the checkpoint, 4 in this run\n" in text
    assert "the remaining documents of this epoch make batches of that size" in text
    assert text.endswith("or allow the change with train.resume_changes=[train.global_batch_size]")
    now = start(cut, tokenizer, resume="auto", layout="fixed", batch=4, changes=("train.global_batch_size",))
    assert "train.global_batch_size is now 4 (was 8): the remaining documents" in capsys.readouterr().out
    before = [i for step in range(1, SAVE_EVERY + 1) for i in taken[step].documents]
    assert len(before) == 8 * SAVE_EVERY
    after = [i for of_step in now.values() if of_step.epoch == 0 for i in of_step.documents]
    assert Counter(before + after) == Counter(range(len(LENGTHS)))
    # Stopped between, it goes on with what it has become, and with nothing to name.
    again = cut_after(cut, 2 * SAVE_EVERY, "again")
    later = start(again, tokenizer, resume="auto", layout="fixed", batch=4)
    assert {step: of_step.documents for step, of_step in later.items()} == {
        step: now[step].documents for step in range(2 * SAVE_EVERY + 1, STEPS + 1)
    }
    assert losses(again) == losses(cut)
