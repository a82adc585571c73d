"""In words: what is learned of the answers of conversations, what is not, and why."""

from __future__ import annotations

from typing import Any

from sftkit.data.tokens.answers import HISTORY
from sftkit.data.tokens.chat import BORDER, CUT, SPLIT_TOKENS, THINKING_OFF, TOO_LONG
from sftkit.data.tokens.learned import CONTEXT, EARLIER, MARKED
from sftkit.runtime.words import counted

_WORDS = {
    CONTEXT: "given in a prompt",
    MARKED: "marked by the data (weight, train)",
    EARLIER: "in earlier turns (data.targets=last_turn)",
    HISTORY: "rendered differently once they are history",
    BORDER: "share a token with their prompt",
    TOO_LONG: "in documents that are too long",
}
"Why an answer is context only."
COST_PCT = 10.0
"Share of a source's tokens from which the cost of split_turns is worth a warning."


def answers_line(source: dict[str, Any]) -> str | None:
    """Return one line about the answers of a source; None: it has none, or all are learned.

    Args:
        source: as preflight.data.source_facts returns it, with `split_turns`.
    """
    answers = source["answers"]
    if not answers:
        return None
    skipped = [f"{answers[name]:,} {words}" for name, words in _WORDS.items() if answers[name]]
    if answers[CUT]:
        skipped.append(f"{answers[CUT]:,} learned in part, cut at data.max_length")
    if answers["reasoning_left_out"]:
        skipped.append(f"the reasoning of {answers['reasoning_left_out']:,} is left out")
    if answers[SPLIT_TOKENS]:
        skipped.append(
            f"{counted(answers[SPLIT_TOKENS], 'token')} in documents of their own for answers that the chat template "
            "renders differently once they are history (data.split_turns)"
        )
    if not skipped:
        return None
    learned = f"{answers['answers_learned']:,} of {counted(answers['answers'], 'answer')} learned"
    return f"{source['name']}: {learned}; {', '.join(skipped)}"


def answer_warnings(source: dict[str, Any]) -> list[str]:
    """Return what a person should decide on about the answers of a source."""
    answers, name = source["answers"], source["name"]
    if not answers:
        return []
    texts = []
    if answers[HISTORY]:
        texts.append(
            f"source {name}: {answers[HISTORY]:,} of {counted(answers['answers'], 'answer')} context only, as the "
            "chat template renders answers differently once they are history. data.split_turns=true learns each "
            f"after its own prompt, {_split_turns_text(source)}"
        )
    if answers["reasoning_left_out"]:
        texts.append(
            f"source {name}: the reasoning before {counted(answers['reasoning_left_out'], 'answer')} is not in the "
            "text that is trained on: either data.thinking=off drops it, or the chat template drops it from history "
            "(data.split_turns=true keeps it)"
        )
    if answers[THINKING_OFF]:
        texts.append(
            f"source {name}: {answers[THINKING_OFF]:,} of {counted(source['rows'], 'conversation')} trained with "
            "thinking turned off, as they have no reasoning; the chat template's default is on. Turn thinking off "
            "when you use the model, or make that the default of chat, evaluation and servers: "
            "model.chat_template_args.enable_thinking=false"
        )
    if answers[SPLIT_TOKENS] * 100.0 > COST_PCT * source["tokens"]:
        share = 100.0 * answers[SPLIT_TOKENS] / source["tokens"]
        texts.append(
            f"source {name}: {share:.0f} % of its tokens are in separate documents for earlier answers, which the "
            "chat template renders differently once they are history. data.split_turns=false saves them, and learns "
            "only the last answers"
        )
    return texts


def _split_turns_text(source: dict[str, Any]) -> str:
    """Return what data.split_turns=true would cost, where it could be estimated (turns.py)."""
    found = source["split_turns"]
    if not found:
        return "for more tokens"
    more = f"{counted(found['tokens'], 'token')} more, in {counted(found['documents'], 'further document')}"
    return (
        f"for about {found['factor']:.2f} times the tokens of this source ({more}; estimated from "
        f"{counted(found['conversations'], 'conversation')})"
    )
