"""What is asked of which model: answers to questions, captions of pictures."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import PreTrainedModel
from ways import DEVICE, Way, encode_compiled

from sftkit.data.demo.builtin import PREFIX, picture
from sftkit.data.tokens import chat
from sftkit.data.types import EncoderInputs, Row
from sftkit.generation import decode as rows_of_batches
from sftkit.generation.decode import Batching, Decoding, generate
from sftkit.generation.kv_cache import StaticStep
from sftkit.models.kinds import kind_of
from sftkit.models.load import from_scratch
from sftkit.models.vision import PIXELS, VisionToText

Texts = list[tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    new_tokens: int = 64
    rows: tuple[int, ...] = (1, 64)
    exact_tokens: int = 32
    exact_rows: int = 16
    exact_layers: int = 2
    seconds: int = 300
    "for all parts; what is under way then is broken off, what comes after it left out"
    tiny: bool = False


TINY = Sizes(new_tokens=8, rows=(1, 3), exact_tokens=6, exact_rows=3, exact_layers=2, tiny=True)


@dataclass(frozen=True)
class Task:
    """A model and what it is asked."""

    model: PreTrainedModel
    tokenizer: Any
    prompts: list[list[int]]
    encoder_inputs: EncoderInputs | None

    def ours(self, way: Way, rows: int, new_tokens: int) -> tuple[Texts, list[float]]:
        """Return (the texts, the times at the start and after each step)."""
        times, step = [now()], Decoding.step

        def timed(decoding: Decoding) -> Any:
            found = step(decoding)
            times.append(now())
            return found

        with ExitStack() as patched:
            patched.enter_context(mock.patch.object(Decoding, "step", timed))
            patched.enter_context(mock.patch.object(rows_of_batches, "StaticStep", way.step or StaticStep))
            if way.encoder_compiled:
                patched.enter_context(mock.patch.object(VisionToText, "encode", encode_compiled))
            answers = generate(
                self.model,
                self.tokenizer,
                self.prompts[:rows],
                Batching(rows),
                max_new_tokens=new_tokens,
                end_ids=[-1],
                encoder_inputs=self.encoder_inputs,
                replay=way.step is not None,
            )
        return [answer.ids for answer in answers], times

    def theirs(self, rows: int, new_tokens: int) -> tuple[Texts, list[float]]:
        """Return the same by transformers' own generate, prompts padded on the left."""
        times = [now()]

        def timed(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            times.append(now())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        if self.encoder_inputs is not None:
            pixels = torch.from_numpy(self.encoder_inputs.arrays[PIXELS][:rows]).to(DEVICE)
            inputs, skip = kind_of(self.model.config).plain_inputs(self.model, {PIXELS: pixels}), 1
        else:
            skip = max(map(len, self.prompts[:rows]))
            ids = [[0] * (skip - len(prompt)) + prompt for prompt in self.prompts[:rows]]
            mask = [[0] * (skip - len(prompt)) + [1] * len(prompt) for prompt in self.prompts[:rows]]
            given = {"input_ids": ids, "attention_mask": mask}
            inputs = {name: torch.tensor(value, device=DEVICE) for name, value in given.items()}
        call: Any = self.model.generate
        found = call(
            **inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
            stopping_criteria=[timed],
        )  # fmt: skip
        return list(map(tuple, found[:, skip:].tolist())), times


def now() -> float:
    """Seconds, all work of the device done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def fields(name: str, layers: int, *, tiny: bool) -> dict[str, Any]:
    """Return the fields of the config of a model."""
    if name == "answers":
        hidden, inner, heads, head = (32, 64, 2, 16) if tiny else (1024, 3072, 16, 128)
        return {
            "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": head,
            "max_position_embeddings": 4096, "tie_word_embeddings": True,
        }  # fmt: skip
    hidden, heads, side = (32, 2, 32) if tiny else (768, 12, 224)
    encoder = {
        "model_type": "vit", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "image_size": side, "patch_size": 16,
    }  # fmt: skip
    decoder = {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    return {"model_type": "vision-encoder-decoder", "encoder": encoder, "decoder": decoder}


def build(name: str, tokenizer: Any, questions: Path, sizes: Sizes, *, exact: bool) -> Task:
    """Build a model with new weights, large enough that its texts differ, and what it is asked."""
    layers = sizes.exact_layers if exact or sizes.tiny else {"answers": 28, "captions": 12}[name]
    model = from_scratch(fields(name, layers, tiny=sizes.tiny), tokenizer, 0)
    kind_of(model.config).prepare(model, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    model = model.to(DEVICE, torch.float32 if exact or DEVICE.type == "cpu" else torch.bfloat16).eval()
    count = max(*sizes.rows, sizes.exact_rows)
    if name == "captions":
        size = (3, model.config.encoder.image_size, model.config.encoder.image_size)
        pixels = np.stack([picture(f"{PREFIX}heldout/{i}", size) for i in range(count)])
        prompts = [[model.generation_config.decoder_start_token_id]] * count
        return Task(model, tokenizer, prompts, EncoderInputs({PIXELS: pixels}, np.arange(count)))
    opened = gzip.open if questions.suffix == ".gz" else open
    with opened(questions, "rt") as file:
        lines = list(islice(file, count))
    asked = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    prompts = [chat.render_prompt(Row("prompt", messages=messages), tokenizer) for messages in asked]
    return Task(model, tokenizer, prompts, None)
