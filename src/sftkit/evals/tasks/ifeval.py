"""IFEval: 541 prompts with instructions that a program can check, such as "no commas" or "at least 300 words".

`RULES` decide whether an answer follows an instruction, as Google's checks do. Each takes the answer and the arguments
of the data set's column `kwargs`, under the names that they have there.

Sentences and words are those of NLTK's Punkt and Treebank tokenizers. Punkt gets a fixed list of abbreviations and of
words that begin sentences, instead of a trained model that would have to be downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from sftkit.config.commands import install
from sftkit.errors import ConfigError, DataError
from sftkit.evals.task import ExampleScores, Question, Task, each
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit, Read, settings_of
from sftkit.generation.repl import Answer

PROMPTS = DatasetSplit(("ifeval_train", "ifeval_prompts", "ifeval"), "google/IFEval", split="train")
MAX_NEW_TOKENS = 1280


def build(name: str, read: Read, shots: int | None, format: str, max_examples: int | None) -> Task[Question, Answer]:
    """Return the task: the prompts as they are (completion) or as user messages (chat)."""
    if missing := [package for package in ("langdetect", "nltk") if find_spec(package) is None]:
        raise ConfigError(f'eval.tasks: "{name}" needs {" and ".join(missing)}: {install("sftkit[eval]")}')
    rows = read(PROMPTS)
    examples = tuple(_question(row, _rules(row), format) for row in rows)[:max_examples]
    settings = settings_of(rows, format, max_examples) | {
        "languages": "langdetect, seed 0",
        "sentences": "Punkt with a fixed list of abbreviations",
    }
    return Task(name, examples, judge, "prompt_strict", chance=0.0, settings=settings)


def _rules(row: CheckedRow) -> list[tuple[str, dict[str, Any]]]:
    """Return (instruction, its arguments) of a row; each is tried once, so that a bad row is an error before anything
    is asked."""
    names = row.texts("instruction_id_list")
    arguments = row["kwargs"]
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise DataError(f'{row.where}: column "kwargs": not one entry for each of instruction_id_list')
    rules = []
    for name, given in zip(names, arguments, strict=True):
        if name not in RULES:
            raise DataError(f'{row.where}: column "instruction_id_list": "{name}" is not one of {", ".join(RULES)}')
        # Files and the hub have every argument in every entry, null if it belongs to another rule.
        named = {key: value for key, value in (given or {}).items() if value is not None}
        try:
            RULES[name]("A text.", **named)
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
    """Mark prompt_*: all instructions are followed; inst_*: each one; strict: as answered; loose: in some trimmed
    form."""
    # The answer whole, without its first line, its last line, both; each with and without asterisks.
    lines = answer.text.split("\n")
    forms = [answer.text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    forms += [form.replace("*", "") for form in forms]
    strict = [float(_follows(answer.text, *rule)) for rule in question.target]
    loose = [float(any(_follows(form, *rule) for form in forms)) for rule in question.target]
    return {"prompt_strict": min(strict), "inst_strict": strict, "prompt_loose": min(loose), "inst_loose": loose}


def _follows(answer: str, name: str, arguments: dict[str, Any]) -> bool:
    """Return whether an answer that is not empty follows one instruction."""
    return bool(answer.strip() and RULES[name](answer, **arguments))


# ---- rules -----------------------------------------------------------------------------------------------------------

POSTSCRIPTS = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _compare(count: int, relation: str, threshold: int) -> bool:
    """Return whether a count is as asked; raises ValueError for an unknown relation."""
    if relation == "less than":
        return count < threshold
    if relation == "at least":
        return count >= threshold
    raise ValueError(f'relation "{relation}" is not one of "less than", "at least"')


def _count(pattern: str, answer: str) -> int:
    return len(re.findall(pattern, answer, re.IGNORECASE))


def _is_language(answer: str, language: str) -> bool:
    """Return whether the answer is in a language; a text without any letter is, as in Google's check."""
    import langdetect

    langdetect.DetectorFactory.seed = 0  # global in langdetect, which samples
    try:
        return bool(langdetect.detect(answer) == language)
    except langdetect.LangDetectException:
        return True


def _paragraphs(answer: str, num_paragraphs: int) -> bool:
    """Return whether there are `num_paragraphs` paragraphs between ***; none in the middle may be empty."""
    paragraphs = [part.strip() for part in re.split(r"\s?\*\*\*\s?", answer)]
    # A lone empty paragraph is the first and the last one, and is taken off once.
    empty_ends = sum(not paragraphs[i] for i in {0, len(paragraphs) - 1})
    return all(paragraphs[1:-1]) and len(paragraphs) - empty_ends == num_paragraphs


