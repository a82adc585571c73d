"""Which answers are learned under templates that think, and in which words: whatever a server would have supplied is not.

The templates in tests/golden are shortened from the published formats of Qwen3, Qwen3.5, SmolLM3, GLM-4.5, DeepSeek-R1's
distilled models and gpt-oss; what is learned of a conversation stands between double brackets here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, OUR_TEMPLATE
from helpers import tiny_llama
from jinja2 import Environment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sftkit.config.schema import DataConfig, ModelConfig
from sftkit.data.tokens import chat, loss_mask
from sftkit.data.tokens.batch import same
from sftkit.data.tokens.loss_mask import check_reasoning, with_reasoning
from sftkit.data.tokens.sources import RowTokenizer, stage_rule
from sftkit.data.tokens.template import render_conversation, template_of, with_arguments
from sftkit.data.types import Row, TokenizedExample
from sftkit.errors import ConfigError, DataError
from sftkit.models.tokenizer import load_tokenizer
from sftkit.verify.proof import prompt_check

SPECIALS = {
    "qwen3": [],
    "qwen3_5": [],
    "smollm3": [],
    "glm45": ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"],
    "r1_distill": ["<｜User｜>", "<｜Assistant｜>"],
    "mistral": ["[INST]", "[/INST]"],
    "gpt_oss": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"],
}
THINKS_OR_NOT = ("defined and enable_thinking is false", "undefined or enable_thinking is not true")
"What Qwen3.5 of 2B and less has in the place of what the larger ones have, which is all that differs."
ENDS = {"glm45": "<|endoftext|>", "r1_distill": "</s>", "gpt_oss": "<|return|>"}

U, V = {"role": "user", "content": "How?"}, {"role": "user", "content": "Why?"}
PLAIN, SECOND = {"role": "assistant", "content": "So."}, {"role": "assistant", "content": "Thus."}
REASONED = {"role": "assistant", "content": "So.", "reasoning_content": "I think."}
REASONED_SECOND = {"role": "assistant", "content": "Thus.", "reasoning": "I ponder."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "it"}}}]}
RESULT = {"role": "tool", "content": "seen"}


def slow_if_long(name: str) -> Any:
    """The case of a template; of Qwen3.5's, which takes longest, for the slow tests."""
    return pytest.param(name, marks=[pytest.mark.slow] * (name == "qwen3_5"))


@pytest.fixture
def make(make_tokenizer):
    def made(name: str):
        eos = ENDS.get(name, "<|im_end|>") if name != "gpt_oss" else "</s>"
        tokenizer = make_tokenizer(name.removesuffix("_small"), bos="<s>", eos=eos)
        if name == "qwen3_5_small":
            thinks, answers = THINKS_OR_NOT
            assert thinks in tokenizer.chat_template
            tokenizer.chat_template = tokenizer.chat_template.replace(thinks, answers)
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS.get(name, [])})
        if name == "gpt_oss":
            tokenizer.eos_token = "<|return|>"
        return tokenizer

    return made


def shown(example: TokenizedExample, tokenizer) -> str:
    """The text with what is learned in double brackets."""
    parts, inside = [], False
    for token, learned in zip(example.ids.tolist(), example.is_target.tolist(), strict=True):
        if learned != inside:
            parts.append("[[" if learned else "]]")
            inside = learned
        parts.append(tokenizer.decode([token]))
    return "".join(parts) + ("]]" if inside else "")


def documents(tokenizer, messages: list[dict[str, Any]], **settings: Any) -> list[str]:
    row = Row("x:1", messages=messages, template_args=settings.pop("template_args", None))
    found = chat.tokenize(row, tokenizer, max_length=1000, learning=chat.Learning(**settings))
    return [shown(example, tokenizer) for example in found.examples]


QWEN = "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
SMOL = "<|im_start|>system\n## Metadata\n\nReasoning Mode: {}\n\n## Custom Instructions\n\nYou are a helpful AI assistant named SmolLM.<|im_end|>\n"
GLM = "[gMASK]<sop><|user|>\nHow?"
OSS = "<|start|>system<|message|>Reasoning: medium\n# Valid channels: analysis, commentary, final.<|end|><|start|>user<|message|>How?<|end|><|start|>assistant"

