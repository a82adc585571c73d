"""What a template leaves out of a conversation, which the answers depend on, is never learned without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.tokens import chat, sources, template
from sftkit.data.types import Row
from sftkit.errors import ConfigError, DataError

TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": {"type": "object"}}}
SECOND_TOOL = {"type": "function", "function": {"name": "day", "parameters": {"type": "object"}}}
ASK, HELLO = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello, how can I help?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"at": "x"}}}]}
RESULT, SYSTEM = {"role": "tool", "content": "sunny"}, {"role": "system", "content": "Be brief."}
SPECIALS = {
    "gemma3": ["<start_of_turn>", "<end_of_turn>"],
    "olmo2": ["<|user|>", "<|assistant|>", "<|system|>"],
    "glm45": ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"],
    "gpt_oss": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"],
}
NAMES = sorted(["chatml", *(path.stem for path in GOLDEN.glob("*.jinja"))])
TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
ALL = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT


def only(condition: str) -> str:
    """A template that renders the messages for which a condition holds."""
    return ALL.replace(TURN, f"{{% if {condition} %}}{TURN}{{% endif %}}")


@pytest.fixture
def make(make_tokenizer):
    def made(name: str, source: str | None = None):
        tokenizer = make_tokenizer(name, bos="<s>", eos="<|im_end|>")
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS.get(name, [])})
        tokenizer.chat_template = source or tokenizer.chat_template
        return tokenizer

    return made


def text_of(tokenizer, messages: list[dict[str, Any]], tools=None, **settings: Any) -> str:
    row = Row("x.jsonl:1", messages=messages, tools=tools)
    found = chat.tokenize(row, tokenizer, max_length=1000, learning=chat.Learning(**settings))
    return " || ".join(tokenizer.decode(example.ids.tolist()) for example in found.examples)


@pytest.mark.parametrize("targets", ["assistant", "all"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("messages", [[ASK, HELLO], [ASK, CALL, RESULT, HELLO]], ids=["hello", "call"])
def test_tools_are_in_what_is_learned_or_the_row_is_rejected(
    make, name: str, messages: list[Any], targets: str
) -> None:
    tokenizer, settings = make(name), {"targets": targets, "thinking": "learn_empty"}
    if name in ("chatml", "llama3", "qwen3", "qwen3_5"):
        text = text_of(tokenizer, messages, [TOOL], **settings)
        assert "description" in text.split("Hello?")[0], "the schema stands in the prompt"
        return
    with pytest.raises(DataError) as caught:
        text_of(tokenizer, messages, [TOOL], **settings)
    assert caught.value.reason.startswith("template ")


@pytest.mark.parametrize("name", ["gemma3", "olmo2", "mistral", "smollm3", "gpt_oss", "plain"])
def test_tools_that_no_template_renders_are_named_with_the_cure(make, name: str) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl:1: tools: .*leaves out these tools.*model\.chat_template") as caught:
        text_of(make(name), [ASK, HELLO], [TOOL])
    assert caught.value.reason == "template does not render the tools"


@pytest.mark.parametrize(
    ("source", "messages", "tools", "reason"),
    [
        # tools: the words of one stand elsewhere, one of two is rendered, only some conversations show them
        (ALL, [{**ASK, "content": "What is weather?"}, HELLO], [TOOL], "the tools"),
        ("{{ tools[0].function.name if tools else '' }}" + ALL, [ASK, HELLO], [TOOL, SECOND_TOOL], "the tools"),
        ("{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}" + ALL, [ASK, HELLO], [TOOL], "the tools"),
        ("{% if tools %}Use your tools. {% endif %}" + ALL, [ASK, HELLO], [TOOL], "the tools"),
        ("{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + ALL, [ASK, HELLO], [TOOL], "the tools"),
        # system texts
        (only("m.role != 'system'"), [SYSTEM, ASK, HELLO], None, "system message"),
        (only("m.role != 'system'"), [{**SYSTEM, "content": "e"}, ASK, HELLO], None,
         "system message"),
        (only("m.role != 'system' or loop.first"), [SYSTEM, ASK, SYSTEM, HELLO],
         None, "system message"),
        # results, long ones and those whose words stand elsewhere
        (only("m.role != 'tool'"), [ASK, HELLO, RESULT, HELLO], None, "tool result"),
        (only("m.role != 'tool'"), [ASK, HELLO, {**RESULT, "content": "H"}, HELLO],
         None, "tool result"),
        # questions
        (only("loop.index0 != 4"), [ASK, HELLO] * 3, None, "a message"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_rejected(
    make, source: str, messages: list[Any], tools: Any, reason: str
) -> None:
    tokenizer = make("chatml", source)
    text_of(tokenizer, [ASK, HELLO]), "a conversation without it is learned"
    with pytest.raises(DataError) as caught:
        text_of(tokenizer, messages, tools, targets="all")
    assert reason in caught.value.reason


def test_a_call_that_is_context_is_rejected_where_the_template_leaves_it_or_its_arguments_out(make) -> None:
    row = Row("x:1", messages=[ASK, CALL, RESULT, HELLO], context_messages=3)
    names = ALL.replace(
        "m.content", "m.content + (m.tool_calls | map(attribute='function.name') | join if m.tool_calls else '')"
    )
    for source in (ALL, names):
        with pytest.raises(DataError) as caught:
            chat.tokenize(row, make("chatml", source), max_length=1000)
        assert caught.value.reason == "template does not render a tool call"
    assert chat.tokenize(row, make("chatml"), max_length=1000).examples


def test_the_text_of_an_earlier_answer_that_the_template_leaves_out_is_counted(make) -> None:
    source = only("m.role != 'assistant' or loop.last or messages | length < 5")
    row = Row("x:1", messages=[*[ASK, HELLO] * 2, ASK, {**HELLO, "content": "Bye."}])
    found = chat.tokenize(row, make("chatml", source), max_length=1000)
    assert len(found.examples) == 2  # the first two answers are one document
    assert list(found.odd) == [template.DROPPED_ANSWER]
    assert "messages[1]" in found.odd[template.DROPPED_ANSWER]


@pytest.mark.parametrize(
    "source",
    [
        ALL.replace("m.content", "(m.content | trim)"),
        ALL.replace("m.content", "(m.content | tojson if m.role == 'tool' else m.content)"),
        ALL.replace("m.content", "(m.content | replace('/no_think', ''))"),
        "{{ messages[0].content + '\\n' if messages[0].role == 'system' else '' }}" + only("m.role != 'system'"),
    ],
)
def test_a_template_that_writes_it_in_another_way_is_no_loss(make, source: str) -> None:
    system = {**SYSTEM, "content": " Be brief. /no_think\nÄ"}
    messages = [system, ASK, {**HELLO, "content": "x"}, {**RESULT, "content": '"sunny"\n\ttoday'}, HELLO]
    tokenizer = make("chatml", source)
    for _ in range(2):
        assert text_of(tokenizer, messages, targets="all")


@pytest.mark.parametrize("first", [[ASK, HELLO], [ASK, {**HELLO, "content": "weather"}, ASK, HELLO]])
def test_a_call_whose_name_stands_elsewhere_is_looked_for_though_such_turns_are_known(make, first: list[Any]) -> None:
    tokenizer = make("chatml", ALL)
    text_of(tokenizer, first)
    said = {**CALL, "content": "The weather:"}
    row = Row("x:1", messages=[ASK, said, ASK, HELLO], context_messages=3)
    with pytest.raises(DataError) as caught:
        chat.tokenize(row, tokenizer, max_length=1000)
    assert caught.value.reason == "template does not render a tool call"


def test_a_message_whose_words_are_said_twice_is_missed_though_such_turns_are_known(make) -> None:
    tokenizer = make("chatml", only("loop.index0 != 4"))
    text_of(tokenizer, [ASK, HELLO] * 2)
    with pytest.raises(DataError) as caught:
        text_of(tokenizer, [ASK, HELLO] * 3)
    assert caught.value.reason == "template leaves out a message"


def test_conversations_of_a_known_shape_are_not_rendered_once_more(make, monkeypatch) -> None:
    tokenizer, rendered = make("chatml"), []
    plain = template._marked
    monkeypatch.setattr(template, "_marked", lambda *args: rendered.append(1) or plain(*args))
    for turns in (5, 6, 7, 50):
        text_of(tokenizer, [SYSTEM, *[ASK, CALL, RESULT, HELLO] * turns], [TOOL])
    assert len(rendered) == 1


def test_what_is_left_out_for_its_words_is_rejected_though_the_shape_is_known(make) -> None:
    tokenizer = make("chatml", only("'secret' not in m.content"))
    for n in range(3):
        assert text_of(tokenizer, [SYSTEM, ASK, {**HELLO, "content": f"Bye {n}."}])
    with pytest.raises(DataError, match="leaves out this system message"):
        text_of(tokenizer, [{**SYSTEM, "content": "Be secret."}, ASK, HELLO])


def test_a_system_text_of_a_question_is_not_left_out_in_silence(make) -> None:
    source = only("m.role != 'system'")
    with pytest.raises(DataError, match=r"prompt: messages\[0\]: the chat template leaves out this system message"):
        chat.render_prompt(Row("prompt", messages=[SYSTEM, ASK]), make("chatml", source))


def test_a_source_with_such_rows_ends_the_run_or_counts_them(make, tmp_path: Path) -> None:
    rows = [{"messages": [ASK, HELLO]}, {"messages": [ASK, HELLO], "tools": [TOOL]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = make("mistral")

    def load(on_bad_row: str):
        source = SourceConfig(path=str(tmp_path / "a.jsonl"))
        data = DataConfig(train=(source,), on_bad_row=on_bad_row, cache_dir=str(tmp_path / "c"))  # type: ignore[arg-type]
        return sources.load_sources(data.train, data, sources.stage_rule("sft")(data, tokenizer, 100))

    with pytest.raises((DataError, ConfigError), match=r"a\.jsonl:2: tools: the chat template leaves out"):
        load("error")
    found = load("skip")
    assert (found.counts["a"]["skipped_bad"], len(found)) == (1, 1)
    assert [one.reason for one in found.findings["a"] if one.kind != "read"] == ["template does not render the tools"]
