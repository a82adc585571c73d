"""Turn conversations into tokens, and decide, here alone, which of them are targets: the loss mask.

Targets are what the assistant says, and the end-of-turn token after it: without that token a model never stops.
`check_prompted_targets` checks that a run asks for answers as a server would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.data.reading import columns, conversation, rows
from sftkit.data.reading.conversation import Message
from sftkit.data.tokens import loss_mask
from sftkit.data.tokens import template as templates
from sftkit.data.tokens.encode import Encoded, TokenBytes, encode, encode_answers, token_bytes
from sftkit.data.tokens.template import Span, T, limited, special_tokens_of, template_of
from sftkit.data.types import CUT, SPLIT_TOKENS, TOO_LONG, Row, Tokenized, TokenizedExample
from sftkit.errors import ConfigError, DataError, fault

if TYPE_CHECKING:
    from sftkit.data.tokens.shapes import Shaped

Locator: TypeAlias = "loss_mask.AnswerLocator | Shaped"
BORDER = "not_learned_border"
"""Why an answer is context only: its first characters share a token with the prompt, and more of
the conversation follows."""
NOT_LEARNED = (loss_mask.CONTEXT, loss_mask.MARKED, loss_mask.EARLIER, loss_mask.HISTORY, BORDER, TOO_LONG)
THINKING_OFF = "thinking_turned_off"
"Conversations that are trained with thinking turned off because they have no reasoning."
ANSWER_COUNTS = ("answers", "answers_learned", CUT, *NOT_LEARNED, "reasoning_left_out", SPLIT_TOKENS, THINKING_OFF)
"Names of the counts of answers that `tokenize` returns."


@dataclass(frozen=True)
class Learning:
    """Settings of the data section that decide what is learned from a conversation."""

    targets: loss_mask.Targets = "assistant"
    "assistant: every answer; last_turn: those after the last user message; all: every token but the first"
    thinking: loss_mask.Thinking = "auto"
    "see answers.AnswerLocator"
    split_turns: bool = True
    """Answers that the template renders differently in the middle of a conversation end documents of their own; if
    every token is learned, only answers whose reasoning is left out there do."""


ANSWERS = Learning()
EVERYTHING = Learning(targets="all")


def tokenize(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    too_long: str = "truncate",
    learning: Learning = ANSWERS,
) -> Tokenized:
    """Tokenize one conversation to documents of at most `max_length` row positions, which hold max_length + 1 tokens.

    The text is the template's own, special tokens included, so nothing is added to it but an eos token where the
    template ends turns with none.

    Raises:
        DataError: what is wrong with the conversation. ConfigError: with template or tokenizer.
    """
    if row.is_tokenized:
        if row.ids is not None and row.is_target is None and learning.targets != "all":
            raise fault(row.where, "tokenized row / no mask")
        return take(row, tokenizer, max_length=max_length, too_long=too_long)
    asking = steps(row, tokenizer, max_length=max_length, too_long=too_long, learning=learning)
    answer: tuple[Encoded, set[int]] | None = None
    while True:
        try:
            text, spans, last = asking.send(answer)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as done:
            result: Tokenized = done.value
            return result
        answer = encode_answers(tokenizer, text, spans, last, max_length + 2)


ChatSteps = Generator[tuple[str, dict[int, list[Span]], int], tuple[Encoded, set[int]], T]
"""A conversation on its way: it asks for the tokens of texts with the places of their answers, of which the last ends
the text, as encode_answers returns them."""


def steps(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    too_long: str = "truncate",
    learning: Learning = ANSWERS,
    seen: loss_mask.Seen | None = None,
    sizes: TokenBytes | None = None,
    shaped: Shaped | None = None,
) -> ChatSteps[Tokenized]:
    """Do what `tokenize` does with a conversation, with texts encoded by the caller.

    Args:
        seen: how the template rendered answers of other rows.
        sizes: bytes of each id; None: documents are decoded to count them.
        shaped: stands for the locator of its answers; None: the conversation is checked and rendered.
    """
    checked: Sequence[Message] = ()
    messages: list[Message] = []
    unlearned: dict[int, list[Span]] = {}
    unused: dict[str, str] = {}
    locator: Locator
    if shaped is not None:
        locator = shaped
        skipped = shaped.shape.skipped
    else:
        checked = rows.require_conversation(row)
        specials = loss_mask.once(seen, "special tokens", lambda: special_tokens_of(tokenizer))
        messages = conversation.validated(row, specials)
        loss_mask.check_reasoning(messages, row.where)
        skipped = loss_mask.not_learned(row, messages, learning.targets)
        unlearned = loss_mask.unlearned_parts(row, messages, learning.targets)
        if not row.learned:
            counts = Counter({"answers": len(skipped), loss_mask.MARKED: len(skipped)})
            return Tokenized([], "dropped_no_target", counts, "the row is marked as not to be learned")
        given = row.changed(messages=loss_mask.without_marks(messages))
        locator = loss_mask.AnswerLocator(tokenizer, given, learning.thinking, seen)
        unused = templates.unused_arguments(row, locator.template)
        conversation.require_answer(locator.messages, row.where)  # without reasoning that is left out
    # why answers are not learned, by what is known before rendering
    counts = Counter(answers=len(locator.answers))
    counts.update(skipped.values())
    # documents before they are cut to max_length
    learnable = set(locator.answers) - skipped.keys()
    if learning.targets == "all":
        texts = yield from _everything(locator, skipped, max_length, counts, split=learning.split_turns)
    else:
        texts = yield from _answers(locator, learnable, max_length, counts, unlearned, split=learning.split_turns)
    counts["reasoning_left_out"] = len(locator.answers_with_reasoning.difference(*(text.reasoned for text in texts)))
    # cut, dropped or rejected as too_long says; the rest is counted
    fitted = [fit(row, text, tokenizer, max_length, too_long, sizes) for text in texts]
    count_cut(counts, texts, fitted, max_length)
    examples = [example for one in fitted for example in one.examples]
    counts[THINKING_OFF] = int(bool(learnable) and locator.turns_thinking_off(max(learnable)))
    counts[SPLIT_TOKENS] = sum(len(example.ids) - 1 for example in examples[:-1])
    noted = [one for one in fitted if one.note]
    keys = columns.unused_keys(checked, partial(templates.renders_key, tokenizer, locator.template))
    if examples:
        odd = {**conversation.oddities(messages, row.where), **unused, **locator.odd}
        return Tokenized(examples, "truncated" if noted else None, counts, odd=odd, unused=keys)
    if noted:
        return Tokenized([], noted[0].note, counts, noted[0].details, unused=keys)
    return Tokenized([], "dropped_no_target", counts, "none of its answers is to be learned", unused=keys)


UNASKED = "targets after no header of the chat template"
"Data warning about a row that was tokenized elsewhere."
_HEADER_TOKENS = 64
"Tokens before a run of targets that may be the header."


def take(row: Row, tokenizer: PreTrainedTokenizerBase, *, max_length: int, too_long: str | None) -> Tokenized:
    """Return the documents of a row that was tokenized elsewhere, or of its segments, which are tokenized apart as they
    are written, special tokens included. Nothing is added.

    Args:
        too_long: what happens to a row that is too long; None: it is cut into documents, as a text is.

    Raises:
        DataError: a token that the tokenizer does not have, or a row that is too long.
    """
    ids = row.ids
    is_target = row.is_target
    if ids is None:
        parts = [(encode(tokenizer, text).ids, learned) for text, learned in row.segments or ()]
        ids = np.concatenate([part for part, _ in parts])
        is_target = np.concatenate([np.full(len(part), learned) for part, learned in parts])
    if not row.learned or not len(ids):
        why = "a row without tokens" if row.learned else "the row is marked as not to be learned"
        return Tokenized([], "dropped_no_target", details=why)
    if (largest := int(ids.max())) >= len(tokenizer):
        raise fault(row.where, "tokenized row / vocabulary", token=largest, size=len(tokenizer))
    odd = {} if is_target is None else _unasked(row, ids, is_target, tokenizer)
    is_target = np.ones(len(ids), dtype=bool) if is_target is None else is_target
    if too_long is not None:
        return replace(fit(row, Text(ids, is_target), tokenizer, max_length, too_long), odd=odd)
    pieces = [slice(i, i + max_length + 1) for i in range(0, max(len(ids) - 1, 1), max_length)]
    documents = [one for piece in pieces if (one := document(ids[piece], is_target[piece], tokenizer))]
    if not documents:
        return Tokenized([], "dropped_no_target", details="no token of it is to be learned")
    return Tokenized(documents, odd=odd)


def _unasked(row: Row, ids: np.ndarray, is_target: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the warning about runs of targets that do not begin after a header of the chat template, if any do not."""
    if row.ids is None or not tokenizer.chat_template:
        return {}
    headers = tuple(header for header in template_of(tokenizer).headers if header.strip())
    begins = np.flatnonzero(np.diff(is_target.astype(np.int8), prepend=0) == 1)
    before = (str(tokenizer.decode(ids[max(begin - _HEADER_TOKENS, 0) : begin].tolist())) for begin in begins)
    unasked = sum(not text.endswith(headers) for text in before)
    return {UNASKED: f"{row.where}: {unasked} of {len(begins)} runs of targets"} if unasked else {}


