"""The recipes of published models, held to the models' published configs: sizes, memory, templates, what cannot work."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from helpers import ROOT
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from sftkit.config.load import read_config
from sftkit.config.schema import Config, ModelConfig
from sftkit.config.topology import Topology, topology_of
from sftkit.data.batches.pack import make_layout
from sftkit.data.tokens.sources import stage_rule
from sftkit.data.types import Row
from sftkit.errors import ConfigError
from sftkit.launch.launch import Hardware, choose, needs_of
from sftkit.memory.estimate import GIB, held_bytes
from sftkit.memory.plan import MemoryPlan, fits
from sftkit.models.files import size_of
from sftkit.models.load import empty_model, resolve_max_length
from sftkit.models.structure import positions
from sftkit.parallel.tensor import TENSOR_MODEL_TYPES
from sftkit.preflight import analysis

PUBLISHED = Path(__file__).parent / "published"
"A folder for each model with what its published config.json says of sizes, positions, windows and rotations."
PARAMETERS = {
    "LFM2-1.2B": 1_170_340_608,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "OLMo-2-0425-1B": 1_484_916_736,
    "Qwen3-0.6B-Base": 596_049_920,
    "Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen3-4B-Base": 4_022_468_096,
    "Qwen3-8B-Base": 8_190_735_360,
    "Qwen3.5-0.8B-Base": 752_393_024,  # of the text model, as of the next
    "Qwen3.5-4B-Base": 4_205_751_296,
    "SmolLM2-135M": 134_515_008,
    "SmolLM3-3B-Base": 3_075_098_624,
    "TinyLlama_v1.1": 1_100_048_384,
    "gemma-3-1b-pt": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gemma-3-4b-pt": 3_880_263_168,  # of the text model; 4,300,079,472 with the encoder of images
}
"As published, tied weights counted once."
GPU_GIB = {"80 GB": 79.0, "141 GB": 139.0}
"What torch finds on such a GPU, rounded down."
OWN_MODEL = {"default", "smoke", "shared", "captioning", "graph", "scale"}
"Folders of recipes that make a model of their own, or name none."
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.yaml") if path.parent.name not in OWN_MODEL)
SFT = [path for path in RECIPES if path.name == "sft.yaml"]
FSDP2 = ROOT / "accelerate_configs" / "fsdp2.yaml"


class Words(NamedTuple):
    """A small stand-in for a published tokenizer."""

    template: str | None
    "in tests/golden; None: the tokenizer has none"
    bos: str | None = None
    eos: str = "<|endoftext|>"
    special: tuple[str, ...] = ()


WORDS = {
    "Qwen/Qwen3-": Words("qwen3"),
    "Qwen/Qwen3.5-": Words("qwen3_5", eos="<|im_end|>"),
    "meta-llama/": Words("llama3", "<|begin_of_text|>", "<|eot_id|>"),
    "google/gemma-3": Words("gemma3", "<|begin_of_text|>", special=("<start_of_turn>", "<end_of_turn>")),
    "HuggingFaceTB/SmolLM3": Words("smollm3", eos="<|im_end|>"),
    "openai/gpt-oss": Words(
        "gpt_oss",
        eos="<|return|>",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
    ),
    "allenai/OLMo-2": Words("olmo2", "<|endoftext|>"),
    "HuggingFaceTB/SmolLM2": Words(None),
    "LiquidAI/LFM2": Words("lfm2", "<|startoftext|>", "<|im_end|>"),
    "TinyLlama/": Words(None),
}
"By how the hub id of the tokenizer begins."


def name_of(recipe: Path) -> str:
    return f"{recipe.parent.name}/{recipe.stem}"


@cache
def read(recipe: Path, *words: str) -> Config:
    return read_config(recipe, words, world_size=1)


def start_of(cfg: Config) -> ModelConfig:
    """Where the chain of stages begins that a recipe is the last of: with a model on the hub."""
    by_dir = {one.run.dir: one for one in map(read, RECIPES)}
    while cfg.model.path in by_dir:
        cfg = by_dir[cfg.model.path]
    return cfg.model


def published(cfg: Config) -> str:
    return str(start_of(cfg).path).rpartition("/")[2]


@cache
def shell(name: str) -> PreTrainedModel:
    """The published model, its parameters without memory."""
    return empty_model(str(PUBLISHED / name), "bf16", {"local_files_only": True, "trust_remote_code": False})


def memory_plan(cfg: Config, gib: float | None, topology: Topology) -> MemoryPlan:
    assert cfg.data.max_length is not None
    lengths = np.full(1000, cfg.data.max_length)
    layout = make_layout(cfg.data, cfg.train, lengths, cfg.data.max_length, topology.row_ranks)
    plan = analysis.memory_plan(cfg, shell(published(cfg)), layout, gib, topology)
    assert plan is not None
    return plan


# ---- the published configs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_config_makes_the_published_model(name: str) -> None:
    assert sum(p.numel() for p in shell(name).parameters()) == PARAMETERS[name]
    size = size_of(ModelConfig(path=str(PUBLISHED / name)))
    # gemma's config leaves sizes to transformers' defaults, and hybrids have two kinds of blocks: the weights have to tell
    if name in ("gemma-3-4b-pt", "LFM2-1.2B", "Qwen3.5-0.8B-Base", "Qwen3.5-4B-Base"):
        assert size is None
    else:
        assert size is not None
        assert size.parameters == pytest.approx(PARAMETERS[name], rel=3e-4)  # norms are not counted


def test_every_published_config_belongs_to_a_recipe_and_every_recipe_has_one() -> None:
    assert {published(read(recipe)) for recipe in RECIPES} == PARAMETERS.keys() == {p.name for p in PUBLISHED.iterdir()}


# ---- what a header says ----------------------------------------------------------------------------------------------

GPUS_LINE = (
    "# GPUs, and the memory that a step takes on each as the planner estimates it (`sftkit inspect`), not measured:"
)


def smallest(cfg: Config, gib: float) -> tuple[int, MemoryPlan]:
    """The fewest GPUs of that size on which a recipe runs as it is, its plan there: one, else shards of the model."""
    for number in (1, 2, 4, 8):
        topology = Topology() if number == 1 else topology_of(FSDP2, number)
        try:
            plan = memory_plan(cfg, gib, topology)
        except ConfigError:
            continue
        if plan.estimate is not None and fits(plan.estimate, plan.total_bytes):
            return number, plan
    raise AssertionError("more than eight")


@cache
def estimates(recipe: Path) -> dict[str, tuple[int, str, str]]:
    """Size of a GPU -> how many, GiB on each, optimizer."""
    found = {}
    for size, gib in GPU_GIB.items():
        number, plan = smallest(read(recipe), gib)
        assert plan.estimate is not None
        found[size] = (number, f"{plan.estimate.total / GIB:.1f} GiB", plan.optim.name)
    return found


def header_lines(recipe: Path) -> list[str]:
    lines = [GPUS_LINE]
    for size, (number, memory, optimizer) in estimates(recipe).items():
        layout = ", fsdp2.yaml" if number > 1 else ""
        lines.append(f"#   {f'{number} x {size}{layout}':<24} {memory:>9}, {optimizer}")
    return lines


def header(recipe: Path) -> list[str]:
    text = recipe.read_text().split("\n")
    return text[: next(i for i, line in enumerate(text) if not line.startswith("#"))]


@pytest.mark.parametrize("recipe", SFT, ids=name_of)
def test_a_header_has_the_command_and_what_the_planner_estimates(recipe: Path) -> None:
    lines = header(recipe)
    path = recipe.relative_to(ROOT)
    assert f"#   sftkit sft {path}      in a clone: make sft RECIPE={path}" in lines
    assert "\n".join(header_lines(recipe)) in "\n".join(lines)
    gated = str(start_of(read(recipe)).path).startswith(("meta-llama/", "google/"))
    assert gated == any(line.startswith("# Gated: ") for line in lines)


@pytest.mark.parametrize("recipe", SFT, ids=name_of)
def test_a_speed_in_a_header_stands_in_the_benchmark_that_it_names(recipe: Path) -> None:
    _, said, text = " ".join(line.removeprefix("#").strip() for line in header(recipe)).partition(" Speed: ")
    assert said
    if text.startswith("not measured"):
        return
    speed, benchmark = re.match(r"([\d,]+) useful tok/s", text), re.search(r"\((benchmarks/\w+)\)", text)
    assert speed, text
    assert benchmark, text
    assert f" {speed[1]} " in (ROOT / benchmark[1] / "README.md").read_text()


def test_the_table_of_the_docs_is_that_of_the_headers() -> None:
    rows = ["| `recipes/` | starts from | parameters | of 80 GB | of 141 GB |", "|---|---|---|---|---|"]
    for recipe in SFT:
        start, found = start_of(read(recipe)), estimates(recipe).values()
        cells = [f"{number}: {memory}, `{optimizer}`" for number, memory, optimizer in found]
        name = f"[{recipe.parent.name}](../recipes/{recipe.parent.name}/sft.yaml)"
        size = PARAMETERS[published(read(recipe))]
        parameters = f"{size / 1e9:.2f}B" if size > 5e8 else f"{size / 1e6:.0f}M"
        rows.append(f"| {name} | `{start.path}` | {parameters} | {' | '.join(cells)} |")
    table = "\n".join(rows)
    assert table in (ROOT / "docs" / "models.md").read_text(), f"docs/models.md should have\n{table}"


@pytest.mark.parametrize("recipe", SFT, ids=name_of)
def test_make_starts_a_recipe_as_its_header_says(recipe: Path) -> None:
    cfg = read(recipe, f"model.path={PUBLISHED / published(read(recipe))}")
    for size, (number, _, _) in estimates(recipe).items():
        hardware = Hardware(number, 16, None, int(GPU_GIB[size] * GIB))
        launch = choose(hardware, cfg.train.global_batch_size, {}, needs_of(cfg, hardware))
        assert launch.num_processes == number
        assert launch.config_file.name == ("fsdp2.yaml" if number > 1 else "single_gpu.yaml")


# ---- a look at each, and what it refuses -----------------------------------------------------------------------------

CHATS = [
    {"messages": [{"role": r, "content": c} for r, c in turns]}
    for i in range(40)
    for turns in (
        [("system", "Count."), ("user", f"What comes after {i}?"), ("assistant", f"It is {i + 1}.")],
        [("user", f"{i}?"), ("assistant", "Yes."), ("user", "And then?"), ("assistant", f"Then {i + 1}.")],
    )
]
Folder = Callable[[Config], Path]


@pytest.fixture
def stand_in(tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> Folder:
    """stand_in(cfg): a folder with a small tokenizer that has the template and the turn marks of the published one."""

    def make(cfg: Config) -> Path:
        start = start_of(cfg)
        hub_id = str(start.tokenizer or start.path)
        (words,) = (words for begins, words in WORDS.items() if hub_id.startswith(begins))
        tokenizer = make_tokenizer(words.template, bos=words.bos, eos=words.eos)
        tokenizer.add_special_tokens({"extra_special_tokens": list(words.special)}, replace_extra_special_tokens=False)
        if "strftime_now" in (start.chat_template_args or {}):  # the published template writes today's date
            tokenizer.chat_template = "{%- set today = strftime_now('%d') -%}" + tokenizer.chat_template
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        return tmp_path / "tokenizer"

    return make


def with_stand_in(recipe: Path, tokenizer: Path, *words: str) -> list[str]:
    """Words that put what is here in the place of what is on the hub; a later stage gets its chain's template too."""
    start = start_of(read(recipe))
    rows = tokenizer.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    here = [f"model.path={PUBLISHED / published(read(recipe))}", f"model.tokenizer={tokenizer}"]
    here += [f"data.{part}=[{{path: {rows}}}]" for part in ("train", "val")]
    here += [f"data.cache_dir={tokenizer.parent / 'cache'}", "data.num_proc=1", f"run.dir={tokenizer.parent / 'run'}"]
    if start.chat_template is not None:
        here.append(f"model.chat_template={start.chat_template}")
    return [*here, *words]


