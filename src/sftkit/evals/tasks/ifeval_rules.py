"""The 25 rules of IFEval: whether an answer does what one instruction says, as Google's checks decide it.

Each rule takes the answer and the arguments of the data set's column `kwargs`, under the names that they have there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sftkit.evals.tasks import ifeval_words

POSTSCRIPTS = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _compare(count: int, relation: str, threshold: int) -> bool:
    """Return whether a count is as asked; raises ValueError for an unknown relation."""
    if relation == "less than":
        return count < threshold
    if relation == "at least":
        return count >= threshold
    raise ValueError(f'relation "{relation}" is not one of "less than", "at least"')


# ---- keywords and letters --------------------------------------------------------------------------------------------


def existence(answer: str, keywords: Sequence[str]) -> bool:
    """Return whether every keyword (a regular expression) occurs."""
    return all(re.search(keyword, answer, re.IGNORECASE) for keyword in keywords)


def frequency(answer: str, keyword: str, frequency: int, relation: str) -> bool:
    """Return whether a keyword occurs as often as asked."""
    return _compare(len(re.findall(keyword.strip(), answer, re.IGNORECASE)), relation, frequency)


def forbidden_words(answer: str, forbidden_words: Sequence[str]) -> bool:
    """Return whether none of the words occurs."""
    return not any(re.search(rf"\b{word}\b", answer, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(answer: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Return whether a letter occurs as often as asked. Two rows ask for a sign (#, !), which is counted; Google's
    check draws a letter at random for them."""
    return _compare(answer.lower().count(letter.strip().lower()), let_relation, let_frequency)


# ---- language --------------------------------------------------------------------------------------------------------


def detects_languages() -> bool:
    """Return whether the package that decides the rules about a language is installed."""
    return find_spec("langdetect") is not None


def response_language(answer: str, language: str) -> bool:
    """Return whether the answer is in a language. A text without any letter counts as
    following, as in Google's check."""
    langdetect = import_module("langdetect")
    # global in langdetect, and left set
    langdetect.DetectorFactory.seed = 0  # it samples
    try:
        return bool(langdetect.detect(answer) == language)
    except langdetect.LangDetectException:
        return True


def english_capital(answer: str) -> bool:
    """Return whether the answer is English and all in capital letters."""
    return answer.isupper() and response_language(answer, "en")


def english_lowercase(answer: str) -> bool:
    """Return whether the answer is English and all in lower case."""
    return answer.islower() and response_language(answer, "en")


# ---- length ----------------------------------------------------------------------------------------------------------


def number_sentences(answer: str, num_sentences: int, relation: str) -> bool:
    """Return whether there are as many sentences as asked."""
    return _compare(len(ifeval_words.sentences(answer)), relation, num_sentences)


def number_words(answer: str, num_words: int, relation: str) -> bool:
    """Return whether there are as many words as asked."""
    return _compare(ifeval_words.words(answer), relation, num_words)


def capital_word_frequency(answer: str, capital_frequency: int, capital_relation: str) -> bool:
    """Return whether there are as many words in capital letters as asked."""
    return _compare(ifeval_words.capital_words(answer), capital_relation, capital_frequency)


def number_paragraphs(answer: str, num_paragraphs: int) -> bool:
    """Return whether there are `num_paragraphs` paragraphs between ***; none in the middle may be empty."""
    paragraphs = [part.strip() for part in re.split(r"\s?\*\*\*\s?", answer)]
    if not all(paragraphs[1:-1]):
        return False
    # A lone empty paragraph is the first and the last one, and is taken off once.
    return len(paragraphs) - sum(not paragraphs[i] for i in {0, len(paragraphs) - 1}) == num_paragraphs


