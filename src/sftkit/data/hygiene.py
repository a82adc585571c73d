"""Choose the documents of a run: limits of size, samples, copies, evaluation questions, and the share of each source
that is held out for validation. No torch; loaded only by runs that tokenize or choose.

Rows are hashed when they are tokenized, so that documents are chosen without their texts, as far as that goes.
"""

import json
import logging
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np

from sftkit.config.commands import install
from sftkit.config.schema import DataConfig, source_label, where_counts
from sftkit.data.reading.columns import MARKS, PARTS, REASONING, finding_text, is_plain
from sftkit.data.reading.origin import find_source
from sftkit.data.store.view import ShardTokens
from sftkit.data.types import ANSWERS_LEFT_OUT, Examples, Finding, Row, Unlearned
from sftkit.errors import ConfigError, DataError, hint
from sftkit.rundir.files import read_object, replace_shared
from sftkit.runtime.script import counted, working

log = logging.getLogger(__name__)

# ---- rows ------------------------------------------------------------------------------------------------------------

HEAD_CHARACTERS = 1000
"Beginning of a text that decides on which side of data.val_fraction its documents fall."


def content_hash(row: Row) -> int:
    """Return a 64-bit hash of all that is learned from a row, in the normal form that decides what a copy is: other
    case, white space and composed characters make no difference."""
    if row.messages is None:
        return _hash([row.text or "", row.image or "", *row.captions, *_tokens(row)])
    # A count, tools and arguments decide tokens and mask, so the same messages with others are no copy.
    parts = [str(row.context_messages), row.masked_role, _text(row.tools), _text(row.template_args)]
    for message in row.messages:
        parts += str(message.get("role")), _text(message.get("content")), _text(message.get("tool_calls"))
        if is_plain(message):
            continue
        parts += [_text(value) for key in (*REASONING, PARTS) if (value := message.get(key))]
        parts += [key for key in MARKS if message.get(key, 1) in (0, "0")]
    return _hash(parts)


def head_hash(row: Row) -> int:
    """Return a 64-bit hash of how a row begins: its first user message, its picture, or the first 1,000 characters of
    its text. Copies, and all answers to one question, have the same."""
    if row.is_tokenized:
        return _hash(_tokens(row)[:HEAD_CHARACTERS])
    if row.messages is None:
        return _hash([row.image or " ".join((row.text or "")[: 2 * HEAD_CHARACTERS].split())[:HEAD_CHARACTERS]])
    first = next((one for one in row.messages if one.get("role") == "user"), row.messages[0] if row.messages else {})
    return _hash([_text(first.get("content"))])


def _tokens(row: Row) -> list[str]:
    """Return the tokens of a row that was tokenized elsewhere, or its segments, each with whether it is learned."""
    if row.ids is None:
        return [f"{learned}{text}" for text, learned in row.segments or ()]
    return [*map(str, row.ids.tolist()), *("" if row.is_target is None else map(str, row.is_target.tolist()))]


def _text(value: object) -> str:
    """Return a value of a message as text; the parts of a content as the text that they are joined to."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in value):
        return "".join(one["text"] for one in value)
    return json.dumps(value, sort_keys=True, default=str) if value else ""


def _normal(text: str) -> bytes:
    """Return a text in lower case, composed, with one space for any white space, as UTF-8."""
    if not text.isascii():
        words = unicodedata.normalize("NFC", text.casefold()).split()
        # a lone surrogate, which JSON may hold, is no error
        return " ".join(words).encode(errors="surrogatepass")
    # The same by bytes, in a third of the time: this runs for each row of a corpus.
    found = text.encode().translate(_LOWER)
    while b"  " in found:
        found = found.replace(b"  ", b" ")
    return found.strip()


_LOWER = bytes(32 if chr(i).isspace() and i < 128 else ord(chr(i).lower()) if i < 128 else i for i in range(256))
"ASCII in lower case, its white space as spaces."


def _hash(parts: Iterable[str]) -> int:
    # Not Python's own hash, which differs between processes. White space around the borders of parts is none.
    return int.from_bytes(blake2b(_normal(" \0 ".join(parts)), digest_size=8).digest(), "little")


def drawn(row: np.ndarray, seed: int) -> np.ndarray:
    """Return a random number for each row, uint64, all different. Those of the first rows stay if rows are added."""
    return mixed(row.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64))


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Return a hash of each number, uint64 [n], one to one."""
    # SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)))


