"""Tasks with choices: ARC, OpenBookQA, HellaSwag, PIQA, BoolQ and MMLU.

Each row becomes an `Item`; `DESIGNS` has the function and the place of the rows. Prompts of format "completion" are
those of lm-evaluation-harness, character by character, drawn shots included. In a chat the options have letters.
"""

import math
import re
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from sftkit.data.hygiene import SHORT_GRAM, words_of
from sftkit.errors import ConfigError, DataError
from sftkit.evals.results import Choices, ExampleScores, Likelihoods, Message, Task, each
from sftkit.evals.tasks import data

CHOICE_LETTERS = string.ascii_uppercase
ASK_FOR_LETTER = "Answer with the letter of the right option only."
MMLU_PREAMBLE = "The following are multiple choice questions (with answers) about {topic}.\n\n"


class Item(NamedTuple):
    """One row in the terms that all tasks with choices share."""

    prompt: str
    "format completion: the text that one of the choices continues, after a space"
    question: str
    "format chat: the text above the lettered options"
    choices: Sequence[str]
    gold: tuple[int, ...]
    "indices of the right ones"


# ---- from a row to an item -------------------------------------------------------------------------------------------


def science(row: data.CheckedRow, question: str, form: str = "{}") -> Item:
    """Return a row of ARC or OpenBookQA as an item. Its `choices` are {"text": [...], "label": [...]}, and its
    `answerKey` is one of the labels (A to E, or 1 to 5)."""
    options = row["choices"]
    if not isinstance(options, dict) or not {"text", "label"} <= set(options):
        raise DataError(f'{row.where}: column "choices": {options!r} is not {{"text": [...], "label": [...]}}')
    texts = options["text"]
    labels = options["label"]
    if (answer := row.text("answerKey").strip()) not in labels or len(labels) != len(texts):
        raise DataError(f'{row.where}: column "answerKey": {answer!r} is not one of the labels {labels}')
    return Item(form.format(question), question, texts, (labels.index(answer),))


def arc(row: data.CheckedRow, format: str) -> Item:
    """Return a row of ARC as an item."""
    return science(row, row.text("question"), "Question: {}\nAnswer:")


def openbookqa(row: data.CheckedRow, format: str) -> Item:
    """Return a row of OpenBookQA as an item."""
    return science(row, row.text("question_stem"))


def hellaswag(row: data.CheckedRow, format: str) -> Item:
    """Return a row of HellaSwag as an item: four endings of a text."""
    context = f"{row.text('ctx_a')} {row.text('ctx_b').capitalize()}"
    texts = [f"{row.text('activity_label')}: {context}", *row.texts("endings")]
    # Without the brackets that WikiHow's markup left, exactly as lm-evaluation-harness does.
    unmarked = (re.sub(r"\[.*?\]", "", one.strip().replace(" [title]", ". ")) for one in texts)
    start, *endings = (one.replace("  ", " ") for one in unmarked)
    question = f"Which ending continues this text best?\n\n{start}"
    return Item(start, question, endings, (row.number("label", len(endings)),))


def piqa(row: data.CheckedRow, format: str) -> Item:
    """Return a row of PIQA as an item: which of two ways works."""
    goal = row.text("goal")
    ways = row.text("sol1"), row.text("sol2")
    return Item(f"Question: {goal}\nAnswer:", goal, ways, (row.number("label", 2),))


def boolq(row: data.CheckedRow, format: str) -> Item:
    """Return a row of BoolQ as an item. The answer is column `label` (0, 1) as in SuperGLUE, or `answer` (false, true)
    as in BoolQ itself."""
    question = f"{row.text('passage')}\nQuestion: {row.text('question')}?"
    column = "answer" if "answer" in row else "label"
    return Item(f"{question}\nAnswer:", question, ("no", "yes"), (row.number(column, 2),))


