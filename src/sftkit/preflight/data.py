"""Count tokenized data before training: sources, roles, lengths, ends of turns, duplicates."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.config.schema import SourceConfig
from sftkit.data.tokens import chat
from sftkit.data.tokens.sources import COUNTS, ROLE_COUNTS
from sftkit.data.types import Examples


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


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the sha256 of the chat template; None without one."""
    template = tokenizer.chat_template
    return hashlib.sha256(str(template).encode()).hexdigest() if template else None


def duplicate_facts(
    training: Examples, validation: dict[str, Examples], sources: Sequence[SourceConfig]
) -> dict[str, Any]:
    """Count documents that are the same as an earlier one, without further passes by `repeat`, and validation documents
    that are trained on.

    Returns:
        duplicate_pct, of the training documents; validation_in_train, by source how many documents occur in training.
    """
    seen = _fingerprints(training, _first_passes(training, sources))
    # By 64-bit hashes: two documents of millions that agree by chance do not change a percentage.
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
