"""Tokenize many rows at a time, with the results of tokenizing them one by one.

Each document is rendered once: how the template renders an answer after its prompt is known from other rows. Texts are
encoded without offsets, by their words if the tokenizer's splits are known. Special tokens cut a text, and no token
reaches across them, so the n-th special token of the text is the n-th special id, and an answer begins after the ids of
its header. A row of which this does not hold is tokenized by itself. So is one in 128 of the others, to compare; after
a difference, all rows are.
"""

import gc
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import accumulate, groupby, zip_longest
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.data.reading.conversation import special_pattern
from sftkit.data.tokens import chat, text
from sftkit.data.tokens.encode import encode, token_bytes
from sftkit.data.tokens.loss_mask import Seen
from sftkit.data.tokens.shapes import ChatShape, Shapes
from sftkit.data.tokens.template import Span, special_tokens_of
from sftkit.data.tokens.words import keep, word_encoder
from sftkit.data.types import Row, Tokenized, TokenizedExample
from sftkit.errors import DataError, hint

COMPARED_ONE_IN = 128
"One of this number of rows is also tokenized alone, for comparison."
LONGEST_TEXT = 2**18
"Characters of a text that a tokenizer encodes in one call: it needs some 600 bytes for each."
LONGEST_OF_WORDS = 2**23
"Characters of a text that is encoded by its words, some 20 bytes each."
CHARACTERS_OF_A_CALL = 2**20
"Characters of the texts of a call."
LONGEST_HEADER = 256
"Characters from a special token to an answer; more is no header but the text of a prompt, other in each row."
MOST_HEADERS = 1024

RowResult = Tokenized | DataError
log = logging.getLogger(__name__)


class NotPlaced(Exception):
    """The tokens of an answer are not known without offsets."""


@dataclass(frozen=True)
class Placed:
    """Tokens of a whole text, and the first token at some of its characters; as Encoded."""

    ids: np.ndarray
    at: Mapping[int, int]
    complete: bool = True

    def tokens(self, span: Span) -> tuple[int, int]:
        """Return (the first token, one past the last) of a span."""
        start, end = span
        if start not in self.at or end not in self.at:
            raise NotPlaced
        return self.at[start], self.at[end]

    def inside(self, spans: list[Span]) -> np.ndarray:
        """Return bool [n]: tokens of the spans."""
        is_target = np.zeros(len(self.ids), dtype=bool)
        for span in spans:
            first, past = self.tokens(span)
            is_target[first:past] = True
        return is_target


@dataclass
class _Waiting:
    """A row whose next text is to be encoded."""

    row: int
    steps: chat.ChatSteps[Tokenized]
    text: str
    spans: dict[int, list[Span]]
    last: int
    pieces: list[str]
    "the text, split at its special tokens"
    prompt: np.ndarray | None = None
    "ids of the text before the last answer, if the two are encoded apart"
    shape: ChatShape | None = None
    "of a row that did not start its steps: its shape says where the answers are"

    @property
    def to_encode(self) -> str:
        """Return the text, or what is to be encoded apart."""
        return self.text if self.prompt is None else self.text[self.spans[self.last][0][0] :]


