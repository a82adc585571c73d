"""Checkpoints of several ranks: bitwise in the same layout, to 1e-6 across world sizes and layouts, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_worker import Run
from helpers import cpu_runtime, torchrun
from transformers import AutoModelForCausalLM

from sftkit.checkpoint.states import plan_files
from sftkit.rundir.files import verify
from sftkit.rundir.names import step_dirs


@pytest.mark.slow
def test_two_ranks_save_and_resume_their_own_each_others_and_one_processs_checkpoints(
    tmp_path: Path, tokenizer, capsys
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rt = cpu_runtime()
    one = Run(tmp_path / "one", tokenizer, rt)
    one.steps(0, 3, every=3)
    expected = one.steps(3, 6)
    one.checkpoints.finish()

    torchrun(2, "checkpoint_worker.py", str(tmp_path), str(tmp_path / "one" / "step-000003"))

    first, second = json.loads((tmp_path / "out.json").read_text())
    assert first == second
    assert first["dropout"] == first["dropout resumed"]
    assert first["fsdp"] == first["fsdp resumed"]
    for name in ("one to ddp", "plain", "ddp to fsdp", "fsdp", "fsdp to ddp"):
        assert first[name] == pytest.approx(expected, rel=1e-6), name
    for name in ("plain", "fsdp"):
        alone = Run(tmp_path / "alone", tokenizer, rt)
        alone.checkpoints.resume(str(tmp_path / name / "step-000003"))
        assert alone.steps(3, 6) == pytest.approx(expected, rel=1e-6), name
    assert "random states derived from seed, step and rank" in capsys.readouterr().out

    assert "rank 1: no space left" in first["failed"]
    assert [folder.name for folder in step_dirs(tmp_path / "failing")] == ["step-000001"]
    assert not list((tmp_path / "failing").glob(".step*"))
    assert all(verify(folder) is None for folder in tmp_path.glob("*/step-*"))
    assert len(list((tmp_path / "fsdp" / "step-000003").glob("model-*.safetensors"))) > 1
    for kind in ("tied", "experts"):  # experts are stored in another form than they are trained in
        back = AutoModelForCausalLM.from_pretrained(tmp_path / kind / "step-000001").state_dict()
        expected_weights = torch.load(tmp_path / f"{kind}.pt")
        assert back.keys() == expected_weights.keys()
        assert all(torch.equal(back[name], value) for name, value in expected_weights.items()), kind
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "step-000003") for name in ("fsdp", "plain")]
    for a, b in zip(loaded[0].parameters(), loaded[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_weights_are_spread_over_files_in_order_none_larger_than_the_limit_but_for_a_single_tensor() -> None:
    assert plan_files({"a": 5, "b": 5}, 10) == {"model.safetensors": ["a", "b"]}
    assert plan_files({"a": 5, "b": 6, "c": 20, "d": 1}, 10) == {
        "model-00001-of-00004.safetensors": ["a"],
        "model-00002-of-00004.safetensors": ["b"],
        "model-00003-of-00004.safetensors": ["c"],
        "model-00004-of-00004.safetensors": ["d"],
    }