def held_out(head: np.ndarray, fraction: float) -> np.ndarray:
    """Return which documents are held out for validation, bool [D]: by their head alone, so that copies, trees and
    documents of one row fall on one side, and stay there if rows are added."""
    return head < np.uint64(min(int(fraction * 2**64), 2**64 - 1))


# ---- documents by their columns --------------------------------------------------------------------------------------


class Copies:
    """Find documents whose row has the content of an earlier row. What it has seen takes 8 bytes a row."""

    def __init__(self) -> None:
        """Start without any content."""
        self._seen = np.zeros(0, np.uint64)

    def among(self, content: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return which documents are copies, bool [D], of earlier ones here or in earlier calls.

        Args:
            content: content_hash of their rows, uint64 [D].
            row: the numbers of these rows, int [D].
        """
        contents, first, of_each = np.unique(content, return_index=True, return_inverse=True)
        known = _is_in(contents, self._seen)
        self._seen = np.union1d(self._seen, contents[~known])
        # All documents of the first row with a content stay.
        return np.asarray(known[of_each] | (row != row[first][of_each]))


def _is_in(values: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    if not len(ascending):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return np.asarray(ascending[at] == values)


# ---- documents by their texts ----------------------------------------------------------------------------------------


LONG_QUESTION = 39
"Words from which a question has enough long n-grams: one changed word leaves more than half of them."
LONG_GRAM = 13
SHORT_GRAM = 8
_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Return the words of a text by which it is compared: composed, in lower case, without punctuation."""
    return _WORD.findall(text.lower() if text.isascii() else unicodedata.normalize("NFC", text.casefold()))


class Questions:
    """N-grams of the texts of evaluation tasks: 13 words, or 8 in texts of fewer than 39 words."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Index the n-grams of all texts."""
        words = [words_of(text) for text in texts]
        self._numbers = {word: i for i, word in enumerate(dict.fromkeys(chain.from_iterable(words)), 1)}
        # A random number for each word; 0 is a word that no question has, or the border of a text.
        self._values = np.concatenate([[np.uint64(0)], drawn(np.arange(1, len(self._numbers) + 1), seed=0)])
        sizes = [LONG_GRAM if len(one) >= LONG_QUESTION else SHORT_GRAM for one in words]
        grams = [np.unique(_grams(self._of_words(one), size)) for one, size in zip(words, sizes, strict=True)]
        self._totals = np.array([len(one) for one in grams], np.int64)
        every = np.concatenate([np.zeros(0, np.uint64), *grams])
        order = np.argsort(every, kind="stable")
        self._owners = np.repeat(np.arange(len(grams)), self._totals)[order]
        self._grams, self._starts = np.unique(every[order], return_index=True)
        self._ends = np.append(self._starts[1:], len(every))
        # Most n-grams of a document are in no question: one bit says so without a search.
        self._maybe = np.zeros(2**_BITS, bool)
        self._maybe[self._grams >> np.uint64(64 - _BITS)] = True

    def find(self, texts: Sequence[str]) -> Iterator[tuple[int, int, float]]:
        """Yield (text, question, share) of each text that has more than half of the n-grams of a question, in order."""
        words = [words_of(text) for text in texts]
        numbers = self._of_words(chain.from_iterable((*one, "") for one in words))
        text_of = np.repeat(np.arange(len(words)), np.array([len(one) + 1 for one in words], np.int64))
        found = []
        for size in (LONG_GRAM, SHORT_GRAM):
            grams = _grams(numbers, size)
            at = np.flatnonzero(self._maybe[grams >> np.uint64(64 - _BITS)])
            at = at[_is_in(grams[at], self._grams)]
            found.append(np.stack([text_of[at], np.searchsorted(self._grams, grams[at])]))
        # Each n-gram of a text once, for each question that has it.
        text, gram = np.unique(np.concatenate(found, axis=1), axis=1)
        times = self._ends[gram] - self._starts[gram]
        place = np.arange(times.sum()) + np.repeat(self._starts[gram] - (np.cumsum(times) - times), times)
        pairs = np.stack([np.repeat(text, times), self._owners[place]])
        (text, question), counts = np.unique(pairs, axis=1, return_counts=True)
        share = counts / self._totals[question]
        yield from zip(*(one[share > 0.5].tolist() for one in (text, question, share)), strict=True)

    def _of_words(self, words: Iterable[str]) -> np.ndarray:
        return self._values[np.fromiter(map(self._numbers.get, words, repeat(0)), np.int64)]


_BITS = 24


def _grams(numbers: np.ndarray, size: int) -> np.ndarray:
    """Return a hash of each `size` neighbouring numbers, uint64 [N - size + 1]."""
    count = max(len(numbers) - size + 1, 0)
    total = np.zeros(count, np.uint64)
    for k in range(size):
        total = total * np.uint64(0x9E3779B97F4A7C15) + numbers[k : k + count]
    return total


SHINGLE = 5
"Words that are compared together."
SIMILAR = 0.8
"Share of the shingles of two texts together that both have (Jaccard), from which one is a near copy."


def near_copies(texts: Iterable[str]) -> np.ndarray:
    """Return which texts are nearly an earlier one that is no near copy itself, bool [D]. Keeps 0.5 kB a text.

    Raises:
        ConfigError: the package for it is not installed.
    """
    try:
        from rensa import RMinHashDeduplicator  # an extra
    except ImportError:
        raise ConfigError(f"data.dedup: near needs the package rensa: {install('sftkit[dedup]')}") from None

    def shingles(text: str) -> list[str]:
        words = words_of(text)
        return [" ".join(words[k : k + SHINGLE]) for k in range(max(len(words) - SHINGLE + 1, 1))]

    # 16 bands of 8 find 95 % of the pairs at the limit; each pair found is then compared by the whole signature.
    known = RMinHashDeduplicator(SIMILAR, 128, use_lsh=True, num_bands=16, seed=0)
    added = known.add_pairs((str(i), shingles(text)) for i, text in enumerate(texts))
    return ~np.array(added, bool)


# ---- choosing the documents of a run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmarks:
    """Texts of evaluation tasks, which documents are compared with."""

    texts: dict[str, list[str]]
    "name of a task -> the questions of its examples; name and OF_ANSWERS -> their answers"
    missing: dict[str, str] = field(default_factory=dict)
    "task -> why its examples cannot be read"


OF_ANSWERS = " answers"
Decode = Callable[[list[list[int]]], list[str]]
"Returns the texts of documents by their ids, without special tokens."
VERSION = 1
"Of what is found in texts: raised whenever the same documents lead to other findings."
COPY = "copy of an earlier or a validation row"
QUESTION = "evaluation question or answer (data.decontaminate)"
REPEATED = "answers that an earlier path of the tree has (tree: all)"


def choose_documents(
    training: Examples,
    validation: dict[str, Examples],
    data: DataConfig,
    decode: Decode,
    benchmarks: Benchmarks | None = None,
) -> tuple[Examples, dict[str, Examples]]:
    """Return (training, validation by source) as data.train, val_fraction, dedup and decontaminate choose them.

    Args:
        training: the documents of data.train with their columns. Validation documents are never left out.
        decode: makes texts of tokens.
        benchmarks: what documents are compared with; they are left out if data.decontaminate asks for it.

    Raises:
        DataError: nothing is left of a source.
    """
    assert training.columns is not None
    # `repeat` has stored its passes one after the other; all are chosen as the first.
    owner = np.asarray(training.source)
    passes = [np.flatnonzero(owner == i).reshape(math.ceil(source.repeat), -1) for i, source in enumerate(data.train)]
    docs = np.concatenate([each[0] for each in passes])
    owner = owner[docs]
    row, turns, content, head = (column[docs] for column in training.columns)
    left_out: dict[str, Any] = {}
    used = np.ones(len(docs), bool)

    def leave_out(reason: str, which: np.ndarray) -> None:
        left_out[reason] = left_out.get(reason, False) | (used & which)
        used[which] = False

    stored = training.tokens
    sizes = training.lengths[docs] + 1
    if isinstance(stored, ShardTokens) and any(map(where_counts, data.train)):
        sizes = stored.sizes(docs)
    for i, source in enumerate(data.train):
        own = owner == i
        for name, limit in where_counts(source).items():
            values = sizes if name.endswith("tokens") else turns
            outside = values < limit if name.startswith("min") else values > limit
            leave_out(f"where.{name}: {limit}", own & outside)
        if (sample := source.sample) is not None and (own & used).any():
            numbers = drawn(row, sample.seed)
            in_order = np.unique(numbers[own & used])
            if len(in_order) < sample.rows:
                said = f"sample: only {counted(len(in_order), 'row')} to draw from; all are taken"
                name = source_label(source)
                log.info("%s: %s", name, said)
                training.files[name] = "; ".join(filter(None, (training.files.get(name), said)))
            leave_out(f"not among {sample.rows:,} rows", own & (numbers > in_order[: sample.rows][-1]))
    if data.dedup:
        copies = Copies()
        for one in validation.values():
            assert one.columns is not None
            copies.among(one.columns.content, one.columns.row)
        which = used.copy()
        which[used] = copies.among(content[used], owner[used] * np.int64(2**32) + row[used])
        leave_out(COPY, which)
    if benchmarks is not None:
        facts = contamination(training, docs, data, decode, benchmarks)
        training = replace(training, contamination=facts)
        if data.decontaminate:
            leave_out(QUESTION, np.isin(docs, [one["document"] for one in facts["found"]]))
    if data.dedup == "near":
        leave_out(f"near {COPY}", np.isin(docs, _near(training, docs[used], validation, data, decode)))

    # Each answer of a tree is learned in the first path that is used, and a path without another one is not used.
    repeated: dict[int, list[tuple[int, int]]] = {}
    for i, source in enumerate(data.train):
        if source.tree == "all":
            its, nothing_new = repeated_answers(training, docs[(owner == i) & used])
            leave_out(REPEATED, np.isin(docs, nothing_new))
            repeated |= its
    if repeated:
        training = _learn_once(training, passes, repeated, decode)

    # What is left of each source, on its side, and counts of the rest.
    aside = used & held_out(head, data.val_fraction or 0.0)
    kept, counts, findings = [], dict(training.counts), dict(training.findings)
    validation = dict(validation)
    for i, source in enumerate(data.train):
        name, own = source_label(source), owner == i
        left = [(reason, np.flatnonzero(which & own)) for reason, which in left_out.items()]
        told = [Finding("left out", r, len(n), f"{source.path}: row {row[n[0]] + 1:,}") for r, n in left if len(n)]
        findings[name] = (*told, *findings.get(name, ()))
        if not (own & used & ~aside).any():
            reasons = "".join(f"; {finding_text(one)}" for one in told)
            if count := int((own & aside).sum()):
                reasons += f"; {count:,} held out (data.val_fraction)"
            advice = "Loosen these settings, or remove the source"
            raise DataError(f"data source {source.path}: no document is left{reasons}. {advice}")
        kept.append(passes[i][:, (used & ~aside)[own]].ravel())
        sizes = {"left_out": int((own & ~used).sum()), "held_out": int((own & aside).sum())}
        counts[name] = counts[name] | sizes | {"documents": round(kept[-1].size / len(passes[i]) * source.repeat)}
        if before := counts[name].get("answers_learned"):
            its = docs[own & used & ~aside]
            assert isinstance(stored, ShardTokens)
            whole = stored.learned_answers(its)
            ends = [(doc, past) for doc in np.intersect1d(its, [*repeated]).tolist() for _, past in repeated[doc]]
            again = sum(past <= training.lengths[doc] + 1 for doc, past in ends)
            learned = round((whole - again) * source.repeat)
            counts[name] |= {"answers_learned": learned, ANSWERS_LEFT_OUT: before - learned}
        if sizes["held_out"]:
            own &= aside
            its_counts = {"rows": len(np.unique(row[own])), "documents": sizes["held_out"]}
            alone = {"source": np.zeros(own.sum(), np.int16), "source_names": (name,), "counts": {name: its_counts}}
            validation[name] = training.take(docs[own], findings={}, contamination=None, **alone)
        elif data.val_fraction:
            log.warning(hint("nothing held out", name=name, fraction=data.val_fraction))
    if data.val_fraction and not any(counts[name]["held_out"] for name in training.source_names):
        there = counted(int(used.sum()), "document")
        raise DataError(f"data.val_fraction: {data.val_fraction} holds out none of {there}: raise it, or set data.val")
    return training.take(np.concatenate(kept), counts=counts, findings=findings), validation


def repeated_answers(examples: Examples, documents: np.ndarray) -> tuple[dict[int, list[tuple[int, int]]], list[int]]:
    """Find the answers of a tree's paths that an earlier one of these documents has, after the same tokens.

    Args:
        documents: of the first pass over the source, ascending.

    Returns:
        document -> first token and one past the last of each such answer; documents without any other answer
    """
    assert isinstance(examples.tokens, ShardTokens)
    assert examples.columns is not None
    answers = examples.tokens.answers(documents)
    found: dict[int, list[tuple[int, int]]] = {}
    nothing_new = []
    known: set[bytes] = set()
    head = None
    for some, offsets, ids, _ in examples.pieces(documents):
        for i, (begin, end) in zip(some.tolist(), pairwise(offsets.tolist()), strict=True):
            if head != examples.columns.head[i]:  # another tree
                known = set()
                head = examples.columns.head[i]
            own = [(first, past) for first, past in next(answers) if begin + first < end]
            keys = [blake2b(ids[begin : min(begin + past, end)].tobytes(), digest_size=16).digest() for _, past in own]
            if again := [span for span, key in zip(own, keys, strict=True) if key in known]:
                found[i] = again
            if own and len(again) == len(own):
                nothing_new.append(i)
            known.update(keys)
    return found, nothing_new


def _learn_once(
    training: Examples, passes: Sequence[np.ndarray], found: Mapping[int, list[tuple[int, int]]], decode: Decode
) -> Examples:
    """Return the documents with these answers as context, in each pass over their source."""
    parts: dict[int, list[tuple[int, int]]] = {}
    for each in passes:
        at = [k for k, i in enumerate(each[0].tolist()) if i in found]
        parts |= {int(one[k]): found[int(each[0][k])] for one in each for k in at}
    training = replace(training, tokens=Unlearned(training.tokens, training.lengths, parts))
    num_targets, num_bytes = np.array(training.num_targets), np.array(training.num_bytes)
    for some, offsets, ids, is_target in training.pieces(sorted(parts)):
        learned = [ids[a:b][is_target[a:b]].tolist() for a, b in pairwise(offsets.tolist())]
        num_targets[some] = list(map(len, learned))
        num_bytes[some] = [len(text.encode("utf-8", errors="replace")) for text in decode(learned)]
    return replace(training, num_targets=num_targets, num_bytes=num_bytes)


def contamination(
    examples: Examples, documents: np.ndarray, data: DataConfig, decode: Decode, benchmarks: Benchmarks
) -> dict[str, Any]:
    """Return which documents hold more than half of the n-grams of an evaluation text, from the cache if it is there.

    Returns:
        found: of each match document, row, where, task, example (from 0) and share; documents: how many were compared;
        tasks, missing: names, and as in Benchmarks.
    """
    names = [(task, i) for task, texts in benchmarks.texts.items() for i in range(len(texts))]
    columns = examples.columns
    assert columns is not None

    def compare() -> dict[str, Any]:
        questions = Questions(list(chain.from_iterable(benchmarks.texts.values())))
        found: list[dict[str, Any]] = []
        for some, texts in _texts(examples, documents, decode):
            for text, question, share in questions.find(texts):
                i = int(some[text])
                task, example = names[question]
                match = {"task": task, "example": example, "share": round(share, 3)}
                found.append({"document": i, "row": int(columns.row[i]), **match})
        # The files are read again for the places of these rows.
        for number, source in enumerate(data.train):
            of_source = [one for one in found if examples.source[one["document"]] == number]
            rows = {one["row"] for one in of_source}
            read = enumerate(islice(find_source(source, data).rows(), max(rows, default=-1) + 1))
            places = {i: raw[0] for i, raw in read if i in rows}
            for one in of_source:
                # Tokens that another program wrote have no rows.
                one["where"] = places.get(one["row"], f"{source.path}: document {one['row'] + 1:,}")
        return {"documents": len(documents), "found": found}

    with working("looking for evaluation questions in the training data"):
        found = _kept(data, [examples.key, benchmarks.texts], compare)
    tasks = [task for task in benchmarks.texts if not task.endswith(OF_ANSWERS)]
    return {**found, "tasks": tasks, "missing": benchmarks.missing, "left_out": bool(data.decontaminate)}


def _near(
    examples: Examples, documents: np.ndarray, validation: Mapping[str, Examples], data: DataConfig, decode: Decode
) -> list[int]:
    """Return the documents of rows that are near copies of an earlier or a validation row."""
    assert examples.columns is not None
    # The longest document represents its row: others may repeat its prompts.
    _, row = np.unique(np.stack([examples.source, examples.columns.row])[:, documents], axis=1, return_inverse=True)
    order = np.lexsort((-examples.lengths[documents], row))
    longest = documents[order[np.unique(row[order], return_index=True)[1]]]

    def compare() -> dict[str, Any]:
        before = [(one, np.arange(len(one))) for one in validation.values()]
        every = chain.from_iterable(
            t for one, some in (*before, (examples, longest)) for _, t in _texts(one, some, decode)
        )
        copies = near_copies(every)[-len(longest) :]
        return {"documents": documents[copies[row]].tolist()}

    keys = [examples.key, *(one.key for one in validation.values())]
    with working("looking for near copies in the training data"):
        found = _kept(data, [*keys, blake2b(documents.tobytes()).hexdigest()], compare)
    return list(found["documents"])


def _texts(examples: Examples, documents: np.ndarray, decode: Decode) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Yield (some documents, their texts)."""
    for some, offsets, ids, _ in examples.pieces(documents):
        yield some, decode([ids[a:b].tolist() for a, b in pairwise(offsets.tolist())])


def _kept(data: DataConfig, follows_from: Sequence[object], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what was computed earlier from the same, next to the tokens; nothing is kept if a key is empty."""
    digest = blake2b(json.dumps([VERSION, *follows_from]).encode(), digest_size=16).hexdigest()
    path = Path(data.cache_dir) / f"chosen-{digest}.json"
    if found := all(follows_from) and read_object(path):
        with suppress(OSError):  # `sftkit data prune` removes what was not used for long
            os.utime(path)
        return found
    found = compute()
    with suppress(OSError):  # then it is computed again at the next start
        replace_shared(path, json.dumps(found))
    return found
