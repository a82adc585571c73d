"""A chat template that loops, writes or grows for ever ends with an error, wherever it is rendered; others render as before."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError
from transformers.utils import chat_template_utils

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.tokens import sources, template
from sftkit.errors import ConfigError
from sftkit.generation.decode import stream

render = partial(template.render, where="x.jsonl:7")
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
LATER = "{% if messages | length > 4 %}" + LOOPS.replace("BODY", "") + "{% endif %}"
"Ends for every small conversation."
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(template, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(template, "MAX_RENDERED", 2**22)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("source", "marks"),
    [
        (LOOPS.replace("BODY", ""), False),
        (LOOPS.replace("BODY", "x"), True),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", False),
        ("{% set x %}" + LOOPS.replace("BODY", "{{ i }}") + "{% endset %}", True),
        ("{{ lipsum(n=10000000) }}", False),
        (CALLS, True),
    ],
)
def test_a_template_without_an_end_is_an_error_of_the_recipe(source: str, marks: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"x\.jsonl:7: the chat template does not end: .*Take another template: model\.chat_template"
    ):
        render(source, {"messages": HI}, marks=marks)
    assert render("{{ messages[0].content }}", {"messages": HI}, marks=marks)[0] == "Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{{ messages[0].content | length ** 9999999999 }}",
        "{{ 'x' * 10 ** 11 }}",
        "{{ (messages * 10 ** 9) | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ 10.0 ** 400 }}",
        "{{ 'x'.center(10 ** 18) }}",
    ],
)
def test_an_operation_that_cannot_end_or_fails_rejects_the_conversation_at_once(source: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateError):
        render(source, {"messages": HI})
    assert time.monotonic() - began < 2


MACRO = "{% macro f(a, b='!') %}[{{ a }}{{ b }}]{% endmacro %}"


@pytest.mark.parametrize(
    "source",
    [
        MACRO + "{{ f(1) }}{{ f(1, 2) }}{{ f(1, b=3) }}{{ f(b=4) }}{{ f() }}",
        "{% macro f() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f() }}{{ f(1, x=2) }}",
        "{% macro f() %}{{ varargs }}{% endmacro %}{{ f() }}{{ f(1) }}",
        "{% macro f() %}{{ kwargs }}{% endmacro %}{{ f() }}{{ f(x=2) }}",
        "{% macro f(a) %}{{ a }}{{ caller(a) if caller }}{% endmacro %}{% call(b) f(1) %}{{ b }}!{% endcall %}{{ f(2) }}",
        "{% macro f(a) %}<{{ a }}>{% endmacro %}{% autoescape true %}{{ f('<b>') ~ '<i>' }}{% endautoescape %}{{ f('<b>') }}",
        MACRO
        + "{% for m in messages %}{{ f(loop.index) }}{% generation %}{{ f(m.content) }}é{% endgeneration %}\n{% endfor %}",
        "{% set x %}a{% generation %}bc{% endgeneration %}{% endset %}d{% generation %}{% endgeneration %}{{ x ~ 1 }}",
        "{% set range = [7] %}{{ range }}{{ dict(a=1) }}",
    ],
)
def test_macros_and_marks_come_out_as_transformers_renders_them(source: str) -> None:
    compiled = chat_template_utils._compile_jinja_template(source)
    given: dict[str, Any] = {"messages": HI, "tools": None, "documents": None, "add_generation_prompt": False}
    text, spans = chat_template_utils._render_with_assistant_indices(compiled, **given)
    for _ in range(2):  # nothing of a rendering stays for the next one
        assert render(source, given, marks=True) == (text, spans)
    assert render(source, given) == (text, [])


def test_a_rendering_knows_no_variable_of_an_earlier_one() -> None:
    found = [render("{{ x }}{{ range }}", given)[0] for given in ({"x": 1, "range": 2}, {"range": 3}, {"x": 4})]
    assert found[:2] == ["12", "3"]
    assert found[2].startswith("4<function safe_range")


def test_a_macro_that_is_called_with_too_much_rejects_the_conversation() -> None:
    for call in ("f(1, 2, 3)", "f(1, c=2)", "f(1, 2, c=3)"):
        with pytest.raises(TemplateError, match="macro 'f' takes n"):
            render(MACRO + f"{{{{ {call} }}}}", {})


def test_a_template_calls_no_private_attribute_and_no_function_that_is_unsafe() -> None:
    def unsafe() -> str:
        return "called"

    unsafe.unsafe_callable = True  # type: ignore[attr-defined]
    for call in (
        "f._func(1)",
        "f.__init__()",
        "messages.append(1)",
        "messages.__len__()",
        "unsafe()",
        "''.__class__()",
    ):
        with pytest.raises(SecurityError):
            render(MACRO + f"{{{{ {call} }}}}", {"messages": HI, "unsafe": unsafe})


def test_small_products_and_powers_are_computed() -> None:
    assert render("{{ 3 * 4 }} {{ 2 ** 10 }} {{ 'ab' * 3 }} {{ 2.5 * 2 }} {{ -2 ** 3 }}", {})[0] == (
        "12 1024 ababab 5.0 -8"
    )


def test_a_template_whose_text_in_memory_grows_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(template, "MAX_MEMORY", 2**28)
    grows = "{% set ns = namespace(x='x' * 9999) %}{% for i in range(9999) %}{% set ns.x = ns.x ~ 'y' * 2 ** 24 %}{% endfor %}"
    with pytest.raises(ConfigError, match="GiB of memory"):
        render(grows, {})
    gc.collect()


@pytest.mark.usefixtures("short")
def test_a_limit_holds_in_a_forked_process() -> None:
    render("{{ messages }}", {"messages": HI})
    child = os.fork()
    if not child:
        try:
            render(LOOPS.replace("BODY", ""), {})
        except ConfigError:
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_rendering_that_ends_when_it_is_ended_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit is exceeded at the same moment at which the rendering is over, many times."""
    monkeypatch.setattr(template, "MAX_SECONDS", 0.004)
    monkeypatch.setattr(template, "_POLL_SECONDS", 1e-5)
    ended = 0
    for n in range(400):
        try:
            render("{% for i in range(n) %}{{ i }}{% endfor %}", {"n": 400 * (n % 200)})
        except ConfigError:
            ended += 1
        sum(range(1000))  # an exception that came late would be raised here
    assert ended
    assert template._run is None
    os.kill(os.getpid(), signal.SIGVTALRM)  # one that is late
    assert sum(range(1000)) == 499500


