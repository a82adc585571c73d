"""The text model of a vision-language model is trained, and every checkpoint is the whole model, the rest bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_worker import Run
from helpers import cpu_runtime, torchrun
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from sftkit.checkpoint.states import check_saved_names
from sftkit.config.schema import AdapterConfig, CheckpointConfig, LossConfig, ModelConfig
from sftkit.errors import CheckpointError, ConfigError
from sftkit.export.export import export
from sftkit.models.files import INDEX_FILE, UNCHANGED, auto_class_in, size_of
from sftkit.models.load import load_model, trained_config
from sftkit.models.towers import Whole, skeleton, whole_of
from sftkit.models.weights import load_model_weights, make_room
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.rundir.names import step_dir
from sftkit.verify.documents import check_documents
from sftkit.verify.round_trip import RoundTrip, open_plainly, row_logits

TEXT = {"vocab_size": 576, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
GEMMA4 = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 8}
LLAMA4 = {"intermediate_size": 64, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"sliding_window": 8}, VISION | {"vision_use_head": False}, {"mm_tokens_per_image": 4}),
    "mistral3": ({"model_type": "mistral"}, VISION | {"model_type": "pixtral", "head_dim": 8}, {}),
    "qwen3_5": (LINEAR | {"layer_types": ["linear_attention", "full_attention"]}, QWEN, {"tie_word_embeddings": True}),
    "qwen3_vl": ({}, QWEN | {"deepstack_visual_indexes": [0]}, {"tie_word_embeddings": True}),
    "gemma4": (GEMMA4, VISION | {"num_key_value_heads": 2, "head_dim": 8}, {}),
    "llama4": ({"intermediate_size_mlp": 32, "num_local_experts": 2, "attention_chunk_size": 64}, VISION | LLAMA4, {}),
}
"By model_type: fields of the text part, of the vision part, and of the whole config."

every_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name != "gemma3")) for name in FAMILIES]
)
IDS = torch.arange(3, 20)[None]


def start(folder: Path, family: str = "gemma3") -> Path:
    """A vision-language model in a folder, with a processor's file and a tensor that its class does not have."""
    torch.manual_seed(0)
    text, vision, more = FAMILIES[family]
    config = AutoConfig.for_model(family, text_config=TEXT | text, vision_config=vision, **more)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    whole.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.weight": torch.ones(3, dtype=torch.bfloat16)}, file, metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    return folder


def text_model(folder: Path, tokenizer: Any, **given: Any) -> PreTrainedModel:
    source = ModelConfig(path=str(folder))
    model = load_model(source, tokenizer, 0, **given)
    if given.get("empty"):
        make_room(model, torch.device("cpu"))
        load_model_weights(model, source)
    return model


def index_text(names: dict[str, str]) -> str:
    weights = {name: f"{file}.safetensors" for name, file in names.items()}
    return json.dumps({"metadata": {}, "weight_map": weights})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def is_text(name: str) -> bool:
    return "language_model" in name or name.startswith("lm_head")


def assert_whole(folder: Path, start: Path, trained: PreTrainedModel) -> None:
    """The folder is the start's model with this text model in it, for plain transformers."""
    held, before = tensors(folder), tensors(start)
    assert held.keys() == before.keys()
    changed = {name for name in held if not torch.equal(held[name], before[name])}
    assert all(held[name].dtype == before[name].dtype for name in held)
    assert all(map(is_text, changed))
    assert all(name in changed or name.endswith(".layer_scalar") for name in held if is_text(name)), (
        "buffers of Gemma 4"
    )
    whole, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(names for key, names in info.items() if key != "unexpected_keys")
    with torch.no_grad():
        # Llama 4's experts are computed by other products here (models/experts.py): the same but for rounding.
        own = trained.eval()(input_ids=IDS).logits
        torch.testing.assert_close(whole.eval()(input_ids=IDS).logits, own, rtol=0.0, atol=1e-6)
    trained.train()
    assert (folder / "preprocessor_config.json").read_bytes() == (start / "preprocessor_config.json").read_bytes()


