"""IFEval: 541 prompts with instructions that a program can check, such as "no commas" or "at least 300 words".

`RULES` are its 25 rules: whether an answer does what one instruction says, as Google's checks decide it. Each takes the
answer and the arguments of the data set's column `kwargs`, under the names that they have there.

Sentences and words are those of NLTK's Punkt and Treebank tokenizers, without their data: sentences follow Kiss and
Strunk's Punkt with a fixed list of abbreviations and of words that begin sentences, where NLTK reads a trained model
that it would have to download; words follow Robert MacIntyre's Treebank rules as NLTK has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from sftkit.config.commands import install
from sftkit.errors import ConfigError, DataError
from sftkit.evals.task import ExampleScores, Question, Task, each
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit, Read, settings_of
from sftkit.generation.repl import Answer

PROMPTS = DatasetSplit(("ifeval_train", "ifeval_prompts", "ifeval"), "google/IFEval", split="train")
MAX_NEW_TOKENS = 1280


def build(name: str, read: Read, shots: int | None, format: str, max_examples: int | None) -> Task[Question, Answer]:
    """Return the task: the prompts as they are (completion) or as user messages (chat).

    Without the package langdetect, prompts with an instruction about the language are left out, and settings
    say how many.
    """
    rows = read(PROMPTS)
    rules_of = [_rules(row) for row in rows]
    # Left out whole, not judged by the other rules: a prompt counts as followed only if all its rules are.
    languages = detects_languages()
    kept = [i for i, rules in enumerate(rules_of) if languages or not any(name in LANGUAGE for name, _ in rules)]
    if not kept:
        raise ConfigError(f"{rows[0].origin}: every prompt has a rule about its language: {install('sftkit[eval]')}")
    examples = tuple(_question(rows[i], rules_of[i], format) for i in kept[:max_examples])
    settings = settings_of(rows, format, max_examples) | {
        "languages": "langdetect, seed 0" if languages else "not checked: langdetect is not installed",
        "left_out": len(rows) - len(kept),
        "sentences": "Punkt with a fixed list of abbreviations",
    }
    return Task(name, examples, judge, "prompt_strict", chance=0.0, settings=settings)


def _rules(row: CheckedRow) -> list[tuple[str, dict[str, Any]]]:
    """Return (instruction, its arguments) of a row; each is tried once, so that a bad row is an error
    before anything is asked."""
    names = row.texts("instruction_id_list")
    arguments = row["kwargs"]
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


def number_sentences(answer: str, num_sentences: int, relation: str) -> bool:
    """Return whether there are as many sentences as asked."""
    return _compare(len(sentences(answer)), relation, num_sentences)


def number_words(answer: str, num_words: int, relation: str) -> bool:
    """Return whether there are as many words as asked: runs of letters, digits and underscores."""
    return _compare(len(re.findall(r"\w+", answer)), relation, num_words)


def capital_word_frequency(answer: str, capital_frequency: int, capital_relation: str) -> bool:
    """Return whether there are as many words in capital letters as asked."""
    return _compare(capital_words(answer), capital_relation, capital_frequency)


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

_AFTER = r"[)\";}\]*:@'({\[‘’“”«»?!]"
_DOTS = r"(?:-{2,}|\.{2,}|(?:\.\s){2,}\.)"
_TOKEN = re.compile(
    rf"{_DOTS}|(?=[^(\"`{{\[:;&#*@)}}\]\-,])\S+?(?=\s|$|{_AFTER}|{_DOTS}|,(?=$|\s|{_AFTER}|{_DOTS}))|\S"
)
_END = re.compile(rf"[.?!](?=(?P<after>{_AFTER}|\s+(?P<next>\S+)))")
_NUMBER = re.compile(r"-?[.,]?\d[\d,.-]*\.?$")
_INITIAL = re.compile(r"[^\W\d]\.$")
_CLOSING = re.compile(r"[\"')\]}‘’“”«»]+?(?:\s+|(?=--)|$)", re.MULTILINE)


def sentences(text: str) -> list[str]:
    """Return the sentences of an English text, with the quotes and brackets that close them."""
    # Punkt looks at a word once, however many marks it has: "U.S.A." is judged at its last one; a mark that begins a
    # word is judged by itself.
    last: dict[tuple[int, bool], re.Match[str]] = {}
    for match in _END.finditer(text):
        start = match.start()
        while start and not text[start - 1].isspace():
            start -= 1
        last[start, start == match.start()] = match
    found = []
    begin = 0
    for (start, _), match in last.items():
        # The word with its end mark, and what comes next.
        context = text[start : match.end()] + match["after"]
        tokens = [token for line in context.split("\n") for token in _TOKEN.findall(line)]
        if any(_ends(token, following) for token, following in pairwise(tokens)):
            found.append(text[begin : match.end()])
            begin = match.start("next") if match["next"] else match.end()
    found.append(text[begin:].rstrip())
    # Quotes and brackets right after an end mark belong to the sentence before; sentences left empty are dropped.
    whole: list[str] = []
    for sentence in found:
        if whole and (closing := _CLOSING.match(sentence)):
            whole[-1] += closing[0].rstrip()
            sentence = sentence[closing.end() :]
        whole.append(sentence)
    return [sentence for sentence in whole if sentence]


def capital_words(text: str) -> int:
    """Count Treebank words all of whose letters are capital: NASA and I, and both parts of DON'T."""
    found = 0
    for sentence in sentences(text):
        for pattern, replacement in _TREEBANK:
            sentence = re.sub(pattern, replacement, sentence)
        found += sum(word.isupper() for word in sentence.split())
    return found


