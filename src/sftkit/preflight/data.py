"""Count tokenized data before training: sources, roles, lengths, ends of turns, duplicates; and which answers of
conversations are learned, which are not, and why.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.config.schema import SourceConfig
from sftkit.data.batches.tree import WORTH_IT, Trees
from sftkit.data.store.view import COUNTS, ROLE_COUNTS
from sftkit.data.tokens import chat
from sftkit.data.tokens.loss_mask import CONTEXT, EARLIER, HISTORY, MARKED
from sftkit.data.types import ANSWERS_LEFT_OUT, CUT, SPLIT_TOKENS, TOO_LONG, Examples
from sftkit.errors import hint
from sftkit.runtime.script import counted

_WORDS = {
    CONTEXT: "given in a prompt",
    MARKED: "marked by the data (weight, train)",
    EARLIER: "in earlier turns (data.targets=last_turn)",
    HISTORY: "rendered differently once they are history",
    chat.BORDER: "share a token with their prompt",
    TOO_LONG: "in documents that are too long",
    ANSWERS_LEFT_OUT: "in documents that are held out or not used, or in an earlier path of their tree",
}
"Why an answer is context only."
MOST_LISTED = 1000
"Matches with evaluation questions that preflight.json lists."
COST_PCT = 10.0
"Share of a source's tokens from which the cost of split_turns is worth a warning."


def answers_line(source: dict[str, Any]) -> str | None:
    """Return one line about the answers of a source; None: it has none, or all are learned.

    Args:
        source: an entry of `source_facts`.
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
        skipped.append(hint("tokens in documents of their own", tokens=counted(answers[SPLIT_TOKENS], "token")))
    if not skipped:
        return None
    learned = f"{answers['answers_learned']:,} of {counted(answers['answers'], 'answer')} learned"
    return f"{source['name']}: {learned}; {', '.join(skipped)}"


def tree_facts(trees: Trees) -> list[dict[str, Any]]:
    """Return for each source the positions of its documents by themselves and in trees, the number of its trees, and
    the factor between the two."""
    count = len(trees.source_names)
    expanded, unique, number = (
        np.bincount(trees.source, weights=one, minlength=count).astype(np.int64).tolist()
        for one in (trees.expanded, trees.lengths, np.ones(len(trees)))
    )
    return [
        {"trees": n, "expanded": a, "unique": b, "factor": a / max(b, 1)}
        for n, a, b in zip(number, expanded, unique, strict=True)
    ]


def trees_line(source: dict[str, Any]) -> str | None:
    """Return one line about what the documents of a source share; None: nothing was looked for.

    Args:
        source: an entry of `source_facts`, with what tree_facts says of it.
    """
    if (found := source.get("trees")) is None:
        return None
    trees = counted(found["trees"], "tree")
    sizes = f"{found['expanded']:,} tokens of its documents are {found['unique']:,} in {trees}"
    said = "data.layout=tree computes only those"
    if found["factor"] < WORTH_IT:
        said = f"below {WORTH_IT}, so data.layout=tree would change nothing"
    return f"{source['name']}: {sizes}, factor {found['factor']:.2f}: {said}"


def answer_warnings(source: dict[str, Any]) -> list[str]:
    """Return what a person should decide on about the answers of a source."""
    name = source["name"]
    answers = source["answers"]
    if not answers:
        return []
    texts = []
    if answers[HISTORY]:
        learned = {"count": answers[HISTORY], "answers": counted(answers["answers"], "answer")}
        texts.append(hint("answers rendered differently as history", name=name, **learned))
    if answers["reasoning_left_out"]:
        count = counted(answers["reasoning_left_out"], "answer")
        texts.append(hint("reasoning that is left out", name=name, count=count))
    if answers[chat.THINKING_OFF]:
        rows = counted(source["rows"], "conversation")
        texts.append(hint("trained with thinking off", name=name, count=answers[chat.THINKING_OFF], rows=rows))
    shared = (source.get("trees") or {"factor": 1.0})["factor"] >= WORTH_IT  # rows of trees compute them once
    if not shared and answers[SPLIT_TOKENS] * 100.0 > COST_PCT * source["tokens"]:
        share = 100.0 * answers[SPLIT_TOKENS] / source["tokens"]
        texts.append(hint("tokens of split turns", name=name, share=share))
    return texts