@pytest.mark.parametrize("recipe", SFT, ids=name_of)
def test_inspection_without_weights_finds_answers_and_memory(
    recipe: Path, stand_in: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = with_stand_in(recipe, stand_in(read(recipe)), "--gpu-gib", "79", "--json", f"{tmp_path}/look.json")
    number, memory, optimizer = estimates(recipe)["80 GB"]
    if number > 1:
        words += ["--config_file", str(FSDP2), "--num_processes", str(number)]
    monkeypatch.setattr(sys, "argv", ["scripts/inspect_data.py", str(recipe), *words])
    runpy.run_path(str(ROOT / "scripts" / "inspect_data.py"))["main"]()
    found = json.loads((tmp_path / "look.json").read_text())
    where = f"each of {number} GPUs (fsdp2, {number} shards)" if number > 1 else "one GPU"
    assert f"about {memory} on {where} of 79.0 GiB" in capsys.readouterr().out
    assert (found["memory"]["fits"], found["memory"]["optimizer"]) == (True, optimizer)
    assert found["end_of_turn_pct"] == 100.0
    assert found["sources"][0]["skipped_bad"] == found["sources"][0]["dropped_no_target"] == 0
    assert found["sources"][0]["answers"]["answers_learned"] == 120


def test_the_recipe_of_the_readme_trains_the_named_model_on_the_named_file(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    block = (root / "README.md").read_text().partition("## Your own file")[2].split("```")[1]
    assert len(block.strip().splitlines()) <= 5
    (tmp_path / "my.yaml").write_text(block.replace("extends: ", f"extends: {root}/"))
    cfg = read(tmp_path / "my.yaml")
    assert (cfg.model.path, [source.path for source in cfg.data.train]) == ("Qwen/Qwen3-0.6B-Base", ["my_chats.jsonl"])
    assert cfg.data.val_fraction is not None
    assert list(cfg.data.val) == []


@pytest.mark.parametrize("recipe", SFT, ids=name_of)
def test_a_row_longer_than_the_models_positions_is_refused(recipe: Path, stand_in: Folder) -> None:
    cfg, tokenizer = read(recipe), stand_in(read(recipe))
    max_positions = positions(shell(published(cfg)))
    assert max_positions is not None
    longer = [f"data.max_length={max_positions + 1}", f"data.row_length={2 * max_positions}"]
    longer = read_config(recipe, with_stand_in(recipe, tokenizer, *longer), world_size=1)
    words = analysis.tokenizer_of(longer.model, longer.data)
    with pytest.raises(
        ConfigError, match=f"data.max_length: {max_positions + 1} is more than the model's {max_positions} positions"
    ):
        resolve_max_length(longer.model, longer.data.max_length, words, "bf16", max_positions)


@pytest.mark.parametrize("recipe", SFT, ids=name_of)
def test_a_template_that_is_missing_or_leaves_answers_out_is_refused(recipe: Path, stand_in: Folder) -> None:
    tokenizer = stand_in(read(recipe))
    (tokenizer / "chat_template.jinja").unlink(missing_ok=True)
    mute = tokenizer.parent / "mute.jinja"
    mute.write_text("{%- for m in messages %}{%- if m.role == 'user' %}{{- m.content }}{%- endif %}{%- endfor %}")
    args = "model.chat_template_args=null"
    for template, problem in (
        ("null", "has no chat template. Set model.chat_template"),
        (mute, "cannot render a plain .* take another one made for this tokenizer: model.chat_template"),
    ):
        words = with_stand_in(recipe, tokenizer, args, f"model.chat_template={template}")
        cfg = read_config(recipe, words, world_size=1)
        learn = stage_rule("sft")(cfg.data, analysis.tokenizer_of(cfg.model, cfg.data), 2048)
        with pytest.raises(ConfigError, match=problem):
            learn(Row("rows.jsonl:1", messages=CHATS[0]["messages"]))


@pytest.mark.parametrize("recipe", SFT, ids=name_of)
def test_a_topology_that_cannot_hold_or_cut_the_model_is_refused(recipe: Path, tmp_path: Path) -> None:
    cfg = read(recipe)
    least = memory_plan(read(recipe, "optim.name=adamw_sr"), None, Topology()).setup
    assert least is not None
    with pytest.raises(ConfigError, match=r"parameters take .*fsdp2\.yaml on 2 such GPUs or more"):
        memory_plan(cfg, 0.9 * held_bytes(least) / GIB, Topology())
    model_type = shell(published(cfg)).config.model_type
    config = yaml.safe_load((ROOT / "accelerate_configs" / "tp.yaml").read_text())
    config["parallelism_config"]["parallelism_config_tp_size"] = size = 32 if model_type in TENSOR_MODEL_TYPES else 2
    (tmp_path / "tp.yaml").write_text(yaml.safe_dump(config))
    message = (
        "does not divide the model's num_" if model_type in TENSOR_MODEL_TYPES else "has no tensor-parallel plan here"
    )
    with pytest.raises(ConfigError, match=message):
        memory_plan(cfg, 139.0, topology_of(tmp_path / "tp.yaml", size))