GOLDEN_DOCUMENTS = {
    ("qwen3", "plain"): ([U, PLAIN], [QWEN + "<think>\n\n</think>\n\n[[So.<|im_end|>]]"]),
    ("qwen3", "reasoned"): ([U, REASONED], [QWEN + "[[<think>\nI think.\n</think>\n\nSo.<|im_end|>]]"]),
    ("qwen3", "two turns"): (
        [U, REASONED, V, REASONED_SECOND],
        [
            QWEN + "[[<think>\nI think.\n</think>\n\nSo.<|im_end|>]]",
            QWEN
            + "So.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
            + "[[<think>\nI ponder.\n</think>\n\nThus.<|im_end|>]]",
        ],
    ),
    ("qwen3", "tools"): (
        [U, CALL, RESULT, PLAIN],
        [
            QWEN
            + '<think>\n\n</think>\n\n[[<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call><|im_end|>]]',
            QWEN
            + '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call><|im_end|>\n'
            + "<|im_start|>user\n<tool_response>\nseen\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            + "<think>\n\n</think>\n\n[[So.<|im_end|>]]",
        ],
    ),
    (
        "qwen3",
        "reasoned call",
    ): (  # thinking is on in this turn, and the block of the other mode is context all the same
        [U, {**CALL, "reasoning_content": "I look."}, RESULT, PLAIN],
        [
            QWEN
            + '[[<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
            + "<|im_end|>]]\n<|im_start|>user\n<tool_response>\nseen\n</tool_response><|im_end|>\n"
            + "<|im_start|>assistant\n<think>\n\n</think>\n\n[[So.<|im_end|>]]",
        ],
    ),
    ("smollm3", "plain"): (
        [U, PLAIN, V, SECOND],
        [
            SMOL.format("/no_think")
            + QWEN
            + "<think>\n\n</think>\n[[So.<|im_end|>]]\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
            + "<think>\n\n</think>\n[[Thus.<|im_end|>]]"
        ],
    ),
    ("smollm3", "reasoned"): (
        [U, {"role": "assistant", "content": "<think>\nI think.\n</think>\nSo."}],
        [SMOL.format("/think") + QWEN + "[[<think>\nI think.\n</think>\nSo.<|im_end|>]]"],
    ),
    ("glm45", "plain"): (
        [U, PLAIN, V, SECOND],
        [
            GLM
            + "/nothink<|assistant|>\n<think></think>[[\nSo.<|user|>]]\nWhy?/nothink<|assistant|>\n<think></think>"
            + "[[\nThus.<|endoftext|>]]"
        ],
    ),
    ("glm45", "reasoned"): (
        [U, REASONED, V, REASONED_SECOND],
        [
            GLM + "<|assistant|>[[\n<think>I think.</think>\nSo.<|endoftext|>]]",
            GLM
            + "<|assistant|>\n<think></think>\nSo.<|user|>\nWhy?<|assistant|>[[\n<think>I ponder.</think>\nThus.<|endoftext|>]]",
        ],
    ),
    ("glm45", "tools"): (
        [U, CALL, RESULT, PLAIN, V, CALL],
        [
            GLM
            + "/nothink<|assistant|>\n<think></think>[[\n<tool_call>look\n<arg_key>at</arg_key>\n"
            + "<arg_value>it</arg_value>\n</tool_call><|observation|>]]\n<tool_response>\nseen\n</tool_response>"
            + "<|assistant|>\n<think></think>[[\nSo.<|user|>]]\nWhy?/nothink<|assistant|>\n<think></think>[[\n"
            + "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>it</arg_value>\n</tool_call><|observation|>]]"
        ],
    ),
    ("r1_distill", "reasoned"): (
        [U, REASONED, V, REASONED_SECOND],
        [
            "<s><｜User｜>How?<｜Assistant｜><think>\n[[I think.\n</think>\n\nSo.</s>]]",
            "<s><｜User｜>How?<｜Assistant｜>So.</s><｜User｜>Why?<｜Assistant｜><think>\n[[I ponder.\n</think>\n\nThus.</s>]]",
        ],
    ),
    ("gpt_oss", "plain"): (
        [U, PLAIN, V, SECOND],
        [
            OSS
            + "[[<|channel|>final<|message|>So.]]<|end|><|start|>user<|message|>Why?<|end|><|start|>assistant"
            + "[[<|channel|>final<|message|>Thus.<|return|>]]"
        ],
    ),
    ("gpt_oss", "reasoned"): (
        [U, REASONED],
        [
            OSS
            + "[[<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>]]"
        ],
    ),
    ("gpt_oss", "tools"): (
        [U, CALL, RESULT, PLAIN],
        [
            OSS
            + '[[ to=functions.look<|channel|>commentary json<|message|>{"at": "it"}<|call|>]]<|start|>functions.tool '
            + "to=assistant<|channel|>commentary<|message|>seen<|end|><|start|>assistant"
            + "[[<|channel|>final<|message|>So.<|return|>]]"
        ],
    ),
    ("gpt_oss", "reasoned call"): (
        [U, {**CALL, "reasoning_content": "I look."}, RESULT, REASONED, V, SECOND],
        [  # what was thought before a call is in the prompt of the answer after it, and left out of later ones
            OSS
            + "[[<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=functions.look<|channel|>commentary "
            + 'json<|message|>{"at": "it"}<|call|>]]<|start|>functions.tool to=assistant<|channel|>commentary<|message|>'
            + "seen<|end|><|start|>assistant[[<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>"
            + "final<|message|>So.<|return|>]]",
            OSS
            + ' to=functions.look<|channel|>commentary json<|message|>{"at": "it"}<|call|><|start|>functions.tool '
            + "to=assistant<|channel|>commentary<|message|>seen<|end|><|start|>assistant<|channel|>final<|message|>So."
            + "<|end|><|start|>user<|message|>Why?<|end|><|start|>assistant[[<|channel|>final<|message|>Thus.<|return|>]]",
        ],
    ),
}

CALLED = "<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n</function>\n</tool_call><|im_end|>"
SEEN = "\n<|im_start|>user\n<tool_response>\nseen\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
AGAIN = "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n"
# Every prompt has a thinking block, open or empty: an answer without reasoning is asked for with the empty one.
for name in ("qwen3_5", "qwen3_5_small"):
    GOLDEN_DOCUMENTS |= {
        (name, "plain"): ([U, PLAIN], [QWEN + "<think>\n\n</think>\n\n[[So.<|im_end|>]]"]),
        (name, "reasoned"): (
            [U, REASONED, V, REASONED_SECOND],
            [
                QWEN + "<think>\n[[I think.\n</think>\n\nSo.<|im_end|>]]",
                QWEN + "So." + AGAIN + "[[I ponder.\n</think>\n\nThus.<|im_end|>]]",
            ],
        ),
        (name, "tools"): (
            [U, CALL, RESULT, PLAIN],
            [
                f"{QWEN}<think>\n\n</think>\n\n[[{CALLED}]]{SEEN}\n</think>\n\n[[So.<|im_end|>]]",
            ],
        ),
        (name, "reasoned call"): (
            [U, {**CALL, "reasoning_content": "I look."}, RESULT, REASONED, V, SECOND],
            [
                QWEN + f"<think>\n[[I look.\n</think>\n\n{CALLED}]]{SEEN}" + "[[I think.\n</think>\n\nSo.<|im_end|>]]",
                QWEN + CALLED + SEEN.removesuffix("<think>\n") + f"So.{AGAIN}\n</think>\n\n[[Thus.<|im_end|>]]",
            ],
        ),
    }


@pytest.mark.parametrize("case", GOLDEN_DOCUMENTS, ids=" ".join)
def test_golden_targets_of_published_templates(make, case) -> None:
    messages, expected = GOLDEN_DOCUMENTS[case]
    assert documents(make(case[0]), messages) == expected


