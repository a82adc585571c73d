"""A recipe that cannot work is refused in a second, with everything that is wrong in one report."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from string import Formatter

import pytest
import yaml

from sftkit.config import keys, rules
from sftkit.config.keys import help_text, key_table, section_classes
from sftkit.config.load import load_config, read_config, to_yaml
from sftkit.config.schema import AdapterConfig, CompileConfig, Config, SourceConfig, source_label
from sftkit.config.topology import Topology
from sftkit.errors import ConfigError

MINIMAL = """
run: {dir: runs/x}
model: {path: org/model}
data: {train: [{path: "builtin:tasks"}]}
train: {max_steps: 10}
"""
HF_TOKEN = "hf_" + "aB3" * 10
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "sft.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def recipe(write) -> Path:
    return write(MINIMAL)


def problems(recipe: Path, *overrides: str, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_config(recipe, overrides, world_size)
    return str(caught.value).splitlines()


# ---- values ----


def test_a_minimal_recipe_has_the_defaults(recipe: Path):
    cfg = read_config(recipe)
    assert (cfg.data.layout, cfg.optim.lr, cfg.compile) == ("packed", 2e-5, CompileConfig())
    assert cfg.data.train == (SourceConfig(path="builtin:tasks"),)


PIPELINE = ["train.engine=pipeline", "train.pipeline_stages=2"]
REFERENCE = ["train.engine=reference", "train.precision=fp32"]


@pytest.mark.parametrize("text", ["2e-5", "0.00002", "2.0e-05", "2E-5"])
def test_floats_are_those_of_yaml_1_2(recipe: Path, text: str):
    assert read_config(recipe, [f"optim.lr={text}"]).optim.lr == 2e-5


@pytest.mark.parametrize("word", ["no", "yes", "on", "off", "12:30", "2024-01-01"])
def test_words_that_yaml_1_1_converts_stay_text(recipe: Path, word: str):
    assert read_config(recipe, [f"data.train.0.name={word}"]).data.train[0].name == word
    assert problems(recipe, f"compile.enabled={word}") == [
        f'command line: compile.enabled: must be true or false, not "{word}"'
    ]


def test_overrides_are_yaml_and_index_lists(recipe: Path):
    cfg = read_config(
        recipe,
        [
            "data.train.0.max_rows=100",
            "data.train.0.where={lang: [en, de], min_turns: 2}",
            "data.train.0.sample={rows: 20}",
            "data.train.0.roles={bot: assistant}",
            "data.layout=bucketed",
            "data.bucket_lengths=[128,256]",
            "model.revision=null",
            "train.max_steps=",
            "train.epochs=2",
            "compile.dynamic=true",
        ],
    )
    source = cfg.data.train[0]
    assert (source.max_rows, source.where) == (100, {"lang": ["en", "de"], "min_turns": 2})
    assert (source.sample.rows, source.sample.seed, source.roles) == (20, 0, {"bot": "assistant"})
    assert cfg.data.bucket_lengths == (128, 256)
    assert (cfg.train.max_steps, cfg.train.epochs, cfg.compile.dynamic) == (None, 2, True)


def test_an_override_opens_a_section_that_the_recipe_leaves_empty(write):
    assert read_config(write(MINIMAL + "compile:\n"), ["compile.scope=model"]).compile.scope == "model"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", None])
def test_optional_literals_accept_each_value_and_null(recipe: Path, mode: str | None):
    assert read_config(recipe, [f"compile.mode={mode or 'null'}"]).compile.mode == mode


def test_optional_literals_refuse_others_and_list_what_is_allowed(recipe: Path):
    assert problems(recipe, "compile.mode=max-autotun") == [
        'command line: compile.mode: "max-autotun" is not one of default, reduce-overhead, max-autotune, '
        'max-autotune-no-cudagraphs, null. Did you mean "max-autotune"?'
    ]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ('train.max_steps="100"', 'must be a whole number or null, not "100"'),
        ("train.max_steps=1.5", "must be a whole number or null, not 1.5"),
        ("train.max_steps=true", "must be a whole number or null, not true"),
        ("train.max_steps=0", "must be greater than 0, not 0"),
        ("optim.lr=true", "must be a number, not true"),
        ('optim.lr="2e-5"', 'must be a number, not "2e-5"'),
        ("optim.lr=1e999", 'must be a number, not "1e999"'),
        ("optim.warmup_ratio=1.5", "must be at most 1.0, not 1.5"),
        ("model.path=3", "must be text (quote it) or null, not 3"),
        ("compile.fullgraph=1", "must be true or false, not 1"),
        ("train.resume=true", "must be text (quote it) or null, not true: auto resumes from the newest checkpoint"),
        ("data.val=x", 'must be a list, not "x": write [{path: x}]'),
        (
            "graph.passes=block_bucketing",
            'must be a list, not "block_bucketing": write passes: [block_bucketing] in a recipe, '
            '"graph.passes=[block_bucketing]" on the command line',
        ),
        (
            "train.pipeline_layers=2",
            "must be a list or null, not 2: write pipeline_layers: [2] in a recipe, "
            '"train.pipeline_layers=[2]" on the command line',
        ),
        ("checkpoint=3", "must be a mapping of keys, not 3"),
        ("checkpoint.keep=1", "must be at least 2, not 1"),
    ],
)
def test_types_are_strict(recipe: Path, override: str, text: str):
    key = override.partition("=")[0]
    assert problems(recipe, override) == [f"command line: {key}: {text}"]


def test_integers_are_accepted_where_a_number_is_wanted(recipe: Path):
    lr = read_config(recipe, ["optim.lr=1"]).optim.lr
    assert lr == 1.0
    assert isinstance(lr, float)


# ---- reports ----


def test_a_problem_names_file_key_value_choices_and_the_likely_meaning(write):
    path = write(MINIMAL.replace("}]}", "}], layout: pakced}"))
    assert problems(path) == [
        f'{path}: data.layout: "pakced" is not one of packed, bucketed, fixed, dynamic, tree. Did you mean "packed"?'
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.amsgrad", None),
        ("optim.learning_rate", '"optim.lr"'),
        ("learning_rate", '"optim.lr"'),
        ("train.save_every", '"checkpoint.every"'),
        ("train.eval_every", '"eval.every"'),
        ("log_every", '"log.every"'),
        ("train.save_steps", '"checkpoint.every"'),
        ("num_train_epochs", '"train.epochs"'),
        ("train.batch_size", '"train.global_batch_size" or "train.micro_batch_size"'),
        ("eval_batch_size", '"eval.batch_size"'),
        ("warmup_steps", '"optim.warmup_ratio" (a share of the steps)'),
        ("train.model", '"model"'),
        ("train.compile", '"compile.enabled"'),
        ("max_seq_length", '"data.max_length"'),
        ("train.warmup_ratio", '"optim.warmup_ratio"'),
        ("optim.weight_decy", '"optim.weight_decay"'),
        ("lr", '"optim.lr"'),
        ("train.lr", '"optim.lr"'),
        ("data.train.0.max_row", '"data.train.0.max_rows"'),
        ("max_rows", '"data.train.0.max_rows" or "data.val.0.max_rows"'),
        ("train.every", '"eval.every" or "checkpoint.every" or "log.every"'),
        ("optm.lr", '"optim"'),
    ],
)
def test_unknown_keys_are_refused_with_a_suggestion(recipe: Path, key: str, meant: str | None):
    (problem,) = problems(recipe, f"{key}=1")
    assert problem.startswith(f"command line: {'optm' if key == 'optm.lr' else key}: is not a known key.")
    if meant:
        assert f"Did you mean {meant}?" in problem
    else:
        assert "Known here: name, lr, lr_scale, betas, " in problem


def test_every_text_of_a_problem_is_used_with_the_values_that_it_names():
    used = {}
    for path in Path(keys.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("hint", "config_error")
            ) and isinstance(node.args[0], ast.Constant):  # not config_error itself
                used.setdefault(node.args[0].value, set()).update(word.arg for word in node.keywords)
    texts = keys.hints()["problems"]
    assert used.keys() == texts.keys()
    for name, text in texts.items():
        named = {re.split(r"[.\[]", value)[0] for _, value, _, _ in Formatter().parse(text) if value}
        # None: **words, whose names only the call itself knows
        assert used[name] == named or None in used[name], name


def test_names_of_other_trainers_mean_settings_that_exist():
    assert {key for ours in keys.hints()["other_names"] for key in ours.split(", ")} <= {
        *key_table(),
        *section_classes(),
    }
    assert keys.hints()["takes"].keys() <= {*key_table(), *section_classes()}


def test_a_setting_that_sftkit_has_not_says_what_to_do_instead(recipe: Path) -> None:
    for instead, names in keys.hints()["no_key"].items():
        for name in names.split():
            assert not any(key.rpartition(".")[2] == name for key in key_table()), name
            assert not keys.own_names(name), name
            key = name.replace(".N.", ".0.") if "." in name else f"train.{name}"
            (problem,) = problems(recipe, f"{key}=1")
            assert problem == f"command line: {key}: is no setting of sftkit: {instead}"
    (problem,) = problems(recipe, "hub=1")
    assert problem.startswith("command line: hub: is no setting of sftkit: `sftkit export RUN --push")


def test_settings_that_other_trainers_give_a_data_set_mean_those_of_a_source(recipe: Path):
    for ours, theirs in keys.hints()["of_sources"].items():
        assert f"data.train.N.{ours}" in key_table()
        for name in theirs.split():
            assert f"data.train.N.{name}" not in key_table()
            (problem,) = problems(recipe, f"data.train.0.{name}=1")
            assert f'Did you mean "data.train.0.{ours}"' in problem
    for key in ("data.streaming", "data.train.0.streaming"):
        (problem,) = problems(recipe, f"{key}=true")
        assert problem.startswith(f"command line: {key}: is no setting of sftkit: leave it out: a source is tokenized")


def test_a_suggestion_has_the_index_that_was_written(write):
    path = write(MINIMAL.replace("}]}", "}, {path: x, max_row: 3}]}"))
    assert problems(path) == [
        f'{path}: data.train.1.max_row: is not a known key. Did you mean "data.train.1.max_rows"?'
    ]


def test_a_path_of_the_command_line_says_what_it_keeps_of_the_recipe(
    write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    write(MINIMAL.replace('"builtin:tasks"', '"builtin:tasks", max_rows: 20'), "base.yaml")
    path = write("extends: base.yaml\ndata: {val: [{path: a}]}\n")

    def told(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", str(path), *words])
        load_config("")
        return capsys.readouterr().err

    assert told("data.train.0.path=b") == (
        f"note: data.train.0.path is from the command line and keeps max_rows: 20 of {path.with_name('base.yaml')}; "
        "to change that: data.train.0.max_rows=...\n"
    )
    assert told() == told("data.val.0.path=b") == told("data.train=[{path: b}]") == ""
    assert told("data.train.0.path=b", "data.train.0.max_rows=20") == ""


def test_type_errors_unknown_keys_and_cross_checks_come_in_one_report(write):
    text = MINIMAL.replace("path: org/model", "path: org/model, scratch: {a: 1}, tokenizer: x").replace("10", "ten")
    lines = problems(write(text), "lr=3", "optim.betas=[1.0,1.0]", "eval.every=5")
    assert [line.split(": ")[1] for line in lines] == [
        "train.max_steps",
        "lr",
        "model.path and model.scratch are both given",
        "model.scratch",
        "optim.betas",
        "eval.every",
    ]


def test_a_dropped_value_causes_no_second_problem(recipe: Path):
    assert len(problems(recipe, "train.max_steps=ten")) == 1  # not: max_steps and epochs are both missing
    assert len(problems(recipe, "model.path=null", "model.pth=x")) == 1  # the typo explains the missing path


def test_missing_keys_say_what_they_are_for(write):
    path = write("model: {path: x}\ntrain: {max_steps: 1}\n")
    lines = problems(path)
    assert [line.partition(": is required: ")[0] for line in lines] == [f"{path}: run.dir", f"{path}: data.train"]
    assert lines[1].endswith(key_table()["data.train"].doc)


def test_duplicate_keys_are_problems_with_their_lines(write):
    path = write(MINIMAL + "optim:\n  lr: 1e-5\n  lr: 2e-5\n")
    assert problems(path) == [f"{path}: optim.lr: given twice, in lines 7 and 8"]


@pytest.mark.parametrize("word", ["train.max_steps", "--train.max_steps=3", "=3", "train.max_steps=[1"])
def test_malformed_overrides_are_problems(recipe: Path, word: str):
    (problem,) = problems(recipe, word)
    assert problem.startswith("command line: ")


NO_DASHES = "no such option. Settings have no dashes"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--resume auto", f'--resume: {NO_DASHES}: "train.resume=auto"'),
        ("--resume=auto", f'--resume: {NO_DASHES}: "train.resume=auto"'),
        ("--resume", f'--resume: {NO_DASHES}: "train.resume=..."'),
        ("--learning-rate 1e-4", f'--learning-rate: {NO_DASHES}: "optim.lr=1e-4"'),
        ("--max_steps 10", f'--max_steps: {NO_DASHES}: "train.max_steps=10"'),
        ("--train.max_steps 10", f'--train.max_steps: {NO_DASHES}: "train.max_steps=10"'),
        ("--optim adamw8bit", f'--optim: {NO_DASHES}: "optim=adamw8bit"'),
        ("--lora_dropout 0.1", f'--lora_dropout: {NO_DASHES}: "adapter.dropout=0.1"'),
        ("--x.y 1", f"--x.y: {NO_DASHES}, and without them it is not a known key. Known here: run, model, "),
        ("--tune x", f"--tune: {NO_DASHES}, and without them it is not a known key. Known here: run, model, "),
    ],
)
def test_a_setting_with_dashes_is_one_problem_that_says_what_to_type(recipe: Path, words: str, text: str):
    (problem,) = problems(recipe, *words.split())
    assert problem.startswith(f"command line: {text}")


def test_a_word_after_a_setting_with_dashes_is_its_value_only_if_it_can_be_one(recipe: Path):
    assert [line.split(":")[1].strip() for line in problems(recipe, "--resume", "--max_steps", "x.y=3")] == [
        *("--resume", "--max_steps", "x"),
    ]
    assert problems(recipe, "--resume=auto", "10")[1] == "command line: 10: is not key=value"


def test_a_setting_that_is_required_is_not_missing_if_it_was_given_with_dashes(write):
    path = write("model: {path: x}\ndata: {train: [{path: x}]}\ntrain: {max_steps: 1}\n")
    (problem,) = problems(path, "--run.dir", "runs/x")
    assert problem.endswith('"run.dir=runs/x"')


def test_overrides_that_leave_the_tree_are_problems(recipe: Path):
    assert problems(recipe, "data.train.7.split=x", "run.dir.x=3") == [
        "command line: data.train.7.split: data.train is a list of 1: index it with 0 to 0",
        "command line: run.dir.x: run.dir is a plain value and has no keys",
    ]


def test_a_missing_recipe_names_its_likely_neighbour(recipe: Path):
    other = recipe.with_name("stf.yaml")
    assert problems(other) == [f'{other}: no such file. Did you mean "{recipe}"?']


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("recipes/qwen3_1_7/sft.yaml", ': no such file. Did you mean "recipes/qwen3_1_7b/sft.yaml"?'),
        ("recipes/qwen3_1_7b/stf.yaml", ': no such file. Did you mean "recipes/qwen3_1_7b/sft.yaml"?'),
        ("recipes/smolm2/mid.yml", ': no such file. Did you mean "recipes/smollm2_135m/mid.yaml"?'),
        ("recipes/qwen3_1_7b", ": a folder; name one of the recipes in it: recipes/qwen3_1_7b/sft.yaml"),
        (".", ": a folder without recipes in it; name a recipe, a .yaml file"),
        ("something/else", ": no such file"),
    ],
)
def test_a_misspelt_recipe_and_a_folder_name_the_recipes_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, told: str
):
    monkeypatch.chdir(tmp_path)  # where there are none but those that come with sftkit
    assert problems(Path(word)) == [f"{word}{told}"]


@pytest.mark.parametrize(
    "text", ["- 1", "a: [", "a: !!python/object:os.system {}", "a: !x 3", "&a b: *a\n", "x: &x [*x]"]
)
def test_yaml_that_is_no_recipe_is_a_config_error(write, text: str):
    assert problems(write(text))


# ---- extends ----


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("optim.implementation=compiled", "optim.implementation: was removed: leave it out: the default update was"),
        ("log.tags=[a]", "log.tags: was removed: set the environment variable WANDB_TAGS, with commas"),
        (
            "model.gradient_checkpointing=true",
            "model.gradient_checkpointing: was removed: train.memory=balanced or low",
        ),
        ("compile.modules={a.b: {mode: default}}", "compile.modules: was removed: compile.scope=block or model"),
    ],
)
def test_a_removed_setting_says_what_to_do_instead(recipe: Path, word: str, instead: str) -> None:
    (problem,) = problems(recipe, word)
    assert instead in problem
    assert keys.hints()["removed"].keys().isdisjoint(key_table())


def test_extends_merges_mappings_and_replaces_lists(write):
    write(MINIMAL + "optim: {lr: 1e-3, eps: 1e-6}\n", "default/base.yaml")
    path = write(
        "extends: ../default/base.yaml\noptim: {lr: 5e-4}\ndata: {train: [{path: 'builtin:docs'}]}\n", "smoke/base.yaml"
    )
    cfg = read_config(path)
    assert (cfg.optim.lr, cfg.optim.eps) == (5e-4, 1e-6)
    assert [s.path for s in cfg.data.train] == ["builtin:docs"]


def test_problems_name_the_file_that_the_value_came_from(write):
    base = write(MINIMAL + "optim: {lr: x}\n", "base.yaml")
    path = write("extends: base.yaml\noptim: {eps: x}\n")
    assert problems(path) == [
        f'{base}: optim.lr: must be a number, not "x"',
        f'{path}: optim.eps: must be a number, not "x"',
    ]


def test_extends_takes_a_shipped_recipe_as_the_command_line_does_and_lists_them_for_one_that_is_not(write, monkeypatch):
    path = write("extends: recipes/smoke/sft.yaml\nrun: {dir: mine}\n")
    monkeypatch.chdir(path.parent)
    cfg = read_config(path)
    assert (cfg.run.dir, cfg.train.max_steps, cfg.model.path) == ("mine", 20, "runs/smoke/mid")
    write("extends: ../default/sft.yaml\nmodel: {path: here}\n", "recipes/smoke/sft.yaml")
    write(MINIMAL, "recipes/default/sft.yaml")
    assert read_config(path).model.path == "here"  # what lies beside it comes first
    lost = write("extends: recipes/nothing/sft.yaml\n" + MINIMAL, "lost.yaml")
    assert "recipes/qwen3_0_6b, " in problems(lost)[1]


def test_extends_in_a_circle_and_of_a_missing_file_are_clear(write):
    first = write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    assert "files extend one another in a circle" in problems(first)[0]
    lost = write("extends: lost.yaml\n" + MINIMAL, "c.yaml")
    assert problems(lost) == [f"{lost}: extends: no such file: {lost.with_name('lost.yaml')}"]


# ---- what one setting forbids another ----

SCRATCH = ("model.path=null", "model.scratch={model_type: llama}")
BUCKETED = ("data.layout=bucketed", "data.max_length=256")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.path=runs/a/step-000005", "run.dir=runs/a"], "run.dir: the model comes from it"),
        (["run.dir=./"], 'run.dir: "./" names no folder of its own'),
        (["run.dir=a/../.."], 'run.dir: "a/../.." names no folder of its own'),
        (["run.dir=../../../../../../../.."], "names no folder of its own"),
        ([f"run.dir={Path.cwd()}"], "names no folder of its own"),
        (["run.dir=runs/a/../x", "model.path=runs/x/step-000002"], "the model comes from it (runs/x/step-000002)"),
        (["model.path=null"], "model.path and model.scratch are both missing"),
        (["model.scratch={model_type: llama}", "model.tokenizer=x"], "model.path and model.scratch are both given"),
        ([*SCRATCH], "model.scratch: needs a tokenizer"),
        (["model.path=null", "model.scratch={}", "model.tokenizer=x"], "model.scratch: needs model_type"),
        ([*SCRATCH, "model.tokenizer=x", "model.train_tokenizer={}"], "model.train_tokenizer: and model.tokenizer"),
        (["model.train_tokenizer={}"], "model.train_tokenizer: only goes with model.scratch"),
        ([*SCRATCH, "model.tokenizer=x", "model.revision=main"], "model.revision: only goes with model.path"),
        ([*SCRATCH, "model.tokenizer=x", "model.trust_remote_code=true"], "model.trust_remote_code: only goes with"),
        (["train.max_steps=null"], "train.max_steps and train.epochs are both missing"),
        (["data.bucket_lengths=[8]"], "data.bucket_lengths: only goes with layout bucketed, not packed"),
        ([*BUCKETED, "data.bucket_lengths=[256,128,256]"], "is not ascending without repeats"),
        ([*BUCKETED, "data.bucket_lengths=[]"], "data.bucket_lengths: is empty: null lets data.num_buckets"),
        ([*BUCKETED, "data.bucket_lengths=[64,128]"], "ends with 128, but data.max_length is 256"),
        ([*BUCKETED, "data.row_length=512"], "data.row_length: only goes with layout packed or tree, not bucketed"),
        (
            ["data.layout=dynamic", "data.row_length=512"],
            "data.row_length: only goes with layout packed or tree, not dynamic",
        ),
        (["data.row_length=128", "data.max_length=256"], "data.row_length: 128 cannot hold a document of"),
        (["data.layout=dynamic", "data.max_length=100"], "100 is not a multiple of data.pad_multiple, 8"),
        (["data.layout=dynamic", "compile.dynamic=true"], "compile.dynamic: true does not go with layout dynamic"),
        (["attention.backend=sdpa"], "packed rows hold several documents"),
        (["optim.name=adamw_sr", "train.precision=fp32"], "optim.name: adamw_sr rounds weights to bf16"),
        (["optim.name=adamw8bit", "train.precision=fp32"], "optim.name: adamw8bit rounds weights to bf16"),
        (["train.fp8=rowwise", "train.precision=fp32"], "train.fp8: rowwise does not go with train.precision fp32"),
        (["train.fp8=rowwise", "compile.enabled=false"], "train.fp8: only goes with compile.enabled true"),
        (["train.pipeline_stages=2"], "train.pipeline_stages: only goes with train.engine pipeline, not blocks"),
        (["train.pipeline_schedule=gpipe"], "train.pipeline_schedule: only goes with train.engine pipeline"),
        (
            [*PIPELINE, "train.freeze=[lm_head.*]"],
            "train.freeze: does not go with train.engine pipeline, which trains all",
        ),
        ([*PIPELINE, "adapter={}"], "adapter: does not go with train.engine pipeline"),
        (["train.engine=graph", "adapter.rank=4"], "adapter: does not go with train.engine graph"),
        (["adapter={}", "optim.name=muon"], "optim.name: muon does not go with adapter, whose factors are fp32"),
        (["adapter={}", "train.fp8=rowwise"], "train.fp8: does not go with adapter"),
        (["adapter={}", "train.freeze=[lm_head.*]"], "train.freeze: does not go with adapter, which freezes the whole"),
        (["adapter.method=dora", "adapter.dropout=0.1"], "adapter.dropout: does not go with adapter.method dora"),
        (["adapter.targets=[]"], "adapter.targets: is empty"),
        (["adapter.method=lokr"], 'adapter.method: "lokr" is not one of lora, dora'),
        (["adapters=[{name: a}]"], "adapters: needs adapter, which has what they share: add adapter: {}"),
        (["adapter={}", "adapters=[]"], "adapters: is empty"),
        (["adapter={}", "adapters=[{rank: 4}]"], "adapters.0.name: is required"),
        (["adapter={}", "adapters=[{name: a}, {name: A}]"], 'adapters.1.name: "A" is already the name of adapters.0'),
        (["adapter={}", "adapters=[{name: a/b}]"], 'adapters.0.name: "a/b" is no name of a folder'),
        (["adapter={}", "adapters=[{name: ..}]"], 'adapters.0.name: ".." is no name of a folder'),
        (
            ["adapter.rank=300", "adapters=[{name: a}, {name: b}]"],
            "adapters: their ranks add up to 600, and at most 512",
        ),
        (["adapter.method=dora", "adapters=[{name: a}]"], "adapter.method: dora does not go with adapters"),
        (["adapter.dropout=0.1", "adapters=[{name: a}]"], "adapter.dropout: 0.1 does not go with adapters"),
        ([*REFERENCE, "adapter={}", "adapters=[{name: a}]"], "train.engine: reference does not go with"),
        (
            ["data.layout=bucketed", "adapter={}", "adapters=[{name: a}]"],
            "data.layout: bucketed does not go with adapters",
        ),
        (["adapter={}", "adapters=[{name: a, data: []}]"], "adapters.0.data: is empty: give at least one source"),
        (["adapter={}", "adapters=[{name: a, learning_rate: 1}]"], "adapters.0.learning_rate: is not a known key"),
        (
            ["adapter={}", "adapters=[{name: a}]", "train.resume_changes=[run.seed]"],
            "run.seed cannot change with adapters",
        ),
        (["adapter.r=8"], 'adapter.r: is not a known key. Did you mean "adapter.rank"?'),
        (["adapter=true"], "adapter: must be a mapping of keys, not true: write adapter: {} in a recipe, "),
        (["adapter=dora"], 'not "dora": write adapter: {method: dora} in a recipe, "adapter={method: dora}" on the'),
        (["model.load_in_4bit=true"], 'Did you mean "adapter.base" (bf16 or nf4)?'),
        (["adapter.load_in_4bit=true"], 'Did you mean "adapter.base" (bf16 or nf4)?'),
        ([*PIPELINE, "data.layout=bucketed"], "rows of data.layout bucketed have several: take packed or fixed"),
        ([*PIPELINE, "train.fp8=rowwise"], "train.fp8: does not go with train.engine pipeline"),
        ([*PIPELINE, "compile.mode=reduce-overhead"], "which CUDA graphs would overwrite"),
        (["train.engine=reference"], "train.engine: reference computes in fp32: set train.precision=fp32"),
        ([*REFERENCE, "optim.name=muon"], "train.engine: reference has torch's AdamW only: set optim.name=adamw"),
        ([*REFERENCE, "train.memory=low"], "train.memory: has no effect with train.engine reference"),
        ([*REFERENCE, "compile.cache=x"], "compile.cache: has no effect with train.engine reference"),
        ([*REFERENCE, "attention.backend=varlen"], "attention.backend: has no effect with train.engine reference"),
        (["compile.cache=x", "compile.enabled=false"], "compile.cache: only goes with compile.enabled true"),
        (["compile.mode=default", "compile.backend=eager"], "compile.mode: default only goes with compile.backend"),
        (["optim.schedule=wsd", "optim.warmup_ratio=0.9", "optim.decay_ratio=0.2"], "add up to more than 1"),
        (["optim.betas=[0.9,1]"], "optim.betas: [0.9, 1] must both be less than 1"),
        (["eval.every=5"], "eval.every: has nothing to evaluate"),
        (["data.train=[]"], "data.train: is empty"),
        (["data.train=[{path: a/x.jsonl}, {path: b/x.parquet}]"], 'data.train.1.name: "x" is already the name of'),
        (["data.train=[{path: a, where: {min_tokens: 0}}]"], "data.train.0.where.min_tokens: is 0, not a whole number"),
        (
            ["data.train=[{path: a, where: {max_tokens: 1025}}]", "data.max_length=1024"],
            "data.train.0.where.max_tokens: 1,025 leaves nothing out: data.max_length 1,024 cuts",
        ),
        (["data.train=[{path: a, where: {max_turns: true}}]"], "data.train.0.where.max_turns: is True, not a whole"),
        (["data.train=[{path: a, roles: {bot: robot}}]"], "data.train.0.roles.bot: "),
        (
            ["data.train=[{path: a, roles: {assistant: bot}}]"],
            'data.train.0.roles.assistant: "bot" is not one of system, developer, user, assistant, tool, tool_call. The '
            "name in your rows comes first: {bot: assistant}",
        ),
        (
            ["data.train=[{path: a, type: alpaca}]"],
            "data.train.0.type: is no setting of sftkit: the shape of rows is known",
        ),
        (["data.train=[{path: a, tree: some}]"], "data.train.0.tree: "),
        (["data.train=[{path: a, sample: {seed: 1}}]"], "data.train.0.sample.rows"),
        (["data.val=[{path: a, name: x}, {path: b, name: x}]"], 'data.val.1.name: "x" is already the name of'),
        (
            ["data.val=[{path: b, name: docs}]", "data.train.0.name=docs", "data.val_fraction=0.1"],
            'data.val.0.name: "docs" is also a source of data.train, of which data.val_fraction holds out',
        ),
        (["data.val_fraction=1"], "data.val_fraction: must be less than 1"),
        (["data.decontaminate=[gsm8]"], 'data.decontaminate: "gsm8" is not one of all, mmlu'),
        (["data.decontaminate=gsm8"], 'Did you mean "gsm8k"?'),
        (["data.train.0.path=builtin:doc"], "is not one of builtin:docs, builtin:tasks"),
        (["data.train.0.split=test"], 'data.train.0.split: "test" is not one of train, heldout'),
        (
            ["data.train=[{path: a, weight: 1}, {path: b}]"],
            "data.train.1.weight: is missing, and a has one: give each source a weight",
        ),
        (
            ["data.train.0.weight=1", "data.train.0.repeat=2"],
            "data.train.0.repeat: 2 does not go with weights",
        ),
        (["data.train.0.max_epochs=2"], "data.train.0.max_epochs: only goes with weights"),
        (["data.train.0.weight=0"], "data.train.0.weight: is 0 like all others"),
        (["data.train.0.weight=1", *BUCKETED], "data.train.0.weight: does not go with layout bucketed"),
        (["data.train.0.weight=1", "train.epochs=1"], "train.epochs: does not go with weights, with which each source"),
        (
            ["data.train=[{path: a, order: given}, {path: b}]"],
            "data.train.0.order: given goes with a single source, or with a weight for each",
        ),
        (["data.val=[{path: v, weight: 1}]"], "data.val.0.weight: 1 only goes with data.train"),
        (["data.val=[{path: v, repeat: 1.5}]"], "data.val.0.repeat: 1.5 only goes with data.train if it is no whole"),
        (["data.tokens=1e6"], "data.tokens: and train.max_steps are both given: set one of them to null"),
        (["data.train=[a.jsonl]"], 'data.train.0: must be a mapping of keys, not "a.jsonl": write {path: a.jsonl}'),
        (
            ["data.tokens=1e6", "train.max_steps=null", "data.layout=fixed"],
            "data.tokens: only goes with layout packed or tree, not fixed",
        ),
        (["data.stages=[{at: 0.5, weights: {tasks: 1}}]"], "data.stages: only go with weights"),
        (
            ["data.train.0.weight=1", "data.stages=[{at: 0.5, weights: {taks: 1}}]"],
            'data.stages.0.weights: "taks" is not one of tasks. Did you mean "tasks"?',
        ),
        (
            ["data.train.0.weight=1", "data.stages=[{at: 0.5, weights: {tasks: 0}}]"],
            "data.stages.0.weights: are all 0",
        ),
        (
            ["data.train.0.weight=1", "data.stages=[{at: 0.5, weights: {tasks: 1}}, {at: 0.5, weights: {tasks: 2}}]"],
            "data.stages.1.at: 0.5 is not after the stage before, at 0.5",
        ),
        (["train.resume=atuo"], 'train.resume: "atuo" is neither auto'),
        (["log.project=a/b"], "log.project: must be 1 to 80"),
    ],
)
def test_settings_that_exclude_each_other(recipe: Path, overrides: list[str], text: str):
    (problem,) = problems(recipe, *overrides)
    assert text in problem


@pytest.mark.parametrize(
    "overrides",
    [
        [*SCRATCH, "model.train_tokenizer={vocab_size: 512}"],
        [*BUCKETED, "data.bucket_lengths=[64,128,256]"],
        ["data.layout=bucketed", "data.bucket_lengths=[64,128]"],
        [*BUCKETED, "data.bucket_lengths=[96,256]"],
        ["data.layout=bucketed", "data.num_buckets=6"],
        ["data.row_length=512", "data.max_length=256"],
        ["data.row_length=512"],
        ["data.layout=dynamic", "data.pad_multiple=32", "compile.dynamic=null", "data.max_length=64"],
        *([f"data.layout={layout}", "attention.backend=sdpa"] for layout in ("bucketed", "fixed", "dynamic")),
        ["optim.name=adamw", "train.precision=fp32"],
        ["optim.name=adamw_sr", "train.fp8=tensorwise", "compile.cache=runs/cache"],
        ["eval.every=5", "eval.tasks=[families]"],
        ["eval.every=5", "data.val=[{path: 'builtin:tasks', split: heldout}]"],
        ["optim.schedule=cosine", "optim.warmup_ratio=0.9", "optim.decay_ratio=0.9"],
        ["adapter={}"],
        ["adapter=null", "optim.name=muon"],
        ["adapter.targets=attention", "adapter.scaling=rslora", "optim.name=adamw"],
        ["adapter={}", "adapters=[{name: lr-1.0e-4, lr: 1.0e-4}, {name: b, rank: 4, seed: 1}]"],
        ["data.tokens=100e9", "train.max_steps=null", "data.train.0.weight=1", "data.train.0.max_epochs=2"],
        ["data.train.0.repeat=2.5"],
        ["train.resume=auto"],
        ["train.resume=runs/x/step-000100"],
        ["compile.mode=max-autotune", "compile.dynamic=null"],
        [f"model.revision={COMMIT}"],
    ],
)
def test_settings_that_go_together(recipe: Path, overrides: list[str]):
    read_config(recipe, overrides)


def test_the_global_batch_must_be_shared_equally_by_all_processes(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    assert problems(recipe, world_size=3) == [
        f"{recipe}: train.global_batch_size: 32 cannot be shared equally by 3 processes: use 30 or 33"
    ]
    assert problems(recipe, "train.global_batch_size=2", world_size=8)[0].endswith("use 8")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 processes"):
        read_config(recipe)
    read_config(recipe, world_size=4)


# ---- secrets ----


@pytest.mark.parametrize(
    "secret",
    [HF_TOKEN, "sk-proj-" + "a1" * 12, COMMIT, "https://user:hunter22@host/x"],
)
def test_secrets_are_refused_without_being_shown(write, secret: str):
    in_file = write(MINIMAL.replace("org/model", f'"{secret}"'))
    reports = [
        problems(in_file),
        problems(write(MINIMAL), f"model.tokenizer={secret}"),
        problems(write(MINIMAL), secret),
    ]
    for report in reports:
        assert "looks like" in report[0]
        assert secret not in "\n".join(report)


def test_a_secret_in_broken_yaml_is_not_shown(write):
    assert HF_TOKEN not in "\n".join(problems(write(f"model: {{path: {HF_TOKEN}\nrun: [")))


# ---- output ----


def test_yaml_output_reads_back_to_an_equal_config(write):
    odd = [
        "no",
        "1e5",
        "100",
        "null",
        "a: b # c",
        "",
        "ünï",
        "two\nlines",
        "- x",
        "'\"",
        "~",
        "12:30",
        ".5",
        ".5e3",
        "a,b]",
    ]
    scratch = {
        "model_type": "llama",
        "odd": odd,
        "deep": [[1, [2.5, None]], {"a": [], "b": {}}],
        "f": 2.0,
        "smile": "😀",
    }
    cfg = read_config(
        write(MINIMAL),
        ["model.path=null", "model.tokenizer=x", f"model.scratch={json.dumps(scratch, ensure_ascii=False)}"],
    )
    assert cfg.model.scratch == scratch
    saved = to_yaml(cfg)
    assert read_config(write(saved, "saved.yaml")) == cfg
    assert yaml.safe_load(saved)["model"]["scratch"] == scratch  # and other readers of YAML 1.1 agree


def script(*words: str | Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
        "from sftkit.config.load import load_config; load_config('A description.'); print('trains')"
    )
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False)


def test_a_script_reports_all_problems_with_code_2_within_two_seconds_of_cpu_and_without_torch(write):
    bad = write(MINIMAL.replace("10", "ten") + "optim: {lr: x}\nlog: {evry: 3}\ncompile: {mode: fast}\n")
    before = os.times()
    done = script(bad)
    after = os.times()
    assert done.returncode == 2
    assert [line.split(": ")[1] for line in done.stderr.removeprefix("\nerror: ").splitlines()] == [
        "optim.lr",
        "train.max_steps",
        "compile.mode",
        "log.evry",
    ]
    assert done.stdout == "False\n"
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2


def test_a_script_without_a_recipe_says_how_it_is_used():
    done = script("train.max_steps=3")
    assert done.returncode == 2
    assert "RECIPE.yaml [key.sub=value ...]" in done.stderr


def test_only_one_process_of_a_machine_reports(write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(sys, "argv", ["x.py", str(write("a: 1"))])
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as left:
        load_config("")
    assert left.value.code == 2
    assert capsys.readouterr().err == ""


def test_print_config_says_where_each_value_came_from(write):
    write(MINIMAL, "base.yaml")
    path = write("extends: base.yaml\noptim: {lr: 1e-3}\n")
    done = script(path, "optim.eps=1e-6", "--print-config")
    assert done.returncode == 0, done.stderr
    origin = {line.split(":")[0].strip(): line.partition("  # ")[2] for line in done.stdout.splitlines()}
    assert origin["lr"] == str(path)
    assert origin["dir"] == str(path.with_name("base.yaml"))
    assert (origin["eps"], origin["betas"]) == ("command line", "default")
    assert read_config(write(done.stdout.removesuffix("False\n"), "printed.yaml")) == read_config(
        path, ["optim.eps=1e-6"]
    )
    assert "trains" not in done.stdout


def test_help_explains_every_key_in_100_columns():
    done = script("--help")
    assert done.returncode == 0
    text = done.stdout
    assert text.startswith("usage: ")
    assert "\n\nA description.\n" in text
    assert "data.layout  packed | bucketed | fixed" in text
    assert "default packed" in text
    assert max(map(len, text.splitlines())) <= 100
    for key, row in key_table().items():
        assert f"  {key}  {row.kind}" in text or f"  {key}\n      {row.kind}\n" in text
        assert row.doc, key
    assert help_text("x", "y.py").count("required") >= 3


def test_the_table_of_keys_holds_every_field_of_the_config():
    assert list(section_classes()) == [field.name for field in dataclasses.fields(Config)]
    names = [f"compile.{f.name}" for f in dataclasses.fields(CompileConfig)]
    assert [k for k in key_table() if k.startswith("compile.")] == names


@pytest.mark.parametrize(
    ("source", "label"),
    [
        (SourceConfig(path="builtin:docs"), "docs"),
        (SourceConfig(path="HuggingFaceTB/smol-smoltalk"), "smol-smoltalk"),
        (SourceConfig(path="a/b/dolly15k.jsonl.gz"), "dolly15k"),
        (SourceConfig(path="a/shards-v1.1/"), "shards-v1.1"),
        (SourceConfig(path="a/b.jsonl", name="mine"), "mine"),
    ],
)
def test_a_source_is_called_by_its_name_or_the_end_of_its_path(source: SourceConfig, label: str):
    assert source_label(source) == label


def test_the_global_batch_is_shared_by_groups_of_ranks_that_hold_the_same_rows(recipe: Path, monkeypatch) -> None:
    """Three rows on two processes are refused, and with both working on the same rows they are not."""
    words = (recipe, ["train.global_batch_size=3"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="global_batch_size"):
        read_config(*words)
    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert read_config(*words).train.global_batch_size == 3
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    with pytest.raises(ConfigError, match="tp_size 4 makes 4 processes, and 2 were started"):
        read_config(*words)


def test_checkpoints_that_no_setting_ever_makes_are_problems(recipe: Path) -> None:
    assert "checkpoint.best" in problems(recipe, "checkpoint.best=val/loss")[0]
    good = ["checkpoint.every=10", "checkpoint.best=eval/families/acc"]
    good += ["eval.every=10", "eval.tasks=[families]"]
    read_config(recipe, good, 1)


def test_a_pipeline_has_rows_of_its_own_once_and_needs_as_many_micro_batches_as_stages(
    recipe: Path, monkeypatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = ["train.engine=pipeline", "train.global_batch_size=6", "train.micro_batch_size=2"]
    with pytest.raises(
        ConfigError, match=r"2 makes 3 micro-batches of a step, and a pipeline of 4 stages .*: set 1 or"
    ):
        read_config(recipe, words)
    assert read_config(recipe, [*words, "train.pipeline_schedule=gpipe"]).train.pipeline_stages is None
    assert read_config(recipe, [*words, "train.micro_batch_size=1"])
    with pytest.raises(ConfigError, match="7 cannot be shared equally by 2 processes"):  # each stage has two copies
        read_config(recipe, [*words, "train.pipeline_stages=2", "train.global_batch_size=7"])
    assert read_config(recipe, [*words, "train.pipeline_stages=2", "train.micro_batch_size=1"])
    few = ["train.global_batch_size=2", "train.micro_batch_size=1"]  # no micro-batch is small enough
    with pytest.raises(ConfigError, match=r"needs 4 or more: set a larger train\.global_batch_size"):
        read_config(recipe, [*words, *few])
    rounds = ["train.pipeline_schedule=interleaved", "train.global_batch_size=9", "train.micro_batch_size=1"]
    with pytest.raises(ConfigError, match=r"1 makes 9 micro-batches .* up to 7 of them, .* multiples of 4 can\. Set"):
        read_config(recipe, [*words, *rounds])
    for word in ("micro_batch_size=3", "global_batch_size=8", "global_batch_size=10"):
        assert read_config(recipe, [*words, *rounds, f"train.{word}"])


def test_a_recipe_has_adapters_if_it_names_the_section_and_one_target_is_a_list_of_one(recipe: Path):
    assert read_config(recipe).adapter is None
    assert read_config(recipe, ["adapter={}"]).adapter == AdapterConfig()
    found = read_config(recipe, ["adapter.targets=mlp", "adapter.rank=4"]).adapter
    assert found == AdapterConfig(rank=4, targets=("mlp",))
    assert read_config(recipe, ["adapter.targets=[mlp]", "adapter.rank=4"]).adapter == found
    assert read_config(recipe, ["adapter.rank=4", "adapter=null"]).adapter is None


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        ("{rope_type: yarn, factor: 4}", None),
        ("{rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4}", None),
        ("{rope_type: yarn}", "model.rope_scaling.factor: is required"),
        ("{rope_type: yarm, factor: 4}", 'Did you mean "yarn"?'),
        ("{rope_type: yarn, factor: 1}", "must be greater than 1"),
        ("{rope_type: linear, factor: 2, beta_fast: 3}", "model.rope_scaling.beta_fast: only goes with rope_type yarn"),
        ("{rope_type: llama3, factor: 8}", "needs low_freq_factor and a larger high_freq_factor"),
        ("{rope_type: yarn, facter: 4}", 'Did you mean "model.rope_scaling.factor"?'),
    ],
)
def test_a_scaling_of_positions_has_the_keys_of_its_type(recipe: Path, scaling: str, problem: str | None):
    words = [f"model.rope_scaling={scaling}"]
    if problem is None:
        assert read_config(recipe, words).model.rope_scaling is not None
    else:
        assert any(problem in line for line in problems(recipe, *words))


def test_a_scaling_of_positions_goes_with_a_whole_model_of_files_only(recipe: Path):
    scaling = "model.rope_scaling={rope_type: yarn, factor: 4}"
    new = ("model.path=null", "model.scratch={model_type: llama}", "model.tokenizer=t")
    (problem,) = problems(recipe, scaling, *new)
    assert problem.endswith("model.rope_scaling: only goes with model.path")
    (problem,) = problems(recipe, scaling, "adapter={}")
    assert "model.rope_scaling: does not go with adapter" in problem


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train.engine=graph"], "does not go with train.engine graph"),
        (["train.engine=pipeline"], "does not go with train.engine pipeline"),
        (["train.engine=reference", "train.precision=fp32"], "does not go with train.engine reference"),
        (["compile.scope=model"], "does not go with compile.scope model"),
        (["adapter={}", "adapters=[{name: a}]"], "does not go with adapters"),
    ],
)
def test_noise_on_embeddings_goes_with_the_blocks_engine_and_one_model(recipe: Path, words: list[str], problem: str):
    assert any(f"train.neftune_alpha: {problem}" in line for line in problems(recipe, "train.neftune_alpha=5", *words))
    assert read_config(recipe, ["train.neftune_alpha=5", "adapter={}"]).train.neftune_alpha == 5


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train.engine=graph"], "data.layout: tree does not go with train.engine graph"),
        (PIPELINE, "data.layout: tree does not go with train.engine pipeline"),
        (["attention.backend=varlen"], "attention.backend: varlen sees no trees"),
        (["attention.backend=sdpa"], "attention.backend: sdpa sees no trees"),
        (["train.neftune_alpha=5"], "data.layout: tree does not go with train.neftune_alpha"),
        (["adapter={}", "adapters=[{name: a}]"], "data.layout: tree does not go with adapters"),
    ],
)
def test_what_sees_no_trees_does_not_go_with_them(recipe: Path, words: list[str], problem: str):
    assert any(problem in line for line in problems(recipe, "data.layout=tree", *words))
    assert read_config(recipe, ["data.layout=tree", "attention.backend=flex", "adapter={}"]).data.layout == "tree"


@pytest.mark.parametrize("layout", [{"context": 2}, {"tensor": 2}])
def test_ranks_that_share_rows_do_not_go_with_trees(layout: dict[str, int]):
    settings = {"data.layout": "tree", "train.engine": "blocks", "attention.backend": "auto"}
    topology = Topology(**layout)
    ((key, problem),) = rules._trees(settings.get, topology)
    assert key == "data.layout"
    assert "whose ranks share rows" in problem


def test_dft_does_not_go_with_label_smoothing(recipe: Path):
    (problem,) = problems(recipe, "loss.dft=true", "loss.label_smoothing=0.1")
    assert "loss.dft: does not go with loss.label_smoothing" in problem