def _ends(token: str, following: str) -> bool:
    """Return whether a sentence ends after a token, given the next one."""
    if token in (".", "?", "!"):
        return True
    if not token.endswith("."):
        return False
    # The order of Punkt's rules: abbreviations and dots, then initials and numbers, whose period may be an ordinal's.
    begins = _begins_sentence(following)
    known = _is_abbreviation(token)
    initial = _INITIAL.match(token) is not None
    if set(token) == {"."} or (known and not initial):
        return begins is True
    if token.endswith("..") or known:
        return False
    if (initial or _NUMBER.match(token.lower())) and begins is False:
        return False
    return not (initial and begins is None and following[0].isupper())


def _begins_sentence(token: str) -> bool | None:
    """Return whether a token is the first of a sentence; None if its case does not tell."""
    if token in tuple(";:,.!?") or token[0].islower():
        return False
    word = token.lower() if _is_abbreviation(token) else token.lower().removesuffix(".")
    return True if token[0].isupper() and word in STARTERS else None


def _is_abbreviation(token: str) -> bool:
    """Return whether a token is an abbreviation with its period."""
    bare = token[:-1].lower()
    return token.endswith(".") and (bare in ABBREVIATIONS or bare.split("-")[-1] in ABBREVIATIONS)


_JOINED = (("can", "not"), ("d", "'ye"), ("gim|lem", "me"), ("gon", "na"), ("got", "ta"), ("more", "'n"))
_TREEBANK = (
    (r"([«“‘„]|`+)", r" \1 "),
    (r'^"', "``"),
    (r"(``)", r" \1 "),
    (r"([ (\[{<])(\"|'{2})", r"\1 `` "),
    (r"(?i)(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", "' "),
    (r"([^.])\.([\])}>\"'»”’ ]*)\s*$", r"\1 . \2 "),
    (r"([:,])([^\d])", r" \1 \2"),
    (r"([:,])$", r" \1 "),
    (r"\.{2,}|[;@#$%&\u2012-\u2015]", r" \g<0> "),
    (r"([^.])\.([\])}>\"']*)\s*$", r"\1 .\2 "),
    (r"[?!]", r" \g<0> "),
    (r"([^'])' ", r"\1 ' "),
    (r"[*\]\[(){}<>]|--", r" \g<0> "),
    (r"^|$", " "),
    (r"[»”’]|''", r" \g<0> "),
    (r'"', " '' "),
    (r"\s+", " "),
    (r"([^' ])('[sS]|'[mM]|'[dD]|') ", r"\1 \2 "),
    (r"([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) ", r"\1 \2 "),
    *((rf"(?i)\b({first})({second})\b", r" \1 \2 ") for first, second in _JOINED),
    (r"(?i)\b(wan)(na)(?=\s)", r" \1 \2 "),
    (r"(?i) ('t)(is|was)\b", r" \1 \2 "),
)
