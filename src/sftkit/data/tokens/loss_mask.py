"""Locate the answers that are learned in a rendered conversation: the mask policy, and the loss mask in characters.

`not_learned` says, by the data and the recipe, which answers are context only, and with which reasoning the others are
learned. The mask itself, a value for each token, is made in tokens/chat.py.

An answer is learned where the text before it is what the chat template makes of the messages before it, generation
prompt included: then each of its tokens is one that the model itself will have to write. What a generation prompt
supplies, such as a closed thinking block, is context. Where a template renders an answer differently once it is history
(Qwen3 leaves its reasoning out), the answer is context only. With data.split_turns it also ends a separate document, in
exactly the context in which it would be asked.

Rendering every prefix of a conversation costs time that grows with the square of its turns. Templates look at roles,
fields and the place of the last question, so answers with equal ones are rendered the same way: a few of them are
rendered, and `AnswerMatcher` finds the others by the text before and after these, if it is there.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from sftkit.data.reading.columns import MARKS, NUMBER_MARKS, PARTS, REASONING, TRUTH_MARKS
from sftkit.data.reading.conversation import THOUGHT, Message, answer_core, function_of, special_pattern, split_thoughts
from sftkit.data.reading.readers import wrong_kind
from sftkit.data.tokens.template import Span, T, Template, Tools, check_context, render_conversation, template_of
from sftkit.data.types import Row
from sftkit.errors import DataError, fault


def within(span: Span, marks: list[Span]) -> list[Span]:
    """Return the parts of a span that are marked. The end-of-turn token, which some marks leave out, belongs to
    the last one."""
    start, end = span
    parts = [(max(a, start), min(b, end)) for a, b in marks if a < end and b > start]
    return [*parts[:-1], (parts[-1][0], end)] if parts else []


def end_of_marked(text: str, span: Span, endings: tuple[str, ...]) -> int:
    """Return the end of a marked span: with what ends the turn if the marks leave it out, without whitespace
    after that."""
    start, end = span
    trimmed = start + len(text[start:end].rstrip())
    if text.endswith(endings, start, trimmed):
        return trimmed
    for ending in endings:
        following = re.compile(r"\s*" + re.escape(ending)).match(text, end)
        if following:
            return following.end()
    return end


def common_prefix(texts: list[str]) -> str:
    """Return what all texts begin with."""
    # in the order of the alphabet, so all others share what these two do
    first = min(texts)
    last = max(texts)
    return first[: next((i for i, (x, y) in enumerate(zip(first, last, strict=False)) if x != y), len(first))]


_NO_MARKS = frozenset((*MARKS, PARTS)).isdisjoint
_NO_REASONING = frozenset(REASONING).isdisjoint
Targets = Literal["assistant", "last_turn", "all"]

CONTEXT = "not_learned_prompt"
"Why an answer is context only: it is in the column `prompt`."
MARKED = "not_learned_marked"
"The same: the data marks it."
EARLIER = "not_learned_earlier_turn"
"The same: it is in an earlier turn (data.targets=last_turn)."


def not_learned(row: Row, messages: list[Message], targets: Targets) -> dict[int, str]:
    """Return the answers that are context only, by their index in messages, and why.

    A message's own marks, such as `weight` (OpenAI's fine-tuning format: 0 or 1) and `train` (true or false), hold for
    every setting of targets: no setting learns text that is marked as bad. So do marks of the whole row.

    Raises:
        DataError: a mark of another value, or a message that is not an answer and is marked as learned; where every
            token is learned, one that is marked as not learned, or a role that the row masks.
    """
    if targets == "all" and row.masked_role:
        raise fault(row.where, "marks of parts / role", role=row.masked_role)
    reasons: dict[int, str] = {}
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    last_user = max((i for i, message in enumerate(messages[:last]) if message["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        marked = None if _NO_MARKS(message) else _marked(message, row.where, i)
        if message["role"] != "assistant":
            if marked is False and targets == "all":
                raise fault(row.where, "bad train mark", i=i, role=message["role"])
            continue
        # Marks of the data count before the recipe.
        if marked is False or not row.learned:
            reasons[i] = MARKED
        elif i < row.context_messages and targets != "all":
            reasons[i] = CONTEXT
        elif i < last_user and targets == "last_turn":
            reasons[i] = EARLIER
    return reasons


def without_marks(messages: list[Message]) -> list[Message]:
    """Return the messages as a template should see them."""
    return [m if _NO_MARKS(m) else {key: m[key] for key in m if key not in (*MARKS, PARTS)} for m in messages]


def unlearned_parts(row: Row, messages: list[Message], targets: Targets) -> dict[int, list[Span]]:
    """Return the characters of answers' contents that train_detail marks as not to be learned, by answer.

    Raises:
        DataError: a mark that does not fit the content, or one where every token is learned.
    """
    found: dict[int, list[Span]] = {}
    for k, message in enumerate(messages):
        parts = message.get(PARTS)
        if not parts:
            continue
        if targets == "all" or THOUGHT.match(message["content"]):
            raise fault(row.where, "marks of parts / not here", k=k)
        most = len(message["content"])
        for part in parts if isinstance(parts, list) else [None]:
            keys = ("begin_offset", "end_offset", "train")
            given: list[Any] = [part.get(key) for key in keys] if isinstance(part, dict) else []
            if [type(one) for one in given] != [int, int, bool] or not 0 <= given[0] <= given[1] < most:
                raise fault(row.where, "marks of parts / offsets", k=k, length=most)
            if not given[2]:
                found.setdefault(k, []).append((given[0], given[1] + 1))
    return found


def placed_parts(message: Message, parts: list[Span], text: str, start: int) -> list[Span]:
    """Return the characters of a rendered text where parts of an answer's content are. `start`: of the answer."""
    core = answer_core(message)
    place = text.find(core, start)
    moved = place - message["content"].find(core)
    return [(max(a + moved, place), min(b + moved, place + len(core))) for a, b in parts]