def source_facts(examples: Examples, too_long: str = "truncate") -> list[dict[str, Any]]:
    """Return for each source its name, what became of its rows and why, its tokens and targets, and of conversations
    what is learned of their answers. `too_long`: data.too_long, which decides what a row lost that was kept in part.

    Tokens are positions of rows, as everywhere in training: the last token of a document is only ever a target.
    """
    sources = np.asarray(examples.source)
    count = len(examples.source_names)
    tokens = np.bincount(sources, weights=examples.lengths, minlength=count)
    targets = np.bincount(sources, weights=examples.num_targets, minlength=count)
    stored = np.bincount(sources, minlength=count)
    facts = []
    for i, name in enumerate(examples.source_names):
        counts = examples.counts.get(name, {})
        numbers = {key: int(counts.get(key, 0)) for key in COUNTS}
        if too_long == "drop":
            numbers |= {"truncated": 0, "partly_dropped": numbers["truncated"]}
        found = [asdict(finding) for finding in examples.findings.get(name, ())]
        of_answers = (*chat.ANSWER_COUNTS, ANSWERS_LEFT_OUT) if counts.get("answers") else ()
        answers = {key: int(counts.get(key, 0)) for key in of_answers}
        # A part of a pass (repeat: 2.5) is stored as a whole one.
        share = counts.get("documents", stored[i]) / max(stored[i], 1)
        learned_of = {"tokens": round(tokens[i] * share), "targets": round(targets[i] * share)}
        learned_of |= {key: counts[key] for key in ("left_out", "held_out") if counts.get(key)}
        facts.append({"name": name, **numbers, **learned_of, "answers": answers, "findings": found})
        if name in examples.files:
            facts[-1]["files"] = examples.files[name]
    return facts


def contamination_facts(examples: Examples) -> dict[str, Any] | None:
    """Return which evaluation questions and answers were found in the training documents, with a sentence about it;
    None: they were not compared with any."""
    if (facts := examples.contamination) is None:
        return None
    found = facts["found"]
    of_tasks = Counter(task for _, task in sorted({(one["document"], one["task"]) for one in found}))
    total = len({one["document"] for one in found})
    said = [f"not compared with {task}: {why}" for task, why in facts["missing"].items()]
    if facts["tasks"]:
        held = "".join(f", {task} {count:,}" for task, count in of_tasks.items()).removeprefix(", ")
        what = f" ({held}), {'left out' if facts['left_out'] else 'not left out'}" if found else ""
        number = f"{total:,} of {counted(facts['documents'], 'document')}"
        said.insert(0, f"compared with questions and answers of {', '.join(facts['tasks'])}: found in {number}{what}")
    return {**facts, "found": found[:MOST_LISTED], "matched": total, "of_tasks": of_tasks, "said": "; ".join(said)}


def length_facts(lengths: np.ndarray) -> dict[str, Any]:
    """Return a histogram in powers of two (counts[i] documents of edges[i] to edges[i + 1] - 1 positions) and
    percentiles.

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
    """Return the messages of each role in the conversations that are learned from, the most frequent first; empty for
    texts."""
    every = examples.counts.values()
    totals = Counter({role: sum(counts.get(name, 0) for counts in every) for role, name in ROLE_COUNTS.items()})
    return {role: total for role, total in totals.most_common() if total}


def end_of_turn_pct(examples: Examples, tokenizer: PreTrainedTokenizerBase) -> float | None:
    """Return the share, in percent, of documents of conversations whose last token, always a target, ends an answer;
    None: no source has conversations that are learned from."""
    counts = [examples.counts.get(name, {}) for name in examples.source_names]
    flags = [any(one.get(name) for name in ROLE_COUNTS.values()) for one in counts]
    chosen = np.asarray(flags)[np.asarray(examples.source)]
    if not chosen.any():
        return None
    last, _ = examples.last_tokens(np.flatnonzero(chosen))
    return 100.0 * float(np.isin(last, chat.end_of_turn_ids(tokenizer)).mean())


def duplicate_facts(
    training: Examples, validation: dict[str, Examples], sources: Sequence[SourceConfig]
) -> dict[str, Any]:
    """Count documents that are the same as an earlier one, without further passes by `repeat`, and validation documents
    that are trained on.

    Returns:
        duplicate_pct, of the training documents; validation_in_train, by source how many documents occur in training.
    """
    # Only the first pass over a source: those that `repeat` asks for stand one after the other.
    first_passes = []
    for i, source in enumerate(sources):
        documents = np.flatnonzero(np.asarray(training.source) == i)
        first_passes.append(documents[: len(documents) // math.ceil(source.repeat)])
    seen = _fingerprints(training, np.concatenate(first_passes))
    # The hashes have 64 bits: two documents of millions that agree by chance do not change a percentage.
    distinct = set(seen)
    found = {
        name: sum(one in distinct for one in _fingerprints(examples, np.arange(len(examples))))
        for name, examples in validation.items()
    }
    return {"duplicate_pct": 100.0 * (1.0 - len(distinct) / len(seen)), "validation_in_train": found}


def _fingerprints(examples: Examples, documents: np.ndarray) -> list[int]:
    """Return 64-bit hashes of the documents' tokens and of the names of their encoder inputs: the same text about
    another picture is no copy.

    Args:
        documents: int [D'], indices.
    """
    names = examples.encoder_sources
    # Python's own hash differs between processes: hashes are compared within one, and never stored.
    return [
        hash((ids[begin:end].tobytes(), names[i] if names else ""))
        for some, offsets, ids, _ in examples.pieces(documents)
        for i, begin, end in zip(some.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