@pytest.mark.parametrize("case", GOLDEN_DOCUMENTS, ids=" ".join)
def test_every_target_follows_the_ids_of_a_prompt_that_a_server_makes(make, case) -> None:
    """For each answer: the ids before its first target are those of the messages before it, in one of the modes."""
    messages, _ = GOLDEN_DOCUMENTS[case]
    tokenizer = make(case[0])
    template = template_of(tokenizer)
    modes = [{}, *({template.thinking_argument: on} for on in (True, False) if template.thinking_argument)]
    prompts = [
        tokenizer(
            render_conversation(
                tokenizer, template, Row("x:1", messages=given, template_args=mode), add_generation_prompt=True
            )[0],
            add_special_tokens=False,
        )["input_ids"]
        for k, message in enumerate(messages)
        if message["role"] == "assistant"
        for mode in modes
        for given in (normal(messages[:k], template),)
    ]
    found = chat.tokenize(Row("x:1", messages=messages), tokenizer, max_length=1000)
    for example in found.examples:
        begins = np.flatnonzero(np.diff(example.is_target.astype(int), prepend=0) == 1)
        assert len(begins)
        for begin in begins:
            assert example.ids[:begin].tolist() in prompts


def normal(messages: list[dict[str, Any]], template) -> list[dict[str, Any]]:
    """With reasoning in the field that the template knows."""
    keys = ("reasoning_content", "reasoning", "thinking")
    result = []
    for m in messages:
        rest = {key: value for key, value in m.items() if key not in keys}
        reasons = [m[key] for key in keys if key in m]
        result.append({**rest, template.reasoning_key: reasons[0]} if reasons and template.reasoning_key else rest)
    return result


def test_an_empty_thinking_block_is_learned_where_the_recipe_says_so(make) -> None:
    assert documents(make("qwen3"), [U, PLAIN], thinking="learn_empty") == [
        QWEN + "[[<think>\n\n</think>\n\nSo.<|im_end|>]]"
    ]
    assert documents(make("r1_distill"), [U, PLAIN], thinking="learn_empty") == [
        "<s><｜User｜>How?<｜Assistant｜><think>\n[[\n</think>\n\nSo.</s>]]"
    ]


def test_reasoning_is_left_out_where_the_recipe_says_so(make) -> None:
    for answer in (REASONED, {**PLAIN, "content": "<think>\nI think.\n</think>\n\nSo."}):
        assert documents(make("qwen3"), [U, answer], thinking="off") == [
            QWEN + "<think>\n\n</think>\n\n[[So.<|im_end|>]]"
        ]


def test_an_answer_without_reasoning_is_refused_where_every_prompt_opens_a_thinking_block(make) -> None:
    with pytest.raises(DataError, match=r"messages\[1\].*opens a thinking block.*data\.thinking=learn_empty"):
        documents(make("r1_distill"), [U, PLAIN])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_the_template_does_not_render_is_refused_with_the_cure(make_tokenizer, key: str) -> None:
    with pytest.raises(DataError, match=r"messages\[1\].*does not render the reasoning.*data\.thinking=off"):
        documents(make_tokenizer("llama3", bos="<|begin_of_text|>", eos="<|eot_id|>"), [U, {**PLAIN, key: "I think."}])


def test_without_splitting_earlier_answers_are_context_and_counted(make) -> None:
    row = Row("x:1", messages=[U, REASONED, V, REASONED_SECOND])
    found = chat.tokenize(row, make("qwen3"), max_length=1000, learning=chat.Learning(split_turns=False))
    assert len(found.examples) == 1
    assert found.counts["answers"] == 2
    assert (
        found.counts["answers_learned"]
        == found.counts["not_learned_history"]
        == found.counts["reasoning_left_out"]
        == 1
    )
    split = chat.tokenize(row, make("qwen3"), max_length=1000)
    assert (split.counts["answers_learned"], split.counts["reasoning_left_out"]) == (2, 0)


def test_a_conversation_that_is_learned_whole_keeps_the_reasoning_of_earlier_turns(make) -> None:
    row, tokenizer = Row("x:1", messages=[U, REASONED, V, REASONED_SECOND]), make("qwen3")
    found = chat.tokenize(row, tokenizer, max_length=1000, learning=chat.Learning(targets="all"))
    alone, whole = (shown(example, tokenizer) for example in found.examples)
    (asked,) = documents(tokenizer, [U, REASONED])
    assert alone == asked, "the first answer as it is asked"
    start = QWEN.removeprefix("<|im_start|>")
    assert whole == f"<|im_start|>[[{start}So.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n" + (
        "<think>\nI ponder.\n</think>\n\nThus.<|im_end|>]]"
    )
    assert (found.counts["answers_learned"], found.counts["reasoning_left_out"]) == (2, 0)
    assert found.counts["split_tokens"] == len(found.examples[0].ids) - 1
    off = chat.tokenize(row, tokenizer, max_length=1000, learning=chat.Learning(targets="all", split_turns=False))
    assert [shown(example, tokenizer) for example in off.examples] == [whole]
    assert off.counts["reasoning_left_out"] == 1


def test_reasoning_is_missed_where_the_template_drops_it_though_its_words_stand_elsewhere(make) -> None:
    again = {**REASONED_SECOND, "reasoning": "I think."}
    for targets, messages in (
        ("all", [U, REASONED, V, again]),
        ("all", [U, REASONED, {**V, "content": "I think. Why?"}, SECOND]),
    ):
        row, tokenizer = Row("x:1", messages=messages), make("qwen3")
        found = chat.tokenize(row, tokenizer, max_length=1000, learning=chat.Learning(targets=targets))  # type: ignore[arg-type]
        (asked,) = documents(tokenizer, [U, REASONED])
        assert shown(found.examples[0], tokenizer) == asked
        assert (len(found.examples), found.counts["reasoning_left_out"]) == (2, 0)
        for settings in ({"targets": "all"}, {}):
            off = chat.tokenize(row, tokenizer, max_length=1000, learning=chat.Learning(split_turns=False, **settings))  # type: ignore[arg-type]
            assert (len(off.examples), off.counts["reasoning_left_out"]) == (1, 1)


