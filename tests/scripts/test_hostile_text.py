"""Real scripts over data, names and a model that hold escape sequences: none reaches the terminal or a page as it is."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import preloaded
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ENV = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
HOSTILE = "\x1b[31m\x1b]8;;http://x\x1b\\\x1b]52;c;QQ==\x07\x9b2J\rover\x08\u202ecba\u2067\u200b\u2028\U000e0041[red]"
STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)
SHOWN = r"\x1b[31m\x1b]8;;http://x\x1b\\x1b]52;c;QQ==\x07\x9b2J\rover\x08\u202ecba\u2067\u200b\u2028\U000e0041[red]"
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def recipe(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Rows, columns, a role, the names of a file and of a source: all of them hostile."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = tmp_path / f"rows{HOSTILE.replace('/', '|')}.jsonl"
    odd = [{HOSTILE: 1}, {"messages": [{"role": HOSTILE, "content": "x"}]}, chat("<|im_end|>" + HOSTILE, "No.")]
    odd.append({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": {HOSTILE: 1}}]})
    good = [chat(f"{HOSTILE} {i}?", f"{HOSTILE} yes, {i}.") for i in range(20)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in good + odd) + "{" + HOSTILE)
    made = {
        "run": {"dir": f"{tmp_path}/run", "seed": 0},
        "model": {"scratch": {"model_type": "llama", "vocab_size": 600, **TINY}, "tokenizer": f"{tmp_path}/tokenizer"},
        "data": {
            "train": [{"path": str(rows), "name": f"mine{HOSTILE}"}],
            "max_length": 512,
            "cache_dir": f"{tmp_path}/cache",
            "on_bad_row": "skip",
        },
        "train": {"max_steps": 1},
    }
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def test_a_look_at_hostile_data_shows_it_written_out(recipe: Path) -> None:
    page = recipe.with_name("look.html")
    done = preloaded.run(
        ["scripts/inspect_data.py", str(recipe), "--stage", "sft", "--html", str(page), "--preview", "2"], 1, ENV
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for text in (done.stdout, done.stderr, page.read_text()):
        assert not STEERING.findall(text)
    assert done.stdout.count(SHOWN) >= 2 * 2 + 4  # previews and findings
    assert SHOWN in page.read_text()


def test_a_refused_row_recipe_and_word_are_shown_written_out(recipe: Path) -> None:
    for words, part in (
        ([str(recipe), "data.on_bad_row=error"], r"are none of the accepted ones"),
        ([str(recipe), "\u202ecba\x9b=1", f"data.layout={json.dumps(HOSTILE)}"], "is not a known key"),
        ([f"{HOSTILE.replace('=', '')}.yaml"], "no such file"),
    ):
        done = preloaded.run(["scripts/inspect_data.py", *words, "--stage", "sft"], 1, ENV)
        assert done.returncode == 2, done.stdout[-2000:]
        assert part in done.stderr
        assert r"\u202ecba" in done.stderr
        assert not STEERING.findall(done.stdout + done.stderr)


def test_what_a_model_says_is_shown_written_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=None, **TINY))
    # It says one of two bytes that control a terminal at every position, whichever way its first hidden value points.
    escape, bell = (tokenizer.encode(byte, add_special_tokens=False)[-1] for byte in ("\x1b", "\x07"))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[escape, 0], model.lm_head.weight[bell, 0] = 100.0, -100.0
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    words = ["scripts/chat.py", str(tmp_path), "--prompt", "Hi?", "--temperature", "0", "--max-new-tokens", "20"]
    done = preloaded.run(words, 1, ENV)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not STEERING.findall(done.stdout + done.stderr)
    assert len(re.findall(r"\\x(?:1b|07)", done.stdout)) == 20
