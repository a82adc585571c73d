"""scripts/evaluate.py: its arguments, its messages, what it prints and writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import preloaded
import pytest
import torch
from helpers import cpu_runtime
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sftkit.config.schema import EvalConfig, ModelConfig, SourceConfig
from sftkit.errors import ConfigError, DataError
from sftkit.evals.flags import as_source, check_arguments, eval_config, flags_named, parse
from sftkit.evals.harness import load_validation
from sftkit.evals.suite import load_tasks
from sftkit.rundir.names import TRAINING_STATE
from sftkit.runtime import hub

WORDS = ("sea shells", "Berlin", "a user", "one, two", "the shore")


@pytest.fixture
def model(tokenizer) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes, initializer_range=0.5)
    return LlamaForCausalLM(config)


def test_arguments_of_the_script_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("")

    def check(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *words])
        check_arguments(parse("about"))

    model = str(tmp_path)
    check(model, "--out", str(tmp_path / "a" / "b"), "--val", str(tmp_path / "rows.jsonl"), "builtin:docs[heldout]")
    assert (tmp_path / "a" / "b").is_dir()
    for words, text in (
        (("mmlu",), "mmlu is a task: name the model before it"),
        (("runs/nothing",), "runs/nothing: no such folder"),
        ((model, "--batch-size", "0"), "--batch-size 0: must be 1 or more"),
        ((model, "--out", "/dev/null/x"), "no folder can be made there"),
        ((model, "mmul"), '^tasks: "mmul" is not one of .* Did you mean "mmlu"'),
        ((model, "humaneval"), "^--allow-code-execution: needed by humaneval"),
        ((model, "mmlu", "--data", "nowhere"), "^--data nowhere: no such folder"),
        ((model, "--val", "rows.jsonl"), "rows.jsonl: no such file or folder"),
        ((model, "--val", "owner/name[validation]"), "owner/name .*: no such file or folder"),
    ):
        with pytest.raises(ConfigError, match=text):
            check(*words)


def test_an_adapter_whose_model_has_moved_is_rejected_before_torch_is_loaded(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "runs/moved"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    rejected = f"""
import sys
from sftkit.errors import ConfigError
from sftkit.evals.flags import check_arguments, parse
from sftkit.models.files import find_with_base
sys.argv = ["evaluate.py", {str(tmp_path)!r}]
for check in (lambda: check_arguments(parse("about")), lambda: find_with_base({str(tmp_path)!r})):
    try:
        check()
    except ConfigError as error:
        assert "runs/moved is not there" in str(error), error
    else:
        raise AssertionError
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", rejected], check=True, timeout=60)


@pytest.mark.parametrize(
    "config", [{"model_type": "vision-encoder-decoder"}, {"model_type": "t5", "is_encoder_decoder": True}]
)
def test_a_model_with_an_encoder_is_refused_before_its_data_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for words in (("mmlu", "--data", "nowhere"), ("--val", "nowhere.jsonl"), ()):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", str(tmp_path), *words])
        with pytest.raises(
            ConfigError, match=r"has an encoder: scripts/evaluate\.py is for models that continue a text"
        ):
            check_arguments(parse("about"))


def test_flags_become_settings_and_families_are_run_unless_validation_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def config(*words: str) -> EvalConfig:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *words])
        return eval_config(parse("about"))

    assert config() == EvalConfig(tasks=("families",), samples=0, batch_size=64)
    assert config("m", "--val", "x").tasks == ()
    assert config("m", "piqa", "--val", "x").tasks == ("piqa",)
    assert config("m", "piqa", "--shots", "2", "--format", "chat", "--allow-code-execution", "--max-examples", "3") == (
        EvalConfig(
            tasks=("piqa",), shots=2, format="chat", allow_code_execution=True, max_examples=3, samples=0, batch_size=64
        )
    )


