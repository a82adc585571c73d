"""Texts that a model with an encoder writes about the pictures or texts of data.val, compared with the references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import EvalConfig
from sftkit.data.types import Examples
from sftkit.evals.results import Result, example_record, interval
from sftkit.evals.task import Question
from sftkit.generation.decode import Batching, generate, text_of
from sftkit.runtime.start import Runtime

CAPTIONS_TASK = "captions"


def evaluate_captions(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Mapping[str, Examples],
    config: EvalConfig,
    rt: Runtime,
) -> tuple[list[Result], list[dict[str, Any]]]:
    """Return (exact_match with every text, and token_f1, over the first config.max_examples documents of each source;
    the first config.samples texts); every rank calls it.

    exact_match: texts that are the same, token for token. token_f1: harmonic mean of the shares of the written and of
    the reference's tokens that the other has as well, as often; its mean over documents.

    Args:
        config: with max_new_tokens.
    """
    max_new_tokens = config.max_new_tokens
    assert max_new_tokens is not None
    scores: list[dict[str, float]] = []
    records: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    for name, examples in sources.items():
        count = min(config.max_examples or len(examples), len(examples))
        # A prompt is a document's first token, which no answer has. Every rank gets all answers, so the scores are
        # the same everywhere.
        answers = generate(
            orig_model,
            tokenizer,
            [[orig_model.generation_config.decoder_start_token_id]] * count,
            Batching(config.batch_size, rt),
            max_new_tokens=max_new_tokens,
            encoder_inputs=examples.encoder_inputs,
        )
        for document, answer in enumerate(answers):
            reference = examples[document].ids[1:].tolist()
            # A generated text ends before the end of sequence, so the reference must too; one that was cut has none.
            reference = reference[:-1] if reference[-1] == tokenizer.eos_token_id else reference
            score = {"exact_match": float(list(answer.ids) == reference), "token_f1": token_f1(answer.ids, reference)}
            scores.append(score)
            source = examples.encoder_sources[document]
            said = text_of(reference, tokenizer)
            question = Question(f"{name}-{document}", source, max_new_tokens, target=said, source={"source": name})
            records.append(example_record(question, answer, {**score}))
            if len(shown) < config.samples:
                shown.append({"prompt": source, "reference": said, "answer": answer.text, "stop": answer.stop})
    settings = {"backend": "sftkit", "max_examples": config.max_examples, "max_new_tokens": max_new_tokens}
    results: list[Result] = []
    for metric in ("exact_match", "token_f1"):
        found = interval([score[metric] for score in scores])
        # The records hold both scores: they go with the first metric, as a file is written for the task.
        kept = [] if results else records
        results.append(Result(CAPTIONS_TASK, metric, *found, None, len(scores), settings, {metric: found[0]}, kept))
    return results, shown


def token_f1(written: Sequence[int], reference: Sequence[int]) -> float:
    """Return twice the tokens that both have over all that they have; 1.0 where both are empty."""
    both = (Counter(written) & Counter(reference)).total()
    return 2 * both / (len(written) + len(reference)) if written or reference else 1.0