class Text(NamedTuple):
    """A document before it is cut to its length."""

    ids: np.ndarray
    is_target: np.ndarray
    answers: tuple[tuple[int, int], ...] = ()
    "of each answer that is learned in it: its first token, and one past its last"
    reasoned: Set[int] = frozenset()
    "answers whose reasoning is in it, or would be in documents that are left out as too long"
    rest: bool | None = None
    "Whether the text that was not tokenized, as it lies far beyond max_length, has targets; None: all was tokenized."


def _answers(
    locator: Locator,
    learnable: set[int],
    max_length: int,
    counts: Counter[str],
    unlearned: Mapping[int, list[Span]],
    *,
    split: bool,
) -> ChatSteps[list[Text]]:
    """Return a document that ends with the last answer and, with `split`, further ones for the answers that are not
    learned there. Of a long conversation only answers that can begin within max_length are rendered; else it
    would be rendered once for each of its turns, for nothing."""
    tokenizer = locator.tokenizer
    found: list[Text] = []
    left = set(learnable)
    while left:
        # Backwards: the document of the last answer holds most of the others as well.
        last = max(left)
        document = locator.document(last, left)
        encoded, shared = yield document.text, document.spans, last
        counts[BORDER] += len(shared)
        # An answer that shares a token with its prompt is no target: a server never sees that token.
        answers = {k: parts for k, parts in document.spans.items() if k not in shared}
        spans = sorted(span for parts in answers.values() for span in parts)
        places = {k: (parts[0][0], parts[-1][1]) for k, parts in answers.items()}
        is_target = encoded.inside(spans)
        for k in answers.keys() & unlearned:
            for part in loss_mask.placed_parts(locator.messages[k], unlearned[k], document.text, places[k][0]):
                # A token that is only partly to be learned is not learned.
                is_target &= ~encoded.inside([part])
        learned = _finished(locator, encoded, is_target, places, last)
        rest = None if encoded.complete else bool(spans)
        found.append(Text(*learned, locator.reasoned(last, document.spans), rest))
        left -= document.spans.keys()
        if not split:
            break
        # Once, after the longest document: an answer that cannot begin within max_length there needs no
        # document either.
        if left and len(found) == 1 and len(encoded.ids) > max_length + 1:
            # Counted by the messages alone, without rendering: fewer tokens than the document has, so no answer is
            # lost by it.
            reach = _reach(locator.messages, tokenizer, max_length + 1)
            beyond = {k for k in left if k >= reach}
            counts[TOO_LONG] += len(beyond)
            found[0] = found[0]._replace(reasoned=found[0].reasoned | (beyond & locator.reasons))
            left -= beyond
    counts[loss_mask.HISTORY] = len(left)
    return found[::-1]


