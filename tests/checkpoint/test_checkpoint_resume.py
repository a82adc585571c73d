"""What a checkpoint is resumed with: the same model, tokenizer, data, optimizer and recipe, or the changes that are named."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_worker import Run, experts, tied
from helpers import cpu_runtime, tiny_llama
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from sftkit.checkpoint import states
from sftkit.checkpoint.states import load_states, save_states, snapshot_states
from sftkit.errors import CheckpointError, ConfigError
from sftkit.models.trained import freeze
from sftkit.optim.protocol import named_states
from sftkit.rundir.changes import compare_recipes, rejection
from sftkit.rundir.names import step_dir

RECIPE = "run: {seed: 0}\noptim: {name: adamw, lr: 1e-4}\ntrain: {max_steps: 10, epochs: null, micro_batch_size: 4}\n"
IDENTITY = {"model": {"hidden_size": 32, "layers": [1, 2]}, "tokenizer": "a" * 64, "data": {"train": "x"}}


def save(folder: Path, tokenizer) -> None:
    Run(folder, tokenizer, cpu_runtime(), recipe=RECIPE, identity=IDENTITY).steps(0, 1, every=1, wait=True)


def check_recipe(there: str, here: str, allowed: tuple[str, ...]) -> list[str]:
    rejected, lines = compare_recipes(there, here, allowed)
    if error := rejection("here", rejected, allowed):
        raise error
    return lines


def test_another_identity_is_refused_with_a_line_for_each_key_that_differs(tmp_path: Path, tokenizer) -> None:
    save(tmp_path, tokenizer)
    other = {**IDENTITY, "model": {"hidden_size": 64, "layers": [1, 2]}, "tokenizer": "b" * 64, "template": "new"}
    with pytest.raises(ConfigError) as refused:
        Run(tmp_path, tokenizer, cpu_runtime(), recipe=RECIPE, identity=other).checkpoints.resume("auto")
    lines = str(refused.value).splitlines()
    assert "  model.hidden_size: 32 in the checkpoint, 64 in this run" in lines
    assert '  template: (none) in the checkpoint, "new" in this run' in lines
    assert any(line.startswith('  tokenizer: "aaaa') and "..." in line for line in lines)
    assert not any("data" in line.split(":")[0] or "layers" in line for line in lines[1:-1])
    same = json.loads(json.dumps(IDENTITY))
    assert Run(tmp_path, tokenizer, cpu_runtime(), recipe=RECIPE, identity=same).checkpoints.resume("auto")["step"] == 1


def test_entries_of_adapters_that_differ_are_named_and_no_setting_allows_them() -> None:
    def of(entries: str) -> str:
        return f"{RECIPE}adapters: {entries}\n"

    with pytest.raises(ConfigError) as told:
        check_recipe(of("[{name: a, lr: 1.0}, {name: b, lr: 2.0}]"), of("[{name: a, lr: 3.0}]"), ())
    assert "adapters.0.lr: 1.0 in the checkpoint, 3.0 in this run" in str(told.value)
    assert 'adapters.1.name: "b" in the checkpoint, (none) in this run' in str(told.value)
    assert "resume_changes" not in str(told.value)
    assert check_recipe(of("[{name: a}]"), of("[{name: a}]"), ()) == []


def test_all_differences_of_a_checkpoint_stand_in_one_error(tmp_path: Path, tokenizer) -> None:
    save(tmp_path, tokenizer)
    other = {**IDENTITY, "tokenizer": "b" * 64}
    run = Run(tmp_path, tokenizer, cpu_runtime(), recipe=RECIPE.replace("1e-4", "5e-5"), identity=other)
    run.checkpoints.optimizer = SimpleNamespace(kind="Muon float32")  # type: ignore[assignment]
    with pytest.raises(ConfigError) as refused:
        run.checkpoints.resume("auto")
    text = str(refused.value)
    for words in (
        "optim.lr: 0.0001 in",
        "resume_changes=[optim.lr]",
        "  tokenizer: ",
        "AdamW float32 in the checkpoint",
    ):
        assert words in text
    assert text.endswith("or start a new run from its weights with model.path")


def test_a_changed_setting_that_a_run_keeps_is_refused_unless_it_is_named(tmp_path: Path, tokenizer, capsys) -> None:
    save(tmp_path, tokenizer)
    changed = RECIPE.replace("1e-4", "5e-5").replace("seed: 0", "seed: 7")
    run = Run(tmp_path, tokenizer, cpu_runtime(), recipe=changed, identity=IDENTITY)
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.0001 in the checkpoint, 5e-05 in this run") as refused:
        run.checkpoints.resume("auto", ("run.seed",))
    assert "run.seed:" not in str(refused.value)
    assert "train.resume_changes=[run.seed,optim.lr]" in str(refused.value)
    run.checkpoints.resume("auto", ("run.seed", "optim.lr"))
    assert "optim.lr is now 5e-05 (was 0.0001)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"optim\.lrr is not a key of a recipe. Did you mean optim\.lr\?"):
        run.checkpoints.resume("auto", ("optim.lrr",))


def test_other_frozen_weights_are_refused_unless_named_and_then_what_is_newly_trained_starts_without_states(
    tmp_path: Path, tokenizer, capsys
) -> None:
    def run(*patterns: str) -> Run:
        model = tiny_llama()
        freeze(model, patterns)
        recipe = RECIPE.replace("max_steps: 10", f"max_steps: 10, freeze: {json.dumps(patterns)}")
        return Run(tmp_path, tokenizer, cpu_runtime(), model=model, recipe=recipe)

    first = run("model.embed_tokens.*", "model.layers.0.*")
    first.steps(0, 3, every=3, wait=True)
    other = run("model.embed_tokens.*", "lm_head.*")
    with pytest.raises(
        ConfigError, match=r'train\.freeze: \["model\.embed_tokens\.\*", "mode.* in the checkpoint'
    ) as refused:
        other.checkpoints.resume("auto")
    assert "train.resume_changes=[train.freeze]" in str(refused.value)
    other.checkpoints.resume("auto", ("train.freeze",))
    assert "newly trained weights start without optimizer states" in capsys.readouterr().out
    then, now = (named_states(one.optimizer, one.orig_model) for one in (first, other))
    new = {name for name in now if ".model.layers.0." in name}
    assert not any(now[name].any() for name in new)
    assert now.keys() - new == then.keys() - {f"{key}.lm_head.weight" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert all(torch.equal(now[name], then[name]) for name in now.keys() - new)
    other.steps(3, 5)


@pytest.mark.parametrize(("before", "after"), [("null", "{'a.*': 0.1}"), ("{'a.*': 0.1}", "{'a.*': 0.1, 'b.*': 2.0}")])
def test_other_factors_of_the_learning_rate_are_refused_unless_named(before: str, after: str) -> None:
    there, here = (f"optim: {{lr: 1.0e-4, lr_scale: {scales}}}\n" for scales in (before, after))
    with pytest.raises(ConfigError, match=r"train.resume_changes=\[optim\.lr_scale\]"):
        check_recipe(there, here, ())
    (line,) = check_recipe(there, here, ("optim.lr_scale",))
    assert line.startswith('optim.lr_scale is now [["a.*", 0.1]')
    assert check_recipe(there, there, ()) == []


@pytest.mark.parametrize("change", ["lr_ratio_b: 16.0", "dropout: 0.1"])
def test_other_settings_of_adapters_that_change_what_is_learned_are_refused_unless_named(change: str) -> None:
    there = "adapter: {rank: 4, lr_ratio_b: 1.0, dropout: 0.0}\n" + RECIPE
    key = change.partition(":")[0]
    here = re.sub(rf"{key}: [\d.]+", change, there, count=1)
    with pytest.raises(ConfigError, match=rf"train.resume_changes=\[adapter\.{key}\]"):
        check_recipe(there, here, ())
    (line,) = check_recipe(there, here, (f"adapter.{key}",))
    assert line.startswith(f"adapter.{key} is now")


def test_another_model_path_of_the_same_shape_is_refused_unless_it_is_named() -> None:
    there, here = (
        "model: {path: runs/a/base, revision: null}\n" + RECIPE,
        "model: {path: org/b, revision: null}\n" + RECIPE,
    )
    with pytest.raises(
        ConfigError, match=r'model\.path: "runs/a/base" in the checkpoint, "org/b" in this run'
    ) as refused:
        check_recipe(there, here, ())
    effect = "its weights are not loaded: the checkpoint's are, except the frozen ones under an adapter"
    assert f"(model.path: {effect})" in str(refused.value)
    (line,) = check_recipe(there, here, ("model.path",))
    assert line.startswith('model.path is now "org/b" (was "runs/a/base"): its weights are not loaded')


def test_a_run_may_grow_and_the_rest_of_its_recipe_may_change() -> None:
    longer = RECIPE.replace("max_steps: 10", "max_steps: 20").replace("micro_batch_size: 4", "micro_batch_size: 1")
    (line,) = check_recipe(RECIPE, longer, ())
    assert line.startswith("train.max_steps is now 20 (was 10)")
    assert check_recipe(RECIPE, RECIPE.replace("adamw,", "muon,"), ()) == []  # compared by its states


@pytest.mark.parametrize("make", [tied, experts])
def test_tied_weights_and_experts_come_back_and_load_in_plain_transformers(tmp_path: Path, tokenizer, make) -> None:
    torch.manual_seed(1)
    run = Run(tmp_path, tokenizer, cpu_runtime(), model=make())
    run.steps(0, 2, every=2, wait=True)
    folder = tmp_path / "step-000002"
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in run.orig_model.state_dict().items():
        assert torch.equal(value, loaded[name]), name
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "lm_head.weight" not in names if make is tied else "model.layers.0.mlp.experts.3.up_proj.weight" in names
    torch.manual_seed(2)
    again = Run(tmp_path, tokenizer, cpu_runtime(), model=make())
    again.checkpoints.resume("auto")
    assert again.steps(2, 4) == run.steps(2, 4)


def test_large_models_are_split_into_files_with_an_index(tmp_path: Path, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(states, "MAX_FILE_BYTES", 40_000)
    run = Run(tmp_path, tokenizer, cpu_runtime())
    run.steps(0, 1, every=1, wait=True)
    folder = tmp_path / "step-000001"
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in run.orig_model.state_dict().items())


def test_states_of_other_names_shapes_or_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    saved = {"exp_avg.a": torch.arange(6.0).view(2, 3), "step.a": torch.tensor(4), "empty": torch.zeros(0, 3)}
    save_states(snapshot_states(saved, 0, 1), tmp_path, None, 0)
    back = {name: torch.zeros_like(value) for name, value in saved.items()}
    load_states(back, tmp_path)
    assert all(torch.equal(back[name], saved[name]) for name in saved)
    for wrong, words in (
        ({"exp_avg.b": torch.zeros(2)}, "exp_avg.b is not in the checkpoint"),
        ({"exp_avg.a": torch.zeros(2, 3, dtype=torch.bfloat16)}, r"float32 \[2, 3\] in the checkpoint, torch.bfloat16"),
        ({"exp_avg.a": torch.zeros(3, 2)}, r"\[3, 2\] in this run"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_states({**back, **wrong}, tmp_path)
    with pytest.raises(ConfigError, match="empty is only in the checkpoint"):
        load_states({name: back[name] for name in ("exp_avg.a", "step.a")}, tmp_path)


def test_auto_is_refused_with_a_list_where_checkpoints_are_there_and_none_verifies(tmp_path: Path, tokenizer) -> None:
    trained = Run(tmp_path, tokenizer, cpu_runtime())
    trained.steps(0, 2, every=1)
    trained.checkpoints.finish()
    for step in (1, 2):
        flip_last_byte(step_dir(tmp_path, step) / "model.safetensors")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        ConfigError, match=r"(?s)no checkpoint in .* verifies:.*step-000002/.*sha256.*step-000001/.*sha256"
    ):
        Run(tmp_path, tokenizer, cpu_runtime()).checkpoints.resume("auto")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert Run(tmp_path / "new", tokenizer, cpu_runtime()).checkpoints.resume("auto") == {"step": 0}


@pytest.mark.parametrize("unreadable", ["manifest.json", "model.safetensors", ""])
def test_a_disk_that_cannot_be_read_is_not_taken_for_one_without_checkpoints(
    tmp_path: Path, tokenizer, monkeypatch, unreadable: str
) -> None:
    trained = Run(tmp_path, tokenizer, cpu_runtime())
    trained.steps(0, 2, every=1)
    trained.checkpoints.finish()
    broken = step_dir(tmp_path, 2) / unreadable if unreadable else tmp_path
    monkeypatch.setattr(Path, "open", failing_at(broken, Path.open))
    monkeypatch.setattr(os, "listdir", failing_at(broken, os.listdir))
    monkeypatch.setattr(os, "scandir", failing_at(broken, os.scandir))
    with pytest.raises(CheckpointError, match=r"cannot be read \(\[Errno 5\].*Nothing was changed"):
        Run(tmp_path, tokenizer, cpu_runtime()).checkpoints.resume("auto")
    monkeypatch.undo()
    assert list(tmp_path.glob("*.old-*")) == []


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def failing_at(broken: Path, original: Any) -> Any:
    """A function of a path that fails as on a disk with a bad block."""

    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path) == broken:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return original(path, *args, **kwargs)

    return read