def mmlu(row: data.CheckedRow, format: str) -> Item:
    """Return a row of MMLU as an item. In a completion the options stand in the prompt, and a letter continues it."""
    question = row.text("question").strip()
    options = row.texts("choices")
    if len(options) != 4:
        raise DataError(f'{row.where}: column "choices": {len(options)} of them instead of four')
    lines = "".join(f"{letter}. {option}\n" for letter, option in zip(CHOICE_LETTERS, options, strict=False))
    shown = options if format == "chat" else CHOICE_LETTERS[:4]
    return Item(f"{question}\n{lines}Answer:", question, shown, (row.number("answer", 4),))


# ---- the tasks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Design:
    """The differences between tasks with choices."""

    item: Callable[[data.CheckedRow, str], Item]
    "row, format -> item"
    hub: str
    subset: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()
    "names of the rows' file; (): NAME_SPLIT"
    metric: str = "acc_norm"
    "the main metric of the task; in a chat acc, of the letter, replaces acc_norm"
    one_more: bool = False
    "lm-evaluation-harness draws one shot more than it needs, in case the example is among them"
    preamble: str = ""
    "format completion: text before the shots"


_OPENBOOKQA_FILES = ("openbookqa_test", "openbookqa_validation")
DESIGNS = {
    "arc_easy": Design(arc, "allenai/ai2_arc", "ARC-Easy"),
    "arc_challenge": Design(arc, "allenai/ai2_arc", "ARC-Challenge"),
    "openbookqa": Design(openbookqa, "allenai/openbookqa", "main", files=_OPENBOOKQA_FILES),
    "hellaswag": Design(hellaswag, "Rowan/hellaswag", split="validation", one_more=True),
    "piqa": Design(piqa, "baber/piqa", split="validation", one_more=True),
    "boolq": Design(boolq, "aps/super_glue", "boolq", "validation", metric="acc", one_more=True),
    "mmlu": Design(mmlu, "cais/mmlu", "all", metric="acc", preamble=MMLU_PREAMBLE),
}


def build(
    name: str, read: data.Read, shots: int | None, format: str, max_examples: int | None
) -> Task[Choices, Likelihoods]:
    """Return the task. `shots` None: no shots, as is lm-evaluation-harness's default."""
    design = DESIGNS[name]
    shots = shots or 0
    drawn: Sequence[Sequence[data.CheckedRow]]
    rows = read(_split(name))
    # Shots never come from the examples that are asked. Those of MMLU are of the example's subject.
    train = "dev" if name == "mmlu" else "train"
    shots_split = data.DatasetSplit((f"{name}_{train}",), design.hub, design.subset, train)
    pool = data.shot_rows(name, shots_split, read, shots, spare=int(design.one_more))
    if name == "mmlu":
        chosen = _spread_over_subjects(rows, max_examples)
        of_subject = _shots_by_subject(rows, pool, shots)
        drawn = [of_subject[row.text("subject")] for row in chosen]
        settings = data.settings_of(rows, format, max_examples, shots, pool, "the subject's first ones")
        if max_examples is not None:
            settings["selection"] = f"{max_examples}, spread evenly over the subjects"
    else:
        chosen = rows[:max_examples]
        drawn = list(data.drawn_shots(pool, chosen, shots, format, one_more=design.one_more))
        settings = data.settings_of(rows, format, max_examples, shots, pool, data.DRAWN[format])
    examples = tuple(_example(name, row, of_row, format) for row, of_row in zip(chosen, drawn, strict=True))
    metric = "acc" if format == "chat" and design.metric == "acc_norm" else design.metric
    chance = sum(len(one.gold) / len(one.continuations) for one in examples) / len(examples)
    return Task(name, examples, JUDGES[metric], metric, chance, settings)


def _split(name: str) -> data.DatasetSplit:
    design = DESIGNS[name]
    return data.DatasetSplit(design.files or (f"{name}_{design.split}",), design.hub, design.subset, design.split)


def question_texts(name: str, read: data.Read) -> Iterator[tuple[str, str]]:
    """Yield question and right answer of each row. A question too short to be recognised has its options with it."""
    for row in read(_split(name)):
        item = DESIGNS[name].item(row, "chat")
        options = item.choices if len(words_of(item.question)) < SHORT_GRAM else ()
        yield " ".join([item.question, *options]), item.choices[item.gold[0]]


