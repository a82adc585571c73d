"""IFEval: 541 prompts with instructions that a program can check, such as "no commas" or "at least 300 words"."""

from __future__ import annotations

from typing import Any

from sftkit.config.commands import install
from sftkit.errors import ConfigError, DataError
from sftkit.evals.task import ExampleScores, Question, Task, each
from sftkit.evals.tasks import choices
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit, Read
from sftkit.evals.tasks.ifeval_rules import LANGUAGE, RULES, detects_languages
from sftkit.generation.repl import Answer

PROMPTS = DatasetSplit(("ifeval_train", "ifeval_prompts", "ifeval"), "google/IFEval", split="train")
MAX_NEW_TOKENS = 1280


def build(read: Read, shots: int | None, format: str, max_examples: int | None) -> Task[Question, Answer]:
    """Return the task: the prompts as they are (completion) or as user messages (chat).

    Without the package langdetect, prompts with an instruction about the language are left out, and settings
    say how many.
    """
    if shots:
        raise ConfigError(f"eval.shots: {shots}: ifeval has no few-shot examples; set 0 or null")
    rows = read(PROMPTS)
    rules_of = [_rules(row) for row in rows]
    # Left out whole, not judged by the other rules: a prompt counts as followed only if all its rules are.
    languages = detects_languages()
    kept = [i for i, rules in enumerate(rules_of) if languages or not any(name in LANGUAGE for name, _ in rules)]
    if not kept:
        raise ConfigError(f"{rows[0].origin}: every prompt has a rule about its language: {install('sftkit[eval]')}")
    examples = tuple(_question(rows[i], rules_of[i], format) for i in kept[:max_examples])
    settings = choices.settings_of(rows, format, max_examples) | {
        "languages": "langdetect, seed 0" if languages else "not checked: langdetect is not installed",
        "left_out": len(rows) - len(kept),
        "sentences": "Punkt with a fixed list of abbreviations",
    }
    return Task("ifeval", examples, judge, "prompt_strict", chance=0.0, settings=settings)


def _rules(row: CheckedRow) -> list[tuple[str, dict[str, Any]]]:
    """Return (instruction, its arguments) of a row; each is tried once, so that a bad row is an error
    before anything is asked."""
    names, arguments = row.texts("instruction_id_list"), row["kwargs"]
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise DataError(f'{row.where}: column "kwargs": not one entry for each of instruction_id_list')
    rules = []
    for name, given in zip(names, arguments, strict=True):
        if name not in RULES:
            raise DataError(f'{row.where}: column "instruction_id_list": "{name}" is not one of {", ".join(RULES)}')
        # Files and the hub have every argument in every entry, null where it is another rule's.
        named = {key: value for key, value in (given or {}).items() if value is not None}
        try:
            name in LANGUAGE or RULES[name]("A text.", **named)
        except Exception as error:  # missing or unknown arguments, of another type, no regular expression
            raise DataError(f'{row.where}: column "kwargs": {named} does not fit {name}: {error}') from None
        rules.append((name, named))
    return rules


def _question(row: CheckedRow, rules: list[tuple[str, dict[str, Any]]], format: str) -> Question:
    prompt = row.text("prompt")
    return Question(
        id=f"ifeval/{row['key']}",
        prompt=({"role": "user", "content": prompt},) if format == "chat" else prompt,
        max_new_tokens=MAX_NEW_TOKENS,
        target=rules,
        source={"key": row["key"], "prompt": prompt, "rules": rules},
    )


@each
def judge(question: Question, answer: Answer) -> ExampleScores:
    """Mark prompt_*: all instructions are followed; inst_*: each one; strict: as answered,
    loose: in some trimmed form."""
    strict = [float(_follows(answer.text, *rule)) for rule in question.target]
    forms = loose_forms(answer.text)
    loose = [float(any(_follows(form, *rule) for form in forms)) for rule in question.target]
    return {"prompt_strict": min(strict), "inst_strict": strict, "prompt_loose": min(loose), "inst_loose": loose}


def _follows(answer: str, name: str, arguments: dict[str, Any]) -> bool:
    """Return whether an answer that is not empty follows one instruction."""
    return bool(answer.strip() and RULES[name](answer, **arguments))


def loose_forms(answer: str) -> list[str]:
    """Return the answer whole, without its first line, its last line, both; each with and without asterisks."""
    lines = answer.split("\n")
    forms = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*forms, *(form.replace("*", "") for form in forms)]