def nth_paragraph_first_word(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return whether there are `num_paragraphs` paragraphs between empty lines, of which the nth begins with a word.
    Empty ones are not counted, but do count for which one is the nth."""
    paragraphs = [part.strip() for part in answer.split("\n\n")]
    count = sum(map(bool, paragraphs))
    if nth_paragraph > count or not paragraphs[nth_paragraph - 1]:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return count == num_paragraphs and re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


# ---- content and format ----------------------------------------------------------------------------------------------


def number_placeholders(answer: str, num_placeholders: int) -> bool:
    """Return whether there are at least so many [placeholders]."""
    return len(re.findall(r"\[.*?\]", answer)) >= num_placeholders


def postscript(answer: str, postscript_marker: str) -> bool:
    """Return whether a line has the marker of a postscript."""
    marker = postscript_marker.strip()
    pattern = POSTSCRIPTS.get(marker, rf"\s*{marker.lower()}.*$")
    return re.search(pattern, answer.lower(), re.MULTILINE) is not None


def number_bullet_lists(answer: str, num_bullets: int) -> bool:
    """Return whether there are exactly so many bullets, * or -."""
    stars = re.findall(r"^\s*\*[^\*].*$", answer, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", answer, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def constrained_response(answer: str) -> bool:
    """Return whether one of the three allowed answers occurs."""
    return any(option in answer for option in OPTIONS)


def number_highlighted_sections(answer: str, num_highlights: int) -> bool:
    """Return whether there are at least so many *sections* and **sections**; the latter are found by both patterns
    where the former leaves them whole."""
    single = [found.strip("*") for found in re.findall(r"\*[^\n\*]*\*", answer)]
    double = [found.removeprefix("**").removesuffix("**") for found in re.findall(r"\*\*[^\n\*]*\*\*", answer)]
    return sum(bool(text.strip()) for text in single + double) >= num_highlights


def multiple_sections(answer: str, section_spliter: str, num_sections: int) -> bool:
    """Return whether there are at least so many sections that begin with the separator and a number."""
    return len(re.split(rf"\s?{section_spliter.strip()}\s?\d+\s?", answer)) - 1 >= num_sections


def json_format(answer: str) -> bool:
    """Return whether the answer is JSON, perhaps in a fenced block."""
    text = answer.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(answer: str) -> bool:
    """Return whether a <<title>> occurs."""
    return any(found.lstrip("<").rstrip(">").strip() for found in re.findall(r"<<[^\n]+>>", answer))


# ---- the answer as a whole -------------------------------------------------------------------------------------------


def two_responses(answer: str) -> bool:
    """Return whether the answer is two different texts with ****** between them; empty ones
    may only stand at the ends."""
    parts = [part.strip() for part in answer.split("******")]
    texts = [part for part in parts if part]
    return all(parts[1:-1]) and len(texts) == 2 and texts[0] != texts[1]


def repeat_prompt(answer: str, prompt_to_repeat: str) -> bool:
    """Return whether the answer begins with the prompt."""
    return answer.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(answer: str, end_phrase: str) -> bool:
    """Return whether the answer ends with a phrase."""
    return answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def no_comma(answer: str) -> bool:
    """Return whether there is no comma."""
    return "," not in answer


def quotation(answer: str) -> bool:
    """Return whether the answer stands in double quotes."""
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


LANGUAGE = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
"Rules that need langdetect."
_BY_GROUP: dict[str, tuple[Callable[..., Any], ...]] = {
    "keywords": (existence, frequency, forbidden_words, letter_frequency),
    "language": (response_language,),
    "length_constraints": (number_sentences, number_paragraphs, number_words, nth_paragraph_first_word),
    "detectable_content": (number_placeholders, postscript),
    "detectable_format": (
        *(number_bullet_lists, constrained_response, number_highlighted_sections),
        *(multiple_sections, json_format, title),
    ),
    "combination": (two_responses, repeat_prompt),
    "startend": (end_checker, quotation),
    "change_case": (capital_word_frequency, english_capital, english_lowercase),
    "punctuation": (no_comma,),
}
RULES = {f"{group}:{rule.__name__}": rule for group, rules in _BY_GROUP.items() for rule in rules}
"Instruction of the data set -> its rule."