@every_family
def test_a_checkpoint_is_the_whole_model_with_all_but_the_text_model_bit_for_bit(
    tmp_path: Path, tokenizer: Any, family: str
) -> None:
    folder = start(tmp_path / "start", family)
    model = text_model(folder, tokenizer)
    assert not any("vision" in name for name, _ in model.named_parameters())
    check_saved_names(model)
    packed = ModelWithLoss(text_model(folder, tokenizer), "reference", NextToken(LossConfig()))
    assert check_documents(packed, "reference", torch.device("cpu")).leak == 0
    run = Run(tmp_path / "run", tokenizer, cpu_runtime(), model=model)
    run.steps(0, 2, every=1, wait=True)
    first, second = (step_dir(tmp_path / "run", step) for step in (1, 2))
    assert_whole(second, folder, model)
    assert (first / UNCHANGED).samefile(second / UNCHANGED), "the same bytes on the disk"
    # A run that resumes, and a later stage.
    again = Run(tmp_path / "run", tokenizer, cpu_runtime(), model=text_model(folder, tokenizer))
    again.checkpoints.resume(str(first))
    again.steps(1, 2)
    assert all(torch.equal(a, b) for a, b in zip(again.orig_model.parameters(), model.parameters(), strict=True))
    for empty in (False, True):
        later = text_model(second, tokenizer, empty=empty)
        assert all(torch.equal(a, b) for a, b in zip(later.parameters(), model.parameters(), strict=True))
    more = Run(tmp_path / "later", tokenizer, cpu_runtime(), model=later)
    more.steps(0, 1, every=1, wait=True)
    assert_whole(step_dir(tmp_path / "later", 1), folder, later)


def test_the_run_opens_its_first_checkpoint_as_the_whole_model(tmp_path: Path, tokenizer: Any) -> None:
    model = text_model(start(tmp_path / "start"), tokenizer)
    run = Run(tmp_path / "run", tokenizer, cpu_runtime(), model=model)
    trip = RoundTrip(model, tokenizer, run.rt, trusted=False)
    files = trip.files_check(run.checkpoints.write_files)
    assert files.ok, files.found
    trip.expect(1)
    run.steps(0, 0)
    run.checkpoints.save(1, {"tokens": 1}, wait=True)
    trip.ended_save(1, None, tmp_path / "run")
    (check,) = trip.checks()
    assert check.ok, check.found
    assert "AutoModelForImageTextToText" in check.how
    loaded, others, _ = open_plainly(step_dir(tmp_path / "run", 1), torch.float32)
    assert others == []
    assert torch.equal(row_logits(loaded, [3, 4, 5]), row_logits(model, [3, 4, 5]))