def _example(name: str, row: data.CheckedRow, shots: Sequence[data.CheckedRow], format: str) -> Choices:
    """Return an example. Format completion: which choice continues the prompt best; shots stand before it with their
    first right choice. Format chat: which letter the assistant answers with; shots are earlier turns."""
    design = DESIGNS[name]
    item, *shown = (design.item(one, format) for one in (row, *shots))
    prompt: str | tuple[Message, ...]
    if format == "chat":
        if len(item.choices) > len(CHOICE_LETTERS):
            raise DataError(f"{row.where}: {len(item.choices)} choices, and 26 letters for them")
        prompt = data.conversation([(_options(shot), CHOICE_LETTERS[shot.gold[0]]) for shot in shown], _options(item))
        texts = continuations = tuple(CHOICE_LETTERS[: len(item.choices)])
    else:
        preamble = design.preamble.format(topic=row.get("subject", "").replace("_", " "))
        before = "".join(f"{shot.prompt} {shot.choices[shot.gold[0]]}\n\n" for shot in shown)
        prompt = f"{preamble}{before}{item.prompt}"
        texts = tuple(item.choices)
        continuations = tuple(f" {text}" for text in texts)
    # Prompts that begin alike share the cache of that beginning: drawn shots differ, so they do not.
    alike = bool(shots) if format == "chat" else bool(design.preamble)
    return Choices(
        id=f"{name}/{row.index}",
        prompt=prompt,
        continuations=continuations,
        gold=item.gold,
        lengths=tuple(map(len, texts)),
        group=row.text("subject") if name == "mmlu" else name if alike else "",
        source=dict(row),
    )


def _options(item: Item) -> str:
    """Format the question, a line for each option, and what to answer with."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(CHOICE_LETTERS, item.choices, strict=False)]
    return "\n".join([item.question, "", *lines, "", ASK_FOR_LETTER])


def _spread_over_subjects(rows: Sequence[data.CheckedRow], max_examples: int | None) -> list[data.CheckedRow]:
    """Return the first rows of every subject, as evenly many as possible, in the order of the file."""
    seen: dict[str, count[int]] = defaultdict(count)
    # (how many of the subject came before, place in the file): sorted, it goes round the subjects.
    order = sorted((next(seen[row.text("subject")]), place) for place, row in enumerate(rows))
    return [rows[place] for place in sorted(place for _, place in order[:max_examples])]


def _shots_by_subject(
    rows: Sequence[data.CheckedRow], pool: Sequence[data.CheckedRow], shots: int
) -> dict[str, list[data.CheckedRow]]:
    """Return subject -> its first `shots` rows of the pool."""
    found: dict[str, list[data.CheckedRow]] = {row.text("subject"): [] for row in rows}
    for row in pool:
        found.setdefault(row.text("subject"), []).append(row)
    for subject in sorted({row["subject"] for row in rows}):
        if len(found[subject]) < shots:
            raise ConfigError(f"eval.shots: {shots}: {pool[0].origin} has {len(found[subject])} rows of {subject}")
    return {subject: of_subject[:shots] for subject, of_subject in found.items()}


# ---- how answers are judged ------------------------------------------------------------------------------------------


@each
def judge_acc(example: Choices, likelihoods: Likelihoods) -> ExampleScores:
    """Mark acc: 1 if a right choice is the most likely one, else 0."""
    return {"acc": _is_right(example, likelihoods.sums)}


@each
def judge_acc_norm(example: Choices, likelihoods: Likelihoods) -> ExampleScores:
    """Mark acc, and acc_norm: the same with log-likelihoods divided by the characters of their choices."""
    sums = zip(likelihoods.sums, example.lengths, strict=True)
    normed = [nats / length if length else -math.inf for nats, length in sums]
    return {"acc": _is_right(example, likelihoods.sums), "acc_norm": _is_right(example, normed)}


JUDGES = {"acc": judge_acc, "acc_norm": judge_acc_norm}
"Main metric of a task -> its judge."


def _is_right(example: Choices, scores: Sequence[float]) -> float:
    """Return 1.0 if the highest score, the first one of equals, is that of a right choice, else 0.0."""
    return float(max(range(len(scores)), key=scores.__getitem__) in example.gold)
