"""Know what a template makes of conversations that have the same roles and differ in their texts alone.

Rendering is most of the work next to the tokenizer's. So a conversation of marks is rendered once for each sequence of
roles, all documents of it are found as in any other, and what stands around the marks is the frame of the texts of
later rows. A template is a program, and could look at a text: rows whose texts have a string in them that the template
looks for are rendered, and so are all rows if it looks at texts otherwise, at their first letter or length. The first
rows of a shape are also tokenized alone, and one that comes out otherwise ends it.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from sftkit.data.reading.columns import MESSAGE
from sftkit.data.reading.conversation import require_answer, special_pattern
from sftkit.data.tokens import loss_mask
from sftkit.data.tokens.chat import BORDER, Learning, end_of_turn_ids
from sftkit.data.tokens.encode import encode
from sftkit.data.tokens.loss_mask import AnswerLocator, Document, Seen
from sftkit.data.tokens.template import literals_of, render_conversation, template_of
from sftkit.data.types import Row, Tokenized
from sftkit.errors import DataError

FROM_ROW = 4
"Rows of a shape before it is learned, because learning it costs as much as tokenizing some rows."
MOST_SHAPES = 4096
_ROLES = frozenset(("system", "developer", "user", "assistant"))
_MARK = '[Text {}\n\nof  {} <É> \\ & "it\'s" 7]'
"A placeholder for a text: a template that escapes it, cuts it or changes its letters makes it impossible to find."
_SPACED = "\n {} \n"
_OWN = ("<think>", "</think>", "<image>", "<video>", "<audio>")
"What is looked for in texts here."

_TIME = re.compile("%-?[HIMSpcXTRrsfzZ]")
"Asks for the time of day."

_SEARCHES = re.compile("(starts|ends)with|count|r?(find|index|split|partition)")
"Methods that look for their first argument in a text."
_STRIPS = frozenset(("strip", "lstrip", "rstrip"))


class _Watched(str):
    """A text that notes the strings that a template looks for in it, and None if it looks at the text otherwise."""

    noted: set[str | None]

    def of(self, other: Any) -> Any:
        """Return what was made of the text, watched too."""
        if isinstance(other, list | tuple):
            return [*map(self.of, other)]
        if not isinstance(other, str):
            return other
        watched = _Watched(other)
        watched.noted = self.noted
        return watched

    def __getattribute__(self, name: str) -> Any:
        """Note what a method looks for."""
        found = super().__getattribute__(name)
        if name.startswith("_") or not hasattr(str, name):
            return found

        def called(*given: Any, **named: Any) -> Any:
            if name in _STRIPS:
                # White space at the ends of texts is tried with a line break outside, so other sets would not show.
                wanted: Sequence[str | None] = () if given in ((), (None,), ("\n",)) else (None,)
            elif _SEARCHES.fullmatch(name) and given and given[0] is not None:
                wanted = given[0] if isinstance(given[0], tuple) else given[:1]
            else:
                wanted = (None,)
            self.noted.update(wanted)
            return self.of(found(*given, **named))

        return called

    def __contains__(self, part: Any) -> bool:
        """Note the part."""
        self.noted.add(None if isinstance(part, _Watched) else part)
        return super().__contains__(part)

    def __eq__(self, other: object) -> bool:
        """Note the other text, except an empty one: rows with empty texts are rendered."""
        if isinstance(other, str) and other:
            self.noted.add(None if isinstance(other, _Watched) else other)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        self.noted.add(None)  # a key of an object, or one of a set: equal texts are one there
        return super().__hash__()

    def __str__(self) -> str:
        return self  # so that filters and joined texts are watched, too

    def __bool__(self) -> bool:
        return super().__len__() > 0

    def __add__(self, other: str) -> Any:
        return self.of(super().__add__(other))

    def __radd__(self, other: str) -> Any:
        return self.of(other + super().__str__())

    def __iter__(self) -> Iterator[str]:
        self.noted.add(None)  # only when the first letter is asked for, which `is iterable` does not
        yield from super().__str__()

    def _otherwise(self, *given: Any) -> Any:
        self.noted.add(None)
        return NotImplemented

    __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __rmod__ = _otherwise

    def __float__(self) -> float:
        self.noted.add(None)
        raise ValueError

    def __format__(self, form: str) -> str:
        self.noted.add(None)
        return super().__format__(form)

    def __len__(self) -> int:
        self.noted.add(None)
        return super().__len__()

    def __getitem__(self, at: Any) -> str:
        self.noted.add(None)
        return super().__getitem__(at)


FramePlace = tuple[int, int]
"(n, i): i characters after the beginning of frame n, which is behind text n - 1."


class Framed(NamedTuple):
    """A document as frames around texts."""

    frames: tuple[str, ...]
    stripped: tuple[bool, ...]
    "whether the template strips each text"
    spans: dict[int, list[tuple[FramePlace, FramePlace]]]
    texts: dict[int, tuple[FramePlace, FramePlace]]

    def pieces(self, texts: Sequence[str], bare: Sequence[str]) -> list[str]:
        """Return the frames and these texts in turn; `bare`: the texts, stripped."""
        given = [b if strips else t for t, b, strips in zip(texts, bare, self.stripped, strict=False)]
        return [*chain.from_iterable(zip(self.frames, given, strict=False)), self.frames[-1]]

    def document(self, texts: Sequence[str], bare: Sequence[str]) -> Document:
        """Return the document with these texts; `bare`: the same, stripped."""
        pieces = self.pieces(texts, bare)
        begins = [0, *accumulate(map(len, pieces))][::2]
        spans = {k: [(begins[n] + i, begins[m] + j) for (n, i), (m, j) in parts] for k, parts in self.spans.items()}
        places = {k: (begins[n] + i, begins[m] + j) for k, ((n, i), (m, j)) in self.texts.items()}
        return Document("".join(pieces), spans, places)


class Placement(NamedTuple):
    """Where the answers of a document are among its special tokens, of which the last ends it."""

    specials: np.ndarray
    "int32 [S], ids of the special tokens in order"
    answers: tuple[tuple[int, np.ndarray, int], ...]
    "of each answer: the special token that its header begins with, the ids of the header, the token that ends it"


class ChatShape:
    """What is known of the conversations with some roles."""

    def __init__(
        self,
        locator: AnswerLocator,
        seen: Seen,
        skipped: dict[int, str],
        documents: dict[int, Framed],
        free: frozenset[int],
        placement: Placement | None,
    ) -> None:
        """Take the conversation of marks.

        Args:
            seen: what is the same in all rows.
            documents: by their last answer.
            free: messages whose texts may begin and end with white space.
            placement: of the answers of the only document; None: they are to be found in each row.
        """
        self.locator = locator
        self.seen = seen
        self.skipped = skipped
        self.documents = documents
        self.free = free
        self.placement = placement
        self.counts: Mapping[str, int] | None = None
        "Counts of each row whose answers are where `placement` has them; None: not known."
        self.thinking_off = {k for k in locator.answers if locator.turns_thinking_off(k)}
        self.agreed = 0
        "rows that came out as they do alone"
        self.tried = 0


class Shaped:
    """Replace the AnswerLocator of a conversation whose shape is known."""

    def __init__(self, shape: ChatShape, texts: Sequence[str], bare: Sequence[str]) -> None:
        """Take the texts of the messages; `bare`: the same, stripped."""
        self.shape = shape
        self.tokenizer = shape.locator.tokenizer
        self.template = shape.locator.template
        self.messages = shape.locator.messages
        self.answers = shape.locator.answers
        self.seen = shape.seen
        self.odd: dict[str, str] = {}
        self.reasons: set[int] = set()
        self.answers_with_reasoning: set[int] = set()
        self._texts = texts
        self._bare = bare

    def document(self, last: int, among: Iterable[int]) -> Document:
        """Return the document that ends with an answer."""
        return self.shape.documents[last].document(self._texts, self._bare)

    everything = document

    @property
    def only_text(self) -> str:
        """Return the text of the only document."""
        [document] = self.shape.documents.values()
        return "".join(document.pieces(self._texts, self._bare))

    def reasoned(self, last: int, known: Collection[int]) -> set[int]:
        """Return no answer: none has reasoning."""
        return set()

    def end_token(self, k: int) -> None:
        """Return none: no answer calls tools."""

    def turns_thinking_off(self, k: int) -> bool:
        """Return whether an answer is asked with thinking turned off."""
        return k in self.shape.thinking_off


class Shapes:
    """The shapes of the rows that were tokenized with some tokenizer and settings."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, learning: Learning, specials: tuple[str, ...], seen: Seen
    ) -> None:
        """Start without any; `seen`: what is the same in all rows."""
        self._tokenizer = tokenizer
        self._learning = learning
        self._seen = seen
        self._known: dict[Hashable, int | ChatShape | None] = {}
        "rows with some roles, or their shape; None: they have none"
        self._pattern = special_pattern(specials)
        self._firsts = {token[0] for token in specials if token}
        self._looked_for: set[str] = set()
        self._compared: Set[str] = frozenset()
        self._around: Set[str] = frozenset()
        "strings of the template in which it may look for a text"

    def find(self, row: Row) -> Shaped | None:
        """Return the replacement of the locator if the shape of a conversation is known; None: render it."""
        messages = row.messages
        if not messages or row.tools or row.template_args or row.masked_role or not row.learned:
            return None
        try:
            roles, texts = zip(*[(one["role"], one["content"]) for one in messages if len(one) == 2], strict=True)
            shape = self._known.get((roles, row.context_messages), 0)
        except (KeyError, TypeError, ValueError):  # other keys, or no messages at all
            return None
        if len(texts) != len(messages) or set(map(type, texts)) != {str}:
            return None
        if isinstance(shape, int):
            if shape >= FROM_ROW:
                self._known[roles, row.context_messages] = self._learned(roles, row.context_messages)
            elif shape or len(self._known) < MOST_SHAPES:
                self._known[roles, row.context_messages] = shape + 1
            return None
        if shape is None or (shape.agreed < Seen.ENOUGH and shape.tried >= Seen.ENOUGH):
            return None
        bare = list(map(str.strip, texts))
        if not all(bare) or not self._compared.isdisjoint((*texts, *bare)):
            return None
        if any(text in one for one in self._around for text in bare):
            return None
        if bare != list(texts) and not shape.free.issuperset(i for i, text in enumerate(texts) if text != bare[i]):
            return None
        whole = "\0".join(texts)
        if any(map(whole.__contains__, self._looked_for)):
            return None
        if any(map(whole.__contains__, self._firsts)) and self._pattern.search(whole):
            return None
        shape.tried += shape.agreed < Seen.ENOUGH
        return Shaped(shape, texts, bare)

    def judge(self, shape: ChatShape, alone: Tokenized | DataError, *, agrees: bool) -> None:
        """Note whether a row that was tried came out as it does `alone`."""
        shape.agreed += agrees
        if not agrees:
            self._known = {key: None if one is shape else one for key, one in self._known.items()}
        elif shape.placement is not None and isinstance(alone, Tokenized):
            is_usual = len(alone.examples) == 1 and not (alone.note or alone.odd or alone.unused)
            if is_usual and not alone.counts.get(BORDER):
                shape.counts = alone.counts

    def start_chunk(self) -> None:
        """Let further rows be tried."""
        for one in self._known.values():
            if isinstance(one, ChatShape) and one.agreed < Seen.ENOUGH:
                one.tried = one.agreed

    def _learned(self, roles: Sequence[str], context_messages: int) -> ChatShape | None:
        """Return the shape of conversations with these roles; None: the frames of its texts are not found."""
        source = template_of(self._tokenizer).source
        inside, self._compared, self._around = literals_of(source)
        self._looked_for.update(_OWN, inside.difference(MESSAGE))
        if "strftime_now" in source and any(_TIME.search(one) for one in self._compared):
            return None
        marks = [_MARK.format(i, len(roles)) for i in range(len(roles))]
        if not _ROLES.issuperset(roles) or any(literal in mark for literal in self._looked_for for mark in marks):
            return None
        try:
            locator, documents, skipped = self._documents(roles, marks, context_messages)
        except DataError:
            return None
        noted = self._noted(locator, documents)
        if any(one is None or one in mark for one in noted for mark in marks):
            return None
        self._looked_for.update(filter(None, noted))
        framed = {last: one for last, whole in documents.items() if (one := _framed(whole, marks))}
        if locator.odd or len(framed) < len(documents):
            return None
        every = frozenset(range(len(roles)))
        for free in (every, every.difference(locator.answers)):
            texts = [_SPACED.format(mark) if i in free else mark for i, mark in enumerate(marks)]
            with suppress(DataError):
                _, documents, _ = self._documents(roles, texts, context_messages)
                spaced = {last: one for last, whole in documents.items() if (one := _framed(whole, marks))}
                if framed == {last: one._replace(stripped=framed[last].stripped) for last, one in spaced.items()}:
                    return ChatShape(locator, self._seen, skipped, spaced, free, self._placement(spaced))
        return ChatShape(locator, self._seen, skipped, framed, frozenset(), self._placement(framed))

    def _placement(self, documents: Mapping[int, Framed]) -> Placement | None:
        """Return where answers are in rows of a single document, if the frames alone say it; else None."""
        if len(documents) != 1 or self._learning.targets == "all":
            return None
        [(last, document)] = documents.items()
        if any(len(parts) != 1 for parts in document.spans.values()):
            return None
        found = [(n, match) for n, frame in enumerate(document.frames) for match in self._pattern.finditer(frame)]
        borders = [(n, match.end()) for n, match in found]
        special_ids: Any = self._tokenizer.convert_tokens_to_ids([match[0] for _, match in found])
        whole = len(document.frames) - 1, len(document.frames[-1])
        if whole not in borders or special_ids[-1] not in end_of_turn_ids(self._tokenizer):
            return None
        answers = []
        for [((n, start), past)] in document.spans.values():
            # The header lies in one frame, from the last special token before the answer.
            before = bisect_right(borders, (n, start)) - 1
            if before < 0 or borders[before][0] != n or past not in borders:
                return None
            header = encode(self._tokenizer, document.frames[n][found[before][1].start() : start])
            answers.append((before, header.ids, borders.index(past)))
        if document.spans[last][0][1] != whole:
            return None
        return Placement(np.array(special_ids, np.int32), tuple(answers))

    def _noted(self, locator: AnswerLocator, documents: Iterable[int]) -> set[str | None]:
        """Return what the template looks for in texts of a conversation, and None if it looks at them otherwise."""
        noted: set[str | None] = set()
        messages = [{**one, "content": _Watched(one["content"])} for one in locator.messages]
        for one in messages:
            one["content"].noted = noted
        for last in documents:
            for past, is_prompt in ((last + 1, False), (last, True)):
                row = Row("a conversation of marks", messages=messages[:past], template_args=locator.arguments(last))
                with suppress(TemplateError):  # no prompt: the answer comes first
                    render_conversation(self._tokenizer, locator.template, row, add_generation_prompt=is_prompt)
        return noted

    def _documents(
        self, roles: Sequence[str], texts: Sequence[str], context_messages: int
    ) -> tuple[AnswerLocator, dict[int, Document], dict[int, str]]:
        """Return the locator of a conversation, its documents by their last answer, and the answers that are not
        learned."""
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        row = Row("a conversation of marks", messages=messages, context_messages=context_messages)
        loss_mask.check_reasoning(messages, row.where)
        skipped = loss_mask.not_learned(row, messages, self._learning.targets)
        locator = AnswerLocator(self._tokenizer, row, self._learning.thinking)
        require_answer(messages, row.where)
        if self._learning.targets == "all":
            last = locator.answers[-1]
            return locator, {last: locator.everything(last, skipped)}, skipped
        documents = {}
        left = set(locator.answers) - skipped.keys()
        while left:
            last = max(left)
            documents[last] = locator.document(last, left)
            left -= documents[last].spans.keys()
            if not self._learning.split_turns:
                break
        return locator, documents, skipped


