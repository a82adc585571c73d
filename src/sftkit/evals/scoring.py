"""Scores that only some evaluations compute: the log-likelihood of each continuation of a prompt, tokenized and
computed as lm-evaluation-harness does it, and the texts that a model with an encoder writes about data.val.

Letters: N positions whose next token is asked for, V the vocabulary.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import EvalConfig
from sftkit.data.tokens import chat
from sftkit.data.types import Examples, Row
from sftkit.errors import ConfigError, DataError
from sftkit.evals.results import Choices, Likelihoods, Message, Question, Result, example_record, interval
from sftkit.generation.decode import ALONE, Batching, gathered, generate, longest_input, text_of, turns
from sftkit.generation.kv_cache import SharedPrefix, empty_pass, plain_forward
from sftkit.models.hybrids import state_besides_keys
from sftkit.models.structure import longrope_limit, output_projection, positions
from sftkit.runtime.start import Runtime

MAX_TARGETS = 1024
"The most positions of a batch with logits, V numbers each."
_CHUNK = 256
"Positions whose fp32 log-probabilities exist at a time."

Pair = tuple[np.ndarray, np.ndarray]
"int32 token ids of a context and of a continuation."


def rendered_prompt(prompt: str | Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Return (text before the answer, is_rendered): the prompt itself, or its messages in the chat template.

    Raises:
        ConfigError: messages, and the tokenizer has no chat template. DataError: what is not a conversation.
    """
    if isinstance(prompt, str):
        return prompt, False
    return chat.prompt_text(Row("prompt", messages=list(prompt)), tokenizer), True


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token before a continuation without a context: bos, else eos."""
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise ConfigError("the tokenizer has neither a bos nor an eos token, so a prompt cannot be empty")
    return int(token)


def encode_texts(texts: Sequence[tuple[str, bool]], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Return int32 ids of each (text, is_rendered). The tokenizer adds its special tokens to texts that no chat
    template has rendered and that do not begin with the bos token."""
    has_prefix = tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None
    bos = (str(tokenizer.decode([prefix_token(tokenizer)])),) if has_prefix else ()
    ids_by_text: dict[tuple[str, bool], np.ndarray] = {}
    # The tokenizer takes one setting for all of its texts, so there are two calls; equal texts are tokenized once.
    for adds in (True, False):
        wanted = [key for key in dict.fromkeys(texts) if adds != (key[1] or key[0].startswith(bos))]
        if wanted:
            encoded = tokenizer([text for text, _ in wanted], add_special_tokens=adds, verbose=False)["input_ids"]
            ids_by_text |= {key: np.asarray(ids, dtype=np.int32) for key, ids in zip(wanted, encoded, strict=True)}
    return [ids_by_text[key] for key in texts]


