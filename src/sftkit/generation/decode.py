"""Greedy answers in batches on the eager `orig_model`, and one answer as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextIteratorStreamer

from sftkit.data.tokens import chat
from sftkit.data.types import EncoderInputs, Row
from sftkit.errors import ConfigError
from sftkit.generation.answer import Answer, Sampling
from sftkit.generation.batching import Batching, PromptRow, gathered, turns
from sftkit.generation.kv_cache import plain_forward
from sftkit.generation.rows import DecodedSequence, Decoding
from sftkit.generation.static_step import replay_pays, replay_unsupported_reason
from sftkit.models.generation_config import stop_ids
from sftkit.models.kind import Continuation
from sftkit.models.kinds import kind_of
from sftkit.models.structure import quiet_routers
from sftkit.ops.attention import mixes_tokens, windows


@dataclass(frozen=True)
class Prompts:
    """Tokenized prompts, and what ends their answers."""

    ids: Sequence[Sequence[int]]
    "tokens of each"
    stop_ids: Sequence[int]
    "tokens that end an answer"
    max_new_tokens: int | Sequence[int]
    "for all prompts, or one number for each"
    stop_texts: Sequence[Sequence[str]] | None = None
    "texts of each prompt that end its answer and are cut off"
    groups: Sequence[str] | None = None
    'names of groups of prompts that begin alike; "" is no group'
    encoder_inputs: EncoderInputs | None = None
    "for models with an encoder, its input for each prompt; encoded once, before the prompt is read"


def generate(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    batching: Batching,
    *,
    replay: bool | None = None,
) -> list[Answer]:
    """Return greedy answers to tokenized prompts, in the order given. With a runtime every rank calls it and gets all.

    Prompts of about the same length are decoded together, padded on the left, over a cache of fixed size. The tokens
    that all prompts of a group begin with are computed once. Batches follow from the arguments, not from the number of
    ranks; if the model is sharded, all ranks run equally many passes.

    Args:
        batching: batches are smaller if the keys and values of prompts and answers would take more than
            `kv_cache.MAX_CACHE_BYTES`, or the prompts more than `batching.MAX_POSITIONS`.
        replay: decode in steps of a fixed shape, on a GPU as a CUDA graph (static_step.py); None: where that is faster.

    Raises:
        Stopped: a stop was requested; checked between batches.
        ConfigError: the steps of this model, or of a sharded one, cannot be replayed.
    """
    rt = batching.rt
    # A replay repeats kernels of this rank alone: it gathers no weights and waits for nobody.
    partial = rt is not None and rt.topology.partial
    reason = "the model is spread over ranks" if partial else replay_unsupported_reason(orig_model)
    if replay and reason:
        raise ConfigError(f"steps of decoding cannot be replayed: {reason}")
    # one limit and one tuple of stop texts for each prompt
    count, max_new_tokens = len(prompts.ids), prompts.max_new_tokens
    max_new_tokens = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
    stops = [tuple(texts) for texts in prompts.stop_texts] if prompts.stop_texts is not None else [()] * count
    ids = [np.asarray(prompt, dtype=np.int64) for prompt in prompts.ids]
    # Padding lies between a prefix and its rows, and windows count it.
    may_share = prompts.groups is not None and not mixes_tokens(orig_model) and not windows(orig_model.config)
    groups = prompts.groups if prompts.groups is not None and may_share else [""] * count
    asked = [
        PromptRow(prompt, group, new_tokens=new) for prompt, group, new in zip(ids, groups, max_new_tokens, strict=True)
    ]
    # Sharded weights are gathered by all ranks together, so ranks without rows run empty passes.
    kind, together = kind_of(orig_model.config), rt if rt is not None and rt.topology.sharded else None
    found: dict[int, Answer] = {}
    with plain_forward(orig_model):
        for batch, prefix in turns(orig_model, asked, batching):
            rows = [DecodedSequence(i, ids[i], max_new_tokens[i], stops[i]) for i in batch.rows] if batch else []
            inputs = _inputs(prompts.encoder_inputs, batch.rows, orig_model.device) if batch else {}
            continuation = kind.continuation(orig_model, inputs) if batch else Continuation(orig_model, {})
            # The first token comes from reading the prompts, so there is one step fewer than tokens.
            steps = max((row.max_new_tokens for row in rows), default=0) - 1
            replayed = replay if replay is not None else not reason and replay_pays(orig_model.device, steps)
            decoding = Decoding(orig_model, continuation, rows, prefix, replay=replayed)
            while decoding.goes_on(together):
                for row, token in decoding.step():
                    row.take(token, prompts.stop_ids, tokenizer)
            found |= {row.index: row.answer(tokenizer) for row in rows}
    return gathered(found, rt)


def _inputs(encoder_inputs: EncoderInputs | None, rows: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the encoder's input for the prompts of these indices, [B, ...] each."""
    if encoder_inputs is None:
        return {}
    entries = encoder_inputs.index[list(rows)]
    return {name: torch.from_numpy(np.asarray(x[entries])).to(device) for name, x in encoder_inputs.arrays.items()}


def stream(
    orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], sampling: Sampling
) -> Iterator[str]:
    """Yield one answer in parts as it is decoded. Closing the generator early waits for the
    token that is being computed."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    prompt = torch.tensor([chat.render_prompt(Row("prompt", messages=messages), tokenizer)], device=orig_model.device)
    # transformers' generate runs in a thread and hands its text over through the streamer. `closed` ends it early; what
    # it raises is raised again here.
    closed, failure = Event(), list[Exception]()
    # top_k is transformers' own default of 50 otherwise: what is asked for is all that decides
    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    orig_model.eval()
    decode: Any = orig_model.generate

    def work() -> None:
        stopping = [lambda ids, *_, **__: torch.full((len(ids),), closed.is_set(), device=ids.device)]
        try:
            with quiet_routers(orig_model):
                decode(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=sampling.max_new_tokens,
                    eos_token_id=stop_ids(orig_model, tokenizer),
                    pad_token_id=tokenizer.pad_token_id,
                    streamer=streamer,
                    stopping_criteria=stopping,
                    **(drawn if sampling.temperature > 0 else {"do_sample": False}),
                )
        except Exception as error:
            failure.append(error)
        finally:
            # Whoever reads the stream would wait for more text.
            streamer.end()

    worker = Thread(target=work, daemon=True)
    worker.start()
    try:
        yield from streamer
    finally:
        closed.set()
        worker.join()
    if failure:
        raise failure[0]
