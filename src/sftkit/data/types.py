"""The types of data between a record and a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from sftkit.runtime.script import first_of

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object of the data: a record, a message, a tool, arguments. Any, for what the keys hold is checked where they
are read, and most of it is the chat template's to know."""


@dataclass(frozen=True)
class Row:
    """One row as read: `text`, or `messages` in the OpenAI shape with optional `tools`, or a picture with
    what it shows, or what is tokenized elsewhere or as it is written: `ids` or `segments`."""

    where: str
    "file:line, or dataset[split]:index, for error messages."
    text: str | None = None
    messages: list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    context_messages: int = 0
    "Number of messages at the beginning that are context, not learned: `prompt` next to `completion`."
    template_args: JsonObject | None = None
    "Arguments of the chat template for this conversation, such as enable_thinking."
    image: str | None = None
    """File of a picture, or the name of a generated one. Beside `text`: a file name in the record, of which
    no file exists."""
    captions: tuple[str, ...] = ()
    "Texts about the picture, each a document of its own."
    learned: bool = True
    "False: the row is marked as not to be learned, with weight: 0 for example."
    masked_role: str = ""
    "The role that the row excludes from learning (NeMo's column mask)."
    unused: tuple[str, ...] = ()
    "Columns that nothing reads, each as findings name it: column quality."
    ids: np.ndarray | None = None
    "int32 [n]: the tokens of a row that was tokenized elsewhere."
    is_target: np.ndarray | None = None
    "bool [n]: which of them are learned; None: the row does not say it."
    segments: tuple[tuple[str, bool], ...] | None = None
    "Texts that are tokenized apart, and whether each is learned."
    shape: str = ""
    "The kind of row that it was read as: alpaca (instruction, output, input)."

    def changed(self, **fields: Any) -> Row:
        """Return the row with other values of some fields, as dataclasses.replace does in ten times the time."""
        row = object.__new__(Row)
        row.__dict__.update(self.__dict__, **fields)
        return row

    @property
    def is_tokenized(self) -> bool:
        """Return whether its tokens are given, or what each text of it becomes, so that no template or rule decides."""
        return self.ids is not None or self.segments is not None


@dataclass(frozen=True)
class TokenizedExample:
    """A document of n >= 2 tokens. `is_target[i]`: token i is learned from tokens 0..i-1; token 0 never is.

    Tokens after the last target are cut off: they cannot change a loss.
    """

    ids: np.ndarray
    "int32 [n]"
    is_target: np.ndarray
    "bool [n]"
    num_bytes: int = 0
    "UTF-8 bytes of the decoded targets, special tokens left out: the denominator of bits per byte."
    encoder_source: str = ""
    "Input of an encoder for it: a picture's file, or a text; empty: nothing."
    size: int = 0
    "Tokens before anything was cut off, of a document that must not be split; 0: a text, which may be."
    answers: tuple[tuple[int, int], ...] = ()
    "Of each answer that is learned whole in it: its first token, and one past its last."


TOO_LONG = "not_learned_too_long"
"Count of answers that are not learned because their document was dropped, or cut before their first target."
CUT = "answers_cut"
"Count of answers of which only the beginning is learned, as data.max_length cuts their document."
ANSWERS_LEFT_OUT = "answers_left_out"
"""Count of answers that are not learned because their document is held out or not used, or an earlier path of their
tree has them."""
SPLIT_TOKENS = "split_tokens"
"Count of the tokens of documents that are there because of split_turns."


@dataclass(frozen=True)
class Tokenized:
    """The result of tokenizing one row: its documents (none if it was dropped), and why something is missing."""

    examples: list[TokenizedExample]
    note: str | None = None
    "None | truncated | dropped_too_long | dropped_no_target"
    counts: Mapping[str, int] = field(default_factory=dict)
    "counts of its answers, see chat.ANSWER_COUNTS"
    details: str = ""
    "of a dropped row: the details, such as its length"
    odd: Mapping[str, str] = field(default_factory=dict)
    "data warnings, although it is learned from: reason -> place and text"
    unused: tuple[str, ...] = ()
    "keys of its messages that nothing reads, each as findings name it: message key mood"


Kind = Literal["read", "skipped", "dropped", "accepted", "unused", "left out"]


