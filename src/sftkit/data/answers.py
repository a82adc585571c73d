"""Which characters of a rendered conversation are answers as a server would have been asked for them.

An answer is learned where the text before it is what the chat template makes of the messages before it, generation
prompt included: then each of its tokens is one that the model itself will have to write. What a generation prompt
supplies, such as a closed thinking block, is context. Where a template renders an answer otherwise once it is history
(Qwen3 leaves its reasoning out), the answer is context only. With data.split_turns it also ends a separate document, in
exactly the context in which it would be asked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from sftkit.data.answer_matcher import NOWHERE, AnswerMatcher
from sftkit.data.conversation import Message, require_instructions
from sftkit.data.reasoning import Thinking, reasoning_of, template_arguments, with_other_reasoning, with_reasoning
from sftkit.data.spans import (
    cannot_begin_with_an_answer,
    end_of_marked,
    marked_not_found,
    no_end_of_turn,
    not_rendered,
    nothing_marked,
    opened_without_reasoning,
    prompt_differs,
    reasoning_not_rendered,
    required_texts,
    template_refuses,
    within,
)
from sftkit.data.template import Conversation, Span, render_conversation, template_of
from sftkit.errors import DataError

HISTORY = "not_learned_history"
"Why an answer is context only: the template renders it otherwise once it is history."


@dataclass(frozen=True)
class Document:
    """A conversation up to one of its answers, as one text that ends with it."""

    text: str
    spans: dict[int, list[Span]]
    "By index in messages, for each answer that stands after the prompt that a server would send: the characters that \
the model writes. The end-of-turn token belongs to them, whitespace after that does not."


@dataclass(frozen=True)
class _LastAnswer:
    """An answer as the last message."""

    text: str
    start: int
    core_end: int
    "Without the end-of-turn token."
    end: int


class Finder:
    """Renders a conversation up to any of its answers and finds them in the text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        conversation: Conversation,
        thinking: Thinking,
        where: str,
    ) -> None:
        """Prepare a conversation to be rendered with a tokenizer's template.

        Args:
            conversation: of a record, its messages checked, see conversation.validated.
            thinking: auto: an answer without reasoning is one with thinking turned off, where the template knows that;
                learn_empty: the empty thinking block that the template writes is learned; off: reasoning is left out.
        """
        self.tokenizer, self.tools, self.thinking, self.where = tokenizer, conversation.tools, thinking, where
        self.template = template_of(tokenizer, with_tools=bool(self.tools))
        self.messages = with_reasoning(conversation.messages, self.template, thinking)
        self._reasons = [reasoning_of(one) for one in conversation.messages if one["role"] == "assistant"]
        self._record_args = conversation.args
        self._args: dict[str, object] = {}
        self._known: dict[int, _LastAnswer] = {}

    @property
    def answers(self) -> list[int]:
        """Return the indices of all answers in messages."""
        return [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]

    def document(self, last: int, among: Iterable[int]) -> Document:
        """Render the messages up to an answer.

        Args:
            last: the index of that answer in messages.
            among: the answers to look for.

        Raises:
            DataError: the template refuses the conversation, leaves out something that would be learned, or makes
                another prompt for the last answer than it then renders.
        """
        self._args = self._arguments(last)
        wanted = sorted(k for k in among if k <= last)
        try:
            marks = self.template.has_marks and self.template.append_only
            marked = marks and all(self._arguments(k) == self._args for k in wanted)
            document = self._marked(last, wanted) if marked else self._located(last, wanted)
        except TemplateError as error:
            raise template_refuses(self.where, error) from error
        require_instructions(self.messages[: last + 1], document.text, self.where)
        if not document.spans.get(last, [()]):
            raise nothing_marked(self.where, last)
        return replace(document, spans={k: parts for k, parts in document.spans.items() if parts})

    def everything(self, last: int, marked: Collection[int]) -> Document:
        """Render the messages up to an answer, for a document of which all is learned except marked answers; the text
        of every answer must be in it.

        It has spans of the answers that stand after the prompts that a server would send; none if the conversation
        does not begin with a prompt that the template can make.

        Raises:
            DataError: the template refuses the conversation or leaves out something that would be learned.
        """
        try:
            found = self.document(last, self.answers)
        except DataError:  # no such prompt, or a fault that rendering it once more shows
            if marked:
                raise
            found = Document(self._render_up_to(last), {})
        cursor = 0
        for k in self.answers:
            if k <= last:
                cursor = self._check_rendered(k, found.text, cursor)
        if missing := set(marked) - found.spans.keys():
            raise marked_not_found(self.where, min(missing))
        return found

    def _render_up_to(self, last: int) -> str:
        """Render the messages up to an answer, without looking for answers in the text."""
        self._args = self._arguments(last)
        try:
            text = self._render(last + 1)
        except TemplateError as error:
            raise template_refuses(self.where, error) from error
        self._check_reasoning(last, text)
        require_instructions(self.messages[: last + 1], text, self.where)
        return text.rstrip()

    def turns_thinking_off(self, k: int) -> bool:
        """Return whether an answer is asked with thinking turned off, because it has no reasoning and the template
        would leave thinking on."""
        name = self.template.thinking_argument
        own = name in self.template.fixed or name in (self._record_args or {})
        return bool(name and not own and self._arguments(k).get(name) is False)

    @property
    def answers_with_reasoning(self) -> set[int]:
        """Return the answers that have reasoning in the data."""
        return {k for k, reasoning in zip(self.answers, self._reasons, strict=True) if reasoning}

    @property
    def reasons(self) -> set[int]:
        """Return the answers whose reasoning is to be learned; none with thinking=off."""
        return {k for k in self.answers if reasoning_of(self.messages[k])}

    def reasoned(self, last: int, known: Collection[int]) -> set[int]:
        """Return the answers whose reasoning stands in the text of a conversation that ends with answer `last`.

        The conversation is rendered with other texts in place of the reasonings, since their own words may stand
        anywhere. For the answers in `known` this was checked before.
        """
        marks = {k: f"[reasoning {k} of {last}]" for k in self.reasons if k <= last}
        if marks.keys() <= set(known):
            return set(marks)
        self._args = self._arguments(last)
        messages = [
            with_other_reasoning(m, marks[k]) if k in marks else m for k, m in enumerate(self.messages[: last + 1])
        ]
        text, _ = render_conversation(self.tokenizer, self.template, self._with(messages))
        rendered = set(map(int, re.findall(rf"\[reasoning (\d+) of {last}\]", text)))
        return {k for k in marks if k in rendered or k in known}

    def _located(self, last: int, wanted: list[int]) -> Document:
        """Find answers that stand in the text of the conversation as they do when they are the last message."""
        own = self._as_last_answer(last)
        matcher = AnswerMatcher(self.template, self.messages, own.text, last)
        spans: dict[int, Span] = {}
        for k in wanted:
            if k == last:
                spans[k] = own.start, own.end
                continue
            found = matcher.find(k)
            if found is None:
                one = self._as_last_answer(k)
                found = self._span_in(own.text, one)
                matcher.add(k, one.start, one.core_end, found)
            elif found != NOWHERE:
                answer = own.text[found[0] : found[1]]
                self._check(k, answer, answer)
            if found != NOWHERE:
                spans[k] = found
        if not self.template.has_marks:
            return Document(own.text[: own.end], {k: [span] for k, span in spans.items()})
        _, marks = self._marks(last)
        return Document(own.text[: own.end], {k: within(span, marks) for k, span in spans.items()})

    def _span_in(self, text: str, one: _LastAnswer) -> Span:
        """Return where an answer stands in the text of a longer conversation; NOWHERE if it is not
        there as it would be asked."""
        if text.startswith(one.text[: one.end]):
            return one.start, self._with_end(text, one)
        if text.startswith(one.text[: one.core_end]):  # it ends otherwise: that is learned at the end
            return one.start, one.core_end
        return NOWHERE

    def _marked(self, last: int, wanted: list[int]) -> Document:
        """Find answers by the template's marks, in one rendering; for templates that never change
        what they have rendered."""
        answers = [k for k in self.answers if k <= last]
        text, marks = self._marks(last)
        if len(marks) != len(answers):  # several for an answer, or none
            return self._located(last, wanted)
        spans, before = {}, 0
        for k, (start, end) in zip(answers, marks, strict=True):
            span = self._after_header(text, start), end_of_marked(text, (start, end), self.template.end_tokens)
            self._check(k, text[span[0] : span[1]], text[before : span[1]])
            before = span[1]
            if k in wanted:
                spans[k] = [span]
            if k == last:
                text = text[: span[1]]
        return Document(text, spans)

    def _marks(self, last: int) -> tuple[str, list[Span]]:
        """Return the rendered text and the spans that the template marks, empty ones left out."""
        messages = self.messages[: last + 1]
        self._args = self._arguments(last)
        text, marks = render_conversation(self.tokenizer, self.template, self._with(messages), marks=True)
        return text, [span for span in marks if span[0] < span[1]]

    def _after_header(self, text: str, start: int) -> int:
        """Return where an answer begins if its mark begins inside the part that a generation prompt supplies."""
        ends = [
            begin + len(header)
            for header in self.template.headers
            for begin in range(max(start - len(header), 0), start + 1)
            if header and text.startswith(header, begin)
        ]
        return max(start, (min if self.thinking == "learn_empty" else max)(ends, default=start))

    def _as_last_answer(self, k: int) -> _LastAnswer:
        """Return an answer as the last message; rendered once."""
        if k in self._known:
            return self._known[k]
        self._args = self._arguments(k)
        text, start = self._start(k, self._render(k + 1))
        core = text[start:].rstrip()
        ends = [token for token in self.template.special_tokens if token and core.endswith(token)]
        if self.template.end_last and not ends:
            raise no_end_of_turn(self.where, k, self.template.end_last)
        length = max(map(len, ends), default=0)
        self._check(k, core, core)
        end = start + len(core)
        self._known[k] = _LastAnswer(text, start, end - length, end)
        return self._known[k]

    def _arguments(self, k: int) -> dict[str, object]:
        """Return the template arguments with which answer k is asked."""
        return template_arguments(self.template, self.messages, k, self._record_args, self.thinking)

    def _start(self, k: int, text: str) -> tuple[str, int]:
        """Return (text, where the answer begins), which is after the longest prompt that a
        server could have made for it."""
        if k == 0:
            return text, self._start_without_question(text)
        prompt = self._render(k, add_generation_prompt=True)
        name, given = self.template.thinking_argument, self._args
        prompts = [prompt]
        chosen = name in (self._record_args or {}) or name in self.template.fixed or self.thinking == "learn_empty"
        if name and (chosen or not text.startswith(prompt)):
            for on in (True, False):
                self._args = {**given, name: on}
                prompts.append(self._render(k, add_generation_prompt=True))
            self._args = given
        fitting = [len(one) for one in prompts if text.startswith(one)]
        if fitting:
            # With learn_empty the block that another prompt supplies is learned; else it is context.
            return text, (min if self.thinking == "learn_empty" else max)(fitting)
        return self._after_opened_thought(k, text, prompt)

    def _after_opened_thought(self, k: int, text: str, prompt: str) -> tuple[str, int]:
        """Return (text, where the answer begins) if the prompt opens a thinking block that the template leaves out of
        finished answers (DeepSeek-R1 and its distilled models): what the model writes begins inside it."""
        opened, bare = prompt.rstrip().endswith("<think>"), self._render(k) + self.template.short_header
        if opened and self.template.short_header.strip() and text.startswith(bare):
            reasoning = reasoning_of(self.messages[k])
            if not reasoning and self.thinking != "learn_empty":
                raise opened_without_reasoning(self.where, k)
            return f"{prompt}{reasoning}\n</think>\n\n{text[len(bare) :].lstrip()}", len(prompt)
        raise prompt_differs(self.where, k, text, prompt)

    def _start_without_question(self, text: str) -> int:
        """Return where the first message begins if it is an answer: many templates cannot render
        the empty prompt before it."""
        for header in sorted((*self.template.headers, self.template.short_header), key=len, reverse=True):
            if header.strip() and header in text:
                return text.index(header) + len(header)
        raise cannot_begin_with_an_answer(self.where)

    def _with_end(self, text: str, one: _LastAnswer) -> int:
        """Return the end of an answer that another turn follows, with the token that ends it there
        if its own text has none."""
        token = self.template.end_within
        if one.core_end == one.end and token and text[one.end :].lstrip().startswith(token):
            return text.index(token, one.end) + len(token)
        return one.end

    def _check(self, k: int, answer: str, text: str) -> None:
        """Refuse an answer unless what its message says is in what will be learned, and its reasoning in the text."""
        self._check_reasoning(k, text)
        self._check_rendered(k, answer, 0)

    def _check_reasoning(self, k: int, text: str) -> None:
        """Refuse an answer whose reasoning is not in the text."""
        reasoning = reasoning_of(self.messages[k])
        if reasoning and reasoning not in text:
            raise reasoning_not_rendered(self.where, k)

    def _check_rendered(self, k: int, text: str, cursor: int) -> int:
        """Return where the last required text of the message ends; refuse the answer if one is not there."""
        for required in required_texts(self.messages[k]):
            at = text.find(required, cursor)
            if at < 0:
                raise not_rendered(self.where, k, required)
            cursor = at + len(required)
        return cursor

    def _render(self, k: int, *, add_generation_prompt: bool = False) -> str:
        """Render the first k messages."""
        asked = self._with(self.messages[:k])
        return render_conversation(self.tokenizer, self.template, asked, add_generation_prompt=add_generation_prompt)[0]

    def _with(self, messages: list[Message]) -> Conversation:
        """Return messages with the tools and the current arguments of the template."""
        return Conversation(messages, self.tools, self._args)
