"""What a recipe starts from is looked for before torch: whatever is missing stands in one report with whatever is wrong."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from sftkit.config.commands import program_path
from sftkit.config.load import read_config, to_yaml
from sftkit.config.tables import EVAL_TASKS, METRICS_IN_CHAT, TASK_METRICS
from sftkit.data.demo.builtin import FAMILIES
from sftkit.data.reading import readers
from sftkit.errors import ConfigError
from sftkit.launch.chain import read_stages
from sftkit.models.adapter_files import base_digest
from sftkit.models.files import find_with_base, not_causal
from sftkit.preflight import inputs
from sftkit.preflight.inputs import FIRST_ROWS, checks_of_stage, input_rules
from sftkit.runtime import hub

ROOT = Path(__file__).parents[2]
HUB_ANSWERS = hub.hub_answers.__wrapped__
CHAT = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]}
TEXT = {"text": "some words"}
BEST_OF = (
    *("data.val=[{path: chats.jsonl}]", "eval.tasks=[families, arc_easy]", "eval.format=chat"),
    *("eval.every=1", "checkpoint.every=1"),
)
RECIPE = """
run: {dir: runs/mine}
model: {scratch: {model_type: llama}, tokenizer: words}
data: {train: [{path: chats.jsonl}], max_length: 64}
train: {max_steps: 1}
"""


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        {"model_type": "llama4", "text_config": {"attention_chunk_size": 8192}},
        {"model_type": "falcon_h1", "mamba_d_conv": 4},
        {"model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_value_heads": 32},
        {"model_type": "nemotron_h", "ssm_state_size": 128},
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        {"model_type": "marian", "is_encoder_decoder": True},
    ],
)
def test_a_model_that_cannot_see_trees_is_found_before_torch(here: Path, fields: dict[str, object]) -> None:
    def with_fields(fields: dict[str, object]) -> list[str]:
        return problems(f"model.scratch={json.dumps(fields)}", "data.layout=tree")

    (told,) = with_fields(fields)
    assert told.startswith("data.layout: tree does not go with ")
    words = [f"model.scratch={json.dumps(fields)}", "data.layout=tree"]
    with pytest.raises(ConfigError, match="tree does not go with"):  # inspect asks too
        read_config("recipe.yaml", words, 1, checks_of_stage("sft"))
    assert with_fields({"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]}) == []
    # Granite 4 without recurrent layers, whose files have their sizes all the same.
    alone = {"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"], "mamba_d_conv": 4}
    assert with_fields(alone) == []


def test_a_pattern_of_frozen_weights_that_no_name_in_the_files_has_is_found_before_torch(here: Path) -> None:
    names = [*(f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)), "model.embed_tokens.weight"]
    folder = model(here / "start")
    tensors(folder / "model.safetensors", {name: [1] for name in names})
    (folder / "config.json").write_text('{"model_type": "qwen3", "tie_word_embeddings": true}')
    start = ("model.scratch=null", "model.path=start")
    assert problems(*start, "train.freeze=[lm_head.*,'model.layers.[01].*']") == []
    (told,) = problems(*start, "train.freeze=['model.layers.[23].*']")
    assert told.startswith(
        'train.freeze: "model.layers.[23].*" matches no parameter of the model: did you mean "model.l'
    )
    (told,) = problems(*start, "train.freeze=[model.layer.*,lm_head.*]")
    assert told.startswith('train.freeze: "model.layer.*" matches no parameter')
    (told,) = problems(*start, "train.freeze=[model.*,lm_head.*]")
    assert told.startswith("train.freeze: freezes every parameter")
    assert problems(*start, "optim.lr_scale={lm_head.*: 2.0, 'model.layers.[01].*': 0.5}") == []
    (told,) = problems(*start, "optim.lr_scale={model.embed_tokens: 0.1}")
    assert told.endswith(
        '"model.embed_tokens" matches no trained parameter of the model: did you mean "model.embed_tokens.*"?'
    )
    (told,) = problems(*start, "optim.lr_scale={'*.up_proj.*': 0.1}", "train.freeze=['model.layers.*']")
    assert told.startswith('optim.lr_scale: "*.up_proj.*" matches no trained parameter')


def test_a_script_rejects_the_recipe_of_another_stage(here: Path) -> None:
    assert problems("run.stage=sft") == problems() == []
    assert problems("run.stage=mid") == [
        "run.stage: mid is trained by mid_train.py, not chat_sft.py: start that, or set run.stage=sft"
    ]


def test_targets_and_rank_are_compared_with_the_files_before_torch(here: Path) -> None:
    shapes = {f"model.layers.0.{name}.weight": [8, 4] for name in ("self_attn.q_proj", "mlp.up_proj")}
    shapes |= {"model.norm.weight": [4], "lm_head.weight": [16, 4], "model.layers.0.input_layernorm.weight": [4]}
    folder = model(here / "start")
    tensors(folder / "model.safetensors", shapes)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    start = ("model.scratch=null", "model.path=start")
    assert problems(*start, "adapter.rank=4", "adapter.targets=[attention,up_proj]") == []
    (told,) = problems(*start, "adapter.rank=5")
    assert told.startswith("adapter.rank: model.layers.0.self_attn.q_proj has 4 inputs and 8 outputs")
    (told,) = problems(*start, "adapter.rank=4", "adapter.targets=[q_prj]")
    assert 'adapter.targets: q_prj is no linear layer in the blocks of the model. Did you mean "q_proj"?' in told
    (told,) = problems(*start, "adapter.rank=4", "adapter.targets=lm_head")
    assert "lm_head is the head, which gets no adapter" in told
    (told,) = problems(*start, "adapter.rank=4", "adapter.targets=[]")
    assert told.startswith("adapter.targets: is empty")
    # Several: each rank, the shared one if an adapter has it; a template that adds tokens; a mixture.
    assert problems(*start, "adapter={}", "adapters=[{name: a, rank: 4}, {name: b, rank: 2}]") == []
    (told,) = problems(*start, "adapter={}", "adapters=[{name: a, rank: 4}, {name: b}]")
    assert told.startswith("adapter.rank: model.layers.0.self_attn.q_proj has 4 inputs")
    (told,) = problems(*start, "adapter.rank=2", "adapters=[{name: a}, {name: b, rank: 5}]")
    assert told.startswith("adapters.1.rank: model.layers.0.self_attn.q_proj has 4 inputs and 8 outputs")
    assert "set adapters.1.rank=4 or less" in told
    several = ("adapter.rank=2", "adapters=[{name: a}]")
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|im_start|>"}]}')
    assert problems(*start, *several) == []
    (told,) = problems(*start, *several, "model.chat_template=chatml")
    assert told.startswith("adapters: train no added tokens yet, and model.chat_template=chatml adds <|im_end|>: use a")
    (folder / "tokenizer.json").write_text('["<|im_start|>", "<|im_end|>"]')
    assert problems(*start, *several, "model.chat_template=chatml") == []
    shapes["model.layers.0.mlp.experts.0.down_proj.weight"] = shapes.pop("model.layers.0.mlp.up_proj.weight")
    tensors(folder / "model.safetensors", shapes)
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (told,) = problems(*start, *several)
    assert told.startswith("adapters: do not go with a mixture of experts yet")
    (told,) = problems(*start, "adapter.rank=4", "adapter.dropout=0.1")
    assert told.startswith("adapter.targets: model.layers.0.mlp.experts has an adapter only without adapter.dropout")
    assert problems(*start, "adapter.rank=4", "adapter.dropout=0.1", "adapter.experts=false") == []
    (told,) = problems(*start, "adapter.rank=4", "train.freeze=['*']")
    assert told.startswith("train.freeze: does not go with adapter")
    (told,) = problems("adapter={}")
    assert "adapter: does not go with model.scratch" in told
    (folder / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    assert problems(*start, "adapter={}") == [f"adapter: {not_causal('t5', 'an adapter')}"]


START = ("model.scratch=null", "model.path=adapter")
CONTINUED = (*START, "adapter.rank=2", "adapter.alpha=4")
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
FACTORS = {
    f"base_model.model.{name}.lora_{one}.weight": shape
    for name in LAYERS
    for one, shape in (("A", [2, 4]), ("B", [8, 2]))
}
A_OF_Q = next(iter(FACTORS))


def start_adapter(here: Path, factors: dict[str, list[int]] = FACTORS, dtype: str = "BF16", **settings: object) -> Path:
    """An adapter of rank 2 and the model that it belongs to, by their headers; return the model's folder."""
    folder = model(here / "start")
    tensors(folder / "model.safetensors", {f"{name}.weight": [8, 4] for name in LAYERS})
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (here / "adapter").mkdir()
    tensors(here / "adapter" / "adapter_model.safetensors", factors, dtype)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(folder)}
    (here / "adapter" / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


def test_settings_of_an_adapter_that_is_continued_are_compared_with_its_files_before_torch(here: Path) -> None:
    folder = start_adapter(here)
    assert problems(*CONTINUED) == problems(*START) == []
    (told,) = problems(*CONTINUED, "adapters=[{name: a}]")
    assert told.startswith(f"adapters: continue no adapter yet, and adapter holds one: set model.path={folder}, its")
    (told,) = problems(*START, "adapter.rank=4", "adapter.alpha=4")
    assert told.startswith("adapter holds an adapter (lora) ")
    assert "of rank 2 with the scale 2, and the recipe asks for lora of rank 4 with 1: set adapter.method=lora" in told
    (told,) = problems(*CONTINUED, "adapter.targets=attention")
    assert told.startswith("adapter.targets: model.layers.0.mlp.up_proj is only in the files of ")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"factors": {}}, "it holds no adapter"),
        ({"factors": FACTORS | {A_OF_Q: [3, 4]}}, "q_proj.lora_A.weight has shape [3, 4], and rank 2 on "),
        ({"factors": FACTORS | {A_OF_Q: [2, 5]}}, "needs [2, 4]: take both files of the adapter from one place"),
        ({"factors": FACTORS | {A_OF_Q: []}}, "q_proj.lora_A.weight has shape [], and rank 2 on "),
        ({"r": 4, "lora_alpha": 8}, "q_proj.lora_A.weight has shape [2, 4], and rank 4 on "),
        ({"factors": FACTORS | {A_OF_Q.replace("_A", "_B"): [7, 2]}}, "q_proj.lora_B.weight has shape [7, 2]"),
        ({"factors": {n: s for n, s in FACTORS.items() if n != A_OF_Q}}, "q_proj.lora_A.weight is missing. Copy or "),
        ({"use_dora": True}, "q_proj.lora_magnitude_vector is missing"),
        ({"factors": FACTORS | {A_OF_Q.replace(".weight", ".default.weight"): [2, 4]}}, "is not loaded here: merge it"),
        ({"factors": {n.replace("0.mlp", "7.mlp"): s for n, s in FACTORS.items()}}, "7.mlp.up_proj: name the model that"),
        ({"factors": FACTORS | {"base_model.model.lm_head.weight": [8, 4]}}, "lm_head.weight (BF16) is no factor that"),
        ({"dtype": "I16"}, "lora_A.weight (I16) is no factor that is loaded here"),
        ({"lora_alpha": math.nan}, "needs r, lora_alpha and base_model_name_or_path"),
        ({"base_model_name_or_path": "adapter"}, "adapter is an adapter itself: merge that one: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("words", [START, CONTINUED])
def test_an_adapter_that_is_not_whole_or_of_another_model_is_found_before_torch(
    here: Path, given: dict[str, Any], told: str, words: tuple[str, ...]
) -> None:
    start_adapter(here, **given)
    (found,) = problems(*words)
    assert found.startswith("model.path: ")
    assert told in found


WEIGHTS = {f"{name}.weight": [8, 4] for name in LAYERS}
FUSED = {f"model.layers.0.mlp.experts.{name}": [2, 8, 4] for name in ("gate_up_proj", "down_proj")}


@pytest.mark.parametrize(
    ("model_type", "weights"),
    [
        ("qwen3", {name.removeprefix("model."): shape for name, shape in WEIGHTS.items()}),  # saved without a head
        ("qwen3_next", WEIGHTS | {"mtp.layers.0.self_attn.q_proj.weight": [8, 4], "mtp.fc.weight": [4, 8]}),
        ("mimo_v2_flash", WEIGHTS | {"model.mtp.layers.0.self_attn.q_proj.weight": [8, 4]}),
        (
            "qwen3",
            WEIGHTS | {"model.layers.1.self_attn.q_proj.weight": [8, 4], "model.layers.1.eh_proj.weight": [4, 8]},
        ),
        ("qwen3_5_moe_text", {next(iter(WEIGHTS)): [8, 4], **FUSED}),
    ],
)
def test_an_adapter_is_compared_with_the_layers_that_transformers_loads(
    here: Path, model_type: str, weights: dict[str, list[int]]
) -> None:
    folder = start_adapter(here)
    tensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "num_hidden_layers": 1}))
    assert problems(*CONTINUED) == problems(*START) == []