@pytest.mark.usefixtures("short")
def test_tokenizing_ends_though_only_some_conversations_make_the_template_loop(make_tokenizer, tmp_path: Path) -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = LATER + tokenizer.chat_template
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": HI}) + "\n" + json.dumps({"messages": HI * 3}) + "\n")
    data = DataConfig(train=(SourceConfig(path=str(tmp_path / "a.jsonl")),), on_bad_row="skip", cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: the chat template does not end"):
        sources.load_sources(data.train, data, sources.stage_rule("sft")(data, tokenizer, 100))


@pytest.mark.usefixtures("short")
def test_chat_ends_though_only_some_conversations_make_the_template_loop(make_tokenizer) -> None:
    from helpers import tiny_llama

    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = LATER + tokenizer.chat_template
    from sftkit.generation.repl import Sampling

    with pytest.raises(ConfigError, match="prompt: the chat template does not end"):
        list(stream(tiny_llama(), tokenizer, HI * 3, Sampling()))


@pytest.mark.slow
def test_a_limit_ends_a_run_whose_template_a_process_renders(make_tokenizer, tmp_path: Path) -> None:
    tokenizer = make_tokenizer("chatml")
    writes = "{% for i in range(99999) %}{{ 'x' * 2 ** 20 }}{% endfor %}"
    tokenizer.chat_template = "{% if messages | length > 4 %}" + writes + "{% endif %}" + tokenizer.chat_template
    rows = [json.dumps({"messages": HI * (1 + n // 100)}) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    data = DataConfig(train=(SourceConfig(path=str(tmp_path / "a.jsonl")),), num_proc=2, cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"a\.jsonl:201: the chat template does not end: it writes more than"):
        sources.load_sources(data.train, data, sources.stage_rule("sft")(data, tokenizer, 100))


def test_a_rendering_leaves_no_garbage_to_collect() -> None:
    source = (
        "{% macro f(a) %}{{ a }}{{ range(2) }}{% endmacro %}{% for m in messages %}{% generation %}{{ f(m.content) }}"
    )
    source += "{% endgeneration %}{% endfor %}"
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            render(source, {"messages": HI}, marks=True)
        assert not gc.collect()
    finally:
        gc.enable()


@pytest.mark.parametrize("expression", ["m.mood.day", "m.mood + 1", "m.mood | tojson", "m.mood()", "m.mood[0]"])
def test_a_key_that_messages_do_not_have_is_undefined_as_it_is_for_transformers(expression: str) -> None:
    source = f"{{% for m in messages %}}{{{{ m.mood or loop.index }}}}{{% endfor %}}{{% set m = messages[1] %}}{{{{ {expression} }}}}"
    with pytest.raises(Exception, match=r"mood|Undefined") as theirs:
        chat_template_utils._compile_jinja_template(source).render(messages=HI)
    for _ in range(2):
        with pytest.raises(TemplateError) as ours:
            render(source, {"messages": HI})
        assert str(ours.value).endswith(str(theirs.value))


def test_values_are_written_as_json_as_transformers_writes_them() -> None:
    source = "{% for x in values %}{{ x | tojson }} {{ x | tojson(indent=2) }}\n{% endfor %}"
    values = ['é"\\\n', 1, True, None, 2.5, float("inf"), {"b": [1, {"a": "</x>"}], "a": {}}, [], [[]], {1: "x"}]
    theirs = chat_template_utils._compile_jinja_template(source).render(values=values)
    assert render(source, {"values": values})[0] == theirs