@pytest.mark.parametrize("targets", ["assistant", "all"])
def test_reasoning_that_the_recipe_leaves_out_is_learned_nowhere(make, targets: str) -> None:
    row, tokenizer = Row("x:1", messages=[U, REASONED, V, REASONED_SECOND]), make("qwen3")
    found = chat.tokenize(row, tokenizer, max_length=1000, learning=chat.Learning(targets=targets, thinking="off"))  # type: ignore[arg-type]
    plain = chat.tokenize(
        Row("x:1", messages=[U, PLAIN, V, SECOND]), tokenizer, max_length=1000, learning=chat.Learning(targets=targets)
    )  # type: ignore[arg-type]
    assert [one.ids.tolist() for one in found.examples] == [one.ids.tolist() for one in plain.examples]
    assert found.counts["reasoning_left_out"] == 2


def test_a_plain_conversation_that_is_learned_whole_is_one_document(make) -> None:
    for name in ("qwen3", "smollm3", "glm45", "r1_distill", "gpt_oss", "mistral"):
        row = Row("x:1", messages=[U, PLAIN, V, SECOND])
        (example,) = chat.tokenize(row, make(name), max_length=1000, learning=chat.Learning(targets="all")).examples
        assert example.is_target.tolist() == [False] + [True] * (len(example.ids) - 1), name


def test_generation_stops_where_an_answer_with_a_call_ends(make) -> None:
    for name, expected in (
        ("glm45", ["<|user|>", "<|observation|>", "<|endoftext|>"]),
        ("gpt_oss", ["<|return|>", "<|call|>"]),
        ("qwen3", ["<|im_end|>"]),
        ("mistral", ["<|im_end|>"]),
    ):
        tokenizer = make(name)
        assert tokenizer.convert_ids_to_tokens(chat.end_of_turn_ids(tokenizer)) == expected, name


def test_a_conversation_that_ends_with_a_call_ends_with_what_the_model_writes_after_it(make) -> None:
    (last,) = documents(make("gpt_oss"), [U, CALL])
    assert last.endswith('{"at": "it"}<|call|>]]')
    (last,) = documents(make("glm45"), [U, CALL], targets="all")
    assert last.endswith("</tool_call><|observation|>]]")
    (last,) = documents(make("glm45"), [U, CALL, V, SECOND])
    assert "</tool_call><|user|>]]\nWhy?" in last, "without a result the model ends its turn as before a question"


THOUGHT = "<think>\nI think.\n</think>\n\n"
TWICE = [
    {**REASONED, "content": f"{THOUGHT}So."},
    {**REASONED, "thinking": "I think. ", "content": f"{THOUGHT}So."},
    {**PLAIN, "content": f"{THOUGHT}<think>I think.</think>So."},
    {**REASONED, "content": "I think.\n</think>\n\nSo."},
    {**REASONED, "content": f"<think>\n\n</think>{THOUGHT}So."},
]


@pytest.mark.parametrize("answer", TWICE)
@pytest.mark.parametrize("name", ["qwen3", "chatml", "smollm3", "glm45", "r1_distill", "gpt_oss"])
def test_reasoning_that_the_data_has_twice_is_learned_once(make, name: str, answer: dict[str, Any]) -> None:
    tokenizer = make(name)
    assert documents(tokenizer, [U, answer]) == documents(tokenizer, [U, REASONED])
    if name != "r1_distill":
        assert documents(tokenizer, [U, answer], thinking="off") == documents(tokenizer, [U, PLAIN])


@pytest.mark.parametrize(
    "answer",
    [
        {**REASONED, "content": "<think>Another.</think>So."},
        {**REASONED, "content": f"{THOUGHT}<think>Another.</think>So."},
        {**PLAIN, "content": f"{THOUGHT}<think>Another.</think>So."},
    ],
)
def test_two_reasonings_that_differ_are_rejected(make, answer: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"messages\[1\]: two different reasonings"):
        documents(make("qwen3"), [U, answer])


@pytest.mark.parametrize("tag", ["thinking", "reasoning"])
def test_the_same_reasoning_by_tags_of_its_own_is_rejected_next_to_a_field(make, tag: str) -> None:
    twice = {"role": "assistant", "reasoning": "because", "content": f"<{tag}>\nbecause\n</{tag}>\nSo."}
    with pytest.raises(DataError, match=rf"messages\[1\]: the same reasoning is in reasoning and in <{tag}>"):
        check_reasoning([{"role": "user", "content": "Why?"}, twice], "x:1")
    check_reasoning([{"role": "user", "content": "Why?"}, {**twice, "content": f"<{tag}>other</{tag}> So."}], "x:1")
    check_reasoning([{"role": "user", "content": "Why?"}, {**twice, "reasoning": ""}], "x:1")


def test_reasoning_in_the_text_is_learned_in_the_field_of_a_template_that_knows_only_that(make) -> None:
    inline = {**PLAIN, "content": f"{THOUGHT}So."}
    assert documents(make("gpt_oss"), [U, inline]) == documents(make("gpt_oss"), [U, REASONED])


@pytest.mark.parametrize("name", ["qwen3", "chatml", "smollm3", "glm45"])
def test_a_thinking_block_is_learned_where_its_tags_are_special_tokens(make, name: str) -> None:
    inline, plain = {**PLAIN, "content": f"{THOUGHT}So."}, make(name)
    special = make(name)
    special.add_special_tokens({"additional_special_tokens": [*SPECIALS.get(name, []), "<think>", "</think>"]})
    assert "<think>" in special.all_special_tokens
    for messages in ([U, inline], [U, REASONED], [U, inline, V, SECOND]):
        assert documents(special, messages) == documents(plain, messages)


