"""Chat templates: render a conversation, and find which characters of the rendered text are an assistant's own.

Templates that mark answers with {% generation %} say so themselves. For others each answer begins where the prompt
that the template makes for it ends, which is checked, and ends with the template's end-of-turn token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from sftkit.data.conversation import Message, answer_core, function_of
from sftkit.errors import ConfigError, DataError

Span = tuple[int, int]
"Character positions [start, end) in the rendered text."

ASKED, ANSWERED, ASKED_AGAIN, ANSWERED_AGAIN = "first question", "first answer", "second question", "second answer"


@dataclass(frozen=True)
class Template:
    """A chat template and what rendering a small probe conversation shows about it."""

    source: str
    special_tokens: tuple[str, ...]
    has_marks: bool
    "It marks answers with {% generation %}."
    end_within: str | None
    "The special token that ends an answer which another turn follows; None: the template writes none."
    end_last: str | None
    "The special token that ends an answer which is the last message."
    header: str
    "What add_generation_prompt adds."
    short_header: str
    "What stands before an answer in the middle of a conversation; shorter where prompts open a thinking block."

    @property
    def end_tokens(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(token for token in (self.end_within, self.end_last) if token))


def template_of(tokenizer: PreTrainedTokenizerBase, with_tools: bool = False) -> Template:
    """The tokenizer's chat template (some have a second one for tools), probed once."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no chat template. "
            "Set model.chat_template to a Jinja file (sftkit's own: src/sftkit/data/chatml.jinja)"
        )
    source = tokenizer.get_chat_template(None, [{}] if with_tools else None)
    return _probe(tokenizer, source, tuple(special_tokens_of(tokenizer)))


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Tokens that text must not contain. Added tokens that are ordinary text, such as <think>, are not among them."""
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *_added_special_tokens(tokenizer, len(tokenizer))]))


def render(
    tokenizer: PreTrainedTokenizerBase,
    template: Template | str,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    marks: bool = False,
) -> tuple[str, list[Span]]:
    """The text of a conversation and, with `marks`, the spans inside {% generation %}. Raises jinja's TemplateError."""
    source = template if isinstance(template, str) else template.source
    if "developer" not in source:  # the newer name of system, which older templates refuse or do not know
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
    texts, spans = render_jinja_template(
        [messages],
        tools=list(tools) if tools else None,
        chat_template=source,
        return_assistant_tokens_mask=marks,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    return texts[0], cast(list[Span], spans[0]) if marks else []


def answer_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]] | None, where: str
) -> tuple[str, list[Span]]:
    """The rendered conversation and the span of each answer, end-of-turn token included and later whitespace not."""
    template = template_of(tokenizer, bool(tools))
    try:
        if template.has_marks:
            text, marked = render(tokenizer, template, messages, tools, marks=True)
            spans = [_with_end_of_turn(text, span, template) for span in marked if span[0] < span[1]]
            _check_marked(text, spans, messages, where)
        else:
            text, _ = render(tokenizer, template, messages, tools)
            finder = _SpanFinder(tokenizer, template, messages, tools, text, where)
            spans = [finder.span(k) for k, message in enumerate(messages) if message["role"] == "assistant"]
    except TemplateError as error:
        raise DataError(
            f"{where}: the chat template refuses this conversation: {error}", reason="template refuses it"
        ) from error
    return text, spans


@lru_cache(maxsize=8)
def _added_special_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[str, ...]:
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


@lru_cache(maxsize=8)
def _probe(tokenizer: PreTrainedTokenizerBase, source: str, special_tokens: tuple[str, ...]) -> Template:
    conversation = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": ANSWERED},
        {"role": "user", "content": ASKED_AGAIN},
        {"role": "assistant", "content": ANSWERED_AGAIN},
    ]
    try:
        text, _ = render(tokenizer, source, conversation)
        question, _ = render(tokenizer, source, conversation[:1])
        prompt, _ = render(tokenizer, source, conversation[:1], add_generation_prompt=True)
        asked, answered = _find(text, ASKED), _find(text, ANSWERED)
        asked_again, answered_again = _find(text, ASKED_AGAIN), _find(text, ANSWERED_AGAIN)
    except (TemplateError, ValueError) as error:
        raise ConfigError(f"the chat template cannot render a plain user and assistant conversation: {error}") from None
    turn_start = len(question) if text.startswith(question) else asked[1]
    return Template(
        source=source,
        special_tokens=special_tokens,
        has_marks=bool(re.search(r"\{%-?\s*generation\s*-?%\}", source)),
        end_within=_first_special(text[answered[1] : asked_again[0]], special_tokens, after_text=False),
        end_last=_first_special(text[answered_again[1] :], special_tokens, after_text=True),
        header=prompt[len(question) :] if prompt.startswith(question) else "",
        short_header=text[turn_start : answered[0]],
    )


