"""Texts that a model with an encoder writes, compared with what was said: of held-out pictures, or texts, of
data.val."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.data import chat
from sftkit.data.types import EncoderInputs, Examples
from sftkit.evals.results import Evaluated, Result, interval, record
from sftkit.evals.task import Question
from sftkit.generation.answer import Answer
from sftkit.generation.decode import generate
from sftkit.runtime.start import Runtime

NAME = "captions"


def describe(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    count: int,
    max_new_tokens: int,
    batch_size: int,
    rt: Runtime | None = None,
    *,
    replay: bool | None = None,
) -> list[Answer]:
    """Write a text for the encoder's input of each of the first `count` documents: greedily, without first token and
    end. With a runtime every rank calls it and has all of them; see generation.decode."""
    assert examples.encoder_inputs is not None
    return generate(
        orig_model,
        tokenizer,
        [[orig_model.generation_config.decoder_start_token_id]] * count,
        stop_ids=chat.end_of_turn_ids(tokenizer),
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
) -> tuple[list[Evaluated], list[dict[str, Any]]]:
    """Return (exact_match with every text, and token_f1, over the first `max_examples` documents of each source; the
    first `samples` texts); every rank calls it.

    exact_match: texts that are the same, token for token. token_f1: harmonic mean of the shares of the written and of
    the reference's tokens that the other has as well, as often; its mean over documents.
    """
    marks: dict[str, list[float]] = {"exact_match": [], "token_f1": []}
    records, shown = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, examples in sources.items():
        count = min(max_examples or len(examples), len(examples))
        found = describe(orig_model, tokenizer, examples, count, max_new_tokens, batch_size, rt)
        for document, answer in enumerate(found):
            reference = examples[document].ids[1:].tolist()
            reference = reference[:-1] if reference[-1] == tokenizer.eos_token_id else reference
            mark = {"exact_match": float(list(answer.ids) == reference), "token_f1": token_f1(answer.ids, reference)}
            for metric, value in mark.items():
                marks[metric].append(value)
            given, said = examples.given[document], str(tokenizer.decode(reference, skip_special_tokens=True))
            asked = Question(f"{name}-{document}", given, max_new_tokens, target=said, source={"source": name})
            records.append(record(asked, answer, {**mark}))
            if len(shown) < samples:
                shown.append({"prompt": given, "reference": said, "answer": answer.text, "stop": answer.stop})
    settings = {"backend": "sftkit", "max_examples": max_examples, "max_new_tokens": max_new_tokens}
    exact, shared = (_result(metric, values, settings) for metric, values in marks.items())
    return [Evaluated(exact, records), Evaluated(shared, [])], shown


def _result(metric: str, marks: Sequence[float], settings: dict[str, Any]) -> Result:
    """Return the result of one metric."""
    value, stderr, low, high = interval(marks)
    return Result(NAME, metric, value, stderr, low, high, None, len(marks), settings, {metric: value})


def token_f1(written: Sequence[int], reference: Sequence[int]) -> float:
    """Return twice the tokens that both have over all that they have; 1.0 where both are empty."""
    both = (Counter(written) & Counter(reference)).total()
    return 2 * both / (len(written) + len(reference)) if written or reference else 1.0
