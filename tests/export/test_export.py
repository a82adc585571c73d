"""sftkit export: a folder that plain transformers reads gives the answers of the run, or there is no folder."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny, tiny_llama
from huggingface_hub import ModelCard
from made_run import make_run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig, Qwen3MoeConfig

from sftkit.config.schema import AdapterConfig, ModelConfig
from sftkit.errors import ConfigError
from sftkit.export import check_export, reread
from sftkit.export import export as module
from sftkit.export.export import export
from sftkit.models.adapter_files import base_digest
from sftkit.models.adapters import Adapters, add_adapters, peft_config_text
from sftkit.models.load import load_model
from sftkit.models.tokenizer import load_tokenizer, train_tokenizer
from sftkit.models.trained import factors
from sftkit.models.vocabulary import add_tokens

TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the folder again here: a process of its own costs seconds."""
    real = module.subprocess.run

    def run(words: list[str], **options: Any) -> Any:
        if words[1:3] != ["-m", "sftkit.export.reread"]:
            return real(words, **options)
        lines: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", words[2:])
            patch.setattr(reread, "print_text", lines.append)
            reread.main()
        return module.subprocess.CompletedProcess(words, 0, "\n".join(lines), "")

    monkeypatch.setattr(module.subprocess, "run", run)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with its tokenizer."""
    tokenizer = train_tokenizer(["a few words about words"], 300, TEMPLATE)
    folder = tmp_path / "base"
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def adapter_on(base: Path, folder: Path, **settings: Any) -> Path:
    """Write an adapter whose B is not zero."""
    source = ModelConfig(path=str(base))
    orig_model = load_model(source, load_tokenizer(source), 0)
    add_adapters(orig_model, Adapters(AdapterConfig(**settings), 0, source, ""))
    for name, factor in factors(orig_model).items():
        if "lora_B" in name:
            torch.nn.init.normal_(factor, std=0.1)
    folder.mkdir()
    save_file(
        {f"base_model.model.{n}": p.detach() for n, p in factors(orig_model).items()}, folder / module.ADAPTER_WEIGHTS
    )
    (folder / module.ADAPTER_CONFIG).write_text(peft_config_text(orig_model))
    return folder


def test_a_whole_model_is_written_in_shards_and_answers_the_same(model: Path, tmp_path: Path) -> None:
    lines = export(str(model), tmp_path / "out", max_shard="20KB")
    assert "8 of 8 greedy answers are the same" in lines[1]
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    before = load_file(model / "model.safetensors")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert f"vllm serve {tmp_path / 'out'}" in lines[-4]
    assert lines[-1].startswith("llama.cpp's converter knows no tokenizer that was trained here")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_merged_adapter_is_a_whole_model_of_the_precision_asked_for(
    dtype: Any, torch_dtype: torch.dtype, model: Path, tmp_path: Path
) -> None:
    adapter = adapter_on(model, tmp_path / "adapter", rank=4)
    lines = export(str(adapter), tmp_path / "out", merge=True, dtype=dtype)
    assert lines[0].startswith(f"{tmp_path / 'out'}: model, {dtype}")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    source = ModelConfig(path=str(adapter))
    merged = load_model(source, load_tokenizer(source), 0)
    assert after.dtype == torch_dtype
    name = "model.layers.0.mlp.up_proj.weight"
    change = after.get_parameter(name).float() - merged.get_parameter(name)
    assert change.abs().max() < 0.005 * merged.get_parameter(name).abs().max()
    assert not torch.equal(merged.get_parameter(name), load_file(model / "model.safetensors")[name])


def test_an_adapter_alone_is_its_files_and_peft_reads_them(model: Path, tmp_path: Path) -> None:
    adapter = adapter_on(model, tmp_path / "adapter", rank=5)
    lines = export(str(adapter), tmp_path / "out")
    assert (tmp_path / "out" / module.ADAPTER_WEIGHTS).read_bytes() == (adapter / module.ADAPTER_WEIGHTS).read_bytes()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert "8 of 8 greedy answers are the same" in lines[1]
    assert any("--max-lora-rank 8" in line for line in lines)
    assert any(f"--base {model} " in line and "llama-server -m base.gguf --lora out.gguf" in line for line in lines)


def test_an_adapter_with_rows_of_added_tokens_is_exported_alone_and_merged(model: Path, tmp_path: Path) -> None:
    """The model under it has no rows for these tokens."""
    source, adapter = ModelConfig(path=str(model)), tmp_path / "adapter"
    tokenizer = load_tokenizer(source)
    tokenizer.chat_template = f"{{{{ '<|new|>' }}}}{TEMPLATE}"
    add_tokens(tokenizer, ["<|new|>"])
    orig_model = load_model(source, tokenizer, 0, adapter=AdapterConfig(rank=4))
    for name, factor in factors(orig_model).items():
        if "lora_A" not in name:
            torch.nn.init.normal_(factor, std=0.1)
    tokenizer.save_pretrained(adapter)
    tensors = {f"base_model.model.{name}": p.detach() for name, p in factors(orig_model).items()}
    save_file(tensors, adapter / module.ADAPTER_WEIGHTS)
    (adapter / module.ADAPTER_CONFIG).write_text(peft_config_text(orig_model))
    lines = export(str(adapter), tmp_path / "alone")
    assert lines[1].startswith("PeftModelForCausalLM of transformers: 8 of 8 greedy answers are the same")
    assert "load no trained rows of tokens: add --merge" in lines[-1]
    lines = export(str(adapter), tmp_path / "merged", merge=True)
    assert "8 of 8 greedy answers are the same" in lines[1]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    name = "model.embed_tokens"
    row = factors(orig_model)[f"{name}.token_adapter.trainable_tokens_delta"]
    assert torch.equal(merged.get_parameter(f"{name}.weight")[len(tokenizer) - 1 :], row)


def run_with(files: Path, tmp_path: Path) -> Path:
    """Return a run whose last checkpoint has these files."""
    run = make_run(tmp_path / "chat" / "sft")
    step = run / "step-000600"
    (step / "model.safetensors").unlink()
    shutil.copytree(files, step, dirs_exist_ok=True)
    return step


@pytest.mark.parametrize("kind", ["whole", "merged", "adapter"])
def test_the_code_in_the_card_runs_in_the_exported_folder_and_nothing_there_has_the_token(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token = "hf" + "_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3z"
    monkeypatch.setenv("HF_TOKEN", token)
    files = model
    if kind != "whole":
        files = adapter_on(model, tmp_path / "adapter", rank=4)
        load_tokenizer(ModelConfig(path=str(model))).save_pretrained(files)
    out = tmp_path / "out"
    export(str(run_with(files, tmp_path)), out, merge=kind == "merged")
    card = ModelCard.load(out / "README.md")
    assert (card.data.library_name, card.data.base_model) == (
        "peft" if kind == "adapter" else "transformers",
        "Qwen/Qwen3-0.6B",
    )
    assert card.data.base_model_relation == ("adapter" if kind == "adapter" else "finetune")
    assert "| smoltalk2 | 41,000 |" in card.text
    assert "arc\\_easy | acc\\_norm | 0.5376 | 0.498 to 0.578" in card.text
    assert not [path for path in out.iterdir() if token.encode() in path.read_bytes()]
    code = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert len(code) == 1
    assert "apply_chat_template" in code[0]
    monkeypatch.chdir(out)
    capsys.readouterr()
    exec(code[0], {})
    assert capsys.readouterr().out


def test_an_exported_adapter_names_its_base_and_its_digest(model: Path, tmp_path: Path) -> None:
    adapter = adapter_on(model, tmp_path / "adapter", rank=4)
    load_tokenizer(ModelConfig(path=str(model))).save_pretrained(adapter)
    step = run_with(adapter, tmp_path)
    lines = export(str(step), tmp_path / "out")
    digest = base_digest(model)
    base = json.loads((tmp_path / "out" / "manifest.json").read_text())["base"]
    assert base == {"path": str(model), "revision": None, "sha256": digest}
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"sha256 of the weights under the adapter | <code>{digest}</code>" in card
    assert "where they were on the machine that trained | <code>" in card
    told = next(line for line in lines if line.startswith("its base is a folder of this machine"))
    assert digest[:16] in told
    assert "write the hub id of these weights as base_model_name_or_path" in told
    # Whoever loads it on other weights is told.
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = 2.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="was trained on other weights"):
        load_model(ModelConfig(path=str(tmp_path / "out")), load_tokenizer(ModelConfig(path=str(model))), 0)


def mixture(folder: Path, config: Any, fields: dict[str, Any]) -> Path:
    """A mixture of experts with its tokenizer."""
    tokenizer = train_tokenizer(["a few words about words"], 300, TEMPLATE)
    tiny(config, vocab_size=len(tokenizer), **fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


MIXTURES = {
    "qwen3_moe": (Qwen3MoeConfig, {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "glm4_moe": (
        Glm4MoeConfig,
        {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")  # peft looks at layers alone
def test_each_expert_gets_factors_under_the_names_of_its_matrices_and_peft_reads_them(
    name: str, tmp_path: Path
) -> None:
    base = mixture(tmp_path / "base", *MIXTURES[name])
    adapter = adapter_on(base, tmp_path / "adapter", rank=3, alpha=5.0)
    lines = export(str(adapter), tmp_path / "out", per_expert=True)
    # transformers gives these files to peft, which joins the factors again in its own way.
    assert "8 of 8 greedy answers are the same" in lines[1]
    assert any("vllm serve" in line for line in lines)
    found = load_file(tmp_path / "out" / module.ADAPTER_WEIGHTS)
    matrices = {n for n in load_file(base / "model.safetensors") if ".experts." in n}
    assert matrices
    assert {n.replace(".lora_A", "") for n in found if ".experts." in n and "lora_A" in n} == {
        f"base_model.model.{n}" for n in matrices
    }
    # The sum for one expert, by hand.
    own = load_file(adapter / module.ADAPTER_WEIGHTS)
    layer = "base_model.model.model.layers.1.mlp.experts"
    a, b = own[f"{layer}.base_layer.lora_A.weight"][6:9], own[f"{layer}.base_layer.lora_B.weight"][:, 2::4]
    block, gate, up = ("block_sparse_moe", "w1", "w3") if name == "mixtral" else ("mlp", "gate_proj", "up_proj")
    expert = f"base_model.model.model.layers.1.{block}.experts.2"
    parts = [found[f"{expert}.{m}.lora_B.weight"] @ found[f"{expert}.{m}.lora_A.weight"] for m in (gate, up)]
    torch.testing.assert_close(torch.cat(parts), b @ a)


def test_an_adapter_of_experts_says_how_it_can_be_served(tmp_path: Path) -> None:
    adapter = adapter_on(mixture(tmp_path / "base", *MIXTURES["qwen3_moe"]), tmp_path / "adapter", rank=3)
    lines = export(str(adapter), tmp_path / "out")
    assert "load no adapters of experts in this form: add --per-expert, or add --merge" in lines[-1]
    settings = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(settings | {"model_type": "granitemoe"}))
    with pytest.raises(ConfigError, match="the files of granitemoe have no matrix for each expert"):
        export(str(adapter), tmp_path / "other", per_expert=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_merged_onto_nf4_is_the_model_that_was_trained(dtype: Any, model: Path, tmp_path: Path) -> None:
    adapter = adapter_on(model, tmp_path / "adapter", rank=4)
    recipe = {"adapter": {"base": "nf4"}, "train": {"precision": "fp32"}}
    (adapter / "recipe.yaml").write_text(json.dumps(recipe))
    lines = export(str(adapter), tmp_path / "full", merge=True)
    assert lines[2].startswith("merged onto the full base, and trained on it in NF4: --onto nf4")
    lines = export(str(adapter), tmp_path / "nf4", merge=True, onto="nf4", dtype=dtype)
    assert lines[2].startswith("merged onto what NF4 holds of its base")
    source = ModelConfig(path=str(adapter))
    trained = load_model(source, load_tokenizer(source), 0, adapter=AdapterConfig(rank=4, base="nf4"))
    ids = torch.arange(12)[None]
    expected = trained(ids).logits.detach()
    merged, full = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("nf4", "full"))
    assert merged.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    changes = [
        float((one(ids).logits.detach() - expected).abs().max() / expected.abs().max()) for one in (merged, full)
    ]
    assert changes[0] < {"fp32": 1e-5, "bf16": 0.03}[dtype] < 0.05 < changes[1]


def test_an_adapter_of_a_full_model_is_not_merged_onto_nf4(model: Path, tmp_path: Path) -> None:
    adapter = adapter_on(model, tmp_path / "adapter", rank=4)
    (adapter / "recipe.yaml").write_text(json.dumps({"adapter": {"rank": 4}, "train": {"precision": "auto"}}))
    with pytest.raises(ConfigError, match="trained on the full model: leave --onto out"):
        export(str(adapter), tmp_path / "out", merge=True, onto="nf4")
    # A folder of peft, two folders below a recipe that is not that of a step.
    inside = adapter / "peft" / "mine"
    shutil.copytree(adapter, inside, ignore=lambda *_: ["recipe.yaml", "peft"])
    (adapter / "recipe.yaml").write_text("adapter: {}\n")
    export(str(inside), tmp_path / "out")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    weights = inside / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="cannot read weights"):
        check_export(str(inside), tmp_path / "other", merge=False, dtype=None, max_shard="5GB")


def test_servers_are_named_that_cannot_load_an_adapter(model: Path, tmp_path: Path) -> None:
    lines = export(str(adapter_on(model, tmp_path / "adapter", rank=4, method="dora")), tmp_path / "out")
    assert lines[-1] == "vLLM and llama.cpp load no DoRA: add --merge, and serve that folder"


def test_a_folder_that_answers_differently_is_not_exported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.answers
    monkeypatch.setattr(module, "answers", lambda *a: [one._replace(logits=one.logits * 1.01) for one in real(*a)])
    with pytest.raises(ConfigError, match="does not answer as the run, so nothing is exported"):
        export(str(model), tmp_path / "out")
    monkeypatch.setattr(module, "answers", lambda *a: [one._replace(prompt=one.prompt[1:]) for one in real(*a)])
    with pytest.raises(ConfigError, match="gives other tokens"):
        export(str(model), tmp_path / "out")
    assert {file.name for file in tmp_path.iterdir()} == {"base"}


def test_a_model_that_is_larger_than_the_gpu_is_compared_on_the_host(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelConfig(path=str(model))
    orig_model = load_model(source, load_tokenizer(source), 0)
    monkeypatch.setattr(module, "start_device", lambda: torch.device("cuda"))
    for free, device in ((2 * orig_model.get_memory_footprint(), "cuda"), (1000, "cpu")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        assert module._device_for(orig_model).type == device


def test_weights_beyond_half_precision_are_an_error(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has numbers above 65,504"):
        export(str(model), tmp_path / "out", dtype="fp16")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"merge": True}, "nothing to merge"),
        ({"max_shard": "5XB"}, "such as 5GB"),
        ({"out": "base"}, "it is there already: name another folder, or move it away$"),
        ({"out": "base", "push": "me/x"}, r"or publish it as it is: .*/base --push me/x$"),
        ({"out": None}, "--out DIR is missing"),
        ({"out": None, "push": "me/x", "dtype": "bf16"}, "--out DIR is missing"),
        ({"out": None, "push": "me/x", "per_expert": True}, "--out DIR is missing"),
        ({"out": None, "push": "me/x", "max_shard": "1GB"}, "--out DIR is missing"),
        ({"yes": True}, "--yes: nothing is pushed without --push ORG/NAME"),
        ({"onto": "nf4"}, "says what an adapter is merged into"),
        ({"per_expert": True}, "has no adapter of experts, or --merge adds it"),
    ],
)
def test_options_that_do_not_go_with_a_model_are_errors(
    options: dict[str, Any], problem: str, model: Path, tmp_path: Path
) -> None:
    name = options.pop("out", "out")
    with pytest.raises(ConfigError, match=problem):
        check_export(
            str(model), name and tmp_path / name, **{"merge": False, "dtype": None, "max_shard": "5GB"} | options
        )


def test_an_adapter_alone_has_no_precision_to_choose(model: Path, tmp_path: Path) -> None:
    adapter = adapter_on(model, tmp_path / "adapter", rank=4)
    with pytest.raises(ConfigError, match="an adapter alone is copied as it is: add --merge"):
        export(str(adapter), tmp_path / "out", dtype="bf16")


def test_answers_are_compared_by_every_number(model: Path, tmp_path: Path) -> None:
    source = ModelConfig(path=str(model))
    tokenizer = load_tokenizer(source)
    found = reread.answers(load_model(source, tokenizer, 0), tokenizer)
    reread.write_answers(found, tmp_path / "answers")
    same = reread.compare_answers(found, tmp_path / "answers")
    assert same == {"prompts": 8, "same_prompts": True, "same_answers": 8, "logits": 0.0}
    changed = [found[0]._replace(tokens=found[0].tokens + 1), *found[1:]]
    assert reread.compare_answers(changed, tmp_path / "answers")["same_answers"] == 7
    broken = [*found[:3], found[3]._replace(logits=found[3].logits * torch.nan), *found[4:]]
    assert math.isnan(reread.compare_answers(broken, tmp_path / "answers")["logits"])
    json.dumps(same)
