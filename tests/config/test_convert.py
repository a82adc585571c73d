"""`sftkit convert`: recipes made of files of TRL, Axolotl and LLaMA-Factory load, and mean what the files meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT

from sftkit.config.convert import (
    _SILENT,
    COPIED,
    DEFAULTS,
    REASONS,
    VALUES,
    converted,
    key_tables,
    our_key,
    print_recipe,
)
from sftkit.config.keys import key_table, section_classes
from sftkit.config.load import read_config
from sftkit.config.schema import Config, SourceConfig
from sftkit.errors import ConfigError

# Three published examples, in own words: QLoRA on alpaca rows, a LoRA on a share of ShareGPT rows, all weights on a
# text column. The keys are theirs.
AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B   # the model to start from
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_model_dir:
datasets:
  - {path: mlabonne/FineTome-100k, type: chat_template, split: "train[:20%]", field_messages: conversations,
     message_property_mappings: {role: from, content: value}}
  - {path: json, data_files: mine.jsonl, ds_type: json, roles: {assistant: [helper], user: [customer]}}
val_set_size: 0.1
output_dir: ./outputs/qlora
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
warmup_ratio: 0.1
weight_decay: 0.0
bf16: auto
gradient_checkpointing: true
logging_steps: 1
attn_implementation: flash_attention_2
evals_per_epoch: 4
wandb_project:
special_tokens: {pad_token: "<|end_of_text|>"}
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: pairs,turns
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/qwen3-4b
logging_steps: 10
save_steps: 500
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""
DATASET_INFO = {
    "pairs": {"file_name": "pairs.json"},
    "turns": {
        "hf_hub_url": "me/turns",
        "columns": {"messages": "dialogue"},
        "tags": {"user_tag": "guest", "assistant_tag": "assistant"},
    },
}
TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: stanfordnlp/imdb
dataset_config: plain_text
eval_strategy: steps
eval_steps: 100
report_to: [tensorboard, mlflow]
learning_rate: 1e-4
lr_scheduler_type: cosine
warmup_steps: 50
max_steps: 1000
packing: true
"""


def load(tmp_path: Path, text: str) -> tuple[Config, str]:
    """Return the converted recipe as it loads, and its text."""
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    recipe = converted(path)
    (tmp_path / "ours.yaml").write_text(recipe)
    return read_config(tmp_path / "ours.yaml", world_size=1), recipe


def test_a_qlora_of_axolotl(tmp_path: Path) -> None:
    cfg, text = load(tmp_path, AXOLOTL)
    assert cfg.model.path == "meta-llama/Llama-3.2-1B"
    assert cfg.adapter is not None
    assert (cfg.adapter.base, cfg.adapter.rank, cfg.adapter.alpha, cfg.adapter.dropout) == ("nf4", 32, 16, 0.05)
    assert cfg.adapter.targets == ("all-linear",)
    conversations, own = cfg.data.train
    assert (conversations.path, conversations.split) == ("mlabonne/FineTome-100k", "train[:20%]")
    assert conversations.columns == {"messages": "conversations"}
    assert (own.path, own.roles) == ("mine.jsonl", {"helper": "assistant", "customer": "user"})
    assert (cfg.data.val_fraction, cfg.data.max_length, cfg.data.layout) == (0.1, 2048, "packed")
    assert (cfg.train.micro_batch_size, cfg.train.global_batch_size, cfg.train.epochs) == (2, 8, 1)
    assert (cfg.optim.lr, cfg.optim.schedule, cfg.optim.warmup_ratio) == (2e-4, "cosine", 0.1)
    assert cfg.optim.betas == (0.9, 0.999)
    assert (cfg.train.memory, cfg.log.every, cfg.log.tracker) == ("balanced", 1, ())
    left = text.partition("# Not taken over:")[2]
    for key in ("optimizer", "attn_implementation", "evals_per_epoch", "special_tokens"):
        assert f"\n#   {key}: " in left
    assert "message_property_mappings" not in left


