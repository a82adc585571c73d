"""Check that training uses the prompts that a server would send: small conversations through a run's own tokenizing,
compared with transformers' prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.data.reading.conversation import Message
from sftkit.data.tokens.chat import Learning
from sftkit.data.tokens.reasoning import Thinking, with_reasoning
from sftkit.data.tokens.rendering import limited
from sftkit.data.tokens.template import Template, template_of
from sftkit.data.types import Row, Tokenized
from sftkit.errors import DataError

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


def check_prompted_targets(tokenize: partial[Tokenized]) -> PromptedTargets | None:
    """Check that each run of targets begins where a prompt of transformers' apply_chat_template ends, token by token,
    with thinking requested, not requested, or as the template has it. None: the tokenizing does not learn
    conversations by their answers.

    Args:
        tokenize: of a run, as loader.load_examples takes it.
    """
    learning: Learning | None = tokenize.keywords.get("learning")
    if learning is None or learning.targets == "all":
        return None
    tokenizer: PreTrainedTokenizerBase = tokenize.keywords["tokenizer"]
    template, count, rendered, unasked = template_of(tokenizer), 0, list[str](), list[str]()
    for name, messages in PROBES.items():
        try:
            examples = tokenize(Row(name, messages=messages)).examples
        except DataError:  # a template without tools or reasoning refuses such conversations, as it does in the data
            continue
        rendered.append(name)
        prompts = _prompts(tokenizer, template, messages, learning.thinking)
        # Each run of targets, as the model sees it: what stands before its first token must be a prompt,
        # token by token.
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
    tokenizer: PreTrainedTokenizerBase, template: Template, messages: list[Message], thinking: Thinking
) -> list[list[int]]:
    """Return, for each answer, the token ids of the prompts that lead to it."""
    name = template.thinking_argument
    # Any: arguments of a template go by name, next to those of apply_chat_template itself.
    # Any of the modes will do: with thinking=auto an answer decides by itself in which it is asked.
    modes: list[dict[str, Any]] = [{}, *({name: on} for on in (True, False) if name)]
    given = with_reasoning(messages, template, thinking)
    render: Callable[..., list[int]] = tokenizer.apply_chat_template  # type: ignore[assignment]
    return [
        limited(render, given[:k], add_generation_prompt=True, tokenize=True, return_dict=False, **mode)
        for k, message in enumerate(given)
        if message["role"] == "assistant"
        for mode in modes
    ]