class RowBatches:
    """A rule for many rows at a time; one that is not known here is called row by row."""

    def __init__(
        self, rule: Callable[..., Tokenized], tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]
    ) -> None:
        """Take what a sources.RowTokenizer has."""
        self.rule = rule
        self.tokenizer = tokenizer
        self.settings = settings
        self.different: str | None = None
        "Place of a row whose result differs when it is tokenized alone. All later rows are tokenized alone."
        self._tokenized = 0
        self._known: tuple[object, ...] = ()
        self._results: list[RowResult | None] = []

    def many(self, rows: Sequence[Row]) -> list[RowResult]:
        """Return the documents of each row, or its error."""
        specials = tuple(special_tokens_of(self.tokenizer))
        # A template may write the date.
        tokens = len(self.tokenizer), tuple(self.tokenizer.added_tokens_decoder), specials
        known = *tokens, self.tokenizer.chat_template, date.today()
        self.tokenizer.backend_tokenizer.no_truncation()
        self.tokenizer.backend_tokenizer.no_padding()
        if known != self._known:  # the first rows, or the tokenizer was changed
            self._read_tokenizer(specials)
            self._known = known
        self._results = [None] * len(rows)
        self._tried: dict[int, ChatShape] = {}
        if self._sizes is not None and self.different is None:
            # A chunk has thousands of objects, and to look for cycles among them would take a fourth of the time.
            collects = gc.isenabled()
            gc.disable()
            try:
                self._chats(rows)
                self._texts(rows)
            finally:
                if collects:
                    gc.enable()
            self._compare(rows)
        # A difference may be in rows of this chunk that were not compared.
        done = self._results if self.different is None else [None] * len(rows)
        self._results = []
        return [self.by_itself(row) if one is None else one for row, one in zip(rows, done, strict=True)]

    def _read_tokenizer(self, specials: tuple[str, ...]) -> None:
        self._words = word_encoder(self.tokenizer.backend_tokenizer)
        self._sizes = token_bytes(self.tokenizer, len(self.tokenizer))
        self._seen = Seen()
        learning = chat.EVERYTHING if self.rule is text.tokenize_any else chat.ANSWERS
        self._shapes = Shapes(self.tokenizer, self.settings.get("learning", learning), specials, self._seen)
        self._headers: dict[str, bytes] = {}
        self._pattern = re.compile(f"({special_pattern(specials).pattern})")
        special_ids: Any = self.tokenizer.convert_tokens_to_ids(list(specials))
        self._special_ids: dict[str, int] = dict(zip(specials, special_ids, strict=True))
        if self._sizes is not None:
            self._text_sizes = self._sizes.sizes.copy()
            self._is_special = np.zeros(len(self._text_sizes), dtype=bool)
            for token, i in self._special_ids.items():
                self._text_sizes[i] = len(token.encode())
                self._is_special[i] = True

    def by_itself(self, row: Row) -> RowResult:
        """Return the documents of a row, or its error, from the rule."""
        try:
            return self.rule(row, self.tokenizer, **self.settings)
        except DataError as error:
            return error

    def _compare(self, rows: Sequence[Row]) -> None:
        """Tokenize some of the rows by themselves, and note a difference."""
        for i, (row, result) in enumerate(zip(rows, self._results, strict=True)):
            if result is None:
                continue
            self._tokenized += 1
            tried = self._tried.get(i)
            if tried is None and self._tokenized % COMPARED_ONE_IN != 1:
                continue
            alone = self.by_itself(row)
            agrees = same(alone, result)
            if tried is not None:
                self._shapes.judge(tried, alone, agrees=agrees)
                self._results[i] = alone
            elif not agrees:
                self.different = row.where
                log.warning("%s", hint("rows differ in a batch", where=row.where))
                return

    def _encode(self, texts: Sequence[str], pieces: Iterable[list[str] | None] = (), *, split: bool) -> list[Any]:
        """Return the ids of texts, int32 [n] each; None for those of more than LONGEST_TEXT characters whose words are
        not known. `split`: special tokens in a text are ordinary characters. `pieces`: as in Words.encode."""
        encode = (lambda *_, **__: None) if self._words is None else self._words.encode
        found = [encode(text, given, split=split) for text, given in zip_longest(texts, pieces)]
        left = [(i, texts[i]) for i, ids in enumerate(found) if ids is None and len(texts[i]) <= LONGEST_TEXT]
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = split
        ends = zip(accumulate(len(text) for _, text in left), left, strict=True)
        for _, group in groupby(ends, lambda one: one[0] // CHARACTERS_OF_A_CALL):
            places, call = zip(*(one for _, one in group), strict=True)
            for i, encoded in zip(places, backend.encode_batch_fast(call, add_special_tokens=False), strict=True):
                found[i] = np.array(encoded.ids, np.int32)
        return found

    # ---- texts -------------------------------------------------------------------------------------------------------

    def _texts(self, rows: Sequence[Row]) -> None:
        """Tokenize the rows of plain text."""
        if self.rule not in (text.tokenize, text.tokenize_any):
            return
        assert self._sizes is not None
        special_tokens = self.settings.get("special_tokens", "split")
        found: dict[int, tuple[str, dict[str, str]]] = {}
        for i, row in enumerate(rows):
            if row.messages is None and row.image is None and not row.is_tokenized:
                try:
                    given, odd = text.text_and_warnings(row, tuple(self._special_ids), special_tokens)
                    if given and _is_encoded_here(given):
                        found[i] = given, odd
                except DataError as error:
                    self._results[i] = error
        encoded = self._encode([given for given, _ in found.values()], split=special_tokens != "parse")
        before, after = (np.array(part, np.int32) for part in text.around(self.tokenizer))
        for (i, (given, odd)), ids in zip(found.items(), encoded, strict=True):
            # Special tokens that are parsed are counted otherwise.
            if ids is not None and self._sizes.sizes.take(ids).sum() == len(given.encode()):
                max_length = self.settings["max_length"]
                whole = np.concatenate([before, ids, after])
                self._results[i] = text.documents_of_text(whole, odd, self.tokenizer, max_length, self._sizes)

    # ---- conversations -----------------------------------------------------------------------------------------------

    def _chats(self, rows: Sequence[Row]) -> None:
        """Tokenize the conversations: one document of each in a call, until all have theirs."""
        if self.rule not in (chat.tokenize, text.tokenize_any):
            return
        every = {"learning": chat.EVERYTHING} if self.rule is text.tokenize_any else {}
        settings = {**every, **self.settings, "seen": self._seen, "sizes": self._sizes}
        settings.pop("special_tokens", None)
        waiting: list[_Waiting] = []
        self._shapes.start_chunk()
        for i, row in enumerate(rows):
            if row.messages is not None and row.image is None and not row.is_tokenized:
                shaped = self._shapes.find(row)
                if shaped is not None and shaped.shape.agreed < Seen.ENOUGH:
                    self._tried[i] = shaped.shape
                steps = chat.steps(row, self.tokenizer, **settings, shaped=shaped)
                if shaped is None or shaped.shape.counts is None:
                    waiting += self._next(i, steps, None)
                elif _is_encoded_here(given := shaped.only_text):
                    waiting.append(_Waiting(i, steps, given, {}, 0, self._pattern.split(given), shape=shaped.shape))
        while waiting:
            # Most tokenizers have no added tokens that are not special.
            is_split = self._words is not None and self._special_ids.keys() == self._words.added
            pieces = [one.pieces if is_split and one.prompt is None else None for one in waiting]
            encoded = self._encode([one.to_encode for one in waiting], pieces, split=False)
            alike: dict[ChatShape, list[tuple[_Waiting, np.ndarray]]] = {}
            following = []
            for one, ids in zip(waiting, encoded, strict=True):
                if ids is None:
                    continue
                if one.shape is None:
                    following += self._after(one, ids)
                else:
                    alike.setdefault(one.shape, []).append((one, ids))
            for shape, group in alike.items():
                for one, ids in self._place(shape, group):
                    _, spans, last = one.steps.send(None)  # type: ignore[arg-type]  # None starts a generator
                    following += self._after(replace(one, spans=spans, last=last, shape=None), ids)
            waiting = following

    def _next(self, row: int, steps: chat.ChatSteps[Tokenized], tokens: tuple[Any, set[int]] | None) -> list[_Waiting]:
        """Take a row to its next text, or to its result; neither: it is tokenized by itself."""
        try:
            text, spans, last = steps.send(tokens)  # type: ignore[arg-type]  # None starts a generator
            pieces = self._pattern.split(text)
            return [_Waiting(row, steps, text, spans, last, pieces)] if _is_encoded_here(text) else []
        except StopIteration as done:
            self._results[row] = done.value
        except DataError as error:
            self._results[row] = error
        except NotPlaced:
            pass
        return []

    def _place(self, shape: ChatShape, group: list[tuple[_Waiting, np.ndarray]]) -> list[tuple[_Waiting, np.ndarray]]:
        """Make the documents of rows of a shape from their ids, all at once, as _after does one by one. Return the rows
        whose answers are not where the shape has them."""
        assert shape.placement is not None
        assert shape.counts is not None
        assert self._sizes is not None
        specials, answers = shape.placement
        lengths = np.array([len(encoded) for _, encoded in group])
        ids = np.concatenate([encoded for _, encoded in group])
        starts = lengths.cumsum() - lengths
        at = self._is_special.take(ids).nonzero()[0]
        number = np.bincount(np.searchsorted(starts, at, side="right") - 1, minlength=len(group)).tolist()
        here = [n == len(specials) == len(one.pieces) // 2 for n, (one, _) in zip(number, group, strict=True)]
        if not all(here):
            rest = [one for one, is_here in zip(group, here, strict=True) if is_here]
            others = [one for one, is_here in zip(group, here, strict=True) if not is_here]
            return others + (self._place(shape, rest) if rest else [])
        places = at.reshape(len(group), -1)
        fits = (ids.take(places) == specials).all(1)
        places -= starts[:, None]
        fits &= (lengths <= self.settings["max_length"]) & (places[:, -1] + 1 == lengths)
        fits &= self._sizes.whole.take(ids.take(starts))
        fits &= np.add.reduceat(self._text_sizes.take(ids), starts) == [len(one.text.encode()) for one, _ in group]
        borders = np.zeros((len(group), len(answers), 2), np.int64)
        for k, (before, header, past) in enumerate(answers):
            begin = places[:, before]
            found = ids.take((starts + begin)[:, None] + np.arange(len(header)), mode="clip")
            fits &= (found == header).all(1)
            borders[:, k, 0] = begin + len(header)
            borders[:, k, 1] = places[:, past] + 1
        change = np.zeros(len(ids) + 1, np.int8)
        change[starts[fits, None] + borders[fits, :, 0]] += 1
        change[starts[fits, None] + borders[fits, :, 1]] -= 1
        is_target = change[:-1].cumsum(dtype=np.int8) > 0
        num_bytes = np.add.reduceat(self._sizes.sizes.take(ids) * is_target, starts)
        columns = (column.tolist() for column in (fits, starts, lengths, num_bytes, borders))
        left = []
        for (one, encoded), fit, start, length, size, parts in zip(group, *columns, strict=True):
            if not fit:
                left.append((one, encoded))
                continue
            mine = slice(start, start + length)
            more = {"size": length, "answers": tuple(map(tuple, parts))}
            self._results[one.row] = Tokenized(
                [TokenizedExample(ids[mine], is_target[mine], size, **more)], counts=shape.counts
            )
        return left

    def _after(self, one: _Waiting, encoded: np.ndarray) -> list[_Waiting]:
        """Place the tokens of a text; return what is to be encoded next for its row."""
        ids = encoded if one.prompt is None else np.concatenate([one.prompt, encoded])
        places = self._is_special.take(ids).nonzero()[0]
        if ids.take(places).tolist() != list(map(self._special_ids.__getitem__, one.pieces[1::2])):
            return []
        is_long = len(ids) > self.settings["max_length"]
        if is_long or self._text_sizes.take(ids).sum() != len(one.text.encode()):
            return []
        ends = list(accumulate(map(len, one.pieces)))[1::2]
        at = dict(zip(ends, (places + 1).tolist(), strict=True))
        at[0] = 0
        at[len(one.text)] = len(ids)
        shared: set[int] = set()
        whole = ids.tobytes()
        for k, parts in one.spans.items():
            start = parts[0][0]
            before = bisect_right(ends, start) - 1
            first = int(places[before]) if before >= 0 else 0
            begin = ends[before] - len(one.pieces[2 * before + 1]) if before >= 0 else 0
            if start - begin > LONGEST_HEADER:
                return []
            header = self._header_ids(one.text[begin:start])
            if whole.startswith(header, first * ids.itemsize):
                at[start] = first + len(header) // ids.itemsize
            elif k == one.last and one.prompt is None:
                return [replace(one, prompt=np.append(ids[:first], np.frombuffer(header, np.int32)))]
            else:
                shared.add(k)
        return self._next(one.row, one.steps, (Placed(ids, at), shared))

    def _header_ids(self, header: str) -> bytes:
        """Return the ids of a header by itself, int32."""
        if header not in self._headers:
            keep(self._headers, header, encode(self.tokenizer, header).ids.tobytes(), MOST_HEADERS)
        return self._headers[header]


def _is_encoded_here(given: str) -> bool:
    """Return whether a text is short enough, and UTF-8 can hold it."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return len(given) <= LONGEST_OF_WORDS


def same(one: RowResult, other: RowResult) -> bool:
    """Return whether two results of a row are the same."""
    if isinstance(one, DataError) or isinstance(other, DataError):
        return type(one) is type(other) and str(one) == str(other)

    def plain(result: Tokenized) -> tuple[object, ...]:
        documents = [
            (e.ids.tolist(), e.is_target.tolist(), e.num_bytes, e.encoder_source, e.size, e.answers)
            for e in result.examples
        ]
        counts = {name: count for name, count in result.counts.items() if count}
        return documents, result.note, counts, result.details, dict(result.odd), result.unused

    return plain(one) == plain(other)
