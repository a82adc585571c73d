"""Decoding speed of the evaluation engine: batches against one prompt at a time, and against transformers' own generate.

python benchmarks/h200_decode/measure.py TOKENIZER_FOLDER QUESTIONS.jsonl OUT.json

The model is the Qwen3 0.6B shape with random weights (speed does not depend on them; an answer never ends by itself), the
prompts are questions of GSM8K through the chat template. Every way answers in full: the same number of new tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from sftkit.data import chat
from sftkit.generation.decode import generate
from sftkit.runtime.hardware import environment

NEW_TOKENS = 128
PROMPTS = 256


def build(vocab_size: int, device: torch.device) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
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


def main(tokenizer_folder: str, questions: Path, out: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = [json.loads(line) for line in questions.read_text().splitlines()[:PROMPTS]]
    asked = [[{"role": "user", "content": row["question"]}] for row in rows]
    prompts = [chat.render_prompt(messages, tokenizer) for messages in asked]
    model = build(len(tokenizer), device)

    def ours(some: list[list[int]], batch_size: int) -> Callable[[], Any]:
        return lambda: generate(model, tokenizer, some, stop_ids=[-1], max_new_tokens=NEW_TOKENS, batch_size=batch_size)

    def theirs(some: list[list[int]]) -> None:
        for prompt in some:
            ids = torch.tensor([prompt], device=device)
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip

    few = prompts[:2]
    ways = {
        "transformers generate, one by one": (lambda: theirs(few), len(few)),
        "sftkit, one by one": (ours(few, 1), len(few)),
        "sftkit, batches of 64": (ours(prompts, 64), PROMPTS),
        "sftkit, batches of 256": (ours(prompts, 256), PROMPTS),
    }
    ours(few, 2)()
    theirs(few[:1])
    results: dict[str, Any] = {"environment": environment(device, 1), "new_tokens": NEW_TOKENS, "runs": []}
    for name, (work, count) in ways.items():
        seconds = sorted(timed(work)[1] for _ in range(3))
        speed = count * NEW_TOKENS / seconds[1]
        results["runs"].append({"way": name, "prompts": count, "seconds": seconds, "tok_per_sec": speed})
        print(
            f"{name}: {speed:,.0f} new tokens/s ({seconds[0]:.2f} to {seconds[-1]:.2f} s for {count} prompts)",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