def _marked(message: Message, row: str, i: int) -> bool | None:
    """Return whether all marks of a message are true: it is learned; None: it has no mark."""
    where = f"{row}: messages[{i}]"
    marks = {name: message[name] for name in MARKS if name in message}
    for name, value in marks.items():
        if name in TRUTH_MARKS and not isinstance(value, bool):
            raise DataError(f"{where}: {name} {value!r} is not true or false", reason="bad train mark")
        if value not in (0, 1) or (name in NUMBER_MARKS and isinstance(value, bool)):
            raise fault(where, "bad weight / message", mark=name, value=value)
    if message["role"] != "assistant" and any(marks.values()):
        raise fault(where, "bad train mark / role", role=message["role"])
    return all(marks.values()) if marks else None


Thinking = Literal["auto", "learn_empty", "off"]
_OTHER_BLOCK = re.compile(r"\A\s*<(\w+)>(.*?)</\1>", re.DOTALL)
"A block at the start of an answer by tags that no template knows, such as <thinking>."


def reasoning_of(message: Message) -> str:
    """Return the reasoning before an answer, from a field or from its content; empty if it has none."""
    if _NO_REASONING(message) and "<think>" not in message["content"]:
        return ""
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key]).strip()
    return next(filter(None, map(str.strip, split_thoughts(message["content"])[0])), "")


def with_other_reasoning(message: Message, reasoning: str) -> Message:
    """Return an answer that has reasoning with another text in its place."""
    fields = {key: reasoning for key in REASONING if message.get(key)}
    content = THOUGHT.sub(lambda _: f"<think>\n{reasoning}\n</think>\n\n", message["content"])
    return {**message, **fields, "content": content}


def without_asides(message: Message) -> Message:
    """Return a message without what its answer has besides its text or its calls: reasoning, and text before a call."""
    if message["role"] != "assistant":
        return message
    bare = {key: value for key, value in with_other_reasoning(message, "").items() if key not in REASONING}
    return {**bare, "content": ""} if message.get("tool_calls") else bare


def with_reasoning(messages: list[Message], template: Template, thinking: Thinking) -> list[Message]:
    """Return messages with the reasoning of answers where the template renders it, or without it."""
    result = []
    for message in messages:
        if message["role"] == "assistant" and (reasoning := reasoning_of(message)):
            # Moved to where this template looks for it: a field of its own, or a thinking block in the text.
            blocks, rest = split_thoughts(message["content"])
            # The reasoning once, though a field and the text have it, or the text twice.
            field = any(message.get(key) for key in REASONING) or len(blocks) > 1
            field = field or bool(template.reasoning_key and not template.renders_thoughts)
            message = {key: value for key, value in message.items() if key not in REASONING}
            if thinking == "off" or field:
                opened, end, answer = rest.partition("</think>")
                # A block without its beginning, as a server returns it that has put that into the prompt.
                message["content"] = answer.lstrip() if end and opened.strip() == reasoning else rest
            if field and thinking != "off":
                if template.renders_thoughts and not template.reasoning_key:
                    message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
                else:
                    message[template.reasoning_key or REASONING[0]] = reasoning
        result.append(message)
    return result


