"""GSM8K: grade-school word problems, answered in free text that ends in a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sftkit.errors import DataError
from sftkit.evals.task import ExampleScores, Question, Task, each
from sftkit.evals.tasks import choices
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit, Read
from sftkit.generation.repl import Answer

HUB = "openai/gsm8k"
TEST = DatasetSplit(("gsm8k_test",), HUB, "main", "test")
TRAIN = DatasetSplit(("gsm8k_train",), HUB, "main", "train")
SHOTS = 5
"Few-shot examples of format completion; a chat has none."
MAX_NEW_TOKENS = {"completion": 256, "chat": 512}
STOP = ("Question:", "</s>", "<|im_end|>")

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?[0-9][0-9,]*(?:\.[0-9]+)?")
"A sign after a digit, letter or bracket is a minus between two numbers or a hyphen."


def build(read: Read, shots: int | None, format: str, max_examples: int | None) -> Task[Question, Answer]:
    """Return the task: format completion is lm-evaluation-harness's gsm8k; chat asks the question and
    reads the answer's number."""
    in_chat = format == "chat"
    shots = (0 if in_chat else SHOTS) if shots is None else shots
    rows = read(TEST)
    pool = choices.shot_rows("gsm8k", TRAIN, read, shots)
    chosen = rows[:max_examples]
    drawn = choices.drawn_shots(pool, chosen, shots, format)
    examples = tuple(_question(row, of_row, format) for row, of_row in zip(chosen, drawn, strict=True))
    settings = choices.settings_of(rows, format, max_examples)
    settings |= choices.shot_settings(shots, pool, choices.DRAWN[format])
    return Task("gsm8k", examples, judge_chat if in_chat else judge, "exact_match", chance=0.0, settings=settings)


def _question(row: CheckedRow, shots: Sequence[CheckedRow], format: str) -> Question:
    prompt: Any
    # Before the model is asked: a row without a number could never be right.
    if parse_number(row.text("answer")) is None:
        raise DataError(f'{row.where}: column "answer": there is no number in {row["answer"]!r}')
    if format == "chat":
        turns = [(shot.text("question"), shot.text("answer")) for shot in shots]
        prompt = choices.conversation(turns, row.text("question"))
    else:
        prompt = "".join(f"{_question_text(shot)} {shot.text('answer')}\n\n" for shot in shots) + _question_text(row)
    return Question(
        id=f"gsm8k/{row.index}",
        prompt=prompt,
        max_new_tokens=MAX_NEW_TOKENS[format],
        stop=() if format == "chat" else STOP,
        target=row.text("answer"),
        group="gsm8k" if format == "chat" and shots else "",
        source=dict(row),
    )


def _question_text(row: CheckedRow) -> str:
    return f"Question: {row.text('question')}\nAnswer:"


# ---- how answers are judged ------------------------------------------------------------------------------------------


@each
def judge(question: Question, answer: Answer) -> ExampleScores:
    """Mark exact_match: the number after ####; and exact_match_flexible: the last number. As
    lm-evaluation-harness reads them."""
    found, right = {"exact_match": strict, "exact_match_flexible": flexible}, _normal(question.target)
    return {metric: float(_normal(number_of(answer.text)) == right) for metric, number_of in found.items()}


@each
def judge_chat(question: Question, answer: Answer) -> ExampleScores:
    """Mark exact_match: the number after ####, or the last number if there is no ####, has the right value."""
    return {"exact_match": float(parse_number(answer.text) == parse_number(question.target))}


def strict(text: str) -> str:
    """Return what lm-evaluation-harness's filter strict-match takes from an answer."""
    found = STRICT.search(text)
    return found[1].strip() if found else "[invalid]"


def flexible(text: str) -> str:
    """Return what its filter flexible-extract takes."""
    matches = FLEXIBLE.findall(text)
    return next(part for part in matches[-1] if part).strip() if matches else "[invalid]"


def _normal(text: str) -> str:
    """Return a text as its exact_match compares it: no commas, no $, nothing before the marker,
    no full stop at the end."""
    for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(ignored, "", text)
    return text.lower()


def parse_number(text: str) -> float | None:
    """Return the value of the number after the last ####, or else of the last number; None if there is none."""
    _, marker, after = text.rpartition("####")
    marked = NUMBER.search(after) if marker else None
    numbers = [marked[0]] if marked else NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("$", "")) if numbers else None
