"""Encode the text of a conversation so that each prompt has the tokens of a prompt alone, and find the tokens of its answers."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.data.encode import Encoded, encode
from sftkit.data.spans import special_pattern
from sftkit.data.template import Span, special_tokens_of


def encode_answers(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: dict[int, list[Span]], last: int, enough: int | None
) -> tuple[Encoded, set[int]]:
    """Encode a text so that the part before its last answer has the token ids that it would have by itself, as a prompt.

    Returns the tokens, and the answers for which that does not hold. `enough`: as in `encode`.

    An answer that begins with whitespace may share a token with the end of the prompt, which no server would ever see.
    """
    encoded = encode(tokenizer, text, enough)
    pattern = special_pattern(tuple(special_tokens_of(tokenizer)))
    specials = [match.span() for match in pattern.finditer(text)]
    shared = {k for k, parts in spans.items() if parts and _shares(tokenizer, text, parts[0][0], encoded, specials)}
    if last not in shared:
        return encoded, shared
    if not encoded.complete:
        return encode_answers(tokenizer, text, spans, last, None)
    prompt_end = spans[last][0][0]
    before, after = encode(tokenizer, text[:prompt_end]), encode(tokenizer, text[prompt_end:])
    joined = np.concatenate([before.ids, after.ids])
    if tokenizer.decode(joined) != tokenizer.decode(encoded.ids):
        return encoded, shared  # this tokenizer begins texts in another way
    starts, ends = (
        np.concatenate([one, other + prompt_end]) for one, other in zip(before[1:3], after[1:3], strict=True)
    )
    return Encoded(joined, starts, ends, complete=True), shared - {last}


def _shares(
    tokenizer: PreTrainedTokenizerBase, text: str, prompt_end: int, encoded: Encoded, specials: list[Span]
) -> bool:
    """Return whether the prompt text[:prompt_end] alone has other ids than in the whole text. Special tokens split a text, so
    what follows the last one of the prompt decides.

    Args:
        encoded: the text, or the beginning of it: if it ends before the prompt does, what lies between the special
            tokens around that place is encoded here.
        specials: where they are in the text, ascending.
    """
    before = bisect_right(specials, prompt_end, key=lambda span: span[1])
    begin = specials[before - 1][0] if before else 0
    alone = _prompt_end(tokenizer, len(tokenizer), text[begin:prompt_end])
    if not encoded.complete and prompt_end >= encoded.ends[-1]:
        end = specials[before][1] if before < len(specials) else len(text)
        encoded = encode(tokenizer, text[begin:end], len(alone) + 1)
        prompt_end, begin = prompt_end - begin, 0
    first, past = (
        np.searchsorted(encoded.ends, begin, side="right"),
        np.searchsorted(encoded.starts, prompt_end, side="left"),
    )
    return bool(past and encoded.ends[past - 1] > prompt_end) or encoded.ids[first:past].tolist() != alone


@lru_cache(maxsize=64)
def _prompt_end(tokenizer: PreTrainedTokenizerBase, vocab_size: int, text: str) -> list[int]:
    """Return the ids of what follows the last special token of a prompt: the same header for nearly every answer.

    Args:
        vocab_size: len(tokenizer), which grows with tokens that are added.
    """
    ids: list[int] = encode(tokenizer, text).ids.tolist()
    return ids


def tokens_inside(spans: list[Span], encoded: Encoded) -> np.ndarray:
    """Return bool [n]: tokens that cover at least one character of a span. Spans ascend and do not overlap."""
    starts, ends = encoded.starts, encoded.ends
    assert all(a[1] <= b[0] for a, b in pairwise(spans)), "answers overlap"
    is_target = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(starts, end, side="left")
        is_target[first:last] |= ends[first:last] > starts[first:last]
    return is_target