def check_reasoning(messages: list[Message], where: str) -> None:
    """Reject an answer with several reasonings, or one that is not text.

    Raises:
        DataError: it has several, or something else in one of the fields.
    """
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or (_NO_REASONING(message) and "<think>" not in message["content"]):
            continue
        given = {key: message[key] for key in REASONING if message.get(key)}
        for key, value in given.items():
            if not isinstance(value, str):
                raise wrong_kind(f"{where}: messages[{i}]: {key}", value, "text", reason="reasoning is not text")
        texts = {value.strip() for value in given.values()}
        inline, rest = split_thoughts(message["content"])
        texts.update(map(str.strip, inline))
        fields = ", ".join(given)
        if (block := _OTHER_BLOCK.match(rest)) and block[2].strip() in texts - {""}:
            raise fault(where, "two reasonings of an answer / same", i=i, places=fields or "<think>", tag=block[1])
        if len(texts - {""}) > 1:
            more = " and <think> in content" if inline else ""
            raise fault(where, "two reasonings of an answer / different", i=i, fields=fields, more=more)


def template_arguments(
    template: Template, messages: list[Message], k: int, args: Mapping[str, object] | None, thinking: Thinking
) -> dict[str, object]:
    """Return the template's arguments for messages up to answer k: thinking is turned on where that turn has reasoning,
    and off elsewhere, unless the recipe or the record sets it."""
    result = dict(args or {})
    name = template.thinking_argument
    if name and name not in result and name not in template.fixed and thinking != "learn_empty":
        last_user = next((i for i in range(k, 0, -1) if messages[i]["role"] == "user"), 0)
        result[name] = any(m["role"] == "assistant" and reasoning_of(m) for m in messages[last_user : k + 1])
    return result


NOWHERE = (-1, -1)
"The place of an answer that is not in a text after the prompt that a server would send for it."
LONGEST_TURN = 50
"The most messages of a turn that are compared; answers further into a turn are rendered."
RENDERED_FIRST = 2
"Answers of each situation that are rendered before others are found by them."


Surroundings = tuple[str, ...]
"""The surroundings of an answer in a longer conversation: the text from the beginning of its header up to the answer,
and the text after the answer that belongs to it, the end of its turn."""
NOT_THERE: Surroundings = ()
"The outcome of an answer that is NOWHERE."


class Seen:
    """How a template rendered the answers of other rows: the same result `ENOUGH` times is not rendered again."""

    ENOUGH = 8

    def __init__(self) -> None:
        """Begin with no answer."""
        self.made: dict[str, Any] = {}
        self._outcomes: dict[Hashable, tuple[Surroundings | None, int]] = {}

    def add(self, situation: Hashable, outcome: Surroundings | None) -> None:
        """Record an answer. One that came out otherwise makes its situation unknown for good."""
        known, times = self._outcomes.get(situation, (outcome, 0))
        self._outcomes[situation] = (known if known == outcome else None, times + 1)

    def find(self, situation: Hashable) -> Surroundings | None:
        """Return what is known of a situation; None: nothing, or too little."""
        outcome, times = self._outcomes.get(situation, (None, 0))
        return outcome if times >= self.ENOUGH else None


def once(seen: Seen | None, name: str, make: Callable[[], T]) -> T:
    """Return what `make` returns, which is the same for all rows, made once if other rows are known."""
    if seen is None:
        return make()
    if name not in seen.made:
        seen.made[name] = make()
    result: T = seen.made[name]
    return result


