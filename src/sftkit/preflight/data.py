"""Count tokenized data before training: sources, roles, lengths, ends of turns, duplicates; say what is learned of
the answers of conversations, what is not, and why; and estimate from a sample what data.split_turns=true would
cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading import rows
from sftkit.data.reading.origin import base_split, find_source
from sftkit.data.tokens import chat
from sftkit.data.tokens.answers import HISTORY
from sftkit.data.tokens.chat import BORDER, CUT, SPLIT_TOKENS, THINKING_OFF, TOO_LONG
from sftkit.data.tokens.loss_mask import CONTEXT, EARLIER, MARKED, Targets
from sftkit.data.tokens.sources import COUNTS, ROLE_COUNTS
from sftkit.data.types import Examples, Row, Tokenized
from sftkit.errors import ConfigError, DataError
from sftkit.runtime.script import counted

ROWS_READ = 2_000
"Rows of a source that are read again at most."
_ALL_LEARNED = 0.95
"""Share of targets in a source's tokens from which all of its tokens count as learned, but for marked answers; in chat
SFT prompts are not targets."""
SAMPLED_ANSWERS = 200
"Answers in the conversations of the sample, which are tokenized again in both ways: about a second."


def estimate_turns(
    source: SourceConfig, facts: dict[str, Any], data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, Any] | None:
    """Return what learning the answers that are left out now would add to a source; None: nothing is left out, or
    nothing of it was found.

    Tokens and documents per answer left out are measured on conversations that are tokenized again, with split_turns
    off and on, and multiplied by the answers left out in all of the source.

    Args:
        facts: the source as preflight.data.source_facts has it.

    Returns:
        conversations: those measured; tokens, documents: what would be added; factor: tokens then over tokens now.
    """
    # What the stage learns where the recipe does not say: told from the counts, as this is given no stage.
    targets = data.targets or ("all" if facts["targets"] > _ALL_LEARNED * facts["tokens"] else "assistant")
    excluded = facts["answers"].get(_excluded_count_name(targets), 0)
    if data.split_turns or not excluded:
        return None
    # An estimate must not end at a long document.
    too_long = "truncate" if data.too_long == "error" else data.too_long
    tokenize = partial(chat.tokenize, tokenizer=tokenizer, max_length=max_length, too_long=too_long)
    learning = chat.Learning(targets, data.thinking)
    found = [one for row in _sample(source) if (one := _added(row, tokenize, learning))]
    if not found:
        return None
    answers, tokens, documents = (sum(numbers) for numbers in zip(*found, strict=True))
    more = round(tokens * excluded / answers)
    return {
        "conversations": len(found),
        "tokens": more,
        "documents": round(documents * excluded / answers),
        "factor": 1.0 + more / facts["tokens"],
    }


def _sample(source: SourceConfig) -> list[Row]:
    """Return some of the first conversations with more than one answer, until they have SAMPLED_ANSWERS, at random and
    always the same."""
    found = _several_answers(source)
    order = np.random.default_rng(0).permutation(len(found)).tolist()
    # Answers in the conversations before each: the sample ends with the one that reaches SAMPLED_ANSWERS.
    before = accumulate((found[i][1] for i in order), initial=0)
    return [found[i][0] for i, answers in zip(order, before, strict=False) if answers < SAMPLED_ANSWERS]


def _several_answers(source: SourceConfig) -> list[tuple[Row, int]]:
    """Return conversations with more than one answer among the first rows, and how many they have. What cannot be read
    is left out: tokenizing has reported it."""
    if "%" in source.split or "-" in source.split:  # a slice that would read the whole file for its total
        source = replace(source, split=base_split(source.split))
    found: list[tuple[Row, int]] = []
    with suppress(OSError, ConfigError, DataError):
        for raw in islice(find_source(source).rows(), ROWS_READ):
            with suppress(DataError):
                row = rows.parse(raw)
                messages = row.messages if isinstance(row.messages, list) else []
                answers = [m for m in messages if isinstance(m, dict) and m.get("role") == "assistant"]
                if len(answers) > 1:
                    found.append((row, len(answers)))
    return found


def _added(row: Row, tokenize: Callable[..., Tokenized], learning: chat.Learning) -> tuple[int, int, int] | None:
    """Return (answers left out now, tokens that would be added, documents that would be added) of a conversation; None:
    it leaves out none, or would be rejected."""
    excluded = _excluded_count_name(learning.targets)
    try:
        off = tokenize(row, learning=replace(learning, split_turns=False))
        if not off.counts[excluded]:
            return None
        on = tokenize(row, learning=replace(learning, split_turns=True))
    except DataError:
        return None
    # One less for each document: its last token is only ever a target, so it takes no position.
    tokens, before = (sum(len(example.ids) - 1 for example in one.examples) for one in (on, off))
    return off.counts[excluded], tokens - before, len(on.examples) - len(off.examples)


def _excluded_count_name(targets: Targets) -> str:
    """Return the name of the count of answers that split_turns would add: of a conversation that is learned whole,
    those whose reasoning is dropped."""
    return "reasoning_left_out" if targets == "all" else HISTORY


_WORDS = {
    CONTEXT: "given in a prompt",
    MARKED: "marked by the data (weight, train)",
    EARLIER: "in earlier turns (data.targets=last_turn)",
    HISTORY: "rendered differently once they are history",
    BORDER: "share a token with their prompt",
    TOO_LONG: "in documents that are too long",
}
"Why an answer is context only."
COST_PCT = 10.0
"Share of a source's tokens from which the cost of split_turns is worth a warning."


def answers_line(source: dict[str, Any]) -> str | None:
    """Return one line about the answers of a source; None: it has none, or all are learned.

    Args:
        source: as preflight.data.source_facts returns it, with `split_turns`.
    """
    answers = source["answers"]
    if not answers:
        return None
    skipped = [f"{answers[name]:,} {words}" for name, words in _WORDS.items() if answers[name]]
    if answers[CUT]:
        skipped.append(f"{answers[CUT]:,} learned in part, cut at data.max_length")
    if answers["reasoning_left_out"]:
        skipped.append(f"the reasoning of {answers['reasoning_left_out']:,} is left out")
    if answers[SPLIT_TOKENS]:
        skipped.append(
            f"{counted(answers[SPLIT_TOKENS], 'token')} in documents of their own for answers that the chat template "
            "renders differently once they are history (data.split_turns)"
        )
    if not skipped:
        return None
    learned = f"{answers['answers_learned']:,} of {counted(answers['answers'], 'answer')} learned"
    return f"{source['name']}: {learned}; {', '.join(skipped)}"


def answer_warnings(source: dict[str, Any]) -> list[str]:
    """Return what a person should decide on about the answers of a source."""
    answers, name = source["answers"], source["name"]
    if not answers:
        return []
    texts = []
    if answers[HISTORY]:
        texts.append(
            f"source {name}: {answers[HISTORY]:,} of {counted(answers['answers'], 'answer')} context only, as the "
            "chat template renders answers differently once they are history. data.split_turns=true learns each "
            f"after its own prompt, {_split_turns_text(source)}"
        )
    if answers["reasoning_left_out"]:
        texts.append(
            f"source {name}: the reasoning before {counted(answers['reasoning_left_out'], 'answer')} is not in the "
            "text that is trained on: either data.thinking=off drops it, or the chat template drops it from history "
            "(data.split_turns=true keeps it)"
        )
    if answers[THINKING_OFF]:
        texts.append(
            f"source {name}: {answers[THINKING_OFF]:,} of {counted(source['rows'], 'conversation')} trained with "
            "thinking turned off, as they have no reasoning; the chat template's default is on. Turn thinking off "
            "when you use the model, or make that the default of chat, evaluation and servers: "
            "model.chat_template_args.enable_thinking=false"
        )
    if answers[SPLIT_TOKENS] * 100.0 > COST_PCT * source["tokens"]:
        share = 100.0 * answers[SPLIT_TOKENS] / source["tokens"]
        texts.append(
            f"source {name}: {share:.0f} % of its tokens are in separate documents for earlier answers, which the "
            "chat template renders differently once they are history. data.split_turns=false saves them, and learns "
            "only the last answers"
        )
    return texts


def _split_turns_text(source: dict[str, Any]) -> str:
    """Return what data.split_turns=true would cost, where it could be estimated (turns.py)."""
    found = source["split_turns"]
    if not found:
        return "for more tokens"
    more = f"{counted(found['tokens'], 'token')} more, in {counted(found['documents'], 'further document')}"
    return (
        f"for about {found['factor']:.2f} times the tokens of this source ({more}; estimated from "
        f"{counted(found['conversations'], 'conversation')})"
    )


def source_facts(examples: Examples) -> list[dict[str, Any]]:
    """Return for each source its name, what became of its rows and why, its tokens and targets, and of conversations
    what is learned of their answers.

    Tokens are positions of rows, as everywhere in training: the last token of a document is only ever a target.
    """
    sources, count = np.asarray(examples.source), len(examples.source_names)
    tokens = np.bincount(sources, weights=examples.lengths, minlength=count)
    targets = np.bincount(sources, weights=examples.num_targets, minlength=count)
    facts = []
    for i, name in enumerate(examples.source_names):
        counts = examples.counts.get(name, {})
        numbers = {key: int(counts.get(key, 0)) for key in COUNTS}
        found = [asdict(finding) for finding in examples.findings.get(name, ())]
        answers = {key: int(counts.get(key, 0)) for key in chat.ANSWER_COUNTS} if counts.get("answers") else {}
        learned_of = {"tokens": int(tokens[i]), "targets": int(targets[i])}
        facts.append({"name": name, **numbers, **learned_of, "answers": answers, "findings": found})
        if name in examples.files:
            facts[-1]["files"] = examples.files[name]
    return facts


def length_facts(lengths: np.ndarray) -> dict[str, Any]:
    """Return a histogram in powers of two (counts[i] documents of edges[i] to edges[i + 1] - 1
    positions) and percentiles.

    Args:
        lengths: int [D], positions of the documents.
    """
    edges = [2 ** int(np.log2(max(int(lengths.min()), 1)))]
    while edges[-1] <= lengths.max():
        edges.append(edges[-1] * 2)
    counts, _ = np.histogram(lengths, bins=edges)
    percentiles = np.percentile(lengths, [50, 90, 99]).tolist()
    return {
        "edges": edges,
        "counts": counts.tolist(),
        "mean": float(lengths.mean()),
        **dict(zip(("p50", "p90", "p99"), percentiles, strict=True)),
        "max": int(lengths.max()),
    }


def roles(examples: Examples) -> dict[str, int]:
    """Return the messages of each role in the conversations that are learned from, the most frequent first;
    empty for texts."""
    every = examples.counts.values()
    totals = Counter({role: sum(counts.get(name, 0) for counts in every) for role, name in ROLE_COUNTS.items()})
    return {role: total for role, total in totals.most_common() if total}


def of_conversations(examples: Examples) -> np.ndarray:
    """Return, as bool [D], which documents are of sources in which conversations are learned from."""
    counts = [examples.counts.get(name, {}) for name in examples.source_names]
    flags = [any(one.get(name) for name in ROLE_COUNTS.values()) for one in counts]
    return np.asarray(flags)[np.asarray(examples.source)]


def end_of_turn_pct(examples: Examples, chosen: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> float | None:
    """Return the share, in percent, of the chosen documents whose last token, always a target, is one after which an
    answer is over; None: no document is chosen.

    Args:
        chosen: bool [D].
    """
    if not chosen.any():
        return None
    last = np.asarray(examples.ids)[examples.offsets[1:][chosen] - 1]
    return 100.0 * float(np.isin(last, chat.end_of_turn_ids(tokenizer)).mean())


def duplicate_facts(
    training: Examples, validation: dict[str, Examples], sources: Sequence[SourceConfig]
) -> dict[str, Any]:
    """Count documents that are the same as an earlier one, without further passes by `repeat`, and validation documents
    that are trained on.

    Returns:
        duplicate_pct, of the training documents; validation_in_train, by source how many documents occur in training.
    """
    seen = _fingerprints(training, _first_passes(training, sources))
    # The hashes have 64 bits: two documents of millions that agree by chance do not change a percentage.
    distinct = set(seen)
    found = {
        name: sum(print_ in distinct for print_ in _fingerprints(examples, np.arange(len(examples))))
        for name, examples in validation.items()
    }
    return {"duplicate_pct": 100.0 * (1.0 - len(distinct) / len(seen)), "validation_in_train": found}


def _first_passes(examples: Examples, sources: Sequence[SourceConfig]) -> np.ndarray:
    """Return the indices of the documents, int [D'], without the further passes that `repeat` asks for; passes stand
    one after the other."""
    found = []
    for i, source in enumerate(sources):
        documents = np.flatnonzero(np.asarray(examples.source) == i)
        found.append(documents[: len(documents) // source.repeat])
    return np.concatenate(found)


def _fingerprints(examples: Examples, documents: np.ndarray) -> list[int]:
    """Return 64-bit hashes of the documents' tokens and of the names of what an encoder reads for them: the same said
    of another picture is no copy.

    Args:
        documents: int [D'], indices.
    """
    ids = np.asarray(examples.ids)
    starts, ends = examples.offsets[:-1][documents].tolist(), examples.offsets[1:][documents].tolist()
    names = [examples.encoder_sources[i] if examples.encoder_sources else "" for i in documents.tolist()]
    # Python's own hash, which is another in each process: these are compared within one, and never stored.
    return [hash((ids[start:end].tobytes(), name)) for start, end, name in zip(starts, ends, names, strict=True)]