def test_a_run_is_evaluated_on_what_it_was_unless_something_else_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "step-000010"
    step.mkdir()
    (step / "config.json").write_text("{}")
    (tmp_path / "LATEST").write_text(step.name)
    (tmp_path / "rows.jsonl").write_text("")
    rows = SourceConfig(path=str(tmp_path / "rows.jsonl"), max_rows=5)

    def written(text: str, *words: str, path: Path = tmp_path) -> tuple[EvalConfig, tuple[SourceConfig, ...]]:
        (tmp_path / "config.yaml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["evaluate.py", str(path), *words])
        args = parse("about")
        check_arguments(args)
        return eval_config(args), args.val

    evaluated = (
        "eval: {every: 5, at_start: true, tasks: [piqa, gsm8k], shots: 2, format: chat, batch_size: 8, "
        f"allow_code_execution: true}}\ndata: {{val: [{{path: {rows.path}, max_rows: 5}}]}}\n"
    )
    own = EvalConfig(tasks=("piqa", "gsm8k"), shots=2, format="chat", batch_size=8, samples=0)
    assert written(evaluated) == written(evaluated, path=step) == (own, (rows,))
    member = step / "adapters" / "one"
    member.mkdir(parents=True)
    (member / "config.json").write_text("{}")
    assert written(evaluated, path=member) == (own, (rows,))
    assert written(evaluated, "--shots", "0", "--batch-size", "4") == (replace(own, shots=0, batch_size=4), (rows,))
    assert written(evaluated, "mmlu") == (EvalConfig(tasks=("mmlu",), samples=0), ())
    assert written(evaluated, "--val", "builtin:docs[heldout]")[0].tasks == ()
    assert written(f"eval: {{}}\ndata: {{val: [{{path: {rows.path}, max_rows: 5}}]}}\n")[0].tasks == ()
    assert written("wandb_version: 1\n")[0].tasks == ("families",), "not a recipe's"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert written(evaluated, path=model)[0].tasks == ("families",), "what lies beside a run's recipe is not of the run"
    for text, message in (
        ("eval: {}\ndata: {}\n", r"config\.yaml: this run was evaluated on nothing .*: name tasks, or --val$"),
        ("eval: {tasks: 3}\ndata: {}\n", r"cannot be read \(another version\): name tasks, or --val$"),
        ("eval: {\n", r"cannot be read \(config\.yaml: .*not valid YAML"),
        ("eval: {tasks: [humaneval], allow_code_execution: true}\ndata: {}\n", "^--allow-code-execution: needed by"),
    ):
        with pytest.raises(ConfigError, match=message):
            written(text)


def test_a_source_may_name_its_split() -> None:
    assert as_source("a/b[train[:10]]") == SourceConfig(path="a/b", split="train[:10]")
    assert as_source("a/b") == SourceConfig(path="a/b")


def test_messages_of_the_script_name_its_flags(tokenizer) -> None:
    for settings, text in (
        ({"tasks": ("humaneval",)}, "--allow-code-execution: needed by humaneval"),
        ({"tasks": ("families",), "shots": 5}, r"--shots: 5: no task here takes shots \(families\): leave it out"),
        ({"tasks": ("piqa",), "data": "/nowhere"}, "--data /nowhere: no such folder"),
        ({"tasks": ("piqa",), "backend": "lm_eval", "max_new_tokens": 3}, "--max-new-tokens: lm_eval's tasks have"),
        ({"tasks": ("mmul",)}, 'tasks: "mmul" is not one of .*set --backend to lm_eval|Did you mean'),
    ):
        with pytest.raises((ConfigError, DataError), match=text) as error, flags_named():
            load_tasks(EvalConfig(**settings), tokenizer, cpu_runtime())
        assert not re.search(r"\beval\.", str(error.value))


def test_validation_data_is_made_as_the_run_made_its_own(tmp_path: Path, make_tokenizer) -> None:
    tokenizer = make_tokenizer("qwen3")
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]})
    )
    learned = {}
    for name, state in (
        ("none", None),
        ("auto", {"max_length": 50, "thinking": "auto", "split_turns": True}),
        (
            "empty",
            {"max_length": 50, "thinking": "learn_empty", "split_turns": True, "targets": None, "too_long": "drop"},
        ),
    ):
        checkpoint = tmp_path / name
        if state is not None:
            (checkpoint / TRAINING_STATE).parent.mkdir(parents=True)
            (checkpoint / TRAINING_STATE).write_text(json.dumps(state))
        source = ModelConfig(path=str(checkpoint))
        examples, layout = load_validation(
            [SourceConfig(path=str(tmp_path / "a.jsonl"))], source, 500, tokenizer, cpu_runtime()
        )
        (example,) = (one[0] for one in examples.values())
        learned[name] = tokenizer.decode(example.ids[example.is_target].tolist())
        assert layout is not None
        assert layout.max_length == (500 if state is None else 50)
    assert learned == {
        "none": "So.<|im_end|>",
        "auto": "So.<|im_end|>",
        "empty": "<think>\n\n</think>\n\nSo.<|im_end|>",
    }


@pytest.fixture
def folder(tmp_path: Path, model, tokenizer) -> Path:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def script(*words: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(["scripts/evaluate.py", *words], env={**os.environ, "ACCELERATE_USE_CPU": "true"})


def test_the_script_evaluates_any_model_folder_on_local_rows(folder: Path) -> None:
    rows = [{"goal": f"go {i}", "sol1": "walk", "sol2": "sit", "label": i % 2} for i in range(6)]
    (folder / "piqa_validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"text": f"{word} and the shore"} for word in WORDS]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    done = script(
        *(str(folder / "model"), "piqa", "--data", str(folder), "--max-examples", "5", "--out", str(folder / "out")),
        *("--val", str(folder / "held_out.jsonl"), "builtin:tasks[heldout[:20]]"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads((folder / "out" / "results.json").read_text())
    assert (found["task"], found["examples"], found["chance"]) == ("piqa", 5, 0.5)
    assert len((folder / "out" / "piqa.jsonl").read_text().splitlines()) == 5
    assert found["settings"]["model"] == str(folder / "model")
    written = json.loads((folder / "out" / "validation.json").read_text())
    sources = {"held_out": 5, "tasks": 20}
    assert written["values"].keys() == {
        f"val/{name}{m}" for name in ("", "held_out/", "tasks/") for m in ("loss", "bpb")
    }
    assert written["settings"]["documents"] == sources
    model, tokenizer = (kind.from_pretrained(folder / "model") for kind in (LlamaForCausalLM, AutoTokenizer))
    nats, targets = torch.zeros(()), 0
    for row in texts:
        ids = torch.tensor([[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]])
        nats += model(ids, labels=ids).loss.detach() * (ids.shape[1] - 1)
        targets += ids.shape[1] - 1
    assert written["values"]["val/held_out/loss"] == pytest.approx(float(nats) / targets, rel=1e-4)
    assert "prompts_cut" in found["settings"]
    for expected in ("val/held_out", "95 % interval", "piqa", f"{found['value']:.3f}", "centred mean"):
        assert expected in done.stdout