class AnswerMatcher:
    """Find answers of a rendered conversation by the surroundings of answers that were rendered before."""

    def __init__(
        self,
        template: Template,
        messages: list[Message],
        text: str,
        last: int,
        seen: Seen | None = None,
        row: Hashable = None,
    ) -> None:
        """Find the headers of the answers in a rendered conversation.

        Args:
            text: the rendered messages up to `last`, an answer.
            seen: answers of other rows.
            row: what a template may look at in all of the row.
        """
        self._seen = seen
        self._row = row
        self.template = template
        self.messages = messages
        self.text = text
        self.last = last
        self._known: dict[Hashable, list[Surroundings | None]] = {}
        self._known_features: dict[int, Hashable] = {}
        self._users = [i for i in range(last) if messages[i]["role"] == "user"]
        self._places = self._headers()

    def find(self, k: int) -> Span | None:
        """Return the place of answer k with its end-of-turn token; None: too little is known, render it."""
        # All rendered answers of the situation must agree: a single answer may match by chance.
        situation = self._situation(k)
        outcome = self._seen.find((self._row, self._turns(k), situation)) if self._seen else None
        alike = self._known.get(situation, []) if outcome is None else []
        if len(alike) >= RENDERED_FIRST and len(set(alike)) == 1:
            outcome = alike[0]
        if outcome is None:
            return None
        if outcome == NOT_THERE:
            return NOWHERE
        header, closing = outcome
        if k not in self._places or not self.text.startswith(header, self._places[k]):
            return None
        start = self._places[k] + len(header)
        end = self._next_special(start)
        return (start, end + len(closing)) if self.text.startswith(closing, end) else None

    def add(self, k: int, start: int, core_end: int, span: Span) -> None:
        """Record where answer k was found by rendering; `start` to `core_end` is its own text, without the token
        that ends it."""
        # An answer that was found otherwise than by header and end is kept as unlike any other.
        outcome = None  # the text around such answers is too little to find others by
        if span == NOWHERE:
            outcome = NOT_THERE
        elif k in self._places and self._next_special(start) == core_end:
            outcome = self.text[self._places[k] : start], self.text[core_end : span[1]]
        situation = self._situation(k)
        self._known.setdefault(situation, []).append(outcome)
        if self._seen:
            self._seen.add((self._row, self._turns(k), situation), outcome)

    def find_start(self) -> int | None:
        """Return where the last answer begins, known from other rows; None: its prompt is to be rendered."""
        header = self._seen and self._seen.find(self._last_situation())
        if not header or self.last not in self._places:
            return None
        place = self._places[self.last]
        return place + len(header[0]) if self.text.startswith(header[0], place) else None

    def add_start(self, start: int | None) -> None:
        """Record where the last answer begins; None: its prompt is no part of the text."""
        if self._seen:
            known = start is not None and self.last in self._places
            self._seen.add(self._last_situation(), (self.text[self._places[self.last] : start],) if known else None)

    def _last_situation(self) -> Hashable:
        """Return what a template may look at when it renders the last answer and its prompt."""
        return self._row, self._turns(self.last), self._turn(self.last), "last"

    def _turns(self, k: int) -> int:
        """Return the questions before an answer: 0, 1 or, for more, 2."""
        return min(bisect_left(self._users, k), 2)

    def _situation(self, k: int) -> Hashable:
        """Return what a template may look at: the turn up to the answer, the role of the next message, and whether
        another question follows."""
        return self._turn(k), self.messages[k + 1]["role"], bisect_left(self._users, k) == len(self._users)

    def _turn(self, k: int) -> Hashable:
        """Return what a template may look at in the turn up to an answer."""
        before = bisect_left(self._users, k)
        turn = self._users[before - 1] if before else 0
        alike = tuple(map(self._features, range(max(turn, k - LONGEST_TURN), k + 1)))
        return alike, k - turn > LONGEST_TURN and k

    def _features(self, i: int) -> Hashable:
        """Return what a template may look at in one message."""
        if i in self._known_features:
            return self._known_features[i]
        message = self.messages[i]
        content = message["content"]
        tags = "<" in content and ("<think>" in content, "</think>" in content, content.startswith("<tool_response>"))
        keys = None if len(message) == 2 else (len(message.get("tool_calls", ())), *sorted(message))
        around = bool(content), content[:1].isspace(), content[-1:].isspace()
        found = message["role"], keys, around, tags, bool(reasoning_of(message))
        self._known_features[i] = found
        return found

    def _headers(self) -> dict[int, int]:
        """Return answer -> where its header begins; empty if a message could contain a header, or if there are not
        as many as answers."""
        headers = [h for h in (*self.template.headers, self.template.short_header) if h.strip()]
        header = common_prefix(headers or [self.template.between])
        if not any(token and token in header for token in self.template.special_tokens):
            return {}
        starts = [match.start() for match in re.finditer(re.escape(header), self.text)]
        answers = [k for k in range(self.last + 1) if self.messages[k]["role"] == "assistant"]
        return dict(zip(answers, starts, strict=True)) if len(starts) == len(answers) else {}

    def _next_special(self, start: int) -> int:
        """Return where the next special token begins; the end of the text if there is none."""
        match = special_pattern(self.template.special_tokens).search(self.text, start)
        return match.start() if match else len(self.text)