def encode_examples(examples: Sequence[Choices | Question], tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Tokenize the examples of a task: pairs of `encode_continuation`, or prompts."""
    if isinstance(examples[0], Choices):
        return encode_continuation(examples, tokenizer)  # type: ignore[arg-type]
    return encode_texts([rendered_prompt(question.prompt, tokenizer) for question in examples], tokenizer)


def encode_continuation(examples: Sequence[Choices], tokenizer: PreTrainedTokenizerBase) -> list[list[Pair]]:
    """Tokenize each context and continuation of each example.

    The whole is tokenized at once and cut after as many tokens as the context has alone; white space at the end of a
    context that no chat template has made belongs to the continuation.

    Raises:
        DataError: a continuation without tokens.
    """
    # index of the example, context, context with continuation, is_rendered
    texts: list[tuple[int, str, str, bool]] = []
    for i, example in enumerate(examples):
        text, rendered = rendered_prompt(example.prompt, tokenizer)
        context = text if rendered else text.rstrip()
        texts += [(i, context, text + more, rendered or not context) for more in example.continuations]
    encoded = encode_texts([(text, as_is) for _, *both, as_is in texts for text in both], tokenizer)
    found: list[list[Pair]] = [[] for _ in examples]
    for (i, context, text, _), context_ids, full_ids in zip(texts, encoded[::2], encoded[1::2], strict=True):
        if not context:
            # A continuation without a context follows this token, unless the text begins with it.
            context_ids = np.asarray([prefix_token(tokenizer)], dtype=np.int32)
            full_ids = full_ids if np.array_equal(full_ids[:1], context_ids) else np.append(context_ids, full_ids)
        continuation = full_ids[len(context_ids) :]
        if not len(continuation):
            raise DataError(f"{examples[i].id}: the continuation {text[len(context) :]!r} has no tokens")
        found[i].append((context_ids, continuation))
    return found


def num_truncated(encoded: Sequence[Sequence[Pair]], longest: int) -> int:
    """Return how many examples have an input that is cut to `longest` tokens."""
    return sum(any(len(context) + len(rest) > longest + 1 for context, rest in pairs) for pairs in encoded)


@dataclass
class ScoredInput:
    """One input of the model and what is asked of it: several continuations may end in the same input."""

    ids: np.ndarray
    "int32 [T]: context and continuation without its last token"
    group: str
    targets: int = 0
    "positions at its end that are asked for"
    new_tokens: int = 0
    continuations: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    "(example, continuation) -> its tokens, int32, which follow the last len() positions"


def score(
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Choices],
    batching: Batching = ALONE,
    encoded: Sequence[Sequence[Pair]] | None = None,
) -> list[Likelihoods]:
    """Return the log-likelihoods of the continuations of each example; every rank calls it and has all of them.

    Inputs are padded on the right, where causal attention does not see it. The text that the examples of a group begin
    with is computed once. Batches follow from the examples and their size alone, not from the number of ranks.

    Args:
        encoded: what `encode_continuation` returned for the examples, if it was called before.
    """
    rt = batching.rt
    encoded = encode_continuation(examples, tokenizer) if encoded is None else encoded
    longest = longest_input(positions(orig_model), tokenizer)
    # Continuations of one token (letters of options) end in the same input: it is computed once for all of them.
    inputs: dict[tuple[int, bytes], ScoredInput] = {}
    for i, pairs in enumerate(encoded):
        # No group if tokens are mixed other than by attention: a cache of keys and values does not hold that state.
        group = "" if state_besides_keys(orig_model) else examples[i].group
        for k, (context, continuation) in enumerate(pairs):
            if len(continuation) > longest:
                raise DataError(f"a continuation has {len(continuation)} tokens, and the model reads {longest}")
            # One token more than the model reads, of which the last is only predicted; cut on the left, where the
            # context begins.
            ids = np.concatenate([context, continuation])[-(longest + 1) :][:-1]
            row = inputs.setdefault((i, ids.tobytes()), ScoredInput(ids, group))
            row.continuations[i, k] = continuation
            row.targets = max(row.targets, len(continuation))
    found: dict[tuple[int, int], tuple[float, bool, int]] = {}
    with plain_forward(orig_model):
        for batch, prefix in turns(orig_model, list(inputs.values()), batching, MAX_TARGETS):
            if batch is not None:
                found |= _score_batch(orig_model, batch.rows, prefix)
            elif rt is not None and rt.topology.sharded:
                # Sharded weights are gathered by all ranks together, so ranks without a batch run empty passes.
                empty_pass(orig_model)
    # The order is that of examples and continuations, whichever rank computed them.
    values = iter(gathered(found, rt))
    return [Likelihoods(*zip(*islice(values, len(pairs)), strict=True)) for pairs in encoded]


def _score_batch(
    orig_model: PreTrainedModel, chosen: Sequence[ScoredInput], prefix: SharedPrefix
) -> dict[tuple[int, int], tuple[float, bool, int]]:
    """Return, for all that is asked of inputs that begin with the prefix, (example, continuation) -> (log-likelihood in
    nats, is it greedy, tokens)."""
    # The shared beginning is in the cache, so that inputs hold only what differs.
    skip = len(prefix.ids)
    width = max(len(row.ids) for row in chosen) - skip
    inputs = np.zeros((len(chosen), width), dtype=np.int64)
    # Padding on the right has the last position of its row, so that longrope sees each row's own length.
    last = np.array([[len(row.ids) - 1] for row in chosen])
    positions = torch.from_numpy(np.minimum(np.arange(skip, skip + width)[None], last)).to(orig_model.device)
    own = {} if longrope_limit(orig_model.config) is None else {"position_ids": positions}
    at: list[int] = []  # flat positions whose next token is asked for
    pairs: list[tuple[int, int]] = []  # (index into `at`, token asked for)
    for b, row in enumerate(chosen):
        ids = row.ids[skip:]
        inputs[b, : len(ids)] = ids
        end = len(at) + row.targets
        at += range(b * width + len(ids) - row.targets, b * width + len(ids))
        for tokens in row.continuations.values():
            pairs += zip(range(end - len(tokens), end), tokens.tolist(), strict=True)
    # Only the asked positions get logits.
    device = orig_model.device
    cache = {"past_key_values": prefix.cache(len(chosen), width), "use_cache": True} if skip else {"use_cache": False}
    with _head_at(orig_model, torch.tensor(at, device=device)):
        logits = orig_model(input_ids=torch.from_numpy(inputs).to(device), **cache, **own).logits
    likelihoods, best = _next_token(logits, pairs)
    # back to rows and continuations
    results = {}
    start = 0
    for row in chosen:
        for key, tokens in row.continuations.items():
            part = slice(start, start + len(tokens))
            is_greedy = [best[i] for i, _ in pairs[part]] == tokens.tolist()
            results[key] = sum(likelihoods[part]), is_greedy, len(tokens)
            start += len(tokens)
    return results


def _next_token(logits: torch.Tensor, pairs: list[tuple[int, int]]) -> tuple[list[float], list[int]]:
    """Return (fp32 log-probability of each (position, token), the most likely token of each position) from logits [N,
    V]."""
    which = torch.tensor(pairs, device=logits.device)
    values = torch.zeros(len(pairs), device=logits.device)
    best = []
    # Chunk by chunk: fp32 log-probabilities of all positions at once would take several times the memory of the logits.
    for start in range(0, len(logits), _CHUNK):
        log_probs = logits[start : start + _CHUNK].float().log_softmax(dim=-1)
        best.append(log_probs.argmax(-1))
        inside = ((which[:, 0] >= start) & (which[:, 0] < start + _CHUNK)).nonzero().squeeze(1)
        values[inside] = log_probs[which[inside, 0] - start, which[inside, 1]]
    return values.tolist(), torch.cat(best).tolist()


def _head_at(orig_model: PreTrainedModel, at: torch.Tensor) -> AbstractContextManager[object]:
    """Let the head project only these positions (int64 [N], of the flattened B * T) inside the block: logits are [N,
    V], with all that the model does to them, and those of whole rows never exist."""

    def choose(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0].flatten(0, -2).index_select(0, at), *inputs[1:])

    return output_projection(orig_model).register_forward_pre_hook(choose)


# ---- captions --------------------------------------------------------------------------------------------------------

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
    the reference's tokens that the other text has as often; its mean over documents.

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
        # A prompt is a document's first token, which no answer has. Every rank gets all answers, so the scores are the
        # same everywhere.
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
    """Return twice the tokens that both have over all that they have; 1.0 if both are empty."""
    both = (Counter(written) & Counter(reference)).total()
    return 2 * both / (len(written) + len(reference)) if written or reference else 1.0