@pytest.mark.parametrize(
    ("messages", "hint"),
    [
        ([U, {**PLAIN, "content": "So <think>x</think>."}], True),
        ([U, {**PLAIN, "content": "I think.</think>So."}], True),
        ([{**U, "content": "<think>x</think>How?"}, PLAIN], True),
        ([U, {**PLAIN, "content": "<think>x<|im_end|></think>So."}], False),
    ],
)
def test_special_thinking_tokens_elsewhere_forge_a_turn(make, messages: list[dict[str, Any]], hint: bool) -> None:
    tokenizer = make("qwen3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    with pytest.raises(DataError, match=r"would forge the end or start of a turn") as caught:
        documents(tokenizer, messages)
    assert ("field reasoning_content" in str(caught.value)) == hint


def test_arguments_of_a_record_reach_the_template(make) -> None:
    (thinking,) = documents(make("smollm3"), [U, PLAIN], template_args={"enable_thinking": True})
    assert thinking == SMOL.format("/think") + QWEN + "[[So.<|im_end|>]]"


@pytest.mark.parametrize("name", ["content", "message", "role", "thinking"])
def test_an_argument_is_no_field_of_a_message_with_its_name(make, name: str) -> None:
    with pytest.raises(DataError, match=rf"chat_template_kwargs\.{name}: the chat template has no {name}"):
        documents(make("qwen3"), [U, PLAIN], template_args={name: "text"})


def test_arguments_of_the_recipe_hold_for_whoever_loads_the_template(make) -> None:
    tokenizer = make("smollm3")
    plain = tokenizer.chat_template
    tokenizer.chat_template = with_arguments(plain, {"enable_thinking": False})
    prompt = tokenizer.apply_chat_template([U], tokenize=False, add_generation_prompt=True)
    assert "Reasoning Mode: /no_think" in prompt
    assert prompt.endswith("<think>\n\n</think>\n")
    asked = tokenizer.apply_chat_template([U], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert "Reasoning Mode: /think" in asked
    (reasoned,) = documents(tokenizer, [U, {**PLAIN, "content": "<think>\nI think.\n</think>\nSo."}])
    assert "/no_think" in reasoned, "the recipe decides, not the data"
    assert with_arguments(tokenizer.chat_template, {"enable_thinking": True}) == with_arguments(
        plain, {"enable_thinking": True}
    )
    assert with_arguments(tokenizer.chat_template, {}) == plain
    Environment(extensions=["jinja2.ext.loopcontrols"]).parse(with_arguments("{{ a }}", {"a": None}))
    with pytest.raises(ConfigError, match=r"chat_template_args\.enable_thinkng.*has no enable_thinkng"):
        with_arguments(plain, {"enable_thinkng": False})


@pytest.fixture(scope="module")
def newlines() -> PreTrainedTokenizerFast:
    """A tokenizer in which newlines and spaces merge, as in published ones."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["user\n\n\n\nassistant\n\n", "\n\n\n"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = OUR_TEMPLATE.read_text()
    return tokenizer


@pytest.mark.parametrize("content", ["\nSo.", "\n\n\nSo.", " So.", "So."])
def test_an_answer_that_begins_with_a_newline_follows_the_ids_of_its_prompt(newlines, content: str) -> None:
    row = Row("x:1", messages=[U, {"role": "assistant", "content": content}])
    (example,) = chat.tokenize(row, newlines, max_length=1000).examples
    start = int(np.flatnonzero(example.is_target)[0])
    assert example.ids[:start].tolist() == chat.render_prompt(Row("x:1", messages=[U]), newlines)
    assert newlines.decode(example.ids[start:].tolist()) == content + "<|im_end|>"
    whole = newlines.apply_chat_template(row.messages, return_dict=False)[: len(example.ids)]
    assert (example.ids.tolist() == whole) == (content != "\n\n\nSo."), "else nothing merges here"


def test_an_earlier_answer_that_shares_a_token_with_its_prompt_is_context_and_counted(newlines) -> None:
    row = Row("x:1", messages=[U, {"role": "assistant", "content": "\n\nSo."}, V, SECOND])
    found = chat.tokenize(row, newlines, max_length=1000)
    (example,) = found.examples
    assert newlines.decode(example.ids[example.is_target].tolist()) == "Thus.<|im_end|>"
    assert (found.counts["answers_learned"], found.counts["not_learned_border"]) == (1, 1)


def test_an_answer_of_a_conversation_that_is_learned_whole_never_begins_within_a_token(newlines) -> None:
    row = Row("x:1", messages=[U, {"role": "assistant", "content": "\n\nSo."}, V, {**SECOND, "content": "\n\nThus."}])
    found = chat.tokenize(row, newlines, max_length=1000, learning=chat.Learning(targets="all"))
    (example,) = found.examples
    assert (found.counts["answers_learned"], found.counts["not_learned_border"]) == (1, 1)
    learned = newlines.decode(example.ids[example.is_target].tolist())
    assert "So." not in learned
    assert learned.endswith("\n\nThus.<|im_end|>")
    last = example.ids[-len(newlines("\n\nThus.<|im_end|>")["input_ids"]) :]
    assert last.tolist() == newlines("\n\nThus.<|im_end|>")["input_ids"], "tokenized apart from its prompt"


WORDS = ["yes", "no\n", " maybe", "", "<tool_response> x", "a </think> b", "x" * 40]


def conversation(rng: np.random.Generator, turns: int) -> list[dict[str, Any]]:
    """Questions and answers, some with tools, some with reasoning, some alike."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be."}] if rng.random() < 0.5 else []
    for _ in range(turns):
        messages.append({"role": "user", "content": rng.choice(WORDS)})
        while rng.random() < 0.3:
            messages += [CALL if rng.random() < 0.5 else {**CALL, "reasoning_content": "I look."}, RESULT]
        answer = {"role": "assistant", "content": rng.choice(WORDS[:3]) + rng.choice(WORDS[:3]) + "."}
        messages.append({**answer, "reasoning_content": "I think."} if rng.random() < 0.3 else answer)
    return messages


