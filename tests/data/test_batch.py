"""Rows that are tokenized together come out as each does by itself: ids, targets, bytes, counts, notes, warnings, errors."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
from conftest import OUR_TEMPLATE, SHARED_DATA
from test_mask_version import CALL, LEARNS_EMPTY, RESULT, THINKS, TOKENS, TOOLS
from test_mask_version import CHATS as SETTINGS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sftkit.data.reading import rows
from sftkit.data.tokens import batch, chat, text
from sftkit.data.tokens import template as templates
from sftkit.data.tokens.encode import token_bytes
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import Row
from sftkit.errors import DataError

WORDS = [
    "seven",
    "days",
    "She",
    "sells",
    "世界",
    "你好",
    "🎈",
    "👩\u200d🚀",
    "123",
    "4.5",
    "e=mc²",
    "don't",
    "the\tshore",
    "",
]
WORDS += [
    "two",
    "__init__",
    "\xa0",
    "Straße",
    "...",
    "où\n\n",
    "\n",
    "\r\n",
    "<b>",
    "</b>",
    "<think>",
    "</think>",
    "<image>",
]
WORDS += ["<tool_response>", '{"a":1}', "<|im_end|>"]
BEGINNINGS = [
    "",
    "",
    "",
    "",
    "\n",
    "\n\n",
    " ",
    "  ",
    "7",
    "世",
    "🎈",
    "é",
    "(",
    "</",
    "<think>\nI count.\n</think>\n\n",
]
NOT_SPECIAL = [word for word in WORDS if word != "<|im_end|>"]


def one_by_one(tokenize: RowTokenizer, given: Sequence[Row]) -> list[batch.Result]:
    def alone(row: Row) -> batch.Result:
        try:
            return tokenize(row)
        except DataError as error:
            return error

    return [alone(row) for row in given]


def assert_same(tokenize: RowTokenizer, given: Sequence[Row], sizes: Sequence[int] = (512,)) -> float:
    """Return the share of rows that were tokenized by themselves, those included that are compared."""
    expected = one_by_one(tokenize, given)
    for size in sizes:
        whole = RowTokenizer(**{name: getattr(tokenize, name) for name in tokenize.__dataclass_fields__})
        alone: list[Row] = []
        slowly = whole._batch.by_itself
        whole._batch.by_itself = lambda row, slowly=slowly, alone=alone: alone.append(row) or slowly(row)  # type: ignore
        found = [one for i in range(0, len(given), size) for one in whole.many(given[i : i + size])]
        assert whole._batch.different is None
        for row, one, other in zip(given, expected, found, strict=True):
            assert batch.same(one, other), (row, one, other)
    return len(alone) / max(len(given), 1)


def made_text(chance: random.Random) -> str:
    words = WORDS if chance.random() < 0.02 else NOT_SPECIAL
    return chance.choice(BEGINNINGS) + " ".join(chance.choices(words, k=chance.randint(1, 9)))


def made_rows(count: int, seed: int = 0) -> list[Row]:
    """Conversations of many kinds, most of them of the same few."""
    chance = random.Random(seed)
    made = []
    for i in range(count):
        messages: list[dict[str, Any]] = []
        if chance.random() < 0.3:
            messages.append({"role": chance.choice(["system", "system", "developer"]), "content": made_text(chance)})
        odd = chance.random() < 0.3
        tools = None
        for _ in range(chance.choice([1, 1, 1, 2, 2, 3])):
            messages.append({"role": "user", "content": made_text(chance)})
            answer: dict[str, Any] = {"role": "assistant", "content": made_text(chance)}
            if odd and chance.random() < 0.5:
                key = chance.choice(["reasoning_content", "reasoning", "weight", "train", "mood", "thinking"])
                answer[key] = {"weight": chance.choice([0, 1, 2]), "train": False}.get(key, "I say.")
            if odd and chance.random() < 0.3:
                tools = TOOLS
                messages += [CALL, {**RESULT, "content": made_text(chance)}]
            messages.append(answer)
        if odd and chance.random() < 0.2:
            messages.append({"role": chance.choice(["user", "assistant"]), "content": chance.choice(["", "So?"])})
        if odd and chance.random() < 0.2:
            messages[-1]["train_detail"] = [{"begin_offset": 0, "end_offset": 1, "train": False}]
        args = {"enable_thinking": chance.random() < 0.5} if odd and chance.random() < 0.2 else None
        made.append(Row(f"made:{i}", messages=messages, tools=tools, template_args=args))
    return made


@pytest.fixture
def of_template(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> Callable[[str], PreTrainedTokenizerFast]:
    def make(name: str) -> PreTrainedTokenizerFast:
        special, bos, eos = TOKENS[name]
        tokenizer = make_tokenizer(name, bos=bos)
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        tokenizer.eos_token = eos
        return tokenizer

    return make


def settings_of(template: str) -> dict[str, dict[str, Any]]:
    return {**SETTINGS, **({"empty": LEARNS_EMPTY} if template in THINKS else {})}


@pytest.mark.parametrize("template", TOKENS)
def test_conversations_come_out_as_one_by_one(of_template, template: str) -> None:
    tokenizer, given = of_template(template), made_rows(80)
    for name, values in settings_of(template).items():
        rule = text.tokenize_any if name == "all" else chat.tokenize
        alone = assert_same(RowTokenizer(rule, tokenizer, 2**20, **values), given)
        assert alone < 0.5 or template == "plain" or name == "all", name


@pytest.mark.slow
@pytest.mark.parametrize("template", TOKENS)
def test_many_conversations_come_out_as_one_by_one(of_template, template: str) -> None:
    tokenizer = of_template(template)
    for seed, (name, values) in enumerate(settings_of(template).items()):
        rule = text.tokenize_any if name == "all" else chat.tokenize
        for max_length in (2**20, 40):
            assert_same(RowTokenizer(rule, tokenizer, max_length, **values), made_rows(70, seed), (7, 512))


@pytest.mark.parametrize("too_long", ["truncate", "drop", "error"])
def test_rows_that_are_cut_and_chunks_of_any_size_come_out_as_one_by_one(of_template, too_long: str) -> None:
    tokenizer, given = of_template("qwen3"), made_rows(40, seed=1)
    assert_same(RowTokenizer(chat.tokenize, tokenizer, 30, too_long), given, (1, 7, 512))


def test_texts_come_out_as_one_by_one(make_tokenizer) -> None:
    chance = random.Random(2)
    given = [Row(f"made:{i}", text=made_text(chance)) for i in range(60)]
    given += [Row("x:1", text=" "), Row("x:2", text="🎈" * 9), Row("x:3", text="a", learned=False), *made_rows(1)]
    mixed = [*given, *made_rows(20), Row("x:4", image="a.png", captions=("b",)), Row("x:5", text="c", image="d")]
    forged = [Row("x:8", text=f"a {mark} b") for mark in ("<|im_end|>", "<|endoftext|><|endoftext|>", "<s>", "c")] * 3
    forged.append(Row("x:9", ids=np.arange(9, dtype=np.int32)))
    for tokenizer in (make_tokenizer(), make_tokenizer(bos="<s>", adds_bos=True)):
        assert assert_same(RowTokenizer(text.tokenize, tokenizer, 2**20), given, (1, 7, 512)) < 0.1
        assert_same(RowTokenizer(text.tokenize, tokenizer, 7), given)
        assert_same(RowTokenizer(text.tokenize_any, tokenizer, 2**20), mixed, (7,))
        for special_tokens in ("split", "parse", "error"):
            assert_same(RowTokenizer(text.tokenize_any, tokenizer, 99, special_tokens=special_tokens), forged)
    assert assert_same(RowTokenizer(text.tokenize, tokenizer, 2**20), [Row("x:6", text="a, b. " * 2**16)]) == 1
    with pytest.raises(TypeError):  # half a character, as one by one
        RowTokenizer(text.tokenize, tokenizer, 9).many([Row("x:7", text="a\ud800b")])


def test_a_difference_is_reported_once_and_ends_batches(of_template, caplog) -> None:
    tokenize, given = RowTokenizer(chat.tokenize, of_template("llama3"), 2**20), made_rows(300, seed=3)
    tokenize.many(given[:100])
    sizes = tokenize._batch._sizes
    assert sizes is not None
    tokenize._batch._sizes = sizes._replace(sizes=sizes.sizes * 2)  # so bytes are wrong from here on
    found = tokenize.many(given[100:250]) + tokenize.many(given[250:])
    assert all(map(batch.same, one_by_one(tokenize, given[100:]), found))
    (warned,) = caplog.messages
    assert f"{tokenize._batch.different}: this row has other tokens" in warned


def test_tokens_that_are_added_later_are_special_in_later_rows(of_template) -> None:
    tokenizer = of_template("llama3")
    tokenize = RowTokenizer(chat.tokenize, tokenizer, 2**20)
    given = [Row("x:1", messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "[new] b"}])]
    assert all(map(batch.same, one_by_one(tokenize, given), tokenize.many(given)))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[new]"]})
    (found,) = tokenize.many(given)
    assert isinstance(found, DataError)
    assert "[new]" in str(found)
    tokenizer.chat_template = OUR_TEMPLATE.read_text()
    in_worker = pickle.loads(pickle.dumps(tokenize))  # as a process that tokenizes is given it
    for one in (tokenize, in_worker):
        assert all(map(batch.same, one_by_one(tokenize, made_rows(20)), one.many(made_rows(20))))


def test_bytes_of_ids_are_those_of_their_texts(make_tokenizer) -> None:
    tokenizer = make_tokenizer(bos="<s>")
    found = token_bytes(tokenizer, len(tokenizer))
    assert found is not None
    for i in range(len(tokenizer)):
        if found.whole[i]:
            assert len(tokenizer.decode([i], skip_special_tokens=True).encode()) == found.sizes[i], i
    for sample in ("🎈 seven\n\n世界", "Straße <think>"):
        ids = tokenizer(sample, add_special_tokens=False)["input_ids"]
        assert found.sizes[ids].sum() == len(sample.encode())


def gemma_like(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    vocab = {**{f"<0x{i:02X}>": i for i in range(256)}, "▁": 256, "a": 257, "▁a": 258, "<eos>": 259}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_texts_of_tokenizers_with_byte_tokens_come_out_as_one_by_one() -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    exact, strips = (gemma_like(decoders.Sequence(s)) for s in (steps, [*steps, decoders.Strip(" ", 1, 0)]))
    given = [Row("x:1", text="a a"), Row("x:2", text=" a🎈a"), Row("x:3", text="世")]
    assert token_bytes(strips, len(strips)) is None
    assert assert_same(RowTokenizer(text.tokenize, exact, 99), given) < 0.5
    assert assert_same(RowTokenizer(text.tokenize, strips, 99), given) == 1


# ---- conversations that differ in their texts alone, and long beginnings ----------------------------------------------


def asked(count: int, *texts: str, system: str = "") -> list[Row]:
    """Conversations of one shape. `texts`: parts of the answers, in turn."""
    first = [{"role": "system", "content": system}] if system else []
    turns = (("user", "What is {}?"), ("assistant", "{} is {}."), ("user", " And\n{} "), ("assistant", "It is {1}."))
    given = texts or ("fine",)
    return [
        Row(f"x:{i}", messages=first + [{"role": r, "content": t.format(i, given[i % len(given)])} for r, t in turns])
        for i in range(count)
    ]


@pytest.mark.parametrize("template", ["llama3", "qwen3", "ours"])
def test_conversations_of_one_shape_are_rendered_a_few_times(
    of_template, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    tokenizer = of_template("chatml" if template == "ours" else template)
    if template == "ours":
        tokenizer.chat_template = OUR_TEMPLATE.read_text()
    tokenize, given = RowTokenizer(chat.tokenize, tokenizer, 2**20), asked(200)
    tokenize.many(given[:40])
    tokenize.many(given[40:70])  # tries the shape
    rendered: list[str] = []
    real = templates.render
    monkeypatch.setattr(templates, "render", lambda *args, **how: rendered.append(how["where"]) or real(*args, **how))
    found = tokenize.many(given[70:])
    assert len(set(rendered)) <= 2, "one in 128 is compared"
    assert all(map(batch.same, one_by_one(tokenize, given[70:]), found))


@pytest.mark.parametrize("template", ["llama3", "ours"])
def test_answers_of_a_known_shape_are_placed_for_all_rows_at_once_and_only_others_one_by_one(
    of_template, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    tokenizer = of_template("chatml" if template == "ours" else template)
    if template == "ours":
        tokenizer.chat_template = OUR_TEMPLATE.read_text()
    tokenize = RowTokenizer(chat.tokenize, tokenizer, 300)
    given = [*asked(40), *asked(60), *asked(60, "fine", "世🎈é", "long " * 99)]
    tokenize.many(given[:40])
    tokenize.many(given[40:100])  # tries the shape
    singly: list[int] = []
    after = batch.RowBatches._after
    monkeypatch.setattr(
        batch.RowBatches, "_after", lambda self, one, ids: singly.append(one.row) or after(self, one, ids)
    )
    found = tokenize.many(given[100:])
    assert singly == list(range(2, 60, 3)), "rows that are longer than max_length"
    assert all(map(batch.same, one_by_one(tokenize, given[100:]), found))
    assert not tokenize.differs


LOOKS = """{% for m in messages %}<|im_start|>{{ m.role }}
LOOK{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    ("look", "odd"),
    [
        ("{% if m.role == 'user' and 'magic' in m.content %}!{% endif %}", "magic"),
        ("{{ m.content.split('magic')[0] }}", "magic"),
        ("{% if m.content | length > 30 %}!{% endif %}", "a long answer, " * 9),
        ("{% if m.content == 'It is magic.' %}!{% endif %}", "magic"),
        ("{% set word = 'magic' %}{% if word in m.content %}!{% endif %}", "magic"),
        ("{% if (m.content | trim)[-6:-1] == 'magic' %}!{% endif %}", "magic"),
        ("{% for c in m.content if c == 'ä' %}!{% endfor %}", "mägic"),
        ("{% if not m.content.isascii() %}!{% endif %}", "mägic"),
        ("{% if m.content > 'It is z' %}!{% endif %}", "zoo"),
        ("{% if m.content.rstrip('c.') != m.content.rstrip('.') %}!{% endif %}", "magic"),
        ("{% macro as_is(x) %}{{ x }}{% endmacro %}{% if as_is(m.content)[-6:-1] == 'magic' %}!{% endif %}", "magic"),
        ("{% if (m.content ~ '') | length > 30 %}!{% endif %}", "a long answer, " * 9),
        ("{% if m.content in '0 is magic., 1 is magic., 101 is magic., 3 is magic.' %}!{% endif %}", "magic"),
        ("{% if ({m.content: 1}).get('0 is m' ~ 'agic.') %}!{% endif %}", "magic"),
        ("{{ m.content | int }}", "7"),
    ],
)
def test_a_template_that_looks_at_texts_renders_those_it_looks_for(make_tokenizer, look: str, odd: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = LOOKS.replace("LOOK", look)
    tokenize = RowTokenizer(chat.tokenize, tokenizer, 2**20)
    given = [*asked(100), *asked(20, "fine", odd), *asked(60, "fine", "good", odd)]
    found = [one for i in range(0, len(given), 25) for one in tokenize.many(given[i : i + 25])]
    assert all(map(batch.same, one_by_one(tokenize, given), found))
    assert not tokenize.differs


# ---- real data -------------------------------------------------------------------------------------------------------


CHAT_FILES = sorted(path.name for path in (SHARED_DATA / "chat").glob("*.gz"))


def read_chat(name: str, count: int | None) -> list[Row]:
    found = []
    with gzip.open(SHARED_DATA / "chat" / name, "rt") as lines:
        for i, line in enumerate(islice(lines, count)):
            try:
                found.append(rows.parse((f"{name}:{i}", json.loads(line))))
            except DataError:
                continue
    return found


@cache
def real_tokenizer(name: str) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(SHARED_DATA / "tokenizers" / name)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def assert_real(tokenizer_name: str, name: str, count: int | None) -> None:
    tokenizer = real_tokenizer(tokenizer_name)
    own = tokenizer.chat_template
    given = read_chat(name, count)
    for template in (OUR_TEMPLATE.read_text(), own):
        if template:
            tokenizer.chat_template = template
            assert_same(RowTokenizer(chat.tokenize, tokenizer, 2**20), given)
    tokenizer.chat_template = own


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer_name", ["smollm2", "gpt2"])
def test_some_real_conversations_come_out_as_one_by_one(tokenizer_name: str) -> None:
    for name in CHAT_FILES:
        assert_real(tokenizer_name, name, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAT_FILES)
@pytest.mark.parametrize("tokenizer_name", ["smollm2", "gpt2"])
def test_many_real_conversations_come_out_as_one_by_one(tokenizer_name: str, name: str) -> None:
    assert_real(tokenizer_name, name, 200)


def test_ordinary_added_tokens_are_not_among_the_special_ones_of_a_text(of_template) -> None:
    tokenizer = of_template("llama3")
    tokenizer.add_tokens(["[pause]", "sea shells"])
    tokenize = RowTokenizer(chat.tokenize, tokenizer, 2**20)
    given = [
        Row(
            f"x:{i}",
            messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": f"She {i}[pause] sea shells"}],
        )
        for i in range(40)
    ]
    found = tokenize.many(given)
    assert not tokenize.differs
    assert all(map(batch.same, one_by_one(tokenize, given), found))
    assert all(tokenizer.convert_tokens_to_ids("[pause]") in one.examples[0].ids for one in found)