def _nth_paragraph_first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return whether there are `num_paragraphs` paragraphs between empty lines, of which the nth begins with a word.
    Empty ones are not counted, but do count for which one is the nth."""
    paragraphs = [part.strip() for part in answer.split("\n\n")]
    count = sum(map(bool, paragraphs))
    if nth_paragraph > count or not paragraphs[nth_paragraph - 1]:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return count == num_paragraphs and re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _postscript(answer: str, postscript_marker: str) -> bool:
    """Return whether a line has the marker of a postscript."""
    marker = postscript_marker.strip()
    pattern = POSTSCRIPTS.get(marker, rf"\s*{marker.lower()}.*$")
    return re.search(pattern, answer.lower(), re.MULTILINE) is not None


def _bullets(answer: str, num_bullets: int) -> bool:
    """Return whether there are exactly `num_bullets` bullets, * or -."""
    stars = re.findall(r"^\s*\*[^\*].*$", answer, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", answer, re.MULTILINE)) == num_bullets


def _highlights(answer: str, num_highlights: int) -> bool:
    """Return whether there are at least `num_highlights` *sections* and **sections**; both patterns find the latter
    where the former leaves them whole."""
    single = [found.strip("*") for found in re.findall(r"\*[^\n\*]*\*", answer)]
    double = [found.removeprefix("**").removesuffix("**") for found in re.findall(r"\*\*[^\n\*]*\*\*", answer)]
    return sum(bool(text.strip()) for text in single + double) >= num_highlights


def _json(answer: str) -> bool:
    """Return whether the answer is JSON, perhaps in a fenced block."""
    text = answer.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(answer: str) -> bool:
    """Return whether the answer is two different texts with ****** between them; empty ones may stand at the ends."""
    parts = [part.strip() for part in answer.split("******")]
    texts = [part for part in parts if part]
    return all(parts[1:-1]) and len(texts) == 2 and texts[0] != texts[1]


RULES: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda answer, keywords: all(_count(keyword, answer) for keyword in keywords),
    "keywords:frequency": lambda answer, keyword, frequency, relation: _compare(
        _count(keyword.strip(), answer), relation, frequency
    ),
    "keywords:forbidden_words": lambda answer, forbidden_words: (
        not any(_count(rf"\b{word}\b", answer) for word in forbidden_words)
    ),
    # Two rows ask for a sign (#, !), which is counted; Google's check draws a letter at random for them.
    "keywords:letter_frequency": lambda answer, letter, let_frequency, let_relation: _compare(
        answer.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "language:response_language": _is_language,
    "length_constraints:number_sentences": lambda answer, num_sentences, relation: _compare(
        len(sentences(answer)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda answer, num_words, relation: _compare(
        _count(r"\w+", answer), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda answer, num_placeholders: (
        _count(r"\[.*?\]", answer) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda answer: any(option in answer for option in OPTIONS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda answer, section_spliter, num_sections: (
        len(re.split(rf"\s?{section_spliter.strip()}\s?\d+\s?", answer)) - 1 >= num_sections
    ),
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda answer: any(
        found.lstrip("<").rstrip(">").strip() for found in re.findall(r"<<[^\n]+>>", answer)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda answer, prompt_to_repeat: (
        answer.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda answer, end_phrase: (
        answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda answer: re.fullmatch(r'\s*".*"\s*', answer, re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda answer, capital_frequency, capital_relation: _compare(
        capital_words(answer), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda answer: answer.isupper() and _is_language(answer, "en"),
    "change_case:english_lowercase": lambda answer: answer.islower() and _is_language(answer, "en"),
    "punctuation:no_comma": lambda answer: "," not in answer,
}
"Instruction of the data set -> whether an answer follows it."


# ---- sentences and words ---------------------------------------------------------------------------------------------

_ABBREVIATIONS = (
    "adm al apr approx aug ave bros capt cf cmdr co col corp ct dec dept dr e.g esq est etc feb fig fri ft gen gov "
    "hon i.e inc jan jr lt ltd maj mar messrs mon mr mrs ms mt no nov oct p.m a.m ph.d pp prof rep rev sat sen sep "
    "sept sgt sr st sun thu thur thurs tue tues u.k u.n u.s u.s.a viz vol vs wed d.c b.c a.d ga fla ill mass mich "
    "minn pa va wash calif conn mo okla ore tenn tex vt wis n.y n.j n.c s.c"
)
ABBREVIATIONS = frozenset(_ABBREVIATIONS.split())
"In lower case, without the last period."
_STARTERS = (
    "a about after all although an and another any are as at because before being both but by can could despite did "
    "do does during each either every finally first for from given had has have he her here hers his how however i "
    "if in instead is it its just last let many maybe more most much my never next no not now of on once one only or "
    "other our perhaps please second should since so some such that the their them then there therefore these they "
    "this those though through thus to under unless until was we well were what when where whether which while who "
    "whose why will with without would yes yet you your"
)
STARTERS = frozenset(_STARTERS.split())
"Words that are written in lower case inside a sentence: with a capital letter after an abbreviation they begin one."


@cache
def _tokenizers() -> tuple[Any, Any]:
    """Return NLTK's tokenizers of sentences and of words."""
    from nltk.tokenize import NLTKWordTokenizer, punkt

    parameters = punkt.PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS)
    for word in STARTERS:
        # Private in NLTK: the word was seen in lower case inside a sentence.
        parameters.add_ortho_context(word, punkt._ORTHO_MID_LC)
    return punkt.PunktSentenceTokenizer(parameters), NLTKWordTokenizer()


def sentences(text: str) -> list[str]:
    """Return the sentences of an English text, with the quotes and brackets that close them."""
    return list(_tokenizers()[0].tokenize(text))


def capital_words(text: str) -> int:
    """Count Treebank words all of whose letters are capital: NASA and I, and both parts of DON'T."""
    words = _tokenizers()[1]
    return sum(word.isupper() for sentence in sentences(text) for word in words.tokenize(sentence))
