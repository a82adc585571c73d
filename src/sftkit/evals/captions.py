"""Texts that a model with an encoder writes, compared with what was said: of held-out pictures, or texts, of data.val."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.data.types import EncoderInputs, Examples
from sftkit.generation.answer import Answer
from sftkit.generation.decode import generate
from sftkit.runtime.start import Runtime

NAME = "eval/captions"


def describe(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    count: int,
    max_new_tokens: int,
    batch_size: int,
    rt: Runtime | None = None,
    replay: bool | None = None,
) -> list[Answer]:
    """Write a text for what is encoded for each of the first documents: greedily, without first token and end. With a runtime
    every rank calls it and has all of them; see generation.decode."""
    assert examples.encoder_inputs is not None
    return generate(
        orig_model,
        tokenizer,
        [[orig_model.generation_config.decoder_start_token_id]] * count,
        stop_ids=[tokenizer.eos_token_id],
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        encoder_inputs=EncoderInputs(examples.encoder_inputs.arrays, examples.encoder_inputs.index[:count]),
        rt=rt,
        replay=replay,
    )


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
    every rank calls it.

    exact_match: texts that are the same, token for token. token_f1: harmonic mean of the shares of the written and of the
    reference's tokens that the other has as well, as often; its mean over documents.
    """
    same, scores, shown = 0, list[float](), list[dict[str, Any]]()
    for examples in sources.values():
        count = min(max_examples or len(examples), len(examples))
        found = describe(orig_model, tokenizer, examples, count, max_new_tokens, batch_size, rt)
        for document, answer in enumerate(found):
            reference = examples[document].ids[1:].tolist()
            reference = reference[:-1] if reference[-1] == tokenizer.eos_token_id else reference
            same += list(answer.ids) == reference
            scores.append(token_f1(answer.ids, reference))
            if len(shown) < samples:
                said = str(tokenizer.decode(reference, skip_special_tokens=True))
                given = {"prompt": examples.given[document], "reference": said}
                shown.append({**given, "answer": answer.text, "stop": answer.stop})
    return {f"{NAME}/exact_match": same / len(scores), f"{NAME}/token_f1": sum(scores) / len(scores)}, shown


def token_f1(written: Sequence[int], reference: Sequence[int]) -> float:
    """Return twice the tokens that both have over all that they have; 1.0 where both are empty."""
    both = (Counter(written) & Counter(reference)).total()
    return 2 * both / (len(written) + len(reference)) if written or reference else 1.0
