"""Decoding speed of the evaluation engine: batches against one prompt at a time, eager steps against replayed and compiled
ones, and against transformers' own generate.

python benchmarks/h200_decode/measure.py TOKENIZER_FOLDER QUESTIONS.jsonl OUT.json [LAYERS PROMPTS]

The model is the Qwen3 0.6B shape with random weights (speed does not depend on them; an answer never ends by itself), the
prompts are questions of GSM8K through the chat template. Every way answers in full: the same number of new tokens. LAYERS
and PROMPTS make it smaller, to try the script.

Replayed steps are recorded as a CUDA graph, once a batch; compiled ones go through Inductor first, then the same. `first_seconds`
is the first call, compiling included, `same_answers` the share of answers that are those of the first
way with the same prompts (transformers' for two, eager batches of 64 for all), to the letter.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from sftkit.data import chat
from sftkit.generation import decode, kv_cache
from sftkit.generation.static_step import StaticStep
from sftkit.runtime.hardware import environment

NEW_TOKENS = 128


class CompiledStep(StaticStep):
    """A step whose kernels are Inductor's, recorded as the others are."""

    _compute = torch.compile(StaticStep._compute, fullgraph=True)


def build(vocab_size: int, layers: int, device: torch.device) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Qwen3ForCausalLM(config).to(device, dtype).eval()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def main(tokenizer_folder: str, questions: Path, out: Path, layers: int = 28, count: int = 256) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = [json.loads(line) for line in questions.read_text().splitlines()[:count]]
    asked = [[{"role": "user", "content": row["question"]}] for row in rows]
    prompts = [chat.render_prompt(messages, tokenizer) for messages in asked]
    model = build(len(tokenizer), layers, device)

    def ours(some: list[list[int]], batch_size: int, step: type[StaticStep] | None = None) -> list[str]:
        compiles = mock.patch.object(kv_cache, "run_eagerly", nullcontext)  # generation forbids it otherwise
        with mock.patch.object(decode, "StaticStep", step or StaticStep), compiles:
            answers = decode.generate(
                model, tokenizer, some, stop_ids=[-1], max_new_tokens=NEW_TOKENS, batch_size=batch_size,
                replay=step is not None,
            )  # fmt: skip
        return [answer.text for answer in answers]

    def theirs(some: list[list[int]]) -> list[str]:
        found = []
        for prompt in some:
            ids = torch.tensor([prompt], device=device)
            answer = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )[0, len(prompt) :]  # fmt: skip
            found.append(str(tokenizer.decode(answer, skip_special_tokens=True)))
        return found

    few = prompts[:2]
    ways: dict[str, tuple[Callable[[], list[str]], int]] = {
        "transformers generate, one by one": (lambda: theirs(few), len(few)),
        "eager, one by one": (lambda: ours(few, 1), len(few)),
        "replayed, one by one": (lambda: ours(few, 1, StaticStep), len(few)),
        "compiled, one by one": (lambda: ours(few, 1, CompiledStep), len(few)),
        "eager, batches of 64": (lambda: ours(prompts, 64), len(prompts)),
        "replayed, batches of 64": (lambda: ours(prompts, 64, StaticStep), len(prompts)),
        "compiled, batches of 64": (lambda: ours(prompts, 64, CompiledStep), len(prompts)),
        "eager, batches of 256": (lambda: ours(prompts, 256), len(prompts)),
        "replayed, batches of 256": (lambda: ours(prompts, 256, StaticStep), len(prompts)),
        "compiled, batches of 256": (lambda: ours(prompts, 256, CompiledStep), len(prompts)),
    }
    results: dict[str, Any] = {"environment": environment(device, 1), "new_tokens": NEW_TOKENS, "layers": layers}
    results["runs"] = []
    first_answers: dict[int, list[str]] = {}
    for name, (work, asked_for) in ways.items():
        answers, first = timed(work)
        expected = first_answers.setdefault(asked_for, answers)
        seconds = sorted(timed(work)[1] for _ in range(3))
        speed = asked_for * NEW_TOKENS / seconds[1]
        same = sum(a == b for a, b in zip(answers, expected, strict=True)) / asked_for
        run = {"way": name, "prompts": asked_for, "first_seconds": first, "seconds": seconds, "tok_per_sec": speed}
        results["runs"].append(run | {"same_answers": same})
        out.write_text(json.dumps(results, indent=1))  # after every way: a call may be cut short
        print(
            f"{name}: {speed:,.0f} new tokens/s ({seconds[0]:.2f} to {seconds[-1]:.2f} s for {asked_for} prompts, "
            f"first {first:.1f} s), {same:.0%} of the answers as in the first way",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
