"""Batched decoding on the eager `orig_model`, through transformers' own generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextIteratorStreamer

from sftkit.attention import plain_attention
from sftkit.compilation import run_eagerly
from sftkit.data import chat
from sftkit.tensor_parallel import whole_rows


def generate(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    in_step: bool = False,
    between: Callable[[], object] = lambda: None,
) -> list[str]:
    """Answers to tokenized prompts, greedy at temperature 0, in the order given; without special tokens.

    Prompts are sorted by length so that little is padded; padding is on the left and masked.

    Args:
        in_step: ranks go on until all have finished a batch, as sharded weights need; all have equally many prompts.
        between: called before each batch; may raise.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [""] * len(prompts)
    with torch.no_grad(), run_eagerly(), plain_attention(orig_model), whole_rows(), _greedy(orig_model):
        for start in range(0, len(order), batch_size):
            between()
            chosen = order[start : start + batch_size]
            output = _generate_batch(
                orig_model, tokenizer, [prompts[i] for i in chosen], stop_ids, max_new_tokens, temperature, in_step
            )
            for i, ids in zip(chosen, output, strict=True):
                answers[i] = str(tokenizer.decode(until_stop(ids, stop_ids), skip_special_tokens=True))
    return answers


@contextmanager
def _greedy(orig_model: PreTrainedModel) -> Iterator[None]:
    """Inside: no dropout, and not the model's own defaults, whose penalties and sampling would not be greedy."""
    was_training, defaults = orig_model.training, orig_model.generation_config
    orig_model.eval()
    orig_model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        orig_model.train(was_training)
        orig_model.generation_config = defaults


def _generate_batch(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    stop_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    in_step: bool,
) -> list[list[int]]:
    longest = max(len(prompt) for prompt in prompts)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=orig_model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=orig_model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    output = orig_model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids),
        pad_token_id=pad,
        use_cache=True,
        synced_gpus=in_step,
        **sampling,
    )
    return output[:, longest:].tolist()


def until_stop(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    """The tokens before the first stop token."""
    stops: Iterator[int] = (i for i, token in enumerate(ids) if token in stop_ids)
    return ids[: next(stops, len(ids))]


def stream(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    max_new_tokens: int,
    temperature: float = 0.0,
) -> Iterator[str]:
    """One answer, piece by piece as it is decoded."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    prompt = torch.tensor([chat.render_prompt(messages, tokenizer)], device=orig_model.device)
    arguments = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": max_new_tokens,
        "eos_token_id": chat.end_of_turn_ids(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "do_sample": temperature > 0,
        "streamer": streamer,
        **({"temperature": temperature} if temperature > 0 else {}),
    }
    orig_model.eval()
    decode: Any = orig_model.generate
    failure: list[Exception] = []

    def work() -> None:
        try:
            decode(**arguments)
        except Exception as error:
            failure.append(error)
        finally:
            streamer.end()

    worker = Thread(target=work, daemon=True)
    worker.start()
    yield from streamer
    worker.join()
    if failure:
        raise failure[0]