def test_a_lora_of_llama_factory_with_its_table_of_data_sets(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    cfg, text = load(tmp_path, LLAMA_FACTORY)
    pairs, turns = cfg.data.train
    assert pairs == SourceConfig(path=str(tmp_path / "data" / "pairs.json"), max_rows=1000)
    assert turns == SourceConfig(
        path="me/turns", max_rows=1000, columns={"messages": "dialogue"}, roles={"guest": "user"}
    )
    assert cfg.adapter is not None
    assert (cfg.adapter.rank, cfg.adapter.alpha, cfg.adapter.dropout) == (8, 16, 0.0)
    assert (cfg.data.layout, cfg.data.max_length, cfg.data.num_proc) == ("bucketed", 2048, 16)
    assert (cfg.train.epochs, cfg.train.global_batch_size, cfg.train.precision) == (3, 8, "bf16")
    assert (cfg.run.dir, cfg.checkpoint.every) == ("saves/qwen3-4b", 500)
    assert "\n# sftkit sft THIS_FILE\n" in text
    assert "#   template: the template of the model's tokenizer is taken" in text


def test_columns_and_tags_of_a_table_of_data_sets_are_taken_over_or_named(tmp_path: Path) -> None:
    columns = {"prompt": "ask", "query": "more", "response": "reply", "history": "past", "chosen": "good"}
    tags = {"role_tag": "from", "content_tag": "said", "observation_tag": "obs", "function_tag": "call"}
    info = {"pairs": {"file_name": "p.json", "columns": columns}, "turns": {"file_name": "t.json", "tags": tags}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    cfg, text = load(tmp_path, LLAMA_FACTORY)
    pairs, turns = cfg.data.train
    assert pairs.columns == {"instruction": "ask", "input": "more", "output": "reply", "history": "past"}
    assert turns.roles == {"obs": "tool", "call": "tool_call"}
    left = text.partition("# Not taken over:")[2]
    assert "#   pairs: columns.chosen: no setting" in left
    assert "#   turns: tags.content_tag: no setting" in left
    assert "role_tag" not in left


def test_fields_of_axolotl_are_columns(tmp_path: Path) -> None:
    fields = (
        "{field_instruction: ask, field_output: reply, field_input: input, system_prompt: Be short., format: '[I]'}"
    )
    texts = "{path: b.jsonl, type: alpaca, field: body}"
    cfg, text = load(tmp_path, f"{AXOLOTL}datasets: [{{path: a.jsonl, type: {fields}}}, {texts}]\n")
    own, named = cfg.data.train
    assert (own.columns, own.system) == ({"instruction": "ask", "output": "reply"}, "Be short.")
    assert named.columns == {"text": "body"}
    assert "#   datasets.format: no setting of a source" in text


def test_all_weights_of_trl_with_the_defaults_of_its_command(tmp_path: Path) -> None:
    cfg, text = load(tmp_path, TRL)
    assert cfg.adapter is None
    assert cfg.data.train == (SourceConfig(path="stanfordnlp/imdb", subset="plain_text"),)
    assert cfg.data.val == (SourceConfig(path="stanfordnlp/imdb", subset="plain_text", split="test"),)
    assert (cfg.data.max_length, cfg.data.layout) == (1024, "packed")
    assert (cfg.train.max_steps, cfg.train.epochs, cfg.train.global_batch_size) == (1000, None, 8)
    assert (cfg.optim.lr, cfg.optim.warmup_ratio, cfg.optim.betas) == (1e-4, 0.05, (0.9, 0.999))
    assert (cfg.eval.every, cfg.checkpoint.every, cfg.log.tracker) == (100, 500, ("tensorboard",))
    assert "# TRL's default of max_length" in text
    assert "#   report_to: mlflow: take wandb or tensorboard" in text
    assert "learns every token of `messages` unless assistant_only_loss" in text


def test_a_value_of_another_type_is_left_out_by_name(tmp_path: Path) -> None:
    cfg, text = load(tmp_path, f"{TRL}gradient_checkpointing: {{a: 1}}\nattn_implementation: [sdpa]\n")
    assert cfg.optim.lr == 1e-4
    assert "#   gradient_checkpointing: train.memory has no such value; known are True" in text
    assert "#   attn_implementation: attention.backend=auto" in text


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        (AXOLOTL, "train_on_inputs: true", {"data": {"targets": "all"}, "run": {"stage": "sft"}}),
        (AXOLOTL, "datasets: [{path: a.txt, type: completion}]", {"run": {"stage": "base"}}),
        (LLAMA_FACTORY, "stage: pt", {"run": {"stage": "base"}}),
        (LLAMA_FACTORY, "mask_history: true", {"data": {"targets": "last_turn"}}),
        (LLAMA_FACTORY, "quantization_bit: 4", {"adapter": {"base": "nf4"}}),
        (LLAMA_FACTORY, "use_dora: true\nuse_rslora: true", {"adapter": {"method": "dora", "scaling": "rslora"}}),
        (LLAMA_FACTORY, "lora_alpha: 5", {"adapter": {"alpha": 5}}),
        (LLAMA_FACTORY, "use_dft_loss: true", {"loss": {"dft": True}}),
        (LLAMA_FACTORY, "pissa_init: true", {"adapter": {"rank": 8}}),
        (TRL, "use_peft: true", {"adapter": {"rank": 16, "alpha": 32, "dropout": 0.05}}),
        (TRL, "completion_only_loss: false", {"data": {"targets": "all"}}),
        (TRL, "optim: adamw_torch_fused", {"optim": {"name": "adamw"}}),
        (
            TRL,
            "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}",
            {"optim": {"min_lr_ratio": 0.1}},
        ),
        (TRL, "save_strategy: epoch", {"checkpoint": {"every": None}}),
    ],
)
def test_keys_that_mean_more_than_a_name(tmp_path: Path, text: str, more: str, expected: dict[str, Any]) -> None:
    cfg, _ = load(tmp_path, f"{text}{more}\n")
    for section, values in expected.items():
        for name, value in values.items():
            assert getattr(getattr(cfg, section), name) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate: 1e-4", "no keys of TRL, LLaMA-Factory, Axolotl\n"),
        ("extends: sft.yaml", "no keys of TRL, LLaMA-Factory, Axolotl: it is a recipe of sftkit"),
        ("- 1", "no mapping of keys"),
        ("base_model: [", "theirs.yaml: while parsing"),
        (f"{LLAMA_FACTORY}stage: dpo", "TRL trains preferences"),
        (f"{AXOLOTL}rl: grpo", "TRL trains preferences"),
        ("base_model: x\n", "names no data set"),
        (f"{TRL}max_steps: many", r'theirs\.yaml:\d+: max_steps must be a number, not "many"'),
        (
            "base_model: a\nlora_r: big\nval_set_size: [1]",
            r'yaml:2: lora_r must.* "big".*\n.*yaml:3: val_set_size .* \[1\]:',
        ),
        (f"{AXOLOTL}datasets: [1]", "a value is not one that Axolotl takes"),
    ],
)
def test_a_file_that_cannot_be_converted_says_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        converted(path)


def test_a_secret_of_their_file_is_not_repeated(tmp_path: Path) -> None:
    _, text = load(tmp_path, f"{TRL}hub_token: hf_abcdefghijklmnop\nsome_key: hf_abcdefghijklmnop\n")
    assert "#   hub_token: `sftkit export" in text
    assert "hf_abc" not in text


def test_the_tables_name_settings_that_exist() -> None:
    assert {*COPIED, *VALUES, *REASONS} <= {*key_table(), *section_classes()}
    for defaults in DEFAULTS.values():
        assert [name for name in defaults if our_key(name) is None and name not in _SILENT] == []


def test_the_page_for_those_who_come_from_elsewhere_has_the_tables_that_messages_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_recipe(["--keys"])
    assert capsys.readouterr().out == key_tables() + "\n"
    assert key_tables() in (ROOT / "docs" / "coming_from.md").read_text()


def test_the_command_prints_the_recipe_and_ends_with_2_on_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(TRL)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "sftkit", "convert"]
    done = subprocess.run([*words, "theirs.yaml"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == converted(tmp_path / "theirs.yaml") + "\n"
    done = subprocess.run([*words, "none.yaml"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "none.yaml" in done.stderr
