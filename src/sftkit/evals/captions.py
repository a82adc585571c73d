"""Texts that a model with an encoder writes, compared with what was said: of held-out pictures, or texts, of data.val."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sftkit.data.types import Examples
from sftkit.generation.kv_cache import plain_forward
from sftkit.models.kinds import kind_of
from sftkit.runtime.start import Runtime

NAME = "eval/captions"


@dataclass(frozen=True)
class Described:
    """Texts that were written for documents, in their order."""

    written: list[list[int]]
    "tokens of each, without the first one and the end"
    ended: list[bool]
    "whether the model ended it, and not the limit"


def describe(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    documents: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
) -> Described:
    """Write a text for what is encoded for each document: greedily, by transformers' own generation, without the compiler."""
    assert examples.encoder_inputs is not None
    kind, found = kind_of(orig_model.config), Described([], [])
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        decoder_start_token_id=orig_model.generation_config.decoder_start_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with plain_forward(orig_model):
        for at in range(0, len(documents), batch_size):
            entries = examples.encoder_inputs.index[list(documents[at : at + batch_size])]
            arrays = examples.encoder_inputs.arrays.items()
            inputs = {
                name: torch.from_numpy(np.asarray(array[entries])).to(orig_model.device) for name, array in arrays
            }
            generate: Any = orig_model.generate
            for ids in generate(**kind.plain_inputs(orig_model, inputs), generation_config=settings)[:, 1:].tolist():
                ended = tokenizer.eos_token_id in ids
                found.written.append(ids[: ids.index(tokenizer.eos_token_id)] if ended else ids)
                found.ended.append(ended)
    return found


def evaluate(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Mapping[str, Examples],
    rt: Runtime,
    *,
    max_examples: int | None,
    samples: int,
    max_new_tokens: int,
    batch_size: int,
) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
    """(eval/captions/exact_match and token_f1 over the first `max_examples` documents of each source, the first few texts);
    every rank calls it and takes its share.

    exact_match: texts that are the same, token for token. token_f1: harmonic mean of the shares of the written and of the
    reference's tokens that the other has as well, as often; its mean over documents.
    """
    sums, shown = torch.zeros(3, dtype=torch.float64), list[dict[str, Any]]()
    for examples in sources.values():
        documents = range(rt.rank, min(max_examples or len(examples), len(examples)), rt.world_size)
        found = describe(orig_model, tokenizer, examples, documents, max_new_tokens, batch_size)
        for document, ids, ended in zip(documents, found.written, found.ended, strict=True):
            reference = examples[document].ids[1:].tolist()
            reference = reference[:-1] if reference[-1] == tokenizer.eos_token_id else reference
            sums += torch.tensor([ids == reference, token_f1(ids, reference), 1.0], dtype=torch.float64)
            if len(shown) < samples:
                said, answer = (str(tokenizer.decode(each, skip_special_tokens=True)) for each in (reference, ids))
                stop = "end_of_turn" if ended else "length"
                shown.append({"prompt": examples.given[document], "reference": said, "answer": answer, "stop": stop})
        rt.check_stop()
    exact, f1, count = rt.sum(sums.to(rt.device)).tolist()
    return {f"{NAME}/exact_match": exact / count, f"{NAME}/token_f1": f1 / count}, shown


def token_f1(written: Sequence[int], reference: Sequence[int]) -> float:
    """Return twice the tokens that both have over all that they have; 1.0 where both are empty."""
    both = (Counter(written) & Counter(reference)).total()
    return 2 * both / (len(written) + len(reference)) if written or reference else 1.0