@pytest.mark.parametrize("name", [*map(slow_if_long, SPECIALS), "llama3", "default_system", "plain"])
@pytest.mark.parametrize("split", [False, True])
def test_what_is_found_by_likeness_is_what_rendering_each_answer_finds(
    make, monkeypatch, name: str, split: bool
) -> None:
    tokenizer, rng, by_likeness = make(name), np.random.default_rng(0), 0
    for number in range(6):
        messages = conversation(rng, turns=10)
        if name in ("llama3", "mistral", "default_system", "plain", "r1_distill", "smollm3"):
            messages = [m for m in messages if "tool_calls" not in m and m["role"] not in ("tool", "system")]
            messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
        row = Row(f"x:{number}", messages=messages)
        learning = chat.Learning(thinking="learn_empty" if name == "r1_distill" else "auto", split_turns=split)
        monkeypatch.setattr(loss_mask, "RENDERED_FIRST", 2)
        quick = chat.tokenize(row, tokenizer, max_length=100_000, learning=learning)
        monkeypatch.setattr(loss_mask, "RENDERED_FIRST", 10**9)
        exact = chat.tokenize(row, tokenizer, max_length=100_000, learning=learning)
        assert quick.counts == exact.counts
        for one, other in zip(quick.examples, exact.examples, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            assert one.is_target.tolist() == other.is_target.tolist()
        by_likeness += exact.counts["answers"]
    assert by_likeness > 50


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral", "glm45", "smollm3"])
def test_the_number_of_renderings_does_not_grow_with_the_turns(make, monkeypatch, name: str) -> None:
    tokenizer, calls = make(name), []
    plain = loss_mask.render_conversation
    monkeypatch.setattr(
        loss_mask, "render_conversation", lambda *args, **kwargs: (calls.append(1), plain(*args, **kwargs))[1]
    )
    counted = []
    for turns in (20, 100):
        calls.clear()
        messages = [message for i in range(turns) for message in (U, {"role": "assistant", "content": f"So {i}."})]
        found = chat.tokenize(
            Row("x:1", messages=messages), tokenizer, max_length=10**6, learning=chat.Learning(split_turns=False)
        )
        assert found.counts["answers_learned"] == (1 if name == "qwen3" else turns)
        counted.append(len(calls))
    assert counted[1] <= counted[0] <= 12


def test_golden_templates_are_all_used() -> None:
    assert {path.stem for path in GOLDEN.glob("*.jinja")} >= SPECIALS.keys()


@pytest.mark.parametrize("name", [*SPECIALS, "qwen3_5_small"])
def test_small_conversations_show_that_a_run_asks_as_a_server_does(make, name: str) -> None:
    tokenizer = make(name)
    tokenize = partial(chat.tokenize, tokenizer=tokenizer, max_length=500)
    found = chat.check_prompted_targets(tokenize, tokenizer, chat.ANSWERS)
    assert found is not None
    assert found.unasked == ()
    assert found.answers >= len(found.conversations) >= 2
    assert chat.check_prompted_targets(tokenize, tokenizer, chat.EVERYTHING) is None
    assert chat.check_prompted_targets(tokenize, tokenizer, None) is None


def test_a_block_that_a_prompt_supplies_is_found_among_the_targets(make, monkeypatch) -> None:
    monkeypatch.setattr(loss_mask.AnswerLocator, "_after_header", lambda self, text, start: start)
    monkeypatch.setattr(loss_mask.AnswerLocator, "_start", lambda self, k, text: (text, text.rindex("assistant\n")))
    tokenizer = make("qwen3")
    tokenize = partial(chat.tokenize, tokenizer=tokenizer, max_length=500)
    found = chat.check_prompted_targets(tokenize, tokenizer, chat.ANSWERS)
    assert found is not None
    assert len(found.unasked) == found.answers
    assert prompt_check(found).ok is False
    assert "assistant" in prompt_check(found).found


# ---- turns with and without reasoning --------------------------------------------------------------------------------


def asked_by_a_server(tokenizer, messages: list[dict[str, Any]]) -> list[list[int]]:
    """The prompts of all answers in all modes, by transformers alone."""
    template = template_of(tokenizer)
    given = with_reasoning(messages, template, "auto")
    modes = [{}, *({template.thinking_argument: on} for on in (True, False) if template.thinking_argument)]
    return [
        tokenizer.apply_chat_template(given[:k], add_generation_prompt=True, return_dict=False, **mode)
        for k, message in enumerate(given)
        if message["role"] == "assistant"
        for mode in modes
    ]


@pytest.mark.parametrize(
    "name", [*map(slow_if_long, sorted(SPECIALS.keys() - {"mistral"}))]
)  # which renders no reasoning
def test_in_any_mix_of_turns_every_target_follows_a_prompt_of_a_server(make, name: str) -> None:
    tokenizer, rng, checked = make(name), np.random.default_rng(1), 0
    for number in range(40):
        messages: list[dict[str, Any]] = []
        for turn in range(4):
            reasoned = rng.random() < 0.5 or name == "r1_distill"
            thought = {"reasoning_content": f"Because {turn}."} if reasoned else {}
            messages += [{"role": "user", "content": f"What {turn}?"}]
            messages += [{"role": "assistant", "content": f"So {turn}.", **thought}]
        found = chat.tokenize(Row(f"x:{number}", messages=messages), tokenizer, max_length=5000)
        prompts_of_all = asked_by_a_server(tokenizer, messages)
        for example in found.examples:
            for begin in np.flatnonzero(np.diff(example.is_target.astype(int), prepend=0) == 1):
                assert example.ids[:begin].tolist() in prompts_of_all, shown(example, tokenizer)
                checked += 1
        assert found.counts["answers_learned"] == 4
    assert checked > 40


def test_reasoning_in_a_field_is_written_into_the_content_of_a_template_that_renders_it_there(make) -> None:
    assert documents(make("smollm3"), [U, REASONED]) == [
        SMOL.format("/think") + QWEN + "[[<think>\nI think.\n</think>\n\nSo.<|im_end|>]]"
    ]


def test_likeness_looks_at_the_whole_turn(make, monkeypatch) -> None:
    """Without empty blocks an earlier call whose reasoning is stripped decides about the answer after it."""
    tokenizer = make("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace("(loop.last or reasoning_content)", "reasoning_content")
    plain = [U, CALL, RESULT, PLAIN]
    messages = [
        *plain,
        *plain,
        U,
        {**CALL, "reasoning_content": "Why."},
        RESULT,
        {**PLAIN, "content": "Key."},
        V,
        SECOND,
    ]
    found = []
    for exactly in (2, 10**9):
        monkeypatch.setattr(loss_mask, "RENDERED_FIRST", exactly)
        found.append(
            chat.tokenize(
                Row("x:1", messages=messages), tokenizer, max_length=5000, learning=chat.Learning(split_turns=False)
            )
        )
    assert found[0].counts == found[1].counts
    assert found[0].examples[0].is_target.tolist() == found[1].examples[0].is_target.tolist()
    assert found[0].counts["not_learned_history"] == 2


@pytest.mark.parametrize("content", ["Close it with the </think> tag.", "Hello <think>a</think> World"])
def test_text_that_the_template_would_cut_at_a_thinking_tag_is_refused(make, content: str) -> None:
    with pytest.raises(DataError, match=r"messages\[1\].*does not render"):
        documents(make("qwen3"), [U, {"role": "assistant", "content": content}])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"reasoning_content": "A", "reasoning": "C"}, "two different reasonings"),
        ({"reasoning_content": "A", "content": "<think>B</think>So."}, "two different reasonings"),
        ({"reasoning": {"text": "A"}}, "reasoning is an object, expected text"),
    ],
)
def test_reasoning_that_is_not_one_text_is_refused(make, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=rf"x:1: messages\[1\]: {reason}"):
        documents(make("qwen3"), [U, {**PLAIN, **fields}])