def test_a_start_adapter_whose_model_is_not_whole_in_the_hubs_cache_yet_starts(here: Path) -> None:
    start_adapter(here, base_model_name_or_path="some/one")
    cached = here / "cache" / "hub" / "models--some--one"
    snapshot = cached / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text('{"model_type": "qwen3"}')
    index = {"weight_map": dict.fromkeys(WEIGHTS, "model-00001-of-00001.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problems(*CONTINUED) == problems(*START) == []


@pytest.mark.parametrize(
    ("fields", "words", "told"),
    [
        ({}, (), True),
        ({"max_position_embeddings": 65}, (), False),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, (), False),
        ({}, ("model.rope_scaling={rope_type: yarn, factor: 4.0}",), False),
        ({"vision_config": {}}, (), False),
    ],
)
def test_more_than_the_positions_of_a_model_is_found_before_torch_where_its_config_alone_says_so(
    here: Path, fields: dict[str, Any], words: tuple[str, ...], told: bool
) -> None:
    folder = start_adapter(here) / "config.json"
    folder.write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64, **fields}))
    found = problems("model.scratch=null", "model.path=start", "data.max_length=65", *words)
    wanted = "data.max_length: 65 is more than the model's 64 positions: set 64 or less, or extend"
    assert any(one.startswith(wanted) for one in found) == told