@dataclass(frozen=True)
class Finding:
    """Rows of a source that are read in the same way, or have the same fault, oddity or unused column."""

    kind: Kind
    """read: how; skipped as bad; dropped although valid; accepted although odd; with an unused column or key; or, of
    documents, left out as the recipe asks"""
    reason: str
    "a short text, the same for all of them; of an unused one what it is: column quality; of those read Row.shape"
    rows: int
    first: str
    "file:line of the first one, and what is wrong there, or what it says"


@dataclass(frozen=True)
class EncoderInputs:
    """Inputs of an encoder for documents, all of one shape: I pictures or texts, which several documents may share."""

    arrays: Mapping[str, np.ndarray]
    "by argument name, [I, ...], memory-mapped where they are large"
    index: np.ndarray
    "int64 [D]; document i is given entry index[i]"


@dataclass(frozen=True)
class DocumentColumns:
    """What documents are chosen by (hygiene.py), arrays [D], read when they are first asked for: most runs choose
    none."""

    read: Callable[[], Sequence[np.ndarray]]
    "returns row, turns, content and head"

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(self.read())

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self._arrays)

    @property
    def row(self) -> np.ndarray:
        """Return the number of its row in the source, int."""
        return self._arrays[0]

    @property
    def turns(self) -> np.ndarray:
        """Return the messages of its row, int; 0: a text."""
        return self._arrays[1]

    @property
    def content(self) -> np.ndarray:
        """Return hygiene.content_hash of its row, uint64."""
        return self._arrays[2]

    @property
    def head(self) -> np.ndarray:
        """Return hygiene.head_hash of its row, uint64."""
        return self._arrays[3]

    def of(self, documents: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of some documents."""
        return [array[documents] for array in self]


class Tokens(Protocol):
    """Where the tokens of documents are kept."""

    def gather(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32 [n], is_target bool [n]) of documents, one after the other."""


@dataclass(frozen=True)
class Examples:
    """All tokenized documents of a set of sources, D of them, source after source; the columns may be memory-mapped."""

    tokens: Tokens
    lengths: np.ndarray
    """int [D], the row positions that each document takes. Its last token is only ever a target, so n tokens take
    n - 1."""
    num_targets: np.ndarray
    "int [D]; token 0 of a document has no context and is never one"
    num_bytes: np.ndarray
    "int [D], UTF-8 bytes of the targets"
    source: np.ndarray
    "int [D], index into source_names"
    source_names: tuple[str, ...]
    counts: dict[str, dict[str, int]]
    "source name -> rows, documents, truncated, dropped_too_long, dropped_no_target, skipped_bad, chat.ANSWER_COUNTS, \
and the messages of each role in conversations that are learned from, see view.ROLE_COUNTS"
    findings: dict[str, tuple[Finding, ...]] = field(default_factory=dict)
    "source name -> why rows were skipped or dropped, and what is odd in others"
    files: dict[str, str] = field(default_factory=dict)
    "source name, of a folder -> which of its files are read, and which are left out, as Origin.said; not in the cache"
    encoder_sources: Sequence[str] = ()
    "of each document what an encoder reads for it, by name; empty: the data is for models without one"
    encoder_inputs: EncoderInputs | None = None
    "the same as arrays; None: there is no encoder"
    columns: DocumentColumns | None = None
    "None: made-up documents"
    key: str = ""
    "names all that the documents follow from, as load_sources has loaded them; empty: made-up or chosen documents"
    contamination: Mapping[str, Any] | None = None
    "the evaluation questions that were found in the documents, as chosen.contamination; None: none were looked for"

    @classmethod
    def of(
        cls,
        ids: np.ndarray,
        sizes: Sequence[int] | np.ndarray,
        encoder_inputs: EncoderInputs | None = None,
        *,
        is_target: np.ndarray | None = None,
    ) -> Examples:
        """Make documents that take `sizes` positions each, one after the other in ids [N].

        Args:
            is_target: bool [N]; None: every token but the first of each document.
        """
        # A document of n positions, with targets shifted by one, has n + 1 tokens.
        lengths = np.asarray(sizes, dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
        learned = np.ones(len(ids), bool) if is_target is None else is_target.copy()
        learned[offsets[:-1]] = False
        tokens = FlatTokens(ids.astype(np.int32), learned, offsets)
        num_targets = np.add.reduceat(learned, offsets[:-1], dtype=np.int64)
        zeros = np.zeros(len(lengths), dtype=np.int64)
        return cls(tokens, lengths, num_targets, zeros, zeros, ("made up",), {}, encoder_inputs=encoder_inputs)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> TokenizedExample:
        return TokenizedExample(*self.gather(np.array([i])), int(self.num_bytes[i]))

    def gather(self, documents: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids int32 [n], is_target bool [n]) of documents, one after the other."""
        return self.tokens.gather(np.asarray(documents, dtype=np.int64))

    def pieces(
        self, documents: Sequence[int] | np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (numbers of some documents, offsets of their tokens, ids, is_target), in order, so that the tokens of
        all are never in memory at once."""
        documents = np.asarray(documents, dtype=np.int64)
        ends = np.cumsum(self.lengths[documents] + 1)
        first = 0
        while first < len(documents):
            before = ends[first - 1] if first else 0
            # A document that is longer than a piece is a piece of its own.
            last = max(int(np.searchsorted(ends, before + _PIECE_TOKENS, side="right")), first + 1)
            offsets = np.concatenate([[0], ends[first:last] - before])
            yield documents[first:last], offsets, *self.gather(documents[first:last])
            first = last

    def last_tokens(self, documents: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (the last id, whether it is a target) of each document."""
        found = [(ids[ends[1:] - 1], learned[ends[1:] - 1]) for _, ends, ids, learned in self.pieces(documents)]
        ids, learned = map(np.concatenate, zip(*found, strict=True))
        return ids, learned

    def take(self, documents: np.ndarray, **others: Any) -> Examples:
        """Return some documents in this order. `others`: fields with another value."""
        names = ("lengths", "num_targets", "num_bytes", "source")
        taken: dict[str, Any] = {name: getattr(self, name)[documents] for name in names}
        if self.encoder_sources:
            taken["encoder_sources"] = [self.encoder_sources[i] for i in documents.tolist()]
        if self.columns is not None:
            taken["columns"] = DocumentColumns(partial(self.columns.of, documents))
        return replace(self, **{**taken, "tokens": _Taken(self.tokens, documents), "key": "", **others})

    def name(self, i: int) -> str:
        """Return the name of document i in messages."""
        return f"{self.source_names[int(self.source[i])]} #{i}"

    @property
    def encoded(self) -> bool:
        """Return whether each document has something for an encoder."""
        return bool(self.encoder_sources) or self.encoder_inputs is not None


class _Taken(NamedTuple):
    """Tokens of some of the documents of others."""

    tokens: Tokens
    documents: np.ndarray
    "int [D]"

    def gather(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens.gather(self.documents[documents])


class Unlearned(NamedTuple):
    """Tokens of documents of which some parts are context only."""

    tokens: Tokens
    lengths: np.ndarray
    "int [D], as in Examples"
    parts: Mapping[int, Sequence[tuple[int, int]]]
    "document -> first token and one past the last of each part"

    def gather(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, is_target) of documents, one after the other."""
        ids, is_target = self.tokens.gather(documents)
        sizes = self.lengths[documents].astype(np.int64) + 1
        for i, start, size in zip(documents.tolist(), np.cumsum(sizes) - sizes, sizes, strict=True):
            for first, past in self.parts.get(i, ()):
                is_target[start + first : start + min(past, size)] = False
        return ids, is_target


@dataclass(frozen=True)
class FlatTokens:
    """Tokens of documents in memory, one document after the other."""

    ids: np.ndarray
    "int32 [N]"
    is_target: np.ndarray
    "bool [N]"
    offsets: np.ndarray
    "int64 [D + 1]; document i is ids[offsets[i] : offsets[i + 1]]"

    def gather(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, is_target) of documents, one after the other."""
        own = [slice(self.offsets[i], self.offsets[i + 1]) for i in documents.tolist()]
        if not own:
            return self.ids[:0], self.is_target[:0]
        return np.concatenate([self.ids[one] for one in own]), np.concatenate([self.is_target[one] for one in own])


_PIECE_TOKENS = 2**20
SHOWN = 5
"Documents named in a message."


def listed(documents: Sequence[str]) -> str:
    """Return the first few of some documents, by name, and how many more there are."""
    return f"documents {first_of(documents, SHOWN)}" if documents else "padding only"