def test_an_answer_that_is_only_reasoning_is_empty(make_tokenizer) -> None:
    with pytest.raises(DataError, match="empty answer"):
        documents(make_tokenizer("chatml"), [U, {**PLAIN, "content": "<think>Why.</think>"}])


def test_reasoning_that_the_recipe_leaves_out_is_counted(make) -> None:
    found = chat.tokenize(
        Row("x:1", messages=[U, REASONED]), make("qwen3"), max_length=500, learning=chat.Learning(thinking="off")
    )
    assert found.counts["reasoning_left_out"] == 1


def test_an_inline_thought_of_a_distilled_model_ends_as_one_in_a_field(make) -> None:
    tokenizer = make("r1_distill")
    inline = {**PLAIN, "content": "<think>\nI think.\n</think>\n\nSo."}
    assert documents(tokenizer, [U, inline]) == documents(tokenizer, [U, REASONED])


def test_documents_that_are_too_long_take_their_answers_out_of_what_is_learned(make) -> None:
    row = Row("x:1", messages=[U, PLAIN, V, {**SECOND, "content": "Thus. " * 100}])
    found = chat.tokenize(row, make("qwen3"), max_length=60, too_long="drop")
    assert (len(found.examples), found.note) == (1, "truncated")
    assert (found.counts["answers_learned"], found.counts["not_learned_too_long"]) == (1, 1)


def test_what_a_template_cannot_do_with_a_record_is_a_refusal(make_tokenizer) -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + (m.name or '') + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )
    with pytest.raises(
        DataError, match=r"x:1: the chat template rejects this conversation: TypeError.*model\.chat_template"
    ):
        documents(tokenizer, [{**U, "name": 5}, PLAIN])


@pytest.mark.parametrize("value", ["a -#} b", "😀", "#", None, 3])
def test_any_value_of_an_argument_reaches_the_template(make_tokenizer, value: Any) -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = with_arguments("\n{{ word }}", {"word": value})
    assert tokenizer.apply_chat_template([U], tokenize=False) == f"\n{value}"
    assert with_arguments(tokenizer.chat_template, {}) == "\n{{ word }}"


HEADER = "<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"
TURN = "<|im_start|>user\nHow?<|im_end|>\n" + HEADER
NEXT = "\n<|im_start|>user\nWhy?<|im_end|>\n" + HEADER
BEGINS = "{{ '<|im_start|>assistant\\n' }}"
SAYS = BEGINS + "{{ m.content + '<|im_end|>\\n' }}"


def small(
    answer: str, prompt: str, *, otherwise: str = "", first: str = "", eos: str = "<|im_end|>"
) -> tuple[str, str]:
    """(template, eos): the source of an answer with its header, of the prompt for one, and of the end without it."""
    user = "{% if m.role != 'assistant' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}{% else %}"
    end = "{% if add_generation_prompt %}" + prompt + "{% else %}" + otherwise + "{% endif %}"
    return first + "{% for m in messages %}" + user + answer + "{% endif %}{% endfor %}" + end, eos