def _find(text: str, part: str) -> Span:
    start = text.index(part)
    return start, start + len(part)


def _first_special(text: str, special_tokens: Iterable[str], after_text: bool) -> str | None:
    """The special token that comes first, and only after whitespace unless `after_text`."""
    found = [(text.find(token), -len(token), token) for token in special_tokens if token and token in text]
    if not found:
        return None
    at, _, token = min(found)
    return token if after_text or not text[:at].strip() else None


def _with_end_of_turn(text: str, span: Span, template: Template) -> Span:
    """A marked span, grown by the end-of-turn token if the marks leave it out, less whitespace after that token."""
    start, end = span
    trimmed = start + len(text[start:end].rstrip())
    if text[start:trimmed].endswith(template.end_tokens):
        return start, trimmed
    for token in template.end_tokens:
        following = re.compile(r"\s*" + re.escape(token)).match(text, end)
        if following:
            return start, following.end()
    return span


def _check_marked(text: str, spans: list[Span], messages: list[Message], where: str) -> None:
    """Every answer must occur, in order, in what the template marked."""
    marked, cursor = "\0".join(text[a:b] for a, b in spans), 0
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            for piece in _pieces(message):
                at = marked.find(piece, cursor)
                if at < 0:
                    raise _not_rendered(where, k, piece)
                cursor = at + len(piece)


def _pieces(message: Message) -> list[str]:
    """Strings that the rendered answer must contain: its text and the names of the tools it calls."""
    return [p for p in (answer_core(message), *(function_of(c)["name"] for c in message.get("tool_calls", ()))) if p]


def _common_length(a: str, b: str) -> int:
    """Leading characters that two texts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _not_rendered(where: str, k: int, piece: str) -> DataError:
    shown = piece if len(piece) <= 40 else piece[:40] + "..."
    return DataError(
        f"{where}: messages[{k}]: the chat template does not render {shown!r} as part of this answer, so it could not "
        "be learned. Use a template that renders it (tool calls need a template that knows them): model.chat_template",
        reason="template does not render the answer",
    )


@dataclass
class _SpanFinder:
    """Finds answers in the rendered `text` of a template without marks."""

    tokenizer: PreTrainedTokenizerBase
    template: Template
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    text: str
    where: str

    def span(self, k: int) -> Span:
        start = self._start(k)
        end = self._end(k, start)
        for piece in _pieces(self.messages[k]):
            if piece not in self.text[start:end]:
                raise _not_rendered(self.where, k, piece)
        return start, end

    def _start(self, k: int) -> int:
        if k == 0:
            return self._start_without_question()
        prompt = self._render(k, add_generation_prompt=True)
        if self.text.startswith(prompt):
            return len(prompt)
        # The prompt may open a thinking block that a finished answer does not have: take the header of finished ones.
        before, header = self._render(k), self.template.short_header
        if header.strip() and self.text.startswith(before + header):
            return len(before + header)
        at = _common_length(self.text, prompt)
        raise DataError(
            f"{self.where}: messages[{k}]: the prompt that the chat template makes for this answer is not how it "
            f"renders the conversation: after {self.text[max(0, at - 20) : at]!r} the prompt has "
            f"{prompt[at : at + 20]!r}, the conversation {self.text[at : at + 20]!r}. "
            "Use a template with {% generation %} marks: model.chat_template",
            reason="template renders the prompt differently",
        )

    def _start_without_question(self) -> int:
        """The conversation begins with an answer: many templates cannot render the empty prompt before it."""
        for header in (self.template.header, self.template.short_header):
            if header.strip() and header in self.text:
                return self.text.index(header) + len(header)
        raise DataError(
            f"{self.where}: messages[0]: the chat template cannot begin with an answer",
            reason="template cannot begin with an answer",
        )

    def _end(self, k: int, start: int) -> int:
        is_last = k == len(self.messages) - 1
        token = self.template.end_last if is_last else self.template.end_within
        if token:
            at = self.text.find(token, start)
            if at >= 0:
                return at + len(token)
            raise DataError(
                f"{self.where}: messages[{k}]: no end-of-turn token {token!r} after this answer",
                reason="no end-of-turn token",
            )
        until_here = self.text[: _common_length(self.text, self._render(k + 1))]
        return max(start, len(until_here.rstrip()))

    def _render(self, k: int, add_generation_prompt: bool = False) -> str:
        """The first k messages."""
        return render(self.tokenizer, self.template, self.messages[:k], self.tools, add_generation_prompt)[0]