def test_a_resumed_run_keeps_the_other_tensors_of_its_checkpoint_when_the_start_has_changed(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a disk without hard links, after the first checkpoint is gone."""
    folder = start(tmp_path / "start")
    run = Run(tmp_path / "run", tokenizer, cpu_runtime(), model=text_model(folder, tokenizer))
    run.steps(0, 1, every=1, wait=True)
    first, third = (step_dir(tmp_path / "run", step) for step in (1, 3))
    held = tensors(first)
    file = folder / "model.safetensors"
    save_file({n: t if is_text(n) else t + 1 for n, t in load_file(file).items()}, file, {"format": "pt"})
    (folder / "preprocessor_config.json").write_text("{}")
    again = Run(tmp_path / "run", tokenizer, cpu_runtime(), model=text_model(folder, tokenizer))
    again.checkpoints.resume(str(first))
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    again.steps(1, 2, every=1, wait=True)
    shutil.rmtree(first)
    again.steps(2, 3, every=1, wait=True)
    now = tensors(third)
    assert all(torch.equal(now[name], held[name]) for name in held if not is_text(name))
    processor = "preprocessor_config.json"
    assert (third / processor).read_bytes() == b'{"image_mean": [0.5]}'


def test_a_start_needs_room_for_the_other_tensors_once(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a run that has a checkpoint, whose file later ones share."""
    model = text_model(start(tmp_path / "start"), tokenizer)
    run = Run(tmp_path / "run", tokenizer, cpu_runtime(), model=model, config=CheckpointConfig(every=1, keep=2))
    other = whole_of(model).unchanged_bytes  # type: ignore[union-attr]
    assert other > 10_000
    monkeypatch.setattr("sftkit.checkpoint.checkpoint.free_bytes", lambda _: 3 * 10**6 + other - 1)
    with pytest.raises(ConfigError, match=r"1\.0 MB each, at most 3 at a time, and .* MB once for the tensors outside"):
        run.checkpoints.check_space(10**6)
    monkeypatch.setattr("sftkit.checkpoint.checkpoint.free_bytes", lambda _: 3 * 10**6 + other)
    run.checkpoints.check_space(10**6)
    run.steps(0, 1, every=1, wait=True)
    monkeypatch.setattr("sftkit.checkpoint.checkpoint.free_bytes", lambda _: 2 * 10**6)
    run.checkpoints.check_space(10**6)


def test_a_model_on_the_meta_device_draws_no_random_numbers() -> None:
    text, vision, more = FAMILIES["qwen3_5"]
    config = AutoConfig.for_model("qwen3_5", text_config=TEXT | text, vision_config=vision, **more)
    before = torch.get_rng_state()
    skeleton(config)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_an_export_is_the_whole_model(tmp_path: Path, tokenizer: Any) -> None:
    folder = start(tmp_path / "start")
    tokenizer.save_pretrained(folder)
    lines = export(str(folder), tmp_path / "out", max_shard="20KB")
    assert "Gemma3ForConditionalGeneration of transformers: 8 of 8" in "\n".join(lines)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 2
    assert auto_class_in(tmp_path / "out") == "AutoModelForImageTextToText"
    held, before = tensors(tmp_path / "out"), tensors(folder)
    assert all(torch.equal(held[name], before[name]) for name in before)


def test_a_start_without_its_vision_tower_is_rejected_before_training(tmp_path: Path, tokenizer: Any) -> None:
    folder = start(tmp_path / "start")
    weights = load_file(folder / "model.safetensors")
    vision = {name: tensor for name, tensor in weights.items() if not is_text(name)}
    save_file({name: weights[name] for name in weights.keys() - vision.keys()}, folder / "a.safetensors")
    save_file(vision, folder / "b.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: "b" if name in vision else "a" for name in weights}
    (folder / INDEX_FILE).write_text(index_text(names))
    model = text_model(folder, tokenizer)
    check_saved_names(model)
    shutil.copyfile(folder / "b.safetensors", tmp_path / "kept")
    # Cut off; not there; of another file.
    (folder / "b.safetensors").write_bytes((tmp_path / "kept").read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"b\.safetensors: cannot read weights"):
        text_model(folder, tokenizer)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors: missing"):
        text_model(folder, tokenizer)
    lost = "vision_tower.post_layernorm.weight"
    save_file({name: tensor for name, tensor in vision.items() if name != lost}, folder / "b.safetensors")
    del names[lost]
    (folder / INDEX_FILE).write_text(index_text(names))
    with pytest.raises(
        ConfigError, match=r"as Gemma3ForConditionalGeneration.*lack model\.vision_tower\.post_layernorm"
    ):
        check_saved_names(text_model(folder, tokenizer))
    # Changed between the start and the first checkpoint.
    run = Run(tmp_path / "run", tokenizer, cpu_runtime(), model=model)
    with pytest.raises(CheckpointError, match="has changed since the model was loaded"):
        run.checkpoints.save(1, {}, wait=True)


def test_only_the_text_model_counts_for_memory_and_names(tmp_path: Path, tokenizer: Any) -> None:
    folder = start(tmp_path / "start")
    model = text_model(folder, tokenizer)
    size = size_of(ModelConfig(path=str(folder)), freeze=["model.layers.0.*"])
    assert size is not None
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.frozen == sum(p.numel() for p in model.model.layers[0].parameters())
    whole = whole_of(model)
    assert whole is not None
    assert "mtp.weight" in whole.unchanged


def test_a_tensor_that_is_dropped_with_the_text_model_is_named(tmp_path: Path, tokenizer: Any, caplog: Any) -> None:
    file = start(tmp_path) / "model.safetensors"
    held = load_file(file)
    prefix = next(name for name in held if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    save_file(held | {f"{prefix}layers.7.more": torch.ones(1)}, file, {"format": "pt"})
    text_model(tmp_path, tokenizer)
    (warning,) = [record.message for record in caplog.records if "neither trained nor saved" in record.message]
    assert "model.layers.7.more" in warning
    assert "vision" not in warning
    assert "mtp" not in warning


@pytest.mark.parametrize("family", ["gemma3", pytest.param("mistral3", marks=pytest.mark.slow)])
def test_an_adapter_has_the_names_of_the_whole_model_and_can_be_merged_into_it(
    tmp_path: Path, tokenizer: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = start(tmp_path / "start", family)
    tokenizer.save_pretrained(folder)
    model = text_model(folder, tokenizer, adapter=AdapterConfig(rank=2, alpha=8))
    run = Run(tmp_path / "run", tokenizer, cpu_runtime(), model=model)
    with monkeypatch.context() as patched:
        patched.setattr(Whole, "unchanged_bytes", 10**18)  # which an adapter needs no space for
        run.steps(0, 2, every=2, wait=True)
    saved = step_dir(tmp_path / "run", 2)
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in tensors(saved))
    again = Run(
        tmp_path / "run",
        tokenizer,
        cpu_runtime(),
        model=text_model(folder, tokenizer, adapter=AdapterConfig(rank=2, alpha=8)),
    )
    again.checkpoints.resume(str(saved))
    files = RoundTrip(model, tokenizer, run.rt, trusted=False).files_check(run.checkpoints.write_files)
    assert files.ok, files.found
    for one, other in zip(again.orig_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    own = row_logits(model, [3, 4, 5])
    for peft in (True, False):
        loaded, others, how = open_plainly(saved, torch.float32, peft=peft)
        assert others == []
        assert ("PeftModel" in how) is peft
        torch.testing.assert_close(row_logits(loaded, [3, 4, 5]), own, rtol=1e-4, atol=1e-5)
    merged = text_model(saved, tokenizer)
    later = Run(tmp_path / "later", tokenizer, cpu_runtime(), model=merged)
    later.checkpoints.save(1, {"tokens": 1}, wait=True)
    whole = AutoModelForImageTextToText.from_pretrained(step_dir(tmp_path / "later", 1))
    with torch.no_grad():
        torch.testing.assert_close(
            whole.eval()(input_ids=IDS).logits[0, 2], row_logits(model, IDS[0].tolist())[2], rtol=1e-4, atol=1e-5
        )
    held, before = tensors(step_dir(tmp_path / "later", 1)), tensors(folder)
    assert {n for n in held if not torch.equal(held[n], before[n])} == {
        n for n in held if n.endswith("proj.weight") and is_text(n) and "layers" in n
    }


def test_a_model_that_reads_pictures_and_has_no_text_model_alone_is_rejected_by_name() -> None:
    with pytest.raises(
        ConfigError, match="qwen3_vl_moe also reads pictures, and transformers cannot load its text model"
    ):
        trained_config(AutoConfig.for_model("qwen3_vl_moe"))


def test_a_sharded_text_model_is_written_by_its_ranks_into_the_whole_model(tmp_path: Path, tokenizer: Any) -> None:
    folder = start(tmp_path / "start")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = Run(tmp_path / "run", tokenizer, cpu_runtime(), model=text_model(folder, tokenizer), shard=True)
        run.steps(0, 1, every=1, wait=True)
    finally:
        dist.destroy_process_group()
    own = text_model(step_dir(tmp_path / "run", 1), tokenizer)
    assert_whole(step_dir(tmp_path / "run", 1), folder, own)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_two_ranks_write_into_the_whole_model_what_one_writes(tmp_path: Path, tokenizer: Any, family: str) -> None:
    folder = start(tmp_path / "start", family)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    torchrun(2, "checkpoint_worker.py", str(tmp_path))
    one = Run(tmp_path / "one", tokenizer, cpu_runtime(), model=text_model(folder, tokenizer))
    one.steps(0, 2, every=1, wait=True)
    wanted = tensors(step_dir(tmp_path / "one", 2))
    for name in ("two", "again"):
        step = step_dir(tmp_path / name, 2)
        assert_whole(step, folder, text_model(step, tokenizer))
        for key, tensor in tensors(step).items():
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-4, atol=1e-4)
    assert tensors(step_dir(tmp_path / "two", 2)).keys() == wanted.keys()
    first, again = (tensors(step_dir(tmp_path / name, 2)) for name in ("two", "again"))
    assert all(torch.equal(tensor, again[key]) for key, tensor in first.items())