TWO_TURNS = [U, PLAIN, V, SECOND]
# template -> messages and documents
SMALL_TEMPLATES = {
    "the next header is always there": (  # Command A
        small(SAYS, BEGINS, otherwise=BEGINS),
        TWO_TURNS,
        [TURN + "[[So.<|im_end|>]]" + NEXT + "[[Thus.<|im_end|>]]"],
    ),
    "eos ends the conversation alone": (  # Phi-3
        small(SAYS, BEGINS, otherwise="{{ eos_token }}", eos="<|endoftext|>"),
        TWO_TURNS,
        [TURN + "[[So.<|im_end|>]]" + NEXT + "[[Thus.<|im_end|>]]"],
    ),
    "the next header is always there, and its first token begins questions too": (  # the end of turn is not eos
        small(SAYS, BEGINS, otherwise=BEGINS, eos="<|endoftext|>"),
        TWO_TURNS,
        [TURN + "[[So.<|im_end|>]]" + NEXT + "[[Thus.<|im_end|>]]"],
    ),
    "two tokens end a turn": (  # Command R7B
        small(BEGINS + "{{ m.content + '<|eot_id|><|im_end|>\\n' }}", BEGINS),
        TWO_TURNS,
        [TURN + "[[So.<|eot_id|><|im_end|>]]" + NEXT + "[[Thus.<|eot_id|><|im_end|>]]"],
    ),
    "two tokens after what is marked end a turn": (
        small(BEGINS + "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|eot_id|><|im_end|>\\n' }}", BEGINS),
        TWO_TURNS,
        [TURN + "[[So.<|eot_id|><|im_end|>]]" + NEXT + "[[Thus.<|eot_id|><|im_end|>]]"],
    ),
    "two tokens and a line break end what is marked": (
        small(BEGINS + "{% generation %}{{ m.content + '<|eot_id|><|im_end|>\\n' }}{% endgeneration %}", BEGINS),
        TWO_TURNS,
        [TURN + "[[So.<|eot_id|><|im_end|>]]" + NEXT + "[[Thus.<|eot_id|><|im_end|>]]"],
    ),
    "the prompt opens a block in another way": (  # a copy of Qwen3's
        small(
            BEGINS
            + "{% if loop.last and m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
            + "{% endif %}{{ m.content + '<|im_end|>\\n' }}",
            BEGINS + "{{ '<think>\\n\\n' }}",
        ),
        [U, REASONED, V, {**SECOND, "reasoning_content": "I ponder."}],
        [
            TURN + "<think>\n\n[[I think.\n</think>\n\nSo.<|im_end|>]]",
            TURN + "So.<|im_end|>" + NEXT + "<think>\n\n[[I ponder.\n</think>\n\nThus.<|im_end|>]]",
        ],
    ),
    "the prompt has an empty block that no answer has": (  # Gemma 4
        small(
            SAYS,
            BEGINS + "{% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
            first="{% if enable_thinking %}Think.{% endif %}",
        ),
        TWO_TURNS,
        [TURN + EMPTY + "[[So.<|im_end|>]]", TURN + "So.<|im_end|>" + NEXT + EMPTY + "[[Thus.<|im_end|>]]"],
    ),
    "a mark has the header of a prompt that opens a block": (  # DeepSeek, as TRL marks it
        small("{% generation %}" + SAYS + "{% endgeneration %}", BEGINS + "{{ '<think>\\n' }}"),
        TWO_TURNS,
        [TURN + "[[So.<|im_end|>]]" + NEXT + "[[Thus.<|im_end|>]]"],
    ),
    "a mark in a text that is there in the prompt alone": (  # gpt-oss, as TRL marks it
        small(
            BEGINS
            + "{% generation %}{% if m.tool_calls %}{{ m.content if messages[-1].role != 'assistant' or loop.last }}"
            + " {{ m.tool_calls[0].function | tojson }}"
            + "{% else %}{{ m.reasoning_content if loop.last }}{{ m.content }}{% endif %}<|im_end|>{% endgeneration %}"
            + "{{ '\\n' }}",
            BEGINS,
        ),
        [U, {**CALL, "content": "I see a long way."}, RESULT, PLAIN],
        [
            TURN
            + '[[I see a long way. {"name": "look", "arguments": {"at": "it"}}<|im_end|>]]\n<|im_start|>user\nseen<|im_end|>\n'
            f"{HEADER}[[So.<|im_end|>]]"
        ],
    ),
}


@pytest.mark.parametrize("name", SMALL_TEMPLATES)
def test_golden_targets_of_small_templates(make_tokenizer, name: str) -> None:
    (source, eos), messages, expected = SMALL_TEMPLATES[name]
    tokenizer = make_tokenizer(eos=eos)
    tokenizer.chat_template = source
    assert documents(tokenizer, messages) == expected
    # In a batch, too, whose later rows are not rendered.
    rows = [Row(f"x:{i}", messages=[{**m, "content": f"{m['content']} {i}."} for m in messages]) for i in range(30)]
    together = RowTokenizer(chat.tokenize, tokenizer, max_length=1000)
    assert all(map(same, together.many(rows), map(together, rows)))
    assert not together.differs


def test_an_empty_block_of_prompts_is_context_where_the_recipe_turns_thinking_off(make_tokenizer) -> None:
    (source, _), messages, expected = SMALL_TEMPLATES["the prompt has an empty block that no answer has"]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = with_arguments(source, {"enable_thinking": False})
    assert documents(tokenizer, messages) == expected


def test_reasoning_is_not_learned_after_an_empty_block(make_tokenizer) -> None:
    """A prompt that turns thinking off has closed the block: no server lets the model reason after it."""
    tokenizer = make_tokenizer()
    thinks = "{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    prompt = BEGINS + "{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}"
    tokenizer.chat_template, _ = small(
        BEGINS + thinks + SAYS.removeprefix(BEGINS), prompt, first="{% if enable_thinking %}Think.{% endif %}"
    )
    assert documents(tokenizer, [U, REASONED]) == ["Think." + TURN + "[[<think>\nI think.\n</think>\n\nSo.<|im_end|>]]"]
    with pytest.raises(DataError, match="prompt"):
        documents(tokenizer, [U, REASONED], thinking="learn_empty")


def test_a_template_for_lists_of_parts_is_rejected(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(
        ConfigError, match="contents are texts and no lists of parts: its text is without 'first question'"
    ):
        template_of(tokenizer)


def test_an_answer_of_which_the_template_marks_nothing_is_refused(make_tokenizer) -> None:
    tokenizer = make_tokenizer("chatml")
    marked = "{{ m.content }}{% generation %}{% endgeneration %}"
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}" + marked + "{{- '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )
    with pytest.raises(DataError, match=r"messages\[1\]: the chat template marks no part"):
        documents(tokenizer, [U, PLAIN])


def test_settings_of_a_recipe_reach_the_tokenizing_of_its_stage(make) -> None:
    data = DataConfig(train=(), targets="last_turn", thinking="off", split_turns=False)
    for stage, default in (("mid", "all"), ("sft", "assistant")):
        found = stage_rule(stage)(data, make("qwen3"), 100)
        assert found.learning == chat.Learning("last_turn", "off", split_turns=False)
        usual = stage_rule(stage)(DataConfig(train=()), make("qwen3"), 100)
        assert usual.learning == chat.Learning(targets=default)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data\.targets=last_turn: base_train\.py learns every token"):
        stage_rule("base")(data, make("qwen3"), 100)


def test_template_arguments_of_a_recipe_are_in_the_tokenizer_that_it_loads(make, tmp_path) -> None:
    make("qwen3").save_pretrained(tmp_path)
    tiny_llama().save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), chat_template_args={"enable_thinking": False})
    prompt = load_tokenizer(model).apply_chat_template([U], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<think>\n\n</think>\n\n")