def _reach(messages: list[Message], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> int:
    """Return the index of the first message before which the messages alone have more than `max_tokens`, whatever the
    template writes around them. Each text counts two tokens fewer: at its borders tokens may merge with others."""
    tokens = 0
    for i, message in enumerate(messages):
        if tokens > max_tokens:
            return i
        text = conversation.answer_core(message) if message["role"] == "assistant" else message["content"].strip()
        tokens += max(len(encode(tokenizer, text, max_tokens + 3).ids) - 2, 0)
    return len(messages)


def _everything(
    locator: Locator, skipped: dict[int, str], max_length: int, counts: Counter[str], *, split: bool
) -> ChatSteps[list[Text]]:
    """Return the documents of a conversation of which every token is learned except answers that are marked as
    not to be.

    With `split`, an answer whose reasoning the template leaves out of the whole text ends a further document of its
    own; these come first.
    """
    last = locator.answers[-1]
    document = locator.everything(last, skipped)
    reasoned = locator.reasoned(last, document.spans)
    # Reasoning that the whole text leaves out is learned in documents of its own, as a server would ask for it.
    apart = locator.reasons - reasoned - skipped.keys() if split else set()
    before = yield from _answers(locator, apart, max_length, counts, {}, split=split)
    encoded, shared = yield document.text, document.spans, last
    counts[BORDER] += len(shared - skipped.keys())
    hidden = skipped.keys() | shared
    spans = sorted(span for k, parts in document.spans.items() if k in hidden for span in parts)
    # An answer after no prompt has no place but that of its text.
    whole = {k: (parts[0][0], parts[-1][1]) for k, parts in document.spans.items()}
    places = {k: span for k, span in {**document.texts, **whole}.items() if k not in hidden | apart}
    is_target = ~encoded.inside(spans)
    learned = _finished(locator, encoded, is_target, places, last, learned=last not in skipped)
    return [*before, Text(*learned, reasoned, None if encoded.complete else True)]


def _finished(
    locator: Locator,
    encoded: Encoded,
    is_target: np.ndarray,
    answers: dict[int, Span],
    last: int,
    *,
    learned: bool = True,
) -> tuple[np.ndarray, np.ndarray, tuple[tuple[int, int], ...]]:
    """End a document: append a token that ends its last turn if the template writes none there.

    Args:
        is_target: bool [n].
        answers: the characters of each answer.
        last: the last answer of the document, to which an appended token belongs.
        learned: whether an appended token is a target.

    Returns:
        (ids; is_target; the first token of each answer and one past its last)
    """
    ids = encoded.ids
    ends = loss_mask.once(locator.seen, "ends", lambda: end_of_turn_ids(locator.tokenizer))
    if encoded.complete and ids[-1] not in ends:
        end = locator.end_token(last)
        end_id = locator.tokenizer.convert_tokens_to_ids(end) if end else locator.tokenizer.eos_token_id
        if end_id is None:
            raise ConfigError("neither the chat template nor the tokenizer has a token that ends an answer")
        ids = np.append(ids, np.asarray(end_id, dtype=np.int32))
        is_target = np.append(is_target, learned)
    ranges = {k: encoded.tokens(span) for k, span in answers.items()}
    if last in ranges and encoded.complete:
        ranges[last] = ranges[last][0], len(ids)
    return ids, is_target, tuple(ranges.values())


def document(
    ids: np.ndarray,
    is_target: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    sizes: TokenBytes | None = None,
    **more: Any,
) -> TokenizedExample | None:
    """Make a document whose token 0 is not a target and that ends with its last target; None if it has no target.

    Args:
        more: other fields of it.
        sizes: bytes of each id, if no character of the targets is only in part among them, except in token 0 and
            token 1; None: the targets are decoded.
    """
    is_target = is_target.astype(bool)
    is_target[:1] = False
    targets = is_target.nonzero()[0]
    if not len(targets):
        return None
    # Tokens after the last target change no loss, but would be computed.
    n = int(targets[-1]) + 1
    ids = ids[:n].astype(np.int32)
    is_target = is_target[:n]
    if sizes is not None and sizes.whole[ids[0]]:
        return TokenizedExample(ids, is_target, int(sizes.sizes.take(ids.take(targets)).sum()), **more)
    return TokenizedExample(ids, is_target, count_bytes(tokenizer, ids, is_target), **more)


def count_bytes(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, is_target: np.ndarray) -> int:
    """Return the UTF-8 bytes of the decoded targets, special tokens left out."""
    targets = ids[is_target]
    sizes = token_bytes(tokenizer, len(tokenizer)) if tokenizer.is_fast else None
    if sizes is not None and sizes.whole.take(targets).all():
        return int(sizes.sizes.take(targets).sum())
    # An array: of a list transformers looks at every number first.
    learned = tokenizer.decode(targets, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(str(learned).encode("utf-8", errors="replace"))


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens after which an answer is over: those of the chat template, and eos. Generation stops at
    any of them."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template:
        ids = [*map(tokenizer.convert_tokens_to_ids, template_of(tokenizer).end_tokens), *ids]
    return list(dict.fromkeys(map(int, ids)))


def prompt_text(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text after which the model writes the next answer to a row's messages."""
    checked = replace(row, messages=conversation.validated(row, special_tokens_of(tokenizer)))
    template = template_of(tokenizer, with_tools=bool(row.tools))

    def render(messages: list[Message], tools: templates.Tools) -> str:
        one = replace(checked, messages=messages, tools=tools)
        return templates.render_conversation(tokenizer, template, one, add_generation_prompt=True)[0]

    # Reasoning of earlier answers is where the template looks for it, as in training.
    messages = loss_mask.with_reasoning(checked.messages or [], template, "auto")
    text = render(messages, row.tools)
    templates.check_context(
        messages, row.tools, text, render, template=template, where=row.where, args=row.template_args
    )
    return text


def render_prompt(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids after which the model writes the next answer to a row's messages."""
    ids: list[int] = encode(tokenizer, prompt_text(row, tokenizer)).ids.tolist()
    return ids


def as_trained(row: Row, k: int, tokenizer: PreTrainedTokenizerBase, thinking: loss_mask.Thinking = "auto") -> Row:
    """Return a record with the messages and template arguments with which answer k of it is trained."""
    messages = loss_mask.without_marks(conversation.validated(row, special_tokens_of(tokenizer)))
    locator = loss_mask.AnswerLocator(tokenizer, replace(row, messages=messages), thinking)
    return replace(row, messages=locator.messages, template_args=locator.arguments(k) or None)


def count_cut(counts: Counter[str], texts: Sequence[Text], fitted: Sequence[Tokenized], max_length: int) -> None:
    """Count the answers that lie beyond data.max_length or are cut there, and those that are learned whole.

    Args:
        counts: of all answers, and of those that are not learned for other reasons.
        fitted: what `fit` has made of each text.
    """
    for text, one in zip(texts, fitted, strict=True):
        kept = max_length + 1 if one.examples else 0
        counts[TOO_LONG] += sum(first >= kept for first, _ in text.answers)
        counts[CUT] += sum(first < kept < past for first, past in text.answers)
    counts["answers_learned"] = counts["answers"] - sum(counts.get(name, 0) for name in (CUT, *NOT_LEARNED))


def fit(
    row: Row,
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    too_long: str,
    sizes: TokenBytes | None = None,
) -> Tokenized:
    """Cut a document to max_length, drop it or reject it, as `too_long` says. `sizes`: as in `document`, of a document
    that is not cut."""
    ids = text.ids
    is_target = text.is_target
    is_long = len(ids) > max_length + 1
    beginning = "more than " if text.rest is not None else ""
    size = f"{beginning}{len(ids)} tokens, but data.max_length {max_length} holds {max_length + 1}"
    if is_long and too_long == "drop":
        return Tokenized([], "dropped_too_long", details=size)
    if is_long and too_long == "error":
        raise fault(row.where, "too long", size=size)
    more: dict[str, Any] = {"size": len(ids), "answers": tuple(one for one in text.answers if one[1] <= max_length + 1)}
    kept = ids[: max_length + 1], is_target[: max_length + 1]
    example = document(*kept, tokenizer, None if is_long else sizes, **more)
    if example is None:
        beyond = is_target[max_length + 1 :].any() or text.rest
        said = f"{size}, and the first target is beyond them: raise data.max_length"
        details = said if beyond else "no token of it is to be learned"
        return Tokenized([], "dropped_no_target", details=details)
    return Tokenized([example], "truncated" if is_long else None)


_ASK = ({"role": "user", "content": "What is it?"}, {"role": "user", "content": "And then?"})
PLAIN = ({"role": "assistant", "content": "This."}, {"role": "assistant", "content": "That."})
_REASONED = tuple({**answer, "reasoning_content": f"Because of {i}."} for i, answer in enumerate(PLAIN))
_LOOK = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [_LOOK]}
RESULT = {"role": "tool", "content": "seen"}
PROBES: dict[str, list[Message]] = {
    "one turn": [_ASK[0], PLAIN[0]],
    "two turns": [_ASK[0], PLAIN[0], _ASK[1], PLAIN[1]],
    "with reasoning": [_ASK[0], _REASONED[0]],
    "two turns with reasoning": [_ASK[0], _REASONED[0], _ASK[1], _REASONED[1]],
    "reasoning, then none": [_ASK[0], _REASONED[0], _ASK[1], PLAIN[1]],
    "none, then reasoning": [_ASK[0], PLAIN[0], _ASK[1], _REASONED[1]],
    "with a tool": [_ASK[0], CALL, RESULT, PLAIN[0]],
}


@dataclass(frozen=True)
class PromptedTargets:
    """Runs of targets in the documents of PROBES."""

    conversations: tuple[str, ...]
    "those that the template can render"
    answers: int
    "runs of targets"
    unasked: tuple[str, ...]
    "conversation and text of those that no prompt leads to"


def check_prompted_targets(
    tokenize: Callable[[Row], Tokenized], tokenizer: PreTrainedTokenizerBase, learning: Learning | None
) -> PromptedTargets | None:
    """Check that each run of targets begins where a prompt of transformers' apply_chat_template ends, token by token,
    with thinking requested, not requested, or as the template has it. None: the run does not learn conversations by
    their answers.

    Args:
        tokenize: the rule of the run, which learns conversations by `learning`.
    """
    if learning is None or learning.targets == "all":
        return None
    count = 0
    rendered: list[str] = []
    unasked: list[str] = []
    for name, messages in PROBES.items():
        try:
            examples = tokenize(Row(name, messages=messages)).examples
        except DataError:  # a template without tools or reasoning rejects such conversations, as it does in the data
            continue
        rendered.append(name)
        prompts = _prompts(tokenizer, messages, learning.thinking)
        # The tokens before each run of targets must be those of a prompt.
        for example in examples:
            begins = np.flatnonzero(np.diff(example.is_target.astype(np.int8), prepend=0) == 1)
            count += len(begins)
            unasked += [
                f"{name}: ...{tokenizer.decode(example.ids[max(begin - 8, 0) : begin + 4].tolist())}..."
                for begin in begins
                if example.ids[:begin].tolist() not in prompts
            ]
    return PromptedTargets(tuple(rendered), count, tuple(unasked))


def _prompts(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], thinking: loss_mask.Thinking
) -> list[list[int]]:
    """Return, for each answer, the token ids of the prompts that lead to it."""
    template = template_of(tokenizer)
    name = template.thinking_argument
    # A prompt of any mode counts, since with thinking=auto the answer decides the mode. Any: the arguments of a
    # template go by name, next to those of apply_chat_template itself.
    modes: list[dict[str, Any]] = [{}, *({name: on} for on in (True, False) if name)]
    given = loss_mask.with_reasoning(messages, template, thinking)
    render: Callable[..., list[int]] = tokenizer.apply_chat_template  # type: ignore[assignment]
    return [
        limited(render, given[:k], add_generation_prompt=True, tokenize=True, return_dict=False, **mode)
        for k, message in enumerate(given)
        if message["role"] == "assistant"
        for mode in modes
    ]