def _framed(document: Document, marks: Sequence[str]) -> Framed | None:
    """Return the frames around the marks of a document, which has each once and in order; None: it has not."""
    text = document.text
    frames: list[str] = []
    stripped = []
    begins = [0]
    for mark in marks:
        start = text.find(mark)
        if start < 0:
            break
        end = start + len(mark)
        before, after = _SPACED.split("{}")
        is_spaced = text[:start].endswith(before) and text.startswith(after, end)
        if is_spaced:
            start -= len(before)
            end += len(after)
        if text.count(mark) != 1 or start < begins[-1]:
            return None
        frames.append(text[begins[-1] : start])
        stripped.append(not is_spaced)
        begins.append(end)
    frames.append(text[begins[-1] :])
    if any(mark in frame or mark[:6] in frame for mark in marks for frame in frames):
        return None

    def place(at: int) -> FramePlace:
        n = bisect_right(begins, at) - 1
        return n, at - begins[n]

    spans = {k: [(place(a), place(b)) for a, b in parts] for k, parts in document.spans.items()}
    texts = {k: (place(a), place(b)) for k, (a, b) in document.texts.items()}
    every = [one for parts in (*spans.values(), texts.values()) for pair in parts for one in pair]
    return Framed(tuple(frames), tuple(stripped), spans, texts) if all(i <= len(frames[n]) for n, i in every) else None
