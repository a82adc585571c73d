"""Tasks answered in free text: GSM8K, school problems whose answer ends in a number, and the built-in families."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from sftkit.data.demo import builtin
from sftkit.errors import DataError
from sftkit.evals.results import ExampleScores, Question, Task, each
from sftkit.evals.tasks import data
from sftkit.generation.repl import Answer

GSM8K_TEST = data.DatasetSplit(("gsm8k_test",), "openai/gsm8k", "main", "test")
GSM8K_TRAIN = data.DatasetSplit(("gsm8k_train",), "openai/gsm8k", "main", "train")
SHOTS = {"completion": 5, "chat": 0}
MAX_NEW_TOKENS = {"completion": 256, "chat": 512, "families": 32}
STOP = ("Question:", "</s>", "<|im_end|>")

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?[0-9][0-9,]*(?:\.[0-9]+)?")
"A sign after a digit, letter or bracket is a minus between two numbers or a hyphen."


def build(
    name: str, read: data.Read, shots: int | None, format: str, max_examples: int | None
) -> Task[Question, Answer]:
    """Return a task. GSM8K: format completion is lm-evaluation-harness's gsm8k; chat asks the question and reads the
    answer's number. families: always a chat, without shots; `max_examples` are of each family."""
    if name == "families":
        about = {"shots": 0, "format": "chat", "split": "heldout", "data": "builtin:tasks"}
        return Task(name, heldout(max_examples), judge_families, metric="acc", chance=0.0, settings=about)
    shots = SHOTS[format] if shots is None else shots
    rows = read(GSM8K_TEST)
    pool = data.shot_rows(name, GSM8K_TRAIN, read, shots)
    chosen = rows[:max_examples]
    drawn = data.drawn_shots(pool, chosen, shots, format)
    examples = tuple(_question(row, of_row, format) for row, of_row in zip(chosen, drawn, strict=True))
    settings = data.settings_of(rows, format, max_examples, shots, pool, data.DRAWN[format])
    return Task(name, examples, judge_chat if format == "chat" else judge, "exact_match", 0.0, settings)


def question_texts(name: str, read: data.Read) -> Iterator[tuple[str, str]]:
    """Yield question and answer of each row of GSM8K."""
    yield from ((row.text("question"), row.text("answer")) for row in read(GSM8K_TEST))


def heldout(max_per_family: int | None = None) -> tuple[Question, ...]:
    """Return the first `max_per_family` held-out instances of each family (None: all), always the same ones:
    conversations that wait for the assistant. The target is the one right answer; `source` names the family."""
    by_family: dict[str, list[builtin.TaskConversation]] = defaultdict(list)
    for task in builtin.tasks("heldout"):
        by_family[task.family].append(task)
    chosen = [task for family in builtin.FAMILIES for task in by_family[family][:max_per_family]]
    return tuple(
        Question(
            id=f"{task.family}-{i}",
            prompt=task.messages[:-1],
            max_new_tokens=MAX_NEW_TOKENS["families"],
            target=task.answer,
            source={"family": task.family},
        )
        for i, task in enumerate(chosen)
    )


def _question(row: data.CheckedRow, shots: Sequence[data.CheckedRow], format: str) -> Question:
    """Return a problem of GSM8K."""
    prompt: Any
    # Before the model is asked: a row without a number could never be right.
    if parse_number(row.text("answer")) is None:
        raise DataError(f'{row.where}: column "answer": there is no number in {row["answer"]!r}')
    shown = [(shot.text("question"), shot.text("answer")) for shot in shots]
    if format == "chat":
        prompt = data.conversation(shown, row.text("question"))
    else:
        before = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in shown)
        prompt = f"{before}Question: {row.text('question')}\nAnswer:"
    return Question(
        id=f"gsm8k/{row.index}",
        prompt=prompt,
        max_new_tokens=MAX_NEW_TOKENS[format],
        stop=() if format == "chat" else STOP,
        target=row.text("answer"),
        group="gsm8k" if format == "chat" and shots else "",
        source=dict(row),
    )


# ---- how answers are judged ------------------------------------------------------------------------------------------


@each
def judge_families(question: Question, answer: Answer) -> ExampleScores:
    """Mark acc: 1 for the right answer, whitespace around it aside."""
    return {"acc": float(answer.text.strip() == question.target)}


@each
def judge(question: Question, answer: Answer) -> ExampleScores:
    """Mark exact_match: the number after ####; and exact_match_flexible: the last number. As lm-evaluation-harness's
    filters strict-match and flexible-extract read them."""
    marked = STRICT.search(answer.text)
    numbers = FLEXIBLE.findall(answer.text)
    strict = marked[1] if marked else "[invalid]"
    flexible = next(part for part in numbers[-1] if part) if numbers else "[invalid]"
    right = _normal(question.target)
    found = {"exact_match": strict, "exact_match_flexible": flexible}
    return {metric: float(_normal(text.strip()) == right) for metric, text in found.items()}


@each
def judge_chat(question: Question, answer: Answer) -> ExampleScores:
    """Mark exact_match: the number after ####, or the last number if there is no ####, has the right value."""
    return {"exact_match": float(parse_number(answer.text) == parse_number(question.target))}


def _normal(text: str) -> str:
    """Return a text as lm-evaluation-harness's exact_match compares it: no commas, no $, nothing before the marker, no
    full stop at the end."""
    for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(ignored, "", text)
    return text.lower()


def parse_number(text: str) -> float | None:
    """Return the value of the number after the last ####, or else of the last number; None if there is none."""
    _, marker, after = text.rpartition("####")
    marked = NUMBER.search(after) if marker else None
    numbers = [marked[0]] if marked else NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("$", "")) if numbers else None
