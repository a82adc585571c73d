"""Sentences and words of a text as IFEval counts them: NLTK's Punkt and Treebank tokenizers, without their data.

Sentences follow Kiss and Strunk's Punkt with a fixed list of abbreviations and of words that begin sentences,
where NLTK reads a trained model that would have to be downloaded. Words follow Robert MacIntyre's Treebank rules
as NLTK has them.
"""

from __future__ import annotations

import re
from itertools import pairwise

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
    found: list[str] = []
    start = 0
    for end, following in _breaks(text):
        found.append(text[start:end])
        start = following
    found.append(text[start:].rstrip())
    return _with_closing(found)


def words(text: str) -> int:
    """Count runs of letters, digits and underscores."""
    return len(re.findall(r"\w+", text))


def capital_words(text: str) -> int:
    """Count Treebank words all of whose letters are capital: NASA and I, and both parts of DON'T."""
    return sum(word.isupper() for sentence in sentences(text) for word in _treebank(sentence))


# ---- sentences -------------------------------------------------------------------------------------------------------


def _breaks(text: str) -> list[tuple[int, int]]:
    """Return (end of a sentence, start of the next one), judged at the last end mark of each word
    and at one that begins it."""
    # Punkt looks at a word once, however many marks it has: "U.S.A." is judged at its last one.
    last: dict[tuple[int, bool], re.Match[str]] = {}
    for match in _END.finditer(text):
        start = _word_start(text, match.start())
        last[start, start == match.start()] = match
    found = []
    for (start, _), match in last.items():
        if _ends_sentence(text[start : match.end()] + match["after"]):
            found.append((match.end(), match.start("next") if match["next"] else match.end()))
    return found


def _word_start(text: str, position: int) -> int:
    """Return where the word at a position begins."""
    while position and not text[position - 1].isspace():
        position -= 1
    return position


def _ends_sentence(context: str) -> bool:
    """Return whether a sentence ends inside `context`: a word with its end mark and what comes next."""
    tokens = [token for line in context.split("\n") for token in _TOKEN.findall(line)]
    return any(_ends(token, following) for token, following in pairwise(tokens))


def _ends(token: str, following: str) -> bool:
    """Return whether a sentence ends after a token, given the next one."""
    if token in (".", "?", "!"):
        return True
    if not token.endswith("."):
        return False
    # The order of Punkt's rules: abbreviations and dots, then initials and numbers, whose period may be an ordinal's.
    begins = _begins_sentence(following)
    known, initial = _is_abbreviation(token), _INITIAL.match(token) is not None
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


def _with_closing(sentences: list[str]) -> list[str]:
    """Move quotes and brackets right after an end mark to the sentence before; sentences left empty are dropped."""
    whole: list[str] = []
    for sentence in sentences:
        match = _CLOSING.match(sentence) if whole else None
        if match:
            whole[-1] += match[0].rstrip()
            sentence = sentence[match.end() :]
        whole.append(sentence)
    return [sentence for sentence in whole if sentence]


# ---- words -----------------------------------------------------------------------------------------------------------

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


def _treebank(sentence: str) -> list[str]:
    """Return the words of a sentence."""
    for pattern, replacement in _TREEBANK:
        sentence = re.sub(pattern, replacement, sentence)
    return sentence.split()