HISTORY = "not_learned_history"
"Why an answer is context only: the template renders it differently once it is history."


@dataclass(frozen=True)
class Document:
    """A conversation up to one of its answers, as one text that ends with it."""

    text: str
    spans: dict[int, list[Span]]
    """Index in messages -> the characters that the model writes, of each answer after the prompt that a server would
    send. The end-of-turn token belongs to them, whitespace after that does not."""
    texts: dict[int, Span] = field(default_factory=dict)
    "Place of each answer's text, after a prompt or not; only of a document that is learned whole."


class _LastAnswer(NamedTuple):
    """An answer as the last message."""

    text: str
    start: int
    core_end: int
    "Without the end-of-turn token."
    end: int


class AnswerLocator:
    """Renders a conversation up to any of its answers and finds them in the text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, row: Row, thinking: Thinking, seen: Seen | None = None
    ) -> None:
        """Prepare a conversation to be rendered with a tokenizer's template.

        Args:
            row: its messages checked, see conversation.validated.
            seen: answers of other rows, with the same tokenizer and value of thinking.
            thinking: auto: an answer without reasoning is one with thinking turned off, where the template knows that;
                learn_empty: the empty thinking block that the template writes is learned; off: reasoning is left out.
        """
        self.tokenizer = tokenizer
        self.row = row
        self.where = row.where
        self.thinking = thinking
        tools = bool(row.tools)
        self.template = once(seen, f"template {tools}", lambda: template_of(tokenizer, with_tools=tools))
        given = row.messages or []
        self.messages = with_reasoning(given, self.template, thinking)
        self.answers = [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]
        "indices of all answers in messages"
        self.answers_with_reasoning = {k for k in self.answers if reasoning_of(given[k])}
        "answers that have reasoning in the data"
        self.reasons = {k for k in self.answers if reasoning_of(self.messages[k])}
        "answers whose reasoning is to be learned; none with thinking=off"
        self._record_args = row.template_args or {}
        self._known: dict[int, _LastAnswer] = {}
        self.seen = seen
        self._latest: AnswerMatcher | None = None
        self.odd: dict[str, str] = {}
        "what is odd in what was rendered, as in conversation.oddities"

    def document(self, last: int, among: Iterable[int]) -> Document:
        """Render the messages up to an answer.

        Args:
            last: the index of that answer in messages.
            among: the answers to look for, that one included.

        Raises:
            DataError: the template rejects the conversation, leaves out something that would be learned, or makes
                another prompt for the last answer than it then renders.
        """
        # Marks are used only if one rendering serves every answer: the same arguments, and nothing rewritten later.
        args = self.arguments(last)
        wanted = sorted(k for k in among if k <= last)
        marks = self.template.has_marks and self.template.append_only
        marked = marks and (not self.template.thinking_argument or all(self.arguments(k) == args for k in wanted))
        document = self._marked(last, wanted) if marked else self._located(last, wanted)
        self._check_context(last, args, document.text)
        if not document.spans[last]:
            raise fault(self.where, "template marks no answer", k=last)
        return Document(document.text, {k: parts for k, parts in document.spans.items() if parts})

    def everything(self, last: int, marked: Collection[int]) -> Document:
        """Render the messages up to an answer, for a document that is learned whole except for marked answers. The text
        of every answer must be in it.

        The document has spans of the answers that follow the prompts that a server would send; none if the
        conversation does not begin with a prompt that the template can make.

        Raises:
            DataError: the template rejects the conversation or leaves out something that would be learned.
        """
        try:
            found = self.document(last, self.answers)
        except DataError:  # no such prompt, or a fault that rendering it once more shows
            if marked:
                raise
            text = self._render(last + 1, self.arguments(last))
            self._check_reasoning(last, text)
            self._check_context(last, self.arguments(last), text)
            found = Document(text.rstrip(), {})
        texts: dict[int, Span] = {}
        cursor = 0
        for k in self.answers:
            if k <= last:
                texts[k] = self._check_rendered(k, found.text, cursor)
                cursor = texts[k][1]
        if missing := set(marked) - found.spans.keys():
            raise fault(self.where, "marked answer cannot be found", k=min(missing))
        return replace(found, texts=texts)

    def end_token(self, k: int) -> str | None:
        """Return the special token with which answer k ends its turn where a template writes it only as the beginning
        of the next one; None: it is eos."""
        return self.template.end_call if self.messages[k].get("tool_calls") else None

    def _check_context(self, last: int, args: dict[str, object], text: str) -> None:
        """Reject a conversation of which the template leaves something out before answer `last`."""

        def render(messages: list[Message], tools: Tools) -> str:
            row = self.row.changed(messages=messages, tools=tools, template_args=args)
            return render_conversation(self.tokenizer, self.template, row)[0]

        # Answers are checked where they are learned, this one too.
        self.odd |= check_context(
            self.messages[: last + 1], self.row.tools, text, render, template=self.template, where=self.where, args=args
        )

    def turns_thinking_off(self, k: int) -> bool:
        """Return whether an answer is asked with thinking turned off, because it has no reasoning and the template
        would leave thinking on."""
        name = self.template.thinking_argument
        return bool(name and not self._sets(name) and self.arguments(k).get(name) is False)

    def _sets(self, name: str) -> bool:
        """Return whether the recipe or the record sets an argument of the template."""
        return name in self.template.fixed or name in self._record_args

    def reasoned(self, last: int, known: Collection[int]) -> set[int]:
        """Return the answers whose reasoning is in the text of a conversation that ends with answer `last`.

        The conversation is rendered with other texts in place of the reasonings, since their own words may occur
        anywhere. For the answers in `known` this was checked before.
        """
        # Texts that no data has, each with its own numbers, so that what is found is sure to be the reasoning of
        # that answer.
        marks = {k: f"[reasoning {k} of {last}]" for k in self.reasons if k <= last}
        if marks.keys() <= set(known):
            return set(marks)
        given = enumerate(self.messages[: last + 1])
        messages = [with_other_reasoning(m, marks[k]) if k in marks else m for k, m in given]
        text, _ = self._rendered(messages, self.arguments(last))
        rendered = set(map(int, re.findall(rf"\[reasoning (\d+) of {last}\]", text)))
        return {k for k in marks if k in rendered or k in known}

    def _located(self, last: int, wanted: list[int]) -> Document:
        """Find answers that are in the text of the conversation as they are when they are the last message."""
        # The last answer is rendered anyway; of the earlier ones as few as will show how the template writes them.
        own = self._as_last_answer(last)
        matcher = self._matcher(own.text, last)
        spans: dict[int, Span] = {}
        for k in wanted[:-1]:
            found = matcher.find(k)
            if found is None:
                one = self._as_last_answer(k)
                found = self._span_in(k, own.text, one)
                matcher.add(k, one.start, one.core_end, found)
            elif found != NOWHERE:
                answer = own.text[found[0] : found[1]]
                self._check(k, answer, answer)
            if found != NOWHERE:
                spans[k] = found
        spans[last] = own.start, own.end
        # If the template has marks, only the marked parts of an answer are the model's own.
        if not self.template.has_marks:
            return Document(own.text[: own.end], {k: [span] for k, span in spans.items()})
        text, marks = self._marks(last)
        if text != own.text:  # the last answer was put after its prompt, which has other places
            moved = len(own.text) - len(text)
            after = [(a + moved, b + moved) for a, b in marks if b + moved > own.start]
            marks = [*self._marks(last, is_prompt=True)[1], *after]
        return Document(own.text[: own.end], {k: within(span, marks) for k, span in spans.items()})

    def _span_in(self, k: int, text: str, one: _LastAnswer) -> Span:
        """Return the place of an answer in the text of a longer conversation; NOWHERE if it is not there as it
        would be asked."""
        if not text.startswith(one.text[: one.core_end]):
            return NOWHERE
        if not text.startswith(one.text[: one.end]):  # it ends otherwise: that is learned at the end
            return one.start, one.core_end
        # The token that ends an answer which another turn follows, if its own text has none.
        if one.core_end == one.end:
            following = text[one.end :].lstrip()
            for token in (self.end_token(k), self.template.end_within):
                if token and following.startswith(token):
                    return one.start, text.index(token, one.end) + len(token)
        return one.start, one.end

    def _marked(self, last: int, wanted: list[int]) -> Document:
        """Find answers by the template's marks, in one rendering; for templates that never change what
        they have rendered."""
        answers = [k for k in self.answers if k <= last]
        text, marks = self._marks(last)
        # Without one mark for each answer it is not known which is whose.
        if len(marks) != len(answers):  # several for an answer, or none
            return self._located(last, wanted)
        spans = {}
        before = 0
        ends = tuple(filter(None, (self.template.ending, *self.template.end_tokens)))
        for k, (start, end) in zip(answers, marks, strict=True):
            past = end_of_marked(text, (start, end), ends)
            first = self._after_header(text, start)
            self._check(k, text[first:past], text[before:past] if k in self.reasons else "")
            before = past
            if k in wanted:
                spans[k] = [(first, past)]
        return Document(text[:before], spans)

    def _marks(self, last: int, *, is_prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text up to answer `last`, or its prompt, and the spans that the template marks, empty ones left
        out."""
        messages = self.messages[: last + (not is_prompt)]
        text, marks = self._rendered(messages, self.arguments(last), add_generation_prompt=is_prompt, marks=True)
        return text, [span for span in marks if span[0] < span[1]]

    def _after_header(self, text: str, start: int) -> int:
        """Return where an answer begins if its mark begins inside the part that a generation prompt supplies."""
        shortest = self.thinking == "learn_empty"
        find = text.find if shortest else text.rfind
        # Also the header in the text, if prompts open a thinking block after it.
        short = self.template.short_header
        begins = short.strip() and any(h.startswith(short) for h in self.template.headers)
        headers = filter(None, (*self.template.headers, short if begins else ""))
        ends = [at + len(h) for h in headers if (at := find(h, max(start - len(h), 0), start + len(h))) >= 0]
        return max(start, (min if shortest else max)(ends, default=start))

    def _as_last_answer(self, k: int) -> _LastAnswer:
        """Return an answer as the last message; rendered once."""
        if k in self._known:
            return self._known[k]
        text = self._render(k + 1, self.arguments(k))
        matcher = self._matcher(text, k) if self.seen and k else None
        start = matcher.find_start() if matcher else None
        if start is None:
            rendered = text
            text, start = self._start(k, text)
            if matcher:
                matcher.add_start(start if text == rendered else None)
        # The model writes up to the end-of-turn token; the line break after that token belongs to no answer.
        core = text[start:].rstrip().removesuffix(self.template.tail)
        ends = [token for token in self.template.special_tokens if token and core.endswith(token)]
        if self.template.end_last and not ends:
            raise fault(self.where, "no end-of-turn token", k=k, token=self.template.end_last)
        length = max(map(len, ends), default=0)
        self._check(k, core, core)
        end = start + len(core)
        self._known[k] = _LastAnswer(text, start, end - length, end)
        return self._known[k]

    def _matcher(self, text: str, last: int) -> AnswerMatcher:
        """Return what finds answers in the text of the messages up to answer `last`."""
        if self._latest is None or self._latest.text is not text or self._latest.last != last:
            row = (bool(self.row.tools), repr(self.arguments(last)), self.messages[0]["role"]) if self.seen else None
            self._latest = AnswerMatcher(self.template, self.messages, text, last, self.seen, row)
        return self._latest

    def arguments(self, k: int) -> dict[str, object]:
        """Return the template arguments with which answer k is asked."""
        return template_arguments(self.template, self.messages, k, self._record_args, self.thinking)

    def _start(self, k: int, text: str) -> tuple[str, int]:
        """Return (text, where the answer begins), which is after the longest prompt that a server could have
        made for it."""
        if k == 0:
            # Many templates cannot render the empty prompt before an answer that comes first. The longest header
            # counts: a short one may be the beginning of another.
            for header in sorted((*self.template.headers, self.template.short_header), key=len, reverse=True):
                if header.strip() and header in text:
                    return text, text.index(header) + len(header)
            raise fault(self.where, "template cannot begin with an answer")
        args = self.arguments(k)
        name = self.template.thinking_argument
        prompt = self._render(k, args, add_generation_prompt=True)
        # A server may ask with thinking on or off, whatever the template does by itself.
        empty = args.get(name or "") and not reasoning_of(self.messages[k])
        more = name and (empty or self._sets(name) or self.thinking == "learn_empty" or not text.startswith(prompt))
        modes: list[dict[str, object]] = [{**args, str(name): on} for on in (True, False) if more]
        prompts = [prompt, *(self._render(k, mode, add_generation_prompt=True) for mode in modes)]
        fitting = [len(one) for one in prompts if text.startswith(one)]
        if fitting:
            # learn_empty learns the block that another prompt supplies; otherwise the block is context.
            return text, (min if self.thinking == "learn_empty" else max)(fitting)
        # A template may write what came before a call as long as no later answer is there (gpt-oss): it is in the
        # prompt, which is what a server sends, and not in the text, which is the same without it.
        bare = [without_asides(message) for message in self.messages[:k]]
        if bare != self.messages[:k]:
            shorter, _ = self._rendered(bare, args, add_generation_prompt=True)
            if text.startswith(shorter) and text == self._rendered([*bare, self.messages[k]], args)[0]:
                return prompt + text[len(shorter) :], len(prompt)
        return self._after_block(k, text, prompt)

    def _after_block(self, k: int, text: str, prompt: str) -> tuple[str, int]:
        """Return (text, where the answer begins) if the prompt has a thinking block that the template leaves out of
        finished answers, or writes there in another way. What the model writes begins inside the block that a prompt
        opens (DeepSeek-R1 and its distilled models), and after the one of a prompt with thinking turned off (Gemma 4).
        """
        off = {**self.arguments(k), self.template.thinking_argument or "": False}
        bare = self._render(k, self.arguments(k)) + self.template.short_header
        if self.template.short_header.strip() and text.startswith(bare):
            answer = text[len(bare) :]
            if prompt.rstrip().endswith("<think>"):
                reasoning = reasoning_of(self.messages[k])
                if not reasoning and self.thinking != "learn_empty":
                    raise fault(self.where, "template opens a thinking block before an answer without reasoning", k=k)
                return f"{prompt}{reasoning}\n</think>\n\n{THOUGHT.sub('', answer).lstrip()}", len(prompt)
            is_off = self.template.thinking_argument and prompt == self._render(k, off, add_generation_prompt=True)
            if is_off and prompt.startswith(bare) and not reasoning_of(self.messages[k]):
                return prompt + answer, len(prompt)
        # The error shows a little of both texts where they begin to differ.
        at = len(common_prefix([text, prompt]))
        shared = text[max(0, at - 20) : at]
        both = {"prompt": prompt[at : at + 20], "text": text[at : at + 20]}
        raise fault(self.where, "template renders the prompt differently", k=k, shared=shared, **both)

    def _check(self, k: int, answer: str, text: str) -> None:
        """Reject an answer unless its content is in the text that is learned, and its reasoning in the whole text."""
        self._check_reasoning(k, text)
        self._check_rendered(k, answer, 0)

    def _check_reasoning(self, k: int, text: str) -> None:
        """Reject an answer whose reasoning is not in the text."""
        if k in self.reasons and reasoning_of(self.messages[k]) not in text:
            raise fault(self.where, "template does not render the reasoning", k=k)

    def _check_rendered(self, k: int, text: str, cursor: int) -> Span:
        """Return where the text of the answer and the names of the tools that it calls are; reject it if one is not
        there."""
        start: int | None = None
        message = self.messages[k]
        names = (function_of(call)["name"] for call in message.get("tool_calls", ()))
        for required in filter(None, (answer_core(message), *names)):
            at = text.find(required, cursor)
            if at < 0:
                missing = required if len(required) <= 40 else required[:40] + "..."
                raise fault(self.where, "template does not render the answer", k=k, missing=missing)
            start = at if start is None else start
            cursor = at + len(required)
        return cursor if start is None else start, cursor

    def _render(self, k: int, args: dict[str, object], *, add_generation_prompt: bool = False) -> str:
        """Render the first k messages."""
        return self._rendered(self.messages[:k], args, add_generation_prompt=add_generation_prompt)[0]

    def _rendered(self, messages: list[Message], args: dict[str, object], **how: bool) -> tuple[str, list[Span]]:
        """Render messages with the tools, `how` as render_conversation takes it; a template that rejects them
        is a DataError."""
        row = self.row.changed(messages=messages, template_args=args)
        try:
            return render_conversation(self.tokenizer, self.template, row, **how)
        except TemplateError as error:
            raise fault(self.where, "template refuses it", error=error) from error