def test_a_damaged_adapter_is_found_before_it_is_evaluated(here: Path) -> None:
    start_adapter(here)
    assert find_with_base("adapter")
    tensors(here / "adapter" / "adapter_model.safetensors", {})
    with pytest.raises(ConfigError, match="it holds no adapter"):
        find_with_base("adapter")


def test_the_model_of_a_start_adapter_is_looked_at_before_torch(here: Path) -> None:
    folder = start_adapter(here)
    (here / "adapter/manifest.json").write_text(json.dumps({"base": {"sha256": base_digest(folder)}}))
    assert problems(*CONTINUED) == []
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    (found,) = problems(*CONTINUED)
    assert "its adapter was trained on other weights than" in found
    weights.write_bytes(weights.read_bytes()[:-1])
    (found,) = problems(*CONTINUED)
    assert found.startswith(f"model.path: {weights}: cannot read weights")


def tensors(file: Path, shapes: dict[str, list[int]], dtype: str = "BF16") -> None:
    """Write a safetensors file of zeros."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + 2 * math.prod(shape)]}
    header = json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def model(folder: Path, max_length: int | None = None, weights: str = "model.safetensors") -> Path:
    """Files of a model by their names, as a run has written them if there is a max_length."""
    (folder / "training_state").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if weights:
        (folder / weights).write_bytes(b"\x02" + bytes(7) + b"{}")
    if max_length:
        (folder / "training_state" / "state.json").write_text(json.dumps({"max_length": max_length}))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and what it needs, without a hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    write(tmp_path / "chats.jsonl", CHAT)
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def problems(*words: str, stage: str | None = "sft", made: tuple[str, ...] | None = ()) -> list[str]:
    """What is wrong with the recipe under these words, without the place."""
    try:
        read_config("recipe.yaml", words, 1, input_rules(stage, made))
    except ConfigError as error:
        return [line.partition(": ")[2] for line in re.split(r"\n(?!  )", str(error))]
    return []


def test_what_is_no_checkpoint_is_told_from_a_run_that_has_one(here: Path) -> None:
    run_dir = here / "runs/mine"
    run_dir.mkdir(parents=True)
    assert "runs/mine: no readable manifest.json" in refused("train.resume=runs/mine")
    (run_dir / "LATEST").write_text("step-000002\n")
    newest = "train.resume: runs/mine: a run, whose newest checkpoint is runs/mine/step-000002: name that"
    assert refused("train.resume=runs/mine") == newest
    one = "runs/mine/step-000002/adapters/one"
    (here / one).mkdir(parents=True)
    checkpoint(here / "runs/mine/step-000002", sources={})
    assert refused(f"train.resume={one}").endswith(
        f"{one}: one adapter of a run with several, which resumes as a whole: name runs/mine/step-000002, or start a "
        f"new run from this adapter with model.path={one}"
    )
    own = "runs/adapters/step-000001"  # a run of this name
    checkpoint(here / own, sources={"chats": 1})
    assert "one adapter of a run" not in str(problems("run.dir=runs/adapters", f"train.resume={own}"))
    assert refused("train.resume=yes").endswith("is neither auto, null nor the path of a step directory"), "said once"


def checkpoint(folder: Path, *, sources: dict[str, int], base: str | None = None, **more: object) -> Path:
    """A step directory that the recipe of this folder has made, by its files of text."""
    (folder / "training_state").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(to_yaml(read_config("recipe.yaml", ["optim.name=adamw"], 1)))
    known = {name: {"documents": n, "digest": ""} for name, n in sources.items()}
    identity = {"rows": {"max_length": 64}, "sources": known, **more}
    (folder / "training_state" / "state.json").write_text(json.dumps({"step": 1, "identity": identity}))
    (folder / "manifest.json").write_text(json.dumps({"files": {}, **({"base": {"sha256": base}} if base else {})}))
    return folder


def test_all_that_a_checkpoint_does_not_go_on_with_is_found_before_torch_in_one_report(here: Path) -> None:
    folder = checkpoint(here / "runs/mine/step-000001", sources={"chats": 1})
    resumed = ("train.resume=auto",)
    assert problems(*resumed) == problems(f"train.resume={folder}") == []
    write(here / "more.jsonl", CHAT)
    grown = (*resumed, "data.train=[{path: chats.jsonl}, {path: more.jsonl}]")
    assert "resume_changes=[data.train]" in refused(*grown)
    assert problems(*grown, "train.resume_changes=[data.train]") == []
    words = ("optim.lr=0.5", "run.seed=8", "data.layout=fixed", "data.max_length=32", "optim.name=muon")
    text = refused(*resumed, *words, "data.train=[{path: more.jsonl}]")
    assert text.startswith("train.resume: runs/mine/step-000001: the recipe differs")
    for line in (
        "optim.lr: 2e-05 in the checkpoint, 0.5 in this run",
        "train.resume_changes=[optim.lr,run.seed,data.train]",
        "source more is new",
        'data.layout: "packed" in the checkpoint, "fixed" in this run',
        "data.max_length: 64 in the checkpoint, 32 in this run",
        'optim.name: "adamw" in the checkpoint, "muon" in this run',
        "source chats does not begin with the 1 documents that the checkpoint knows (no source has that name",
    ):
        assert line in text
    (folder / "training_state" / "state.json").write_text("[")
    assert problems(*resumed, *words) == [], "the start says what is wrong with the checkpoint"


def test_a_finished_run_of_an_adapter_is_not_resumed_over_other_frozen_weights(here: Path) -> None:
    model(here / "start")
    recipe = RECIPE.replace("{scratch: {model_type: llama}, tokenizer: words}", "{path: start}\nadapter: {}")
    (here / "recipe.yaml").write_text(recipe)
    checkpoint(here / "runs/mine/step-000001", sources={"chats": 1}, base=base_digest(here / "start"))
    assert problems("train.resume=auto") == []
    (here / "start" / "model.safetensors").write_bytes(b"\x04" + bytes(7) + b"{  }")
    assert "start: other weights than those under the adapters of the checkpoint" in refused("train.resume=auto")


def test_a_run_of_an_adapter_is_not_resumed_with_another_one(here: Path) -> None:
    model(here / "start")
    recipe = RECIPE.replace("{scratch: {model_type: llama}, tokenizer: words}", "{path: start}\nadapter: {}")
    (here / "recipe.yaml").write_text(recipe)
    own = {"method": "lora", "rank": 16, "scale": 2.0, "modules": []}
    checkpoint(here / "runs/mine/step-000001", sources={}, base=base_digest(here / "start"), adapter=own)
    assert problems("train.resume=auto", "adapter.alpha=32") == []
    text = refused("train.resume=auto", "adapter.rank=4", "adapter.method=dora")
    for line in ('method: "lora" in the checkpoint, "dora"', "rank: 16 in the checkpoint, 4", "scale: 2.0 in the"):
        assert f"adapter.{line}" in text
    assert "adapter.rank: 16 in the checkpoint, null in this run" in refused("train.resume=auto", "adapter=null")
    assert "adapter.rank" not in str(problems("train.resume=auto", "adapters=[{name: a}]"))
    # The names of the model's layers are not known here: the start compares them.
    assert problems("train.resume=auto", "adapter.targets=attention", "adapter.experts=false") == []


def test_a_run_of_an_adapter_is_resumed_with_its_layers_however_they_are_named(here: Path) -> None:
    folder = start_adapter(here)
    recipe = RECIPE.replace("{scratch: {model_type: llama}, tokenizer: words}", "{path: start}\nadapter: {rank: 2}")
    (here / "recipe.yaml").write_text(recipe)
    own = {"method": "lora", "rank": 2, "scale": 16.0, "modules": [*LAYERS]}
    step = checkpoint(here / "runs/mine/step-000001", sources={}, base=base_digest(folder), adapter=own)
    for same in ("[q_proj, up_proj]", "[attention, mlp]"):
        assert problems("train.resume=auto", f"adapter.targets={same}") == []
    text = refused("train.resume=auto", "adapter.targets=q_proj")
    assert 'adapter.targets: ["all-linear"] in the checkpoint, ["q_proj"] in this run' in text
    assert "Resume with the original ones, or start a new run from its weights with model.path" in text
    # Of several, by the rank that they share.
    state = step / "training_state" / "state.json"
    known = json.loads(state.read_text())
    known["identity"]["adapter"] = dict.fromkeys("ab", own)
    state.write_text(json.dumps(known))
    entries = "adapters=[{name: a}, {name: b, rank: 1}]"
    (step / "recipe.yaml").write_text(to_yaml(read_config("recipe.yaml", ["optim.name=adamw", entries], 1)))
    resumed = ("train.resume=auto", entries)
    assert problems(*resumed) == problems(*resumed, "adapter.targets=[q_proj, up_proj]") == []
    text = refused(*resumed, "adapter.rank=4")
    assert "adapters.a.rank: 2 in the checkpoint, 4 in this run" in text
    assert "adapters.b" not in text
    assert "adapter.targets" in refused(*resumed, "adapter.targets=q_proj")


def refused(*words: str, stage: str | None = "sft") -> str:
    (problem,) = problems(*words, stage=stage)
    return problem


def test_what_is_whole_is_not_refused() -> None:
    assert problems() == problems(stage="mid") == problems(stage=None) == []


def test_wrong_settings_files_columns_models_and_stages_stand_in_one_report(here: Path) -> None:
    (here / "wrong.csv").write_text("question,reply\na,b\n")
    words = (
        *("optim.lr=fast", "log.evry=1", "model.scratch=null", "model.train_tokenizer=null"),
        *("model.path=runs/default/mid", "model.tokenizer=./tok", "model.chat_template=own.jinja"),
        *("data.train.0.path=chat.jsonl", "data.val=[{path: wrong.csv}, {path: chats.jsonl, repeat: 0}]"),
        *("train.resume=runs/mine/step-000001", "eval.tasks=[mmlu]", "eval.data=rows"),
    )
    found = problems(*words)
    starts = [
        "optim.lr: must be a number",
        "data.val.1.repeat: must be greater than 0",
        "log.evry: is not a known key",
        "model.path: runs/default/mid: no such folder. A run has not been made there yet: train the recipe whose run.dir is",
        "model.tokenizer: ./tok: no such folder",
        f"model.chat_template: own.jinja: no such file (looked in {here})",
        f"data.train.0.path: chat.jsonl: no such file or folder (looked in {here}). Did you mean chats.jsonl?",
        "data.val.0.path: wrong.csv:2: columns question, reply are none of the accepted ones",
        f"train.resume: runs/mine/step-000001: no such folder (looked in {here})",
        f"eval.data: rows: no such folder (looked in {here})",
    ]
    assert sorted(starts) == sorted(start for start in starts if any(problem.startswith(start) for problem in found)), (
        found
    )
    assert len(found) == len(starts)


def test_a_condition_on_a_column_that_no_row_has_names_those_that_are_there(here: Path) -> None:
    rows = [{**CHAT, "language": "en", "meta": {"score": i}} for i in range(3)]
    write(here / "chats.jsonl", *rows)
    told = refused("data.train=[{path: chats.jsonl, where: {lang: en}}]")
    assert told == (
        "data.train.0.path: where: none of the first 3 rows has it: chats.jsonl:1: there is no column lang, only "
        'messages, language, meta, meta.score. Did you mean "language"?'
    )
    assert 'Did you mean "meta.score"?' in refused("data.train=[{path: chats.jsonl, where: {meta.scor: 1}}]")
    assert problems("data.train=[{path: chats.jsonl, where: {meta.score: 1, lang: null}}]") == []
    write(here / "chats.jsonl", *rows * FIRST_ROWS)
    assert "first 100 rows" in refused("data.train=[{path: chats.jsonl, where: {lang: en}}]")
    assert problems("data.train=[{path: chats.jsonl, where: {zzz: en}}]") == [], "a later row may have it"


def test_a_column_that_a_source_names_and_no_row_has_is_refused_with_those_that_are_there(here: Path) -> None:
    def told(columns: str) -> list[str]:
        return problems(f"data.train=[{{path: chats.jsonl, columns: {columns}}}]")

    row = {**CHAT, "meta": {"turns": 1, "persona": None}}
    write(here / "chats.jsonl", *[row] * 3)
    (problem,) = told("{messages: meta.turn}")
    assert problem == (
        "data.train.0.path: columns.messages: there is no column meta.turn in its 3 rows, only meta.turns, meta.persona, "
        'meta, messages (the first: chats.jsonl:1). Did you mean "meta.turns"? Name one of these, or remove '
        "columns.messages"
    )
    assert told("{system: meta.persona}") == [], "it is there, and null"
    write(here / "chats.jsonl", *[row] * 2 * FIRST_ROWS, {**row, "zzz": "Be brief."})
    assert told("{system: zzz}") == [], "a small file is read to its end"
    assert "no column qqq in its 201 rows" in told("{system: qqq}")[0]
    write(here / "chats.jsonl", *[{**row, "meta": "x" * 20_000}] * 2 * FIRST_ROWS)
    assert told("{system: qqq}") == [], "a later row of a large file may have it"
    assert "no column qqq in the first 100 rows" in told("{messages: qqq}")[0]
    assert "in the first 100 rows" in told("{system: mesages}")[0]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", """{"messages": "[{'role': 'user'}]"}""", r"messages: not JSON.*how Python shows a value: write it with json\.dumps"),
        ("a.jsonl", '[\n{"text": "a"}]', r"a\.jsonl:1: not JSON.*if the whole file is one, name it \.json"),
        ("a.jsonl", '{"prompt": ["a", "b"], "completion": ["c", "d"]}', r"messages\[0\] is text, expected .*a row is one conversation"),
        ("a.jsonl", '{"messages": [{"author": "user", "content": "a"}]}', "no role among author, content. Name each message's speaker"),
        ("a.jsonl", '{"messages": [{"role": "user", "text": "a"}]}', "content is missing next to role, text"),
        ("a.csv", "prompt;completion\na;b\n", r"One column has ';' in its name: cells have commas"),
        ("a.json", '{"train": [{"text": "a"}], "test": []}', r"If train holds the rows of a \.json file, name it data"),
        ("a.xlsx", "PK", r"Write tables of other programs as \.csv"),
    ],
)  # fmt: skip
def test_what_people_take_for_data_is_answered_with_what_to_do(here: Path, name: str, content: str, told: str) -> None:
    (here / name).write_text(content)
    assert re.search(told, refused(f"data.train=[{{path: {name}}}]"))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{path: chats.jsonl, subset: main}", "subset is of a folder or dataset, and this is a file"),
        ("{path: chats.jsonl, tokenizer_of: words}", "leave it out, model.tokenizer reads rows"),
        ("{path: chats.jsonl, where: {min_token: 5}}", 'Did you mean "min_tokens"?'),
        ("{path: [chats.jsonl]}", "write an entry {path: ...} for each, or path: FOLDER with files"),
    ],
)
def test_settings_of_a_source_that_cannot_be_meant_are_rejected(here: Path, source: str, told: str) -> None:
    assert told in refused(f"data.train=[{source}]")


def test_a_missing_tokenizer_of_tokens_is_named(here: Path) -> None:
    (here / "a.bin").write_bytes(b"12")
    told = refused("data.train=[{path: a.bin, tokenizer_of: ./word}]", stage="mid")
    assert f"tokenizer_of: ./word: no such folder (looked in {here}). Did you mean words?" in told


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz", "folder"])
def test_columns_are_read_of_every_kind_of_file(here: Path, name: str) -> None:
    record, path = {"question": "a", "reply": "b"}, here / name
    if name == "folder":
        path.mkdir()
        write(path / "part.jsonl", record)
    elif name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(json.dumps(record).encode()))
    else:
        text = {".csv": "question,reply\na,b\n", ".json": json.dumps([record])}
        path.write_text(text.get(path.suffix, json.dumps(record)))
    assert "columns question, reply are none of the accepted ones" in refused(f"data.train.0.path={name}")


@pytest.mark.parametrize(
    ("stage", "row", "message"),
    [
        ("base", CHAT, "a conversation, but this script learns from plain text"),
        ("sft", TEXT, "a text without turns, but this script learns from conversations"),
        ("sft", {"messages": "Hi?"}, "messages is text, expected a list of messages"),
        (
            "sft",
            {"messages": [{"role": "user", "content": "Hi?"}]},
            "no assistant turn (roles: user), nothing to learn",
        ),
        (
            "mid",
            {"messages": [{"role": "user", "content": "Hi?"}]},
            "no assistant turn (roles: user), nothing to learn",
        ),
        ("sft", {"conversations": [{"from": "gpt", "value": " "}]}, "messages[0]: empty answer"),
        ("mid", {"messages": [{"role": "bot", "content": "x"}]}, 'role "bot" is not one of'),
        (None, {"x": 1}, "columns x are none of the accepted ones"),
        ("a stage of their own", {"x": 1}, "columns x are none of the accepted ones"),
        ("mid", [1], "the row is a list, expected an object"),
    ],
)
def test_a_first_row_that_the_stage_cannot_learn_from_is_refused(
    here: Path, stage: str, row: object, message: str
) -> None:
    write(here / "rows.jsonl", row)
    assert message in refused("data.train.0.path=rows.jsonl", stage=stage)
    write(here / "rows.jsonl", TEXT if stage == "base" else CHAT)
    assert problems("data.train.0.path=rows.jsonl", stage=stage) == []


def test_special_tokens_in_text_are_a_setting_of_stages_that_learn_texts(here: Path) -> None:
    (told,) = problems("data.special_tokens_in_text=parse", stage="sft")
    assert told.startswith(
        "data.special_tokens_in_text: is for plain texts: chat_sft.py takes special tokens in no text"
    )
    assert problems("data.special_tokens_in_text=parse", stage="mid") == []
    write(here / "rows.jsonl", TEXT)
    assert problems("data.train.0.path=rows.jsonl", "data.special_tokens_in_text=error", stage="base") == []


def test_rows_that_are_tokenized_fit_each_stage_and_those_that_where_leaves_out_are_not_looked_at(here: Path) -> None:
    write(here / "rows.jsonl", {"input_ids": [1, 2], "labels": [1, 2]})
    for stage in ("base", "mid", "sft"):
        assert problems("data.train.0.path=rows.jsonl", stage=stage) == []
    (here / "rows.jsonl").write_text('{"messages": [], "label": false}\n' + json.dumps({**CHAT, "label": True}) + "\n")
    where = "data.train=[{path: rows.jsonl, where: {label: true}}]"
    assert problems(where, stage="sft") == []
    assert "label is false" in refused("data.train.0.path=rows.jsonl", stage="sft")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("a.jsonl", b""), ("a.jsonl", b"\n  \n\n"), ("a.json", b""), ("a.json", b"[]"), ("a.txt", b"\n")),
        *(("a.csv", b"prompt,response\n"), ("a.jsonl.gz", gzip.compress(b"\n", mtime=0)), ("folder/a.jsonl", b"")),
    ],
)
def test_a_file_without_a_row_is_refused(here: Path, name: str, content: bytes) -> None:
    (here / "folder").mkdir()
    (here / name).write_bytes(content)
    path = name.removesuffix("/a.jsonl")
    assert refused(f"data.train.0.path={path}") == f"data.train.0.path: {path} (split train): empty, it has no rows"


def test_a_parquet_file_and_a_slice_without_a_row_are_refused(here: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), here / "a.parquet")
    assert refused("data.val=[{path: a.parquet}]").endswith("a.parquet (split train): empty, it has no rows")
    for past in ("train[1:]", "train[20000:]", "train[-1:-1]"):
        assert refused(f"data.train.0.split='{past}'").endswith(f"chats.jsonl (split {past}): empty, it has no rows")


def test_of_large_files_the_first_row_alone_is_looked_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "SMALL_BYTES", 10)
    assert problems("data.train.0.split='train[20000:]'") == []


def test_conversations_without_answers_that_are_skipped_are_refused_where_there_are_no_others(here: Path) -> None:
    asks = {"messages": CHAT["messages"][:1]}
    skips = ("data.train.0.path=rows.jsonl", "data.on_bad_row=skip")
    write(here / "rows.jsonl", asks, asks)
    assert "rows.jsonl:1: no assistant turn (roles: user)" in refused(*skips)
    assert problems(*skips, stage=None) == []
    for later in ([asks, CHAT], [asks] * FIRST_ROWS):
        write(here / "rows.jsonl", *later)
        assert problems(*skips) == []


def test_builtins_are_of_one_kind_each() -> None:
    assert "builtin:docs: a text without turns" in refused("data.train.0.path=builtin:docs")
    assert "builtin:tasks[train]:0: a conversation" in refused("data.train.0.path=builtin:tasks", stage="base")
    assert problems("data.train.0.path=builtin:docs", stage="mid") == []


def test_a_tokenizer_is_trained_on_rows_of_any_kind(here: Path) -> None:
    write(here / "texts.jsonl", TEXT)
    both = "model.train_tokenizer.sources=[{path: texts.jsonl}, {path: chats.jsonl}]"
    assert problems("data.train.0.path=texts.jsonl", both, "model.tokenizer=null", stage="base") == []
    missing = "model.train_tokenizer.sources=[{path: text.jsonl}]"
    told = refused("data.train.0.path=texts.jsonl", missing, "model.tokenizer=null", stage="base")
    assert told.startswith("model.train_tokenizer.sources.0.path: ")


# ---- never refuse what would work ------------------------------------------------------------------------------------


def test_rows_that_a_slice_leaves_out_are_not_looked_at(here: Path) -> None:
    write(here / "rows.jsonl", {"x": 1}, CHAT, {"x": 1})
    rows = "data.train.0.path=rows.jsonl"
    for fine in ("train[1:2]", "train[50%:]", "train[-2:-1]"):
        assert problems(rows, f"data.train.0.split='{fine}'") == [], fine
    assert "rows.jsonl:1: columns x" in refused(rows)
    assert "rows.jsonl:1: columns x" in refused(rows, "data.train.0.split='train[0%:90%]'")
    assert "rows.jsonl:3: columns x" in refused(rows, "data.train.0.split='train[1:]'")
    assert problems(rows, "data.train.0.split='train[1:]'", "data.train.0.max_rows=1") == []
    assert "expected train, train[:1000]" in refused(rows, "data.train.0.split='train[a:]'")
    assert "is more than 100%" in refused(rows, "data.train.0.split='train[:200%]'")


def test_rows_that_a_run_skips_are_refused_only_where_all_are_bad(here: Path) -> None:
    words = ("data.train.0.path=rows.jsonl", "data.on_bad_row=skip")
    write(here / "rows.jsonl", {"x": 1}, {"x": 2})
    assert "rows.jsonl:1: columns x" in refused(*words)
    write(here / "rows.jsonl", {"x": 1}, CHAT)
    assert problems(*words) == []
    answers_nothing = {"messages": [{"role": "user"}]}
    write(here / "rows.jsonl", *[answers_nothing] * FIRST_ROWS, CHAT)
    assert problems(*words) == []


def test_one_bad_row_among_good_ones_is_refused_with_what_can_be_done_about_it(here: Path) -> None:
    rows, advice = "data.train.0.path=rows.jsonl", "fix the row, or skip and count all such rows with"
    answers_nothing = {"messages": [{"role": "user"}]}
    write(here / "rows.jsonl", CHAT, answers_nothing)
    assert f"({advice} data.on_bad_row=skip)" in refused(rows)
    write(here / "rows.jsonl", answers_nothing, CHAT)
    assert f"({advice} data.on_bad_row=skip)" in refused(rows)
    write(here / "rows.jsonl", CHAT, {"x": 1})  # wrong columns are those of most rows
    assert refused(rows).startswith("data.train.0.path: rows.jsonl:2: columns x")
    assert advice not in refused(rows)


def test_a_folder_of_pictures_alone_is_told_what_it_lacks(here: Path) -> None:
    (here / "pictures").mkdir()
    (here / "pictures" / "cat.PNG").write_text("")
    assert "pictures need rows that name them, such as a captions.jsonl next to them" in refused(
        "data.train.0.path=pictures", stage="caption"
    )


def test_wrong_columns_all_along_the_beginning_are_not_skipped(here: Path) -> None:
    words = ("data.train.0.path=rows.jsonl", "data.on_bad_row=skip")
    for bad, told in (
        ({"x": 1}, "columns x"),
        (TEXT, "a text without turns"),
        ([1], "the row is a list, expected an object"),
    ):
        write(here / "rows.jsonl", *[bad] * 2 * FIRST_ROWS)
        assert f"rows.jsonl:1: {told}" in refused(*words)
        assert "All of the first 100 rows are like this" in refused(*words)
        write(here / "rows.jsonl", *[bad] * (FIRST_ROWS - 1), CHAT, *[bad] * FIRST_ROWS)
        assert problems(*words) == []


def test_a_large_json_value_is_left_to_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_RECORD", 300)
    monkeypatch.setattr(inputs, "SMALL_BYTES", 0)
    monkeypatch.setattr(readers, "LONGEST_JSON", 0)  # of which reading it as a whole would be an error
    path = here / "rows.json"
    path.write_text(json.dumps([CHAT] * 50))
    assert problems("data.train.0.path=rows.json") == []
    path.write_text(json.dumps({"data": [CHAT] * 50}))
    assert problems("data.train.0.path=rows.json") == []


# ---- models and earlier stages ---------------------------------------------------------------------------------------


def of_model(path: str, *more: str) -> tuple[str, ...]:
    return ("model.scratch=null", "model.train_tokenizer=null", f"model.path={path}", *more)


def test_a_model_folder_has_weights_and_a_length_is_inherited_from_runs_alone(here: Path) -> None:
    model(here / "whole")
    assert problems(*of_model("whole")) == []
    assert refused(*of_model("whole", "data.max_length=null")).startswith("data.max_length: whole has no earlier run")
    assert refused("data.max_length=null").startswith("data.max_length: a new model has no earlier run")
    run = here / "runs" / "base"
    model(run / "step-000002", max_length=64)
    (run / "LATEST").write_text("step-000002\n")
    assert problems(*of_model("runs/base", "data.max_length=null")) == []
    model(here / "empty", weights="")
    assert refused(*of_model("empty")).startswith(
        "model.path: empty: there are no weights in it (*.safetensors, *.bin)"
    )


def test_quantized_and_damaged_models_are_rejected(here: Path) -> None:
    folder = model(here / "small")
    config = {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert refused(*of_model("small")).startswith(
        "model.path: small: config.json: quantization_config: the weights are"
    )
    # Of the hub, where its config.json is in the cache.
    cached = here / "cache" / "hub" / "models--some--one"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    for name in ("config.json", "model.safetensors"):
        (cached / "snapshots" / "abc" / name).write_text(json.dumps(config))
    assert refused(*of_model("some/one")).startswith("model.path: some/one: config.json: quantization_config: ")
    (folder / "config.json").write_bytes(b"\0")
    assert refused(*of_model("small")).startswith("model.path: small/config.json: not valid JSON")


@pytest.mark.parametrize("stage", ["mid", "sft"])
def test_a_new_model_needs_a_tokenizer_where_none_is_trained(here: Path, stage: str) -> None:
    told = refused("model.tokenizer=null", "model.train_tokenizer={}", stage=stage)
    assert re.match(r"model.train_tokenizer: \S+_\S+\.py trains no tokenizer: set model.tokenizer", told)


def test_a_misspelt_local_path_is_told_before_the_hub(here: Path) -> None:
    model(here / "models" / "mine")
    (here / "data").mkdir()
    write(here / "data" / "my_chats", CHAT)
    assert "Did you mean" not in refused("data.train.0.path=nope.jsonl")
    told = refused(*of_model("models/mein"))
    assert told.startswith(
        f"model.path: models/mein: no such folder (looked in {here}). Did you mean models/mine? As a model"
    )
    told = refused(*of_model("modles/mine"))
    assert told.startswith(
        f"model.path: modles/mine: no such folder (looked in {here}). Did you mean models/mine? As a model"
    )
    told = refused("data.train.0.path=data/mychats")
    assert (
        f"no such file or folder (looked in {here}). Did you mean data/my_chats? As a dataset of the hub: it is" in told
    )
    assert "hf download" not in told
    told = refused(*of_model("an other"))
    assert told.endswith("and as a model of the hub it is no name that the hub could know")


def test_a_hub_name_is_refused_without_network_unless_it_is_cached(here: Path) -> None:
    told = refused(*of_model("some/one"))
    assert (
        "run `hf download some/one --local-dir DIR`, copy DIR here and name that folder in the place of some/one"
        in told
    )
    assert "model.path=DIR" not in told  # model.tokenizer may be meant
    assert "it is not in the cache" in told
    assert "cannot be reached" in told
    snapshot = here / "cache" / "hub" / "models--some--one" / "snapshots" / "ab"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")  # fetched alone, to know the size
    assert "it is not in the cache" in refused(*of_model("some/one"))
    (snapshot / "model.safetensors").write_text("")
    assert problems(*of_model("some/one")) == []
    assert "hf download --repo-type dataset Some/OneMore" in refused("data.train.0.path=Some/OneMore")
    (here / "cache" / "datasets" / "Some___one_more").mkdir(parents=True)
    assert problems("data.train.0.path=Some/OneMore") == []


class StandIn(BaseHTTPRequestHandler):
    """A hub with open, gated, private and slow repositories, which the token "right" may read, and "stranger" not."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(200)

    def do_GET(self) -> None:
        kind, owner, name, *rest = [*self.path.split("?")[0].split("/")[2:], "", ""]
        rest = [word for word in rest if word]
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        self.asked.append(f"{kind}/{owner}/{name}/{'/'.join(rest)}")
        if name == "busy":
            self._answer(429)
        elif token == "expired":
            self._answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif name == "private" and token != "right":
            self._answer(401, {"X-Error-Code": "RepoNotFound"})
        elif rest == ["revision", "v2"]:
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        elif rest == ["auth-check"] and token != "right":
            self._answer(401 if not token else 403, {"X-Error-Code": "GatedRepo"})
        else:
            content = {"id": f"{owner}/{name}", "gated": "manual" if name == "gated" else False, "private": False}
            self._answer(200, {}, json.dumps(content | {"tags": [], "downloads": 0, "siblings": []}).encode())

    def _answer(self, code: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stand_in(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a hub on this machine; nobody is logged in."""
    StandIn.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(here / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub, "hub_answers", HUB_ANSWERS)
    yield address
    server.shutdown()
    server.server_close()


def test_a_hub_that_answers_is_asked_for_the_name(stand_in: str) -> None:
    assert problems(*of_model("some/one")) == problems(*of_model("some/busy")) == []
    told = refused(*of_model("some/one", "model.revision=v2"))
    assert told.endswith(f"as a model of the hub {stand_in} has no revision v2 of it")
    told = refused(*of_model("some/private"))
    assert told.endswith(
        f"{stand_in} has no model of that name, or none that it shows without a token (for one that is private log in with "
        f"`{program_path('hf')} auth login`, or set HF_TOKEN)"
    )
    assert "has no dataset of that name" in refused("data.train.0.path=some/private")


def test_a_gated_model_is_refused_before_it_is_loaded_to_whom_the_hub_does_not_give_it(
    here: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = f"log in with `{program_path('hf')} auth login`, or set HF_TOKEN"
    message = "the hub gives this {} to those alone who have accepted its licence: accept it at {}, then {}"
    assert refused(*of_model("some/gated")) == (
        f"model.path: some/gated: {message.format('model', f'{stand_in}/some/gated', login)}"
    )
    assert refused("data.train.0.path=some/gated") == (
        f"data.train.0.path: some/gated: {message.format('dataset', f'{stand_in}/datasets/some/gated', login)}"
    )
    assert refused("model.tokenizer=some/gated", "model.train_tokenizer=null").startswith(
        "model.tokenizer: some/gated: "
    )
    monkeypatch.setenv("HF_TOKEN", "stranger")
    assert f"accept its licence at {stand_in}/some/gated with that account" in refused(*of_model("some/gated"))
    assert "shows to the account whose token is set here" in refused(*of_model("some/private"))
    monkeypatch.setenv("HF_TOKEN", "expired")
    assert (
        refused(*of_model("some/one"))
        == f"model.path: some/one: {stand_in} rejects the token that is set here: {login}"
    )
    monkeypatch.setenv("HF_TOKEN", "right")
    assert problems(*of_model("some/gated")) == problems(*of_model("some/private")) == []


def test_a_gated_model_that_is_cached_and_one_without_network_are_not_asked_for(
    here: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = here / "cache" / "hub" / "models--some--gated" / "snapshots" / "ab"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_text("")
    assert problems(*of_model("some/gated")) == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "and HF_HUB_OFFLINE is set" in refused(*of_model("other/gated"))
    assert StandIn.asked == []


def test_a_hub_that_takes_too_long_refuses_nothing(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answered, auth_check = threading.Event(), HfApi.auth_check

    def slow(*words: object, **more: object) -> None:
        answered.wait(60)
        auth_check(*words, **more)

    monkeypatch.setattr(HfApi, "auth_check", slow)
    monkeypatch.setattr(hub, "MAX_PROBE_SECONDS", 0.5)
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    assert problems(*of_model("some/gated")) == []
    answered.set()


def test_what_cannot_be_read_is_told_and_a_damaged_checkpoint_left_to_its_own_check(here: Path) -> None:
    (here / "broken.json.gz").write_bytes(b"no gzip")
    assert "broken.json.gz: cannot be read as .json" in refused("data.train.0.path=broken.json.gz")
    assert "File name too long" in refused(f"data.train.0.path=./{'x' * 300}.jsonl")
    state = model(here / "model", max_length=64) / "training_state" / "state.json"
    state.write_text("{")
    assert problems(*of_model("model", "data.max_length=null")) == []


def test_wildcards_are_of_data_alone(here: Path) -> None:
    assert "Wildcards are not expanded: name a folder or a file." in refused(*of_model("chats/*"))
    assert f"nothing in {here / 'chats'} matches *" in refused("data.train.0.path=chats/*")


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("val/los", 'Did you mean "val/loss"?'),
        ("val/chat/loss", 'Did you mean "val/chats/loss"?'),
        ("families/acc", 'Did you mean "eval/families/acc"?'),
        ("eval/arc_easy/acc_norm", 'Did you mean "eval/arc_easy/acc"?'),
        (
            "train/loss",
            "is no metric that an evaluation of this run writes: val/loss, val/bpb, val/chats/loss, val/chats/bpb, ",
        ),
    ],
)
def test_a_best_metric_that_no_evaluation_writes_is_refused(named: str, told: str) -> None:
    assert told in refused(*BEST_OF, f"checkpoint.best={named}")


@pytest.mark.parametrize(
    "named",
    [
        "val/bpb",
        "val/chats/loss",
        "eval/families/acc",
        f"eval/{FAMILIES[-1]}/acc",
        "eval/centred_mean",
        "eval/arc_easy/low",
    ],
)
def test_a_best_metric_that_evaluations_write_is_not_refused(named: str) -> None:
    assert problems(*BEST_OF, f"checkpoint.best={named}") == []


def test_scores_of_captions_are_metrics_of_the_stage_that_writes_them() -> None:
    recipe = str(ROOT / "recipes/captioning/caption_smoke.yaml")
    words = (recipe, ["eval.every=5", "checkpoint.every=5", "checkpoint.best=eval/captions/token_f1"], 1)
    assert read_config(*words, input_rules("caption")).checkpoint.best == "eval/captions/token_f1"
    with pytest.raises(ConfigError, match="is no metric that an evaluation of this run writes"):
        read_config(*words, [partial(inputs.best, stage="base")])


def test_the_metrics_of_every_task_are_known() -> None:
    assert set(TASK_METRICS) == set(EVAL_TASKS)
    assert METRICS_IN_CHAT.keys() <= TASK_METRICS.keys()


def test_of_lm_eval_and_without_evaluations_no_name_is_known() -> None:
    lm_eval = (*BEST_OF, "eval.tasks=[arc_easy]", "eval.backend=lm_eval")
    assert problems(*lm_eval, "checkpoint.best=eval/arc_easy/acc_norm") == []
    assert "is no metric" in refused(*lm_eval, "checkpoint.best=val/los")
    told = refused("eval.every=null", "checkpoint.every=1", "checkpoint.best=val/los")
    assert told == "checkpoint.best: needs checkpoint.every and eval.every: only a step with both can be the best"


# ---- chain and launcher ----------------------------------------------------------------------------------------------


def chain(folder: Path, **changed: str) -> Path:
    """Three recipes, each from the run before; {} in a change stands for the stage's own text."""
    start = {
        "base": "{scratch: {model_type: llama}, train_tokenizer: {}}",
        "mid": "{path: runs/base}",
        "sft": "{path: runs/mid}",
    }
    for stage, origin in start.items():
        length = ", max_length: 64" if stage == "base" else ""
        text = f"run: {{dir: runs/{stage}}}\nmodel: {origin}\ntrain: {{max_steps: 1}}\n"
        text += f"data: {{train: [{{path: {'texts' if stage == 'base' else 'chats'}.jsonl}}]{length}}}\n"
        (folder / f"{stage}.yaml").write_text(text + changed.get(stage, ""))
    write(folder / "texts.jsonl", TEXT)
    return folder


def test_stages_of_a_chain_may_start_from_runs_that_it_will_make(here: Path) -> None:
    assert list(read_stages(chain(here), [])) == ["base", "mid", "sft"]
    assert problems(*of_model("runs/mid/", "data.max_length=null"), made=("runs/mid",)) == []


def test_what_is_missing_for_a_later_stage_of_a_chain_is_told_before_the_first_with_the_rest(here: Path) -> None:
    chain(here, sft="eval: {tasks: [mmlu], data: rows}\n")
    with pytest.raises(ConfigError) as refusal:
        read_stages(here, ["optim.lr=fast"])
    assert [line.split(": ")[1] for line in str(refusal.value).splitlines()] == ["optim.lr", "eval.data"]
    (here / "chats.jsonl").unlink()
    with pytest.raises(ConfigError) as refusal:
        read_stages(here, [])
    lines = str(refusal.value).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        [str(here / "mid.yaml"), "data.train.0.path"],
        [str(here / "sft.yaml"), "data.train.0.path"],
        [str(here / "sft.yaml"), "eval.data"],
    ]


@pytest.mark.parametrize(
    "words", [("-m", "sftkit.launch", ROOT / "scripts" / "chat_sft.py"), (ROOT / "scripts" / "chat_sft.py",)]
)
def test_launcher_and_script_refuse_what_is_missing_before_torch_with_code_2(here: Path, words: tuple) -> None:
    code = f"import runpy, sys; sys.argv = {[str(word) for word in words if word not in ('-m', 'sftkit.launch')]!r} + sys.argv[1:]\n"
    code += "import atexit; atexit.register(lambda: print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules))))\n"
    run = f"runpy.run_path({str(words[0])!r}, run_name='__main__')"
    if "-m" in words:
        run = "sys.argv.insert(0, 'launch'); runpy.run_module('sftkit.launch', run_name='__main__')"
    write(here / "rows.jsonl", {"x": 1})
    more = ["recipe.yaml", "data.train.0.path=rows.jsonl", "data.val=[{path: gone.jsonl}]", "optim.lr=fast"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code + run, *more], capture_output=True, text=True, env=env, timeout=100
    )
    assert done.returncode == 2, done.stderr
    for text in ("optim.lr: must be a number", "rows.jsonl:1: columns x", "gone.jsonl: no such file"):
        assert text in done.stderr
    assert done.stdout == "[]\n"
