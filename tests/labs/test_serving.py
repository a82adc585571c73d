"""labs/serving.py finds a server that renders another prompt or gives another answer, and accepts one that does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from helpers import tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from labs import serving
from sftkit.models.tokenizer import train_tokenizer

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer."""
    tokenizer = train_tokenizer(["a few words about words"], 300, TEMPLATE)
    folder = tmp_path_factory.mktemp("served")
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def serve(model: Path) -> Iterator[Callable[..., str]]:
    """Start a server that answers with transformers alone; it may change each prompt or answer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    causal: Any = AutoModelForCausalLM.from_pretrained(model)
    started: list[ThreadingHTTPServer] = []

    def start(owner: str = "vllm", prompt: str = "", answer: str = "") -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply({"data": [{"id": "tiny", "owned_by": owner}]})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != "/v1/chat/completions":
                    self.send_error(404)
                    return
                for message in asked["messages"]:
                    for call in message.get("tool_calls") or ():
                        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
                text = tokenizer.apply_chat_template(
                    asked["messages"],
                    tools=asked.get("tools"),
                    add_generation_prompt=True,
                    tokenize=False,
                    **asked.get("chat_template_kwargs", {}),
                )
                ids = tokenizer(text + prompt, return_tensors="pt")["input_ids"]
                made = causal.generate(ids, max_new_tokens=asked["max_tokens"], do_sample=False, pad_token_id=0)
                said = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
                found: dict[str, Any] = {"usage": {"prompt_tokens": ids.shape[1]}}
                if asked.get("return_token_ids"):
                    found["prompt_token_ids"] = ids[0].tolist()
                self.reply({"choices": [{"message": {"role": "assistant", "content": said + answer}}], **found})

            def reply(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        started.append(server)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_TOKENS", 3)


@pytest.mark.parametrize("owner", ["vllm", "someone"])
def test_a_server_with_the_same_template_and_model_is_equal(owner: str, model: Path, serve: Any) -> None:
    found = serving.compare(str(model), serve(owner), None)
    assert serving.summary(found) == [
        "chat: 20 prompts, 20 with the same tokens, 20 answers equal",
        "tools: 6 prompts, 6 with the same tokens, 6 answers equal",
        "thinking: 6 prompts, 6 with the same tokens, 6 answers equal",
    ]
    assert found["model"] == "tiny"
    assert any(isinstance(row["prompts"][1], str) for row in found["rows"]) == (owner == "vllm")


def test_another_prompt_and_another_answer_are_found_and_shown(model: Path, serve: Any) -> None:
    lines = serving.summary(serving.compare(str(model), serve(prompt=" more"), None))
    assert lines[0].startswith("chat: 20 prompts, 0 with the same tokens")
    assert any("assistant: ' and " in line for line in lines)
    lines = serving.summary(serving.compare(str(model), serve(answer="!"), None))
    assert lines[0] == "chat: 20 prompts, 20 with the same tokens, 0 answers equal"


def test_reasoning_and_calls_are_equal_apart_or_in_the_text() -> None:
    text = (
        '<think>\nA city.\n</think>\n\nSo:\n<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>'
    )
    call = {"function": {"name": "look", "arguments": '{"city":"Oslo"}'}}
    apart = {"content": "So:", "reasoning_content": "A city.", "tool_calls": [call]}
    assert serving.parts_of(apart) == serving.parts(text) == serving.parts_of({"content": text})
    assert serving.parts_of({**apart, "tool_calls": None}) != serving.parts(text)
    broken = "<tool_call>{not json}</tool_call>"
    assert serving.parts(broken) == ("", broken, [])


def test_the_data_has_calls_and_answers_and_fits_the_template_that_comes_with_sftkit() -> None:
    from sftkit.data.tokens import chat
    from sftkit.data.types import Row

    source = Path(chat.__file__).with_name("chatml.jinja").read_text()
    tokenizer = train_tokenizer(["a few words"], 300, source)
    rows = [*serving.data()]
    assert len(rows) == 2 * 20 * len(serving.CITIES)
    text = tokenizer.decode(
        chat.render_prompt(Row("x", messages=rows[0]["messages"][:3], tools=rows[0]["tools"]), tokenizer)
    )
    assert re.search(r'</think>\n\n<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Accra"\}\}', text)
    # vLLM gives content in parts: an empty part is no text before a call.
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in rows[0]["messages"][:3]]
    for message in parts:
        for made in message.get("tool_calls") or ():
            made["function"] = {**made["function"], "arguments": json.loads(made["function"]["arguments"])}
    served = tokenizer.apply_chat_template(parts, tools=rows[0]["tools"], add_generation_prompt=True, tokenize=False)
    assert served == text
